// What the tests of work and of the crew share: a request that counts what happens to it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "base/os.h"
#include "base/test.h"
#include "exec/shard_work.h"

namespace windlass::test {

inline constexpr int64_t kSecond = 1'000'000'000;

// The shards of a test. A helper may still look at them when the work is done, so every work keeps them.
class Turns {
 public:
  explicit Turns(size_t n) : all_(std::make_shared<std::vector<Turn>>(n)) {}
  Turn& operator[](size_t i) const { return (*all_)[i]; }
  size_t size() const { return all_->size(); }

 private:
  std::shared_ptr<std::vector<Turn>> all_;
};

// A request whose parts count how often they ran; the numbers of one part belong to the holder of its turn.
class Counting : public Future, public ShardWork {
 public:
  explicit Counting(const Turns& turns)
      : ShardWork(static_cast<Future&>(*this)), turns_(turns), ran(turns.size()), was_kept(turns.size()) {
    set_parts(static_cast<uint32_t>(turns.size()));
  }
  bool wait_until(int64_t deadline_ns) override {
    if (!done()) help();
    return Future::wait_until(deadline_ns);
  }

 protected:
  Turn& turn(uint32_t part) override { return turns_[part]; }
  Ran run(uint32_t part, bool kept, Status* status) override {
    ++ran[part];
    was_kept[part] = kept;
    if (on_run) *status = on_run(part);
    return Ran::kDone;
  }
  void keep(uint32_t) override { ++keeps; }
  void finished() override { ++ends; }

 private:
  const Turns turns_;

 public:
  std::vector<int> ran;
  std::vector<char> was_kept;
  std::atomic<int> keeps{0}, ends{0};
  std::function<Status(uint32_t)> on_run;
};

inline void check_each_ran_once(const Counting& work) {
  CHECK(work.done());
  CHECK_OK(work.status());
  for (const int n : work.ran) CHECK_EQ(n, 1);
  CHECK_EQ(work.ends.load(), 1);
}

}  // namespace windlass::test
