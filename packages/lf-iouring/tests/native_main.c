/* Runs the C code without Python, for sanitizers: native_main FILE. Prints "ok" or what went wrong.
   The file holds bytes that are a function of their offset, so every result can be checked here. */

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

int main(int argc, char **argv) {
  CHECK(argc == 2);
  int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(file >= 0);
  for (uint64_t at = 0; at < (uint64_t)N * 4001 + 4096; at += 4096) {
    uint8_t page[4096];
    for (int k = 0; k < 4096; k++) page[k] = byte_at(at + (uint64_t)k);
    CHECK(pwrite(file, page, sizeof page, (off_t)at) == sizeof page);
  }
  fill(file);
  for (uint32_t ring = 0; ring < 2; ring++) {
    fsync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    run(file, 3, ring, 0, 0);
    run(file, 1, ring, 1, 0);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    run(file, 2, ring, 1, 1);
  }
  puts("ok");
  return 0;
}
