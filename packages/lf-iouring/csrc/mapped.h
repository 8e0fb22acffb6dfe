/* Files mapped into memory: pages that are known to be in the page cache are copied without a system call. */

#ifndef LF_MAPPED_H
#define LF_MAPPED_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
  const uint8_t *base;        /* NULL: not mapped */
  uint64_t bytes;             /* length of the file when it was mapped */
  _Atomic uint64_t *resident; /* a bit a page that was seen in memory; it may have left since */
  _Atomic uint8_t *asked;     /* whether the kernel was asked about a region; NULL where it would not tell */
} lf_map;

/* A file that shrinks under its mapping makes the copy raise SIGBUS. Catches that in the copies below, and hands
   every other SIGBUS on to the handler that was there. Returns 0 or a negative errno. */
int lf_bus_guard(void);
/* Whether the handler is in force for this thread: somebody may have put another one in its place, and a thread
   that blocks SIGBUS would not get to it. */
int lf_bus_guarded(void);

/* 0 or a negative errno. */
int lf_map_open(lf_map *map, int fd);
void lf_map_close(lf_map *map);

/* Copies bytes that are in memory; 0 when they may not be, or the file has shrunk. */
int lf_map_copy(lf_map *map, uint8_t *dst, uint64_t offset, uint64_t bytes);
/* These bytes were just read through the page cache. */
void lf_map_seen(lf_map *map, uint64_t offset, uint64_t bytes);

#endif
