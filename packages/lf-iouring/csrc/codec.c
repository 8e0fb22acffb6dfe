#include "codec.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { ZSTD_CODEC = 1, PACKED_CODEC = 2, RANK_CODEC = 3, PLANE_ALIGN = 64 };

/* The stable part of zstd.h that we call. The library is looked up at run time: neither building nor importing
   this module needs it. */
static struct {
  unsigned (*version)(void);
  void *(*new_context)(void);
  size_t (*free_context)(void *);
  size_t (*decompress)(void *, void *, size_t, const void *, size_t);
  size_t (*decompress_with)(void *, void *, size_t, const void *, size_t, const void *);
  void *(*new_dictionary)(const void *, size_t);
  size_t (*free_dictionary)(void *);
  unsigned long long (*content_size)(const void *, size_t);
  size_t (*frame_size)(const void *, size_t);
  int found;
} zstd;

static void look_up(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  zstd.found &= symbol != NULL;
}

static void load_zstd(void) {
  void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return;
  zstd.found = 1;
  look_up(library, "ZSTD_versionNumber", &zstd.version);
  look_up(library, "ZSTD_createDCtx", &zstd.new_context);
  look_up(library, "ZSTD_freeDCtx", &zstd.free_context);
  look_up(library, "ZSTD_decompressDCtx", &zstd.decompress);
  look_up(library, "ZSTD_decompress_usingDDict", &zstd.decompress_with);
  look_up(library, "ZSTD_createDDict", &zstd.new_dictionary);
  look_up(library, "ZSTD_freeDDict", &zstd.free_dictionary);
  look_up(library, "ZSTD_getFrameContentSize", &zstd.content_size);
  look_up(library, "ZSTD_findFrameCompressedSize", &zstd.frame_size);
}

uint32_t lf_zstd_version(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load_zstd);
  return zstd.found ? zstd.version() : 0;
}

int lf_codings_open(lf_codings *codings, const lf_options *options) {
  *codings = (lf_codings){options->codings, NULL, options->coding_count};
  if (codings->count == 0) return 0;
  codings->prepared = calloc(codings->count, sizeof *codings->prepared);
  if (codings->prepared == NULL) return -ENOMEM;
  for (uint32_t i = 0; i < codings->count; i++) {
    const lf_coding *c = &codings->codings[i];
    if (c->dictionary == NULL || lf_zstd_version() == 0) continue;
    codings->prepared[i] = zstd.new_dictionary(c->dictionary, c->dictionary_bytes);
    if (codings->prepared[i] == NULL) {
      lf_codings_close(codings);
      return -ENOMEM;
    }
  }
  return 0;
}

void lf_codings_close(lf_codings *codings) {
  for (uint32_t i = 0; codings->prepared != NULL && i < codings->count; i++) {
    if (codings->prepared[i] != NULL) zstd.free_dictionary(codings->prepared[i]);
  }
  free(codings->prepared);
  memset(codings, 0, sizeof *codings);
}

void lf_decoder_close(lf_decoder *decoder) {
  if (decoder->zstd != NULL) zstd.free_context(decoder->zstd);
  decoder->zstd = NULL;
}

/* Exactly one frame that states exactly the size of the payload. */
static int decompress(lf_decoder *d, const void *dictionary, const lf_block *b, const uint8_t *stored,
                      uint8_t *raw) {
  if (lf_zstd_version() == 0) return 0;
  if (d->zstd == NULL && (d->zstd = zstd.new_context()) == NULL) return 0;
  if (zstd.content_size(stored, b->stored) != b->raw) return 0;
  if (zstd.frame_size(stored, b->stored) != b->stored) return 0;
  size_t got = dictionary == NULL
                   ? zstd.decompress(d->zstd, raw, b->raw, stored, b->stored)
                   : zstd.decompress_with(d->zstd, raw, b->raw, stored, b->stored, dictionary);
  return got == b->raw; /* errors are huge numbers */
}

static void put_id(uint8_t *dst, uint32_t width, uint64_t i, uint32_t id) {
  if (width == 1) dst[i] = (uint8_t)id;
  if (width == 2) ((uint16_t *)dst)[i] = (uint16_t)id;
  if (width == 4) ((uint32_t *)dst)[i] = id;
}

static uint32_t get_id(const uint8_t *src, uint32_t width, uint64_t i) {
  return width == 1 ? src[i] : width == 2 ? ((const uint16_t *)src)[i] : ((const uint32_t *)src)[i];
}

/* Ids of up to 32 bits from eight bytes at a time; the last ones byte by byte, to stay inside. */
static void unpack_ids(uint8_t *dst, uint32_t width, const uint8_t *packed, uint64_t bytes, uint32_t bits,
                       uint64_t ids) {
  const uint64_t mask = ((uint64_t)1 << bits) - 1;
  for (uint64_t i = 0; i < ids; i++) {
    uint64_t at = i * bits, word = 0;
    if (at / 8 + 8 <= bytes) {
      memcpy(&word, packed + at / 8, 8);
    } else {
      for (uint64_t k = at / 8; k < bytes; k++) word |= (uint64_t)packed[k] << 8 * (k - at / 8);
    }
    put_id(dst, width, i, (uint32_t)(word >> at % 8 & mask));
  }
}

static int unpack(const lf_coding *c, const lf_block *b, const uint8_t *stored, uint8_t *raw) {
  uint64_t plane = (uint64_t)b->ids * c->width, packed = ((uint64_t)b->ids * c->bits + 7) / 8;
  uint64_t rest = b->raw > plane ? (plane + PLANE_ALIGN - 1) / PLANE_ALIGN * PLANE_ALIGN : plane;
  if (plane > b->raw || rest > b->raw || b->stored != packed + b->raw - rest) return 0;
  uint32_t spare = (uint32_t)((uint64_t)b->ids * c->bits % 8);
  if (spare > 0 && stored[packed - 1] >> spare != 0) return 0;
  unpack_ids(raw, c->width, stored, packed, c->bits, b->ids);
  memset(raw + plane, 0, rest - plane);
  memcpy(raw + rest, stored + packed, b->raw - rest);
  return 1;
}

static int rank_to_id(const lf_coding *c, const lf_block *b, uint8_t *raw) {
  if (c->table == NULL || (uint64_t)b->ids * c->width > b->raw) return 0;
  for (uint64_t i = 0; i < b->ids; i++) {
    uint32_t rank = get_id(raw, c->width, i);
    if (rank >= c->vocabulary) return 0;
    put_id(raw, c->width, i, c->table[rank]);
  }
  return 1;
}

int lf_decode(lf_decoder *decoder, const lf_codings *codings, const lf_block *block, const uint8_t *stored,
              uint8_t *raw) {
  if (block->coding >= codings->count) return 0;
  const lf_coding *c = &codings->codings[block->coding];
  const void *dictionary = codings->prepared[block->coding];
  switch (block->codec) {
    case ZSTD_CODEC:
      return decompress(decoder, dictionary, block, stored, raw);
    case PACKED_CODEC:
      return unpack(c, block, stored, raw);
    case RANK_CODEC:
      return decompress(decoder, dictionary, block, stored, raw) && rank_to_id(c, block, raw);
    default:
      return 0;
  }
}

void lf_unpack_bits(uint8_t *dst, const uint8_t *bits, uint64_t items) {
  const uint64_t ones = 0x0101010101010101, low = 0x7F7F7F7F7F7F7F7F, pick = 0x8040201008040201;
  uint64_t i = 0;
  for (; i + 8 <= items; i += 8) { /* byte k of `spread` keeps bit k only */
    uint64_t spread = bits[i >> 3] * ones & pick;
    uint64_t values = (((spread & low) + low) | spread) >> 7 & ones;
    memcpy(dst + i, &values, 8);
  }
  for (; i < items; i++) dst[i] = (bits[i >> 3] >> (i & 7)) & 1;
}
