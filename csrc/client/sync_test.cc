// Policies end to end: workers as threads, hosts in this process, arrays that travel and arrays that lie in arenas.
#include <algorithm>
#include <thread>

#include "client/client_test.h"
#include "client/net/relay_test.h"
#include "client/op/step.h"

namespace windlass::sync_test {
namespace {

using test::array_of;
using test::Hosts;
using test::in_ms;
using test::Joined;
using test::now;
using test::soon;
using test::sums;
using test::Worker;

constexpr uint64_t kN = 100'000;

TensorSpec means(const Sync& sync) {
  TensorSpec spec = sums({kN});
  spec.rule.kind = RuleKind::kSgd;
  spec.sync = sync;
  return spec;
}
constexpr Sync kBsp{Sync::kBsp, 0, 0};

Hyper rate(double lr) {
  Hyper hyper;
  hyper.v[0] = lr;
  return hyper;
}

// Every worker pushes rank + 1, so each update takes the mean off every weight.
void train(Worker& worker, uint32_t rank, uint32_t world, uint64_t clocks, bool registered) {
  const auto t = worker.tensor("w", means(kBsp));
  std::vector<float> ordinary_in(kN), ordinary_out(kN);
  float* const in = registered ? worker.take<float>(kN) : ordinary_in.data();
  float* const out = registered ? worker.take<float>(kN) : ordinary_out.data();
  std::fill_n(in, kN, static_cast<float>(rank + 1));
  const Array g = array_of(in, {kN}), into = array_of(out, {kN});
  const float mean = static_cast<float>(world + 1) / 2;
  for (uint64_t clock = 0; clock < clocks; ++clock) {
    CHECK_OK(now(*t, TensorRequest{.in = &g, .out = &into, .hyper = rate(1), .closes = true}));
    const float expected = -mean * static_cast<float>(clock + 1);
    CHECK(std::all_of(out, out + kN, [&](float x) { return x == expected; }));
  }
}

// Rank 0 pushes 1, rank 1 pushes 2 and weighs 3; in buckets of whole shards, rank 1 the last one first, and never the
// second. Where both pushed the mean is 7/4, in the second bucket 1/4.
void train_in_buckets(Worker& worker, uint32_t rank, uint64_t clocks) {
  const auto t = worker.tensor("w", means(kBsp));
  const uint64_t each = t->cut().per_shard;
  CHECK(t->cut().shards >= 4);
  std::vector<float> in(kN, static_cast<float>(rank + 1)), out(kN);
  const std::vector<uint64_t> bounds = {0, each, 2 * each, kN};
  for (uint64_t clock = 0; clock < clocks; ++clock) {
    std::vector<Ref<TensorCall>> calls;
    for (size_t i = 0; i < 3; ++i) {
      const size_t bucket = rank == 0 ? i : 2 - i;
      if (rank == 1 && bucket == 1) continue;
      const uint64_t begin = bounds[bucket], end = bounds[bucket + 1];
      const Array g = array_of(in.data() + begin, {end - begin}), into = array_of(out.data() + begin, {end - begin});
      TensorRequest request{.in = &g, .out = &into, .hyper = rate(1), .weight = rank == 0 ? 1.0 : 3.0, .closes = true};
      request.rows.kind = Selection::kRange;
      request.rows.begin = begin;
      request.rows.end = end;
      CHECK_OK(t->start(request, How::kWait, &calls.emplace_back(), soon()));
    }
    if (rank == 1 && clock % 2 == 0) CHECK_OK(worker.session->tick(soon()));
    for (const Ref<TensorCall>& call : calls) CHECK_OK(call->finish(soon()));
  }
  CHECK_OK(worker.session->tick(soon()));
  const Array into = array_of(out.data(), {kN});
  CHECK_OK(now(*t, TensorRequest{.out = &into}));
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kN; ++i) {
    const float mean = i >= each && i < 2 * each ? 0.25f : 1.75f;
    wrong += out[i] != -mean * static_cast<float>(clocks) ? 1 : 0;
  }
  CHECK_EQ(wrong, 0u);
}

}  // namespace

TEST(disjoint_buckets_of_a_worker_are_one_contribution) {
  Hosts hosts(2);
  for (const bool elsewhere : {false, true}) {
    const auto engine = elsewhere ? nullptr : std::make_shared<Engine>(2, ~uint64_t{0});
    std::vector<std::unique_ptr<Worker>> workers;
    for (uint32_t rank = 0; rank < 2; ++rank)
      workers.push_back(elsewhere ? std::make_unique<Joined>(hosts, rank, 2)
                                  : std::make_unique<Worker>(engine, rank, 2));
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] { train_in_buckets(*workers[rank], rank, 6); });
    for (std::thread& thread : threads) thread.join();
    if (!elsewhere) CHECK_OK(engine->close(soon()));
  }
}

TEST(pushes_add_up_where_they_meet_and_what_is_taken_back_weighs_nothing) {
  const auto engine = std::make_shared<Engine>(1, ~uint64_t{0});
  Worker worker(engine, 0, 2);
  const auto t = worker.tensor("w", means(kBsp));
  const Iteration first = t->iteration_of_push({0, 1}, false, 2);
  CHECK_EQ(first.object_weight, 2.0);
  CHECK_EQ(first.other_weight, 0.0);
  const Iteration apart = t->iteration_of_push({2}, false, 1);
  CHECK_EQ(apart.object_weight, 2.0);
  CHECK_EQ(apart.other_weight, 2.0);
  const Iteration meets = t->iteration_of_push({1, 2}, false, 3);
  CHECK_EQ(meets.object_weight, 5.0);
  CHECK_EQ(meets.other_weight, 2.0);
  t->uncount({1, 2}, meets);
  CHECK_EQ(t->progress()->weight, 2.0);
  t->uncount({0, 1}, first);
  CHECK_EQ(t->progress()->weight, 1.0);
  CHECK_OK(worker.session->tick(soon()));
  CHECK_EQ(t->iteration_of_push({2}, false, 4).object_weight, 4.0);
}

TEST(workers_in_step_see_the_mean_of_all) {
  for (const bool registered : {false, true}) {
    Hosts hosts(2);
    std::vector<std::unique_ptr<Joined>> workers;
    for (uint32_t rank = 0; rank < 3; ++rank) workers.push_back(std::make_unique<Joined>(hosts, rank, 3));
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < 3; ++rank)
      threads.emplace_back([&, rank] { train(*workers[rank], rank, 3, 20, registered); });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(hosts[0].rounds_bytes() + hosts[1].rounds_bytes(), 0u);
  }
}

TEST(workers_inside_the_process_see_the_mean_of_all) {
  for (const bool registered : {false, true}) {
    const auto engine = std::make_shared<Engine>(2, ~uint64_t{0});
    std::vector<std::unique_ptr<Worker>> workers;
    for (uint32_t rank = 0; rank < 3; ++rank) workers.push_back(std::make_unique<Worker>(engine, rank, 3));
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < 3; ++rank)
      threads.emplace_back([&, rank] { train(*workers[rank], rank, 3, 20, registered); });
    for (std::thread& thread : threads) thread.join();
    CHECK_OK(engine->close(soon()));
  }
}

}  // namespace windlass::sync_test
