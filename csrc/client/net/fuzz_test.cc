// S6, from the other side: whatever a server answers, a client neither crashes nor hangs nor writes outside the
// caller's arrays. A relay stands between a client and an honest host, and mutates the answers.
#include <atomic>
#include <memory>

#include "client/net/relay_test.h"
#include "server/net/mutate_test.h"

namespace windlass::fuzz_test {
namespace {

using test::array_of;
using test::eventually;
using test::Frame;
using test::FramePart;
using test::Hosts;
using test::in_ms;
using test::Joined;
using test::Mutator;
using test::op_of;
using test::parsed;
using test::Relay;
using test::row_sums;
using test::soon;
using test::sums;
using wire::Op;

// An array of the caller's between two walls.
template <class T>
class Walled {
 public:
  explicit Walled(size_t n) : n_(n), all_(n + 2 * kWall, T(77)) {}
  T* data() { return all_.data() + kWall; }
  bool whole() const {
    for (size_t i = 0; i < kWall; ++i) {
      if (all_[i] != T(77) || all_[kWall + n_ + i] != T(77)) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kWall = 4096;
  const size_t n_;
  std::vector<T> all_;
};

class Victim {
 public:
  static constexpr uint64_t kRows = 30, kRow = 4000;  // float32: 8 shards, some of them on the bulk lane
  static constexpr uint32_t kDim = 6;

  Victim(Hosts& hosts, Relay& relay, uint64_t seed) : random_(seed), worker_(hosts, &relay, seed % 2 == 0 ? 1 : 0) {}

  bool open() {
    TensorSpec alike = sums({kRows, kRow});
    alike.like = "w";
    return TensorClient::open(worker_.session, "w", sums({kRows, kRow}), &tensor_, in_ms(300)).ok() &&
           TensorClient::open(worker_.session, "v", alike, &alike_, in_ms(300)).ok() &&
           TableClient::open(worker_.session, "t", row_sums(kDim), &table_, in_ms(300)).ok();
  }
  // False when it has to start anew: its server is lost to it, or has lied about what it has done.
  bool request() {
    const int64_t deadline = in_ms(200);
    const Status status = one(deadline);
    const int64_t late = os::now_ns() - deadline;
    if (late > 1'000'000'000) test::fail(__FILE__, __LINE__, "a request ended " + std::to_string(late) + " ns late");
    timeouts_ = status.code() == Code::kTimeout ? timeouts_ + 1 : 0;
    return timeouts_ < 3 && !lost();
  }
  bool lost() {
    const Status ready = worker_.links->wait_ready(os::now_ns());
    return !ready.ok() && ready.code() != Code::kTimeout;
  }

 private:
  Status one(int64_t deadline) {
    if (random_.below(40) == 0) {  // seldom: who believes in more objects than come waits for them
      std::vector<Placed> all;
      uint64_t x = 0;
      WL_RETURN_IF_ERROR(worker_.session->list(deadline, &all));
      return worker_.session->fingerprint(deadline, &x);
    }
    switch (random_.below(9)) {
      case 0: return dense(true, false, deadline);
      case 1: return dense(false, true, deadline);
      case 2: return dense(true, true, deadline);
      case 3:
      case 4: return keys(deadline);
      case 5: return planes(deadline);
      case 6: {
        const auto op = static_cast<VectorOp>(1 + random_.below(kVectorOpMax));
        uint64_t x = 0;
        return tensor_->vector(op, has_other(op) ? alike_.get() : nullptr, 0, deadline, &x);
      }
      case 7: {
        uint64_t x = 0;
        return random_.below(2) == 0 ? table_->rows(deadline, &x) : tensor_->fingerprint(deadline, &x);
      }
      default: {
        TableClient::Cursor cursor;
        std::vector<uint64_t> found;
        std::vector<float> weights;
        cursor.shard = 250;
        return table_->scan(&cursor, 50, deadline, &found, &weights);
      }
    }
  }
  Status dense(bool pushes, bool pulls, int64_t deadline) {
    const bool all = random_.below(2) == 0;
    const uint64_t n = all ? kRows : 1 + random_.below(6);
    std::vector<int64_t> list(n);
    for (int64_t& row : list) row = static_cast<int64_t>(random_.below(kRows));
    std::vector<float> g(n * kRow, 1.0f);
    Walled<float> out(n * kRow);
    const Array in = array_of(g.data(), {n, kRow}), into = array_of(out.data(), {n, kRow});
    TensorRequest request;
    if (pushes) request.in = &in;
    if (pulls) request.out = &into;
    if (!all) request.rows = {Selection::kList, 0, 0, list.data(), n};
    Versions versions(tensor_->cut().shards, 3);
    if (!pushes && random_.below(2) == 0) request.versioned = true, request.newer_than = &versions;
    Ref<TensorCall> call;
    WL_RETURN_IF_ERROR(tensor_->start(request, How::kWait, &call, deadline));
    const Status status = call->finish(deadline);
    CHECK(out.whole());
    return status;
  }
  Status planes(int64_t deadline) {
    Walled<float> weights(kRows * kRow);
    std::vector<uint64_t> counts(tensor_->cut().shards);
    const PlaneArrays arrays{{reinterpret_cast<std::byte*>(weights.data())}, counts.data()};
    const Status status = random_.below(2) == 0 ? tensor_->put(arrays, deadline) : tensor_->snapshot(arrays, deadline);
    CHECK(weights.whole());
    return status;
  }
  Status keys(int64_t deadline) {
    std::vector<uint64_t> some(1 + random_.below(30));
    for (uint64_t& k : some) k = random_.below(1000);
    std::vector<float> g(some.size() * kDim, 1.0f);
    Walled<float> out(some.size() * kDim);
    const Array in = array_of(g.data(), {some.size(), kDim}), into = array_of(out.data(), {some.size(), kDim});
    TableRequest request{.keys = test::keys_of(some)};
    const uint64_t dice = random_.below(4);
    if (dice < 2) request.in = &in;
    if (dice == 1 || dice == 2) request.out = &into;
    if (dice == 3) request.erase = true;
    Ref<TableCall> call;
    WL_RETURN_IF_ERROR(table_->start(request, How::kWait, &call, deadline));
    const Status status = call->finish(deadline);
    CHECK(out.whole());
    return status;
  }

  test::Random random_;
  Joined worker_;
  int timeouts_ = 0;
  std::shared_ptr<TensorClient> tensor_, alike_;
  std::shared_ptr<TableClient> table_;
};

}  // namespace

TEST(a_client_survives_mutated_answers) {
  const uint64_t rounds = (test::accurate() ? 200'000 : 2'000) / test::kSlowness;
  Mutator mutator(test::seed());
  std::atomic<uint64_t> mutated{0};
  std::atomic<bool> kind{false};
  Relay relay([&](Relay::Passing& passing, std::string frame) -> std::string {
    test::Random& r = mutator.random;
    if (kind || !passing.answer || r.below(op_of(frame) == Op::kHello ? 50 : 2) != 0) return frame;
    std::string wrong;
    for (uint64_t n = 1 + r.below(2); n != 0; --n) wrong += mutator.mutated(parsed(frame));
    ++mutated;
    if (r.below(10) == 0) wrong.resize(r.below(wrong.size()));
    passing.cut = r.below(100) != 0;  // else the client is left to itself
    return r.below(100) == 0 ? wrong : wrong + frame;
  });
  Hosts hosts(1);
  for (uint64_t i = 0; mutated < rounds; ++i) {
    Victim victim(hosts, relay, test::seed() * 1000 + i);
    bool going = false;
    for (int tries = 0; tries < 20 && !going && !victim.lost(); ++tries) going = victim.open();
    for (int n = 0; going && n < 500 && mutated < rounds; ++n) going = victim.request();
  }
  // The host was never harmed by its clients' troubles.
  kind = true;
  Joined witness(hosts, &relay);
  std::shared_ptr<TensorClient> t;
  CHECK_OK(TensorClient::open(witness.session, "w", sums({Victim::kRows, Victim::kRow}), &t, soon()));
  uint64_t x = 0;
  CHECK_OK(t->fingerprint(soon(), &x));
}

// What a server says of a shard that has not changed has no numbers; if it has, they go nowhere.
TEST(numbers_beside_not_changed_are_not_believed) {
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (!passing.answer || op_of(frame) != Op::kPull) return frame;
    Frame lie = parsed(frame);
    for (FramePart& part : lie.parts) {
      part.part.flags |= wire::kUnchanged;
      part.numbers.resize(64);
    }
    return lie.bytes();
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay);
  const auto t = worker.tensor("w", sums({4 << 20}));  // 16 MiB: shards of 256 KiB
  Walled<float> out(4 << 20);
  const Array into = array_of(out.data(), {4 << 20});
  Versions versions;
  const TensorRequest request{.out = &into, .versioned = true, .newer_than = &versions};
  Ref<TensorCall> call;
  CHECK_OK(t->start(request, How::kWait, &call, in_ms(500)));
  (void)call->finish(in_ms(500));
  CHECK(out.whole());
  for (size_t i = 0; i < (4 << 20); ++i) CHECK(out.data()[i] == 77.0f);
}

TEST(a_list_with_maps_that_make_no_sense_is_refused) {
  const std::vector<std::function<void(Map*, ObjectSpec*)>> kLies = {
      [](Map* map, ObjectSpec*) { map->runs.clear(); },
      [](Map* map, ObjectSpec*) { map->runs[0].server = 7; },
      [](Map* map, ObjectSpec*) { map->runs[0].server = ~0u; },
      [](Map* map, ObjectSpec*) { map->runs[0].first = 1; },
      [](Map* map, ObjectSpec*) { map->runs.push_back({~0u, 0, 1}); },
      [](Map*, ObjectSpec* spec) { spec->tensor.shape = {uint64_t{1} << 32, uint64_t{1} << 31}; },
      [](Map*, ObjectSpec* spec) { spec->tensor.shape = {uint64_t{1} << 50}; },
      [](Map*, ObjectSpec* spec) { spec->is_table = true, spec->table.dim = 0; },
  };
  for (const auto& lie : kLies) {
    Relay relay([&](Relay::Passing& passing, std::string frame) {
      if (!passing.answer || op_of(frame) != Op::kList) return frame;
      Frame wrong = parsed(frame);
      wire::Reader reader(wrong.parts[0].items);
      Map map;
      ObjectSpec spec;
      CHECK_OK(decode(&reader, &map));
      CHECK_OK(decode(&reader, &spec));
      lie(&map, &spec);
      wire::Writer writer;
      encode(map, &writer);
      encode(spec, &writer);
      wrong.parts[0].items = writer.take();
      return wrong.bytes();
    });
    Hosts hosts(1);
    Joined worker(hosts, &relay);
    worker.tensor("w", sums({4}));
    uint64_t x = 0;
    CHECK(!worker.session->fingerprint(in_ms(500), &x).ok());
  }
}

// A list that was answered stays answered, whatever parts come after it.
TEST(parts_that_come_after_the_last_are_passed_over) {
  Hosts hosts(1);
  Joined worker(hosts);
  CHECK(worker.ready());
  worker.stop_dialing();
  worker.cut_all();
  CHECK(eventually([&] { return !worker.links->lane(0, 0).connected(); }));
  const test::SocketPair pair;
  test::Stream server(pair.theirs);
  worker.links->attach({0, 0}, pair.ours);
  Frame frame;
  CHECK(server.receive(&frame));
  Frame welcome = test::with_body(Op::kHello, encode(Welcome{hosts[0].incarnation(), 1}));
  welcome.header.op |= wire::kAnswer;
  welcome.header.request = frame.header.request;
  CHECK(server.send(welcome.bytes()));
  for (int round = 0; round < 3; ++round) {
    std::thread asks([&] {
      std::vector<Placed> all;
      CHECK_OK(worker.session->list(soon(), &all));
    });
    CHECK(server.receive(&frame));
    Frame answer = test::frame_of(Op::kList);
    answer.header.op |= wire::kAnswer;
    answer.header.request = frame.header.request;
    ObjectSpec spec = test::a_tensor("w", {4});
    Map map;
    map.object = 1;
    map.runs = {{0, 0, 1}};
    wire::Writer writer;
    encode(map, &writer);
    encode(spec, &writer);
    const std::string body = writer.take();
    answer.parts = {{{.value = 1}, body, ""}, {{.shard = 1, .value = 2}, body, ""}};
    const std::string bytes = answer.bytes();
    const size_t first = 128 + wire::padded(body.size());
    CHECK(server.send(bytes.substr(0, first)));
    asks.join();  // it has its answer, and nobody waits any more
    CHECK(server.send(bytes.substr(first)));
    usleep(20'000);
  }
  worker.allow_dialing();
}

// S5 for a client: what is only claimed costs nothing.
TEST(claimed_lengths_of_answers_take_no_memory) {
  std::atomic<uint32_t> items{0};
  std::atomic<uint64_t> numbers{0};
  Relay relay([&](Relay::Passing& passing, std::string frame) {
    if (!passing.answer || items + numbers == 0) return frame;
    if (op_of(frame) != Op::kPull) return std::string();  // nothing more comes
    Frame lie = parsed(frame);
    lie.parts.resize(1);
    lie.parts[0].items.clear();
    lie.parts[0].numbers.clear();
    std::string bytes = lie.bytes();
    uint64_t bytes_behind = 0;
    test::change_block(&bytes, [&](wire::Block* b) {
      b->body_bytes = items;
      b->numbers_bytes = static_cast<uint32_t>(numbers);
      bytes_behind = b->bytes();
    });
    test::change_header(&bytes, [&](wire::Header* h) { h->length = limits::kSectionBytes + bytes_behind; });
    return bytes;
  });
  Hosts hosts(1);
  Joined worker(hosts, &relay);
  const auto t = worker.tensor("w", sums({100}));
  std::vector<float> out(100);
  const Array into = array_of(out.data(), {100});
  for (const bool of_items : {false, true}) {
    CHECK_OK(test::now(*t, TensorRequest{.out = &into}));
    const int64_t before = test::resident_bytes();
    items = of_items ? limits::kItemsBytesMax : 0;
    numbers = of_items ? 0 : limits::kNumbersBytesMax;
    CHECK_CODE(test::now(*t, TensorRequest{.out = &into}, in_ms(200)), Code::kTimeout);
    CHECK(test::kSanitized || test::resident_bytes() - before <= 1 << 20);
    items = 0;
    numbers = 0;
    worker.cut_all();
  }
}

}  // namespace windlass::fuzz_test
