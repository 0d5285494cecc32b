/* Frames, their checksums, and whether numbers are finite.
 *
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#define CHUNK 4096
#define MANY (1 << 18) /* words, from which on threads pay */

#define SIDE_BY_SIDE 64 /* words that are summed at the same time */

/* With the sums of each lane after each row in `later`, no word is multiplied: a word in row k of n
 * is in n - k of them.
 */
FAST static uint32_t weighted(const uint32_t *words, int64_t n, int64_t place) {
  uint32_t sums[SIDE_BY_SIDE] = {0}, later[SIDE_BY_SIDE] = {0};
  uint32_t sum = 0, first = (uint32_t)(2 * place + 17);
  int64_t rows = n / SIDE_BY_SIDE;
  for (int64_t row = 0; row < rows; row++, words += SIDE_BY_SIDE)
    for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
      sums[lane] += words[lane];
      later[lane] += sums[lane];
    }
  for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
    uint32_t by_row = (uint32_t)rows * sums[lane] - later[lane];
    sum += (first + 2 * (uint32_t)lane) * sums[lane] + 2 * SIDE_BY_SIDE * by_row;
  }
  first += 2 * SIDE_BY_SIDE * (uint32_t)rows;
  for (int64_t i = 0; i < n % SIDE_BY_SIDE; i++) sum += words[i] * (first + 2 * (uint32_t)i);
  return sum;
}

/* Sum of words from one on, each times 2 * place + 17, modulo 2**32. */
uint32_t weighted_sum(const uint32_t *words, int64_t first, int64_t stop, int threads) {
  uint32_t sum = 0;
  int64_t n = stop - first;
  if (n < MANY) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : sum)
  for (int t = 0; t < threads; t++) {
    int64_t begin = first + border(n, CHUNK, t, threads);
    sum += weighted(words + begin, first + border(n, CHUNK, t + 1, threads) - begin, begin);
  }
  return sum;
}

/* -- frames -------------------------------------------------------------------------------- */

/* The weighted sum of a frame's words, and of its body. */
uint32_t frame_sum(const uint32_t *words, int64_t count, const uint32_t *body, int64_t n,
                   int threads) {
  uint32_t sum = weighted_sum(body, 0, n, threads);
  for (int64_t i = 0; i < count; i++) sum += words[i] * (uint32_t)(2 * i + 1);
  return sum;
}

/* Copies a part to the body of a frame, from byte `at` on, unless it is there.
 *
 * Returns the weighted sum of the words that it completes.
 */
uint32_t copy_summed(uint8_t *body, int64_t at, const uint8_t *part, int64_t bytes, int threads) {
  uint32_t sum = 0;
  if (body + at == part || bytes < MUCH || at % 4 || bytes % 4 || (uintptr_t)part % 4) {
    if (body + at != part && bytes) memcpy(body + at, part, (size_t)bytes);
    return weighted_sum((const uint32_t *)body, at / 4, (at + bytes) / 4, threads);
  }
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : sum)
  for (int t = 0; t < threads; t++) {
    int64_t stop = border(bytes, 4 * CHUNK, t + 1, threads), size;
    for (int64_t from = border(bytes, 4 * CHUNK, t, threads); from < stop; from += size) {
      size = from + 4 * CHUNK < stop ? 4 * CHUNK : stop - from;
      sum += weighted((const uint32_t *)(part + from), size / 4, (at + from) / 4);
      write_past(body + at + from, part + from, size);
    }
    written_past();
  }
  return sum;
}

/* Reads the words of frames, and checks them; see `Headers.examine`.
 *
 * frames: `stride` words apart, of `length` words: `count` words, their sum, and a body.
 * words [rows, count]. intact [fields + 1, rows]: of the sums, and of each field.
 */
void examine(const uint32_t *frames, int64_t rows, int64_t stride, int64_t length, int64_t count,
             const field *fields, int64_t number, const int64_t *expected, int64_t *words,
             uint8_t *intact, int threads) {
  for (int64_t row = 0; row < rows; row++, frames += stride, words += count) {
    const uint32_t *body = frames + count + 1;
    intact[row] = frames[count] == frame_sum(frames, count, body, length - count - 1, threads);
    for (int64_t i = 0; i < count; i++) words[i] = frames[i];
    for (int64_t i = 0; i < number; i++) {
      int64_t number_there = words[fields[i].word] >> fields[i].low & (((int64_t)1 << fields[i].bits) - 1);
      intact[(i + 1) * rows + row] = number_there == expected[i];
    }
  }
}

/* -- what is not finite ---------------------------------------------------------------------- */

FAST int32_t largest_bits(const float *x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return most;
}

/* Whether there is neither a NaN nor an infinity. */
int all_finite(const float *x, int64_t n, int threads) {
  int finite = 1;
  if (n < MANY) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(& : finite)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads);
    finite &= largest_bits(x + start, stop - start) < 0x7f800000;
  }
  return finite;
}

#define LANES 64

FAST float sum_of(const float *x, int64_t n, int squares) {
  float lanes[LANES] = {0.0f}, total = 0.0f;
  int64_t whole = n / LANES * LANES;
  for (int64_t i = 0; i < whole && squares; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * x[i + lane];
  for (int64_t i = 0; i < whole && !squares; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane];
  for (int64_t lane = 0; lane < LANES; lane++) total += lanes[lane];
  for (int64_t i = whole; i < n; i++) total += squares ? x[i] * x[i] : x[i];
  return total;
}

/* Whether the sum of x, or of its squares, is finite times 4096. */
int sum_finite(const float *x, int64_t n, int squares, int threads) {
  float total = 0.0f;
  if (n < MANY) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : total)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads);
    total += sum_of(x + start, stop - start, squares);
  }
  return isfinite(total * 4096.0f) != 0;
}
