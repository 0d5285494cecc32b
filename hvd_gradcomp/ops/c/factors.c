/* Matrices from their thin factors; see `expand_factors` of ops/interface/matrices.py.
 *
 * Sums run from the first product to the last, without fused multiply-add: the same bits on all
 * processors and frameworks. Those of the plain ops differ by rounding.
 */
#include "kernels.h"
#include "threads.h"

#define LANES 8
#define WIDE (2 * LANES)
#define BLOCK 512 /* columns of which the factors stay in the first-level cache */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

/* kept = x - p q, total = other_p other_q, for n columns of a row; q are rows, `apart` floats. */
FAST static void expand_row(const float *p, const float *q, const float *other_p,
                            const float *other_q, int64_t rank, int64_t apart, const float *x,
                            float *kept, float *total, int64_t n) {
  int64_t j = 0;
  for (; j + WIDE <= n; j += WIDE) {
    const lanes *own = (const lanes *)(q + j), *other = (const lanes *)(other_q + j);
    lanes a0 = p[0] * own[0], a1 = p[0] * own[1];
    lanes b0 = other_p[0] * other[0], b1 = other_p[0] * other[1];
    for (int64_t k = 1; k < rank; k++) {
      own = (const lanes *)(q + k * apart + j), other = (const lanes *)(other_q + k * apart + j);
      a0 += p[k] * own[0], a1 += p[k] * own[1];
      b0 += other_p[k] * other[0], b1 += other_p[k] * other[1];
    }
    const lanes *from = (const lanes *)(x + j);
    lanes *left = (lanes *)(kept + j), *to = (lanes *)(total + j);
    left[0] = from[0] - a0, left[1] = from[1] - a1;
    to[0] = b0, to[1] = b1;
  }
  for (; j < n; j++) {
    float a = p[0] * q[j], b = other_p[0] * other_q[j];
    for (int64_t k = 1; k < rank; k++) {
      a += p[k] * q[k * apart + j];
      b += other_p[k] * other_q[k * apart + j];
    }
    kept[j] = x[j] - a;
    total[j] = b;
  }
}

/* out [rank, apart] = q [columns, rank], across. */
static void transpose(const float *q, int64_t columns, int64_t rank, int64_t apart, float *out) {
  for (int64_t j = 0; j < columns; j++)
    for (int64_t k = 0; k < rank; k++) out[k * apart + j] = q[j * rank + k];
}

int64_t scratch_of_factors(int64_t columns, int64_t rank) { return 2 * columns * rank; }

/* The rows from `first` on of a matrix, block by block. */
static void expand_rows(const factored *m, const float *p, const float *q, const float *other_p,
                        const float *other_q, const float *x, float *kept, float *total,
                        int64_t first, int64_t end) {
  float left[BLOCK];
  for (int64_t j = 0; j < m->columns; j += BLOCK) {
    const int64_t n = m->columns - j < BLOCK ? m->columns - j : BLOCK;
    for (int64_t i = first; i < end; i++) {
      const int64_t at = m->start + i * m->columns + j;
      expand_row(p + i * m->rank, q + j, other_p + i * m->rank, other_q + j, m->rank, m->columns,
                 x + at, left, total + at, n);
      write_past(kept + at, left, 4 * n);
    }
  }
  written_past();
}

/* x less the product of the first factors, and the product of the others, where there are matrices;
 * 0 and `between` elsewhere. total may be x. scratch: `scratch_of_factors` of the largest. */
void expand_factors(const factored *matrices, int64_t count, const float *x, const float *p,
                    const float *q, const float *other_p, const float *other_q,
                    const float *between, int64_t size, float *kept, float *total, float *scratch,
                    int threads) {
  int64_t done = 0;
  for (int64_t number = 0; number <= count; number++) {
    const factored *m = matrices + number;
    const int64_t stop = number < count ? m->start : size;
    if (stop > done) { /* of a vector without elements there may be no memory */
      memset(kept + done, 0, sizeof(float) * (size_t)(stop - done));
      memcpy(total + done, between, sizeof(float) * (size_t)(stop - done));
      between += stop - done;
    }
    if (number == count) break;
    float *across = scratch, *other = scratch + m->columns * m->rank;
    transpose(q, m->columns, m->rank, m->columns, across);
    transpose(other_q, m->columns, m->rank, m->columns, other);
    IN_PIECES
    for (int t = 0; t < threads; t++)
      expand_rows(m, p, across, other_p, other, x, kept, total, border(m->rows, 1, t, threads),
                  border(m->rows, 1, t + 1, threads));
    p += m->rows * m->rank, other_p += m->rows * m->rank;
    q += m->columns * m->rank, other_q += m->columns * m->rank;
    done = m->start + m->rows * m->columns;
  }
}
