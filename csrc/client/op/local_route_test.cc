#include "client/op/local_route.h"

#include <algorithm>
#include <thread>

#include "client/client_test.h"

namespace windlass::local_route_test {
namespace {

using test::array_of;
using test::Busy;
using test::in_ms;
using test::now;
using test::soon;
using test::sums;
using test::Worker;

constexpr uint64_t kN = 100;  // in one shard
constexpr float kUntouched = 7;

Hyper rate_of_one() {
  Hyper hyper;
  hyper.v[0] = 1;
  return hyper;
}

size_t count_parked(Shard& shard) {
  size_t n = 0;
  with_turn(shard.turn, [&] { shard.parked.each([&](Waiting&) { ++n; }); });
  return n;
}

bool all_are(const std::vector<float>& values, float x) {
  return std::all_of(values.begin(), values.end(), [&](float v) { return v == x; });
}

// Two workers, and their handles on a tensor of one shard: SGD with a rate of 1 takes the mean off its weights.
struct Pair {
  explicit Pair(Sync sync = {Sync::kBsp, 0, 0})
      : engine(std::make_shared<Engine>(2, ~uint64_t{0})), workers{Worker(engine, 0, 2), Worker(engine, 1, 2)} {
    TensorSpec spec = sums({kN});
    spec.rule.kind = RuleKind::kSgd;
    spec.sync = sync;
    for (int i = 0; i < 2; ++i) tensors[i] = workers[i].tensor("w", spec);
  }
  Shard& shard() { return tensors[0]->tensor().shard(0); }
  // A push_pull, or where `g` is missing a pull, on arrays that are registered or not.
  Status start(int rank, float* g, float* out, How how, Ref<TensorCall>* call) {
    const Array in = array_of(g, {kN}), into = array_of(out, {kN});
    const bool pushes = g != nullptr;
    const TensorRequest request{.in = pushes ? &in : nullptr, .out = &into, .hyper = rate_of_one(), .closes = pushes};
    return tensors[rank]->start(request, how, call, soon());
  }
  float* registered(float value) {
    float* const array = workers[0].take<float>(kN);
    std::fill_n(array, kN, value);
    return array;
  }
  // The other worker closes the iteration.
  void push_as(int rank, float value) {
    std::vector<float> g(kN, value), out(kN);
    Ref<TensorCall> call;
    CHECK_OK(start(rank, g.data(), out.data(), How::kWait, &call));
    CHECK_OK(call->finish(soon()));
  }
  // As of a shard that is about to move: what comes for it must wait, and nothing of it has been taken.
  void freeze(bool frozen) {
    with_turn(shard().turn, [&] {
      shard().home.state = frozen ? Residence::kFrozen : Residence::kHere;
      if (frozen) return;
      Freed freed;
      shard().parked.free(shard(), &freed);
      deliver(&freed);
    });
  }

  std::shared_ptr<Engine> engine;
  Worker workers[2];
  std::shared_ptr<TensorClient> tensors[2];
};

}  // namespace

TEST(a_near_entry_that_must_wait_leaves_a_ticket_and_no_thread) {
  Pair p;
  float* const g = p.registered(2);
  float* const out = p.registered(kUntouched);
  Ref<TensorCall> call;
  CHECK_OK(p.start(1, g, out, How::kFuture, &call));
  CHECK(!call->done());
  CHECK_EQ(count_parked(p.shard()), 1u);
  CHECK_EQ(out[0], kUntouched);
  p.push_as(0, 1);
  CHECK(call->done());  // within the other's request
  CHECK_EQ(count_parked(p.shard()), 0u);
  CHECK_EQ(out[0], -1.5f);
  CHECK_OK(call->wait(soon()));
  CHECK_EQ(call->seen().rank, 0u);
  CHECK(call->seen().waited_ns > 0);
}

TEST(a_pull_that_is_given_up_at_the_gate_leaves_it_and_writes_nothing) {
  Pair p;
  CHECK_OK(p.workers[0].session->tick(soon()));
  std::vector<float> out(kN, kUntouched);
  Ref<TensorCall> call;
  CHECK_OK(p.start(0, nullptr, out.data(), How::kWait, &call));
  CHECK_EQ(count_parked(p.shard()), 1u);
  const Status late = call->finish(in_ms(5));
  CHECK(late.code() == Code::kTimeout);
  CHECK(late.message().find("rank 0 at clock 1 waits for rank 1, whose clock is 0") != std::string::npos);
  CHECK_EQ(count_parked(p.shard()), 0u);
  CHECK(call->done());
  CHECK_OK(p.workers[1].session->tick(soon()));
  CHECK(all_are(out, kUntouched));
}

// A push_pull whose push was taken cannot be taken back; nor does it write where its caller wants nothing any more.
TEST(a_push_pull_that_is_given_up_at_the_gate_counts_and_writes_nothing) {
  Pair p;
  std::vector<float> g(kN, 2.0f), out(kN, kUntouched);
  Ref<TensorCall> call;
  CHECK_OK(p.start(1, g.data(), out.data(), How::kWait, &call));
  const Status late = call->finish(in_ms(5));
  CHECK(late.code() == Code::kTimeout);
  CHECK(late.message().find("waits for rank 0, whose clock is 0; the push goes on") != std::string::npos);
  std::vector<float>().swap(g);  // the memory is gone
  CHECK_EQ(count_parked(p.shard()), 1u);
  p.push_as(0, 1);
  CHECK(call->done());
  CHECK(all_are(out, kUntouched));
  CHECK_EQ(p.shard().version, 1u);
  std::vector<float> weights(kN);
  const Array into = array_of(weights.data(), {kN});
  CHECK_OK(now(*p.tensors[0], TensorRequest{.out = &into}));
  CHECK(all_are(weights, -1.5f));
}

TEST(a_push_that_waits_untaken_is_taken_back) {
  Pair p({Sync::kAsp, 0, 0});
  p.freeze(true);
  float* const g = p.registered(2);
  float* const out = p.registered(kUntouched);
  Ref<TensorCall> call;
  CHECK_OK(p.start(1, g, out, How::kFuture, &call));
  CHECK_EQ(count_parked(p.shard()), 1u);
  CHECK(call->take_back());
  CHECK_CODE(call->wait(soon()), Code::kCancelled);
  CHECK_EQ(count_parked(p.shard()), 0u);
  p.freeze(false);
  CHECK_EQ(p.shard().version, 0u);
  CHECK_EQ(out[0], kUntouched);
}

TEST(a_push_that_waits_taken_is_not_taken_back) {
  Pair p;
  float* const g = p.registered(2);
  float* const out = p.registered(kUntouched);
  Ref<TensorCall> call;
  CHECK_OK(p.start(1, g, out, How::kFuture, &call));
  CHECK(!call->take_back());
  CHECK_EQ(count_parked(p.shard()), 1u);
  p.push_as(0, 1);
  CHECK_OK(call->wait(soon()));
  CHECK_EQ(out[0], -1.5f);
}

TEST(a_push_that_waits_untaken_goes_on_with_a_copy_of_its_gradient) {
  Pair p({Sync::kAsp, 0, 0});
  p.freeze(true);
  std::vector<float> g(kN, 2.0f), out(kN, kUntouched);
  Ref<TensorCall> call;
  CHECK_OK(p.start(1, g.data(), out.data(), How::kWait, &call));
  CHECK_CODE(call->finish(in_ms(5)), Code::kTimeout);
  std::fill(g.begin(), g.end(), 1000.0f);
  p.freeze(false);
  CHECK(call->done());
  CHECK(all_are(out, kUntouched));
  CHECK_EQ(p.shard().version, 1u);
  std::vector<float> weights(kN);
  const Array into = array_of(weights.data(), {kN});
  CHECK_OK(now(*p.tensors[0], TensorRequest{.out = &into}));
  CHECK(all_are(weights, -2.0f));
}

// Nobody has the future, and another thread runs its part: its call goes away within the turn. ASan looks.
TEST(a_call_that_nobody_holds_ends_within_the_turn_of_another) {
  for (const bool is_last : {false, true}) {
    Pair p;
    float* const g = p.registered(1);
    float* const out = p.registered(kUntouched);
    Busy busy(p.shard());
    {
      Ref<TensorCall> call;
      CHECK_OK(p.start(0, g, out, How::kFuture, &call));
      call->drop();
    }
    if (is_last) {
      busy.end();
      p.push_as(1, 2);
    } else {
      std::thread other([&] { p.push_as(1, 2); });
      std::this_thread::yield();
      busy.end();
      other.join();
    }
    CHECK_OK(p.engine->close(soon()));
    CHECK_EQ(out[0], -1.5f);
  }
}

// Whoever gives up has its arrays back, though the gate opens at this moment. ASan looks.
TEST(giving_up_and_the_gate_may_race) {
  for (int i = 0; i < (test::accurate() ? 2000 : 200); ++i) {
    Pair p;
    Ref<TensorCall> call;
    std::thread other([&] { p.push_as(0, 1); });
    {
      std::vector<float> g(3, 2.0f), out(3, kUntouched);
      const std::vector<int64_t> rows = {3, 1, 3};  // a row that repeats is written when its part has landed
      const Array in = array_of(g.data(), {3}), into = array_of(out.data(), {3});
      TensorRequest request{.in = &in, .out = &into, .hyper = rate_of_one(), .closes = true};
      request.rows = {.kind = Selection::kList, .list = rows.data(), .n = rows.size()};
      CHECK_OK(p.tensors[1]->start(request, How::kWait, &call, soon()));
      const Status status = call->finish(os::now_ns() + i * 500);
      CHECK(status.ok() || status.code() == Code::kTimeout);
    }
    other.join();
    CHECK_EQ(p.shard().version, 1u);
  }
}

}  // namespace windlass::local_route_test
