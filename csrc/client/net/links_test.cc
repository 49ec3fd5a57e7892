// A client and its servers in one process, joined by socketpairs that are cut, or by a relay that loses, doubles and
// reorders frames. Everything pushed is a small integer, so totals are exact whatever the order: a push lost or doubled
// shows.
#include "client/net/links.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "client/totals_test.h"

namespace windlass::links_test {
namespace {

using test::array_of;
using test::bad_hands;
using test::check_totals;
using test::eventually;
using test::Frame;
using test::Hosts;
using test::in_ms;
using test::Joined;
using test::kDim;
using test::kKeys;
using test::kRow;
using test::kRows;
using test::length_ns;
using test::now;
using test::op_of;
using test::Relay;
using test::row_sums;
using test::soon;
using test::sums;
using wire::Op;

std::shared_ptr<TensorClient> small(Joined& worker, const std::string& name, uint64_t n = 100) {
  return worker.tensor(name, sums({n}, Dtype::kInt64));
}

Status push_one(TensorClient& t, int64_t value, int64_t deadline_ns = soon()) {
  std::vector<int64_t> g(t.spec().elements(), value);
  const Array in = array_of(g.data(), {t.spec().elements()});
  return now(t, TensorRequest{.in = &in}, deadline_ns);
}

Status pull_one(TensorClient& t, int64_t* value, int64_t deadline_ns = soon()) {
  std::vector<int64_t> out(t.spec().elements());
  const Array into = array_of(out.data(), {t.spec().elements()});
  WL_RETURN_IF_ERROR(now(t, TensorRequest{.out = &into}, deadline_ns));
  CHECK(std::all_of(out.begin(), out.end(), [&](int64_t x) { return x == out[0]; }));
  *value = out[0];
  return {};
}

}  // namespace

TEST(totals_are_exact_when_connections_are_cut_all_the_time) {
  Hosts hosts(2);
  std::vector<std::unique_ptr<Joined>> workers;
  for (int i = 0; i < 2; ++i) workers.push_back(std::make_unique<Joined>(hosts));
  check_totals(hosts, workers, length_ns(),
               [&](test::Random* random) { workers[random->below(2)]->cut(random->below(100)); });
  CHECK(workers[0]->dials + workers[1]->dials > 30);
}

TEST(totals_are_exact_when_frames_are_lost_doubled_and_late) {
  test::Random random(test::seed());
  std::atomic<uint64_t> bitten{0};
  Relay relay(bad_hands(&random, 10, &bitten));
  Hosts hosts(2);
  std::vector<std::unique_ptr<Joined>> workers;
  for (int i = 0; i < 2; ++i) workers.push_back(std::make_unique<Joined>(hosts, &relay, 1));
  check_totals(hosts, workers, length_ns(), nullptr);
  CHECK(bitten > 10);
  workers.clear();
}

TEST(totals_are_exact_when_nothing_happens) {
  Hosts hosts(3);
  std::vector<std::unique_ptr<Joined>> workers;
  workers.push_back(std::make_unique<Joined>(hosts));
  check_totals(hosts, workers, length_ns() / 4, nullptr);
  CHECK_EQ(workers[0]->dials.load(), 6);
}

TEST(everything_under_way_ends_when_a_server_is_lost) {
  Hosts hosts(2);
  Joined worker(hosts);
  const auto t = worker.tensor("w", sums({kRows, kRow}, Dtype::kInt64));  // on both
  CHECK(worker.ready());
  std::vector<int64_t> g(kRows * kRow, 1), out(kRows * kRow);
  const Array in = array_of(g.data(), {kRows, kRow}), into = array_of(out.data(), {kRows, kRow});
  worker.stop_dialing();
  worker.cut_all();
  std::vector<Ref<TensorCall>> calls(20);
  for (size_t i = 0; i < calls.size(); ++i) {
    CHECK_OK(t->start(TensorRequest{.in = &in, .out = i % 2 == 0 ? &into : nullptr}, How::kFuture, &calls[i], soon()));
  }
  std::thread waiting([&] { CHECK_CODE(now(*t, TensorRequest{.out = &into}), Code::kServerLost); });
  usleep(20'000);
  CHECK(!calls[0]->done());
  worker.links->lost(1, Status(Code::kServerLost, "host1 has been out of reach for 1 s"));
  worker.allow_dialing();
  waiting.join();
  for (const auto& call : calls) {
    const Status status = call->wait(soon());
    CHECK_CODE(status, Code::kServerLost);
    CHECK(status.message().find("out of reach") != std::string::npos);
  }
  // And so does what comes later, at once.
  const int64_t begin = os::now_ns();
  CHECK_CODE(now(*t, TensorRequest{.in = &in}), Code::kServerLost);
  CHECK(os::now_ns() - begin < 1'000'000'000);
  // The other server goes on.
  const auto small_one = small(worker, "s");
  CHECK_EQ(small_one->map().runs[0].server, 0u);
  CHECK_OK(push_one(*small_one, 5));
}

// What nobody needs to tell a server that is gone is no error: neither under way nor later.
TEST(who_has_lost_a_server_still_closes_iterations_enters_and_leaves) {
  Hosts hosts(2);
  Joined a(hosts, 0u, 2u), b(hosts, 1u, 2u);
  TensorSpec spec = sums({100}, Dtype::kInt64);
  spec.sync = Sync{Sync::kSsp, 3, 0};
  const auto here = a.tensor("here", spec), gone = a.tensor("gone", spec), of_b = b.tensor("here", spec);
  CHECK_EQ(here->map().runs[0].server, 0u);
  CHECK_EQ(gone->map().runs[0].server, 1u);
  CHECK_OK(push_one(*here, 1));
  CHECK_OK(push_one(*gone, 1));
  CHECK_OK(a.session->tick(soon()));
  a.stop_dialing();
  a.cut_all();
  CHECK(eventually([&] { return !a.links->lane(0, 0).connected() && !a.links->lane(1, 0).connected(); }));
  CHECK_OK(a.session->tick(soon()));  // on its way when the server is lost
  a.links->lost(1, Status(Code::kServerLost, "it is dead"));
  a.allow_dialing();
  CHECK(a.session->await_closes(soon()));
  CHECK_OK(a.session->take_unseen());
  CHECK_OK(push_one(*here, 1));
  CHECK_OK(a.session->tick(soon()));
  CHECK(a.session->await_closes(soon()));
  CHECK_OK(a.session->take_unseen());
  CHECK_OK(a.session->enter(soon()));
  CHECK_OK(b.session->tick(soon()));  // the other server has heard of all that
  CHECK_OK(b.session->tick(soon()));
  int64_t value = 0;
  CHECK_OK(pull_one(*of_b, &value));
  CHECK_EQ(value, 2);
  CHECK_CODE(push_one(*gone, 1), Code::kServerLost);
  CHECK_OK(a.session->leave(soon()));
  for (int i = 0; i < 8; ++i) CHECK_OK(b.session->tick(soon()));  // further than if it waited for the first
  CHECK_OK(pull_one(*of_b, &value));
}

TEST(who_has_lost_all_servers_is_told_by_the_next_tick) {
  Hosts hosts(2);
  Joined a(hosts, 0u, 2u);
  CHECK(a.ready());
  a.stop_dialing();
  for (const uint32_t server : {0, 1}) a.links->lost(server, Status(Code::kServerLost, "it is dead"));
  CHECK_CODE(a.session->tick(soon()), Code::kServerLost);
  CHECK_CODE(a.session->enter(soon()), Code::kServerLost);
  a.allow_dialing();
}

// A push that leaves its worker just before that ends is applied, whoever else is lost.
TEST(who_leaves_waits_for_its_pushes_to_servers_that_are_there) {
  Hosts hosts(2);
  Joined a(hosts, 0u, 2u), b(hosts, 1u, 2u);
  TensorSpec spec = sums({100}, Dtype::kInt64);
  spec.sync = Sync{Sync::kBsp, 0, 0};
  const auto here = a.tensor("here", spec), gone = a.tensor("gone", spec), of_b = b.tensor("here", spec);
  a.links->lost(1, Status(Code::kServerLost, "it is dead"));
  a.stop_dialing();
  a.cut_all();
  CHECK(eventually([&] { return !a.links->lane(0, 0).connected(); }));
  std::vector<int64_t> g(100, 1);
  const Array in = array_of(g.data(), {100});
  Ref<TensorCall> call;
  CHECK_OK(here->start(TensorRequest{.in = &in, .closes = true}, How::kFuture, &call, soon()));
  std::thread leaves([&] { CHECK_OK(a.session->leave(soon())); });
  usleep(50'000);
  a.allow_dialing();
  leaves.join();
  CHECK_OK(b.session->tick(soon()));
  CHECK_OK(call->wait(soon()));
  int64_t value = 0;
  CHECK_OK(pull_one(*of_b, &value));
  CHECK_EQ(value, 1);
}

TEST(a_server_that_cannot_be_reached_is_lost_before_anything_was_sent) {
  Hosts hosts(1);
  CHECK_OK(hosts[0].close(soon()));  // adopt() refuses from now on, and the dialer gives up
  Joined worker(hosts);
  CHECK_CODE(worker.links->wait_ready(soon()), Code::kServerLost);
  std::shared_ptr<TensorClient> t;
  CHECK_CODE(TensorClient::open(worker.session, "w", sums({4}), &t, soon()), Code::kServerLost);
}

TEST(a_server_that_was_started_again_is_lost) {
  Hosts hosts(1), fresh(1);
  Joined worker(hosts);
  CHECK(worker.ready());  // nobody is dialling the host that is about to close
  const auto t = small(worker, "w");
  CHECK_OK(push_one(*t, 1));
  worker.redirect(fresh);
  CHECK_OK(hosts[0].close(soon()));
  const Status status = push_one(*t, 1);
  CHECK_CODE(status, Code::kServerLost);
  CHECK(status.message().find("started again") != std::string::npos);
}

TEST(a_deadline_ends_a_wait_for_a_server_that_is_away) {
  Hosts hosts(1);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  worker.stop_dialing();
  worker.cut_all();
  CHECK(eventually([&] { return !worker.links->lane(0, 0).connected(); }));
  const int64_t begin = os::now_ns();
  const Status status = push_one(*t, 1, in_ms(100));
  CHECK_CODE(status, Code::kTimeout);
  CHECK(status.message().find("connecting again to host0") != std::string::npos);
  int64_t value = -1;
  CHECK_CODE(pull_one(*t, &value, in_ms(100)), Code::kTimeout);
  uint64_t fingerprint = 0;
  CHECK_CODE(t->fingerprint(in_ms(100), &fingerprint), Code::kTimeout);
  CHECK(os::now_ns() - begin < 5'000'000'000);
  worker.allow_dialing();
  CHECK_OK(pull_one(*t, &value));
  CHECK_EQ(value, 1);  // the push went on
}

TEST(a_window_is_full_when_so_many_are_without_an_answer) {
  Hosts hosts(1);
  Joined worker(hosts);
  const auto t = small(worker, "w", 10);
  worker.stop_dialing();
  worker.cut_all();
  CHECK(eventually([&] { return !worker.links->lane(0, 0).connected(); }));
  std::vector<int64_t> g(10, 1);
  const Array in = array_of(g.data(), {10});
  std::vector<Ref<TensorCall>> calls(limits::kWindowMax + 1);
  for (size_t i = 0; i < limits::kWindowMax; ++i) {
    CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &calls[i], in_ms(100)));
  }
  const Status full = t->start(TensorRequest{.in = &in}, How::kFuture, &calls.back(), in_ms(50));
  CHECK_CODE(full, Code::kTimeout);
  std::thread waits([&] { CHECK_OK(push_one(*t, 1)); });  // for room
  usleep(20'000);
  worker.allow_dialing();
  waits.join();
  calls.pop_back();
  for (const auto& call : calls) CHECK_OK(call->wait(soon()));
  int64_t value = 0;
  CHECK_OK(pull_one(*t, &value));
  CHECK_EQ(value, static_cast<int64_t>(limits::kWindowMax + 1));
}

// Who waits must not sleep on a lane that is down: the quickest of many is much quicker than the next look around.
TEST(a_request_that_finds_its_lane_down_goes_out_as_soon_as_it_is_up) {
  Hosts hosts(1);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  int64_t quickest = INT64_MAX;
  for (int i = 0; i < 20; ++i) {
    worker.stop_dialing();
    worker.cut_all();
    CHECK(eventually([&] { return !worker.links->lane(0, 0).connected(); }));
    std::thread pushes([&] { CHECK_OK(push_one(*t, 1)); });
    usleep(5000);
    const int64_t begin = os::now_ns();
    worker.allow_dialing();
    pushes.join();
    quickest = std::min(quickest, os::now_ns() - begin);
  }
  CHECK(quickest < limits::kAskMs * test::kMsNs / 2);
}

// Large pushes on the bulk lane, small pulls on the other: a worker always sees what it has pushed.
TEST(a_small_pull_sees_a_large_push_that_is_still_on_its_way) {
  Hosts hosts(2);
  Joined worker(hosts);
  const auto t = worker.tensor("w", sums({kRows, kRow}, Dtype::kInt64));
  std::vector<int64_t> g(kRows * kRow, 1), out(kRow);
  const Array in = array_of(g.data(), {kRows, kRow}), into = array_of(out.data(), {1, kRow});
  for (int64_t n = 1; n <= 100; ++n) {
    Ref<TensorCall> call;
    CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
    const uint64_t row = static_cast<uint64_t>(n) % kRows;
    CHECK_OK(now(*t, TensorRequest{.out = &into, .rows = {Selection::kRange, row, row + 1, nullptr, 0}}));
    CHECK(std::all_of(out.begin(), out.end(), [&](int64_t x) { return x == n; }));
    call->drop();
  }
}

TEST(an_array_that_timed_out_is_the_callers_again) {
  Hosts hosts(1);
  Joined worker(hosts);
  const auto t = worker.tensor("w", sums({kRows, kRow}, Dtype::kInt64));
  CHECK(worker.ready());
  Shard* const shard = hosts[0].find(t->map().object)->find(3);
  for (int round = 0; round < 5; ++round) {
    std::vector<int64_t> g(kRows * kRow, 1), out(kRows * kRow, -7);
    const Array in = array_of(g.data(), {kRows, kRow}), into = array_of(out.data(), {kRows, kRow});
    {
      const test::Busy busy(*shard);
      CHECK_CODE(now(*t, TensorRequest{.in = &in}, in_ms(30)), Code::kTimeout);
      std::fill(g.begin(), g.end(), 1'000'000);  // it goes on with a copy
      CHECK_CODE(now(*t, TensorRequest{.in = &in, .out = &into}, in_ms(30)), Code::kTimeout);
      CHECK_CODE(now(*t, TensorRequest{.out = &into}, in_ms(30)), Code::kTimeout);
      std::fill(out.begin(), out.end(), -9);
    }
    uint64_t fingerprint = 0;
    CHECK_OK(t->fingerprint(soon(), &fingerprint));
    CHECK(std::all_of(out.begin(), out.end(), [](int64_t x) { return x == -9; }));  // nothing came after that
    CHECK_OK(now(*t, TensorRequest{.out = &into}));
    const int64_t want = (round + 1) * (int64_t{1} + 1'000'000);
    CHECK(std::all_of(out.begin(), out.end(), [&](int64_t x) { return x == want; }));
  }
}

TEST(a_push_that_was_taken_back_before_it_left_is_not_applied) {
  Hosts hosts(1);
  Joined worker(hosts);
  const auto t = small(worker, "w");
  const auto table = worker.table("t", row_sums(2));
  CHECK(worker.ready());
  for (const bool pulls : {false, true}) {
    worker.stop_dialing();
    worker.cut_all();
    CHECK(eventually([&] { return !worker.links->lane(0, 0).connected(); }));
    std::vector<int64_t> g(100, 7), out(100, -1);
    std::vector<float> rows(4, 1);
    const std::vector<uint64_t> keys = {1, 2};
    const Array in = array_of(g.data(), {100}), into = array_of(out.data(), {100}), row = array_of(rows.data(), {2, 2});
    Ref<TensorCall> call;
    Ref<TableCall> other;
    CHECK_OK(t->start(TensorRequest{.in = &in, .out = pulls ? &into : nullptr}, How::kFuture, &call, soon()));
    CHECK_OK(table->start(TableRequest{.keys = test::keys_of(keys), .in = &row, .out = pulls ? &row : nullptr},
                          How::kFuture, &other, soon()));
    CHECK(call->take_back() && other->take_back());
    const int dials = worker.dials;
    worker.allow_dialing();
    CHECK_CODE(call->wait(in_ms(5000)), Code::kCancelled);
    CHECK_CODE(other->wait(in_ms(5000)), Code::kCancelled);
    CHECK_OK(push_one(*t, 1));  // its sequence was used up
    int64_t value = 0;
    CHECK_OK(pull_one(*t, &value));
    CHECK_EQ(value, pulls ? 2 : 1);
    CHECK(worker.dials - dials <= 2);
  }
}

TEST(a_list_whose_answer_was_cut_short_is_asked_for_again) {
  std::atomic<int> lists{0};
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (!passing.answer || op_of(frame) != Op::kList || ++lists != 1) return frame;
    passing.cut = true;
    return frame.substr(0, frame.size() / 2);
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay);
  for (int i = 0; i < 20; ++i) small(worker, std::to_string(i));
  std::vector<Placed> all;
  CHECK_OK(worker.session->list(in_ms(5000), &all));
  CHECK_EQ(all.size(), 20u);
  CHECK_EQ(lists.load(), 2);
}

TEST(a_request_that_was_damaged_on_its_way_is_sent_again) {
  std::atomic<uint64_t> damaged{0};
  test::Random random(test::seed());
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (op_of(frame) == Op::kHello && passing.answer) return frame;
    if (random.below(4) != 0) return frame;
    const size_t at = random.below(frame.size());  // a header, items, numbers or padding
    frame[at] = static_cast<char>(frame[at] ^ (1 << random.below(8)));
    ++damaged;
    return frame;
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay, 1);
  const auto t = worker.tensor("w", sums({50'000}, Dtype::kInt64));
  const int rounds = test::accurate() ? 2000 : 100;
  for (int i = 1; i <= rounds; ++i) {
    CHECK_OK(push_one(*t, 1));
    int64_t value = 0;
    CHECK_OK(pull_one(*t, &value));
    CHECK_EQ(value, i);
  }
  CHECK(damaged > static_cast<uint64_t>(rounds) / 4);
}

TEST(a_hello_that_was_damaged_is_said_again) {
  std::atomic<int> damaged{0};
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (!passing.answer && op_of(frame) == Op::kHello && damaged++ < 6) frame[140] = static_cast<char>(frame[140] ^ 1);
    return frame;
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay);
  CHECK_OK(worker.links->wait_ready(in_ms(10'000)));
  CHECK_OK(push_one(*small(worker, "w"), 1));
}

// R8: what was lost is asked for, however busy the lane is with others.
TEST(a_lost_request_is_asked_for_while_others_are_answered) {
  std::atomic<int> lost{0};
  std::atomic<uint32_t> victim{~0u};
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    wire::Block block;
    if (frame.size() > sizeof block) std::memcpy(&block, frame.data() + limits::kSectionBytes, sizeof block);
    if (!passing.answer && block.object == victim && op_of(frame) == Op::kPull && lost++ == 0) return std::string();
    return frame;
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay);
  const auto busy = small(worker, "busy"), quiet = small(worker, "quiet");
  victim = quiet->map().object;
  std::atomic<bool> over{false};
  std::thread others([&] {
    while (!over) CHECK_OK(push_one(*busy, 1));
  });
  int64_t value = -1;
  CHECK_OK(pull_one(*quiet, &value, in_ms(5000)));
  over = true;
  others.join();
  CHECK_EQ(lost.load(), 2);
}

// Without room to park, what comes too early is refused and sent again and again; what was lost must still be found.
TEST(a_lost_push_is_asked_for_while_later_ones_are_refused) {
  std::atomic<int> lost{0};
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (!passing.answer && op_of(frame) == Op::kPush && lost++ == 0) return std::string();
    return frame;
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay);
  constexpr uint64_t kLarge = 128 << 10;  // 1 MiB in a shard that is not divided
  const auto t = worker.tensor("w", sums({1, kLarge}, Dtype::kInt64));
  std::vector<int64_t> out(kLarge);
  const Array into = array_of(out.data(), {1, kLarge});
  std::vector<Ref<TensorCall>> calls(100);
  for (auto& call : calls) {
    int64_t* const own = worker.take<int64_t>(kLarge);
    std::fill_n(own, kLarge, 1);
    const Array registered = array_of(own, {1, kLarge});
    CHECK_OK(t->start(TensorRequest{.in = &registered}, How::kFuture, &call, soon()));
  }
  for (const auto& call : calls) CHECK_OK(call->wait(in_ms(20'000)));
  CHECK_OK(now(*t, TensorRequest{.out = &into}));
  CHECK(std::all_of(out.begin(), out.end(), [](int64_t x) { return x == 100; }));
}

// The answer comes while the request is being sent a second time, and then the server is lost.
TEST(a_request_that_was_answered_while_it_was_sent_again_ends_with_its_lane) {
  Hosts hosts(1);
  Joined worker(hosts);
  const auto t = worker.tensor("w", sums({1, 512 << 10}, Dtype::kInt64));
  worker.stop_dialing();
  worker.cut_all();
  CHECK(eventually([&] { return !worker.links->lane(0, 1).connected() && !worker.links->lane(0, 0).connected(); }));
  const test::SocketPair pair;
  test::Stream server(pair.theirs);
  worker.links->attach({0, 1}, pair.ours);
  Frame frame;
  CHECK(server.receive(&frame));
  Frame welcome = test::with_body(Op::kHello, encode(Welcome{hosts[0].incarnation(), 1}));
  welcome.header.op |= wire::kAnswer;
  welcome.header.request = frame.header.request;
  CHECK(server.send(welcome.bytes()));
  std::vector<int64_t> g(512 << 10, 1);
  const Array in = array_of(g.data(), {1, 512 << 10});
  Ref<TensorCall> call;
  CHECK_OK(t->start(TensorRequest{.in = &in}, How::kFuture, &call, soon()));
  CHECK(server.receive(&frame));
  Frame answer = test::frame_of(Op::kPush, t->map().object);
  answer.header.op |= wire::kAnswer;
  answer.header.request = frame.header.request;
  answer.parts.push_back({{.status = static_cast<uint8_t>(Code::kOutOfSequence)}, "again", ""});
  CHECK(server.send(answer.bytes()));
  std::byte begun[64];
  CHECK(server.receive(begun, sizeof begun));  // it is on its way again, and there is no room for all of it
  answer.parts[0] = {};
  CHECK(server.send(answer.bytes()));
  usleep(50'000);
  worker.links->lost(0, Status(Code::kServerLost, "gone"));
  CHECK(call->wait(in_ms(5000)).code() != Code::kTimeout);
  worker.allow_dialing();
}

// Two objects whose servers come in opposite order, and requests on both that run out of time at once.
TEST(requests_that_time_out_do_not_wait_for_each_other) {
  Hosts hosts(2);
  Joined worker(hosts);
  const auto filler = small(worker, "filler");  // now the second server has less
  const auto a = worker.tensor("a", sums({kRows, kRow}, Dtype::kInt64));
  const auto more = small(worker, "more", 1000);
  const auto b = worker.tensor("b", sums({kRows, kRow}, Dtype::kInt64));
  CHECK(a->map().runs[0].server != b->map().runs[0].server);
  CHECK(worker.ready());
  std::vector<std::thread> threads;
  for (const auto& t : {a, b, a, b}) {
    threads.emplace_back([t] {
      std::vector<int64_t> g(kRows * kRow, 1), out(kRows * kRow);
      const Array in = array_of(g.data(), {kRows, kRow}), into = array_of(out.data(), {kRows, kRow});
      for (int i = 0; i < 200; ++i) {
        const Status status = now(*t, TensorRequest{.in = &in, .out = &into}, os::now_ns() + 200'000);
        CHECK(status.ok() || status.code() == Code::kTimeout);
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(links_can_be_stopped_at_any_time) {
  for (int round = 0; round < 20; ++round) {
    Hosts hosts(2);
    auto worker = std::make_unique<Joined>(hosts);
    const auto t = worker->tensor("w", sums({kRows, kRow}, Dtype::kInt64));
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        std::vector<int64_t> g(kRows * kRow, 1);
        const Array in = array_of(g.data(), {kRows, kRow});
        for (;;) {
          const Status status = now(*t, TensorRequest{.in = &in, .out = &in});
          if (!status.ok()) {
            CHECK_CODE(status, Code::kClosed);
            return;
          }
          ++done;
        }
      });
    }
    CHECK(eventually([&] { return done > 3; }));
    if (round % 2 == 0) {
      CHECK_OK(worker->engine->close(soon()));
    } else {
      worker->links->stop();
    }
    for (std::thread& th : threads) th.join();
  }
}

}  // namespace windlass::links_test
