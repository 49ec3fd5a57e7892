// What the tests of the client share: an engine with a worker on it, and requests in one line.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "base/test.h"
#include "client/op/table.h"
#include "client/op/tensor.h"
#include "client/session.h"

namespace windlass::test {

inline int64_t in_ms(int64_t ms) { return os::now_ns() + ms * 1'000'000; }
inline int64_t soon() { return in_ms(30'000); }  // further off than any test should need

template <class T>
constexpr Dtype dtype_of() {
  if (std::is_same_v<T, double>) return Dtype::kFloat64;
  return std::is_same_v<T, int64_t> ? Dtype::kInt64 : Dtype::kFloat32;
}

template <class T>
Array array_of(T* data, std::initializer_list<uint64_t> shape) {
  Array a;
  a.data = data;
  a.dtype = dtype_of<T>();
  for (const uint64_t d : shape) a.shape[a.dims++] = d;
  return a;
}

template <class Client, class Request>
Status now(Client& client, const Request& request, int64_t deadline_ns = soon()) {
  Ref<std::conditional_t<std::is_same_v<Client, TensorClient>, TensorCall, TableCall>> call;
  WL_RETURN_IF_ERROR(client.start(request, How::kWait, &call, deadline_ns));
  return call->finish(deadline_ns);
}

inline Keys keys_of(const std::vector<uint64_t>& keys) { return {keys.data(), KeyType::kUint64, keys.size()}; }

struct Worker {
  virtual ~Worker() = default;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Session> session;

  explicit Worker(int threads = 2, uint64_t memory_bytes_max = ~uint64_t{0})
      : Worker(std::make_shared<Engine>(threads, memory_bytes_max)) {}
  explicit Worker(std::shared_ptr<Engine> on, uint32_t rank = 0, uint32_t world_size = 1) : engine(std::move(on)) {
    CHECK_OK(Session::open(engine, rank, world_size, &session));
  }
  std::shared_ptr<TensorClient> tensor(const std::string& name, const TensorSpec& spec) {
    std::shared_ptr<TensorClient> client;
    CHECK_OK(TensorClient::open(session, name, spec, &client));
    return client;
  }
  std::shared_ptr<TableClient> table(const std::string& name, const TableSpec& spec) {
    std::shared_ptr<TableClient> client;
    CHECK_OK(TableClient::open(session, name, spec, &client));
    return client;
  }
  // A registered array.
  template <class T>
  T* take(size_t n) {
    return reinterpret_cast<T*>(engine->arena().take(n * sizeof(T)));
  }
};

inline TensorSpec sums(std::vector<uint64_t> shape, Dtype dtype = Dtype::kFloat32) {
  TensorSpec spec;
  spec.shape = std::move(shape);
  spec.dtype = dtype;
  spec.rule.kind = RuleKind::kSum;
  return spec;
}

inline TableSpec row_sums(uint32_t dim) {
  TableSpec spec;
  spec.dim = dim;
  spec.rule.kind = RuleKind::kSum;
  return spec;
}

// The turn of a shard, kept as a busy thread would keep it.
class Busy {
 public:
  explicit Busy(Shard& shard) : turn_(&shard.turn) {
    const int64_t end = os::now_ns() + int64_t{10'000'000'000};
    bool taken = false;
    while (!(taken = turn_->try_take()) && os::now_ns() < end) {  // an answer is there before its sender lets go
    }
    CHECK(taken);
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { end(); }
  void end() {
    if (turn_ != nullptr) std::exchange(turn_, nullptr)->release();
  }

 private:
  Turn* turn_;
};

}  // namespace windlass::test
