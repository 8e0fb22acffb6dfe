/* Threads that gather batches in the order they were submitted. One thread submits and waits. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gather.h"

/* Spinning is for the gap between two batches of a fast caller, about 10 us; waking a sleeper costs that much. */
enum { JOBS = 64, MIN_ENTRIES = 8, WAIT_SPINS = 100, IDLE_SPINS = 100, QUICK_NS = 100000 };

typedef struct {
  struct lf_engine *engine;
  pthread_t thread;
  lf_gatherer gatherer;
  int ring_error, register_error, files_error, polling_error;
} worker; /* the caller's own has no thread */

struct lf_engine {
  pthread_mutex_t lock;
  pthread_cond_t work, finished;
  lf_job jobs[JOBS];
  _Atomic int64_t done[JOBS]; /* ticket whose result is in the place */
  _Atomic int64_t submitted;  /* tickets below it may be claimed */
  _Atomic int64_t claimed;    /* written under the lock */
  _Atomic int spinner;        /* one idle thread at most keeps a core busy */
  uint32_t waiters, ready;    /* under the lock */
  _Atomic int stop;
  lf_options options;
  uint32_t threads;
  int may_help;
  _Atomic int quick;          /* the last batch took little time and no device */
  lf_files files;
  lf_codings codings;
  lf_cache cache;
  lf_tally tally;
  worker caller; /* reads what no thread has begun when its turn comes */
  worker workers[];
};

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* The largest ring that RLIMIT_MEMLOCK allows. */
static int open_largest(lf_ring *ring, uint32_t entries, int one_thread) {
  int rc = -ENOMEM;
  for (uint32_t n = entries; n >= MIN_ENTRIES && rc == -ENOMEM; n /= 2) rc = lf_ring_open(ring, n, one_thread);
  return rc;
}

/* The limit may allow a ring, but not registered buffers, or only the pool. */
static int register_buffers(lf_gatherer *g, const lf_options *options) {
  struct iovec buffers[LF_BUFFERS];
  uint32_t count = 0;
  if (options->pool_bytes > 0) {
    buffers[count++] = (struct iovec){(void *)(uintptr_t)options->pool, options->pool_bytes};
  }
  if (g->bounce.memory != NULL) buffers[count++] = (struct iovec){g->bounce.memory, g->bounce.bytes};
  int rc = count > 0 ? lf_ring_register(&g->ring, buffers, count) : 0;
  if (rc < 0 && count > 1) lf_ring_register(&g->ring, buffers, 1);
  return rc;
}

static int open_polled(worker *w, uint32_t entries) {
  const struct lf_engine *e = w->engine;
  if (e->options.polling == LF_POLL_NONE || e->files.count == 0) return 0;
  int fd = e->files.fds[e->files.direct ? e->files.count : 0];
  int rc = lf_ring_open_polled(&w->gatherer.ring, entries, e->options.polling, fd);
  w->polling_error = -rc;
  return rc == 0;
}

static void open_ring(worker *w, int one_thread) {
  struct lf_engine *e = w->engine;
  lf_gatherer *g = &w->gatherer;
  uint32_t entries = e->options.entries > MIN_ENTRIES ? e->options.entries : MIN_ENTRIES;
  int rc = open_polled(w, entries) ? 0 : open_largest(&g->ring, entries, one_thread);
  /* The kernel returns the locked memory of closed rings some milliseconds late (seen on 6.18). */
  for (int i = 0; i < 4 && rc == -ENOMEM; i++) {
    nanosleep(&(struct timespec){0, 10000000}, NULL);
    rc = open_largest(&g->ring, entries, one_thread);
  }
  w->ring_error = -rc;
  if (rc < 0) return;
  g->has_ring = 1;
  if (g->ring.entries < g->depth) g->depth = g->ring.entries;
  w->register_error = -register_buffers(g, &e->options);
  if (e->files.count > 0) {
    uint32_t count = e->files.direct ? 2 * e->files.count : e->files.count;
    w->files_error = -lf_ring_register_files(&g->ring, e->files.fds, count);
  }
}

static int64_t available(struct lf_engine *e) {
  return atomic_load_explicit(&e->submitted, memory_order_acquire) -
         atomic_load_explicit(&e->claimed, memory_order_relaxed);
}

static void spin_for_work(struct lf_engine *e) {
  if (atomic_exchange_explicit(&e->spinner, 1, memory_order_acquire)) return;
  for (int i = 0; i < IDLE_SPINS && available(e) == 0; i++) pause_cpu();
  atomic_store_explicit(&e->spinner, 0, memory_order_release);
}

/* The next ticket, or -1 when the engine stops. */
static int64_t claim(struct lf_engine *e) {
  spin_for_work(e);
  pthread_mutex_lock(&e->lock);
  while (available(e) == 0 && !atomic_load_explicit(&e->stop, memory_order_relaxed)) {
    e->waiters++;
    pthread_cond_wait(&e->work, &e->lock);
    e->waiters--;
  }
  int stop = atomic_load_explicit(&e->stop, memory_order_relaxed);
  int64_t ticket = stop ? -1 : atomic_fetch_add_explicit(&e->claimed, 1, memory_order_relaxed);
  pthread_mutex_unlock(&e->lock);
  return ticket;
}

static void finish(struct lf_engine *e, int64_t ticket) {
  pthread_mutex_lock(&e->lock);
  atomic_store_explicit(&e->done[ticket % JOBS], ticket, memory_order_release);
  pthread_cond_signal(&e->finished);
  pthread_mutex_unlock(&e->lock);
}

static void gather(struct lf_engine *e, lf_gatherer *g, int64_t ticket) {
  lf_gather(g, &e->jobs[ticket % JOBS]);
  int device = g->done.ring_reads + g->done.pread_reads > 0;
  atomic_store_explicit(&e->quick, !device && g->done.busy_ns < QUICK_NS, memory_order_relaxed);
}

static void *run(void *arg) {
  worker *w = arg;
  struct lf_engine *e = w->engine;
  if (e->options.want_ring) open_ring(w, 1); /* here: SINGLE_ISSUER binds a ring to its thread */
  pthread_mutex_lock(&e->lock);
  e->ready++;
  pthread_cond_broadcast(&e->finished);
  pthread_mutex_unlock(&e->lock);
  for (int64_t ticket; (ticket = claim(e)) >= 0;) {
    gather(e, &w->gatherer, ticket);
    finish(e, ticket);
  }
  return NULL;
}

static void report(struct lf_engine *e, lf_info *info) {
  info->threads = e->threads;
  for (uint32_t i = 0; i < e->threads; i++) {
    const worker *w = &e->workers[i];
    info->ring_threads += (uint32_t)w->gatherer.has_ring;
    info->registered += w->gatherer.has_ring && w->register_error == 0;
    info->registered_files += (uint32_t)w->gatherer.ring.fixed_files;
    if (w->gatherer.has_ring) {
      info->entries = w->gatherer.depth;
      info->setup_flags = w->gatherer.ring.flags;
    }
    info->polling += e->options.polling != LF_POLL_NONE && w->gatherer.has_ring && w->polling_error == 0;
    if (w->polling_error) info->polling_error = w->polling_error;
    if (w->ring_error) info->ring_error = w->ring_error;
    if (w->register_error) info->register_error = w->register_error;
    if (w->files_error) info->files_error = w->files_error;
  }
}

static void prepare(struct lf_engine *e, worker *w) {
  w->engine = e;
  w->gatherer.tally = &e->tally;
  w->gatherer.ring.fd = -1;
  w->gatherer.files = &e->files;
  w->gatherer.codings = &e->codings;
  w->gatherer.cache = &e->cache;
  w->gatherer.depth = e->options.entries;
  if (e->files.direct) {
    uint32_t places = lf_bounce_open(&w->gatherer.bounce, e->options.entries, e->options.span);
    if (places > 0 && places < w->gatherer.depth) w->gatherer.depth = places;
  }
}

static int start(struct lf_engine *e, uint32_t threads) {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGBUS); /* of a copy from a file that shrinks */
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to Python's main thread */
  int rc = 0;
  while (e->threads < threads && rc == 0) {
    worker *w = &e->workers[e->threads];
    prepare(e, w);
    rc = pthread_create(&w->thread, NULL, run, w);
    e->threads += rc == 0;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return rc;
}

lf_engine *lf_engine_new(const lf_options *options, lf_info *info) {
  const uint32_t threads = options->threads;
  memset(info, 0, sizeof *info);
  struct lf_engine *e = calloc(1, sizeof *e + threads * sizeof(worker));
  if (e == NULL || lf_files_open(&e->files, options) < 0 || lf_codings_open(&e->codings, options) < 0) {
    info->start_error = ENOMEM;
    if (e != NULL) lf_files_close(&e->files);
    free(e);
    return NULL;
  }
  lf_cache_open(&e->cache, options->cache_bytes);
  if (options->mapped && options->files > 0) info->map_error = -lf_files_map(&e->files);
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->work, NULL);
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&e->finished, &clock);
  pthread_condattr_destroy(&clock);
  for (int i = 0; i < JOBS; i++) atomic_init(&e->done[i], -1);
  e->options = *options;
  prepare(e, &e->caller);
  info->start_error = start(e, threads);
  pthread_mutex_lock(&e->lock);
  while (e->ready < e->threads) pthread_cond_wait(&e->finished, &e->lock);
  pthread_mutex_unlock(&e->lock);
  if (info->start_error && e->threads == 0) {
    lf_engine_free(e);
    return NULL;
  }
  report(e, info);
  if (info->ring_threads > 0) open_ring(&e->caller, 0);
  e->may_help = e->caller.gatherer.has_ring || info->ring_threads == 0;
  return e;
}

int64_t lf_next_ticket(lf_engine *e) { return atomic_load_explicit(&e->submitted, memory_order_relaxed); }

int64_t lf_submit(lf_engine *e, const lf_window *window, uint32_t batch, uint64_t slot) {
  int64_t ticket = lf_next_ticket(e);
  e->jobs[ticket % JOBS] = (lf_job){.window = window, .batch = batch, .slot = (uint8_t *)(uintptr_t)slot};
  pthread_mutex_lock(&e->lock);
  atomic_store_explicit(&e->submitted, ticket + 1, memory_order_release);
  if (e->waiters > 0) pthread_cond_signal(&e->work);
  pthread_mutex_unlock(&e->lock);
  return ticket;
}

static int is_done(lf_engine *e, int64_t ticket) {
  return atomic_load_explicit(&e->done[ticket % JOBS], memory_order_acquire) == ticket;
}

/* Instead of sleeping, the caller reads what no thread has begun: the batch it waits for (a woken thread may not
   run for milliseconds on a busy machine), or a later one, but that only while batches are quick to read. */
static int help(lf_engine *e, int64_t ticket) {
  pthread_mutex_lock(&e->lock);
  int64_t next = atomic_load_explicit(&e->claimed, memory_order_relaxed);
  int take = next == ticket || (atomic_load_explicit(&e->quick, memory_order_relaxed) && available(e) > 0);
  if (take) atomic_store_explicit(&e->claimed, next + 1, memory_order_relaxed);
  pthread_mutex_unlock(&e->lock);
  if (!take) return 0;
  gather(e, &e->caller.gatherer, next);
  atomic_store_explicit(&e->done[next % JOBS], next, memory_order_release);
  return 1;
}

uint32_t lf_wait(lf_engine *e, int64_t ticket, uint32_t timeout_ms, lf_fault *fault) {
  if (ticket >= lf_next_ticket(e)) return LF_OK;
  while (e->may_help && !is_done(e, ticket) && help(e, ticket)) continue;
  for (int i = 0; i < WAIT_SPINS && !is_done(e, ticket); i++) pause_cpu();
  if (!is_done(e, ticket)) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)timeout_ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    int rc = 0;
    pthread_mutex_lock(&e->lock);
    while (!is_done(e, ticket) && rc == 0) rc = pthread_cond_timedwait(&e->finished, &e->lock, &until);
    pthread_mutex_unlock(&e->lock);
    if (!is_done(e, ticket)) return LF_PENDING;
  }
  *fault = e->jobs[ticket % JOBS].fault;
  return fault->kind;
}

void lf_engine_counters(lf_engine *e, lf_counters *out) {
  const memory_order relaxed = memory_order_relaxed;
  out->mapped_reads = atomic_load_explicit(&e->tally.mapped_reads, relaxed);
  out->cached_reads = atomic_load_explicit(&e->tally.cached_reads, relaxed);
  out->direct_reads = atomic_load_explicit(&e->tally.direct_reads, relaxed);
  out->ring_reads = atomic_load_explicit(&e->tally.ring_reads, relaxed);
  out->pread_reads = atomic_load_explicit(&e->tally.pread_reads, relaxed);
  out->bytes = atomic_load_explicit(&e->tally.bytes, relaxed);
  out->busy_ns = atomic_load_explicit(&e->tally.busy_ns, relaxed);
  out->hash_ns = atomic_load_explicit(&e->tally.hash_ns, relaxed);
  out->decoded_blocks = atomic_load_explicit(&e->tally.decoded_blocks, relaxed);
  out->decode_ns = atomic_load_explicit(&e->tally.decode_ns, relaxed);
}

static void clean(worker *w) {
  if (w->gatherer.ring.fd >= 0) lf_ring_close(&w->gatherer.ring);
  lf_bounce_close(&w->gatherer.bounce);
  lf_gatherer_free(&w->gatherer);
}

/* Waits for the batches being read; those not begun are dropped. */
void lf_engine_free(lf_engine *e) {
  pthread_mutex_lock(&e->lock);
  atomic_store_explicit(&e->stop, 1, memory_order_relaxed);
  pthread_cond_broadcast(&e->work);
  pthread_mutex_unlock(&e->lock);
  for (uint32_t i = 0; i < e->threads; i++) {
    pthread_join(e->workers[i].thread, NULL);
    clean(&e->workers[i]);
  }
  clean(&e->caller);
  pthread_mutex_destroy(&e->lock);
  pthread_cond_destroy(&e->work);
  pthread_cond_destroy(&e->finished);
  lf_files_close(&e->files);
  lf_cache_close(&e->cache);
  lf_codings_close(&e->codings);
  free(e);
}

/* For a forked child: the threads are not here and a lock may be held for ever. Only descriptors are ours
   to close; the memory is left to the end of the process. */
void lf_engine_abandon(lf_engine *e) {
  if (e->caller.gatherer.ring.fd >= 0) close(e->caller.gatherer.ring.fd);
  for (uint32_t i = 0; i < e->threads; i++) {
    if (e->workers[i].gatherer.ring.fd >= 0) close(e->workers[i].gatherer.ring.fd);
  }
}
