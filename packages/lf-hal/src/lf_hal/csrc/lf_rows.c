/* Row reductions over 16 logical lanes. */
#include "lf_internal.h"

typedef struct lanes {
    vf v[LF_VECTORS];
} lanes;

LF_INLINE lanes lanes_of(float x) {
    lanes s;
    for (int i = 0; i < LF_VECTORS; i++) s.v[i] = lf_splat(x);
    return s;
}

LF_INLINE float add(float a, float b) { return a + b; }
LF_INLINE float larger(float m, float x) { return x > m ? x : m; }
LF_INLINE float larger_nan(float m, float x) { return x > m || x != x ? x : m; }

#define LF_FOLD(s, op, result)                                         \
    do {                                                               \
        float lane_[LF_LANES];                                         \
        memcpy(lane_, (s).v, sizeof lane_);                            \
        for (int h_ = LF_LANES / 2; h_ > 0; h_ /= 2)                   \
            for (int i_ = 0; i_ < h_; i_++) lane_[i_] = op(lane_[i_], lane_[i_ + h_]); \
        result = lane_[0];                                             \
    } while (0)

/* Adds the last n % 16 elements: the lanes without one are left as they are. */
#define LF_TAIL(s, n, expression)                                                  \
    do {                                                                           \
        float lane_[LF_LANES];                                                     \
        memcpy(lane_, (s).v, sizeof lane_);                                        \
        for (int64_t i = (n) / LF_LANES * LF_LANES; i < (n); i++) {                \
            float old = lane_[i % LF_LANES];                                       \
            lane_[i % LF_LANES] = (expression);                                    \
        }                                                                          \
        memcpy((s).v, lane_, sizeof lane_);                                        \
    } while (0)

LF_INLINE float row_sum(const float *x, int64_t n) {
    lanes s = lanes_of(0.0f);
    for (int64_t i = 0; i + LF_LANES <= n; i += LF_LANES)
        for (int l = 0; l < LF_VECTORS; l++) s.v[l] = s.v[l] + lf_load(x + i + l * LF_VL);
    LF_TAIL(s, n, old + x[i]);
    float r;
    LF_FOLD(s, add, r);
    return r;
}

/* Sum of (x - center)^2. For the root mean square the center is +0: x - 0 is x. */
LF_INLINE float row_squares(const float *x, int64_t n, float center) {
    lanes s = lanes_of(0.0f);
    for (int64_t i = 0; i + LF_LANES <= n; i += LF_LANES)
        for (int l = 0; l < LF_VECTORS; l++) {
            vf d = lf_load(x + i + l * LF_VL) - center;
            s.v[l] = lf_fma(d, d, s.v[l]);
        }
    LF_TAIL(s, n, lf_fma1(x[i] - center, x[i] - center, old));
    float r;
    LF_FOLD(s, add, r);
    return r;
}

LF_INLINE float row_max(const float *x, int64_t n, int nan_wins) {
    lanes s = lanes_of(-LF_INF);
    for (int64_t i = 0; i + LF_LANES <= n; i += LF_LANES)
        for (int l = 0; l < LF_VECTORS; l++) {
            vf v = lf_load(x + i + l * LF_VL);
            s.v[l] = nan_wins ? lf_max_nan(s.v[l], v) : lf_select(v > s.v[l], v, s.v[l]);
        }
    float r;
    if (nan_wins) {
        LF_TAIL(s, n, larger_nan(old, x[i]));
        LF_FOLD(s, larger_nan, r);
    } else {
        LF_TAIL(s, n, larger(old, x[i]));
        LF_FOLD(s, larger, r);
    }
    return r;
}

void lf_softmax_row(float *y, const float *x, int64_t n) {
    float m = row_max(x, n, 0);
    for (int64_t i = 0; i < n; i += LF_VL) {
        if (i + LF_VL <= n)
            lf_store(y + i, lf_exp(lf_load(x + i) - m));
        else
            lf_store_part(y + i, lf_exp(lf_load_part(x + i, n - i) - m), n - i);
    }
    float r = 1.0f / row_sum(y, n);
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * r;
}

void lf_softmax_f32(float *y, const float *x, int64_t n, int64_t row_begin, int64_t row_end) {
    for (int64_t r = row_begin; r < row_end; r++) lf_softmax_row(y + r * n, x + r * n, n);
}

void lf_layer_norm_f32(float *y, const float *x, const float *weight, const float *bias, int64_t n, float eps,
                       int64_t row_begin, int64_t row_end) {
    for (int64_t r = row_begin; r < row_end; r++) {
        const float *from = x + r * n;
        float *to = y + r * n;
        float mean = row_sum(from, n) / (float)n;
        float scale = 1.0f / __builtin_sqrtf(row_squares(from, n, mean) / (float)n + eps);
        int64_t i = 0;
        for (; i + LF_VL <= n; i += LF_VL) {
            vf t = (lf_load(from + i) - mean) * scale;
            if (weight && bias)
                t = lf_fma(t, lf_load(weight + i), lf_load(bias + i));
            else if (weight)
                t = t * lf_load(weight + i);
            else if (bias)
                t = t + lf_load(bias + i);
            lf_store(to + i, t);
        }
        for (; i < n; i++) {
            float t = (from[i] - mean) * scale;
            to[i] = weight && bias ? lf_fma1(t, weight[i], bias[i]) : weight ? t * weight[i] : bias ? t + bias[i] : t;
        }
    }
}

void lf_rms_norm_f32(float *y, const float *x, const float *weight, int64_t n, float eps, int64_t row_begin,
                     int64_t row_end) {
    for (int64_t r = row_begin; r < row_end; r++) {
        const float *from = x + r * n;
        float *to = y + r * n;
        float scale = 1.0f / __builtin_sqrtf(row_squares(from, n, 0.0f) / (float)n + eps);
        int64_t i = 0;
        for (; i + LF_VL <= n; i += LF_VL) { /* clang leaves the plain loop scalar on LoongArch and Arm */
            vf t = lf_load(from + i) * scale;
            lf_store(to + i, weight ? t * lf_load(weight + i) : t);
        }
        for (; i < n; i++) to[i] = weight ? (from[i] * scale) * weight[i] : from[i] * scale;
    }
}

void lf_reduce_f32(int32_t op, float *y, const float *x, int64_t n, int64_t row_begin, int64_t row_end) {
    for (int64_t r = row_begin; r < row_end; r++) {
        const float *from = x + r * n;
        if (op == LF_REDUCE_MAX)
            y[r] = row_max(from, n, 1);
        else
            y[r] = op == LF_REDUCE_MEAN ? row_sum(from, n) / (float)n : row_sum(from, n);
    }
}
