// StepCall: calls that leave together, as one request per server, and the tick that ends their iteration.
//
// Every part of a member keeps its own sequence, so a retry is harmless. The members' arrays are registered: a step
// whose caller gives up continues with them.
//
// StepClient: collects pushes and pulls on any number of objects and runs them as a StepCall; inside the process each
// of them is a call of its own.
//
// All of it is one iteration. If its worker has already closed one of the shards, that iteration ends before the first
// request leaves. Of several pushes to an object only the last may close it:
//
//     push w      push_pull w     push_pull w     tick
//                 (closes not)    (closes w)      (closes the rest)
//
// Thread safety: StepClient: none; one thread's. StepCall: as a Future.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/op/close.h"
#include "client/op/table.h"
#include "client/op/tensor.h"

namespace windlass {

class StepCall final : public Future, public Payload {
 public:
  // verb: its name in errors.
  StepCall(std::shared_ptr<Session> session, const char* verb);

  // Call before it is started. in, out: the member's registered arrays; they are on loan while the step is under way.
  void add(Ref<Call> member, Range in = {}, Range out = {});
  // Ends its worker's iteration once its members belong to it.
  void end_iteration() { ends_ = true; }
  // It is a part of what this stands for, and settles it.
  void settles(Unsettled unsettled) { unsettled_.emplace(std::move(unsettled)); }
  // Tells these servers that an iteration has ended; the members close what is open. open: the objects that the worker
  // has open.
  void tell(uint64_t clock, std::vector<uint32_t> open, std::vector<uint32_t> servers);

  Status start(How how, int64_t deadline_ns);
  // Waits; the caller gives the step up at the deadline.
  Status finish(int64_t deadline_ns);
  bool wait_until(int64_t deadline_ns) override { return done() || remote_.wait(deadline_ns); }

  // Payload.
  void describe(uint32_t part, bool in_place, Parcel* to) override;
  void write_items(uint32_t part, bool in_place, std::byte* to) override;
  void write_argument(uint32_t part, std::byte* to) override;
  bool joins(uint32_t part) const override;
  bool list(uint32_t part, uint32_t n, wire::ListedItems* list) override;
  const std::byte* numbers(uint32_t part) override;
  void gather(uint32_t part, std::byte* to) override;
  std::byte* landing(uint32_t part, uint64_t bytes) override;
  Status land(uint32_t part, bool in_place, const PartAnswer& answer, const std::byte* numbers) override;
  bool refused(uint32_t part, Code code) override;
  Owners* owners(uint32_t part, uint32_t* shard) override;

 protected:
  void finished() override;
  void over() override;

 private:
  static constexpr uint32_t kTick = ~0u;  // instead of a member
  struct Member {
    Ref<Call> call;
    Range in, out;
    Trip::Common* common = nullptr;
    uint16_t flags = 0;
  };
  struct Part {
    uint32_t member, part;
  };
  Status named(const Status& status) const;
  Status lend();
  Status plan();
  void add_parts(uint32_t member);
  void begin();
  void add_member(Member* member, const RemoteRoute::Plan& plan);
  Call& call_of(uint32_t part) const { return *members_[parts_[part].member].call; }

  const std::shared_ptr<Session> session_;
  const char* const verb_;
  RemoteRoute remote_;
  RemoteRoute::Plan plan_;  // of its trips
  std::vector<Member> members_;
  std::vector<Part> parts_;
  std::vector<Range> lent_;
  bool ends_ = false;
  bool ticks_ = false;
  uint64_t clock_ = 0;
  std::vector<uint32_t> open_, told_, hear_end_;
  std::optional<Unsettled> unsettled_;
  bool waited_for_ = false;
  std::atomic<bool> given_up_{false};
};

class StepClient {
 public:
  explicit StepClient(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  StepClient(const StepClient&) = delete;
  StepClient& operator=(const StepClient&) = delete;
  ~StepClient();

  // Checks a request at once and adds it; ordinary inputs and key lists are copied, registered ones and outputs belong
  // to the step until it has run.
  Status add(std::shared_ptr<TensorClient> tensor, const TensorRequest& request);
  Status add(std::shared_ptr<TableClient> table, const TableRequest& request);
  // Sends everything, closes the worker's iteration and waits for all of it. Returns the first error when the others
  // are done; requests after one that cannot begin are not sent.
  Status run(int64_t deadline_ns);

 private:
  struct Item {
    Array in, out;
    Ref<ArrayCall> call;
  };
  // An ordinary output, and where its weights are staged until the end.
  struct Landing {
    void* out;
    std::byte* staged;
    size_t bytes;
  };
  template <class Client, class Request, class Copy>
  Status add_call(Client& client, Request request, Copy copy_items);
  void let_the_last_close();
  Status run_remote(int64_t deadline_ns);
  Status run_local(int64_t deadline_ns);
  bool keep(Array* array);
  bool stage(Array* array);
  std::byte* copy(const void* data, size_t bytes);
  bool registered(const Array& array);

  const std::shared_ptr<Session> session_;
  std::deque<Item> items_;
  std::vector<std::byte*> copies_;
  std::vector<Landing> landings_;
  Range known_[2];  // blocks in which arrays were last found: arrays of a step often share one
};

}  // namespace windlass
