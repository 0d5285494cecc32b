/* Kernels in C; called by ops/torch/ through ctypes, and by tensorflow.cc. */
#ifndef HVD_GRADCOMP_KERNELS_H
#define HVD_GRADCOMP_KERNELS_H

#include <stdint.h>

/* What functions return that fail: there is no memory; an index lies beyond the bucket; what is given does not fit. */
enum { NO_MEMORY = -1, BEYOND = -2, INVALID = -3 };

/* What a method does with an element, in numbers; see `Rule` in rules.py. */
typedef struct {
  int32_t ambiguity; /* has second moments v, and sends where r*r > alpha*v */
  int32_t large;     /* sends where |r| > tau */
  int32_t powers;    /* codes are powers of two below the layer's largest; else plus or minus tau */
  int32_t subtracts; /* what was sent is taken from r; else r = 0 */
  int32_t corrects;  /* v of what was sent becomes max(v - 2*|r|*tau + tau*tau, 0); else 0 */
  float alpha, tau, zeta, twice_tau, tau_squared;
} rule;

/* Where the layers lie. */
typedef struct {
  const int32_t *layer_of_block;
  int64_t size, layers;
  int32_t block_bits, side; /* side: bytes before words and places in a body */
} place;

/* How a memory takes a gradient in, in numbers; see `Collecting` in rules.py. */
typedef struct {
  float momentum;
  int32_t nesterov, masking;
} collecting;

/* What competes with what; see `Scope` in scope.py. */
typedef struct {
  place where;
  const int64_t *offsets, *sizes, *strides; /* of layers */
  int64_t elements;                         /* of all layers */
  int32_t whole;                            /* whether all layers are one group */
} scope;

/* Elements, by their index and what they hold, as bits. Those of a group lie where it begins. */
typedef struct {
  uint32_t *index, *bits;
  int64_t *count; /* of each group */
} elements;

/* A body: `capacity` values if it is `valued`, and as many indices behind them; see `Form`. */
typedef struct {
  int64_t capacity, valued;
} form;

int64_t threshold_find(const rule *how, const place *where, float *r, float *v, const float *r0,
                   const float *v0, const float *g, const float *q, uint32_t *wanted, uint8_t *flags,
                   int32_t *top, int *finite, int threads);
int64_t threshold_code(const rule *how, const place *where, uint32_t *wanted, int64_t count,
                   const int32_t *top, int threads);
int64_t threshold_write(const rule *how, const place *where, const uint32_t *words, int64_t count,
                    const int32_t *top, int64_t capacity, int64_t step, float *v, uint8_t *body,
                    int64_t *sent);
int64_t threshold_places(const rule *how, const place *where, const float *r, uint8_t *flags,
                     const int32_t *top, uint8_t *body, int64_t *sent, int threads);
void threshold_commit(const rule *how, const place *where, const uint8_t *body, int64_t count, float *r,
                  float *v, int threads);
int threshold_add(const rule *how, const place *where, const uint8_t *bodies, int64_t stride,
              int64_t ranks, int64_t capacity, const float *weights, float *total, int threads);
void threshold_add_places(const rule *how, const place *where, const uint8_t *bodies, int64_t stride,
                      int64_t ranks, const float *weights, float *total, int threads);
int topk_find(const collecting *how, const scope *of, float *r, float *u, const float *r0,
                 const float *u0, const float *g, const int64_t *k, const int64_t *slack,
                 const float *hint, const elements *found, int *finite, int threads);
void topk_again(const scope *of, const float *r, const float *g, const int64_t *k,
                   const int64_t *slack, const elements *found, int threads);
int64_t topk_choose(const scope *of, int64_t step, const int64_t *k, const elements *found,
                       float *hint, int threads);
void topk_write(const scope *of, const form *as, const elements *chosen, int64_t count,
                   uint8_t *body, int64_t *sent, int threads);
void topk_commit(const collecting *how, const place *where, const form *as, const uint8_t *body,
                    float *r, float *u, int threads);
int topk_add(const place *where, const form *as, const uint8_t *bodies, int64_t stride,
                int64_t ranks, const float *weights, float *total, int threads);
int topk_values(const place *where, const form *as, const uint8_t *body, const float *r,
                   const float *g, float *values, int threads);
int topk_replace(const place *where, const form *as, const uint8_t *body, const float *total,
                    float beta, float keeps, float *kept, float *r, const float *r0, float *mean,
                    const float *g, int64_t *sent, int threads);

/* -- elias_fano.c -- */

int encode_ascending(const int64_t *numbers, int64_t rows, int64_t count, int64_t low,
                     int64_t width, int64_t *lows, int64_t *highs);
void decode_ascending(const int64_t *lows, const int64_t *highs, int64_t rows, int64_t count,
                      int64_t low, int64_t width, int64_t universe, int64_t *numbers);

int encode_words(const uint32_t *words, int64_t count, int64_t low, int64_t width, int bits,
                 uint32_t *lows, uint32_t *highs, uint32_t *codes);
int decode_words(const uint32_t *lows, const uint32_t *highs, const uint32_t *codes, int64_t count,
                 int64_t low, int64_t width, int64_t universe, int bits, uint32_t *words);

/* -- chunks.c: rows of a vector -- */

int64_t memory_of_row(int64_t length);
int largest_of_rows(const float *x, const float *y, float factor, float *out, int64_t size,
                    int64_t length, int64_t k, int64_t *index, float *values, uint64_t *memory,
                    int checks, int threads);
int add_in_rows(const float *base, float *out, int64_t size, int64_t length, int64_t k,
                int64_t ranks, const int64_t *const *index, const float *const *values,
                const float *weights, int threads);

/* -- composite ops of ops/interface/ --
 *
 * Every result equals the composite's to the bit: the same operations in the same order, no fused
 * multiply-add (compiled with -ffp-contract=off), sums folded in halves. */

#define GROUP 32       /* codes that are packed together; see ops/interface/bitpack.py */
#define TINY 0x1p-100f /* a scale below it counts as zero; see ops/interface/quantization.py */

/* Codes that are packed for n of them: whole groups. */
static inline int64_t whole_groups(int64_t n) { return (n + GROUP - 1) / GROUP * GROUP; }

/* `rows` groups of `length` neighbours each; see core/row_groups.py. */
typedef struct {
  int64_t start, rows, length;
} band;

/* A number within the words of a frame: which word, from which bit, of how many bits. */
typedef struct {
  int64_t word, low, bits;
} field;

static inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x45d9f3bu;
  x = (x ^ x >> 16) * 0x45d9f3bu;
  return x ^ x >> 16;
}

/* -- elementwise.c -- */

/* u = momentum * u0 + g, r = r0 + u, or a step ahead. r0 may be r, and u0 u. */
void add_momentum(float *r, float *u, const float *r0, const float *u0, const float *g, int64_t n,
                  float momentum, int nesterov);
/* x may be out. */
void add_vectors(const float *x, const float *y, float *out, int64_t n);

/* -- indexing.c -- */

int gather(const float *x, int64_t size, const int64_t *index, int64_t n, float *out);
int fill_at(float *x, int64_t size, const int64_t *index, int64_t n, float value);
int add_at(float *x, int64_t size, const int64_t *index, int64_t n, const float *values);
int sort(int64_t *x, int64_t n);
int merge_rows(const int64_t *index, const float *values, int64_t n, int64_t sink,
               int64_t *scratch, int64_t *places, float *totals);

/* -- transpose.c -- */

void reverse(const float *x, int64_t a, int64_t b, int64_t c, int64_t x_apart, float *out,
             int64_t out_apart, int past, int threads);

/* -- checks.c -- */

int all_finite(const float *x, int64_t n, int threads);
/* The largest magnitude, as bits: beyond that of finite numbers lie infinities and NaNs. */
int32_t largest_bits(const float *x, int64_t n);
float sum_of(const float *x, int64_t n, int squares);
int sum_finite(const float *x, int64_t n, int squares, int threads);
uint32_t weighted_sum(const uint32_t *words, int64_t first, int64_t stop, int threads);
uint32_t frame_sum(const uint32_t *words, int64_t count, const uint32_t *body, int64_t n,
                   int threads);
uint32_t copy_summed(uint8_t *body, int64_t at, const uint8_t *part, int64_t bytes, int threads);
void examine(const uint32_t *frames, int64_t rows, int64_t stride, int64_t length, int64_t count,
             const field *fields, int64_t number, const int64_t *expected, int64_t *words,
             uint8_t *intact, int threads);

/* -- bitpack.c -- */

/* Codes of up to 8 bits as planes: of 32 numbers bit `plane` is one word; n is a multiple of 32. */
void pack_codes(const uint8_t *codes, int64_t n, int bits, uint32_t *words);
void unpack_codes(const uint32_t *words, int64_t n, int bits, uint8_t *codes);
/* The same for integers of any width: [m, 32] to [m, bits] and back. */
void bit_planes(const int64_t *groups, int64_t m, int bits, int64_t *planes);
void from_bit_planes(const int64_t *planes, int64_t m, int bits, int64_t *groups);

/* -- groups.c -- */

void group_maxima(const band *bands, int64_t count, const float *x, float *out, int threads);
int group_squares(const band *bands, int64_t count, const float *x, float *out, int threads);
int group_means(const band *bands, int64_t count, const float *x, float *out, int threads);
void layer_histograms(const band *bands, int64_t layers, const float *x, int64_t bins,
                      int64_t *counts, int threads);

/* -- bins.c -- */

int encode_bins(const float *x, const int64_t *group, int64_t n, const int64_t *entries,
                int64_t count, int bits, uint32_t *words, float *means, int64_t total);
int decode_bins(const uint32_t *words, const float *means, const int64_t *group, int64_t n,
                const int64_t *entries, int64_t count, int bits, float *out);

/* -- levels.c. key: two numbers of 32 bits; NULL rounds to the nearest -- */

void encode_levels(const band *bands, int64_t count, const float *x, int64_t n, const float *scale,
                   int bits, const int64_t *key, uint32_t *words, int threads);
void encode_peaks(const band *bands, int64_t count, const float *x, int64_t n, int bits,
                  const int64_t *key, float *scale, uint32_t *words, int threads);
void add_levels(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint32_t *words, int64_t word_stride, const float *scale,
                int64_t scale_stride, int bits, const float *weights, int threads);

/* -- floats.c -- */

/* Returns the largest magnitude. */
float encode_bfloat16(const float *x, int64_t n, const int64_t *key, uint32_t *words, int threads);
/* Codes of x / unit. */
void encode_e4m3(const band *bands, int64_t count, const float *x, int64_t n, const float *unit,
                 uint8_t *codes, int threads);
void encode_e4m3_peaks(const band *bands, int64_t count, const float *x, int64_t n, int powers,
                       float *unit, uint8_t *codes, int threads);
/* bfloat16 if bits is 16, else e4m3. Returns whether the sum is finite, if `checks`. */
int add_floats(const band *bands, int64_t count, const float *base, float *out, int64_t n,
               int64_t ranks, const uint8_t *codes, int64_t code_stride, const float *unit,
               int64_t unit_stride, int bits, const float *weights, int checks, int threads);

/* -- signs.c -- */

int encode_signs(const band *bands, int64_t count, const float *x, int64_t n, float *above,
                 float *below, uint32_t *words, int threads);
void add_signs(const band *bands, int64_t count, const float *base, float *out, int64_t n,
               int64_t ranks, const uint32_t *words, int64_t word_stride, const float *above,
               const float *below, int64_t mean_stride, const float *weights, int threads);

/* -- powers.c -- */

void encode_powers_of_two(const float *x, int64_t n, const int64_t *key, uint32_t *words,
                          int threads);
void add_powers_of_two(const float *base, float *out, int64_t n, int64_t ranks,
                       const uint32_t *words, int64_t stride, const float *weights, int threads);

/* -- tiles.c -- */

void turn_tiles(const float *x, float *out, int64_t rows, int64_t columns, int64_t height,
                int64_t width, const float *left, const float *right, int back, float *scratch,
                int threads);
int64_t scratch_of_tile(int64_t height, int64_t width);

/* -- factors.c -- */

/* A matrix of a vector that has thin factors [rows, rank] and [columns, rank]. */
typedef struct {
  int64_t start, rows, columns, rank;
} factored;

int64_t scratch_of_factors(int64_t columns, int64_t rank);
int64_t scratch_of_columns(int64_t rows, int64_t rank);
void multiply_factors(const factored *matrices, int64_t count, const float *x, const float *factor,
                      int transposed, float *out, float *scratch, int threads);
void orthogonalize_factors(const int64_t *shapes, int64_t count, const float *x, float *out,
                           double *scratch, int64_t apart, int threads);
void expand_factors(const factored *matrices, int64_t count, const float *x, const float *p,
                    const float *q, const float *other_p, const float *other_q,
                    const float *between, int64_t size, float *kept, float *total, float *scratch,
                    int threads);

/* -- votes.c -- */

void momentum_signs(const band *bands, int64_t count, const float *m, const float *g, float *out,
                    int64_t n, float momentum, float rest, int zeros, uint32_t *words,
                    int threads);
void majority(const band *bands, int64_t count, const uint32_t *words, int64_t stride,
              int64_t ranks, const float *weights, float unit, int64_t n, float *out,
              const float *m, float *kept, int threads);

#endif
