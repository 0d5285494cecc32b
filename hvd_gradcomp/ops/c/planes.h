/* Unpacking of 32 codes of eight bits each, in registers; see bitpack.c. */
#ifndef HVD_GRADCOMP_PLANES_H
#define HVD_GRADCOMP_PLANES_H

#include "kernels.h"
#include "simd.h"

#ifdef __x86_64__
/* Swaps the bits of a mask with those `shift` above them. */
#define SWAP(v, shift, mask)                                                                 \
  do {                                                                                       \
    __m256i lower = _mm256_set1_epi64x(mask);                                                  \
    __m256i differ = _mm256_and_si256(_mm256_xor_si256(v, _mm256_srli_epi64(v, shift)), lower); \
    v = _mm256_xor_si256(v, _mm256_xor_si256(differ, _mm256_slli_epi64(differ, shift)));     \
  } while (0)

/* Of eight planes: eight codes are a square of 64 bits, which is transposed. */
AVX2 static inline void unpack_bytes_avx2(const uint32_t *words, int64_t n, uint8_t *codes) {
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
#endif

#endif
