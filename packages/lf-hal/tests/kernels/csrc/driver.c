/* Runs a list of kernel calls over one image of memory: stdin -> stdout. No C library, so it links in no time for
 * every machine. stdin: int64 words {flags, calls, image floats}, calls * 48 words, the image. stdout: the image.
 * A call is {function, arguments}; pointers are offsets into the image in floats, -1 is NULL. */
#include <stddef.h>
#include <stdint.h>

#include "lf_kernels.h"

#define WORDS 48
#define FLUSH_TO_ZERO 1

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n xor %ebp,%ebp\n and $-16,%rsp\n call lf_main\n");
static long call3(long n, long a, long b, long c) {
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return r;
}
#define SYS_READ 0
#define SYS_WRITE 1
#define SYS_EXIT 60
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n bl lf_main\n");
static long call3(long n, long a, long b, long c) {
    register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}
#elif defined(__riscv)
__asm__(".globl _start\n_start:\n call lf_main\n");
static long call3(long n, long a, long b, long c) {
    register long a7 __asm__("a7") = n, a0 __asm__("a0") = a, a1 __asm__("a1") = b, a2 __asm__("a2") = c;
    __asm__ volatile("ecall" : "+r"(a0) : "r"(a7), "r"(a1), "r"(a2) : "memory");
    return a0;
}
#elif defined(__loongarch__)
__asm__(".globl _start\n_start:\n bl lf_main\n");
static long call3(long n, long a, long b, long c) {
    register long a7 __asm__("a7") = n, a0 __asm__("a0") = a, a1 __asm__("a1") = b, a2 __asm__("a2") = c;
    __asm__ volatile("syscall 0"
                     : "+r"(a0)
                     : "r"(a7), "r"(a1), "r"(a2)
                     : "$t0", "$t1", "$t2", "$t3", "$t4", "$t5", "$t6", "$t7", "$t8", "memory");
    return a0;
}
#endif
#if !defined(SYS_READ)
#define SYS_READ 63
#define SYS_WRITE 64
#define SYS_EXIT 93
#endif

void *memcpy(void *to, const void *from, size_t n);
void *memset(void *to, int byte, size_t n);
void lf_main(void);

void *memcpy(void *to, const void *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ((char *)to)[i] = ((const char *)from)[i];
        __asm__ volatile("" ::: "memory"); /* or the compiler makes a call to memcpy of it */
    }
    return to;
}

void *memset(void *to, int byte, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ((char *)to)[i] = (char)byte;
        __asm__ volatile("" ::: "memory");
    }
    return to;
}

static _Alignas(64) float image[4 << 20];
static int64_t words[1024 * WORDS];

static void leave(int code) {
    for (;;) call3(SYS_EXIT, code, 0, 0);
}

static void transfer(long call, void *p, int64_t n) {
    for (int64_t done = 0; done < n;) {
        long r = call3(call, call == SYS_READ ? 0 : 1, (long)p + done, n - done);
        if (r <= 0) leave(2);
        done += r;
    }
}

static float *at(int64_t offset) { return offset < 0 ? 0 : image + offset; }

static float real(int64_t bits) {
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)bits};
    return v.f;
}

static lf_epilogue epilogue(const int64_t *w) {
    return (lf_epilogue){at(w[0]), at(w[1]), at(w[2]), (int32_t)w[3], 0, 0};
}

static lf_epilogue stored_epilogue(const int64_t *w) {
    lf_epilogue e = epilogue(w);
    e.weight_scale = at(w[4]);
    e.add = at(w[5]);
    return e;
}

static lf_conv2d conv(const int64_t *w) {
    return (lf_conv2d){w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15]};
}

static lf_pool2d pool(const int64_t *w) {
    return (lf_pool2d){w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13],
                       (int32_t)w[14]};
}

static lf_attention attention(const int64_t *w) {
    return (lf_attention){w[0], w[1], w[2], w[3], w[4], w[5], w[6], {w[7], w[8], w[9]}, {w[10], w[11], w[12]},
                          {w[13], w[14], w[15]}, {w[16], w[17], w[18]}, (const int64_t *)at(w[19]), at(w[20]),
                          {w[21], w[22], w[23]}, w[24], real(w[25]), (int32_t)w[26]};
}

static void run(const int64_t *c) {
    const int64_t *w = c + 1;
    switch (c[0]) {
    case 0: lf_pack_b_f32(at(w[0]), at(w[1]), w[2], w[3], w[4], w[5], w[6], w[7]); break;
    case 1: {
        lf_epilogue e = epilogue(w + 12);
        lf_gemm_f32(at(w[0]), w[1], at(w[2]), w[3], at(w[4]), w[5], w[6], w[11] ? &e : 0, w[7], w[8], w[9], w[10]);
        break;
    }
    case 2: {
        lf_conv2d s = conv(w + 4);
        lf_pack_conv_f32(at(w[0]), at(w[1]), &s, w[2], w[3]);
        break;
    }
    case 3: {
        lf_epilogue e = epilogue(w + 6);
        lf_conv2d s = conv(w + 10);
        lf_conv2d_f32(at(w[0]), at(w[1]), at(w[2]), &s, w[5] ? &e : 0, w[3], w[4]);
        break;
    }
    case 4: {
        lf_attention s = attention(w + 7);
        lf_attention_f32(at(w[0]), at(w[1]), at(w[2]), at(w[3]), &s, at(w[4]), w[5], w[6]);
        break;
    }
    case 5: lf_softmax_f32(at(w[0]), at(w[1]), w[2], w[3], w[4]); break;
    case 6: lf_layer_norm_f32(at(w[0]), at(w[1]), at(w[2]), at(w[3]), w[4], real(w[5]), w[6], w[7]); break;
    case 7: lf_rms_norm_f32(at(w[0]), at(w[1]), at(w[2]), w[3], real(w[4]), w[5], w[6]); break;
    case 8: lf_reduce_f32((int32_t)w[0], at(w[1]), at(w[2]), w[3], w[4], w[5]); break;
    case 9: lf_unary_f32((int32_t)w[0], at(w[1]), at(w[2]), w[3], w[4]); break;
    case 10: lf_binary_f32((int32_t)w[0], at(w[1]), at(w[2]), w + 8, at(w[3]), w + 16, w + 24, (int32_t)w[4], w[5], w[6]); break;
    case 11: lf_multiply_add_f32(at(w[0]), at(w[1]), w + 8, at(w[2]), w + 16, at(w[3]), w + 24, w + 32, (int32_t)w[4], w[5], w[6]); break;
    case 12: lf_copy_f32(at(w[0]), w + 8, at(w[1]), w + 16, w + 24, (int32_t)w[2], w[3], w[4]); break;
    case 13: lf_rope_f32(at(w[0]), at(w[1]), at(w[2]), at(w[3]), w[4], w[5], w[6], (int32_t)w[7], w[8], w[9]); break;
    case 14: *at(w[0]) = (float)lf_embedding_f32(at(w[1]), at(w[2]), (const int64_t *)at(w[3]), w[4], w[5], w[6], w[7]); break;
    case 15: {
        lf_pool2d s = pool(w + 5);
        lf_pool2d_f32((int32_t)w[0], at(w[1]), at(w[2]), &s, w[3], w[4]);
        break;
    }
    case 16: lf_pack_b_stored((int32_t)w[0], at(w[1]), at(w[2]), w[3], w[4], w[5], w[6], w[7], w[8]); break;
    case 17: {
        lf_epilogue e = stored_epilogue(w + 13);
        lf_gemm_stored((int32_t)w[0], at(w[1]), w[2], at(w[3]), w[4], at(w[5]), w[6], w[7], w[12] ? &e : 0, w[8], w[9], w[10], w[11]);
        break;
    }
    case 18: {
        lf_conv2d s = conv(w + 5);
        lf_pack_conv_stored((int32_t)w[0], at(w[1]), at(w[2]), &s, w[3], w[4]);
        break;
    }
    case 19: {
        lf_epilogue e = stored_epilogue(w + 7);
        lf_conv2d s = conv(w + 13);
        lf_conv2d_stored((int32_t)w[0], at(w[1]), at(w[2]), at(w[3]), &s, w[6] ? &e : 0, w[4], w[5]);
        break;
    }
    default: leave(3);
    }
}

static void flush_to_zero(void) {
#if defined(__x86_64__)
    uint32_t state;
    __asm__ volatile("stmxcsr %0" : "=m"(state));
    state |= 0x8040;
    __asm__ volatile("ldmxcsr %0" ::"m"(state));
#elif defined(__aarch64__)
    uint64_t state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state));
    state |= 1u << 24;
    __asm__ volatile("msr fpcr, %0" ::"r"(state));
#else
    leave(4); /* the machine has no such mode */
#endif
}

void lf_main(void) {
    int64_t head[3];
    transfer(SYS_READ, head, sizeof head);
    if (head[1] > 1024 || head[2] > (4 << 20)) leave(5);
    transfer(SYS_READ, words, head[1] * WORDS * 8);
    transfer(SYS_READ, image, head[2] * 4);
    if (head[0] & FLUSH_TO_ZERO) flush_to_zero();
    for (int64_t i = 0; i < head[1]; i++) run(words + i * WORDS);
    transfer(SYS_WRITE, image, head[2] * 4);
    leave(0);
}
