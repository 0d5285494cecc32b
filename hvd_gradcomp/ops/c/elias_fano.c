/* Elias-Fano code of rows of ascending numbers; see ops/interface/bitpack.py, which says the same in
 * plain ops, and codecs/elias_fano.py.
 */
#include "kernels.h"
#include "threads.h"

#define GROUP 32

/* low: of 32 numbers the last bits, as `bit_planes` packs them; high: a bit for each number. */
int encode_ascending(const int64_t *numbers, int64_t rows, int64_t count, int64_t low,
                     int64_t width, int64_t *lows, int64_t *highs) {
  const int64_t all = rows * count, mask = ((int64_t)1 << low) - 1;
  memset(highs, 0, sizeof(int64_t) * (size_t)((rows * width + 31) / 32));
  for (int64_t row = 0, at = 0; row < rows; row++)
    for (int64_t i = 0; i < count; i++, at++) {
      int64_t place = (numbers[at] >> low) + i;
      if (numbers[at] < 0 || place >= width) return BEYOND;
      place += row * width;
      highs[place >> 5] |= (int64_t)1 << (place & 31);
    }
  for (int64_t at = 0; low && at < all; at += GROUP) {
    int64_t group[GROUP] = {0}, n = all - at < GROUP ? all - at : GROUP;
    for (int64_t i = 0; i < n; i++) group[i] = numbers[at + i] & mask;
    bit_planes(group, 1, (int)low, lows + at / GROUP * low);
  }
  return 0;
}

/* Numbers that have no bit are as if theirs were the first of all; bits beyond the last are ignored. */
void decode_ascending(const int64_t *lows, const int64_t *highs, int64_t rows, int64_t count,
                      int64_t low, int64_t width, int64_t universe, int64_t *numbers) {
  const int64_t all = rows * count, bits = rows * width;
  int64_t at = 0, row = 0, i = 0; /* number `at` is the i-th of its row */
  for (int64_t word = 0; word * 32 < bits && at < all; word++) {
    uint32_t held = (uint32_t)highs[word];
    if (bits - word * 32 < 32) held &= ((uint32_t)1 << (bits - word * 32)) - 1;
    for (; held && at < all; held &= held - 1) {
      int64_t rest = word * 32 + __builtin_ctz(held) - row * width - i;
      numbers[at++] = rest > 0 ? rest : 0;
      if (++i == count) i = 0, row++;
    }
  }
  if (at < all) memset(numbers + at, 0, sizeof(int64_t) * (size_t)(all - at));
  for (at = 0; at < all; at += GROUP) {
    int64_t group[GROUP] = {0}, n = all - at < GROUP ? all - at : GROUP;
    if (low) from_bit_planes(lows + at / GROUP * low, 1, (int)low, group);
    for (i = 0; i < n; i++) {
      int64_t number = (numbers[at + i] << low) + group[i];
      numbers[at + i] = number < universe ? number : universe;
    }
  }
}
