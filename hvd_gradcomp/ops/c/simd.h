/* Vectors of AVX2, where the compiler and the processor have them. */
#ifndef HVD_GRADCOMP_SIMD_H
#define HVD_GRADCOMP_SIMD_H

#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
/* A function has a twin with the same result for other processors: NAME_avx2 and NAME_plainly. */
#define BEST(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_plainly)
#else
#define BEST(name) name##_plainly
#endif

#endif
