/* Shows a machine's floating-point environment as its C library writes it, and takes one: see test_machines.py.
   fenv_probe         prints fenv_t as found, rounding towards zero, and (aarch64) flushing subnormals, in hex
   fenv_probe HEX     takes this fenv_t, prints fegetround() and whether half of a subnormal is zero
   On LoongArch a first line has the words of cpucfg, by the machine code that lf_hal._cpu uses. */
#include <fenv.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static void show(void) {
    unsigned char bytes[sizeof(fenv_t)];
    fenv_t env;
    fegetenv(&env);
    memcpy(bytes, &env, sizeof env);
    for (unsigned i = 0; i < sizeof env; i++) printf("%02x", bytes[i]);
    printf("\n");
}

static void flush(void) {
#if defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr | 1u << 24));
#elif defined(__x86_64__)
    uint32_t mxcsr;
    __asm__ volatile("stmxcsr %0" : "=m"(mxcsr));
    mxcsr |= 0x8040;
    __asm__ volatile("ldmxcsr %0" : : "m"(mxcsr));
#endif
}

int main(int argc, char **argv) {
    if (argc > 1) {
        fenv_t env;
        unsigned char bytes[sizeof env];
        for (unsigned i = 0; i < sizeof env; i++) {
            unsigned byte;
            sscanf(argv[1] + 2 * i, "%2x", &byte);
            bytes[i] = (unsigned char)byte;
        }
        memcpy(&env, bytes, sizeof env);
        fesetround(FE_TOWARDZERO);
        flush();
        fesetenv(&env);
        volatile float tiny = 0x1p-140f, half = 0.5f;
        volatile float made = tiny * half;
        printf("%d %d\n", fegetround() == FE_TONEAREST, made == 0);
        return 0;
    }
#if defined(__loongarch__)
    static const unsigned char code[] = {CPUCFG_CODE};
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, sizeof code);
    __asm__ volatile("ibar 0");
    static const uint64_t words[] = {0x2, 0x10, 0x11, 0x12, 0x13, 0x14};
    for (unsigned i = 0; i < 6; i++) {
        uint64_t asked;
        __asm__ volatile("cpucfg %0, %1" : "=r"(asked) : "r"(words[i]));
        uint32_t got = ((uint32_t(*)(uint64_t))page)(words[i]);
        if ((uint32_t)asked != got) return 3;
        printf("%x:%x ", (unsigned)words[i], got);
    }
    printf("\n");
#endif
    show();
    fesetround(FE_TOWARDZERO);
    show();
    fesetround(FE_TONEAREST);
    flush();
    show();
    return 0;
}
