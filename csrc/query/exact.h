// ExactSum: a sum of float64 numbers that is rounded once, at the end.
//
// The rows of a table lie in the order in which they were made, and in another order once a shard has moved. A plain
// running sum would depend on that order; this one does not, nor on the order in which shards answer.
//
//     limb[i] counts 2^(32 i - 1074); a number lies in three limbs, which have 31 bits to spare for carries
//
// Thread safety: a value.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace windlass {

class ExactSum {
 public:
  void add(double x) {
    const auto bits = std::bit_cast<uint64_t>(x);
    const auto exponent = static_cast<uint32_t>(bits >> 52 & 0x7FF);
    uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
    if (exponent == 0x7FF) {
      (mantissa != 0 ? nan_ : x > 0 ? above_ : below_) = true;
      return;
    }
    if (exponent != 0) mantissa |= uint64_t{1} << 52;
    const uint32_t place = exponent != 0 ? exponent - 1 : 0;
    const unsigned __int128 wide = static_cast<unsigned __int128>(mantissa) << (place % 32);
    int64_t* const at = limb_ + place / 32;
    const int64_t sign = static_cast<int64_t>(bits) < 0 ? -1 : 1;
    at[0] += sign * static_cast<int64_t>(static_cast<uint32_t>(wide));
    at[1] += sign * static_cast<int64_t>(static_cast<uint32_t>(wide >> 32));
    at[2] += sign * static_cast<int64_t>(static_cast<uint32_t>(wide >> 64));
    if (++added_ == kAddsMax) carry();
  }

  // The sum, rounded to the nearest.
  double value() const {
    if (nan_ || (above_ && below_)) return NAN;
    if (above_ || below_) return above_ ? INFINITY : -INFINITY;
    ExactSum s = *this;
    s.carry();
    const bool negative = s.limb_[kLimbs - 1] < 0;
    if (negative) {
      for (int64_t& limb : s.limb_) limb = -limb;
      s.carry();
    }
    int high = kLimbs - 1;
    while (high >= 0 && s.limb_[high] == 0) --high;
    if (high < 0) return 0;
    unsigned __int128 top = 0;
    for (int i = high; i > high - 3; --i) top = top << 32 | static_cast<uint64_t>(i >= 0 ? s.limb_[i] : 0);
    int exponent = 32 * (high - 2) - 1074;
    bool rest = false;
    for (int i = 0; i < high - 2; ++i) rest = rest || s.limb_[i] != 0;
    while (top >> 64 != 0) {  // dropped bits still decide how it is rounded
      rest = rest || (top & 1) != 0;
      top >>= 1;
      ++exponent;
    }
    const double magnitude = std::ldexp(static_cast<double>(static_cast<uint64_t>(top) | (rest ? 1u : 0u)), exponent);
    return negative ? -magnitude : magnitude;
  }

 private:
  static constexpr int kLimbs = 68;
  static constexpr uint32_t kAddsMax = 1u << 30;

  // Afterwards every limb but the last is at least 0 and less than 2^32.
  void carry() {
    for (int i = 0; i + 1 < kLimbs; ++i) {
      const int64_t over = limb_[i] >> 32;
      limb_[i] -= over * (int64_t{1} << 32);
      limb_[i + 1] += over;
    }
    added_ = 0;
  }

  int64_t limb_[kLimbs] = {};
  uint32_t added_ = 0;
  bool nan_ = false, above_ = false, below_ = false;
};

}  // namespace windlass
