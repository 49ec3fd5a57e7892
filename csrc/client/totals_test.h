// Threads that push and pull whatever there is, and what it should add up to. Everything pushed is a small integer, so
// totals are exact whatever the order: a push lost or doubled shows.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <thread>

#include "client/net/relay_test.h"

namespace windlass::test {

inline constexpr uint64_t kRows = 40, kRow = 2000;  // of the tensor: int64 in 10 shards
inline constexpr uint64_t kKeys = 2000;
inline constexpr uint32_t kDim = 8;

// One thread of a worker: requests of every kind, and what they should add up to.
class TotalThread {
 public:
  TotalThread(Joined& worker, uint64_t number, std::atomic<uint64_t>* wrong)
      : worker_(worker),
        number_(number),
        random_(seed() * 1000 + number),
        wrong_(*wrong),
        tensor_(worker.tensor("w", sums({kRows, kRow}, Dtype::kInt64))),
        table_(worker.table("t", row_sums(kDim))) {
    for (int64_t*& r : registered_) r = worker_.take<int64_t>(kRows * kRow);
  }

  void run(int64_t end_ns) {
    while (os::now_ns() < end_ns) {
      switch (random_.below(8)) {
        case 0: push_rows(How::kWait); break;
        case 1: push_rows(How::kFuture); break;
        case 2: push_all_registered(); break;
        case 3: pull_all(); break;
        case 4: push_keys(); break;
        case 5: pull_keys(); break;
        case 6: erase_own(); break;
        default: ask();
      }
    }
    for (const Ref<TensorCall>& call : futures_) check(call->wait(soon()), "future");
    for (const Ref<TensorCall>& call : loans_) check(call ? call->wait(soon()) : Status(), "loan");
    uint64_t x = 0;  // asking waits for what was pushed before, also where nobody kept the future
    check(table_->rows(soon(), &x), "len");
    check(tensor_->take_unseen(), "unseen");
    check(table_->take_unseen(), "unseen");
  }

  int64_t rows[kRows] = {};  // what this thread has added to each row
  std::map<uint64_t, float> keys;
  uint64_t done = 0;

 private:
  void check(const Status& status, const char* what) {
    ++done;
    if (status.ok()) return;
    std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
    ++wrong_;
  }

  void push_rows(How how) {
    const uint64_t n = 1 + random_.below(4);
    int64_t list[8];
    std::vector<int64_t> g(n * kRow);
    for (uint64_t i = 0; i < n; ++i) {
      const int64_t value = 1 + static_cast<int64_t>(random_.below(3));
      list[i] = static_cast<int64_t>(random_.below(kRows));
      rows[list[i]] += value;
      std::fill_n(g.begin() + static_cast<ptrdiff_t>(i * kRow), kRow, value);
    }
    const Array in = array_of(g.data(), {n, kRow});
    const bool pull = how == How::kWait && random_.below(2) == 0;
    Ref<TensorCall> call;
    check(tensor_->start(
              TensorRequest{
                  .in = &in, .out = pull ? &in : nullptr, .rows = {Selection::kList, 0, 0, list, n}, .closes = pull},
              how, &call, soon()),
          "push of rows");
    if (how == How::kWait) {
      check(call->finish(soon()), "push of rows");
      for (uint64_t i = 0; i < n && pull; ++i) check_row(list[i], &g[i * kRow]);
    } else {
      std::fill(g.begin(), g.end(), 1'000'000'000);
      futures_.push_back(call);
      if (futures_.size() > 6) {
        check(futures_.front()->wait(soon()), "future");
        futures_.erase(futures_.begin());
      }
    }
  }
  void push_all_registered() {
    const size_t slot = random_.below(2);
    if (loans_[slot]) check(loans_[slot]->wait(soon()), "loan");
    std::fill_n(registered_[slot], kRows * kRow, 1);
    for (int64_t& r : rows) ++r;
    const Array in = array_of(registered_[slot], {kRows, kRow});
    check(tensor_->start(TensorRequest{.in = &in}, How::kFuture, &loans_[slot], soon()), "push of all");
  }
  // A worker sees its own pushes, and each row whole.
  void check_row(int64_t row, const int64_t* got) {
    wrong_ += got[0] < rows[row];
    for (uint64_t i = 1; i < kRow; ++i) wrong_ += got[i] != got[0];
  }
  void pull_all() {
    std::vector<int64_t> out(kRows * kRow);
    const Array into = array_of(out.data(), {kRows, kRow});
    check(now(*tensor_, TensorRequest{.out = &into}), "pull");
    for (uint64_t r = 0; r < kRows; ++r) check_row(static_cast<int64_t>(r), &out[r * kRow]);
  }
  std::vector<uint64_t> some_keys() {
    std::vector<uint64_t> some(1 + random_.below(20));
    for (uint64_t& k : some) k = random_.below(kKeys);
    return some;
  }
  void push_keys() {
    const std::vector<uint64_t> some = some_keys();
    std::vector<float> g(some.size() * kDim);
    for (size_t i = 0; i < some.size(); ++i) {
      const float value = static_cast<float>(1 + random_.below(3));
      keys[some[i]] += value;
      std::fill_n(g.begin() + static_cast<ptrdiff_t>(i * kDim), kDim, value);
    }
    const Array in = array_of(g.data(), {some.size(), kDim});
    Ref<TableCall> call;
    const How how = random_.below(2) == 0 ? How::kWait : How::kFuture;
    check(table_->start(TableRequest{.keys = keys_of(some), .in = &in}, how, &call, soon()), "push of keys");
    if (how == How::kWait) check(call->finish(soon()), "push of keys");
    if (how == How::kFuture) call->drop();  // its error would come with a later call
  }
  void pull_keys() {
    const std::vector<uint64_t> some = some_keys();
    std::vector<float> out(some.size() * kDim);
    const Array into = array_of(out.data(), {some.size(), kDim});
    check(now(*table_, TableRequest{.keys = keys_of(some), .out = &into, .create = random_.below(2) == 0}),
          "pull of keys");
    for (size_t i = 0; i < some.size(); ++i) {
      const float* row = &out[i * kDim];
      const auto mine = keys.find(some[i]);
      wrong_ += mine != keys.end() && row[0] < mine->second;
      for (uint32_t j = 1; j < kDim; ++j) wrong_ += row[j] != row[0];
    }
  }
  // Keys that are nobody else's: how many were taken out is exact, however often the request was sent.
  void erase_own() {
    std::vector<uint64_t> own;
    for (uint64_t i = 0; i < 5; ++i) own.push_back((number_ + 1) * 1'000'000 + i);
    std::vector<float> out(own.size() * kDim);
    const Array into = array_of(out.data(), {own.size(), kDim});
    check(now(*table_, TableRequest{.keys = keys_of(own), .out = &into}), "pull of own keys");
    Ref<TableCall> call;
    check(table_->start(TableRequest{.keys = keys_of(own), .erase = true}, How::kWait, &call, soon()), "delete");
    check(call->finish(soon()), "delete");
    wrong_ += call->erased() != own.size();
  }
  void ask() {
    uint64_t x = 0;
    switch (random_.below(3)) {
      case 0: check(table_->rows(soon(), &x), "len"); break;
      case 1: check(tensor_->fingerprint(soon(), &x), "fingerprint"); break;
      default: {
        std::shared_ptr<TensorClient> again;
        check(TensorClient::open(worker_.session, "w", sums({kRows, kRow}, Dtype::kInt64), &again, soon()), "open");
      }
    }
  }

  Joined& worker_;
  const uint64_t number_;
  Random random_;
  std::atomic<uint64_t>& wrong_;
  std::shared_ptr<TensorClient> tensor_;
  std::shared_ptr<TableClient> table_;
  int64_t* registered_[2];
  std::vector<Ref<TensorCall>> futures_;
  Ref<TensorCall> loans_[2];
};

// Runs threads on workers until `length_ns` have passed, with harm() now and then, and compares the totals.
inline void check_totals(Hosts& hosts, std::vector<std::unique_ptr<Joined>>& workers, int64_t length_ns,
                         const std::function<void(Random*)>& harm) {
  std::atomic<uint64_t> wrong{0};
  std::vector<std::unique_ptr<TotalThread>> threads;
  for (uint64_t i = 0; i < 4; ++i)
    threads.push_back(std::make_unique<TotalThread>(*workers[i % workers.size()], i, &wrong));
  const int64_t end = os::now_ns() + length_ns;
  std::vector<std::thread> running;
  for (const auto& t : threads) running.emplace_back([&t, end] { t->run(end); });
  Random random(seed());
  while (harm && os::now_ns() < end) {
    usleep(static_cast<useconds_t>(random.below(4000)));
    harm(&random);
  }
  for (std::thread& t : running) t.join();
  CHECK_EQ(wrong.load(), 0u);
  uint64_t done = 0;
  for (const auto& t : threads) done += t->done;
  CHECK(done > 40);

  Joined witness(hosts);
  const auto tensor = witness.tensor("w", sums({kRows, kRow}, Dtype::kInt64));
  std::vector<int64_t> out(kRows * kRow);
  const Array into = array_of(out.data(), {kRows, kRow});
  CHECK_OK(now(*tensor, TensorRequest{.out = &into}));
  uint64_t differ = 0;
  for (uint64_t r = 0; r < kRows; ++r) {
    int64_t want = 0;
    for (const auto& t : threads) want += t->rows[r];
    for (uint64_t i = 0; i < kRow; ++i) differ += out[r * kRow + i] != want;
  }
  CHECK_EQ(differ, 0u);
  std::map<uint64_t, float> want;
  for (const auto& t : threads) {
    for (const auto& [key, value] : t->keys) want[key] += value;
  }
  const auto table = witness.table("t", row_sums(kDim));
  TableClient::Cursor cursor;
  std::vector<uint64_t> keys;
  std::vector<float> weights;
  CHECK_OK(table->scan(&cursor, 10 * kKeys, soon(), &keys, &weights));
  size_t matched = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto it = want.find(keys[i]);
    matched += it != want.end();
    for (uint32_t j = 0; j < kDim; ++j) differ += weights[i * kDim + j] != (it == want.end() ? 0.0f : it->second);
  }
  CHECK_EQ(differ, 0u);
  CHECK_EQ(matched, want.size());
}

inline int64_t length_ns() { return (accurate() ? 60 : kSanitized ? 4 : 2) * int64_t{1'000'000'000}; }

// Hands that lose, double and hold back frames, so many of a hundred each, and now and then cut within one.
inline Relay::Hands bad_hands(Random* random, uint64_t percent, std::atomic<uint64_t>* bitten) {
  return [random, percent, bitten](Relay::Passing& passing, std::string frame) -> std::string {
    if (op_of(frame) == wire::Op::kHello) return frame;
    frame += std::exchange(passing.held, "");
    const uint64_t dice = random->below(1000);
    if (dice >= 30 * percent + 3) return frame;
    ++*bitten;
    if (dice < 10 * percent) return "";
    if (dice < 20 * percent) return frame + frame;
    if (dice < 30 * percent) return passing.held = std::move(frame), "";
    passing.cut = true;
    return frame.substr(0, random->below(frame.size()));
  };
}

}  // namespace windlass::test
