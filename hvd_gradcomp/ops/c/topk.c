/* Kernels of codecs/topk.py: the k largest of each group, and nothing is sorted for it.
 *
 * A group is a layer, or the model. Every result equals that of the plain ops to the bit, whatever the
 * number of threads; see threshold.c.
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include "rows.h"

#define SMALL 4096       /* a group up to here is not sampled */
#define FINE 18          /* bits below a bin of the sample's histogram */
#define SAMPLE_BINS 512  /* of a group */
#define SAMPLE_RUN 16    /* neighbours that are looked at together */
#define DIGIT 11         /* bits that one histogram of candidates tells apart */
#define VECTOR 16        /* of them, looked at together */
#define SHARED (1 << 18) /* candidates of a group that threads share */

static int64_t groups_of(const scope *of) { return of->whole ? 1 : of->where.layers; }

static int64_t size_of(const scope *of, int64_t group) {
  return of->whole ? of->elements : of->sizes[group];
}

/* Where a group begins; after the last one, where the bucket ends. */
static int64_t start_of(const scope *of, int64_t group) {
  if (group == 0) return 0;
  return group < groups_of(of) ? of->offsets[group] : of->where.size;
}

/* -- finding --------------------------------------------------------------------------------- */

/* Beyond this lies what is as large as a bound, and not zero: not below a float is beyond the one
 * before it. */
static float beyond(float bound) {
  if (!(bound < INFINITY)) return INFINITY;
  return bound > 0.0f ? float_of(bits_of(bound) - 1) : 0.0f;
}

/* What is as large as a bound and not zero, of x [n], whose first element has an index. */
static int64_t list_from(float bound, const float *x, int64_t n, int64_t at, uint32_t *index,
                         uint32_t *bits) {
  if (!(bound < INFINITY)) return 0;
  const rule how = {.large = 1, .tau = beyond(bound)};
  uint32_t most = 0;
  return list(&how, x, x, n, (uint32_t)at, index, bits, &most);
}

/* The same of the stretch of r + g from `at` to `end`; of r if there is no g. */
static int64_t list_of_both(float bound, const float *r, const float *g, int64_t at, int64_t end,
                            uint32_t *index, uint32_t *bits) {
  float sum[CHUNK];
  int64_t count = 0;
  if (!g) return list_from(bound, r + at, end - at, at, index, bits);
  for (int64_t n; at < end; at += n) {
    n = at + CHUNK < end ? CHUNK : end - at;
    add(sum, r + at, g + at, n);
    count += list_from(bound, sum, n, at, index + count, bits + count);
  }
  return count;
}

/* A piece of one layer: what is taken in, and where what comes of it goes. */
typedef struct {
  float *r, *u; /* u: NULL without momentum */
  const float *r0, *u0, *g;
  uint32_t base; /* the first index */
  uint32_t *index, *bits;
  float beyond;   /* what is larger is listed */
  float *squares; /* to which those of g are added; NULL, and then they are not */
  int past;       /* r and u are written past the caches; see `write_past` */
} piece;

/* Elements `first` to n of a piece, in one walk each; see `take_in`. */
static int64_t take_in_plainly(const collecting *how, const piece *of, int64_t first, int64_t n,
                               uint32_t *index, uint32_t *bits) {
  const rule large = {.large = 1, .tau = of->beyond};
  float *r = of->r + first;
  const float *r0 = of->r0 + first, *g = of->g + first;
  uint32_t most = 0;
  if (first >= n) return 0;
  if (of->squares) *of->squares += sum_of(g, n - first, 1);
  if (of->u)
    add_momentum(r, of->u + first, r0, of->u0 + first, g, n - first, how->momentum, how->nesterov);
  else
    add(r, r0, g, n - first);
  return list_plainly(&large, r, r, 0, n - first, of->base + (uint32_t)first, index, bits, &most);
}

#ifdef __x86_64__
__attribute__((target("avx2,bmi"))) static int64_t take_in_avx2(const collecting *how,
                                                                 const piece *of, int64_t n) {
  const __m256 momentum = _mm256_set1_ps(how->momentum), beyond = _mm256_set1_ps(of->beyond);
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 squares[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                       _mm256_setzero_ps()};
  int64_t run = of->past ? before_line(of->r, n) : 0;
  int64_t count = take_in_plainly(how, of, 0, run, of->index, of->bits);
  for (; run + 32 <= n; run += 32) {
    __m256 x[4];
    uint32_t flags = 0;
    for (int part = 0; part < 4; part++) {
      const int64_t i = run + 8 * part;
      const __m256 g = _mm256_loadu_ps(of->g + i);
      __m256 ahead = g;
      if (of->squares) squares[part] = _mm256_add_ps(squares[part], _mm256_mul_ps(g, g));
      if (of->u) {
        ahead = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(of->u0 + i), momentum), g);
        store_avx2(of->u + i, ahead, of->past);
        if (how->nesterov) ahead = _mm256_add_ps(_mm256_mul_ps(ahead, momentum), g);
      }
      x[part] = _mm256_add_ps(_mm256_loadu_ps(of->r0 + i), ahead);
      store_avx2(of->r + i, x[part], of->past);
      const __m256 size = _mm256_and_ps(x[part], magnitude);
      flags |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(size, beyond, _CMP_GT_OQ)) << 8 * part;
    }
    if (!flags) continue;
    float sums[32]; /* what is written past the caches is not read back */
    for (int part = 0; part < 4; part++) _mm256_storeu_ps(sums + 8 * part, x[part]);
    for (; flags; flags &= flags - 1) {
      int64_t i = __builtin_ctz(flags);
      of->index[count] = of->base + (uint32_t)(run + i), of->bits[count++] = bits_of(sums[i]);
    }
  }
  if (of->squares) *of->squares += sum_of_lanes_avx2(squares);
  return count + take_in_plainly(how, of, run, n, of->index + count, of->bits + count);
}

AVX512 static int64_t take_in_avx512(const collecting *how, const piece *of, int64_t n) {
  const __m512 momentum = _mm512_set1_ps(how->momentum), beyond = _mm512_set1_ps(of->beyond);
  __m512 squares[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                       _mm512_setzero_ps()};
  int64_t run = of->past ? before_line(of->r, n) : 0;
  int64_t count = take_in_plainly(how, of, 0, run, of->index, of->bits);
  for (; run + RUN <= n; run += RUN) {
    __m512 x[4];
    __mmask16 passes[4];
    for (int part = 0; part < 4; part++) {
      const int64_t i = run + 16 * part;
      const __m512 g = _mm512_loadu_ps(of->g + i);
      __m512 ahead = g;
      if (of->squares) squares[part] = _mm512_add_ps(squares[part], _mm512_mul_ps(g, g));
      if (of->u) {
        ahead = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(of->u0 + i), momentum), g);
        store_avx512(of->u + i, ahead, of->past);
        if (how->nesterov) ahead = _mm512_add_ps(_mm512_mul_ps(ahead, momentum), g);
      }
      x[part] = _mm512_add_ps(_mm512_loadu_ps(of->r0 + i), ahead);
      store_avx512(of->r + i, x[part], of->past);
      passes[part] = _mm512_cmp_ps_mask(_mm512_abs_ps(x[part]), beyond, _CMP_GT_OQ);
    }
    if (!(passes[0] | passes[1] | passes[2] | passes[3])) continue;
    for (int part = 0; part < 4; part++) {
      const uint32_t first = of->base + (uint32_t)(run + 16 * part);
      count += append_avx512(x[part], passes[part], first, of->index + count, of->bits + count);
    }
  }
  if (of->squares) *of->squares += sum_of_lanes_avx512(squares);
  return count + take_in_plainly(how, of, run, n, of->index + count, of->bits + count);
}
#endif

/* Takes the gradient of a piece in, and lists what of r is larger than a bound; returns how many. */
static int64_t take_in(const collecting *how, const piece *of, int64_t n) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) return take_in_avx512(how, of, n);
  if (__builtin_cpu_supports("avx2")) return take_in_avx2(how, of, n);
#endif
  return take_in_plainly(how, of, 0, n, of->index, of->bits);
}

static void move(const elements *found, int64_t to, int64_t from, int64_t count) {
  if (to == from) return;
  memmove(found->index + to, found->index + from, sizeof(uint32_t) * (size_t)count);
  memmove(found->bits + to, found->bits + from, sizeof(uint32_t) * (size_t)count);
}

/* Calls for each run of neighbours in a group's part of the sample. */
#define EACH_RUN(does)                                                                            \
  for (int64_t layer = of->whole ? 0 : group; layer < (of->whole ? of->where.layers : group + 1); \
       layer++) {                                                                                 \
    int64_t stop = of->offsets[layer] + of->sizes[layer], stride = of->strides[layer];            \
    for (int64_t at = of->offsets[layer]; at < stop; at += SAMPLE_RUN * stride)                   \
      for (int64_t i = at; i < stop && i < at + SAMPLE_RUN; i++) does;                            \
  }

/* What `add_momentum` or `add` makes of an element; what r is if there is no g. */
static float taken(const collecting *how, const float *r, const float *u, const float *g,
                   int64_t i) {
  if (!g) return r[i];
  if (!u) return r[i] + g[i];
  float next = u[i] * how->momentum;
  next = next + g[i];
  float ahead = next * how->momentum;
  ahead = ahead + g[i];
  return r[i] + (how->nesterov ? ahead : next);
}

/* What somewhat more than k elements of a group reach, to all appearance; see `taken`. */
static float bound_by_sample(const collecting *how, const scope *of, int64_t group, const float *r,
                             const float *u, const float *g, int64_t wanted) {
  int64_t counts[SAMPLE_BINS] = {0}, top = 0, below = 0, reached = 0;
  if (size_of(of, group) <= SMALL) return 0.0f;
#define BIN(i) (int64_t)(MAGNITUDE(taken(how, r, u, g, i)) >> FINE)
  EACH_RUN(top = BIN(i) > top ? BIN(i) : top)
  EACH_RUN(counts[top - BIN(i) < SAMPLE_BINS ? top - BIN(i) : SAMPLE_BINS - 1] += stride)
#undef BIN
  for (; below < SAMPLE_BINS; below++) {
    reached += counts[below];
    if (reached >= wanted) break;
  }
  return below < SAMPLE_BINS - 1 && top > below ? float_of((uint32_t)(top - below) << FINE) : 0.0f;
}

/* Takes the gradient in, and finds what reaches the hint of its group; ascending.
 *
 * k, slack, hint: of each group; see `topk_again`. Where a hint is infinite, a sample says where to
 * look for k.
 * r: NULL to take nothing in, and only look at r0 + g. r0: what r is before, which may be r.
 * u: the velocity; NULL without momentum. u0: likewise.
 * finite: whether `sum_finite` holds of g's squares; if it does not, what is found means nothing, and
 * r and u stay as they are unless they are other memory than r0 and u0. NULL: is not looked at.
 * Returns NO_MEMORY, or 0.
 */
int topk_find(const collecting *how, const scope *of, float *r, float *u, const float *r0,
                 const float *u0, const float *g, const int64_t *k, const int64_t *slack,
                 const float *hint, const elements *found, int *finite, int threads) {
  int64_t n = of->where.size, groups = groups_of(of);
  int checks = finite && !in_place(r, u, r0, u0);
  if (finite) *finite = checks || sum_finite(g, n, 1, threads);
  if (finite && !*finite) return 0;
  int64_t *counts = calloc((size_t)(threads * groups + groups + 1), sizeof(int64_t));
  if (!counts) return NO_MEMORY;
  float *bound = (float *)(counts + threads * groups);
  const int past = r && written_elsewhere(r, u, r0, u0, n);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t group = 0; group < groups; group++)
    bound[group] = hint[group] < INFINITY ? hint[group]
                                          : bound_by_sample(how, of, group, r0, u0, g,
                                                            k[group] + slack[group]);
  float total = 0.0f;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : total)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads);
    for (int64_t at = start, end; at < stop; at = end) {
      end = end_of(&of->where, at, stop);
      int64_t group = of->whole ? 0 : layer_of(&of->where, at), first = start_of(of, group);
      int64_t *count = counts + t * groups + group, out = (first > start ? first : start) + *count;
      if (!r) {
        *count += list_of_both(bound[group], r0, g, at, end, found->index + out, found->bits + out);
        continue;
      }
      const piece here = {.r = r + at,
                          .u = u ? u + at : NULL,
                          .r0 = r0 + at,
                          .u0 = u ? u0 + at : NULL,
                          .g = g + at,
                          .base = (uint32_t)at,
                          .index = found->index + out,
                          .bits = found->bits + out,
                          .beyond = beyond(bound[group]),
                          .squares = checks ? &total : NULL,
                          .past = past};
      *count += take_in(how, &here, end - at);
    }
    written_past();
  }
  if (checks) *finite = isfinite(total * 4096.0f) != 0;
  for (int64_t group = 0; group < groups; group++) {
    int64_t first = start_of(of, group), all = 0;
    for (int t = 0; t < threads; t++) {
      int64_t start = border(n, CHUNK, t, threads), count = counts[t * groups + group];
      move(found, first + all, first > start ? first : start, count);
      all += count;
    }
    found->count[group] = all;
  }
  free(counts);
  return 0;
}

/* Looks again in groups of which fewer than k elements were found, at r + g; at r if there is no g.
 *
 * slack: by how much a sample may be wrong about k, for each group.
 */
void topk_again(const scope *of, const float *r, const float *g, const int64_t *k,
                   const int64_t *slack, const elements *found, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t group = 0; group < groups_of(of); group++) {
    if (found->count[group] >= k[group]) continue;
    int64_t first = start_of(of, group), end = start_of(of, group + 1);
    float bound = bound_by_sample(NULL, of, group, r, NULL, g, k[group] + slack[group]);
    for (int scan = 0; scan < 3; scan++) {
      int64_t count =
          list_of_both(bound, r, g, first, end, found->index + first, found->bits + first);
      found->count[group] = count;
      if (count >= k[group] || !(bound > 0.0f)) break;
      bound = bound * (scan ? 0.0f : 0.25f);
    }
  }
}

/* -- choosing -------------------------------------------------------------------------------- */

#define SIZE(i) (bits[i] & 0x7fffffffu)

/* How many magnitudes lie in each bin of 2**shift, from `least` on. */
typedef struct {
  uint32_t least;
  int shift;
  int64_t counts[1 << DIGIT];
} histogram;

/* Adds to `counts`, but for those beyond the last bin. */
static void count_bins(const histogram *bins, const uint32_t *bits, int64_t n, int64_t *counts) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bin = (SIZE(i) - bins->least) >> bins->shift;
    if (bin < 1 << DIGIT) counts[bin]++;
  }
}

static void fill(histogram *bins, const uint32_t *bits, int64_t n, int threads) {
  memset(bins->counts, 0, sizeof bins->counts);
  if (threads == 1) {
    count_bins(bins, bits, n, bins->counts);
    return;
  }
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t counts[1 << DIGIT] = {0}, start = border(n, VECTOR, t, threads);
    count_bins(bins, bits + start, border(n, VECTOR, t + 1, threads) - start, counts);
#pragma omp critical
    for (int bin = 0; bin < 1 << DIGIT; bin++) bins->counts[bin] += counts[bin];
  }
}

FAST static void extremes(const uint32_t *bits, int64_t n, int32_t *least, int32_t *most) {
  int32_t low = 0x7fffffff, high = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t size = (int32_t)SIZE(i);
    low = size < low ? size : low;
    high = size > high ? size : high;
  }
  *least = low, *most = high;
}

/* A histogram with all of them in it. */
static void survey(histogram *bins, const uint32_t *bits, int64_t n, int threads) {
  int32_t least = 0x7fffffff, most = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : least) \
    reduction(max : most)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, VECTOR, t, threads), stop = border(n, VECTOR, t + 1, threads);
    int32_t low, high;
    extremes(bits + start, stop - start, &low, &high);
    least = low < least ? low : least;
    most = high > most ? high : most;
  }
  bins->least = (uint32_t)least;
  for (bins->shift = 0; (uint32_t)(most - least) >> bins->shift >> DIGIT;) bins->shift++;
  fill(bins, bits, n, threads);
}

/* Keeps those of a magnitude from `least` to `most`; returns how many.
 *
 * index: goes along, where it is not NULL. to: what is read, or VECTOR longer than what is kept.
 */
static int64_t keep_plainly(const uint32_t *index, const uint32_t *bits, int64_t n, uint32_t least,
                            uint32_t most, uint32_t *to_index, uint32_t *to, int64_t from,
                            int64_t kept) {
  for (int64_t i = from; i < n; i++) {
    if (index) to_index[kept] = index[i];
    to[kept] = bits[i];
    kept += SIZE(i) - least <= most - least;
  }
  return kept;
}

#ifdef __x86_64__
AVX512 static int64_t keep_avx512(
    const uint32_t *index, const uint32_t *bits, int64_t n, uint32_t least, uint32_t most,
    uint32_t *to_index, uint32_t *to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), first = _mm512_set1_epi32((int)least);
  const __m512i range = _mm512_set1_epi32((int)(most - least));
  int64_t kept = 0, i = 0;
  for (; i + VECTOR <= n; i += VECTOR) {
    const __m512i x = _mm512_loadu_si512(bits + i);
    const __m512i beyond = _mm512_sub_epi32(_mm512_and_si512(x, magnitude), first);
    const __mmask16 passes = _mm512_cmple_epu32_mask(beyond, range);
    if (index) {
      const __m512i at = _mm512_loadu_si512(index + i);
      _mm512_storeu_si512(to_index + kept, _mm512_maskz_compress_epi32(passes, at));
    }
    _mm512_storeu_si512(to + kept, _mm512_maskz_compress_epi32(passes, x));
    kept += __builtin_popcount(passes);
  }
  return keep_plainly(index, bits, n, least, most, to_index, to, i, kept);
}
#endif

static int64_t keep(const uint32_t *index, const uint32_t *bits, int64_t n, uint32_t least,
                    uint32_t most, uint32_t *to_index, uint32_t *to) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f"))
    return keep_avx512(index, bits, n, least, most, to_index, to);
#endif
  return keep_plainly(index, bits, n, least, most, to_index, to, 0, 0);
}

/* Keeps those of a magnitude from `least` on, where they are; returns how many. */
static int64_t keep_from(uint32_t least, uint32_t *index, uint32_t *bits, int64_t n, int threads) {
  int64_t *starts = threads > 1 ? malloc(2 * sizeof(int64_t) * (size_t)threads) : NULL;
  if (!starts) return keep(index, bits, n, least, 0x7fffffff, index, bits);
  int64_t *counts = starts + threads;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, VECTOR, t, threads), stop = border(n, VECTOR, t + 1, threads);
    uint32_t *own = index + start, *held = bits + start;
    starts[t] = start, counts[t] = keep(own, held, stop - start, least, 0x7fffffff, own, held);
  }
  join(index, starts, counts, threads);
  int64_t kept = join(bits, starts, counts, threads);
  free(starts);
  return kept;
}

/* The magnitude of the rank-th largest, counted from 1, as bits.
 *
 * spare [room]: for those in the bin that it lies in, if there is room for them.
 */
static uint32_t nth(const histogram *all, const uint32_t *bits, int64_t n, int64_t rank,
                    uint32_t *spare, int64_t room) {
  const histogram *bins = all;
  histogram part;
  for (int digit = DIGIT;;) {
    int64_t bin = (1 << digit) - 1;
    while (bins->counts[bin] < rank) rank -= bins->counts[bin--];
    uint32_t least = bins->least + ((uint32_t)bin << bins->shift);
    if (!bins->shift) return least;
    if (bins->counts[bin] + VECTOR <= room) {
      n = keep(NULL, bits, n, least, least + (1u << bins->shift) - 1, NULL, spare);
      bits = spare;
    }
    digit = bins->shift < DIGIT ? bins->shift : DIGIT;
    part.least = least, part.shift = bins->shift - digit;
    bins = &part;
    fill(&part, bits, n, 1);
  }
}

/* The index from which on the elements that are as large as the k-th are taken in turn. */
static int64_t first_in_turn(const scope *of, int64_t group, int64_t step, int64_t k) {
  int64_t size = size_of(of, group);
  int64_t number = (int64_t)((__int128)step * k % (size ? size : 1)), layer = group;
  while (of->whole && number >= of->sizes[layer]) number -= of->sizes[layer++];
  return of->offsets[layer] + number;
}

/* Keeps k: all but those that are as large as the last, of which it takes the first from an index
 * on, and then those from the beginning. Returns how many. */
static int64_t take_turns(uint32_t *index, uint32_t *bits, int64_t n, uint32_t last, int64_t k,
                          int64_t from) {
  int64_t ties = 0, early = 0, tie = 0, kept = 0;
  for (int64_t i = 0; i < n; i++) {
    ties += SIZE(i) == last;
    early += (SIZE(i) == last) & (index[i] < from);
  }
  int64_t room = k - (n - ties);
  for (int64_t i = 0; i < n; i++) {
    int equal = SIZE(i) == last;
    tie += equal;
    int64_t place = tie > early ? tie - early : tie + ties - early;
    index[kept] = index[i], bits[kept] = bits[i];
    kept += !equal | (place <= room);
  }
  return kept;
}

/* The k largest of a group's candidates, or all if there are fewer; ascending still.
 *
 * hint: what about 1.3 k elements reach.
 */
static void choose(const scope *of, int64_t group, int64_t step, int64_t k, const elements *found,
                   float *hint, int threads) {
  uint32_t *index = found->index + start_of(of, group), *bits = found->bits + start_of(of, group);
  int64_t n = found->count[group], room = start_of(of, group + 1) - start_of(of, group) - n;
  *hint = 0.0f;
  if (n == 0 || n < k) return;
  int64_t wished = k + k / 4 + (int64_t)(sqrt((double)k) * 4.0) + 8;
  int64_t ranks[2] = {k > 1 ? k : 1, wished < n ? wished : n};
  uint32_t reached[2], last;
  histogram all;
  survey(&all, bits, n, threads);
#pragma omp parallel for num_threads(2) if (threads > 1)
  for (int i = 0; i < 2; i++)
    reached[i] = nth(&all, bits, n, ranks[i], bits + n + i * (room / 2), room / 2);
  last = reached[0];
  *hint = float_of(reached[1]) * (n < wished ? 0.97f : 1.0f);
  int64_t kept = keep_from(last, index, bits, n, threads);
  if (kept > k)
    kept = take_turns(index, bits, kept, last, k, first_in_turn(of, group, step, k));
  found->count[group] = kept;
}

/* The k largest of each group, ascending, where the group begins in `found`.
 *
 * found->count: how many they are, together with those of the groups before. Returns that of all.
 */
int64_t topk_choose(const scope *of, int64_t step, const int64_t *k, const elements *found,
                       float *hint, int threads) {
  int64_t groups = groups_of(of), total = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t group = 0; group < groups; group++)
    if (found->count[group] < SHARED) choose(of, group, step, k[group], found, hint + group, 1);
  for (int64_t group = 0; group < groups; group++) {
    if (found->count[group] >= SHARED)
      choose(of, group, step, k[group], found, hint + group, threads);
    total += found->count[group];
    found->count[group] = total;
  }
  return total;
}

/* -- bodies ---------------------------------------------------------------------------------- */

/* Of all that is chosen, group after group, what has the numbers from one to another; see
 * `topk_choose`. items: indices, or bits. */
static void copy_chosen(const scope *of, const int64_t *ends, const uint32_t *items, int64_t from,
                        int64_t to, uint32_t *out) {
  int64_t group = 0, count = groups_of(of);
  while (count > 0) { /* the first that ends behind */
    int64_t half = count / 2;
    if (ends[group + half] <= from) {
      group += half + 1;
      count -= half + 1;
    } else
      count = half;
  }
  for (int64_t n; from < to; group++, from += n, out += n) {
    int64_t before = group ? ends[group - 1] : 0;
    n = (ends[group] < to ? ends[group] : to) - from;
    memcpy(out, items + start_of(of, group) + from - before, sizeof(uint32_t) * (size_t)n);
  }
}

static int64_t within(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

/* out = the first `count` items that are chosen, and `filling` behind them. */
static void lay_out(const scope *of, const int64_t *ends, const uint32_t *items, int64_t count,
                    int64_t capacity, uint32_t filling, uint32_t *out, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t from = border(capacity, VECTOR, t, threads);
    int64_t to = border(capacity, VECTOR, t + 1, threads);
    int64_t full = within(count, from, to);
    copy_chosen(of, ends, items, from, full, out + from);
    for (int64_t i = full; i < to; i++) out[i] = filling;
  }
}

/* A body: values, if it has any, and then indices; both of `capacity` elements. */
typedef struct {
  const uint32_t *index;
  const float *values;
  int64_t count;
} share;

static share share_of(const form *as, const uint8_t *body) {
  const uint32_t *index = (const uint32_t *)body + (as->valued ? as->capacity : 0);
  return (share){index, (const float *)body, as->capacity};
}

/* Returns BEYOND if an index lies beyond the bucket or before the one in front of it, or 0. */
static int check_share(const share *of, const place *where) {
  return order_of(of->index, of->count, ~0u, (uint32_t)where->size) ? BEYOND : 0;
}

/* Writes a body; its indices ascend, and unused ones are the sink.
 *
 * chosen, count: of `topk_choose`. sent [layers]: how many of each layer are sent.
 */
void topk_write(const scope *of, const form *as, const elements *chosen, int64_t count,
                   uint8_t *body, int64_t *sent, int threads) {
  const place *where = &of->where;
  const int64_t *ends = chosen->count, capacity = as->capacity;
  uint32_t sink = (uint32_t)(where->size - 1), last;
  uint32_t *index = (uint32_t *)body + (as->valued ? capacity : 0);
  memset(sent, 0, sizeof(int64_t) * (size_t)where->layers);
  if (count > capacity) count = capacity;
  if (count) copy_chosen(of, ends, chosen->index, count - 1, count, &last);
  if (count && last >= sink) count--;
  lay_out(of, ends, chosen->index, count, capacity, sink, index, threads);
  if (as->valued) lay_out(of, ends, chosen->bits, count, capacity, 0, (uint32_t *)body, threads);
  count_layers(where, ~0u, index, count, sent);
}

/* Takes out of r and u what a body of this rank says. */
void topk_commit(const collecting *how, const place *where, const form *as, const uint8_t *body,
                    float *r, float *u, int threads) {
  const share of = share_of(as, body);
  int stops = u && how->masking;
  IN_PIECES
  for (int64_t i = 0; i < of.count; i++) {
    r[of.index[i]] = 0.0f;
    if (stops) u[of.index[i]] = 0.0f;
  }
  r[where->size - 1] = 0.0f;
  if (u) u[where->size - 1] = 0.0f;
}

/* -- adding up ------------------------------------------------------------------------------- */

/* Adds a rank's elements in a stretch of the bucket to the total. */
static void add_share(const share *of, float weight, int64_t at, int64_t end, float *total) {
  int64_t i = first_from(of->index, of->count, ~0u, at);
  for (; i < of->count && of->index[i] < end; i++) {
    float part = of->values[i] * weight;
    total[of->index[i]] = total[of->index[i]] + part;
  }
}

/* total = the sum of all ranks' elements times their weight, rank by rank in rank order.
 *
 * bodies: of all ranks, `stride` bytes apart.
 * Returns BEYOND if indices lie beyond the bucket or do not ascend, NO_MEMORY, or 0.
 */
int topk_add(const place *where, const form *as, const uint8_t *bodies, int64_t stride,
                int64_t ranks, const float *weights, float *total, int threads) {
  share *shares = malloc(sizeof(share) * (size_t)(ranks + 1));
  int beyond = 0;
  if (!shares) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : beyond)
  for (int64_t rank = 0; rank < ranks; rank++) {
    shares[rank] = share_of(as, bodies + rank * stride);
    beyond |= check_share(shares + rank, where) != 0;
  }
#pragma omp parallel for num_threads(threads) if (threads > 1 && !beyond) schedule(static)
  for (int t = 0; t < threads; t++) {
    int64_t stop = beyond ? 0 : border(where->size, TILE, t + 1, threads);
    for (int64_t at = border(where->size, TILE, t, threads); at < stop; at += TILE) {
      int64_t end = at + TILE < stop ? at + TILE : stop;
      memset(total + at, 0, sizeof(float) * (size_t)(end - at));
      end -= end == where->size; /* the sink: all that is not used points there */
      for (int64_t rank = 0; rank < ranks; rank++)
        add_share(shares + rank, weights[rank], at, end, total);
    }
  }
  free(shares);
  return beyond ? BEYOND : 0;
}

/* -- values where another rank has chosen ----------------------------------------------------- */

/* values [capacity] = r + g at the indices of a body.
 *
 * Returns BEYOND if indices lie beyond the bucket or do not ascend, or 0.
 */
int topk_values(const place *where, const form *as, const uint8_t *body, const float *r,
                   const float *g, float *values, int threads) {
  const share of = share_of(as, body);
  if (check_share(&of, where)) return BEYOND;
  IN_PIECES
  for (int64_t i = 0; i < of.count; i++) values[i] = r[of.index[i]] + g[of.index[i]];
  return 0;
}

/* `from` may be x itself: nothing else overlaps. */
FAST static void add_scaled(float *x, const float *from, const float *y, int64_t n, float factor) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) x[i] = from[i] + y[i] * factor;
}

/* Puts `total`, and `kept` (0 if NULL), at the indices that lie in a stretch. */
static void put_share(const share *of, const float *kept, const float *total, int64_t at,
                      int64_t end, float *r, float *mean) {
  int64_t i = first_from(of->index, of->count, ~0u, at);
  for (; i < of->count && of->index[i] < end; i++) {
    r[of->index[i]] = kept ? kept[i] : 0.0f;
    mean[of->index[i]] = total[i];
  }
}

/* r = r0 + beta * g, but keeps * r0 at the indices of a body; mean = `total` there, else 0.
 *
 * r0 may be r, and g mean. total, kept [capacity]: kept is scratch.
 * sent [layers]: how many of each layer were chosen.
 * Returns BEYOND if indices lie beyond the bucket or do not ascend, and nothing is written; or 0.
 */
int topk_replace(const place *where, const form *as, const uint8_t *body, const float *total,
                    float beta, float keeps, float *kept, float *r, const float *r0, float *mean,
                    const float *g, int64_t *sent, int threads) {
  const share of = share_of(as, body);
  if (check_share(&of, where)) return BEYOND;
  if (!keeps) kept = NULL;
  for (int64_t i = 0; kept && i < of.count; i++) kept[i] = r0[of.index[i]] * keeps;
  memset(sent, 0, sizeof(int64_t) * (size_t)where->layers);
  count_layers(where, ~0u, of.index,
               first_from(of.index, of.count, ~0u, where->size - 1), sent);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int t = 0; t < threads; t++) {
    int64_t stop = border(where->size, TILE, t + 1, threads);
    for (int64_t at = border(where->size, TILE, t, threads); at < stop; at += TILE) {
      int64_t end = at + TILE < stop ? at + TILE : stop;
      add_scaled(r + at, r0 + at, g + at, end - at, beta);
      memset(mean + at, 0, sizeof(float) * (size_t)(end - at));
      end -= end == where->size;
      put_share(&of, kept, total, at, end, r, mean);
    }
  }
  r[where->size - 1] = mean[where->size - 1] = 0.0f;
  return 0;
}
