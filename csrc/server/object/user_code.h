// UserCode: a queue of calls of the user's functions. A thread of Python runs them (windlass/_rules/user_code.py).
//
// A caller makes a Call and waits until it is done or its time is up. A call owns the memory it works on: one that was
// given up may run on for as long as it likes and changes nothing of ours.
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
  // The copy of a shard that a reading function gets.
  struct Part {
    std::string arguments;
    std::vector<std::byte> numbers;
    Dtype dtype = Dtype::kFloat32;
    std::vector<uint64_t> keys;  // of a table's rows
    uint64_t row = 1, first = 0;
    uint32_t shard = 0;
    bool is_table = false;
  };
  // Shared with everybody who has one of its arrays: in Python an array may outlive the object that stands for its
  // call.
  struct Call : std::enable_shared_from_this<Call> {
    enum Kind : uint8_t { kFind, kApply, kRead } kind = kFind;
    std::string text;       // kFind, kRead: a name
    Foreign foreign;        // kFind: all that is known of the rule
    std::string what;       // the object, for messages
    uint64_t function = 0;  // the number it was found under; set by kFind
    ForeignRule::Size size;
    ForeignCall arrays;
    Buffer memory;
    Part part;                          // kRead
    std::string result;                 // kRead
    std::atomic<bool> given_up{false};  // nobody waits for it any more

   private:
    friend class UserCode;
    enum State : uint8_t { kWaiting, kRunning, kDone } state_ = kWaiting;
    Status status_;
  };
  using Ref = std::shared_ptr<Call>;

  // seconds: the time limit of a call, including its time in the queue.
  explicit UserCode(double seconds) : limit_ns_(static_cast<int64_t>(seconds * 1e9)) {}
  virtual ~UserCode() = default;

  // Finds the rule of that name, if the thread that runs the functions allows it.
  Status find(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out);
  // Waits until the call has ended; kFunctionFailed when its time was up first.
  Status run(const Ref& call);

  // For the thread that runs the functions. The next call; null if none came before the deadline, or after close().
  Ref next(int64_t deadline_ns);
  void end(const Ref& call, Status status);
  // Waits until a running call is given up. False if none was before the deadline.
  bool wait_given_up(int64_t deadline_ns);
  bool closed();
  // No more calls are run: all end with kClosed, and a running one is given up.
  void close();

 protected:
  // Called around a wait, to release what the functions need (the GIL).
  virtual void let_go(const std::function<void()>& wait) { wait(); }

 private:
  friend class FoundRule;
  Status wait_for(const Ref& call);
  Ref take_call();  // reuses one and its memory, if it can
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
