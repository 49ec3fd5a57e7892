// TensorClient: a session's handle on a tensor.
//
// Thread safety: every method from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "client/handle.h"
#include "client/query.h"
#include "tensor/tensor.h"

namespace windlass {

// Of every shard, its version when it was read, plus one; a shard that was not read has 0.
using Versions = std::vector<uint64_t>;

// Which rows a request is about: all, a range, or a list.
struct Selection {
  enum Kind : uint8_t { kAll, kRange, kList } kind = kAll;
  uint64_t begin = 0, end = 0;    // kRange
  const int64_t* list = nullptr;  // kList: row numbers, in any order, repeated ones too
  uint64_t n = 0;
};

struct TensorRequest {
  const Array* in = nullptr;   // a gradient to push
  const Array* out = nullptr;  // where the weights go
  Selection rows;
  Hyper hyper;
  double weight = 1;                     // of the push in a mean over workers
  bool closes = false;                   // push_pull: closes the shards it touches
  uint8_t priority = 0;                  // on the way to servers elsewhere: higher ones go first
  bool versioned = false;                // report versions()
  const Versions* newer_than = nullptr;  // leave shards out that have not changed since
};

// The arrays that a tensor is made of (tensor/planes.h), whole, and the rule's count of updates of every shard. Null:
// left out.
struct PlaneArrays {
  std::vector<std::byte*> planes;
  uint64_t* counts = nullptr;
};

class TensorClient;

// A request on a tensor, cut by shard, and what it saw. To the server inside the process it goes as it is; how it goes
// to servers elsewhere is the subclass's business (remote_tensor.cc).
class TensorCall : public Call {
 public:
  TensorCall(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& request);
  // After it is done, where the request was versioned.
  const Versions& versions() const { return versions_; }
  bool changed() const { return changed_.load(std::memory_order_relaxed); }

  void fill(uint32_t part, bool kept, Entry* entry) override;
  void set_arrays(uint32_t part, bool kept, Entry* entry) override;
  void keep(uint32_t part) override;
  Status landed(uint32_t part, Outcome* outcome) override;

 protected:
  bool pushes() const override { return pushes_; }
  bool waits_for_update() const override;
  bool would_deadlock() const override;
  void uncount() override;
  void admitted() override;
  bool is_alone() const override;
  // A push counts from now on; a pull is of the present clock, or of the one that its worker has closed at the shard.
  void begin_iteration();
  // The clock at which a part looks at the weights.
  uint64_t asked(uint32_t part) const { return closed_.empty() ? asked_ : std::max(asked_, closed_[part]); }
  const Span* spans(uint32_t part) const { return spans_.data() + starts_[part]; }
  size_t span_count(uint32_t part) const { return starts_[part + 1] - starts_[part]; }

  const std::shared_ptr<TensorClient> client_;
  const Hyper hyper_;
  const double weight_;
  const bool closes_, pushes_, versioned_;
  const wire::Op op_;
  Iteration iteration_;  // of a push
  uint64_t asked_ = 0;
  std::vector<uint64_t> closed_;  // of a pull, at each part, where it is beyond that
  Versions newer_than_, versions_;
  std::atomic<bool> changed_{false};
  Arrays arrays_;
  std::vector<Span> spans_;       // in the order of their shards
  std::vector<Span> repeats_;     // where rows repeat: what the answer needs, in the order of their shards
  std::vector<uint32_t> shards_;  // of each part
  std::vector<size_t> starts_;    // of each part in spans_, and the end
  std::unique_ptr<std::byte[]> combined_;
  std::unique_ptr<std::byte[]> kept_;        // the input, where its caller has it back
  std::unique_ptr<std::byte[]> unrepeated_;  // the answer, where it has each row once

  uint64_t count(uint32_t part) const;  // of its elements
  // The answer has each row once, in ascending order; the caller wants it wherever it was asked for.
  void scatter_repeats(uint32_t part, const std::byte* from);

 public:
  const std::vector<uint32_t>& shards() const { return shards_; }
  bool waits_for_close() const override;

 private:
  void add(uint64_t first, uint64_t n, uint64_t at);
  void combine_repeats(const Selection& rows, const Array& in);
  void make_parts();
  void sort_by_shard(std::vector<Span>* spans) const;

  std::mutex keep_mutex_;
};

class TensorClient : public Handle, public std::enable_shared_from_this<TensorClient> {
 public:
  static Status open(std::shared_ptr<Session> session, const std::string& name, const TensorSpec& spec,
                     std::shared_ptr<TensorClient>* out, int64_t deadline_ns = limits::kNoDeadline);
  static std::shared_ptr<TensorClient> attach(std::shared_ptr<Session> session, std::shared_ptr<ServedObject> object);
  static std::shared_ptr<TensorClient> attach(std::shared_ptr<Session> session, const Placed& placed);

  const std::string& name() const { return name_; }
  const TensorSpec& spec() const { return spec_; }
  const Cut& cut() const { return cut_; }
  Tensor& tensor() { return object().tensor(); }  // inside this process

  What what(const TensorRequest& request) const;
  // Ok when the request fits the tensor.
  Status check(const TensorRequest& request, const What& what) const;
  // A request that is checked; begin_push() and (*call)->start() begin it.
  Status make(const TensorRequest& request, Ref<TensorCall>* call);
  // Starts a request: *call->finish() or *call->wait() says how it went.
  Status start(const TensorRequest& request, How how, Ref<TensorCall>* call, int64_t deadline_ns = limits::kNoDeadline);
  // The sum over all shards, each read at its turn.
  Status fingerprint(int64_t deadline_ns, uint64_t* out);
  Status query(const std::string& query, int64_t deadline_ns, std::string* answer);
  // Keys of rows that satisfy a predicate, in chunks: client/query.h.
  Status scan(ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
              std::vector<uint64_t>* keys);
  // Weights and state as they are, each shard at its turn: atomic for a shard, not for the tensor. Waits at no gate.
  Status snapshot(const PlaneArrays& to, int64_t deadline_ns);
  // A vector operation with another tensor of this session that is like this one, or with itself; nullptr where the
  // operation has none (client/vector.cc). `a` and *dot are the bits of a float64, or of an int64 where the tensor is.
  Status vector(VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns, uint64_t* dot);
  // Sets them. No contribution and no update: it closes nothing, waits at no gate, and what waits for its update is
  // then applied to the new weights. Numbered like a push.
  Status put(const PlaneArrays& from, int64_t deadline_ns);
  // A function of the user's, called with every shard as it is; its results. Waits at no gate.
  Status call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results);

 private:
  Asked asked(const char* verb);
  Status check_finite(const What& what, const PlaneArrays& from) const;
  Status check_other(VectorOp op, const TensorClient& other) const;
  Status settle(const What& what, const std::vector<uint32_t>& shards, int64_t deadline_ns);
  Status vector_near(const What& what, VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns,
                     uint64_t* dots);
  Status vector_away(const What& what, VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns,
                     uint64_t* dots);
  TensorClient(std::shared_ptr<Session> session, const std::string& full_name, const std::string& name,
               const TensorSpec& spec, const Cut& cut)
      : Handle(std::move(session), full_name, cut.shards),
        name_(name),
        group_(full_name.substr(0, full_name.size() - name.size()) + (spec.like.empty() ? name : spec.like)),
        spec_(spec),
        cut_(cut) {}

  const std::string name_;
  const std::string group_;  // the tensor that it is like, with its app; its own name where it is like none
  const TensorSpec spec_;
  const Cut cut_;
};

// The same request to servers elsewhere.
Ref<TensorCall> make_remote_call(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& request);

}  // namespace windlass
