// StepClient: pushes and pulls on any number of objects that leave together, in order.
//
// What is added is checked at once; ordinary inputs and key lists are copied, registered ones and outputs belong to the
// step until it has run. Whole tensors on servers elsewhere share one request per server (StepCall); what is about some
// rows, and everything inside the process, is a call of its own. Every part has its own sequence either way, so a retry
// is as harmless as ever.
//
// All of it is one iteration. Where its worker has closed one of the shards already, that iteration ends before the
// first request leaves; and of several pushes to an object only the last one may close it:
//
//     push w      push_pull w     push_pull w     tick
//                 (closes not)    (closes w)      (closes the rest)
//
// Thread safety: none; one thread's.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "client/table.h"
#include "client/tensor.h"

namespace windlass {

class StepCall;

class StepClient {
 public:
  explicit StepClient(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  StepClient(const StepClient&) = delete;
  StepClient& operator=(const StepClient&) = delete;
  ~StepClient();

  Status add(std::shared_ptr<TensorClient> tensor, const TensorRequest& request);
  Status add(std::shared_ptr<TableClient> table, const TableRequest& request);
  // Sends everything, closes the worker's iteration and waits for all of it. The first error is returned when the
  // others are done; what comes behind a request that cannot be begun is not sent.
  Status run(int64_t deadline_ns);

 private:
  struct Item {
    std::shared_ptr<TensorClient> tensor;  // one of the two
    std::shared_ptr<TableClient> table;
    TensorRequest tensor_request;
    TableRequest table_request;
    Array in, out;
    bool together = false;  // in one request with its neighbours
    Ref<Call> call;
  };
  // An ordinary output, and where the weights go instead until the end.
  struct Landing {
    void* out;
    std::byte* staged;
    size_t bytes;
  };
  void let_the_last_close();
  Status prepare(Item& item, int64_t deadline_ns);
  bool keep(Array* array);
  bool stage(Array* array);
  std::byte* copy(const void* data, size_t bytes);
  bool registered(const Array& array);

  const std::shared_ptr<Session> session_;
  std::deque<Item> items_;
  std::vector<std::byte*> copies_;
  std::vector<Landing> landings_;
  Range known_[2];  // blocks that arrays were last found in: those of a step often share one
};

}  // namespace windlass
