/* The permutation of _permute.py, which explains it; results are the same. */

#include "lf_native.h"

enum { ROUNDS = 8 };

static uint64_t mixed(uint64_t half, uint64_t key, uint32_t out_bits) {
  uint64_t x = half + key;
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9;
  x ^= x >> 27;
  x *= 0x94D049BB133111EB;
  return x >> (64 - out_bits);
}

void lf_permute(int64_t *values, uint64_t count, uint64_t n, uint32_t bits, const uint64_t *keys) {
  const uint32_t low_bits = bits / 2, high_bits = bits - low_bits;
  const uint64_t mask = ((uint64_t)1 << low_bits) - 1;
  for (uint64_t k = 0; k < count; k++) {
    uint64_t value = (uint64_t)values[k];
    do {
      uint64_t low = value & mask, high = value >> low_bits;
      for (int i = 0; i < ROUNDS; i += 2) {
        high ^= mixed(low, keys[i], high_bits);
        low ^= mixed(high, keys[i + 1], low_bits);
      }
      value = high << low_bits | low;
    } while (value >= n);
    values[k] = (int64_t)value;
  }
}
