#include "gather.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pieces.h"

struct lf_row {
  uint32_t waiting;  /* reads outstanding, of a raw row */
  int mine;          /* this thread has to load the block */
  lf_cached *block;  /* of a coded row, held until the row is finished */
};

uint64_t lf_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void count(_Atomic uint64_t *counter, uint64_t by) {
  atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* The fault of the lowest row wins, so that a report does not depend on timing. */
void lf_fail(lf_job *job, uint32_t kind, uint32_t row, uint32_t field, int error, uint64_t expected,
             uint64_t found) {
  if (job->fault.kind != LF_OK && job->fault.row <= row) return;
  job->fault = (lf_fault){kind, row, field, error, expected, found};
}

static size_t at_row(const lf_job *job, uint32_t row) {
  return (size_t)job->batch * job->window->rows + row;
}

static size_t at_field(const lf_job *job, uint32_t row, uint32_t field) {
  return (size_t)field * job->window->batches * job->window->rows + at_row(job, row);
}

static uint64_t used_of(const lf_job *job) { return job->window->used[job->batch]; }

static uint64_t room_of(const lf_job *job, uint32_t field) {
  return job->window->room[(size_t)field * job->window->batches + job->batch];
}

static uint8_t **stored_at(const lf_gatherer *g, const lf_job *job, uint32_t row) {
  return g->stored + (size_t)row * job->window->fields;
}

static int is_coded(const lf_job *job, uint32_t row) { return job->window->block[at_row(job, row)] >= 0; }

/* Stored bytes that cannot be read straight into the slot. */
static int needs_scratch(const lf_job *job, uint32_t row, uint32_t field) {
  const lf_window *w = job->window;
  return w->place[at_field(job, row, field)] == LF_NOWHERE || (w->kind[field] & LF_BITS) != 0;
}

static int grow(void **memory, size_t *room, size_t bytes) {
  if (bytes <= *room) return 1;
  free(*memory);
  *memory = malloc(bytes);
  *room = *memory ? bytes : 0;
  return *memory != NULL;
}

static int reserve(lf_gatherer *g, const lf_job *job) {
  const lf_window *w = job->window;
  size_t values = (size_t)w->rows * w->fields, scratch = 0;
  if (w->rows > g->rows_room) {
    free(g->rows);
    g->rows = malloc((size_t)w->rows * sizeof *g->rows);
    g->rows_room = g->rows ? w->rows : 0;
  }
  if (values > g->values_room) {
    free(g->pieces);
    free(g->stored);
    g->pieces = malloc(values * sizeof *g->pieces);
    g->stored = malloc(values * sizeof *g->stored);
    g->values_room = g->pieces && g->stored ? values : 0;
  }
  for (uint32_t row = 0; row < w->rows; row++) {
    if (w->fd[at_row(job, row)] < 0 || is_coded(job, row)) continue;
    for (uint32_t f = 0; f < w->fields; f++) {
      if (needs_scratch(job, row, f)) scratch += w->nbytes[at_field(job, row, f)];
    }
  }
  return w->rows <= g->rows_room && values <= g->values_room &&
         grow((void **)&g->scratch, &g->scratch_room, scratch);
}

static int lies_in(uint64_t start, uint64_t bytes, uint64_t whole) {
  return start <= whole && bytes <= whole - start;
}

/* An index that lies must not make us write outside the row, nor read outside its block. */
static int value_fits(const lf_job *job, uint32_t row, uint32_t field) {
  const lf_window *w = job->window;
  size_t at = at_field(job, row, field);
  uint64_t bytes = w->nbytes[at], items = w->items[at], place = w->place[at];
  int32_t block = w->block[at_row(job, row)];
  if (block >= 0 && !lies_in(w->offset[at], bytes, w->blocks[block].raw)) return 0;
  uint64_t wanted = w->kind[field] & LF_BITS ? items : bytes;
  if (w->kind[field] & LF_BITS && bytes != (items + 7) / 8) return 0;
  if (place == LF_NOWHERE) return 1;
  uint64_t room = w->kind[field] & LF_JOIN ? wanted : room_of(job, field);
  return wanted <= room && lies_in(place, room, used_of(job));
}

static int row_fits(lf_job *job, uint32_t row) {
  const lf_window *w = job->window;
  for (uint32_t f = 0; f < w->fields; f++) {
    if (value_fits(job, row, f)) continue;
    lf_fail(job, LF_EXTENT, row, f, 0, w->kind[f] & LF_JOIN ? used_of(job) : room_of(job, f),
         w->nbytes[at_field(job, row, f)]);
    return 0;
  }
  return 1;
}

static void clear_row(const lf_job *job, uint32_t row) {
  const lf_window *w = job->window;
  for (uint32_t f = 0; f < w->fields; f++) {
    uint64_t place = w->place[at_field(job, row, f)], room = room_of(job, f);
    if (w->kind[f] & LF_JOIN || place == LF_NOWHERE) continue;
    if (lies_in(place, room, used_of(job))) memset(job->slot + place, 0, room);
  }
}

/* From stored bytes to the value in the slot. */
static void put_value(const lf_job *job, uint32_t row, uint32_t field, const uint8_t *stored) {
  const lf_window *w = job->window;
  size_t at = at_field(job, row, field);
  if (w->place[at] == LF_NOWHERE) return;
  uint8_t *dst = job->slot + w->place[at];
  uint64_t filled = w->nbytes[at];
  if (w->kind[field] & LF_BITS) {
    filled = w->items[at];
    lf_unpack_bits(dst, stored, filled);
  } else if (stored != dst) {
    memcpy(dst, stored, filled);
  }
  if (!(w->kind[field] & LF_JOIN)) memset(dst + filled, 0, room_of(job, field) - filled);
}

/* All bytes of a row are there: check the hash chained over its fields, then lay them out. */
static void finish_row(lf_gatherer *g, lf_job *job, uint32_t row) {
  const lf_window *w = job->window;
  uint8_t *const *stored = stored_at(g, job, row);
  if (w->verify) {
    uint64_t began = g->hashed == 0 ? lf_now_ns() : 0, hash = 0;
    for (uint32_t f = 0; f < w->fields; f++) {
      hash = lf_xxh3_64(stored[f], w->nbytes[at_field(job, row, f)], hash);
    }
    if (g->hashed++ == 0) g->hash_ns = lf_now_ns() - began; /* reading the clock for each costs as much */
    uint32_t expected = w->hash[at_row(job, row)];
    if ((uint32_t)hash != expected) lf_fail(job, LF_HASH, row, 0, 0, expected, (uint32_t)hash);
  }
  for (uint32_t f = 0; f < w->fields; f++) put_value(job, row, f, stored[f]);
}

/* The payload of a block has landed: check it, decode it, and let others have it. */
static void finish_block(lf_gatherer *g, lf_job *job, uint32_t row) {
  const lf_window *w = job->window;
  const lf_block *block = &w->blocks[w->block[at_row(job, row)]];
  lf_cached *entry = g->rows[row].block;
  lf_fault fault = {.kind = LF_OK};
  uint64_t began = lf_now_ns();
  uint64_t hash = w->verify ? lf_xxh3_64(entry->stored, block->stored, 0) : block->hash;
  if (hash != block->hash) {
    fault = (lf_fault){.kind = LF_BLOCK_HASH, .expected = block->hash, .found = hash};
  } else if (!lf_decode(&g->decoder, g->codings, block, entry->stored, entry->raw)) {
    fault = (lf_fault){.kind = LF_DECODE, .expected = block->raw, .found = block->stored};
  }
  g->done.decode_ns += lf_now_ns() - began;
  g->done.decoded_blocks++;
  g->rows[row].mine = 0;
  lf_cache_loaded(g->cache, entry, &fault);
}

static void block_failed(lf_gatherer *g, uint32_t row, uint32_t kind, int error, uint64_t expected,
                         uint64_t found) {
  lf_fault fault = {.kind = kind, .error = error, .expected = expected, .found = found};
  g->rows[row].mine = 0;
  lf_cache_loaded(g->cache, g->rows[row].block, &fault);
}

/* Waits for the block, then as any row. */
static void finish_coded(lf_gatherer *g, lf_job *job, uint32_t row) {
  const lf_window *w = job->window;
  lf_cached *entry = g->rows[row].block;
  if (entry == NULL) return;
  if (g->rows[row].mine) block_failed(g, row, LF_ERRNO, EIO, w->blocks[w->block[at_row(job, row)]].stored, 0);
  lf_cache_wait(g->cache, entry);
  if (entry->state == LF_FAILED) {
    lf_fail(job, entry->fault.kind, row, 0, entry->fault.error, entry->fault.expected, entry->fault.found);
  } else {
    for (uint32_t f = 0; f < w->fields; f++) {
      stored_at(g, job, row)[f] = entry->raw + w->offset[at_field(job, row, f)];
    }
    finish_row(g, job, row);
  }
  lf_cache_give(g->cache, entry);
}

void lf_piece_failed(lf_gatherer *g, lf_job *job, const lf_piece *p, int error) {
  uint32_t found = p->done > p->head ? p->done - p->head : 0, kind = error ? LF_ERRNO : LF_SHORT;
  lf_bounce_give(&g->bounce, p->bounce);
  if (p->whole_block) {
    block_failed(g, p->row, kind, error, p->bytes, found);
  } else {
    lf_fail(job, kind, p->row, p->field, error, p->bytes, found);
  }
}

void lf_piece_done(lf_gatherer *g, lf_job *job, const lf_piece *p) {
  if (p->bounce >= 0) memcpy(p->dst, p->at + p->head, p->bytes);
  lf_bounce_give(&g->bounce, p->bounce);
  g->done.direct_reads += (uint32_t)p->direct;
  if (p->whole_block) {
    finish_block(g, job, p->row);
  } else if (--g->rows[p->row].waiting == 0) {
    finish_row(g, job, p->row);
  }
}

static uint32_t start_block(lf_gatherer *g, lf_job *job, uint32_t row, uint32_t pieces) {
  const lf_window *w = job->window;
  const lf_block *block = &w->blocks[w->block[at_row(job, row)]];
  lf_row *r = &g->rows[row];
  r->block = lf_cache_take(g->cache, block, &r->mine);
  if (r->block == NULL) lf_fail(job, LF_ERRNO, row, 0, ENOMEM, block->raw, 0);
  if (r->block == NULL || !r->mine) return pieces;
  r->block->stored = malloc(block->stored > 0 ? block->stored : 1);
  if (r->block->stored == NULL) {
    block_failed(g, row, LF_ERRNO, ENOMEM, block->stored, 0);
    return pieces;
  }
  lf_piece p = {.fd = block->fd, .row = row, .bytes = block->stored, .offset = block->offset,
                .dst = r->block->stored, .whole_block = 1};
  return lf_start_read(g, job, p, pieces);
}

static uint32_t start_raw(lf_gatherer *g, lf_job *job, uint32_t row, uint32_t pieces, uint8_t **scratch) {
  const lf_window *w = job->window;
  uint8_t **stored = stored_at(g, job, row);
  g->rows[row].waiting = w->fields + 1; /* held until every field was looked at */
  for (uint32_t f = 0; f < w->fields; f++) {
    size_t at = at_field(job, row, f);
    stored[f] = job->slot + w->place[at];
    if (needs_scratch(job, row, f)) {
      stored[f] = *scratch;
      *scratch += w->nbytes[at];
    }
    lf_piece p = {.fd = w->fd[at_row(job, row)], .row = row, .field = f, .bytes = w->nbytes[at],
                  .offset = w->offset[at], .dst = stored[f]};
    pieces = lf_start_read(g, job, p, pieces);
  }
  if (--g->rows[row].waiting == 0) finish_row(g, job, row);
  return pieces;
}

static uint32_t start_row(lf_gatherer *g, lf_job *job, uint32_t row, uint32_t pieces, uint8_t **scratch) {
  g->rows[row] = (lf_row){0};
  if (job->window->fd[at_row(job, row)] < 0) {
    clear_row(job, row);
    return pieces;
  }
  if (!row_fits(job, row)) return pieces;
  return is_coded(job, row) ? start_block(g, job, row, pieces) : start_raw(g, job, row, pieces, scratch);
}

static void add_to_tally(lf_gatherer *g) {
  count(&g->tally->mapped_reads, g->done.mapped_reads);
  count(&g->tally->cached_reads, g->done.cached_reads);
  count(&g->tally->direct_reads, g->done.direct_reads);
  count(&g->tally->ring_reads, g->done.ring_reads);
  count(&g->tally->pread_reads, g->done.pread_reads);
  count(&g->tally->bytes, g->done.bytes);
  count(&g->tally->busy_ns, g->done.busy_ns);
  count(&g->tally->hash_ns, g->done.hash_ns);
  count(&g->tally->decoded_blocks, g->done.decoded_blocks);
  count(&g->tally->decode_ns, g->done.decode_ns);
}

void lf_gather(lf_gatherer *g, lf_job *job) {
  const lf_window *w = job->window;
  uint64_t began = lf_now_ns();
  uint32_t pieces = 0;
  memset(&g->done, 0, sizeof g->done);
  g->mapped = g->files->maps != NULL && lf_bus_guarded();
  g->hashed = 0;
  g->hash_ns = 0;
  if (!reserve(g, job)) {
    lf_fail(job, LF_ERRNO, 0, 0, ENOMEM, 0, 0);
    return;
  }
  uint8_t *scratch = g->scratch;
  for (uint32_t row = 0; row < w->rows; row++) pieces = start_row(g, job, row, pieces, &scratch);
  if (pieces > 0) lf_read_by_ring(g, job, pieces);
  /* Others may wait for blocks of ours, so ours are loaded before we wait for theirs. */
  for (uint32_t row = 0; row < w->rows; row++) finish_coded(g, job, row);
  g->done.busy_ns = lf_now_ns() - began;
  g->done.hash_ns = g->hash_ns * g->hashed; /* an estimate, so it may exceed the whole */
  if (g->done.hash_ns > g->done.busy_ns) g->done.hash_ns = g->done.busy_ns;
  add_to_tally(g);
}

void lf_gatherer_free(lf_gatherer *g) {
  lf_decoder_close(&g->decoder);
  free(g->rows);
  free(g->pieces);
  free(g->stored);
  free(g->scratch);
}
