// Clients that ask for more than they read, that wait at gates, or for whom there is no thread.
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/test.h"
#include "base/thread.h"
#include "server/host.h"
#include "server/net/peer_test.h"

namespace windlass::overload_test {
namespace {

using test::a_tensor;
using test::after_ms;
using test::bytes_of;
using test::eventually;
using test::Frame;
using test::frame_of;
using test::FramePart;
using test::hello_as;
using test::in_step;
using test::on_whole;
using test::Peer;
using test::values_of;
using wire::Op;

constexpr uint64_t kNoLimit = ~uint64_t{0};
constexpr uint64_t kStaging = uint64_t{16} << 20;
constexpr uint64_t kShards = 64, kShardBytes = uint64_t{256} << 10;  // of the model: 16 MiB
constexpr uint64_t kModelBytes = kShards * kShardBytes;

Hello as_rank(uint32_t rank, uint32_t world_size = 2) {
  Hello hello = hello_as();
  hello.rank = rank;
  hello.world_size = world_size;
  return hello;
}

ObjectSpec a_model(Sync sync) {
  ObjectSpec spec = a_tensor("w", {kModelBytes / sizeof(float)});
  spec.tensor.sync = sync;
  return spec;
}

uint32_t shards_of(const ObjectSpec& spec) {
  uint32_t n = 0;
  CHECK_OK(spec.shards(&n));
  return n;
}

Frame pull_of_all(const Map& map, uint32_t shards, uint64_t clock) {
  Frame f = frame_of(Op::kPull, map.object);
  for (uint32_t s = 0; s < shards; ++s) f.parts.push_back(on_whole(Op::kPull, map, s, 0).parts[0]);
  for (FramePart& p : f.parts) p.part.clock = clock;
  return f;
}

// Says that a worker has closed everything before a clock.
Frame tick_to(uint64_t clock) {
  Frame f = frame_of(Op::kTick);
  f.parts.emplace_back();
  f.parts[0].part.clock = clock;
  f.parts[0].about = FramePart::About{.op = static_cast<uint8_t>(Op::kTick)};
  return f;
}

// Runs functions of the user's: each returns as much as it may.
class LargeResults {
 public:
  LargeResults() : thread_([this] { run(); }) {}
  ~LargeResults() {
    code->close();
    thread_.join();
  }
  const std::shared_ptr<UserCode> code = std::make_shared<UserCode>(60);
  std::atomic<int> ran{0};

 private:
  void run() {
    while (!code->closed()) {
      const UserCode::Ref call = code->next(os::now_ns() + 10'000'000);
      if (call == nullptr) continue;
      call->result.assign(limits::kResultBytesMax, 'x');
      ++ran;
      code->end(call, {});
    }
  }
  std::thread thread_;
};

Frame call_of(const Map& map) {
  return test::about(Op::kCall, map, 0, 0, wire::encode(wire::CallItem{"rules:large", ""}), "", 0, Dtype::kFloat32);
}

struct NoThreads {
  NoThreads() { g_no_threads = true; }
  ~NoThreads() { g_no_threads = false; }
};

}  // namespace

// ---- no thread to be had ------------------------------------------------------------------------------------------

TEST(a_connection_without_a_thread_is_refused_with_a_reason_and_the_others_go_on) {
  Host host(2, kNoLimit);
  Peer first = Peer::greeted(host, "first");
  const Map map = first.made(a_tensor("w", {100}));
  {
    const NoThreads none;
    const test::SocketPair pair;
    CHECK_CODE(host.adopt(pair.theirs, "late", "late"), Code::kResourceExhausted);
    test::Stream late(pair.ours);
    Frame said;
    CHECK(late.receive(&said));
    CHECK_EQ(said.header.request, wire::kHelloRequest);
    CHECK_CODE(said.parts.at(0).status(), Code::kResourceExhausted);
    CHECK(late.ended());
    CHECK_EQ(host.connections(), 1u);
    CHECK_OK(first.call_one(on_whole(Op::kPush, map, 0, 1, bytes_of(std::vector<float>(100, 1)))).status());
  }
  Peer second = Peer::greeted(host, "second");
  CHECK_EQ(values_of<float>(second.call_one(on_whole(Op::kPull, map, 0, 0)).numbers)[0], 1.0f);
  CHECK_OK(host.close(after_ms(20'000)));
}

// A push that is refused uses up its number, so that the next one is not taken for an early one.
TEST(without_a_thread_for_answers_a_request_that_may_wait_is_refused_and_later_ones_are_served) {
  Host host(2, kNoLimit);
  Peer worker = Peer::greeted(host, "k", 1, as_rank(0, 1));
  const Map map = worker.made(a_model({Sync::kSsp, 1, 0}));
  const std::string ones = bytes_of(std::vector<float>(kShardBytes / sizeof(float), 1));
  {
    const NoThreads none;
    CHECK_CODE(worker.call_one(on_whole(Op::kPush, map, 0, 1, ones)).status(), Code::kResourceExhausted);
    CHECK_OK(worker.call_one(on_whole(Op::kPull, map, 0, 0)).status());  // it need not wait
  }
  CHECK_OK(worker.call_one(on_whole(Op::kPush, map, 0, 2, ones)).status());
  CHECK_EQ(values_of<float>(worker.call_one(on_whole(Op::kPull, map, 0, 2)).numbers)[0], 1.0f);
}

TEST(a_crew_without_threads_leaves_the_work_to_its_callers) {
  const NoThreads none;
  Host host(4, kNoLimit);
  g_no_threads = false;
  Peer worker = Peer::greeted(host, "k");
  const ObjectSpec spec = a_model({});
  const Map map = worker.made(spec);
  Frame all = pull_of_all(map, shards_of(spec), 0);
  all.header.work_bytes = kModelBytes;
  CHECK_EQ(worker.call(all).size(), shards_of(spec));
}

// ---- what waits at a gate -----------------------------------------------------------------------------------------

// Rank 1 is a clock ahead and asks for the whole model, again and again, without reading.
TEST(pulls_at_a_gate_are_charged_and_their_answers_are_made_as_they_are_read) {
  Host host(2, kNoLimit, kNoLimit, kStaging);
  Peer slow = Peer::greeted(host, "slow", 1, as_rank(0)), ahead = Peer::greeted(host, "ahead", 2, as_rank(1));
  const ObjectSpec spec = a_model({Sync::kSsp, 0, 0});
  const uint32_t shards = shards_of(spec);
  const Map map = slow.made(spec);
  CHECK_OK(ahead.attach(spec, map));
  CHECK_OK(ahead.call_one(tick_to(1)).status());
  const int64_t before = test::resident_bytes();
  std::vector<uint64_t> pulls;
  std::string rest;  // what the server does not read any more
  for (size_t i = 0; i < 40; ++i) {
    Frame pull = pull_of_all(map, shards, 1);
    ahead.stamp(&pull);
    pulls.push_back(pull.header.request);
    rest += pull.bytes();
  }
  std::thread sending([&] { CHECK(ahead.send(rest, 60'000)); });
  CHECK(eventually([&] { return host.waiting().used() > kStaging / 64; }));
  usleep(50'000);
  CHECK(eventually([&] { return host.answers().used() == 0; }));  // a pull has room until it is known to wait
  CHECK(test::kSanitized || test::resident_bytes() - before < int64_t{16} << 20);

  CHECK_OK(slow.call_one(tick_to(1)).status());  // opens the gate for all of them
  CHECK(eventually([&] { return host.answers().used() != 0; }));
  usleep(50'000);
  CHECK(host.answers().used() <= kStaging / limits::kAnswersShare + kShardBytes);
  CHECK(test::kSanitized || test::resident_bytes() - before < int64_t{24} << 20);

  for (const uint64_t request : pulls) {
    const std::vector<FramePart> parts = ahead.finish(request, shards, 60'000);
    CHECK_EQ(parts.size(), shards);
    for (const FramePart& p : parts) CHECK_OK(p.status());
  }
  sending.join();
  CHECK(eventually([&] { return host.waiting().used() == 0 && host.answers().used() == 0; }));
}

TEST(a_worker_beyond_its_window_at_a_gate_waits_and_one_that_gave_up_makes_room) {
  Host host(2, kNoLimit);
  Peer slow = Peer::greeted(host, "slow", 1, as_rank(0)), ahead = Peer::greeted(host, "ahead", 2, as_rank(1));
  ObjectSpec spec = a_tensor("w", {100});
  spec.tensor.sync = {Sync::kSsp, 0, 0};
  const Map map = slow.made(spec);
  CHECK_OK(ahead.attach(spec, map));
  CHECK_OK(ahead.call_one(tick_to(1)).status());
  const auto pull = [&](uint32_t deadline_ms) {
    Frame f = on_whole(Op::kPull, map, 0, 0);
    f.parts[0].part.clock = 1;
    f.header.deadline_ms = deadline_ms;
    return ahead.start(f);
  };
  std::vector<uint64_t> pulls;
  for (size_t i = 0; i < limits::kWindowMax; ++i) pulls.push_back(pull(300));
  const uint64_t again = pull(0);  // waits until the others are given up
  for (const uint64_t request : pulls) CHECK(ahead.finish(request, 1, 1).empty());
  CHECK(eventually([&] { return host.waiting().used() < 10'000; }));
  CHECK_OK(slow.call_one(tick_to(1)).status());
  CHECK_OK(ahead.finish(again, 1).at(0).status());
}

// ---- pushes that wait for their update ----------------------------------------------------------------------------

// The lowest rank must not wait, since others wait for it. It pushes on and on and closes nothing.
TEST(a_worker_that_others_wait_for_is_refused_when_there_is_no_memory_and_trains_on_once_it_closes) {
  constexpr uint64_t kLeft = uint64_t{2} << 20;  // of memory_bytes_max, besides the model
  Host host(2, kModelBytes + kLeft, kNoLimit, kStaging);
  Peer worker = Peer::greeted(host, "worker", 1, as_rank(0)), other = Peer::greeted(host, "other", 2, as_rank(1));
  ObjectSpec spec = a_model({Sync::kBsp, 0, 0});
  const Map map = worker.made(spec);
  CHECK_OK(other.attach(spec, map));
  const std::string ones = bytes_of(std::vector<float>(kShardBytes / sizeof(float), 1));
  const uint64_t model = host.server().budget().used();
  const uint64_t fit = (kStaging / limits::kStagedShare + kLeft) / kShardBytes;
  CHECK_EQ(model, kModelBytes);
  const int64_t before = test::resident_bytes();
  std::vector<uint64_t> pushes;
  for (uint64_t n = 1; n <= 2 * fit; ++n) pushes.push_back(worker.start(on_whole(Op::kPush, map, 0, n, ones)));
  for (uint64_t n = fit + 1; n <= 2 * fit; ++n)
    CHECK_CODE(worker.finish(pushes[n - 1], 1, 20'000).at(0).status(), Code::kResourceExhausted);
  CHECK_EQ(host.server().staging().used(), kStaging / limits::kStagedShare);
  CHECK_EQ(host.server().budget().used(), kModelBytes + kLeft);
  CHECK(test::kSanitized || test::resident_bytes() - before < int64_t{24} << 20);

  CHECK_OK(worker.call_one(tick_to(1)).status());
  CHECK_OK(other.call_one(tick_to(1)).status());
  for (uint64_t n = 1; n <= fit; ++n) CHECK_OK(worker.finish(pushes[n - 1], 1, 20'000).at(0).status());
  CHECK_EQ(host.server().staging().used(), 0u);
  CHECK_EQ(host.server().budget().used(), kModelBytes);
}

// ---- blocks that come byte by byte --------------------------------------------------------------------------------

TEST(blocks_whose_clients_stop_within_them_are_limited_in_memory) {
  constexpr int kClients = 64;
  constexpr size_t kBytes = size_t{1000} << 10;
  Host host(2, kNoLimit, kNoLimit, kStaging);
  std::vector<Peer> clients;
  clients.push_back(Peer::greeted(host, "first"));
  ObjectSpec spec = a_tensor("w", {64 * kBytes / sizeof(float)});
  const Map map = clients[0].made(spec);
  while (clients.size() < kClients) clients.push_back(Peer::greeted(host, "client " + std::to_string(clients.size())));
  const int64_t before = test::resident_bytes();
  std::vector<std::thread> sending;
  for (Peer& client : clients)
    sending.emplace_back([&] {
      Frame push = on_whole(Op::kPush, map, 0, 1, std::string(kBytes, '\0'));
      client.stamp(&push);
      const std::string bytes = push.bytes();
      (void)client.send(bytes.substr(0, bytes.size() - 100), 1000);
    });
  for (std::thread& t : sending) t.join();
  CHECK(test::kSanitized || test::resident_bytes() - before < int64_t{24} << 20);
}

// ---- answers to who does not read ---------------------------------------------------------------------------------

// Readers take all the room there is. A worker of any rank still gets its answers, one after the other.
TEST(answers_to_clients_that_do_not_read_are_limited_and_workers_go_on) {
  constexpr int kReaders = 24;
  Host host(2, kNoLimit, kNoLimit, kStaging);
  Peer worker = Peer::greeted(host, "worker", 1, as_rank(1));
  const ObjectSpec spec = a_model({});
  const uint32_t shards = shards_of(spec);
  const Map map = worker.made(spec);
  const int64_t before = test::resident_bytes();
  std::vector<Peer> readers;
  for (int i = 0; i < kReaders; ++i) {
    Hello hello = as_rank(0, 0);
    readers.push_back(Peer::greeted(host, "reader " + std::to_string(i), 0, hello));
    for (int n = 0; n < 4; ++n) {
      Frame all = pull_of_all(map, shards, 0);
      all.header.dtype_out = static_cast<uint8_t>(n % 2 == 0 ? Dtype::kFloat32 : Dtype::kBfloat16);
      readers.back().start(all);
    }
  }
  CHECK(eventually([&] { return host.answers().contended(); }));
  CHECK(host.answers().used() <= kStaging / limits::kAnswersShare + 2 * kShardBytes);
  for (uint64_t n = 1; n <= 5; ++n) {
    for (const FramePart& p : worker.call(pull_of_all(map, shards, 0))) CHECK_OK(p.status());
  }
  CHECK(test::kSanitized || test::resident_bytes() - before < int64_t{64} << 20);
  CHECK_OK(host.close(after_ms(20'000)));
  CHECK_EQ(host.answers().used(), 0u);
}

// Of eight that call a function, none reads its result at first.
TEST(results_of_functions_are_made_as_they_are_read) {
  constexpr int kClients = 8;
  LargeResults functions;
  Host host(2, kNoLimit, kNoLimit, kStaging);
  host.set_user_code(functions.code);
  Peer maker = Peer::greeted(host, "maker");
  const Map map = maker.made(a_tensor("w", {1000}));
  std::vector<Peer> clients;
  for (int i = 0; i < kClients; ++i)
    clients.push_back(Peer::greeted(host, "reader " + std::to_string(i), 0, as_rank(0, 0)));
  const int64_t before = test::resident_bytes();
  std::vector<uint64_t> calls;
  for (Peer& client : clients) calls.push_back(client.start(call_of(map)));
  CHECK(eventually([&] { return functions.ran.load() == 1; }));
  usleep(200'000);
  CHECK_EQ(functions.ran.load(), 1);
  CHECK(host.results().used() <= kResultMemoryBytes);
  CHECK(test::kSanitized || test::resident_bytes() - before < int64_t{80} << 20);
  std::vector<std::thread> reading;
  for (size_t i = 0; i < clients.size(); ++i)
    reading.emplace_back([&, i] {
      const std::vector<FramePart> said = clients[i].finish(calls[i], 1, 60'000);
      CHECK_OK(said.at(0).status());
      CHECK_EQ(said.at(0).items.size(), limits::kResultBytesMax);
    });
  for (std::thread& t : reading) t.join();
  CHECK_EQ(functions.ran.load(), kClients);
  CHECK(eventually([&] { return host.results().used() == 0; }));
}

// A call that comes before a push of its session waits in its shard, and its function runs when its result can be sent.
TEST(a_call_that_waited_runs_when_its_result_can_be_sent) {
  LargeResults functions;
  Host host(2, kNoLimit);
  host.set_user_code(functions.code);
  Peer client = Peer::greeted(host, "client"), other = Peer::greeted(host, "other");
  const Map map = client.made(a_tensor("w", {1000}));
  Frame early = call_of(map);
  early.parts[0].part.sequence = 1;
  std::vector<uint64_t> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(client.start(early));
  usleep(50'000);
  CHECK_EQ(functions.ran.load(), 0);
  const uint64_t push = client.start(on_whole(Op::kPush, map, 0, 1, bytes_of(std::vector<float>(1000, 1))));
  CHECK(eventually([&] { return functions.ran.load() == 1; }));
  usleep(100'000);
  CHECK_EQ(functions.ran.load(), 1);
  CHECK_OK(other.call_one(on_whole(Op::kPull, map, 0, 0)).status());
  CHECK_OK(client.finish(push, 1).at(0).status());
  for (const uint64_t call : calls)
    CHECK_EQ(client.finish(call, 1, 60'000).at(0).items.size(), limits::kResultBytesMax);
  CHECK_EQ(functions.ran.load(), 4);
}

// ---- who stops within a frame -------------------------------------------------------------------------------------

TEST(a_client_on_a_unix_socket_that_stops_within_a_frame_is_closed_when_its_time_is_up) {
  Host host(1, kNoLimit);
  for (const size_t sent : {size_t{30}, size_t{100}, size_t{5000}}) {
    const test::SocketPair pair;
    CHECK_OK(host.adopt(pair.theirs, "test", "k"));
    timeval stall{};
    socklen_t bytes = sizeof stall;
    CHECK_EQ(getsockopt(pair.theirs, SOL_SOCKET, SO_RCVTIMEO, &stall, &bytes), 0);
    CHECK_EQ(stall.tv_sec, limits::kStallMs / 1000);
    stall = {0, 200'000};  // instead: the test need not take so long
    CHECK_EQ(setsockopt(pair.theirs, SOL_SOCKET, SO_RCVTIMEO, &stall, sizeof stall), 0);
    test::Stream peer(pair.ours);
    CHECK(peer.quiet(500));  // between frames it may take its time
    std::string frame = test::with_body(Op::kHello, std::string(10'000, 'x')).bytes();
    test::change_header(&frame, [](wire::Header* h) { h->request = 1; });
    CHECK(peer.send(frame.substr(0, sent)));
    CHECK(peer.ended(10'000));
  }
}

}  // namespace windlass::overload_test
