/* Reads the rows of one batch into a slot: cached bytes first, the ring for what is not in memory. */

#ifndef LF_GATHER_H
#define LF_GATHER_H

#include <stdatomic.h>
#include <stdint.h>

#include "blocks.h"
#include "codec.h"
#include "direct.h"
#include "lf_native.h"
#include "ring.h"

typedef struct {
  const lf_window *window;
  uint32_t batch;
  uint8_t *slot;
  lf_fault fault;
} lf_job;

typedef struct {
  _Atomic uint64_t mapped_reads, cached_reads, direct_reads, ring_reads, pread_reads, bytes, busy_ns, hash_ns;
  _Atomic uint64_t decoded_blocks, decode_ns;
} lf_tally;

typedef struct lf_piece lf_piece;
typedef struct lf_row lf_row;

/* What one thread needs to gather; reused from job to job. */
typedef struct {
  lf_ring ring;
  int has_ring;
  uint32_t depth; /* reads in flight at most */
  int no_nowait; /* a file system refused RWF_NOWAIT */
  int no_cachestat;
  int mapped; /* copies from mappings are guarded now */
  const lf_files *files;
  const lf_codings *codings;
  lf_cache *cache;
  lf_decoder decoder;
  lf_bounce bounce; /* where direct reads land that a row cannot take as they are */
  lf_tally *tally;
  lf_counters done;  /* of this job; added to the tally at its end, so that threads do not share a line */
  uint32_t hashed;   /* rows of this job */
  uint64_t hash_ns;  /* of the first of them */
  lf_row *rows;
  lf_piece *pieces;
  uint8_t **stored;  /* [rows][fields] stored bytes of a value */
  uint8_t *scratch;  /* those that do not belong into the slot as they are */
  uint32_t rows_room;
  size_t values_room, scratch_room;
} lf_gatherer;

void lf_gather(lf_gatherer *g, lf_job *job);
void lf_gatherer_free(lf_gatherer *g);
uint64_t lf_now_ns(void);

#endif
