/* Feeds the reader windows that lie: fuzz_reader FILE ITERATIONS SEED. Prints "ok" and what came of them, or what
   went wrong. Meant for -fsanitize=address,undefined: a slot ends exactly where its window says.

   An index can claim anything, so every number that comes from a file is put to hostile values: extents, blocks,
   codecs, hashes, the file's length. Whatever happens, a batch that is LF_OK must hash to what its window
   promises, computed here from the slot alone, with zeros behind each value. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lf_native.h"

enum { SIZE = 1 << 17, BLOCKS = 8, BLOCK_SPAN = 4096, IDS = 1500, ROWS = 5, FIELDS = 3, ROOM = 700, CODINGS = 3 };
enum { ZSTD = 1, PACKED = 2, RANKED = 3, FRAME_HEADER = 12 };

#define CHECK(what)                                                \
  do {                                                             \
    if (!(what)) {                                                 \
      printf("iteration %lu, line %d: %s\n", round_, __LINE__, #what); \
      exit(1);                                                     \
    }                                                              \
  } while (0)

typedef struct {
  lf_window window;
  int32_t fd[ROWS], block[ROWS];
  uint32_t hash[ROWS], nbytes[FIELDS * ROWS], items[FIELDS * ROWS];
  uint64_t offset[FIELDS * ROWS], place[FIELDS * ROWS], room[FIELDS], used;
  uint8_t kind[FIELDS];
  lf_block blocks[BLOCKS];
  int scrambled; /* values may lie across each other */
  uint8_t *slot;
} attempt;

static unsigned long round_, outcomes[LF_PENDING];
static uint64_t state;
static uint8_t image[SIZE];                  /* what the file holds */
static lf_block blocks[BLOCKS];              /* as they truly are */
static uint8_t decoded[BLOCKS][4 * IDS + 4096];
static uint32_t table[200];
static lf_coding codings[CODINGS] = {
    {.bits = 7, .width = 1, .vocabulary = 128, .table = table},
    {.bits = 13, .width = 2, .vocabulary = 200, .table = table},
    {.bits = 17, .width = 4, .vocabulary = 200, .table = table},
};

static uint64_t any(void) { /* xorshift64* */
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545F4914F6CDD1D;
}

static uint64_t below(uint64_t n) { return (any() >> 16) % n; }

static int one_in(uint64_t n) { return below(n) == 0; }

static uint64_t hostile(void) {
  static const uint64_t edges[] = {0, 1, 7, 8, 4095, 4096, 4097, SIZE - 1, SIZE, SIZE + 1, INT32_MAX, UINT32_MAX,
                                   (uint64_t)UINT32_MAX + 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX - 4095,
                                   UINT64_MAX - 1, UINT64_MAX};
  uint64_t edge = edges[below(sizeof edges / sizeof *edges)];
  return one_in(2) ? edge : one_in(2) ? edge + below(9) - 4 : below(2 * SIZE);
}

/* A frame with one raw block in it: what the decoder has to accept, without a compressor at hand. */
static uint32_t put_frame(uint8_t *to, const uint8_t *raw, uint32_t bytes) {
  uint32_t block = 1 | bytes << 3;
  const uint8_t head[FRAME_HEADER] = {0x28, 0xB5, 0x2F, 0xFD, 0xA0, (uint8_t)bytes, (uint8_t)(bytes >> 8), 0, 0,
                                      (uint8_t)block, (uint8_t)(block >> 8), (uint8_t)(block >> 16)};
  memcpy(to, head, sizeof head);
  memcpy(to + sizeof head, raw, bytes);
  return FRAME_HEADER + bytes;
}

static void put_id(uint8_t *to, uint32_t width, uint32_t i, uint32_t id) {
  for (uint32_t k = 0; k < width; k++) to[i * width + k] = (uint8_t)(id >> 8 * k);
}

static uint32_t pack_ids(uint8_t *to, uint8_t *raw, const lf_coding *c, uint32_t ids) {
  uint32_t bytes = (ids * c->bits + 7) / 8;
  memset(to, 0, bytes);
  for (uint32_t i = 0; i < ids; i++) {
    uint32_t id = (uint32_t)below((uint64_t)1 << c->bits);
    put_id(raw, c->width, i, id);
    for (uint32_t bit = 0; bit < c->bits; bit++) {
      uint32_t at = i * c->bits + bit;
      to[at / 8] |= (uint8_t)((id >> bit & 1) << at % 8);
    }
  }
  return bytes;
}

static uint32_t rank_ids(uint8_t *to, uint8_t *raw, const lf_coding *c, uint32_t ids) {
  uint8_t ranks[BLOCK_SPAN];
  uint32_t most = c->vocabulary < 100 ? (uint32_t)c->vocabulary : 100;
  for (uint32_t i = 0; i < ids; i++) {
    uint32_t rank = (uint32_t)below(most);
    put_id(ranks, c->width, i, rank);
    put_id(raw, c->width, i, table[rank]);
  }
  return put_frame(to, ranks, ids * c->width);
}

static void make_file(int file) {
  for (uint32_t i = 0; i < SIZE; i++) image[i] = (uint8_t)any();
  for (uint32_t i = 0; i < 200; i++) table[i] = 199 - i;
  for (uint32_t b = 0; b < BLOCKS; b++) {
    lf_block *k = &blocks[b];
    const lf_coding *c = &codings[b % CODINGS];
    uint8_t *stored = image + b * BLOCK_SPAN;
    *k = (lf_block){.offset = b * BLOCK_SPAN, .fd = file, .codec = 1 + b % 3, .coding = b % CODINGS};
    k->ids = k->codec == PACKED ? IDS : 900;
    k->raw = k->ids * c->width;
    if (k->codec == ZSTD) {
      for (uint32_t i = 0; i < k->raw; i++) decoded[b][i] = (uint8_t)any();
      k->stored = put_frame(stored, decoded[b], (uint32_t)k->raw);
    } else {
      k->stored = (k->codec == PACKED ? pack_ids : rank_ids)(stored, decoded[b], c, k->ids);
    }
    k->hash = lf_xxh3_64(stored, k->stored, 0);
  }
  CHECK(pwrite(file, image, SIZE, 0) == SIZE);
}

static void honest_row(attempt *a, uint32_t row, int file, uint64_t *end) {
  uint32_t fields = a->window.fields;
  int b = one_in(2) && lf_zstd_version() ? (int)below(BLOCKS) : -1;
  const uint8_t *from = b < 0 ? image : decoded[b];
  uint64_t whole = b < 0 ? SIZE : blocks[b].raw, chain = 0;
  a->fd[row] = one_in(9) ? -1 : file;
  a->block[row] = b;
  for (uint32_t f = 0; f < fields; f++) {
    uint32_t at = f * ROWS + row, bits = a->kind[f] & LF_BITS;
    a->items[at] = a->fd[row] < 0 ? 0 : (uint32_t)below(ROOM) & ~(bits ? 7u : 0u);
    a->nbytes[at] = bits ? (a->items[at] + 7) / 8 : a->items[at];
    a->offset[at] = below(whole - a->nbytes[at] + 1);
    a->place[at] = one_in(9) ? LF_NOWHERE : *end;
    if (a->place[at] != LF_NOWHERE) *end += a->kind[f] & LF_JOIN ? a->items[at] : ROOM;
    chain = lf_xxh3_64(from + a->offset[at], a->nbytes[at], chain);
  }
  a->hash[row] = (uint32_t)chain;
}

static void be_honest(attempt *a, int file) {
  uint64_t end = 0;
  memset(a, 0, sizeof *a);
  a->window = (lf_window){a->fd, a->block, a->hash, a->offset, a->nbytes, a->items, a->place, a->room, &a->used,
                          a->kind, a->blocks, 1, ROWS, 1 + (uint32_t)below(FIELDS), 1};
  memcpy(a->blocks, blocks, sizeof blocks);
  for (uint32_t f = 0; f < FIELDS; f++) {
    a->kind[f] = (uint8_t)below(4);
    a->room[f] = ROOM;
  }
  for (uint32_t row = 0; row < ROWS; row++) honest_row(a, row, file, &end);
  a->used = end;
}

/* The front of a packed block, every number of it right: two windows may call the same bytes different blocks. */
static void be_shorter(lf_block *k, uint32_t b) {
  const lf_coding *c = &codings[blocks[b].coding];
  *k = blocks[b];
  k->ids = 8 * (uint32_t)below(IDS / 8);
  k->raw = (uint64_t)k->ids * c->width;
  k->stored = k->ids * c->bits / 8;
  k->hash = lf_xxh3_64(image + k->offset, k->stored, 0);
}

static void lie_about_a_block(attempt *a) {
  uint32_t b = (uint32_t)below(BLOCKS);
  lf_block *k = &a->blocks[b];
  if (blocks[b].codec == PACKED && one_in(3)) {
    be_shorter(k, b);
    return;
  }
  switch (below(8)) {
    case 0: k->offset = hostile(); break;
    case 1: k->raw = below(2 * SIZE); break;
    case 2: k->stored = (uint32_t)below(2 * SIZE); break;
    case 3: k->codec = (uint32_t)hostile(); break;
    case 4: k->coding = (uint32_t)hostile(); break;
    case 5: k->ids = (uint32_t)hostile(); break;
    case 6: k->hash ^= hostile(); break;
    default: k->codec = 1 + (uint32_t)below(3), k->coding = (uint32_t)below(CODINGS), k->raw += below(64);
  }
  if (one_in(2)) k->offset += below(64); /* so that no cache knows it */
}

/* Sizes that are allocated before anything is read stay small enough for a machine. */
static void lie(attempt *a) {
  uint32_t at = (uint32_t)(below(a->window.fields) * ROWS + below(ROWS)), f = at / ROWS;
  int large = !(a->kind[f] & LF_BITS) && a->place[at] != LF_NOWHERE;
  switch (below(9)) {
    case 0: a->offset[at] = hostile(); break;
    case 1: a->nbytes[at] = (uint32_t)(large ? hostile() : below(2 * SIZE)); break;
    case 2: a->items[at] = (uint32_t)hostile(); break;
    case 3: a->hash[at % ROWS] ^= (uint32_t)hostile(); break;
    case 4: a->place[at] = hostile(), a->scrambled = 1; break;
    case 5: a->room[f] = hostile(), a->scrambled = 1; break;
    case 6: a->used = below(a->used + 1), a->scrambled = 1; break;
    case 7: a->window.verify = 0; break;
    default: lie_about_a_block(a);
  }
}

/* What is stored of a value, from the slot; NULL when its bits are no bits. */
static const uint8_t *stored_of(const attempt *a, uint32_t at, uint32_t f, uint8_t *packed) {
  const uint8_t *value = a->slot + a->place[at];
  if (!(a->kind[f] & LF_BITS)) return value;
  memset(packed, 0, a->nbytes[at]);
  for (uint32_t i = 0; i < a->items[at]; i++) {
    if (value[i] > 1) return NULL;
    packed[i / 8] |= (uint8_t)(value[i] << i % 8);
  }
  return packed;
}

/* Behind `filled` bytes of a value, up to its room. */
static void check_padding(const attempt *a, uint32_t at, uint32_t f, uint64_t filled) {
  if (a->kind[f] & LF_JOIN || a->place[at] == LF_NOWHERE) return;
  for (uint64_t k = filled; k < a->room[f]; k++) CHECK(a->slot[a->place[at] + k] == 0);
}

static void check_row(const attempt *a, uint32_t row) {
  static uint8_t packed[ROOM];
  uint64_t chain = 0;
  int whole = a->window.verify;
  for (uint32_t f = 0; f < a->window.fields; f++) {
    uint32_t at = f * ROWS + row, bits = a->kind[f] & LF_BITS;
    check_padding(a, at, f, a->fd[row] < 0 ? 0 : bits ? a->items[at] : a->nbytes[at]);
    whole &= a->fd[row] >= 0 && a->place[at] != LF_NOWHERE && !(bits && a->items[at] % 8); /* spare bits are hashed */
    if (!whole) continue;
    const uint8_t *stored = stored_of(a, at, f, packed);
    CHECK(stored != NULL);
    chain = lf_xxh3_64(stored, a->nbytes[at], chain);
  }
  CHECK(!whole || (uint32_t)chain == a->hash[row]);
}

static void finish(lf_engine *e, attempt *a, int64_t ticket) {
  lf_fault fault;
  uint32_t kind;
  while ((kind = lf_wait(e, ticket, 1000, &fault)) == LF_PENDING) continue;
  CHECK(kind < LF_PENDING && (kind == LF_OK || fault.row < ROWS));
  outcomes[kind]++;
  for (uint32_t row = 0; kind == LF_OK && !a->scrambled && row < ROWS; row++) check_row(a, row);
  free(a->slot);
}

/* The file is shorter, or holds another byte, for one turn. */
static void fuzz(lf_engine *e, int file) {
  static attempt attempts[2];
  int64_t tickets[2];
  uint64_t flipped = below(SIZE), cut = one_in(4) ? below(SIZE) : SIZE;
  uint8_t wrong = image[flipped] ^ (uint8_t)(1 << below(8));
  int flip = one_in(3);
  if (flip) CHECK(pwrite(file, &wrong, 1, (off_t)flipped) == 1);
  if (cut < SIZE) CHECK(ftruncate(file, (off_t)cut) == 0);
  for (int i = 0; i < 2; i++) {
    be_honest(&attempts[i], file);
    for (uint64_t lies = below(4); lies > 0; lies--) lie(&attempts[i]);
    attempts[i].slot = malloc(attempts[i].used);
    tickets[i] = lf_submit(e, &attempts[i].window, 0, (uint64_t)attempts[i].slot);
  }
  for (int i = 0; i < 2; i++) finish(e, &attempts[i], tickets[i]);
  if (cut < SIZE) CHECK(pwrite(file, image + cut, SIZE - cut, (off_t)cut) == (ssize_t)(SIZE - cut));
  if (flip) CHECK(pwrite(file, image + flipped, 1, (off_t)flipped) == 1);
}

static void run(int file, uint32_t ring, int direct, unsigned long iterations) {
  int32_t fds[2] = {file, direct ? lf_direct_open(file) : -1};
  lf_options options = {.threads = 2, .want_ring = ring, .entries = 8, .files = 1, .direct = fds[1] >= 0,
                        .span = BLOCK_SPAN, .fds = fds, .codings = codings, .coding_count = CODINGS,
                        .cache_bytes = 3 * BLOCK_SPAN};
  lf_info info;
  lf_engine *e = lf_engine_new(&options, &info);
  CHECK(e != NULL);
  for (unsigned long i = 0; i < iterations; i += 2, round_ += 2) fuzz(e, file);
  lf_engine_free(e);
  if (fds[1] >= 0) close(fds[1]);
}

int main(int argc, char **argv) {
  CHECK(argc == 4);
  unsigned long iterations = strtoul(argv[2], NULL, 10);
  state = strtoul(argv[3], NULL, 10) * 2 + 1;
  int file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(file >= 0);
  make_file(file);
  run(file, 1, 0, iterations / 2);
  run(file, 0, 0, iterations / 4);
  run(file, 1, 1, iterations / 4);
  printf("ok: %lu right", outcomes[LF_OK]);
  for (uint32_t kind = 1; kind < LF_PENDING; kind++) printf(", %lu of fault %u", outcomes[kind], kind);
  puts("");
  return 0;
}
