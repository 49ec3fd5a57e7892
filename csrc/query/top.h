// Top: the best k of many scored keys. Among equal scores the smaller key is better; NaN is worse than anything.
//
// Candidates are gathered, and the worse half is dropped when there are twice as many as wanted: a few steps for each,
// however large k is.
//
// Thread safety: a value.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace windlass {

class Top {
 public:
  struct Scored {
    uint64_t key;
    double score;
  };

  Top(uint64_t k, bool largest) : k_(k), largest_(largest) {}

  void add(const uint64_t* keys, const double* scores, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      if (pruned_ && (largest_ ? scores[i] < bar_ : scores[i] > bar_)) continue;  // most are worse
      add(keys[i], scores[i]);
    }
  }
  void add(uint64_t key, double score) {
    const Candidate c{rank_of(score), key};
    if (pruned_ && !(c < worst_)) return;
    found_.push_back(c);
    if (found_.size() >= 2 * k_ + kSpare) prune();
  }
  // Best first.
  std::vector<Scored> take() {
    prune();
    std::sort(found_.begin(), found_.end());
    std::vector<Scored> all;
    all.reserve(found_.size());
    for (const Candidate& c : found_) all.push_back({c.key, score_of(c.rank)});
    return all;
  }

 private:
  static constexpr size_t kSpare = 64;
  static constexpr uint64_t kNan = ~uint64_t{0};
  static constexpr uint64_t kSign = uint64_t{1} << 63;

  struct Candidate {
    uint64_t rank, key;
    bool operator<(const Candidate& o) const { return rank != o.rank ? rank < o.rank : key < o.key; }
  };

  // A number for every score, the smaller the better.
  uint64_t rank_of(double score) const {
    if (std::isnan(score)) return kNan;
    const auto bits = std::bit_cast<uint64_t>(score + 0.0);  // -0 becomes 0
    const uint64_t up = (bits & kSign) != 0 ? ~bits : bits | kSign;
    return largest_ ? ~up : up;
  }
  double score_of(uint64_t rank) const {
    if (rank == kNan) return std::numeric_limits<double>::quiet_NaN();
    const uint64_t up = largest_ ? ~rank : rank;
    return std::bit_cast<double>((up & kSign) != 0 ? up & ~kSign : ~up);
  }
  void prune() {
    if (found_.size() <= k_) return;
    const auto end = found_.begin() + static_cast<ptrdiff_t>(k_);
    std::nth_element(found_.begin(), end - 1, found_.end());
    found_.erase(end, found_.end());
    worst_ = found_.back();
    bar_ = score_of(worst_.rank);
    pruned_ = true;
  }

  const uint64_t k_;  // at least 1
  const bool largest_;
  std::vector<Candidate> found_;
  bool pruned_ = false;
  double bar_ = 0;     // the score of the worst
  Candidate worst_{};  // once pruned: candidates no better than this are dropped
};

}  // namespace windlass
