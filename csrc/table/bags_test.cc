#include "table/bags.h"

#include <vector>

#include "base/test.h"

namespace windlass::bags_test {

TEST(a_row_gets_the_gradients_of_its_bags) {
  const std::vector<int64_t> row = {2, 0, 2, 1, 2}, begin = {0, 2, 2, 4};
  const std::vector<float> grads = {1, 10, 2, 20, 4, 40, 8, 80};
  std::vector<float> rows(6, 1e30f);  // whatever is there
  const Bags bags = {row.data(), 5, begin.data(), 4, nullptr};
  CHECK(check_bags(bags, 3));
  CHECK(sum_bags(bags, 2, grads.data(), 2, rows.data(), 3));
  const std::vector<float> wanted = {1, 10, 4, 40, 1 + 4 + 8, 10 + 40 + 80};
  CHECK(rows == wanted);
}

TEST(an_order_decides_about_the_last_bits) {
  const std::vector<int64_t> row = {0, 0, 0}, begin = {0, 1, 2}, back = {2, 1, 0}, far = {0, 1, 3};
  const std::vector<float> grads = {1e8f, 1.0f, -1e8f};
  std::vector<float> forward(1, 0), backward(1, 0);
  CHECK(sum_bags({row.data(), 3, begin.data(), 3, nullptr}, 1, grads.data(), 1, forward.data(), 1));
  const std::vector<int64_t> middle_last = {0, 2, 1};
  CHECK(sum_bags({row.data(), 3, begin.data(), 3, middle_last.data()}, 1, grads.data(), 1, backward.data(), 1));
  CHECK_EQ(forward[0], 0.0f);
  CHECK_EQ(backward[0], 1.0f);
  CHECK(check_bags({row.data(), 3, begin.data(), 3, back.data()}, 1));
  CHECK(!check_bags({row.data(), 3, begin.data(), 3, far.data()}, 1));
}

TEST(rows_that_are_in_no_bag_get_zeros) {
  const std::vector<int64_t> row = {2}, begin = {0};
  const std::vector<float> grads = {5};
  std::vector<float> rows(4, 1e30f);
  CHECK(sum_bags({row.data(), 1, begin.data(), 1, nullptr}, 1, grads.data(), 1, rows.data(), 4));
  CHECK(rows == (std::vector<float>{0, 0, 5, 0}));
}

TEST(gradients_of_bags_may_lie_apart) {
  const std::vector<int64_t> row = {1, 0, 1};
  const std::vector<float> grads = {1, 10, -1, 2, 20, -1, 4, 40};
  std::vector<float> rows(4, 1e30f);
  CHECK(sum_bags({row.data(), 3, nullptr, 3, nullptr}, 2, grads.data(), 3, rows.data(), 2));
  CHECK(rows == (std::vector<float>{2, 20, 5, 50}));
}

TEST(many_gradients_of_any_width_are_added_up_in_their_order) {
  test::Random random(test::seed());
  for (const uint32_t dim : {1u, 5u, 16u, 32u, 64u, 128u, 130u}) {
    const uint64_t ids = 2'000, n = 40;
    std::vector<float> grads(ids * dim), rows(n * dim, 1e30f), wanted(n * dim, 0);
    for (float& x : grads) x = random.unit() * 1e3f;
    std::vector<int64_t> row(ids);
    for (int64_t& of : row) of = static_cast<int64_t>(random.below(n));
    CHECK(sum_bags({row.data(), ids, nullptr, ids, nullptr}, dim, grads.data(), dim, rows.data(), n));
    for (size_t i = 0; i < grads.size(); ++i) wanted[static_cast<size_t>(row[i / dim]) * dim + i % dim] += grads[i];
    CHECK(rows == wanted);
  }
}

TEST(every_id_is_given_its_row) {
  test::Random random(test::seed());
  for (const uint32_t dim : {1u, 3u, 16u, 100u, 30'000u}) {  // the last in outputs that bypass the cache
    std::vector<float> rows(50 * dim), to(300 * dim);
    for (float& x : rows) x = random.unit();
    std::vector<int64_t> row(300);
    for (int64_t& of : row) of = static_cast<int64_t>(random.below(50));
    gather_rows(row.data(), row.size(), dim, rows.data(), to.data());
    for (size_t i = 0; i < to.size(); ++i) CHECK_EQ(to[i], rows[static_cast<size_t>(row[i / dim]) * dim + i % dim]);
  }
}

TEST(bags_that_point_elsewhere_are_refused) {
  const int64_t row[] = {2, 0}, negative[] = {-1, 0}, begin[] = {0, 1}, late[] = {1, 1}, back[] = {0, 2, 1},
                far[] = {0, 3};
  CHECK(check_bags({row, 2, begin, 2, nullptr}, 3));
  CHECK(!check_bags({row, 2, begin, 2, nullptr}, 2));
  CHECK(!check_bags({negative, 2, begin, 2, nullptr}, 3));
  CHECK(!check_bags({row, 2, late, 2, nullptr}, 3));
  CHECK(!check_bags({row, 2, back, 3, nullptr}, 3));
  CHECK(!check_bags({row, 2, far, 2, nullptr}, 3));
  CHECK(check_bags({nullptr, 0, nullptr, 0, nullptr}, 0));
  CHECK(!check_bags({row, 2, nullptr, 0, nullptr}, 3));
}

}  // namespace windlass::bags_test
