#include "messages/messages.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/test.h"

namespace windlass::messages_test {
namespace {

std::string some_name(test::Random* random, size_t most = 40) {
  std::string name(1 + random->below(most), 'a');
  for (char& c : name) c = static_cast<char>('a' + random->below(26));
  return name;
}

Hello some_hello(test::Random* random) {
  Hello h;
  h.world_size = 1 + static_cast<uint32_t>(random->below(random->below(2) == 0 ? 4 : 0xFFFFFFFF));
  h.rank = static_cast<uint32_t>(random->below(h.world_size));
  h.lane = static_cast<uint8_t>(random->below(limits::kLanes));
  h.app = some_name(random, limits::kNameBytesMax);
  h.servers.resize(1 + random->below(random->below(20) == 0 ? limits::kServersMax : 8));
  for (std::string& s : h.servers) s = some_name(random) + ":" + std::to_string(random->below(65536));
  h.index = static_cast<uint32_t>(random->below(h.servers.size()));
  h.known = random->next();
  return h;
}

bool same(const Hello& a, const Hello& b) {
  return a.rank == b.rank && a.world_size == b.world_size && a.lane == b.lane && a.index == b.index && a.app == b.app &&
         a.servers == b.servers && a.known == b.known;
}

ObjectSpec some_spec(test::Random* random) {
  ObjectSpec s;
  s.name = some_name(random) + "/" + some_name(random, limits::kNameBytesMax);
  s.is_table = random->below(2) == 0;
  RuleSpec rule{static_cast<RuleKind>(random->below(static_cast<uint64_t>(RuleKind::kCount))), random->unit()};
  if (random->below(2) == 0) {
    rule.clip = random->unit();
    rule.lowest = -random->unit();
    rule.highest = random->unit();
    rule.schedule = {static_cast<Schedule::Kind>(random->below(Schedule::kKinds)), random->next(), random->next(),
                     random->unit() * 1.0};
  }
  if (rule.kind == RuleKind::kForeign) {
    rule.foreign = {"rules:" + some_name(random),
                    static_cast<uint8_t>(random->below(9)),
                    static_cast<uint8_t>(random->below(17)),
                    static_cast<uint32_t>(random->below(1000)),
                    random->below(2) == 0,
                    random->below(2) == 0,
                    random->below(2) == 0};
  }
  Init init{static_cast<InitKind>(random->below(4)), random->unit() * 2.0 - 1.0, random->unit() * 1e9};
  if (s.is_table) {
    s.table = {1 + static_cast<uint32_t>(random->below(limits::kTableDimMax)), rule, init, random->next(),
               random->below(2) == 0};
  } else {
    s.tensor.shape.resize(random->below(limits::kTensorDimsMax + 1));
    for (uint64_t& d : s.tensor.shape) d = random->below(4) == 0 ? random->next() : random->below(100);
    s.tensor.dtype = static_cast<Dtype>(random->below(5));
    s.tensor.rule = rule;
    s.tensor.init = init;
    s.tensor.seed = random->next();
    s.tensor.reject_nonfinite = random->below(2) == 0;
    if (random->below(3) == 0) s.tensor.like = some_name(random, limits::kNameBytesMax);
  }
  return s;
}

std::string bytes_of(const ObjectSpec& spec) {
  wire::Writer w;
  encode(spec, &w);
  return w.take();
}

std::string bytes_of(const Map& map) {
  wire::Writer w;
  encode(map, &w);
  return w.take();
}

// A copy that ends with its allocation, so that the sanitizer sees a read too many.
struct Exact {
  explicit Exact(const std::string& bytes)
      : data(std::make_unique_for_overwrite<char[]>(bytes.size())), reader(data.get(), bytes.size()) {
    if (!bytes.empty()) std::memcpy(data.get(), bytes.data(), bytes.size());
  }
  std::unique_ptr<char[]> data;
  wire::Reader reader;
};

void mutate(test::Random* random, std::string* bytes) {
  for (uint64_t n = 1 + random->below(4); n != 0 && !bytes->empty(); --n) {
    const size_t at = random->below(bytes->size());
    switch (random->below(5)) {
      case 0: (*bytes)[at] = static_cast<char>(random->next()); break;
      case 1: (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << random->below(8))); break;
      case 2: {  // a number that is larger than anything should be
        const uint64_t huge[] = {uint64_t{1} << 31, 0xFFFFFFFF, uint64_t{1} << 63, ~uint64_t{0}, uint64_t{1} << 32, 0};
        const uint64_t x = huge[random->below(6)];
        std::memcpy(&(*bytes)[at], &x, std::min(size_t{1} << random->below(4), bytes->size() - at));
        break;
      }
      case 3: bytes->erase(at, 1 + random->below(9)); break;
      default: bytes->insert(at, std::string(1 + random->below(9), static_cast<char>(random->next())));
    }
  }
}

bool good_text(const std::string& text) { return wire::printable(text) == text; }

bool good_name(const std::string& name) {
  return !name.empty() && name.size() <= limits::kNameBytesMax && name.find('/') == std::string::npos &&
         good_text(name);
}

void check_within_limits(const Hello& h) {
  CHECK(h.rank < std::max(h.world_size, 1u));
  CHECK(h.lane < limits::kLanes);
  CHECK((h.cluster != 0 || !h.servers.empty()) && h.servers.size() <= limits::kServersMax);
  CHECK(h.index < (h.cluster != 0 ? limits::kServersMax : h.servers.size()));
  CHECK(good_name(h.app));
  for (const std::string& s : h.servers) CHECK(s.size() <= limits::kAddressBytesMax && good_text(s));
}

void check_within_limits(const ObjectSpec& s) {
  const size_t slash = s.name.find('/');
  CHECK(slash != std::string::npos && good_name(s.name.substr(0, slash)) && good_name(s.own_name()));
  const RuleSpec& rule = s.is_table ? s.table.rule : s.tensor.rule;
  CHECK(rule.kind < RuleKind::kCount);
  CHECK((s.is_table ? s.table.init : s.tensor.init).kind <= InitKind::kNormal);
  CHECK(s.tensor.dtype <= Dtype::kFloat16);
  CHECK(s.tensor.shape.size() <= limits::kTensorDimsMax);
  uint32_t shards = 0;
  if (!s.shards(&shards).ok()) return;
  CHECK(!s.describe().empty());
  if (s.is_table) {
    CHECK_EQ(shards, limits::kTableShards);
    CHECK(s.table.dim != 0 && s.table.dim <= limits::kTableDimMax);
    return;
  }
  bool empty = false;
  long double elements = 1;  // does not overflow
  for (const uint64_t d : s.tensor.shape) {
    empty = empty || d == 0;
    elements *= static_cast<long double>(d);
  }
  CHECK(storable(s.tensor.dtype));
  CHECK(empty ? shards == 0 : shards != 0);
  CHECK(empty || elements <= static_cast<long double>(limits::kTensorElementsMax));
  CHECK(uint64_t{shards} * limits::kShardBytesMin <= 2 * limits::kTensorElementsMax * sizeof(double));
}

// Ok exactly when every shard has one server, in order.
bool covers(const Map& map, uint32_t shards, uint32_t servers) {
  uint64_t next = 0;
  for (size_t i = 0; i < map.runs.size(); ++i) {
    const Map::Owned& run = map.runs[i];
    const uint64_t end = i + 1 < map.runs.size() ? map.runs[i + 1].first : shards;
    if (run.first != next || end <= run.first || end > shards || run.server >= servers) return false;
    next = end;
  }
  return next == shards;
}

void check_usable(const Map& map, uint32_t shards, uint32_t servers) {
  CHECK(covers(map, shards, servers));
  std::vector<bool> placed(servers);
  for (uint32_t server = 0; server < servers; ++server) {
    const Run run = map.run_of_server(server, shards);
    CHECK(run.first <= run.end && run.end <= shards);
    placed[server] = run.first < run.end;
    for (uint32_t shard = run.first; shard < run.end; ++shard) CHECK_EQ(map.run_of(shard).server, server);
  }
  for (uint32_t shard = 0; shard < shards; ++shard) CHECK(placed[map.run_of(shard).server]);
}

Map some_map(test::Random* random, uint32_t shards, uint32_t servers) {
  Map map;
  map.object = static_cast<uint32_t>(random->next());
  const auto most = static_cast<uint32_t>(random->below(2) == 0 ? servers : 4 * servers);  // more runs after moves
  const auto n = static_cast<uint32_t>(std::min(shards, 1 + static_cast<uint32_t>(random->below(most))));
  std::vector<uint32_t> order(servers);
  for (uint32_t i = 0; i < servers; ++i) order[i] = i;
  for (uint32_t i = servers; i > 1; --i) std::swap(order[i - 1], order[random->below(i)]);
  for (uint32_t i = 0; i < n; ++i) {
    map.runs.push_back(
        {static_cast<uint32_t>(uint64_t{shards} * i / n), order[i % servers], static_cast<uint32_t>(random->next())});
  }
  return map;
}

}  // namespace

TEST(hello_and_welcome_come_back_as_they_were_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 500; ++i) {
    const Hello sent = some_hello(&random);
    Hello got;
    CHECK_OK(decode(encode(sent), &got));
    CHECK(same(sent, got));
    const Welcome welcome{random.next(), static_cast<uint32_t>(random.next())};
    Welcome back;
    CHECK_OK(decode(encode(welcome), &back));
    CHECK(back.incarnation == welcome.incarnation && back.app == welcome.app);
  }
}

TEST(specs_come_back_as_they_were_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 5000; ++i) {
    const ObjectSpec sent = some_spec(&random);
    ObjectSpec got;
    Exact from(bytes_of(sent));
    CHECK_OK(decode(&from.reader, &got));
    CHECK(sent == got);
    CHECK(from.reader.at_end());
    CHECK(sent.describe() == got.describe());
  }
}

TEST(maps_come_back_as_they_were_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 2000; ++i) {
    const auto shards = static_cast<uint32_t>(random.below(300)), servers = 1 + static_cast<uint32_t>(random.below(20));
    const Map sent = some_map(&random, shards, servers);
    Map got;
    Exact from(bytes_of(sent));
    CHECK_OK(decode(&from.reader, &got));
    CHECK(from.reader.at_end());
    CHECK(sent == got);
    CHECK_OK(got.check(shards, servers));
    check_usable(got, shards, servers);
  }
}

TEST(a_message_cut_short_at_any_byte_is_refused) {
  test::Random random(test::seed());
  for (int i = 0; i < 30; ++i) {
    Hello hello = some_hello(&random);
    if (hello.servers.size() > 8) hello.servers.resize(8);
    hello.index %= static_cast<uint32_t>(hello.servers.size());
    const std::string h = encode(hello), w = encode(Welcome{random.next(), 1});
    const std::string spec = bytes_of(some_spec(&random)), map = bytes_of(some_map(&random, 100, 8));
    for (size_t n = 0; n < h.size(); ++n) {
      Hello got;
      CHECK_CODE(decode(h.substr(0, n), &got), Code::kProtocolError);
    }
    for (size_t n = 0; n < w.size(); ++n) {
      Welcome got;
      CHECK_CODE(decode(w.substr(0, n), &got), Code::kProtocolError);
    }
    for (size_t n = 0; n < spec.size(); ++n) {
      Exact cut(spec.substr(0, n));
      ObjectSpec got;
      CHECK_CODE(decode(&cut.reader, &got), Code::kProtocolError);
    }
    for (size_t n = 0; n < map.size(); ++n) {
      Exact cut(map.substr(0, n));
      Map got;
      CHECK_CODE(decode(&cut.reader, &got), Code::kProtocolError);
    }
    Hello got;
    Welcome back;
    CHECK_CODE(decode(h + '\0', &got), Code::kProtocolError);  // and so is one that is too long
    CHECK_CODE(decode(w + '\0', &back), Code::kProtocolError);
  }
}

TEST(a_message_with_any_bytes_changed_is_refused_or_within_all_limits) {
  test::Random random(test::seed());
  const int rounds = test::accurate() ? 500'000 : test::kUnderTsan ? 5'000 : test::kSanitized ? 25'000 : 100'000;
  for (int i = 0; i < rounds; ++i) {
    Hello hello = some_hello(&random);
    if (hello.servers.size() > 8) hello.servers.resize(8);
    hello.index %= static_cast<uint32_t>(hello.servers.size());
    std::string bytes = encode(hello);
    mutate(&random, &bytes);
    Hello h;
    if (decode(bytes, &h).ok()) check_within_limits(h);

    bytes = bytes_of(some_spec(&random));
    mutate(&random, &bytes);
    Exact spec(bytes);
    ObjectSpec s;
    if (decode(&spec.reader, &s).ok()) check_within_limits(s);

    const auto shards = static_cast<uint32_t>(random.below(300)), servers = 1 + static_cast<uint32_t>(random.below(20));
    bytes = bytes_of(some_map(&random, shards, servers));
    if (random.below(10) != 0) mutate(&random, &bytes);
    Exact map(bytes);
    Map m;
    if (decode(&map.reader, &m).ok()) {
      CHECK(m.runs.size() <= limits::kServersMax);
      const bool right = m.check(shards, servers).ok();
      CHECK(right == covers(m, shards, servers));
      if (right) check_usable(m, shards, servers);
    }

    bytes = encode(Welcome{random.next(), 1});
    mutate(&random, &bytes);
    Welcome w;
    (void)decode(bytes, &w).ok();
  }
}

TEST(maps_with_holes_overlaps_or_servers_out_of_range_are_refused) {
  const auto check = [](std::vector<Map::Owned> runs, uint32_t shards, uint32_t servers) {
    Map map;
    map.runs = std::move(runs);
    const Status status = map.check(shards, servers);
    CHECK(status.ok() == covers(map, shards, servers));
    return status;
  };
  CHECK_OK(check({{0, 0, 1}, {5, 1, 1}}, 10, 2));
  CHECK_OK(check({{0, 1, 1}}, 10, 2));
  CHECK_OK(check({}, 0, 2));
  CHECK_OK(check({{0, 2, 1}, {1, 0, 7}, {2, 1, 0}}, 3, 3));
  CHECK_OK(check({{0, 0, 1}, {5, 1, 2}, {6, 0, 1}}, 10, 2));  // a shard has moved
  const std::pair<std::vector<Map::Owned>, uint32_t> kWrong[] = {
      {{}, 10},                                 // nobody has them
      {{{1, 0, 1}}, 10},                        // nobody has the first
      {{{0, 0, 1}, {0, 1, 1}}, 10},             // an empty run
      {{{0, 0, 1}, {10, 1, 1}}, 10},            // a run behind the last
      {{{0, 0, 1}, {7, 1, 1}, {5, 2, 1}}, 10},  // out of order
      {{{0, 3, 1}}, 10},                        // a server that there is not
      {{{0, ~0u, 1}}, 10},                      //
      {{{0, 0, 1}, {~0u, 1, 1}}, 10},           //
      {{{0, 0, 1}}, 0},                         // nothing to have
  };
  for (const auto& [runs, shards] : kWrong) CHECK_CODE(check(runs, shards, 3), Code::kProtocolError);
  CHECK_CODE(check({{0, 0, 1}, {1, 1, 1}, {2, 2, 1}, {3, 3, 1}}, 10, 3), Code::kProtocolError);
}

TEST(a_map_of_more_runs_than_its_body_has_takes_no_memory) {
  for (const uint32_t runs : {1u, limits::kServersMax + 1, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
    wire::Writer w;
    w.put(uint32_t{1});
    w.put(runs);
    Exact from(w.take());
    Map map;
    CHECK_CODE(decode(&from.reader, &map), Code::kProtocolError);
    CHECK_EQ(map.runs.capacity(), 0u);
  }
}

TEST(shapes_whose_product_overflows_are_refused) {
  constexpr uint64_t kBig = uint64_t{1} << 40;
  const std::vector<uint64_t> kShapes[] = {{kBig + 1},
                                           {uint64_t{1} << 63},
                                           {~uint64_t{0}},
                                           {uint64_t{1} << 32, uint64_t{1} << 32},
                                           {uint64_t{1} << 63, 2},
                                           {kBig, 2},
                                           {3, (~uint64_t{0}) / 3 + 1},
                                           {kBig, kBig, 0}};
  for (const std::vector<uint64_t>& shape : kShapes) {
    ObjectSpec spec, got;
    spec.name = "a/t";
    spec.tensor.shape = shape;
    Exact from(bytes_of(spec));
    CHECK_OK(decode(&from.reader, &got));
    uint32_t shards = 0;
    CHECK_CODE(got.shards(&shards), Code::kInvalidArgument);
  }
  ObjectSpec spec;
  spec.name = "a/t";
  spec.tensor.shape = {kBig};
  uint32_t shards = 0;
  CHECK_OK(spec.shards(&shards));
  CHECK_EQ(shards, kBig * 4 / limits::kShardBytesMax);
  for (const uint32_t dim : {0u, limits::kTableDimMax + 1, 0x80000000u, 0xFFFFFFFFu}) {
    ObjectSpec table;
    table.name = "a/t";
    table.is_table = true;
    table.table.dim = dim;
    CHECK_CODE(table.shards(&shards), Code::kInvalidArgument);
  }
}

TEST(names_are_checked_where_they_arrive) {
  const auto decoded = [](const std::string& name) {
    ObjectSpec spec, got;
    spec.name = name;
    spec.is_table = true;
    spec.table.dim = 1;
    Exact from(bytes_of(spec));
    return decode(&from.reader, &got);
  };
  const std::string longest(limits::kNameBytesMax, 'n');
  CHECK_OK(decoded("app/name"));
  CHECK_OK(decoded(longest + "/" + longest));
  CHECK_CODE(decoded("name"), Code::kProtocolError);
  CHECK_CODE(decoded(""), Code::kProtocolError);
  CHECK_CODE(decoded("/name"), Code::kInvalidArgument);
  CHECK_CODE(decoded("app/"), Code::kInvalidArgument);
  CHECK_CODE(decoded("app/a/b"), Code::kInvalidArgument);
  CHECK_CODE(decoded(longest + "x/name"), Code::kInvalidArgument);
  CHECK_CODE(decoded("app/" + longest + "x"), Code::kInvalidArgument);
  const auto like = [](const std::string& name) {
    ObjectSpec spec, got;
    spec.name = "app/w";
    spec.tensor.shape = {1};
    spec.tensor.like = name;
    Exact from(bytes_of(spec));
    return decode(&from.reader, &got);
  };
  CHECK_OK(like(longest));
  CHECK_CODE(like(longest + "x"), Code::kInvalidArgument);
  CHECK_CODE(like("app/v"), Code::kInvalidArgument);
  Hello hello, got;
  hello.servers = {"unix:/a"};
  for (const std::string& app : {std::string(), longest + "x", std::string("a/b")}) {
    hello.app = app;
    CHECK_CODE(decode(encode(hello), &got), Code::kInvalidArgument);
  }
}

TEST(a_hello_that_contradicts_itself_is_refused) {
  Hello right;
  right.rank = 1;
  right.world_size = 2;
  right.app = "app";
  right.servers = {"a:1", "b:2"};
  Hello got;
  CHECK_OK(decode(encode(right), &got));
  const auto refused = [&](auto change) {
    Hello h = right;
    change(&h);
    Hello out;
    CHECK_CODE(decode(encode(h), &out), Code::kProtocolError);
  };
  refused([](Hello* h) { h->rank = 2; });
  refused([](Hello* h) { h->world_size = 0; });  // a reader has no rank
  refused([](Hello* h) { h->lane = limits::kLanes; });
  refused([](Hello* h) { h->index = 2; });
  refused([](Hello* h) { h->index = 0x80000000u; });
  refused([](Hello* h) { h->servers.clear(); });
  refused([](Hello* h) { h->servers.assign(limits::kServersMax + 1, "a"); });
  refused([](Hello* h) { h->servers[0] = std::string(limits::kAddressBytesMax + 1, 'a'); });
}

}  // namespace windlass::messages_test
