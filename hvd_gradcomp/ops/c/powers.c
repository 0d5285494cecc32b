/* Elements rounded at random to powers of two: sign and exponent, 9 bits; see
 * ops/interface/quantization.py, which says the same in plain ops.
 */
#include "kernels.h"
#include "threads.h"

#define GROUP 32
#define BITS 9
#define CHUNK 4096 /* elements at a time; whole groups */

/* The first bits of float32, to which a random carry goes out of the last 23. */
FAST static void round_at_random(const float *x, int64_t n, uint32_t place, uint32_t key,
                                 uint32_t *codes) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t hash = mix(mix(place + (uint32_t)i) ^ key);
    codes[i] = (bits_of(x[i]) + (hash >> 9)) >> 23;
  }
}

/* key: two numbers of 32 bits. n is a multiple of GROUP. */
void encode_powers_of_two(const float *x, int64_t n, const int64_t *key, uint32_t *words,
                          int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint32_t codes[CHUNK];
    int64_t end = border(n, CHUNK, t + 1, threads);
    for (int64_t at = border(n, CHUNK, t, threads); at < end; at += CHUNK) {
      int64_t here = end - at < CHUNK ? end - at : CHUNK;
      round_at_random(x + at, here, (uint32_t)at + (uint32_t)key[0], (uint32_t)key[1], codes);
      for (int64_t i = 0; i < here; i += GROUP)
        split_planes(codes + i, BITS, words + (at + i) / GROUP * BITS);
    }
  }
}

/* Adds the weighted numbers of codes; n is a multiple of GROUP. */
static void add_codes_plainly(float *total, const uint32_t *words, int64_t n, float weight) {
  for (int64_t i = 0; i < n; i += GROUP, words += BITS) {
    uint32_t numbers[GROUP] = {0};
    join_planes(words, BITS, 23, numbers);
    for (int64_t lane = 0; lane < GROUP; lane++) {
      float value = float_of(numbers[lane]) * weight;
      total[i + lane] = total[i + lane] + value;
    }
  }
}

#ifdef __x86_64__
#include <immintrin.h>

/* Exponents are bytes: of eight planes, a bit of each; the ninth has the signs. */
__attribute__((target("avx2"))) static void add_codes_avx2(float *total, const uint32_t *words,
                                                          int64_t n, float weight) {
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                          2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i lanes = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  const __m256i top = _mm256_set1_epi32(INT32_MIN);
  const __m256i to_top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256 times = _mm256_set1_ps(weight);
  for (int64_t i = 0; i < n; i += GROUP, words += BITS) {
    uint8_t exponents[GROUP];
    __m256i bytes = _mm256_setzero_si256();
    for (int plane = 0; plane < 8; plane++) {
      const __m256i word = _mm256_set1_epi32((int32_t)words[plane]);
      const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(word, spread), lanes);
      const __m256i bit = _mm256_set1_epi8((char)(1 << plane));
      bytes = _mm256_or_si256(bytes, _mm256_and_si256(_mm256_cmpeq_epi8(own, lanes), bit));
    }
    _mm256_storeu_si256((__m256i *)exponents, bytes);
    for (int part = 0; part < GROUP; part += 8) {
      const __m256i own = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(exponents + part)));
      const __m256i signs = _mm256_set1_epi32((int32_t)(words[8] >> part));
      const __m256i sign = _mm256_and_si256(_mm256_sllv_epi32(signs, to_top), top);
      const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(own, 23), sign);
      const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(bits), times);
      float *to = total + i + part;
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), value));
    }
  }
}

static void add_codes(float *total, const uint32_t *words, int64_t n, float weight) {
  if (__builtin_cpu_supports("avx2"))
    add_codes_avx2(total, words, n, weight);
  else
    add_codes_plainly(total, words, n, weight);
}
#else
#define add_codes add_codes_plainly
#endif

/* out = base, or 0, + the sum over ranks; their words are `stride` apart. */
void add_powers_of_two(const float *base, float *out, int64_t n, int64_t ranks,
                       const uint32_t *words, int64_t stride, const float *weights, int threads) {
  int past = base != out && 4 * n >= MUCH;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    float room[CHUNK];
    int64_t end = border(n, CHUNK, t + 1, threads);
    for (int64_t at = border(n, CHUNK, t, threads); at < end; at += CHUNK) {
      int64_t here = end - at < CHUNK ? end - at : CHUNK;
      float *total = past ? room : out + at;
      if (!base)
        memset(total, 0, sizeof(float) * (size_t)here);
      else if (total != base + at)
        memcpy(total, base + at, sizeof(float) * (size_t)here);
      for (int64_t rank = 0; rank < ranks; rank++)
        add_codes(total, words + rank * stride + at / GROUP * BITS, here, weights[rank]);
      if (past) write_past(out + at, room, 4 * here);
    }
    written_past();
  }
}
