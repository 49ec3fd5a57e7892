// ArrayCall: a push, a pull or both: moves numbers between the caller's arrays and the shards of a tensor or table.
//
// The two kinds of object differ in which elements a part is about (client/op/tensor.h, client/op/table.h). What they
// share is here: the iteration, the arrays, where a server on the same host finds them, and what is copied when the
// caller takes its input back.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "client/arena/sharing.h"
#include "client/op/call.h"
#include "client/op/handle.h"

namespace windlass {

class ArrayCall : public Call {
 public:
  bool waits_for_close() const override;
  bool waits_for_update() const override;
  bool contributes() const { return batch_.op->contributes; }
  // Of a member of a StepCall: another push to the object comes later in it.
  void leave_open() { closes_ = false; }
  Handle& handle() const { return *handle_; }
  bool returns() const { return batch_.op->returns; }
  // Of a member of a StepCall: its arrays may have changed since they were checked.
  Status check_again() const;

  void begin_iteration() override;

 protected:
  // in, out: either may be missing.
  ArrayCall(std::shared_ptr<Handle> handle, const What& what, wire::Op op, const Array* in, const Array* out,
            const Hyper& hyper, double weight, bool closes);

  bool would_deadlock() const override;
  void uncount() override;
  bool is_alone() const override;
  uint64_t clock_of(uint32_t part) const override { return contributes() ? iteration_.clock : asked(part); }
  void keep_input(bool under_way) override;

  // The clock at which a part reads the weights.
  uint64_t asked(uint32_t part) const { return closed_.empty() ? asked_ : std::max(asked_, closed_[part]); }
  // Whether a server on the same host can use the arrays in place; finds out where they are.
  bool share(Arena::Segments* known, RemoteRoute::Plan* plan);
  // Checks an answer, and notes what it says of the other workers. `expected`: the bytes of numbers that it must have,
  // unless they are in place.
  Status check_answer(uint32_t part, bool in_place, const PartAnswer& answer, uint64_t expected);
  // The bytes that the server's threads read and write for a part, given the bytes on either side.
  uint64_t work_of(bool in_place, uint64_t in_bytes, uint64_t out_bytes, bool whole) const;

  Arrays arrays_;
  bool closes_;
  const double weight_;
  uint64_t in_bytes_ = 0, out_bytes_ = 0;
  std::optional<Sharing> sharing_;
  std::unique_ptr<std::byte[]> kept_;  // a copy of the input, once the caller has taken it back
  bool owns_input_ = false;            // arrays_.in is this call's own memory

 private:
  const std::shared_ptr<Handle> handle_;
  Iteration iteration_;  // of a push
  uint64_t asked_ = 0;
  std::vector<uint64_t> closed_;  // of a pull: the clock of each part, if any is beyond that
};

}  // namespace windlass
