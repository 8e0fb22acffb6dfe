#define _GNU_SOURCE
#include "pieces.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 0x00000008
#endif

#define SYS_CACHESTAT 451 /* Linux 6.5; the same number on every architecture we build for */

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

static lf_map *map_of(const lf_gatherer *g, const lf_piece *p) {
  return g->mapped && !p->direct && p->place >= 0 ? &g->files->maps[p->place] : NULL;
}

static void landed(lf_gatherer *g, lf_job *job, const lf_piece *p) {
  lf_map *map = map_of(g, p);
  if (map != NULL) lf_map_seen(map, p->offset, p->bytes);
  lf_piece_done(g, job, p);
}

static void read_blocking(lf_gatherer *g, lf_job *job, lf_piece *p) {
  int state = 0;
  while (state == 0) {
    ssize_t got = pread(p->fd, p->at + p->done, p->ask - p->done, (off_t)(p->offset + p->done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      lf_piece_failed(g, job, p, errno);
      return;
    }
    state = advance(p, (uint32_t)got);
  }
  if (state < 0) {
    lf_piece_failed(g, job, p, 0);
    return;
  }
  g->done.pread_reads++;
  landed(g, job, p);
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
    lf_piece_failed(g, job, p, result < 0 ? -result : 0);
    return 1;
  }
  g->done.ring_reads++;
  landed(g, job, p);
  return 1;
}

static uint32_t start_piece(lf_gatherer *g, lf_job *job, lf_piece *p) {
  if (place_piece(g, p)) {
    queue_piece(g, p);
    return 1;
  }
  lf_piece_failed(g, job, p, ENOMEM);
  return 0;
}

void lf_read_by_ring(lf_gatherer *g, lf_job *job, uint32_t pieces) {
  uint32_t next = 0, flying = 0;
  while (next < pieces || flying > 0) {
    while (next < pieces && flying < g->depth) flying += start_piece(g, job, g->pieces + next++);
    if (flying == 0) return;
    int rc = lf_ring_enter(&g->ring, 1);
    if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
      /* Not seen on any kernel; the slot may still be written, so this ring is not used again. */
      lf_fail(job, LF_ERRNO, g->pieces[next - 1].row, 0, -rc, 0, 0);
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

/* Behind the end of a file that shrank, its last page reads as zeros: the hash tells, or else the size has to. */
static int copy_is_sound(const lf_job *job, const lf_piece *p) {
  struct stat file;
  return job->window->verify || (fstat(p->fd, &file) == 0 && (uint64_t)file.st_size >= p->offset + p->bytes);
}

uint32_t lf_start_read(lf_gatherer *g, lf_job *job, lf_piece p, uint32_t pieces) {
  p.place = lf_place_of(g->files, p.fd);
  p.at = p.dst;
  p.ask = p.bytes;
  p.bounce = -1;
  g->done.bytes += p.bytes;
  lf_map *map = map_of(g, &p);
  if (map != NULL && lf_map_copy(map, p.dst, p.offset, p.bytes) && copy_is_sound(job, &p)) {
    g->done.mapped_reads++;
    lf_piece_done(g, job, &p);
    return pieces;
  }
  if (p.bytes > 0 && may_be_cached(g, &p)) p.done = read_cached(g, &p);
  if (p.done == p.bytes) {
    g->done.cached_reads += p.bytes > 0;
    landed(g, job, &p);
    return pieces;
  }
  make_direct(g, &p);
  if (g->has_ring) {
    g->pieces[pieces++] = p;
  } else if (place_piece(g, &p)) {
    read_blocking(g, job, &p);
  } else {
    lf_piece_failed(g, job, &p, ENOMEM);
  }
  return pieces;
}

