/* Tiles of a matrix, each multiplied from both sides; see `turn_tiles` of ops/interface/matrices.py.
 *
 * Sums run from the first product to the last, without fused multiply-add: the same bits on all
 * processors and frameworks. Those of the plain ops differ by rounding.
 */
#include "kernels.h"
#include "threads.h"

#define TALL 4  /* rows and columns of what is summed up in registers */
#define WIDE 16
#define LANES 8

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

static int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* c [m, n] = a [m, k] times b [k, n]; m is a multiple of TALL, and n, which is how far rows of b and
 * c are apart, of WIDE. */
FAST static void product(const float *a, int64_t a_apart, const float *b, float *c, int64_t m,
                         int64_t k, int64_t n) {
  for (int64_t i = 0; i < m; i += TALL)
    for (int64_t j = 0; j < n; j += WIDE) {
      lanes sum[TALL][WIDE / LANES] = {{{0.0f}}};
      for (int64_t l = 0; l < k; l++) {
        const lanes *row = (const lanes *)(b + l * n + j);
#pragma GCC unroll 4
        for (int r = 0; r < TALL; r++) {
          float own = a[(i + r) * a_apart + l];
          sum[r][0] += own * row[0];
          sum[r][1] += own * row[1];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < TALL; r++) {
        lanes *to = (lanes *)(c + (i + r) * n + j);
        to[0] = sum[r][0], to[1] = sum[r][1];
      }
    }
}

/* Floats: both factors, the tile and its first product, each up to whole blocks; and the columns of
 * the left factor that meet a row with numbers. */
int64_t scratch_of_tile(int64_t height, int64_t width) {
  int64_t tall = up_to(height, TALL), wide = up_to(width, WIDE);
  return 2 * tall * height + width * wide + 2 * tall * wide;
}

FAST static int is_clear(const float *x, int64_t n) {
  uint32_t any = 0;
  for (int64_t i = 0; i < n; i++) any |= bits_of(x[i]) << 1;
  return !any;
}

/* out = out + factor * x */
FAST static void add_multiple(float *out, const float *x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = out[i] + factor * x[i];
}

/* A tile times the right factor, without the products of zeros, which add nothing: rows of the
 * result that are not clear, close together in `half`, and the columns of the left factor for them.
 *
 * Returns how many there are.
 */
static int64_t turn_few(const float *x, int64_t apart, int64_t height, int64_t width,
                        const float *right, int64_t wide, const float *left, int64_t tall,
                        float *half, float *columns) {
  int64_t count = 0;
  for (int64_t i = 0; i < height; i++) {
    const float *row = x + i * apart;
    if (is_clear(row, width)) continue;
    float *to = half + count * wide;
    memset(to, 0, sizeof(float) * (size_t)wide);
    for (int64_t j = 0; j < width; j++)
      if (row[j] != 0.0f) add_multiple(to, right + j * wide, row[j], wide);
    for (int64_t r = 0; r < tall; r++) columns[r * height + count] = left[r * height + i];
    count++;
  }
  return count;
}

/* Copies a matrix into one of longer rows, of which the rest stays as it is. */
static void lay(const float *from, int64_t from_apart, float *to, int64_t to_apart, int64_t rows,
                int64_t columns) {
  for (int64_t i = 0; i < rows; i++)
    memcpy(to + i * to_apart, from + i * from_apart, sizeof(float) * (size_t)columns);
}

/* Each tile of x becomes left [height, height] times it times right [width, width].
 *
 * A tile lies in a matrix [rows, columns], or by itself, one after another: `back` says that x is
 * tiles and out a matrix; most of their numbers are zeros then. scratch: [threads, scratch_of_tile].
 */
void turn_tiles(const float *x, float *out, int64_t rows, int64_t columns, int64_t height,
                int64_t width, const float *left, const float *right, int back, float *scratch,
                int threads) {
  int64_t across = columns / width, tiles = rows / height * across;
  int64_t tall = up_to(height, TALL), wide = up_to(width, WIDE);
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    float *first = scratch + scratch_of_tile(height, width) * t, *second = first + tall * height;
    float *tile = second + width * wide, *half = tile + tall * wide, *some = half + tall * wide;
    memset(first, 0, sizeof(float) * (size_t)scratch_of_tile(height, width));
    lay(left, height, first, height, height, height);
    lay(right, width, second, wide, width, width);
    int64_t end = border(tiles, 1, t + 1, threads);
    for (int64_t at = border(tiles, 1, t, threads); at < end; at++) {
      int64_t there = at / across * height * columns + at % across * width;
      int64_t from = back ? at * height * width : there, to = back ? there : at * height * width;
      if (back) {
        int64_t count =
            turn_few(x + from, width, height, width, second, wide, first, tall, half, some);
        product(some, height, half, tile, tall, count, wide);
      } else {
        lay(x + from, columns, tile, wide, height, width);
        product(tile, wide, second, half, tall, width, wide);
        product(first, height, half, tile, tall, height, wide);
      }
      lay(tile, wide, out + to, back ? columns : width, height, width);
    }
  }
}
