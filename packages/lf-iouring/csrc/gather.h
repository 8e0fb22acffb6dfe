/* Reads the rows of one batch into a slot: cached bytes first, the ring for what is not in memory. */

#ifndef LF_GATHER_H
#define LF_GATHER_H

#include <stdatomic.h>
#include <stdint.h>

#include "direct.h"
#include "lf_native.h"
#include "ring.h"

enum { LF_FIELDS = 2 };

typedef struct {
  const lf_window *window;
  uint32_t batch;
  uint8_t *dst[LF_FIELDS];
  uint64_t row_bytes[LF_FIELDS]; /* field 0: bytes; field 1: one byte an item, unpacked from bits */
  lf_fault fault;
} lf_job;

typedef struct {
  _Atomic uint64_t cached_reads, direct_reads, ring_reads, pread_reads, bytes, busy_ns, hash_ns;
} lf_tally;

typedef struct lf_piece lf_piece;

/* What one thread needs to gather; reused from job to job. */
typedef struct {
  lf_ring ring;
  int has_ring;
  uint32_t depth; /* reads in flight at most */
  int no_nowait; /* a file system refused RWF_NOWAIT */
  int no_cachestat;
  const lf_files *files;
  lf_bounce bounce; /* where direct reads land that a row cannot take as they are */
  lf_tally *tally;
  lf_counters done;  /* of this job; added to the tally at its end, so that threads do not share a line */
  uint32_t hashed;   /* rows of this job */
  uint64_t hash_ns;  /* of the first of them */
  lf_piece *pieces;
  uint32_t *waiting; /* [rows] reads outstanding */
  uint8_t *packed;   /* [rows] bits as stored */
  size_t packed_row;
  uint32_t rows_room;
  size_t packed_room;
} lf_gatherer;

void lf_gather(lf_gatherer *g, lf_job *job);
void lf_gatherer_free(lf_gatherer *g);
uint64_t lf_now_ns(void);

#endif
