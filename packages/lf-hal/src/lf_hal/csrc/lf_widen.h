/* Weights that are stored narrow, as the floats that they stand for. Every conversion is exact. */
#ifndef LF_WIDEN_H
#define LF_WIDEN_H

#include "lf_vec.h"

/* gcc 12 takes __builtin_convertvector apart into halves; these are single instructions. */
#if !defined(__clang__) && defined(__AVX512F__) && LF_VL == 16
#include <immintrin.h>
#define LF_WIDEN_U16(h) ((vu)_mm512_cvtepu16_epi32((__m256i)(h)))
#define LF_WIDEN_I8(b) ((vi)_mm512_cvtepi8_epi32((__m128i)(b)))
#define LF_WIDEN_F16(h) ((vf)_mm512_cvtph_ps((__m256i)(h)))
#elif !defined(__clang__) && defined(__AVX2__) && defined(__F16C__) && LF_VL == 8
#include <immintrin.h>
#define LF_WIDEN_U16(h) ((vu)_mm256_cvtepu16_epi32((__m128i)(h)))
#define LF_WIDEN_I8(b) ((vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)(b))))
#define LF_WIDEN_F16(h) ((vf)_mm256_cvtph_ps((__m128i)(h)))
#else
#define LF_WIDEN_U16(h) __builtin_convertvector(h, vu)
#define LF_WIDEN_I8(b) __builtin_convertvector(b, vi)
#endif

typedef uint16_t vh __attribute__((vector_size(2 * LF_VL)));
typedef int8_t vb __attribute__((vector_size(LF_VL)));

LF_INLINE vf lf_load_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(LF_WIDEN_U16(h) << 16);
}

/* The bits below the sign, as those of a float, are the value times 2^-112, subnormals too; infinities and NaN get the
 * exponent of theirs. */
LF_INLINE vf lf_load_f16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
#if defined(LF_WIDEN_F16)
    return LF_WIDEN_F16(h);
#else
    vu u = LF_WIDEN_U16(h), rest = (u & 0x7fffu) << 13;
    vi special = (vi)((u & 0x7c00u) == 0x7c00u);
    vf value = lf_select(special, (vf)(rest | 0x7f800000u), (vf)rest * 0x1p+112f);
    return (vf)((vu)value | ((u & 0x8000u) << 16));
#endif
}

LF_INLINE vf lf_load_i8(const int8_t *p) {
    vb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(LF_WIDEN_I8(b), vf);
}

/* Element i of an array of that storage. */
LF_INLINE float lf_widen1(int32_t storage, const void *p, int64_t i) {
    if (storage == LF_F32) return ((const float *)p)[i];
    if (storage == LF_I8) return (float)((const int8_t *)p)[i];
    uint32_t h = ((const uint16_t *)p)[i];
    if (storage == LF_BF16) return lf_float1(h << 16);
    uint32_t rest = (h & 0x7fffu) << 13;
    float value = (h & 0x7c00u) == 0x7c00u ? lf_float1(rest | 0x7f800000u) : lf_float1(rest) * 0x1p+112f;
    return lf_float1(lf_bits1(value) | (h & 0x8000u) << 16);
}

#endif
