#include "client/op/finite_check.h"

#include <algorithm>
#include <atomic>

#include "base/limits.h"
#include "base/os.h"
#include "exec/crew.h"
#include "exec/shares.h"
#include "rule/kernels.h"

namespace windlass {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{256} << 10;

class FiniteCheck final : public Counted, public CrewTask {
 public:
  FiniteCheck(Dtype dtype, const void* numbers, uint64_t n, size_t threads)
      : dtype_(dtype),
        numbers_(static_cast<const std::byte*>(numbers)),
        n_(n),
        per_piece_(kPieceBytes / size_of(dtype)),
        pieces_(static_cast<uint32_t>((n + per_piece_ - 1) / per_piece_)),
        left_(pieces_) {
    shares_.divide(pieces_, threads);
  }

  void help() override {
    uint32_t done = 0;
    for (uint32_t i = 0; shares_.take(Crew::number(), 1, &i) != 0; ++done) {
      if (finite_.load(std::memory_order_relaxed) && !look(pieces_ - 1 - i))
        finite_.store(false, std::memory_order_relaxed);
    }
    left_.fetch_sub(done, std::memory_order_acq_rel);
  }

  // After help(): what others have begun takes a moment.
  bool result() const {
    for (uint32_t left = 0; (left = left_.load(std::memory_order_acquire)) != 0;) os::wait(left_, left, 50'000);
    return finite_.load(std::memory_order_relaxed);
  }

 private:
  bool look(uint32_t piece) const {
    const uint64_t first = piece * per_piece_;
    return kernels().finite(dtype_, numbers_ + first * size_of(dtype_), std::min(per_piece_, n_ - first));
  }

  const Dtype dtype_;
  const std::byte* const numbers_;
  const uint64_t n_, per_piece_;
  const uint32_t pieces_;
  Shares shares_;
  std::atomic<uint32_t> left_;
  std::atomic<bool> finite_{true};
};

}  // namespace

bool are_finite(Dtype dtype, const void* numbers, uint64_t n, Crew* helpers) {
  const uint64_t bytes = n * size_of(dtype);
  if (bytes <= kPieceBytes) return kernels().finite(dtype, numbers, n);
  const bool helped = helpers != nullptr && bytes >= limits::kCrewBytesMin;
  const Ref<FiniteCheck> check(new FiniteCheck(dtype, numbers, n, helped ? helpers->size() + 1 : 1));
  if (helped) helpers->post(Ref<Counted>(check), check.get());
  check->help();
  return check->result();
}

}  // namespace windlass
