/* Bins of equal width: `encode_bins` and `decode_bins` of ops/interface/quantization.py.
 *
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

/* What is known of a group of values; see `_parts_of_peaks` in interface/quantization.py. */
typedef struct {
  int64_t entries, first, number, sum, squares;
  uint32_t top;
  float up, down, mean, per_unit;
} bin_group;

/* Exact in steps of 2**-bits; what is not a number is lost. */
static inline int64_t in_steps(float x, int bits) {
  float scaled = x * (float)((int64_t)1 << bits), most = (float)((int64_t)1 << 62);
  return scaled > -most && scaled < most ? (int64_t)scaled : 0;
}

static float mean_of(int64_t sum, int64_t number, int bits) {
  return (float)sum * (1.0f / (float)((int64_t)1 << bits)) / (float)(number > 1 ? number : 1);
}

static float power_of_two(uint32_t biased) {
  uint32_t bits = biased << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

/* Where the run of members of one group ends that begins at i; which it is, or NULL for none. */
static int64_t run_of(const int64_t *group, int64_t i, int64_t n, bin_group *groups, int64_t count,
                      bin_group **own) {
  const int64_t g = group[i];
  *own = g >= 0 && g < count ? groups + g : NULL;
  while (++i < n && group[i] == g) continue;
  return i;
}

static bin_group *bin_groups(const int64_t *entries, int64_t count) {
  bin_group *groups = calloc((size_t)count + 1, sizeof *groups);
  int64_t first = 0;
  for (int64_t g = 0; groups && g < count; first += entries[g++])
    groups[g].entries = entries[g], groups[g].first = first;
  return groups;
}

FAST static void bin_codes(const float *part, int64_t n, float mean, float per_unit, int bins,
                           uint8_t *codes) {
  float middle = (float)bins / 2.0f, most = (float)bins - 1.0f;
  for (int64_t i = 0; i < n; i++) {
    float height = (part[i] - mean) * per_unit;
    height = height + middle;
    height = height > 0.0f ? height : 0.0f;
    codes[i] = (uint8_t)(height < most ? height : most);
  }
}

/* The largest exponent, and how many there are. */
FAST static void see_run(const float *x, int64_t n, bin_group *own) {
  uint32_t top = own->top;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits = bits << 1 >> 24;
    top = bits > top ? bits : top;
  }
  own->top = top, own->number += n;
}

/* Packed codes of n values, means [sum of entries]; see interface/quantization.py. */
int encode_bins(const float *x, const int64_t *group, int64_t n, const int64_t *entries,
                int64_t count, int bits, uint32_t *words, float *means, int64_t total) {
  const int64_t all = whole_groups(n);
  const int bins = 1 << bits;
  bin_group *groups = bin_groups(entries, count), *own;
  int64_t *sums = calloc((size_t)total * 2 + 1, sizeof *sums), *numbers = sums + total;
  float *part = malloc(sizeof(float) * (size_t)n + (size_t)all + 1);
  if (!groups || !sums || !part) {
    free(groups), free(sums), free(part);
    return NO_MEMORY;
  }
  uint8_t *codes = (uint8_t *)(part + n);
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (own) see_run(x + i, end - i, own);
  }
  for (int64_t g = 0; g < count; g++) {
    uint32_t top = groups[g].top < 253 ? groups[g].top : 253;
    int used = groups[g].top >= 127 - 88;
    groups[g].up = used ? power_of_two(top) : 0.0f;
    groups[g].down = used ? power_of_two(254 - top) : 0.0f;
  }
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own) continue;
    int64_t sum = 0;
    for (int64_t j = i; j < end; j++) {
      part[j] = x[j] * own->down;
      sum += in_steps(part[j], 38);
    }
    own->sum += sum;
  }
  for (int64_t g = 0; g < count; g++) groups[g].mean = mean_of(groups[g].sum, groups[g].number, 38);
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own) continue;
    int64_t sum = 0;
    for (int64_t j = i; j < end; j++) {
      float apart = part[j] - own->mean;
      sum += in_steps(apart * apart, 34);
    }
    own->squares += sum;
  }
  for (int64_t g = 0; g < count; g++) {
    float variance = mean_of(groups[g].squares, groups[g].number, 34);
    float deviation = (float)sqrt((double)variance);
    groups[g].per_unit = (deviation >= TINY ? 1.0f / deviation : 0.0f) * (float)(bins / 6.0);
    groups[g].number = 0;  /* from here on the rank of the next member */
  }
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own) {
      memset(codes + i, 0, (size_t)(end - i));
      continue;
    }
    if (own->entries == bins)
      bin_codes(part + i, end - i, own->mean, own->per_unit, bins, codes + i);
    else
      for (int64_t j = i; j < end; j++, own->number++)
        codes[j] = (uint8_t)(own->number < own->entries ? own->number : own->entries - 1);
    int64_t *sum = sums + own->first, *number = numbers + own->first;
    for (int64_t j = i; j < end; j++) sum[codes[j]] += in_steps(part[j], 38), number[codes[j]]++;
  }
  for (int64_t g = 0; g < count; g++)
    for (int64_t e = groups[g].first; e < groups[g].first + groups[g].entries; e++)
      means[e] = mean_of(sums[e], numbers[e], 38) * groups[g].up;
  memset(codes + n, 0, (size_t)(all - n));
  pack_codes(codes, all, bits, words);
  free(groups), free(sums), free(part);
  return 0;
}

/* What bins are decoded as. */
static void of_bins_plainly(const uint8_t *codes, const float *means, int64_t n, int bits,
                            float *out) {
  (void)bits;
  for (int64_t i = 0; i < n; i++) out[i] = means[codes[i]];
}

#ifdef __x86_64__
/* Up to 16 means are two registers, of which codes choose. */
AVX2 static void of_bins_avx2(const uint8_t *codes, const float *means, int64_t n, int bits,
                              float *out) {
  float table[16];
  int64_t i = 0;
  if (bits <= 4) {
    for (int code = 0; code < 16; code++) table[code] = means[code & ((1 << bits) - 1)];
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    for (; i + 8 <= n; i += 8) {
      const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                                 _mm256_permutevar8x32_ps(high, code), upper));
    }
  }
  of_bins_plainly(codes + i, means, n - i, bits, out + i);
}
#endif

int decode_bins(const uint32_t *words, const float *means, const int64_t *group, int64_t n,
                const int64_t *entries, int64_t count, int bits, float *out) {
  bin_group *groups = bin_groups(entries, count), *own;
  uint8_t *codes = malloc((size_t)whole_groups(n) + 1);
  if (!groups || !codes) {
    free(groups), free(codes);
    return NO_MEMORY;
  }
  unpack_codes(words, whole_groups(n), bits, codes);
  for (int64_t i = 0, end; i < n; i = end) {
    end = run_of(group, i, n, groups, count, &own);
    if (!own)
      memset(out + i, 0, sizeof(float) * (size_t)(end - i));
    else if (own->entries == 1 << bits)
      BEST(of_bins)(codes + i, means + own->first, end - i, bits, out + i);
    else
      for (int64_t j = i; j < end; j++)
        out[j] = means[own->first + (codes[j] < own->entries ? codes[j] : own->entries - 1)];
  }
  free(groups), free(codes);
  return 0;
}
