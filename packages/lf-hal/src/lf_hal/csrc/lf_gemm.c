/* Sums of products: every output takes its terms in the order of ORDER.md, whatever tile it is computed in. */
#include "lf_internal.h"

#define LF_BLOCK_PANELS 32 /* a chunk of so many panels is 256 KiB and stays in the second-level cache */

#define LF_FEW_PANELS (LF_VL == 16 ? 8 : 4) /* what a tile of one row takes */

int64_t lf_panels(int64_t n) { return (n + LF_PANEL - 1) / LF_PANEL; }

int64_t lf_packed_size_f32(int64_t k, int64_t n) { return lf_panels(n) * k * LF_PANEL; }

typedef float v4 __attribute__((vector_size(16)));

/* to[i * LF_PANEL + j] = from[j * stride + i] for i, j < 4. */
LF_INLINE void transpose4(float *to, const float *from, int64_t stride) {
    v4 r[4];
    for (int i = 0; i < 4; i++) memcpy(&r[i], from + i * stride, sizeof(v4));
    v4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    v4 c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    v4 t[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
               __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
    for (int i = 0; i < 4; i++) memcpy(to + i * LF_PANEL, &t[i], sizeof(v4));
}

void lf_pack_b_f32(float *packed, const float *b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n,
                   int64_t panel_begin, int64_t panel_end) {
    for (int64_t p = panel_begin; p < panel_end; p++) {
        float *to = packed + p * k * LF_PANEL;
        const float *from = b + p * LF_PANEL * n_stride;
        int64_t valid = lf_min64(LF_PANEL, n - p * LF_PANEL);
        if (n_stride == 1 && valid == LF_PANEL) {
            for (int64_t i = 0; i < k; i++) memcpy(to + i * LF_PANEL, from + i * k_stride, LF_PANEL * sizeof(float));
            continue;
        }
        int64_t i = 0;
        if (k_stride == 1 && valid == LF_PANEL)
            for (; i + 4 <= k; i += 4)
                for (int64_t j = 0; j < LF_PANEL; j += 4)
                    transpose4(to + i * LF_PANEL + j, from + j * n_stride + i, n_stride);
        for (; i < k; i++)
            for (int64_t j = 0; j < LF_PANEL; j++)
                to[i * LF_PANEL + j] = j < valid ? from[i * k_stride + j * n_stride] : 0.0f;
    }
}

/* Narrow elements are only moved, by their size. */
#define LF_DEFINE_PACK(name, type)                                                                                    \
    static void name(type *packed, const type *b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n,          \
                     int64_t panel_begin, int64_t panel_end) {                                                        \
        for (int64_t p = panel_begin; p < panel_end; p++)                                                             \
            for (int64_t j = 0; j < LF_PANEL; j++) {                                                                  \
                type *to = packed + p * k * LF_PANEL + j;                                                             \
                const type *from = b + (p * LF_PANEL + j) * n_stride;                                                 \
                for (int64_t i = 0; i < k; i++) to[i * LF_PANEL] = p * LF_PANEL + j < n ? from[i * k_stride] : 0;     \
            }                                                                                                         \
    }
LF_DEFINE_PACK(pack_2, uint16_t)
LF_DEFINE_PACK(pack_1, int8_t)

void lf_pack_b_stored(int32_t storage, void *packed, const void *b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n,
               int64_t panel_begin, int64_t panel_end) {
    if (storage == LF_F32)
        lf_pack_b_f32(packed, b, k_stride, n_stride, k, n, panel_begin, panel_end);
    else if (storage == LF_I8)
        pack_1(packed, b, k_stride, n_stride, k, n, panel_begin, panel_end);
    else
        pack_2(packed, b, k_stride, n_stride, k, n, panel_begin, panel_end);
}

void lf_product(lf_tile_fn *tiles, float *y, int64_t y_stride, const float *a, int64_t a_stride, const void *packed,
                int64_t panel_k, int64_t k, int64_t n, const lf_epilogue *epilogue, int64_t row_begin,
                int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    /* With few rows B is read once: one panel group after the other, each along its whole k, is one stream. */
    int64_t few = row_end - row_begin <= LF_ROWS, width = few ? LF_FEW_PANELS : LF_BLOCK_PANELS;
    lf_epilogue part;
    if (epilogue && epilogue->add) {
        part = *epilogue;
        part.add += row_begin * y_stride;
        epilogue = &part;
    }
    y += row_begin * y_stride;
    a += row_begin * a_stride;
    for (int64_t p = panel_begin; p < panel_end; p += width) {
        int64_t k_begin = 0;
        do {
            int64_t k_end = lf_min64(k, k_begin + LF_CHUNK);
            tiles(y, y_stride, a, a_stride, packed, panel_k, n, k_end == k ? epilogue : 0, row_end - row_begin,
                  p, lf_min64(panel_end, p + width), k_begin, k_end);
            k_begin = k_end;
        } while (k_begin < k);
    }
}

void lf_gemm_stored(int32_t storage, float *y, int64_t y_stride, const float *a, int64_t a_stride, const void *packed,
             int64_t k, int64_t n, const lf_epilogue *epilogue, int64_t row_begin, int64_t row_end,
             int64_t panel_begin, int64_t panel_end) {
    if (row_begin >= row_end) return;
    lf_product(lf_tiles_of(storage), y, y_stride, a, a_stride, packed, k, k, n, epilogue, row_begin, row_end,
               panel_begin, panel_end);
}

void lf_gemm_f32(float *y, int64_t y_stride, const float *a, int64_t a_stride, const float *packed, int64_t k,
                 int64_t n, const lf_epilogue *epilogue, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end) {
    lf_gemm_stored(LF_F32, y, y_stride, a, a_stride, packed, k, n, epilogue, row_begin, row_end, panel_begin, panel_end);
}
