/* What a compiled graph stands on: threads that split outputs, a clean floating-point state, opening and running.
 *
 * The generated file defines lf_graph_* below; lf_runtime.c the functions. No state outside lf_model. */
#ifndef LF_RUNTIME_H
#define LF_RUNTIME_H

#include <stdint.h>

/* The addresses that a step works on. Offsets into them are constants of the generated code. */
typedef struct lf_ctx {
    const uint8_t *weights; /* payload of weights.lfw */
    uint8_t *packed;        /* weights as the kernels want them, made once by the steps of lf_graph_packing */
    uint8_t *arena;         /* intermediate values */
    const void *const *in;
    void *const *out;
    int64_t bad_step, bad_index; /* first index outside its table, or -1 */
} lf_ctx;

/* One step over [begin, end) of its outputs; scratch is the calling thread's own. */
typedef void (*lf_step_fn)(lf_ctx *x, int64_t begin, int64_t end, uint8_t *scratch);

/* A step and what lf_for cuts: [0, total) at multiples of grain. */
typedef struct lf_step {
    lf_step_fn fn;
    int64_t total, grain;
} lf_step;

typedef struct lf_team lf_team;

/* Calls fn over [0, total), cut into one part per thread, and returns when all are done. Parts begin at multiples of
 * grain. */
void lf_for(lf_team *team, lf_step_fn fn, lf_ctx *x, int64_t total, int64_t grain);

/* An index outside its table was met: the first report is kept. */
void lf_report(lf_ctx *x, int64_t step, int64_t index);

/* ---- the generated part */

extern const int64_t lf_graph_weight_bytes, lf_graph_packed_bytes, lf_graph_arena_bytes;
extern const int32_t lf_graph_inputs, lf_graph_outputs;
extern const int64_t lf_graph_input_bytes[], lf_graph_output_bytes[];
int64_t lf_graph_scratch_bytes(void); /* of each thread */
extern const lf_step lf_graph_packing[], lf_graph_steps[]; /* in order; the last fn is 0 */

/* ---- the interface of a model */

typedef struct lf_model lf_model;

enum lf_status { LF_OK = 0, LF_NO_MEMORY = 1, LF_NO_THREAD = 2, LF_BAD_INDEX = 3, LF_BAD_ARGUMENT = 4, LF_NO_COUNTER = 5 };

/* weights: the payload of the weights file, bytes of it, aligned to 64; it has to stay for the life of the model. */
int32_t lf_model_open(lf_model **model, const uint8_t *weights, int64_t bytes, int32_t threads);

/* in and out: one address per input and output, dense arrays aligned to their elements. One run at a time. After
 * LF_BAD_INDEX, bad[0] is the number of the step and bad[1] the place of the index in it. */
int32_t lf_model_run(lf_model *model, const void *const *in, void *const *out, int64_t *bad);

/* lf_model_run that looks at the clock and at `counters` files of perf_event_open before the first step and after each:
 * ns[steps + 1] and counts[steps + 1][counters][3], the three words that a read of such a file gives. A counter that
 * cannot be read ends it with LF_NO_COUNTER. lf_model_run itself has no part in this. */
int32_t lf_model_profile(lf_model *model, const void *const *in, void *const *out, int64_t *bad, int64_t *ns,
                         const int32_t *files, int32_t counters, uint64_t *counts);

void lf_model_close(lf_model *model);

#endif
