/* Writes past the page cache, several in flight, out of the caller's memory. Declarations: lf_native.cdef. */

#ifndef LF_WRITE_H
#define LF_WRITE_H

#include "direct.h"
#include "lf_native.h"
#include "ring.h"
#include "xxh3.h"

/* A write that the ring holds; `job` is NULL in places that are free. */
typedef struct {
  lf_write_job *job;
  const uint8_t *at;
  uint64_t offset;
  uint32_t bytes;
  int32_t bounce; /* place held in the bounce buffer, or -1 */
} lf_transfer;

struct lf_writer {
  lf_ring ring;
  int has_ring;
  uint32_t depth, chunk;
  uint32_t flying;
  lf_transfer *transfers; /* [depth] */
  lf_bounce bounce;       /* for bytes that do not begin on a unit in memory */
  lf_xxh3_state hash;     /* of the job that lf_write is at */
};

#endif
