/* One vector type per build, and fma with exactly one rounding whether the machine has it or not. */
#ifndef LF_VEC_H
#define LF_VEC_H

#include <stdint.h>
#include <string.h>

#include "lf_kernels.h"

#if defined(LF_VL) /* 4, 8 or 16, by the tests */
#elif defined(__AVX512F__)
#define LF_VL 16
#elif defined(__AVX2__) || defined(__loongarch_asx)
#define LF_VL 8
#else
#define LF_VL 4
#endif

/* No vector registers: the compiler takes LF_VL floats apart. */
#if defined(__SSE2__) || defined(__ARM_NEON) || defined(__loongarch_sx) || defined(__riscv_vector)
#define LF_SCALAR 0
#else
#define LF_SCALAR 1
#endif

#if defined(__FMA__) || defined(__aarch64__) || (defined(__riscv_flen) && __riscv_flen >= 32) || \
    (defined(__loongarch_frlen) && __loongarch_frlen >= 32)
#define LF_HARD_FMA 1
#else
#define LF_HARD_FMA 0
#endif

#if defined(__FMA__) && !defined(__clang__)
#include <immintrin.h>
#endif

#define LF_INLINE static inline __attribute__((always_inline, unused))
/* Where sums cannot stay in vector registers a large tile only costs compile time. */
#define LF_SMALL_TILES (LF_SCALAR || !LF_HARD_FMA)
#if LF_SMALL_TILES
#define LF_UNROLL
#elif defined(__clang__)
#define LF_UNROLL _Pragma("unroll")
#else
#define LF_UNROLL _Pragma("GCC unroll 32")
#endif
#define LF_VECTORS (LF_LANES / LF_VL) /* vectors that hold 16 lanes, or a row of a panel */

typedef float vf __attribute__((vector_size(4 * LF_VL)));
typedef int32_t vi __attribute__((vector_size(4 * LF_VL)));
typedef uint32_t vu __attribute__((vector_size(4 * LF_VL)));

LF_INLINE vf lf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

LF_INLINE void lf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

LF_INLINE vf lf_splat(float x) { return x - (vf){0}; } /* x - (+0) is x for every x, -0 too */

LF_INLINE vf lf_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

LF_INLINE vf lf_abs(vf x) { return (vf)((vu)x & 0x7fffffffu); }

LF_INLINE vf lf_neg(vf x) { return (vf)((vu)x ^ 0x80000000u); }

LF_INLINE vf lf_with_sign(vf magnitude, vf x) { return (vf)(((vu)magnitude & 0x7fffffffu) | ((vu)x & 0x80000000u)); }

LF_INLINE uint32_t lf_bits1(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

LF_INLINE float lf_float1(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

#if LF_HARD_FMA

LF_INLINE float lf_fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

LF_INLINE vf lf_fma(vf a, vf b, vf c) {
#if defined(__clang__)
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__) && LF_VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && LF_VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vf r;
    LF_UNROLL
    for (int i = 0; i < LF_VL; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

#else

/* The product of two floats is exact in a double. The double sum s has error e (TwoSum, exact). Where e is not zero and
 * the last bit of s is even, s moves one step towards e: that is rounding to odd, and a value rounded to odd with
 * 53 >= 2 * 24 + 2 bits rounds to float as the exact value does (Boldo and Melquiond, 2008), subnormals included. */
typedef double vd __attribute__((vector_size(8 * LF_VL)));
typedef int64_t vl __attribute__((vector_size(8 * LF_VL)));
typedef uint64_t vul __attribute__((vector_size(8 * LF_VL)));

LF_INLINE vf lf_fma(vf a, vf b, vf c) {
    vd p = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd);
    vd d = __builtin_convertvector(c, vd);
    vd s = p + d;
    vd t = s - p;
    vd e = (p - (s - t)) + (d - t);
    vl inexact = (e < 0.0) | (e > 0.0); /* false for NaN: s is infinite or NaN then */
    vl even = ((vl)s & 1) - 1;
    vul opposite = ((vul)e ^ (vul)s) >> 63;
    vl step = (vl)(1 - 2 * opposite);
    return __builtin_convertvector((vd)(vl)((vul)s + (vul)(step & inexact & even)), vf);
}

LF_INLINE float lf_fma1(float a, float b, float c) {
    double p = (double)a * (double)b, d = c, s = p + d, t = s - p, e = (p - (s - t)) + (d - t);
    int64_t w;
    memcpy(&w, &s, 8);
    if ((e < 0.0 || e > 0.0) && !(w & 1)) w += ((e < 0.0) == (s < 0.0)) ? 1 : -1;
    memcpy(&s, &w, 8);
    return (float)s;
}

#endif

/* The vector of up to LF_VL elements at p; the others are +0. */
LF_INLINE vf lf_load_part(const float *p, int64_t n) {
    float t[LF_VL] = {0};
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    return lf_load(t);
}

LF_INLINE void lf_store_part(float *p, vf v, int64_t n) {
    float t[LF_VL];
    lf_store(t, v);
    for (int64_t i = 0; i < n; i++) p[i] = t[i];
}

#endif
