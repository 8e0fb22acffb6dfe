/* The functions of ORDER.md, one vector at a time. */
#ifndef LF_MATH_H
#define LF_MATH_H

#include "lf_vec.h"

#define LF_MAGIC 0x1.8p+23f
#define LF_MAGIC_BITS 0x4b400000u
#define LF_INF __builtin_inff()

LF_INLINE vf lf_horner(vf z, const float *c, int n) {
    vf p = lf_splat(c[n - 1]);
    LF_UNROLL
    for (int i = n - 2; i >= 0; i--) p = lf_fma(p, z, lf_splat(c[i]));
    return p;
}
#define LF_POLY(z, ...) \
    lf_horner(z, (const float[]){__VA_ARGS__}, (int)(sizeof((const float[]){__VA_ARGS__}) / sizeof(float)))

LF_INLINE vf lf_exp2i(vi n) { return (vf)(((vu)n + 127u) << 23); }

LF_INLINE vf lf_exp(vf x) {
    x = lf_select(x > 89.0f, lf_splat(89.0f), x);
    x = lf_select(x < -104.0f, lf_splat(-104.0f), x);
    vf t = lf_fma(x, lf_splat(0x1.715476p+0f), lf_splat(LF_MAGIC));
    vf n = t - LF_MAGIC;
    vf r = lf_fma(n, lf_splat(-0x1.63p-1f), x);
    r = lf_fma(n, lf_splat(0x1.bd0106p-13f), r);
    vf q = LF_POLY(r, 0x1p-1f, 0x1.55548ep-3f, 0x1.55545ep-5f, 0x1.123be0p-7f, 0x1.6db4e6p-10f);
    vf p = lf_fma(q, r * r, r) + 1.0f;
    vi i = (vi)((vu)t - LF_MAGIC_BITS), h = i >> 1;
    return (p * lf_exp2i(h)) * lf_exp2i((vi)((vu)i - (vu)h));
}

LF_INLINE vf lf_log(vf x) {
    vi small = x < 0x1p-126f;
    vf y = lf_select(small, x * 0x1p+23f, x);
    vu i = (vu)y - 0x3f3504f3u;
    vf e = __builtin_convertvector(((vi)i >> 23) + (small & -23), vf);
    vf f = (vf)((i & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    vf z = f * f;
    vf q = LF_POLY(f, 0x1.555546p-2f, -0x1.ffffecp-3f, 0x1.99a588p-3f, -0x1.55634ep-3f, 0x1.232d74p-3f,
                   -0x1.fb2cb4p-4f, 0x1.e68d5ep-4f, -0x1.e39202p-4f, 0x1.1b847cp-4f);
    vf w = (z * f) * q;
    w = lf_fma(e, lf_splat(-0x1.bd0106p-13f), w);
    w = lf_fma(z, lf_splat(-0.5f), w) + f;
    w = lf_fma(e, lf_splat(0x1.63p-1f), w);
    w = lf_select(x == LF_INF, x, w);
    w = lf_select(x == 0.0f, lf_splat(-LF_INF), w);
    return lf_select((x < 0.0f) | (x != x), lf_splat(lf_float1(0x7fc00000u)), w);
}

LF_INLINE vf lf_tanh(vf x) {
    vf a = lf_abs(x), z = x * x;
    vf q = LF_POLY(z, -0x1.555534p-2f, 0x1.110768p-3f, -0x1.b84446p-5f, 0x1.5256cap-6f, -0x1.76abe4p-8f);
    vf large = 1.0f - 2.0f / (lf_exp(a + a) + 1.0f);
    return lf_with_sign(lf_select(a < 0.625f, lf_fma(x * z, q, x), large), x);
}

LF_INLINE vf lf_erf(vf x) {
    vf a = lf_abs(x), z = x * x;
    vf small = x * LF_POLY(z, 0x1.20dd74p+0f, -0x1.8126d4p-2f, 0x1.ce17a6p-4f, -0x1.b66324p-6f, 0x1.464ff2p-8f,
                           -0x1.365910p-11f);
    vf b = lf_select(a > 3.953125f, lf_splat(3.953125f), a);
    vf g = LF_POLY(b, -0x1.77fc3ap-13f, 0x1.212956p+0f, 0x1.44403cp-1f, 0x1.bbb6e4p-4f, -0x1.9c11fep-6f,
                   0x1.1221fap-8f, -0x1.ca212ep-12f, 0x1.657482p-16f);
    vf large = 1.0f - lf_exp(lf_neg(g));
    return lf_select(a < 0.9375f, small, lf_with_sign(large, x));
}

/* |x| > 131072 and finite: the angle in quarter turns by integers, x = m * 2^e times the bits of 2/pi. */
LF_INLINE float lf_reduce_large(float x, int32_t *quadrant) {
    static const uint32_t two_over_pi[9] = {0,           0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
                                            0xdb629599u, 0x3c439041u, 0xfe5163abu, 0xdebbc561u};
    uint32_t w = lf_bits1(x), m = (w & 0x7fffffu) | 0x800000u;
    int32_t first = (int32_t)((w >> 23) & 255) - 150 - 2 + 32; /* bits of two_over_pi before the window */
    uint32_t at = (uint32_t)first / 32, shift = (uint32_t)first % 32, f[3];
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t pair = ((uint64_t)two_over_pi[at + i] << 32) | two_over_pi[at + i + 1];
        f[i] = (uint32_t)((pair << shift) >> 32);
    }
    uint64_t low = (uint64_t)m * f[2], mid = (uint64_t)m * f[1] + (low >> 32);
    uint64_t u = mid + ((uint64_t)(m * f[0]) << 32); /* P >> 32 */
    uint64_t j = ((u >> 61) + 1) >> 1;
    float r = (float)(int64_t)(u - (j << 62)) * 0x1.921fb6p-62f;
    int negative = w >> 31;
    *quadrant = negative ? -(int32_t)j : (int32_t)j;
    return negative ? -r : r;
}

LF_INLINE vf lf_sin_shifted(vf x, uint32_t shift) {
    vf t = lf_fma(x, lf_splat(0x1.45f306p-1f), lf_splat(LF_MAGIC));
    vf n = t - LF_MAGIC;
    vu j = (vu)t - LF_MAGIC_BITS;
    vf r = lf_fma(n, lf_splat(-0x1.921fb6p+0f), x);
    r = lf_fma(n, lf_splat(0x1.777a5cp-25f), r);
    r = lf_fma(n, lf_splat(0x1.ee59dap-50f), r);
    for (int i = 0; i < LF_VL; i++) {
        float v = x[i], a = v < 0.0f ? -v : v;
        if (a <= 131072.0f) continue;
        int32_t q = 0;
        r[i] = a < LF_INF ? lf_reduce_large(v, &q) : lf_float1(0x7fc00000u);
        j[i] = (uint32_t)q;
    }
    vf z = r * r;
    vf s = lf_fma(z * r, LF_POLY(z, -0x1.555556p-3f, 0x1.111108p-7f, -0x1.a00f32p-13f, 0x1.6cbeccp-19f), r);
    vf c = lf_fma(z * z, LF_POLY(z, 0x1.555556p-5f, -0x1.6c16b8p-10f, 0x1.a010c4p-16f, -0x1.2417dep-22f),
                  lf_fma(z, lf_splat(-0.5f), lf_splat(1.0f)));
    j += shift;
    vf v = lf_select((j & 1u) != 0u, c, s);
    return (vf)((vu)v ^ ((j & 2u) << 30));
}

LF_INLINE vf lf_sin(vf x) { return lf_select(x == 0.0f, x, lf_sin_shifted(x, 0)); }
LF_INLINE vf lf_cos(vf x) { return lf_sin_shifted(x, 1); }
LF_INLINE vf lf_relu(vf x) { return lf_select(x <= 0.0f, lf_splat(0.0f), x); }
LF_INLINE vf lf_sigmoid(vf x) { return 1.0f / (1.0f + lf_exp(lf_neg(x))); }
LF_INLINE vf lf_silu(vf x) { return x / (1.0f + lf_exp(lf_neg(x))); }

LF_INLINE vf lf_gelu_tanh(vf x) {
    vf u = lf_fma((x * x) * x, lf_splat(0x1.6e4e26p-5f), x) * 0x1.988454p+0f;
    return x / (1.0f + lf_exp(lf_neg(u)));
}

LF_INLINE vf lf_gelu_erf(vf x) { return (x * 0.5f) * (1.0f + lf_erf(x * 0x1.6a09e6p-1f)); }

LF_INLINE vf lf_sqrt(vf x) {
    LF_UNROLL
    for (int i = 0; i < LF_VL; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

LF_INLINE vf lf_max_nan(vf m, vf x) { return lf_select((x > m) | (x != x), x, m); }
LF_INLINE vf lf_min_nan(vf m, vf x) { return lf_select((x < m) | (x != x), x, m); }

LF_INLINE vf lf_act_apply(vf x, int32_t act) {
    switch (act) {
    case LF_ACT_RELU: return lf_relu(x);
    case LF_ACT_SILU: return lf_silu(x);
    case LF_ACT_GELU_TANH: return lf_gelu_tanh(x);
    case LF_ACT_GELU_ERF: return lf_gelu_erf(x);
    default: return x;
    }
}

#endif
