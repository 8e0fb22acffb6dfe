/* Runs the C code without Python, for sanitizers: native_main FILE. Prints "ok" or what went wrong.
   The file holds bytes that are a function of their offset, so every result can be checked here. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lf_native.h"

enum { ROWS = 37, BATCHES = 9, ITEMS = 1000, EDGE = 1024, N = ROWS * BATCHES };

#define CHECK(what)                                        \
  do {                                                     \
    if (!(what)) {                                         \
      printf("line %d: %s\n", __LINE__, #what);            \
      exit(1);                                             \
    }                                                      \
  } while (0)

static uint8_t byte_at(uint64_t offset) { return (uint8_t)(offset * 2654435761u >> 13); }

static int32_t fd[N];
static uint64_t offset[2 * N];
static uint32_t nbytes[2 * N], hash[N], items[N];

static void fill(int file) {
  static uint8_t tokens[EDGE], bits[EDGE];
  for (uint32_t i = 0; i < N; i++) {
    fd[i] = i % 10 == 9 ? -1 : file;
    items[i] = (i * 131) % ITEMS;
    nbytes[i] = items[i];
    nbytes[N + i] = (items[i] + 7) / 8;
    offset[i] = (uint64_t)i * 4001;
    offset[N + i] = (uint64_t)i * 4001 + 2000;
    for (uint32_t k = 0; k < nbytes[i]; k++) tokens[k] = byte_at(offset[i] + k);
    for (uint32_t k = 0; k < nbytes[N + i]; k++) bits[k] = byte_at(offset[N + i] + k);
    hash[i] = (uint32_t)lf_xxh3_64(bits, nbytes[N + i], lf_xxh3_64(tokens, nbytes[i], 0));
  }
}

static void check_batch(const uint8_t *tokens, const uint8_t *mask, uint32_t batch) {
  for (uint32_t row = 0; row < ROWS; row++) {
    uint32_t i = batch * ROWS + row, length = fd[i] < 0 ? 0 : items[i];
    for (uint32_t k = 0; k < EDGE; k++) {
      uint8_t bit = (byte_at(offset[N + i] + k / 8) >> (k % 8)) & 1;
      CHECK(tokens[row * EDGE + k] == (k < length ? byte_at(offset[i] + k) : 0));
      CHECK(mask[row * EDGE + k] == (k < length ? bit : 0));
    }
  }
}

static void run(int file, uint32_t threads, uint32_t ring, int registered, int direct) {
  const size_t size = (size_t)ROWS * EDGE;
  uint8_t *memory = aligned_alloc(4096, (2 * size * BATCHES + 4095) / 4096 * 4096);
  lf_window window = {fd, offset, nbytes, hash, items, BATCHES, ROWS, 2, 1};
  lf_info info;
  lf_fault fault;
  int32_t fds[2] = {file, direct ? lf_direct_open(file) : -1};
  lf_options options = {.threads = threads,
                        .want_ring = ring,
                        .entries = 16,
                        .files = 1,
                        .direct = fds[1] >= 0,
                        .span = EDGE,
                        .fds = fds,
                        .pool = (uint64_t)memory,
                        .pool_bytes = registered ? 2 * size * BATCHES : 0};
  if (direct && fds[1] < 0) fprintf(stderr, "no direct reads here\n");
  lf_engine *e = lf_engine_new(&options, &info);
  CHECK(e != NULL && info.threads == threads);
  for (int pass = 0; pass < 20; pass++) {
    memset(memory, 0xEE, 2 * size * BATCHES);
    int64_t tickets[BATCHES];
    for (uint32_t b = 0; b < BATCHES; b++) {
      uint64_t at = (uint64_t)(memory + 2 * size * b);
      tickets[b] = lf_submit(e, &window, b, at, EDGE, at + size, EDGE);
    }
    for (uint32_t b = 0; b < BATCHES; b++) {
      uint32_t kind;
      while ((kind = lf_wait(e, tickets[b], 50, &fault)) == LF_PENDING) continue;
      CHECK(kind == LF_OK);
      check_batch(memory + 2 * size * b, memory + 2 * size * b + size, b);
    }
  }
  hash[3] ^= 1;
  uint64_t at = (uint64_t)memory;
  int64_t bad = lf_submit(e, &window, 0, at, EDGE, at + size, EDGE);
  while (lf_wait(e, bad, 50, &fault) == LF_PENDING) continue;
  CHECK(fault.kind == LF_HASH && fault.row == 3);
  hash[3] ^= 1;
  nbytes[5] += EDGE;
  bad = lf_submit(e, &window, 0, at, EDGE, at + size, EDGE);
  while (lf_wait(e, bad, 50, &fault) == LF_PENDING) continue;
  CHECK(fault.kind == LF_EXTENT && fault.row == 5);
  nbytes[5] -= EDGE;
  offset[7] += 1u << 30;
  bad = lf_submit(e, &window, 0, at, EDGE, at + size, EDGE);
  while (lf_wait(e, bad, 50, &fault) == LF_PENDING) continue;
  CHECK(fault.kind == LF_SHORT && fault.row == 7);
  offset[7] -= 1u << 30;
  lf_submit(e, &window, 1, at, EDGE, at + size, EDGE); /* still flying when the engine is freed */
  lf_engine_free(e);
  if (fds[1] >= 0) close(fds[1]);
  free(memory);
}

static void fill_file(int file) {
  for (uint64_t at = 0; at < (uint64_t)N * 4001 + 4096; at += 4096) {
    uint8_t page[4096];
    for (int k = 0; k < 4096; k++) page[k] = byte_at(at + (uint64_t)k);
    CHECK(pwrite(file, page, sizeof page, (off_t)at) == sizeof page);
  }
}

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
    jobs[i] = (lf_write_job){file, second, unit, 1, address + at, STRETCH, at + 123, 0, 0, 0, 0, 0, 0, 0, 0};
    while (lf_write(w, &jobs[i]) == LF_PENDING) continue;
    CHECK(jobs[i].xxh3 == lf_xxh3_64(memory + at, STRETCH, 0));
  }
  for (uint32_t i = 0; i < COUNT; i++) CHECK(lf_write_wait(w, &jobs[i]) == LF_OK);
  check_file(file, 123, (uint64_t)COUNT * STRETCH, memory);
  CHECK(second < 0 || jobs[1].refused || jobs[1].direct_bytes > 0);
  lf_write_job bad = {second < 0 ? -1 : file, second < 0 ? -1 : 1 << 20, unit, 0, address, SIZE, 0, 0, 0, 0, 0, 0, 0, 0, 0};
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
  int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(file >= 0);
  fill_file(file);
  fill(file);
  for (uint32_t ring = 0; ring < 2; ring++) {
    fsync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    run(file, 3, ring, 0, 0);
    run(file, 1, ring, 1, 0);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    run(file, 2, ring, 1, 1);
    run_writes(argv[1], ring, 0);
    run_writes(argv[1], ring, 1);
    fill_file(file);
  }
  puts("ok");
  return 0;
}
