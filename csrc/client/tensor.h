// TensorClient: a session's handle on a tensor.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "client/handle.h"
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
  bool closes = false;                   // push_pull: closes the shards it touches
  bool versioned = false;                // report versions()
  const Versions* newer_than = nullptr;  // leave shards out that have not changed since
};

class TensorClient;

// A request on a tensor, and what it saw.
class TensorCall final : public Call {
 public:
  TensorCall(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& request);

  // After it is done, where the request was versioned.
  const Versions& versions() const { return versions_; }
  bool changed() const { return changed_.load(std::memory_order_relaxed); }

 protected:
  void admitted() override;
  bool pushes() const override { return pushes_; }
  Turn& turn(uint32_t part) override;
  Status run(uint32_t part, bool kept) override;
  void keep(uint32_t part) override;

 private:
  friend class TensorClient;
  void add(uint64_t first, uint64_t n, uint64_t at);
  void combine_repeats(const Selection& rows, const Array& in);
  void make_parts();
  void sort_by_shard(std::vector<Span>* spans) const;
  void read_repeats(uint32_t shard);

  const std::shared_ptr<TensorClient> client_;
  const Hyper hyper_;
  const bool closes_, pushes_, versioned_;
  uint64_t clock_ = 0;
  Versions newer_than_, versions_;
  std::atomic<bool> changed_{false};
  Arrays arrays_;
  std::vector<Span> spans_;       // in the order of their shards
  std::vector<Span> repeats_;     // where rows repeat: what the answer needs, in the order of their shards
  std::vector<uint32_t> shards_;  // of each part
  std::vector<size_t> starts_;    // of each part in spans_, and the end
  std::unique_ptr<std::byte[]> combined_;
  std::mutex keep_mutex_;
  std::unique_ptr<std::byte[]> kept_;
};

class TensorClient : public Handle, public std::enable_shared_from_this<TensorClient> {
 public:
  static Status open(std::shared_ptr<Session> session, const std::string& name, const TensorSpec& spec,
                     std::shared_ptr<TensorClient>* out);
  static std::shared_ptr<TensorClient> attach(std::shared_ptr<Session> session, std::shared_ptr<Tensor> tensor);

  Tensor& tensor() { return *tensor_; }

  // Starts a request: *call->finish() or *call->wait() says how it went.
  Status start(const TensorRequest& request, How how, Ref<TensorCall>* call, int64_t deadline_ns = limits::kNoDeadline);
  // The sum over all shards, each read at its turn.
  Status fingerprint(int64_t deadline_ns, uint64_t* out);

 private:
  TensorClient(std::shared_ptr<Session> session, std::shared_ptr<Tensor> tensor);
  Status check(const TensorRequest& request, const What& what) const;

  const std::shared_ptr<Tensor> tensor_;
};

}  // namespace windlass
