// AnswerQuota: limits the memory of answers that are made and not sent yet. Who finds no room waits in line, workers
// before readers and lower ranks before higher ones.
//
//     used    |################|          line    rank 0   rank 3   reader
//                                                  may overdraw
//
// A worker need not wait for others to read: the lowest rank of an app in line may exceed the limit by one answer,
// unless one of the same app with the same or a lower rank still does. Readers may not. An answer that alone is larger
// than the limit is made when there is no other.
//
// Who holds room waits for nothing but its own client, which is dropped when it does not read. So room always comes
// back, and nobody waits in a circle. Nobody may wait in line while holding a turn or the right to send.
//
// Thread safety: every method from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "base/breaks.h"
#include "sync/gate.h"

namespace windlass {

class AnswerQuota {
 public:
  explicit AnswerQuota(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  // Whose answer it is.
  struct Whose {
    uint32_t rank = kReader;
    uint32_t app = 0;
    friend auto operator<=>(const Whose&, const Whose&) = default;
  };
  static constexpr uint32_t kReader = Gate::kOutsider;

  // Room for one answer, given back at its end.
  class Room {
   public:
    Room() = default;
    Room(Room&& other) noexcept { *this = std::move(other); }
    Room& operator=(Room&& other) noexcept {
      give_back();
      quota_ = std::exchange(other.quota_, nullptr);
      bytes_ = other.bytes_;
      overdraws_ = other.overdraws_;
      whose_ = other.whose_;
      return *this;
    }
    ~Room() { give_back(); }
    void give_back() {
      if (quota_ != nullptr) std::exchange(quota_, nullptr)->refund(*this);
    }

    // Gives back what is more than so many bytes.
    void shrink(uint64_t most) {
      if (quota_ == nullptr || bytes_ <= most) return;
      const uint64_t more = bytes_ - most;
      bytes_ = most;
      quota_->refund(more);
    }

   private:
    friend class AnswerQuota;
    AnswerQuota* quota_ = nullptr;
    uint64_t bytes_ = 0;
    bool overdraws_ = false;
    Whose whose_;
  };

  // Takes room if there is some and nobody waits for it.
  bool take(uint64_t bytes, Room* room) {
    if (line_length_.load(std::memory_order_seq_cst) != 0 || !charge(bytes)) return false;
    *room = made(bytes);
    return true;
  }
  // Takes room whatever there is, for what is left of an answer.
  void force(uint64_t bytes, Room* room) {
    used_.fetch_add(bytes, std::memory_order_seq_cst);
    *room = made(bytes);
  }
  // Waits for room. False once gone() says that nobody wants the answer any more.
  template <class Gone>
  bool await(uint64_t bytes, const Whose& whose, Gone gone, Room* room) {
    if (take(bytes, room)) return true;
    std::unique_lock lock(mutex_);
    const auto me = line_.insert(whose);
    line_length_.store(line_.size(), std::memory_order_seq_cst);
    bool is_gone = false;
    while (!(me == line_.begin() && charge(bytes, room)) && !overdraw(bytes, me, room) && !(is_gone = gone()))
      changed_.wait_for(lock, std::chrono::milliseconds(kLookMs));
    line_.erase(me);
    line_length_.store(line_.size(), std::memory_order_seq_cst);
    changed_.notify_all();
    return !is_gone;
  }
  uint64_t bytes_max() const { return bytes_max_; }
  bool contended() const { return line_length_.load(std::memory_order_relaxed) != 0; }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  static constexpr int kLookMs = 100;  // how often a waiter looks whether its client is still there

  using Line = std::multiset<Whose>;  // by rank; equal ones in order of arrival

  Room made(uint64_t bytes) {
    Room room;
    room.quota_ = this;
    room.bytes_ = bytes;
    return room;
  }
  bool charge(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_seq_cst);
    do {
      if (used != 0 && used + bytes > bytes_max_ && !broken(Break::kAnswers)) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst));
    return true;
  }
  bool charge(uint64_t bytes, Room* room) {
    if (!charge(bytes)) return false;
    *room = made(bytes);
    return true;
  }
  // With the lock.
  bool overdraw(uint64_t bytes, Line::iterator me, Room* room) {
    const auto of_my_app = [&](const Whose& other) { return other.app == me->app && other.rank <= me->rank; };
    if (me->rank == kReader || std::any_of(line_.begin(), me, of_my_app) ||
        std::any_of(overdrawn_.begin(), overdrawn_.end(), of_my_app))
      return false;
    force(bytes, room);
    room->overdraws_ = true;
    room->whose_ = *me;
    overdrawn_.insert(*me);
    return true;
  }
  void refund(uint64_t bytes) {
    used_.fetch_sub(bytes, std::memory_order_seq_cst);
    if (line_length_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  void refund(const Room& room) {
    used_.fetch_sub(room.bytes_, std::memory_order_seq_cst);
    if (!room.overdraws_ && line_length_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard lock(mutex_);
    if (room.overdraws_) overdrawn_.erase(overdrawn_.find(room.whose_));
    changed_.notify_all();
  }

  const uint64_t bytes_max_;
  std::atomic<uint64_t> used_{0};
  std::atomic<size_t> line_length_{0};

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Line line_, overdrawn_;
};

}  // namespace windlass
