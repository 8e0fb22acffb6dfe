/* Functions of single elements, broadcast arithmetic, copies, rotary embedding, embedding. */
#include "lf_internal.h"

#define LF_EACH(expression)                                                       \
    do {                                                                          \
        int64_t i = begin;                                                        \
        for (; i + LF_VL <= end; i += LF_VL) {                                    \
            vf v = lf_load(x + i);                                                \
            lf_store(y + i, (expression));                                        \
        }                                                                         \
        if (i < end) {                                                            \
            vf v = lf_load_part(x + i, end - i);                                  \
            lf_store_part(y + i, (expression), end - i);                          \
        }                                                                         \
    } while (0)

void lf_unary_f32(int32_t op, float *y, const float *x, int64_t begin, int64_t end) {
    switch (op) {
    case LF_NEG: LF_EACH(lf_neg(v)); break;
    case LF_RSQRT: LF_EACH(1.0f / lf_sqrt(v)); break;
    case LF_SIN: LF_EACH(lf_sin(v)); break;
    case LF_COS: LF_EACH(lf_cos(v)); break;
    case LF_TANH: LF_EACH(lf_tanh(v)); break;
    case LF_SIGMOID: LF_EACH(lf_sigmoid(v)); break;
    case LF_SILU: LF_EACH(lf_silu(v)); break;
    case LF_GELU_TANH: LF_EACH(lf_gelu_tanh(v)); break;
    case LF_GELU_ERF: LF_EACH(lf_gelu_erf(v)); break;
    case LF_RELU: LF_EACH(lf_relu(v)); break;
    case LF_EXP: LF_EACH(lf_exp(v)); break;
    case LF_ERF: LF_EACH(lf_erf(v)); break;
    case LF_SQRT: LF_EACH(lf_sqrt(v)); break;
    case LF_ABS: LF_EACH(lf_abs(v)); break;
    case LF_LOG: LF_EACH(lf_log(v)); break;
    default: break;
    }
}

LF_INLINE vf power(vf a, vf b) {
    vf w = lf_exp(b * lf_log(lf_abs(a)));
    vi large = (lf_abs(b) >= 0x1p+24f) | (b != b);
    vi whole = __builtin_convertvector(lf_select(large, lf_splat(0.0f), b), vi);
    vi integer = (large & (b == b)) | (~large & (__builtin_convertvector(whole, vf) == b));
    vi odd = ~large & ((whole & 1) != 0);
    vf signed_w = (vf)((vu)w ^ ((vu)odd & 0x80000000u));
    w = lf_select(a < 0.0f, lf_select(integer, signed_w, lf_splat(lf_float1(0x7fc00000u))), w);
    w = lf_select(b == -0.5f, 1.0f / lf_sqrt(a), w);
    w = lf_select(b == 0.5f, lf_sqrt(a), w);
    w = lf_select(b == -1.0f, 1.0f / a, w);
    w = lf_select(b == 3.0f, (a * a) * a, w);
    w = lf_select(b == 2.0f, a * a, w);
    w = lf_select(b == 1.0f, a, w);
    return lf_select(b == 0.0f, lf_splat(1.0f), w);
}

LF_INLINE vf apply(int32_t op, vf a, vf b) {
    switch (op) {
    case LF_ADD: return a + b;
    case LF_SUB: return a - b;
    case LF_MUL: return a * b;
    case LF_DIV: return a / b;
    case LF_POW: return power(a, b);
    case LF_MAXIMUM: return lf_max_nan(a, b);
    default: return lf_min_nan(a, b);
    }
}

/* Offset of row r in an array with strides; the last axis is the row itself. */
LF_INLINE int64_t row_offset(int64_t r, const int64_t *shape, const int64_t *strides, int32_t rank) {
    int64_t offset = 0;
    for (int32_t d = rank - 2; d >= 0; d--) {
        offset += r % shape[d] * strides[d];
        r /= shape[d];
    }
    return offset;
}

LF_INLINE vf take(const float *p, int64_t i, int64_t step, int64_t count) {
    if (step == 0) return lf_splat(*p);
    if (step == 1) return count >= LF_VL ? lf_load(p + i) : lf_load_part(p + i, count);
    float t[LF_VL] = {0};
    for (int64_t j = 0; j < lf_min64(LF_VL, count); j++) t[j] = p[(i + j) * step];
    return lf_load(t);
}

LF_INLINE void give(float *y, int64_t i, vf v, int64_t count) {
    if (count >= LF_VL)
        lf_store(y + i, v);
    else
        lf_store_part(y + i, v, count);
}

LF_INLINE void binary_rows(int32_t op, float *y, const float *a, const int64_t *a_strides, const float *b,
                           const int64_t *b_strides, const int64_t *shape, int32_t rank, int64_t row_begin,
                           int64_t row_end) {
    int64_t n = shape[rank - 1], sa = a_strides[rank - 1], sb = b_strides[rank - 1];
    for (int64_t r = row_begin; r < row_end; r++) {
        const float *pa = a + row_offset(r, shape, a_strides, rank), *pb = b + row_offset(r, shape, b_strides, rank);
        for (int64_t i = 0; i < n; i += LF_VL)
            give(y + r * n, i, apply(op, take(pa, i, sa, n - i), take(pb, i, sb, n - i)), n - i);
    }
}

void lf_binary_f32(int32_t op, float *y, const float *a, const int64_t *a_strides, const float *b,
                   const int64_t *b_strides, const int64_t *shape, int32_t rank, int64_t row_begin, int64_t row_end) {
#define LF_CASE(which) \
    case which: binary_rows(which, y, a, a_strides, b, b_strides, shape, rank, row_begin, row_end); break
    switch (op) {
        LF_CASE(LF_ADD);
        LF_CASE(LF_SUB);
        LF_CASE(LF_MUL);
        LF_CASE(LF_DIV);
        LF_CASE(LF_POW);
        LF_CASE(LF_MAXIMUM);
        LF_CASE(LF_MINIMUM);
    default: break;
    }
#undef LF_CASE
}

void lf_multiply_add_f32(float *y, const float *a, const int64_t *a_strides, const float *b, const int64_t *b_strides,
                         const float *c, const int64_t *c_strides, const int64_t *shape, int32_t rank,
                         int64_t row_begin, int64_t row_end) {
    int64_t n = shape[rank - 1], last = rank - 1;
    for (int64_t r = row_begin; r < row_end; r++) {
        const float *pa = a + row_offset(r, shape, a_strides, rank), *pb = b + row_offset(r, shape, b_strides, rank);
        const float *pc = c + row_offset(r, shape, c_strides, rank);
        for (int64_t i = 0; i < n; i += LF_VL) {
            vf va = take(pa, i, a_strides[last], n - i), vb = take(pb, i, b_strides[last], n - i);
            give(y + r * n, i, lf_fma(va, vb, take(pc, i, c_strides[last], n - i)), n - i);
        }
    }
}

void lf_copy_f32(float *y, const int64_t *y_strides, const float *x, const int64_t *x_strides, const int64_t *shape,
                 int32_t rank, int64_t row_begin, int64_t row_end) {
    int64_t n = shape[rank - 1], sy = y_strides[rank - 1], sx = x_strides[rank - 1];
    for (int64_t r = row_begin; r < row_end; r++) {
        float *to = y + row_offset(r, shape, y_strides, rank);
        const float *from = x + row_offset(r, shape, x_strides, rank);
        if (sy == 1 && sx == 1) {
            if (n > 0) memcpy(to, from, (size_t)n * sizeof(float));
            continue;
        }
        for (int64_t i = 0; i < n; i++) to[i * sy] = from[i * sx];
    }
}

void lf_rope_f32(float *y, const float *x, const float *cosine, const float *sine, int64_t dim, int64_t inner,
                 int64_t length, int32_t interleaved, int64_t row_begin, int64_t row_end) {
    int64_t half = dim / 2, step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
    for (int64_t r = row_begin; r < row_end; r++) {
        const float *c = cosine + r / inner % length * half, *s = sine + r / inner % length * half;
        for (int64_t i = 0; i < half; i += LF_VL) {
            int64_t count = half - i;
            vf first = take(x + r * dim, i, step, count), second = take(x + r * dim + other, i, step, count);
            vf vc = take(c, i, 1, count), vs = take(s, i, 1, count);
            vf u = lf_fma(first, vc, lf_neg(second * vs)), w = lf_fma(second, vc, first * vs);
            for (int64_t j = 0; j < lf_min64(LF_VL, count); j++) {
                y[r * dim + (i + j) * step] = u[j];
                y[r * dim + (i + j) * step + other] = w[j];
            }
        }
    }
}

int64_t lf_embedding_f32(float *y, const float *table, const int64_t *ids, int64_t rows, int64_t dim, int64_t begin,
                         int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        if (ids[i] < 0 || ids[i] >= rows) return i;
        if (dim > 0) memcpy(y + i * dim, table + ids[i] * dim, (size_t)dim * sizeof(float));
    }
    return -1;
}
