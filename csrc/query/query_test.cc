#include "query/query.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/limits.h"
#include "base/test.h"
#include "query/query_test.h"

namespace windlass::query_test {
namespace {

using Function = Query::Function;
using test::a_query;
using test::above;
using test::the_norm;

constexpr size_t kDim = 19;
constexpr RowType kFloats{Dtype::kFloat32, kDim, true, true};
constexpr RowType kWholes{Dtype::kInt64, kDim, false, true};

template <class T>
struct Object {
  std::vector<uint64_t> keys;
  std::vector<std::vector<T>> rows;

  void each(size_t begin, size_t end, Tally* tally) const {
    for (size_t at = begin; at < end; at += Block::kRowsMax) {
      std::vector<const void*> pointers;
      for (size_t i = at; i < std::min(at + Block::kRowsMax, end); ++i) pointers.push_back(rows[i].data());
      const std::vector<RowHead> heads(pointers.size());
      std::vector<const RowHead*> head;
      for (const RowHead& h : heads) head.push_back(&h);
      tally->add({keys.data() + at, pointers.data(), head.data(), pointers.size()});
    }
  }
};

Object<float> some_rows(test::Random& random, size_t n) {
  Object<float> made;
  for (size_t i = 0; i < n; ++i) {
    made.keys.push_back(random.next());
    made.rows.emplace_back(kDim);
    for (float& x : made.rows.back()) x = random.below(9) == 0 ? 0.0f : random.unit() * 8 - 4;
  }
  return made;
}

std::string answer(const Query& query, const Object<float>& object) {
  Tally tally(query);
  object.each(0, object.rows.size(), &tally);
  return tally.take();
}

// In pieces, as shards answer, and those in any order.
template <class T>
std::string merged(const Query& query, const Object<T>& object, test::Random& random) {
  std::vector<std::string> answers;
  for (size_t at = 0; at < object.rows.size();) {
    const size_t end = std::min<size_t>(object.rows.size(), at + 1 + random.below(700));
    Tally tally(query);
    object.each(at, end, &tally);
    answers.push_back(tally.take());
    at = end;
  }
  answers.push_back(Tally(query).take());  // a shard that has nothing
  for (size_t i = answers.size(); i > 1; --i) std::swap(answers[i - 1], answers[random.below(i)]);
  Tally all(query);
  for (const std::string& a : answers) CHECK_OK(all.merge(a));
  return all.take();
}

template <class T>
struct Numbered {
  uint64_t n;
  T value;
};
template <class T>
Numbered<T> read(const std::string& bytes) {
  CHECK_EQ(bytes.size(), sizeof(Numbered<T>));
  Numbered<T> out{};
  std::memcpy(&out, bytes.data(), std::min(sizeof out, bytes.size()));
  return out;
}

}  // namespace

TEST(queries_answer_what_a_plain_loop_does) {
  test::Random random(test::seed());
  for (const double least : {-10.0, 0.5, 3.9, 100.0}) {
    const Object<float> object = some_rows(random, 3000);
    const std::string where = least == -10.0 ? "" : above(3, least);
    uint64_t rows = 0, numbers = 0, nonzero = 0, bins[3] = {};
    double sum = 0, squares = 0, absolutes = 0, low = INFINITY, high = -INFINITY, wide = 0;
    std::vector<std::pair<double, uint64_t>> scores;
    for (size_t i = 0; i < object.rows.size(); ++i) {
      if (!(object.rows[i][3] > least) && !where.empty()) continue;
      double norm = 0;
      for (const float f : object.rows[i]) {
        const double x = f;
        ++numbers, sum += x, squares += x * x, absolutes += std::fabs(x), nonzero += x != 0, norm += x * x;
        low = std::min(low, x), high = std::max(high, x), wide = std::max(wide, std::fabs(x));
        for (int b = 0; b < 3; ++b) bins[b] += x >= b - 1 && (x < b || (b == 2 && x == b));
      }
      scores.emplace_back(std::sqrt(norm), object.keys[i]);
      ++rows;
    }
    const auto ask = [&](const std::string& bytes) {
      Query query;
      CHECK_OK(test::parse(bytes, kFloats, &query));
      return merged(query, object, random);
    };
    const auto near = [](double a, double b) { return std::fabs(a - b) <= 1e-9 * (1 + std::fabs(b)); };
    CHECK(ask(a_query(Function::kCount, where)) == std::string(reinterpret_cast<const char*>(&rows), 8));
    for (const auto& [function, want] : {std::pair{Function::kSum, sum},
                                         {Function::kMean, sum},
                                         {Function::kSquares, squares},
                                         {Function::kAbsolutes, absolutes},
                                         {Function::kNonzero, static_cast<double>(nonzero)}}) {
      const auto got = read<double>(ask(a_query(function, where)));
      CHECK_EQ(got.n, numbers);
      CHECK(near(got.value, want));
    }
    for (const auto& [function, want] :
         {std::pair{Function::kMin, low}, {Function::kMax, high}, {Function::kAbsMax, wide}}) {
      const auto got = read<double>(ask(a_query(function, where)));
      CHECK_EQ(got.n, numbers);
      if (numbers != 0) CHECK(got.value == want);
    }
    const std::string counted = ask(a_query(Function::kHistogram, where, 0, "", false, {-1, 0, 1, 2}));
    CHECK_EQ(counted.size(), sizeof bins);
    CHECK(std::memcmp(counted.data(), bins, sizeof bins) == 0);
    std::sort(scores.begin(), scores.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const uint64_t k : {1, 10, 5000}) {
      const std::string best = ask(a_query(Function::kTop, where, k, the_norm(), true));
      CHECK_EQ(best.size(), std::min<size_t>(k, scores.size()) * sizeof(Top::Scored));
      for (size_t i = 0; i < best.size() / sizeof(Top::Scored); ++i) {
        Top::Scored one;
        std::memcpy(&one, best.data() + i * sizeof one, sizeof one);
        CHECK(one.key == scores[i].second && near(one.score, scores[i].first));
      }
    }
  }
}

TEST(answers_do_not_depend_on_the_order_of_rows_and_shards) {
  test::Random random(test::seed());
  Object<float> object = some_rows(random, 2000);
  for (uint8_t f = 1; f <= static_cast<uint8_t>(Function::kTop); ++f) {
    const auto function = static_cast<Function>(f);
    const bool top = function == Function::kTop, bins = function == Function::kHistogram;
    const std::vector<double> edges = bins ? std::vector<double>{-4, -1, 0.5, 4} : std::vector<double>{};
    Query query;
    CHECK_OK(
        test::parse(a_query(function, above(1, 0), top ? 100 : 0, top ? the_norm() : "", top, edges), kFloats, &query));
    const std::string want = answer(query, object);
    for (size_t i = object.rows.size(); i > 1; --i) {
      const size_t j = random.below(i);
      std::swap(object.keys[i - 1], object.keys[j]);
      std::swap(object.rows[i - 1], object.rows[j]);
    }
    CHECK(answer(query, object) == want);
  }
}

TEST(whole_numbers_are_summed_and_compared_exactly) {
  test::Random random(test::seed());
  Object<int64_t> object;
  uint64_t sum = 0;
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (size_t i = 0; i < 300; ++i) {
    object.keys.push_back(i);
    object.rows.emplace_back(kDim);
    for (int64_t& x : object.rows.back()) {
      x = static_cast<int64_t>(random.next());
      sum += static_cast<uint64_t>(x), low = std::min(low, x), high = std::max(high, x);
    }
  }
  const auto ask = [&](Function function) {
    Query query;
    CHECK_OK(test::parse(a_query(function), kWholes, &query));
    return read<int64_t>(merged(query, object, random)).value;
  };
  CHECK_EQ(ask(Function::kSum), static_cast<int64_t>(sum));
  CHECK_EQ(ask(Function::kMin), low);
  CHECK_EQ(ask(Function::kMax), high);
}

TEST(of_equal_scores_the_smaller_key_is_the_better_and_nan_the_worst) {
  Top top(4, true), low(4, false);
  const uint64_t keys[] = {9, 3, 7, 1, 5};
  const double scores[] = {2, NAN, 2, 0.0, -0.0};
  top.add(keys, scores, 5);
  low.add(keys, scores, 5);
  const auto keys_of = [](const std::vector<Top::Scored>& best) {
    std::string text;
    for (const Top::Scored& s : best) text += std::to_string(s.key);
    return text;
  };
  CHECK(keys_of(top.take()) == "7915");
  CHECK(keys_of(low.take()) == "1579");
}

TEST(even_the_worst_is_among_the_best_of_few) {
  Top top(4, true);
  top.add(~uint64_t{0}, NAN);
  CHECK_EQ(top.take().size(), 1u);
}

TEST(the_best_are_found_however_many_are_wanted) {
  test::Random random(test::seed());
  for (const uint64_t k : {1, 2, 100, 3000, 20'000}) {
    std::vector<std::pair<double, uint64_t>> want;
    const bool largest = k % 2 == 0;
    Top chosen(k, largest);
    for (uint64_t i = 0; i < 10'000; ++i) {
      const auto score = static_cast<double>(random.below(500));
      chosen.add(i, score);
      want.emplace_back(largest ? -score : score, i);
    }
    std::sort(want.begin(), want.end());
    const std::vector<Top::Scored> best = chosen.take();
    CHECK_EQ(best.size(), std::min<size_t>(k, want.size()));
    for (size_t i = 0; i < best.size(); ++i) CHECK_EQ(best[i].key, want[i].second);
  }
}

TEST(a_query_that_makes_no_sense_is_refused) {
  Query query;
  const auto refused = [&](const std::string& bytes, const char* why, const RowType& rows = kFloats) {
    const Status status = test::parse(bytes, rows, &query);
    CHECK_CODE(status, Code::kInvalidArgument);
    if (status.message().find(why) == std::string::npos)
      test::fail(__FILE__, __LINE__, "'" + status.message() + "' does not say '" + why + "'");
  };
  const auto changed = [](std::string bytes, size_t at, char to) {
    bytes[at] = to;
    return bytes;
  };
  const std::string count = a_query(Function::kCount), top = a_query(Function::kTop, "", 5, the_norm());
  refused("", "cut off");
  refused(count.substr(0, 23), "cut off");
  refused(changed(count, 0, 0), "no function 0");
  refused(changed(count, 0, 12), "no function 12");
  refused(changed(count, 0, '\xFF'), "no function 255");
  refused(changed(count, 1, 2), "flags");
  refused(changed(count, 2, 1), "flags");
  refused(changed(count, 12, 1), "flags");
  refused(changed(count, 4, 1), "longer than the query");
  refused(changed(count, 7, '\xFF'), "longer than the query");
  refused(changed(count, 11, '\xFF'), "longer than the query");
  refused(changed(count, 16, 1), "not needed");
  refused(count + "x", "its length");
  refused(std::string(limits::kQueryBytesMax + 1, '\1'), "bytes, at most");
  refused(a_query(Function::kTop, "", 0, the_norm()), "1 to 1000000 rows, not 0");
  refused(a_query(Function::kTop, "", limits::kTopMax + 1, the_norm()), "1 to 1000000 rows");
  refused(a_query(Function::kTop, "", 5, ""), "a score");
  refused(a_query(Function::kSum, "", 0, the_norm()), "a score");
  refused(a_query(Function::kTop, "", 5, above(0, 1)), "expected a number");
  refused(a_query(Function::kCount, the_norm()), "expected true or false");
  refused(a_query(Function::kCount, above(kDim, 1)), "column 19 of rows with 19");
  refused(a_query(Function::kHistogram, "", 0, "", false, {1}), "1 to 4096 bins");
  refused(a_query(Function::kHistogram, "", 0, "", false, std::vector<double>(limits::kBinsMax + 2)), "1 to 4096 bins");
  refused(a_query(Function::kHistogram, "", 0, "", false, {1, 0}), "ascend");
  refused(a_query(Function::kHistogram, "", 0, "", false, {0, NAN}), "ascend");
  refused(a_query(Function::kHistogram, "", 0, "", false, {0, INFINITY}), "ascend");
  const RowType cut{Dtype::kFloat32, 1u << 22, false, false};
  refused(count, "more than one shard", cut);
  refused(top, "more than one shard", cut);
  refused(a_query(Function::kSum, above(0, 0)), "more than one shard", cut);
  CHECK_OK(test::parse(a_query(Function::kSum), cut, &query));
}

TEST(an_answer_that_is_none_is_refused) {
  for (const auto& [bytes, lengths] : {std::pair{a_query(Function::kCount), std::vector<size_t>{0, 7, 9, 16}},
                                       {a_query(Function::kSum), {0, 8, 15, 17}},
                                       {a_query(Function::kHistogram, "", 0, "", false, {0, 1, 2}), {0, 8, 24}},
                                       {a_query(Function::kTop, "", 2, the_norm()), {8, 17, 48}}}) {
    Query query;
    CHECK_OK(test::parse(bytes, kFloats, &query));
    for (const size_t n : lengths) CHECK_CODE(Tally(query).merge(std::string(n, '\1')), Code::kProtocolError);
  }
}

}  // namespace windlass::query_test
