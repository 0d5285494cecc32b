/* Signs, with the means of both sides of each group; see `encode_signs` and `add_signs`.
 *
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include <stdlib.h>
#include <string.h>

#include "groups.h"

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
  for (; i + 16 <= n; i += 16) {
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

/* The means of the groups that begin in [begin, end). scratch [2 * half] */
static void sign_means(const band *bands, int64_t count, const float *x, int64_t begin, int64_t end,
                       float *scratch, int64_t half, float *above, float *below) {
  int64_t at, length, group, negative;
  walk w = walk_from(bands, count, begin);
  while (next_group(&w, begin, end, &at, &length, &group)) {
    int64_t folded = split(x + at, length, scratch, scratch + half, &negative);
    fold(scratch, folded);
    fold(scratch + half, folded);
    above[group] = scratch[0] / (float)(length - negative > 1 ? length - negative : 1);
    below[group] = scratch[half] / (float)(negative > 1 ? negative : 1);
  }
}

int encode_signs(const band *bands, int64_t count, const float *x, int64_t n, float *above,
                 float *below, uint32_t *words, int threads) {
  int64_t half = longest(bands, count) / 2 + 1;
  float *scratch = malloc(2 * sizeof(float) * (size_t)(half * threads));
  if (!scratch) return -1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
    for (; begin < stop; begin = end) {
      int64_t from, to, group, done = begin;
      int more;
      end = begin + NEAR < stop ? begin + NEAR : stop;
      sign_means(bands, count, x, begin, end, scratch + 2 * half * t, half, above, below);
      pack_signs(x + begin, end - begin, words + begin / GROUP);
      do {
        more = next_piece(&w, begin, end, &from, &to, &group);
        clear_bits(words, done, more ? from : end);
        done = more ? to : end;
      } while (more == 1);
    }
  }
  free(scratch);
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
