/* io_uring by system call numbers 425-427, which are the same on every architecture.
   Layouts are those of the kernel's ABI (io_uring_setup(2), io_uring_enter(2), io_uring_register(2)). */

#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lf_native.h"

enum { SYS_SETUP = 425, SYS_ENTER = 426, SYS_REGISTER = 427 };
enum { OP_READ_FIXED = 4, OP_WRITE_FIXED = 5, OP_READ = 22, OP_WRITE = 23 };
enum { ENTER_GETEVENTS = 1, ENTER_SQ_WAKEUP = 2, SQ_NEED_WAKEUP = 1 };
enum { REGISTER_BUFFERS = 0, REGISTER_FILES = 2, FIXED_FILE = 1 };
enum { SETUP_IOPOLL = 1 << 0, SETUP_SQPOLL = 1 << 1, SETUP_CLAMP = 1 << 4 };
enum { SETUP_SINGLE_ISSUER = 1 << 12, SETUP_DEFER_TASKRUN = 1 << 13 };
/* One mapping for both rings (5.4), and the release that brought OP_READ (5.6). */
enum { FEAT_SINGLE_MMAP = 1 << 0, FEAT_RW_CUR_POS = 1 << 3 };
/* How long the kernel's thread looks for work before it sleeps; a batch is read in less. */
#define SQ_IDLE_MS 20
#define PROBE_BYTES 4096
#define OFFSET_RINGS 0
#define OFFSET_SQES 0x10000000

struct ring_offsets {
  uint32_t head, tail, mask, entries, word4, word5, word6, reserved;
  uint64_t user_addr;
};
/* word4..6: sq has flags, dropped, array; cq has overflow, cqes, flags. */

struct ring_params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  struct ring_offsets sq, cq;
};

struct sqe {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, rw_flags;
  uint64_t user_data;
  uint16_t buffer, personality;
  int32_t splice_fd;
  uint64_t pad[2];
};

struct cqe {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};

_Static_assert(sizeof(struct ring_params) == 120, "io_uring_params is 120 bytes");
_Static_assert(sizeof(struct sqe) == 64, "io_uring_sqe is 64 bytes");
_Static_assert(sizeof(struct cqe) == 16, "io_uring_cqe is 16 bytes");

static uint32_t load_acquire(uint32_t *p) {
  return atomic_load_explicit((_Atomic uint32_t *)p, memory_order_acquire);
}

static void store_release(uint32_t *p, uint32_t v) {
  atomic_store_explicit((_Atomic uint32_t *)p, v, memory_order_release);
}

static int setup(uint32_t entries, int one_thread, struct ring_params *params) {
  /* DEFER_TASKRUN is of 6.1, SINGLE_ISSUER of 6.0: ask for less until the kernel knows it. */
  static const uint32_t tries[] = {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_SINGLE_ISSUER, 0};
  int fd = -EINVAL;
  for (size_t i = one_thread ? 0 : 2; i < sizeof tries / sizeof *tries; i++) {
    memset(params, 0, sizeof *params);
    params->flags = tries[i] | SETUP_CLAMP;
    fd = (int)syscall(SYS_SETUP, entries, params);
    if (fd >= 0) return fd;
    fd = -errno;
    if (fd != -EINVAL) return fd;
  }
  return fd;
}

static int setup_polled(uint32_t entries, uint32_t polling, struct ring_params *params) {
  memset(params, 0, sizeof *params);
  params->flags = SETUP_CLAMP | (polling == LF_POLL_DEVICE ? SETUP_IOPOLL : SETUP_SQPOLL);
  params->sq_thread_idle = SQ_IDLE_MS;
  int fd = (int)syscall(SYS_SETUP, entries, params);
  return fd < 0 ? -errno : fd;
}

static int map_rings(lf_ring *ring, const struct ring_params *p) {
  size_t sq = p->sq.word6 + p->sq_entries * sizeof(uint32_t);
  size_t cq = p->cq.word5 + p->cq_entries * sizeof(struct cqe);
  ring->rings_bytes = sq > cq ? sq : cq;
  ring->sqes_bytes = p->sq_entries * sizeof(struct sqe);
  const int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
  ring->rings = mmap(NULL, ring->rings_bytes, prot, flags, ring->fd, OFFSET_RINGS);
  ring->sqes = mmap(NULL, ring->sqes_bytes, prot, flags, ring->fd, OFFSET_SQES);
  if (ring->rings == MAP_FAILED || ring->sqes == MAP_FAILED) return -errno;
  /* A forked child that shared the ring would corrupt its parent's queue. */
  madvise(ring->rings, ring->rings_bytes, MADV_DONTFORK);
  madvise(ring->sqes, ring->sqes_bytes, MADV_DONTFORK);
  return 0;
}

static void locate(lf_ring *ring, const struct ring_params *p) {
  uint8_t *base = ring->rings;
  ring->sq_tail = (uint32_t *)(base + p->sq.tail);
  ring->sq_mask = (uint32_t *)(base + p->sq.mask);
  ring->sq_flags = (uint32_t *)(base + p->sq.word4);
  ring->sq_array = (uint32_t *)(base + p->sq.word6);
  ring->cq_head = (uint32_t *)(base + p->cq.head);
  ring->cq_tail = (uint32_t *)(base + p->cq.tail);
  ring->cq_mask = (uint32_t *)(base + p->cq.mask);
  ring->cqes = base + p->cq.word5;
  ring->entries = p->sq_entries;
  ring->flags = p->flags;
  ring->tail = *ring->sq_tail;
}

/* The set-up call's answer to a ring that can be used. */
static int begin(lf_ring *ring, int fd, const struct ring_params *params) {
  memset(ring, 0, sizeof *ring);
  ring->rings = ring->sqes = MAP_FAILED;
  ring->fd = fd;
  if (fd < 0) return fd;
  const uint32_t needed = FEAT_SINGLE_MMAP | FEAT_RW_CUR_POS;
  int rc = (params->features & needed) == needed ? map_rings(ring, params) : -ENOSYS;
  if (rc < 0) {
    lf_ring_close(ring);
    return rc;
  }
  locate(ring, params);
  return 0;
}

int lf_ring_open(lf_ring *ring, uint32_t entries, int one_thread) {
  struct ring_params params;
  int fd = setup(entries, one_thread, &params);
  return begin(ring, fd, &params);
}

/* A set-up that succeeds proves nothing: without poll queues of the device every IOPOLL read fails. */
static int probe(lf_ring *ring, int fd) {
  void *unit;
  uint64_t tag;
  int32_t result = 0;
  if (posix_memalign(&unit, PROBE_BYTES, PROBE_BYTES) != 0) return -ENOMEM;
  lf_ring_read(ring, fd, -1, unit, PROBE_BYTES, 0, 0);
  int rc = 0, done = 0;
  while (!done && (rc == 0 || rc == -EINTR || rc == -EAGAIN)) {
    rc = lf_ring_enter(ring, 1);
    done = lf_ring_reap(ring, &tag, &result);
  }
  if (done) free(unit); /* otherwise the kernel may still write there */
  return !done ? rc : result < 0 ? result : 0;
}

int lf_ring_open_polled(lf_ring *ring, uint32_t entries, uint32_t polling, int fd) {
  struct ring_params params;
  int ring_fd = setup_polled(entries, polling, &params);
  int rc = begin(ring, ring_fd, &params);
  if (rc == 0 && (rc = probe(ring, fd)) < 0) lf_ring_close(ring);
  return rc;
}

int lf_ring_register(lf_ring *ring, const struct iovec *buffers, uint32_t count) {
  if (count > LF_BUFFERS) return -EINVAL;
  if (syscall(SYS_REGISTER, ring->fd, REGISTER_BUFFERS, buffers, count) < 0) return -errno;
  memcpy(ring->buffers, buffers, count * sizeof *buffers);
  ring->fixed = count;
  return 0;
}

int lf_ring_register_files(lf_ring *ring, const int32_t *fds, uint32_t count) {
  if (syscall(SYS_REGISTER, ring->fd, REGISTER_FILES, fds, count) < 0) return -errno;
  ring->fixed_files = 1;
  return 0;
}

/* The registered buffer that holds these bytes, or -1. */
static int buffer_of(const lf_ring *ring, const uint8_t *address, uint32_t bytes) {
  for (uint32_t i = 0; i < ring->fixed; i++) {
    /* Wraps to a huge value below the start. */
    uint64_t inside = (uint64_t)(uintptr_t)address - (uint64_t)(uintptr_t)ring->buffers[i].iov_base;
    if (inside < ring->buffers[i].iov_len && bytes <= ring->buffers[i].iov_len - inside) return (int)i;
  }
  return -1;
}

/* The next free entry, with all that a read and a write have in common. */
static struct sqe *queue(lf_ring *ring, const uint8_t *memory, uint32_t bytes, uint64_t offset, uint64_t tag) {
  uint32_t index = ring->tail & *ring->sq_mask;
  struct sqe *sqe = (struct sqe *)ring->sqes + index;
  memset(sqe, 0, sizeof *sqe);
  sqe->offset = offset;
  sqe->address = (uint64_t)(uintptr_t)memory;
  sqe->length = bytes;
  sqe->user_data = tag;
  ring->sq_array[index] = index;
  ring->tail++;
  ring->queued++;
  return sqe;
}

void lf_ring_read(lf_ring *ring, int fd, int32_t place, uint8_t *dst, uint32_t bytes, uint64_t offset,
                  uint64_t tag) {
  struct sqe *sqe = queue(ring, dst, bytes, offset, tag);
  int buffer = buffer_of(ring, dst, bytes);
  int named = ring->fixed_files && place >= 0;
  sqe->opcode = buffer >= 0 ? OP_READ_FIXED : OP_READ;
  sqe->buffer = buffer >= 0 ? (uint16_t)buffer : 0;
  sqe->flags = named ? FIXED_FILE : 0;
  sqe->fd = named ? place : fd;
}

void lf_ring_write(lf_ring *ring, int fd, const uint8_t *src, uint32_t bytes, uint64_t offset, uint64_t tag) {
  struct sqe *sqe = queue(ring, src, bytes, offset, tag);
  int buffer = buffer_of(ring, src, bytes);
  sqe->opcode = buffer >= 0 ? OP_WRITE_FIXED : OP_WRITE;
  sqe->buffer = buffer >= 0 ? (uint16_t)buffer : 0;
  sqe->fd = fd;
}

/* With SQPOLL the kernel's thread takes entries by itself, unless it sleeps. It looks at the tail once more after it
   has set its flag, so the flag has to be read after the tail was written: not with less than this order. */
static uint32_t publish_and_wake(lf_ring *ring) {
  const memory_order order = memory_order_seq_cst;
  atomic_store_explicit((_Atomic uint32_t *)ring->sq_tail, ring->tail, order);
  uint32_t flags = atomic_load_explicit((_Atomic uint32_t *)ring->sq_flags, order);
  return flags & SQ_NEED_WAKEUP ? ENTER_SQ_WAKEUP : 0;
}

int lf_ring_enter(lf_ring *ring, uint32_t wait_for) {
  uint32_t flags = ENTER_GETEVENTS;
  if (ring->flags & SETUP_SQPOLL) {
    flags |= publish_and_wake(ring);
  } else {
    store_release(ring->sq_tail, ring->tail);
  }
  long taken = syscall(SYS_ENTER, ring->fd, ring->queued, wait_for, flags, NULL, 0);
  if (taken < 0) return -errno;
  ring->queued -= (uint32_t)taken;
  return 0;
}

int lf_ring_reap(lf_ring *ring, uint64_t *tag, int32_t *result) {
  uint32_t head = *ring->cq_head; /* only this thread writes it */
  if (head == load_acquire(ring->cq_tail)) return 0;
  const struct cqe *cqe = (const struct cqe *)ring->cqes + (head & *ring->cq_mask);
  *tag = cqe->user_data;
  *result = cqe->result;
  store_release(ring->cq_head, head + 1);
  return 1;
}

void lf_ring_close(lf_ring *ring) {
  if (ring->rings != MAP_FAILED) munmap(ring->rings, ring->rings_bytes);
  if (ring->sqes != MAP_FAILED) munmap(ring->sqes, ring->sqes_bytes);
  if (ring->fd >= 0) close(ring->fd);
  ring->rings = ring->sqes = MAP_FAILED;
  ring->fd = -1;
}
