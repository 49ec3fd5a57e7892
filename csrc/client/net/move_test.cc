// Shards move between hosts while clients push and pull: totals are exact, whatever else happens meanwhile.
#include <set>

#include "client/op/step.h"
#include "client/totals_test.h"
#include "server/move/move_test.h"

namespace windlass::move_test {
namespace {

using test::array_of;
using test::check_totals;
using test::eventually;
using test::Hosts;
using test::in_ms;
using test::Joined;
using test::length_ns;
using test::move_shard;
using test::now;
using test::Relay;
using test::soon;
using test::sums;

// Knows where every shard is, as a scheduler would.
class Mover {
 public:
  explicit Mover(Hosts& hosts) : hosts_(hosts) {}

  // One that is not there yet is passed over.
  void move_one(test::Random* random) {
    const uint32_t object = 1 + static_cast<uint32_t>(random->below(2));
    const std::shared_ptr<ServedObject> there = hosts_[0].find(object);
    if (there == nullptr) return;
    const auto shard = static_cast<uint32_t>(random->below(std::min(there->shards(), 40u)));
    move(object, shard, static_cast<uint32_t>(random->below(hosts_.size())));
  }
  void move(uint32_t object, uint32_t shard, uint32_t to) {
    std::pair<uint32_t, uint32_t> at;  // the highest term counts
    for (size_t i = 0; i < hosts_.size(); ++i) {
      const std::shared_ptr<ServedObject> there = hosts_[i].find(object);
      if (there == nullptr) continue;
      if (const auto known = there->whereabouts(shard); known.second > at.second) at = known;
    }
    if (at.second == 0 || at.first == to) return;
    CHECK_OK(move_shard(hosts_[at.first], hosts_[to], object, shard, to, at.second + 1));
    ++moves;
  }
  uint64_t moves = 0;

 private:
  Hosts& hosts_;
};

std::shared_ptr<TensorClient> small(Joined& worker, const std::string& name, uint64_t n = 100) {
  return worker.tensor(name, sums({n}, Dtype::kInt64));
}
Status push_one(TensorClient& t, int64_t value, int64_t deadline_ns = soon()) {
  std::vector<int64_t> g(t.spec().elements(), value);
  const Array in = array_of(g.data(), {t.spec().elements()});
  return now(t, TensorRequest{.in = &in}, deadline_ns);
}
int64_t pull_one(TensorClient& t) {
  std::vector<int64_t> out(t.spec().elements());
  const Array into = array_of(out.data(), {t.spec().elements()});
  CHECK_OK(now(t, TensorRequest{.out = &into}));
  CHECK(std::all_of(out.begin(), out.end(), [&](int64_t x) { return x == out[0]; }));
  return out[0];
}

}  // namespace

TEST(totals_are_exact_while_shards_move) {
  Hosts hosts(3);
  Mover mover(hosts);
  std::vector<std::unique_ptr<Joined>> workers;
  for (int i = 0; i < 2; ++i) workers.push_back(std::make_unique<Joined>(hosts));
  check_totals(hosts, workers, length_ns(), [&](test::Random* random) { mover.move_one(random); });
  CHECK(mover.moves > 20);
}

TEST(totals_are_exact_while_shards_move_and_connections_are_cut) {
  Hosts hosts(3);
  Mover mover(hosts);
  std::vector<std::unique_ptr<Joined>> workers;
  for (int i = 0; i < 2; ++i) workers.push_back(std::make_unique<Joined>(hosts));
  check_totals(hosts, workers, length_ns(), [&](test::Random* random) {
    mover.move_one(random);
    if (random->below(2) == 0) workers[random->below(2)]->cut(random->below(100));
  });
  CHECK(mover.moves > 20);
}

TEST(totals_are_exact_while_shards_move_and_frames_are_lost_doubled_and_late) {
  test::Random random(test::seed());
  std::atomic<uint64_t> bitten{0};
  Relay relay(test::bad_hands(&random, 10, &bitten));
  Hosts hosts(3);
  Mover mover(hosts);
  std::vector<std::unique_ptr<Joined>> workers;
  for (int i = 0; i < 2; ++i) workers.push_back(std::make_unique<Joined>(hosts, &relay, 1));
  check_totals(hosts, workers, length_ns(), [&](test::Random* dice) { mover.move_one(dice); });
  CHECK(mover.moves > 20);
  CHECK(bitten > 10);
  workers.clear();
}

TEST(steps_are_exact_while_shards_move) {
  Hosts hosts(3);
  Mover mover(hosts);
  Joined worker(hosts);
  constexpr uint64_t kElements = 60'000;  // int64 in 8 shards
  const auto a = small(worker, "a", kElements), b = small(worker, "b", kElements);
  int64_t* const g = worker.take<int64_t>(kElements);
  int64_t* const out = worker.take<int64_t>(kElements);
  std::fill_n(g, kElements, 1);
  const Array in = array_of(g, {kElements}), into = array_of(out, {kElements});
  std::atomic<bool> stop{false};
  std::thread moving([&] {
    test::Random random(test::seed());
    while (!stop) {
      mover.move_one(&random);
      usleep(500);
    }
  });
  const int64_t end = os::now_ns() + length_ns() / 2;
  int64_t done = 0;
  for (; os::now_ns() < end || done < 20; ++done) {
    StepClient step(worker.session);
    CHECK_OK(step.add(a, TensorRequest{.in = &in}));
    CHECK_OK(step.add(b, TensorRequest{.in = &in, .out = &into, .closes = true}));
    CHECK_OK(step.run(soon()));
    CHECK(std::all_of(out, out + kElements, [&](int64_t x) { return x == done + 1; }));
  }
  stop = true;
  moving.join();
  CHECK_EQ(pull_one(*a), done);
  CHECK(mover.moves > 10);
}

TEST(a_request_follows_a_shard_that_has_moved_and_later_ones_go_there_at_once) {
  Hosts hosts(3);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  const uint32_t at = t->owners()->of(0).server, to = (at + 1) % 3, object = t->map().object;
  CHECK_OK(push_one(*t, 1));
  uint64_t before = 0, after = 0;
  CHECK_OK(t->fingerprint(soon(), &before));
  CHECK_OK(move_shard(hosts[at], hosts[to], object, 0, to, 2));
  CHECK_EQ(t->owners()->of(0).server, at);  // nobody has told it
  CHECK_OK(t->fingerprint(soon(), &after));
  CHECK_EQ(before, after);
  CHECK_EQ(t->owners()->of(0).server, to);
  CHECK_EQ(t->owners()->of(0).term, 2u);
  CHECK_OK(push_one(*t, 2));
  CHECK_EQ(pull_one(*t), 3);
  CHECK_OK(move_shard(hosts[to], hosts[at], object, 0, at, 3));  // and home again
  CHECK_OK(push_one(*t, 4));
  CHECK_EQ(pull_one(*t), 7);
  CHECK_EQ(t->owners()->of(0).server, at);
}

TEST(parts_whose_shards_have_moved_to_one_server_follow_as_one_request) {
  Hosts hosts(3);
  std::atomic<uint32_t> requests{0};
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (!passing.answer) ++requests;
    return frame;
  });
  Joined worker(hosts, &relay);
  const auto t = worker.table("t", test::row_sums(1));
  std::vector<uint64_t> keys(2000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<float> ones(keys.size(), 1), out(keys.size());
  const Array in = array_of(ones.data(), {keys.size(), 1}), into = array_of(out.data(), {keys.size(), 1});
  CHECK_OK(now(*t, TableRequest{.keys = test::keys_of(keys), .in = &in}));
  uint32_t moved = 0;
  for (uint32_t shard = 0; shard < t->owners()->shards(); ++shard) {
    if (t->owners()->of(shard).server != 0) continue;
    const uint32_t to = 1 + moved++ % 2;
    CHECK_OK(move_shard(hosts[0], hosts[to], t->map().object, shard, to, 2));
  }
  CHECK(moved > 50);
  const uint32_t before = requests;
  CHECK_OK(now(*t, TableRequest{.keys = test::keys_of(keys), .in = &in}));
  const uint32_t during = requests - before;
  // One to each server, and one more to the two that have the shards by now. A busy machine may ask whether a request
  // has come.
  CHECK(during >= 5 && during < 20);
  CHECK_OK(now(*t, TableRequest{.keys = test::keys_of(keys), .out = &into}));
  CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 2; }));
}

TEST(a_client_that_is_told_of_a_move_before_it_is_made_waits_for_it) {
  Hosts hosts(2);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  CHECK_OK(push_one(*t, 1));
  const uint32_t at = t->owners()->of(0).server, to = 1 - at, object = t->map().object;
  CHECK_OK(worker.links->moved(object, 0, to, 2));
  std::vector<int64_t> out(100);
  const Array into = array_of(out.data(), {100});
  CHECK_CODE(now(*t, TensorRequest{.out = &into}, in_ms(100)), Code::kTimeout);
  std::vector<Ref<TensorCall>> calls(5);
  std::vector<int64_t> g(100, 1);
  const Array in = array_of(g.data(), {100});
  for (auto& call : calls) CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
  usleep(30'000);
  for (const auto& call : calls) CHECK(!call->done());
  CHECK_OK(move_shard(hosts[at], hosts[to], object, 0, to, 2));
  for (const auto& call : calls) CHECK_OK(call->wait(soon()));
  CHECK_EQ(pull_one(*t), 6);
}

TEST(what_waits_for_a_dead_server_goes_on_when_somebody_says_where_the_shard_is) {
  for (const auto& [told, n] : {std::pair<bool, uint64_t>{false, 100}, {true, 100}, {true, 5000}}) {
    Hosts hosts(2);
    Joined worker(hosts);
    const auto t = small(worker, "w", n);
    CHECK_OK(push_one(*t, 1));
    CHECK_OK(push_one(*t, 0));  // what is large lies in an arena from now on
    const uint32_t at = t->owners()->of(0).server, to = 1 - at, object = t->map().object;
    CHECK_OK(move_shard(hosts[at], hosts[to], object, 0, to, 2));
    worker.stop_dialing();
    worker.cut_all();
    CHECK(eventually([&] { return !worker.links->lane(at, 0).connected() && !worker.links->lane(to, 0).connected(); }));
    std::vector<Ref<TensorCall>> calls(5);
    std::vector<int64_t> g(n, 1), out(n);
    const Array in = array_of(g.data(), {n}), into = array_of(out.data(), {n});
    for (auto& call : calls) CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
    Ref<TensorCall> pull;
    CHECK_OK(t->start(TensorRequest{.out = &into}, How::kWait, &pull, soon()));
    if (told) CHECK_OK(worker.links->moved(object, 0, to, 2));
    worker.links->lost(at, Status(Code::kServerLost, "it is dead"));
    worker.allow_dialing();
    for (auto& call : calls) CHECK_CODE(call->wait(soon()), told ? Code::kOk : Code::kServerLost);
    CHECK_CODE(pull->finish(soon()), told ? Code::kOk : Code::kServerLost);
    if (!told) continue;
    CHECK_EQ(out[0], 6);
    CHECK_OK(push_one(*t, 1));
    CHECK_EQ(pull_one(*t), 7);
  }
}

// The user would push what was cancelled again, and it would count twice.
TEST(a_push_that_a_lost_server_may_have_applied_cannot_be_taken_back) {
  for (const bool refused : {false, true}) {  // its server is lost; or is back, and has the shard no more
    std::atomic<bool> silent{false};
    std::atomic<uint32_t> blocked{~0u};
    Relay relay([&](Relay::Passing& passing, std::string frame) {
      if (silent && passing.answer && test::op_of(frame) == wire::Op::kPush) return std::string();
      if (passing.answer || test::op_of(frame) != wire::Op::kHello) return frame;
      Hello hello;
      CHECK_OK(decode(test::parsed(frame).parts[0].items, &hello));
      return hello.index == blocked ? std::string() : frame;
    });
    Hosts hosts(2);
    Joined worker(hosts, &relay);
    const auto t = small(worker, "w");
    CHECK_OK(push_one(*t, 1));
    const uint32_t at = t->owners()->of(0).server, to = 1 - at, object = t->map().object;
    silent = true;
    Ref<TensorCall> call;
    std::vector<int64_t> g(100, 1);
    const Array in = array_of(g.data(), {100});
    CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
    Shard& shard = *hosts[at].find(object)->find(0);
    CHECK(eventually([&] {
      uint64_t version = 0;
      with_turn(shard.turn, [&] { version = shard.version; });
      return version == 2;
    }));
    worker.stop_dialing();
    worker.cut_all();
    CHECK(eventually([&] { return !worker.links->lane(at, 0).connected() && !worker.links->lane(to, 0).connected(); }));
    silent = false;
    CHECK_OK(move_shard(hosts[at], hosts[to], object, 0, to, 2));
    if (refused) {
      blocked = to;
      worker.allow_dialing();
      CHECK(eventually([&] { return t->owners()->of(0).server == to; }));
    } else {
      CHECK_OK(worker.links->moved(object, 0, to, 2));
    }
    CHECK(!call->take_back());
    blocked = ~0u;
    worker.allow_dialing();
    CHECK_OK(call->wait(soon()));
    CHECK_EQ(pull_one(*t), 2);
  }
}

TEST(a_request_that_was_planned_for_a_server_before_it_was_lost_goes_to_the_new_one) {
  for (const bool waits_for_room : {false, true}) {
    Hosts hosts(2);
    Joined worker(hosts);
    const auto t = small(worker, "w");
    CHECK_OK(push_one(*t, 1));
    const uint32_t at = t->owners()->of(0).server, to = 1 - at, object = t->map().object;
    CHECK_OK(move_shard(hosts[at], hosts[to], object, 0, to, 2));
    worker.stop_dialing();
    worker.cut_all();
    CHECK(eventually([&] { return !worker.links->lane(at, 0).connected() && !worker.links->lane(to, 0).connected(); }));
    std::vector<Ref<TensorCall>> calls(waits_for_room ? limits::kWindowMax : 0);
    std::vector<int64_t> g(100, 1);
    const Array in = array_of(g.data(), {100});
    for (auto& call : calls) CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
    std::unique_lock order(worker.session->order_mutex(), std::defer_lock);
    if (!waits_for_room) order.lock();  // it has its plan and its place, and is not numbered yet
    std::thread pushes([&] { CHECK_OK(push_one(*t, 1)); });
    usleep(50'000);
    CHECK_OK(worker.links->moved(object, 0, to, 2));
    worker.links->lost(at, Status(Code::kServerLost, "it is dead"));
    if (!waits_for_room) order.unlock();
    worker.allow_dialing();
    pushes.join();
    for (auto& call : calls) CHECK_OK(call->wait(soon()));
    CHECK_EQ(pull_one(*t), 2 + static_cast<int64_t>(calls.size()));
  }
}

TEST(requests_that_are_given_up_while_their_shard_is_nowhere_end) {
  Hosts hosts(2);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  CHECK_OK(push_one(*t, 1));
  const uint32_t at = t->owners()->of(0).server, to = 1 - at, object = t->map().object;
  CHECK_OK(worker.links->moved(object, 0, to, 9));  // which never comes
  {
    // A pull is cancelled, and its memory is the caller's again.
    std::vector<int64_t> out(100);
    const Array into = array_of(out.data(), {100});
    CHECK_CODE(now(*t, TensorRequest{.out = &into}, in_ms(30)), Code::kTimeout);
  }
  uint64_t print = 0;
  CHECK_CODE(t->fingerprint(in_ms(30), &print), Code::kTimeout);
  CHECK_CODE(push_one(*t, 1, in_ms(30)), Code::kTimeout);  // it goes on
  CHECK_CODE(worker.engine->close(in_ms(50)), Code::kTimeout);
  CHECK(worker.links->ended(soon()));
}

TEST(a_push_that_times_out_while_its_shard_is_nowhere_goes_on_with_a_copy) {
  for (const uint64_t n : {uint64_t{100}, uint64_t{5000}}) {  // sent, and in an arena
    Hosts hosts(2);
    Joined worker(hosts);
    const auto t = small(worker, "w", n);
    for (int i = 0; i < 3; ++i) CHECK_OK(push_one(*t, 1));
    const uint32_t at = t->owners()->of(0).server, to = 1 - at, object = t->map().object;
    CHECK_OK(worker.links->moved(object, 0, to, 2));
    std::vector<int64_t> g(n, 5), out(n);
    const Array in = array_of(g.data(), {n}), into = array_of(out.data(), {n});
    CHECK_CODE(now(*t, TensorRequest{.in = &in}, in_ms(20)), Code::kTimeout);
    std::fill(g.begin(), g.end(), 1'000'000);  // the caller's again
    Ref<TensorCall> push, pull;
    CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &push, soon()));
    std::fill(g.begin(), g.end(), 7'000'000);
    CHECK_OK(t->start(TensorRequest{.out = &into}, How::kFuture, &pull, soon()));
    CHECK_CODE(push->wait(in_ms(20)), Code::kTimeout);
    CHECK(!pull->take_back());  // it has left, and been refused
    CHECK_OK(move_shard(hosts[at], hosts[to], object, 0, to, 2));
    CHECK_OK(push->wait(soon()));
    CHECK_EQ(pull_one(*t), 1'000'008);
  }
}

TEST(moved_refuses_what_cannot_be) {
  Hosts hosts(2);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  CHECK_CODE(worker.links->moved(t->map().object, 0, 2, 5), Code::kInvalidArgument);
  CHECK_CODE(worker.links->moved(t->map().object, 1, 0, 5), Code::kInvalidArgument);
  CHECK_OK(worker.links->moved(t->map().object, 0, t->owners()->of(0).server, 0));  // an old term says nothing
  CHECK_EQ(t->owners()->of(0).term, 1u);
  CHECK_OK(worker.links->moved(77, 3, 1, 5));  // of an object that is not open: kept for when it is
}

}  // namespace windlass::move_test
