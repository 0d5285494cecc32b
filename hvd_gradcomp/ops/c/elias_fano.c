/* Elias-Fano code of rows of ascending numbers; see ops/interface/bitpack.py, which says the same in
 * plain ops, and codecs/elias_fano.py.
 * ops/interface/bitpack.py lists the twins of this format.
 */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

/* -- planes of 32 numbers, and bits that are set ------------------------------------------------ */

/* Bits of 32 numbers from `first` on, a word for each. */
static void to_planes_plainly(const uint32_t *numbers, int planes, int first, uint32_t *words) {
  for (int plane = 0; plane < planes; plane++) {
    uint32_t word = 0;
    for (int lane = 0; lane < GROUP; lane++) word |= (numbers[lane] >> (first + plane) & 1) << lane;
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
AVX2 static void to_planes_avx2(const uint32_t *numbers, int planes, int first, uint32_t *words) {
  __m256i part[4];
  for (int i = 0; i < 4; i++) part[i] = _mm256_loadu_si256((const __m256i *)(numbers + 8 * i));
  for (int plane = 0; plane < planes; plane++) {
    const __m128i shift = _mm_cvtsi32_si128(31 - first - plane);
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

AVX512 static void to_planes_avx512(const uint32_t *numbers, int planes, int first,
                                    uint32_t *words) {
  const __m512i front = _mm512_loadu_si512(numbers), back = _mm512_loadu_si512(numbers + 16);
  for (int plane = 0; plane < planes; plane++) {
    const __m512i bit = _mm512_set1_epi32((int)(1u << (first + plane)));
    words[plane] = (uint32_t)_mm512_test_epi32_mask(front, bit) |
                   (uint32_t)_mm512_test_epi32_mask(back, bit) << 16;
  }
}

/* Adds to each of 16 numbers what the planes hold, from bit `first` on; of their 32 lanes those from
 * `lane` on. */
AVX512 static inline __m512i with_planes_avx512(__m512i numbers, const uint32_t *words, int planes,
                                                int first, int lane) {
  for (int plane = 0; plane < planes; plane++) {
    const __m512i bit = _mm512_set1_epi32((int)(1u << (first + plane)));
    numbers = _mm512_mask_add_epi32(numbers, (__mmask16)(words[plane] >> lane), numbers, bit);
  }
  return numbers;
}

AVX512 static void from_planes_avx512(const uint32_t *words, int planes, int first,
                                      uint32_t *numbers) {
  for (int lane = 0; lane < GROUP; lane += 16) {
    const __m512i part = _mm512_loadu_si512(numbers + lane);
    _mm512_storeu_si512(numbers + lane, with_planes_avx512(part, words, planes, first, lane));
  }
}

/* Sixteen bits at a time; the next ones write over what is too much. */
AVX512 static int64_t rests_avx512(const uint32_t *highs, int64_t width, int64_t count,
                                   int64_t *bit, uint32_t *rests) {
  const __m512i lanes = lanes_avx512();
  int64_t at = 0, first = 0;
  for (; first + 32 <= width && at + 48 <= count; first += 32)
    for (int part = 0; part < 32; part += 16) {
      const __mmask16 set = (__mmask16)(highs[first / 32] >> part);
      /* What is added to a lane's number: the place less how many come before. */
      const __m512i apart = _mm512_set1_epi32((int)(uint32_t)(first + part - at));
      const __m512i places = _mm512_sub_epi32(_mm512_maskz_compress_epi32(set, lanes), lanes);
      _mm512_storeu_si512(rests + at, _mm512_add_epi32(places, apart));
      at += __builtin_popcount(set);
    }
  *bit = first;
  return at;
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
  if (__builtin_cpu_supports("avx512f")) return rests_avx512(highs, width, count, bit, rests);
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
    WIDEST(to_planes)(group, (int)low, 0, planes);
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
    WIDEST(from_planes)(planes, (int)low, 0, last);
    join_rows(numbers + at, last, all - at < GROUP ? all - at : GROUP, at, count, width - count,
              low, universe);
  }
}

/* -- words: a code of `bits` bits, or none, above an index -------------------------------------- */

/* Sets a bit for each of n words, at the rest of its index and how many words come before.
 *
 * mask: the bits of an index. at: how many words come before the first. Returns whether each has a
 * place below `width`. */
static int set_places_plainly(const uint32_t *words, uint32_t mask, int64_t n, int64_t at,
                              int64_t low, int64_t width, uint32_t *highs) {
  for (int64_t i = 0; i < n; i++) {
    int64_t place = ((int64_t)(words[i] & mask) >> low) + at + i;
    if (place >= width) return 0;
    highs[place >> 5] |= (uint32_t)1 << (place & 31);
  }
  return 1;
}

#ifdef __x86_64__
#define set_places_avx2 set_places_plainly

/* Sixteen at a time: as indices ascend, their places are in 64 bits, as a rule. */
AVX512 static int set_places_avx512(const uint32_t *words, uint32_t mask, int64_t n, int64_t at,
                                    int64_t low, int64_t width, uint32_t *highs) {
  const __m512i lanes = lanes_avx512();
  const __m512i one = _mm512_set1_epi64(1), indices = _mm512_set1_epi32((int)mask);
  const __m512i wide = _mm512_set1_epi32(64);
  const __m128i shift = _mm_cvtsi32_si128((int)low);
  for (; n >= 16; n -= 16, at += 16, words += 16) {
    const uint32_t least = (words[0] & mask) >> low;
    const int64_t place = least + at, word = place >> 5;
    const __m512i index = _mm512_and_si512(_mm512_loadu_si512(words), indices);
    const __m512i rests = _mm512_srl_epi32(index, shift), first = _mm512_set1_epi32((int)least);
    const __m512i above = _mm512_min_epu32(_mm512_sub_epi32(rests, first), wide);
    const __m512i begin = _mm512_set1_epi32((int)(place & 31));
    const __m512i ahead = _mm512_add_epi32(_mm512_add_epi32(above, lanes), begin);
    if (32 * word + 64 > width ||
        (_mm512_cmpge_epu32_mask(ahead, wide) | _mm512_cmplt_epu32_mask(rests, first))) {
      if (!set_places_plainly(words, mask, 16, at, low, width, highs)) return 0;
      continue;
    }
    const __m512i front = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(ahead));
    const __m512i back = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(ahead, 1));
    const uint64_t set = (uint64_t)_mm512_reduce_or_epi64(
        _mm512_or_si512(_mm512_sllv_epi64(one, front), _mm512_sllv_epi64(one, back)));
    highs[word] |= (uint32_t)set;
    highs[word + 1] |= (uint32_t)(set >> 32);
  }
  return set_places_plainly(words, mask, n, at, low, width, highs);
}
#endif

/* Words whose indices ascend, as `low` planes of the indices, their other bits, planes of codes.
 *
 * highs: (width + 31) / 32 words. Returns 0, or BEYOND if an index has no place.
 */
int encode_words(const uint32_t *words, int64_t count, int64_t low, int64_t width, int bits,
                 uint32_t *lows, uint32_t *highs, uint32_t *codes) {
  const uint32_t mask = (uint32_t)(((uint64_t)1 << (32 - bits)) - 1);
  memset(highs, 0, sizeof *highs * (size_t)((width + 31) / 32));
  if (!WIDEST(set_places)(words, mask, count, 0, low, width, highs)) return BEYOND;
  for (int64_t at = 0; at < count; at += GROUP, words += GROUP, lows += low, codes += bits) {
    uint32_t last[GROUP] = {0};
    const uint32_t *group = words;
    if (count - at < GROUP) group = memcpy(last, words, sizeof *last * (size_t)(count - at));
    WIDEST(to_planes)(group, (int)low, 0, lows);
    if (bits) WIDEST(to_planes)(group, bits, 32 - bits, codes);
  }
  return 0;
}

typedef struct {
  int64_t low, universe; /* bits of an index that are planes; one beyond all indices */
  int bits;              /* of a code, above an index */
  int64_t before;        /* the index before those that come next; -1 for none */
  int falls;             /* whether an index was not above the one before it, and not `universe` */
} reading;

/* Puts n words together, 1 to 32: their rests, planes of the indices' last bits, planes of codes.
 *
 * No index is beyond `universe`; that of a rest which is beyond it is `universe`.
 */
FAST static void join_words_plainly(reading *how, const uint32_t *lows, const uint32_t *codes,
                                    int64_t n, uint32_t *words) {
  const uint32_t universe = (uint32_t)how->universe, most = universe >> how->low;
  uint32_t last[GROUP] = {0}, code[GROUP] = {0}, numbers[GROUP + 1], falls = 0;
  BEST(from_planes)(lows, (int)how->low, 0, last);
  if (how->bits) BEST(from_planes)(codes, how->bits, 32 - how->bits, code);
  for (int64_t i = 0; i < n; i++) {
    uint32_t number = words[i] <= most ? (words[i] << how->low) + last[i] : universe;
    numbers[i + 1] = number < universe ? number : universe;
    words[i] = numbers[i + 1] + code[i];
  }
  numbers[0] = how->before < 0 ? 0 : (uint32_t)how->before;
  for (int64_t i = how->before < 0; i < n; i++)
    falls |= numbers[i + 1] <= numbers[i] && numbers[i + 1] != universe;
  how->falls |= falls != 0;
  how->before = numbers[n];
}

#ifdef __x86_64__
#define join_words_avx2 join_words_plainly

AVX512 static void join_words_avx512(reading *how, const uint32_t *lows, const uint32_t *codes,
                                     int64_t n, uint32_t *words) {
  if (n < GROUP || how->before < 0) {
    join_words_plainly(how, lows, codes, n, words);
    return;
  }
  const __m512i universe = _mm512_set1_epi32((int)(uint32_t)how->universe);
  const __m512i most = _mm512_set1_epi32((int)((uint32_t)how->universe >> how->low));
  const __m128i low = _mm_cvtsi32_si128((int)how->low);
  __m512i before = _mm512_set1_epi32((int)(uint32_t)how->before);
  for (int lane = 0; lane < GROUP; lane += 16) {
    const __m512i rests = _mm512_loadu_si512(words + lane);
    __m512i number = _mm512_sll_epi32(rests, low);
    number = with_planes_avx512(number, lows, (int)how->low, 0, lane);
    const __mmask16 beyond = _mm512_cmpgt_epu32_mask(rests, most);
    number = _mm512_min_epu32(_mm512_mask_mov_epi32(number, beyond, universe), universe);
    const __m512i ahead = _mm512_alignr_epi32(number, before, 15);
    const __mmask16 falls = _mm512_cmple_epu32_mask(number, ahead);
    how->falls |= _mm512_mask_cmpneq_epu32_mask(falls, number, universe) != 0;
    before = number;
    number = with_planes_avx512(number, codes, how->bits, 32 - how->bits, lane);
    _mm512_storeu_si512(words + lane, number);
  }
  const __m128i end = _mm512_extracti32x4_epi32(before, 3);
  how->before = (uint32_t)_mm_extract_epi32(end, 3);
}
#endif

/* The inverse; numbers as `decode_ascending` reads them. Returns whether indices ascend up to those
 * that are `universe`. */
int decode_words(const uint32_t *lows, const uint32_t *highs, const uint32_t *codes, int64_t count,
                 int64_t low, int64_t width, int64_t universe, int bits, uint32_t *words) {
  int64_t bit, at = rests_of(highs, width, count, &bit, words);
  for (int64_t word = bit / 32; word * 32 < width && at < count; word++) {
    uint32_t held = highs[word];
    if (width - word * 32 < 32) held &= ((uint32_t)1 << (width - word * 32)) - 1;
    for (; held && at < count; held &= held - 1, at++)
      words[at] = (uint32_t)(word * 32 + __builtin_ctz(held) - at);
  }
  if (at < count) memset(words + at, 0, sizeof *words * (size_t)(count - at));
  reading how = {low, universe, bits, -1, 0};
  for (at = 0; at < count; at += GROUP, lows += low, codes += bits)
    WIDEST(join_words)(&how, lows, codes, count - at < GROUP ? count - at : GROUP, words + at);
  return !how.falls;
}
