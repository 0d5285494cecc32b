/* Axes in the reverse order, for layers that a framework stores in another order than it shows. */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

#define MANY (1 << 18) /* elements, from which on threads pay */

#define EDGE 16 /* elements of a cache line */
#define TALL 64 /* rows, each of which lies in another page, that are read in turn */

/* Sixteen rows of sixteen, read from `from`, become columns of what is written to `to`. */
static void transpose_plainly(const float *const *from, float *const *to) {
  for (int j = 0; j < EDGE; j++)
    for (int i = 0; i < EDGE; i++) to[j][i] = from[i][j];
}

#ifdef __x86_64__
/* Four times, what lies in row i and column k goes to the place whose bits are those of (i, k),
 * rotated by one: afterwards i and k have changed places.
 *
 * past: whether it is written past the caches, which would read each line first; to whole lines.
 */
__attribute__((target("avx512f"))) static void transpose_avx512(const float *const *from,
                                                            float *const *to, int past) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512 x[EDGE], y[EDGE];
  for (int i = 0; i < EDGE; i++) {
    x[i] = _mm512_loadu_ps(from[i]);
    __builtin_prefetch(from[i] + 2 * EDGE);
  }
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; stage++) {
#pragma GCC unroll 8
    for (int i = 0; i < EDGE / 2; i++) {
      y[2 * i] = _mm512_permutex2var_ps(x[i], low, x[i + EDGE / 2]);
      y[2 * i + 1] = _mm512_permutex2var_ps(x[i], high, x[i + EDGE / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < EDGE; i++) x[i] = y[i];
  }
  for (int j = 0; j < EDGE; j++)
    if (past)
      _mm512_stream_ps(to[j], x[j]);
    else
      _mm512_storeu_ps(to[j], x[j]);
}
#endif

static void transpose_tile(const float *const *from, float *const *to, int past) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) {
    transpose_avx512(from, to, past);
    return;
  }
#endif
  (void)past;
  transpose_plainly(from, to);
}

/* x [a, b, c] becomes out [c, b, a]; what lies in either at one place of its first axis is
 * contiguous, and `apart` elements from the next place.
 *
 * Of rows and columns that are far from each other: two axes are taken together, one of them the
 * shortest, and only whole rows change their places by it.
 *
 * past: whether out is not needed soon, and may be written past the caches.
 */
PUBLIC void reverse(const float *x, int64_t a, int64_t b, int64_t c, int64_t x_apart, float *out,
             int64_t out_apart, int past, int threads) {
  int wide = c > a; /* rows are of a and b, or of a alone */
  int64_t rows = wide ? a * b : a, columns = wide ? c : b * c;
  past = past && out_apart % EDGE == 0 && (wide || a % EDGE == 0) &&
         (uintptr_t)out % (4 * EDGE) == 0;
  if (a * b * c < MANY) threads = 1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t begin = border(columns, EDGE, t, threads), stop = border(columns, EDGE, t + 1, threads);
    for (int64_t top = 0, low; top < rows; top = low) {
      low = top + TALL < rows ? top + TALL : rows;
      for (int64_t left = begin, right; left < stop; left = right) {
        right = left + EDGE < stop ? left + EDGE : stop;
        float *to[EDGE];
        for (int64_t j = left; j < right; j++)
          to[j - left] = out + (wide ? j * out_apart : j % c * out_apart + j / c * a) + top;
        for (int64_t i = top; i < low; i += EDGE) {
          const float *from[EDGE];
          int64_t height = i + EDGE < low ? EDGE : low - i, width = right - left;
          for (int64_t k = i; k < i + height; k++)
            from[k - i] = x + (wide ? k % a * x_apart + k / a * c : k * x_apart) + left;
          if (height == EDGE && width == EDGE)
            transpose_tile(from, to, past);
          else
            for (int64_t k = 0; k < height; k++)
              for (int64_t j = 0; j < width; j++) to[j][k] = from[k][j];
          for (int64_t j = 0; j < width; j++) to[j] += height;
        }
      }
    }
#ifdef __x86_64__
    if (past) _mm_sfence(); /* before other threads read it */
#endif
  }
}
