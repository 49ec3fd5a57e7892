// Many threads on one engine, in every way a request can be made. Everything pushed is a small integer, so sums are
// exact whatever their order: a push lost, doubled or torn shows in the total.
#include <atomic>
#include <map>
#include <thread>

#include "client/client_test.h"

namespace windlass::stress_test {
namespace {

using test::array_of;
using test::now;
using test::soon;
using test::sums;
using test::Worker;

constexpr uint64_t kRows = 40, kRow = 1000;  // of the tensor: int64 in 5 shards
constexpr uint64_t kKeys = 3000;             // of the table
constexpr uint32_t kDim = 8;

class Thread {
 public:
  Thread(Worker worker, uint64_t seed, std::atomic<uint64_t>* wrong)
      : worker_(std::move(worker)),
        random_(seed),
        wrong_(*wrong),
        tensor_(worker_.tensor("w", sums({kRows, kRow}, Dtype::kInt64))),
        table_(worker_.table("t", test::row_sums(kDim))) {
    for (int64_t*& r : registered_) r = worker_.take<int64_t>(kRows * kRow);
  }

  void run(int64_t end_ns) {
    while (os::now_ns() < end_ns) {
      switch (random_.below(6)) {
        case 0: push_rows(How::kWait); break;
        case 1: push_rows(How::kFuture); break;
        case 2: push_all_registered(); break;
        case 3: pull_all(); break;
        case 4: push_keys(); break;
        default: pull_keys();
      }
    }
    for (const Ref<TensorCall>& call : futures_) check(call->wait(soon()));
    for (const Ref<TensorCall>& call : loans_) check(call ? call->wait(soon()) : Status());
  }

  int64_t rows[kRows] = {};  // what this thread has added to each row
  std::map<uint64_t, float> keys;

 private:
  void check(const Status& status) { wrong_ += !status.ok(); }

  // Some rows from an ordinary array, which is overwritten at once.
  void push_rows(How how) {
    const uint64_t n = 1 + random_.below(6);
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
        how, &call));
    if (how == How::kWait) {
      check(call->finish(soon()));
      for (uint64_t i = 0; i < n && pull; ++i) check_row(list[i], &g[i * kRow]);
    } else {
      std::fill(g.begin(), g.end(), 1'000'000'000);
      futures_.push_back(call);
      if (futures_.size() > 8) {
        check(futures_.front()->wait(soon()));
        futures_.erase(futures_.begin());
      }
    }
  }

  void push_all_registered() {
    const size_t slot = random_.below(2);
    if (loans_[slot]) check(loans_[slot]->wait(soon()));
    std::fill_n(registered_[slot], kRows * kRow, 1);
    for (int64_t& r : rows) ++r;
    const Array in = array_of(registered_[slot], {kRows, kRow});
    check(tensor_->start(TensorRequest{.in = &in}, How::kFuture, &loans_[slot]));
  }

  // A worker sees its own pushes, done or not, and each row whole.
  void check_row(int64_t row, const int64_t* got) {
    wrong_ += got[0] < rows[row];
    for (uint64_t i = 1; i < kRow; ++i) wrong_ += got[i] != got[0];
  }

  void pull_all() {
    std::vector<int64_t> out(kRows * kRow);
    const Array into = array_of(out.data(), {kRows, kRow});
    check(now(*tensor_, TensorRequest{.out = &into}));
    for (uint64_t r = 0; r < kRows; ++r) check_row(static_cast<int64_t>(r), &out[r * kRow]);
  }

  std::vector<uint64_t> some_keys() {
    std::vector<uint64_t> some(1 + random_.below(60));
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
    check(table_->start(TableRequest{.keys = test::keys_of(some), .in = &in}, how, &call));
    if (how == How::kWait) check(call->finish(soon()));
    if (how == How::kFuture) call->drop();  // its error would come with a later call
  }

  void pull_keys() {
    const std::vector<uint64_t> some = some_keys();
    std::vector<float> out(some.size() * kDim);
    const Array into = array_of(out.data(), {some.size(), kDim});
    check(now(*table_, TableRequest{.keys = test::keys_of(some), .out = &into, .create = random_.below(2) == 0}));
    for (size_t i = 0; i < some.size(); ++i) {
      const float* row = &out[i * kDim];
      const auto mine = keys.find(some[i]);
      wrong_ += mine != keys.end() && row[0] < mine->second;
      for (uint32_t j = 1; j < kDim; ++j) wrong_ += row[j] != row[0];
    }
  }

  Worker worker_;
  test::Random random_;
  std::atomic<uint64_t>& wrong_;
  std::shared_ptr<TensorClient> tensor_;
  std::shared_ptr<TableClient> table_;
  int64_t* registered_[2];
  std::vector<Ref<TensorCall>> futures_;
  Ref<TensorCall> loans_[2];
};

}  // namespace

TEST(the_total_is_exact_after_many_threads_have_pushed) {
  const int64_t length_ns = (test::accurate() ? 30 : 1) * int64_t{1'000'000'000};
  Worker first(3);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::unique_ptr<Thread>> threads;
  Worker shared(first.engine);
  for (uint64_t i = 0; i < 8; ++i) {  // some have a session of their own, others share one
    threads.push_back(std::make_unique<Thread>(i < 4 ? Worker(first.engine) : shared, test::seed() * 100 + i, &wrong));
  }
  const int64_t end = os::now_ns() + length_ns;
  std::vector<std::thread> running;
  for (const auto& t : threads) running.emplace_back([&t, end] { t->run(end); });
  for (std::thread& t : running) t.join();
  CHECK_EQ(wrong.load(), 0u);

  const auto tensor = first.tensor("w", sums({kRows, kRow}, Dtype::kInt64));
  std::vector<int64_t> out(kRows * kRow);
  const Array into = array_of(out.data(), {kRows, kRow});
  CHECK_OK(now(*tensor, TensorRequest{.out = &into}));
  for (uint64_t r = 0; r < kRows; ++r) {
    int64_t want = 0;
    for (const auto& t : threads) want += t->rows[r];
    for (uint64_t i = 0; i < kRow; ++i) CHECK_EQ(out[r * kRow + i], want);
  }
  std::map<uint64_t, float> want;
  for (const auto& t : threads) {
    for (const auto& [key, value] : t->keys) want[key] += value;
  }
  const auto table = first.table("t", test::row_sums(kDim));
  TableClient::Cursor cursor;
  std::vector<uint64_t> keys;
  std::vector<float> weights;
  CHECK_OK(table->scan(&cursor, kKeys + 1, soon(), &keys, &weights));
  size_t matched = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto it = want.find(keys[i]);
    matched += it != want.end();
    for (uint32_t j = 0; j < kDim; ++j) CHECK_EQ(weights[i * kDim + j], it == want.end() ? 0.0f : it->second);
  }
  CHECK_EQ(matched, want.size());
  CHECK_OK(first.engine->close(soon()));
}

}  // namespace windlass::stress_test
