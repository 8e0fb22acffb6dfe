/* Decoded blocks, shared by the threads of an engine: each is read and decoded once while it is kept. */

#ifndef LF_BLOCKS_H
#define LF_BLOCKS_H

#include <pthread.h>
#include <stdint.h>

#include "lf_native.h"

enum { LF_CHAINS = 1024 };

typedef enum { LF_LOADING, LF_READY, LF_FAILED } lf_state;

typedef struct lf_cached {
  uint64_t offset;
  int32_t fd;
  lf_state state;
  uint32_t pins;             /* rows that use it now */
  uint8_t *raw;
  uint64_t bytes, room;
  uint8_t *stored;           /* only while it is loaded */
  lf_fault fault;            /* of a failed one; its row means nothing */
  struct lf_cached *next;    /* in its chain */
  struct lf_cached *older, *newer; /* among those that nobody uses */
} lf_cached;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t loaded;
  lf_cached *chains[LF_CHAINS];
  lf_cached *oldest, *newest;
  uint64_t bytes, limit;
} lf_cache;

void lf_cache_open(lf_cache *cache, uint64_t limit);
void lf_cache_close(lf_cache *cache);

/* The entry of a block, pinned; NULL without memory. With `*mine` the caller has to load it. */
lf_cached *lf_cache_take(lf_cache *cache, const lf_block *block, int *mine);
/* Tells the others that it is loaded, or that it failed; then the next take begins anew. */
void lf_cache_loaded(lf_cache *cache, lf_cached *entry, const lf_fault *fault);
/* Blocks until somebody has loaded it. */
void lf_cache_wait(lf_cache *cache, lf_cached *entry);
void lf_cache_give(lf_cache *cache, lf_cached *entry);

#endif
