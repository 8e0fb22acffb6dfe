/* A minimal io_uring: one ring, plain reads and writes. System calls by number, no library. */

#ifndef LF_RING_H
#define LF_RING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* A registered buffer holds 1 GiB at most, so a large slab takes several. */
enum { LF_BUFFERS = 64 };

typedef struct {
  int fd;
  uint32_t entries;
  uint32_t flags;      /* IORING_SETUP_* in use */
  uint32_t fixed;      /* registered buffers */
  struct iovec buffers[LF_BUFFERS];
  int fixed_files;     /* descriptors are registered, see lf_ring_register_files */
  void *rings;
  size_t rings_bytes;
  void *sqes;
  size_t sqes_bytes;
  uint32_t *sq_tail, *sq_mask, *sq_flags, *sq_array;
  uint32_t *cq_head, *cq_tail, *cq_mask;
  void *cqes;
  uint32_t tail;       /* our copy; the kernel sees it at lf_ring_enter */
  uint32_t queued;     /* entries the kernel has not taken yet */
} lf_ring;

/* All return 0 or a negative errno. With `one_thread` only the thread that opens a ring may use it, which
   saves the kernel work; without, calls may come from any thread, one at a time. */
int lf_ring_open(lf_ring *ring, uint32_t entries, int one_thread);
/* One that polls, LF_POLL_SUBMIT (SQPOLL) or LF_POLL_DEVICE (IOPOLL), proved by a read of the open file `fd`.
   Device polling works only with O_DIRECT descriptors. For calls from any thread, one at a time. */
int lf_ring_open_polled(lf_ring *ring, uint32_t entries, uint32_t polling, int fd);
/* Transfers inside one of these buffers, LF_BUFFERS at most, pin no pages of their own any more. Called once. */
int lf_ring_register(lf_ring *ring, const struct iovec *buffers, uint32_t count);
/* Reads may then name a descriptor by its place in `fds`. */
int lf_ring_register_files(lf_ring *ring, const int32_t *fds, uint32_t count);
int lf_ring_enter(lf_ring *ring, uint32_t wait_for);

/* The caller keeps at most `entries` transfers in flight. `place` is that of `fd` among the registered files, or -1. */
void lf_ring_read(lf_ring *ring, int fd, int32_t place, uint8_t *dst, uint32_t bytes, uint64_t offset, uint64_t tag);
void lf_ring_write(lf_ring *ring, int fd, const uint8_t *src, uint32_t bytes, uint64_t offset, uint64_t tag);
/* Takes one completion; 0 when there is none. */
int lf_ring_reap(lf_ring *ring, uint64_t *tag, int32_t *result);
void lf_ring_close(lf_ring *ring);

#endif
