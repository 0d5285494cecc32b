/* Elements rounded at random to powers of two: sign and exponent, 9 bits; see
 * ops/interface/quantization.py, which says the same in plain ops.
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include "kernels.h"
#include "threads.h"

#define BITS 9
#define CHUNK 4096 /* elements at a time; whole groups */

/* The first bits of float32, to which a random carry goes out of the last 23. */
FAST static void round_at_random(const float *x, int64_t n, uint32_t place, uint32_t key,
                                 uint8_t *exponents, uint8_t *signs) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t hash = mix(mix(place + (uint32_t)i) ^ key);
    uint32_t bits = bits_of(x[i]) + (hash >> 9);
    exponents[i] = (uint8_t)(bits >> 23);
    signs[i] = (uint8_t)(bits >> 31);
  }
}

/* key: two numbers of 32 bits. n is a multiple of GROUP. */
void encode_powers_of_two(const float *x, int64_t n, const int64_t *key, uint32_t *words,
                          int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t exponents[CHUNK], signs[CHUNK];
    int64_t end = border(n, CHUNK, t + 1, threads);
    for (int64_t at = border(n, CHUNK, t, threads); at < end; at += CHUNK) {
      int64_t here = end - at < CHUNK ? end - at : CHUNK;
      uint32_t place = (uint32_t)at + (uint32_t)key[0], *own = words + at / GROUP * BITS;
      round_at_random(x + at, here, place, (uint32_t)key[1], exponents, signs);
      for (int64_t i = 0; i < here; i += GROUP, own += BITS) {
        pack_codes(exponents + i, GROUP, 8, own);
        pack_codes(signs + i, GROUP, 1, own + 8);
      }
    }
  }
}

FAST static void add_weighted(float *total, const uint8_t *exponents, const uint8_t *signs,
                              int64_t n, float weight) {
  for (int64_t i = 0; i < n; i++) {
    float value = float_of((uint32_t)exponents[i] << 23 | (uint32_t)signs[i] << 31) * weight;
    total[i] = total[i] + value;
  }
}

/* out = base, or 0, + the sum over ranks; their words are `stride` apart. */
void add_powers_of_two(const float *base, float *out, int64_t n, int64_t ranks,
                       const uint32_t *words, int64_t stride, const float *weights, int threads) {
  int past = base != out && 4 * n >= MUCH;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    float spare[CHUNK];
    uint8_t exponents[CHUNK], signs[CHUNK];
    int64_t end = border(n, CHUNK, t + 1, threads);
    for (int64_t at = border(n, CHUNK, t, threads); at < end; at += CHUNK) {
      int64_t here = end - at < CHUNK ? end - at : CHUNK;
      float *total = past ? spare : out + at;
      if (!base)
        memset(total, 0, sizeof(float) * (size_t)here);
      else if (total != base + at)
        memcpy(total, base + at, sizeof(float) * (size_t)here);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const uint32_t *own = words + rank * stride + at / GROUP * BITS;
        for (int64_t i = 0; i < here; i += GROUP, own += BITS) {
          unpack_codes(own, GROUP, 8, exponents + i);
          unpack_codes(own + 8, GROUP, 1, signs + i);
        }
        add_weighted(total, exponents, signs, here, weights[rank]);
      }
      if (past) write_past(out + at, spare, 4 * here);
    }
    written_past();
  }
}
