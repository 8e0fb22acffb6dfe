/* Attention: the product of queries and keys, the softmax of each row, the product with the values. */
#include "lf_internal.h"

#define LF_QUERIES 24 /* query rows whose scores are held at a time */

int64_t lf_attention_scratch_f32(const lf_attention *c) {
    return lf_packed_size_f32(c->qk_dim, c->kv_len) + lf_packed_size_f32(c->kv_len, c->v_dim) +
           LF_QUERIES * lf_panels(c->kv_len) * LF_PANEL;
}

LF_INLINE int64_t keys_seen(const lf_attention *c, int64_t batch, int64_t query) {
    int64_t n = c->kv_len;
    if (c->lengths) n = lf_min64(n, c->lengths[batch]);
    if (c->causal) n = lf_min64(n, c->q_offset + query + 1);
    return lf_max64(n, 0);
}

LF_INLINE void scale_and_mask(float *z, const float *mask, float scale, int64_t n) {
    if (mask)
        for (int64_t i = 0; i < n; i++) z[i] = z[i] * scale + mask[i];
    else
        for (int64_t i = 0; i < n; i++) z[i] = z[i] * scale;
}

/* Columns [0, nv * LF_VL) of one row of p @ v, v as it lies. */
LF_INLINE void weigh_values(const int nv, float *y, const float *p, const float *v, int64_t v_stride, int64_t keys) {
    vf total[8];
    for (int64_t begin = 0; begin == 0 || begin < keys; begin += LF_CHUNK) {
        vf sum[8];
        LF_UNROLL
        for (int j = 0; j < nv; j++) sum[j] = lf_splat(0.0f);
        for (int64_t k = begin; k < lf_min64(keys, begin + LF_CHUNK); k++) {
            LF_UNROLL
            for (int j = 0; j < nv; j++)
                sum[j] = lf_fma(lf_splat(p[k]), lf_load(v + k * v_stride + j * LF_VL), sum[j]);
        }
        LF_UNROLL
        for (int j = 0; j < nv; j++) total[j] = begin == 0 ? sum[j] : total[j] + sum[j];
    }
    LF_UNROLL
    for (int j = 0; j < nv; j++) lf_store(y + j * LF_VL, total[j]);
}

/* One row of p @ v without packing v: for few queries packing costs more than the product. n is a multiple of LF_VL. */
static void values_as_they_lie(float *y, const float *p, const float *v, int64_t v_stride, int64_t n, int64_t keys) {
    int64_t i = 0;
    for (; i + 8 * LF_VL <= n; i += 8 * LF_VL) weigh_values(8, y + i, p, v + i, v_stride, keys);
    for (; i + 4 * LF_VL <= n; i += 4 * LF_VL) weigh_values(4, y + i, p, v + i, v_stride, keys);
    for (; i < n; i += LF_VL) weigh_values(1, y + i, p, v + i, v_stride, keys);
}

LF_INLINE int few_queries(const lf_attention *c) { return c->q_len <= 2 && c->v_dim % LF_VL == 0; }

/* Queries [first, first + rows) of one head. keys and values are packed (values are not if v is given). */
static void head_block(float *y, const float *q, const float *keys, const float *values, const float *v, float *scores,
                       const lf_attention *c, int64_t batch, int64_t head, int64_t first, int64_t rows) {
    int64_t stride = lf_panels(c->kv_len) * LF_PANEL, least = c->kv_len, most = 0, seen[LF_QUERIES];
    for (int64_t r = 0; r < rows; r++) {
        seen[r] = keys_seen(c, batch, first + r);
        least = lf_min64(least, seen[r]);
        most = lf_max64(most, seen[r]);
    }
    if (most > 0)
        lf_product(lf_tile_rows_f32, scores, stride, q + first * c->q_stride[2], c->q_stride[2], keys, c->qk_dim, c->qk_dim, most, 0, 0,
                   rows, 0, lf_panels(most));
    for (int64_t r = 0; r < rows; r++) {
        const float *mask = c->mask;
        if (mask) mask += batch * c->mask_stride[0] + head * c->mask_stride[1] + (first + r) * c->mask_stride[2];
        scale_and_mask(scores + r * stride, mask, c->scale, seen[r]);
        if (seen[r] > 0) lf_softmax_row(scores + r * stride, scores + r * stride, seen[r]);
    }
    if (v) {
        for (int64_t r = 0; r < rows; r++)
            values_as_they_lie(y + (first + r) * c->y_stride[2], scores + r * stride, v, c->v_stride[2], c->v_dim,
                               seen[r]);
        return;
    }
    /* Chunks that every row sees whole go through the tile; the rest of each row has an end of its own. */
    int64_t panels = lf_panels(c->v_dim), common = least / LF_CHUNK * LF_CHUNK;
    float *to = y + first * c->y_stride[2];
    if (common > 0)
        lf_product(lf_tile_rows_f32, to, c->y_stride[2], scores, stride, values, c->kv_len, common, c->v_dim, 0, 0, rows, 0, panels);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = common; k < seen[r] || k == 0; k += LF_CHUNK)
            lf_tile_rows_f32(to + r * c->y_stride[2], 0, scores + r * stride, 0, values, c->kv_len, c->v_dim, 0, 1, 0,
                         panels, k, lf_min64(seen[r], k + LF_CHUNK));
}

void lf_attention_f32(float *y, const float *q, const float *k, const float *v, const lf_attention *c,
                      float *scratch, int64_t group_begin, int64_t group_end) {
    float *keys = scratch, *values = keys + lf_packed_size_f32(c->qk_dim, c->kv_len);
    float *scores = values + lf_packed_size_f32(c->kv_len, c->v_dim);
    int64_t share = c->heads / c->groups;
    for (int64_t u = group_begin; u < group_end; u++) {
        int64_t batch = u / c->groups, group = u % c->groups;
        lf_pack_b_f32(keys, k + batch * c->k_stride[0] + group * c->k_stride[1], 1, c->k_stride[2], c->qk_dim,
                      c->kv_len, 0, lf_panels(c->kv_len));
        const float *of_group = v + batch * c->v_stride[0] + group * c->v_stride[1];
        if (!few_queries(c))
            lf_pack_b_f32(values, of_group, c->v_stride[2], 1, c->kv_len, c->v_dim, 0, lf_panels(c->v_dim));
        for (int64_t head = group * share; head < (group + 1) * share; head++)
            for (int64_t t = 0; t < c->q_len; t += LF_QUERIES)
                head_block(y + batch * c->y_stride[0] + head * c->y_stride[1],
                           q + batch * c->q_stride[0] + head * c->q_stride[1], keys, values,
                           few_queries(c) ? of_group : 0, scores, c, batch, head, t,
                           lf_min64(LF_QUERIES, c->q_len - t));
    }
}
