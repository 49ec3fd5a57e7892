#include "messages/messages.h"

#include <algorithm>

namespace windlass {
namespace {

Status malformed(const char* what) {
  return Status(Code::kProtocolError, std::string(what) + ": the body is malformed");
}

}  // namespace

Status check_name(const char* what, const std::string& name) {
  if (name.empty() || name.size() > limits::kNameBytesMax) {
    return Status(Code::kInvalidArgument, std::string(what) + " name must have 1 to " +
                                              std::to_string(limits::kNameBytesMax) + " bytes, not " +
                                              std::to_string(name.size()));
  }
  if (name.find('/') != std::string::npos) {
    return Status(Code::kInvalidArgument,
                  std::string(what) + " name '" + name + "': '/' separates an app from a name; use '.' within names");
  }
  return {};
}

std::string encode(const Hello& h) {
  wire::Writer w;
  w.put(h.rank);
  w.put(h.world_size);
  w.put(h.lane);
  w.put_bytes(std::string(3, '\0'));
  w.put(h.index);
  w.put(h.known);
  w.put(h.cluster);
  w.put(static_cast<uint16_t>(h.servers.size()));
  w.put(static_cast<uint16_t>(h.app.size()));
  w.put_bytes(h.app);
  for (const std::string& s : h.servers) {
    w.put(static_cast<uint16_t>(s.size()));
    w.put_bytes(s);
  }
  return w.take();
}

Status decode(const std::string& body, Hello* h) {
  wire::Reader r(body);
  h->rank = r.get<uint32_t>();
  h->world_size = r.get<uint32_t>();
  h->lane = r.get<uint8_t>();
  r.get_bytes(3);
  h->index = r.get<uint32_t>();
  h->known = r.get<uint64_t>();
  h->cluster = r.get<uint64_t>();
  const size_t servers = r.get<uint16_t>(), app = r.get<uint16_t>();
  h->app = wire::printable(r.get_bytes(app));
  const size_t places = h->cluster != 0 ? limits::kServersMax : servers;  // the scheduler of a cluster keeps the list
  if (!r.ok() || servers > limits::kServersMax || h->index >= places || h->lane >= limits::kLanes ||
      h->rank >= std::max(h->world_size, 1u))
    return malformed("hello");
  for (size_t i = 0; i < servers && r.ok(); ++i) {
    const size_t bytes = r.get<uint16_t>();
    if (bytes > limits::kAddressBytesMax) return malformed("hello");
    h->servers.push_back(wire::printable(r.get_bytes(bytes)));
  }
  if (!r.at_end()) return malformed("hello");
  return check_name("app", h->app);
}

std::string encode(const Welcome& welcome) {
  wire::Writer w;
  w.put(welcome.incarnation);
  w.put(welcome.app);
  w.put(uint32_t{0});
  return w.take();
}

Status decode(const std::string& body, Welcome* welcome) {
  wire::Reader r(body);
  welcome->incarnation = r.get<uint64_t>();
  welcome->app = r.get<uint32_t>();
  r.get<uint32_t>();
  return r.at_end() ? Status() : malformed("answer to hello");
}

std::string encode(const ClockReport& s) {
  wire::Writer w;
  w.put(s.own);
  w.put(s.own_highest);
  w.put(s.lowest);
  w.put(s.highest);
  w.put(static_cast<uint8_t>(s.waited));
  w.put(static_cast<uint8_t>(s.starts));
  w.put(static_cast<uint8_t>(s.rounds));
  w.put(uint8_t{0});
  w.put(uint32_t{0});
  return w.take();
}

Status decode(const std::string& body, ClockReport* s) {
  wire::Reader r(body);
  s->own = r.get<uint64_t>();
  s->own_highest = r.get<uint64_t>();
  s->lowest = r.get<uint64_t>();
  s->highest = r.get<uint64_t>();
  s->waited = r.get<uint8_t>() != 0;
  s->starts = r.get<uint8_t>() != 0;
  s->rounds = r.get<uint8_t>() != 0;
  r.get<uint8_t>();
  r.get<uint32_t>();
  return r.at_end() ? Status() : malformed("answer to enter");
}

Status not_there(const char* what, const ObjectSpec& spec) {
  return Status(Code::kAccessDenied,
                std::string(what) + ": '" + spec.own_name() + "' is not there, and a reader makes no objects");
}

Status ObjectSpec::shards(uint32_t* out) const {
  *out = limits::kTableShards;
  if (is_table) return check_spec(own_name(), table);
  Cut cut;
  WL_RETURN_IF_ERROR(check_spec(own_name(), tensor, &cut));
  *out = cut.shards;
  return {};
}

namespace {

void encode(const RuleSpec& rule, wire::Writer* w) {
  w->put(rule.clip);
  w->put(rule.lowest);
  w->put(rule.highest);
  w->put(rule.schedule.kind);
  w->put_bytes(std::string(3, '\0'));
  w->put(rule.schedule.warmup);
  w->put(rule.schedule.updates);
  w->put(rule.schedule.end);
  w->put(rule.foreign.vectors);
  w->put(rule.foreign.row_scalars);
  w->put(static_cast<uint8_t>(rule.foreign.whole | rule.foreign.by_row << 1 | rule.foreign.begins << 2));
  w->put(uint8_t{0});
  w->put(rule.foreign.shard_scalars);
  w->put(static_cast<uint16_t>(rule.foreign.name.size()));
  w->put_bytes(rule.foreign.name);
}

// Everything but its kind and initial state, which are known already.
Status decode(wire::Reader* r, RuleSpec* rule) {
  rule->clip = r->get<float>();
  rule->lowest = r->get<float>();
  rule->highest = r->get<float>();
  const auto kind = r->get<uint8_t>();
  r->get_bytes(3);
  rule->schedule.warmup = r->get<uint64_t>();
  rule->schedule.updates = r->get<uint64_t>();
  rule->schedule.end = r->get<double>();
  rule->foreign.vectors = r->get<uint8_t>();
  rule->foreign.row_scalars = r->get<uint8_t>();
  const auto wants = r->get<uint8_t>();
  r->get<uint8_t>();
  rule->foreign.shard_scalars = r->get<uint32_t>();
  const size_t name = r->get<uint16_t>();
  if (!r->ok() || kind >= Schedule::kKinds || wants > 7 || name > limits::kForeignNameBytesMax)
    return malformed("spec");
  rule->schedule.kind = static_cast<Schedule::Kind>(kind);
  rule->foreign.whole = (wants & 1) != 0;
  rule->foreign.by_row = (wants & 2) != 0;
  rule->foreign.begins = (wants & 4) != 0;
  rule->foreign.name = wire::printable(r->get_bytes(name));
  return r->ok() ? Status() : malformed("spec");
}

}  // namespace

void encode(const ObjectSpec& s, wire::Writer* w) {
  const RuleSpec& rule = s.is_table ? s.table.rule : s.tensor.rule;
  const Init& init = s.is_table ? s.table.init : s.tensor.init;
  w->put(static_cast<uint8_t>(s.is_table));
  w->put(s.is_table ? Dtype::kFloat32 : s.tensor.dtype);
  w->put(rule.kind);
  w->put(init.kind);
  w->put(static_cast<uint8_t>(s.is_table ? s.table.reject_nonfinite : s.tensor.reject_nonfinite));
  w->put(static_cast<uint8_t>(s.is_table ? 0 : s.tensor.shape.size()));
  w->put(static_cast<uint16_t>(s.name.size()));
  w->put(s.is_table ? s.table.dim : uint32_t{0});
  w->put(rule.initial_state);
  w->put(init.a);
  w->put(init.b);
  w->put(s.is_table ? s.table.seed : s.tensor.seed);
  const Sync& sync = s.sync();
  w->put(sync.kind);
  w->put(uint8_t{0});
  w->put(static_cast<uint16_t>(s.is_table ? 0 : s.tensor.like.size()));
  w->put(sync.number);
  w->put(sync.seconds);
  if (!s.is_table) {
    for (const uint64_t d : s.tensor.shape) w->put(d);
  }
  w->put_bytes(s.name);
  if (!s.is_table) w->put_bytes(s.tensor.like);
  encode(rule, w);
  w->put(static_cast<uint16_t>(s.rule_text.size()));
  w->put_bytes(s.rule_text);
}

Status decode(wire::Reader* r, ObjectSpec* s) {
  const auto kind = r->get<uint8_t>(), dtype = r->get<uint8_t>(), rule = r->get<uint8_t>(), init = r->get<uint8_t>();
  const auto reject = r->get<uint8_t>(), dims = r->get<uint8_t>();
  const size_t name = r->get<uint16_t>();
  const auto dim = r->get<uint32_t>();
  const auto initial_state = r->get<float>();
  const auto a = r->get<double>(), b = r->get<double>();
  const auto seed = r->get<uint64_t>();
  const auto policy = r->get<uint8_t>();
  r->get<uint8_t>();
  const size_t like = r->get<uint16_t>();
  const auto number = r->get<uint32_t>();
  const auto seconds = r->get<double>();
  if (!r->ok() || kind > 1 || dtype > static_cast<uint8_t>(Dtype::kFloat16) || reject > 1 ||
      rule >= static_cast<uint8_t>(RuleKind::kCount) || init > static_cast<uint8_t>(InitKind::kNormal) ||
      dims > limits::kTensorDimsMax || policy >= Sync::kKinds || (kind == 1 && like != 0))
    return malformed("spec");
  s->is_table = kind == 1;
  RuleSpec rule_spec{static_cast<RuleKind>(rule), initial_state};
  const Init init_spec{static_cast<InitKind>(init), a, b};
  const Sync sync{static_cast<Sync::Kind>(policy), number, seconds};
  std::vector<uint64_t> shape(dims);
  for (uint64_t& d : shape) d = r->get<uint64_t>();
  const std::string text = r->get_bytes(name), like_text = wire::printable(r->get_bytes(like));
  WL_RETURN_IF_ERROR(decode(r, &rule_spec));
  const size_t rule_bytes = r->get<uint16_t>();
  if (rule_bytes > limits::kRuleTextBytesMax) return malformed("spec");
  s->rule_text = wire::printable(r->get_bytes(rule_bytes));
  if (s->is_table) {
    s->table = TableSpec{dim, rule_spec, init_spec, seed, reject == 1, sync};
  } else {
    s->tensor = TensorSpec{std::move(shape), static_cast<Dtype>(dtype), rule_spec, init_spec, seed, reject == 1, sync,
                           like_text};
  }
  s->name = wire::printable(text);
  const size_t slash = s->name.find('/');
  if (!r->ok() || slash == std::string::npos) return malformed("spec");
  WL_RETURN_IF_ERROR(check_name("app", s->name.substr(0, slash)));
  if (like != 0) WL_RETURN_IF_ERROR(check_name("like: tensor", s->tensor.like));
  return check_name(s->is_table ? "table" : "tensor", s->own_name());
}

const Map::Owned& Map::run_of(uint32_t shard) const {
  const auto after =
      std::upper_bound(runs.begin(), runs.end(), shard, [](uint32_t s, const Owned& run) { return s < run.first; });
  return *(after - 1);
}

Run Map::run_of_server(uint32_t server, uint32_t shards) const {
  Run longest{0, 0};
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run run{runs[i].first, i + 1 < runs.size() ? runs[i + 1].first : shards};
    if (runs[i].server == server && run.end - run.first > longest.end - longest.first) longest = run;
  }
  return longest;
}

Status Map::check(uint32_t shards, uint32_t servers) const {
  bool right = shards == 0 ? runs.empty() : !runs.empty() && runs[0].first == 0;
  for (size_t i = 0; right && i < runs.size(); ++i) {
    right = runs[i].server < servers && runs[i].first < shards && (i == 0 || runs[i].first > runs[i - 1].first);
  }
  return right ? Status() : malformed("map");
}

bool Map::agrees(const Map& other, uint32_t shards) const {
  if (object != other.object) return false;
  for (uint32_t shard = 0; shard < shards; ++shard) {
    const Owned &a = run_of(shard), &b = other.run_of(shard);
    if (a.term == b.term && a.server != b.server) return false;
  }
  return true;
}

void encode(const Map& map, wire::Writer* w) {
  w->put(map.object);
  w->put(static_cast<uint32_t>(map.runs.size()));
  for (const Map::Owned& run : map.runs) w->put(run);
}

Status decode(wire::Reader* r, Map* map) {
  map->object = r->get<uint32_t>();
  const auto runs = r->get<uint32_t>();
  if (!r->ok() || runs > r->left() / sizeof(Map::Owned)) return malformed("map");
  map->runs.clear();
  for (uint32_t i = 0; i < runs && r->ok(); ++i) map->runs.push_back(r->get<Map::Owned>());
  return r->ok() ? Status() : malformed("map");
}

Status check_no_anchor(std::vector<std::string> alike) {
  if (alike.empty()) return {};
  std::sort(alike.begin(), alike.end());
  std::string names;
  for (const std::string& name : alike) names += (names.empty() ? "'" : ", '") + name + "'";
  return Status(Code::kInvalidArgument,
                "it lies where others are placed like it, and they must be deleted first: " + names);
}

}  // namespace windlass
