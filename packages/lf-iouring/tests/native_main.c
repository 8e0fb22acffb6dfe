/* Runs the C code without Python, for sanitizers: native_main FILE. Prints "ok" or what went wrong.
   The file holds bytes that are a function of their offset, so every result can be checked here. */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lf_native.h"

enum { ROWS = 37, BATCHES = 9, ITEMS = 1000, EDGE = 1024, N = ROWS * BATCHES, FIELDS = 3 };
/* Rows of odd batches lie in blocks of packed ids: IDS ids of 7 bits, one a byte when decoded. */
enum { IDS = 4096, PACKED = IDS * 7 / 8, BLOCKS = 5, BLOCKS_AT = N * 4001 + 4096 };

#define CHECK(what)                                        \
  do {                                                     \
    if (!(what)) {                                         \
      printf("line %d: %s\n", __LINE__, #what);            \
      exit(1);                                             \
    }                                                      \
  } while (0)

/* Field 0 is copied and padded, field 1 is bits, field 2 is joined; all of a row begin at different bytes. */
static int32_t fd[N], block[N];
static uint64_t offset[FIELDS * N], place[FIELDS * N], room[FIELDS * BATCHES], used[BATCHES];
static uint32_t nbytes[FIELDS * N], hash[N], items[FIELDS * N];
static const uint8_t kind[FIELDS] = {LF_COPY, LF_BITS, LF_JOIN};
static lf_block blocks[BLOCKS];

static uint8_t byte_at(uint64_t offset) { return (uint8_t)(offset * 2654435761u >> 13); }

static uint8_t id_at(uint32_t b, uint32_t i) {
  uint32_t bit = i * 7, low = byte_at(blocks[b].offset + bit / 8), high = byte_at(blocks[b].offset + bit / 8 + 1);
  return (uint8_t)((low | high << 8) >> bit % 8 & 127);
}

/* Byte `k` of field `f` of row `i` as it is stored. */
static uint8_t stored_at(uint32_t f, uint32_t i, uint32_t k) {
  uint64_t at = offset[f * N + i] + k;
  return block[i] < 0 ? byte_at(at) : id_at((uint32_t)block[i], (uint32_t)at);
}

static void fill(int file) {
  static uint8_t bytes[EDGE];
  for (uint32_t b = 0; b < BLOCKS; b++) {
    blocks[b] = (lf_block){.offset = BLOCKS_AT + b * 4099, .raw = IDS, .stored = PACKED, .fd = file, .codec = 2,
                           .ids = IDS};
    static uint8_t packed[PACKED];
    for (uint32_t k = 0; k < PACKED; k++) packed[k] = byte_at(blocks[b].offset + k);
    blocks[b].hash = lf_xxh3_64(packed, PACKED, 0);
  }
  for (uint32_t b = 0; b < BATCHES; b++) {
    uint64_t joined = 2 * ROWS * EDGE;
    room[b] = room[BATCHES + b] = EDGE;
    for (uint32_t row = 0; row < ROWS; row++) {
      uint32_t i = b * ROWS + row;
      fd[i] = i % 10 == 9 ? -1 : file;
      block[i] = b % 2 == 0 ? -1 : (int32_t)(i % BLOCKS);
      uint64_t base = block[i] < 0 ? (uint64_t)i * 4001 : i % 300;
      uint64_t hashed = 0;
      for (uint32_t f = 0; f < FIELDS; f++) {
        uint32_t at = f * N + i;
        items[at] = fd[i] < 0 ? 0 : (i * 131 + f * 17) % ITEMS;
        nbytes[at] = f == 1 ? (items[at] + 7) / 8 : items[at];
        offset[at] = base + f * 1200;
        place[at] = f < 2 ? (f * ROWS + row) * EDGE : joined;
        joined += f < 2 ? 0 : items[at];
        for (uint32_t k = 0; k < nbytes[at]; k++) bytes[k] = stored_at(f, i, k);
        hashed = lf_xxh3_64(bytes, nbytes[at], hashed);
      }
      if (i % 7 == 3) place[i] = LF_NOWHERE;
      hash[i] = (uint32_t)hashed;
    }
    used[b] = joined;
  }
}

static void check_batch(const uint8_t *slot, uint32_t batch) {
  for (uint32_t i = batch * ROWS; i < (batch + 1) * ROWS; i++) {
    for (uint32_t k = 0; k < EDGE; k++) {
      uint8_t bit = k < items[N + i] ? stored_at(1, i, k / 8) >> k % 8 & 1 : 0;
      uint8_t byte = k < items[i] ? stored_at(0, i, k) : 0;
      CHECK(slot[place[N + i] + k] == bit);
      CHECK(place[i] == LF_NOWHERE || slot[place[i] + k] == byte);
    }
    for (uint32_t k = 0; k < items[2 * N + i]; k++) CHECK(slot[place[2 * N + i] + k] == stored_at(2, i, k));
  }
}

static uint32_t result(lf_engine *e, int64_t ticket, lf_fault *fault) {
  uint32_t kind;
  while ((kind = lf_wait(e, ticket, 50, fault)) == LF_PENDING) continue;
  return kind;
}

/* One thing is wrong while batch `b` is read. */
static void expect(lf_engine *e, const lf_window *w, uint32_t b, uint8_t *slot, uint32_t kind, uint32_t row) {
  lf_fault fault;
  CHECK(result(e, lf_submit(e, w, b, (uint64_t)slot), &fault) == kind);
  CHECK(fault.row == row);
}

static void break_things(lf_engine *e, lf_window *w, uint8_t *slot) {
  hash[3] ^= 1;
  expect(e, w, 0, slot, LF_HASH, 3);
  hash[3] ^= 1;
  nbytes[5] += EDGE;
  expect(e, w, 0, slot, LF_EXTENT, 5);
  nbytes[5] -= EDGE;
  place[2 * N + 6] = used[0];
  expect(e, w, 0, slot, LF_EXTENT, 6);
  place[2 * N + 6] = place[2 * N + 5] + items[2 * N + 5];
  offset[7] += 1u << 30;
  expect(e, w, 0, slot, LF_SHORT, 7);
  offset[7] -= 1u << 30;
  offset[ROWS + 4] = IDS - 1;
  expect(e, w, 1, slot, LF_EXTENT, 4);
  offset[ROWS + 4] = (ROWS + 4) % 300;
  lf_block fresh[BLOCKS]; /* places that no cache knows, with every fault a block can have */
  memcpy(fresh, blocks, sizeof fresh);
  w->blocks = fresh;
  for (uint32_t b = 0; b < BLOCKS; b++) fresh[b].offset = BLOCKS_AT + 64 * b;
  expect(e, w, 1, slot, LF_BLOCK_HASH, 0);
  w->verify = 0;
  for (uint32_t b = 0; b < BLOCKS; b++) fresh[b].ids = IDS + 1;
  expect(e, w, 1, slot, LF_DECODE, 0);
  for (uint32_t b = 0; b < BLOCKS; b++) fresh[b] = blocks[b], fresh[b].coding = 1, fresh[b].offset++;
  expect(e, w, 1, slot, LF_DECODE, 0);
  for (uint32_t b = 0; b < BLOCKS; b++) fresh[b] = blocks[b], fresh[b].offset = 1u << 30;
  expect(e, w, 1, slot, LF_SHORT, 0);
  w->verify = 1;
  w->blocks = blocks;
}

static void run(int file, uint32_t threads, uint32_t ring, int registered, int direct, int mapped, uint64_t cache) {
  const size_t size = (size_t)ROWS * (2 * EDGE + ITEMS) + 4096;
  uint8_t *memory = aligned_alloc(4096, (size * BATCHES + 4095) / 4096 * 4096);
  lf_window window = {fd, block, hash, offset, nbytes, items, place, room, used, kind, blocks,
                      BATCHES, ROWS, FIELDS, 1};
  lf_coding coding = {.bits = 7, .width = 1, .vocabulary = 128};
  lf_info info;
  lf_fault fault;
  int32_t fds[2] = {file, direct ? lf_direct_open(file) : -1};
  lf_options options = {.threads = threads,
                        .want_ring = ring,
                        .entries = 16,
                        .files = 1,
                        .direct = fds[1] >= 0,
                        .span = 4096,
                        .fds = fds,
                        .pool = (uint64_t)memory,
                        .pool_bytes = registered ? size * BATCHES : 0,
                        .codings = &coding,
                        .coding_count = 1,
                        .mapped = (uint32_t)mapped,
                        .cache_bytes = cache};
  if (direct && fds[1] < 0) fprintf(stderr, "no direct reads here\n");
  lf_engine *e = lf_engine_new(&options, &info);
  CHECK(e != NULL && info.threads == threads);
  for (int pass = 0; pass < 10; pass++) {
    memset(memory, 0xEE, size * BATCHES);
    int64_t tickets[BATCHES];
    for (uint32_t b = 0; b < BATCHES; b++) tickets[b] = lf_submit(e, &window, b, (uint64_t)(memory + size * b));
    for (uint32_t b = 0; b < BATCHES; b++) {
      CHECK(result(e, tickets[b], &fault) == LF_OK);
      check_batch(memory + size * b, b);
      CHECK(memory[size * b + used[b]] == 0xEE);
    }
  }
  lf_counters counters;
  lf_engine_counters(e, &counters);
  CHECK(!mapped == (counters.mapped_reads == 0));
  CHECK(cache < BLOCKS * IDS ? counters.decoded_blocks > BLOCKS : counters.decoded_blocks == BLOCKS);
  break_things(e, &window, memory);
  lf_submit(e, &window, 1, (uint64_t)memory); /* still flying when the engine is freed */
  lf_engine_free(e);
  if (fds[1] >= 0) close(fds[1]);
  free(memory);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(file >= 0);
  for (uint64_t at = 0; at < BLOCKS_AT + BLOCKS * 4099 + PACKED; at += 4096) {
    uint8_t page[4096];
    for (int k = 0; k < 4096; k++) page[k] = byte_at(at + (uint64_t)k);
    CHECK(pwrite(file, page, sizeof page, (off_t)at) == sizeof page);
  }
  fill(file);
  for (uint32_t ring = 0; ring < 2; ring++) {
    fsync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    run(file, 3, ring, 0, 0, 0, 1 << 20);
    run(file, 2, ring, 0, 0, 1, 0);
    run(file, 1, ring, 1, 0, 0, 0);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    run(file, 2, ring, 1, 1, 0, 2 * IDS);
  }
  puts("ok");
  return 0;
}
