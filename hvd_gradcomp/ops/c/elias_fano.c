/* Elias-Fano code of rows of ascending numbers; see ops/interface/bitpack.py, which says the same in
 * plain ops, and codecs/elias_fano.py.
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

/* -- planes of 32 numbers, and bits that are set ------------------------------------------------ */

/* Bit `plane` of 32 numbers as one word, for each plane. */
static void to_planes_plainly(const uint32_t *numbers, int planes, uint32_t *words) {
  for (int plane = 0; plane < planes; plane++) {
    uint32_t word = 0;
    for (int lane = 0; lane < GROUP; lane++) word |= (numbers[lane] >> plane & 1) << lane;
    words[plane] = word;
  }
}

/* Adds the number that the planes hold to each of 32, from bit `first` on. */
static void from_planes_plainly(const uint32_t *words, int planes, int first, uint32_t *numbers) {
  for (int plane = 0; plane < planes; plane++)
    for (int lane = 0; lane < GROUP; lane++)
      numbers[lane] += (words[plane] >> lane & 1) << (first + plane);
}

#ifdef __x86_64__
AVX2 static void to_planes_avx2(const uint32_t *numbers, int planes, uint32_t *words) {
  __m256i part[4];
  for (int i = 0; i < 4; i++) part[i] = _mm256_loadu_si256((const __m256i *)(numbers + 8 * i));
  for (int plane = 0; plane < planes; plane++) {
    const __m128i shift = _mm_cvtsi32_si128(31 - plane);
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
      const __m256 top = _mm256_castsi256_ps(_mm256_sll_epi32(part[i], shift));
      word |= (uint32_t)_mm256_movemask_ps(top) << 8 * i;
    }
    words[plane] = word;
  }
}

/* Eight planes at a time: bytes of 32 lanes. */
AVX2 static void from_planes_avx2(const uint32_t *words, int planes, int first,
                                  uint32_t *numbers) {
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                          2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i lanes = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  for (int begin = 0; begin < planes; begin += 8) {
    const int here = planes - begin < 8 ? planes - begin : 8;
    const __m128i shift = _mm_cvtsi32_si128(first + begin);
    __m256i v = _mm256_setzero_si256();
    uint8_t bytes[GROUP];
    for (int plane = 0; plane < here; plane++) {
      const __m256i word = _mm256_set1_epi32((int32_t)words[begin + plane]);
      const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(word, spread), lanes);
      const __m256i bit = _mm256_set1_epi8((char)(1 << plane));
      v = _mm256_or_si256(v, _mm256_and_si256(_mm256_cmpeq_epi8(own, lanes), bit));
    }
    _mm256_storeu_si256((__m256i *)bytes, v);
    for (int i = 0; i < GROUP; i += 8) {
      const __m256i part = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + i)));
      __m256i *own = (__m256i *)(numbers + i);
      const __m256i sum = _mm256_add_epi32(_mm256_loadu_si256(own), _mm256_sll_epi32(part, shift));
      _mm256_storeu_si256(own, sum);
    }
  }
}

/* Four at a time, since how many there are is hard to predict; the next ones write over what is too
 * much. */
__attribute__((target("avx2,bmi,popcnt"))) static int64_t rests_avx2(const uint32_t *highs,
                                                                      int64_t width, int64_t count,
                                                                      int64_t *bit,
                                                                      uint32_t *rests) {
  int64_t at = 0, first = 0;
  for (; first + 64 <= width && at + 68 <= count; first += 64) {
    uint64_t held;
    memcpy(&held, highs + first / 32, sizeof held);
    int64_t here = __builtin_popcountll(held);
    for (int64_t i = at; i < at + here; i += 4)
      for (int64_t k = i; k < i + 4; k++, held &= held - 1)
        rests[k] = (uint32_t)(first + (int64_t)_tzcnt_u64(held) - k);
    at += here;
  }
  *bit = first;
  return at;
}

/* The same for the places of bits that are set, in words of 32 bits. */
__attribute__((target("avx2,bmi,popcnt"))) static int64_t places_avx2(const int64_t *words,
                                                                       int64_t bits, int64_t count,
                                                                       int64_t *word,
                                                                       int64_t *places) {
  int64_t at = 0, first = 0;
  for (; first + 64 <= bits && at + 68 <= count; first += 64) {
    uint64_t held = (uint64_t)(uint32_t)words[first / 32] | (uint64_t)words[first / 32 + 1] << 32;
    int64_t here = __builtin_popcountll(held);
    for (int64_t i = at; i < at + here; i += 4)
      for (int64_t k = i; k < i + 4; k++, held &= held - 1)
        places[k] = first + (int64_t)_tzcnt_u64(held);
    at += here;
  }
  *word = first / 32;
  return at;
}

static int64_t bits_of_words(const int64_t *words, int64_t bits, int64_t count, int64_t *word,
                             int64_t *places) {
  if (__builtin_cpu_supports("avx2")) return places_avx2(words, bits, count, word, places);
  return *word = 0;
}

static int64_t rests_of(const uint32_t *highs, int64_t width, int64_t count, int64_t *bit,
                        uint32_t *rests) {
  if (__builtin_cpu_supports("avx2")) return rests_avx2(highs, width, count, bit, rests);
  return *bit = 0;
}
#else
#define rests_of(highs, width, count, bit, rests) (*(bit) = 0)
#define bits_of_words(words, bits, count, word, places) (*(word) = 0)
#endif

/* -- rows of ascending numbers ------------------------------------------------------------------ */

/* low: of 32 numbers the last bits, as `bit_planes` packs them; high: a bit for each number. */
int encode_ascending(const int64_t *numbers, int64_t rows, int64_t count, int64_t low,
                     int64_t width, int64_t *lows, int64_t *highs) {
  const int64_t all = rows * count, mask = ((int64_t)1 << low) - 1;
  int64_t word = 0, beyond = 0;
  uint32_t held = 0; /* of the word that is being filled: numbers ascend */
  memset(highs, 0, sizeof(int64_t) * (size_t)((rows * width + 31) / 32));
  for (int64_t row = 0; row < rows && !beyond; row++)
    for (int64_t i = 0; i < count; i++) {
      const int64_t number = numbers[row * count + i];
      int64_t place = (number >> low) + i;
      beyond |= number < 0 || place >= width;
      if (beyond) break;
      place += row * width;
      if (place >> 5 != word) highs[word] |= held, held = 0, word = place >> 5;
      held |= (uint32_t)1 << (place & 31);
    }
  if (beyond) return BEYOND;
  if (held) highs[word] |= held;
  for (int64_t at = 0; low && at < all; at += GROUP, lows += low) {
    uint32_t group[GROUP] = {0}, planes[GROUP];
    int64_t n = all - at < GROUP ? all - at : GROUP;
    for (int64_t i = 0; i < n; i++) group[i] = (uint32_t)(numbers[at + i] & mask);
    BEST(to_planes)(group, (int)low, planes);
    for (int64_t plane = 0; plane < low; plane++) lows[plane] = planes[plane];
  }
  return 0;
}

/* A number of each row from the bit that stands for it, and its last bits; none beyond `universe`.
 *
 * at: how many come before. count, apart: numbers, and other bits, of a row.
 */
FAST static void join_rows(int64_t *bits, const uint32_t *last, int64_t n, int64_t at,
                           int64_t count, int64_t apart, int64_t low, int64_t universe) {
  int64_t row = at / count, i = at - row * count;
  for (int64_t done = 0; done < n; row++, i = 0) {
    const int64_t here = n - done < count - i ? n - done : count - i;
    const int64_t first = at + done + row * apart;
    for (int64_t k = 0; k < here; k++) {
      int64_t rest = bits[done + k] - first - k;
      int64_t number = ((rest > 0 ? rest : 0) << low) + last[done + k];
      bits[done + k] = number < universe ? number : universe;
    }
    done += here;
  }
}

/* Numbers that have no bit are as if theirs were the first of all; bits beyond the last are ignored. */
void decode_ascending(const int64_t *lows, const int64_t *highs, int64_t rows, int64_t count,
                      int64_t low, int64_t width, int64_t universe, int64_t *numbers) {
  const int64_t all = rows * count, bits = rows * width;
  int64_t word, at = bits_of_words(highs, bits, all, &word, numbers);
  for (; word * 32 < bits && at < all; word++) {
    uint32_t held = (uint32_t)highs[word];
    if (bits - word * 32 < 32) held &= ((uint32_t)1 << (bits - word * 32)) - 1;
    for (; held && at < all; held &= held - 1) numbers[at++] = word * 32 + __builtin_ctz(held);
  }
  if (at < all) memset(numbers + at, 0, sizeof(int64_t) * (size_t)(all - at));
  for (at = 0; at < all; at += GROUP, lows += low) {
    uint32_t last[GROUP] = {0}, planes[GROUP];
    for (int64_t plane = 0; plane < low; plane++) planes[plane] = (uint32_t)lows[plane];
    BEST(from_planes)(planes, (int)low, 0, last);
    join_rows(numbers + at, last, all - at < GROUP ? all - at : GROUP, at, count, width - count,
              low, universe);
  }
}

/* -- words: a code of `bits` bits, or none, above an index -------------------------------------- */

/* Words whose indices ascend, as `low` planes of the indices, their other bits, planes of codes.
 *
 * highs: (width + 31) / 32 words. Returns 0, or BEYOND if an index has no place.
 */
int encode_words(const uint32_t *words, int64_t count, int64_t low, int64_t width, int bits,
                 uint32_t *lows, uint32_t *highs, uint32_t *codes) {
  const uint32_t mask = (uint32_t)(((uint64_t)1 << (32 - bits)) - 1);
  memset(highs, 0, sizeof *highs * (size_t)((width + 31) / 32));
  for (int64_t at = 0; at < count; at += GROUP, lows += low, codes += bits) {
    uint32_t index[GROUP] = {0}, code[GROUP] = {0};
    int64_t n = count - at < GROUP ? count - at : GROUP;
    for (int64_t i = 0; i < n; i++) index[i] = words[at + i] & mask;
    for (int64_t i = 0; i < n; i++) {
      int64_t place = ((int64_t)index[i] >> low) + at + i;
      if (place >= width) return BEYOND;
      highs[place >> 5] |= (uint32_t)1 << (place & 31);
    }
    BEST(to_planes)(index, (int)low, lows);
    if (!bits) continue;
    for (int64_t i = 0; i < n; i++) code[i] = words[at + i] >> (32 - bits);
    BEST(to_planes)(code, bits, codes);
  }
  return 0;
}

/* Puts numbers together, none beyond `universe`; a rest beyond `most` is. Returns the last one.
 *
 * fall: gets whether one is not above the one before it, and not `universe`.
 */
FAST static int64_t join(uint32_t *rests, const uint32_t *last, int64_t n, int64_t low,
                         uint32_t most, uint32_t universe, int64_t before, int *fall) {
  uint32_t numbers[GROUP + 1], falls = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t number = rests[i] <= most ? (rests[i] << low) + last[i] : universe;
    numbers[i + 1] = rests[i] = number < universe ? number : universe;
  }
  numbers[0] = before < 0 ? 0 : (uint32_t)before;
  for (int64_t i = before < 0; i < n; i++)
    falls |= numbers[i + 1] <= numbers[i] && numbers[i + 1] != universe;
  *fall |= falls != 0;
  return numbers[n];
}

/* The inverse; numbers as `decode_ascending` reads them. Returns whether indices ascend up to those
 * that are `universe`. */
int decode_words(const uint32_t *lows, const uint32_t *highs, const uint32_t *codes, int64_t count,
                 int64_t low, int64_t width, int64_t universe, int bits, uint32_t *words) {
  int64_t bit, at = rests_of(highs, width, count, &bit, words), before = -1;
  const uint32_t most = (uint32_t)(universe >> low);
  int fall = 0;
  for (int64_t word = bit / 32; word * 32 < width && at < count; word++) {
    uint32_t held = highs[word];
    if (width - word * 32 < 32) held &= ((uint32_t)1 << (width - word * 32)) - 1;
    for (; held && at < count; held &= held - 1, at++)
      words[at] = (uint32_t)(word * 32 + __builtin_ctz(held) - at);
  }
  if (at < count) memset(words + at, 0, sizeof *words * (size_t)(count - at));
  for (at = 0; at < count; at += GROUP, lows += low, codes += bits) {
    uint32_t last[GROUP] = {0}, code[GROUP] = {0};
    int64_t n = count - at < GROUP ? count - at : GROUP;
    BEST(from_planes)(lows, (int)low, 0, last);
    before = join(words + at, last, n, low, most, (uint32_t)universe, before, &fall);
    if (!bits) continue;
    BEST(from_planes)(codes, bits, 32 - bits, code);
    for (int64_t i = 0; i < n; i++) words[at + i] += code[i];
  }
  return !fall;
}
