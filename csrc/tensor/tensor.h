// Tensor: what a server holds of a named dense array in shards, with its rule's state.
//
// A server holds a run of the tensor's shards: all of them, or its share. They are contiguous, so that a request for
// all of them is few long passes. The distances between weights and state arrays are some cache lines off a power of
// two: powers of two would put them into the same cache sets and halve the speed.
//
// Thread safety: apply(), read(), take_memory() and give_memory() belong to the holder of the shard's turn; everything
// else is fixed after create().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/pool.h"
#include "rule/foreign.h"
#include "rule/init.h"
#include "rule/kernels.h"
#include "session/shard.h"
#include "sync/policy.h"
#include "tensor/cut.h"

namespace windlass {

struct TensorSpec {
  std::vector<uint64_t> shape;
  Dtype dtype = Dtype::kFloat32;
  RuleSpec rule;
  Init init;
  uint64_t seed = 0;
  bool reject_nonfinite = false;
  Sync sync = {};
  std::string like = {};  // the tensor of the same app whose cut and placement it shares; "": none
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;

  uint64_t elements() const;
  uint64_t row() const;  // elements per row: all dimensions but the first
};

// How it is cut.
Cut cut_of(const TensorSpec& spec);

std::string describe(const TensorSpec& spec);
std::string describe_shape(const uint64_t* shape, size_t dims);
std::string describe(const RuleSpec& rule);
std::string describe(const Init& init);

// Some elements of one shard, and where they are in the caller's arrays.
struct Span {
  uint64_t first;  // in the tensor
  uint64_t n;
  uint64_t at;  // in the caller's arrays
};

// The caller's arrays. Either may be missing.
struct Arrays {
  const void* in = nullptr;
  void* out = nullptr;
  Dtype in_dtype = Dtype::kFloat32;
  Dtype out_dtype = Dtype::kFloat32;
  bool stream = false;  // outputs bypass the cache
  bool lent = false;    // the input is the caller's own memory, which may change at any time
};

// The error of a push whose numbers were finite when they were checked and are not when they are used. any: some of it
// has been applied.
Status changed_on_loan(const std::string& what, uint32_t shard, bool any);

// A run of shards, [first, end).
struct Run {
  uint32_t first = 0;
  uint32_t end = ~0u;
};

// Ok when the spec is valid; *cut becomes how it is cut.
Status check_spec(const std::string& name, const TensorSpec& spec, Cut* cut);

// Ok when a tensor can be placed like the one that spec.like names. anchor: the spec of that one; nullptr: there is
// none.
Status check_like(const std::string& name, const TensorSpec& spec, const TensorSpec* anchor);

class Tensor {
 public:
  static Status create(const std::string& name, const TensorSpec& spec, Budget* budget, std::unique_ptr<Tensor>* out,
                       Run run = {});
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor();

  const std::string& name() const { return name_; }
  const TensorSpec& spec() const { return spec_; }
  const Cut& cut() const { return cut_; }
  const Run& run() const { return run_; }
  Shard& shard(uint32_t i) { return shards_[i - run_.first]; }
  uint64_t bytes() const { return bytes_; }

  // One update of a shard from arrays.in, over the spans; where arrays.out is given, the new weights go there. A user's
  // rule can fail; nothing has changed then. With reject_nonfinite, lent memory that has NaN or infinity when it is
  // read fails with kNonFinite if nothing has changed yet, else with kBufferInUse.
  Status apply(uint32_t shard, const Hyper& hyper, const Span* spans, size_t n, const Arrays& arrays);
  // One update of a whole float32 shard from several gradients: their weighted sum, divided by `weight`. The new
  // weights also go to each of the copies.
  void apply_mean(uint32_t shard, const Hyper& hyper, const std::vector<Weighed>& terms, float weight,
                  const std::vector<Mean::Copy>& copies);
  // Copies the weights of the spans to arrays.out.
  void read(const Span* spans, size_t n, const Arrays& arrays) const;
  // The shard's weights in place, for the holder of its turn.
  const std::byte* weights_of(uint32_t shard) const { return weights(cut_.first_of(shard)); }
  // Of the shard's weights and state; the sum over all shards is the tensor's.
  uint64_t fingerprint(uint32_t shard) const;
  // All numbers of the shard, in place: weights, state arrays, numbers per row and of the shard.
  struct Piece {
    std::byte* data;
    uint64_t bytes;
  };
  std::vector<Piece> pieces_of(uint32_t shard) const;
  // The fingerprint of a part of one of these pieces, which begins `at` bytes into it; all parts of all pieces and the
  // shard's count add up to fingerprint().
  uint64_t fingerprint_of_piece(uint32_t shard, size_t piece, uint64_t at, const std::byte* from, uint64_t bytes) const;
  uint64_t fingerprint_of_count(uint32_t shard, uint64_t count) const;

  // For a tensor that is one shard which comes and goes: it is made without memory, takes it, and gives it back. The
  // Shard itself stays in place.
  static std::unique_ptr<Tensor> make_empty(const std::string& name, const TensorSpec& spec, const Cut& cut,
                                            Budget* budget, Run run);
  Status take_memory();
  void give_memory();

  // The rule, where it is the user's own.
  void set_foreign(std::shared_ptr<ForeignRule> rule) { foreign_ = std::move(rule); }

 private:
  Tensor(std::string name, TensorSpec spec, const Cut& cut, Budget* budget, Run run);
  uint64_t elements() const { return run_.first < run_.end ? cut_.end_of(run_.end - 1) - first_ : 0; }
  uint64_t rows() const { return (elements() + cut_.row - 1) / cut_.row; }
  void write_out(const Span& span, uint64_t done, uint64_t n, const Arrays& arrays) const;
  Status apply_foreign(uint32_t shard, const Hyper& hyper, const Span* spans, size_t n, const Arrays& arrays);
  Status found_nonfinite(uint32_t shard, bool any) const;
  Status call_foreign(uint32_t shard, const Hyper& hyper, const Span* spans, size_t n, const Arrays& arrays);
  float* shard_scalars(uint32_t shard) const {
    return shard_scalars_ + (shard - run_.first) * uint64_t{spec_.rule.foreign.shard_scalars};
  }
  std::byte* weights(uint64_t element) const { return weights_ + (element - first_) * size_of(spec_.dtype); }

  const std::string name_;
  const TensorSpec spec_;
  const Cut cut_;
  const Run run_;
  const uint64_t first_;  // the first element that is held
  Budget* const budget_;
  std::unique_ptr<Shard[]> shards_;
  std::byte* memory_ = nullptr;
  uint64_t bytes_ = 0;
  std::byte* weights_ = nullptr;
  float* state_[limits::kForeignVectorsMax] = {};
  float* scalars_ = nullptr;        // of rows
  float* shard_scalars_ = nullptr;  // of shards
  std::shared_ptr<ForeignRule> foreign_;
};

}  // namespace windlass
