/* Kernels of codecs/threshold.py: each one walk over a bucket, or over what is sent of it.
 *
 * Every result equals that of the plain ops to the bit; see kernels.h for how. A kernel is cut into as many
 * pieces as it gets threads, at borders that do not depend on what the pieces hold.
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include "rows.h"

/* -- taking in and finding ------------------------------------------------------------------ */

/* A piece of one layer: what is taken in, and where what comes of it goes. */
typedef struct {
  float *r, *v;
  const float *r0, *v0, *g, *q; /* q: NULL where it is g*g */
  uint32_t base;                /* the first index */
  uint32_t *index, *bits;       /* of what is wanted; NULL, and then there are */
  uint8_t *flags;
  float *squares; /* to which those of g are added; NULL, and then they are not */
  int past;                     /* r and v are written past the caches; see `write_past` */
} piece;

FAST static void add_square(float *x, const float *from, const float *y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float square = y[i] * y[i];
    x[i] = from[i] + square;
  }
}

FAST static void scale(float *x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = x[i] * factor;
}

FAST static void flag(const rule *how, const float *r, const float *v, int64_t n, uint8_t *flags) {
  for (int64_t i = 0; i < n && how->ambiguity; i++)
    flags[i] = r[i] * r[i] > v[i] * how->alpha;
  for (int64_t i = 0; i < n && how->large; i++) {
    uint8_t large = fabsf(r[i]) > how->tau;
    flags[i] = how->ambiguity ? flags[i] & large : large;
  }
}

FAST static uint32_t largest_flagged(const float *r, const uint8_t *flags, int64_t n) {
  int32_t most = 0; /* integers with a sign have a vector maximum everywhere */
  for (int64_t i = 0; i < n; i++) {
    int32_t size = (int32_t)MAGNITUDE(r[i]) & -(int32_t)flags[i];
    most = size > most ? size : most;
  }
  return (uint32_t)most;
}

FAST static void scale_unless(float *x, float factor, const uint8_t *flags, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = flags[i] ? x[i] : x[i] * factor;
}

/* Elements `first` to n of a piece, in one walk each; see `take_in`. */
static int64_t take_in_plainly(const rule *how, const piece *of, int64_t first, int64_t n,
                               uint32_t *index, uint32_t *bits, uint32_t *most) {
  float *r = of->r + first, *v = how->ambiguity ? of->v + first : NULL, before[CHUNK];
  int64_t size = n - first, fresh = 0;
  if (size <= 0) return 0;
  if (of->squares) *of->squares += sum_of(of->g + first, size, 1);
  add(r, of->r0 + first, of->g + first, size);
  if (v && of->q)
    add(v, of->v0 + first, of->q + first, size);
  else if (v)
    add_square(v, of->v0 + first, of->g + first, size);
  if (of->index)
    fresh = list_plainly(how, r, v, 0, size, of->base + (uint32_t)first, index, bits, most);
  else {
    uint8_t *flags = of->flags + first;
    flag(how, r, v, size, flags);
    uint32_t here = largest_flagged(r, flags, size);
    if (here > *most) *most = here;
    if (v && how->corrects) {
      scale_unless(v, how->zeta, flags, size);
      return 0;
    }
  }
  if (!v) return fresh;
  for (int64_t i = 0; i < fresh && how->corrects; i++) before[i] = of->v[index[i] - of->base];
  scale(v, how->zeta, size);
  for (int64_t i = 0; i < fresh && how->corrects; i++) of->v[index[i] - of->base] = before[i];
  return fresh;
}

#ifdef __x86_64__
__attribute__((target("avx2,bmi"))) static int64_t take_in_avx2(const rule *how, const piece *of,
                                                                 int64_t n, uint32_t *most) {
  const __m256 alpha = _mm256_set1_ps(how->alpha), tau = _mm256_set1_ps(how->tau);
  const __m256 zeta = _mm256_set1_ps(how->zeta);
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi8(1);
  const __m256i corrected = _mm256_set1_epi32(how->corrects ? -1 : 0);
  const __m256i in_turn = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i largest = _mm256_setzero_si256();
  __m256 squares[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                       _mm256_setzero_ps()};
  int64_t run = of->past ? before_line(of->r, n) : 0;
  int64_t count = take_in_plainly(how, of, 0, run, of->index, of->bits, most);
  for (; run + 32 <= n; run += 32) {
    __m256i passes[4];
    for (int part = 0; part < 4; part++) {
      const int64_t i = run + 8 * part;
      const __m256 g = _mm256_loadu_ps(of->g + i);
      if (of->squares) squares[part] = _mm256_add_ps(squares[part], _mm256_mul_ps(g, g));
      const __m256 x = _mm256_add_ps(_mm256_loadu_ps(of->r0 + i), g);
      const __m256i size = _mm256_and_si256(_mm256_castps_si256(x), magnitude);
      __m256i pass = _mm256_set1_epi32(-1);
      store_avx2(of->r + i, x, of->past);
      if (how->large)
        pass = _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(size), tau, _CMP_GT_OQ));
      if (how->ambiguity) {
        const __m256 q = of->q ? _mm256_loadu_ps(of->q + i) : _mm256_mul_ps(g, g);
        const __m256 y = _mm256_add_ps(_mm256_loadu_ps(of->v0 + i), q);
        const __m256 bound = _mm256_mul_ps(y, alpha);
        const __m256 clear = _mm256_cmp_ps(_mm256_mul_ps(x, x), bound, _CMP_GT_OQ);
        pass = _mm256_and_si256(pass, _mm256_castps_si256(clear));
        const __m256 stays = _mm256_castsi256_ps(_mm256_and_si256(pass, corrected));
        store_avx2(of->v + i, _mm256_blendv_ps(_mm256_mul_ps(y, zeta), y, stays), of->past);
      }
      largest = _mm256_max_epi32(largest, _mm256_and_si256(size, pass));
      passes[part] = pass;
    }
    const __m256i low = _mm256_packs_epi32(passes[0], passes[1]);
    const __m256i high = _mm256_packs_epi32(passes[2], passes[3]);
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_turn); /* 0 or -1 each */
    if (!of->index) {
      _mm256_storeu_si256((__m256i *)(of->flags + run), _mm256_and_si256(bytes, one));
      continue;
    }
    for (uint32_t flags = (uint32_t)_mm256_movemask_epi8(bytes); flags; flags &= flags - 1) {
      int64_t i = run + __builtin_ctz(flags);
      of->index[count] = of->base + (uint32_t)i, of->bits[count++] = bits_of(of->r[i]);
    }
  }
  int32_t sizes[8];
  _mm256_storeu_si256((__m256i *)sizes, largest);
  for (int lane = 0; lane < 8; lane++)
    if ((uint32_t)sizes[lane] > *most) *most = (uint32_t)sizes[lane];
  if (of->squares) *of->squares += sum_of_lanes_avx2(squares);
  return count + take_in_plainly(how, of, run, n, of->index + count, of->bits + count, most);
}

__attribute__((target("avx512f,avx512bw,avx512vl,popcnt"))) static int64_t take_in_avx512(
    const rule *how, const piece *of, int64_t n, uint32_t *most) {
  const __m512 alpha = _mm512_set1_ps(how->alpha), tau = _mm512_set1_ps(how->tau);
  const __m512 zeta = _mm512_set1_ps(how->zeta);
  const __mmask16 corrected = how->corrects ? 0xffff : 0;
  __m512i largest = _mm512_setzero_si512();
  __m512 squares[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                       _mm512_setzero_ps()};
  int64_t run = of->past ? before_line(of->r, n) : 0;
  int64_t count = take_in_plainly(how, of, 0, run, of->index, of->bits, most);
  for (; run + RUN <= n; run += RUN) {
    __m512 x[4];
    __mmask16 passes[4];
    for (int part = 0; part < 4; part++) {
      const int64_t i = run + 16 * part;
      const __m512 g = _mm512_loadu_ps(of->g + i);
      if (of->squares) squares[part] = _mm512_add_ps(squares[part], _mm512_mul_ps(g, g));
      __mmask16 pass = 0xffff;
      x[part] = _mm512_add_ps(_mm512_loadu_ps(of->r0 + i), g);
      store_avx512(of->r + i, x[part], of->past);
      if (how->large) pass = _mm512_cmp_ps_mask(_mm512_abs_ps(x[part]), tau, _CMP_GT_OQ);
      if (how->ambiguity) {
        const __m512 q = of->q ? _mm512_loadu_ps(of->q + i) : _mm512_mul_ps(g, g);
        const __m512 y = _mm512_add_ps(_mm512_loadu_ps(of->v0 + i), q);
        const __m512 bound = _mm512_mul_ps(y, alpha);
        pass = _mm512_mask_cmp_ps_mask(pass, _mm512_mul_ps(x[part], x[part]), bound, _CMP_GT_OQ);
        const __mmask16 decays = (__mmask16) ~(pass & corrected);
        store_avx512(of->v + i, _mm512_mask_mul_ps(y, decays, y, zeta), of->past);
      }
      passes[part] = pass;
    }
    if (!of->index)
      for (int part = 0; part < 4; part++)
        _mm_storeu_si128((__m128i *)(of->flags + run + 16 * part),
                         _mm_maskz_set1_epi8(passes[part], 1));
    if (!(passes[0] | passes[1] | passes[2] | passes[3])) continue;
    for (int part = 0; part < 4; part++) {
      const __m512i size = _mm512_castps_si512(_mm512_abs_ps(x[part]));
      largest = _mm512_mask_max_epu32(largest, passes[part], largest, size);
      if (!of->index) continue;
      const uint32_t first = of->base + (uint32_t)(run + 16 * part);
      count += append_avx512(x[part], passes[part], first, of->index + count, of->bits + count);
    }
  }
  uint32_t here = _mm512_reduce_max_epu32(largest);
  if (here > *most) *most = here;
  if (of->squares) *of->squares += sum_of_lanes_avx512(squares);
  return count + take_in_plainly(how, of, run, n, of->index + count, of->bits + count, most);
}
#endif

/* r = r0 + g, v = v0 + q, v *= zeta; what is wanted, and the largest magnitude of it.
 *
 * One loop for all: what it computes is done while memory brings what comes next. Returns how many
 * are listed.
 */
static int64_t take_in(const rule *how, const piece *of, int64_t n, uint32_t *most) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return take_in_avx512(how, of, n, most);
  if (__builtin_cpu_supports("avx2")) return take_in_avx2(how, of, n, most);
#endif
  return take_in_plainly(how, of, 0, n, of->index, of->bits, most);
}

/* r = r0 + g, v = v0 + q (g*g where q is NULL), v *= zeta; which elements are wanted.
 *
 * r0 may be r, and v0 v. Where the rule corrects v, that of wanted elements has not decayed yet.
 *
 * wanted [2, size]: their indices, ascending, in the beginning, and what r holds there, as bits; or
 * NULL, and then flags [size]: 1 for each of them, and 0.
 * top [layers]: the largest exponent of a wanted element, as it stands in a float.
 * finite: as for `topk_find`.
 * Returns how many are wanted; -1 without memory.
 */
int64_t threshold_find(const rule *how, const place *where, float *r, float *v, const float *r0,
                   const float *v0, const float *g, const float *q, uint32_t *wanted, uint8_t *flags,
                   int32_t *top, int *finite, int threads) {
  int64_t n = where->size;
  int checks = finite && !in_place(r, v, r0, v0);
  if (finite) *finite = checks || sum_finite(g, n, 1, threads);
  if (finite && !*finite) return 0;
  int64_t *starts = malloc(2 * sizeof(int64_t) * (size_t)threads), *counts = starts + threads;
  uint32_t *tops = calloc((size_t)(threads * where->layers), sizeof(uint32_t));
  if (!starts || !tops) {
    free(starts);
    free(tops);
    return -1;
  }
  const int past = written_elsewhere(r, v, r0, v0, n);
  float squares = 0.0f;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : squares)
  for (int t = 0; t < threads; t++) {
    int64_t start = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads);
    int64_t count = 0;
    for (int64_t at = start, end; at < stop; at = end) {
      end = end_of(where, at, stop);
      uint32_t *out = wanted ? wanted + start + count : NULL;
      const piece here = {.r = r + at,
                          .v = v ? v + at : NULL,
                          .r0 = r0 + at,
                          .v0 = v ? v0 + at : NULL,
                          .g = g + at,
                          .q = q ? q + at : NULL,
                          .base = (uint32_t)at,
                          .index = out,
                          .bits = wanted ? out + n : NULL,
                          .flags = wanted ? NULL : flags + at,
                          .squares = checks ? &squares : NULL,
                          .past = past};
      count += take_in(how, &here, end - at, tops + t * where->layers + layer_of(where, at));
    }
    starts[t] = start, counts[t] = count;
    written_past();
  }
  if (checks) *finite = isfinite(squares * 4096.0f) != 0;
  for (int64_t layer = 0; layer < where->layers; layer++) {
    uint32_t most = 0;
    for (int t = 0; t < threads; t++)
      if (tops[t * where->layers + layer] > most) most = tops[t * where->layers + layer];
    top[layer] = (int32_t)(most >> 23 < 254 ? most >> 23 : 254);
  }
  int64_t total = wanted ? join(wanted, starts, counts, threads) : 0;
  if (wanted) join(wanted + n, starts, counts, threads);
  free(starts);
  free(tops);
  return total;
}

/* -- codes ----------------------------------------------------------------------------------- */

#define SIGN 0x80000000u

static int64_t code_plainly(const uint32_t *index, const uint32_t *bits, int64_t first, int64_t n,
                            int32_t ceiling, uint32_t *words) {
  int64_t kept = 0;
  for (int64_t i = first; i < n; i++) {
    int32_t nearest = (int32_t)(((bits[i] & 0x7fffffffu) + 0x400000u) >> 23);
    int32_t rounded = nearest < ceiling ? nearest : ceiling, below = ceiling - rounded;
    words[kept] = (bits[i] & SIGN) | (uint32_t)(below & 7) << 28 | index[i];
    kept += (below <= 7) & (rounded > 0);
  }
  return kept;
}

#ifdef __x86_64__
/* Never ahead of what is read, so words may lie where indices do. */
AVX512 static int64_t code_avx512(
    const uint32_t *index, const uint32_t *bits, int64_t n, int32_t ceiling, uint32_t *words) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), half = _mm512_set1_epi32(0x400000);
  const __m512i top = _mm512_set1_epi32(ceiling), most = _mm512_set1_epi32(7);
  int64_t kept = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512i held = _mm512_loadu_si512(bits + i), place = _mm512_loadu_si512(index + i);
    const __m512i size = _mm512_add_epi32(_mm512_and_si512(held, magnitude), half);
    const __m512i rounded = _mm512_min_epi32(_mm512_srli_epi32(size, 23), top);
    const __m512i below = _mm512_sub_epi32(top, rounded);
    const __m512i code = _mm512_or_si512(_mm512_slli_epi32(below, 28), place);
    const __m512i word = _mm512_or_si512(_mm512_andnot_si512(magnitude, held), code);
    __mmask16 keeps = _mm512_cmple_epi32_mask(below, most);
    keeps = _mm512_mask_cmpgt_epi32_mask(keeps, rounded, _mm512_setzero_si512());
    _mm512_storeu_si512(words + kept, _mm512_maskz_compress_epi32(keeps, word));
    kept += __builtin_popcount(keeps);
  }
  return kept + code_plainly(index, bits, i, n, ceiling, words + kept);
}
#endif

/* Words for `n` elements of one layer, and how many: those that a code can express. */
static int64_t code_words(const uint32_t *index, const uint32_t *bits, int64_t n, int32_t ceiling,
                          uint32_t *words) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) return code_avx512(index, bits, n, ceiling, words);
#endif
  return code_plainly(index, bits, 0, n, ceiling, words);
}

/* wanted [2, size], of `threshold_find`: indices become words, code above index, without what no code can
 * express.
 *
 * Returns how many are left; -1 without memory.
 */
int64_t threshold_code(const rule *how, const place *where, uint32_t *wanted, int64_t count,
                   const int32_t *top, int threads) {
  const uint32_t *bits = wanted + where->size;
  int64_t *starts = malloc(2 * sizeof(int64_t) * (size_t)threads), *counts = starts + threads;
  if (!starts) return -1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t start = border(count, 1, t, threads), stop = border(count, 1, t + 1, threads);
    int64_t kept = start;
    for (int64_t i = start, n, layer; i < stop; i += n) {
      n = near(where, ~0u, wanted + i, stop - i, &layer);
      if (how->powers)
        kept += code_words(wanted + i, bits + i, n, top[layer], wanted + kept);
      else
        for (int64_t j = i; j < i + n; j++) wanted[kept++] = (bits[j] & SIGN) | wanted[j];
    }
    starts[t] = start, counts[t] = kept - start;
  }
  int64_t total = join(wanted, starts, counts, threads);
  free(starts);
  return total;
}

static inline uint32_t mask_of(const rule *how) { return how->powers ? 0x0fffffffu : 0x7fffffffu; }

static inline uint32_t index_of(const rule *how, uint32_t word) { return word & mask_of(how); }

/* What words of one layer stand for, times a weight; `exponent` came with them. */
FAST static void values_of(const rule *how, const uint32_t *words, int64_t n, int32_t exponent,
                           float weight, float *values) {
  for (int64_t i = 0; i < n && how->powers; i++) {
    int32_t power = exponent + 127 - (int32_t)(words[i] >> 28 & 7);
    values[i] = float_of((uint32_t)(power > 0 ? power : 0) << 23 | (words[i] & SIGN)) * weight;
  }
  for (int64_t i = 0; i < n && !how->powers; i++) {
    float value = words[i] & SIGN ? -how->tau : how->tau;
    values[i] = value * weight;
  }
}

/* The body's side part: an exponent for each layer, and padding. */
static void write_side(const rule *how, const place *where, const int32_t *top, uint8_t *body) {
  memset(body, 0, (size_t)where->side);
  if (how->powers)
    for (int64_t layer = 0; layer < where->layers; layer++)
      body[layer] = (uint8_t)(top[layer] - 127);
}

/* A body of words: a window of neighbours if not all fit, and the sink in unused slots.
 *
 * v: of what was wanted and is not sent it decays now, where the rule corrects it.
 * sent [layers]: how many of each layer are sent.
 * Returns how many are.
 */
int64_t threshold_write(const rule *how, const place *where, const uint32_t *words, int64_t count,
                    const int32_t *top, int64_t capacity, int64_t step, float *v, uint8_t *body,
                    int64_t *sent) {
  int64_t head = 0, start = 0;
  if (count > capacity) {
    start = (int64_t)((__int128)step * capacity % count);
    head = start + capacity > count ? start + capacity - count : 0;
  }
  int64_t stop = start + capacity < count ? start + capacity : count, tail = stop - start;
  uint32_t *out = (uint32_t *)(body + where->side);
  write_side(how, where, top, body);
  memcpy(out, words, (size_t)head * 4);
  memcpy(out + head, words + start, (size_t)tail * 4);
  for (int64_t i = head + tail; i < capacity; i++) out[i] = (uint32_t)(where->size - 1);
  if (how->corrects)
    for (int64_t i = head; i < count; i++)
      if (i < start || i >= stop) {
        float *x = v + index_of(how, words[i]);
        *x = *x * how->zeta;
      }
  memset(sent, 0, sizeof(int64_t) * (size_t)where->layers);
  count_layers(where, mask_of(how), out, head + tail, sent);
  return head + tail;
}

/* flags become `code + 1`, 0 where no code can express it; how many there are. */
FAST static int64_t code_powers(const float *r, int64_t n, int32_t ceiling, uint8_t *flags) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(r[i]);
    int32_t nearest = (int32_t)(((bits & 0x7fffffffu) + 0x400000u) >> 23);
    int32_t rounded = nearest < ceiling ? nearest : ceiling, below = ceiling - rounded;
    int32_t kept = flags[i] & (below <= 7) & (rounded > 0);
    flags[i] = (uint8_t)(kept ? (int32_t)(bits >> 31) * 8 + below + 1 : 0);
    count += kept;
  }
  return count;
}

FAST static int64_t code_signs(const float *r, int64_t n, uint8_t *flags) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    count += flags[i];
    flags[i] = (uint8_t)(flags[i] ? (bits_of(r[i]) >> 31) + 1 : 0);
  }
  return count;
}

/* Four codes of two bits to a byte, the first in the lowest bits; and back. */
FAST static void pack_fours(const uint8_t *codes, int64_t n, uint8_t *out) {
  for (int64_t i = 0; i < n / 4; i++) {
    uint32_t four;
    memcpy(&four, codes + 4 * i, 4);
    out[i] = (uint8_t)(four | four >> 6 | four >> 12 | four >> 18);
  }
}

FAST static void unpack_fours(const uint8_t *packed, int64_t n, uint8_t *codes) {
  for (int64_t i = 0; i < n / 4; i++) {
    uint32_t x = packed[i];
    uint32_t four = (x | x << 6 | x << 12 | x << 18) & 0x03030303u;
    memcpy(codes + 4 * i, &four, 4);
  }
}

/* A body of places: `code + 1` of every element in a byte, or in two bits; all that can are sent.
 *
 * flags [size]: from `threshold_find`; the places of the body themselves, where those are bytes.
 * Returns how many are sent.
 */
int64_t threshold_places(const rule *how, const place *where, const float *r, uint8_t *flags,
                     const int32_t *top, uint8_t *body, int64_t *sent, int threads) {
  int64_t n = where->size, total = 0;
  write_side(how, where, top, body);
  memset(sent, 0, sizeof(int64_t) * (size_t)where->layers);
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t stop = border(n, CHUNK, t + 1, threads);
    for (int64_t at = border(n, CHUNK, t, threads), end; at < stop; at = end) {
      end = end_of(where, at, stop);
      int64_t layer = layer_of(where, at), count;
      if (how->powers)
        count = code_powers(r + at, end - at, top[layer], flags + at);
      else {
        count = code_signs(r + at, end - at, flags + at);
        pack_fours(flags + at, end - at, body + where->side + at / 4);
      }
#pragma omp atomic
      sent[layer] += count;
    }
  }
  for (int64_t layer = 0; layer < where->layers; layer++) total += sent[layer];
  return total;
}

/* -- settling -------------------------------------------------------------------------------- */

static inline void commit(const rule *how, uint32_t index, float value, float *r, float *v) {
  float held = r[index];
  r[index] = how->subtracts ? held - value : 0.0f;
  if (v && how->corrects) {
    float less = fabsf(held) * how->twice_tau, left = v[index] - less;
    left = left + how->tau_squared;
    v[index] = (left > 0.0f ? left : 0.0f) * how->zeta;
  } else if (v)
    v[index] = 0.0f;
}

FAST static void commit_powers(float *r, const uint8_t *codes, int64_t n, int32_t exponent,
                               int subtracts) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t code = (uint32_t)codes[i] - 1;
    int32_t power = exponent + 127 - (int32_t)(code & 7);
    uint32_t bits = (uint32_t)(power > 0 ? power : 0) << 23 | (code >> 3) << 31;
    float value, left;
    memcpy(&value, &bits, 4);
    left = subtracts ? r[i] - value : 0.0f;
    r[i] = codes[i] ? left : r[i];
  }
}

FAST static void commit_signs(float *r, const uint8_t *codes, int64_t n, float tau,
                              int subtracts) {
  for (int64_t i = 0; i < n; i++) {
    float value = (float)(3 - 2 * (int32_t)codes[i]) * tau, left = subtracts ? r[i] - value : 0.0f;
    r[i] = codes[i] ? left : r[i];
  }
}

FAST static void clear_sent(float *v, const uint8_t *codes, int64_t n) {
  for (int64_t i = 0; i < n; i++) v[i] = codes[i] ? 0.0f : v[i];
}

FAST static void correct(float *restrict v, const float *restrict r, const uint8_t *codes,
                         int64_t n, float twice_tau, float tau_squared, float zeta) {
  for (int64_t i = 0; i < n; i++) {
    float less = fabsf(r[i]) * twice_tau, left = v[i] - less;
    left = left + tau_squared;
    left = (left > 0.0f ? left : 0.0f) * zeta;
    v[i] = codes[i] ? left : v[i];
  }
}

/* Takes out of r and v what a body of this rank says: `count` words, or places where it is -1. */
void threshold_commit(const rule *how, const place *where, const uint8_t *body, int64_t count, float *r,
                  float *v, int threads) {
  const int8_t *exponents = (const int8_t *)body;
  if (count >= 0) {
    const uint32_t *words = (const uint32_t *)(body + where->side);
    IN_PIECES
    for (int t = 0; t < threads; t++) {
      int64_t stop = border(count, NEAR, t + 1, threads);
      for (int64_t i = border(count, NEAR, t, threads), n, layer; i < stop; i += n) {
        float values[NEAR];
        n = near(where, mask_of(how), words + i, stop - i, &layer);
        values_of(how, words + i, n, how->powers ? exponents[layer] : 0, 1.0f, values);
        for (int64_t j = 0; j < n; j++) {
          int64_t ahead = i + j + AHEAD < stop ? i + j + AHEAD : i + j;
          __builtin_prefetch(r + index_of(how, words[ahead]), 1);
          if (v) __builtin_prefetch(v + index_of(how, words[ahead]), 1);
          commit(how, index_of(how, words[i + j]), values[j], r, v);
        }
      }
    }
    return;
  }
  const uint8_t *places = body + where->side;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t unpacked[CHUNK];
    int64_t stop = border(where->size, CHUNK, t + 1, threads);
    for (int64_t at = border(where->size, CHUNK, t, threads), end; at < stop; at = end) {
      end = end_of(where, at, stop);
      const uint8_t *codes = how->powers ? places + at : unpacked;
      if (!how->powers) unpack_fours(places + at / 4, end - at, unpacked);
      if (v && how->corrects)
        correct(v + at, r + at, codes, end - at, how->twice_tau, how->tau_squared, how->zeta);
      else if (v)
        clear_sent(v + at, codes, end - at);
      if (how->powers)
        commit_powers(r + at, codes, end - at, exponents[layer_of(where, at)], how->subtracts);
      else
        commit_signs(r + at, codes, end - at, how->tau, how->subtracts);
    }
  }
}

/* -- adding up ------------------------------------------------------------------------------- */

/* total = the sum of all ranks' words times their weight, rank by rank in rank order.
 *
 * bodies: of all ranks, `stride` bytes apart. Returns BEYOND if an index lies beyond the bucket.
 */
int threshold_add(const rule *how, const place *where, const uint8_t *bodies, int64_t stride,
              int64_t ranks, int64_t capacity, const float *weights, float *total, int threads) {
  int falls = 0;
  for (int64_t rank = 0; rank < ranks; rank++) {
    const uint32_t *words = (const uint32_t *)(bodies + rank * stride + where->side);
    int order = order_of(words, capacity, mask_of(how), (uint32_t)where->size);
    if (order < 0) return BEYOND;
    falls |= order;
  }
  if (falls) threads = 1; /* nobody here writes such: one walk over all, for each rank */
  int64_t grain = falls ? where->size : TILE;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t stop = border(where->size, grain, t + 1, threads);
    for (int64_t at = border(where->size, grain, t, threads); at < stop; at += grain) {
      int64_t end = at + grain < stop ? at + grain : stop;
      memset(total + at, 0, sizeof(float) * (size_t)(end - at));
      for (int64_t rank = 0; rank < ranks; rank++) {
        const uint8_t *body = bodies + rank * stride;
        const uint32_t *words = (const uint32_t *)(body + where->side);
        int64_t i = falls ? 0 : first_from(words, capacity, mask_of(how), at);
        int64_t until = falls ? capacity : first_from(words, capacity, mask_of(how), end);
        for (int64_t n, layer; i < until; i += n) {
          float values[NEAR];
          n = near(where, mask_of(how), words + i, falls ? 1 : until - i, &layer);
          values_of(how, words + i, n, how->powers ? ((const int8_t *)body)[layer] : 0,
                    weights[rank], values);
          for (int64_t j = 0; j < n; j++) total[index_of(how, words[i + j])] += values[j];
        }
      }
    }
  }
  total[where->size - 1] = 0.0f;
  return 0;
}

FAST static void add_powers(float *total, const uint8_t *codes, int64_t n, int32_t exponent,
                            float weight) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t code = (uint32_t)codes[i] - 1;
    int32_t power = exponent + 127 - (int32_t)(code & 7);
    uint32_t bits = (uint32_t)(power > 0 ? power : 0) << 23 | (code >> 3) << 31;
    float value;
    memcpy(&value, &bits, 4);
    value = value * weight;
    total[i] = total[i] + (codes[i] ? value : 0.0f);
  }
}

FAST static void add_signs_of(float *total, const uint8_t *codes, int64_t n, float tau,
                              float weight) {
  for (int64_t i = 0; i < n; i++) {
    float value = (float)(3 - 2 * (int32_t)codes[i]) * tau;
    value = value * weight;
    total[i] = total[i] + (codes[i] ? value : 0.0f);
  }
}

/* The same of places. */
void threshold_add_places(const rule *how, const place *where, const uint8_t *bodies, int64_t stride,
                      int64_t ranks, const float *weights, float *total, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t codes[CHUNK];
    int64_t stop = border(where->size, CHUNK, t + 1, threads);
    for (int64_t at = border(where->size, CHUNK, t, threads), end; at < stop; at = end) {
      end = end_of(where, at, stop);
      memset(total + at, 0, sizeof(float) * (size_t)(end - at));
      for (int64_t rank = 0; rank < ranks; rank++) {
        const uint8_t *body = bodies + rank * stride, *places = body + where->side;
        if (how->powers) {
          add_powers(total + at, places + at, end - at, ((const int8_t *)body)[layer_of(where, at)],
                     weights[rank]);
          continue;
        }
        unpack_fours(places + at / 4, end - at, codes);
        add_signs_of(total + at, codes, end - at, how->tau, weights[rank]);
      }
    }
  }
  total[where->size - 1] = 0.0f;
}
