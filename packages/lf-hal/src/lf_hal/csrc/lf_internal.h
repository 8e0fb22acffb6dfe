/* What the files of the kernels share. */
#ifndef LF_INTERNAL_H
#define LF_INTERNAL_H

#include "lf_math.h"

/* Rows of a register tile, and panels beside one another in it, so that the sums stay in registers. */
#if LF_VL == 16
#define LF_ROWS 12
#elif defined(__loongarch_asx)
#define LF_ROWS 12
#elif LF_SMALL_TILES
#define LF_ROWS 1
#else
#define LF_ROWS 6
#endif

LF_INLINE int64_t lf_min64(int64_t a, int64_t b) { return a < b ? a : b; }
LF_INLINE int64_t lf_max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The part [k_begin, k_end) of the products of up to LF_ROWS rows with the panels of a packed B. panel_k is the K that
 * B was packed with; k_begin is a multiple of LF_CHUNK and k_end - k_begin <= LF_CHUNK. If k_begin is not 0 the sums in
 * y are continued. The epilogue (may be NULL) is for the call that ends a sum; its add begins where y does. One function for each storage of B. */
typedef void lf_tile_fn(float *y, int64_t y_stride, const float *a, int64_t a_stride, const void *packed,
                        int64_t panel_k, int64_t n, const lf_epilogue *epilogue, int64_t rows, int64_t panel_begin,
                        int64_t panel_end, int64_t k_begin, int64_t k_end);
lf_tile_fn lf_tile_rows_f32, lf_tile_rows_bf16, lf_tile_rows_f16, lf_tile_rows_i8;

LF_INLINE lf_tile_fn *lf_tiles_of(int32_t storage) {
    return storage == LF_BF16  ? lf_tile_rows_bf16
           : storage == LF_F16 ? lf_tile_rows_f16
           : storage == LF_I8  ? lf_tile_rows_i8
                               : lf_tile_rows_f32;
}

/* lf_gemm_stored of the first k rows of a B that was packed with panel_k. */
void lf_product(lf_tile_fn *tiles, float *y, int64_t y_stride, const float *a, int64_t a_stride, const void *packed,
                int64_t panel_k, int64_t k, int64_t n, const lf_epilogue *epilogue, int64_t row_begin,
                int64_t row_end, int64_t panel_begin, int64_t panel_end);

/* Softmax of one row. */
void lf_softmax_row(float *y, const float *x, int64_t n);

#endif
