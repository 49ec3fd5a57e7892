#include "server/object/user_code.h"

#include <atomic>
#include <thread>

#include "base/os.h"
#include "base/test.h"
#include "table/table.h"
#include "tensor/tensor.h"

namespace windlass::user_code_test {
namespace {

// Somebody who runs functions: w -= lr * g, the state counts; or what the test wants.
class Runner {
 public:
  explicit Runner(double seconds) : code(std::make_shared<UserCode>(seconds)), thread_([this] { run(); }) {}
  ~Runner() {
    release = true;
    code->close();
    thread_.join();
  }

  std::shared_ptr<UserCode> code;
  std::atomic<bool> fails{false}, hangs{false}, release{false};
  std::atomic<int> begun{0};

 private:
  void run() {
    while (!code->closed()) {
      const UserCode::Ref call = code->next(os::now_ns() + 10'000'000);
      if (call == nullptr) continue;
      if (call->kind == UserCode::Call::kFind) {
        const bool known = call->text == "rules:descent";
        call->function = 7;
        code->end(call, known ? Status() : Status(Code::kAccessDenied, call->what + ": not allowed"));
        continue;
      }
      CHECK_EQ(call->function, 7u);
      ForeignCall& a = call->arrays;
      if (a.count == 0) ++begun;
      for (uint64_t i = 0; i < call->size.elements; ++i) {
        if (a.count != 0) a.w[i] -= static_cast<float>(a.hyper.v[0]) * a.g[i];
        for (int v = 0; v < call->size.vectors; ++v) a.state[v][i] += static_cast<float>(v + 1);
      }
      for (uint32_t i = 0; i < call->size.shard_scalars; ++i) a.shard_scalars[i] += 1;
      while (hangs && !release) std::this_thread::yield();
      code->end(call, fails ? Status(Code::kFunctionFailed, call->what + ": raised") : Status());
    }
  }
  std::thread thread_;
};

RuleSpec descent(uint8_t vectors, uint32_t shard_scalars = 0) {
  RuleSpec rule;
  rule.kind = RuleKind::kForeign;
  rule.foreign = {.name = "rules:descent", .vectors = vectors, .shard_scalars = shard_scalars, .begins = true};
  return rule;
}

struct Made {
  explicit Made(Runner& runner, TensorSpec spec) : spec(std::move(spec)) {
    std::shared_ptr<ForeignRule> rule;
    CHECK_OK(runner.code->find("tensor 'w'", this->spec.rule, &rule));
    CHECK_OK(Tensor::create("w", this->spec, &budget, &tensor));
    tensor->set_foreign(std::move(rule));
  }
  Status push(uint32_t shard, uint64_t first, uint64_t n, std::vector<float>* g, float lr) {
    Hyper hyper;
    hyper.v[0] = lr;
    const Span span{first, n, 0};
    return tensor->apply(shard, hyper, &span, 1, {.in = g->data()});
  }
  std::vector<float> read(uint64_t first, uint64_t n) const {
    std::vector<float> out(n);
    const Span span{first, n, 0};
    tensor->read(&span, 1, {.out = out.data()});
    return out;
  }
  Budget budget{~uint64_t{0}};
  TensorSpec spec;
  std::unique_ptr<Tensor> tensor;
};

}  // namespace

TEST(a_function_of_the_users_is_the_rule_of_a_tensor) {
  Runner runner(10);
  Made made(runner, {.shape = {100, 10}, .rule = descent(2)});
  std::vector<float> g(1000, 2.0f);
  CHECK_OK(made.push(0, 20, 30, &g, 0.5f));  // some rows
  CHECK_EQ(runner.begun.load(), 1);          // and the beginning of all
  CHECK_OK(made.push(0, 0, 1000, &g, 0.25f));
  CHECK_EQ(runner.begun.load(), 1);
  const std::vector<float> w = made.read(0, 1000);
  for (uint64_t i = 0; i < 1000; ++i) CHECK_EQ(w[i], i >= 20 && i < 50 ? -1.5f : -0.5f);
  const std::vector<Tensor::Piece> pieces = made.tensor->pieces_of(0);
  CHECK_EQ(pieces.size(), 3u);
  CHECK_EQ(reinterpret_cast<const float*>(pieces[2].data)[20], 6.0f);
  CHECK_EQ(reinterpret_cast<const float*>(pieces[2].data)[0], 4.0f);
  CHECK_EQ(made.tensor->shard(0).count, 2u);
}

TEST(a_function_that_fails_changes_nothing) {
  Runner runner(10);
  Made made(runner, {.shape = {1000}, .rule = descent(1, 3), .init = {InitKind::kNormal, 0, 1}});
  std::vector<float> g(1000, 1.0f);
  CHECK_OK(made.push(0, 0, 1000, &g, 1));
  const uint64_t before = made.tensor->fingerprint(0);
  runner.fails = true;
  CHECK(made.push(0, 0, 1000, &g, 1).code() == Code::kFunctionFailed);
  CHECK_EQ(made.tensor->fingerprint(0), before);
  runner.fails = false;
  CHECK_OK(made.push(0, 0, 1000, &g, 1));
  CHECK(made.tensor->fingerprint(0) != before);
}

TEST(a_function_that_takes_too_long_is_given_up_and_changes_nothing_later) {
  Runner runner(0.05);
  Made made(runner, {.shape = {1000}, .rule = descent(1)});
  std::vector<float> g(1000, 1.0f);
  CHECK_OK(made.push(0, 0, 1000, &g, 1));
  const uint64_t before = made.tensor->fingerprint(0);
  runner.hangs = true;
  const int64_t start = os::now_ns();
  const Status late = made.push(0, 0, 1000, &g, 1);
  CHECK(late.code() == Code::kFunctionFailed && late.message().find("took longer than 0.05 s") != std::string::npos);
  CHECK(os::now_ns() - start < 5'000'000'000);
  CHECK(runner.code->wait_given_up(os::now_ns()));
  // Another waits for the thread that is stuck, for so long and no longer.
  const Status behind = made.push(0, 0, 1000, &g, 1);
  CHECK(behind.code() == Code::kFunctionFailed && behind.message().find("was not called") != std::string::npos);
  CHECK(!runner.code->wait_given_up(os::now_ns()));
  runner.hangs = false;
  runner.release = true;
  CHECK_OK(made.push(0, 0, 1000, &g, 0));
  CHECK_EQ(made.read(0, 1)[0], -1.0f);
  CHECK(made.tensor->fingerprint(0) != before);  // the last counts
}

TEST(who_waits_for_a_function_that_runs_stops_waiting_when_all_is_closed) {
  Runner runner(60);
  std::shared_ptr<ForeignRule> rule;
  CHECK_OK(runner.code->find("tensor 't'", descent(0), &rule));
  runner.hangs = true;
  std::atomic<bool> taken{false};
  Status status;
  std::thread waiting(
      [&] { status = rule->apply({.elements = 4}, [](ForeignCall&) {}, [&](const ForeignCall&) { taken = true; }); });
  while (runner.begun == 0) std::this_thread::yield();
  const int64_t start = os::now_ns();
  runner.code->close();
  waiting.join();
  CHECK(os::now_ns() - start < 30'000'000'000);
  CHECK(status.code() == Code::kClosed && status.message().find("was still running") != std::string::npos);
  CHECK(!taken);
}

TEST(a_rule_for_a_whole_tensor_makes_one_shard_and_refuses_some_rows) {
  Runner runner(10);
  TensorSpec spec{.shape = {4000, 100}, .rule = descent(1)};
  spec.rule.foreign.whole = true;
  Made made(runner, spec);
  CHECK_EQ(made.tensor->cut().shards, 1u);
  std::vector<float> g(400'000, 1.0f);
  CHECK_OK(made.push(0, 0, 400'000, &g, 1));
  CHECK(made.push(0, 0, 100, &g, 1).code() == Code::kInvalidArgument);
  spec.shape = {uint64_t{1} << 30};
  std::unique_ptr<Tensor> large;
  Budget budget{~uint64_t{0}};
  CHECK(Tensor::create("w", spec, &budget, &large).code() == Code::kInvalidArgument);
}

TEST(a_function_of_the_users_is_the_rule_of_a_tables_rows) {
  Runner runner(10);
  RuleSpec rule = descent(2);
  std::shared_ptr<ForeignRule> found;
  CHECK_OK(runner.code->find("table 't'", rule, &found));
  Budget budget{~uint64_t{0}};
  TablePools pools(&budget);
  std::unique_ptr<Table> table;
  CHECK_OK(Table::create("t", {.dim = 3, .rule = rule}, &pools, &table));
  table->set_foreign(found);
  const uint64_t hash = mix(5);
  const uint32_t shard = shard_of_hash(hash);
  std::vector<Keyed> keyed = {{hash, 0}, {hash, 1}};  // a key that repeats is one row
  std::vector<float> g = {1, 2, 3, 1, 1, 1}, out(6);
  Hyper hyper;
  hyper.v[0] = 1;
  CHECK_OK(table->apply(shard, hyper, keyed.data(), 2, {.in = g.data(), .out = out.data()}));
  CHECK_EQ(out[0], -2.0f);
  CHECK_EQ(out[5], -4.0f);
  runner.fails = true;
  const uint64_t before = table->fingerprint(shard);
  CHECK(table->apply(shard, hyper, keyed.data(), 2, {.in = g.data()}).code() == Code::kFunctionFailed);
  CHECK_EQ(table->fingerprint(shard), before);
}

TEST(a_name_that_is_not_known_and_a_runner_that_has_gone_are_errors) {
  Runner runner(10);
  RuleSpec rule = descent(0);
  rule.foreign.name = "os:system";
  std::shared_ptr<ForeignRule> found;
  CHECK(runner.code->find("tensor 'w'", rule, &found).code() == Code::kAccessDenied);
  runner.code->close();
  rule.foreign.name = "rules:descent";
  CHECK(runner.code->find("tensor 'w'", rule, &found).code() == Code::kClosed);
}

}  // namespace windlass::user_code_test
