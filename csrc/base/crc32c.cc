// The mechanism
//
// A message is a polynomial over GF(2) and its CRC is message * x^32 modulo P, a polynomial of degree 32. "Reflected"
// says that the first bit, bit 0 of byte 0, is the highest power: bit i of a register of w bits stands for x^(w-1-i).
// Loads are therefore little-endian, and the three facts behind everything below are:
//
//   1. Whatever precedes the last n bits adds (its own polynomial * x^n) to the message, so parts can be computed side
//      by side, each moved to its place by one product with the constant x^n modulo P, and joined by xor. The CRC of
//      what came before is such a part: it is xored into the first 32 bits of what follows.
//   2. A carry-less product of two reflected registers of w bits has 2w-1 bits and lies one bit low in a register of
//      2w, so it reads as the product times x. The constant that moves a part by n bits is thus x^(n-1).
//   3. The crc32 instruction given (c, v) with v of w bits makes (v ^ c) * x^32 modulo P: it reduces as well as adds.
//
// Both the streams of sse4.2 and the folding of avx512 are these facts; their constants come from power_of_x().
#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace windlass {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kPolynomial = 0x82F63B78;  // P without its x^32, reflected

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

template <class T>
[[gnu::always_inline]] inline T load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Slicing by 8: kSlices[k][b] is the CRC of byte b followed by k zero bytes, so the eight bytes of a word are looked
// up independently of each other.
constexpr auto kSlices = [] {
  std::array<std::array<uint32_t, 256>, 8> t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (auto& slice : t) {
      for (int bit = 0; bit < 8; ++bit) c = times_x(c);
      slice[b] = c;
    }
  }
  return t;
}();

uint32_t portable(const void* data, size_t bytes, uint32_t so_far) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t c = ~so_far;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    const uint32_t v = load<uint32_t>(p) ^ c, w = load<uint32_t>(p + 4);  // w need not wait for c
    c = (kSlices[3][w & 0xFF] ^ kSlices[2][(w >> 8) & 0xFF] ^ kSlices[1][(w >> 16) & 0xFF] ^ kSlices[0][w >> 24]) ^
        ((kSlices[7][v & 0xFF] ^ kSlices[6][(v >> 8) & 0xFF]) ^ (kSlices[5][(v >> 16) & 0xFF] ^ kSlices[4][v >> 24]));
  }
  for (; bytes > 0; ++p, --bytes) c = (c >> 8) ^ kSlices[0][(c ^ *p) & 0xFF];
  return ~c;
}

#if defined(__x86_64__)

#define WL_SSE42 gnu::target("sse4.2,pclmul")
#define WL_AVX512 gnu::target("sse4.2,pclmul,avx512f,vpclmulqdq")

// x^n modulo P.
consteval uint32_t power_of_x(size_t n) {
  uint32_t a = uint32_t{1} << 31;
  for (; n > 0; --n) a = times_x(a);
  return a;
}

// One word after the other: bound by the latency of crc32, and the best there is for a few words.
[[WL_SSE42]] inline uint32_t one_stream(const uint8_t* p, size_t bytes, uint64_t c) {
  for (; bytes >= 8; p += 8, bytes -= 8) c = _mm_crc32_u64(c, load<uint64_t>(p));
  auto c32 = static_cast<uint32_t>(c);
  if ((bytes & 4) != 0) c32 = _mm_crc32_u32(c32, load<uint32_t>(p)), p += 4;
  if ((bytes & 2) != 0) c32 = _mm_crc32_u16(c32, load<uint16_t>(p)), p += 2;
  if ((bytes & 1) != 0) c32 = _mm_crc32_u8(c32, *p);
  return c32;
}

// Three words at a time, one from each third of a block of 3 * kBytes: crc32 takes three cycles but starts every
// cycle. The first two thirds are moved to the end of the block, as 64 bits not yet reduced, by joining the last word
// on its way through crc32; that multiplies by x^32 once more, which the constants leave out.
template <size_t kBytes>
[[WL_SSE42]] inline void three_streams(const uint8_t** p, size_t* bytes, uint64_t* crc) {
  constexpr uint64_t kTwo = power_of_x(2 * 8 * kBytes - 33), kOne = power_of_x(8 * kBytes - 33);
  const __m128i k = _mm_set_epi64x(kOne, kTwo);
  for (; *bytes >= 3 * kBytes; *bytes -= 3 * kBytes) {
    const uint8_t *s = *p, *last = s + kBytes - 8;
    uint64_t a = *crc, b = 0, c = 0;
    for (; s != last; s += 8) {
      a = _mm_crc32_u64(a, load<uint64_t>(s));
      b = _mm_crc32_u64(b, load<uint64_t>(s + kBytes));
      c = _mm_crc32_u64(c, load<uint64_t>(s + 2 * kBytes));
    }
    a = _mm_crc32_u64(a, load<uint64_t>(s));
    b = _mm_crc32_u64(b, load<uint64_t>(s + kBytes));
    const __m128i moved = _mm_xor_si128(_mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(a)), k, 0x00),
                                        _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(b)), k, 0x10));
    *crc = _mm_crc32_u64(c, load<uint64_t>(s + 2 * kBytes) ^ static_cast<uint64_t>(_mm_cvtsi128_si64(moved)));
    *p += 3 * kBytes;
  }
}

// Larger thirds would gain a tenth in the cache, but the prefetcher loses track of them and memory comes in at a third.
[[WL_SSE42]] uint32_t sse42(const void* data, size_t bytes, uint32_t so_far) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint64_t c = ~so_far;
  three_streams<336>(&p, &bytes, &c);
  three_streams<96>(&p, &bytes, &c);
  three_streams<32>(&p, &bytes, &c);
  return ~one_stream(p, bytes, c);
}

// Folding: a register of 128 bits moves n bits on by two products, of its first half with x^(n+64) and of its second
// with x^n, and joins what lies there. The products are not reduced below 96 bits until the end. A 32-bit constant
// lies in the upper half of its 64-bit register, where the low powers are.
consteval long long half(size_t n) { return static_cast<long long>(uint64_t{power_of_x(n - 1)} << 32); }

template <size_t kBits>
[[WL_AVX512]] inline __m512i moving() {
  constexpr long long kFirst = half(kBits + 64), kSecond = half(kBits);
  return _mm512_set4_epi64(kSecond, kFirst, kSecond, kFirst);
}

[[WL_AVX512]] inline __m512i fold(__m512i x, __m512i by, __m512i onto) {
  constexpr int kXor = 0x96;  // of three inputs
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), onto,
                                   kXor);
}

[[WL_AVX512]] uint32_t avx512(const void* data, size_t bytes, uint32_t so_far) {
  const auto* p = static_cast<const uint8_t*>(data);
  if (bytes < 128) return ~one_stream(p, bytes, ~so_far);
  const __m512i by_512 = moving<512>();
  __m512i x =
      _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int32_t>(~so_far))));
  p += 64, bytes -= 64;
  if (bytes >= 256 - 64) {  // four registers side by side hide the latency of the products
    const __m512i by_2048 = moving<2048>();
    __m512i x1 = _mm512_loadu_si512(p), x2 = _mm512_loadu_si512(p + 64), x3 = _mm512_loadu_si512(p + 128);
    p += 192, bytes -= 192;
    for (; bytes >= 256; p += 256, bytes -= 256) {
      x = fold(x, by_2048, _mm512_loadu_si512(p));
      x1 = fold(x1, by_2048, _mm512_loadu_si512(p + 64));
      x2 = fold(x2, by_2048, _mm512_loadu_si512(p + 128));
      x3 = fold(x3, by_2048, _mm512_loadu_si512(p + 192));
    }
    x = fold(x, moving<1536>(), fold(x1, moving<1024>(), fold(x2, by_512, x3)));
  }
  for (; bytes >= 64; p += 64, bytes -= 64) x = fold(x, by_512, _mm512_loadu_si512(p));
  // Fold the four lanes onto the last, which stays as it is: its products are with 0.
  constexpr long long k1 = half(128), k2 = half(192), k3 = half(256), k4 = half(320), k5 = half(384), k6 = half(448);
  const __m512i to_last = _mm512_set_epi64(0, 0, k1, k2, k3, k4, k5, k6);
  const __m512i lanes = fold(x, to_last, _mm512_maskz_mov_epi64(0xC0, x));
  // With masks of ones: gcc 12 warns that its own unmasked forms use uninitialized values.
  const __m256i two = _mm256_xor_si256(_mm512_maskz_extracti64x4_epi64(0xFF, lanes, 0),
                                       _mm512_maskz_extracti64x4_epi64(0xFF, lanes, 1));
  const __m128i one = _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
  const uint64_t c = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(one)));
  return ~one_stream(p, bytes, _mm_crc32_u64(c, static_cast<uint64_t>(_mm_extract_epi64(one, 1))));
}

#elif defined(__ARM_FEATURE_CRC32)

uint32_t armv8(const void* data, size_t bytes, uint32_t so_far) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t c = ~so_far;
  for (; bytes >= 8; p += 8, bytes -= 8) c = __crc32cd(c, load<uint64_t>(p));
  for (; bytes > 0; ++p, --bytes) c = __crc32cb(c, *p);
  return ~c;
}

#endif

}  // namespace

std::vector<crc::Implementation> crc::implementations() {
  std::vector<Implementation> here = {{"portable", portable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    here.push_back({"sse4.2", sse42});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) here.push_back({"avx512", avx512});
  }
#elif defined(__ARM_FEATURE_CRC32)
  here.push_back({"armv8", armv8});
#endif
  return here;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t so_far) {
  static const crc::Crc32c best = crc::implementations().back().run;
  return best(data, bytes, so_far);
}

}  // namespace windlass
