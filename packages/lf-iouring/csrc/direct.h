/* Reads past the page cache: second descriptors, and aligned memory for extents that are not aligned. */

#ifndef LF_DIRECT_H
#define LF_DIRECT_H

#include <stddef.h>
#include <stdint.h>

#include "lf_native.h"
#include "mapped.h"

/* Start, length and memory of a direct read are multiples of this. Devices ask for 512 or 4096 bytes. */
enum { LF_UNIT = 4096 };

typedef struct {
  uint32_t count;  /* of files */
  uint32_t direct; /* `fds` holds a second, O_DIRECT, descriptor of each after the first ones */
  int32_t *fds;
  int32_t *places; /* place of each descriptor in `fds`, or -1 */
  uint32_t known;  /* length of `places` */
  lf_map *maps;    /* of each file, or NULL */
} lf_files;

typedef struct {
  uint8_t *memory;
  size_t bytes;
  uint32_t stride;
  uint32_t spare; /* free places, the last ones of `stack` */
  uint32_t *stack;
} lf_bounce;

static inline uint32_t lf_round_up(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit * unit; }

int lf_files_open(lf_files *files, const lf_options *options);
void lf_files_close(lf_files *files);
int lf_files_map(lf_files *files); /* without direct reads; all of them, or a negative errno and none */

/* Of a first descriptor; -1 when the engine was not told of it. */
static inline int32_t lf_place_of(const lf_files *files, int fd) {
  return (uint32_t)fd < files->known ? files->places[fd] : -1;
}

/* Up to `places` places for extents of `span` bytes anywhere in a file; returns how many, 0 without memory. */
uint32_t lf_bounce_open(lf_bounce *bounce, uint32_t places, uint32_t span);
void lf_bounce_close(lf_bounce *bounce);
int32_t lf_bounce_take(lf_bounce *bounce); /* -1 when all are taken */
void lf_bounce_give(lf_bounce *bounce, int32_t place); /* -1 is no place */

#endif
