// S6, S7: whatever bytes an authenticated client sends, the host neither crashes nor hangs, others' objects stay as
// they are, and others are served.
#include <sys/socket.h>

#include <memory>

#include "query/query_test.h"
#include "server/host.h"
#include "server/net/mutate_test.h"
#include "server/net/peer_test.h"

namespace windlass::fuzz_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::about;
using test::bytes_of;
using test::Frame;
using test::frame_of;
using test::hello_as;
using test::keys_in;
using test::Mutator;
using test::on_keys;
using test::on_spans;
using test::on_whole;
using test::Peer;
using test::with_body;
using wire::Op;

constexpr uint64_t kMemory = uint64_t{48} << 20;

std::string some_floats(test::Random* random, size_t n) {
  std::vector<float> all(n);
  for (float& x : all) x = random->unit();
  return bytes_of(all);
}

std::string body_of(const ObjectSpec& spec, const Map* map = nullptr) {
  wire::Writer w;
  if (map != nullptr) encode(*map, &w);
  encode(spec, &w);
  return w.take();
}

// A host with a victim, who has objects of its own, and objects for the fuzzer.
class Arena {
 public:
  explicit Arena(uint64_t seed)
      : host(2, kMemory), mutator(seed), victim_(Peer::greeted(host, "victim", 4711)), sessions_(seed << 20) {
    tensor_ = victim_.made(a_tensor("victims", {20'000}));
    table_ = victim_.made(a_table("victims_rows", 4));
    own_tensor_ = victim_.made(fuzz_tensor());
    own_table_ = victim_.made(fuzz_table());
    ObjectSpec alike = fuzz_tensor();
    alike.tensor.like = alike.own_name();
    alike.name += "_too";
    alike_ = victim_.made(alike);
    for (uint32_t s = 0; s < 2; ++s) push_to_tensor(s);
    for (uint32_t s = 0; s < limits::kTableShards; s += 16) {
      const test::FramePart p =
          victim_.call_one(on_keys(Op::kPush, table_, s, 1, keys_in(s, 3), some_floats(&mutator.random, 12)));
      CHECK_OK(p.status());
    }
    print_ = prints();
  }

  // The requests of an honest session, from its first to its last.
  std::vector<Frame> session() {
    test::Random& r = mutator.random;
    ++sessions_;
    std::vector<Frame> frames = {with_body(Op::kHello, encode(hello_as(static_cast<uint8_t>(r.below(2)))))};
    uint64_t tensor_sequence[2] = {}, table_sequence[4] = {};
    for (uint64_t n = 4 + r.below(10); n != 0; --n) {
      const auto s = static_cast<uint32_t>(r.below(2)), k = static_cast<uint32_t>(r.below(4));
      const uint64_t begin = s * 16'384, size = s == 0 ? 16'384 : 3'616;
      switch (r.below(22)) {
        case 0: frames.push_back(with_body(Op::kOpen, body_of(some_spec()))); break;
        case 1: {
          const bool table = r.below(2) == 0;
          Map map = table ? own_table_ : own_tensor_;
          if (r.below(2) == 0) map.object = static_cast<uint32_t>(3 + r.below(60));
          frames.push_back(with_body(Op::kAttach, body_of(r.below(3) == 0 ? some_spec()
                                                          : table         ? fuzz_table()
                                                                          : fuzz_tensor(),
                                                          &map)));
          break;
        }
        case 2: frames.push_back(r.below(2) == 0 ? frame_of(Op::kList) : with_body(Op::kList, "")); break;
        case 3: frames.push_back(with_body(Op::kAsk, bytes_of<uint64_t>({2, 3, 4, r.next()}))); break;
        case 4:
          frames.push_back(on_whole(Op::kPush, own_tensor_, s, ++tensor_sequence[s], some_floats(&r, size)));
          break;
        case 5: frames.push_back(on_whole(Op::kPull, own_tensor_, s, tensor_sequence[s])); break;
        case 6:
          frames.push_back(on_spans(Op::kPushPull, own_tensor_, s, ++tensor_sequence[s], {begin + 5, 3, begin + 100, 2},
                                    some_floats(&r, 5)));
          break;
        case 7: frames.push_back(on_spans(Op::kPull, own_tensor_, s, tensor_sequence[s], {begin, r.below(100)})); break;
        case 8:
        case 9: {
          const Op op = r.below(2) == 0 ? Op::kPush : Op::kPushPull;
          frames.push_back(on_keys(op, own_table_, k, ++table_sequence[k], keys_in(k, 3), some_floats(&r, 24)));
          break;
        }
        case 10:
          frames.push_back(on_keys(Op::kPull, own_table_, k, table_sequence[k], keys_in(k, 5), "",
                                   r.below(2) == 0 ? wire::kCreates : 0));
          break;
        case 11: frames.push_back(on_keys(Op::kErase, own_table_, k, ++table_sequence[k], keys_in(k, 2))); break;
        case 12: {
          const Frame push = on_whole(Op::kPush, own_tensor_, s, ++tensor_sequence[s], some_floats(&r, size));
          const Frame pull = on_spans(Op::kPull, own_tensor_, s, tensor_sequence[s], {begin, r.below(100)});
          const Frame rows =
              on_keys(Op::kPushPull, own_table_, k, ++table_sequence[k], keys_in(k, 3), some_floats(&r, 24));
          frames.push_back(r.below(2) == 0 ? test::in_step({push, pull, rows})
                                           : test::in_step({rows, pull, push}, {0.5}));
          frames.back().header.lane = static_cast<uint8_t>(r.below(2));
          break;
        }
        case 13:
          frames.push_back(about(Op::kScan, own_table_, k, table_sequence[k], bytes_of<uint64_t>({1 + r.below(50)})));
          break;
        case 14: {
          wire::PutItem item{.planes = static_cast<uint32_t>(r.below(2))};
          item.sets_count = static_cast<uint32_t>(r.below(2));
          item.count = item.sets_count != 0 ? r.below(100) : 0;
          const std::string body(reinterpret_cast<const char*>(&item), sizeof item);
          frames.push_back(about(Op::kPut, own_tensor_, s, ++tensor_sequence[s], body,
                                 item.planes != 0 ? some_floats(&r, size) : ""));
          break;
        }
        case 16:
        case 17: {
          const uint8_t function = static_cast<uint8_t>(1 + r.below(11));
          const bool top = function == 11, bins = function == 10;
          const std::string query =
              test::a_query(static_cast<Query::Function>(function), r.below(2) == 0 ? test::above(0, 0.5) : "",
                            top ? 1 + r.below(5) : 0, top ? test::the_norm() : "", top,
                            bins ? std::vector<double>{0, 0.5, 1} : std::vector<double>{});
          frames.push_back(r.below(2) == 0 ? about(Op::kQuery, own_table_, k, table_sequence[k], query)
                                           : about(Op::kQuery, own_tensor_, s, tensor_sequence[s], query));
          break;
        }
        case 18: {
          wire::Writer body;
          body.put(1 + r.below(50)), body.put(static_cast<uint32_t>(r.below(2))), body.put(uint32_t{0});
          body.put_bytes(test::above(0, 0.5));
          frames.push_back(about(Op::kScan, own_table_, k, table_sequence[k], body.take()));
          break;
        }
        case 19:
          frames.push_back(on_keys(Op::kErase, own_table_, k, ++table_sequence[k], keys_in(k, 2)));
          frames.back().parts[0].items += test::above(0, 0.5);
          break;
        case 15: frames.push_back(about(Op::kSnapshot, own_tensor_, s, tensor_sequence[s])); break;
        case 20: {
          const auto op = static_cast<VectorOp>(1 + r.below(kVectorOpMax));
          wire::VectorItem item;
          item.operation = static_cast<uint8_t>(op);
          if (has_other(op)) {
            item.object = r.below(3) == 0 ? own_tensor_.object : alike_.object;
            item.term = 1;
          }
          if (has_number(op)) item.a = r.next();
          const std::string body(reinterpret_cast<const char*>(&item), sizeof item);
          frames.push_back(
              about(writes(op) ? Op::kVector : Op::kDot, own_tensor_, s, tensor_sequence[s] += writes(op), body));
          break;
        }
        default:
          frames.push_back(about(r.below(2) == 0 ? Op::kRows : Op::kFingerprint, own_table_, k, table_sequence[k]));
      }
      Frame& last = frames.back();
      if (r.below(3) == 0 && last.header.object != 0) last.hyper = {0.1, 0.9, 0.99};
      if (r.below(3) == 0) last.header.flags = wire::kChecksummed;
      // Parts of several shards in one frame.
      if (last.header.object == own_tensor_.object && r.below(3) == 0) {
        test::FramePart other = last.parts[0];
        other.part.shard = 1 - other.part.shard;
        last.parts.push_back(other);
      }
    }
    if (r.below(20) == 0) frames.push_back(frame_of(Op::kGoodbye));
    for (size_t i = 0; i < frames.size(); ++i) {
      frames[i].header.request = i + 1;
      frames[i].header.session = sessions_;
      frames[i].header.app = i == 0 ? 0 : victim_.app;
    }
    return frames;
  }

  // Frames after which nothing of the victim's may change: what would be an honest push to it is none of ours.
  bool harmless(const std::string& bytes) const {
    for (size_t at = 0; at + 64 <= bytes.size(); ++at) {
      wire::Header h;
      std::memcpy(&h, bytes.data() + at, sizeof h);
      if (h.magic != wire::kMagic || !wire::decode(reinterpret_cast<const std::byte*>(bytes.data()) + at, &h).ok())
        continue;
      if (h.operation() == Op::kStep && pushes_to_victim(bytes, at, h)) return false;
    }
    return true;
  }

  bool pushes_to_victim(const std::string& bytes, size_t at, const wire::Header& h) const {
    at += 64;
    for (uint32_t i = 0; i < h.blocks && at + 64 <= bytes.size(); ++i) {
      wire::Block block;
      if (!wire::decode(reinterpret_cast<const std::byte*>(bytes.data()) + at, &block).ok()) return false;
      if (block.op != static_cast<uint8_t>(Op::kPull) &&
          (block.object == tensor_.object || block.object == table_.object))
        return true;
      at += 64 + block.bytes();
    }
    return false;
  }

  // Sends the bytes on a connection of their own; returns whatever came until its end.
  std::string throw_at(const std::string& bytes) {
    const test::SocketPair pair;
    CHECK_OK(host.adopt(pair.theirs, "fuzz", "fuzz" + std::to_string(sessions_)));
    test::Stream stream(pair.ours);
    size_t sent = 0;
    std::string answers;
    char got[1 << 16];
    const int64_t end = test::after_ms(20'000);
    if (bytes.empty()) stream.end_sending();  // the mutator may cut all of it
    for (bool open = true; open;) {
      pollfd p{stream.fd(), static_cast<short>(POLLIN | (sent < bytes.size() ? POLLOUT : 0)), 0};
      if (poll(&p, 1, 20'000) <= 0 || os::now_ns() > end) {
        test::fail(__FILE__, __LINE__, "a connection hangs");
        break;
      }
      if (sent < bytes.size()) {
        const ssize_t n = send(stream.fd(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) sent += static_cast<size_t>(n);
        if (n < 0 && errno != EAGAIN) sent = bytes.size();  // thrown out
        if (sent == bytes.size()) stream.end_sending();
      }
      if ((p.revents & (POLLIN | POLLHUP)) != 0) {
        const ssize_t n = recv(stream.fd(), got, sizeof got, MSG_DONTWAIT);
        open = n > 0 || (n < 0 && errno == EAGAIN);
        if (n > 0) answers.append(got, static_cast<size_t>(n));
      }
    }
    return answers;
  }

  // The victim is served, and has what it had.
  void check_victim(bool thorough) {
    const test::FramePart p = victim_.call_one(on_spans(Op::kPull, tensor_, 1, next_[1] - 1, {16'384, 4}));
    CHECK_OK(p.status());
    CHECK(p.numbers == expected_);
    if (!thorough) return;
    CHECK_EQ(prints(), print_);
    push_to_tensor(static_cast<uint32_t>(mutator.random.below(2)));
    CHECK(prints() != print_);
    print_ = prints();
  }

  Host host;
  Mutator mutator;

 private:
  static ObjectSpec fuzz_tensor() { return a_tensor("fuzz", {20'000}); }
  static ObjectSpec fuzz_table() { return a_table("fuzz_rows", 8); }
  ObjectSpec some_spec() {
    test::Random& r = mutator.random;
    const std::string name = "n" + std::to_string(r.below(40));
    const auto rule = static_cast<RuleKind>(r.below(9));
    ObjectSpec spec = r.below(2) == 0 ? a_tensor(name, {1 + r.below(50), 1 + r.below(50)}, Dtype::kFloat32, rule)
                                      : a_table(name, 1 + static_cast<uint32_t>(r.below(50)), rule);
    (spec.is_table ? spec.table.init : spec.tensor.init) = Init{static_cast<InitKind>(r.below(4)), -1, 1};
    return spec;
  }
  void push_to_tensor(uint32_t s) {
    const size_t n = s == 0 ? 16'384 : 3'616;
    const test::FramePart p =
        victim_.call_one(on_whole(Op::kPushPull, tensor_, s, next_[s]++, some_floats(&mutator.random, n)));
    CHECK_OK(p.status());
    if (s == 1) expected_ = p.numbers.substr(0, 16);
  }
  uint64_t prints() { return victim_.fingerprint(tensor_, 2) + victim_.fingerprint(table_, limits::kTableShards); }

  Peer victim_;
  Map tensor_, table_, own_tensor_, own_table_, alike_;
  uint64_t next_[2] = {1, 1};
  uint64_t print_ = 0, sessions_;
  std::string expected_;
};

}  // namespace

// The decoders alone, which is cheap: headers, blocks and the bodies of control messages, on copies that
// end with their allocation.
TEST(decoders_read_any_mutated_frame) {
  const uint64_t rounds = (test::accurate() ? 10'000'000 : 200'000) / test::kSlowness;
  Arena arena(test::seed());
  Mutator& mutator = arena.mutator;
  uint64_t done = 0, refused = 0;
  while (done < rounds) {
    for (const Frame& frame : arena.session()) {
      const std::string bytes = mutator.mutated(frame);
      const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes.size());
      std::memcpy(copy.get(), bytes.data(), bytes.size());
      ++done;
      wire::Header h;
      if (!wire::decode(copy.get(), &h).ok()) {
        ++refused;
        continue;
      }
      size_t at = limits::kSectionBytes;
      CHECK(h.length <= limits::kFrameBytesMax && h.blocks <= limits::kBlocksMax);
      for (uint32_t i = 0; i < h.blocks && at + limits::kSectionBytes <= bytes.size(); ++i) {
        wire::Block block;
        if (!wire::decode(copy.get() + at, &block).ok()) {
          ++refused;
          break;
        }
        at += limits::kSectionBytes;
        CHECK(block.body_bytes <= limits::kItemsBytesMax && block.numbers_bytes <= limits::kNumbersBytesMax);
        if (block.bytes() > bytes.size() - at) break;
        // A copy of the body alone, so that a read beyond its end is seen.
        const auto alone = std::make_unique_for_overwrite<std::byte[]>(block.body_bytes);
        std::memcpy(alone.get(), copy.get() + at, block.body_bytes);
        wire::Body read;
        if (wire::read(block, alone.get(), &read).ok()) {
          uint64_t items = 0;
          for (uint32_t k = 0; k < block.entries; ++k) items += read.at(block, k).items;
          CHECK(read.rest_bytes <= block.body_bytes && items <= uint64_t{block.entries} << 32);
        } else {
          ++refused;
        }
        const std::string body(reinterpret_cast<const char*>(copy.get()) + at, block.body_bytes);
        Hello hello;
        Welcome welcome;
        wire::VectorItem vector;
        refused += !wire::decode(reinterpret_cast<const std::byte*>(body.data()), block.body_bytes, &vector).ok();
        wire::PutItem put;
        refused += !wire::decode(reinterpret_cast<const std::byte*>(body.data()), block.body_bytes, 3, &put).ok();
        ObjectSpec spec;
        Map map;
        uint32_t shards = 0;
        refused += !decode(body, &hello).ok();
        refused += !decode(body, &welcome).ok();
        wire::Reader first(body), second(body);
        if (decode(&first, &spec).ok()) refused += !spec.shards(&shards).ok();
        if (decode(&second, &map).ok() && map.check(256, 8).ok()) CHECK(map.run_of(255).server < 8);
        at += block.bytes();
      }
    }
  }
  CHECK(refused > rounds / 10);
}

// Against a living host. After each stream the victim is looked at.
TEST(a_host_survives_mutated_streams_and_others_keep_what_they_have) {
  // S6: with those of the decoders 10^5 per commit where AddressSanitizer looks on; fewer where it does not.
  const uint64_t some = test::kSlowness == 2 ? 80'000 : 30'000;
  const uint64_t rounds = (test::accurate() ? 1'000'000 : some) / test::kSlowness;
  uint64_t done = 0, streams = 0, skipped = 0;
  for (uint64_t round = 0; done < rounds; ++round) {
    Arena arena(test::seed() * 1000 + round);
    for (int i = 0; i < 400 && done < rounds; ++i) {
      const std::string bytes = arena.mutator.stream(arena.session(), &done);
      if (!arena.harmless(bytes)) {
        ++skipped;
        continue;
      }
      arena.throw_at(bytes);
      arena.check_victim(i % 40 == 39);
      ++streams;
    }
    CHECK(test::eventually([&] { return arena.host.connections() == 1; }));
    CHECK(test::eventually([&] { return arena.host.waiting().used() == 0 && arena.host.answers().used() == 0; }));
    CHECK(arena.host.server().memory_bytes() <= kMemory);
    CHECK_OK(arena.host.close(test::after_ms(20'000)));
  }
  CHECK(skipped < streams / 4);
}

// Honest sessions, to see that the fuzzer starts from something that is served.
TEST(an_honest_stream_is_served_from_its_first_frame_to_its_last) {
  Arena arena(test::seed());
  for (int i = 0; i < 50; ++i) {
    std::vector<Frame> frames = arena.session();
    if (frames.back().header.op == static_cast<uint8_t>(Op::kGoodbye)) frames.pop_back();
    std::string bytes;
    for (const Frame& frame : frames) bytes += frame.bytes();
    CHECK(arena.harmless(bytes));
    const std::string answers = arena.throw_at(bytes);
    std::vector<bool> answered(frames.size() + 1);
    for (size_t at = 0; at < answers.size();) {
      wire::Header h;
      CHECK_OK(wire::decode(reinterpret_cast<const std::byte*>(answers.data()) + at, &h));
      if (h.request > frames.size()) break;
      answered[h.request] = true;
      at += limits::kSectionBytes + h.length;
    }
    CHECK(!answered[0]);
    for (size_t n = 1; n < answered.size(); ++n) CHECK(answered[n]);
    arena.check_victim(false);
  }
}

}  // namespace windlass::fuzz_test
