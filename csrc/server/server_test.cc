#include "server/server.h"

#include <barrier>
#include <string>
#include <thread>

#include "base/test.h"

namespace windlass::server_test {
namespace {

constexpr uint64_t kRank0 = 11, kRank1 = 12;  // incarnations

ObjectSpec table(Server& server, const std::string& name) {
  ObjectSpec spec;
  spec.name = server.workers()->app() + "/" + name;
  spec.is_table = true;
  spec.table.dim = 1;
  spec.table.rule.kind = RuleKind::kSum;
  spec.table.sync = {Sync::kBsp, 0, 0};
  return spec;
}

// One thread makes an object while another closes an iteration that the object was never part of.
TEST(an_object_that_is_made_while_a_worker_ticks_knows_of_the_tick) {
  const uint64_t rounds = test::accurate() ? 40000 : 2500;
  Server server(1, ~uint64_t{0});
  const std::shared_ptr<Workers> workers = server.workers();
  CHECK(workers->set_view(1, {{0, kRank0, true}, {1, kRank1, true}}, {}));
  std::shared_ptr<ServedObject> object;
  std::barrier sync(2);
  std::thread worker([&] {
    for (uint64_t round = 1; round <= rounds; ++round) {
      sync.arrive_and_wait();
      server.tick(workers, 1, round, {});
      sync.arrive_and_wait();
    }
  });
  uint64_t missed = 0;
  for (uint64_t round = 1; round <= rounds; ++round) {
    const ObjectSpec spec = table(server, "t" + std::to_string(round));
    sync.arrive_and_wait();
    CHECK_OK(server.open(spec, &object));
    sync.arrive_and_wait();
    for (uint32_t i = 0; i < object->shards(); ++i) {
      Shard& shard = *object->find(i);
      with_turn(shard.turn, [&] { missed += shard.gate->clock_of(1) != round; });
    }
    uint32_t number = 0;
    CHECK_OK(server.remove(spec.name, &number));
  }
  worker.join();
  CHECK_EQ(missed, 0u);
}

}  // namespace
}  // namespace windlass::server_test
