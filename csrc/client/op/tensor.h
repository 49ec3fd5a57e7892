// TensorClient: a session's handle on a tensor.
//
// Thread safety: every method from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "client/op/array_call.h"
#include "client/op/query.h"
#include "tensor/tensor.h"

namespace windlass {

// For every shard its version when it was read, plus one; 0 for a shard that was not read.
using Versions = std::vector<uint64_t>;

// Which rows a request is about: all, a range, or a list.
struct Selection {
  enum Kind : uint8_t { kAll, kRange, kList } kind = kAll;
  uint64_t begin = 0, end = 0;    // kRange
  const int64_t* list = nullptr;  // kList: row numbers, in any order, possibly repeated
  uint64_t n = 0;
};

struct TensorRequest {
  const Array* in = nullptr;   // a gradient to push
  const Array* out = nullptr;  // where the weights go
  Selection rows;
  Hyper hyper;
  double weight = 1;                            // of the push in a mean over workers
  bool closes = false;                          // push_pull: closes the shards it touches
  uint8_t priority = 0;                         // to servers elsewhere: higher ones go first
  bool versioned = false;                       // report versions()
  const Versions* newer_than = nullptr;         // leave out shards that have not changed since
  const std::vector<uint32_t>* only = nullptr;  // leave out all other shards; ascending
};

// The whole arrays that a tensor is made of (tensor/planes.h), and the rule's count of updates of every shard. Null:
// left out.
struct PlaneArrays {
  std::vector<std::byte*> planes;
  uint64_t* counts = nullptr;
};

class TensorClient;

// What a request is about, cut by shard.
struct TensorParts {
  std::vector<Span> spans;       // in the order of their shards
  std::vector<uint32_t> shards;  // of each part
  std::vector<size_t> starts;    // of each part in spans, and the end
};

class TensorCall final : public ArrayCall {
 public:
  TensorCall(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& request);
  // Valid after it is done, if the request was versioned.
  const Versions& versions() const { return versions_; }
  bool changed() const { return changed_.load(std::memory_order_relaxed); }

  Status fill(uint32_t part, bool kept, Entry* entry) override;
  void set_arrays(uint32_t part, bool kept, Entry* entry) override;
  void keep(uint32_t part) override;
  Status landed(uint32_t part, Outcome* outcome) override;

  void describe(uint32_t part, bool in_place, Parcel* to) override;
  bool joins(uint32_t) const override { return true; }
  void write_items(uint32_t part, bool in_place, std::byte* to) override;
  const std::byte* numbers(uint32_t part) override;
  void gather(uint32_t part, std::byte* to) override;
  std::byte* landing(uint32_t part, uint64_t bytes) override;
  Status land(uint32_t part, bool in_place, const PartAnswer& answer, const std::byte* numbers) override;

 protected:
  void admitted() override;
  void describe_refused(uint32_t part, Refused* to) const override;
  Status add_to_plan(Arena::Segments* known, RemoteRoute::Plan* plan) override;

 private:
  const Span* spans(uint32_t part) const { return parts_->spans.data() + parts_->starts[part]; }
  size_t span_count(uint32_t part) const { return parts_->starts[part + 1] - parts_->starts[part]; }
  uint32_t shard(uint32_t part) const { return parts_->shards[part]; }
  uint64_t count(uint32_t part) const;  // of its elements
  bool together(uint32_t part) const;   // its spans are adjacent in the caller's arrays
  bool along() const;                   // all elements lie in the arrays in their own order
  void choose(const TensorRequest& request);
  void keep_only(const std::vector<uint32_t>& shards);
  void combine_repeats(const Selection& rows, const Array& in);
  // Copies a part's spans to the caller's output, from memory that has them at the same places or back to back.
  void scatter(uint32_t part, const std::byte* from, bool same_places);
  // The answer has each row once, in ascending order; copies it to every place that asked for it.
  void scatter_repeats(uint32_t part, const std::byte* from);

  const std::shared_ptr<TensorClient> client_;
  const bool versioned_;
  const uint8_t priority_;
  Versions newer_than_, versions_;
  std::atomic<bool> changed_{false};
  const TensorParts* parts_;  // the client's, of the whole tensor, or its own
  TensorParts own_;
  std::vector<Span> repeats_;  // if rows repeat: what the answer needs, in the order of their shards
  bool along_ = false;         // if the arrays are shared: spans need not say where their numbers are
  std::unique_ptr<std::byte[]> combined_;
  std::unique_ptr<std::byte[]> unrepeated_;  // the answer, if it has each row once
  std::mutex keep_mutex_;
};

class TensorClient : public Handle, public std::enable_shared_from_this<TensorClient> {
 public:
  static Status open(std::shared_ptr<Session> session, const std::string& name, const TensorSpec& spec,
                     std::shared_ptr<TensorClient>* out, int64_t deadline_ns = limits::kNoDeadline,
                     std::string rule_text = "");
  static std::shared_ptr<TensorClient> attach(std::shared_ptr<Session> session, std::shared_ptr<ServedObject> object);
  static std::shared_ptr<TensorClient> attach(std::shared_ptr<Session> session, const Placed& placed);

  const std::string& name() const { return name_; }
  const TensorSpec& spec() const { return spec_; }
  const Cut& cut() const { return cut_; }
  const RuleSpec& rule() const override { return spec_.rule; }
  const TensorParts& whole() const { return whole_; }
  Tensor& tensor() { return object().tensor(); }  // inside this process

  What what(const TensorRequest& request) const;
  // Checks that the request fits the tensor.
  Status check(const TensorRequest& request, const What& what) const;
  using CallRef = Ref<TensorCall>;
  // Checks a request and makes its call; begin_push() and (*call)->start() begin it.
  Status make(const TensorRequest& request, Ref<TensorCall>* call);
  Status prepare(const TensorRequest& request, Ref<TensorCall>* call);  // for a request that was checked
  bool rejects_nonfinite() const override { return spec_.reject_nonfinite; }
  // Starts a request: (*call)->finish() or (*call)->wait() returns its result.
  Status start(const TensorRequest& request, How how, Ref<TensorCall>* call, int64_t deadline_ns = limits::kNoDeadline);
  // The sum over all shards, each read at its turn.
  Status fingerprint(int64_t deadline_ns, uint64_t* out);
  Status query(const std::string& query, int64_t deadline_ns, std::string* answer);
  // Keys of rows that satisfy a predicate, in chunks: client/op/query.h.
  Status scan(ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
              std::vector<uint64_t>* keys);
  // Reads weights and state, each shard at its turn: atomic for a shard, not for the tensor. Waits at no gate.
  Status snapshot(const PlaneArrays& to, int64_t deadline_ns);
  // How many updates the rule has made of each shard, which is all that travels.
  Status counts(int64_t deadline_ns, std::vector<int64_t>* out);
  // A vector operation with another tensor of this session that is like this one, or with itself; nullptr if the
  // operation takes none (client/op/vector.cc). `a` and *dot are the bits of a float64, or of an int64 for an int64
  // tensor.
  Status vector(VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns, uint64_t* dot);
  // Sets weights and state. It is neither a contribution nor an update: it closes nothing and waits at no gate, and
  // pushes that wait for their update are then applied to the new weights. Numbered like a push.
  Status put(const PlaneArrays& from, int64_t deadline_ns);
  // Calls a user's function with every shard as it is. Waits at no gate.
  Status call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results);

 private:
  Asked asked(const char* verb);
  Status check_finite(const What& what, const PlaneArrays& from) const;
  Status check_other(VectorOp op, const TensorClient& other) const;
  Status settle(const What& what, const std::vector<uint32_t>& shards, int64_t deadline_ns);
  Status vector_local(const What& what, VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns,
                      uint64_t* dots);
  Status vector_remote(const What& what, VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns,
                       uint64_t* dots);
  TensorClient(std::shared_ptr<Session> session, const std::string& full_name, uint32_t number, const std::string& name,
               const TensorSpec& spec, const Cut& cut)
      : Handle(std::move(session), full_name, number, cut.shards),
        name_(name),
        group_(full_name.substr(0, full_name.size() - name.size()) + (spec.like.empty() ? name : spec.like)),
        spec_(spec),
        cut_(cut),
        whole_(whole_of(spec, cut)) {}
  static TensorParts whole_of(const TensorSpec& spec, const Cut& cut);

  const std::string name_;
  const std::string group_;  // app and name of the tensor that it is like; its own name if it is like none
  const TensorSpec spec_;
  const Cut cut_;
  const TensorParts whole_;  // the parts of a request for all of it
};

}  // namespace windlass
