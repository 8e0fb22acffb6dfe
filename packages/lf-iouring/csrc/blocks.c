#include "blocks.h"

#include <stdlib.h>
#include <string.h>

static lf_cached **chain_of(lf_cache *cache, int32_t fd, uint64_t offset) {
  uint64_t key = (offset ^ ((uint64_t)(uint32_t)fd << 40)) * 0x9E3779B97F4A7C15;
  return &cache->chains[key >> 32 & (LF_CHAINS - 1)];
}

static void unlist(lf_cache *cache, lf_cached *entry) {
  *(entry->older ? &entry->older->newer : &cache->oldest) = entry->newer;
  *(entry->newer ? &entry->newer->older : &cache->newest) = entry->older;
  entry->older = entry->newer = NULL;
}

static void enlist(lf_cache *cache, lf_cached *entry) {
  entry->older = cache->newest;
  *(cache->newest ? &cache->newest->newer : &cache->oldest) = entry;
  cache->newest = entry;
}

static void unchain(lf_cache *cache, lf_cached *entry) {
  lf_cached **at = chain_of(cache, entry->fd, entry->offset);
  while (*at != NULL && *at != entry) at = &(*at)->next;
  if (*at == NULL) return; /* a failed one has left before */
  *at = entry->next;
  cache->bytes -= entry->room;
}

static void drop(lf_cached *entry) {
  free(entry->raw);
  free(entry->stored);
  free(entry);
}

/* Memory of the block unused for longest, when there is no room for `bytes` more; NULL when there is. */
static lf_cached *evict(lf_cache *cache, uint64_t bytes) {
  lf_cached *entry = cache->oldest;
  if (entry == NULL || cache->bytes + bytes <= cache->limit) return NULL;
  unlist(cache, entry);
  unchain(cache, entry);
  return entry;
}

static lf_cached *fresh(lf_cache *cache, uint64_t bytes) {
  lf_cached *entry = NULL, *old;
  while ((old = evict(cache, bytes)) != NULL) {
    int fits = entry == NULL && old->room >= bytes && old->room / 2 <= bytes;
    if (fits) {
      entry = old; /* its pages are mapped already */
      bytes = entry->room;
    } else {
      drop(old);
    }
  }
  if (entry == NULL) {
    entry = calloc(1, sizeof *entry);
    if (entry == NULL) return NULL;
    entry->room = bytes;
    entry->raw = malloc(bytes > 0 ? bytes : 1);
  }
  if (entry->raw == NULL) {
    drop(entry);
    return NULL;
  }
  uint8_t *raw = entry->raw;
  *entry = (lf_cached){.raw = raw, .room = entry->room};
  return entry;
}

void lf_cache_open(lf_cache *cache, uint64_t limit) {
  memset(cache, 0, sizeof *cache);
  pthread_mutex_init(&cache->lock, NULL);
  pthread_cond_init(&cache->loaded, NULL);
  cache->limit = limit;
}

void lf_cache_close(lf_cache *cache) {
  for (int i = 0; i < LF_CHAINS; i++) {
    for (lf_cached *entry = cache->chains[i], *next; entry != NULL; entry = next) {
      next = entry->next;
      drop(entry);
    }
  }
  pthread_mutex_destroy(&cache->lock);
  pthread_cond_destroy(&cache->loaded);
}

/* By size too: an index may call the same bytes two blocks, and a row is checked against the size of its own. */
static int is_of(const lf_cached *entry, const lf_block *block) {
  return entry->fd == block->fd && entry->offset == block->offset && entry->bytes == block->raw;
}

lf_cached *lf_cache_take(lf_cache *cache, const lf_block *block, int *mine) {
  pthread_mutex_lock(&cache->lock);
  lf_cached **chain = chain_of(cache, block->fd, block->offset), *entry = *chain;
  while (entry != NULL && !is_of(entry, block)) entry = entry->next;
  *mine = entry == NULL;
  if (entry == NULL && (entry = fresh(cache, block->raw)) != NULL) {
    entry->fd = block->fd;
    entry->offset = block->offset;
    entry->bytes = block->raw;
    entry->next = *chain;
    *chain = entry;
    cache->bytes += entry->room;
  } else if (entry != NULL && entry->pins == 0) {
    unlist(cache, entry);
  }
  if (entry != NULL) entry->pins++;
  pthread_mutex_unlock(&cache->lock);
  return entry;
}

void lf_cache_loaded(lf_cache *cache, lf_cached *entry, const lf_fault *fault) {
  pthread_mutex_lock(&cache->lock);
  free(entry->stored);
  entry->stored = NULL;
  entry->fault = *fault;
  entry->state = fault->kind == LF_OK ? LF_READY : LF_FAILED;
  if (entry->state == LF_FAILED) unchain(cache, entry);
  pthread_cond_broadcast(&cache->loaded);
  pthread_mutex_unlock(&cache->lock);
}

void lf_cache_wait(lf_cache *cache, lf_cached *entry) {
  pthread_mutex_lock(&cache->lock);
  while (entry->state == LF_LOADING) pthread_cond_wait(&cache->loaded, &cache->lock);
  pthread_mutex_unlock(&cache->lock);
}

void lf_cache_give(lf_cache *cache, lf_cached *entry) {
  pthread_mutex_lock(&cache->lock);
  if (--entry->pins == 0) {
    if (entry->state == LF_FAILED) {
      drop(entry);
    } else {
      enlist(cache, entry);
      for (lf_cached *old; (old = evict(cache, 0)) != NULL;) drop(old);
    }
  }
  pthread_mutex_unlock(&cache->lock);
}
