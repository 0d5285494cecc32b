/* Sorting, and single elements that lie far apart. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

/* By the bits from `first` on, 11 at a time; equal ones stay in order. Returns x or other, which has
 * as much room. */
static int64_t *sort_from(int64_t *x, int64_t n, int first, int64_t *other) {
  int64_t *from = x, *to = other;
  uint64_t all = 0;
  for (int64_t i = 0; i < n; i++) all |= (uint64_t)x[i];
  for (int shift = first; shift < 63 && all >> shift; shift += 11) {
    int64_t starts[2049] = {0};
    for (int64_t i = 0; i < n; i++) starts[(from[i] >> shift & 2047) + 1]++;
    for (int digit = 0; digit < 2048; digit++) starts[digit + 1] += starts[digit];
    for (int64_t i = 0; i < n; i++) to[starts[from[i] >> shift & 2047]++] = from[i];
    int64_t *done = to;
    to = from;
    from = done;
  }
  return from;
}

/* Ascending, of what is not negative; 0, or -1 without memory. */
int sort(int64_t *x, int64_t n) {
  int64_t *other = malloc(sizeof(int64_t) * (size_t)(n ? n : 1));
  if (!other) return -1;
  if (sort_from(x, n, 0, other) != x) memcpy(x, other, sizeof(int64_t) * (size_t)n);
  free(other);
  return 0;
}

/* Adds up the values at each place, in their order; ascending places, then sinks with 0.
 *
 * scratch: room for 2 * n. Returns 0, or BEYOND at an index beyond the sink.
 */
int merge_rows(const int64_t *index, const float *values, int64_t n, int64_t sink,
               int64_t *scratch, int64_t *places, float *totals) {
  int64_t at = -1;
  int bits = 0;
  while (n >> bits) bits++;
  for (int64_t i = 0; i < n; i++) {
    if (index[i] < 0 || index[i] > sink) return BEYOND;
    scratch[i] = index[i] << bits | i;
  }
  const int64_t *keys = sort_from(scratch, n, bits, scratch + n);
  for (int64_t i = 0; i < n; i++) {
    const int64_t place = keys[i] >> bits;
    if (at < 0 || places[at] != place) {
      places[++at] = place;
      totals[at] = 0;
    }
    totals[at] += values[keys[i] & (((int64_t)1 << bits) - 1)];
  }
  while (++at < n) {
    places[at] = sink;
    totals[at] = 0;
  }
  return 0;
}

/* -- single elements, far apart ------------------------------------------------------------ */

/* Fetched ahead; 0, or BEYOND at the first index that is not below size. */
#define AHEAD 24
#define EACH_INDEX(does)                                                 \
  for (int64_t i = 0; i < n; i++) {                                      \
    __builtin_prefetch(x + index[i + AHEAD < n ? i + AHEAD : i], 1);     \
    if ((uint64_t)index[i] >= (uint64_t)size) return BEYOND;                 \
    does;                                                                \
  }                                                                      \
  return 0;

int gather(const float *x, int64_t size, const int64_t *index, int64_t n, float *out) {
  EACH_INDEX(out[i] = x[index[i]])
}

int fill_at(float *x, int64_t size, const int64_t *index, int64_t n, float value) {
  EACH_INDEX(x[index[i]] = value)
}

int add_at(float *x, int64_t size, const int64_t *index, int64_t n, const float *values) {
  EACH_INDEX(x[index[i]] += values[i])
}
