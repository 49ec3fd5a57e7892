#include "client/op/table.h"

#include <atomic>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "client/client_test.h"
#include "rule/kernels_test.h"

namespace windlass::table_test {
namespace {

using test::array_of;
using test::keys_of;
using test::now;
using test::row_sums;
using test::same_bits;
using test::Worker;

std::vector<float> pulled(TableClient& t, const std::vector<uint64_t>& keys, bool create = true) {
  std::vector<float> out(keys.size() * t.table().spec().dim, -7.0f);
  const Array into = array_of(out.data(), {keys.size(), t.table().spec().dim});
  CHECK_OK(now(t, TableRequest{.keys = keys_of(keys), .out = &into, .create = create}));
  return out;
}

Status push(TableClient& t, const std::vector<uint64_t>& keys, std::vector<float> g) {
  const Array in = array_of(g.data(), {keys.size(), t.table().spec().dim});
  return now(t, TableRequest{.keys = keys_of(keys), .in = &in});
}

}  // namespace

TEST(rows_are_pushed_pulled_counted_and_deleted) {
  Worker worker;
  const auto t = worker.table("t", row_sums(2));
  const std::vector<uint64_t> keys = {5, ~uint64_t{0}, 5, 1};
  CHECK(same_bits(pulled(*t, keys, false), std::vector<float>(8)));
  uint64_t rows = 77;
  CHECK_OK(t->rows(test::soon(), &rows));
  CHECK_EQ(rows, 0u);
  CHECK_OK(push(*t, keys, {1, 2, 3, 4, 5, 6, 7, 8}));
  CHECK(same_bits(pulled(*t, keys), std::vector<float>{6, 8, 3, 4, 6, 8, 7, 8}));
  std::vector<float> both(8, 1.0f);
  const Array in_place = array_of(both.data(), {4, 2});
  CHECK_OK(now(*t, TableRequest{.keys = keys_of(keys), .in = &in_place, .out = &in_place}));
  CHECK(same_bits(both, std::vector<float>{8, 10, 4, 5, 8, 10, 8, 9}));
  CHECK_OK(t->rows(test::soon(), &rows));
  CHECK_EQ(rows, 3u);
  Ref<TableCall> call;
  CHECK_OK(t->start(TableRequest{.keys = keys_of({1, 5, 9, 5}), .erase = true}, How::kWait, &call));
  CHECK_OK(call->finish(test::soon()));
  CHECK_EQ(call->erased(), 2u);
  CHECK(same_bits(pulled(*t, keys), std::vector<float>{0, 0, 4, 5, 0, 0, 0, 0}));
  CHECK_OK(push(*t, {}, {}));
}

TEST(a_large_request_with_helpers_is_the_same_as_many_small_ones) {
  test::Random random(test::seed());
  Worker worker(3);
  const auto large = worker.table("t", row_sums(16));
  std::vector<uint64_t> keys(60'000);  // 3.8 MB: the crew helps, and the answer bypasses the cache
  for (uint64_t& k : keys) k = random.below(30'000);
  std::vector<float> g(keys.size() * 16), out(g.size());
  for (float& x : g) x = static_cast<float>(random.below(100));
  std::map<uint64_t, float> want;
  for (size_t i = 0; i < keys.size(); ++i) want[keys[i]] += g[i * 16 + 3];
  const Array in = array_of(g.data(), {keys.size(), 16}), into = array_of(out.data(), {keys.size(), 16});
  CHECK_OK(now(*large, TableRequest{.keys = keys_of(keys), .in = &in, .out = &into}));
  bool right = true;
  for (size_t i = 0; i < keys.size(); ++i) right = right && out[i * 16 + 3] == want[keys[i]];
  CHECK(right);
}

TEST(an_export_has_every_row_once_while_others_come_and_go) {
  Worker worker;
  const auto t = worker.table("t", row_sums(3));
  std::vector<uint64_t> keys(20'000);
  std::vector<float> values(keys.size() * 3);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = i;
    values[i * 3] = static_cast<float>(i);
  }
  CHECK_OK(push(*t, keys, values));
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  Worker rival(worker.engine);
  const auto theirs = rival.table("t", row_sums(3));
  std::thread growing([&] {
    std::vector<float> g(100 * 3, 1.0f);
    const Array in = array_of(g.data(), {100, 3});
    for (uint64_t next = 1'000'000; !stop && next < 1'400'000; next += 100) {
      std::vector<uint64_t> others(100);
      for (size_t i = 0; i < 100; ++i) others[i] = next + i;
      failed += !now(*theirs, TableRequest{.keys = keys_of(others), .in = &in}).ok();
      others.resize(50);
      failed += !now(*theirs, TableRequest{.keys = keys_of(others), .erase = true}).ok();
    }
  });
  std::set<uint64_t> seen;
  size_t wrong = 0;
  for (TableClient::Cursor cursor;;) {
    std::vector<uint64_t> page;
    std::vector<float> weights;
    CHECK_OK(t->scan(&cursor, 333, test::soon(), &page, &weights));
    if (page.empty()) break;
    CHECK(page.size() <= 333 && weights.size() == page.size() * 3);
    for (size_t i = 0; i < page.size(); ++i) {
      wrong += !seen.insert(page[i]).second;
      wrong += page[i] < keys.size() && weights[i * 3] != static_cast<float>(page[i]);
    }
  }
  stop = true;
  growing.join();
  for (const uint64_t k : keys) wrong += seen.count(k) == 0;
  CHECK_EQ(wrong, 0u);
  CHECK_EQ(failed.load(), 0);
}

TEST(tables_with_the_same_rows_have_the_same_fingerprint) {
  Worker one, other(1);
  const auto a = one.table("t", row_sums(2)), b = other.table("t", row_sums(2));
  CHECK_OK(push(*a, {1, 2, 3}, {1, 2, 3, 4, 5, 6}));
  CHECK_OK(push(*b, {3}, {5, 6}));
  CHECK_OK(push(*b, {2, 1}, {3, 4, 1, 2}));
  uint64_t x = 0, y = 1, whole = 2;
  CHECK_OK(a->fingerprint(test::soon(), &x));
  CHECK_OK(b->fingerprint(test::soon(), &y));
  CHECK_EQ(x, y);
  CHECK_OK(other.session->fingerprint(test::soon(), &whole));
  CHECK_EQ(whole, y);
}

TEST(a_table_without_memory_says_so_and_goes_on_with_what_it_has) {
  Worker worker(2, uint64_t{4} << 20);
  const auto t = worker.table("t", row_sums(64));
  uint64_t next = 0;
  Status status;
  while (status.ok() && next < 100'000) {
    std::vector<uint64_t> keys(256);
    for (uint64_t& k : keys) k = next++;
    status = push(*t, keys, std::vector<float>(256 * 64, 1.0f));
  }
  CHECK(status.code() == Code::kResourceExhausted);
  CHECK(status.message().find("memory_bytes_max=4194304") != std::string::npos);
  CHECK(worker.engine->server().memory_bytes() <= uint64_t{4} << 20);
  CHECK_OK(push(*t, {0}, std::vector<float>(64, 1.0f)));
  CHECK(pulled(*t, {0})[63] == 2.0f);
}

TEST(keys_and_rows_that_do_not_fit_are_refused) {
  Worker worker;
  TableSpec spec = row_sums(2);
  spec.reject_nonfinite = true;
  const auto t = worker.table("t", spec);
  std::vector<float> g(8, 1.0f);
  const std::vector<uint64_t> keys = {1, 2};
  for (const Array& wrong : {array_of(g.data(), {4}), array_of(g.data(), {1, 2}), array_of(g.data(), {2, 4})}) {
    const Status in = now(*t, TableRequest{.keys = keys_of(keys), .in = &wrong});
    CHECK(in.code() == Code::kShapeMismatch);
    CHECK(in.message().find("push of table 't', gradients: expected") == 0);
    CHECK_CODE(now(*t, TableRequest{.keys = keys_of(keys), .out = &wrong}), Code::kShapeMismatch);
  }
  g[3] = NAN;
  CHECK_CODE(push(*t, keys, {g.begin(), g.begin() + 4}), Code::kNonFinite);
  Keys many = keys_of(keys);
  many.n = limits::kRequestKeysMax + 1;
  const Array in = array_of(g.data(), {2, 2});
  CHECK_CODE(now(*t, TableRequest{.keys = many, .in = &in}), Code::kInvalidArgument);
  uint64_t rows = 1;
  CHECK_OK(t->rows(test::soon(), &rows));
  CHECK_EQ(rows, 0u);
}

}  // namespace windlass::table_test
