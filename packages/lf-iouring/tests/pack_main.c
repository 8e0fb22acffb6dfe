/* Packs and lays random documents without Python, for sanitizers: pack_main IGNORED. Prints "ok" or what went
   wrong. Token k of document d is d * 1000 + k. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lf_native.h"

enum { MOST = 200, CAPACITY = 64 };

#define CHECK(what)                                        \
  do {                                                     \
    if (!(what)) {                                         \
      printf("line %d: %s\n", __LINE__, #what);            \
      exit(1);                                             \
    }                                                      \
  } while (0)

static int64_t first_fit_plainly(const int64_t *lengths, int64_t count, int64_t *row) {
  int64_t room[MOST], rows = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t r = 0;
    while (r < rows && room[r] < lengths[i]) r++;
    if (r == rows) room[rows++] = CAPACITY;
    room[r] -= lengths[i];
    row[i] = r;
  }
  return rows;
}

/* Exact sizes on the heap, so that a byte too many is found. */
static void lay(const int64_t *lengths, const int64_t *row, int64_t count, uint32_t rows, int masked) {
  int64_t *by_row = malloc((size_t)count * 3 * sizeof *by_row), *length = by_row + count, *at = length + count;
  int32_t *group = calloc((size_t)count, sizeof *group);
  uint32_t *staged = calloc((size_t)count, CAPACITY * sizeof *staged);
  uint8_t *bits = malloc((size_t)count * CAPACITY);
  uint64_t n = 0, places = (uint64_t)rows * CAPACITY;
  memset(bits, 1, (size_t)count * CAPACITY);
  for (uint32_t r = 0; r < rows; r++) {
    for (int64_t d = 0; d < count; d++) {
      if (row[d] != r) continue;
      by_row[n] = r, length[n] = lengths[d], at[n] = d * CAPACITY;
      for (int64_t k = 0; k < lengths[d]; k++) staged[d * CAPACITY + k] = (uint32_t)(d * 1000 + k);
      n++;
    }
  }
  lf_staging staging = {(uint8_t *)staged, masked ? bits : NULL};
  lf_segments from = {n, by_row, length, at, group, &staging};
  uint32_t *tokens = malloc(places * sizeof *tokens);
  uint8_t *mask = malloc(places);
  int32_t *position = malloc(places * 4), *segment = malloc(places * 4), *cuts = malloc((n + rows + 1) * 4);
  int64_t *used = malloc(rows * sizeof *used);
  lf_laid to = {(uint8_t *)tokens, mask, position, segment, cuts, used, CAPACITY, rows, 4, 0, 0};
  lf_lay(&to, &from);
  CHECK(to.cu_seqlens[0] == 0 && to.cu_seqlens[to.cuts - 1] == (int32_t)places);
  uint64_t s = 0;
  for (uint32_t r = 0; r < rows; r++) {
    uint64_t p = (uint64_t)r * CAPACITY;
    for (; s < n && by_row[s] == r; s++) {
      for (int64_t k = 0; k < length[s]; k++, p++) {
        CHECK(tokens[p] == (uint32_t)(at[s] / CAPACITY * 1000 + k));
        CHECK(position[p] == k && segment[p] > 0 && mask[p] == (k > 0));
      }
    }
    CHECK(used[r] == (int64_t)(p - (uint64_t)r * CAPACITY));
    for (; p < (uint64_t)(r + 1) * CAPACITY; p++) {
      CHECK(tokens[p] == 0 && position[p] == 0 && segment[p] == 0 && mask[p] == 0);
    }
  }
  void *all[] = {by_row, group, staged, bits, tokens, mask, position, segment, cuts, used};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(void) {
  srand(7);
  for (int pass = 0; pass < 200; pass++) {
    int64_t lengths[MOST], row[MOST], plain[MOST], count = pass < MOST ? pass : MOST;
    for (int64_t i = 0; i < count; i++) lengths[i] = 1 + rand() % CAPACITY;
    int64_t rows = lf_first_fit(lengths, count, CAPACITY, row);
    CHECK(rows == first_fit_plainly(lengths, count, plain));
    CHECK(memcmp(row, plain, (size_t)count * sizeof *row) == 0);
    lay(lengths, row, count, (uint32_t)rows + 1, pass % 2); /* the last row is empty */
  }
  puts("ok");
  return 0;
}
