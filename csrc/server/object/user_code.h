// UserCode: calls of functions of the user's, which one thread of somebody else runs: Python's
// (windlass/_user_code.py).
//
// Whoever has work for a function makes a Call and waits until it is done, or until its time is up. A call owns the
// memory it works on: one that is given up may go on for as long as it likes and changes nothing of ours.
//
//     run() ---> calls_ ---> next()   the function runs   end() ---> run() returns
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "rule/foreign.h"

namespace windlass {

class UserCode : public std::enable_shared_from_this<UserCode> {
 public:
  // What a function that reads gets of a shard, as a copy.
  struct Part {
    std::string arguments;
    std::vector<std::byte> numbers;
    Dtype dtype = Dtype::kFloat32;
    std::vector<uint64_t> keys;  // of a table's rows
    uint64_t row = 1, first = 0;
    uint32_t shard = 0;
    bool is_table = false;
  };
  // Shared with whoever has one of its arrays, in Python without the object that stands for it there.
  struct Call : std::enable_shared_from_this<Call> {
    enum Kind : uint8_t { kFind, kApply, kRead } kind = kFind;
    std::string text;       // kFind, kRead: a name
    Foreign foreign;        // kFind: all that is known of it
    std::string what;       // the object, for messages
    uint64_t function = 0;  // the number it was found under; set by kFind
    ForeignRule::Size size;
    ForeignCall arrays;
    Buffer memory;
    Part part;                          // kRead
    std::string result;                 // likewise
    std::atomic<bool> given_up{false};  // nobody waits for it any more

   private:
    friend class UserCode;
    enum State : uint8_t { kWaiting, kRunning, kDone } state_ = kWaiting;
    Status status_;
  };
  using Ref = std::shared_ptr<Call>;

  // seconds: what a call may take, waiting for its turn included.
  explicit UserCode(double seconds) : limit_ns_(static_cast<int64_t>(seconds * 1e9)) {}
  virtual ~UserCode() = default;

  // The rule of that name, if whoever runs the functions lets it be used.
  Status find(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out);
  // Waits until the call has ended; kFunctionFailed when its time was up first.
  Status run(const Ref& call);

  // For who runs them. The next call; null when there is none until the deadline, or never again.
  Ref next(int64_t deadline_ns);
  void end(const Ref& call, Status status);
  // Waits until a call that runs is given up. False when none is until the deadline.
  bool wait_given_up(int64_t deadline_ns);
  bool closed();
  // Nobody runs calls any longer: all end with kClosed, and one that runs is given up.
  void close();

 protected:
  // Somebody is about to wait, who may have what the functions need.
  virtual void let_go(const std::function<void()>& wait) { wait(); }

 private:
  friend class FoundRule;
  Status wait_for(const Ref& call);
  Ref take_call();  // one that was used before, if there is one: its memory is there
  void give_call(Ref call);

  const int64_t limit_ns_;
  std::mutex mutex_;
  std::condition_variable came_, ended_, stuck_;
  std::deque<Ref> calls_;
  std::vector<Ref> spare_;
  uint64_t given_up_ = 0, noticed_ = 0;
  bool closed_ = false;
};

}  // namespace windlass
