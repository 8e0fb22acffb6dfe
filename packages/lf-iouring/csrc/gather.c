#define _GNU_SOURCE
#include "gather.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 0x00000008
#endif

#define SYS_CACHESTAT 451 /* Linux 6.5; the same number on every architecture we build for */

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

static void piece_failed(lf_gatherer *g, lf_job *job, const lf_piece *p, int error) {
  uint32_t found = p->done > p->head ? p->done - p->head : 0;
  lf_bounce_give(&g->bounce, p->bounce);
  fail(job, error ? LF_ERRNO : LF_SHORT, p->row, p->field, error, p->bytes, found);
}

static void piece_done(lf_gatherer *g, lf_job *job, const lf_piece *p) {
  if (p->bounce >= 0) memcpy(p->dst, p->at + p->head, p->bytes);
  lf_bounce_give(&g->bounce, p->bounce);
  g->done.direct_reads += (uint32_t)p->direct;
  if (--g->waiting[p->row] == 0) finish_row(g, job, p->row);
}

/* Whether all of an extent is in the page cache; asking starts no read, unlike RWF_NOWAIT. */
static int is_resident(lf_gatherer *g, const lf_piece *p) {
  struct { uint64_t offset, bytes; } range = {p->offset, p->bytes};
  struct { uint64_t cached, dirty, writeback, evicted, recently; } pages = {0, 0, 0, 0, 0};
  if (g->no_cachestat) return 0;
  if (syscall(SYS_CACHESTAT, p->fd, &range, &pages, 0) < 0) {
    g->no_cachestat = 1; /* an older kernel, or a file we may not ask about */
    return 0;
  }
  uint64_t first = p->offset / 4096, last = (p->offset + p->bytes - 1) / 4096;
  return pages.cached * (uint64_t)sysconf(_SC_PAGESIZE) / 4096 >= last - first + 1;
}

/* Bytes that are in memory now; 0 when none are, or when only a blocking read can tell. */
static uint32_t read_cached(lf_gatherer *g, const lf_piece *p) {
  if (g->no_nowait) return 0;
  struct iovec to = {p->dst, p->bytes};
  ssize_t got = preadv2(p->fd, &to, 1, (off_t)p->offset, RWF_NOWAIT);
  if (got < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) g->no_nowait = 1;
  return got > 0 ? (uint32_t)got : 0;
}

/* From an extent to whole units around it. */
static void make_direct(const lf_gatherer *g, lf_piece *p) {
  if (!g->files->direct || p->place < 0) return;
  p->direct = 1;
  p->place += (int32_t)g->files->count;
  p->fd = g->files->fds[p->place];
  p->head = (uint32_t)(p->offset % LF_UNIT);
  p->offset -= p->head;
  p->done = 0;
  p->ask = lf_round_up(p->head + p->bytes, LF_UNIT);
}

/* A row that begins and ends on units takes a read as it is; others need a place in the bounce buffer. */
static int place_piece(lf_gatherer *g, lf_piece *p) {
  if (!p->direct || (p->head == 0 && p->ask == p->bytes && (uintptr_t)p->dst % LF_UNIT == 0)) return 1;
  if (p->ask > g->bounce.stride) return 0;
  p->bounce = lf_bounce_take(&g->bounce);
  p->at = p->bounce < 0 ? NULL : g->bounce.memory + (size_t)p->bounce * g->bounce.stride;
  return p->bounce >= 0;
}

/* Adds what a read brought. 1: the extent is complete; 0: there is more to read; -1: the file ends here. */
static int advance(lf_piece *p, uint32_t got) {
  uint32_t before = p->done;
  p->done += got;
  if (p->done >= p->head + p->bytes) return 1;
  if (p->direct && p->done % LF_UNIT != 0) {
    /* A direct read stops between units at the end of the file, or may, elsewhere, for no reason. */
    uint32_t whole = p->done - p->done % LF_UNIT;
    if (whole == before) return -1;
    p->done = whole;
  }
  return got == 0 ? -1 : 0;
}

static void read_blocking(lf_gatherer *g, lf_job *job, lf_piece *p) {
  int state = 0;
  while (state == 0) {
    ssize_t got = pread(p->fd, p->at + p->done, p->ask - p->done, (off_t)(p->offset + p->done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      piece_failed(g, job, p, errno);
      return;
    }
    state = advance(p, (uint32_t)got);
  }
  if (state < 0) {
    piece_failed(g, job, p, 0);
    return;
  }
  g->done.pread_reads++;
  piece_done(g, job, p);
}

static void queue_piece(lf_gatherer *g, lf_piece *p) {
  lf_ring_read(&g->ring, p->fd, p->place, p->at + p->done, p->ask - p->done, p->offset + p->done,
               (uint64_t)(p - g->pieces));
}

/* Returns 1 when the piece is finished, well or not, and 0 when it was queued again. */
static int completed(lf_gatherer *g, lf_job *job, lf_piece *p, int32_t result) {
  int again = result == -EAGAIN || result == -EINTR;
  int state = again ? 0 : result < 0 ? -1 : advance(p, (uint32_t)result);
  if (state == 0) {
    queue_piece(g, p);
    return 0;
  }
  if (state < 0) {
    piece_failed(g, job, p, result < 0 ? -result : 0);
    return 1;
  }
  g->done.ring_reads++;
  piece_done(g, job, p);
  return 1;
}

static uint32_t start_piece(lf_gatherer *g, lf_job *job, lf_piece *p) {
  if (place_piece(g, p)) {
    queue_piece(g, p);
    return 1;
  }
  piece_failed(g, job, p, ENOMEM);
  return 0;
}

static void read_by_ring(lf_gatherer *g, lf_job *job, uint32_t pieces) {
  uint32_t next = 0, flying = 0;
  while (next < pieces || flying > 0) {
    while (next < pieces && flying < g->depth) flying += start_piece(g, job, g->pieces + next++);
    if (flying == 0) return;
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

static int may_be_cached(lf_gatherer *g, const lf_piece *p) {
  return g->files->direct ? is_resident(g, p) : g->has_ring;
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
    uint32_t bytes = w->nbytes[at_field(job, row, f)];
    uint8_t *dst = landing(g, job, row, f);
    lf_piece p = {.fd = fd, .place = lf_place_of(g->files, fd), .row = row, .field = f, .ask = bytes,
                  .bytes = bytes, .offset = w->offset[at_field(job, row, f)], .at = dst, .dst = dst,
                  .bounce = -1};
    g->done.bytes += bytes;
    if (bytes > 0 && may_be_cached(g, &p)) p.done = read_cached(g, &p);
    if (p.done == bytes) {
      g->done.cached_reads += bytes > 0;
      continue;
    }
    g->waiting[row]++;
    make_direct(g, &p);
    if (g->has_ring) {
      g->pieces[pieces++] = p;
    } else if (place_piece(g, &p)) {
      read_blocking(g, job, &p);
    } else {
      piece_failed(g, job, &p, ENOMEM);
    }
  }
  if (--g->waiting[row] == 0) finish_row(g, job, row);
  return pieces;
}

static void add_to_tally(lf_gatherer *g) {
  count(&g->tally->cached_reads, g->done.cached_reads);
  count(&g->tally->direct_reads, g->done.direct_reads);
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
