/* Vectors of AVX2 and AVX-512, where the compiler and the processor have them. */
#ifndef HVD_GRADCOMP_SIMD_H
#define HVD_GRADCOMP_SIMD_H

#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,popcnt")))

AVX512 static inline __m512i lanes_avx512(void) {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

/* A function has a twin with the same result for other processors: NAME_avx2 and NAME_plainly. */
#define BEST(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_plainly)
/* The same with a third twin, NAME_avx512. */
#define WIDEST(name) (__builtin_cpu_supports("avx512f") ? name##_avx512 : BEST(name))
#else
#define BEST(name) name##_plainly
#define WIDEST(name) name##_plainly
#endif

#endif
