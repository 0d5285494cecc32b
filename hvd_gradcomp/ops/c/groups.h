/* Passes over groups of elements that have a number each, chunk by chunk. */
#ifndef HVD_GRADCOMP_GROUPS_H
#define HVD_GRADCOMP_GROUPS_H

#include <string.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

#define CHUNK 4096     /* elements at a time; whole groups of codes */
#define NEAR (1 << 14) /* elements that are read again soon after the values of their groups */

/* Fetches what is read after the next NEAR elements: codes take longer than reading does. */
static inline void fetch_after(const float *x) {
  __builtin_prefetch((const void *)((uintptr_t)x + sizeof(float) * NEAR), 0, 2);
  __builtin_prefetch((const void *)((uintptr_t)x + sizeof(float) * (NEAR + 16)), 0, 2);
}

/* Fetches codes that are read soon: of several ranks, they come too late by themselves. */
static inline void fetch_ahead(const uint8_t *codes) {
  __builtin_prefetch((const void *)((uintptr_t)codes + 2048), 0, 3);
}

/* Folds x[0..n) in halves, in place: the sum is x[0]. */
void fold(float *x, int64_t n);
float largest_magnitude(const float *x, int64_t n);
int64_t longest(const band *bands, int64_t count);
/* The maxima of the groups that begin in [begin, end): all of them, if there are threads. */
void maxima_between(const band *bands, int64_t count, const float *x, int64_t begin, int64_t end,
                    float *out, int threads);

/* Goes over a vector chunk by chunk, and within one over the rows that meet it. */
typedef struct {
  const band *bands;
  int64_t count, at, row, group;
} walk;

/* One that has come to an element. */
static inline walk walk_from(const band *bands, int64_t count, int64_t begin) {
  walk w = {bands, count, 0, 0, 0};
  for (; w.at < count; w.at++) {
    const band *b = bands + w.at;
    int64_t ended = begin > b->start ? (begin - b->start) / b->length : 0;
    w.row = ended < b->rows ? ended : b->rows;
    w.group += w.row;
    if (w.row < b->rows) return w;
  }
  w.row = 0;
  return w;
}

/* The next piece of a row in [begin, end): 1 and where, or 0. */
static inline int next_piece(walk *w, int64_t begin, int64_t end, int64_t *from, int64_t *to,
                      int64_t *group) {
  while (w->at < w->count) {
    const band *b = w->bands + w->at;
    int64_t start = b->start + w->row * b->length, stop = start + b->length;
    if (start >= end) return 0;
    *from = start > begin ? start : begin;
    *to = stop < end ? stop : end;
    *group = w->group;
    if (stop > end) return *from < *to ? 2 : 0;
    w->group++;
    if (++w->row == b->rows) w->row = 0, w->at++;
    if (*from < *to) return 1;
  }
  return 0;
}

/* The next group that begins in [begin, end): 1 and where, or 0. */
static inline int next_group(walk *w, int64_t begin, int64_t end, int64_t *at, int64_t *length,
                      int64_t *group) {
  for (; w->at < w->count; w->row = 0, w->at++) {
    const band *b = w->bands + w->at;
    if (w->row < b->rows && b->start + w->row * b->length < begin) w->row++, w->group++;
    if (w->row == b->rows) continue;
    *at = b->start + w->row * b->length;
    if (*at >= end) return 0;
    *length = b->length;
    *group = w->group++;
    w->row++;
    return 1;
  }
  return 0;
}

/* Where a sum starts: from another vector, or from nothing. */
static inline void begin_sum(float *out, const float *base, int64_t begin, int64_t end) {
  size_t bytes = sizeof(float) * (size_t)(end - begin);
  if (!base)
    memset(out + begin, 0, bytes);
  else if (base != out)
    memcpy(out + begin, base + begin, bytes);
}

/* Where a chunk is summed up: in `spare`, if it is to be written past the caches; else in out. */
static inline float *begin_chunk(float *spare, float *out, const float *base, int64_t n, int64_t begin,
                          int64_t end) {
  float *total = base == out || 4 * n < MUCH ? out + begin : spare;
  begin_sum(total, base ? base + begin : NULL, 0, end - begin);
  return total;
}

static inline void end_chunk(const float *total, float *out, int64_t begin, int64_t end) {
  if (total != out + begin) write_past(out + begin, total, 4 * (end - begin));
}

#ifdef __x86_64__
#define FEW 8 /* ranks whose codes are read side by side */

/* Stores eight, past the caches if `past`: `to` is a multiple of 32 bytes then. */
AVX2 static inline void store_eight(float *to, __m256 x, int past) {
  if (past)
    _mm256_stream_ps(to, x);
  else
    _mm256_storeu_ps(to, x);
}

/* out = base + the sum over a few ranks, of [from, to) of a group, and of its unit on each rank.
 *
 * codes: `stride` bytes apart. past: whether it is written past the caches.
 */
typedef void sum_of_group(const float *base, float *out, int64_t from, int64_t to, int64_t ranks,
                          const uint8_t *codes, int64_t stride, const float *units,
                          const float *weights, int past);

/* The same of all groups in [begin, stop), and the base between them; a unit is `factor` scales. */
static inline void sum_groups(sum_of_group *sum, walk w, const float *base, float *out, int64_t begin,
                       int64_t stop, int64_t ranks, const uint8_t *codes, int64_t stride,
                       const float *scale, int64_t scale_stride, float factor,
                       const float *weights, int past) {
  int64_t from, to, group, done = begin;
  for (int more = 1; more == 1; done = more ? to : stop) {
    float units[FEW];
    more = next_piece(&w, begin, stop, &from, &to, &group);
    begin_sum(out, base, done, more ? from : stop);
    if (!more) continue;
    for (int64_t rank = 0; rank < ranks; rank++) {
      float own = scale[rank * scale_stride + group];
      units[rank] = own >= TINY ? own * factor : 0.0f;
    }
    sum(base, out, from, to, ranks, codes, stride, units, weights, past);
  }
  begin_sum(out, base, done, stop);
}
#endif

#endif
