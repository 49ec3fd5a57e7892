#include "exec/shard_work.h"

#include <chrono>
#include <thread>

#include "exec/crew.h"
#include "exec/shard_work_test.h"

namespace windlass::shard_work_test {

using test::check_each_ran_once;
using test::Counting;
using test::kSecond;
using test::Turns;

TEST(a_part_of_a_busy_shard_runs_when_the_holder_lets_go) {
  const Turns turns(3);
  CHECK(turns[1].try_take());
  const Ref<Counting> work(new Counting(turns));
  work->begin(nullptr);
  CHECK(!work->done());
  CHECK(work->ran == (std::vector<int>{1, 0, 1}));
  const int64_t start = os::now_ns();
  CHECK(!work->wait_until(start + 20'000'000));
  CHECK(os::now_ns() - start >= 20'000'000);
  turns[1].release();
  CHECK(work->wait_until(0));
  check_each_ran_once(*work);
}

TEST(a_waiting_thread_wakes_when_another_finishes_the_work) {
  for (int i = 0; i < 50; ++i) {
    const Turns turns(1);
    CHECK(turns[0].try_take());
    const Ref<Counting> work(new Counting(turns));
    work->begin(nullptr);
    std::thread other([&] {
      if (i % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      turns[0].release();
    });
    const int64_t start = os::now_ns();
    CHECK(work->wait_until(start + 30 * kSecond));
    CHECK(os::now_ns() - start < 20 * kSecond);
    other.join();
    check_each_ran_once(*work);
  }
}

TEST(kept_work_copies_what_a_busy_shard_will_need_and_no_more) {
  const Turns turns(4);
  CHECK(turns[0].try_take());
  CHECK(turns[2].try_take());
  const Ref<Counting> work(new Counting(turns));
  work->begin_kept(nullptr);
  CHECK_EQ(work->keeps.load(), 2);
  CHECK(!work->done());
  turns[0].release();
  turns[2].release();
  check_each_ran_once(*work);
  CHECK(work->was_kept == (std::vector<char>{1, 0, 1, 0}));
}

TEST(an_error_of_one_part_does_not_stop_the_others) {
  const Turns turns(6);
  const Ref<Counting> work(new Counting(turns));
  work->on_run = [](uint32_t part) {
    return part == 2 || part == 4 ? Status(Code::kNotFound, "part " + std::to_string(part)) : Status();
  };
  work->begin(nullptr);
  CHECK(work->done());
  for (const int n : work->ran) CHECK_EQ(n, 1);
  CHECK(work->status().code() == Code::kNotFound);
  CHECK(work->status().message() == "part 2");  // the first one counts
}

TEST(cancelled_parts_never_run_and_the_work_still_ends) {
  const Turns turns(3);
  CHECK(turns[1].try_take());
  const Ref<Counting> work(new Counting(turns));
  work->begin(nullptr);
  work->cancel();
  CHECK(!work->done());
  turns[1].release();
  CHECK(work->done());
  CHECK(work->ran == (std::vector<int>{1, 0, 1}));
  CHECK_EQ(work->ends.load(), 1);
}

TEST(cancel_waits_for_a_part_that_is_under_way) {
  const Turns turns(1);
  CHECK(turns[0].try_take());
  std::atomic<bool> running{false}, over{false};
  const Ref<Counting> work(new Counting(turns));
  work->on_run = [&](uint32_t) {
    running = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    over = true;
    return Status();
  };
  work->begin(nullptr);
  std::thread other([&] { turns[0].release(); });
  while (!running) std::this_thread::yield();
  work->cancel();
  CHECK(over);
  other.join();
  check_each_ran_once(*work);
}

TEST(work_that_is_let_go_keeps_the_input_of_parts_not_yet_begun_and_runs_them) {
  const Turns turns(3);
  CHECK(turns[1].try_take());
  const Ref<Counting> work(new Counting(turns));
  work->begin(nullptr);
  work->let_go();
  CHECK(!work->done());
  CHECK_EQ(work->keeps.load(), 1);
  turns[1].release();
  check_each_ran_once(*work);
  CHECK(work->was_kept == (std::vector<char>{0, 1, 0}));
}

TEST(parts_run_once_though_they_are_let_go_while_others_take_turns) {
  for (int round = 0; round < (test::accurate() ? 2000 : 200); ++round) {
    const Turns turns(8);
    for (int i = 0; i < 8; ++i) CHECK(turns[i].try_take());
    const Ref<Counting> work(new Counting(turns));
    work->begin(nullptr);
    std::thread other([&] {
      for (int i = 0; i < 8; ++i) turns[i].release();
    });
    work->let_go();
    other.join();
    check_each_ran_once(*work);
  }
}

TEST(work_lives_until_its_last_part_though_nobody_else_holds_it) {
  static std::atomic<int> alive{0};
  struct Watched final : Counting {
    explicit Watched(const Turns& turns) : Counting(turns) { ++alive; }
    ~Watched() override { --alive; }
  };
  const Turns turns(2);
  CHECK(turns[0].try_take());
  Ref<Watched>(new Watched(turns))->begin(nullptr);
  CHECK_EQ(alive.load(), 1);
  turns[0].release();
  CHECK_EQ(alive.load(), 0);
  {
    Crew crew(1);
    for (int i = 0; i < 20; ++i) Ref<Watched>(new Watched(turns))->begin_later(&crew, false);
  }  // finishes what was posted
  CHECK_EQ(alive.load(), 0);
}

// Work whose parts stop, as at a gate.
class Stopping final : public Future, public ShardWork {
 public:
  explicit Stopping(const Turns& turns) : ShardWork(static_cast<Future&>(*this)), turns_(turns) {
    set_parts(static_cast<uint32_t>(turns.size()));
  }
  using ShardWork::is_stopped;
  bool ends_at_once = false;              // somebody else ends it, at the same turn
  std::atomic<bool> is_delivered{false};  // it has run again, and ends soon
  std::atomic<int> detached{0};

 protected:
  Turn& turn(uint32_t part) override { return turns_[part]; }
  Ran run(uint32_t part, bool, Status*) override {
    stop(part);
    if (ends_at_once) end_stopped(part, {});
    return Ran::kStopped;
  }
  bool detach(uint32_t) override {
    ++detached;
    return !is_delivered;
  }

 private:
  const Turns turns_;
};

TEST(a_part_that_stops_may_end_before_its_run_returns) {
  const Turns turns(2);
  const Ref<Stopping> work(new Stopping(turns));
  work->ends_at_once = true;
  work->begin(nullptr);
  CHECK(work->done());
  CHECK(!work->is_stopped(0) && !work->is_stopped(1));
  work->let_go();
  CHECK_EQ(work->detached.load(), 0);
}

TEST(work_may_be_gone_when_a_part_of_it_has_stopped) {
  const Turns turns(1);
  CHECK(turns[0].try_take());
  {
    const Ref<Stopping> work(new Stopping(turns));
    work->ends_at_once = true;
    work->begin(nullptr);
  }
  turns[0].release();  // the last that is done with it; ASan looks
}

// A ticket has run and left its shard, and whoever ran it delivers it when it has let go of the turn.
TEST(letting_go_waits_for_a_part_that_is_about_to_end) {
  const Turns turns(1);
  const Ref<Stopping> work(new Stopping(turns));
  work->begin(nullptr);
  CHECK(work->is_stopped(0));
  work->let_go();
  CHECK_EQ(work->detached.load(), 1);
  CHECK(!work->done());
  work->is_delivered = true;
  std::atomic<bool> delivered{false};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    delivered = true;
    work->end_stopped(0, {});
  });
  work->let_go();
  CHECK(delivered);
  other.join();
  CHECK(work->done());
}

}  // namespace windlass::shard_work_test
