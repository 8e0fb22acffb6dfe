/* Kernels of lf-hal: float32, the same bits on every instruction set. ORDER.md defines every result.
 *
 * Rules that hold for all functions
 * - No globals, no allocation, no libm. The only library functions that may be needed are memcpy and memset.
 * - Sizes, strides and ranges count elements and are int64_t. Ranges are half open: [begin, end).
 * - Threads split outputs only: calls whose ranges do not overlap may run at the same time, and the bits do not
 *   depend on how a range is cut. A kernel that needs scratch gets one scratch of its own per thread.
 * - Arrays need the alignment of float (4 bytes); 64 bytes are faster. y may not overlap an input, except where
 *   "in place" is said.
 * - Rounding mode is to nearest even and flush-to-zero is off in every thread that calls.
 */
#ifndef LF_KERNELS_H
#define LF_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LF_ORDER_VERSION 1
#define LF_CHUNK 128 /* terms of a sum of products that share one accumulator */
#define LF_LANES 16  /* logical lanes of a row reduction */
#define LF_PANEL 16  /* columns of a packed panel; the same on every instruction set */
#define LF_MAX_RANK 8

/* ---- products ------------------------------------------------------------------------------------------------ */

enum lf_act { LF_ACT_NONE = 0, LF_ACT_RELU = 1, LF_ACT_SILU = 2, LF_ACT_GELU_TANH = 3, LF_ACT_GELU_ERF = 4 };

/* How the weights of a product are stored. All are widened to float32 exactly before they are multiplied: bf16 is the
 * upper half of a float32, f16 is IEEE half precision, i8 is an integer (what a step of it is worth is weight_scale). */
enum lf_storage { LF_F32 = 0, LF_BF16 = 1, LF_F16 = 2, LF_I8 = 3 };

/* What happens to a finished sum s of output column n, in this order:
 *   s = s * weight_scale[n]       if weight_scale
 *   s = s + bias[n]               if bias
 *   s = fma(s, scale[n], shift[n]) if scale (then shift is given too)
 *   s = s + add[m, n]             if add
 *   s = act(s) */
typedef struct lf_epilogue {
    const float *bias;  /* [N] or NULL */
    const float *scale; /* [N] or NULL */
    const float *shift; /* [N], with scale */
    int32_t act;        /* enum lf_act */
    const float *weight_scale; /* [N] or NULL */
    const float *add;          /* laid out as y, strides and all, or NULL; may not overlap y */
} lf_epilogue;

/* Panels of a packed B of N columns: (N + 15) / 16. */
int64_t lf_panels(int64_t n);

/* Floats of a packed B[K, N]: lf_panels(N) * K * 16. */
int64_t lf_packed_size_f32(int64_t k, int64_t n);

/* Packs B[K, N], element (k, n) at b[k * k_stride + n * n_stride], into panels:
 *   packed[(n / 16) * K * 16 + k * 16 + n % 16] = B[k, n], and +0 for columns from N to the end of the last panel.
 * A torch weight w[N, K] is packed with k_stride 1, n_stride K; a matrix b[K, N] with k_stride N, n_stride 1.
 * Range: panels. The layout does not depend on the instruction set. */
void lf_pack_b_f32(float *packed, const float *b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n,
                   int64_t panel_begin, int64_t panel_end);

/* y[m, n] = epilogue(sum over k of a[m, k] * B[k, n]), y at y[m * y_stride + n], a at a[m * a_stride + k].
 * linear: B packed from w[N, K]; matmul: from b[K, N]. k may be 0 (the sum is +0). epilogue may be NULL.
 * Range: rows [row_begin, row_end) times panels [panel_begin, panel_end). */
void lf_gemm_f32(float *y, int64_t y_stride, const float *a, int64_t a_stride, const float *packed, int64_t k,
                 int64_t n, const lf_epilogue *epilogue, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                 int64_t panel_end);

/* The two of any storage; packed and b hold elements of it, as many as floats above. */
void lf_pack_b_stored(int32_t storage, void *packed, const void *b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n,
               int64_t panel_begin, int64_t panel_end);
void lf_gemm_stored(int32_t storage, float *y, int64_t y_stride, const float *a, int64_t a_stride, const void *packed,
             int64_t k, int64_t n, const lf_epilogue *epilogue, int64_t row_begin, int64_t row_end,
             int64_t panel_begin, int64_t panel_end);

/* conv2d over NHWC. x[batch, in_h, in_w, in_c], y[batch, out_h, out_w, out_c], both dense.
 * The weights are packed per group by lf_pack_conv_f32. out_h = (in_h + pad_top + pad_bottom - dil_h * (k_h - 1)
 * - 1) / stride_h + 1 is computed by the caller (bottom and right padding follow from it); so out_w. */
typedef struct lf_conv2d {
    int64_t batch, in_h, in_w, in_c, out_h, out_w, out_c;
    int64_t k_h, k_w, stride_h, stride_w, pad_top, pad_left, dil_h, dil_w, groups;
} lf_conv2d;

/* Floats of packed conv weights: groups * lf_packed_size_f32(k_h * k_w * in_c / groups, out_c / groups). */
int64_t lf_packed_conv_size_f32(const lf_conv2d *c);

/* Packs w[out_c, in_c / groups, k_h, k_w] (the layout of torch). For group g the matrix B[K, N] has
 * K index (kh * k_w + kw) * (in_c / groups) + ci and N = out_c / groups columns; groups follow one another.
 * Range: groups. */
void lf_pack_conv_f32(float *packed, const float *w, const lf_conv2d *c, int64_t group_begin, int64_t group_end);

/* y = epilogue(conv2d(x, w)); the epilogue's arrays have out_c entries. Taps that fall on padding are terms with
 * a = +0. Range: rows = output pixels, flattened (batch, out_h, out_w). */
void lf_conv2d_f32(float *y, const float *x, const float *packed, const lf_conv2d *c, const lf_epilogue *epilogue,
                   int64_t row_begin, int64_t row_end);

/* The two of any storage. */
void lf_pack_conv_stored(int32_t storage, void *packed, const void *w, const lf_conv2d *c, int64_t group_begin,
                  int64_t group_end);
void lf_conv2d_stored(int32_t storage, float *y, const float *x, const void *packed, const lf_conv2d *c,
                   const lf_epilogue *epilogue, int64_t row_begin, int64_t row_end);

/* Scaled dot product attention. q[B, H, T, D], k[B, G, S, D], v[B, G, S, V], y[B, H, T, V]; G divides H and query
 * head h reads group h / (H / G). The last axis is dense; the other axes have strides, in the order batch, head, row.
 * Query t sees keys j with j < S, j < lengths[b] (if given) and, if causal, j <= q_offset + t. Keys it does not
 * see take part in no sum. A query that sees no key gives +0. mask, if given, is added to the scaled scores. */
typedef struct lf_attention {
    int64_t batch, heads, groups, q_len, kv_len, qk_dim, v_dim;
    int64_t q_stride[3], k_stride[3], v_stride[3], y_stride[3];
    const int64_t *lengths; /* [batch] or NULL */
    const float *mask;      /* NULL, or mask[b, h, t, j] at b * s[0] + h * s[1] + t * s[2] + j; strides may be 0 */
    int64_t mask_stride[3];
    int64_t q_offset;
    float scale;
    int32_t causal;
} lf_attention;

/* Floats of scratch that one thread needs. */
int64_t lf_attention_scratch_f32(const lf_attention *c);

/* Range: pairs (b, g), flattened, of batch * groups. */
void lf_attention_f32(float *y, const float *q, const float *k, const float *v, const lf_attention *c,
                      float *scratch, int64_t group_begin, int64_t group_end);

/* ---- rows: x[rows, n] dense, range rows ------------------------------------------------------------------------ */

/* In place allowed. n = 0 gives nothing. */
void lf_softmax_f32(float *y, const float *x, int64_t n, int64_t row_begin, int64_t row_end);

/* weight and bias may be NULL, each for itself. In place allowed. */
void lf_layer_norm_f32(float *y, const float *x, const float *weight, const float *bias, int64_t n, float eps,
                       int64_t row_begin, int64_t row_end);

/* weight may be NULL. In place allowed. */
void lf_rms_norm_f32(float *y, const float *x, const float *weight, int64_t n, float eps, int64_t row_begin,
                     int64_t row_end);

enum lf_reduce { LF_REDUCE_SUM = 0, LF_REDUCE_MEAN = 1, LF_REDUCE_MAX = 2 };

/* y[row] from x[row, 0..n). Other axes: bring them to the end with lf_copy_f32 first, in ascending order.
 * n = 0: sum +0, mean NaN, max -inf. */
void lf_reduce_f32(int32_t op, float *y, const float *x, int64_t n, int64_t row_begin, int64_t row_end);

/* ---- elements ---------------------------------------------------------------------------------------------------- */

enum lf_unary {
    LF_NEG = 0, LF_RSQRT = 1, LF_SIN = 2, LF_COS = 3, LF_TANH = 4, LF_SIGMOID = 5, LF_SILU = 6, LF_GELU_TANH = 7,
    LF_GELU_ERF = 8, LF_RELU = 9, LF_EXP = 10, LF_ERF = 11, LF_SQRT = 12, LF_ABS = 13, LF_LOG = 14
};

/* y[i] = op(x[i]) for i in the range. In place allowed. */
void lf_unary_f32(int32_t op, float *y, const float *x, int64_t begin, int64_t end);

enum lf_binary { LF_ADD = 0, LF_SUB = 1, LF_MUL = 2, LF_DIV = 3, LF_POW = 4, LF_MAXIMUM = 5, LF_MINIMUM = 6 };

/* y (dense, of that shape) = a op b. Strides, rank of them each, are in elements; 0 broadcasts; a scalar has strides
 * of 0 throughout. rank is 1..LF_MAX_RANK. In place allowed where y and the input are both dense.
 * Range: rows = product of shape[0..rank-2] (1 if rank is 1); the last axis is done whole. */
void lf_binary_f32(int32_t op, float *y, const float *a, const int64_t *a_strides, const float *b,
                   const int64_t *b_strides, const int64_t *shape, int32_t rank, int64_t row_begin, int64_t row_end);

/* y = fma(a, b, c), one rounding; the rest as lf_binary_f32. An affine per channel is this with broadcast b and c. */
void lf_multiply_add_f32(float *y, const float *a, const int64_t *a_strides, const float *b, const int64_t *b_strides,
                         const float *c, const int64_t *c_strides, const int64_t *shape, int32_t rank,
                         int64_t row_begin, int64_t row_end);

/* y[i...] = x[i...] with strides on both sides: permute, slice, concat, broadcast, layout changes. Range as above. */
void lf_copy_f32(float *y, const int64_t *y_strides, const float *x, const int64_t *x_strides, const int64_t *shape,
                 int32_t rank, int64_t row_begin, int64_t row_end);

/* Rotary embedding of x[rows, dim] (dim even, h = dim / 2), with cosine and sine tables of h entries per position.
 * Row r has position (r / inner) % length (x[B, T, H, dim]: inner = H, length = T; x[B, H, T, dim]: inner = 1).
 * The pair is (i, i + h), or (2i, 2i + 1) if interleaved:
 *   y_first = fma(x_first, cos, -(x_second * sin)), y_second = fma(x_second, cos, x_first * sin). In place allowed. */
void lf_rope_f32(float *y, const float *x, const float *cosine, const float *sine, int64_t dim, int64_t inner,
                 int64_t length, int32_t interleaved, int64_t row_begin, int64_t row_end);

/* y[i, :] = table[ids[i], :] for i in the range. Returns -1, or the first i whose id lies outside [0, rows). */
int64_t lf_embedding_f32(float *y, const float *table, const int64_t *ids, int64_t rows, int64_t dim, int64_t begin,
                         int64_t end);

/* ---- pooling over NHWC, x[batch, in_h, in_w, c] -> y[batch, out_h, out_w, c], range: output pixels ---------------- */

enum lf_pool { LF_POOL_MAX = 0, LF_POOL_AVG = 1 };

typedef struct lf_pool2d {
    int64_t batch, in_h, in_w, channels, out_h, out_w, k_h, k_w, stride_h, stride_w, pad_top, pad_left, dil_h, dil_w;
    int32_t count_pad; /* average: divide by k_h * k_w (1), or by the taps that lie in the input (0) */
} lf_pool2d;

/* Taps on padding take no part. An average over the whole image is adaptive_avg_pool2d(1). */
void lf_pool2d_f32(int32_t op, float *y, const float *x, const lf_pool2d *c, int64_t row_begin, int64_t row_end);

#ifdef __cplusplus
}
#endif

#endif
