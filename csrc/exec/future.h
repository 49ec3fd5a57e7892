// Future: something under way that a caller can wait for. It counts parts that have not ended, and keeps the first
// error of any of them.
//
//     expect(3)   end()  end(error)  end()   ->   finished()   done()   over()
//
// Unfinished parts hold one reference together (retained by expect(), released by the last end()).
//
// Thread safety: every public method from any thread. Memory: alive while a Ref or an unfinished part exists.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/ref.h"
#include "base/status.h"

namespace windlass {

class Future : public Counted {
 public:
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  // Waits until done or until this monotonic time, and helps with the work where possible. True when done.
  virtual bool wait_until(int64_t deadline_ns);
  bool sleep_until(int64_t deadline_ns);  // the same, without helping or spinning
  Status status() const;                  // of a future that is done

  // Keeps the future open until one more end(). False when all parts have ended already.
  bool stay_open();

  // Announces how many parts will end. With none, the future is done at once.
  void expect(uint32_t parts);
  // end(): one part has ended. end_well(): this many have, without errors.
  void end(const Status& status);
  void end_well(uint32_t parts);
  void fail(const Status& status);  // reports an error while its part goes on

 protected:
  Future() = default;
  ~Future() override = default;

  virtual void finished() {}  // once, after the last part and before anyone sees done()
  virtual void over() {}      // once, after done()

 private:
  enum : uint32_t { kPending, kAwaited, kDone };
  void complete();

  std::atomic<uint32_t> unfinished_{0};
  std::atomic<uint32_t> state_{kPending};
  mutable std::mutex mutex_;  // of error_
  Status error_;
  std::atomic<bool> failed_{false};  // error_ is set
};

}  // namespace windlass
