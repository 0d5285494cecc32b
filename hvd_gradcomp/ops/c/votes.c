/* Signs of a momentum, packed, and the majority of them; see `momentum_signs` and `majority` of
 * ops/interface/quantization.py. Every result equals that of the plain ops to the bit.
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

#define CHUNK 4096
#define WORDS (CHUNK / GROUP)
#define PLANES 32 /* bits of a number of ranks */

/* out = m * momentum + g * rest; g may be out. */
FAST static void blend(const float *m, const float *g, float *out, int64_t n, float momentum,
                       float rest) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float ahead = g[i] * rest;
    float kept = m[i] * momentum;
    out[i] = ahead + kept;
  }
}

/* A bit for each of [n]: whether it is negative, and what a zero counts as. */
static void pack_plainly(const float *x, int64_t n, int zeros, uint32_t *words) {
  for (int64_t g = 0; g < n / GROUP; g++) {
    uint32_t word = 0;
    for (int lane = 0; lane < GROUP; lane++) {
      float value = x[g * GROUP + lane];
      word |= (uint32_t)(zeros ? value <= 0.0f : value < 0.0f) << lane;
    }
    words[g] = word;
  }
}

/* Values of signs by two bits each: plus, minus, or nothing if the second bit is set. */
static void spread_plainly(const uint32_t *minus, const uint32_t *none, const float *value,
                           int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t lane = (uint32_t)(i % GROUP);
    int sign = none[i / GROUP] >> lane & 1 ? 2 : (int)(minus[i / GROUP] >> lane & 1);
    out[i] = value[sign];
  }
}

#ifdef __x86_64__
AVX2 static void pack_avx2(const float *x, int64_t n, int zeros, uint32_t *words) {
  const __m256 zero = _mm256_setzero_ps();
  for (int64_t g = 0; g < n / GROUP; g++) {
    uint32_t word = 0;
    for (int lane = 0; lane < GROUP; lane += 8) {
      const __m256 eight = _mm256_loadu_ps(x + g * GROUP + lane);
      const __m256 is = zeros ? _mm256_cmp_ps(eight, zero, _CMP_LE_OQ)
                              : _mm256_cmp_ps(eight, zero, _CMP_LT_OQ);
      word |= (uint32_t)_mm256_movemask_ps(is) << lane;
    }
    words[g] = word;
  }
}

AVX2 static void spread_avx2(const uint32_t *minus, const uint32_t *none, const float *value,
                             int64_t n, float *out) {
  const __m256 plus = _mm256_set1_ps(value[0]), less = _mm256_set1_ps(value[1]);
  const __m256 nothing = _mm256_set1_ps(value[2]);
  const __m256i top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  for (int64_t g = 0; g < n / GROUP; g++)
    for (int lane = 0; lane < GROUP; lane += 8) {
      /* A blend looks at the topmost bit. */
      __m256i sign = _mm256_set1_epi32((int32_t)(minus[g] >> lane));
      __m256i tie = _mm256_set1_epi32((int32_t)(none[g] >> lane));
      __m256 x = _mm256_blendv_ps(plus, less, _mm256_castsi256_ps(_mm256_sllv_epi32(sign, top)));
      x = _mm256_blendv_ps(x, nothing, _mm256_castsi256_ps(_mm256_sllv_epi32(tie, top)));
      _mm256_storeu_ps(out + g * GROUP + lane, x);
    }
}
#endif

/* Where the gap before band i ends, or behind the last one; and where it begins. */
static int64_t gap(const band *bands, int64_t count, int64_t i, int64_t n, int64_t *begin) {
  *begin = i ? bands[i - 1].start + bands[i - 1].rows * bands[i - 1].length : 0;
  return i < count ? bands[i].start : n;
}

void momentum_signs(const band *bands, int64_t count, const float *m, const float *g, float *out,
                    int64_t n, float momentum, float rest, int zeros, uint32_t *words,
                    int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t stop = border(n, CHUNK, t + 1, threads), end;
    for (int64_t begin = border(n, CHUNK, t, threads); begin < stop; begin = end) {
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      blend(m + begin, g + begin, out + begin, end - begin, momentum, rest);
      BEST(pack)(out + begin, end - begin, zeros, words + begin / GROUP);
    }
  }
  for (int64_t i = 0, begin; i <= count; i++) {
    int64_t end = gap(bands, count, i, n, &begin);
    for (; begin < end && begin % GROUP; begin++) words[begin / GROUP] &= ~(1u << begin % GROUP);
    for (; begin + GROUP <= end; begin += GROUP) words[begin / GROUP] = 0;
    for (; begin < end; begin++) words[begin / GROUP] &= ~(1u << begin % GROUP);
  }
}

/* Counts bits of ranks, in place `k` of the sum being a word of its own: planes [bits][n]. */
FAST static void count_bits(uint32_t (*planes)[WORDS], int bits, const uint32_t *words, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t carry = words[i];
    for (int k = 0; k < bits; k++) {
      uint32_t both = planes[k][i] & carry;
      planes[k][i] ^= carry;
      carry = both;
    }
  }
}

/* Of each lane, whether more than `half` bits were counted, and whether just so many. */
FAST static void compare(uint32_t (*planes)[WORDS], int bits, int64_t half, int64_t n,
                         uint32_t *more, uint32_t *equal) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t above = 0, same = ~0u;
    for (int k = bits - 1; k >= 0; k--) {
      uint32_t own = planes[k][i], wanted = half >> k & 1 ? ~0u : 0u;
      above |= same & own & ~wanted;
      same &= ~(own ^ wanted);
    }
    more[i] = above, equal[i] = same;
  }
}

/* out = unit times the sign that most ranks have whose weight is not 0, and 0 where they tie and
 * outside of the bands. `kept` gets what m holds, unless it is NULL; out may be m.
 *
 * Bit by bit of the sums, 32 elements at once. stride: words.
 */
void majority(const band *bands, int64_t count, const uint32_t *words, int64_t stride,
              int64_t ranks, const float *weights, float unit, int64_t n, float *out,
              const float *m, float *kept, int threads) {
  const float value[3] = {unit, -1.0f * unit, 0.0f * unit};
  int64_t voters = 0;
  int bits = 1;
  for (int64_t rank = 0; rank < ranks; rank++) voters += weights[rank] != 0.0f;
  while (bits < PLANES && voters >> bits) bits++;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint32_t planes[PLANES][WORDS], minus[WORDS], none[WORDS];
    float spare[CHUNK];
    int64_t stop = border(n, CHUNK, t + 1, threads), end;
    for (int64_t begin = border(n, CHUNK, t, threads); begin < stop; begin = end) {
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      int64_t here = end - begin, many = here / GROUP;
      float *to = out == m || 4 * n < MUCH ? out + begin : spare;
      memset(planes, 0, sizeof *planes * (size_t)bits);
      for (int64_t rank = 0; rank < ranks; rank++)
        if (weights[rank] != 0.0f)
          count_bits(planes, bits, words + rank * stride + begin / GROUP, many);
      compare(planes, bits, voters / 2, many, minus, none);
      if (voters % 2) memset(none, 0, sizeof none);
      if (kept && 4 * n < MUCH)
        memcpy(kept + begin, m + begin, 4 * (size_t)here);
      else if (kept)
        write_past(kept + begin, m + begin, 4 * here);
      BEST(spread)(minus, none, value, here, to);
      if (to == spare) write_past(out + begin, spare, 4 * here);
    }
    written_past();
  }
  for (int64_t i = 0, begin; i <= count; i++) {
    int64_t end = gap(bands, count, i, n, &begin);
    for (; begin < end; begin++) out[begin] = value[2];
  }
}
