// Engines, sessions and clocks: who may do what, and when it ends.
#include "client/session.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "client/client_test.h"

namespace windlass::engine_test {
namespace {

using test::array_of;
using test::Busy;
using test::in_ms;
using test::now;
using test::soon;
using test::sums;
using test::Worker;

// The clock that a shard has of a session.
uint64_t closed_at(Shard& shard, const Session& session) {
  const Record* record = shard.records.find(session.number());
  return record == nullptr ? 0 : record->clock;
}

struct Pusher {
  std::shared_ptr<TensorClient> t;
  float g = 1, out = 0;
  explicit Pusher(std::shared_ptr<TensorClient> tensor) : t(std::move(tensor)) {}
  Status push() {
    const Array in = array_of(&g, {1});
    return now(*t, TensorRequest{.in = &in});
  }
  Status push_pull() {
    const Array in = array_of(&g, {1}), into = array_of(&out, {1});
    return now(*t, TensorRequest{.in = &in, .out = &into, .closes = true});
  }
};

}  // namespace

TEST(an_object_is_opened_again_with_the_same_spec_only) {
  Worker worker, other(worker.engine);
  const auto t = worker.tensor("w", sums({1}));
  CHECK(&other.tensor("w", sums({1}))->tensor() == &t->tensor());
  std::shared_ptr<TensorClient> tensor;
  std::shared_ptr<TableClient> table;
  const Status other_shape = TensorClient::open(worker.session, "w", sums({2}), &tensor);
  CHECK(other_shape.code() == Code::kSpecMismatch);
  CHECK(other_shape.message().find("there: tensor(shape=(1,)") != std::string::npos);
  CHECK(other_shape.message().find("asked: tensor(shape=(2,)") != std::string::npos);
  CHECK_CODE(TableClient::open(worker.session, "w", test::row_sums(1), &table), Code::kSpecMismatch);
  CHECK_OK(TableClient::open(worker.session, "t", test::row_sums(1), &table));
  CHECK_CODE(TableClient::open(worker.session, "t", test::row_sums(2), &table), Code::kSpecMismatch);
  CHECK_CODE(TensorClient::open(worker.session, "t", sums({1}), &tensor), Code::kSpecMismatch);
  for (const std::string& name : {std::string(), std::string("a/b"), std::string(257, 'x')}) {
    CHECK_CODE(TensorClient::open(worker.session, name, sums({1}), &tensor), Code::kInvalidArgument);
    CHECK_CODE(TableClient::open(worker.session, name, test::row_sums(1), &table), Code::kInvalidArgument);
  }
  CHECK_OK(TensorClient::open(worker.session, std::string(256, 'x'), sums({1}), &tensor));
  std::shared_ptr<Session> session;
  CHECK_CODE(Session::open(worker.engine, 2, 2, &session), Code::kInvalidArgument);
  CHECK_CODE(Session::open(worker.engine, 1, 0, &session), Code::kInvalidArgument);
}

TEST(a_reader_inside_the_process_opens_what_is_there_and_makes_nothing) {
  Worker worker;
  const std::shared_ptr<TensorClient> made = worker.tensor("w", sums({1}));
  std::shared_ptr<Session> reader;
  CHECK_OK(Session::open(worker.engine, 0, 0, &reader));
  std::shared_ptr<TensorClient> tensor;
  std::shared_ptr<TableClient> table;
  CHECK_OK(TensorClient::open(reader, "w", sums({1}), &tensor));
  CHECK_CODE(TensorClient::open(reader, "v", sums({1}), &tensor), Code::kAccessDenied);
  CHECK_CODE(TableClient::open(reader, "t", test::row_sums(1), &table), Code::kAccessDenied);
  CHECK_CODE(reader->tick(limits::kNoDeadline), Code::kAccessDenied);
  CHECK_OK(worker.session->tick(limits::kNoDeadline));
}

TEST(sessions_have_numbers_sequences_and_incarnations_of_their_own) {
  Worker one, other(one.engine);
  CHECK(one.session->number() != other.session->number());
  CHECK(one.session->incarnation() != other.session->incarnation());
  Pusher a(one.tensor("w", sums({1}))), b(other.tensor("w", sums({1})));
  for (int i = 0; i < 3; ++i) CHECK_OK(a.push());
  CHECK_OK(b.push());
  Shard& shard = a.t->tensor().shard(0);
  CHECK_EQ(shard.version, 4u);
  CHECK_EQ(shard.records.find(one.session->number())->sequence, 3u);
  CHECK_EQ(shard.records.find(other.session->number())->sequence, 1u);
  Pusher again(one.tensor("w", sums({1})));  // a second handle goes on where the first one is
  CHECK_OK(again.push());
  CHECK_OK(a.push());
  CHECK_EQ(shard.records.find(one.session->number())->sequence, 5u);
}

TEST(a_push_pull_closes_and_the_next_push_ticks) {
  Worker worker;
  Pusher a(worker.tensor("a", sums({1}))), b(worker.tensor("b", sums({1})));
  Session& session = *worker.session;
  Shard &at_a = a.t->tensor().shard(0), &at_b = b.t->tensor().shard(0);
  CHECK_OK(a.push());
  CHECK_OK(a.push());
  CHECK_EQ(session.clock(), 0u);
  CHECK_EQ(closed_at(at_a, session), 0u);
  CHECK_OK(a.push_pull());
  CHECK_EQ(session.clock(), 0u);
  CHECK_EQ(closed_at(at_a, session), 1u);
  CHECK_OK(b.push_pull());  // the same iteration on another object
  CHECK_EQ(session.clock(), 0u);
  CHECK_EQ(closed_at(at_b, session), 1u);
  CHECK_OK(a.push());  // a has been closed: this is the next one
  CHECK_EQ(session.clock(), 1u);
  CHECK_EQ(closed_at(at_a, session), 1u);
  CHECK_OK(a.push_pull());
  CHECK_OK(b.push_pull());
  CHECK_EQ(session.clock(), 1u);
  CHECK_EQ(closed_at(at_a, session), 2u);
  CHECK_OK(session.tick(soon()));
  CHECK_OK(a.push_pull());  // the tick was the user's
  CHECK_EQ(session.clock(), 2u);
  CHECK_EQ(closed_at(at_a, session), 3u);
  for (uint64_t i = 3; i < 10; ++i) {
    CHECK_OK(b.push_pull());
    CHECK_OK(a.push_pull());
    CHECK_EQ(session.clock(), i);
  }
}

TEST(closing_is_per_shard) {
  Worker worker;
  const auto t = worker.tensor("w", sums({40'000}));
  std::vector<float> g(40'000, 1.0f);
  const uint64_t half = t->tensor().cut().per_shard;
  const Array low = array_of(g.data(), {half}), high = array_of(g.data(), {40'000 - half});
  const Selection first{Selection::kRange, 0, half, nullptr, 0}, rest{Selection::kRange, half, 40'000, nullptr, 0};
  CHECK_OK(now(*t, TensorRequest{.in = &low, .out = &low, .rows = first, .closes = true}));
  CHECK_OK(now(*t, TensorRequest{.in = &high, .out = &high, .rows = rest, .closes = true}));
  CHECK_EQ(worker.session->clock(), 0u);
  CHECK_OK(now(*t, TensorRequest{.in = &high, .rows = rest}));
  CHECK_EQ(worker.session->clock(), 1u);
  CHECK_EQ(closed_at(t->tensor().shard(0), *worker.session), 1u);
}

TEST(a_refused_push_pull_closes_nothing) {
  Worker worker;
  const auto t = worker.tensor("w", sums({4}));
  float* g = worker.take<float>(4);
  std::fill_n(g, 4, 1.0f);
  const Array in = array_of(g, {4}), wrong = array_of(g, {3});
  const Range loan = in.range();
  CHECK_OK(worker.engine->arena().lend(&loan, 1, "another request"));
  for (int i = 0; i < 3; ++i) {
    CHECK_CODE(now(*t, TensorRequest{.in = &in, .out = &in, .closes = true}), Code::kBufferInUse);
    CHECK_CODE(now(*t, TensorRequest{.in = &wrong, .out = &wrong, .closes = true}), Code::kShapeMismatch);
  }
  worker.engine->arena().end(&loan, 1);
  CHECK_OK(now(*t, TensorRequest{.in = &in, .out = &in, .closes = true}));
  CHECK_EQ(worker.session->clock(), 0u);
  CHECK_EQ(closed_at(t->tensor().shard(0), *worker.session), 1u);
}

TEST(close_waits_for_requests_under_way_and_refuses_new_ones) {
  Worker worker;
  const auto t = worker.tensor("w", sums({4}));
  const auto rows = worker.table("t", test::row_sums(4));
  std::vector<float> g(4, 1.0f);
  const Array in = array_of(g.data(), {4});
  Ref<TensorCall> call, refused;
  Busy busy(t->tensor().shard(0));
  CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call));
  const Status late = worker.engine->close(in_ms(5));
  CHECK(late.code() == Code::kTimeout);
  CHECK(late.message().find("close: 1 requests are still under way") == 0);
  CHECK(worker.engine->closed());
  uint64_t value = 0;
  CHECK_CODE(t->start(TensorRequest{.in = &in}, How::kFuture, &refused), Code::kClosed);
  CHECK_CODE(rows->rows(soon(), &value), Code::kClosed);
  CHECK_CODE(worker.session->fingerprint(soon(), &value), Code::kClosed);
  std::shared_ptr<TensorClient> tensor;
  std::shared_ptr<Session> session;
  CHECK_CODE(TensorClient::open(worker.session, "v", sums({4}), &tensor), Code::kClosed);
  CHECK_CODE(Session::open(worker.engine, 0, 1, &session), Code::kClosed);
  std::thread other([&] {
    std::this_thread::yield();
    busy.end();
  });
  CHECK_OK(worker.engine->close(soon()));
  other.join();
  CHECK_OK(call->wait(soon()));
  CHECK_OK(worker.engine->close(0));
}

TEST(close_may_come_while_threads_push) {
  for (int round = 0; round < 20; ++round) {
    Worker worker;
    Pusher first(worker.tensor("w", sums({1})));
    std::atomic<uint64_t> pushed{0}, unexpected{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        Pusher pusher(first);
        for (;;) {
          const Status status = pusher.push();
          if (status.ok()) {
            ++pushed;
          } else {
            unexpected += status.code() != Code::kClosed;
            return;
          }
        }
      });
    }
    while (pushed < 100) std::this_thread::yield();
    CHECK_OK(worker.engine->close(soon()));
    for (std::thread& t : threads) t.join();
    CHECK_EQ(unexpected.load(), 0u);
    CHECK_EQ(first.t->tensor().shard(0).version, pushed.load());
  }
}

// The last reference to everything may be that of a thread of the crew, which then ends itself.
TEST(an_engine_may_be_let_go_in_the_middle_of_a_request) {
  std::vector<float> g(1 << 20, 1.0f);
  const Array in = array_of(g.data(), {1 << 20});
  for (int i = 0; i < 60; ++i) {
    Worker worker(3);
    const auto t = worker.tensor("w", sums({1 << 20}));
    Ref<TensorCall> call;
    CHECK_OK(t->start(TensorRequest{.in = &in}, i % 2 == 0 ? How::kFuture : How::kWait, &call));
    if (i % 3 == 0) CHECK_OK(call->wait(soon()));
    if (i % 2 != 0) CHECK_OK(call->finish(soon()));
    call->drop();
  }
}

TEST(the_child_of_a_fork_is_told_so) {
  Worker worker;
  Pusher pusher(worker.tensor("w", sums({1})));
  CHECK_OK(pusher.push());
  const pid_t child = fork();
  if (child == 0) _exit(pusher.push().code() == Code::kForkedProcess && worker.engine->close(0).ok() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_OK(pusher.push());
}

}  // namespace windlass::engine_test
