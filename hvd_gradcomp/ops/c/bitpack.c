/* Codes as bit planes: of 32 codes, bit j of each is one word.
 *
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include <string.h>

#include "kernels.h"
#include "planes.h"
#include "simd.h"
#include "threads.h"

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
