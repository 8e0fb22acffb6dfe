#include "lf_runtime.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- floating-point state: round to nearest even, no flush to zero, in every thread that computes */

#if defined(__x86_64__)
typedef uint32_t fp_state;
static fp_state fp_enter(void) {
    fp_state old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
    return old;
}
static void fp_leave(fp_state old) { __builtin_ia32_ldmxcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t fp_state;
static fp_state fp_enter(void) {
    fp_state old, clean = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(clean));
    return old;
}
static void fp_leave(fp_state old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#elif defined(__riscv)
typedef uint64_t fp_state;
static fp_state fp_enter(void) {
    fp_state old, clean = 0;
    __asm__ volatile("frrm %0" : "=r"(old));
    __asm__ volatile("fsrm %0" : : "r"(clean));
    return old;
}
static void fp_leave(fp_state old) { __asm__ volatile("fsrm %0" : : "r"(old)); }
#elif defined(__loongarch__)
typedef uint32_t fp_state;
static fp_state fp_enter(void) {
    fp_state old, clean = 0;
    __asm__ volatile("movfcsr2gr %0, $fcsr0" : "=r"(old));
    __asm__ volatile("movgr2fcsr $fcsr0, %0" : : "r"(clean));
    return old;
}
static void fp_leave(fp_state old) { __asm__ volatile("movgr2fcsr $fcsr0, %0" : : "r"(old)); }
#else
#error "no floating-point state known for this machine"
#endif

/* ---- threads
 *
 * A job is cut into chunks, several for each thread, which whoever is free claims, so a thread that the system holds up
 * holds up no more than its chunk. `state` says which job it is (high 32 bits), how many chunks it has (16) and which is
 * the next (16). Who has claimed a chunk may read the job's fields: they change only after all chunks are done. */

enum { SPINS = 2000, CHUNKS = 4 };

struct lf_team {
    int32_t threads; /* with the calling one */
    int64_t scratch_bytes;
    uint8_t *scratch;
    pthread_t *workers;
    int32_t started;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    lf_step_fn fn;
    lf_ctx *x;
    int64_t total, grain;
    _Atomic uint64_t state;
    _Atomic int32_t pending; /* chunks that are not done */
    _Atomic int32_t stop;
};

typedef struct {
    lf_team *pool;
    int32_t rank;
} worker_arg;

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint32_t chunks_of(uint64_t state) { return (uint32_t)(state >> 16 & 0xffff); }
static uint32_t next_of(uint64_t state) { return (uint32_t)(state & 0xffff); }
static int idle(uint64_t state) { return next_of(state) >= chunks_of(state); }

static int64_t cut(const lf_team *p, int64_t chunk, int64_t chunks) {
    int64_t units = (p->total + p->grain - 1) / p->grain, at = units * chunk / chunks * p->grain;
    return at < p->total ? at : p->total;
}

/* Claims and does chunks until there are none. */
static void work(lf_team *p, int32_t rank) {
    uint64_t state = atomic_load(&p->state);
    while (!idle(state)) {
        if (!atomic_compare_exchange_weak(&p->state, &state, state + 1)) continue;
        uint32_t chunk = next_of(state), chunks = chunks_of(state);
        int64_t begin = cut(p, chunk, chunks), end = cut(p, chunk + 1, chunks);
        if (begin < end) p->fn(p->x, begin, end, p->scratch + rank * p->scratch_bytes);
        if (atomic_fetch_sub(&p->pending, 1) == 1) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->lock);
        }
        state = atomic_load(&p->state);
    }
}

static void *worker(void *given) {
    worker_arg arg = *(worker_arg *)given;
    free(given);
    lf_team *p = arg.pool;
    fp_enter();
    for (;;) {
        for (int i = 0; i < SPINS && idle(atomic_load(&p->state)); i++) relax();
        if (idle(atomic_load(&p->state))) {
            pthread_mutex_lock(&p->lock);
            while (idle(atomic_load(&p->state)) && !atomic_load(&p->stop)) pthread_cond_wait(&p->work, &p->lock);
            pthread_mutex_unlock(&p->lock);
        }
        if (atomic_load(&p->stop)) return NULL;
        work(p, arg.rank);
    }
}

void lf_for(lf_team *p, lf_step_fn fn, lf_ctx *x, int64_t total, int64_t grain) {
    int64_t units = (total + grain - 1) / grain, chunks = (int64_t)p->threads * CHUNKS;
    if (chunks > units) chunks = units;
    if (p->threads == 1 || units <= 1) {
        if (total > 0) fn(x, 0, total, p->scratch);
        return;
    }
    p->fn = fn, p->x = x, p->total = total, p->grain = grain;
    atomic_store(&p->pending, (int32_t)chunks);
    pthread_mutex_lock(&p->lock);
    uint64_t job = (atomic_load(&p->state) >> 32) + 1;
    atomic_store(&p->state, job << 32 | (uint64_t)chunks << 16);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    work(p, 0);
    for (int i = 0; i < SPINS && atomic_load(&p->pending); i++) relax();
    if (atomic_load(&p->pending)) {
        pthread_mutex_lock(&p->lock);
        while (atomic_load(&p->pending)) pthread_cond_wait(&p->done, &p->lock);
        pthread_mutex_unlock(&p->lock);
    }
}

static void pool_close(lf_team *p) {
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        atomic_store(&p->stop, 1);
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
        for (int32_t i = 0; i < p->started; i++) pthread_join(p->workers[i], NULL);
    }
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->done);
    free(p->workers);
    free(p->scratch);
}

static void *aligned(int64_t bytes) {
    return aligned_alloc(64, (size_t)(bytes + 63 + (bytes == 0)) / 64 * 64);
}

static int32_t pool_open(lf_team *p, int32_t threads, int64_t scratch_bytes) {
    memset(p, 0, sizeof *p);
    p->threads = threads;
    p->scratch_bytes = (scratch_bytes + 63) / 64 * 64;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    p->scratch = aligned(p->scratch_bytes * threads);
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    if (!p->scratch || !p->workers) return LF_NO_MEMORY;
    for (int32_t rank = 1; rank < threads; rank++) {
        worker_arg *arg = malloc(sizeof *arg);
        if (!arg) return LF_NO_MEMORY;
        *arg = (worker_arg){p, rank};
        if (pthread_create(&p->workers[rank - 1], NULL, worker, arg)) {
            free(arg);
            return LF_NO_THREAD;
        }
        p->started++;
    }
    return LF_OK;
}

/* ---- models */

struct lf_model {
    lf_ctx x;
    lf_team pool;
    pthread_mutex_t reporting;
};

void lf_report(lf_ctx *x, int64_t step, int64_t index) {
    lf_model *m = (lf_model *)x; /* x is its first member */
    pthread_mutex_lock(&m->reporting);
    if (x->bad_step < 0 || step < x->bad_step || (step == x->bad_step && index < x->bad_index))
        x->bad_step = step, x->bad_index = index;
    pthread_mutex_unlock(&m->reporting);
}

int32_t lf_model_open(lf_model **model, const uint8_t *weights, int64_t bytes, int32_t threads) {
    *model = NULL;
    if (bytes != lf_graph_weight_bytes || threads < 1 || threads > 1024) return LF_BAD_ARGUMENT;
    lf_model *m = calloc(1, sizeof *m);
    if (!m) return LF_NO_MEMORY;
    m->x.weights = weights;
    m->x.packed = aligned(lf_graph_packed_bytes);
    m->x.arena = aligned(lf_graph_arena_bytes);
    pthread_mutex_init(&m->reporting, NULL);
    int32_t status = pool_open(&m->pool, threads, lf_graph_scratch_bytes());
    if (!m->x.packed || !m->x.arena) status = LF_NO_MEMORY;
    if (status != LF_OK) {
        lf_model_close(m);
        return status;
    }
    fp_state old = fp_enter();
    for (const lf_step *s = lf_graph_packing; s->fn; s++) lf_for(&m->pool, s->fn, &m->x, s->total, s->grain);
    fp_leave(old);
    *model = m;
    return LF_OK;
}

int32_t lf_model_run(lf_model *m, const void *const *in, void *const *out, int64_t *bad) {
    m->x.in = in, m->x.out = out;
    m->x.bad_step = m->x.bad_index = -1;
    fp_state old = fp_enter();
    for (const lf_step *s = lf_graph_steps; s->fn; s++) lf_for(&m->pool, s->fn, &m->x, s->total, s->grain);
    fp_leave(old);
    bad[0] = m->x.bad_step, bad[1] = m->x.bad_index;
    return m->x.bad_step < 0 ? LF_OK : LF_BAD_INDEX;
}

static int look(int64_t *ns, const int32_t *files, int32_t counters, uint64_t *counts) {
    struct timespec t;
    for (int32_t c = 0; c < counters; c++)
        if (read(files[c], counts + 3 * c, 24) != 24) return 0;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    return 1;
}

int32_t lf_model_profile(lf_model *m, const void *const *in, void *const *out, int64_t *bad, int64_t *ns,
                         const int32_t *files, int32_t counters, uint64_t *counts) {
    m->x.in = in, m->x.out = out;
    m->x.bad_step = m->x.bad_index = -1;
    fp_state old = fp_enter();
    int good = look(ns, files, counters, counts);
    for (const lf_step *s = lf_graph_steps; s->fn && good; s++) {
        lf_for(&m->pool, s->fn, &m->x, s->total, s->grain);
        ns++, counts += 3 * counters;
        good = look(ns, files, counters, counts);
    }
    fp_leave(old);
    bad[0] = m->x.bad_step, bad[1] = m->x.bad_index;
    return !good ? LF_NO_COUNTER : m->x.bad_step < 0 ? LF_OK : LF_BAD_INDEX;
}

void lf_model_close(lf_model *m) {
    if (!m) return;
    pool_close(&m->pool);
    pthread_mutex_destroy(&m->reporting);
    free(m->x.packed);
    free(m->x.arena);
    free(m);
}
