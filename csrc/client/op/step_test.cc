// Steps to servers elsewhere: what travels, and what becomes of it.
#include "client/op/step.h"

#include <map>
#include <mutex>

#include "client/totals_test.h"

namespace windlass::step_test {
namespace {

using test::array_of;
using test::Frame;
using test::Hosts;
using test::in_ms;
using test::Joined;
using test::parsed;
using test::Relay;
using test::soon;
using wire::Op;

// Requests about shards as they pass, by request, and the operations of their blocks.
class Log {
 public:
  Relay::Hands hands() {
    return [this](Relay::Passing& passing, std::string bytes) {
      const Frame frame = parsed(bytes);
      if (!passing.answer && frame.header.operation() == Op::kStep) {
        std::lock_guard lock(mutex_);
        std::vector<Op>& ops = requests_.emplace_back();
        for (const test::FramePart& p : frame.parts) ops.push_back(static_cast<Op>(p.about->op));
      }
      return bytes;
    };
  }
  std::vector<std::vector<Op>> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(requests_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<Op>> requests_;
};

TensorSpec a_tensor(const Sync& sync, std::vector<uint64_t> shape) {
  TensorSpec spec;
  spec.shape = std::move(shape);
  spec.rule.kind = RuleKind::kSgd;
  spec.sync = sync;
  return spec;
}

TableSpec a_table(const Sync& sync) {
  TableSpec spec;
  spec.dim = 4;
  spec.rule.kind = RuleKind::kSgd;
  spec.sync = sync;
  return spec;
}

Hyper rate_of_one() {
  Hyper hyper{};
  hyper.v[0] = 1;
  return hyper;
}

}  // namespace

TEST(tensors_rows_tables_and_the_tick_of_a_step_travel_in_one_frame_per_server) {
  for (const Sync& sync : {Sync{Sync::kBsp, 0, 0}, Sync{Sync::kSsp, 2, 0}}) {
    Log log;
    Relay relay(log.hands());
    Hosts hosts(2);
    Joined first(hosts, 0, 2, &relay), second(hosts, 1, 2);
    std::vector<std::shared_ptr<TensorClient>> w;
    std::vector<std::shared_ptr<TableClient>> t;
    for (Joined* worker : {&first, &second}) {
      std::shared_ptr<TensorClient> tensor;
      std::shared_ptr<TableClient> table;
      CHECK_OK(TensorClient::open(worker->session, "w", a_tensor(sync, {100, 400}), &tensor, soon()));
      CHECK_OK(TableClient::open(worker->session, "t", a_table(sync), &table, soon()));
      w.push_back(tensor);
      t.push_back(table);
    }
    CHECK_OK(first.session->settle(soon()));
    (void)log.take();
    // Both workers do the same, one of them through the relay.
    std::vector<uint64_t> keys(64);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = mix(i);
    const auto run = [&](size_t i, Joined& worker) {
      std::vector<float> whole(40'000, 1), rows(2 * 400, 1), gradients(keys.size() * 4, -2), out(keys.size() * 4);
      const Array in_whole = array_of(whole.data(), {100, 400}), in_rows = array_of(rows.data(), {2, 400});
      const Array in_table = array_of(gradients.data(), {keys.size(), 4}),
                  into = array_of(out.data(), {keys.size(), 4});
      const int64_t list[2] = {3, 90};
      StepClient step(worker.session);
      TensorRequest some;
      some.rows.kind = Selection::kList;
      some.rows.list = list;
      some.rows.n = 2;
      some.in = &in_rows;
      some.hyper = rate_of_one();
      CHECK_OK(step.add(w[i], some));
      CHECK_OK(step.add(w[i], TensorRequest{.in = &in_whole, .hyper = rate_of_one()}));
      TableRequest push;
      push.keys = test::keys_of(keys);
      push.in = &in_table;
      push.out = &into;
      push.hyper = rate_of_one();
      CHECK_OK(step.add(t[i], push));
      CHECK_OK(step.run(soon()));
      // Under BSP the mean of both; else what has come so far.
      if (sync.rounds()) CHECK(out == std::vector<float>(keys.size() * 4, 2.0f));
    };
    std::thread other([&] { run(1, second); });
    run(0, first);
    other.join();
    const std::vector<std::vector<Op>> sent = log.take();
    CHECK_EQ(sent.size(), 2u);  // one for each server
    for (const std::vector<Op>& ops : sent) {
      const auto has = [&](Op op) { return std::count(ops.begin(), ops.end(), op); };
      CHECK(has(Op::kPush) >= 2);
      CHECK(has(Op::kPushPull) >= 1);
      CHECK(has(Op::kClose) >= 1);  // of what no push closed
      CHECK_EQ(has(Op::kTick), 1);
      CHECK(ops.back() == Op::kTick);
      CHECK(ops.size() < 24);  // blocks, not one for each of 128 shards and more
    }
  }
}

TEST(a_step_whose_connection_is_cut_is_sent_again_and_counts_once) {
  Hosts hosts(2);
  std::atomic<int> cuts{0};
  Relay relay([&](Relay::Passing& passing, std::string bytes) {
    const Frame frame = parsed(bytes);
    // Every third answer to a step is lost with its connection.
    if (passing.answer && frame.header.operation() == Op::kStep && ++cuts % 3 == 0) {
      passing.cut = true;
      return std::string();
    }
    return bytes;
  });
  Joined worker(hosts, &relay);
  const auto w = worker.tensor("w", test::sums({40'000}, Dtype::kInt64));
  std::shared_ptr<TableClient> t;
  TableSpec spec;
  spec.dim = 2;
  spec.rule.kind = RuleKind::kSum;
  CHECK_OK(TableClient::open(worker.session, "t", spec, &t, soon()));
  std::vector<uint64_t> keys(300);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = mix(i);
  std::vector<int64_t> ones(40'000, 1), total(40'000);
  std::vector<float> gradients(600, 1), rows(600);
  const Array in = array_of(ones.data(), {40'000}), into = array_of(total.data(), {40'000});
  const Array in_rows = array_of(gradients.data(), {300, 2}), into_rows = array_of(rows.data(), {300, 2});
  constexpr int kSteps = 30;
  for (int i = 0; i < kSteps; ++i) {
    StepClient step(worker.session);
    CHECK_OK(step.add(w, TensorRequest{.in = &in, .out = &into}));
    TableRequest push;
    push.keys = test::keys_of(keys);
    push.in = &in_rows;
    push.out = &into_rows;
    CHECK_OK(step.add(t, push));
    CHECK_OK(step.run(in_ms(30'000)));
  }
  CHECK(total == std::vector<int64_t>(40'000, kSteps));
  CHECK(rows == std::vector<float>(600, kSteps));
  CHECK(cuts >= 3);
}

}  // namespace windlass::step_test
