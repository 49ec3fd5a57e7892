#include "server/object/bsp_updates.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/test.h"
#include "server/object/close_test.h"
#include "table/table_test.h"

namespace windlass::bsp_updates_test {
namespace {

using test::close_in_turn;
using test::Tabled;
using Row = std::vector<float>;

constexpr uint64_t kN = 4;
constexpr uint32_t kRanks = 3;
constexpr uint64_t kBytes = kN * sizeof(float);
constexpr Sync kBsp{Sync::kBsp, 0, 0}, kSpare{Sync::kBsp, 1, 0};

// How a push comes: in a registered array, as a copy that counts against the quota, or in memory that is good until the
// end of the turn.
enum class How { kInPlace, kCopied, kPassing };

View view_of(const std::vector<uint32_t>& ranks) {
  View view;
  view.known = true;
  for (const uint32_t rank : ranks) view.workers.push_back({rank, 0});
  return view;
}

// A shard, and whatever pushes to it. SGD takes steps of 1 from weights of 0: they become the mean, negated.
struct Pushes {
  explicit Pushes(const Sync& sync) : sync(sync) {}
  virtual ~Pushes() = default;
  virtual Shard& shard() = 0;
  virtual Target target() = 0;

  void begin() {
    shard().gate = std::make_unique<Gate>(sync);
    shard().gate->set_view(view_of({0, 1, 2}), 0);
    shard().staged = std::make_unique<BspUpdates>(&quota);
  }
  BspUpdates& updates() { return static_cast<BspUpdates&>(*shard().staged); }
  Gate& gate() { return *shard().gate; }
  void close(uint32_t rank, uint64_t clock, double weight) {
    close_in_turn(target(), shard(), rank, clock, weight);
    for (const auto& numbers : passing) std::fill(numbers->begin(), numbers->end(), 1e30f);  // they are others' by now
  }
  void set_view(const std::vector<uint32_t>& ranks) {
    gate().set_view(view_of(ranks), 0);
    make_updates(shard(), target());
  }
  bool add(BspUpdates::Push push, const Row& g, uint64_t item_bytes, How how) {
    const auto numbers = std::make_shared<Row>(g);
    push.hyper.v[0] = 1;
    push.numbers = reinterpret_cast<const std::byte*>(numbers->data());
    if (how == How::kInPlace) push.memory = numbers;
    if (how == How::kPassing) passing.push_back(numbers);
    if (how == How::kCopied) {
      const uint64_t bytes = push.items() * item_bytes;
      StagingQuota::Room room;
      CHECK(quota.take(bytes, &room));
      push.copy_numbers(item_bytes, bytes, std::move(room));
      std::fill(numbers->begin(), numbers->end(), 1e30f);
    }
    return updates().add(std::move(push), gate());
  }

  const Sync sync;
  Budget objects{1 << 20};
  StagingQuota quota{1 << 20, &objects};
  std::vector<std::shared_ptr<Row>> passing;
};

struct OnTensor final : Pushes {
  explicit OnTensor(const Sync& sync = kBsp, RuleKind rule = RuleKind::kSgd) : Pushes(sync) {
    TensorSpec spec;
    spec.shape = {kN};
    spec.rule.kind = rule;
    CHECK_OK(Tensor::create("w", spec, &budget, &tensor));
    begin();
  }
  Shard& shard() override { return tensor->shard(0); }
  Target target() override { return {tensor.get(), nullptr, 0}; }
  bool push(uint32_t rank, uint64_t iteration, const Row& g, How how = How::kInPlace, double weight = 1,
            uint64_t by = 0) {
    BspUpdates::Push p{.rank = rank, .incarnation = by, .iteration = iteration, .weight = weight};
    p.spans = {{0, g.size(), 0}};
    return add(std::move(p), g, sizeof(float), how);
  }
  // In one turn, as a push that closes.
  void contribute(uint32_t rank, const Row& g, How how) {
    CHECK(push(rank, gate().made(), g, how));
    close(rank, gate().made() + 1, 1);
  }
  Row weights() {
    Row all(kN);
    std::memcpy(all.data(), tensor->weights_of(0), kBytes);
    return all;
  }
  float weight() { return weights()[0]; }

  Budget budget;
  std::unique_ptr<Tensor> tensor;
};

constexpr uint32_t kShard = 7;

struct OnTable final : Pushes {
  explicit OnTable(uint64_t bytes_max = ~uint64_t{0}) : Pushes(kBsp), tabled({.dim = 1}, "t", bytes_max) { begin(); }
  Shard& shard() override { return tabled.table->shard(kShard); }
  Target target() override { return {nullptr, tabled.table.get(), kShard}; }
  static uint64_t key(uint64_t i) { return key_of(kShard, mix(i + 1)); }
  void push(uint32_t rank, const std::vector<uint64_t>& keys, const Row& g, How how = How::kInPlace) {
    BspUpdates::Push p{.rank = rank, .iteration = gate().made()};
    for (uint32_t i = 0; i < keys.size(); ++i) p.keyed.push_back({mix(key(keys[i])), i});
    CHECK(add(std::move(p), g, sizeof(float), how));
  }
  Row rows(std::vector<uint64_t> keys) {
    for (uint64_t& k : keys) k = key(k);
    return tabled.read(keys, false);
  }
  Tabled tabled;
};

// Of each rank. The order of their sum matters in every element.
const Row kG[kRanks] = {{1e8f, 5.0f, 0.1f, -3e7f}, {-1e8f, 1e8f, 0.7f, 1.0f}, {1.0f, -1e8f, -0.75f, 3e7f}};

// `heavy` is what the first weighs.
Row minus_mean(const Row& first, const Row& second, const Row& third, float heavy = 1) {
  Row all(kN);
  for (size_t i = 0; i < kN; ++i) all[i] = 0.0f - ((heavy * first[i] + second[i]) + third[i]) / (heavy + 2);
  return all;
}

// Once for each order in which three can come.
template <class F>
void each_order(F f) {
  std::array<uint32_t, kRanks> order{0, 1, 2};
  do f(order);
  while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace

TEST(contributions_are_added_in_the_order_of_ranks_however_they_come) {
  const Row expected = minus_mean(kG[0], kG[1], kG[2]);
  for (size_t i = 0; i < kN; ++i) {
    CHECK(expected[i] != minus_mean(kG[1], kG[2], kG[0])[i] || expected[i] != minus_mean(kG[2], kG[0], kG[1])[i]);
  }
  each_order([&](const std::array<uint32_t, kRanks>& order) {
    for (uint32_t copied = 0; copied < 8; ++copied) {  // a bit for each rank
      OnTensor together, apart;
      for (const uint32_t rank : order) {
        const How how = (copied >> rank & 1) != 0 ? How::kCopied : How::kInPlace;
        together.contribute(rank, kG[rank], how);
        CHECK(apart.push(rank, 0, kG[rank], how));
      }
      for (const uint32_t rank : order) apart.close(rank, 1, 1);
      CHECK(together.weights() == expected);
      CHECK(apart.weights() == expected);
      CHECK_EQ(together.shard().version, 1u);
    }
  });
}

TEST(several_pushes_of_one_worker_become_one_before_ranks_are_added) {
  const float a = 1e8f, b = -1e8f, c = 1.0f;
  CHECK((a + b) + c != a + (b + c));
  for (const How how : {How::kInPlace, How::kCopied}) {
    OnTensor s;
    CHECK(s.push(1, 0, Row(kN, b), how, 1));
    CHECK(s.push(1, 0, Row(kN, c), how, 1));
    CHECK(s.push(0, 0, Row(kN, a), how, 1));
    for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 1, rank == 1 ? 2 : 1);
    CHECK_EQ(s.weight(), 0.0f - (a + (b + c)) / 4.0f);
  }
}

TEST(a_worker_is_next_when_all_lower_ranks_have_closed_the_iteration) {
  OnTensor s;
  const auto is_next = [&](uint32_t rank, uint64_t at) { return BspUpdates::is_next(rank, at, s.gate()); };
  CHECK(is_next(0, 0));
  CHECK(!is_next(0, 1));  // the update before it is not made
  CHECK(!is_next(1, 0));
  s.close(1, 1, 0);
  CHECK(!is_next(2, 0));
  s.close(0, 1, 0);
  CHECK(is_next(2, 0));
  s.set_view({1, 2});  // whoever is not waited for holds nobody up
  CHECK(is_next(1, 0));
}

TEST(who_comes_after_all_lower_ranks_goes_into_a_running_sum_with_the_same_bits) {
  OnTensor s;
  s.contribute(0, kG[0], How::kPassing);
  CHECK(s.updates().waiting().empty());
  CHECK_EQ(s.updates().first(s.gate()), 0u);  // there is a sum
  s.contribute(2, kG[2], How::kCopied);
  CHECK_EQ(s.updates().waiting().size(), 1u);  // rank 1 comes first
  s.contribute(1, kG[1], How::kPassing);
  CHECK(s.updates().waiting().empty());
  CHECK(s.weights() == minus_mean(kG[0], kG[1], kG[2]));
}

TEST(an_array_in_place_before_one_that_must_be_summed_goes_into_the_sum_first) {
  OnTensor s;
  s.contribute(0, kG[0], How::kInPlace);
  CHECK_EQ(s.updates().waiting().size(), 1u);  // nothing urges
  s.contribute(1, kG[1], How::kPassing);
  CHECK(s.updates().waiting().empty());
  s.contribute(2, kG[2], How::kInPlace);
  CHECK(s.weights() == minus_mean(kG[0], kG[1], kG[2]));
}

TEST(a_mean_divides_by_the_weights_of_all_who_closed_also_of_who_pushed_nothing) {
  for (const How how : {How::kInPlace, How::kCopied, How::kPassing}) {
    OnTensor s;
    CHECK(s.push(0, 0, Row(kN, 6.0f), how, 2));
    s.close(0, 1, 2);
    s.close(1, 1, 1);  // pushed elsewhere
    s.close(2, 1, 0);  // pushed nothing at all
    CHECK_EQ(s.weight(), -4.0f);
  }
}

TEST(a_gradient_counts_as_often_as_its_weight_says) {
  OnTensor s;
  CHECK(s.push(0, 0, Row(kN, 3.0f), How::kInPlace, 2));
  CHECK(s.push(1, 0, Row(kN, 6.0f), How::kInPlace, 1));
  CHECK(s.push(2, 0, Row(kN, 100.0f), How::kInPlace, 0));
  for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 1, 2 - rank);
  CHECK_EQ(s.weight(), -4.0f);
}

TEST(sum_adds_max_and_min_choose_and_assign_takes_the_highest_rank) {
  const std::pair<RuleKind, float> rules[] = {
      {RuleKind::kSum, 9.0f}, {RuleKind::kMax, 7.0f}, {RuleKind::kMin, -1.0f}, {RuleKind::kAssign, 3.0f}};
  each_order([&](const std::array<uint32_t, kRanks>& order) {
    for (const auto& [rule, expected] : rules) {
      OnTensor s(kBsp, rule);
      for (const uint32_t rank : order) s.contribute(rank, Row(kN, std::array{7.0f, -1.0f, 3.0f}[rank]), How::kInPlace);
      CHECK_EQ(s.weight(), expected);
    }
  });
}

TEST(elements_that_nobody_pushed_keep_their_weights) {
  const std::pair<RuleKind, Row> rules[] = {{RuleKind::kSgd, {-8.0f, -7.0f, -5.0f, -5.0f}},
                                            {RuleKind::kAssign, {6.0f, 6.0f, 5.0f, 5.0f}}};
  for (const auto& [rule, expected] : rules) {
    OnTensor s(kBsp, rule);
    for (uint32_t rank = 0; rank < kRanks; ++rank) s.contribute(rank, Row(kN, 5.0f), How::kInPlace);
    CHECK(s.push(0, 1, {3.0f}) && s.push(1, 1, {6.0f, 6.0f}, How::kCopied));
    for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 2, 1);
    CHECK(s.weights() == expected);
  }
}

TEST(what_a_lost_worker_has_not_closed_ends_when_another_takes_its_rank) {
  OnTensor s;
  CHECK(s.push(1, 0, Row(kN, 1000.0f), How::kCopied, 1, 11));
  CHECK(s.push(1, 1, Row(kN, 1000.0f), How::kInPlace, 1, 11));
  CHECK(s.push(1, 0, Row(kN, 3.0f), How::kCopied, 1, 12));
  CHECK_EQ(s.updates().waiting().size(), 1u);
  CHECK_EQ(s.quota.used(), kBytes);
  for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 1, 1);
  CHECK_EQ(s.weight(), -1.0f);
}

TEST(what_a_lost_worker_has_closed_counts_and_is_not_counted_again_when_redone) {
  OnTensor s;
  CHECK(s.push(1, 0, Row(kN, 3.0f), How::kCopied, 1, 11));
  s.close(1, 1, 1);
  CHECK(!s.push(1, 0, Row(kN, 3.0f), How::kCopied, 1, 12));
  CHECK_EQ(s.quota.used(), kBytes);
  CHECK(s.push(1, 1, Row(kN, 30.0f), How::kCopied, 1, 12));
  for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 1, 1);
  CHECK_EQ(s.weight(), -1.0f);
  for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 2, 1);
  CHECK_EQ(s.weight(), -11.0f);
}

TEST(who_was_given_up_counts_in_what_it_had_closed_and_in_nothing_else) {
  for (const bool closed : {false, true}) {
    OnTensor s;
    CHECK(s.push(1, 0, Row(kN, 1000.0f), How::kCopied));
    if (closed) s.close(1, 1, 1);
    for (const uint32_t rank : {0u, 2u}) s.contribute(rank, Row(kN, 4.0f), How::kCopied);
    CHECK_EQ(s.gate().made(), closed ? 1u : 0u);
    s.set_view({0, 2});
    CHECK_EQ(s.gate().made(), 1u);
    CHECK_EQ(s.weight(), closed ? -336.0f : -4.0f);
    CHECK_EQ(s.quota.used(), 0u);
  }
}

TEST(an_update_goes_without_the_spare_and_drops_what_they_bring_late) {
  OnTensor s(kSpare);
  s.contribute(0, Row(kN, 2.0f), How::kInPlace);
  s.contribute(2, Row(kN, 4.0f), How::kInPlace);
  CHECK_EQ(s.weight(), -3.0f);
  CHECK(!s.push(1, 0, Row(kN, 1000.0f), How::kCopied));
  CHECK_EQ(s.quota.used(), 0u);
  s.close(1, 1, 1);
  CHECK_EQ(s.weight(), -3.0f);
  CHECK(s.push(1, 1, Row(kN, 3.0f), How::kCopied));  // it has caught up
}

TEST(rows_that_one_worker_pushed_once_have_the_bits_of_their_sum_and_take_no_memory_for_it) {
  const float a = 1e8f, b = 5.0f, c = -1e8f;
  for (const How how : {How::kInPlace, How::kCopied, How::kPassing}) {
    for (const double weight : {1.0, 3.0}) {
      OnTable s;
      s.set_view({0});
      BspUpdates::Push p{.rank = 0, .iteration = 0, .weight = weight};
      const uint64_t keys[] = {1, 2, 1, 3, 1};
      for (uint32_t i = 0; i < 5; ++i) p.keyed.push_back({mix(OnTable::key(keys[i])), i});
      CHECK(s.add(std::move(p), {a, 0.7f, b, -0.0f, c}, sizeof(float), how));
      s.close(0, 1, weight);
      const float mean = static_cast<float>(weight) * 0.7f / static_cast<float>(weight);
      CHECK(s.rows({1, 2, 3}) == (Row{0.0f - ((a + b) + c), 0.0f - mean, 0.0f}));
      CHECK_EQ(s.shard().version, 1u);
      CHECK_EQ(s.tabled.table->rows(kShard), 3u);
      CHECK_EQ(s.quota.used(), 0u);
      CHECK_EQ(s.objects.used(), 0u);
      CHECK(s.updates().waiting().empty());
    }
  }
}

TEST(rows_of_one_worker_among_several_that_pushed_nothing_are_still_a_mean) {
  OnTable s;
  s.push(1, {1}, {6.0f});
  for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, 1, 1);
  CHECK(s.rows({1}) == Row{-2.0f});
}

TEST(repeated_keys_are_added_within_a_push_before_workers_are_in_the_order_of_ranks) {
  const float a = 1e8f, b = 5.0f, c = -1e8f, d = 1.0f;
  const float first = 0.0f - ((a + b) + (c + d)) / 3.0f;
  CHECK(first != 0.0f - (((a + b) + c) + d) / 3.0f);
  each_order([&](const std::array<uint32_t, kRanks>& order) {
    for (uint32_t copied = 0; copied < 8; ++copied) {
      OnTable s;
      for (const uint32_t rank : order) {
        const How how = (copied >> rank & 1) != 0 ? How::kCopied : How::kInPlace;
        if (rank == 0) s.push(rank, {1, 2, 1}, {a, 6.0f, b}, how);
        if (rank == 1) s.push(rank, {1, 1}, {c, d}, how);
        if (rank == 2) s.push(rank, {3, 2}, {9.0f, 3.0f}, how);
        s.close(rank, 1, 1);
      }
      CHECK(s.rows({1, 2, 3}) == (Row{first, -3.0f, -3.0f}));
      CHECK_EQ(s.shard().version, 1u);
      CHECK_EQ(s.tabled.table->rows(kShard), 3u);
    }
  });
}

TEST(an_update_without_memory_changes_nothing_and_its_error_is_told_for_its_iteration) {
  OnTable s(0);
  constexpr uint64_t kRounds = 17;  // one more than are kept
  for (uint64_t c = 0; c < kRounds; ++c) {
    s.push(0, {1}, {1.0f}, How::kCopied);
    for (uint32_t rank = 0; rank < kRanks; ++rank) s.close(rank, c + 1, 1);
    CHECK_CODE(s.updates().error(c, 0), Code::kResourceExhausted);
    CHECK_OK(s.updates().error(c + 1, 0));
    CHECK_EQ(s.gate().made(), c + 1);
  }
  CHECK_EQ(s.shard().version, 0u);
  CHECK_EQ(s.tabled.table->rows(kShard), 0u);
  CHECK_EQ(s.quota.used(), 0u);
  CHECK_OK(s.updates().error(0, 0));  // for a while
  CHECK_CODE(s.updates().error(1, 0), Code::kResourceExhausted);
}

TEST(a_copy_counts_against_the_quota_until_it_is_summed_or_its_update_is_made) {
  OnTensor s;
  CHECK(s.push(1, 0, kG[1], How::kCopied));
  CHECK(s.push(1, 1, kG[1], How::kCopied));
  CHECK(s.push(0, 0, kG[0], How::kCopied));
  CHECK_EQ(s.quota.used(), 3 * kBytes);
  s.close(1, 1, 1);
  CHECK_EQ(s.quota.used(), 3 * kBytes);
  s.close(0, 1, 1);
  CHECK_EQ(s.quota.used(), kBytes);  // both are in the running sum
  s.close(2, 2, 0);
  CHECK_EQ(s.quota.used(), kBytes);  // of the next iteration
  s.close(0, 2, 0);
  s.close(1, 2, 1);
  CHECK_EQ(s.quota.used(), 0u);
}

TEST(the_running_sum_takes_room_from_what_objects_may_take_until_its_update_is_made) {
  OnTensor s;
  s.contribute(0, kG[0], How::kPassing);
  CHECK_EQ(s.objects.used(), kBytes);
  CHECK_EQ(s.quota.used(), 0u);
  s.contribute(1, kG[1], How::kPassing);
  CHECK_EQ(s.objects.used(), kBytes);
  s.contribute(2, kG[2], How::kPassing);
  CHECK_EQ(s.objects.used(), 0u);
  CHECK(s.weights() == minus_mean(kG[0], kG[1], kG[2]));

  OnTable t;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    CHECK_EQ(t.objects.used() != 0, rank != 0);
    t.push(rank, {rank + 1, 9}, {1.0f, 1.0f}, How::kPassing);
    t.close(rank, 1, 1);
  }
  CHECK_EQ(t.objects.used(), 0u);
}

TEST(without_room_for_the_running_sum_pushes_wait_as_they_are_and_the_update_has_the_same_bits) {
  OnTensor s;
  OnTable t;
  for (Pushes* const p : {static_cast<Pushes*>(&s), static_cast<Pushes*>(&t)}) CHECK(p->objects.charge(1 << 20));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    CHECK(s.push(rank, 0, kG[rank], How::kCopied));
    t.push(rank, {1, rank + 2}, {1.0f, 2.0f}, How::kCopied);
  }
  StagingQuota::Room all, all_of_table;
  CHECK(s.quota.take((1 << 20) - s.quota.used(), &all));
  CHECK(t.quota.take((1 << 20) - t.quota.used(), &all_of_table));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    s.close(rank, 1, 1);
    t.close(rank, 1, 1);
    CHECK_EQ(s.updates().waiting().size(), rank + 1 < kRanks ? kRanks : 0);
    CHECK_EQ(t.updates().waiting().size(), rank + 1 < kRanks ? kRanks : 0);
  }
  CHECK(s.weights() == minus_mean(kG[0], kG[1], kG[2]));
  CHECK(t.rows({1, 2, 3, 4}) == (Row{-1.0f, -2.0f / 3, -2.0f / 3, -2.0f / 3}));
  CHECK_EQ(s.quota.used(), all.bytes());
  CHECK_EQ(t.quota.used(), all_of_table.bytes());
}

TEST(a_shard_that_is_cleared_and_one_that_goes_away_give_their_copies_back) {
  OnTensor cleared, gone;
  for (OnTensor* s : {&cleared, &gone}) CHECK(s->push(1, 0, kG[1], How::kCopied) && s->quota.used() == kBytes);
  cleared.shard().staged.reset();
  gone.tensor.reset();
  CHECK_EQ(cleared.quota.used(), 0u);
  CHECK_EQ(gone.quota.used(), 0u);
}

TEST(what_waits_is_the_same_at_the_shards_new_place_and_counts_against_the_quota_there) {
  for (uint32_t pushed = 1; pushed <= kRanks; ++pushed) {  // before the move
    OnTensor from, to;
    CHECK(from.push(0, 0, kG[0], How::kPassing, 2));
    from.close(0, 1, 2);
    const uint32_t others[] = {2, 1};
    for (uint32_t i = 0; i < 2 && i + 1 < pushed; ++i) from.push(others[i], 0, kG[others[i]], How::kCopied);
    uint64_t bytes = 0;
    to.gate().close(0, 1, 2, 0);
    for (const std::string& body : from.updates().copy(from.gate(), from.target(), 1 << 20)) {
      const auto* const data = reinterpret_cast<const std::byte*>(body.data());
      CHECK_CODE(to.updates().put(data, body.size() - 1, to.gate(), to.target()), Code::kCorrupt);
      CHECK_OK(to.updates().put(data, body.size(), to.gate(), to.target()));
      bytes += kBytes;
    }
    CHECK_EQ(to.quota.used(), bytes);
    for (uint32_t i = 0; i < 2; ++i) {
      if (i + 1 >= pushed) CHECK(to.push(others[i], 0, kG[others[i]], How::kCopied));
      to.close(others[i], 1, 1);
    }
    CHECK(to.weights() == minus_mean(kG[0], kG[1], kG[2], 2));
    CHECK_EQ(to.quota.used(), 0u);
  }
}

}  // namespace windlass::bsp_updates_test
