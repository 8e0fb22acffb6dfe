/* A model as a program: model [-t THREADS] [-r RUNS] WEIGHTS INPUT... OUTPUT...
 *
 * Inputs and outputs are raw little-endian arrays, in the order of manifest.json. Ends with 0; with 2 for wrong
 * usage, 3 for a damaged file, 4 for a failed run, 5 on a processor without the vectors it is for, and says why. With -r, the seconds of the fastest run go to stdout. */
#include "lf_runtime.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int fail(int code, const char *path, const char *why) {
    fprintf(stderr, "model: %s: %s\n", path, why);
    return code;
}

/* The vectors this file was compiled for that the processor lacks, or 0. Bits of AT_HWCAP: arch/loongarch's hwcap.h. */
static const char *lacking(void) {
#if defined(__loongarch_asx)
    if (!(getauxval(AT_HWCAP) & 1 << 5)) return "LASX; compile for loongarch64-lsx or loongarch64";
#elif defined(__loongarch_sx)
    if (!(getauxval(AT_HWCAP) & 1 << 4)) return "LSX; compile for loongarch64";
#elif defined(__AVX2__)
    /* zig's runtime has no __builtin_cpu_supports */
    unsigned a = 0, b = 0, c = 0, d = 0, known = (unsigned)__get_cpuid_count(7, 0, &a, &b, &c, &d);
    if (!known || !(b & bit_AVX2)) return "AVX2; compile for x86-64-sse2";
#if defined(__AVX512F__)
    if (!(b & bit_AVX512F)) return "AVX-512; compile for x86-64-avx2";
#endif
#endif
    return NULL;
}

static const uint8_t *map_file(const char *path, int64_t *bytes) {
    struct stat s;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &s)) return NULL;
    *bytes = s.st_size;
    void *p = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : p;
}

static uint64_t word(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static void add_sums(uint64_t *s, uint64_t *count, const uint8_t *p, uint64_t bytes) {
    for (uint64_t i = 0; i + 8 <= bytes; i += 8) s[0] += word(p + i), s[1] += word(p + i) * ++*count;
}

/* The header of weights.lfw, as lf_hal/weights.py describes it. */
static const uint8_t *payload(const uint8_t *file, uint64_t bytes, const char **why) {
    uint64_t start, size, s[2] = {0, 0}, t[2] = {0, 0}, n = 0, m = 0;
    *why = "is no weights file of lf-hal";
    if (bytes < 64 || memcmp(file, "LFHALW1", 8)) return NULL;
    start = word(file + 16), size = word(file + 24);
    *why = "is cut, or its header was changed";
    if (start % 4096 || start < 64 || start > bytes || size != bytes - start) return NULL;
    *why = "was changed: its sums are wrong";
    add_sums(s, &n, file, 32);
    add_sums(s, &n, file + 64, start - 64);
    add_sums(t, &m, file + start, size);
    if (s[0] != word(file + 48) || s[1] != word(file + 56) || t[0] != word(file + 32) || t[1] != word(file + 40))
        return NULL;
    return file + start;
}

static int read_input(const char *path, void *to, int64_t bytes) {
    FILE *f = fopen(path, "rb");
    if (!f) return 0;
    int good = fread(to, 1, (size_t)bytes, f) == (size_t)bytes && fgetc(f) == EOF;
    fclose(f);
    return good;
}

static int write_output(const char *path, const void *from, int64_t bytes) {
    FILE *f = fopen(path, "wb");
    if (!f) return 0;
    int good = fwrite(from, 1, (size_t)bytes, f) == (size_t)bytes;
    return fclose(f) == 0 && good;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    const char *vectors = lacking();
    if (vectors) {
        fprintf(stderr, "model: this processor has no %s\n", vectors);
        return 5;
    }
    int threads = 1, runs = 0, i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        if (!strcmp(argv[i], "-t")) threads = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "-r")) runs = atoi(argv[i + 1]);
        else break;
    }
    int ins = lf_graph_inputs, outs = lf_graph_outputs;
    if (argc - i != 1 + ins + outs) {
        fprintf(stderr, "usage: model [-t THREADS] [-r RUNS] WEIGHTS and files of %d inputs, %d outputs\n", ins, outs);
        return 2;
    }
    const char *why = "cannot be read";
    int64_t bytes = 0;
    const uint8_t *file = map_file(argv[i], &bytes), *weights = file ? payload(file, (uint64_t)bytes, &why) : NULL;
    if (!weights) return fail(3, argv[i], why);

    const void **in = calloc((size_t)ins + 1, sizeof *in);
    void **out = calloc((size_t)outs + 1, sizeof *out);
    if (!in || !out) return fail(4, argv[0], "no memory");
    for (int k = 0; k < ins; k++) {
        int64_t n = lf_graph_input_bytes[k];
        void *p = aligned_alloc(64, (size_t)(n + 64) / 64 * 64);
        if (!p) return fail(4, argv[0], "no memory");
        in[k] = p;
        if (!read_input(argv[i + 1 + k], p, n)) return fail(3, argv[i + 1 + k], "is not there or of another size");
    }
    for (int k = 0; k < outs; k++) {
        out[k] = aligned_alloc(64, (size_t)(lf_graph_output_bytes[k] + 64) / 64 * 64);
        if (!out[k]) return fail(4, argv[0], "no memory");
    }
    lf_model *model;
    int32_t status = lf_model_open(&model, weights, (int64_t)word(file + 24), threads);
    if (status == LF_BAD_ARGUMENT) return fail(3, argv[i], "belongs to another model, or the threads are none");
    if (status != LF_OK) return fail(4, argv[0], status == LF_NO_MEMORY ? "no memory" : "no threads");
    double best = 1e300;
    for (int r = 0; r < (runs ? runs : 1); r++) {
        int64_t bad[2];
        double begin = now();
        if (lf_model_run(model, in, out, bad) != LF_OK) {
            fprintf(stderr, "model: step %lld: index %lld is outside its table\n", (long long)bad[0], (long long)bad[1]);
            return 4;
        }
        if (now() - begin < best) best = now() - begin;
    }
    if (runs) printf("%.9f\n", best);
    lf_model_close(model);
    for (int k = 0; k < outs; k++)
        if (!write_output(argv[i + 1 + ins + k], out[k], lf_graph_output_bytes[k]))
            return fail(4, argv[i + 1 + ins + k], "cannot be written");
    return 0;
}
