/* Narrow floats, bfloat16 and e4m3, and sums of them; see `encode_floats` and `add_floats`.
 *
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include <string.h>

#include "groups.h"

#ifdef __x86_64__
#include <cpuid.h>

/* clang before 16 does not know the name for `__builtin_cpu_supports`. */
static int has_f16c;
__attribute__((constructor)) static void look_for_f16c(void) {
  unsigned a, b, c = 0, d;
  has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* What is added to a magnitude before its lower half is cut off: for the nearest, ties to even. */
static inline uint32_t half_up(uint32_t magnitude) { return 0x7fffu + (magnitude >> 16 & 1); }

static inline uint32_t random_up(uint32_t place, uint32_t key) { return mix(mix(place) ^ key) >> 16; }

/* Two codes as a word. A NaN's may take a bit more than there is: words are sums of codes, as the
 * composite's. */
#define PAIR(i, up_first, up_second)                                                            \
  uint32_t first = bits_of(x[2 * (i)]), second = bits_of(x[2 * (i) + 1]);                       \
  uint32_t low = first & 0x7fffffffu, high = second & 0x7fffffffu;                              \
  most = larger(most, larger((int32_t)low, (int32_t)high));                                     \
  words[i] = ((low + (up_first)) >> 16) + (first >> 16 & 0x8000u) +                             \
             ((high + (up_second)) & 0xffff0000u) + (second & 0x80000000u)

/* All return the largest magnitude, as bits. */
static int32_t nearest_bfloat16_plainly(const float *x, int64_t n, uint32_t *words, int past) {
  int32_t most = 0;
  (void)past;
  for (int64_t i = 0; i < n / 2; i++) {
    PAIR(i, half_up(low), half_up(high));
  }
  return most;
}

#ifdef __x86_64__
AVX2 static inline int32_t largest_of(__m256i x) {
  int32_t lanes[8], most = 0;
  _mm256_storeu_si256((__m256i *)lanes, x);
  for (int i = 0; i < 8; i++) most = larger(most, lanes[i]);
  return most;
}

/* Codes of eight magnitudes, in the lower halves. */
AVX2 static inline __m256i eight_bfloat16(__m256i bits, __m256i magnitude) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x8000));
  return _mm256_add_epi32(_mm256_srli_epi32(_mm256_add_epi32(magnitude, up), 16), sign);
}

/* The sums of each two codes, the second one half a word further, in every other place. */
AVX2 static inline __m256 four_words(__m256i codes) {
  const __m256i second = _mm256_and_si256(codes, _mm256_set1_epi64x((long long)0xffffffff00000000ull));
  return _mm256_castsi256_ps(_mm256_add_epi32(codes, _mm256_srli_epi64(second, 16)));
}

AVX2 static int32_t nearest_bfloat16_avx2(const float *x, int64_t n, uint32_t *words, int past) {
  const __m256i rest = _mm256_set1_epi32(INT32_MAX);
  __m256i most = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i first = _mm256_loadu_si256((const __m256i *)(x + i));
    const __m256i second = _mm256_loadu_si256((const __m256i *)(x + i + 8));
    const __m256i low = _mm256_and_si256(first, rest), high = _mm256_and_si256(second, rest);
    most = _mm256_max_epi32(most, _mm256_max_epi32(low, high));
    const __m256 left = four_words(eight_bfloat16(first, low));
    const __m256 right = four_words(eight_bfloat16(second, high));
    const __m256i all = _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0x88));
    const __m256i codes = _mm256_permute4x64_epi64(all, 0xd8);
    if (past)
      _mm256_stream_si256((__m256i *)(words + i / 2), codes);
    else
      _mm256_storeu_si256((__m256i *)(words + i / 2), codes);
  }
  return larger(largest_of(most), nearest_bfloat16_plainly(x + i, n - i, words + i / 2, 0));
}
#endif

/* Past the caches if `past`: words begin at a multiple of 32 bytes then. */
static int32_t nearest_bfloat16(const float *x, int64_t n, uint32_t *words, int past) {
  return BEST(nearest_bfloat16)(x, n, words, past);
}

FAST static int32_t random_bfloat16(const float *x, int64_t n, uint32_t place, uint32_t key,
                                    uint32_t *words) {
  int32_t most = 0;
  for (int64_t i = 0; i < n / 2; i++) {
    uint32_t own = place + 2 * (uint32_t)i;
    PAIR(i, random_up(own, key), random_up(own + 1, key));
  }
  return most;
}

/* Below 2**-6 are multiples of 2**-9: the last bits of a sum. No code of a NaN means anything. */
static void nearest_e4m3_plainly(const float *x, int64_t n, float inverse, uint8_t *codes) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i] * inverse), magnitude = bits & 0x7fffffffu;
    uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    float sum = float_of(magnitude) * 0x1p9f;
    sum = sum + 0x1p23f;
    codes[i] =
        (uint8_t)((magnitude < 121u << 23 ? bits_of(sum) & 15 : normal) + (bits >> 31 << 7));
  }
}

#ifdef __x86_64__
/* Four times eight numbers below 256, in lanes as they were loaded, as bytes. */
AVX2 static inline __m256i as_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i low = _mm256_packs_epi32(a, b), high = _mm256_packs_epi32(c, d);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
}

AVX2 static inline __m256i eight_e4m3(const float *x, __m256 inverse) {
  const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MAX));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  __m256i normal = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7ffff)), odd);
  normal = _mm256_sub_epi32(_mm256_srli_epi32(normal, 20), _mm256_set1_epi32(120 << 3));
  __m256 sum = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p9f));
  sum = _mm256_add_ps(sum, _mm256_set1_ps(0x1p23f));
  const __m256i small = _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(15));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), magnitude);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 7);
  const __m256i code = _mm256_add_epi32(_mm256_blendv_epi8(normal, small, is_small), sign);
  return _mm256_and_si256(code, _mm256_set1_epi32(255));
}

AVX2 static void nearest_e4m3_avx2(const float *x, int64_t n, float inverse, uint8_t *codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  int64_t i = 0;
  for (; i + GROUP <= n; i += GROUP) {
    fetch_after(x + i);
    _mm256_storeu_si256((__m256i *)(codes + i),
                        as_bytes(eight_e4m3(x + i, factor), eight_e4m3(x + i + 8, factor),
                                 eight_e4m3(x + i + 16, factor), eight_e4m3(x + i + 24, factor)));
  }
  nearest_e4m3_plainly(x + i, n - i, inverse, codes + i);
}
#endif

static void nearest_e4m3(const float *x, int64_t n, float inverse, uint8_t *codes) {
  BEST(nearest_e4m3)(x, n, inverse, codes);
}

float encode_bfloat16(const float *x, int64_t n, const int64_t *key, uint32_t *words, int threads) {
  int32_t most = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(max : most)
  for (int t = 0; t < threads; t++) {
    uint32_t codes[CHUNK / 2];
    int64_t stop = border(n, CHUNK, t + 1, threads), end;
    for (int64_t begin = border(n, CHUNK, t, threads); begin < stop; begin = end) {
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      if (!key) {
        int past = 2 * n >= MUCH && (uintptr_t)(words + begin / 2) % 32 == 0;
        most = larger(most, nearest_bfloat16(x + begin, end - begin, words + begin / 2, past));
        continue;
      }
      uint32_t *to = 2 * n < MUCH ? words + begin / 2 : codes;
      uint32_t place = (uint32_t)begin + (uint32_t)key[0];
      most = larger(most, random_bfloat16(x + begin, end - begin, place, (uint32_t)key[1], to));
      if (to == codes) write_past(words + begin / 2, codes, 2 * (end - begin));
    }
    written_past();
  }
  return float_of((uint32_t)most);
}

/* Codes of [first, last). */
static void e4m3_between(const band *bands, int64_t count, const float *x, int64_t first,
                         int64_t last, const float *unit, uint8_t *codes, int threads) {
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    int64_t begin = first + border(last - first, CHUNK, t, threads);
    int64_t stop = first + border(last - first, CHUNK, t + 1, threads);
    int64_t from, to, group, done = begin;
    int more;
    walk w = walk_from(bands, count, begin);
    do {
      more = next_piece(&w, begin, stop, &from, &to, &group);
      memset(codes + done, 0, (size_t)((more ? from : stop) - done));
      done = more ? to : stop;
      if (more)
        nearest_e4m3(x + from, to - from, unit[group] >= TINY ? 1.0f / unit[group] : 0.0f,
                     codes + from);
    } while (more == 1);
    memset(codes + done, 0, (size_t)(stop - done));
  }
}

void encode_e4m3(const band *bands, int64_t count, const float *x, int64_t n, const float *unit,
                 uint8_t *codes, int threads) {
  e4m3_between(bands, count, x, 0, n, unit, codes, threads);
}

/* Units in which each group's largest magnitude is 448, perhaps rounded up to powers of two; and
 * the codes with them: x is read once. */
void encode_e4m3_peaks(const band *bands, int64_t count, const float *x, int64_t n, int powers,
                       float *unit, uint8_t *codes, int threads) {
  int64_t part = threads > 1 ? n : NEAR, at, length, group;
  for (int64_t begin = 0, end; begin < n; begin = end) {
    end = begin + part < n ? begin + part : n;
    maxima_between(bands, count, x, begin, end, unit, threads);
    walk w = walk_from(bands, count, begin);
    while (next_group(&w, begin, end, &at, &length, &group)) {
      unit[group] *= (float)(1.0 / 448.0);
      if (powers) unit[group] = float_of((bits_of(unit[group]) + (1u << 23) - 1) >> 23 << 23);
    }
    e4m3_between(bands, count, x, begin, end, unit, codes, threads);
  }
}

FAST static void add_bfloat16(float *total, const uint8_t *codes, int64_t n, float weight) {
  for (int64_t i = 0; i < n; i++) {
    uint16_t code;
    memcpy(&code, codes + 2 * i, sizeof code);
    float value = float_of((uint32_t)code << 16) * weight;
    total[i] = total[i] + value;
  }
}

#ifdef __x86_64__
/* out = base + the sum over a few ranks, read once and written once, past the caches if `past`.
 *
 * Returns the largest magnitude, as bits.
 */
AVX2 static int32_t sum_bfloat16_avx2(const float *base, float *out, int64_t n, int64_t ranks,
                                      const uint8_t *codes, int64_t stride, const float *weights,
                                      int past) {
  const __m256i rest = _mm256_set1_epi32(INT32_MAX);
  __m256i most = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 sum = base ? _mm256_loadu_ps(base + i) : _mm256_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m128i eight = _mm_loadu_si128((const __m128i *)(codes + rank * stride + 2 * i));
      if (i % 32 == 0) fetch_ahead(codes + rank * stride + 2 * i);
      const __m256 value = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
      sum = _mm256_add_ps(sum, _mm256_mul_ps(value, _mm256_set1_ps(weights[rank])));
    }
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(sum), rest));
    store_eight(out + i, sum, past);
  }
  for (; i < n; i++) {
    float sum = base ? base[i] : 0.0f;
    for (int64_t rank = 0; rank < ranks; rank++)
      add_bfloat16(&sum, codes + rank * stride + 2 * i, 1, weights[rank]);
    most = _mm256_max_epi32(most, _mm256_set1_epi32((int32_t)(bits_of(sum) & INT32_MAX)));
    out[i] = sum;
  }
  return largest_of(most);
}
#endif

FAST static void add_e4m3_plainly(float *total, const uint8_t *codes, int64_t n, float unit,
                                  float weight) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t magnitude = codes[i] & 127u;
    float small = (float)(int32_t)magnitude * 0x1p-9f;
    uint32_t bits = magnitude < 8 ? bits_of(small) : (magnitude + (120 << 3)) << 20;
    float value = float_of(bits | (uint32_t)codes[i] >> 7 << 31) * unit;
    value = value * weight;
    total[i] = total[i] + value;
  }
}

#ifdef __x86_64__
/* Halfs have the same mantissas, and others than normal ones too; only their exponents are 8 more. */
__attribute__((target("avx2,f16c"))) static void add_e4m3_avx2(float *total, const uint8_t *codes,
                                                              int64_t n, float unit,
                                                              float weight) {
  const __m256 scale = _mm256_set1_ps(unit), factor = _mm256_set1_ps(weight);
  const __m128i sign = _mm_set1_epi16((int16_t)0x8000), rest = _mm_set1_epi16(127 << 7);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(codes + i)));
    const __m128i half = _mm_or_si128(_mm_and_si128(_mm_slli_epi16(code, 8), sign),
                                      _mm_and_si128(_mm_slli_epi16(code, 7), rest));
    __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    value = _mm256_mul_ps(_mm256_mul_ps(value, scale), factor);
    _mm256_storeu_ps(total + i, _mm256_add_ps(_mm256_loadu_ps(total + i), value));
  }
  add_e4m3_plainly(total + i, codes + i, n - i, unit, weight);
}

__attribute__((target("avx2,f16c"))) static void sum_e4m3_avx2(
    const float *base, float *out, int64_t from, int64_t to, int64_t ranks, const uint8_t *codes,
    int64_t stride, const float *units, const float *weights, int past) {
  const __m128i sign = _mm_set1_epi16((int16_t)0x8000), rest = _mm_set1_epi16(127 << 7);
  int64_t at = from;
  past = past && (uintptr_t)(out + from) % 32 == 0;
  for (; at + 8 <= to; at += 8) {
    __m256 sum = base ? _mm256_loadu_ps(base + at) : _mm256_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m128i eight = _mm_loadl_epi64((const __m128i *)(codes + rank * stride + at));
      if ((at - from) % 64 == 0) fetch_ahead(codes + rank * stride + at);
      const __m128i code = _mm_cvtepu8_epi16(eight);
      const __m128i half = _mm_or_si128(_mm_and_si128(_mm_slli_epi16(code, 8), sign),
                                        _mm_and_si128(_mm_slli_epi16(code, 7), rest));
      __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
      value = _mm256_mul_ps(value, _mm256_set1_ps(units[rank]));
      sum = _mm256_add_ps(sum, _mm256_mul_ps(value, _mm256_set1_ps(weights[rank])));
    }
    store_eight(out + at, sum, past);
  }
  begin_sum(out, base, at, to);
  for (int64_t rank = 0; rank < ranks; rank++)
    add_e4m3_plainly(out + at, codes + rank * stride + at, to - at, units[rank], weights[rank]);
}

__attribute__((target("avx512f,avx2,f16c"))) static void sum_e4m3_avx512(
    const float *base, float *out, int64_t from, int64_t to, int64_t ranks, const uint8_t *codes,
    int64_t stride, const float *units, const float *weights, int past) {
  const __m256i sign = _mm256_set1_epi16((int16_t)0x8000), rest = _mm256_set1_epi16(127 << 7);
  int64_t at = from;
  const int wide = past && (uintptr_t)(out + from) % 64 == 0;
  for (; at + 16 <= to; at += 16) {
    __m512 sum = base ? _mm512_loadu_ps(base + at) : _mm512_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const uint8_t *own = codes + rank * stride + at;
      const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)own));
      if ((at - from) % 64 == 0) fetch_ahead(own);
      const __m256i half = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(code, 8), sign),
                                           _mm256_and_si256(_mm256_slli_epi16(code, 7), rest));
      __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
      value = _mm512_mul_ps(value, _mm512_set1_ps(units[rank]));
      sum = _mm512_add_ps(sum, _mm512_mul_ps(value, _mm512_set1_ps(weights[rank])));
    }
    if (wide)
      _mm512_stream_ps(out + at, sum);
    else
      _mm512_storeu_ps(out + at, sum);
  }
  if (at < to) sum_e4m3_avx2(base, out, at, to, ranks, codes, stride, units, weights, past);
}
#endif

static void add_e4m3(float *total, const uint8_t *codes, int64_t n, float unit, float weight) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && has_f16c) {
    add_e4m3_avx2(total, codes, n, unit, weight);
    return;
  }
#endif
  add_e4m3_plainly(total, codes, n, unit, weight);
}

/* out = base + the sum over ranks, rank by rank; strides in bytes and floats. Returns whether all of
 * it is finite, if `checks`. */
int add_floats(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint8_t *codes, int64_t code_stride, const float *unit,
                int64_t unit_stride, int bits, const float *weights, int checks, int threads) {
  int32_t most = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(max : most)
  for (int t = 0; t < threads; t++) {
    float spare[CHUNK];
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
#ifdef __x86_64__
    if (bits == 16 && ranks <= FEW && __builtin_cpu_supports("avx2")) {
      int past = base != out && 4 * n >= MUCH && (uintptr_t)(out + begin) % 32 == 0;
      most = larger(most, sum_bfloat16_avx2(base ? base + begin : NULL, out + begin, stop - begin,
                                            ranks, codes + 2 * begin, code_stride, weights, past));
      begin = stop;
    }
    if (bits == 8 && !checks && ranks <= FEW && __builtin_cpu_supports("avx2") &&
        has_f16c) {
      sum_of_group *sum = __builtin_cpu_supports("avx512f") ? sum_e4m3_avx512 : sum_e4m3_avx2;
      sum_groups(sum, w, base, out, begin, stop, ranks, codes, code_stride, unit,
                 unit_stride, 1.0f, weights, base != out && 4 * n >= MUCH);
      begin = stop;
    }
#endif
    for (; begin < stop; begin = end) {
      walk start = w;
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      float *total = begin_chunk(spare, out, base, n, begin, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const uint8_t *own = codes + rank * code_stride;
        const float *units = unit + rank * unit_stride;
        int64_t from, to, group;
        int more;
        if (bits == 16) {
          add_bfloat16(total, own + 2 * begin, end - begin, weights[rank]);
          continue;
        }
        w = start;
        do {
          more = next_piece(&w, begin, end, &from, &to, &group);
          if (more)
            add_e4m3(total + from - begin, own + from, to - from,
                     units[group] >= TINY ? units[group] : 0.0f, weights[rank]);
        } while (more == 1);
      }
      if (checks) most = larger(most, largest_bits(total, end - begin));
      end_chunk(total, out, begin, end);
    }
    written_past();
  }
  return most < 0x7f800000;
}
