/* Levels of a scale as codes, and sums of them; see `encode_levels` and `add_levels`.
 *
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include <math.h>
#include <string.h>

#include "groups.h"
#include "planes.h"

FAST static void level_codes(const float *x, int64_t n, float inverse, int levels, uint32_t first,
                             uint32_t key, uint8_t *codes) {
  float most = (float)levels;
  for (int64_t i = 0; i < n; i++) {
    uint32_t hash = mix(mix(first + (uint32_t)i) ^ key);
    float chance = (float)(int32_t)(hash >> 8) * 0x1p-24f;
    float height = fabsf(x[i]) * inverse;
    height = height + chance;
    int32_t level = (int32_t)(height < most ? height : most);
    codes[i] = (uint8_t)(x[i] < 0.0f ? levels - level : levels + level);
  }
}

static void nearest_levels_plainly(const float *x, int64_t n, float inverse, int levels,
                                   uint8_t *codes) {
  float most = (float)levels;
  for (int64_t i = 0; i < n; i++) {
    float height = fabsf(x[i]) * inverse;
    height = height + 0.5f;
    int32_t level = (int32_t)(height < most ? height : most);
    codes[i] = (uint8_t)(x[i] < 0.0f ? levels - level : levels + level);
  }
}

#ifdef __x86_64__
/* Eight values to their nearest levels, with their signs; what is far below is not yet cut off. */
AVX2 static inline __m256i eight_levels(const float *x, __m256 inverse, __m256 most) {
  const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
  const __m256 sign = _mm256_and_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)));
  const __m256 half = _mm256_or_ps(sign, _mm256_set1_ps(0.5f));
  return _mm256_cvttps_epi32(_mm256_min_ps(_mm256_add_ps(value, half), most));
}

AVX2 static void nearest_levels_avx2(const float *x, int64_t n, float inverse, int levels,
                                     uint8_t *codes) {
  const __m256 factor = _mm256_set1_ps(inverse), most = _mm256_set1_ps((float)levels);
  const __m256i middle = _mm256_set1_epi8((char)levels), least = _mm256_set1_epi8((char)-levels);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* lanes as they were loaded */
  int64_t i = 0;
  for (; i + GROUP <= n; i += GROUP) {
    fetch_after(x + i);
    const __m256i low = _mm256_packs_epi32(eight_levels(x + i, factor, most),
                                           eight_levels(x + i + 8, factor, most));
    const __m256i high = _mm256_packs_epi32(eight_levels(x + i + 16, factor, most),
                                            eight_levels(x + i + 24, factor, most));
    const __m256i all = _mm256_max_epi8(_mm256_packs_epi16(low, high), least);
    _mm256_storeu_si256((__m256i *)(codes + i),
                        _mm256_permutevar8x32_epi32(_mm256_add_epi8(all, middle), order));
  }
  nearest_levels_plainly(x + i, n - i, inverse, levels, codes + i);
}
#endif

static void nearest_level_codes(const float *x, int64_t n, float inverse, int levels,
                                uint8_t *codes) {
  BEST(nearest_levels)(x, n, inverse, levels, codes);
}

FAST static void add_level_values(float *total, const uint8_t *codes, int64_t n, float unit,
                                  int levels, float weight) {
  for (int64_t i = 0; i < n; i++) {
    float value = (float)(codes[i] - levels) * unit;
    value = value * weight;
    total[i] = total[i] + value;
  }
}

/* Codes of [first, last); first is a multiple of CHUNK. */
static void levels_between(const band *bands, int64_t count, const float *x, int64_t first,
                           int64_t last, const float *scale, int bits, const int64_t *key,
                           uint32_t *words, int threads) {
  int levels = (1 << (bits - 1)) - 1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t codes[CHUNK];
    int64_t begin = first + border(last - first, CHUNK, t, threads), end;
    int64_t stop = first + border(last - first, CHUNK, t + 1, threads);
    walk w = walk_from(bands, count, begin);
    for (; begin < stop; begin = end) {
      int64_t from, to, group;
      int more;
      end = begin + CHUNK < stop ? begin + CHUNK : stop;
      memset(codes, 0, CHUNK);
      do {
        more = next_piece(&w, begin, end, &from, &to, &group);
        if (more) {
          float inverse = scale[group] >= TINY ? (float)levels / scale[group] : 0.0f;
          if (key)
            level_codes(x + from, to - from, inverse, levels, (uint32_t)(from + key[0]),
                        (uint32_t)key[1], codes + from - begin);
          else
            nearest_level_codes(x + from, to - from, inverse, levels, codes + from - begin);
        }
      } while (more == 1);
      pack_codes(codes, end - begin, bits, words + begin / GROUP * bits);
    }
  }
}

void encode_levels(const band *bands, int64_t count, const float *x, int64_t n, const float *scale,
                   int bits, const int64_t *key, uint32_t *words, int threads) {
  levels_between(bands, count, x, 0, n, scale, bits, key, words, threads);
}

/* The maxima, and the codes with them as scales: x is read once. */
void encode_peaks(const band *bands, int64_t count, const float *x, int64_t n, int bits,
                  const int64_t *key, float *scale, uint32_t *words, int threads) {
  int64_t part = threads > 1 ? n : NEAR;
  for (int64_t begin = 0, end; begin < n; begin = end) {
    end = begin + part < n ? begin + part : n;
    maxima_between(bands, count, x, begin, end, scale, threads);
    levels_between(bands, count, x, begin, end, scale, bits, key, words, threads);
  }
}

#ifdef __x86_64__
AVX2 static void sum_levels_avx2(const float *base, float *out, int64_t from, int64_t to,
                                 int64_t ranks, const uint8_t *codes, int64_t stride,
                                 const float *units, const float *weights, int past) {
  const int levels = 127;
  const __m256i middle = _mm256_set1_epi32(levels);
  past = past && (uintptr_t)out % 32 == 0;
  for (int64_t at = from, end; at < to; at = end) {
    uint8_t here[GROUP];
    int64_t word = at / GROUP * GROUP; /* where the planes of 32 codes begin */
    end = word + GROUP < to ? word + GROUP : to;
    if (end - at < GROUP) {
      begin_sum(out, base, at, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        unpack_bytes_avx2((const uint32_t *)(codes + rank * stride + word), GROUP, here);
        add_level_values(out + at, here + at - word, end - at, units[rank], levels, weights[rank]);
      }
      continue;
    }
    __m256 sums[4];
    for (int part = 0; part < 4; part++)
      sums[part] = base ? _mm256_loadu_ps(base + at + 8 * part) : _mm256_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m256 unit = _mm256_set1_ps(units[rank]), weight = _mm256_set1_ps(weights[rank]);
      fetch_ahead(codes + rank * stride + word);
      unpack_bytes_avx2((const uint32_t *)(codes + rank * stride + word), GROUP, here);
      for (int part = 0; part < 4; part++) {
        const __m128i eight = _mm_loadl_epi64((const __m128i *)(here + 8 * part));
        __m256 value = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(eight), middle));
        value = _mm256_mul_ps(_mm256_mul_ps(value, unit), weight);
        sums[part] = _mm256_add_ps(sums[part], value);
      }
    }
    for (int part = 0; part < 4; part++) store_eight(out + at + 8 * part, sums[part], past);
  }
}

__attribute__((target("avx512f,avx512bw,avx512vl,gfni"))) static void sum_levels_avx512(
    const float *base, float *out, int64_t from, int64_t to, int64_t ranks, const uint8_t *codes,
    int64_t stride, const float *units, const float *weights, int past) {
  const int levels = 127;
  const __m512i middle = _mm512_set1_epi32(levels);
  int64_t whole = from;
  if (from % GROUP == 0 && (uintptr_t)out % 64 == 0) whole = from + (to - from) / GROUP * GROUP;
  for (int64_t at = from; at < whole; at += GROUP) {
    __m512 first = base ? _mm512_loadu_ps(base + at) : _mm512_setzero_ps();
    __m512 second = base ? _mm512_loadu_ps(base + at + 16) : _mm512_setzero_ps();
    for (int64_t rank = 0; rank < ranks; rank++) {
      const __m512 unit = _mm512_set1_ps(units[rank]), weight = _mm512_set1_ps(weights[rank]);
      fetch_ahead(codes + rank * stride + at);
      const __m256i here = unpacked_bytes((const uint32_t *)(codes + rank * stride + at));
      const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(here));
      const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(here, 1));
      const __m512 lower = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, middle));
      const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, middle));
      first = _mm512_add_ps(first, _mm512_mul_ps(_mm512_mul_ps(lower, unit), weight));
      second = _mm512_add_ps(second, _mm512_mul_ps(_mm512_mul_ps(upper, unit), weight));
    }
    if (past) {
      _mm512_stream_ps(out + at, first);
      _mm512_stream_ps(out + at + 16, second);
    } else {
      _mm512_storeu_ps(out + at, first);
      _mm512_storeu_ps(out + at + 16, second);
    }
  }
  if (whole < to)
    sum_levels_avx2(base, out, whole, to, ranks, codes, stride, units, weights, past);
}
#endif

/* out = base + the sum over ranks, rank by rank; strides in words and floats. */
void add_levels(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint32_t *words, int64_t word_stride, const float *scale,
                int64_t scale_stride, int bits, const float *weights, int threads) {
  int levels = (1 << (bits - 1)) - 1;
  IN_PIECES
  for (int t = 0; t < threads; t++) {
    uint8_t codes[CHUNK];
    float spare[CHUNK];
    int64_t begin = border(n, CHUNK, t, threads), stop = border(n, CHUNK, t + 1, threads), end;
    walk w = walk_from(bands, count, begin);
#ifdef __x86_64__
    if (bits == 8 && ranks <= FEW && __builtin_cpu_supports("avx2")) {
      int wide = HAS_GFNI && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl");
      sum_of_group *sum = wide ? sum_levels_avx512 : sum_levels_avx2;
      sum_groups(sum, w, base, out, begin, stop, ranks, (const uint8_t *)words,
                 4 * word_stride, scale, scale_stride, (float)(1.0 / levels), weights,
                 base != out && 4 * n >= MUCH);
      begin = stop;
    }
#endif
    for (; begin < stop; begin = end) {
      int64_t from, to, group;
      int more;
      walk start = w;
      end = begin + CHUNK < n ? begin + CHUNK : n;
      float *total = begin_chunk(spare, out, base, n, begin, end);
      for (int64_t rank = 0; rank < ranks; rank++) {
        const float *scales = scale + rank * scale_stride;
        w = start;
        unpack_codes(words + rank * word_stride + begin / GROUP * bits, end - begin, bits, codes);
        do {
          more = next_piece(&w, begin, end, &from, &to, &group);
          if (more) {
            float unit = scales[group] >= TINY ? scales[group] * (float)(1.0 / levels) : 0.0f;
            add_level_values(total + from - begin, codes + from - begin, to - from, unit, levels,
                             weights[rank]);
          }
        } while (more == 1);
      }
      end_chunk(total, out, begin, end);
    }
    written_past();
  }
}
