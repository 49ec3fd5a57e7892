#include "server/catalogue.h"

#include <algorithm>
#include <cmath>

#include "base/test.h"

namespace windlass::catalogue_test {
namespace {

std::vector<std::string> some_servers(uint32_t n) {
  std::vector<std::string> servers;
  for (uint32_t i = 0; i < n; ++i) servers.push_back("server" + std::to_string(i) + ":7000");
  return servers;
}

ObjectSpec tensor(const std::string& name, std::vector<uint64_t> shape, Dtype dtype = Dtype::kFloat32) {
  ObjectSpec spec;
  spec.name = "app/" + name;
  spec.tensor.shape = std::move(shape);
  spec.tensor.dtype = dtype;
  spec.tensor.rule.kind = RuleKind::kSum;
  return spec;
}

ObjectSpec table(const std::string& name, uint32_t dim) {
  ObjectSpec spec;
  spec.name = "app/" + name;
  spec.is_table = true;
  spec.table.dim = dim;
  return spec;
}

// What each server holds: the bytes of tensors, and of tables as if all shards had as much.
class Loads {
 public:
  explicit Loads(uint32_t servers) : catalogue(std::make_unique<Catalogue>()), bytes(servers) {
    CHECK_OK(catalogue->join(some_servers(servers)));
  }
  Map open(const ObjectSpec& spec, uint64_t table_bytes = 0) {
    Map map;
    CHECK_OK(catalogue->open(spec, &map));
    uint32_t shards = 0;
    CHECK_OK(spec.shards(&shards));
    CHECK_OK(map.check(shards, static_cast<uint32_t>(bytes.size())));
    for (uint32_t server = 0; server < bytes.size(); ++server) {
      const Run run = map.run_of_server(server, shards);
      if (run.first == run.end) continue;
      if (spec.is_table) {
        bytes[server] += static_cast<double>(table_bytes) * (run.end - run.first) / shards;
      } else {
        const TensorSpec& t = spec.tensor;
        const Cut cut = Cut::of(t.elements(), t.row(), size_of(t.dtype));
        bytes[server] += static_cast<double>((cut.end_of(run.end - 1) - cut.first_of(run.first)) * size_of(t.dtype));
      }
    }
    return map;
  }
  // The fullest against the mean.
  double imbalance() const {
    double sum = 0, most = 0;
    for (const double b : bytes) sum += b, most = std::max(most, b);
    return sum == 0 ? 1 : most / (sum / static_cast<double>(bytes.size()));
  }
  std::unique_ptr<Catalogue> catalogue;
  std::vector<double> bytes;
};

void check_balanced(const Loads& loads, const char* what) {
  CHECK(loads.imbalance() <= 1.3);
  if (loads.imbalance() > 1.3) {
    std::fprintf(stderr, "%s on %d servers: the fullest has %.2f of the mean\n", what,
                 static_cast<int>(loads.bytes.size()), loads.imbalance());
  }
}

uint64_t some_elements(test::Random* random) {  // from one to 16 Mi, each order of magnitude as often
  return static_cast<uint64_t>(std::exp2(random->unit() * 24.0));
}

}  // namespace

TEST(no_server_is_the_hot_spot_of_many_tensors_of_mixed_sizes) {
  for (uint32_t servers = 1; servers <= 8; ++servers) {
    for (uint64_t round = 0; round < 10; ++round) {
      test::Random random(test::seed() * 1000 + servers * 100 + round);
      Loads loads(servers);
      for (int i = 0; i < 200; ++i) {
        const uint64_t n = some_elements(&random), row = 1 + random.below(100);
        const Dtype dtype = random.below(3) == 0 ? Dtype::kInt64 : Dtype::kFloat32;
        loads.open(random.below(2) == 0 ? tensor(std::to_string(i), {n}, dtype)
                                        : tensor(std::to_string(i), {n / row + 1, row}, dtype));
      }
      check_balanced(loads, "mixed sizes");
    }
  }
}

TEST(no_server_is_the_hot_spot_of_a_model_whose_layers_are_alike) {
  for (uint32_t servers = 1; servers <= 8; ++servers) {
    for (uint64_t kib = 4; kib <= 64 * 20; kib += 52) {
      for (const bool biased : {false, true}) {
        Loads loads(servers);
        for (int i = 0; i < 64; ++i) {
          loads.open(tensor("w" + std::to_string(i), {kib * 256}));
          if (biased) loads.open(tensor("b" + std::to_string(i), {64}));
        }
        check_balanced(loads, (std::to_string(kib) + " KiB each" + (biased ? " and a bias" : "")).c_str());
      }
    }
  }
}

TEST(one_large_tensor_is_spread_over_all_servers) {
  for (uint32_t servers = 1; servers <= 8; ++servers) {
    Loads loads(servers);
    const Map map = loads.open(tensor("large", {uint64_t{64} << 20}));
    CHECK_EQ(map.runs.size(), servers);
    check_balanced(loads, "one large tensor");
  }
}

TEST(a_table_is_divided_evenly_whatever_else_there_is) {
  test::Random random(test::seed());
  for (uint32_t servers = 1; servers <= 8; ++servers) {
    Loads loads(servers);
    for (int i = 0; i < 20; ++i) {
      loads.open(tensor("w" + std::to_string(i), {some_elements(&random)}));
      const Map map = loads.open(table("t" + std::to_string(i), 8));
      for (uint32_t server = 0; server < servers; ++server) {
        const Run run = map.run_of_server(server, limits::kTableShards);
        CHECK(run.end - run.first >= limits::kTableShards / servers);
        CHECK(run.end - run.first <= (limits::kTableShards + servers - 1) / servers);
      }
    }
  }
}

TEST(tensors_that_are_too_small_to_share_go_to_different_servers) {
  Loads loads(4);
  for (int i = 0; i < 400; ++i) {
    CHECK_EQ(loads.open(tensor(std::to_string(i), {1 + static_cast<uint64_t>(i % 7)})).runs.size(), 1u);
  }
  check_balanced(loads, "small tensors");
}

TEST(the_same_objects_in_the_same_order_are_placed_alike) {
  test::Random random(test::seed());
  std::vector<ObjectSpec> specs;
  for (int i = 0; i < 100; ++i) {
    specs.push_back(i % 5 == 0 ? table(std::to_string(i), 4) : tensor(std::to_string(i), {some_elements(&random)}));
  }
  Loads a(5), b(5);
  for (const ObjectSpec& spec : specs) CHECK(a.open(spec) == b.open(spec));
  CHECK_EQ(a.catalogue->entries().size(), specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    CHECK(a.catalogue->entries()[i].spec == specs[i]);
    CHECK_EQ(a.catalogue->entries()[i].map.object, i + 1);
  }
}

TEST(an_object_that_is_opened_again_is_where_it_was) {
  Loads loads(3);
  const Map first = loads.open(tensor("w", {1'000'000}));
  for (int i = 0; i < 10; ++i) loads.open(tensor(std::to_string(i), {500'000}));
  Map again;
  CHECK_OK(loads.catalogue->open(tensor("w", {1'000'000}), &again));
  CHECK(again == first);
  CHECK_EQ(loads.catalogue->entries().size(), 11u);
}

TEST(a_tensor_that_is_like_another_is_where_that_one_is_whatever_else_there_is) {
  test::Random random(test::seed());
  for (int round = 0; round < 50; ++round) {
    Loads loads(static_cast<uint32_t>(1 + random.below(5)));
    const uint64_t n = some_elements(&random);
    const Map anchor = loads.open(tensor("w", {n}));
    for (uint64_t i = random.below(8); i != 0; --i) loads.open(tensor(std::to_string(i), {some_elements(&random)}));
    ObjectSpec spec = tensor("d", {n});
    spec.tensor.like = "w";
    spec.tensor.rule.kind = RuleKind::kAssign;
    const Map map = loads.open(spec);
    CHECK(map.runs == anchor.runs);
    CHECK(map.object != anchor.object);
    CHECK(loads.open(spec) == map);
    Map out;
    CHECK_CODE(loads.catalogue->open(tensor("d", {n}), &out), Code::kSpecMismatch);  // it is part of the spec
  }
}

TEST(a_tensor_like_none_or_like_another_form_is_refused_and_leaves_no_trace) {
  Loads loads(2);
  loads.open(tensor("w", {1000}));
  loads.open(table("t", 4));
  ObjectSpec d = tensor("d", {1000});
  d.tensor.like = "w";
  loads.open(d);
  Map out;
  const auto refused = [&](const ObjectSpec& spec, const std::string& like, Code code, const char* why) {
    ObjectSpec wrong = spec;
    wrong.tensor.like = like;
    const Status status = loads.catalogue->open(wrong, &out);
    CHECK_CODE(status, code);
    CHECK(status.message().find("tensor 'e': like '" + like + "': ") != std::string::npos);
    CHECK(status.message().find(why) != std::string::npos);
  };
  refused(tensor("e", {1000}), "x", Code::kNotFound, "there is no such tensor");
  refused(tensor("e", {1000}), "t", Code::kNotFound, "there is no such tensor");
  refused(tensor("e", {1000}), "e", Code::kNotFound, "there is no such tensor");
  refused(tensor("e", {1000}), "d", Code::kInvalidArgument, "is like 'w' itself");
  refused(tensor("e", {999}), "w", Code::kInvalidArgument, "expected float32(1000,), saw float32(999,)");
  refused(tensor("e", {1000}, Dtype::kInt64), "w", Code::kInvalidArgument, "saw int64(1000,)");
  ObjectSpec elsewhere = tensor("e", {1000});
  elsewhere.name = "other/e";
  refused(elsewhere, "w", Code::kNotFound, "there is no such tensor");
  CHECK_EQ(loads.catalogue->entries().size(), 3u);
}

TEST(an_object_with_another_spec_is_refused_with_both) {
  Loads loads(2);
  const Map map = loads.open(tensor("w", {10}));
  loads.open(table("t", 4));
  ObjectSpec other_rule = tensor("w", {10});
  other_rule.tensor.rule.kind = RuleKind::kMax;
  for (const ObjectSpec& wrong :
       {tensor("w", {11}), tensor("w", {10, 1}), tensor("w", {10}, Dtype::kInt64), other_rule, table("w", 10)}) {
    Map out;
    const Status status = loads.catalogue->open(wrong, &out);
    CHECK_CODE(status, Code::kSpecMismatch);
    CHECK(status.message().find("'w'") != std::string::npos);
    CHECK(status.message().find(tensor("w", {10}).describe()) != std::string::npos);
    CHECK(status.message().find(wrong.describe()) != std::string::npos);
  }
  Map out;
  CHECK_CODE(loads.catalogue->open(table("t", 5), &out), Code::kSpecMismatch);
  CHECK_EQ(loads.catalogue->entries().size(), 2u);
  CHECK_OK(loads.catalogue->open(tensor("w", {10}), &out));
  CHECK(out == map);
}

TEST(what_can_never_be_is_refused_and_leaves_no_trace) {
  Loads loads(2);
  Map out;
  for (const ObjectSpec& wrong : {tensor("w", {uint64_t{1} << 41}), tensor("w", {uint64_t{1} << 32, uint64_t{1} << 32}),
                                  tensor("w", {4}, Dtype::kBfloat16), table("w", 0), table("w", 1u << 21)}) {
    CHECK_CODE(loads.catalogue->open(wrong, &out), Code::kInvalidArgument);
  }
  CHECK(loads.catalogue->entries().empty());
  CHECK_EQ(loads.open(tensor("w", {4})).object, 1u);
}

TEST(an_empty_tensor_is_on_no_server) {
  Loads loads(2);
  CHECK(loads.open(tensor("e", {0, 7})).runs.empty());
}

TEST(lists_of_servers_that_differ_are_refused_with_both) {
  Catalogue catalogue;
  Map map;
  CHECK_CODE(catalogue.open(tensor("w", {1}), &map), Code::kProtocolError);
  CHECK_OK(catalogue.join({"a:1", "b:2"}));
  CHECK_OK(catalogue.join({"a:1", "b:2"}));
  for (const std::vector<std::string>& other :
       std::vector<std::vector<std::string>>{{"b:2", "a:1"}, {"a:1"}, {"a:1", "b:2", "c:3"}, {"a:1", "b:3"}}) {
    const Status status = catalogue.join(other);
    CHECK_CODE(status, Code::kSpecMismatch);
    CHECK(status.message().find("[a:1, b:2]") != std::string::npos);
    CHECK(status.message().find(other.back()) != std::string::npos);
  }
  CHECK_EQ(catalogue.servers(), 2u);
}

TEST(names_of_different_apps_are_different_objects) {
  Loads loads(2);
  ObjectSpec a = tensor("w", {4}), b = tensor("w", {5});
  b.name = "other/w";
  CHECK(loads.open(a).object != loads.open(b).object);
}

TEST(numbers_are_never_used_again) {
  Catalogue catalogue;
  CHECK_OK(catalogue.join(some_servers(2)));
  Map first, again, other;
  const ObjectSpec spec = tensor("w", {100});
  CHECK_OK(catalogue.open(spec, &first));
  CHECK_OK(catalogue.remove(spec, first.object));
  CHECK_OK(catalogue.remove(spec, first.object));
  CHECK(catalogue.remove(spec, first.object + 1).code() == Code::kNotFound);
  CHECK(catalogue.empty());
  CHECK_OK(catalogue.open(spec, &again));
  CHECK_EQ(again.object, first.object + 1);
  CHECK_OK(catalogue.remove(spec, first.object));  // that one is another
  CHECK_EQ(catalogue.entries().size(), 1u);
  CHECK_OK(catalogue.remove(spec, again.object));
  catalogue.disband(7);
  CHECK_OK(catalogue.join(some_servers(3)));
  CHECK(catalogue.entries().empty());
  CHECK_OK(catalogue.open(spec, &other));
  CHECK_EQ(other.object, 8u);
}

TEST(an_anchor_is_removed_after_those_that_are_like_it) {
  Catalogue catalogue;
  CHECK_OK(catalogue.join(some_servers(2)));
  Map map, like;
  const ObjectSpec spec = tensor("w", {100});
  ObjectSpec other = tensor("y", {100});
  other.tensor.like = "w";
  CHECK_OK(catalogue.open(spec, &map));
  CHECK_OK(catalogue.open(other, &like));
  const Status refused = catalogue.remove(spec, map.object);
  CHECK(refused.code() == Code::kInvalidArgument && refused.message().find("'y'") != std::string::npos);
  CHECK_OK(catalogue.remove(other, like.object));
  CHECK_OK(catalogue.remove(spec, map.object));
}

}  // namespace windlass::catalogue_test
