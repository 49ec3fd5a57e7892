// Closes of iterations, as servers see them: out of order, again, late.
#include <bit>

#include "base/test.h"
#include "server/host.h"
#include "server/net/peer_test.h"

namespace windlass::close_test {
namespace {

using test::a_tensor;
using test::bytes_of;
using test::Frame;
using test::FramePart;
using test::hello_as;
using test::in_step;
using test::on_whole;
using test::Peer;
using test::values_of;
using wire::Op;

constexpr uint64_t kN = 100;

Hello as_rank(uint32_t rank) {
  Hello hello = hello_as();
  hello.rank = rank;
  hello.world_size = 2;
  return hello;
}

// SGD under BSP, with a learning rate of 1.
ObjectSpec a_model() {
  ObjectSpec spec = a_tensor("w", {kN});
  spec.tensor.rule.kind = RuleKind::kSgd;
  spec.tensor.sync = {Sync::kBsp, 0, 0};
  return spec;
}

Frame push_of(const Map& map, uint64_t sequence, uint64_t clock, float value) {
  Frame f = on_whole(Op::kPush, map, 0, sequence, bytes_of(std::vector<float>(kN, value)));
  f.parts[0].part.clock = clock;
  return in_step({f}, {1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0});
}

Frame close_of(const Map& map, uint64_t to, uint64_t follows, double weight) {
  Frame f = test::about(Op::kClose, map, 0, 0, bytes_of<uint64_t>({follows}));
  f.parts[0].part.clock = to;
  f.parts[0].part.flags = wire::kCloses;
  f.parts[0].part.value = std::bit_cast<uint64_t>(weight);
  return in_step({f});
}

}  // namespace

// A worker that touched none of a shard's elements still counts in the mean there. Its closes may come over two
// connections, or as redirects.
TEST(a_close_that_passes_the_one_before_it_waits_for_it_so_that_no_weight_is_lost) {
  for (const bool passes : {false, true}) {
    Host host(2, ~uint64_t{0});
    Peer first = Peer::greeted(host, "first", 1, as_rank(0)), second = Peer::greeted(host, "second", 2, as_rank(1));
    const Map map = first.made(a_model());
    const uint64_t pushed = first.start(push_of(map, 1, 0, 2.0f));
    const Frame before = close_of(map, 1, 0, 1), after = close_of(map, 2, 1, 0);
    const uint64_t one = second.start(passes ? after : before);
    const uint64_t two = second.start(passes ? before : after);
    for (const FramePart& p : second.finish(one, 1)) CHECK_OK(p.status());
    for (const FramePart& p : second.finish(two, 1)) CHECK_OK(p.status());
    const uint64_t closed = first.start(close_of(map, 1, 0, 1));
    CHECK_OK(first.finish(pushed, 1).at(0).status());
    CHECK_OK(first.finish(closed, 1).at(0).status());
    Frame pull = on_whole(Op::kPull, map, 0, 1);
    pull.parts[0].part.clock = 1;
    CHECK_EQ(values_of<float>(first.call_one(pull).numbers)[0], -1.0f);  // 2, divided by both
  }
}

}  // namespace windlass::close_test
