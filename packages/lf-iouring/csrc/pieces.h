/* How the bytes of an extent get into memory: page cache, ring, or a blocking read. */

#ifndef LF_PIECES_H
#define LF_PIECES_H

#include <stdint.h>

#include "gather.h"

/* A read that the page cache could not serve at once. A direct one asks for whole units around its extent:
   `head` bytes too many in front, and as many as it takes behind. */
struct lf_piece {
  int fd;
  int32_t place;       /* of fd among the registered files, or -1 */
  uint32_t row, field;
  uint32_t done, ask;  /* bytes that landed, bytes to read */
  uint32_t head, bytes;
  uint64_t offset;     /* where the read starts in the file */
  uint8_t *at;         /* and in memory */
  uint8_t *dst;        /* where the extent belongs; differs from `at` for a read into the bounce buffer */
  int32_t bounce;      /* place held in it, or -1 */
  int direct;
  int whole_block;     /* the payload of the row's block, not a value of the row */
};

/* Serves an extent from the page cache, or reads it now, or leaves it to the ring; the number of pieces then.
   The caller sets fd, offset, bytes, dst and what the piece belongs to. */
uint32_t lf_start_read(lf_gatherer *g, lf_job *job, lf_piece p, uint32_t pieces);
/* Reads what was left to the ring. */
void lf_read_by_ring(lf_gatherer *g, lf_job *job, uint32_t pieces);

/* Of gather.c: what happens when a piece has landed, or did not (errno, or 0 at the end of the file). */
void lf_piece_done(lf_gatherer *g, lf_job *job, const lf_piece *p);
void lf_piece_failed(lf_gatherer *g, lf_job *job, const lf_piece *p, int error);
void lf_fail(lf_job *job, uint32_t kind, uint32_t row, uint32_t field, int error, uint64_t expected,
             uint64_t found);

#endif
