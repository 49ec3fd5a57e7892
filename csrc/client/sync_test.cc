// Policies end to end: workers as threads, hosts in this process, arrays that travel and arrays that lie in arenas.
#include <algorithm>
#include <thread>

#include "client/client_test.h"
#include "client/relay_test.h"
#include "client/step.h"

namespace windlass {
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

}  // namespace

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

}  // namespace windlass
