// Call: what requests of every kind have in common: arrays that are checked and lent, a place in the engine, and a
// future that must not lose its error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/status.h"
#include "client/engine.h"
#include "server/work.h"

namespace windlass {

// An array of the caller's: contiguous, in C order.
struct Array {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  uint32_t dims = 0;
  uint64_t shape[limits::kTensorDimsMax + 1] = {};

  uint64_t elements() const {
    uint64_t n = 1;
    for (uint32_t i = 0; i < dims; ++i) n *= shape[i];
    return n;
  }
  uint64_t bytes() const { return elements() * size_of(dtype); }
  Range range() const { return {static_cast<const std::byte*>(data), bytes()}; }
};

// Ok when the array has that shape and a dtype that may travel to an object that stores `stored`.
Status check_array(const std::string& what, const Array& array, const uint64_t* shape, size_t dims, Dtype stored);

enum class How : uint8_t {
  kWait,    // somebody will finish() it
  kFuture,  // nobody may, and ordinary arrays are free when start() returns
};

class Call : public Work {
 public:
  // Starts the request, `bytes` large, on arrays that are checked; lends those that are registered.
  Status start(const Array* arrays, size_t n, size_t bytes, How how);
  // Waits for a request started with kWait. One that is not done in time fails with kTimeout: parts that would still
  // use an ordinary array are cancelled, registered arrays stay on loan until the request ends.
  Status finish(int64_t deadline_ns);
  // Waits for a request started with kFuture; can be called again after kTimeout.
  Status wait(int64_t deadline_ns);
  // The future is gone: an error from now on is for the next caller.
  void drop();

  const std::string& what() const { return what_; }

 protected:
  Call(std::shared_ptr<Session> session, std::shared_ptr<Progress> progress, std::string what)
      : session_(std::move(session)), progress_(std::move(progress)), what_(std::move(what)) {}
  void finished() override;
  Session& session() { return *session_; }

 private:
  static constexpr size_t kArraysMax = 3;
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Progress> progress_;
  const std::string what_;
  Range lent_[kArraysMax];
  size_t n_lent_ = 0;
  bool ordinary_ = false;  // some array is not registered
  std::mutex seen_mutex_;
  bool seen_ = false, dropped_ = false, finished_ = false;
};

}  // namespace windlass
