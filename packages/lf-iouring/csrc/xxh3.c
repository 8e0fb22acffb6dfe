/* XXH3, 64 bits, with seed; written from the algorithm's specification (xxHash doc/xxhash_spec.md).
   The inner loop has SSE2 and AVX2 forms; elsewhere the plain loop is left to the compiler. */

#include <string.h>

#include "lf_native.h"
#include "xxh3.h"

#if defined(__SSE2__) && !defined(LF_PLAIN_XXH3)
#include <immintrin.h>
#endif

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull
#define PMX_1 0x165667919E3779F9ull
#define PMX_2 0x9FB21C651E98DF25ull

enum { SECRET = 192, STRIPE = 64, LANES = 8, STEP = 8, STRIPES = (SECRET - STRIPE) / STEP };
enum { BLOCK = STRIPE * STRIPES };

/* The specification's default secret. */
static const uint8_t default_secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint32_t read32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  v = __builtin_bswap32(v);
#endif
  return v;
}

static uint64_t read64(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  v = __builtin_bswap64(v);
#endif
  return v;
}

static void write64(uint8_t *p, uint64_t v) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  v = __builtin_bswap64(v);
#endif
  memcpy(p, &v, sizeof v);
}

static uint64_t rotate(uint64_t v, int n) { return (v << n) | (v >> (64 - n)); }

static uint64_t fold128(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= PMX_1;
  return h ^ (h >> 32);
}

static uint64_t avalanche_xxh64(uint64_t h) {
  h ^= h >> 33;
  h *= P64_2;
  h ^= h >> 29;
  h *= P64_3;
  return h ^ (h >> 32);
}

static uint64_t hash_up_to_16(const uint8_t *p, size_t n, uint64_t seed) {
  const uint8_t *s = default_secret;
  if (n > 8) {
    uint64_t low = read64(p) ^ ((read64(s + 24) ^ read64(s + 32)) + seed);
    uint64_t high = read64(p + n - 8) ^ ((read64(s + 40) ^ read64(s + 48)) - seed);
    return avalanche(n + __builtin_bswap64(low) + high + fold128(low, high));
  }
  if (n >= 4) {
    uint64_t mixed_seed = seed ^ ((uint64_t)__builtin_bswap32((uint32_t)seed) << 32);
    uint64_t word = read32(p + n - 4) + ((uint64_t)read32(p) << 32);
    uint64_t h = word ^ ((read64(s + 8) ^ read64(s + 16)) - mixed_seed);
    h ^= rotate(h, 49) ^ rotate(h, 24);
    h *= PMX_2;
    h ^= (h >> 35) + n;
    h *= PMX_2;
    return h ^ (h >> 28);
  }
  if (n > 0) {
    uint32_t word = ((uint32_t)p[0] << 16) | ((uint32_t)p[n >> 1] << 24) | p[n - 1] | ((uint32_t)n << 8);
    return avalanche_xxh64(word ^ ((read32(s) ^ read32(s + 4)) + seed));
  }
  return avalanche_xxh64(seed ^ read64(s + 56) ^ read64(s + 64));
}

static uint64_t mix16(const uint8_t *p, const uint8_t *s, uint64_t seed) {
  return fold128(read64(p) ^ (read64(s) + seed), read64(p + 8) ^ (read64(s + 8) - seed));
}

static uint64_t hash_up_to_128(const uint8_t *p, size_t n, uint64_t seed) {
  uint64_t acc = n * P64_1;
  for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
    acc += mix16(p + 16 * i, default_secret + 32 * i, seed);
    acc += mix16(p + n - 16 * (i + 1), default_secret + 32 * i + 16, seed);
  }
  return avalanche(acc);
}

static uint64_t hash_up_to_240(const uint8_t *p, size_t n, uint64_t seed) {
  uint64_t acc = n * P64_1;
  size_t chunks = n / 16;
  for (size_t i = 0; i < 8; i++) acc += mix16(p + 16 * i, default_secret + 16 * i, seed);
  acc = avalanche(acc);
  for (size_t i = 8; i < chunks; i++) acc += mix16(p + 16 * i, default_secret + 16 * (i - 8) + 3, seed);
  acc += mix16(p + n - 16, default_secret + 136 - 17, seed);
  return avalanche(acc);
}

enum { MIDDLE = 240 }; /* longer data is hashed in stripes */

static uint64_t hash_short(const uint8_t *p, size_t n, uint64_t seed) {
  if (n <= 16) return hash_up_to_16(p, n, seed);
  return n <= 128 ? hash_up_to_128(p, n, seed) : hash_up_to_240(p, n, seed);
}

/* One block: `stripes` stripes, then the scramble when `full`. */
typedef void block_fn(uint64_t *acc, const uint8_t *p, const uint8_t *secret, size_t stripes, int full);

#if defined(__SSE2__) && !defined(LF_PLAIN_XXH3)
static void block_sse2(uint64_t *acc, const uint8_t *p, const uint8_t *secret, size_t stripes, int full) {
  __m128i *a = (__m128i *)acc;
  __m128i lane[4];
  for (int i = 0; i < 4; i++) lane[i] = _mm_loadu_si128(a + i);
  for (size_t n = 0; n < stripes; n++) {
    for (int i = 0; i < 4; i++) {
      __m128i data = _mm_loadu_si128((const __m128i *)(p + n * STRIPE) + i);
      __m128i key = _mm_xor_si128(data, _mm_loadu_si128((const __m128i *)(secret + n * STEP) + i));
      __m128i product = _mm_mul_epu32(key, _mm_srli_epi64(key, 32));
      lane[i] = _mm_add_epi64(lane[i], _mm_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2)));
      lane[i] = _mm_add_epi64(lane[i], product);
    }
  }
  const __m128i prime = _mm_set1_epi32((int)P32_1);
  for (int i = 0; i < 4 && full; i++) {
    __m128i key = _mm_loadu_si128((const __m128i *)(secret + SECRET - STRIPE) + i);
    __m128i x = _mm_xor_si128(_mm_xor_si128(lane[i], _mm_srli_epi64(lane[i], 47)), key);
    __m128i high = _mm_mul_epu32(_mm_srli_epi64(x, 32), prime);
    lane[i] = _mm_add_epi64(_mm_mul_epu32(x, prime), _mm_slli_epi64(high, 32));
  }
  for (int i = 0; i < 4; i++) _mm_storeu_si128(a + i, lane[i]);
}

__attribute__((target("avx2"), unused)) static void block_avx2(uint64_t *acc, const uint8_t *p, const uint8_t *secret,
                                                       size_t stripes, int full) {
  __m256i *a = (__m256i *)acc;
  __m256i lane[2] = {_mm256_loadu_si256(a), _mm256_loadu_si256(a + 1)};
  for (size_t n = 0; n < stripes; n++) {
    for (int i = 0; i < 2; i++) {
      __m256i data = _mm256_loadu_si256((const __m256i *)(p + n * STRIPE) + i);
      __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(secret + n * STEP) + i));
      __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      lane[i] = _mm256_add_epi64(lane[i], _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2)));
      lane[i] = _mm256_add_epi64(lane[i], product);
    }
  }
  const __m256i prime = _mm256_set1_epi32((int)P32_1);
  for (int i = 0; i < 2 && full; i++) {
    __m256i key = _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE) + i);
    __m256i x = _mm256_xor_si256(_mm256_xor_si256(lane[i], _mm256_srli_epi64(lane[i], 47)), key);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    lane[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
  }
  for (int i = 0; i < 2; i++) _mm256_storeu_si256(a + i, lane[i]);
}

#if defined(LF_NO_AVX2) /* for the test of the other form */
static block_fn *pick_block(void) { return block_sse2; }
#else
static block_fn *pick_block(void) { return __builtin_cpu_supports("avx2") ? block_avx2 : block_sse2; }
#endif
#else
static void block_plain(uint64_t *acc, const uint8_t *p, const uint8_t *secret, size_t stripes, int full) {
  for (size_t n = 0; n < stripes; n++) {
    for (int i = 0; i < LANES; i++) {
      uint64_t data = read64(p + n * STRIPE + 8 * i);
      uint64_t key = data ^ read64(secret + n * STEP + 8 * i);
      acc[i ^ 1] += data;
      acc[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
  }
  for (int i = 0; i < LANES && full; i++) {
    acc[i] ^= acc[i] >> 47;
    acc[i] ^= read64(secret + SECRET - STRIPE + 8 * i);
    acc[i] *= P32_1;
  }
}

static block_fn *pick_block(void) { return block_plain; }
#endif

static uint64_t merge(const uint64_t *acc, const uint8_t *secret, uint64_t start) {
  uint64_t h = start;
  for (int i = 0; i < 4; i++) {
    h += fold128(acc[2 * i] ^ read64(secret + 16 * i), acc[2 * i + 1] ^ read64(secret + 16 * i + 8));
  }
  return avalanche(h);
}

void lf_xxh3_begin(lf_xxh3_state *h, const uint8_t *data, size_t length, uint64_t seed) {
  static const uint64_t start[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  h->data = data;
  h->length = length;
  h->seed = seed;
  h->blocks = 0;
  memcpy(h->acc, start, sizeof start);
  for (int i = 0; i < SECRET; i += 16) {
    write64(h->secret + i, read64(default_secret + i) + seed);
    write64(h->secret + i + 8, read64(default_secret + i + 8) - seed);
  }
}

void lf_xxh3_advance(lf_xxh3_state *h, size_t upto) {
  /* The last block, full or not, has to wait for the end. */
  size_t whole = h->length > 0 ? (h->length - 1) / BLOCK : 0;
  size_t target = upto / BLOCK < whole ? upto / BLOCK : whole;
  block_fn *block = pick_block();
  for (; h->blocks < target; h->blocks++) block(h->acc, h->data + h->blocks * BLOCK, h->secret, STRIPES, 1);
}

uint64_t lf_xxh3_end(lf_xxh3_state *h) {
  const uint8_t *p = h->data;
  size_t n = h->length;
  if (n <= MIDDLE) return hash_short(p, n, h->seed);
  lf_xxh3_advance(h, n);
  block_fn *block = pick_block();
  block(h->acc, p + h->blocks * BLOCK, h->secret, (n - 1 - h->blocks * BLOCK) / STRIPE, 0);
  block(h->acc, p + n - STRIPE, h->secret + SECRET - STRIPE - 7, 1, 0);
  return merge(h->acc, h->secret + 11, n * P64_1);
}

uint64_t lf_xxh3_64(const uint8_t *data, size_t length, uint64_t seed) {
  if (length <= MIDDLE) return hash_short(data, length, seed);
  lf_xxh3_state state;
  lf_xxh3_begin(&state, data, length, seed);
  return lf_xxh3_end(&state);
}
