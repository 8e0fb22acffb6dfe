/* Packing: which row a document goes to, and laying documents into rows. Called without the GIL. */
#include "lf_native.h"

#include <stdlib.h>
#include <string.h>

/* The room of every row, open or not, as leaves of a tree of maxima: the first row with enough of it is
   found in log2(rows) steps. */
typedef struct {
  int64_t leaves;
  int64_t *room;
} lf_rooms;

static int64_t first_with(const lf_rooms *t, int64_t length) {
  int64_t node = 1;
  while (node < t->leaves) node = t->room[2 * node] >= length ? 2 * node : 2 * node + 1;
  return node;
}

static void take(const lf_rooms *t, int64_t node, int64_t length) {
  t->room[node] -= length;
  for (node /= 2; node >= 1; node /= 2) {
    int64_t left = t->room[2 * node], right = t->room[2 * node + 1], most = left > right ? left : right;
    if (t->room[node] == most) return;
    t->room[node] = most;
  }
}

int64_t lf_first_fit(const int64_t *lengths, int64_t count, int64_t capacity, int64_t *row) {
  lf_rooms t = {1, NULL};
  int64_t rows = 0;
  while (t.leaves < count) t.leaves *= 2;
  t.room = malloc(2 * (size_t)t.leaves * sizeof *t.room);
  if (t.room == NULL) return -1;
  for (int64_t i = 0; i < 2 * t.leaves; i++) t.room[i] = capacity;
  for (int64_t i = 0; i < count; i++) {
    int64_t node = first_with(&t, lengths[i]);
    take(&t, node, lengths[i]);
    row[i] = node - t.leaves;
    if (row[i] >= rows) rows = row[i] + 1;
  }
  free(t.room);
  return rows;
}

/* One segment to place `at` of the flattened rows; `number` counts from 1 in its row. */
static void lay_segment(lf_laid *to, const lf_segments *from, uint64_t s, uint64_t at, int32_t number) {
  uint64_t length = (uint64_t)from->length[s], first = (uint64_t)from->at[s], item = to->itemsize;
  const lf_staging *staging = &from->staging[from->group[s]];
  memcpy(to->tokens + at * item, staging->tokens + first * item, length * item);
  if (staging->mask != NULL) {
    memcpy(to->mask + at, staging->mask + first, length);
  } else {
    memset(to->mask + at, 1, length);
  }
  to->mask[at] = 0; /* nothing in the row leads to the first token */
  for (uint64_t i = 0; i < length; i++) {
    to->position[at + i] = (int32_t)i;
    to->segment[at + i] = number;
  }
}

static void clear(lf_laid *to, uint64_t at, uint64_t length) {
  memset(to->tokens + at * to->itemsize, 0, length * to->itemsize);
  memset(to->mask + at, 0, length);
  memset(to->position + at, 0, length * sizeof *to->position);
  memset(to->segment + at, 0, length * sizeof *to->segment);
}

static void cut(lf_laid *to, uint64_t end) {
  uint32_t length = (uint32_t)end - (uint32_t)to->cu_seqlens[to->cuts - 1];
  to->cu_seqlens[to->cuts++] = (int32_t)end;
  if (length > to->longest) to->longest = length;
}

void lf_lay(lf_laid *to, const lf_segments *from) {
  uint64_t s = 0;
  to->cu_seqlens[0] = 0;
  to->cuts = 1;
  to->longest = 0;
  for (uint32_t row = 0; row < to->rows; row++) {
    uint64_t at = row * to->capacity, end = at + to->capacity;
    for (int32_t number = 1; s < from->count && from->row[s] == row; s++, number++) {
      lay_segment(to, from, s, at, number);
      at += (uint64_t)from->length[s];
      cut(to, at);
    }
    to->used[row] = (int64_t)(at - row * to->capacity);
    if (at == end) continue;
    clear(to, at, end - at);
    cut(to, end);
  }
}
