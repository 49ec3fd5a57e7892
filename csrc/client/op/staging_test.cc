// The staging limit inside the process: pushes of ordinary arrays under BSP, while there is no room for their copies.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>

#include "client/client_test.h"

namespace windlass::staging_test {
namespace {

using test::array_of;
using test::in_ms;
using test::soon;
using test::Worker;

constexpr uint64_t kFull = limits::kRoundsBytesMax;
constexpr uint64_t kNumbers = 40'000;  // of a tensor, in several shards
constexpr uint64_t kRows = 400, kDim = 4;

Hyper rate_of_one() {
  Hyper hyper;
  hyper.v[0] = 1;
  return hyper;
}

// One worker's ordinary arrays, and its tensor or table under BSP. SGD with a rate of 1 takes the mean off the weights.
class Model {
 public:
  Model(Worker& worker, bool is_table) : session_(worker.session) {
    const Sync bsp{Sync::kBsp, 0, 0};
    if (is_table) {
      TableSpec spec = test::row_sums(kDim);
      spec.rule.kind = RuleKind::kSgd;
      spec.sync = bsp;
      table_ = worker.table("m", spec);
      keys_.resize(kRows);
      for (uint64_t i = 0; i < kRows; ++i) keys_[i] = i;
    } else {
      TensorSpec spec = test::sums({kNumbers});
      spec.rule.kind = RuleKind::kSgd;
      spec.sync = bsp;
      tensor_ = worker.tensor("m", spec);
    }
    out_.resize(is_table ? kRows * kDim : kNumbers);
  }

  uint64_t bytes() const { return out_.size() * sizeof(float); }
  uint64_t updates() { return (tensor_ != nullptr ? tensor_->tensor().shard(0) : table_->table().shard(0)).version; }
  const std::vector<float>& out() const { return out_; }
  Session& session() { return *session_; }

  // A push, or a push_pull, whose gradient is gone when it has returned: for one that is waited for when it is done.
  Status push(float value, How how, Ref<Call>* call, int64_t deadline_ns, bool pulls = false) {
    std::vector<float> g(out_.size(), value);
    const Array in = shaped(g.data()), out = shaped(out_.data());
    Status status;
    if (tensor_ != nullptr) {
      Ref<TensorCall> made;
      status = tensor_->start({.in = &in, .out = pulls ? &out : nullptr, .hyper = rate_of_one(), .closes = pulls}, how,
                              &made, deadline_ns);
      if (call != nullptr) *call = made;
      if (status.ok() && how == How::kWait) status = made->finish(deadline_ns);
    } else {
      TableRequest request{.keys = test::keys_of(keys_), .in = &in, .out = pulls ? &out : nullptr};
      request.hyper = rate_of_one();
      request.closes = pulls;
      Ref<TableCall> made;
      status = table_->start(request, how, &made, deadline_ns);
      if (call != nullptr) *call = made;
      if (status.ok() && how == How::kWait) status = made->finish(deadline_ns);
    }
    std::fill(g.begin(), g.end(), 1000.0f);
    return status;
  }
  Status push_pull(float value, int64_t deadline_ns) { return push(value, How::kWait, nullptr, deadline_ns, true); }
  // The weight that all of it has; NaN where they differ.
  float weight() const {
    const bool same = std::all_of(out_.begin(), out_.end(), [&](float x) { return x == out_[0]; });
    return same ? out_[0] : std::numeric_limits<float>::quiet_NaN();
  }
  float pulled() {
    const Array out = shaped(out_.data());
    if (tensor_ != nullptr) {
      CHECK_OK(test::now(*tensor_, TensorRequest{.out = &out}));
    } else {
      CHECK_OK(test::now(*table_, TableRequest{.keys = test::keys_of(keys_), .out = &out}));
    }
    return weight();
  }

 private:
  Array shaped(float* data) const {
    return table_ != nullptr ? array_of(data, {kRows, kDim}) : array_of(data, {kNumbers});
  }

  const std::shared_ptr<Session> session_;
  std::shared_ptr<TensorClient> tensor_;
  std::shared_ptr<TableClient> table_;
  std::vector<uint64_t> keys_;
  std::vector<float> out_;
};

// Two workers on one engine whose staging quota is used up.
struct Crowded {
  explicit Crowded(bool is_table)
      : engine(std::make_shared<Engine>(2, ~uint64_t{0})),
        workers{Worker(engine, 0, 2), Worker(engine, 1, 2)},
        low(workers[0], is_table),
        high(workers[1], is_table) {
    quota().force(kFull);
  }
  StagingQuota& quota() { return engine->server().staging(); }

  std::shared_ptr<Engine> engine;
  Worker workers[2];
  Model low, high;  // of rank 0 and rank 1
};

// How the other worker goes on, whose push needs no room.
void push_and_tick(Model& model, float value) {
  Ref<Call> pushed;
  CHECK_OK(model.push(value, How::kFuture, &pushed, in_ms(10'000)));
  CHECK_OK(model.session().tick(soon()));
  CHECK_OK(pushed->wait(soon()));
}

void a_while() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

}  // namespace

TEST(a_future_of_the_lowest_rank_never_waits_for_room) {
  for (const bool is_table : {false, true}) {
    Crowded c(is_table);
    std::thread other([&] { CHECK_OK(c.high.push_pull(2, soon())); });
    a_while();
    push_and_tick(c.low, 1);
    other.join();
    CHECK_EQ(c.high.weight(), -1.5f);
    CHECK_EQ(c.low.pulled(), -1.5f);
    CHECK_EQ(c.low.updates(), 1u);
    CHECK_EQ(c.quota().used(), kFull);
  }
}

TEST(a_blocking_push_of_the_lowest_rank_never_waits_for_room) {
  for (const bool is_table : {false, true}) {
    Crowded c(is_table);
    for (int i = 1; i <= 3; ++i) {
      std::thread other([&] { CHECK_OK(c.high.push_pull(2, soon())); });
      if (i != 2) a_while();
      CHECK_OK(c.low.push_pull(1, soon()));
      other.join();
      CHECK_EQ(c.low.weight(), -1.5f * static_cast<float>(i));
      CHECK_EQ(c.high.weight(), -1.5f * static_cast<float>(i));
    }
    CHECK_EQ(c.quota().used(), kFull);
  }
}

TEST(a_future_of_a_higher_rank_begins_when_the_lower_ones_have_closed) {
  for (const bool is_table : {false, true}) {
    Crowded c(is_table);
    std::atomic<bool> begun{false};
    std::thread other([&] {
      Ref<Call> pushed;
      CHECK_OK(c.high.push(2, How::kFuture, &pushed, soon()));
      begun = true;
      CHECK_OK(c.high.session().tick(soon()));
      CHECK_OK(pushed->wait(soon()));
    });
    a_while();
    CHECK(!begun);
    push_and_tick(c.low, 1);
    other.join();
    CHECK_EQ(c.low.pulled(), -1.5f);
    CHECK_EQ(c.high.pulled(), -1.5f);
    CHECK_EQ(c.quota().used(), kFull);
  }
}

TEST(a_push_that_waits_for_room_begins_when_there_is_some) {
  for (const bool is_table : {false, true}) {
    Crowded c(is_table);
    std::atomic<bool> begun{false};
    std::thread other([&] {
      Ref<Call> pushed;
      CHECK_OK(c.high.push(2, How::kFuture, &pushed, soon()));
      begun = true;
      CHECK_OK(c.high.session().tick(soon()));
      CHECK_OK(pushed->wait(soon()));
    });
    a_while();
    CHECK(!begun);
    c.quota().refund(c.high.bytes());  // elsewhere an update was made
    const int64_t end = soon();
    while (!begun && os::now_ns() < end) std::this_thread::yield();
    CHECK(begun);
    CHECK_EQ(c.quota().used(), kFull);
    push_and_tick(c.low, 1);
    other.join();
    CHECK_EQ(c.high.pulled(), -1.5f);
    CHECK_EQ(c.quota().used(), kFull - c.high.bytes());
  }
}

// What a push takes is counted once while it waits for its update, and not at all afterwards.
TEST(pushes_take_as_much_room_as_they_bring) {
  for (const bool is_table : {false, true}) {
    for (const bool pulls : {false, true}) {
      Crowded c(is_table);
      c.quota().refund(kFull);
      Ref<Call> pushed;
      std::thread other(
          [&] { CHECK_OK(pulls ? c.high.push_pull(2, soon()) : c.high.push(2, How::kFuture, &pushed, soon())); });
      const int64_t end = soon();
      while (c.quota().used() != c.high.bytes() && os::now_ns() < end) std::this_thread::yield();
      a_while();
      CHECK_EQ(c.quota().used(), c.high.bytes());
      if (!pulls) {
        other.join();
        CHECK_OK(c.high.session().tick(soon()));
      }
      push_and_tick(c.low, 1);
      if (pulls) other.join();
      if (!pulls) CHECK_OK(pushed->wait(soon()));
      CHECK_EQ(c.low.pulled(), -1.5f);
      CHECK_EQ(c.quota().used(), 0u);
    }
  }
}

// Its gradient is gone then; and it may be pushed again.
TEST(a_push_that_is_given_up_while_it_waits_for_room_has_not_begun) {
  for (const bool is_table : {false, true}) {
    for (const How how : {How::kWait, How::kFuture}) {
      Crowded c(is_table);
      const int64_t start = os::now_ns();
      Ref<Call> call;
      const Status late = c.high.push(2, how, &call, in_ms(30), how == How::kWait);
      CHECK(late.code() == Code::kTimeout);
      CHECK(late.message().find(": not begun; 268435456 bytes of pushes wait for their update, which waits for rank 0, "
                                "whose clock is 0") != std::string::npos);
      CHECK(os::now_ns() - start >= 30'000'000);
      CHECK_EQ(c.quota().used(), kFull);
      std::thread other([&] { CHECK_OK(c.high.push_pull(4, soon())); });
      a_while();
      push_and_tick(c.low, 1);
      other.join();
      CHECK_EQ(c.high.weight(), -2.5f);  // not of the 2, and divided by two weights, not three
      CHECK_EQ(c.high.updates(), 1u);
      CHECK_EQ(c.quota().used(), kFull);
    }
  }
}

// Nobody is lower, but its iteration is not the oldest: somebody else's push is waited for.
TEST(the_lowest_rank_waits_for_room_for_its_next_iteration) {
  for (const bool is_table : {false, true}) {
    Crowded c(is_table);
    Ref<Call> first, second;
    CHECK_OK(c.low.push(1, How::kFuture, &first, in_ms(10'000)));
    CHECK_OK(c.low.session().tick(soon()));
    const Status late = c.low.push(3, How::kFuture, &second, in_ms(30));
    CHECK(late.code() == Code::kTimeout);
    CHECK(late.message().find("which waits for rank 1, whose clock is 0") != std::string::npos);
    std::thread other([&] { CHECK_OK(c.high.push_pull(2, soon())); });
    CHECK_OK(c.low.push(3, How::kFuture, &second, soon()));
    other.join();
    CHECK_EQ(c.high.weight(), -1.5f);
    CHECK_OK(c.low.session().tick(soon()));
    CHECK_OK(c.high.push_pull(5, soon()));
    CHECK_EQ(c.high.weight(), -5.5f);
    CHECK_OK(first->wait(soon()));
    CHECK_OK(second->wait(soon()));
    CHECK_EQ(c.quota().used(), kFull);
  }
}

TEST(a_push_that_waits_for_room_begins_when_the_lower_rank_leaves) {
  Crowded c(false);
  std::thread other([&] { CHECK_OK(c.high.push_pull(2, soon())); });
  a_while();
  CHECK_OK(c.workers[0].session->leave(soon()));
  other.join();
  CHECK_EQ(c.high.weight(), -2.0f);
  CHECK_EQ(c.quota().used(), kFull);
}

TEST(a_push_that_waits_for_room_ends_when_the_cluster_is_closed) {
  for (const How how : {How::kWait, How::kFuture}) {
    Crowded c(false);
    std::thread other([&] {
      Ref<Call> call;
      CHECK_CODE(c.high.push(2, how, &call, soon(), how == How::kWait), Code::kClosed);
    });
    a_while();
    CHECK_OK(c.engine->close(in_ms(10'000)));
    other.join();
  }
}

}  // namespace windlass::staging_test
