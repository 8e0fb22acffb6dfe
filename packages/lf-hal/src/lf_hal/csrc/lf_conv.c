/* conv2d as the product of gathered rows with packed weights, and pooling. NHWC. */
#include "lf_internal.h"
#include "lf_widen.h"

LF_INLINE int64_t group_in(const lf_conv2d *c) { return c->in_c / c->groups; }
LF_INLINE int64_t group_out(const lf_conv2d *c) { return c->out_c / c->groups; }
LF_INLINE int64_t terms(const lf_conv2d *c) { return c->k_h * c->k_w * group_in(c); }

int64_t lf_packed_conv_size_f32(const lf_conv2d *c) {
    return c->groups * lf_packed_size_f32(terms(c), group_out(c));
}

/* Elements are only moved, by their size. */
#define LF_DEFINE_PACK(name, type)                                                                            \
    static void name(type *packed, const type *w, const lf_conv2d *c, int64_t group_begin, int64_t group_end) { \
        int64_t k = terms(c), n = group_out(c), ci = group_in(c), taps = c->k_h * c->k_w;                     \
        for (int64_t g = group_begin; g < group_end; g++) {                                                   \
            type *to = packed + g * lf_packed_size_f32(k, n);                                                 \
            const type *from = w + g * n * k;                                                                 \
            for (int64_t p = 0; p < lf_panels(n); p++)                                                        \
                for (int64_t i = 0; i < k; i++)                                                               \
                    for (int64_t j = 0; j < LF_PANEL; j++) {                                                  \
                        int64_t o = p * LF_PANEL + j;                                                         \
                        to[(p * k + i) * LF_PANEL + j] = o < n ? from[(o * ci + i % ci) * taps + i / ci] : 0; \
                    }                                                                                         \
        }                                                                                                     \
    }
LF_DEFINE_PACK(pack_4, float)
LF_DEFINE_PACK(pack_2, uint16_t)
LF_DEFINE_PACK(pack_1, int8_t)

void lf_pack_conv_stored(int32_t storage, void *packed, const void *w, const lf_conv2d *c, int64_t group_begin,
                         int64_t group_end) {
    if (storage == LF_F32)
        pack_4(packed, w, c, group_begin, group_end);
    else if (storage == LF_I8)
        pack_1(packed, w, c, group_begin, group_end);
    else
        pack_2(packed, w, c, group_begin, group_end);
}

void lf_pack_conv_f32(float *packed, const float *w, const lf_conv2d *c, int64_t group_begin, int64_t group_end) {
    pack_4(packed, w, c, group_begin, group_end);
}

LF_INLINE void put(float *to, const float *from, int64_t n) {
    if (n > 0) memcpy(to, from, (size_t)n * sizeof(float));
}

LF_INLINE void put_zeros(float *to, int64_t n) {
    if (n > 0) memset(to, 0, (size_t)n * sizeof(float));
}

/* Terms [k_begin, k_end) of one output pixel and group. A run is what lies side by side in x: one tap's channels, or
 * a whole line of the window if its taps touch. */
static void gather(float *to, const float *x, const lf_conv2d *c, int64_t group, int64_t pixel, int64_t k_begin,
                   int64_t k_end) {
    int64_t ci = group_in(c), whole = c->dil_w == 1 && c->groups == 1;
    int64_t taps_run = whole ? c->k_w : 1, run = taps_run * ci;
    int64_t ox = pixel % c->out_w, oy = pixel / c->out_w % c->out_h, image = pixel / c->out_w / c->out_h;
    int64_t x0 = ox * c->stride_w - c->pad_left, y0 = oy * c->stride_h - c->pad_top;
    for (int64_t k = k_begin; k < k_end;) {
        int64_t r = k / run, skip = k % run, n = lf_min64(run - skip, k_end - k);
        int64_t kh = whole ? r : r / c->k_w, kw = whole ? 0 : r % c->k_w;
        int64_t iy = y0 + kh * c->dil_h, ix = x0 + kw * c->dil_w;
        if (iy < 0 || iy >= c->in_h) {
            put_zeros(to, n);
        } else {
            const float *line = x + (image * c->in_h + iy) * c->in_w * c->in_c;
            /* the run covers elements [at, at + n) of the line, of which [0, end) exist */
            int64_t step = whole ? ci : c->in_c, inside = ix >= 0 && ix < c->in_w;
            int64_t at = ix * step + (whole ? 0 : group * ci) + skip, end = c->in_w * step;
            if (whole || inside) {
                int64_t left = lf_min64(n, lf_max64(0, -at)), right = lf_min64(n - left, lf_max64(0, at + n - end));
                put_zeros(to, left);
                put(to + left, line + at + left, n - left - right);
                put_zeros(to + n - right, right);
            } else {
                put_zeros(to, n);
            }
        }
        k += n;
        to += n;
    }
}

/* Rows of a, gathered for one chunk, are used for so many panels at a time. */
#define LF_CONV_PANELS 32
/* Odd multiple of a cache line, so that rows of a tile do not fall on one another in the first-level cache. */
#define LF_CONV_STRIDE (LF_CHUNK + 16)

static void conv_group(lf_tile_fn *tiles, float *y, const float *x, const void *packed, const lf_conv2d *c,
                       const lf_epilogue *e, int64_t group, int64_t row_begin, int64_t row_end) {
    float a[LF_ROWS * LF_CONV_STRIDE];
    int64_t k = terms(c), n = group_out(c), panels = lf_panels(n);
    for (int64_t p = 0; p < panels; p += LF_CONV_PANELS) {
        int64_t k_begin = 0;
        do {
            int64_t k_end = lf_min64(k, k_begin + LF_CHUNK);
            for (int64_t row = row_begin; row < row_end; row += LF_ROWS) {
                int64_t rows = lf_min64(LF_ROWS, row_end - row);
                for (int64_t r = 0; r < rows; r++)
                    gather(a + r * LF_CONV_STRIDE, x, c, group, row + r, k_begin, k_end);
                int64_t at = row * c->out_c + group * n;
                lf_epilogue of_rows;
                if (e) of_rows = *e, of_rows.add = e->add ? e->add + at : 0;
                tiles(y + at, c->out_c, a - k_begin, LF_CONV_STRIDE, packed, k, n, k_end == k && e ? &of_rows : 0,
                      rows, p, lf_min64(panels, p + LF_CONV_PANELS), k_begin, k_end);
            }
            k_begin = k_end;
        } while (k_begin < k);
    }
}

LF_INLINE vf take(const float *p, int64_t count) { return count >= LF_VL ? lf_load(p) : lf_load_part(p, count); }

/* nv vectors of channels from first on, or count < LF_VL of them (nv is 1 then). */
LF_INLINE void depthwise_channels(const int nv, int32_t storage, float *y, const float *x, const void *packed,
                                  const lf_conv2d *c, const lf_epilogue *e, int64_t first, int64_t count,
                                  int64_t row_begin, int64_t row_end) {
    int64_t taps = c->k_h * c->k_w;
    vf w[4 * LF_CHUNK];
    for (int64_t t = 0; t < taps * nv; t++) {
        float lane[LF_VL] = {0};
        for (int64_t i = 0; i < lf_min64(count, LF_VL); i++)
            lane[i] = lf_widen1(storage, packed, ((first + t % nv * LF_VL + i) * taps + t / nv) * LF_PANEL);
        w[t] = lf_load(lane);
    }
    for (int64_t row = row_begin; row < row_end; row++) {
        int64_t ox = row % c->out_w, oy = row / c->out_w % c->out_h, image = row / c->out_w / c->out_h;
        int64_t y0 = oy * c->stride_h - c->pad_top, x0 = ox * c->stride_w - c->pad_left;
        vf s[4];
        LF_UNROLL
        for (int j = 0; j < nv; j++) s[j] = lf_splat(0.0f);
        for (int64_t kh = 0; kh < c->k_h; kh++)
            for (int64_t kw = 0; kw < c->k_w; kw++) {
                int64_t iy = y0 + kh * c->dil_h, ix = x0 + kw * c->dil_w;
                int inside = iy >= 0 && iy < c->in_h && ix >= 0 && ix < c->in_w;
                const vf *tap = w + (kh * c->k_w + kw) * nv;
                int64_t from = ((image * c->in_h + iy) * c->in_w + ix) * c->in_c + first;
                LF_UNROLL
                for (int j = 0; j < nv; j++)
                    s[j] = lf_fma(inside ? take(x + from + j * LF_VL, count) : lf_splat(0.0f), tap[j], s[j]);
            }
        for (int j = 0; j < nv; j++) {
            int64_t at = first + j * LF_VL;
            vf v = s[j];
            if (e && e->weight_scale) v = v * take(e->weight_scale + at, count);
            if (e && e->bias) v = v + take(e->bias + at, count);
            if (e && e->scale) v = lf_fma(v, take(e->scale + at, count), take(e->shift + at, count));
            if (e && e->add) v = v + take(e->add + row * c->out_c + at, count);
            if (e && e->act) v = lf_act_apply(v, e->act);
            if (count >= LF_VL)
                lf_store(y + row * c->out_c + at, v);
            else
                lf_store_part(y + row * c->out_c + at, v, count);
        }
    }
}

/* One channel in, one out for each group, and no more taps than a chunk holds: lanes are channels. */
static void depthwise(int32_t storage, float *y, const float *x, const void *packed, const lf_conv2d *c,
                      const lf_epilogue *e, int64_t row_begin, int64_t row_end) {
    int64_t i = 0, n = c->out_c;
    for (; i + 4 * LF_VL <= n; i += 4 * LF_VL)
        depthwise_channels(4, storage, y, x, packed, c, e, i, LF_VL, row_begin, row_end);
    for (; i + LF_VL <= n; i += LF_VL)
        depthwise_channels(1, storage, y, x, packed, c, e, i, LF_VL, row_begin, row_end);
    if (i < n) depthwise_channels(1, storage, y, x, packed, c, e, i, n - i, row_begin, row_end);
}

void lf_conv2d_stored(int32_t storage, float *y, const float *x, const void *packed, const lf_conv2d *c,
                      const lf_epilogue *epilogue, int64_t row_begin, int64_t row_end) {
    int64_t n = group_out(c), size = lf_packed_size_f32(terms(c), n);
    int64_t width = storage == LF_F32 ? 4 : storage == LF_I8 ? 1 : 2; /* bytes of an element */
    int plain = c->k_h == 1 && c->k_w == 1 && c->stride_h == 1 && c->stride_w == 1 && c->groups == 1 &&
                c->pad_top == 0 && c->pad_left == 0 && c->out_h == c->in_h && c->out_w == c->in_w;
    if (plain) {
        lf_gemm_stored(storage, y, n, x, c->in_c, packed, c->in_c, n, epilogue, row_begin, row_end, 0, lf_panels(n));
        return;
    }
    if (group_in(c) == 1 && n == 1 && terms(c) <= LF_CHUNK && terms(c) > 0) {
        depthwise(storage, y, x, packed, c, epilogue, row_begin, row_end);
        return;
    }
    for (int64_t g = 0; g < c->groups; g++) {
        lf_epilogue e = {0};
        if (epilogue) {
            e.weight_scale = epilogue->weight_scale ? epilogue->weight_scale + g * n : 0;
            e.bias = epilogue->bias ? epilogue->bias + g * n : 0;
            e.scale = epilogue->scale ? epilogue->scale + g * n : 0;
            e.shift = epilogue->shift ? epilogue->shift + g * n : 0;
            e.act = epilogue->act;
            e.add = epilogue->add;
        }
        conv_group(lf_tiles_of(storage), y, x, (const uint8_t *)packed + g * size * width, c, epilogue ? &e : 0, g,
                   row_begin, row_end);
    }
}

void lf_conv2d_f32(float *y, const float *x, const float *packed, const lf_conv2d *c, const lf_epilogue *epilogue,
                   int64_t row_begin, int64_t row_end) {
    lf_conv2d_stored(LF_F32, y, x, packed, c, epilogue, row_begin, row_end);
}

/* One output pixel, LF_VL channels from column on (count of them exist). */
LF_INLINE void pool_channels(int32_t op, float *y, const float *x, const lf_pool2d *c, int64_t y0, int64_t x0,
                             int64_t column, int64_t count) {
    vf s = lf_splat(op == LF_POOL_MAX ? -LF_INF : 0.0f);
    int64_t taps = 0;
    for (int64_t kh = 0; kh < c->k_h; kh++) {
        int64_t iy = y0 + kh * c->dil_h;
        if (iy < 0 || iy >= c->in_h) continue;
        for (int64_t kw = 0; kw < c->k_w; kw++) {
            int64_t ix = x0 + kw * c->dil_w;
            if (ix < 0 || ix >= c->in_w) continue;
            const float *from = x + (iy * c->in_w + ix) * c->channels + column;
            vf v = count >= LF_VL ? lf_load(from) : lf_load_part(from, count);
            s = op == LF_POOL_MAX ? lf_max_nan(s, v) : s + v;
            taps++;
        }
    }
    if (op == LF_POOL_AVG) s = s / (float)(c->count_pad ? c->k_h * c->k_w : taps);
    if (count >= LF_VL)
        lf_store(y + column, s);
    else
        lf_store_part(y + column, s, count);
}

void lf_pool2d_f32(int32_t op, float *y, const float *x, const lf_pool2d *c, int64_t row_begin, int64_t row_end) {
    for (int64_t row = row_begin; row < row_end; row++) {
        int64_t ox = row % c->out_w, oy = row / c->out_w % c->out_h, image = row / c->out_w / c->out_h;
        const float *from = x + image * c->in_h * c->in_w * c->channels;
        for (int64_t i = 0; i < c->channels; i += LF_VL)
            pool_channels(op, y + row * c->channels, from, c, oy * c->stride_h - c->pad_top,
                          ox * c->stride_w - c->pad_left, i, c->channels - i);
    }
}
