/* The table of kernels: what each takes and gives, and how its C function is called.
 *
 * A `plan` checks the inputs, so that whatever tensors come, nothing is read or written where it may
 * not be; it declares the outputs, and how much scratch memory there has to be. A `run` comes after.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "calls.h"
#include "threads.h"

#define ANY (-1)
#define FLOATS(i) ((const float *)c->in[i].data)
#define INT64S(i) ((const int64_t *)c->in[i].data)
#define BYTES(i) ((const uint8_t *)c->in[i].data)
#define OUT(type, i) ((type *)c->out[i].data)
#define ITEMS(b) ((b).rows * (b).length)
#define NEED(condition, ...) \
  if (!(condition)) return invalid(__VA_ARGS__)
#define TRY(step) \
  do { \
    int failed = (step); \
    if (failed) return failed; \
  } while (0)

static _Thread_local char error[160];

PUBLIC const char *kernel_error(void) { return error; }

static int invalid(const char *what, ...) __attribute__((format(printf, 1, 2)));

static int invalid(const char *what, ...) {
  va_list numbers;
  va_start(numbers, what);
  vsnprintf(error, sizeof error, what, numbers);
  va_end(numbers);
  return INVALID;
}

/* -- checks ---------------------------------------------------------------------------------- */

static int takes(const call *c, int64_t inputs, int64_t ints, int64_t floats) {
  NEED(c->n_in >= inputs && c->n_ints == ints && c->n_floats == floats,
       "expected %lld inputs, %lld integers and %lld reals", (long long)inputs, (long long)ints,
       (long long)floats);
  return 0;
}

static int is(const call *c, int64_t i, int dtype, int64_t rank, int64_t rows, int64_t length) {
  const buffer *x = c->in + i;
  NEED(x->dtype == dtype && (rank == ANY || x->rank == rank) && (rows == ANY || x->rows == rows) &&
           (length == ANY || x->length == length),
       "input %lld is [%lld, %lld], expected [%lld, %lld]", (long long)i, (long long)x->rows,
       (long long)x->length, (long long)rows, (long long)length);
  return 0;
}

static int is_vector(const call *c, int64_t i, int dtype, int64_t length) {
  return is(c, i, dtype, 1, 1, length);
}

static size_t bytes_of(int64_t dtype) { return dtype == INT64 ? 8 : dtype == FLOAT ? 4 : 1; }

static int gives(call *c, int64_t i, int dtype, int64_t rank, int64_t rows, int64_t length) {
  NEED(i < c->n_out && rows >= 0 && length >= 0, "output %lld is missing", (long long)i);
  buffer *x = c->out + i;
  NEED(!x->data || (x->dtype == dtype && ITEMS(*x) == rows * length),
       "output %lld is [%lld, %lld], expected [%lld, %lld]", (long long)i, (long long)x->rows,
       (long long)x->length, (long long)rows, (long long)length);
  *x = (buffer){x->data, dtype, rank, rows, length, length * (int64_t)bytes_of(dtype), -1};
  return 0;
}

static int gives_vector(call *c, int64_t i, int dtype, int64_t length) {
  return gives(c, i, dtype, 1, 1, length);
}

static int gives_number(call *c, int64_t i, int dtype) { return gives(c, i, dtype, 0, 1, 1); }

static int gives_like(call *c, int64_t i, int64_t input) {
  const buffer *x = c->in + input;
  TRY(gives(c, i, (int)x->dtype, x->rank, x->rows, x->length));
  c->out[i].like = input;
  return 0;
}

/* -- single elements ------------------------------------------------------------------------- */

static int plan_gather(call *c) {
  TRY(takes(c, 2, 0, 0));
  TRY(is(c, 0, FLOAT, ANY, 1, ANY));
  TRY(is(c, 1, INT64, ANY, ANY, ANY));
  return gives(c, 0, FLOAT, c->in[1].rank, c->in[1].rows, c->in[1].length);
}

static int run_gather(call *c) {
  return gather(FLOATS(0), c->in[0].length, INT64S(1), ITEMS(c->in[1]), OUT(float, 0));
}

static int plan_fill_at(call *c) {
  TRY(takes(c, 1, 0, 1));
  TRY(is(c, 0, INT64, ANY, ANY, ANY));
  NEED(c->n_out == 1, "a vector is filled");
  return gives_vector(c, 0, FLOAT, ITEMS(c->out[0]));
}

static int run_fill_at(call *c) {
  return fill_at(OUT(float, 0), c->out[0].length, INT64S(0), ITEMS(c->in[0]), (float)*c->floats);
}

static int plan_add_at(call *c) {
  TRY(takes(c, 2, 0, 0));
  TRY(is(c, 0, INT64, ANY, ANY, ANY));
  TRY(is(c, 1, FLOAT, ANY, ANY, ANY));
  NEED(c->n_out == 1 && ITEMS(c->in[0]) == ITEMS(c->in[1]), "a value for each index");
  return gives_vector(c, 0, FLOAT, ITEMS(c->out[0]));
}

static int run_add_at(call *c) {
  return add_at(OUT(float, 0), c->out[0].length, INT64S(0), ITEMS(c->in[0]), FLOATS(1));
}

static int plan_sort(call *c) {
  TRY(takes(c, 0, 0, 0));
  NEED(c->n_out == 1, "a vector is sorted");
  return gives_vector(c, 0, INT64, ITEMS(c->out[0]));
}

static int run_sort(call *c) { return sort(OUT(int64_t, 0), c->out[0].length); }

/* index, values; sink -> index, values: those of each place added up */
static int plan_merge_rows(call *c) {
  TRY(takes(c, 2, 1, 0));
  TRY(is(c, 0, INT64, 2, ANY, ANY));
  TRY(is(c, 1, FLOAT, 2, c->in[0].rows, c->in[0].length));
  int64_t count = ITEMS(c->in[0]), bits = 0;
  while (count >> bits) bits++;
  NEED(0 <= *c->ints && *c->ints <= INT64_MAX >> bits, "places and elements are too many");
  c->scratch_bytes += 16 * count;
  TRY(gives_vector(c, 0, INT64, count));
  return gives_vector(c, 1, FLOAT, count);
}

static int run_merge_rows(call *c) {
  return merge_rows(INT64S(0), FLOATS(1), ITEMS(c->in[0]), *c->ints, (int64_t *)c->scratch,
                    OUT(int64_t, 0), OUT(float, 1));
}

static int plan_add_momentum(call *c) {
  TRY(takes(c, 3, 1, 1));
  for (int i = 0; i < 3; i++) TRY(is_vector(c, i, FLOAT, c->in[0].length));
  TRY(gives_like(c, 0, 0));
  return gives_like(c, 1, 1);
}

static int run_add_momentum(call *c) {
  add_momentum(OUT(float, 0), OUT(float, 1), FLOATS(0), FLOATS(1), FLOATS(2), c->in[0].length,
               (float)*c->floats, *c->ints != 0);
  return 0;
}

/* An addition that no optimizer of graphs takes apart: it sums a chain of them in another order. */
static int plan_accumulate(call *c) {
  TRY(takes(c, 2, 0, 0));
  TRY(is(c, 0, FLOAT, ANY, ANY, ANY));
  TRY(is(c, 1, FLOAT, c->in[0].rank, c->in[0].rows, c->in[0].length));
  return gives_like(c, 0, 0);
}

static int run_accumulate(call *c) {
  add_vectors(FLOATS(0), FLOATS(1), OUT(float, 0), ITEMS(c->in[0]));
  return 0;
}

static int plan_finite(call *c) {
  TRY(takes(c, 1, 0, 0));
  TRY(is(c, 0, FLOAT, ANY, ANY, ANY));
  return gives_number(c, 0, BOOL);
}

static int run_finite(call *c) {
  *OUT(uint8_t, 0) = all_finite(FLOATS(0), ITEMS(c->in[0]), (int)c->threads) != 0;
  return 0;
}

static int plan_sum_finite(call *c) {
  TRY(takes(c, 1, 1, 0));
  TRY(is(c, 0, FLOAT, ANY, ANY, ANY));
  return gives_number(c, 0, BOOL);
}

static int run_sum_finite(call *c) {
  *OUT(uint8_t, 0) =
      sum_finite(FLOATS(0), ITEMS(c->in[0]), (int)*c->ints, (int)c->threads) != 0;
  return 0;
}

/* -- frames and packed codes ----------------------------------------------------------------- */

static int plan_bit_planes(call *c) {
  TRY(takes(c, 1, 1, 0));
  TRY(is(c, 0, INT64, 2, ANY, GROUP));
  NEED(1 <= *c->ints && *c->ints <= 32, "codes have 1 to 32 bits");
  return gives(c, 0, INT64, 2, c->in[0].rows, *c->ints);
}

static int run_bit_planes(call *c) {
  bit_planes(INT64S(0), c->in[0].rows, (int)*c->ints, OUT(int64_t, 0));
  return 0;
}

static int plan_from_bit_planes(call *c) {
  TRY(takes(c, 1, 0, 0));
  TRY(is(c, 0, INT64, 2, ANY, ANY));
  NEED(c->in[0].length <= 32, "codes have at most 32 bits");
  return gives(c, 0, INT64, 2, c->in[0].rows, GROUP);
}

static int run_from_bit_planes(call *c) {
  from_bit_planes(INT64S(0), c->in[0].rows, (int)c->in[0].length, OUT(int64_t, 0));
  return 0;
}

/* Checks the sizes of an Elias-Fano code: numbers, bits of each that are sent as they are, and
 * bits of a row. */
static int code_sizes(int64_t rows, int64_t count, int64_t low, int64_t width) {
  const int64_t most = (int64_t)1 << 40;
  NEED(0 <= low && low <= 32 && 0 <= rows && rows <= most && 0 <= count && count <= most &&
           0 <= width && width <= most && (!rows || (count <= most / rows && width <= most / rows)),
       "%lld rows of %lld numbers, %lld bits each and %lld a row, are no code", (long long)rows,
       (long long)count, (long long)low, (long long)width);
  return 0;
}

/* numbers; low, width, whether each row has a code of its own -> low bits, high bits */
static int plan_encode_ascending(call *c) {
  TRY(takes(c, 1, 3, 0));
  TRY(is(c, 0, INT64, 2, ANY, ANY));
  int64_t all = c->in[0].rows, count = c->in[0].length, low = c->ints[0], width = c->ints[1];
  TRY(code_sizes(all, count, low, width));
  int64_t codes = c->ints[2] ? all : 1, rows = c->ints[2] ? 1 : all, rank = c->ints[2] ? 2 : 1;
  TRY(gives(c, 0, INT64, rank, codes, (rows * count + GROUP - 1) / GROUP * low));
  return gives(c, 1, INT64, rank, codes, (rows * width + 31) / 32);
}

static int run_encode_ascending(call *c) {
  int64_t count = c->in[0].length, codes = c->ints[2] ? c->in[0].rows : 1;
  int64_t rows = c->ints[2] ? 1 : c->in[0].rows;
  for (int64_t i = 0; i < codes; i++)
    TRY(encode_ascending(INT64S(0) + i * rows * count, rows, count, c->ints[0], c->ints[1],
                         OUT(int64_t, 0) + i * c->out[0].length,
                         OUT(int64_t, 1) + i * c->out[1].length));
  return 0;
}

/* low bits, high bits; rows, count, low, width, universe -> numbers. Matrices are a code a row. */
static int plan_decode_ascending(call *c) {
  TRY(takes(c, 2, 5, 0));
  int64_t rows = c->ints[0], count = c->ints[1], low = c->ints[2], width = c->ints[3];
  TRY(code_sizes(rows, count, low, width));
  NEED(0 <= c->ints[4] && c->ints[4] < (int64_t)1 << 40, "numbers are not negative");
  const buffer *x = c->in;
  TRY(is(c, 0, INT64, ANY, ANY, (rows * count + GROUP - 1) / GROUP * low));
  NEED(x->rank == 1 || x->rank == 2, "codes are a vector or a matrix");
  TRY(is(c, 1, INT64, x->rank, x->rows, (rows * width + 31) / 32));
  NEED(rows * count == 0 || x->rows <= ((int64_t)1 << 40) / (rows * count), "too many codes");
  return gives(c, 0, INT64, 2, x->rows * rows, count);
}

static int run_decode_ascending(call *c) {
  const buffer *lows = c->in, *highs = c->in + 1;
  int64_t rows = c->ints[0], count = c->ints[1];
  for (int64_t i = 0; i < lows->rows; i++)
    decode_ascending((const int64_t *)((const char *)lows->data + i * lows->stride),
                     (const int64_t *)((const char *)highs->data + i * highs->stride), rows, count,
                     c->ints[2], c->ints[3], c->ints[4], OUT(int64_t, 0) + i * rows * count);
  return 0;
}

/* Checks the form of words that are sent apart; gives the words of each part of a body. */
static int apart_sizes(int64_t count, int64_t low, int64_t width, int64_t bits, int64_t *parts) {
  TRY(code_sizes(1, count, low, width));
  NEED(0 <= bits && bits < 32 && low < 32, "an index and a code are a word");
  parts[0] = (count + GROUP - 1) / GROUP * low;
  parts[1] = (width + 31) / 32;
  parts[2] = (count + GROUP - 1) / GROUP * bits;
  return 0;
}

/* body of words; side, count, low, width, bits -> body of indices and codes apart */
static int plan_encode_words(call *c) {
  int64_t parts[3], side = c->n_ints ? *c->ints : 0;
  TRY(takes(c, 1, 5, 0));
  TRY(apart_sizes(c->ints[1], c->ints[2], c->ints[3], c->ints[4], parts));
  NEED(0 <= side && side % 4 == 0 && side < (int64_t)1 << 40, "what is before words is words");
  TRY(is_vector(c, 0, UINT8, side + 4 * c->ints[1]));
  return gives_vector(c, 0, UINT8, side + 4 * (parts[0] + parts[1] + parts[2]));
}

static int run_encode_words(call *c) {
  int64_t parts[3], side = *c->ints;
  (void)apart_sizes(c->ints[1], c->ints[2], c->ints[3], c->ints[4], parts);
  uint32_t *lows = (uint32_t *)(OUT(uint8_t, 0) + side);
  if (side) memcpy(OUT(uint8_t, 0), BYTES(0), (size_t)side);
  return encode_words((const uint32_t *)(BYTES(0) + side), c->ints[1], c->ints[2], c->ints[3],
                      (int)c->ints[4], lows, lows + parts[0], lows + parts[0] + parts[1]);
}

/* bodies of indices and codes apart; side, count, low, width, bits, universe
 * -> bodies of words, whether the indices of each ascend */
static int plan_decode_words(call *c) {
  int64_t parts[3], side = c->n_ints ? *c->ints : 0;
  TRY(takes(c, 1, 6, 0));
  TRY(apart_sizes(c->ints[1], c->ints[2], c->ints[3], c->ints[4], parts));
  NEED(0 <= side && side % 4 == 0 && side < (int64_t)1 << 40 && 0 <= c->ints[5] &&
           c->ints[5] < (int64_t)1 << (32 - c->ints[4]),
       "what is before words is words, and an index fits into one");
  TRY(is(c, 0, UINT8, 2, ANY, side + 4 * (parts[0] + parts[1] + parts[2])));
  NEED(c->in[0].stride % 4 == 0, "bodies are whole words");
  TRY(gives(c, 0, UINT8, 2, c->in[0].rows, side + 4 * c->ints[1]));
  return gives_vector(c, 1, BOOL, c->in[0].rows);
}

static int run_decode_words(call *c) {
  int64_t parts[3], side = *c->ints;
  (void)apart_sizes(c->ints[1], c->ints[2], c->ints[3], c->ints[4], parts);
  for (int64_t row = 0; row < c->in[0].rows; row++) {
    const uint8_t *body = BYTES(0) + row * c->in[0].stride;
    const uint32_t *lows = (const uint32_t *)(body + side), *highs = lows + parts[0];
    uint8_t *out = OUT(uint8_t, 0) + row * c->out[0].length;
    if (side) memcpy(out, body, (size_t)side);
    OUT(uint8_t, 1)[row] = decode_words(lows, highs, highs + parts[1], c->ints[1], c->ints[2],
                                        c->ints[3], c->ints[5], (int)c->ints[4],
                                        (uint32_t *)(out + side)) != 0;
  }
  return 0;
}

/* words, parts of the first body, of the next; frames: 0 for one that is a vector -> frames */
static int plan_frame(call *c) {
  int64_t frames = c->n_ints ? *c->ints : 0, rows = frames ? frames : 1, bytes = 0;
  TRY(takes(c, 2, 1, 0));
  TRY(is_vector(c, 0, INT64, ANY));
  NEED(rows > 0 && (c->n_in - 1) % rows == 0, "as many parts for each frame");
  for (int64_t i = 1, parts = (c->n_in - 1) / rows; i < c->n_in; i += parts) {
    int64_t here = 0;
    for (int64_t part = i; part < i + parts; part++) {
      TRY(is_vector(c, part, UINT8, ANY));
      here += c->in[part].length;
    }
    NEED(here % 4 == 0 && (i == 1 || here == bytes), "bodies are equally many whole words");
    bytes = here;
  }
  return gives(c, 0, UINT8, frames ? 2 : 1, rows, 4 * (c->in[0].length + 1) + bytes);
}

static int run_frame(call *c) {
  int64_t count = c->in[0].length, rows = c->out[0].rows, parts = (c->n_in - 1) / rows;
  for (int64_t row = 0; row < rows; row++) {
    uint32_t *out = (uint32_t *)(OUT(uint8_t, 0) + row * c->out[0].length), sum = 0;
    uint8_t *body = (uint8_t *)(out + count + 1);
    for (int64_t i = 0; i < count; i++) out[i] = (uint32_t)INT64S(0)[i];
    for (int64_t part = 1 + row * parts, at = 0; part < 1 + (row + 1) * parts; part++) {
      sum += copy_summed(body, at, BYTES(part), c->in[part].length, (int)c->threads);
      at += c->in[part].length;
    }
    out[count] = sum + frame_sum(out, count, NULL, 0, 1);
  }
  return 0;
}

/* frames, fields, expected; count -> words, intact */
static int plan_examine(call *c) {
  TRY(takes(c, 3, 1, 0));
  TRY(is(c, 0, UINT8, 2, ANY, ANY));
  TRY(is_vector(c, 1, INT64, ANY));
  int64_t count = *c->ints, fields = c->in[1].length / 3;
  TRY(is_vector(c, 2, INT64, fields));
  NEED(0 <= count && c->in[0].length % 4 == 0 && c->in[0].stride % 4 == 0 &&
           c->in[0].length / 4 > count,
       "a frame is at least %lld whole words", (long long)count + 1);
  for (int64_t i = 0; i < fields; i++) {
    const int64_t *field = INT64S(1) + 3 * i;
    NEED(0 <= field[0] && field[0] < count && 0 <= field[1] && field[1] < 32 && 0 < field[2] &&
             field[2] <= 32,
         "a field is a word, a lowest bit and bits");
  }
  TRY(gives(c, 0, INT64, 2, c->in[0].rows, count));
  return gives(c, 1, BOOL, 2, fields + 1, c->in[0].rows);
}

static int run_examine(call *c) {
  examine((const uint32_t *)c->in[0].data, c->in[0].rows, c->in[0].stride / 4, c->in[0].length / 4,
          *c->ints, (const field *)c->in[1].data, c->in[1].length / 3, INT64S(2), OUT(int64_t, 0),
          OUT(uint8_t, 1), (int)c->threads);
  return 0;
}

/* step, salt -> key */
static int plan_key(call *c) {
  TRY(takes(c, 0, 2, 0));
  return gives_vector(c, 0, INT64, 2);
}

static int run_key(call *c) {
  uint32_t first = mix(mix((uint32_t)c->ints[0]) ^ (uint32_t)c->ints[1]);
  OUT(int64_t, 0)[0] = first;
  OUT(int64_t, 0)[1] = mix(first ^ 0x9e3779b9u);
  return 0;
}

/* -- quantizers: input 0 is the bands, three numbers each ------------------------------------- */

#define BANDS (const band *)c->in[0].data, c->in[0].length / 3

/* Checks that bands are in order and none reaches beyond `size`; counts their groups. */
static int groups_in(const call *c, int64_t size, int64_t *groups) {
  int64_t end = 0;
  TRY(is_vector(c, 0, INT64, ANY));
  *groups = 0;
  NEED(c->in[0].length % 3 == 0, "a band is three numbers");
  for (const int64_t *n = INT64S(0); n < INT64S(0) + c->in[0].length; n += 3) {
    NEED(n[0] >= end && n[1] > 0 && n[2] > 0 && n[1] <= (INT64_MAX - n[0]) / n[2],
         "bands must be ascending, without overlap, and not empty");
    end = n[0] + n[1] * n[2];
    *groups += n[1];
  }
  NEED(end <= size, "expected a vector of at least %lld elements", (long long)end);
  return 0;
}

/* bands, x -> a number a group */
static int plan_of_groups(call *c) {
  int64_t groups;
  TRY(takes(c, 2, 0, 0));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  return gives_vector(c, 0, FLOAT, groups);
}

static int run_group_maxima(call *c) {
  group_maxima(BANDS, FLOATS(1), OUT(float, 0), (int)c->threads);
  return 0;
}

static int run_group_squares(call *c) {
  return group_squares(BANDS, FLOATS(1), OUT(float, 0), (int)c->threads);
}

static int run_group_means(call *c) {
  return group_means(BANDS, FLOATS(1), OUT(float, 0), (int)c->threads);
}

/* The entries of groups, and their sum. */
static int entries_in(call *c, int64_t i, int64_t bits, int64_t *total) {
  NEED(1 <= bits && bits <= 8, "codes have 1 to 8 bits");
  TRY(is_vector(c, i, INT64, ANY));
  *total = 0;
  for (int64_t g = 0; g < c->in[i].length; g++) {
    NEED(1 <= INT64S(i)[g] && INT64S(i)[g] <= 1 << bits, "a group has 1 to %d bins", 1 << bits);
    *total += INT64S(i)[g];
  }
  return 0;
}

/* x, groups, entries; bits -> codes, means */
static int plan_encode_bins(call *c) {
  TRY(takes(c, 3, 1, 0));
  int64_t bits = *c->ints, total;
  TRY(is_vector(c, 0, FLOAT, ANY));
  TRY(is_vector(c, 1, INT64, c->in[0].length));
  TRY(entries_in(c, 2, bits, &total));
  TRY(gives_vector(c, 0, UINT8, (c->in[0].length + GROUP - 1) / GROUP * GROUP / 8 * bits));
  return gives_vector(c, 1, FLOAT, total);
}

static int run_encode_bins(call *c) {
  return encode_bins(FLOATS(0), INT64S(1), c->in[0].length, INT64S(2), c->in[2].length,
                     (int)*c->ints, OUT(uint32_t, 0), OUT(float, 1), c->out[1].length);
}

/* packed codes, means, groups, entries; bits -> values */
static int plan_decode_bins(call *c) {
  TRY(takes(c, 4, 1, 0));
  int64_t bits = *c->ints, total;
  TRY(is_vector(c, 2, INT64, ANY));
  TRY(entries_in(c, 3, bits, &total));
  TRY(is_vector(c, 1, FLOAT, total));
  TRY(is_vector(c, 0, UINT8, (c->in[2].length + GROUP - 1) / GROUP * GROUP / 8 * bits));
  return gives_vector(c, 0, FLOAT, c->in[2].length);
}

static int run_decode_bins(call *c) {
  return decode_bins((const uint32_t *)BYTES(0), FLOATS(1), INT64S(2), c->in[2].length, INT64S(3),
                     c->in[3].length, (int)*c->ints, OUT(float, 0));
}

/* x [rows, length] -> the largest magnitude of each row */
static int plan_peaks(call *c) {
  TRY(takes(c, 1, 0, 0));
  TRY(is(c, 0, FLOAT, 2, ANY, ANY));
  return gives_vector(c, 0, FLOAT, c->in[0].rows);
}

static int run_peaks(call *c) {
  const band all = {0, 1, c->in[0].length};
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1) schedule(static)
  for (int64_t row = 0; row < c->in[0].rows; row++)
    group_maxima(&all, 1, (const float *)(BYTES(0) + row * c->in[0].stride), OUT(float, 0) + row, 1);
  return 0;
}

/* bands of a row each, x; bins -> counts */
static int plan_layer_histograms(call *c) {
  int64_t groups;
  TRY(takes(c, 2, 1, 0));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  NEED(groups == c->in[0].length / 3 && *c->ints > 0, "a layer is a band of one row");
  return gives(c, 0, INT64, 2, *c->ints, groups);
}

static int run_layer_histograms(call *c) {
  layer_histograms(BANDS, FLOATS(1), *c->ints, OUT(int64_t, 0), (int)c->threads);
  return 0;
}

/* Checks a key: two numbers, or none to round to the nearest. */
static int is_key(const call *c, int64_t i) {
  return is_vector(c, i, INT64, c->in[i].length ? 2 : 0);
}

static const int64_t *key_of(const call *c, int64_t i) {
  return c->in[i].length ? INT64S(i) : NULL;
}

/* bands, x, scale, key; bits -> packed */
static int plan_encode_levels(call *c) {
  int64_t groups;
  TRY(takes(c, 4, 1, 0));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  TRY(is_vector(c, 2, FLOAT, groups));
  TRY(is_key(c, 3));
  NEED(2 <= *c->ints && *c->ints <= 8 && c->in[1].length % GROUP == 0, "codes have 2 to 8 bits");
  return gives_vector(c, 0, UINT8, c->in[1].length / 8 * *c->ints);
}

static int run_encode_levels(call *c) {
  encode_levels(BANDS, FLOATS(1), c->in[1].length, FLOATS(2), (int)*c->ints, key_of(c, 3),
                OUT(uint32_t, 0), (int)c->threads);
  return 0;
}

/* bands, x, key; bits -> maxima, packed */
static int plan_encode_peaks(call *c) {
  int64_t groups;
  TRY(takes(c, 3, 1, 0));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  TRY(is_key(c, 2));
  NEED(2 <= *c->ints && *c->ints <= 8 && c->in[1].length % GROUP == 0, "codes have 2 to 8 bits");
  TRY(gives_vector(c, 0, FLOAT, groups));
  return gives_vector(c, 1, UINT8, c->in[1].length / 8 * *c->ints);
}

static int run_encode_peaks(call *c) {
  encode_peaks(BANDS, FLOATS(1), c->in[1].length, (int)*c->ints, key_of(c, 2), OUT(float, 0),
               OUT(uint32_t, 1), (int)c->threads);
  return 0;
}

/* bands, x; powers -> units, codes */
static int plan_encode_e4m3(call *c) {
  int64_t groups;
  TRY(takes(c, 2, 1, 0));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  NEED(c->in[1].length % 4 == 0, "codes are whole words");
  TRY(gives_vector(c, 0, FLOAT, groups));
  return gives_vector(c, 1, UINT8, c->in[1].length);
}

static int run_encode_e4m3(call *c) {
  encode_e4m3_peaks(BANDS, FLOATS(1), c->in[1].length, *c->ints != 0, OUT(float, 0),
                    OUT(uint8_t, 1), (int)c->threads);
  return 0;
}

/* Checks inputs 2 on: packed codes, values by group, and weights, of each rank. */
static int plan_sum(call *c, int64_t bits, int64_t values) {
  int64_t groups, n = c->in[1].length, ranks = c->in[3 + values].length;
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, n, &groups));
  TRY(is_vector(c, 3 + values, FLOAT, ANY));
  TRY(is(c, 2, UINT8, 2, ranks, ANY));
  NEED(n % GROUP == 0 && c->in[2].length >= n / 8 * bits && c->in[2].stride % 4 == 0 &&
           c->in[2].length % 4 == 0,
       "codes of %lld elements are whole words", (long long)n);
  for (int64_t i = 3; i < 3 + values; i++) {
    TRY(is(c, i, FLOAT, 2, ranks, ANY));
    NEED(c->in[i].length >= groups && c->in[i].stride == c->in[3].stride &&
             c->in[i].length == c->in[3].length && c->in[i].stride % 4 == 0,
         "a value for each of %lld groups", (long long)groups);
  }
  return gives_like(c, 0, 1);
}

/* bands, base, packed, scale, weights; bits, from_zero -> total */
static int plan_add_levels(call *c) {
  TRY(takes(c, 5, 2, 0));
  NEED(2 <= *c->ints && *c->ints <= 8, "codes have 2 to 8 bits");
  return plan_sum(c, *c->ints, 1);
}

static int run_add_levels(call *c) {
  add_levels(BANDS, c->ints[1] ? NULL : FLOATS(1), OUT(float, 0), c->in[1].length, c->in[2].rows,
             (const uint32_t *)c->in[2].data, c->in[2].stride / 4, FLOATS(3), c->in[3].stride / 4,
             (int)*c->ints, FLOATS(4), (int)c->threads);
  return 0;
}

/* bands, x, unit, key; bits -> packed; unit is empty for bfloat16 */
static int plan_encode_floats(call *c) {
  int64_t groups, bits;
  TRY(takes(c, 4, 1, 0));
  bits = *c->ints;
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  NEED(bits == 8 || bits == 16, "codes have 8 or 16 bits");
  TRY(is_vector(c, 2, FLOAT, bits == 16 ? 0 : groups));
  TRY(is_key(c, 3));
  NEED(c->in[1].length % (32 / bits) == 0 && (bits == 16 || !c->in[3].length),
       "codes are whole words, and those of 8 bits the nearest");
  return gives_vector(c, 0, UINT8, c->in[1].length / 8 * bits + c->in[1].length % 8 * bits / 8);
}

static int run_encode_floats(call *c) {
  int64_t n = c->in[1].length;
  if (*c->ints == 8)
    encode_e4m3(BANDS, FLOATS(1), n, FLOATS(2), OUT(uint8_t, 0), (int)c->threads);
  else
    (void)encode_bfloat16(FLOATS(1), n, key_of(c, 3), OUT(uint32_t, 0), (int)c->threads);
  return 0;
}

/* x, key -> packed, largest magnitude */
static int plan_encode_bfloat16(call *c) {
  TRY(takes(c, 2, 0, 0));
  TRY(is_vector(c, 0, FLOAT, ANY));
  TRY(is_key(c, 1));
  NEED(c->in[0].length % 2 == 0, "codes are whole words");
  TRY(gives_vector(c, 0, UINT8, 2 * c->in[0].length));
  return gives_vector(c, 1, FLOAT, 1);
}

static int run_encode_bfloat16(call *c) {
  *OUT(float, 1) = encode_bfloat16(FLOATS(0), c->in[0].length, key_of(c, 1), OUT(uint32_t, 0),
                                   (int)c->threads);
  return 0;
}

/* bands, base, packed, unit, weights; bits, from_zero -> total[, whether it is finite]; unit is empty
 * for bfloat16 */
static int plan_add_floats(call *c) {
  int64_t groups, bits, n, ranks;
  TRY(takes(c, 5, 2, 0));
  bits = *c->ints, n = c->in[1].length, ranks = c->in[4].length;
  NEED(bits == 8 || bits == 16, "codes have 8 or 16 bits");
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, n, &groups));
  TRY(is_vector(c, 4, FLOAT, ANY));
  TRY(is(c, 2, UINT8, 2, ranks, ANY));
  NEED(c->in[2].length / (bits / 8) >= n, "a code for each of %lld elements", (long long)n);
  if (bits == 8) {
    TRY(is(c, 3, FLOAT, 2, ranks, ANY));
    NEED(c->in[3].length >= groups && c->in[3].stride % 4 == 0,
         "a value for each of %lld groups", (long long)groups);
  }
  TRY(gives_like(c, 0, 1));
  return c->n_out > 1 ? gives_number(c, 1, BOOL) : 0;
}

static int run_add_floats(call *c) {
  int finite = add_floats(BANDS, c->ints[1] ? NULL : FLOATS(1), OUT(float, 0), c->in[1].length,
                          c->in[2].rows, BYTES(2), c->in[2].stride, FLOATS(3),
                          c->in[3].stride / 4, (int)*c->ints, FLOATS(4), c->n_out > 1,
                          (int)c->threads);
  if (c->n_out > 1) *OUT(uint8_t, 1) = finite != 0;
  return 0;
}

/* x, key -> packed */
static int plan_encode_powers(call *c) {
  TRY(takes(c, 2, 0, 0));
  TRY(is_vector(c, 0, FLOAT, ANY));
  TRY(is_vector(c, 1, INT64, 2));
  NEED(c->in[0].length % GROUP == 0, "codes are whole words");
  return gives_vector(c, 0, UINT8, c->in[0].length / 8 * 9);
}

static int run_encode_powers(call *c) {
  encode_powers_of_two(FLOATS(0), c->in[0].length, INT64S(1), OUT(uint32_t, 0), (int)c->threads);
  return 0;
}

/* base, packed, weights; from_zero -> total */
static int plan_add_powers(call *c) {
  TRY(takes(c, 3, 1, 0));
  int64_t n = c->in[0].length;
  TRY(is_vector(c, 0, FLOAT, ANY));
  TRY(is_vector(c, 2, FLOAT, ANY));
  TRY(is(c, 1, UINT8, 2, c->in[2].length, ANY));
  NEED(n % GROUP == 0 && c->in[1].length >= n / 8 * 9 && c->in[1].stride % 4 == 0,
       "a code for each of %lld elements", (long long)n);
  return gives_like(c, 0, 0);
}

static int run_add_powers(call *c) {
  add_powers_of_two(*c->ints ? NULL : FLOATS(0), OUT(float, 0), c->in[0].length, c->in[1].rows,
                    (const uint32_t *)c->in[1].data, c->in[1].stride / 4, FLOATS(2),
                    (int)c->threads);
  return 0;
}

/* bands, x -> above, below, packed */
static int plan_encode_signs(call *c) {
  int64_t groups;
  TRY(takes(c, 2, 0, 0));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(groups_in(c, c->in[1].length, &groups));
  NEED(c->in[1].length % GROUP == 0, "signs are whole words");
  TRY(gives_vector(c, 0, FLOAT, groups));
  TRY(gives_vector(c, 1, FLOAT, groups));
  return gives_vector(c, 2, UINT8, c->in[1].length / 8);
}

static int run_encode_signs(call *c) {
  return encode_signs(BANDS, FLOATS(1), c->in[1].length, OUT(float, 0), OUT(float, 1),
                      OUT(uint32_t, 2), (int)c->threads);
}

/* bands, base, packed, above, below, weights; from_zero -> total */
static int plan_add_signs(call *c) {
  TRY(takes(c, 6, 1, 0));
  return plan_sum(c, 1, 2);
}

static int run_add_signs(call *c) {
  add_signs(BANDS, *c->ints ? NULL : FLOATS(1), OUT(float, 0), c->in[1].length, c->in[2].rows,
            (const uint32_t *)c->in[2].data, c->in[2].stride / 4, FLOATS(3), FLOATS(4),
            c->in[3].stride / 4, FLOATS(5), (int)c->threads);
  return 0;
}

/* bands, m, gradient; whether zeros count as negative; momentum, rest
 * -> momentum * m + rest * gradient, packed */
static int plan_momentum_signs(call *c) {
  int64_t groups, n = c->in[1].length;
  TRY(takes(c, 3, 1, 2));
  TRY(is_vector(c, 1, FLOAT, ANY));
  TRY(is_vector(c, 2, FLOAT, n));
  TRY(groups_in(c, n, &groups));
  NEED(n % GROUP == 0, "signs are whole words");
  TRY(gives_like(c, 0, 2));
  return gives_vector(c, 1, UINT8, n / 8);
}

static int run_momentum_signs(call *c) {
  momentum_signs(BANDS, FLOATS(1), FLOATS(2), OUT(float, 0), c->in[1].length, (float)c->floats[0],
                 (float)c->floats[1], *c->ints != 0, OUT(uint32_t, 1), (int)c->threads);
  return 0;
}

/* bands, packed, weights[, m]; elements; unit -> the majority[, m], which may be in m's memory */
static int plan_majority(call *c) {
  int64_t groups, n = c->n_ints ? *c->ints : 0;
  TRY(takes(c, 3, 1, 1));
  NEED(0 <= n && n % GROUP == 0 && c->n_in - 3 == c->n_out - 1 && c->n_in <= 4,
       "signs are whole words");
  TRY(groups_in(c, n, &groups));
  TRY(is_vector(c, 2, FLOAT, ANY));
  TRY(is(c, 1, UINT8, 2, c->in[2].length, ANY));
  NEED(c->in[1].length >= n / 8 && c->in[1].stride % 4 == 0, "a sign for each of %lld elements",
       (long long)n);
  if (c->n_in > 3) TRY(is_vector(c, 3, FLOAT, n));
  TRY(gives_vector(c, 0, FLOAT, n));
  return c->n_in > 3 ? gives_vector(c, 1, FLOAT, n) : 0;
}

static int run_majority(call *c) {
  int keeps = c->n_in > 3;
  majority(BANDS, (const uint32_t *)c->in[1].data, c->in[1].stride / 4, c->in[1].rows, FLOATS(2),
           (float)*c->floats, *c->ints, OUT(float, 0), keeps ? FLOATS(3) : NULL,
           keeps ? OUT(float, 1) : NULL, (int)c->threads);
  return 0;
}

/* x, left, right; rows, columns, back -> tiles, or from tiles a matrix */
static int plan_turn_tiles(call *c) {
  TRY(takes(c, 3, 3, 0));
  int64_t rows = c->ints[0], columns = c->ints[1], size = c->in[0].length;
  int64_t height = c->in[1].length, width = c->in[2].length;
  TRY(is_vector(c, 0, FLOAT, ANY));
  TRY(is(c, 1, FLOAT, 2, height, height));
  TRY(is(c, 2, FLOAT, 2, width, width));
  NEED(0 < height && height <= 4096 && 0 < width && width <= 4096 && 0 < rows && 0 < columns &&
           rows % height == 0 && columns % width == 0 && size % columns == 0 &&
           size / columns == rows,
       "whole tiles of %lld by %lld", (long long)height, (long long)width);
  c->scratch_bytes = 4 * scratch_of_tile(height, width) * c->threads;
  return gives_vector(c, 0, FLOAT, size);
}

static int run_turn_tiles(call *c) {
  turn_tiles(FLOATS(0), OUT(float, 0), c->ints[0], c->ints[1], c->in[1].length, c->in[2].length,
             FLOATS(1), FLOATS(2), c->ints[2] != 0, (float *)c->scratch, (int)c->threads);
  return 0;
}

/* Checks that input 0 has matrices of input 1, and counts the elements of their factors. */
static int plan_factored(call *c, int64_t *left, int64_t *right, int64_t *rest) {
  TRY(is_vector(c, 0, INT64, ANY));
  TRY(is_vector(c, 1, FLOAT, ANY));
  NEED(c->in[0].length % 4 == 0, "a matrix is four numbers");
  const factored *m = (const factored *)c->in[0].data;
  int64_t count = c->in[0].length / 4, size = c->in[1].length, done = 0, largest = 0;
  *left = *right = 0, *rest = size;
  for (int64_t i = 0; i < count; i++) {
    NEED(done <= m[i].start && m[i].start <= size && 0 < m[i].rows && 0 < m[i].columns &&
             0 < m[i].rank && m[i].rank <= m[i].rows && m[i].rank <= m[i].columns &&
             m[i].rows <= (size - m[i].start) / m[i].columns,
         "matrix %lld does not lie in the vector behind the one before it", (long long)i);
    done = m[i].start + m[i].rows * m[i].columns;
    *left += m[i].rows * m[i].rank, *right += m[i].columns * m[i].rank;
    *rest -= m[i].rows * m[i].columns;
    int64_t needed = scratch_of_factors(m[i].columns, m[i].rank);
    largest = needed > largest ? needed : largest;
  }
  c->scratch_bytes = 4 * largest;
  return 0;
}

/* matrices (start, rows, columns, rank), x, factor; transposed -> other factor */
static int plan_multiply_factors(call *c) {
  int64_t left, right, rest;
  TRY(takes(c, 3, 1, 0));
  TRY(plan_factored(c, &left, &right, &rest));
  TRY(is_vector(c, 2, FLOAT, *c->ints ? left : right));
  return gives_vector(c, 0, FLOAT, *c->ints ? right : left);
}

static int run_multiply_factors(call *c) {
  multiply_factors((const factored *)c->in[0].data, c->in[0].length / 4, FLOATS(1), FLOATS(2),
                   *c->ints != 0, OUT(float, 0), (float *)c->scratch, (int)c->threads);
  return 0;
}

/* Doubles that a thread needs for the largest matrix. */
static int64_t largest_of_shapes(const call *c) {
  const int64_t *shape = INT64S(0), *end = shape + c->in[0].length;
  int64_t largest = 0;
  for (; shape < end; shape += 2) {
    int64_t needed = scratch_of_columns(shape[0], shape[1]);
    largest = needed > largest ? needed : largest;
  }
  return largest;
}

/* (rows, rank) of each matrix, x -> x with orthonormal columns */
static int plan_orthogonalize_factors(call *c) {
  TRY(takes(c, 2, 0, 0));
  TRY(is_vector(c, 0, INT64, ANY));
  TRY(is_vector(c, 1, FLOAT, ANY));
  NEED(c->in[0].length % 2 == 0, "a shape is two numbers");
  const int64_t *shapes = INT64S(0);
  int64_t left = c->in[1].length;
  for (int64_t i = 0; i < c->in[0].length; i += 2) {
    NEED(0 < shapes[i + 1] && shapes[i + 1] <= shapes[i] && shapes[i] <= left / shapes[i + 1],
         "matrix %lld does not lie in the vector, or is too wide", (long long)i / 2);
    left -= shapes[i] * shapes[i + 1];
  }
  NEED(left == 0, "%lld elements are of no matrix", (long long)left);
  c->scratch_bytes = 8 * largest_of_shapes(c) * c->threads;
  return gives_vector(c, 0, FLOAT, c->in[1].length);
}

static int run_orthogonalize_factors(call *c) {
  orthogonalize_factors(INT64S(0), c->in[0].length / 2, FLOATS(1), OUT(float, 0),
                        (double *)c->scratch, largest_of_shapes(c), (int)c->threads);
  return 0;
}

/* matrices (start, rows, columns, rank), x, p, q, other p, other q, between -> kept, total */
static int plan_expand_factors(call *c) {
  int64_t left, right, rest;
  TRY(takes(c, 7, 0, 0));
  TRY(plan_factored(c, &left, &right, &rest));
  TRY(is_vector(c, 2, FLOAT, left));
  TRY(is_vector(c, 3, FLOAT, right));
  TRY(is_vector(c, 4, FLOAT, left));
  TRY(is_vector(c, 5, FLOAT, right));
  TRY(is_vector(c, 6, FLOAT, rest));
  TRY(gives_vector(c, 0, FLOAT, c->in[1].length));
  return gives_vector(c, 1, FLOAT, c->in[1].length);
}

static int run_expand_factors(call *c) {
  expand_factors((const factored *)c->in[0].data, c->in[0].length / 4, FLOATS(1), FLOATS(2),
                 FLOATS(3), FLOATS(4), FLOATS(5), FLOATS(6), c->in[1].length, OUT(float, 0),
                 OUT(float, 1), (float *)c->scratch, (int)c->threads);
  return 0;
}

/* -- rows of a vector ------------------------------------------------------------------------ */

/* Rows of so many elements, the last one perhaps of fewer; 0 if none can be that long. */
static int64_t rows_of(int64_t size, int64_t length) {
  return 0 < length && length < (int64_t)1 << 31 ? (size + length - 1) / length : 0;
}

/* Declares what is chosen of the rows of input 0. */
static int gives_largest(call *c, int64_t i) {
  int64_t length = c->ints[0], k = c->ints[1], rows = rows_of(c->in[0].length, length);
  TRY(is_vector(c, 0, FLOAT, ANY));
  NEED(length < (int64_t)1 << 31 && 0 < k && k <= length, "a row has at least k elements");
  c->scratch_bytes = 8 * memory_of_row(length) * c->threads;
  TRY(gives(c, i, INT64, 2, rows, k));
  return gives(c, i + 1, FLOAT, 2, rows, k);
}

/* x; length, k -> index, values */
static int plan_largest_of_rows(call *c) {
  TRY(takes(c, 1, 2, 0));
  return gives_largest(c, 0);
}

static int run_largest_of_rows(call *c) {
  largest_of_rows(FLOATS(0), NULL, 1.0f, NULL, c->in[0].length, c->ints[0], c->ints[1],
                  OUT(int64_t, 0), OUT(float, 1), (uint64_t *)c->scratch, 0, (int)c->threads);
  return 0;
}

/* x, y; length, k; factor -> factor * x + y, its index, values[, whether y's squares are finite] */
static int plan_accumulate_largest(call *c) {
  TRY(takes(c, 2, 2, 1));
  TRY(is_vector(c, 1, FLOAT, c->in[0].length));
  TRY(gives_largest(c, 1));
  if (c->n_out > 3) TRY(gives_number(c, 3, BOOL));
  return gives_like(c, 0, 1);
}

static int run_accumulate_largest(call *c) {
  int finite = largest_of_rows(FLOATS(0), FLOATS(1), (float)*c->floats, OUT(float, 0),
                               c->in[0].length, c->ints[0], c->ints[1], OUT(int64_t, 1),
                               OUT(float, 2), (uint64_t *)c->scratch, c->n_out > 3,
                               (int)c->threads);
  if (c->n_out > 3) *OUT(uint8_t, 3) = finite != 0;
  return 0;
}

/* base, weights, index and values of each rank; length, from_zero -> sum */
static int plan_add_in_rows(call *c) {
  TRY(takes(c, 2, 2, 0));
  TRY(is_vector(c, 0, FLOAT, ANY));
  TRY(is_vector(c, 1, FLOAT, (c->n_in - 2) / 2));
  int64_t rows = rows_of(c->in[0].length, *c->ints), ranks = c->in[1].length;
  NEED(*c->ints > 0 && c->n_in == 2 + 2 * ranks, "places and values of each rank");
  for (int64_t i = 2; i < c->n_in; i += 2) {
    TRY(is(c, i, INT64, 2, rows, c->in[2].length));
    TRY(is(c, i + 1, FLOAT, 2, rows, c->in[2].length));
  }
  c->scratch_bytes = 2 * (int64_t)sizeof(void *) * ranks;
  return gives_like(c, 0, 0);
}

static int run_add_in_rows(call *c) {
  int64_t ranks = c->in[1].length;
  const int64_t **index = (const int64_t **)c->scratch;
  const float **values = (const float **)(index + ranks);
  for (int64_t rank = 0; rank < ranks; rank++)
    index[rank] = INT64S(2 + 2 * rank), values[rank] = FLOATS(3 + 2 * rank);
  return add_in_rows(c->ints[1] ? NULL : FLOATS(0), OUT(float, 0), c->in[0].length, *c->ints,
                     ranks ? c->in[2].length : 0, ranks, index, values, FLOATS(1),
                     (int)c->threads);
}

/* -- buckets --------------------------------------------------------------------------------- */

/* Five numbers of the state, capacities; patience -> level, capacity, dense, unneeded, highest,
 * changes. `CapacitySchedule.next_level`; the state is that of `CapacityState`. */
static int plan_next_level(call *c) {
  TRY(takes(c, 6, 1, 0));
  for (int i = 0; i < 5; i++) TRY(is(c, i, INT64, 0, 1, 1));
  TRY(is_vector(c, 5, INT64, ANY));
  for (int i = 0; i < 6; i++) TRY(gives_number(c, i, i == 2 ? BOOL : INT64));
  return 0;
}

static int64_t within_levels(int64_t level, int64_t top) {
  return level < 0 ? 0 : level < top ? level : top;
}

static int run_next_level(call *c) {
  int64_t top = c->in[5].length, demand = 0, wanted = INT64S(3)[0];
  int64_t last = within_levels(INT64S(0)[0], top), unneeded = INT64S(1)[0];
  int64_t highest = within_levels(INT64S(2)[0], top);
  for (int64_t i = 0; i < top; i++) demand += INT64S(5)[i] < wanted;
  int below = demand < last;
  unneeded = below ? unneeded + 1 : 0;
  highest = !below ? 0 : demand > highest ? demand : highest;
  int rested = unneeded >= *c->ints;
  int64_t level = rested ? highest : below ? last : demand;
  *OUT(int64_t, 0) = level;
  *OUT(int64_t, 1) = level < top ? INT64S(5)[level] : 0;
  *OUT(uint8_t, 2) = level == top;
  *OUT(int64_t, 3) = rested ? 0 : unneeded;
  *OUT(int64_t, 4) = rested ? 0 : highest;
  *OUT(int64_t, 5) = INT64S(4)[0] + (level != last);
  return 0;
}

/* A bucket is a vector of int64: its size, the bits of a block, and the sizes of its layers. */
#define LAYERS(i) (c->in[i].length - 2)

/* Checks the bucket, which is input 0, and asks for memory for its tables. */
static int plan_bucket(call *c) {
  TRY(is_vector(c, 0, INT64, ANY));
  const int64_t *numbers = INT64S(0);
  int64_t layers = LAYERS(0), size = layers > 0 ? numbers[0] : 0, bits = layers > 0 ? numbers[1] : 0;
  NEED(layers > 0 && 2 <= bits && bits < 31,
       "a bucket has layers, and blocks of 4 to 2**30 elements");
  NEED(0 < size && size < (int64_t)1 << 31 && size % ((int64_t)1 << bits) == 0,
       "a bucket is whole blocks, of fewer than 2**31 elements");
  for (int64_t i = 0, end = 0; i < layers; i++) {
    NEED(0 <= numbers[2 + i] && numbers[2 + i] < size - end,
         "the layers do not fit into %lld elements", (long long)size);
    end += ((numbers[2 + i] + ((int64_t)1 << bits) - 1) >> bits) << bits;
  }
  c->scratch_bytes = (8 * layers + 4 * (size >> bits) + 7) / 8 * 8;
  return 0;
}

/* Lays the tables of the bucket into scratch memory, and says where the rest of that begins. */
static place open_bucket(const call *c, int64_t side, int64_t **offsets, char **rest) {
  const int64_t *numbers = INT64S(0), layers = LAYERS(0), bits = numbers[1];
  int64_t *starts = (int64_t *)c->scratch, block = 0;
  int32_t *layer_of_block = (int32_t *)(starts + layers);
  int64_t blocks = numbers[0] >> bits;
  for (int64_t layer = 0; layer < layers; layer++) {
    starts[layer] = block << bits;
    int64_t end = block + ((numbers[2 + layer] + ((int64_t)1 << bits) - 1) >> bits);
    if (layer == layers - 1) end = blocks; /* the sink's too */
    for (; block < end; block++) layer_of_block[block] = (int32_t)layer;
  }
  if (offsets) *offsets = starts;
  if (rest) *rest = c->scratch + (8 * layers + 4 * blocks + 7) / 8 * 8;
  return (place){layer_of_block, numbers[0], layers, (int32_t)bits, (int32_t)side};
}

/* Flags of a rule, as bits of an integer, and its five reals. */
static rule rule_of(int64_t flags, const double *x) {
  return (rule){flags & 1, flags >> 1 & 1, flags >> 2 & 1, flags >> 3 & 1, flags >> 4 & 1,
                (float)x[0], (float)x[1], (float)x[2], (float)x[3], (float)x[4]};
}

#define POWERS(flags) ((flags) >> 2 & 1)
#define SIDE(flags) (POWERS(flags) ? (LAYERS(0) + 3) / 4 * 4 : 0)

/* Checks a capacity, negative for places; gives the bytes of a body. */
static int body_bytes(const call *c, int64_t capacity, int64_t flags, int64_t *bytes) {
  int64_t size = *INT64S(0);
  NEED(capacity <= size && (!POWERS(flags) || size <= 1 << 28),
       "capacity is at most %lld, and with powers of two a bucket has at most 2**28 elements",
       (long long)size);
  *bytes = SIDE(flags) + (capacity >= 0 ? 4 * capacity : POWERS(flags) ? size : size / 4);
  return 0;
}

/* bucket, gradient, r[, v[, moment]]; step, capacity, flags, commits; rule
 * -> body, sent, wanted, per_layer, r[, v][, whether the gradient's squares are finite]
 *
 * What is not finite is not encoded. */
static int plan_threshold_write(call *c) {
  int64_t bytes;
  TRY(takes(c, 3, 4, 5));
  TRY(plan_bucket(c));
  int64_t fields = c->ints[2] & 1 ? 2 : 1, size = *INT64S(0), tables = c->scratch_bytes;
  NEED(c->n_in >= 2 + fields && c->n_in <= 2 + fields + (fields == 2) && *c->ints >= 0,
       "the rule has a memory of %lld tensors", (long long)fields);
  for (int64_t i = 1; i < c->n_in; i++) TRY(is_vector(c, i, FLOAT, size));
  TRY(body_bytes(c, c->ints[1], c->ints[2], &bytes));
  int dense = c->ints[1] < 0, in_place = dense && POWERS(c->ints[2]);
  c->scratch_bytes = tables + (4 * LAYERS(0) + 7) / 8 * 8 + (in_place ? 0 : (dense ? 1 : 8) * size);
  TRY(gives_vector(c, 0, UINT8, bytes));
  TRY(gives_number(c, 1, INT64));
  TRY(gives_number(c, 2, INT64));
  TRY(gives_vector(c, 3, INT64, LAYERS(0)));
  for (int64_t i = 0; i < fields; i++) TRY(gives_like(c, 4 + i, 2 + i));
  return c->n_out > 4 + fields ? gives_number(c, 4 + fields, BOOL) : 0;
}

static int run_threshold_write(call *c) {
  char *rest;
  const rule how = rule_of(c->ints[2], c->floats);
  const place where = open_bucket(c, SIDE(c->ints[2]), NULL, &rest);
  int32_t *top = (int32_t *)rest;
  int64_t step = c->ints[0], capacity = c->ints[1], sent = -1, count;
  int dense = capacity < 0, threads = (int)c->threads, finite = 1;
  uint32_t *wanted = (uint32_t *)(rest + (4 * where.layers + 7) / 8 * 8);
  uint8_t *body = OUT(uint8_t, 0), *flags = how.powers ? body + where.side : (uint8_t *)wanted;
  int64_t *per_layer = OUT(int64_t, 3);
  float *r = OUT(float, 4), *v = how.ambiguity ? OUT(float, 5) : NULL;
  int64_t fields = v ? 2 : 1, checks = c->n_out > 4 + fields;
  count = threshold_find(&how, &where, r, v, FLOATS(2), v ? FLOATS(3) : NULL, FLOATS(1),
                         c->n_in > 4 ? FLOATS(4) : NULL, dense ? NULL : wanted,
                         dense ? flags : NULL, top, checks ? &finite : NULL, threads);
  if (checks) *OUT(uint8_t, 4 + fields) = finite != 0;
  if (!finite) return 0;
  if (count >= 0 && dense) {
    count = sent = threshold_places(&how, &where, r, flags, top, body, per_layer, threads);
  } else if (count >= 0) {
    count = threshold_code(&how, &where, wanted, count, top, threads);
    if (count >= 0)
      sent = threshold_write(&how, &where, wanted, count, top, capacity, step, v, body, per_layer);
  }
  if (sent < 0) return NO_MEMORY;
  if (c->ints[3]) threshold_commit(&how, &where, body, dense ? -1 : sent, r, v, threads);
  *OUT(int64_t, 1) = sent;
  *OUT(int64_t, 2) = count;
  return 0;
}

/* bucket, body; sent, capacity, flags; rule -> r[, v], of which the body's elements are committed */
static int plan_threshold_commit(call *c) {
  int64_t bytes;
  TRY(takes(c, 2, 3, 5));
  TRY(plan_bucket(c));
  TRY(body_bytes(c, c->ints[1], c->ints[2], &bytes));
  TRY(is_vector(c, 1, UINT8, bytes));
  NEED(c->ints[1] < 0 || c->ints[0] <= c->ints[1], "more is sent than there is room for");
  for (int64_t i = 0; i < 1 + (c->ints[2] & 1); i++) TRY(gives_vector(c, i, FLOAT, *INT64S(0)));
  return 0;
}

static int run_threshold_commit(call *c) {
  const rule how = rule_of(c->ints[2], c->floats);
  const place where = open_bucket(c, SIDE(c->ints[2]), NULL, NULL);
  threshold_commit(&how, &where, BYTES(1), c->ints[1] < 0 ? -1 : c->ints[0], OUT(float, 0),
                   how.ambiguity ? OUT(float, 1) : NULL, (int)c->threads);
  return 0;
}

/* bucket, bodies, weights, out; capacity, flags; rule -> total */
static int plan_threshold_add(call *c) {
  int64_t bytes;
  TRY(takes(c, 4, 2, 5));
  TRY(plan_bucket(c));
  TRY(body_bytes(c, c->ints[0], c->ints[1], &bytes));
  TRY(is_vector(c, 2, FLOAT, ANY));
  TRY(is(c, 1, UINT8, 2, c->in[2].length, bytes));
  NEED(c->in[1].stride % 4 == 0, "bodies are whole words");
  TRY(is_vector(c, 3, FLOAT, *INT64S(0)));
  return gives_like(c, 0, 3);
}

static int run_threshold_add(call *c) {
  const rule how = rule_of(c->ints[1], c->floats);
  const place where = open_bucket(c, SIDE(c->ints[1]), NULL, NULL);
  int64_t stride = c->in[1].stride, ranks = c->in[1].rows;
  if (*c->ints >= 0)
    return threshold_add(&how, &where, BYTES(1), stride, ranks, *c->ints, FLOATS(2), OUT(float, 0),
                         (int)c->threads);
  threshold_add_places(&how, &where, BYTES(1), stride, ranks, FLOATS(2), OUT(float, 0),
                       (int)c->threads);
  return 0;
}

/* -- top-k: input 0 is the bucket, and input 1 the form of a body ------------------------------ */

/* Reads the two numbers of `Form`. */
static int form_of(const call *c, int needs_values, form *as, int64_t *bytes) {
  TRY(is_vector(c, 1, INT64, 2));
  const int64_t *n = INT64S(1);
  *as = (form){n[0], n[1]};
  NEED(0 <= n[0] && n[0] <= 2 * *INT64S(0) && needs_values <= n[1] && n[1] <= 1,
       "no such form of a body");
  *bytes = 4 * as->capacity * (1 + as->valued);
  return 0;
}

/* bucket, form, strides, quota, slack, hint, gradient, r[, u]; step, whole, nesterov, masking,
 * commits; momentum -> body, sent, chosen, per_layer, hint[, r[, u][, whether g's squares are finite]]
 *
 * Without r and u the memory stays as it is. What is not finite is not encoded. */
static int plan_topk_write(call *c) {
  form as;
  int64_t bytes;
  TRY(takes(c, 8, 5, 1));
  TRY(plan_bucket(c));
  TRY(form_of(c, 0, &as, &bytes));
  int64_t size = *INT64S(0), layers = LAYERS(0), groups = c->ints[1] ? 1 : layers;
  int64_t fields = *c->floats != 0 ? 2 : 1;
  int checks = c->n_out == 6 + fields;
  NEED(c->n_in == 7 + fields && *c->ints >= 0 &&
           (c->n_out == 5 || c->n_out == 5 + fields || checks),
       "a memory of %lld tensors", (long long)fields);
  TRY(is_vector(c, 2, INT64, layers));
  for (int i = 3; i < 6; i++) TRY(is_vector(c, i, i < 5 ? INT64 : FLOAT, groups));
  for (int64_t i = 6; i < c->n_in; i++) TRY(is_vector(c, i, FLOAT, size));
  for (int64_t i = 0; i < layers; i++)
    NEED(0 < INT64S(2)[i] && INT64S(2)[i] <= size, "no such stride");
  for (int64_t i = 0; i < groups; i++)
    NEED(0 <= INT64S(3)[i] && INT64S(3)[i] <= size && 0 <= INT64S(4)[i] &&
             INT64S(4)[i] <= INT32_MAX,
         "quota and slack are numbers of elements");
  c->scratch_bytes += 8 * groups + 8 * size;
  TRY(gives_vector(c, 0, UINT8, bytes));
  TRY(gives_number(c, 1, INT64));
  TRY(gives_number(c, 2, INT64));
  TRY(gives_vector(c, 3, INT64, layers));
  TRY(gives_vector(c, 4, FLOAT, groups));
  for (int64_t i = 5; i < c->n_out - checks; i++) TRY(gives_like(c, i, 2 + i));
  return checks ? gives_number(c, c->n_out - 1, BOOL) : 0;
}

static int run_topk_write(call *c) {
  form as;
  char *rest;
  int64_t bytes, *offsets, total = 0, all_elements = 0;
  (void)form_of(c, 0, &as, &bytes);
  const place where = open_bucket(c, 0, &offsets, &rest);
  const int64_t *sizes = INT64S(0) + 2, *k = INT64S(3), *slack = INT64S(4);
  int64_t step = c->ints[0], whole = c->ints[1] != 0, *per_layer = OUT(int64_t, 3);
  int threads = (int)c->threads, looks = c->n_out == 5, finite = 1;
  int checks = c->n_out > 5 + (*c->floats != 0 ? 2 : 1);
  for (int64_t i = 0; i < where.layers; i++) all_elements += sizes[i];
  const collecting how = {(float)*c->floats, c->ints[2] != 0, c->ints[3] != 0};
  const scope of = {where, offsets, sizes, INT64S(2), all_elements, (int32_t)whole};
  int64_t *count = (int64_t *)rest;
  uint32_t *index = (uint32_t *)(count + (whole ? 1 : where.layers)), *bits = index + where.size;
  const elements found = {index, bits, count};
  float *r = looks ? NULL : OUT(float, 5), *u = looks || *c->floats == 0 ? NULL : OUT(float, 6);
  TRY(topk_find(&how, &of, r, u, FLOATS(7), c->n_in > 8 ? FLOATS(8) : NULL, FLOATS(6), k, slack,
                FLOATS(5), &found, checks ? &finite : NULL, threads));
  if (checks) *OUT(uint8_t, c->n_out - 1) = finite != 0;
  if (!finite) return 0;
  topk_again(&of, looks ? FLOATS(7) : r, looks ? FLOATS(6) : NULL, k, slack, &found, threads);
  memcpy(OUT(float, 4), FLOATS(5), 4 * (size_t)c->in[5].length);
  int64_t chosen = topk_choose(&of, step, k, &found, OUT(float, 4), threads);
  topk_write(&of, &as, &found, chosen, OUT(uint8_t, 0), per_layer, threads);
  if (c->ints[4] && !looks) topk_commit(&how, &where, &as, OUT(uint8_t, 0), r, u, threads);
  for (int64_t i = 0; i < where.layers; i++) total += per_layer[i];
  *OUT(int64_t, 1) = total;
  *OUT(int64_t, 2) = chosen;
  return 0;
}

/* Checks the body that input 2 is. */
static int plan_body(call *c, form *as) {
  int64_t bytes;
  TRY(plan_bucket(c));
  TRY(form_of(c, 0, as, &bytes));
  return is_vector(c, 2, UINT8, bytes);
}

/* Lays open the bucket and the form; `rest`: see `open_bucket`. */
static place open_form(call *c, form *as, char **rest) {
  int64_t bytes;
  (void)form_of(c, 0, as, &bytes);
  return open_bucket(c, 0, NULL, rest);
}

/* bucket, form, body; masking -> r[, u], of which the body's elements are committed */
static int plan_topk_commit(call *c) {
  form as;
  TRY(takes(c, 3, 1, 0));
  TRY(plan_body(c, &as));
  NEED(c->n_out == 1 || c->n_out == 2, "a memory of one or two tensors");
  for (int64_t i = 0; i < c->n_out; i++) TRY(gives_vector(c, i, FLOAT, *INT64S(0)));
  return 0;
}

static int run_topk_commit(call *c) {
  form as;
  const collecting how = {.masking = *c->ints != 0};
  const place where = open_form(c, &as, NULL);
  topk_commit(&how, &where, &as, BYTES(2), OUT(float, 0), c->n_out == 2 ? OUT(float, 1) : NULL,
              (int)c->threads);
  return 0;
}

/* bucket, form, bodies, weights, out -> total */
static int plan_topk_add(call *c) {
  form as;
  int64_t bytes;
  TRY(takes(c, 5, 0, 0));
  TRY(plan_bucket(c));
  TRY(form_of(c, 1, &as, &bytes));
  TRY(is_vector(c, 3, FLOAT, ANY));
  TRY(is(c, 2, UINT8, 2, c->in[3].length, bytes));
  NEED(c->in[2].stride % 4 == 0, "bodies are whole words");
  TRY(is_vector(c, 4, FLOAT, *INT64S(0)));
  return gives_like(c, 0, 4);
}

static int run_topk_add(call *c) {
  form as;
  const place where = open_form(c, &as, NULL);
  return topk_add(&where, &as, BYTES(2), c->in[2].stride, c->in[2].rows, FLOATS(3), OUT(float, 0),
                  (int)c->threads);
}

/* bucket, form, body, r, gradient -> values */
static int plan_topk_values(call *c) {
  form as;
  TRY(takes(c, 5, 0, 0));
  TRY(plan_body(c, &as));
  for (int i = 3; i < 5; i++) TRY(is_vector(c, i, FLOAT, *INT64S(0)));
  return gives_vector(c, 0, FLOAT, as.capacity);
}

static int run_topk_values(call *c) {
  form as;
  const place where = open_form(c, &as, NULL);
  return topk_values(&where, &as, BYTES(2), FLOATS(3), FLOATS(4), OUT(float, 0), (int)c->threads);
}

/* bucket, form, body, r, gradient, total; beta, keeps -> mean, r, per_layer */
static int plan_topk_replace(call *c) {
  form as;
  TRY(takes(c, 6, 0, 2));
  TRY(plan_body(c, &as));
  for (int i = 3; i < 5; i++) TRY(is_vector(c, i, FLOAT, *INT64S(0)));
  TRY(is_vector(c, 5, FLOAT, as.capacity));
  c->scratch_bytes += 4 * as.capacity;
  TRY(gives_like(c, 0, 4));
  TRY(gives_like(c, 1, 3));
  return gives_vector(c, 2, INT64, LAYERS(0));
}

static int run_topk_replace(call *c) {
  form as;
  char *kept;
  const place where = open_form(c, &as, &kept);
  return topk_replace(&where, &as, BYTES(2), FLOATS(5), (float)c->floats[0], (float)c->floats[1],
                      (float *)kept, OUT(float, 1), FLOATS(3), OUT(float, 0), FLOATS(4),
                      OUT(int64_t, 2), (int)c->threads);
}

/* -- the table ------------------------------------------------------------------------------- */

typedef struct {
  const char *name;
  int (*plan)(call *), (*run)(call *);
} kernel;

#define KERNEL(name) {#name, plan_##name, run_##name}

static const kernel KERNELS[] = {
    KERNEL(gather),
    KERNEL(fill_at),
    KERNEL(add_at),
    KERNEL(sort),
    KERNEL(merge_rows),
    KERNEL(add_momentum),
    KERNEL(accumulate),
    KERNEL(finite),
    KERNEL(sum_finite),
    KERNEL(bit_planes),
    KERNEL(from_bit_planes),
    KERNEL(encode_ascending),
    KERNEL(decode_ascending),
    KERNEL(encode_words),
    KERNEL(decode_words),
    KERNEL(frame),
    KERNEL(examine),
    KERNEL(key),
    {"group_maxima", plan_of_groups, run_group_maxima},
    {"group_squares", plan_of_groups, run_group_squares},
    {"group_means", plan_of_groups, run_group_means},
    KERNEL(encode_bins),
    KERNEL(decode_bins),
    KERNEL(peaks),
    KERNEL(layer_histograms),
    KERNEL(encode_levels),
    KERNEL(add_levels),
    KERNEL(encode_floats),
    KERNEL(encode_bfloat16),
    KERNEL(encode_peaks),
    KERNEL(encode_e4m3),
    KERNEL(add_floats),
    KERNEL(encode_powers),
    KERNEL(add_powers),
    KERNEL(encode_signs),
    KERNEL(add_signs),
    KERNEL(momentum_signs),
    KERNEL(majority),
    KERNEL(turn_tiles),
    KERNEL(multiply_factors),
    KERNEL(orthogonalize_factors),
    KERNEL(expand_factors),
    KERNEL(largest_of_rows),
    KERNEL(accumulate_largest),
    KERNEL(add_in_rows),
    KERNEL(next_level),
    KERNEL(threshold_write),
    KERNEL(threshold_commit),
    KERNEL(threshold_add),
    KERNEL(topk_write),
    KERNEL(topk_commit),
    KERNEL(topk_add),
    KERNEL(topk_values),
    KERNEL(topk_replace),
};

PUBLIC int kernel_number(const char *name) {
  int count = (int)(sizeof KERNELS / sizeof *KERNELS), i = 0;
  while (i < count && strcmp(KERNELS[i].name, name)) i++;
  return i < count ? i : -1;
}

int kernel_plan(int number, call *c) { return KERNELS[number].plan(c); }

int kernel_run(int number, call *c) { return KERNELS[number].run(c); }

PUBLIC int64_t kernel_call(int number, buffer *buffers, const int64_t *sizes, const int64_t *ints,
                           const double *floats, void *scratch) {
  call c = {buffers, buffers + sizes[0], ints,     floats,  sizes[0], sizes[1],
            sizes[2], sizes[3],          scratch, 0,       sizes[5]};
  int failed = kernel_plan(number, &c);
  if (failed) return failed;
  return c.scratch_bytes > sizes[4] ? c.scratch_bytes : kernel_run(number, &c);
}
