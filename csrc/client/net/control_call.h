// ControlCall: a request to one server that is about no shard: open, attach, list, enter.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/net/remote_route.h"

namespace windlass {

class ControlCall final : public Future, public Payload {
 public:
  explicit ControlCall(std::shared_ptr<Links> links) : remote_(std::move(links), *this, *this) {}

  // Asks and waits. `what`: for errors.
  Status ask(wire::Op op, uint32_t server, const std::string& body, const std::string& what, int64_t deadline_ns) {
    body_ = body;
    answers.resize(1);
    const RemoteRoute::Plan plan{.op = op, .deadline_ns = deadline_ns};
    remote_.add_part(plan, server, {.common = remote_.add_common(plan)});
    WL_RETURN_IF_ERROR(remote_.reserve(what, deadline_ns));
    expect(1);
    remote_.submit();
    remote_.set_off(How::kWait);
    if (!wait_until(deadline_ns)) {
      const Status late(Code::kTimeout, what + ": not done in time; " + remote_.stuck());
      bool any = false;
      remote_.withdraw(true, late, &any);
      return late;
    }
    const Status s = status();
    return s.ok() ? s : Status(s.code(), what + ": " + s.message());
  }
  std::vector<std::string> answers;  // one; for a list, one per object

  bool wait_until(int64_t deadline_ns) override { return done() || remote_.wait(deadline_ns); }

  // Payload.
  void describe(uint32_t, bool, Parcel* to) override { to->argument_bytes = static_cast<uint32_t>(body_.size()); }
  void write_argument(uint32_t, std::byte* to) override { body_.copy(reinterpret_cast<char*>(to), body_.size()); }
  Status land(uint32_t part, bool, const PartAnswer& answer, const std::byte*) override {
    if (part >= answers.size()) answers.resize(part + 1);
    answers[part] = answer.body;
    return {};
  }
  Owners* owners(uint32_t, uint32_t*) override { return nullptr; }

 private:
  RemoteRoute remote_;
  std::string body_;
};

}  // namespace windlass
