/* Which engine serves here, and whether it serves rightly, without Python: served_main FILE [spoil].
   Prints hashes of known bytes, then how reads and writes went, then "ok", or what went wrong. With `spoil` one byte
   of the file is turned after its hashes were taken, which has to be found. */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lf_native.h"

enum { ROWS = 64, ROOM = 3000, LONGEST = 5000, SIZE = ROWS * LONGEST, SPOILT = 41 };

#define CHECK(what)                                        \
  do {                                                     \
    if (!(what)) {                                         \
      printf("line %d: %s\n", __LINE__, #what);            \
      exit(1);                                             \
    }                                                      \
  } while (0)

static uint8_t bytes[SIZE];

static void print_hashes(void) {
  static const uint32_t lengths[] = {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, LONGEST};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    printf("hash %u %016llx\n", lengths[i], (unsigned long long)lf_xxh3_64(bytes, lengths[i], 77));
  }
}

static void write_all(int file) {
  uint64_t address = (uint64_t)(uintptr_t)bytes, size = SIZE;
  lf_write_options options = {1, 4, 64 << 10, 1, &address, &size};
  lf_write_info info;
  lf_writer *w = lf_writer_new(&options, &info);
  CHECK(w != NULL);
  lf_write_job job = {.fd = file, .direct = -1, .unit = 4096, .hash = 1, .source = address, .bytes = SIZE};
  while (lf_write(w, &job) == LF_PENDING) continue;
  CHECK(lf_write_wait(w, &job) == LF_OK && job.xxh3 == lf_xxh3_64(bytes, SIZE, 0));
  lf_writer_free(w);
  printf("write ring=%u error=%d\n", info.has_ring, info.ring_error);
}

static void read_all(int file, uint8_t *slot) {
  static int32_t fd[ROWS], block[ROWS];
  static uint32_t hash[ROWS], nbytes[ROWS], items[ROWS];
  static uint64_t offset[ROWS], place[ROWS];
  const uint64_t room = ROOM, used = (uint64_t)ROWS * ROOM;
  const uint8_t kind = LF_COPY;
  for (uint32_t i = 0; i < ROWS; i++) {
    fd[i] = file, block[i] = -1, offset[i] = (uint64_t)i * LONGEST + i % 13, place[i] = (uint64_t)i * ROOM;
    nbytes[i] = items[i] = i * 47 % ROOM;
    hash[i] = (uint32_t)lf_xxh3_64(bytes + offset[i], nbytes[i], 0);
  }
  lf_window window = {fd, block, hash, offset, nbytes, items, place, &room, &used, &kind, NULL, 1, ROWS, 1, 1};
  lf_options options = {.threads = 2, .want_ring = 1, .entries = 8, .files = 1, .fds = &file};
  lf_info info;
  lf_fault fault;
  lf_counters counters;
  lf_engine *e = lf_engine_new(&options, &info);
  CHECK(e != NULL);
  int64_t ticket = lf_submit(e, &window, 0, (uint64_t)(uintptr_t)slot);
  while (lf_wait(e, ticket, 50, &fault) == LF_PENDING) continue;
  lf_engine_counters(e, &counters);
  lf_engine_free(e);
  printf("read ring=%u error=%d by_ring=%llu by_pread=%llu cached=%llu\n", info.ring_threads,
         info.ring_error, (unsigned long long)counters.ring_reads, (unsigned long long)counters.pread_reads,
         (unsigned long long)counters.cached_reads);
  if (fault.kind != LF_OK) {
    printf("row %u: fault %u\n", fault.row, fault.kind);
    exit(1);
  }
  for (uint32_t i = 0; i < ROWS; i++) {
    CHECK(memcmp(slot + place[i], bytes + offset[i], nbytes[i]) == 0);
    for (uint32_t k = nbytes[i]; k < ROOM; k++) CHECK(slot[place[i] + k] == 0);
  }
}

int main(int argc, char **argv) {
  CHECK(argc == 2 || (argc == 3 && strcmp(argv[2], "spoil") == 0));
  for (uint64_t i = 0; i < SIZE; i++) bytes[i] = (uint8_t)(i * 2654435761u >> 13);
  print_hashes();
  int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(file >= 0);
  write_all(file);
  const uint64_t at = (uint64_t)SPOILT * LONGEST + 100;
  const uint8_t turned = bytes[at] ^ 1;
  if (argc == 3) CHECK(pwrite(file, &turned, 1, (off_t)at) == 1);
  fsync(file);
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED); /* what the page cache holds is read without an engine */
  uint8_t *slot = malloc((size_t)ROWS * ROOM);
  memset(slot, 0xEE, (size_t)ROWS * ROOM);
  read_all(file, slot);
  free(slot);
  close(file);
  puts("ok");
  return 0;
}
