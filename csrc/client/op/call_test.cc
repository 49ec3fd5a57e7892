// Futures: what becomes of arrays, time and errors between the start of a request and its end.
#include "client/op/call.h"

#include <algorithm>
#include <thread>

#include "client/client_test.h"

namespace windlass::call_test {
namespace {

using test::array_of;
using test::Busy;
using test::in_ms;
using test::now;
using test::soon;
using test::sums;
using test::Worker;

constexpr uint64_t kSmall = 100, kLarge = 1 << 20;  // kLarge: 4 MiB in 64 shards, which the crew helps with

float first_of(TensorClient& t) {
  const uint64_t n = t.tensor().spec().elements();
  std::vector<float> out(n);
  const Array into = array_of(out.data(), {n});
  CHECK_OK(now(t, TensorRequest{.out = &into}));
  CHECK(std::all_of(out.begin(), out.end(), [&](float x) { return x == out[0]; }));
  return out[0];
}

TableRequest one_row(const Array* in) {
  static const uint64_t key = 1;
  return {.keys = {&key, KeyType::kUint64, 1}, .in = in};
}

}  // namespace

TEST(an_ordinary_array_is_free_when_the_call_returns) {
  Worker worker(3);
  for (const uint64_t n : {kSmall, kLarge}) {
    const auto t = worker.tensor(std::to_string(n), sums({n}));
    std::vector<float> g(n);
    const Array in = array_of(g.data(), {n});
    std::vector<Ref<TensorCall>> calls(10);
    {
      const Busy busy(t->tensor().shard(0));
      for (size_t i = 0; i < calls.size(); ++i) {
        std::fill(g.begin(), g.end(), static_cast<float>(i + 1));
        CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &calls[i]));
      }
      std::fill(g.begin(), g.end(), 1000.0f);
      CHECK(!calls[0]->done());
    }
    for (const auto& call : calls) CHECK_OK(call->wait(soon()));
    CHECK(first_of(*t) == 55.0f);
  }
}

TEST(rows_of_a_table_are_copied_at_the_call_as_well) {
  Worker worker(3);
  const auto t = worker.table("t", test::row_sums(256));
  std::vector<uint64_t> keys(4096);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<float> g(keys.size() * 256), out(g.size());
  const Array in = array_of(g.data(), {keys.size(), 256}), into = array_of(out.data(), {keys.size(), 256});
  std::vector<Ref<TableCall>> calls(6);
  {
    const Busy busy(t->table().shard(7));
    for (size_t i = 0; i < calls.size(); ++i) {
      std::fill(g.begin(), g.end(), static_cast<float>(i + 1));
      CHECK_OK(t->start(TableRequest{.keys = test::keys_of(keys), .in = &in}, How::kFuture, &calls[i]));
    }
    std::fill(g.begin(), g.end(), 1000.0f);
    CHECK(!calls[0]->done());
  }
  CHECK_OK(now(*t, TableRequest{.keys = test::keys_of(keys), .out = &into}));
  CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 21.0f; }));
}

TEST(a_registered_array_is_on_loan_until_the_request_ends) {
  Worker worker(3);
  for (const uint64_t n : {kSmall, kLarge}) {
    const auto t = worker.tensor(std::to_string(n), sums({n}));
    float* g = worker.take<float>(n);
    std::fill_n(g, n, 2.0f);
    const Array in = array_of(g, {n});
    Ref<TensorCall> call, second;
    {
      const Busy busy(t->tensor().shard(0));
      CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call));
      const Status refused = t->start(TensorRequest{.out = &in}, How::kFuture, &second);
      CHECK(refused.code() == Code::kBufferInUse);
      CHECK(refused.message().find("pull of tensor '") == 0);
      CHECK_CODE(call->wait(in_ms(1)), Code::kTimeout);
      CHECK_CODE(t->start(TensorRequest{.in = &in}, How::kWait, &second), Code::kBufferInUse);
    }
    CHECK_OK(call->wait(soon()));
    CHECK_OK(now(*t, TensorRequest{.in = &in}));
    CHECK(first_of(*t) == 4.0f);
  }
}

// Requests of one worker reach each shard in the order they were made, so a pull sees the pushes before it.
TEST(a_worker_sees_its_own_pushes_waited_for_or_not) {
  Worker worker(3);
  const auto t = worker.tensor("w", sums({kLarge}));
  float* registered[] = {worker.take<float>(kLarge), worker.take<float>(kLarge)};
  std::vector<float> ordinary(kLarge, 1.0f);
  const Array plain = array_of(ordinary.data(), {kLarge});
  Ref<TensorCall> last[2];
  for (int i = 0; i < (test::accurate() ? 200 : 20); ++i) {
    if (last[i % 2]) CHECK_OK(last[i % 2]->wait(soon()));
    std::fill_n(registered[i % 2], kLarge, 1.0f);
    const Array in = array_of(registered[i % 2], {kLarge});
    CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &last[i % 2]));
    Ref<TensorCall> forgotten;
    CHECK_OK(t->start(TensorRequest{.in = &plain}, How::kFuture, &forgotten));
    forgotten->drop();
    CHECK(first_of(*t) == static_cast<float>(2 * i + 2));
  }
}

// A worker that pushes faster than the server applies must not fill the memory with copies.
TEST(copies_of_ordinary_arrays_are_limited_and_then_a_push_waits) {
  Worker worker;
  constexpr uint64_t kNumbers = limits::kShardBytesMin / sizeof(float),
                     kPushes = limits::kKeptBytesMax / (kNumbers * 4);
  const auto t = worker.tensor("w", sums({kNumbers}));
  std::vector<float> g(kNumbers, 1.0f);
  const Array in = array_of(g.data(), {kNumbers});
  Ref<TensorCall> call;
  {
    const Busy busy(t->tensor().shard(0));
    for (uint64_t i = 0; i < kPushes; ++i) CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
    const int64_t start = os::now_ns();
    CHECK_CODE(t->start(TensorRequest{.in = &in}, How::kFuture, &call, in_ms(20)), Code::kTimeout);
    CHECK(os::now_ns() - start >= 20'000'000);
    std::fill(g.begin(), g.end(), 1000.0f);
  }
  CHECK(first_of(*t) == static_cast<float>(kPushes));
  CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, in_ms(0)));  // room again
  CHECK_OK(call->wait(soon()));
}

TEST(a_push_that_times_out_goes_on_without_the_ordinary_array) {
  Worker worker;
  const auto t = worker.tensor("w", sums({kSmall}));
  std::vector<float> g(kSmall, 1.0f);
  const Array in = array_of(g.data(), {kSmall});
  Busy busy(t->tensor().shard(0));
  const int64_t start = os::now_ns();
  const Status late = now(*t, TensorRequest{.in = &in, .out = &in}, in_ms(20));
  CHECK(late.code() == Code::kTimeout);
  CHECK(late.message() == "push_pull of tensor 'w': not done in time; the push goes on");
  CHECK(os::now_ns() - start >= 20'000'000);
  std::vector<float>().swap(g);  // the memory is gone
  busy.end();
  CHECK(first_of(*t) == 1.0f);
  CHECK_EQ(t->tensor().shard(0).version, 1u);
}

TEST(a_push_that_times_out_goes_on_with_a_registered_array) {
  Worker worker;
  const auto t = worker.tensor("w", sums({kSmall}));
  float* g = worker.take<float>(kSmall);
  std::fill_n(g, kSmall, 1.0f);
  const Array in = array_of(g, {kSmall});
  Busy busy(t->tensor().shard(0));
  CHECK_CODE(now(*t, TensorRequest{.in = &in}, in_ms(5)), Code::kTimeout);
  CHECK_CODE(now(*t, TensorRequest{.in = &in}, in_ms(5)), Code::kBufferInUse);
  worker.engine->arena().give(reinterpret_cast<std::byte*>(g));  // the caller's last reference
  busy.end();
  CHECK(first_of(*t) == 1.0f);
  CHECK(!worker.engine->arena().registered({reinterpret_cast<std::byte*>(g), 1}));
}

TEST(a_visit_of_all_shards_ends_at_its_deadline) {
  Worker worker;
  const auto t = worker.tensor("w", sums({40'000}));
  const auto rows = worker.table("t", test::row_sums(4));
  uint64_t value = 77;
  {
    const Busy busy(t->tensor().shard(1)), other(rows->table().shard(200));
    CHECK_CODE(t->fingerprint(in_ms(5), &value), Code::kTimeout);
    CHECK_CODE(rows->rows(in_ms(5), &value), Code::kTimeout);
    CHECK_CODE(worker.session->fingerprint(in_ms(5), &value), Code::kTimeout);
    CHECK_EQ(value, 77u);
  }
  CHECK_OK(t->fingerprint(soon(), &value));
  CHECK_OK(worker.session->fingerprint(soon(), &value));
}

TEST(the_error_of_a_dropped_future_is_for_the_next_call) {
  Worker worker(2, uint64_t{1} << 20);  // less than one chunk: no row can be made
  const auto t = worker.table("t", test::row_sums(4)), other = worker.table("other", test::row_sums(4));
  std::vector<float> g(4, 1.0f);
  const Array in = array_of(g.data(), {1, 4});
  TableRequest look = one_row(nullptr);
  look.out = &in;
  look.create = false;
  for (const int dropped : {1, 3}) {
    {
      const Busy busy(t->table().shard(shard_of_hash(mix(1))));
      for (int i = 0; i < dropped; ++i) {
        Ref<TableCall> call;
        CHECK_OK(t->start(one_row(&in), How::kFuture, &call));
        if (i % 2 == 0) call->drop();  // before the error, or after it
        if (i % 2 != 0) std::thread([call] { (void)call->wait(0), call->drop(); }).join();
      }
      CHECK_OK(t->take_unseen());
    }
    CHECK_OK(now(*other, look));
    const Status raised = now(*t, look);
    CHECK(raised.code() == Code::kResourceExhausted);
    CHECK(raised.message().find("push of table 't': table 't' cannot grow") == 0);
    CHECK(raised.message().find(dropped == 1 ? "(from an earlier request whose"
                                             : "(from 3 earlier requests, the first") != std::string::npos);
    CHECK_OK(now(*t, look));  // once
  }
  Ref<TableCall> call;
  CHECK_OK(t->start(one_row(&in), How::kFuture, &call));
  CHECK_CODE(call->wait(soon()), Code::kResourceExhausted);
  CHECK_CODE(call->wait(soon()), Code::kResourceExhausted);
  call->drop();  // seen
  CHECK_OK(now(*t, look));
  // A refusal uses its sequence up and changes no version.
  const Shard& shard = t->table().shard(shard_of_hash(mix(1)));
  CHECK_EQ(shard.version, 0u);
  CHECK_EQ(shard.records.find(worker.session->number())->sequence, 1u + 3 + 1);
  CHECK_OK(other->start(one_row(&in), How::kFuture, &call));
  call->drop();
  CHECK_CODE(worker.session->take_unseen(), Code::kResourceExhausted);
  CHECK_OK(worker.session->take_unseen());
}

TEST(many_threads_may_wait_for_one_future) {
  Worker worker;
  const auto t = worker.tensor("w", sums({kSmall}));
  float* g = worker.take<float>(kSmall);
  std::fill_n(g, kSmall, 1.0f);
  const Array in = array_of(g, {kSmall});
  Ref<TensorCall> call;
  std::atomic<int> fine{0};
  std::vector<std::thread> threads;
  {
    const Busy busy(t->tensor().shard(0));
    CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call));
    for (int i = 0; i < 4; ++i) threads.emplace_back([&fine, call] { fine += call->wait(soon()).ok(); });
    std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(fine.load(), 4);
}

}  // namespace windlass::call_test
