/* The register tiles, once for each storage of B: a file defines LF_STORED, the type that panels hold, and LF_WIDEN(p),
 * the LF_VL floats that lie at p, and LF_TILE_ROWS, the name of its lf_tile_fn, and includes this. */
#ifndef LF_TILE_H
#define LF_TILE_H

#include "lf_internal.h"

static __attribute__((unused)) void act_panel(float *y, int32_t act) {
    for (int i = 0; i < LF_VECTORS; i++) lf_store(y + i * LF_VL, lf_act_apply(lf_load(y + i * LF_VL), act));
}

/* Ends LF_PANEL sums of one row: what y holds, the epilogue, the store. column is that of v[0]. */
LF_INLINE void finish_full(float *y, const float *add, const vf *v, int64_t column, int first,
                           const lf_epilogue *e) {
    LF_UNROLL
    for (int i = 0; i < LF_VECTORS; i++) {
        int64_t at = column + i * LF_VL;
        vf s = first ? v[i] : lf_load(y + at) + v[i];
        if (e) {
            if (e->weight_scale) s = s * lf_load(e->weight_scale + at);
            if (e->bias) s = s + lf_load(e->bias + at);
            if (e->scale) s = lf_fma(s, lf_load(e->scale + at), lf_load(e->shift + at));
            if (add) s = s + lf_load(add + at);
            if (e->act == LF_ACT_RELU) s = lf_relu(s);
        }
        lf_store(y + at, s);
    }
    if (e && e->act > LF_ACT_RELU) act_panel(y + column, e->act);
}

/* The same for a panel of which only the first columns exist. */
static __attribute__((unused)) void finish_part(float *y, const float *add, const vf *v, int64_t column, int64_t valid, int first, const lf_epilogue *e) {
    float row[LF_PANEL] = {0}, bias[LF_PANEL] = {0}, scale[LF_PANEL] = {0}, shift[LF_PANEL] = {0},
          unit[LF_PANEL] = {0}, more[LF_PANEL] = {0};
    lf_epilogue part = {0};
    for (int64_t i = 0; i < valid; i++) {
        if (!first) row[i] = y[column + i];
        if (add) more[i] = add[column + i];
        if (e && e->bias) bias[i] = e->bias[column + i];
        if (e && e->scale) scale[i] = e->scale[column + i], shift[i] = e->shift[column + i];
        if (e && e->weight_scale) unit[i] = e->weight_scale[column + i];
    }
    if (e) {
        part.bias = e->bias ? bias : 0;
        part.scale = e->scale ? scale : 0;
        part.shift = shift;
        part.act = e->act;
        part.weight_scale = e->weight_scale ? unit : 0;
    }
    finish_full(row, add ? more : 0, v, 0, first, &part);
    for (int64_t i = 0; i < valid; i++) y[column + i] = row[i];
}

/* mr rows times np panels with all sums in registers. */
LF_INLINE void tile(const int mr, const int np, float *y, int64_t y_stride, const float *a, int64_t a_stride,
                    const LF_STORED *packed, int64_t panel_k, int64_t n, const lf_epilogue *e, int64_t panel,
                    int64_t k_begin, int64_t k_end) {
    vf sum[LF_ROWS][8 * LF_VECTORS];
    const int nv = np * LF_VECTORS;
    const LF_STORED *b[8];
    LF_UNROLL
    for (int p = 0; p < np; p++) b[p] = packed + ((panel + p) * panel_k + k_begin) * LF_PANEL;
    LF_UNROLL
    for (int r = 0; r < mr; r++) {
        LF_UNROLL
        for (int j = 0; j < nv; j++) sum[r][j] = lf_splat(0.0f);
    }
    a += k_begin;
    for (int64_t k = 0; k < k_end - k_begin; k++) {
        vf column[8 * LF_VECTORS];
        LF_UNROLL
        for (int j = 0; j < nv; j++) {
            column[j] = LF_WIDEN(b[j / LF_VECTORS] + k * LF_PANEL + j % LF_VECTORS * LF_VL);
            /* One row uses a vector at once: 8 of them beside 8 sums are more than 16 registers. */
            if (mr == 1) sum[0][j] = lf_fma(lf_splat(a[k]), column[j], sum[0][j]);
        }
        LF_UNROLL
        for (int r = 0; mr > 1 && r < mr; r++) {
            vf x = lf_splat(a[r * a_stride + k]);
            LF_UNROLL
            for (int j = 0; j < nv; j++) sum[r][j] = lf_fma(x, column[j], sum[r][j]);
        }
    }
    /* Copied, so that only the copy needs an address and the sums above stay in registers. */
    vf done[LF_ROWS * 8 * LF_VECTORS];
    LF_UNROLL
    for (int r = 0; r < mr; r++) {
        LF_UNROLL
        for (int j = 0; j < nv; j++) done[r * nv + j] = sum[r][j];
    }
    for (int r = 0; r < mr; r++)
        for (int p = 0; p < np; p++) {
            int64_t at = (panel + p) * LF_PANEL, valid = n - at;
            const vf *v = done + r * nv + p * LF_VECTORS;
            const float *add = e && e->add ? e->add + r * y_stride : 0;
            if (valid >= LF_PANEL)
                finish_full(y + r * y_stride, add, v, at, k_begin == 0, e);
            else
                finish_part(y + r * y_stride, add, v, at, valid, k_begin == 0, e);
        }
}

#define LF_TILE_ARGS                                                                                               \
    float *y, int64_t y_stride, const float *a, int64_t a_stride, const LF_STORED *packed, int64_t panel_k, int64_t n, \
        const lf_epilogue *e, int64_t panel_begin, int64_t panel_end, int64_t k_begin, int64_t k_end
#define LF_DEFINE_ROWS(mr, np)                                                                                       \
    static void rows_##mr(LF_TILE_ARGS) {                                                                            \
        int64_t p = panel_begin;                                                                                     \
        for (; p + np <= panel_end; p += np)                                                                         \
            tile(mr, np, y, y_stride, a, a_stride, packed, panel_k, n, e, p, k_begin, k_end);                        \
        for (; p < panel_end; p++) tile(mr, 1, y, y_stride, a, a_stride, packed, panel_k, n, e, p, k_begin, k_end); \
    }

#if LF_VL == 16
LF_DEFINE_ROWS(1, 8)
LF_DEFINE_ROWS(2, 4)
LF_DEFINE_ROWS(3, 4)
LF_DEFINE_ROWS(4, 2)
LF_DEFINE_ROWS(5, 2)
LF_DEFINE_ROWS(6, 2)
LF_DEFINE_ROWS(8, 2)
LF_DEFINE_ROWS(12, 2)
#elif LF_VL == 8
LF_DEFINE_ROWS(1, 4)
LF_DEFINE_ROWS(2, 2)
LF_DEFINE_ROWS(3, 2)
LF_DEFINE_ROWS(4, 1)
LF_DEFINE_ROWS(5, 1)
LF_DEFINE_ROWS(6, 1)
#if LF_ROWS == 12
LF_DEFINE_ROWS(8, 1)
LF_DEFINE_ROWS(12, 1)
#endif
#elif LF_SMALL_TILES
LF_DEFINE_ROWS(1, 1)
#else
LF_DEFINE_ROWS(1, 2)
LF_DEFINE_ROWS(2, 1)
LF_DEFINE_ROWS(3, 1)
LF_DEFINE_ROWS(4, 1)
LF_DEFINE_ROWS(5, 1)
LF_DEFINE_ROWS(6, 1)
#endif

void LF_TILE_ROWS(float *y, int64_t y_stride, const float *a, int64_t a_stride, const void *packed, int64_t panel_k,
                  int64_t n, const lf_epilogue *epilogue, int64_t rows, int64_t panel_begin, int64_t panel_end,
                  int64_t k_begin, int64_t k_end) {
    static void (*const table[LF_ROWS + 1])(LF_TILE_ARGS) = {
        [1] = rows_1,
#if LF_ROWS >= 6
        [2] = rows_2, [3] = rows_3, [4] = rows_4, [5] = rows_5, [6] = rows_6,
#endif
#if LF_ROWS == 12
        [8] = rows_8, [12] = rows_12,
#endif
    };
    lf_epilogue part; /* its add goes from tile to tile with y */
    if (epilogue) part = *epilogue, epilogue = &part;
    while (rows > 0) {
        int64_t mr = rows >= LF_ROWS ? LF_ROWS : rows >= 8 && LF_ROWS > 8 ? 8 : lf_min64(rows, LF_ROWS < 6 ? LF_ROWS : 6);
        table[mr](y, y_stride, a, a_stride, packed, panel_k, n, epilogue, panel_begin, panel_end, k_begin, k_end);
        y += mr * y_stride;
        a += mr * a_stride;
        if (epilogue && part.add) part.add += mr * y_stride;
        rows -= mr;
    }
}

#endif
