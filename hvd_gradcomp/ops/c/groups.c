/* Sums and extremes of groups, and histograms of layers. */
#include <stdlib.h>
#include <string.h>

#include "groups.h"

FAST void fold(float *x, int64_t n) {
  while (n > 1) {
    int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) x[i] = x[i] + x[half + i];
    if (n % 2) x[0] = x[0] + x[n - 1];
    n = half;
  }
}

FAST float largest_magnitude(const float *x, int64_t n) {
  /* Magnitudes order like their bits, and integers have a vector maximum. */
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float value;
  memcpy(&value, &largest, 4);
  return value;
}

/* Of which band a group is: its elements, and how many. */
static const float *group_of(const band *bands, const float *x, int64_t group, int64_t *length) {
  while (group >= bands->rows) group -= (bands++)->rows;
  *length = bands->length;
  return x + bands->start + group * bands->length;
}

/* The first group of piece t: pieces have whole groups, and about as many elements each. */
static int64_t group_border(const band *bands, int64_t count, int t, int pieces) {
  int64_t all = 0, group = 0;
  for (int64_t b = 0; b < count; b++) all += bands[b].rows * bands[b].length;
  int64_t before = (int64_t)((__int128)all * t / pieces);
  for (int64_t b = 0; b < count; group += bands[b++].rows) {
    int64_t own = bands[b].rows * bands[b].length;
    if (before < own) return group + (before + bands[b].length / 2) / bands[b].length;
    before -= own;
  }
  return group;
}

void group_maxima(const band *bands, int64_t count, const float *x, float *out, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t end = group_border(bands, count, t + 1, threads);
    for (int64_t g = group_border(bands, count, t, threads); g < end; g++) {
      int64_t n;
      const float *group = group_of(bands, x, g, &n);
      out[g] = largest_magnitude(group, n);
    }
  }
}

int64_t longest(const band *bands, int64_t count) {
  int64_t most = 1;
  for (int64_t b = 0; b < count; b++)
    if (bands[b].length > most) most = bands[b].length;
  return most;
}

FAST static void squares(const float *x, int64_t n, float *out) {
  /* The first fold, while squaring: half the memory. */
  int64_t half = n / 2;
  if (n == 1) out[0] = x[0] * x[0];
  for (int64_t i = 0; i < half; i++) out[i] = x[i] * x[i] + x[half + i] * x[half + i];
  if (n > 1 && n % 2) out[0] = out[0] + x[n - 1] * x[n - 1];
}

FAST static void sums(const float *x, int64_t n, float *out) {
  int64_t half = n / 2;
  if (n == 1) out[0] = x[0];
  for (int64_t i = 0; i < half; i++) out[i] = x[i] + x[half + i];
  if (n > 1 && n % 2) out[0] = out[0] + x[n - 1];
}

/* Folds each group to one number; `first` makes the first fold; a mean is divided by the length. */
static int fold_groups(const band *bands, int64_t count, const float *x, float *out, int threads,
                       void (*first)(const float *, int64_t, float *), int mean) {
  int64_t half = longest(bands, count) / 2 + 1;
  float *scratch = malloc(sizeof(float) * (size_t)(half * threads));
  if (!scratch) return -1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t end = group_border(bands, count, t + 1, threads);
    for (int64_t g = group_border(bands, count, t, threads); g < end; g++) {
      float *folded = scratch + half * t;
      int64_t n;
      const float *group = group_of(bands, x, g, &n);
      first(group, n, folded);
      fold(folded, n > 1 ? n / 2 : 1);
      out[g] = mean ? folded[0] / (float)n : folded[0];
    }
  }
  free(scratch);
  return 0;
}

int group_squares(const band *bands, int64_t count, const float *x, float *out, int threads) {
  return fold_groups(bands, count, x, out, threads, squares, 0);
}

int group_means(const band *bands, int64_t count, const float *x, float *out, int threads) {
  return fold_groups(bands, count, x, out, threads, sums, 1);
}

void maxima_between(const band *bands, int64_t count, const float *x, int64_t begin,
                           int64_t end, float *out, int threads) {
  int64_t at, length, group;
  walk w = walk_from(bands, count, begin);
  if (threads > 1)
    group_maxima(bands, count, x, out, threads);
  else
    while (next_group(&w, begin, end, &at, &length, &group))
      out[group] = largest_magnitude(x + at, length);
}

/* -- layers ---------------------------------------------------------------------------------- */

/* Integers that order like floats: of negative ones all bits but the sign are turned round. */
static inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

FAST static void extremes(const float *x, int64_t n, float *low, float *high) {
  int32_t least = INT32_MAX, most = INT32_MIN;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits = ordered(bits);
    least = bits < least ? bits : least;
    most = bits > most ? bits : most;
  }
  least = ordered(least), most = ordered(most);
  memcpy(low, &least, 4);
  memcpy(high, &most, 4);
}

#define MANY (1 << 18) /* elements whose count fits into an int32_t */

FAST static int64_t count_from(const float *x, int64_t n, float first) {
  int64_t count = 0;
  for (int64_t at = 0, end; at < n; at = end) {
    int32_t here = 0;
    end = at + MANY < n ? at + MANY : n;
    for (int64_t i = at; i < end; i++) here += x[i] >= first;
    count += here;
  }
  return count;
}

/* counts [bins, layers]: how much of each layer lies in equal bins between its extremes. */
void layer_histograms(const band *bands, int64_t layers, const float *x, int64_t bins,
                      int64_t *counts, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t layer = 0; layer < layers; layer++) {
    const float *own = x + bands[layer].start;
    int64_t size = bands[layer].length, above = size;
    float low, high;
    extremes(own, above, &low, &high);
    float width = (high - low) / (float)bins;
    for (int64_t bin = 0; bin < bins; bin++) {
      float edge = width * (float)(bin + 1);
      int64_t beyond = bin + 1 < bins ? count_from(own, size, low + edge) : 0;
      counts[bin * layers + layer] = above - beyond;
      above = beyond;
    }
  }
}
