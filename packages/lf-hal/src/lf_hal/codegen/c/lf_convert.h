/* Conversions between element types, by integer operations and exact steps only: the same bits everywhere. */
#ifndef LF_CONVERT_H
#define LF_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float lf_widen_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* IEEE half precision; exact. The bits below the sign, as those of a float, are the value times 2^-112. */
static inline float lf_widen_f16(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float f;
    if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    memcpy(&f, &bits, 4);
    if ((h & 0x7c00) != 0x7c00) f *= 0x1p+112f;
    return h & 0x8000 ? -f : f;
}

/* To nearest, ties to even; NaN becomes 0x7fc0. */
static inline uint16_t lf_narrow_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* float to integer truncates; what does not fit becomes the nearest end of the range, NaN becomes 0. In C such casts
 * are undefined, and machines differ. */
#define LF_TRUNCATE(name, type, low, high, low_value, high_value)                                                      \
    static inline type name(float f) {                                                                                 \
        return f >= (low) && f < (high) ? (type)f : f < (low) ? (low_value) : f >= (high) ? (high_value) : 0;          \
    }
LF_TRUNCATE(lf_truncate_i8, int8_t, -128.0f, 128.0f, INT8_MIN, INT8_MAX)
LF_TRUNCATE(lf_truncate_i32, int32_t, -2147483648.0f, 2147483648.0f, INT32_MIN, INT32_MAX)
LF_TRUNCATE(lf_truncate_i64, int64_t, -9223372036854775808.0f, 9223372036854775808.0f, INT64_MIN, INT64_MAX)

#endif
