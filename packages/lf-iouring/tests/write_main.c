/* Runs the writing C code without Python, for sanitizers: write_main FILE. Prints "ok" or what went wrong. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lf_native.h"

#define CHECK(what)                                        \
  do {                                                     \
    if (!(what)) {                                         \
      printf("line %d: %s\n", __LINE__, #what);            \
      exit(1);                                             \
    }                                                      \
  } while (0)

static uint8_t byte_at(uint64_t offset) { return (uint8_t)(offset * 2654435761u >> 13); }

static void check_file(int file, uint64_t start, uint64_t bytes, const uint8_t *expected) {
  uint8_t *found = malloc(bytes);
  CHECK(pread(file, found, bytes, (off_t)start) == (ssize_t)bytes && memcmp(found, expected, bytes) == 0);
  free(found);
}

/* Stretches that overlap in pages but not in bytes, all in flight together. */
static void run_writes(const char *path, uint32_t ring, int direct) {
  enum { SIZE = 3 << 20, STRETCH = 300001, COUNT = 9 };
  uint8_t *memory = aligned_alloc(4096, SIZE);
  for (uint32_t i = 0; i < SIZE; i++) memory[i] = byte_at(i);
  uint64_t address = (uint64_t)memory, size = SIZE;
  lf_write_options options = {ring, 4, 64 << 10, 1, &address, &size};
  lf_write_info info;
  lf_writer *w = lf_writer_new(&options, &info);
  CHECK(w != NULL && info.has_ring <= ring);
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  uint32_t unit = 4096;
  int second = direct ? lf_direct_sink(file, &unit) : -1;
  lf_write_job jobs[COUNT];
  for (uint64_t i = 0; i < COUNT; i++) {
    uint64_t at = i * STRETCH;
    jobs[i] = (lf_write_job){.fd = file, .direct = second, .unit = unit, .hash = 1, .source = address + at,
                             .bytes = STRETCH, .offset = at + 123};
    while (lf_write(w, &jobs[i]) == LF_PENDING) continue;
    CHECK(jobs[i].xxh3 == lf_xxh3_64(memory + at, STRETCH, 0));
  }
  for (uint32_t i = 0; i < COUNT; i++) CHECK(lf_write_wait(w, &jobs[i]) == LF_OK);
  check_file(file, 123, (uint64_t)COUNT * STRETCH, memory);
  CHECK(second < 0 || jobs[1].refused || jobs[1].direct_bytes > 0);
  lf_write_job bad = {.fd = second < 0 ? -1 : file, .direct = second < 0 ? -1 : 1 << 20, .unit = unit};
  bad.source = address;
  bad.bytes = SIZE;
  uint32_t kind = lf_write(w, &bad);
  CHECK(kind == LF_ERRNO || lf_write_wait(w, &bad) == LF_ERRNO);
  CHECK(bad.error == EBADF && bad.failed_at == 0);
  while (bad.flying > 0) lf_write_wait(w, &bad);
  lf_writer_free(w);
  if (second >= 0) close(second);
  close(file);
  free(memory);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  for (uint32_t ring = 0; ring < 2; ring++) {
    run_writes(argv[1], ring, 0);
    run_writes(argv[1], ring, 1);
  }
  puts("ok");
  return 0;
}
