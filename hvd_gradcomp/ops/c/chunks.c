/* Rows of a vector, of which the last may be shorter: the k largest of each, and values that are
 * added to each. Every result equals that of the plain ops to the bit; see kernels.h for how.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#define MAGNITUDE 0x7fffffffu
#define SHORT 4096 /* elements of a row that stays in the first-level cache */
#define RUN 64 /* elements of which the flags are one word */
#define STEP (1u << 21) /* a quarter of an octave: threshold of a row, and of the next one */

/* -- the k largest ---------------------------------------------------------------------------- */

/* Flags of the magnitudes beyond a bound, from `first` on, a multiple of RUN; returns how many. */
static int64_t mark_plainly(const uint32_t *x, int64_t first, int64_t n, int32_t bound,
                            uint64_t *flags) {
  int64_t count = 0;
  for (int64_t run = first; run < n; run += RUN) {
    int64_t end = run + RUN < n ? RUN : n - run;
    uint64_t word = 0;
    for (int64_t i = 0; i < end; i++)
      word |= (uint64_t)((int32_t)(x[run + i] & MAGNITUDE) > bound) << i;
    flags[run / RUN] = word;
    count += __builtin_popcountll(word);
  }
  return count;
}

/* Lists the indices of flags that are set. */
static void list_plainly(const uint64_t *flags, int64_t n, uint32_t *index) {
  for (int64_t run = 0; run < n; run += RUN)
    for (uint64_t word = flags[run / RUN]; word; word &= word - 1)
      *index++ = (uint32_t)(run + __builtin_ctzll(word));
}

/* out = factor * x + y; y may be out. */
FAST static void decay(const float *x, const float *y, float *out, int64_t n, float factor) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float kept = x[i] * factor;
    out[i] = kept + y[i];
  }
}

/* Decays, and marks in the same walk; adds the sum of squares of y, as `sum_of` does, if `squares`. */
static int64_t collect_plainly(const float *x, const float *y, float factor, float *out, int64_t n,
                               int32_t bound, uint64_t *flags, float *squares) {
  if (squares) *squares += sum_of(y, n, 1);
  decay(x, y, out, n, factor);
  return mark_plainly((const uint32_t *)out, 0, n, bound, flags);
}

#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define BEST(name, ...) \
  (__builtin_cpu_supports("avx2") ? name##_avx2(__VA_ARGS__) : name##_plainly(__VA_ARGS__))

AVX2 static int64_t mark_avx2(const uint32_t *x, int64_t first, int64_t n, int32_t bound,
                              uint64_t *flags) {
  const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE), beyond = _mm256_set1_epi32(bound);
  int64_t count = 0, run = first;
  for (; run + RUN <= n; run += RUN) {
    uint64_t word = 0;
    for (int64_t part = 0; part < RUN; part += 8) {
      const __m256i eight = _mm256_loadu_si256((const __m256i *)(x + run + part));
      const __m256i is = _mm256_cmpgt_epi32(_mm256_and_si256(eight, magnitude), beyond);
      word |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is)) << part;
    }
    flags[run / RUN] = word;
    count += __builtin_popcountll(word);
  }
  return count + mark_plainly(x, run, n, bound, flags);
}

AVX2 static int64_t collect_avx2(const float *x, const float *y, float factor, float *out, int64_t n,
                                 int32_t bound, uint64_t *flags, float *squares) {
  const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE), beyond = _mm256_set1_epi32(bound);
  const __m256 times = _mm256_set1_ps(factor);
  __m256 sums[RUN / 8];
  float lanes[RUN], total = 0.0f;
  int64_t count = 0, run = 0;
  for (int part = 0; part < RUN / 8; part++) sums[part] = _mm256_setzero_ps();
  for (; run + RUN <= n; run += RUN) {
    uint64_t word = 0;
    for (int64_t part = 0; part < RUN; part += 8) {
      const __m256 given = _mm256_loadu_ps(y + run + part);
      const __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(x + run + part), times);
      const __m256 sum = _mm256_add_ps(kept, given);
      const __m256i eight = _mm256_and_si256(_mm256_castps_si256(sum), magnitude);
      const __m256i is = _mm256_cmpgt_epi32(eight, beyond);
      sums[part / 8] = _mm256_add_ps(sums[part / 8], _mm256_mul_ps(given, given));
      _mm256_storeu_ps(out + run + part, sum);
      word |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is)) << part;
    }
    flags[run / RUN] = word;
    count += __builtin_popcountll(word);
  }
  if (squares) {
    for (int part = 0; part < RUN / 8; part++) _mm256_storeu_ps(lanes + 8 * part, sums[part]);
    for (int lane = 0; lane < RUN; lane++) total += lanes[lane];
    for (int64_t i = run; i < n; i++) total += y[i] * y[i];
    *squares += total;
  }
  decay(x + run, y + run, out + run, n - run, factor);
  return count + mark_plainly((const uint32_t *)out, run, n, bound, flags);
}

/* Four at a time, since how many there are is hard to predict; the next ones write over what is
 * too much, for which there is room behind. */
AVX2 static void list_avx2(const uint64_t *flags, int64_t n, uint32_t *index) {
  for (int64_t run = 0; run < n; run += RUN) {
    uint64_t word = flags[run / RUN];
    int64_t count = __builtin_popcountll(word);
    for (int64_t i = 0; i < count; i += 4)
      for (int64_t k = i; k < i + 4; k++, word &= word - 1)
        index[k] = (uint32_t)(run + (int64_t)_tzcnt_u64(word));
    index += count;
  }
}
#else
#define BEST(name, ...) name##_plainly(__VA_ARGS__)
#endif

/* Bits between which the k-th largest magnitude lies: k or more reach `low`, fewer reach `high`. */
typedef struct {
  uint32_t low, high;
} range;

/* Narrows a range until no more than `few` reach its lower end, or it is a single number.
 *
 * From a guess on, in steps that double until both ends are known; then by halves. n: how many
 * reach the lower end before. marked: how many reach the guess, if their flags are set
 * already; else -1. Returns how many reach the lower end afterwards; their flags are set.
 */
static int64_t narrow(const uint32_t *x, int64_t n, int64_t k, int64_t few, uint32_t guess,
                      int64_t marked, range *is, uint64_t *flags) {
  const range all = *is;
  uint32_t middle = guess, step = STEP;
  int64_t count = n, here = -1;
  while (count > few && is->high - is->low > 1) {
    if (middle <= is->low || middle >= is->high)
      middle = is->low + (is->high - is->low) / 2, marked = -1;
    here = marked < 0 ? BEST(mark, x, 0, n, (int32_t)middle - 1, flags) : marked;
    marked = -1;
    if (here >= k)
      is->low = middle, count = here;
    else
      is->high = middle;
    middle = is->high == all.high  ? is->low + step
             : is->low == all.low && is->high > step ? is->high - step
                                                     : 0;
    if (step < STEP << 8) step *= 2;
  }
  return here == count ? count : BEST(mark, x, 0, n, (int32_t)is->low - 1, flags);
}

#define WORDS(n) (((n) + RUN - 1) / RUN)

/* Memory to look at a row with, and to fill up the last one. */
typedef struct {
  uint64_t *flags; /* [WORDS(n)] */
  uint32_t *found, *bits, *chosen, *last; /* [n + RUN] each */
} lists;

int64_t memory_of_row(int64_t length) { return WORDS(length) + 2 * (length + RUN); }

static lists lists_at(uint64_t *memory, int64_t n) {
  uint32_t *found = (uint32_t *)(memory + WORDS(n));
  return (lists){memory, found, found + n + RUN, found + 2 * (n + RUN), found + 3 * (n + RUN)};
}

/* The k largest magnitudes of a row, of equal ones the first, in order: places and values.
 *
 * guess: bits that some more than k reach, at least 1; for the next row it is made from this one.
 * marked: how many reach it, if that is known and their flags are set; else -1.
 */
static void largest_of_row(const uint32_t *x, int64_t n, int64_t k, uint32_t *guess,
                           int64_t marked, const lists *with, int64_t *index, float *values) {
  uint32_t *bits = with->bits, *found = with->found;
  range is = {0, MAGNITUDE + 1};
  int64_t count = narrow(x, n, k, 4 * k + RUN, *guess, marked, &is, with->flags);
  BEST(list, with->flags, n, found);
  for (int64_t i = 0; i < count; i++) bits[i] = x[found[i]];
  /* Whole words are fast. Zeros are beyond no bound. */
  int64_t padded = WORDS(count) * RUN;
  memset(bits + count, 0, sizeof *bits * (size_t)(padded - count));
  (void)narrow(bits, padded, k, k, is.low + STEP, -1, &is, with->flags);
  int64_t ties = k - BEST(mark, bits, 0, padded, (int32_t)is.low, with->flags);
  for (int64_t i = 0; ties > 0; i++)
    if ((bits[i] & MAGNITUDE) == is.low) with->flags[i / RUN] |= (uint64_t)1 << i % RUN, ties--;
  BEST(list, with->flags, padded, with->chosen);
  for (int64_t i = 0; i < k; i++) {
    uint32_t place = with->chosen[i];
    index[i] = found[place], values[i] = float_of(bits[place]);
  }
  *guess = is.low > STEP ? is.low - STEP : 1;
}

/* The k largest of each row of x; or of out = factor * x + y, if there is a y.
 *
 * index, values [rows, k]. memory [threads, memory_of_row]. Returns whether the sum of squares of y
 * is finite times 4096, if `checks`.
 */
int largest_of_rows(const float *x, const float *y, float factor, float *out, int64_t size,
                    int64_t length, int64_t k, int64_t *index, float *values, uint64_t *memory,
                    int checks, int threads) {
  int64_t rows = (size + length - 1) / length;
  float total = 0.0f;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : total)
  for (int t = 0; t < threads; t++) {
    const lists with = lists_at(memory + memory_of_row(length) * t, length);
    uint32_t guess = 1;
    int64_t end = border(rows, 1, t + 1, threads);
    for (int64_t row = border(rows, 1, t, threads); row < end; row++) {
      int64_t first = row * length, here = size - first < length ? size - first : length;
      const float *from = (y ? out : x) + first;
      int64_t marked = -1;
      if (y)
        marked = BEST(collect, x + first, y + first, factor, out + first, here, (int32_t)guess - 1,
                      with.flags, checks ? &total : NULL);
      if (here < length) {
        memcpy(with.last, from, sizeof(float) * (size_t)here);
        memset(with.last + here, 0, sizeof(float) * (size_t)(length - here));
        marked = -1;
      }
      largest_of_row(here < length ? with.last : (const uint32_t *)from, length, k, &guess, marked,
                     &with, index + row * k, values + row * k);
    }
  }
  return isfinite(total * 4096.0f) != 0;
}

/* -- values at places of rows ----------------------------------------------------------------- */

/* Fetches the lines of a row that is read next, one with each line that is written. */
static void write_past_and_fetch(float *to, const float *from, int64_t n, const float *next) {
  const int64_t line = 16;
  int64_t done = 0;
  for (; done + line <= n; done += line) {
    __builtin_prefetch(next + done, 0, 2);
    write_past(to + done, from + done, 4 * line);
  }
  write_past(to + done, from + done, 4 * (n - done));
}

/* Adds the weighted values of one rank to a row, at their places; those beyond it are left out.
 *
 * next: the row that is changed next where it lies, or NULL: its lines at `ahead` are fetched.
 * Returns whether a place is negative.
 */
static int64_t add_in_row(float *row, int64_t here, const int64_t *places, const float *values,
                          int64_t k, float weight, const float *next, const int64_t *ahead) {
  int64_t negative = 0;
  for (int64_t i = 0; i < k; i++) {
    const int64_t place = places[i];
    if (next && (uint64_t)ahead[i] < (uint64_t)here) __builtin_prefetch(next + ahead[i], 1, 3);
    negative |= place < 0;
    if ((uint64_t)place >= (uint64_t)here) continue;
    float value = values[i] * weight;
    row[place] = row[place] + value;
  }
  return negative;
}

/* Clears a row of zeros again that ranks have added to. */
static void clear_places(float *row, int64_t here, const int64_t *const *index, int64_t first,
                         int64_t k, int64_t ranks) {
  for (int64_t rank = 0; rank < ranks; rank++)
    for (int64_t i = first; i < first + k; i++)
      if ((uint64_t)index[rank][i] < (uint64_t)here) row[index[rank][i]] = 0.0f;
}

/* out = base, or 0, + the weighted values of all ranks, rank by rank, at their places in each row.
 *
 * What lies beyond its row, or beyond the last element, is left out.
 * index, values: of each rank, [rows, k]. Returns 0, or BEYOND if a place is negative.
 */
int add_in_rows(const float *base, float *out, int64_t size, int64_t length, int64_t k,
                int64_t ranks, const int64_t *const *index, const float *const *values,
                const float *weights, int threads) {
  int64_t rows = (size + length - 1) / length, negative = 0;
  int past = base != out && length <= SHORT && 4 * size >= MUCH;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : negative)
  for (int t = 0; t < threads; t++) {
    float spare[SHORT];
    int64_t end = border(rows, 1, t + 1, threads);
    if (past && !base) memset(spare, 0, sizeof(float) * (size_t)length);
    for (int64_t row = border(rows, 1, t, threads); row < end; row++) {
      float *own = past ? spare : out + row * length;
      int64_t here = size - row * length < length ? size - row * length : length;
      if (!base && !past)
        memset(own, 0, sizeof(float) * (size_t)here);
      else if (base && base != out)
        memcpy(own, base + row * length, sizeof(float) * (size_t)here);
      int64_t whole = base == out && row + 1 < end && (row + 2) * length <= size;
      for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t *places = index[rank] + row * k;
        negative |= add_in_row(own, here, places, values[rank] + row * k, k, weights[rank],
                               whole ? own + length : NULL, places + k);
      }
      if (past && base && row + 1 < end && (row + 2) * length <= size)
        write_past_and_fetch(out + row * length, spare, here, base + (row + 1) * length);
      else if (past)
        write_past(out + row * length, spare, 4 * here);
      if (past && !base) clear_places(spare, here, index, row * k, k, ranks);
    }
    written_past();
  }
  return negative ? BEYOND : 0;
}
