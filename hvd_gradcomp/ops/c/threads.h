/* How what is written in C uses a processor: its vectors, and several threads. */
#ifndef HVD_GRADCOMP_PIECES_H
#define HVD_GRADCOMP_PIECES_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
/* The fourth level has vectors of bytes as well, which codes are. */
#define FAST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

/* The bits of a float, and the float of bits. */
static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

/* A function that Python calls. */
#define PUBLIC __attribute__((visibility("default")))

/* What follows is a loop over pieces, of which each is one thread's. */
#define IN_PIECES _Pragma("omp parallel for num_threads(threads) if (threads > 1) schedule(static)")

/* Where piece t of `pieces` begins; a multiple of `grain`, and the end for the last. */
static inline int64_t border(int64_t n, int64_t grain, int t, int pieces) {
  int64_t grains = (n + grain - 1) / grain, at = grains * t / pieces * grain;
  return at < n ? at : n;
}

#define MUCH (1 << 20) /* bytes that are not in a cache any more when they are needed next */
#define LINE 64        /* bytes of a cache's */

#ifdef __x86_64__
#include <emmintrin.h>

/* Copies past the caches: a store reads the line that it writes to first otherwise.
 *
 * Before other threads read it, `written_past`.
 */
static inline void write_past(void *to, const void *from, int64_t bytes) {
  char *out = to;
  const char *in = from;
  int64_t head = -(intptr_t)to & 15, done = head < bytes ? head : bytes;
  memcpy(out, in, (size_t)done);
  for (; done + 16 <= bytes; done += 16)
    _mm_stream_si128((__m128i *)(out + done), _mm_loadu_si128((const __m128i *)(in + done)));
  memcpy(out + done, in + done, (size_t)(bytes - done));
}

static inline void written_past(void) { _mm_sfence(); }
#else
static inline void write_past(void *to, const void *from, int64_t bytes) {
  memcpy(to, from, (size_t)bytes);
}

static inline void written_past(void) {}
#endif

#endif
