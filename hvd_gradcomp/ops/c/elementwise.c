/* Elementwise sums. No fused multiply-add; see kernels.h. */
#include "kernels.h"
#include "threads.h"

FAST void add_momentum(float *r, float *u, const float *r0, const float *u0, const float *g,
                       int64_t n, float momentum, int nesterov) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float next = u0[i] * momentum;
    next = next + g[i];
    u[i] = next;
    float ahead = next * momentum;
    ahead = ahead + g[i];
    r[i] = r0[i] + (nesterov ? ahead : next);
  }
}

FAST void add_vectors(const float *x, const float *y, float *out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}
