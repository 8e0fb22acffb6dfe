#define _GNU_SOURCE
#include "gather.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 0x00000008
#endif

/* A read that the page cache could not serve at once. */
struct lf_piece {
  int fd;
  uint32_t row, field, done, bytes;
  uint64_t offset;
  uint8_t *dst;
};

uint64_t lf_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void count(_Atomic uint64_t *counter, uint64_t by) {
  atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* The fault of the lowest row wins, so that a report does not depend on timing. */
static void fail(lf_job *job, uint32_t kind, uint32_t row, uint32_t field, int error, uint64_t expected,
                 uint64_t found) {
  if (job->fault.kind != LF_OK && job->fault.row <= row) return;
  job->fault = (lf_fault){kind, row, field, error, expected, found};
}

static size_t at_row(const lf_job *job, uint32_t row) {
  return (size_t)job->batch * job->window->rows + row;
}

static size_t at_field(const lf_job *job, uint32_t row, uint32_t field) {
  return (size_t)field * job->window->batches * job->window->rows + at_row(job, row);
}

/* Where the stored bytes of a field go: tokens straight to their row, bits to scratch first. */
static uint8_t *landing(const lf_gatherer *g, const lf_job *job, uint32_t row, uint32_t field) {
  if (field == 0) return job->dst[0] + row * job->row_bytes[0];
  return g->packed + row * g->packed_row;
}

static int reserve(lf_gatherer *g, const lf_job *job) {
  uint32_t rows = job->window->rows;
  g->packed_row = (job->row_bytes[1] + 7) / 8;
  if (rows > g->rows_room) {
    free(g->pieces);
    free(g->waiting);
    g->pieces = malloc((size_t)rows * LF_FIELDS * sizeof *g->pieces);
    g->waiting = malloc((size_t)rows * sizeof *g->waiting);
    g->rows_room = g->pieces && g->waiting ? rows : 0;
  }
  size_t packed = g->packed_row * rows;
  if (packed > g->packed_room) {
    free(g->packed);
    g->packed = malloc(packed);
    g->packed_room = g->packed ? packed : 0;
  }
  return rows <= g->rows_room && packed <= g->packed_room;
}

/* An index that lies must not make us write outside the row. */
static int extent_fits(const lf_job *job, uint32_t row, uint32_t field) {
  uint64_t bytes = job->window->nbytes[at_field(job, row, field)];
  uint64_t items = job->window->items[at_row(job, row)];
  if (field == 0) return bytes <= job->row_bytes[0];
  return items <= job->row_bytes[1] && bytes == (items + 7) / 8;
}

static void unpack_bits(uint8_t *dst, const uint8_t *bits, uint64_t items) {
  for (uint64_t i = 0; i < items; i++) dst[i] = (bits[i >> 3] >> (i & 7)) & 1;
}

static void clear_row(const lf_job *job, uint32_t row, uint32_t fields) {
  for (uint32_t f = 0; f < fields; f++) memset(job->dst[f] + row * job->row_bytes[f], 0, job->row_bytes[f]);
}

/* All bytes of a row are there: check the hash chained over its fields, then pad. */
static void finish_row(lf_gatherer *g, lf_job *job, uint32_t row) {
  const lf_window *w = job->window;
  if (w->verify) {
    uint64_t began = g->hashed == 0 ? lf_now_ns() : 0, hash = 0;
    for (uint32_t f = 0; f < w->fields; f++) {
      hash = lf_xxh3_64(landing(g, job, row, f), w->nbytes[at_field(job, row, f)], hash);
    }
    if (g->hashed++ == 0) g->hash_ns = lf_now_ns() - began; /* reading the clock for each costs as much */
    uint32_t expected = w->hash[at_row(job, row)];
    if ((uint32_t)hash != expected) fail(job, LF_HASH, row, 0, 0, expected, (uint32_t)hash);
  }
  uint64_t bytes = w->nbytes[at_field(job, row, 0)];
  memset(job->dst[0] + row * job->row_bytes[0] + bytes, 0, job->row_bytes[0] - bytes);
  if (w->fields < 2) return;
  uint64_t items = w->items[at_row(job, row)];
  uint8_t *mask = job->dst[1] + row * job->row_bytes[1];
  unpack_bits(mask, landing(g, job, row, 1), items);
  memset(mask + items, 0, job->row_bytes[1] - items);
}

static void piece_failed(lf_job *job, const lf_piece *p, int error) {
  if (error) {
    fail(job, LF_ERRNO, p->row, p->field, error, p->bytes, p->done);
  } else {
    fail(job, LF_SHORT, p->row, p->field, 0, p->bytes, p->done);
  }
}

static void piece_done(lf_gatherer *g, lf_job *job, const lf_piece *p) {
  if (--g->waiting[p->row] == 0) finish_row(g, job, p->row);
}

/* Bytes that are in memory now; 0 when none are, or when only a blocking read can tell. */
static uint32_t read_cached(lf_gatherer *g, const lf_piece *p) {
  if (g->no_nowait) return 0;
  struct iovec to = {p->dst, p->bytes};
  ssize_t got = preadv2(p->fd, &to, 1, (off_t)p->offset, RWF_NOWAIT);
  if (got < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) g->no_nowait = 1;
  return got > 0 ? (uint32_t)got : 0;
}

static void read_blocking(lf_gatherer *g, lf_job *job, lf_piece *p) {
  while (p->done < p->bytes) {
    ssize_t got = pread(p->fd, p->dst + p->done, p->bytes - p->done, (off_t)(p->offset + p->done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      piece_failed(job, p, got < 0 ? errno : 0);
      return;
    }
    p->done += (uint32_t)got;
  }
  g->done.pread_reads++;
  piece_done(g, job, p);
}

static void queue_piece(lf_gatherer *g, lf_piece *p) {
  lf_ring_read(&g->ring, p->fd, p->dst + p->done, p->bytes - p->done, p->offset + p->done,
               (uint64_t)(p - g->pieces));
}

/* Returns 1 when the piece is finished, well or not, and 0 when it was queued again. */
static int completed(lf_gatherer *g, lf_job *job, lf_piece *p, int32_t result) {
  if (result == -EAGAIN || result == -EINTR) {
    queue_piece(g, p);
    return 0;
  }
  if (result <= 0) {
    piece_failed(job, p, -result);
    return 1;
  }
  p->done += (uint32_t)result;
  if (p->done < p->bytes) {
    queue_piece(g, p);
    return 0;
  }
  g->done.ring_reads++;
  piece_done(g, job, p);
  return 1;
}

static void read_by_ring(lf_gatherer *g, lf_job *job, uint32_t pieces) {
  uint32_t next = 0, flying = 0;
  while (next < pieces || flying > 0) {
    while (next < pieces && flying < g->ring.entries) {
      queue_piece(g, g->pieces + next++);
      flying++;
    }
    int rc = lf_ring_enter(&g->ring, 1);
    if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
      /* Not seen on any kernel; the slot may still be written, so this ring is not used again. */
      fail(job, LF_ERRNO, g->pieces[next - 1].row, 0, -rc, 0, 0);
      g->has_ring = 0;
      return;
    }
    uint64_t tag;
    int32_t result;
    while (lf_ring_reap(&g->ring, &tag, &result)) {
      flying -= (uint32_t)completed(g, job, g->pieces + tag, result);
    }
  }
}

/* Starts the reads of one row; what is not served at once is appended to the pieces. */
static uint32_t start_row(lf_gatherer *g, lf_job *job, uint32_t row, uint32_t pieces) {
  const lf_window *w = job->window;
  int fd = w->fd[at_row(job, row)];
  g->waiting[row] = 1; /* held until every field was looked at */
  for (uint32_t f = 0; f < w->fields; f++) {
    if (!extent_fits(job, row, f)) {
      fail(job, LF_EXTENT, row, f, 0, job->row_bytes[f], w->nbytes[at_field(job, row, f)]);
      return pieces;
    }
    lf_piece p = {fd, row, f, 0, w->nbytes[at_field(job, row, f)], w->offset[at_field(job, row, f)],
                  landing(g, job, row, f)};
    g->done.bytes += p.bytes;
    if (p.bytes > 0 && g->has_ring) p.done = read_cached(g, &p);
    if (p.done == p.bytes) {
      g->done.cached_reads += p.bytes > 0;
      continue;
    }
    g->waiting[row]++;
    if (g->has_ring) {
      g->pieces[pieces++] = p;
    } else {
      read_blocking(g, job, &p);
    }
  }
  if (--g->waiting[row] == 0) finish_row(g, job, row);
  return pieces;
}

static void add_to_tally(lf_gatherer *g) {
  count(&g->tally->cached_reads, g->done.cached_reads);
  count(&g->tally->ring_reads, g->done.ring_reads);
  count(&g->tally->pread_reads, g->done.pread_reads);
  count(&g->tally->bytes, g->done.bytes);
  count(&g->tally->busy_ns, g->done.busy_ns);
  count(&g->tally->hash_ns, g->done.hash_ns);
}

void lf_gather(lf_gatherer *g, lf_job *job) {
  const lf_window *w = job->window;
  uint64_t began = lf_now_ns();
  uint32_t pieces = 0;
  memset(&g->done, 0, sizeof g->done);
  g->hashed = 0;
  g->hash_ns = 0;
  if (!reserve(g, job)) {
    fail(job, LF_ERRNO, 0, 0, ENOMEM, 0, 0);
    return;
  }
  for (uint32_t row = 0; row < w->rows; row++) {
    if (w->fd[at_row(job, row)] < 0) {
      clear_row(job, row, w->fields);
    } else {
      pieces = start_row(g, job, row, pieces);
    }
  }
  if (pieces > 0) read_by_ring(g, job, pieces);
  g->done.busy_ns = lf_now_ns() - began;
  g->done.hash_ns = g->hash_ns * g->hashed;
  add_to_tally(g);
}

void lf_gatherer_free(lf_gatherer *g) {
  free(g->pieces);
  free(g->waiting);
  free(g->packed);
}
