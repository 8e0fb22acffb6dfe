/* XXH3 of bytes that lie in one piece, but are visited in steps. */

#ifndef LF_XXH3_H
#define LF_XXH3_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  const uint8_t *data;
  size_t length;
  uint64_t seed;
  size_t blocks; /* done, of 1024 bytes */
  uint64_t acc[8];
  uint8_t secret[192];
} lf_xxh3_state;

void lf_xxh3_begin(lf_xxh3_state *state, const uint8_t *data, size_t length, uint64_t seed);
/* Hash on while `upto` bytes of the data are near. */
void lf_xxh3_advance(lf_xxh3_state *state, size_t upto);
/* What is left, and the hash: lf_xxh3_64 of the same bytes. */
uint64_t lf_xxh3_end(lf_xxh3_state *state);

#endif
