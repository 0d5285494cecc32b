/* Rows of a vector, of which the last may be shorter: the k largest of each, and values that are
 * added to each. Every result equals that of the plain ops to the bit; see quant.c for how.
 */
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#define MAGNITUDE 0x7fffffffu
#define RUN 64

/* -- the k largest ---------------------------------------------------------------------------- */

/* How many magnitudes lie beyond a bound: they order like their bits. */
FAST static int64_t count_beyond(const uint32_t *x, int64_t n, int32_t bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i++) count += (int32_t)(x[i] & MAGNITUDE) > bound;
  return count;
}

/* Bits between which the k-th largest magnitude lies: k and more reach low, fewer reach high. */
typedef struct {
  uint32_t low, high;
} range;

/* Narrows a range until at most `few` reach its lower end, or it has only one number; `count` did.
 *
 * From a guess on, in steps that double until both ends are known; then by halves.
 * Returns how many reach the lower end.
 */
static int64_t narrow(const uint32_t *x, int64_t n, int64_t k, int64_t few, int64_t count,
                      uint32_t guess, range *is) {
  const range all = *is;
  uint32_t middle = guess, step = 1u << 21;
  while (count > few && is->high - is->low > 1) {
    if (middle <= is->low || middle >= is->high) middle = is->low + (is->high - is->low) / 2;
    int64_t here = count_beyond(x, n, (int32_t)middle - 1);
    if (here >= k)
      is->low = middle, count = here;
    else
      is->high = middle;
    if (is->high == all.high)
      middle = is->low + step;
    else if (is->low == all.low)
      middle = is->high > step ? is->high - step : 0;
    else
      middle = 0;
    step *= step < 1u << 29 ? 2 : 1;
  }
  return count;
}

/* Lists what reaches `least`, in order: its index, and its bits. */
static int64_t list_plainly(const uint32_t *x, int64_t first, int64_t n, uint32_t least,
                            uint32_t *index, uint32_t *bits) {
  int64_t count = 0;
  for (int64_t i = first; i < n; i++) {
    index[count] = (uint32_t)i, bits[count] = x[i];
    count += (x[i] & MAGNITUDE) >= least;
  }
  return count;
}

#ifdef __x86_64__
#include <immintrin.h>

__attribute__((target("avx2,bmi"))) static int64_t list_avx2(const uint32_t *x, int64_t n,
                                                              uint32_t least, uint32_t *index,
                                                              uint32_t *bits) {
  const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE);
  const __m256i below = _mm256_set1_epi32((int)least - 1);
  int64_t count = 0, run = 0;
  for (; run + RUN <= n; run += RUN) {
    uint64_t flags = 0;
    for (int64_t part = 0; part < RUN; part += 8) {
      const __m256i eight = _mm256_loadu_si256((const __m256i *)(x + run + part));
      const __m256i reach = _mm256_cmpgt_epi32(_mm256_and_si256(eight, magnitude), below);
      flags |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(reach)) << part;
    }
    for (; flags; flags &= flags - 1) {
      int64_t i = run + __builtin_ctzll(flags);
      index[count] = (uint32_t)i, bits[count++] = x[i];
    }
  }
  return count + list_plainly(x, run, n, least, index + count, bits + count);
}
#endif

static int64_t list(const uint32_t *x, int64_t n, uint32_t least, uint32_t *index,
                    uint32_t *bits) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return list_avx2(x, n, least, index, bits);
#endif
  return list_plainly(x, 0, n, least, index, bits);
}

/* The k largest magnitudes of a row, of equal ones the first, in order: places and values.
 *
 * guess: of the bits that some more than k reach; for the next row it is made from this one.
 * room [2 * n], for those that are looked at closely.
 */
static void largest_of_row(const uint32_t *x, int64_t n, int64_t k, uint32_t *guess, uint32_t *room,
                           int64_t *index, float *values) {
  uint32_t *found = room, *bits = room + n;
  range is = {0, MAGNITUDE + 1};
  int64_t count = narrow(x, n, k, 4 * k + RUN, n, *guess, &is), taken = 0;
  count = list(x, n, is.low, found, bits);
  narrow(bits, count, k, k, count, 0, &is);
  int64_t ties = k - count_beyond(bits, count, (int32_t)is.low);
  for (int64_t i = 0; i < count && taken < k; i++) {
    uint32_t magnitude = bits[i] & MAGNITUDE;
    index[taken] = found[i], values[taken] = float_of(bits[i]);
    taken += magnitude > is.low || (magnitude == is.low && ties-- > 0);
  }
  *guess = is.low > 1u << 21 ? is.low - (1u << 21) : 0;
}

/* index, values [rows, k]. room [threads, 3 * length] */
void largest_of_rows(const float *x, int64_t size, int64_t length, int64_t k, int64_t *index,
                     float *values, uint32_t *room, int threads) {
  int64_t rows = (size + length - 1) / length;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint32_t guess = 1, *own = room + 3 * length * t, *last = own + 2 * length;
    int64_t end = border(rows, 1, t + 1, threads);
    for (int64_t row = border(rows, 1, t, threads); row < end; row++) {
      const float *from = x + row * length;
      int64_t here = size - row * length < length ? size - row * length : length;
      if (here < length) {
        memcpy(last, from, sizeof(float) * (size_t)here);
        memset(last + here, 0, sizeof(float) * (size_t)(length - here));
      }
      largest_of_row(here < length ? last : (const uint32_t *)from, length, k, &guess, own,
                     index + row * k, values + row * k);
    }
  }
}

/* -- values at places of rows ----------------------------------------------------------------- */

/* out = base, or 0, + the weighted values of all ranks, rank by rank, at their places in each row.
 *
 * What lies beyond its row, or not before the last element, is left out; that becomes 0.
 * index, values: of each rank, [rows, k]. Returns 0, or BEYOND if a place is negative.
 */
int add_in_rows(const float *base, float *out, int64_t size, int64_t length, int64_t k,
                int64_t ranks, const int64_t *const *index, const float *const *values,
                const float *weights, int threads) {
  int64_t rows = (size + length - 1) / length, negative = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : negative)
  for (int t = 0; t < threads; t++) {
    int64_t end = border(rows, 1, t + 1, threads);
    for (int64_t row = border(rows, 1, t, threads); row < end; row++) {
      float *own = out + row * length;
      int64_t here = size - row * length < length ? size - row * length : length;
      if (!base)
        memset(own, 0, sizeof(float) * (size_t)here);
      else if (base != out)
        memcpy(own, base + row * length, sizeof(float) * (size_t)here);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t *places = index[rank] + row * k;
        const float *added = values[rank] + row * k;
        for (int64_t i = 0; i < k; i++) {
          negative |= places[i] < 0;
          if ((uint64_t)places[i] >= (uint64_t)here) continue;
          float value = added[i] * weights[rank];
          own[places[i]] = own[places[i]] + value;
        }
      }
    }
  }
  if (size) out[size - 1] = 0.0f;
  return negative ? BEYOND : 0;
}
