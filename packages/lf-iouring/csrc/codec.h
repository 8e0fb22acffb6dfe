/* Stored block payloads to decoded ones: SPEC.md of lf-format, sections 4 and 5.5. */

#ifndef LF_CODEC_H
#define LF_CODEC_H

#include <stdint.h>

#include "lf_native.h"

/* zstd dictionaries prepared for decoding, one a coding, shared by all threads. */
typedef struct {
  const lf_coding *codings;
  void **prepared;
  uint32_t count;
} lf_codings;

/* One thread's. */
typedef struct {
  void *zstd;
} lf_decoder;

int lf_codings_open(lf_codings *codings, const lf_options *options); /* 0 or a negative errno */
void lf_codings_close(lf_codings *codings);
void lf_decoder_close(lf_decoder *decoder);

/* Fills `raw` with the block's `raw` bytes; 0 when the stored ones are not what the codec makes. */
int lf_decode(lf_decoder *decoder, const lf_codings *codings, const lf_block *block, const uint8_t *stored,
              uint8_t *raw);

/* One byte of 0 or 1 for each of `items` bits, lowest bit of a byte first. */
void lf_unpack_bits(uint8_t *dst, const uint8_t *bits, uint64_t items);

#endif
