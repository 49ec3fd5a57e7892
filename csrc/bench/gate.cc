#include "bench/gate.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "base/hash.h"
#include "base/os.h"
#include "sync/gate.h"

namespace windlass {
namespace {

constexpr int64_t kStepNs = 50'000'000;
constexpr size_t kEventsMax = size_t{1} << 21;

// What happens to a gate during training, in order. kAgain is opens() for a worker that waits.
struct Event {
  enum Kind : uint8_t { kClose, kOpens, kAgain, kBlocker };
  Kind kind;
  uint32_t rank;
  uint64_t clock;
  int64_t now_ns;
};

Gate gate_of(const Sync& sync, uint32_t workers) {
  Gate gate(sync);
  View view;
  view.known = true;
  for (uint32_t rank = 0; rank < workers; ++rank) view.workers.push_back({rank, 0});
  gate.set_view(view, 0);
  return gate;
}

// As a server does it: makes the updates that are complete, in one go, as where nothing was pushed.
void close(Gate* gate, const Event& e) {
  gate->close(e.rank, e.clock, 1, e.now_ns);
  if (!gate->sync().rounds()) return;
  const uint64_t complete = gate->complete();
  if (complete <= gate->made()) return;
  gate->advance(complete);
  gate->forget(gate->made());
}

class History {
 public:
  History(const Sync& sync, uint32_t workers, size_t pulls) : gate_(gate_of(sync, workers)), clocks_(workers, 0) {
    for (uint32_t rank = 0; rank < workers; ++rank) begin(rank, 0);
    while (pulls_ < pulls && events_.size() < kEventsMax) next();
  }

  const std::vector<Event>& events() const { return events_; }
  size_t pulls() const { return pulls_; }

 private:
  struct Done {
    int64_t at_ns;
    uint32_t rank;
    friend bool operator>(const Done& a, const Done& b) {
      return a.at_ns != b.at_ns ? a.at_ns > b.at_ns : a.rank > b.rank;
    }
  };

  void begin(uint32_t rank, int64_t now_ns) {
    const uint64_t chance = mix(++drawn_);
    const auto more_ns = static_cast<int64_t>(chance >> 44);  // up to a millisecond: no two come at once
    steps_.push({now_ns + (chance % 8 == 0 ? 4 : 1) * kStepNs + more_ns, rank});
  }

  // The step that ends first: its worker closes it, and pulls.
  void next() {
    const auto [now, rank] = steps_.top();
    steps_.pop();
    const uint64_t clock = ++clocks_[rank];
    close(&gate_, add(Event::kClose, rank, clock, now));
    ++pulls_;
    add(Event::kOpens, rank, clock, now);
    if (gate_.opens(rank, clock, now)) {
      begin(rank, now);
    } else {
      add(Event::kBlocker, rank, clock, now);
      waiting_.push_back(rank);
    }
    std::erase_if(waiting_, [&, now = now, came = rank](uint32_t waits) {
      if (waits == came) return false;
      add(Event::kAgain, waits, clocks_[waits], now);
      if (!gate_.opens(waits, clocks_[waits], now)) return false;
      begin(waits, now);
      return true;
    });
  }

  const Event& add(Event::Kind kind, uint32_t rank, uint64_t clock, int64_t now_ns) {
    events_.push_back({kind, rank, clock, now_ns});
    return events_.back();
  }

  Gate gate_;
  std::vector<uint64_t> clocks_;
  std::vector<uint32_t> waiting_;
  std::priority_queue<Done, std::vector<Done>, std::greater<>> steps_;
  std::vector<Event> events_;
  size_t pulls_ = 0;
  uint64_t drawn_ = 0;
};

double replay_seconds(const Sync& sync, uint32_t workers, const std::vector<Event>& events) {
  Gate gate = gate_of(sync, workers);
  uint64_t open = 0;
  const int64_t begun_ns = os::now_ns();
  for (const Event& e : events) {
    switch (e.kind) {
      case Event::kClose: close(&gate, e); break;
      case Event::kOpens:
      case Event::kAgain: open += gate.opens(e.rank, e.clock, e.now_ns) ? 1 : 0; break;
      case Event::kBlocker: open += gate.blocker(e.rank, e.clock, e.now_ns).rank == e.rank ? 1 : 0; break;
    }
  }
  asm volatile("" : : "r"(open));  // keeps the calls
  return static_cast<double>(os::now_ns() - begun_ns) * 1e-9;
}

}  // namespace

GateTimes time_gate(const Sync& sync, uint32_t workers, size_t pulls, int repeats) {
  const History history(sync, workers, pulls);
  std::vector<Event> once;
  for (const Event& e : history.events()) {
    if (e.kind == Event::kClose || e.kind == Event::kOpens) once.push_back(e);
  }
  const auto count = static_cast<double>(std::max<size_t>(history.pulls(), 1));
  GateTimes times;
  for (int r = 0; r < repeats; ++r) {
    times.pull_seconds.push_back(replay_seconds(sync, workers, once) / count);
    times.asked_seconds.push_back(replay_seconds(sync, workers, history.events()) / count);
  }
  return times;
}

}  // namespace windlass
