#include "rule/schedule.h"

#include <cmath>

#include "base/test.h"

namespace windlass::schedule_test {

namespace {

// The formulas, by the library's functions.
double expected(const Schedule& s, double count) {
  const auto warmup = static_cast<double>(s.warmup), updates = static_cast<double>(s.updates);
  if (count <= warmup) return count / warmup;
  const double t = count - 1 - warmup, share = std::min(t / updates, 1.0);
  switch (s.kind) {
    case Schedule::kLinear: return 1 - share * (1 - s.end);
    case Schedule::kCosine: return s.end + (1 - s.end) * (1 + std::cos(M_PI * share)) / 2;
    case Schedule::kInverseRoot: {
      const double over = updates > 0 ? updates : std::max(warmup, 1.0);
      return std::max(s.end, std::sqrt(over / (over + t)));
    }
    case Schedule::kSteps: return std::pow(s.end, std::floor(t / updates));
    default: return 1;
  }
}

}  // namespace

TEST(a_schedule_follows_its_formula) {
  for (const uint64_t warmup : {0, 1, 7, 100}) {
    for (const uint64_t updates : {1, 10, 333}) {
      for (const double end : {0.0, 0.1, 1.0}) {
        for (uint8_t kind = 0; kind < Schedule::kKinds; ++kind) {
          const Schedule s{static_cast<Schedule::Kind>(kind), warmup, updates, end};
          for (uint64_t count = 1; count <= 1000; ++count)
            CHECK(std::abs(factor(s, count) - expected(s, static_cast<double>(count))) < 1e-14);
        }
      }
    }
  }
}

TEST(the_first_update_of_a_warm_up_moves_something_and_its_last_has_all) {
  const Schedule s{Schedule::kLinear, 4, 10, 0.5};
  CHECK(factor(s, 1) == 0.25 && factor(s, 4) == 1.0 && factor(s, 5) == 1.0);
  CHECK(factor(s, 6) == 0.95 && factor(s, 15) == 0.5 && factor(s, 1000) == 0.5);
}

TEST(an_inverse_root_without_updates_has_those_of_its_warm_up) {
  const Schedule s{Schedule::kInverseRoot, 100, 0, 0.0};
  CHECK(factor(s, 100) == 1.0 && factor(s, 401) == 0.5);
  CHECK(factor({Schedule::kInverseRoot, 0, 0, 0.0}, 4) == 0.5);
  CHECK(factor({Schedule::kInverseRoot, 0, 0, 0.7}, 1000) == 0.7);
}

TEST(the_ends_of_counts_are_no_trouble) {
  for (uint8_t kind = 0; kind < Schedule::kKinds; ++kind) {
    for (const uint64_t warmup : {uint64_t{0}, ~uint64_t{0}}) {
      for (const uint64_t updates : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
        for (const uint64_t count : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
          const double f = factor({static_cast<Schedule::Kind>(kind), warmup, updates, 0.5}, count);
          CHECK(f >= 0.0 && f <= 1.0);
        }
      }
    }
  }
}

TEST(a_schedule_moves_the_step_size_and_nothing_else) {
  RuleSpec rule;
  const Hyper hyper{{1, 2, 3, 4, 5, 6, 7, 8}};
  CHECK(at_update(rule, hyper, 1).v[0] == 1.0);
  rule.schedule.warmup = 10;
  const Hyper now = at_update(rule, hyper, 5);
  CHECK(now.v[0] == 0.5);
  for (int i = 1; i < limits::kRuleHyperMax; ++i) CHECK(now.v[i] == hyper.v[i]);
}

TEST(a_schedule_that_cannot_be_is_refused) {
  const auto check = [](RuleKind kind, const Schedule& s) {
    RuleSpec rule;
    rule.kind = kind;
    rule.schedule = s;
    return check_rule("tensor 'w'", rule);
  };
  CHECK(check(RuleKind::kSgd, {Schedule::kLinear, 0, 10, 0.0}).ok());
  CHECK(check(RuleKind::kNAdam, {Schedule::kInverseRoot, 0, 0, 0.0}).ok());
  CHECK(!check(RuleKind::kSgd, {Schedule::kLinear, 0, 0, 0.0}).ok());
  CHECK(!check(RuleKind::kSgd, {Schedule::kSteps, 0, 10, 1.5}).ok());
  for (const double end : {-0.1, 1e31, double(NAN), double(INFINITY)})
    CHECK(!check(RuleKind::kSgd, {Schedule::kCosine, 0, 10, end}).ok());
  for (const RuleKind kind :
       {RuleKind::kSum, RuleKind::kAssign, RuleKind::kMax, RuleKind::kMin, RuleKind::kAverage, RuleKind::kFtrl})
    CHECK(!check(kind, {Schedule::kConstant, 5, 0, 0.0}).ok());
}

}  // namespace windlass::schedule_test
