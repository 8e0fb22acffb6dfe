#define _GNU_SOURCE
#include "write.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* One blocking write of this size keeps a device as busy as several smaller ones in flight: the kernel splits it. */
#define BLOCKING ((uint64_t)16 << 20)
/* Handed over in one call; Python sees signals between calls. */
#define BUDGET ((uint64_t)64 << 20)
/* The largest buffer the kernel registers. */
#define MAX_REGISTERED ((uint64_t)1 << 30)

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The fault nearest to the start of the file wins, so that a report does not depend on timing. */
static void fail(lf_write_job *job, int error, uint64_t offset) {
  if (job->error && job->failed_at <= offset) return;
  job->error = error;
  job->failed_at = offset;
}

/* Through the page cache, which takes any offset and length. */
static void write_buffered(lf_write_job *job, const uint8_t *at, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    ssize_t got = pwrite(job->fd, at, bytes, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      fail(job, got < 0 ? errno : EIO, offset);
      return;
    }
    at += got;
    bytes -= (uint64_t)got;
    offset += (uint64_t)got;
  }
}

/* Some file systems take the flag at open, and refuse the writes. */
static int is_refusal(int error) { return error == EINVAL || error == EOPNOTSUPP; }

static void write_refused(lf_write_job *job, int error, const uint8_t *at, uint64_t bytes, uint64_t offset) {
  job->refused = error;
  job->direct = -1;
  write_buffered(job, at, bytes, offset);
}

static void write_direct(lf_write_job *job, const uint8_t *at, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    ssize_t got = pwrite(job->direct, at, bytes, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && is_refusal(errno)) {
      write_refused(job, errno, at, bytes, offset);
      return;
    }
    if (got < LF_UNIT) { /* what lies beyond the last whole unit is written once more */
      fail(job, got < 0 ? errno : EIO, offset);
      return;
    }
    uint64_t whole = (uint64_t)got - (uint64_t)got % LF_UNIT;
    job->direct_bytes += whole;
    at += whole;
    bytes -= whole;
    offset += whole;
  }
}

static void queue(lf_writer *w, lf_transfer *t) {
  lf_ring_write(&w->ring, t->job->direct, t->at, t->bytes, t->offset, (uint64_t)(t - w->transfers));
}

static void retire(lf_writer *w, lf_transfer *t) {
  lf_bounce_give(&w->bounce, t->bounce);
  t->job->flying--;
  t->job = NULL;
  w->flying--;
}

static void completed(lf_writer *w, lf_transfer *t, int32_t result) {
  lf_write_job *job = t->job;
  int again = result == -EAGAIN || result == -EINTR;
  uint32_t whole = result > 0 ? (uint32_t)result - (uint32_t)result % LF_UNIT : 0;
  if (whole > 0 || again) {
    job->direct_bytes += whole;
    t->at += whole;
    t->bytes -= whole;
    t->offset += whole;
    if (t->bytes > 0 && job->direct >= 0) {
      queue(w, t);
      return;
    }
    if (t->bytes > 0) write_buffered(job, t->at, t->bytes, t->offset);
  } else if (is_refusal(-result)) {
    write_refused(job, -result, t->at, t->bytes, t->offset);
  } else {
    fail(job, result < 0 ? -result : EIO, t->offset);
  }
  retire(w, t);
}

/* Not seen on any kernel. What is in flight may or may not land, so this ring is not used again. */
static void lose_ring(lf_writer *w, int error) {
  for (uint32_t i = 0; i < w->depth; i++) {
    lf_transfer *t = &w->transfers[i];
    if (t->job == NULL) continue;
    fail(t->job, error, t->offset);
    retire(w, t);
  }
  lf_ring_close(&w->ring);
  w->has_ring = 0;
}

/* Hands over what is queued and takes what is complete. -EINTR when a signal came, 0 otherwise. */
static int turn(lf_writer *w, uint32_t wait_for) {
  uint64_t tag;
  int32_t result;
  int rc = lf_ring_enter(&w->ring, wait_for);
  while (lf_ring_reap(&w->ring, &tag, &result)) completed(w, &w->transfers[tag], result);
  if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) lose_ring(w, -rc);
  return rc == -EINTR ? rc : 0;
}

static lf_transfer *free_transfer(lf_writer *w) {
  for (uint32_t i = 0; i < w->depth; i++) {
    if (w->transfers[i].job == NULL) return &w->transfers[i];
  }
  return NULL;
}

static int start_transfer(lf_writer *w, lf_write_job *job, const uint8_t *from, uint32_t bytes, uint64_t offset) {
  lf_transfer *t;
  while ((t = free_transfer(w)) == NULL) {
    if (turn(w, 1) < 0) return -EINTR;
  }
  if (!w->has_ring || job->error || job->direct < 0) return 0; /* found out while waiting: the caller looks again */
  *t = (lf_transfer){job, from, offset, bytes, -1};
  if ((uintptr_t)from % LF_UNIT != 0) {
    t->bounce = lf_bounce_take(&w->bounce);
    t->at = memcpy(w->bounce.memory + (size_t)t->bounce * w->bounce.stride, from, bytes);
    job->bounced_bytes += bytes;
  }
  job->flying++;
  w->flying++;
  job->next += bytes;
  queue(w, t);
  turn(w, 0);
  return 0;
}

static void write_now(lf_writer *w, lf_write_job *job, const uint8_t *from, uint64_t bytes, uint64_t offset) {
  if ((uintptr_t)from % LF_UNIT != 0) {
    from = memcpy(w->bounce.memory, from, bytes);
    job->bounced_bytes += bytes;
  }
  write_direct(job, from, bytes, offset);
  job->next += bytes;
}

static int write_next(lf_writer *w, lf_write_job *job) {
  const uint8_t *from = (const uint8_t *)(uintptr_t)job->source + job->next;
  uint64_t offset = job->offset + job->next, left = job->bytes - job->next;
  uint64_t head = offset % job->unit, whole = left - left % job->unit;
  int aligned = (uintptr_t)from % LF_UNIT == 0;
  uint64_t bytes = least(left, BLOCKING);
  if (job->direct >= 0 && (head > 0 || whole == 0)) {
    bytes = least(left, job->unit - head);
  } else if (job->direct >= 0 && (aligned || w->bounce.memory != NULL)) {
    uint64_t chunk = w->chunk - w->chunk % job->unit;
    if (w->has_ring) return start_transfer(w, job, from, (uint32_t)least(whole, chunk), offset);
    write_now(w, job, from, least(whole, aligned ? BLOCKING : chunk), offset);
    return 0;
  }
  write_buffered(job, from, bytes, offset);
  job->next += bytes;
  return 0;
}

uint32_t lf_write(lf_writer *w, lf_write_job *job) {
  uint64_t pause = job->next + BUDGET;
  if (job->hash && job->next == 0) {
    lf_xxh3_begin(&w->hash, (const uint8_t *)(uintptr_t)job->source, job->bytes, 0);
  }
  while (job->next < job->bytes && job->error == 0) {
    if (job->next >= pause || write_next(w, job) < 0) return LF_PENDING;
    /* After the hand-over: the device works meanwhile, and the bytes have just been near. */
    if (job->hash) lf_xxh3_advance(&w->hash, job->next);
  }
  if (job->hash && job->error == 0) job->xxh3 = lf_xxh3_end(&w->hash);
  return job->error ? LF_ERRNO : LF_OK;
}

uint32_t lf_write_wait(lf_writer *w, lf_write_job *job) {
  while (job->flying > 0) {
    if (turn(w, 1) < 0) return LF_PENDING;
  }
  return job->error ? LF_ERRNO : LF_OK;
}

void lf_write_drop(lf_writer *w, lf_write_job *job) {
  while (job->flying > 0) turn(w, 1);
}

/* The caller's buffers in parts the kernel takes, as many as there is room for. */
static uint32_t parts_of(const lf_write_options *options, struct iovec *parts) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < options->buffers; i++) {
    for (uint64_t at = 0; at < options->sizes[i] && count < LF_BUFFERS - 1; at += MAX_REGISTERED) {
      void *start = (void *)(uintptr_t)(options->addresses[i] + at);
      parts[count++] = (struct iovec){start, least(options->sizes[i] - at, MAX_REGISTERED)};
    }
  }
  return count;
}

/* RLIMIT_MEMLOCK may not allow all. The caller's buffers come first: few writes need the bounce buffer. */
static void register_buffers(lf_writer *w, const lf_write_options *options, lf_write_info *info) {
  struct iovec parts[LF_BUFFERS];
  const struct iovec own = {w->bounce.memory, w->bounce.bytes};
  uint32_t count = parts_of(options, parts), all = count;
  if (own.iov_base != NULL) parts[all++] = own;
  int rc = all > 0 ? lf_ring_register(&w->ring, parts, all) : 0;
  if (rc < 0 && count > 0 && count < all) rc = lf_ring_register(&w->ring, parts, count);
  info->register_error = count > 0 ? -rc : 0;
  if (rc < 0 && count > 0 && count < all) lf_ring_register(&w->ring, &own, 1);
  for (uint32_t i = 0; rc == 0 && i < count; i++) info->registered_bytes += parts[i].iov_len;
}

static void open_ring(lf_writer *w, const lf_write_options *options, lf_write_info *info) {
  int rc = -ENOMEM;
  for (uint32_t n = w->depth; n > 0 && rc == -ENOMEM; n /= 2) rc = lf_ring_open(&w->ring, n, 0);
  info->ring_error = rc < 0 ? -rc : 0;
  if (rc < 0) return;
  w->has_ring = 1;
  if (w->ring.entries < w->depth) w->depth = w->ring.entries;
  register_buffers(w, options, info);
}

lf_writer *lf_writer_new(const lf_write_options *options, lf_write_info *info) {
  memset(info, 0, sizeof *info);
  lf_writer *w = calloc(1, sizeof *w);
  if (w == NULL) return NULL;
  w->depth = options->depth;
  w->chunk = options->chunk;
  uint32_t places = lf_bounce_open(&w->bounce, options->depth, options->chunk);
  if (places > 0 && places < w->depth) w->depth = places;
  w->transfers = calloc(w->depth, sizeof *w->transfers);
  if (w->transfers == NULL) {
    lf_writer_free(w);
    return NULL;
  }
  if (options->want_ring) open_ring(w, options, info);
  info->has_ring = (uint32_t)w->has_ring;
  info->depth = w->has_ring ? w->depth : 1;
  return w;
}

void lf_writer_free(lf_writer *w) {
  while (w->has_ring && w->flying > 0) turn(w, 1);
  if (w->has_ring) lf_ring_close(&w->ring);
  lf_bounce_close(&w->bounce);
  free(w->transfers);
  free(w);
}

void lf_writer_abandon(lf_writer *w) {
  if (w->has_ring) close(w->ring.fd);
}
