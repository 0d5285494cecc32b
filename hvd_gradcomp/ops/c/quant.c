/* Composites of ops/interface/ in one pass each, for tensors on a CPU.
 *
 * Every result equals the composite's to the bit: the same operations in the same order, no fused
 * multiply-add (compiled with -ffp-contract=off), sums folded in halves. No Python, no framework;
 * calls.c has the table of them.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#ifdef __x86_64__
#include <cpuid.h>

/* clang before 16 does not know the name for `__builtin_cpu_supports`. */
static int has_f16c;
__attribute__((constructor)) static void look_for_f16c(void) {
  unsigned a, b, c = 0, d;
  has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#define GROUP 32
#define CHUNK 4096
#define TINY 0x1p-100f
#define MANY (1 << 18) /* words, from which on threads pay */
#define NEAR (1 << 14) /* elements that are read again soon after the values of their groups */

/* Fetches what is read after the next NEAR elements: codes take longer than reading does. */
static inline void fetch_after(const float *x) {
  __builtin_prefetch((const void *)((uintptr_t)x + sizeof(float) * NEAR), 0, 2);
  __builtin_prefetch((const void *)((uintptr_t)x + sizeof(float) * (NEAR + 16)), 0, 2);
}

/* Fetches codes that are read soon: of several ranks, they come too late by themselves. */
static inline void fetch_ahead(const uint8_t *codes) {
  __builtin_prefetch((const void *)((uintptr_t)codes + 2048), 0, 3);
}

/* -- momentum ------------------------------------------------------------------------------ */

FAST void add_momentum(float *r, float *u, const float *r0, const float *u0, const float *g,
                       int64_t n, float momentum, int nesterov) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float next = u0[i] * momentum;
    next = next + g[i];
    u[i] = next;
    float ahead = next * momentum;
    ahead = ahead + g[i];
    r[i] = r0[i] + (nesterov ? ahead : next);
  }
}

/* x may be out. */
FAST void add_vectors(const float *x, const float *y, float *out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}

#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define BEST(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_plainly)
#else
#define BEST(name) name##_plainly
#endif

/* By the bits from `first` on, 11 at a time; equal ones stay in order. Returns x or other, which has
 * as much room. */
static int64_t *sort_from(int64_t *x, int64_t n, int first, int64_t *other) {
  int64_t *from = x, *to = other;
  uint64_t all = 0;
  for (int64_t i = 0; i < n; i++) all |= (uint64_t)x[i];
  for (int shift = first; shift < 63 && all >> shift; shift += 11) {
    int64_t starts[2049] = {0};
    for (int64_t i = 0; i < n; i++) starts[(from[i] >> shift & 2047) + 1]++;
    for (int digit = 0; digit < 2048; digit++) starts[digit + 1] += starts[digit];
    for (int64_t i = 0; i < n; i++) to[starts[from[i] >> shift & 2047]++] = from[i];
    int64_t *done = to;
    to = from;
    from = done;
  }
  return from;
}

/* Ascending, of what is not negative; 0, or -1 without memory. */
int sort(int64_t *x, int64_t n) {
  int64_t *other = malloc(sizeof(int64_t) * (size_t)(n ? n : 1));
  if (!other) return -1;
  if (sort_from(x, n, 0, other) != x) memcpy(x, other, sizeof(int64_t) * (size_t)n);
  free(other);
  return 0;
}

/* Adds up the values at each place, in their order; ascending places, then sinks with 0.
 *
 * scratch: room for 2 * n. Returns 0, or BEYOND at an index beyond the sink.
 */
int merge_rows(const int64_t *index, const float *values, int64_t n, int64_t sink,
               int64_t *scratch, int64_t *places, float *totals) {
  int64_t at = -1;
  int bits = 0;
  while (n >> bits) bits++;
  for (int64_t i = 0; i < n; i++) {
    if (index[i] < 0 || index[i] > sink) return BEYOND;
    scratch[i] = index[i] << bits | i;
  }
  const int64_t *keys = sort_from(scratch, n, bits, scratch + n);
  for (int64_t i = 0; i < n; i++) {
    const int64_t place = keys[i] >> bits;
    if (at < 0 || places[at] != place) {
      places[++at] = place;
      totals[at] = 0;
    }
    totals[at] += values[keys[i] & (((int64_t)1 << bits) - 1)];
  }
  while (++at < n) {
    places[at] = sink;
    totals[at] = 0;
  }
  return 0;
}

/* -- single elements, far apart ------------------------------------------------------------ */

/* Fetched ahead; 0, or BEYOND at the first index that is not below size. */
#define AHEAD 24
#define EACH_INDEX(does)                                                 \
  for (int64_t i = 0; i < n; i++) {                                      \
    __builtin_prefetch(x + index[i + AHEAD < n ? i + AHEAD : i], 1);     \
    if ((uint64_t)index[i] >= (uint64_t)size) return BEYOND;                 \
    does;                                                                \
  }                                                                      \
  return 0;

int gather(const float *x, int64_t size, const int64_t *index, int64_t n, float *out) {
  EACH_INDEX(out[i] = x[index[i]])
}

int fill_at(float *x, int64_t size, const int64_t *index, int64_t n, float value) {
  EACH_INDEX(x[index[i]] = value)
}

int add_at(float *x, int64_t size, const int64_t *index, int64_t n, const float *values) {
  EACH_INDEX(x[index[i]] += values[i])
}

/* -- transposition --------------------------------------------------------------------------- */

#define EDGE 16 /* elements of a cache line */
#define TALL 64 /* rows, each of which lies in another page, that are read in turn */

/* Sixteen rows of sixteen, read from `from`, become columns of what is written to `to`. */
static void turn_plainly(const float *const *from, float *const *to) {
  for (int j = 0; j < EDGE; j++)
    for (int i = 0; i < EDGE; i++) to[j][i] = from[i][j];
}

#ifdef __x86_64__
/* Four times, what lies in row i and column k goes to the place whose bits are those of (i, k),
 * rotated by one: afterwards i and k have changed places.
 *
 * past: whether it is written past the caches, which would read each line first; to whole lines.
 */
__attribute__((target("avx512f"))) static void turn_avx512(const float *const *from,
                                                            float *const *to, int past) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512 x[EDGE], y[EDGE];
  for (int i = 0; i < EDGE; i++) {
    x[i] = _mm512_loadu_ps(from[i]);
    __builtin_prefetch(from[i] + 2 * EDGE);
  }
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; stage++) {
#pragma GCC unroll 8
    for (int i = 0; i < EDGE / 2; i++) {
      y[2 * i] = _mm512_permutex2var_ps(x[i], low, x[i + EDGE / 2]);
      y[2 * i + 1] = _mm512_permutex2var_ps(x[i], high, x[i + EDGE / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < EDGE; i++) x[i] = y[i];
  }
  for (int j = 0; j < EDGE; j++)
    if (past)
      _mm512_stream_ps(to[j], x[j]);
    else
      _mm512_storeu_ps(to[j], x[j]);
}
#endif

static void turn_tile(const float *const *from, float *const *to, int past) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) {
    turn_avx512(from, to, past);
    return;
  }
#endif
  (void)past;
  turn_plainly(from, to);
}

/* x [a, b, c] becomes out [c, b, a]; what lies in either at one place of its first axis is
 * contiguous, and `apart` elements from the next place.
 *
 * Of rows and columns that are far from each other: two axes are taken together, one of them the
 * shortest, and only whole rows change their places by it.
 *
 * past: whether out is not needed soon, and may be written past the caches.
 */
PUBLIC void reverse(const float *x, int64_t a, int64_t b, int64_t c, int64_t x_apart, float *out,
             int64_t out_apart, int past, int threads) {
  int wide = c > a; /* rows are of a and b, or of a alone */
  int64_t rows = wide ? a * b : a, columns = wide ? c : b * c;
  past = past && out_apart % EDGE == 0 && (wide || a % EDGE == 0) &&
         (uintptr_t)out % (4 * EDGE) == 0;
  if (a * b * c < MANY) threads = 1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t begin = border(columns, EDGE, t, threads), stop = border(columns, EDGE, t + 1, threads);
    for (int64_t top = 0, low; top < rows; top = low) {
      low = top + TALL < rows ? top + TALL : rows;
      for (int64_t left = begin, right; left < stop; left = right) {
        right = left + EDGE < stop ? left + EDGE : stop;
        float *to[EDGE];
        for (int64_t j = left; j < right; j++)
          to[j - left] = out + (wide ? j * out_apart : j % c * out_apart + j / c * a) + top;
        for (int64_t i = top; i < low; i += EDGE) {
          const float *from[EDGE];
          int64_t height = i + EDGE < low ? EDGE : low - i, width = right - left;
          for (int64_t k = i; k < i + height; k++)
            from[k - i] = x + (wide ? k % a * x_apart + k / a * c : k * x_apart) + left;
          if (height == EDGE && width == EDGE)
            turn_tile(from, to, past);
          else
            for (int64_t k = 0; k < height; k++)
              for (int64_t j = 0; j < width; j++) to[j][k] = from[k][j];
          for (int64_t j = 0; j < width; j++) to[j] += height;
        }
      }
    }
#ifdef __x86_64__
    if (past) _mm_sfence(); /* before other threads read it */
#endif
  }
}

/* -- packing ------------------------------------------------------------------------------- */

#define ONES 0x0101010101010101ull

/* Bit `plane` of 32 bytes as one word. */
static inline uint32_t gather_plane(const uint8_t *codes, int plane) {
  uint32_t word = 0;
  for (int part = 0; part < 4; part++) {
    uint64_t eight;
    memcpy(&eight, codes + 8 * part, 8);
    uint64_t bits = ((eight >> plane) & ONES) * 0x0102040810204080ull >> 56;
    word |= (uint32_t)bits << (8 * part);
  }
  return word;
}

/* codes [n] to words [n / 32 * bits]. */
static void pack_plainly(const uint8_t *codes, int64_t n, int bits, uint32_t *words) {
  for (int64_t g = 0; g < n / GROUP; g++)
    for (int plane = 0; plane < bits; plane++)
      words[g * bits + plane] = gather_plane(codes + g * GROUP, plane);
}

static void unpack_plainly(const uint32_t *words, int64_t n, int bits, uint8_t *codes) {
  for (int64_t g = 0; g < n / GROUP; g++) {
    uint64_t parts[4] = {0, 0, 0, 0};
    for (int plane = 0; plane < bits; plane++) {
      uint32_t word = words[g * bits + plane];
      for (int part = 0; part < 4; part++) {
        uint64_t spread = ((word >> (8 * part) & 255) * ONES) & 0x8040201008040201ull;
        spread = ((spread + 0x7f7f7f7f7f7f7f7full) >> 7) & ONES;
        parts[part] |= spread << plane;
      }
    }
    memcpy(codes + g * GROUP, parts, GROUP);
  }
}

#ifdef __x86_64__
AVX2 static void pack_avx2(const uint8_t *codes, int64_t n, int bits,
                                                      uint32_t *words) {
  for (int64_t g = 0; g < n / GROUP; g++) {
    __m256i v = _mm256_loadu_si256((const __m256i *)(codes + g * GROUP));
    for (int plane = 0; plane < bits; plane++)
      words[g * bits + plane] = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(v, 7 - plane));
  }
}

/* Swaps the bits of a mask with those `shift` above them. */
#define SWAP(v, shift, mask)                                                                 \
  do {                                                                                       \
    __m256i own = _mm256_set1_epi64x(mask);                                                  \
    __m256i differ = _mm256_and_si256(_mm256_xor_si256(v, _mm256_srli_epi64(v, shift)), own); \
    v = _mm256_xor_si256(v, _mm256_xor_si256(differ, _mm256_slli_epi64(differ, shift)));     \
  } while (0)

/* Of eight planes: eight codes are a square of 64 bits, which is transposed. */
AVX2 static void unpack_bytes_avx2(const uint32_t *words, int64_t n, uint8_t *codes) {
  const __m256i planes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4,
                                          8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m256i squares = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t i = 0; i < n; i += GROUP) {
    __m256i v = _mm256_loadu_si256((const __m256i *)(words + i / 4));
    v = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(v, planes), squares);
    SWAP(v, 7, 0x00aa00aa00aa00aall);
    SWAP(v, 14, 0x0000cccc0000ccccll);
    SWAP(v, 28, 0x00000000f0f0f0f0ll);
    _mm256_storeu_si256((__m256i *)(codes + i), v);
  }
}

AVX2 static void unpack_avx2(const uint32_t *words, int64_t n, int bits,
                                                        uint8_t *codes) {
  if (bits == 8) {
    unpack_bytes_avx2(words, n, codes);
    return;
  }
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                          2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i lanes = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  for (int64_t g = 0; g < n / GROUP; g++) {
    __m256i v = _mm256_setzero_si256();
    for (int plane = 0; plane < bits; plane++) {
      __m256i word = _mm256_set1_epi32((int)words[g * bits + plane]);
      __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(word, spread), lanes);
      __m256i set = _mm256_cmpeq_epi8(own, lanes);
      v = _mm256_or_si256(v, _mm256_and_si256(set, _mm256_set1_epi8((char)(1 << plane))));
    }
    _mm256_storeu_si256((__m256i *)(codes + g * GROUP), v);
  }
}

#define GFNI __attribute__((target("avx2,gfni")))
#define HAS_GFNI (__builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx2"))

/* Transposes squares of 8 x 8 bits, whose last row comes first. */
GFNI static inline __m256i transposed(__m256i squares) {
  const __m256i columns = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  return _mm256_gf2p8affine_epi64_epi8(columns, squares, 0);
}

GFNI static inline __m256i unpacked_bytes(const uint32_t *words) {
  const __m256i rows = _mm256_setr_epi8(12, 8, 4, 0, 13, 9, 5, 1, 14, 10, 6, 2, 15, 11, 7, 3, 12, 8,
                                        4, 0, 13, 9, 5, 1, 14, 10, 6, 2, 15, 11, 7, 3);
  const __m256i squares = _mm256_setr_epi32(4, 0, 5, 1, 6, 2, 7, 3);
  const __m256i v = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)words), rows);
  return transposed(_mm256_permutevar8x32_epi32(v, squares));
}

GFNI static void pack_bytes_gfni(const uint8_t *codes, int64_t n, uint32_t *words) {
  const __m256i last_first = _mm256_setr_epi8(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8,
                                              7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
  const __m256i halves = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i planes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4,
                                          8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t i = 0; i < n; i += GROUP) {
    const __m256i v = _mm256_loadu_si256((const __m256i *)(codes + i));
    const __m256i square = transposed(_mm256_shuffle_epi8(v, last_first));
    _mm256_storeu_si256(
        (__m256i *)(words + i / 4),
        _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(square, halves), planes));
  }
}

__attribute__((target("avx512bw,avx512vl"))) static void unpack_avx512(const uint32_t *words,
                                                                        int64_t n, int bits,
                                                                        uint8_t *codes) {
  for (int64_t g = 0; g < n / GROUP; g++) {
    __m256i v = _mm256_setzero_si256();
    for (int plane = 0; plane < bits; plane++) {
      const __m256i bit = _mm256_set1_epi8((char)(1 << plane));
      v = _mm256_mask_add_epi8(v, words[g * bits + plane], v, bit);
    }
    _mm256_storeu_si256((__m256i *)(codes + g * GROUP), v);
  }
}
#endif

void pack_codes(const uint8_t *codes, int64_t n, int bits, uint32_t *words) {
#ifdef __x86_64__
  if (bits == 8 && HAS_GFNI) {
    pack_bytes_gfni(codes, n, words);
    return;
  }
#endif
  BEST(pack)(codes, n, bits, words);
}

void unpack_codes(const uint32_t *words, int64_t n, int bits, uint8_t *codes) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    unpack_avx512(words, n, bits, codes);
    return;
  }
#endif
  BEST(unpack)(words, n, bits, codes);
}

/* Codes that are packed for n of them: whole groups. */
static int64_t whole_groups(int64_t n) { return (n + GROUP - 1) / GROUP * GROUP; }

/* The same for integers of any width: [m, 32] to [m, bits] and back. */
FAST void bit_planes(const int64_t *groups, int64_t m, int bits, int64_t *planes) {
  for (int64_t g = 0; g < m; g++) {
    uint32_t codes[GROUP];
    for (int lane = 0; lane < GROUP; lane++) codes[lane] = (uint32_t)groups[g * GROUP + lane];
    for (int plane = 0; plane < bits; plane++) {
      uint32_t word = 0;
      for (int lane = 0; lane < GROUP; lane++) word |= (codes[lane] >> plane & 1) << lane;
      planes[g * bits + plane] = word;
    }
  }
}

FAST void from_bit_planes(const int64_t *planes, int64_t m, int bits, int64_t *groups) {
  for (int64_t g = 0; g < m; g++) {
    uint32_t codes[GROUP] = {0};
    for (int plane = 0; plane < bits; plane++) {
      uint32_t word = (uint32_t)planes[g * bits + plane];
      for (int lane = 0; lane < GROUP; lane++) codes[lane] |= (word >> lane & 1) << plane;
    }
    for (int lane = 0; lane < GROUP; lane++) groups[g * GROUP + lane] = codes[lane];
  }
}

#define SIDE_BY_SIDE 64 /* words that are summed at the same time */

/* With the sums of each lane after each row in `later`, no word is multiplied: a word in row k of n
 * is in n - k of them.
 */
FAST static uint32_t weighted(const uint32_t *words, int64_t n, int64_t place) {
  uint32_t sums[SIDE_BY_SIDE] = {0}, later[SIDE_BY_SIDE] = {0};
  uint32_t sum = 0, first = (uint32_t)(2 * place + 17);
  int64_t rows = n / SIDE_BY_SIDE;
  for (int64_t row = 0; row < rows; row++, words += SIDE_BY_SIDE)
    for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
      sums[lane] += words[lane];
      later[lane] += sums[lane];
    }
  for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
    uint32_t by_row = (uint32_t)rows * sums[lane] - later[lane];
    sum += (first + 2 * (uint32_t)lane) * sums[lane] + 2 * SIDE_BY_SIDE * by_row;
  }
  first += 2 * SIDE_BY_SIDE * (uint32_t)rows;
  for (int64_t i = 0; i < n % SIDE_BY_SIDE; i++) sum += words[i] * (first + 2 * (uint32_t)i);
  return sum;
}

/* Sum of words from one on, each times 2 * place + 17, modulo 2**32. */
uint32_t weighted_sum(const uint32_t *words, int64_t first, int64_t stop, int threads) {
  uint32_t sum = 0;
  int64_t n = stop - first;
  if (n < MANY) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : sum)
  for (int t = 0; t < threads; t++) {
    int64_t begin = first + border(n, CHUNK, t, threads);
    sum += weighted(words + begin, first + border(n, CHUNK, t + 1, threads) - begin, begin);
  }
  return sum;
}

/* -- frames -------------------------------------------------------------------------------- */

/* The weighted sum of a frame's words, and of its body. */
uint32_t frame_sum(const uint32_t *words, int64_t count, const uint32_t *body, int64_t n,
                   int threads) {
  uint32_t sum = weighted_sum(body, 0, n, threads);
  for (int64_t i = 0; i < count; i++) sum += words[i] * (uint32_t)(2 * i + 1);
  return sum;
}

/* Copies a part to the body of a frame, from byte `at` on, unless it is there.
 *
 * Returns the weighted sum of the words that it completes.
 */
uint32_t copy_summed(uint8_t *body, int64_t at, const uint8_t *part, int64_t bytes, int threads) {
  uint32_t sum = 0;
  if (body + at == part || bytes < MUCH || at % 4 || bytes % 4 || (uintptr_t)part % 4) {
    if (body + at != part && bytes) memcpy(body + at, part, (size_t)bytes);
    return weighted_sum((const uint32_t *)body, at / 4, (at + bytes) / 4, threads);
  }
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : sum)
  for (int t = 0; t < threads; t++) {
    int64_t stop = border(bytes, 4 * CHUNK, t + 1, threads), size;
    for (int64_t from = border(bytes, 4 * CHUNK, t, threads); from < stop; from += size) {
      size = from + 4 * CHUNK < stop ? 4 * CHUNK : stop - from;
      sum += weighted((const uint32_t *)(part + from), size / 4, (at + from) / 4);
      write_past(body + at + from, part + from, size);
    }
    written_past();
  }
  return sum;
}

/* What frames say, and what is right about it; see `Headers.examine`.
 *
 * frames: `stride` words apart, of `length` words: `count` words, their sum, and a body.
 * words [rows, count]. held [fields + 1, rows]: of the sums, and of each field.
 */
void examine(const uint32_t *frames, int64_t rows, int64_t stride, int64_t length, int64_t count,
             const field *fields, int64_t number, const int64_t *expected, int64_t *words,
             uint8_t *held, int threads) {
  for (int64_t row = 0; row < rows; row++, frames += stride, words += count) {
    const uint32_t *body = frames + count + 1;
    held[row] = frames[count] == frame_sum(frames, count, body, length - count - 1, threads);
    for (int64_t i = 0; i < count; i++) words[i] = frames[i];
    for (int64_t i = 0; i < number; i++) {
      int64_t said = words[fields[i].word] >> fields[i].low & (((int64_t)1 << fields[i].bits) - 1);
      held[(i + 1) * rows + row] = said == expected[i];
    }
  }
}

/* -- what is not finite ---------------------------------------------------------------------- */

/* The largest magnitude, as bits: beyond that of finite numbers lie infinities and NaNs. */
FAST static int32_t largest_bits(const float *x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return most;
}

/* Whether there is neither a NaN nor an infinity. */
int all_finite(const float *x, int64_t n, int threads) {
  int finite = 1;
  if (n < MANY) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(& : finite)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads);
    finite &= largest_bits(x + start, stop - start) < 0x7f800000;
  }
  return finite;
}

#define LANES 64

FAST float sum_of(const float *x, int64_t n, int squares) {
  float lanes[LANES] = {0.0f}, total = 0.0f;
  int64_t whole = n / LANES * LANES;
  for (int64_t i = 0; i < whole && squares; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * x[i + lane];
  for (int64_t i = 0; i < whole && !squares; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane];
  for (int64_t lane = 0; lane < LANES; lane++) total += lanes[lane];
  for (int64_t i = whole; i < n; i++) total += squares ? x[i] * x[i] : x[i];
  return total;
}

/* Whether the sum of x, or of its squares, is finite times 4096. */
int sum_finite(const float *x, int64_t n, int squares, int threads) {
  float total = 0.0f;
  if (n < MANY) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : total)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads);
    total += sum_of(x + start, stop - start, squares);
  }
  return isfinite(total * 4096.0f) != 0;
}

/* -- sums and extremes of groups ------------------------------------------------------------- */

/* x[0..n) is folded in halves, in place; the sum is x[0]. */
FAST static void fold(float *x, int64_t n) {
  while (n > 1) {
    int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) x[i] = x[i] + x[half + i];
    if (n % 2) x[0] = x[0] + x[n - 1];
    n = half;
  }
}

FAST static float largest_magnitude(const float *x, int64_t n) {
  /* Magnitudes order like their bits, and integers have a vector maximum. */
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float value;
  memcpy(&value, &largest, 4);
  return value;
}

/* Of which band a group is: its elements, and how many. */
static const float *group_of(const band *bands, const float *x, int64_t group, int64_t *length) {
  while (group >= bands->rows) group -= (bands++)->rows;
  *length = bands->length;
  return x + bands->start + group * bands->length;
}

/* The first group of piece t: pieces have whole groups, and about as many elements each. */
static int64_t group_border(const band *bands, int64_t count, int t, int pieces) {
  int64_t all = 0, group = 0;
  for (int64_t b = 0; b < count; b++) all += bands[b].rows * bands[b].length;
  int64_t before = (int64_t)((__int128)all * t / pieces);
  for (int64_t b = 0; b < count; group += bands[b++].rows) {
    int64_t own = bands[b].rows * bands[b].length;
    if (before < own) return group + (before + bands[b].length / 2) / bands[b].length;
    before -= own;
  }
  return group;
}

void group_maxima(const band *bands, int64_t count, const float *x, float *out, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t end = group_border(bands, count, t + 1, threads);
    for (int64_t g = group_border(bands, count, t, threads); g < end; g++) {
      int64_t n;
      const float *group = group_of(bands, x, g, &n);
      out[g] = largest_magnitude(group, n);
    }
  }
}

static int64_t longest(const band *bands, int64_t count) {
  int64_t most = 1;
  for (int64_t b = 0; b < count; b++)
    if (bands[b].length > most) most = bands[b].length;
  return most;
}

FAST static void squares(const float *x, int64_t n, float *out) {
  /* The first fold, while squaring: half the memory. */
  int64_t half = n / 2;
  if (n == 1) out[0] = x[0] * x[0];
  for (int64_t i = 0; i < half; i++) out[i] = x[i] * x[i] + x[half + i] * x[half + i];
  if (n > 1 && n % 2) out[0] = out[0] + x[n - 1] * x[n - 1];
}

FAST static void sums(const float *x, int64_t n, float *out) {
  int64_t half = n / 2;
  if (n == 1) out[0] = x[0];
  for (int64_t i = 0; i < half; i++) out[i] = x[i] + x[half + i];
  if (n > 1 && n % 2) out[0] = out[0] + x[n - 1];
}

/* Folds each group to one number; `first` makes the first fold; a mean is divided by the length. */
static int fold_groups(const band *bands, int64_t count, const float *x, float *out, int threads,
                       void (*first)(const float *, int64_t, float *), int mean) {
  int64_t half = longest(bands, count) / 2 + 1;
  float *room = malloc(sizeof(float) * (size_t)(half * threads));
  if (!room) return -1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t end = group_border(bands, count, t + 1, threads);
    for (int64_t g = group_border(bands, count, t, threads); g < end; g++) {
      float *scratch = room + half * t;
      int64_t n;
      const float *group = group_of(bands, x, g, &n);
      first(group, n, scratch);
      fold(scratch, n > 1 ? n / 2 : 1);
      out[g] = mean ? scratch[0] / (float)n : scratch[0];
    }
  }
  free(room);
  return 0;
}

int group_squares(const band *bands, int64_t count, const float *x, float *out, int threads) {
  return fold_groups(bands, count, x, out, threads, squares, 0);
}

int group_means(const band *bands, int64_t count, const float *x, float *out, int threads) {
  return fold_groups(bands, count, x, out, threads, sums, 1);
}

/* -- bins of equal width ---------------------------------------------------------------------- */

/* What is known of a group of values; see `_parts_of_peaks` in interface/quantization.py. */
typedef struct {
  int64_t entries, first, number, sum, squares;
  uint32_t top;
  float up, down, mean, per_unit;
} bin_group;

/* Exact in steps of 2**-bits; what is not a number is lost. */
static inline int64_t in_steps(float x, int bits) {
  float scaled = x * (float)((int64_t)1 << bits), most = (float)((int64_t)1 << 62);
  return scaled > -most && scaled < most ? (int64_t)scaled : 0;
}

static float mean_of(int64_t sum, int64_t number, int bits) {
  return (float)sum * (1.0f / (float)((int64_t)1 << bits)) / (float)(number > 1 ? number : 1);
}

static float power_of_two(uint32_t biased) {
  uint32_t bits = biased << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

/* Where the run of members of one group ends that begins at i; which it is, or NULL for none. */
static int64_t run_of(const int64_t *group, int64_t i, int64_t n, bin_group *groups, int64_t count,
                      bin_group **own) {
  const int64_t g = group[i];
  *own = g >= 0 && g < count ? groups + g : NULL;
  while (++i < n && group[i] == g) continue;
  return i;
}

static bin_group *bin_groups(const int64_t *entries, int64_t count) {
  bin_group *groups = calloc((size_t)count + 1, sizeof *groups);
  int64_t first = 0;
  for (int64_t g = 0; groups && g < count; first += entries[g++])
    groups[g].entries = entries[g], groups[g].first = first;
  return groups;
}

FAST static void bin_codes(const float *part, int64_t n, float mean, float per_unit, int bins,
                           uint8_t *codes) {
  float middle = (float)bins / 2.0f, most = (float)bins - 1.0f;
  for (int64_t i = 0; i < n; i++) {
    float height = (part[i] - mean) * per_unit;
    height = height + middle;
    height = height > 0.0f ? height : 0.0f;
    codes[i] = (uint8_t)(height < most ? height : most);
  }
}

/* The largest exponent, and how many there are. */
FAST static void see_run(const float *x, int64_t n, bin_group *own) {
  uint32_t top = own->top;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits = bits << 1 >> 24;
    top = bits > top ? bits : top;
  }
  own->top = top, own->number += n;
}

/* Packed codes of n values, means [sum of entries]; see interface/quantization.py. */
int encode_bins(const float *x, const int64_t *group, int64_t n, const int64_t *entries,
                int64_t count, int bits, uint32_t *words, float *means, int64_t total) {
  const int64_t all = whole_groups(n);
  const int bins = 1 << bits;
  bin_group *groups = bin_groups(entries, count), *own;
  int64_t *sums = calloc((size_t)total * 2 + 1, sizeof *sums), *numbers = sums + total;
  float *part = malloc(sizeof(float) * (size_t)n + (size_t)all + 1);
  if (!groups || !sums || !part) {
    free(groups), free(sums), free(part);
    return NO_MEMORY;
  }
  uint8_t *codes = (uint8_t *)(part + n);
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (own) see_run(x + i, end - i, own);
  }
  for (int64_t g = 0; g < count; g++) {
    uint32_t top = groups[g].top < 253 ? groups[g].top : 253;
    int used = groups[g].top >= 127 - 88;
    groups[g].up = used ? power_of_two(top) : 0.0f;
    groups[g].down = used ? power_of_two(254 - top) : 0.0f;
  }
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own) continue;
    int64_t sum = 0;
    for (int64_t j = i; j < end; j++) {
      part[j] = x[j] * own->down;
      sum += in_steps(part[j], 38);
    }
    own->sum += sum;
  }
  for (int64_t g = 0; g < count; g++) groups[g].mean = mean_of(groups[g].sum, groups[g].number, 38);
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own) continue;
    int64_t sum = 0;
    for (int64_t j = i; j < end; j++) {
      float apart = part[j] - own->mean;
      sum += in_steps(apart * apart, 34);
    }
    own->squares += sum;
  }
  for (int64_t g = 0; g < count; g++) {
    float variance = mean_of(groups[g].squares, groups[g].number, 34);
    float deviation = (float)sqrt((double)variance);
    groups[g].per_unit = (deviation >= TINY ? 1.0f / deviation : 0.0f) * (float)(bins / 6.0);
    groups[g].number = 0;  /* from here on the rank of the next member */
  }
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own) {
      memset(codes + i, 0, (size_t)(end - i));
      continue;
    }
    if (own->entries == bins)
      bin_codes(part + i, end - i, own->mean, own->per_unit, bins, codes + i);
    else
      for (int64_t j = i; j < end; j++, own->number++)
        codes[j] = (uint8_t)(own->number < own->entries ? own->number : own->entries - 1);
    int64_t *sum = sums + own->first, *number = numbers + own->first;
    for (int64_t j = i; j < end; j++) sum[codes[j]] += in_steps(part[j], 38), number[codes[j]]++;
  }
  for (int64_t g = 0; g < count; g++)
    for (int64_t e = groups[g].first; e < groups[g].first + groups[g].entries; e++)
      means[e] = mean_of(sums[e], numbers[e], 38) * groups[g].up;
  memset(codes + n, 0, (size_t)(all - n));
  pack_codes(codes, all, bits, words);
  free(groups), free(sums), free(part);
  return 0;
}

/* What bins are decoded as. */
static void of_bins_plainly(const uint8_t *codes, const float *means, int64_t n, int bits,
                            float *out) {
  (void)bits;
  for (int64_t i = 0; i < n; i++) out[i] = means[codes[i]];
}

#ifdef __x86_64__
/* Up to 16 means are two registers, of which codes choose. */
AVX2 static void of_bins_avx2(const uint8_t *codes, const float *means, int64_t n, int bits,
                              float *out) {
  float table[16];
  int64_t i = 0;
  if (bits <= 4) {
    for (int code = 0; code < 16; code++) table[code] = means[code & ((1 << bits) - 1)];
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    for (; i + 8 <= n; i += 8) {
      const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                                 _mm256_permutevar8x32_ps(high, code), upper));
    }
  }
  of_bins_plainly(codes + i, means, n - i, bits, out + i);
}
#endif

int decode_bins(const uint32_t *words, const float *means, const int64_t *group, int64_t n,
                const int64_t *entries, int64_t count, int bits, float *out) {
  bin_group *groups = bin_groups(entries, count), *own;
  uint8_t *codes = malloc((size_t)whole_groups(n) + 1);
  if (!groups || !codes) {
    free(groups), free(codes);
    return NO_MEMORY;
  }
  unpack_codes(words, whole_groups(n), bits, codes);
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own)
      memset(out + i, 0, sizeof(float) * (size_t)(end - i));
    else if (own->entries == 1 << bits)
      BEST(of_bins)(codes + i, means + own->first, end - i, bits, out + i);
    else
      for (int64_t j = i; j < end; j++)
        out[j] = means[own->first + (codes[j] < own->entries ? codes[j] : own->entries - 1)];
  }
  free(groups), free(codes);
  return 0;
}

#define NOT_BELOW(x) ((x) < 0.0f ? 0.0f : (x))
#define BELOW(x) ((x) < 0.0f ? (x) : 0.0f)
#define IS_BELOW(x) ((x) < 0.0f)
#define OF_TWO(side, i, apart) (side(x[i]) + side(x[(i) + (apart)]))
#define OF_FOUR(side, i) (OF_TWO(side, i, 4 * part) + OF_TWO(side, (i) + 2 * part, 4 * part))
#define OF_EIGHT(side, i) (OF_FOUR(side, i) + OF_FOUR(side, (i) + part))

/* What is not negative and what is, folded in halves: three times where it can be, else once.
 *
 * Returns how long that is. negative: how many were.
 */
FAST static int64_t split(const float *restrict x, int64_t n, float *restrict above,
                          float *restrict below, int64_t *negative) {
  int64_t part = n % 8 ? 0 : n / 8, half = n % 8 ? n / 2 : 0;
  int32_t count = 0;
  for (int64_t i = 0; i < part; i++) {
    above[i] = OF_EIGHT(NOT_BELOW, i);
    below[i] = OF_EIGHT(BELOW, i);
    count += OF_EIGHT(IS_BELOW, i);
  }
  for (int64_t i = 0; i < half; i++) {
    above[i] = OF_TWO(NOT_BELOW, i, half);
    below[i] = OF_TWO(BELOW, i, half);
    count += OF_TWO(IS_BELOW, i, half);
  }
  if (n % 2) {
    float last = x[n - 1];
    above[0] = n == 1 ? NOT_BELOW(last) : above[0] + NOT_BELOW(last);
    below[0] = n == 1 ? BELOW(last) : below[0] + BELOW(last);
    count += IS_BELOW(last);
  }
  *negative = count;
  return part ? part : half ? half : 1;
}

/* -- layers ---------------------------------------------------------------------------------- */

/* Integers that order like floats: of negative ones all bits but the sign are turned round. */
static inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

FAST static void extremes(const float *x, int64_t n, float *low, float *high) {
  int32_t least = INT32_MAX, most = INT32_MIN;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits = ordered(bits);
    least = bits < least ? bits : least;
    most = bits > most ? bits : most;
  }
  least = ordered(least), most = ordered(most);
  memcpy(low, &least, 4);
  memcpy(high, &most, 4);
}

FAST static int64_t count_from(const float *x, int64_t n, float first) {
  int64_t count = 0;
  for (int64_t at = 0, end; at < n; at = end) {
    int32_t here = 0;
    end = at + MANY < n ? at + MANY : n;
    for (int64_t i = at; i < end; i++) here += x[i] >= first;
    count += here;
  }
  return count;
}

/* counts [bins, layers]: how much of each layer lies in equal bins between its extremes. */
void layer_histograms(const band *bands, int64_t layers, const float *x, int64_t bins,
                      int64_t *counts, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t layer = 0; layer < layers; layer++) {
    const float *own = x + bands[layer].start;
    int64_t size = bands[layer].length, above = size;
    float low, high;
    extremes(own, above, &low, &high);
    float width = (high - low) / (float)bins;
    for (int64_t bin = 0; bin < bins; bin++) {
      float edge = width * (float)(bin + 1);
      int64_t beyond = bin + 1 < bins ? count_from(own, size, low + edge) : 0;
      counts[bin * layers + layer] = above - beyond;
      above = beyond;
    }
  }
}

/* -- codes for every element ------------------------------------------------------------------ */

FAST static void level_codes(const float *x, int64_t n, float inverse, int levels, uint32_t first,
                             uint32_t key, uint8_t *codes) {
  float most = (float)levels;
  for (int64_t i = 0; i < n; i++) {
    uint32_t hash = mix(mix(first + (uint32_t)i) ^ key);
    float chance = (float)(int32_t)(hash >> 8) * 0x1p-24f;
    float height = fabsf(x[i]) * inverse;
    height = height + chance;
    int32_t level = (int32_t)(height < most ? height : most);
    codes[i] = (uint8_t)(x[i] < 0.0f ? levels - level : levels + level);
  }
}

static void nearest_levels_plainly(const float *x, int64_t n, float inverse, int levels,
                                   uint8_t *codes) {
  float most = (float)levels;
  for (int64_t i = 0; i < n; i++) {
    float height = fabsf(x[i]) * inverse;
    height = height + 0.5f;
    int32_t level = (int32_t)(height < most ? height : most);
    codes[i] = (uint8_t)(x[i] < 0.0f ? levels - level : levels + level);
  }
}

#ifdef __x86_64__
/* Four times eight numbers below 256, in lanes as they were loaded, as bytes. */
AVX2 static inline __m256i as_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i low = _mm256_packs_epi32(a, b), high = _mm256_packs_epi32(c, d);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
}

/* Eight values to their nearest levels, with their signs; what is far below is not yet cut off. */
AVX2 static inline __m256i eight_levels(const float *x, __m256 inverse, __m256 most) {
  const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
  const __m256 sign = _mm256_and_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)));
  const __m256 half = _mm256_or_ps(sign, _mm256_set1_ps(0.5f));
  return _mm256_cvttps_epi32(_mm256_min_ps(_mm256_add_ps(value, half), most));
}

AVX2 static void nearest_levels_avx2(const float *x, int64_t n, float inverse, int levels,
                                     uint8_t *codes) {
  const __m256 factor = _mm256_set1_ps(inverse), most = _mm256_set1_ps((float)levels);
  const __m256i middle = _mm256_set1_epi8((char)levels), least = _mm256_set1_epi8((char)-levels);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* lanes as they were loaded */
  int64_t i = 0;
  for (; i + GROUP <= n; i += GROUP) {
    fetch_after(x + i);
    const __m256i low = _mm256_packs_epi32(eight_levels(x + i, factor, most),
                                           eight_levels(x + i + 8, factor, most));
    const __m256i high = _mm256_packs_epi32(eight_levels(x + i + 16, factor, most),
                                            eight_levels(x + i + 24, factor, most));
    const __m256i all = _mm256_max_epi8(_mm256_packs_epi16(low, high), least);
    _mm256_storeu_si256((__m256i *)(codes + i),
                        _mm256_permutevar8x32_epi32(_mm256_add_epi8(all, middle), order));
  }
  nearest_levels_plainly(x + i, n - i, inverse, levels, codes + i);
}
#endif

static void nearest_level_codes(const float *x, int64_t n, float inverse, int levels,
                                uint8_t *codes) {
  BEST(nearest_levels)(x, n, inverse, levels, codes);
}

/* Signs [n] to words [n / 32]. */
static void pack_signs_plainly(const float *x, int64_t n, uint32_t *words) {
  for (int64_t g = 0; g < n / GROUP; g++) {
    uint32_t word = 0;
    for (int lane = 0; lane < GROUP; lane++)
      word |= (uint32_t)(x[g * GROUP + lane] < 0.0f) << lane;
    words[g] = word;
  }
}

#ifdef __x86_64__
AVX2 static void pack_signs_avx2(const float *x, int64_t n, uint32_t *words) {
  const __m256 zero = _mm256_setzero_ps();
  for (int64_t g = 0; g < n / GROUP; g++) {
    uint32_t word = 0;
    for (int lane = 0; lane < GROUP; lane += 8) {
      const __m256 eight = _mm256_loadu_ps(x + g * GROUP + lane);
      word |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(eight, zero, _CMP_LT_OQ)) << lane;
    }
    words[g] = word;
  }
}
#endif

static void pack_signs(const float *x, int64_t n, uint32_t *words) {
  BEST(pack_signs)(x, n, words);
}

/* Clears the bits from `begin` to `end`. */
static void clear_bits(uint32_t *words, int64_t begin, int64_t end) {
  for (; begin < end; begin++) words[begin / GROUP] &= ~(1u << begin % GROUP);
}

FAST static void add_level_values(float *total, const uint8_t *codes, int64_t n, float unit,
                                  int levels, float weight) {
  for (int64_t i = 0; i < n; i++) {
    float value = (float)(codes[i] - levels) * unit;
    value = value * weight;
    total[i] = total[i] + value;
  }
}

/* x = from + the side that each bit from `at` on says; `from` may be x itself, and is 0 if NULL.
 *
 * bits: with two bytes more than that.
 */
static void add_sides_plainly(float *x, const float *from, const uint8_t *bits, int64_t at,
                              int64_t n, float above, float below) {
  for (int64_t i = 0; i < n; i++) {
    float side = bits[(at + i) / 8] >> (at + i) % 8 & 1 ? below : above;
    x[i] = (from ? from[i] : 0.0f) + side;
  }
}

#ifdef __x86_64__
AVX2 static void add_sides_avx2(float *x, const float *from, const uint8_t *bits, int64_t at,
                                int64_t n, float above, float below) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256 high = _mm256_set1_ps(above), low = _mm256_set1_ps(below);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint16_t word;
    memcpy(&word, bits + (at + i) / 8, sizeof word);
    __m256i own = _mm256_and_si256(_mm256_set1_epi32(word >> (at + i) % 8), lanes);
    __m256 set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, lanes));
    __m256 sum = from ? _mm256_loadu_ps(from + i) : _mm256_setzero_ps();
    _mm256_storeu_ps(x + i, _mm256_add_ps(sum, _mm256_blendv_ps(high, low, set)));
  }
  add_sides_plainly(x + i, from ? from + i : NULL, bits, at + i, n - i, above, below);
}

__attribute__((target("avx512f"))) static void add_sides_avx512(float *x, const float *from,
                                                                 const uint8_t *bits, int64_t at,
                                                                 int64_t n, float above,
                                                                 float below) {
  const __m512 high = _mm512_set1_ps(above), low = _mm512_set1_ps(below);
  int64_t i = 0;
  for (; i + EDGE <= n; i += EDGE) {
    uint32_t word;
    memcpy(&word, bits + (at + i) / 8, sizeof word);
    __m512 side = _mm512_mask_blend_ps((__mmask16)(word >> (at + i) % 8), high, low);
    __m512 sum = from ? _mm512_loadu_ps(from + i) : _mm512_setzero_ps();
    _mm512_storeu_ps(x + i, _mm512_add_ps(sum, side));
  }
  add_sides_plainly(x + i, from ? from + i : NULL, bits, at + i, n - i, above, below);
}
#endif

static void add_sign_values(float *x, const float *from, const uint8_t *bits, int64_t at,
                            int64_t n, float above, float below) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) {
    add_sides_avx512(x, from, bits, at, n, above, below);
    return;
  }
#endif
  BEST(add_sides)(x, from, bits, at, n, above, below);
}

/* Goes over a vector chunk by chunk, and within one over the rows that meet it. */
typedef struct {
  const band *bands;
  int64_t count, at, row, group;
} walk;

/* One that has come to an element. */
static walk walk_from(const band *bands, int64_t count, int64_t begin) {
  walk w = {bands, count, 0, 0, 0};
  for (; w.at < count; w.at++) {
    const band *b = bands + w.at;
    int64_t ended = begin > b->start ? (begin - b->start) / b->length : 0;
    w.row = ended < b->rows ? ended : b->rows;
    w.group += w.row;
    if (w.row < b->rows) return w;
  }
  w.row = 0;
  return w;
}

/* The next piece of a row in [begin, end): 1 and where, or 0. */
static int next_piece(walk *w, int64_t begin, int64_t end, int64_t *from, int64_t *to,
                      int64_t *group) {
  while (w->at < w->count) {
    const band *b = w->bands + w->at;
    int64_t start = b->start + w->row * b->length, stop = start + b->length;
    if (start >= end) return 0;
    *from = start > begin ? start : begin;
    *to = stop < end ? stop : end;
    *group = w->group;
    if (stop > end) return *from < *to ? 2 : 0;
    w->group++;
    if (++w->row == b->rows) w->row = 0, w->at++;
    if (*from < *to) return 1;
  }
  return 0;
}

/* The next group that begins in [begin, end): 1 and where, or 0. */
static int next_group(walk *w, int64_t begin, int64_t end, int64_t *at, int64_t *length,
                      int64_t *group) {
  for (; w->at < w->count; w->row = 0, w->at++) {
    const band *b = w->bands + w->at;
    if (w->row < b->rows && b->start + w->row * b->length < begin) w->row++, w->group++;
    if (w->row == b->rows) continue;
    *at = b->start + w->row * b->length;
    if (*at >= end) return 0;
    *length = b->length;
    *group = w->group++;
    w->row++;
    return 1;
  }
  return 0;
}


/* The maxima of the groups that begin in [begin, end): all of them, if there are threads. */
static void maxima_between(const band *bands, int64_t count, const float *x, int64_t begin,
                           int64_t end, float *out, int threads) {
  int64_t at, length, group;
  walk w = walk_from(bands, count, begin);
  if (threads > 1)
    group_maxima(bands, count, x, out, threads);
  else
    while (next_group(&w, begin, end, &at, &length, &group))
      out[group] = largest_magnitude(x + at, length);
}

/* Codes of [first, last); first is a multiple of CHUNK. */
static void levels_between(const band *bands, int64_t count, const float *x, int64_t first,
                           int64_t last, const float *scale, int bits, const int64_t *key,
                           uint32_t *words, int threads) {
  int levels = (1 << (bits - 1)) - 1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t codes[CHUNK];
    int64_t begin = first + border(last - first, CHUNK, t, threads), end;
    int64_t stop = first + border(last - first, CHUNK, t + 1, threads);
    walk w = walk_from(bands, count, begin);
    for (; begin < stop; begin = end) {
      int64_t from, to, group;
      int more;
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      memset(codes, 0, CHUNK);
      do {
        more = next_piece(&w, begin, end, &from, &to, &group);
        if (more) {
          float inverse = scale[group] >= TINY ? (float)levels / scale[group] : 0.0f;
          if (key)
            level_codes(x + from, to - from, inverse, levels, (uint32_t)(from + key[0]),
                        (uint32_t)key[1], codes + from - begin);
          else
            nearest_level_codes(x + from, to - from, inverse, levels, codes + from - begin);
        }
      } while (more == 1);
      pack_codes(codes, end - begin, bits, words + begin / GROUP * bits);
    }
  }
}

void encode_levels(const band *bands, int64_t count, const float *x, int64_t n, const float *scale,
                   int bits, const int64_t *key, uint32_t *words, int threads) {
  levels_between(bands, count, x, 0, n, scale, bits, key, words, threads);
}

/* The maxima, and the codes with them as scales: x is read once. */
void encode_peaks(const band *bands, int64_t count, const float *x, int64_t n, int bits,
                  const int64_t *key, float *scale, uint32_t *words, int threads) {
  int64_t part = threads > 1 ? n : NEAR;
  for (int64_t begin = 0, end; begin < n; begin = end) {
    end = begin + part < n ? begin + part : n;
    maxima_between(bands, count, x, begin, end, scale, threads);
    levels_between(bands, count, x, begin, end, scale, bits, key, words, threads);
  }
}

/* Where a sum starts: from another vector, or from nothing. */
static void begin_sum(float *out, const float *base, int64_t begin, int64_t end) {
  size_t bytes = sizeof(float) * (size_t)(end - begin);
  if (!base)
    memset(out + begin, 0, bytes);
  else if (base != out)
    memcpy(out + begin, base + begin, bytes);
}

/* Where a chunk is summed up: in `room`, if it is to be written past the caches; else in out. */
static float *begin_chunk(float *room, float *out, const float *base, int64_t n, int64_t begin,
                          int64_t end) {
  float *total = base == out || 4 * n < MUCH ? out + begin : room;
  begin_sum(total, base ? base + begin : NULL, 0, end - begin);
  return total;
}

static void end_chunk(const float *total, float *out, int64_t begin, int64_t end) {
  if (total != out + begin) write_past(out + begin, total, 4 * (end - begin));
}

#ifdef __x86_64__
#define FEW 8 /* ranks whose codes are read side by side */

/* Stores eight, past the caches if `past`: `to` is a multiple of 32 bytes then. */
AVX2 static inline void store_eight(float *to, __m256 x, int past) {
  if (past)
    _mm256_stream_ps(to, x);
  else
    _mm256_storeu_ps(to, x);
}

/* out = base + the sum over a few ranks, of [from, to) of a group, and of its unit on each rank.
 *
 * codes: `stride` bytes apart. past: whether it is written past the caches.
 */
typedef void sum_of_group(const float *base, float *out, int64_t from, int64_t to, int64_t ranks,
                          const uint8_t *codes, int64_t stride, const float *units,
                          const float *weights, int past);

AVX2 static void sum_levels_avx2(const float *base, float *out, int64_t from, int64_t to,
                                 int64_t ranks, const uint8_t *codes, int64_t stride,
                                 const float *units, const float *weights, int past) {
  const int levels = 127;
  const __m256i middle = _mm256_set1_epi32(levels);
  past = past && (uintptr_t)out % 32 == 0;
  for (int64_t at = from, end; at < to; at = end) {
    uint8_t here[GROUP];
    int64_t word = at / GROUP * GROUP; /* where the planes of 32 codes begin */
    end = word + GROUP < to ? word + GROUP : to;
    if (end - at < GROUP) {
      begin_sum(out, base, at, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        unpack_bytes_avx2((const uint32_t *)(codes + rank * stride + word), GROUP, here);
        add_level_values(out + at, here + at - word, end - at, units[rank], levels, weights[rank]);
      }
      continue;
    }
    __m256 sums[4];
    for (int part = 0; part < 4; part++)
      sums[part] = base ? _mm256_loadu_ps(base + at + 8 * part) : _mm256_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m256 unit = _mm256_set1_ps(units[rank]), weight = _mm256_set1_ps(weights[rank]);
      fetch_ahead(codes + rank * stride + word);
      unpack_bytes_avx2((const uint32_t *)(codes + rank * stride + word), GROUP, here);
      for (int part = 0; part < 4; part++) {
        const __m128i eight = _mm_loadl_epi64((const __m128i *)(here + 8 * part));
        __m256 value = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(eight), middle));
        value = _mm256_mul_ps(_mm256_mul_ps(value, unit), weight);
        sums[part] = _mm256_add_ps(sums[part], value);
      }
    }
    for (int part = 0; part < 4; part++) store_eight(out + at + 8 * part, sums[part], past);
  }
}

__attribute__((target("avx512f,avx512bw,avx512vl,gfni"))) static void sum_levels_avx512(
    const float *base, float *out, int64_t from, int64_t to, int64_t ranks, const uint8_t *codes,
    int64_t stride, const float *units, const float *weights, int past) {
  const int levels = 127;
  const __m512i middle = _mm512_set1_epi32(levels);
  int64_t whole = from;
  if (from % GROUP == 0 && (uintptr_t)out % 64 == 0) whole = from + (to - from) / GROUP * GROUP;
  for (int64_t at = from; at < whole; at += GROUP) {
    __m512 first = base ? _mm512_loadu_ps(base + at) : _mm512_setzero_ps();
    __m512 second = base ? _mm512_loadu_ps(base + at + 16) : _mm512_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m512 unit = _mm512_set1_ps(units[rank]), weight = _mm512_set1_ps(weights[rank]);
      fetch_ahead(codes + rank * stride + at);
      const __m256i here = unpacked_bytes((const uint32_t *)(codes + rank * stride + at));
      const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(here));
      const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(here, 1));
      const __m512 lower = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, middle));
      const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, middle));
      first = _mm512_add_ps(first, _mm512_mul_ps(_mm512_mul_ps(lower, unit), weight));
      second = _mm512_add_ps(second, _mm512_mul_ps(_mm512_mul_ps(upper, unit), weight));
    }
    if (past) {
      _mm512_stream_ps(out + at, first);
      _mm512_stream_ps(out + at + 16, second);
    } else {
      _mm512_storeu_ps(out + at, first);
      _mm512_storeu_ps(out + at + 16, second);
    }
  }
  if (whole < to)
    sum_levels_avx2(base, out, whole, to, ranks, codes, stride, units, weights, past);
}

/* The same of all groups in [begin, stop), and the base between them; a unit is `factor` scales. */
static void sum_groups(sum_of_group *sum, walk w, const float *base, float *out, int64_t begin,
                       int64_t stop, int64_t ranks, const uint8_t *codes, int64_t stride,
                       const float *scale, int64_t scale_stride, float factor,
                       const float *weights, int past) {
  int64_t from, to, group, done = begin;
  for (int more = 1; more == 1; done = more ? to : stop) {
    float units[FEW];
    more = next_piece(&w, begin, stop, &from, &to, &group);
    begin_sum(out, base, done, more ? from : stop);
    if (!more) continue;
    for (int64_t rank = 0; rank < ranks; rank++) {
      float own = scale[rank * scale_stride + group];
      units[rank] = own >= TINY ? own * factor : 0.0f;
    }
    sum(base, out, from, to, ranks, codes, stride, units, weights, past);
  }
  begin_sum(out, base, done, stop);
}
#endif

/* out = base + the sum over ranks, rank by rank; strides in words and floats. */
void add_levels(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint32_t *words, int64_t word_stride, const float *scale,
                int64_t scale_stride, int bits, const float *weights, int threads) {
  int levels = (1 << (bits - 1)) - 1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t codes[CHUNK];
    float room[CHUNK];
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
#ifdef __x86_64__
    if (bits == 8 && ranks <= FEW && __builtin_cpu_supports("avx2")) {
      int wide = HAS_GFNI && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl");
      sum_of_group *sum = wide ? sum_levels_avx512 : sum_levels_avx2;
      sum_groups(sum, w, base, out, begin, stop, ranks, (const uint8_t *)words,
                 4 * word_stride, scale, scale_stride, (float)(1.0 / levels), weights,
                 base != out && 4 * n >= MUCH);
      begin = stop;
    }
#endif
    for (; begin < stop; begin = end) {
      int64_t from, to, group;
      int more;
      walk start = w;
      end = begin + CHUNK < n ? begin + CHUNK : n;
      float *total = begin_chunk(room, out, base, n, begin, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const float *scales = scale + rank * scale_stride;
        w = start;
        unpack_codes(words + rank * word_stride + begin / GROUP * bits, end - begin, bits, codes);
        do {
          more = next_piece(&w, begin, end, &from, &to, &group);
          if (more) {
            float unit = scales[group] >= TINY ? scales[group] * (float)(1.0 / levels) : 0.0f;
            add_level_values(total + from - begin, codes + from - begin, to - from, unit, levels,
                             weights[rank]);
          }
        } while (more == 1);
      }
      end_chunk(total, out, begin, end);
    }
    written_past();
  }
}

/* -- narrow floats ------------------------------------------------------------------------------ */

static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* What is added to a magnitude before its lower half is cut off: for the nearest, ties to even. */
static inline uint32_t half_up(uint32_t magnitude) { return 0x7fffu + (magnitude >> 16 & 1); }

static inline uint32_t random_up(uint32_t place, uint32_t key) { return mix(mix(place) ^ key) >> 16; }

/* Two codes as a word. A NaN's may take a bit more than there is: words are sums of codes, as the
 * composite's. */
#define PAIR(i, up_first, up_second)                                                            \
  uint32_t first = bits_of(x[2 * (i)]), second = bits_of(x[2 * (i) + 1]);                       \
  uint32_t low = first & 0x7fffffffu, high = second & 0x7fffffffu;                              \
  most = larger(most, larger((int32_t)low, (int32_t)high));                                     \
  words[i] = ((low + (up_first)) >> 16) + (first >> 16 & 0x8000u) +                             \
             ((high + (up_second)) & 0xffff0000u) + (second & 0x80000000u)

/* All return the largest magnitude, as bits. */
static int32_t nearest_bfloat16_plainly(const float *x, int64_t n, uint32_t *words, int past) {
  int32_t most = 0;
  (void)past;
  for (int64_t i = 0; i < n / 2; i++) {
    PAIR(i, half_up(low), half_up(high));
  }
  return most;
}

#ifdef __x86_64__
AVX2 static inline int32_t largest_of(__m256i x) {
  int32_t lanes[8], most = 0;
  _mm256_storeu_si256((__m256i *)lanes, x);
  for (int i = 0; i < 8; i++) most = larger(most, lanes[i]);
  return most;
}

/* Codes of eight magnitudes, in the lower halves. */
AVX2 static inline __m256i eight_bfloat16(__m256i bits, __m256i magnitude) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x8000));
  return _mm256_add_epi32(_mm256_srli_epi32(_mm256_add_epi32(magnitude, up), 16), sign);
}

/* The sums of each two codes, the second one half a word further, in every other place. */
AVX2 static inline __m256 four_words(__m256i codes) {
  const __m256i second = _mm256_and_si256(codes, _mm256_set1_epi64x((long long)0xffffffff00000000ull));
  return _mm256_castsi256_ps(_mm256_add_epi32(codes, _mm256_srli_epi64(second, 16)));
}

AVX2 static int32_t nearest_bfloat16_avx2(const float *x, int64_t n, uint32_t *words, int past) {
  const __m256i rest = _mm256_set1_epi32(INT32_MAX);
  __m256i most = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i first = _mm256_loadu_si256((const __m256i *)(x + i));
    const __m256i second = _mm256_loadu_si256((const __m256i *)(x + i + 8));
    const __m256i low = _mm256_and_si256(first, rest), high = _mm256_and_si256(second, rest);
    most = _mm256_max_epi32(most, _mm256_max_epi32(low, high));
    const __m256 left = four_words(eight_bfloat16(first, low));
    const __m256 right = four_words(eight_bfloat16(second, high));
    const __m256i all = _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0x88));
    const __m256i codes = _mm256_permute4x64_epi64(all, 0xd8);
    if (past)
      _mm256_stream_si256((__m256i *)(words + i / 2), codes);
    else
      _mm256_storeu_si256((__m256i *)(words + i / 2), codes);
  }
  return larger(largest_of(most), nearest_bfloat16_plainly(x + i, n - i, words + i / 2, 0));
}
#endif

/* Past the caches if `past`: words begin at a multiple of 32 bytes then. */
static int32_t nearest_bfloat16(const float *x, int64_t n, uint32_t *words, int past) {
  return BEST(nearest_bfloat16)(x, n, words, past);
}

FAST static int32_t random_bfloat16(const float *x, int64_t n, uint32_t place, uint32_t key,
                                    uint32_t *words) {
  int32_t most = 0;
  for (int64_t i = 0; i < n / 2; i++) {
    uint32_t own = place + 2 * (uint32_t)i;
    PAIR(i, random_up(own, key), random_up(own + 1, key));
  }
  return most;
}

/* Below 2**-6 are multiples of 2**-9: the last bits of a sum. No code of a NaN means anything. */
static void nearest_e4m3_plainly(const float *x, int64_t n, float inverse, uint8_t *codes) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i] * inverse), magnitude = bits & 0x7fffffffu;
    uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    float sum = float_of(magnitude) * 0x1p9f;
    sum = sum + 0x1p23f;
    codes[i] =
        (uint8_t)((magnitude < 121u << 23 ? bits_of(sum) & 15 : normal) + (bits >> 31 << 7));
  }
}

#ifdef __x86_64__
AVX2 static inline __m256i eight_e4m3(const float *x, __m256 inverse) {
  const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MAX));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  __m256i normal = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7ffff)), odd);
  normal = _mm256_sub_epi32(_mm256_srli_epi32(normal, 20), _mm256_set1_epi32(120 << 3));
  __m256 sum = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p9f));
  sum = _mm256_add_ps(sum, _mm256_set1_ps(0x1p23f));
  const __m256i small = _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(15));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), magnitude);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 7);
  const __m256i code = _mm256_add_epi32(_mm256_blendv_epi8(normal, small, is_small), sign);
  return _mm256_and_si256(code, _mm256_set1_epi32(255));
}

AVX2 static void nearest_e4m3_avx2(const float *x, int64_t n, float inverse, uint8_t *codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  int64_t i = 0;
  for (; i + GROUP <= n; i += GROUP) {
    fetch_after(x + i);
    _mm256_storeu_si256((__m256i *)(codes + i),
                        as_bytes(eight_e4m3(x + i, factor), eight_e4m3(x + i + 8, factor),
                                 eight_e4m3(x + i + 16, factor), eight_e4m3(x + i + 24, factor)));
  }
  nearest_e4m3_plainly(x + i, n - i, inverse, codes + i);
}
#endif

static void nearest_e4m3(const float *x, int64_t n, float inverse, uint8_t *codes) {
  BEST(nearest_e4m3)(x, n, inverse, codes);
}

float encode_bfloat16(const float *x, int64_t n, const int64_t *key, uint32_t *words, int threads) {
  int32_t most = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(max : most)
  for (int t = 0; t < threads; t++) {
    uint32_t codes[CHUNK / 2];
    int64_t stop = border(n, CHUNK, t + 1, threads), end;
    for (int64_t begin = border(n, CHUNK, t, threads); begin < stop; begin = end) {
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      if (!key) {
        int past = 2 * n >= MUCH && (uintptr_t)(words + begin / 2) % 32 == 0;
        most = larger(most, nearest_bfloat16(x + begin, end - begin, words + begin / 2, past));
        continue;
      }
      uint32_t *to = 2 * n < MUCH ? words + begin / 2 : codes;
      uint32_t place = (uint32_t)begin + (uint32_t)key[0];
      most = larger(most, random_bfloat16(x + begin, end - begin, place, (uint32_t)key[1], to));
      if (to == codes) write_past(words + begin / 2, codes, 2 * (end - begin));
    }
    written_past();
  }
  return float_of((uint32_t)most);
}

/* Codes of [first, last). */
static void e4m3_between(const band *bands, int64_t count, const float *x, int64_t first,
                         int64_t last, const float *unit, uint8_t *codes, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t begin = first + border(last - first, CHUNK, t, threads);
    int64_t stop = first + border(last - first, CHUNK, t + 1, threads);
    int64_t from, to, group, done = begin;
    int more;
    walk w = walk_from(bands, count, begin);
    do {
      more = next_piece(&w, begin, stop, &from, &to, &group);
      memset(codes + done, 0, (size_t)((more ? from : stop) - done));
      done = more ? to : stop;
      if (more)
        nearest_e4m3(x + from, to - from, unit[group] >= TINY ? 1.0f / unit[group] : 0.0f,
                     codes + from);
    } while (more == 1);
    memset(codes + done, 0, (size_t)(stop - done));
  }
}

void encode_e4m3(const band *bands, int64_t count, const float *x, int64_t n, const float *unit,
                 uint8_t *codes, int threads) {
  e4m3_between(bands, count, x, 0, n, unit, codes, threads);
}

/* Units in which each group's largest magnitude is 448, perhaps rounded up to powers of two; and
 * the codes with them: x is read once. */
void encode_e4m3_peaks(const band *bands, int64_t count, const float *x, int64_t n, int powers,
                       float *unit, uint8_t *codes, int threads) {
  int64_t part = threads > 1 ? n : NEAR, at, length, group;
  for (int64_t begin = 0, end; begin < n; begin = end) {
    end = begin + part < n ? begin + part : n;
    maxima_between(bands, count, x, begin, end, unit, threads);
    walk w = walk_from(bands, count, begin);
    while (next_group(&w, begin, end, &at, &length, &group)) {
      unit[group] *= (float)(1.0 / 448.0);
      if (powers) unit[group] = float_of((bits_of(unit[group]) + (1u << 23) - 1) >> 23 << 23);
    }
    e4m3_between(bands, count, x, begin, end, unit, codes, threads);
  }
}

FAST static void add_bfloat16(float *total, const uint8_t *codes, int64_t n, float weight) {
  for (int64_t i = 0; i < n; i++) {
    uint16_t code;
    memcpy(&code, codes + 2 * i, sizeof code);
    float value = float_of((uint32_t)code << 16) * weight;
    total[i] = total[i] + value;
  }
}

#ifdef __x86_64__
/* out = base + the sum over a few ranks, read once and written once, past the caches if `past`.
 *
 * Returns the largest magnitude, as bits.
 */
AVX2 static int32_t sum_bfloat16_avx2(const float *base, float *out, int64_t n, int64_t ranks,
                                      const uint8_t *codes, int64_t stride, const float *weights,
                                      int past) {
  const __m256i rest = _mm256_set1_epi32(INT32_MAX);
  __m256i most = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 sum = base ? _mm256_loadu_ps(base + i) : _mm256_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m128i eight = _mm_loadu_si128((const __m128i *)(codes + rank * stride + 2 * i));
      if (i % 32 == 0) fetch_ahead(codes + rank * stride + 2 * i);
      const __m256 value = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
      sum = _mm256_add_ps(sum, _mm256_mul_ps(value, _mm256_set1_ps(weights[rank])));
    }
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(sum), rest));
    store_eight(out + i, sum, past);
  }
  for (; i < n; i++) {
    float sum = base ? base[i] : 0.0f;
    for (int64_t rank = 0; rank < ranks; rank++)
      add_bfloat16(&sum, codes + rank * stride + 2 * i, 1, weights[rank]);
    most = _mm256_max_epi32(most, _mm256_set1_epi32((int32_t)(bits_of(sum) & INT32_MAX)));
    out[i] = sum;
  }
  return largest_of(most);
}
#endif

FAST static void add_e4m3_plainly(float *total, const uint8_t *codes, int64_t n, float unit,
                                  float weight) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t magnitude = codes[i] & 127u;
    float small = (float)(int32_t)magnitude * 0x1p-9f;
    uint32_t bits = magnitude < 8 ? bits_of(small) : (magnitude + (120 << 3)) << 20;
    float value = float_of(bits | (uint32_t)codes[i] >> 7 << 31) * unit;
    value = value * weight;
    total[i] = total[i] + value;
  }
}

#ifdef __x86_64__
/* Halfs have the same mantissas, and others than normal ones too; only their exponents are 8 more. */
__attribute__((target("avx2,f16c"))) static void add_e4m3_avx2(float *total, const uint8_t *codes,
                                                              int64_t n, float unit,
                                                              float weight) {
  const __m256 scale = _mm256_set1_ps(unit), factor = _mm256_set1_ps(weight);
  const __m128i sign = _mm_set1_epi16((int16_t)0x8000), rest = _mm_set1_epi16(127 << 7);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(codes + i)));
    const __m128i half = _mm_or_si128(_mm_and_si128(_mm_slli_epi16(code, 8), sign),
                                      _mm_and_si128(_mm_slli_epi16(code, 7), rest));
    __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    value = _mm256_mul_ps(_mm256_mul_ps(value, scale), factor);
    _mm256_storeu_ps(total + i, _mm256_add_ps(_mm256_loadu_ps(total + i), value));
  }
  add_e4m3_plainly(total + i, codes + i, n - i, unit, weight);
}

__attribute__((target("avx2,f16c"))) static void sum_e4m3_avx2(
    const float *base, float *out, int64_t from, int64_t to, int64_t ranks, const uint8_t *codes,
    int64_t stride, const float *units, const float *weights, int past) {
  const __m128i sign = _mm_set1_epi16((int16_t)0x8000), rest = _mm_set1_epi16(127 << 7);
  int64_t at = from;
  past = past && (uintptr_t)(out + from) % 32 == 0;
  for (; at + 8 <= to; at += 8) {
    __m256 sum = base ? _mm256_loadu_ps(base + at) : _mm256_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m128i eight = _mm_loadl_epi64((const __m128i *)(codes + rank * stride + at));
      if ((at - from) % 64 == 0) fetch_ahead(codes + rank * stride + at);
      const __m128i code = _mm_cvtepu8_epi16(eight);
      const __m128i half = _mm_or_si128(_mm_and_si128(_mm_slli_epi16(code, 8), sign),
                                        _mm_and_si128(_mm_slli_epi16(code, 7), rest));
      __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
      value = _mm256_mul_ps(value, _mm256_set1_ps(units[rank]));
      sum = _mm256_add_ps(sum, _mm256_mul_ps(value, _mm256_set1_ps(weights[rank])));
    }
    store_eight(out + at, sum, past);
  }
  begin_sum(out, base, at, to);
  for (int64_t rank = 0; rank < ranks; rank++)
    add_e4m3_plainly(out + at, codes + rank * stride + at, to - at, units[rank], weights[rank]);
}

__attribute__((target("avx512f,avx2,f16c"))) static void sum_e4m3_avx512(
    const float *base, float *out, int64_t from, int64_t to, int64_t ranks, const uint8_t *codes,
    int64_t stride, const float *units, const float *weights, int past) {
  const __m256i sign = _mm256_set1_epi16((int16_t)0x8000), rest = _mm256_set1_epi16(127 << 7);
  int64_t at = from;
  const int wide = past && (uintptr_t)(out + from) % 64 == 0;
  for (; at + 16 <= to; at += 16) {
    __m512 sum = base ? _mm512_loadu_ps(base + at) : _mm512_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const uint8_t *own = codes + rank * stride + at;
      const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)own));
      if ((at - from) % 64 == 0) fetch_ahead(own);
      const __m256i half = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(code, 8), sign),
                                           _mm256_and_si256(_mm256_slli_epi16(code, 7), rest));
      __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
      value = _mm512_mul_ps(value, _mm512_set1_ps(units[rank]));
      sum = _mm512_add_ps(sum, _mm512_mul_ps(value, _mm512_set1_ps(weights[rank])));
    }
    if (wide)
      _mm512_stream_ps(out + at, sum);
    else
      _mm512_storeu_ps(out + at, sum);
  }
  if (at < to) sum_e4m3_avx2(base, out, at, to, ranks, codes, stride, units, weights, past);
}
#endif

static void add_e4m3(float *total, const uint8_t *codes, int64_t n, float unit, float weight) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && has_f16c) {
    add_e4m3_avx2(total, codes, n, unit, weight);
    return;
  }
#endif
  add_e4m3_plainly(total, codes, n, unit, weight);
}

/* out = base + the sum over ranks, rank by rank; strides in bytes and floats. Returns whether all of
 * it is finite, if `checks`. */
int add_floats(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint8_t *codes, int64_t code_stride, const float *unit,
                int64_t unit_stride, int bits, const float *weights, int checks, int threads) {
  int32_t most = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(max : most)
  for (int t = 0; t < threads; t++) {
    float room[CHUNK];
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
#ifdef __x86_64__
    if (bits == 16 && ranks <= FEW && __builtin_cpu_supports("avx2")) {
      int past = base != out && 4 * n >= MUCH && (uintptr_t)(out + begin) % 32 == 0;
      most = larger(most, sum_bfloat16_avx2(base ? base + begin : NULL, out + begin, stop - begin,
                                            ranks, codes + 2 * begin, code_stride, weights, past));
      begin = stop;
    }
    if (bits == 8 && !checks && ranks <= FEW && __builtin_cpu_supports("avx2") &&
        has_f16c) {
      sum_of_group *sum = __builtin_cpu_supports("avx512f") ? sum_e4m3_avx512 : sum_e4m3_avx2;
      sum_groups(sum, w, base, out, begin, stop, ranks, codes, code_stride, unit,
                 unit_stride, 1.0f, weights, base != out && 4 * n >= MUCH);
      begin = stop;
    }
#endif
    for (; begin < stop; begin = end) {
      walk start = w;
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      float *total = begin_chunk(room, out, base, n, begin, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const uint8_t *own = codes + rank * code_stride;
        const float *units = unit + rank * unit_stride;
        int64_t from, to, group;
        int more;
        if (bits == 16) {
          add_bfloat16(total, own + 2 * begin, end - begin, weights[rank]);
          continue;
        }
        w = start;
        do {
          more = next_piece(&w, begin, end, &from, &to, &group);
          if (more)
            add_e4m3(total + from - begin, own + from, to - from,
                     units[group] >= TINY ? units[group] : 0.0f, weights[rank]);
        } while (more == 1);
      }
      if (checks) most = larger(most, largest_bits(total, end - begin));
      end_chunk(total, out, begin, end);
    }
    written_past();
  }
  return most < 0x7f800000;
}

/* The means of the groups that begin in [begin, end). room [2 * half] */
static void sign_means(const band *bands, int64_t count, const float *x, int64_t begin, int64_t end,
                       float *room, int64_t half, float *above, float *below) {
  int64_t at, length, group, negative;
  walk w = walk_from(bands, count, begin);
  while (next_group(&w, begin, end, &at, &length, &group)) {
    int64_t folded = split(x + at, length, room, room + half, &negative);
    fold(room, folded);
    fold(room + half, folded);
    above[group] = room[0] / (float)(length - negative > 1 ? length - negative : 1);
    below[group] = room[half] / (float)(negative > 1 ? negative : 1);
  }
}

int encode_signs(const band *bands, int64_t count, const float *x, int64_t n, float *above,
                 float *below, uint32_t *words, int threads) {
  int64_t half = longest(bands, count) / 2 + 1;
  float *room = malloc(2 * sizeof(float) * (size_t)(half * threads));
  if (!room) return -1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
    for (; begin < stop; begin = end) {
      int64_t from, to, group, done = begin;
      int more;
      end = begin + NEAR < stop ? begin + NEAR : stop;
      sign_means(bands, count, x, begin, end, room + 2 * half * t, half, above, below);
      pack_signs(x + begin, end - begin, words + begin / GROUP);
      do {
        more = next_piece(&w, begin, end, &from, &to, &group);
        clear_bits(words, done, more ? from : end);
        done = more ? to : end;
      } while (more == 1);
    }
  }
  free(room);
  return 0;
}

void add_signs(const band *bands, int64_t count, const float *base, float *out, int64_t n,
               int64_t ranks, const uint32_t *words, int64_t word_stride, const float *above,
               const float *below, int64_t mean_stride, const float *weights, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t bits[CHUNK / 8 + 2];
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
    for (; begin < stop; begin = end) {
      walk start = w;
      end = begin + CHUNK < n ? begin + CHUNK : n;
      if (!ranks) begin_sum(out, base, begin, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const float *high = above + rank * mean_stride, *low = below + rank * mean_stride;
        const float *before = rank ? out : base;
        int64_t from, to, group, done = begin;
        int more;
        w = start;
        memcpy(bits, words + rank * word_stride + begin / GROUP, (size_t)(end - begin) / 8);
        do {
          more = next_piece(&w, begin, end, &from, &to, &group);
          if (!rank) begin_sum(out, base, done, more ? from : end);
          done = more ? to : end;
          if (more)
            add_sign_values(out + from, before ? before + from : NULL, bits, from - begin,
                            to - from, high[group] * weights[rank], low[group] * weights[rank]);
        } while (more == 1);
      }
    }
  }
}
