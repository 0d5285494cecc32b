/* Vectors of AVX2 and AVX-512, where the compiler and the processor have them. */
#ifndef HVD_GRADCOMP_SIMD_H
#define HVD_GRADCOMP_SIMD_H

#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,popcnt")))
/* A function has a twin with the same result for other processors: NAME_avx2 and NAME_plainly. */
#define BEST(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_plainly)
/* The same with a third twin, NAME_avx512. */
#define WIDEST(name) (__builtin_cpu_supports("avx512f") ? name##_avx512 : BEST(name))
#else
#define BEST(name) name##_plainly
#define WIDEST(name) name##_plainly
#endif

#endif
