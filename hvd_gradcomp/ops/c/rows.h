/* What walks over a bucket share; see threshold.c and topk.c. */
#ifndef HVD_GRADCOMP_WALKS_H
#define HVD_GRADCOMP_WALKS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

#define CHUNK 2048 /* elements that stay in the first-level cache, of four vectors */
#define TILE 16384 /* of one vector */
#define RUN 64
#define NEAR 256 /* words that are looked at together, at most */
#define AHEAD 32 /* of which the one whose element is fetched already */

/* -- places ---------------------------------------------------------------------------------- */

static int64_t layer_of(const place *where, int64_t index) {
  return where->layer_of_block[index >> where->block_bits];
}

/* Where the piece of one layer that begins at `at` ends: at most CHUNK further, and at `stop`. */
static int64_t end_of(const place *where, int64_t at, int64_t stop) {
  int64_t block = (int64_t)1 << where->block_bits, layer = layer_of(where, at);
  int64_t end = (at / block + 1) * block;
  while (end < stop && end - at < CHUNK && layer_of(where, end) == layer) end += block;
  if (end - at > CHUNK) end = at + CHUNK;
  return end < stop ? end : stop;
}

/* How many ascending words from the first on lie in its layer: not all, if those are many. */
static int64_t near(const place *where, uint32_t mask, const uint32_t *words, int64_t count,
                    int64_t *layer) {
  int64_t n = count < NEAR ? count : NEAR;
  *layer = layer_of(where, words[0] & mask);
  while (n > 1 && layer_of(where, words[n - 1] & mask) != *layer) n /= 2;
  return n;
}

/* Adds to `sent` how many of the ascending words are of each layer; mask: the bits of an index. */
static void count_layers(const place *where, uint32_t mask, const uint32_t *words, int64_t count,
                         int64_t *sent) {
  for (int64_t i = 0, n, layer; i < count; i += n) {
    n = near(where, mask, words + i, count - i, &layer);
    sent[layer] += n;
  }
}

/* 0 if words ascend, 1 if they do not, -1 if one lies beyond the bucket. */
FAST static int order_of(const uint32_t *words, int64_t count, uint32_t mask, uint32_t size) {
  uint32_t falls = 0, beyond = 0;
  for (int64_t i = 0; i < count; i++) beyond |= (words[i] & mask) >= size;
  for (int64_t i = 1; i < count; i++) falls |= (words[i] & mask) < (words[i - 1] & mask);
  return beyond ? -1 : (int)falls;
}

/* The first of ascending words that does not lie before an index. */
static int64_t first_from(const uint32_t *words, int64_t count, uint32_t mask, int64_t index) {
  int64_t low = 0;
  while (count > 0) {
    int64_t half = count / 2;
    if ((words[low + half] & mask) < index) {
      low += half + 1;
      count -= half + 1;
    } else
      count = half;
  }
  return low;
}

/* Moves the pieces that threads have written together. */
static int64_t join(uint32_t *items, const int64_t *starts, const int64_t *counts, int pieces) {
  int64_t total = 0;
  for (int t = 0; t < pieces; t++) {
    if (starts[t] != total)
      memmove(items + total, items + starts[t], sizeof(uint32_t) * (size_t)counts[t]);
    total += counts[t];
  }
  return total;
}

/* -- taking in and finding ------------------------------------------------------------------ */

/* Elements before those that are written past the caches, which begin on a line. */
static inline int64_t before_line(const float *r, int64_t n) {
  int64_t head = (int64_t)(-(uintptr_t)r % LINE / sizeof(float));
  return head < n ? head : 0;
}

/* Whether one of two is the same memory as before. */
static inline int in_place(const float *r, const float *v, const float *r0, const float *v0) {
  return r == r0 || (v && v == v0);
}

/* Whether v lies beside r, and both are other memory than before, and much. */
static inline int written_elsewhere(const float *r, const float *v, const float *r0,
                                    const float *v0, int64_t n) {
  int beside = !v || ((uintptr_t)r - (uintptr_t)v) % LINE == 0;
  return beside && !in_place(r, v, r0, v0) && (int64_t)sizeof(float) * n >= MUCH;
}

/* `from` may be x itself: nothing else overlaps. */
FAST static void add(float *x, const float *from, const float *y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) x[i] = from[i] + y[i];
}

#define UNAMBIGUOUS(i) (r[i] * r[i] > v[i] * how->alpha)
#define LARGE(i) (fabsf(r[i]) > how->tau)
#define WANTED(i) ((!how->ambiguity || UNAMBIGUOUS(i)) && (!how->large || LARGE(i)))
#define MAGNITUDE(x) (bits_of(x) & 0x7fffffffu)

/* The indices of what is wanted and what r holds there, as bits; and the largest magnitude of it. */
static int64_t list_plainly(const rule *how, const float *r, const float *v, int64_t first,
                            int64_t n, uint32_t base, uint32_t *index, uint32_t *bits,
                            uint32_t *most) {
  int64_t count = 0;
  for (int64_t i = first; i < n; i++)
    if (WANTED(i)) {
      index[count] = base + (uint32_t)i, bits[count++] = bits_of(r[i]);
      if (MAGNITUDE(r[i]) > *most) *most = MAGNITUDE(r[i]);
    }
  return count;
}

#ifdef __x86_64__

__attribute__((target("avx2"))) static inline float sum_of_lanes_avx2(const __m256 x[4]) {
  float lanes[8], total = 0.0f;
  _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(x[0], x[1]), _mm256_add_ps(x[2], x[3])));
  for (int lane = 0; lane < 8; lane++) total += lanes[lane];
  return total;
}

__attribute__((target("avx512f"))) static inline float sum_of_lanes_avx512(const __m512 x[4]) {
  return _mm512_reduce_add_ps(
      _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
}

__attribute__((target("avx2"))) static inline void store_avx2(float *to, __m256 x, int past) {
  if (past)
    _mm256_stream_ps(to, x);
  else
    _mm256_storeu_ps(to, x);
}

__attribute__((target("avx512f"))) static inline void store_avx512(float *to, __m512 x, int past) {
  if (past)
    _mm512_stream_ps(to, x);
  else
    _mm512_storeu_ps(to, x);
}

__attribute__((target("avx2,bmi"))) static int64_t list_avx2(const rule *how, const float *r,
                                                              const float *v, int64_t n,
                                                              uint32_t base, uint32_t *index,
                                                              uint32_t *bits, uint32_t *most) {
  const __m256 alpha = _mm256_set1_ps(how->alpha), tau = _mm256_set1_ps(how->tau);
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  int64_t count = 0, run = 0;
  for (; run + RUN <= n; run += RUN) {
    uint64_t flags = 0;
    for (int64_t part = 0; part < RUN; part += 8) {
      const __m256 x = _mm256_loadu_ps(r + run + part);
      uint32_t passes = 255;
      if (how->ambiguity) {
        const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(v + run + part), alpha);
        passes = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_mul_ps(x, x), y, _CMP_GT_OQ));
      }
      if (how->large)
        passes &= (uint32_t)_mm256_movemask_ps(
            _mm256_cmp_ps(_mm256_and_ps(x, magnitude), tau, _CMP_GT_OQ));
      flags |= (uint64_t)passes << part;
    }
    for (; flags; flags &= flags - 1) {
      int64_t i = run + __builtin_ctzll(flags);
      index[count] = base + (uint32_t)i, bits[count++] = bits_of(r[i]);
      if (MAGNITUDE(r[i]) > *most) *most = MAGNITUDE(r[i]);
    }
  }
  return count + list_plainly(how, r, v, run, n, base, index + count, bits + count, most);
}

/* Appends which of 16 elements pass, with their bits; returns how many. `first` is the index of the
 * first. Writes 16, so it may write beyond what passes, never beyond what was looked at. */
AVX512 static inline int64_t append_avx512(
    __m512 x, __mmask16 passes, uint32_t first, uint32_t *index, uint32_t *bits) {
  const __m512i ahead = lanes_avx512();
  const __m512i here = _mm512_add_epi32(_mm512_set1_epi32((int)first), ahead);
  _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(passes, here));
  _mm512_storeu_ps(bits, _mm512_maskz_compress_ps(passes, x));
  return __builtin_popcount(passes);
}

AVX512 static int64_t list_avx512(
    const rule *how, const float *r, const float *v, int64_t n, uint32_t base, uint32_t *index,
    uint32_t *bits, uint32_t *most) {
  const __m512 alpha = _mm512_set1_ps(how->alpha), tau = _mm512_set1_ps(how->tau);
  __m512i largest = _mm512_setzero_si512();
  int64_t count = 0, run = 0;
  for (; run + RUN <= n; run += RUN) {
    __mmask16 passes[4];
    for (int part = 0; part < 4; part++) {
      const __m512 x = _mm512_loadu_ps(r + run + 16 * part);
      passes[part] = 0xffff;
      if (how->ambiguity) {
        const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(v + run + 16 * part), alpha);
        passes[part] = _mm512_cmp_ps_mask(_mm512_mul_ps(x, x), y, _CMP_GT_OQ);
      }
      if (how->large)
        passes[part] = _mm512_mask_cmp_ps_mask(passes[part], _mm512_abs_ps(x), tau, _CMP_GT_OQ);
    }
    if (!(passes[0] | passes[1] | passes[2] | passes[3])) continue;
    for (int part = 0; part < 4; part++) {
      int64_t i = run + 16 * part;
      const __m512 x = _mm512_loadu_ps(r + i);
      const __m512i size = _mm512_castps_si512(_mm512_abs_ps(x));
      largest = _mm512_mask_max_epu32(largest, passes[part], largest, size);
      count += append_avx512(x, passes[part], base + (uint32_t)i, index + count, bits + count);
    }
  }
  uint32_t here = _mm512_reduce_max_epu32(largest);
  if (here > *most) *most = here;
  return count + list_plainly(how, r, v, run, n, base, index + count, bits + count, most);
}

static inline int64_t list(const rule *how, const float *r, const float *v, int64_t n, uint32_t base,
                    uint32_t *index, uint32_t *bits, uint32_t *most) {
  if (__builtin_cpu_supports("avx512f")) return list_avx512(how, r, v, n, base, index, bits, most);
  if (__builtin_cpu_supports("avx2")) return list_avx2(how, r, v, n, base, index, bits, most);
  return list_plainly(how, r, v, 0, n, base, index, bits, most);
}
#else
#define list(how, r, v, n, base, index, bits, most) \
  list_plainly(how, r, v, 0, n, base, index, bits, most)
#endif

#endif
