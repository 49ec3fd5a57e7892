// What a lane decides: which request leaves next, on which of the two lanes, and what is sent again in which order.
#include "client/net/lane.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "client/totals_test.h"

namespace windlass::lane_test {
namespace {

using test::array_of;
using test::eventually;
using test::Hosts;
using test::Joined;
using test::now;
using test::op_of;
using test::Relay;
using test::soon;
using test::sums;
using wire::Op;

// A push on its way to the host.
struct Left {
  uint32_t object = 0;
  uint64_t sequence = 0;
  uint8_t lane = 0;
  bool operator==(const Left&) const = default;
};

// Notes pushes in the order in which they leave, and may keep answers from coming.
class Watch {
 public:
  std::string pass(Relay::Passing& passing, std::string frame) {
    if (passing.answer) return mute ? std::string() : frame;
    if (op_of(frame) != Op::kPush) return frame;
    wire::Header header;
    wire::Block block;
    std::memcpy(&header, frame.data(), sizeof header);
    std::memcpy(&block, frame.data() + limits::kSectionBytes, sizeof block);
    std::lock_guard lock(mutex_);
    left_.push_back({block.object, block.sequence, header.lane});
    return frame;
  }
  std::vector<Left> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(left_, {});
  }
  size_t count() {
    std::lock_guard lock(mutex_);
    return left_.size();
  }

  std::atomic<bool> mute{false};

 private:
  std::mutex mutex_;
  std::vector<Left> left_;
};

// A worker whose only lane for small requests is down until up() is called.
struct Scene {
  Watch watch;
  Relay relay{[this](Relay::Passing& passing, std::string frame) { return watch.pass(passing, std::move(frame)); }};
  Hosts hosts{1};
  Joined worker{hosts, &relay};
  std::vector<Ref<TensorCall>> calls;

  std::shared_ptr<TensorClient> tensor(const std::string& name, uint64_t n = 10) {
    return worker.tensor(name, sums({n}, Dtype::kInt64));
  }
  void push(TensorClient& t, uint8_t priority = 0) {
    std::vector<int64_t> g(t.spec().elements(), 1);
    const Array in = array_of(g.data(), {t.spec().elements()});
    calls.emplace_back();
    CHECK_OK(t.start(TensorRequest{.in = &in, .priority = priority}, How::kFuture, &calls.back(), soon()));
  }
  void down() {
    worker.stop_dialing();
    worker.cut_all();
    CHECK(eventually([&] { return !worker.links->lane(0, 0).connected(); }));
  }
  // The pushes that leave once the lane is up, until all calls are done.
  std::vector<Left> up() {
    (void)watch.take();
    worker.allow_dialing();
    for (const auto& call : calls) CHECK_OK(call->wait(soon()));
    return watch.take();
  }
};

}  // namespace

TEST(the_highest_priority_leaves_first_after_what_it_must_follow) {
  Scene s;
  const auto a = s.tensor("a"), b = s.tensor("b"), c = s.tensor("c");
  const uint32_t on_a = a->map().object, on_b = b->map().object, on_c = c->map().object;
  s.down();
  s.push(*a);
  s.push(*c);
  s.push(*b, 5);
  s.push(*a, 9);  // about the same shard as the first, which therefore leaves before it
  const std::vector<Left> expected = {{on_a, 1, 0}, {on_a, 2, 0}, {on_b, 1, 0}, {on_c, 1, 0}};
  CHECK(s.up() == expected);
}

TEST(what_has_no_answer_is_sent_again_in_its_order_with_its_sequences) {
  Scene s;
  const auto t = s.tensor("t");
  const uint32_t object = t->map().object;
  s.watch.mute = true;
  for (int i = 0; i < 5; ++i) s.push(*t, static_cast<uint8_t>(i));
  CHECK(eventually([&] { return s.watch.count() == 5; }));
  s.down();
  s.watch.mute = false;
  const std::vector<Left> again = s.up();
  CHECK(again.size() == 5);
  for (size_t i = 0; i < again.size(); ++i) CHECK((again[i] == Left{object, i + 1, 0}));
  std::vector<int64_t> out(10);
  const Array into = array_of(out.data(), {10});
  CHECK_OK(now(*t, TensorRequest{.out = &into}));
  CHECK_EQ(out[0], 5);  // the host had applied all of them
}

TEST(a_request_of_many_bytes_takes_the_lane_for_bulk) {
  Scene s;
  constexpr uint64_t kFew = limits::kBulkBytesMin / sizeof(int64_t) / 2,
                     kMany = limits::kBulkBytesMin / sizeof(int64_t);
  const auto few = s.tensor("few", kFew), many = s.tensor("many", kMany);
  s.push(*few);
  s.push(*many);
  std::vector<Left> left;
  for (const auto& call : s.calls) CHECK_OK(call->wait(soon()));
  left = s.watch.take();
  std::sort(left.begin(), left.end(), [](const Left& x, const Left& y) { return x.lane < y.lane; });
  CHECK(left.size() == 2);
  CHECK((left.front() == Left{few->map().object, 1, 0}));
  CHECK((left.back() == Left{many->map().object, 1, 1}));
}

}  // namespace windlass::lane_test
