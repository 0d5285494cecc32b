/* Matrices and their thin factors; see `multiply_factors`, `orthogonalize_factors` and
 * `expand_factors` of ops/interface/matrices.py.
 *
 * The order of each sum is written down, and there is no fused multiply-add: the same bits on all
 * processors and frameworks, in any number of threads. Those of the plain ops differ by rounding.
 */
#include <math.h>

#include "kernels.h"
#include "threads.h"

#define LANES 8
#define WIDE (2 * LANES)
#define BLOCK 512 /* columns of which the factors stay in the first-level cache */
#define TALL 2    /* rows of a matrix that share what is read of a factor */
#define DEEP 8    /* rows that are added up before sums are stored */
#define INLINED static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef double doubles __attribute__((vector_size(8 * LANES), aligned(8)));

/* out [rank, apart] = q [columns, rank], across. */
static void transpose(const float *q, int64_t columns, int64_t rank, int64_t apart, float *out) {
  for (int64_t j = 0; j < columns; j++)
    for (int64_t k = 0; k < rank; k++) out[k * apart + j] = q[j * rank + k];
}

/* -- matrices times factors -- */

INLINED float fold(const float *x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* out [rows, rank] = m f^T for `rows` rows and the `width` first rows of f [rank, columns]. */
INLINED void dot_rows(const float *m, int64_t columns, const float *f, int rows, int width,
                      float *out, int64_t rank) {
  lanes sums[TALL][4] = {{{0}}};
  int64_t j = 0;
  for (; j + LANES <= columns; j += LANES)
    for (int k = 0; k < width; k++)
      for (int i = 0; i < rows; i++)
        sums[i][k] += *(const lanes *)(m + i * columns + j) * *(const lanes *)(f + k * columns + j);
  for (int i = 0; i < rows; i++)
    for (int k = 0; k < width; k++) {
      float total = fold((const float *)&sums[i][k]);
      for (int64_t t = j; t < columns; t++) total += m[i * columns + t] * f[k * columns + t];
      out[i * rank + k] = total;
    }
}

INLINED void dot_all(const float *m, int64_t columns, const float *f, int rows, float *out,
                     int64_t rank) {
  int64_t k = 0;
  for (; k + 4 <= rank; k += 4) dot_rows(m, columns, f + k * columns, rows, 4, out + k, rank);
  for (; k + 2 <= rank; k += 2) dot_rows(m, columns, f + k * columns, rows, 2, out + k, rank);
  for (; k < rank; k++) dot_rows(m, columns, f + k * columns, rows, 1, out + k, rank);
}

/* out [rows, rank] = M Q, its rows from `first` on; across is Q transposed. */
FAST static void multiply_rows(const factored *m, const float *x, const float *across, float *out,
                               int64_t first, int64_t end) {
  int64_t i = first;
  for (; i + TALL <= end; i += TALL)
    dot_all(x + i * m->columns, m->columns, across, TALL, out + i * m->rank, m->rank);
  for (; i < end; i++)
    dot_all(x + i * m->columns, m->columns, across, 1, out + i * m->rank, m->rank);
}

/* sums [rank, apart] += the transpose of p [rows, rank], its first `width` columns, times m. */
INLINED void add_rows(const float *m, int64_t columns, int64_t n, const float *p, int64_t rank,
                      int64_t rows, int width, float *sums, int64_t apart) {
  int64_t j = 0;
  for (; j + WIDE <= n; j += WIDE) {
    lanes a[4][2];
    for (int k = 0; k < width; k++) {
      a[k][0] = *(const lanes *)(sums + k * apart + j);
      a[k][1] = *(const lanes *)(sums + k * apart + j + LANES);
    }
    for (int64_t i = 0; i < rows; i++) {
      const lanes left = *(const lanes *)(m + i * columns + j);
      const lanes right = *(const lanes *)(m + i * columns + j + LANES);
      for (int k = 0; k < width; k++) {
        a[k][0] += p[i * rank + k] * left;
        a[k][1] += p[i * rank + k] * right;
      }
    }
    for (int k = 0; k < width; k++) {
      *(lanes *)(sums + k * apart + j) = a[k][0];
      *(lanes *)(sums + k * apart + j + LANES) = a[k][1];
    }
  }
  for (; j < n; j++)
    for (int k = 0; k < width; k++)
      for (int64_t i = 0; i < rows; i++) sums[k * apart + j] += p[i * rank + k] * m[i * columns + j];
}

/* out [columns, rank] = M^T P, its rows from `first` on; sums: `rank` rows, `apart` floats each. */
FAST static void multiply_columns(const factored *m, const float *x, const float *p, float *sums,
                                  float *out, int64_t first, int64_t end) {
  const int64_t rank = m->rank, apart = m->columns, n = end - first;
  for (int64_t k = 0; k < rank; k++)
    for (int64_t j = first; j < end; j++) sums[k * apart + j] = 0;
  for (int64_t i = 0; i < m->rows; i += DEEP) {
    const int64_t rows = m->rows - i < DEEP ? m->rows - i : DEEP;
    const float *from = x + i * m->columns + first, *by = p + i * rank;
    float *to = sums + first;
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4)
      add_rows(from, m->columns, n, by + k, rank, rows, 4, to + k * apart, apart);
    for (; k + 2 <= rank; k += 2)
      add_rows(from, m->columns, n, by + k, rank, rows, 2, to + k * apart, apart);
    for (; k < rank; k++)
      add_rows(from, m->columns, n, by + k, rank, rows, 1, to + k * apart, apart);
  }
  for (int64_t j = first; j < end; j++)
    for (int64_t k = 0; k < rank; k++) out[j * rank + k] = sums[k * apart + j];
}

/* out = M Q of each matrix, one after another, or M^T P if `transposed`. scratch:
 * `scratch_of_factors` of the largest. */
void multiply_factors(const factored *matrices, int64_t count, const float *x, const float *factor,
                      int transposed, float *out, float *scratch, int threads) {
  for (const factored *m = matrices; m < matrices + count; m++) {
    const float *from = x + m->start;
    if (!transposed) transpose(factor, m->columns, m->rank, m->columns, scratch);
    IN_PIECES
    for (int t = 0; t < threads; t++)
      if (transposed)
        multiply_columns(m, from, factor, scratch, out, border(m->columns, WIDE, t, threads),
                         border(m->columns, WIDE, t + 1, threads));
      else
        multiply_rows(m, from, scratch, out, border(m->rows, TALL, t, threads),
                      border(m->rows, TALL, t + 1, threads));
    factor += (transposed ? m->rows : m->columns) * m->rank;
    out += (transposed ? m->columns : m->rows) * m->rank;
  }
}

/* -- orthonormal columns -- */

INLINED double inner(const double *x, const double *y, int64_t n) {
  doubles sums = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    sums += *(const doubles *)(x + i) * *(const doubles *)(y + i);
  double total = ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
                 ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (; i < n; i++) total += x[i] * y[i];
  return total;
}

/* Reflects y, from x to -x where it is along x; scale: 2 over the square of x. */
INLINED void reflect(const double *x, double scale, double *y, int64_t n) {
  const double times = scale * inner(x, y, n);
  for (int64_t i = 0; i < n; i++) y[i] -= times * x[i];
}

/* Doubles that a matrix of thin columns needs. */
int64_t scratch_of_columns(int64_t rows, int64_t rank) { return rank * (rows + 2) + rows; }

/* out [n, rank] has orthonormal columns, which span what those of x do, in their order; by
 * Householder's reflections. Double precision holds the square of any float. */
FAST static void orthogonalize_columns(const float *x, int64_t n, int64_t rank, float *out,
                                       double *scratch) {
  double *a = scratch, *scales = a + rank * n, *signs = scales + rank, *q = signs + rank;
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < rank; k++) a[k * n + i] = x[i * rank + k];
  for (int64_t k = 0; k < rank; k++) {
    double *v = a + k * n + k;
    const double norm = sqrt(inner(v, v, n - k)), head = v[0];
    const double half = norm * (norm + fabs(head)); /* of the square of v - its image */
    v[0] += head < 0 ? -norm : norm;
    scales[k] = half > 0 ? 1 / half : 0;
    signs[k] = half > 0 && !(head < 0) ? -1 : 1; /* the image points away from the column */
    for (int64_t j = k + 1; j < rank; j++) reflect(v, scales[k], a + j * n + k, n - k);
  }
  for (int64_t k = 0; k < rank; k++) {
    for (int64_t i = 0; i < n; i++) q[i] = 0;
    q[k] = signs[k];
    for (int64_t j = k; j >= 0; j--) reflect(a + j * n + j, scales[j], q + j, n - j);
    for (int64_t i = 0; i < n; i++) out[i * rank + k] = (float)q[i];
  }
}

/* Of matrices one after another, with (rows, rank) in `shapes`. scratch: `apart` for each thread. */
void orthogonalize_factors(const int64_t *shapes, int64_t count, const float *x, float *out,
                           double *scratch, int64_t apart, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    const int64_t first = border(count, 1, t, threads), end = border(count, 1, t + 1, threads);
    int64_t at = 0;
    for (int64_t i = 0; i < end; i++) {
      const int64_t rows = shapes[2 * i], rank = shapes[2 * i + 1];
      if (i >= first) orthogonalize_columns(x + at, rows, rank, out + at, scratch + t * apart);
      at += rows * rank;
    }
  }
}

/* -- factors times factors -- */

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
