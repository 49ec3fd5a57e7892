// Clients and a server made of the session's own pieces (Outbox, Record, Parked), joined by a channel that drops,
// doubles, reorders and cuts, and an oracle that sees everything. Deterministic: a seed names a run.
//
//     client:  Outbox per lane | lane 0 |  up: requests, asks      |  shard: Records, Parked
//     (two of  numbers a shard | ------ |  -----------------------> |  admits, applies, parks
//      them)   window          | lane 1 |  down: answers, held     |  keeps what cannot be made again
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "base/test.h"
#include "session/outbox.h"
#include "session/parked.h"
#include "session/record.h"

namespace windlass::exactly_once_test {
namespace {

// What may be wrong with the code under test: the oracle must notice each.
enum class Flaw {
  kNone,
  kAlwaysApplies,    // whatever the sequence is
  kForgetsRefusals,  // a repeat of a refused push is acknowledged
  kReadsTooEarly,    // a pull does not wait for its session's pushes
  kNeverHears,       // a client does not send again what the server does not hold
  kHoldsEverything,  // a server says that it holds whatever it is asked about
  kAsksWhenQuiet,    // a client does not ask while it has something to send, which may be the same again and again
};

struct Options {
  Flaw flaw = Flaw::kNone;
  size_t window = 32;        // requests without an answer, per client
  size_t room = ~size_t{0};  // for parked requests, on the whole server
  uint64_t bad = 10;         // how often a message is dropped, doubled or overtaken, in percent each
  uint64_t requests = 150;   // per client
};

constexpr uint32_t kClients = 2, kShards = 3;
constexpr size_t kLanes = limits::kLanes;

enum class Kind { kPush, kEmpty, kPull };

struct Part {
  uint32_t shard;
  uint64_t sequence;
  int64_t value;
  bool answered = false;
};

struct Request {
  Kind kind;
  std::vector<Part> parts;
};

struct Up {
  uint64_t request;
  bool asks;
  Request what;
  std::vector<uint64_t> asked;
};

struct AnswerPart {
  uint32_t shard;
  Status status;
  uint64_t sequence;
  int64_t total;  // a pull: the sum of what the session had applied
};

struct Down {
  uint64_t request;
  bool asks;
  std::vector<AnswerPart> parts;
  std::vector<uint64_t> held;
};

struct Connection {
  uint32_t client;
  size_t lane;
  bool alive = true;  // the client still has it
  std::deque<Up> up;
  std::deque<Down> down;
  std::vector<uint64_t> parked;  // requests with a parked part
};

bool refuses(int64_t value) { return value % 5 == 3; }

// What really happened, and what should have.
class Oracle {
 public:
  void pushed(uint32_t client, uint32_t shard, uint64_t sequence, int64_t value) {
    std::vector<int64_t>& all = pushed_[{client, shard}];
    all.push_back(value);
    if (all.size() != sequence) complain();
  }
  void applied(uint32_t client, uint32_t shard, uint64_t sequence, int64_t value, const Status& status) {
    std::vector<Status>& all = outcome_[{client, shard}];
    const std::vector<int64_t>& sent = pushed_[{client, shard}];
    if (sequence != all.size() + 1 || sequence > sent.size() || sent[sequence - 1] != value) return complain();
    all.push_back(status);
  }
  // The client takes this for the answer of a push.
  void answered(uint32_t client, uint32_t shard, uint64_t sequence, const Status& status) {
    const std::vector<Status>& all = outcome_[{client, shard}];
    if (sequence > all.size() || all[sequence - 1].code() != status.code() ||
        all[sequence - 1].message() != status.message())
      complain();
    refusals_ += !status.ok();
  }
  // And this for that of a pull.
  void saw(uint32_t client, uint32_t shard, uint64_t wanted, const AnswerPart& answer) {
    const std::vector<int64_t>& sent = pushed_[{client, shard}];
    if (answer.sequence < wanted || answer.sequence > sent.size()) return complain();
    int64_t total = 0;
    for (uint64_t i = 0; i < answer.sequence; ++i) total += refuses(sent[i]) ? 0 : sent[i];
    if (total != answer.total) complain();
  }
  void everything_was_applied() {
    for (const auto& [where, sent] : pushed_) {
      if (outcome_[where].size() != sent.size()) complain();
    }
  }
  void complain() { ++complaints_; }
  uint64_t complaints() const { return complaints_; }
  uint64_t refusals() const { return refusals_; }

 private:
  using Where = std::pair<uint32_t, uint32_t>;
  std::map<Where, std::vector<int64_t>> pushed_;
  std::map<Where, std::vector<Status>> outcome_;
  uint64_t complaints_ = 0, refusals_ = 0;
};

class Server {
 public:
  Server(const Options& options, Oracle* oracle) : options_(options), oracle_(*oracle) {}

  void receive(const std::shared_ptr<Connection>& from, const Up& message) {
    if (message.asks) {
      Down answer{message.request, true, {}, {}};
      for (const uint64_t id : message.asked) {
        const bool held = std::find(from->parked.begin(), from->parked.end(), id) != from->parked.end();
        if (held || options_.flaw == Flaw::kHoldsEverything) answer.held.push_back(id);
      }
      from->down.push_back(answer);
      return;
    }
    for (const Part& part : message.what.parts) serve(from, message.request, message.what.kind, part);
  }
  void ended(const std::shared_ptr<Connection>& connection) {
    for (Shard& shard : shards_) {
      shard.parked.drop_if([&](const Waiting& w) { return static_cast<const Order&>(w).from == connection; });
    }
  }
  bool nothing_parked() const {
    for (const Shard& shard : shards_) {
      if (!shard.parked.empty()) return false;
    }
    return parked_ == 0;
  }
  void check_limits() {
    for (Shard& shard : shards_) {
      size_t n = 0;
      shard.parked.each([&](const Waiting&) { ++n; });
      if (n > limits::kParkedMax) oracle_.complain();
      most_parked = std::max(most_parked, n);
      for (uint32_t client = 0; client < kClients; ++client) {
        const Record* record = shard.records.find(client);
        if (record != nullptr && record->kept != nullptr && record->kept->size() > limits::kKeptAnswersMax)
          oracle_.complain();
      }
    }
  }
  size_t most_parked = 0, out_of_sequence = 0, repeats = 0;

 private:
  struct Order final : Waiting {
    Order(Server* server, std::shared_ptr<Connection> from, uint64_t request, Kind kind, const Part& part)
        : after(kind == Kind::kPull ? part.sequence : part.sequence - 1),
          server(*server),
          from(std::move(from)),
          request(request),
          kind(kind),
          part(part) {
      ++this->server.parked_;
      this->from->parked.push_back(request);
    }
    ~Order() override {
      --server.parked_;
      from->parked.erase(std::find(from->parked.begin(), from->parked.end(), request));
    }
    bool ready(windlass::Shard&) override { return false; }  // this server looks for itself
    bool run(windlass::Shard&) override { return true; }
    const uint64_t after;
    Server& server;
    const std::shared_ptr<Connection> from;
    const uint64_t request;
    const Kind kind;
    const Part part;
  };
  struct Shard {
    Records records;
    Parked parked;
    int64_t total[kClients] = {};
  };

  void serve(const std::shared_ptr<Connection>& from, uint64_t request, Kind kind, const Part& part) {
    Shard& shard = shards_[part.shard];
    AnswerPart answer{part.shard, {}, 0, 0};
    if (!run(shard, from->client, kind, part, &answer)) {
      std::unique_ptr<Waiting> order = std::make_unique<Order>(this, from, request, kind, part);
      if (parked_ <= options_.room && shard.parked.park(&order)) return;
      ++out_of_sequence;
      answer.status = Status(Code::kOutOfSequence, "no room");
    }
    from->down.push_back({request, false, {answer}, {}});
    for (;;) {
      const uint64_t sequence = shard.records.of(from->client, 1).sequence;
      const std::unique_ptr<Waiting> freed = shard.parked.take_if([&](const Waiting& w) {
        const auto& order = static_cast<const Order&>(w);
        return order.from->client == from->client && order.after <= sequence;
      });
      if (freed == nullptr) break;
      const Order& order = static_cast<const Order&>(*freed);
      AnswerPart late{part.shard, {}, 0, 0};
      if (!run(shard, from->client, order.kind, order.part, &late)) oracle_.complain();
      order.from->down.push_back({order.request, false, {late}, {}});
    }
  }

  // False: it came too early.
  bool run(Shard& shard, uint32_t client, Kind kind, const Part& part, AnswerPart* answer) {
    Record& record = shard.records.of(client, 1);
    if (kind == Kind::kPull) {
      if (part.sequence > record.sequence && options_.flaw != Flaw::kReadsTooEarly) return false;
      answer->total = shard.total[client];
    } else {
      const Admission admission =
          options_.flaw == Flaw::kAlwaysApplies ? Admission::kApply : record.admit(part.sequence);
      if (admission == Admission::kGap) return false;
      if (admission == Admission::kRepeat) {
        ++repeats;
        if (const Record::Kept* kept = record.find(part.sequence); kept != nullptr) answer->status = kept->status;
      } else {
        record.sequence = part.sequence;
        if (kind == Kind::kPush && refuses(part.value)) {
          answer->status = Status(Code::kNonFinite, "refusal number " + std::to_string(++refusals_));
          if (options_.flaw != Flaw::kForgetsRefusals) record.keep(part.sequence, answer->status, 0);
        } else {
          shard.total[client] += part.value;
        }
        oracle_.applied(client, part.shard, part.sequence, part.value, answer->status);
      }
    }
    answer->sequence = record.sequence;
    return true;
  }

  const Options options_;
  Oracle& oracle_;
  Shard shards_[kShards];
  size_t parked_ = 0;
  uint64_t refusals_ = 0;
};

class Client {
 public:
  Client(const Options& options, uint32_t number, Oracle* oracle)
      : options_(options), number_(number), oracle_(*oracle), left_(options.requests) {}

  void make(test::Random* random) {
    if (left_ == 0 || under_way() >= options_.window) return;
    --left_;
    const uint64_t dice = random->below(10);
    Request request{dice < 6 ? Kind::kPush : dice < 7 ? Kind::kEmpty : Kind::kPull, {}};
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      if (random->below(2) == 0 && !(request.parts.empty() && shard + 1 == kShards)) continue;
      if (request.kind == Kind::kPull) {
        request.parts.push_back({shard, sent_[shard], 0});
        continue;
      }
      const int64_t value = request.kind == Kind::kEmpty ? 0 : static_cast<int64_t>(random->below(1000));
      request.parts.push_back({shard, ++sent_[shard], value});
      oracle_.pushed(number_, shard, sent_[shard], value);
    }
    lane_[random->below(kLanes)].outbox.add(next_id_++, std::move(request));
  }
  void send(size_t lane) {
    Lane& l = lane_[lane];
    if (l.connection == nullptr) return;
    const Request* request = l.outbox.next();
    if (request == nullptr) return;
    Up message{0, false, {request->kind, {}}, {}};
    l.outbox.each([&](uint64_t id, const Request& r) {
      if (&r == request) message.request = id;
    });
    for (const Part& part : request->parts) {
      if (!part.answered) message.what.parts.push_back(part);
    }
    l.connection->up.push_back(std::move(message));
  }
  void ask(size_t lane) {
    Lane& l = lane_[lane];
    if (l.connection == nullptr || !l.outbox.has_sent()) return;
    if (options_.flaw == Flaw::kAsksWhenQuiet && l.outbox.has_queued()) return;
    l.asked = l.outbox.to_ask(limits::kAskedMax);
    l.asking = next_id_++;
    l.connection->up.push_back({l.asking, true, {}, l.asked});
  }
  void receive(size_t lane, const Down& answer) {
    Lane& l = lane_[lane];
    if (answer.asks) {
      if (answer.request == l.asking && options_.flaw != Flaw::kNeverHears) l.outbox.heard(l.asked, answer.held);
      if (answer.request == l.asking) l.asked.clear(), l.asking = 0;
      return;
    }
    Request* const request = l.outbox.find(answer.request);
    if (request == nullptr) return;
    size_t unanswered = 0;
    for (Part& part : request->parts) {
      for (const AnswerPart& a : answer.parts) {
        if (a.shard == part.shard && !part.answered) take(&l, answer.request, request->kind, &part, a);
      }
      unanswered += !part.answered;
    }
    if (unanswered == 0) l.outbox.answered(answer.request);
  }
  void connect(size_t lane, std::shared_ptr<Connection> connection) { lane_[lane].connection = std::move(connection); }
  void disconnect(size_t lane) {
    Lane& l = lane_[lane];
    l.connection->alive = false;
    l.connection = nullptr;
    l.outbox.lost();
    l.asked.clear();
    l.asking = 0;
  }
  const std::shared_ptr<Connection>& connection(size_t lane) const { return lane_[lane].connection; }
  size_t under_way() const { return lane_[0].outbox.size() + lane_[1].outbox.size(); }
  bool done() const { return left_ == 0 && under_way() == 0; }

 private:
  struct Lane {
    Outbox<Request> outbox;
    std::shared_ptr<Connection> connection;
    std::vector<uint64_t> asked;
    uint64_t asking = 0;
  };
  void take(Lane* l, uint64_t id, Kind kind, Part* part, const AnswerPart& answer) {
    if (answer.status.code() == Code::kOutOfSequence) return l->outbox.again(id);
    part->answered = true;
    if (kind == Kind::kPull) {
      oracle_.saw(number_, part->shard, part->sequence, answer);
    } else {
      oracle_.answered(number_, part->shard, part->sequence, answer.status);
    }
  }

  const Options options_;
  const uint32_t number_;
  Oracle& oracle_;
  uint64_t left_, next_id_ = 2;
  uint64_t sent_[kShards] = {};
  Lane lane_[kLanes];
};

class World {
 public:
  World(const Options& options, uint64_t seed) : options_(options), random_(seed), server_(options, &oracle_) {
    for (uint32_t c = 0; c < kClients; ++c) clients_.push_back(std::make_unique<Client>(options, c, &oracle_));
  }

  // True when everything was answered and nothing was wrong.
  bool run() {
    for (int step = 0; step < 6000; ++step) harm();
    for (int round = 0; round < 3000 && !done(); ++round) kindness();
    if (!done()) return false;
    oracle_.everything_was_applied();
    if (!server_.nothing_parked()) oracle_.complain();
    return oracle_.complaints() == 0;
  }
  const Server& server() const { return server_; }
  const Oracle& oracle() const { return oracle_; }
  uint64_t dropped = 0, doubled = 0, overtaken = 0, cut = 0, late = 0;

 private:
  bool done() const {
    for (const auto& client : clients_) {
      if (!client->done()) return false;
    }
    return connections_.size() <= kClients * kLanes;  // old ones have ended
  }
  bool happens(uint64_t percent) { return random_.below(100) < percent; }

  void connect(Client& client, uint32_t number, size_t lane) {
    if (client.connection(lane) != nullptr) return;
    auto made = std::make_shared<Connection>();
    made->client = number;
    made->lane = lane;
    connections_.push_back(made);
    client.connect(lane, std::move(made));
  }

  template <class T>
  bool take(std::deque<T>* queue, uint64_t bad, T* out) {
    if (queue->empty()) return false;
    size_t at = 0;
    if (queue->size() > 1 && happens(bad)) at = random_.below(queue->size()), overtaken += at != 0;
    const auto it = queue->begin() + static_cast<ptrdiff_t>(at);
    *out = *it;
    if (happens(bad)) {
      ++doubled;
    } else {
      queue->erase(it);
    }
    if (!happens(bad)) return true;
    ++dropped;
    return false;
  }
  void deliver_up(const std::shared_ptr<Connection>& c, uint64_t bad) {
    Up message;
    if (!take(&c->up, bad, &message)) return;
    late += !c->alive;
    server_.receive(c, message);
  }
  void deliver_down(const std::shared_ptr<Connection>& c, uint64_t bad) {
    Down answer;
    if (take(&c->down, bad, &answer) && c->alive) clients_[c->client]->receive(c->lane, answer);
  }
  // The server notices that a connection has ended.
  void end(size_t index) {
    const std::shared_ptr<Connection> gone = connections_[index];
    connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(index));
    server_.ended(gone);
  }

  void harm() {
    const auto number = static_cast<uint32_t>(random_.below(kClients));
    Client& client = *clients_[number];
    const size_t lane = random_.below(kLanes);
    const uint64_t action = random_.below(100);
    if (action < 15) {
      client.make(&random_);
    } else if (action < 35) {
      client.send(lane);
    } else if (action < 60 && !connections_.empty()) {
      deliver_up(connections_[random_.below(connections_.size())], options_.bad);
    } else if (action < 85 && !connections_.empty()) {
      deliver_down(connections_[random_.below(connections_.size())], options_.bad);
    } else if (action < 90) {
      client.ask(lane);
    } else if (action < 96) {
      connect(client, number, lane);
    } else if (action < 98 && client.connection(lane) != nullptr) {
      // What is on its way may still arrive, after what is sent on the next connection.
      if (happens(50)) client.connection(lane)->up.clear();
      client.disconnect(lane);
      ++cut;
    } else if (!connections_.empty()) {
      const size_t index = random_.below(connections_.size());
      if (!connections_[index]->alive) end(index);
    }
    if (client.under_way() > options_.window) oracle_.complain();
    server_.check_limits();
  }

  void kindness() {
    for (uint32_t c = 0; c < kClients; ++c) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        clients_[c]->make(&random_);
        connect(*clients_[c], c, lane);
        for (int i = 0; i < 4; ++i) clients_[c]->send(lane);
        clients_[c]->ask(lane);
      }
    }
    for (size_t i = 0; i < connections_.size(); ++i) {
      const std::shared_ptr<Connection> c = connections_[i];
      while (!c->up.empty()) deliver_up(c, 0);
      while (!c->down.empty()) deliver_down(c, 0);
      if (!c->alive) end(i--);
    }
    server_.check_limits();
  }

  const Options options_;
  test::Random random_;
  Oracle oracle_;
  Server server_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<std::shared_ptr<Connection>> connections_;  // as the server sees them
};

uint64_t seeds() { return test::accurate() ? 5000 : test::kUnderTsan ? 20 : 80; }

}  // namespace

TEST(each_push_is_applied_once_and_in_order_whatever_the_channel_does) {
  uint64_t dropped = 0, doubled = 0, overtaken = 0, cut = 0, late = 0, repeats = 0, refusals = 0, parked = 0;
  for (uint64_t i = 0; i < seeds(); ++i) {
    World world({.bad = 5 + i % 30}, test::seed() * 100'000 + i);
    const bool right = world.run();
    CHECK(right);
    if (!right) std::fprintf(stderr, "seed %d\n", static_cast<int>(i));
    dropped += world.dropped, doubled += world.doubled, overtaken += world.overtaken, cut += world.cut;
    late += world.late, repeats += world.server().repeats, refusals += world.oracle().refusals();
    parked = std::max<uint64_t>(parked, world.server().most_parked);
  }
  // The channel was as bad as it should have been.
  CHECK(dropped > 100 * seeds() && doubled > 100 * seeds() && overtaken > 20 * seeds() && cut > 20 * seeds());
  CHECK(late > seeds() && repeats > 20 * seeds() && refusals > 20 * seeds() && parked > 2);
}

TEST(a_full_window_with_room_for_few_completes) {
  uint64_t out_of_sequence = 0;
  for (uint64_t i = 0; i < seeds(); ++i) {
    World world({.window = limits::kWindowMax, .room = i % 4, .bad = i % 20, .requests = 400},
                test::seed() * 200'000 + i);
    CHECK(world.run());
    out_of_sequence += world.server().out_of_sequence;
  }
  CHECK(out_of_sequence > 10 * seeds());
}

TEST(a_kind_channel_needs_no_repeats) {
  World world({.bad = 0, .requests = 1000}, test::seed());
  CHECK(world.run());
  CHECK_EQ(world.dropped + world.doubled + world.overtaken, 0u);
}

TEST(a_seed_gives_the_same_run_each_time) {
  World a({}, test::seed()), b({}, test::seed());
  CHECK(a.run() == b.run());
  CHECK(a.dropped == b.dropped && a.doubled == b.doubled && a.overtaken == b.overtaken && a.cut == b.cut);
  CHECK_EQ(a.server().repeats, b.server().repeats);
}

TEST(the_oracle_notices_each_flaw) {
  for (const Flaw flaw : {Flaw::kAlwaysApplies, Flaw::kForgetsRefusals, Flaw::kReadsTooEarly, Flaw::kNeverHears,
                          Flaw::kHoldsEverything, Flaw::kAsksWhenQuiet}) {
    int noticed = 0;
    Options options{.flaw = flaw, .bad = 15};
    if (flaw == Flaw::kAsksWhenQuiet) options.window = limits::kWindowMax, options.room = 1, options.requests = 400;
    for (uint64_t i = 0; i < 20; ++i) noticed += !World(options, test::seed() * 300'000 + i).run();
    CHECK(noticed >= 5);
    if (noticed < 5) std::fprintf(stderr, "flaw %d was noticed in %d of 20 runs\n", static_cast<int>(flaw), noticed);
  }
}

// An answer that cannot be made again is kept for as long as a window of requests may ask for it.
TEST(refusals_are_kept_for_a_window_and_no_longer_than_their_limit) {
  Record record;
  for (uint64_t n = 1; n <= 10 * limits::kKeptAnswersMax; ++n) {
    record.sequence = n;
    record.keep(n, Status(Code::kNonFinite, std::to_string(n)), n);
    CHECK(record.kept->size() <= limits::kKeptAnswersMax);
    for (uint64_t back = 0; back < std::min<uint64_t>(n, limits::kWindowMax); ++back) {
      const Record::Kept* kept = record.find(n - back);
      CHECK(kept != nullptr && kept->value == n - back && kept->status.message() == std::to_string(n - back));
    }
  }
  CHECK(record.find(1) == nullptr);
}

TEST(the_number_of_an_ended_session_starts_anew_for_the_next) {
  Records records;
  Record& first = records.of(3, 111);
  first.sequence = 9;
  first.keep(9, Status(Code::kNonFinite, "no"), 0);
  CHECK_EQ(records.of(3, 111).sequence, 9u);
  CHECK_EQ(records.of(3, 222).sequence, 0u);
  CHECK(records.of(3, 222).find(9) == nullptr);
}

}  // namespace windlass::exactly_once_test
