// Lane: one of a client's two connections to a server.
//
// Any thread may send: what the socket does not take at once stays queued. One thread at a time receives, the leader: a
// caller that waits for its answer, or else the thread of Links. So an answer wakes the very thread that waits for it,
// and a request that nobody waits for is still looked after.
//
// A connection that breaks is torn down by its leader; everything without an answer goes back into the outbox, and
// Links asks for a new connection. Frames, sequences and the server's records make the repetition harmless.
//
// Thread safety: every public method from any thread, except those that belong to the leader.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/os.h"
#include "client/trip.h"
#include "session/outbox.h"
#include "transport/messages.h"

namespace windlass {

class Links;

class Lane {
 public:
  Lane(Links& links, uint32_t server, uint8_t number);
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane();

  uint32_t server() const { return server_; }
  uint8_t number() const { return number_; }

  // Queues a trip; it is sent by the next pump_send().
  void submit(const Ref<Trip>& trip);
  // Sends what the socket takes without waiting.
  void pump_send();
  bool unsent();
  // Makes sure that somebody looks after what is under way: the leader, or the thread of Links.
  void attend();

  // keep_watch: for the thread of Links, which is told of what arrives anyway.
  bool try_lead(bool keep_watch = false);
  void unlead();
  bool watched();  // by the thread of Links
  bool ready() const { return state_.load(std::memory_order_acquire) == kReady; }
  bool connected() const { return state_.load(std::memory_order_acquire) != kDown; }
  int fd() const { return fd_.load(std::memory_order_relaxed); }
  // The leader's. Handles what has arrived; false when that was nothing. A broken connection is torn down.
  bool pump_receive();
  // The leader's. Asks after requests that have been without an answer for long.
  void maintain(int64_t now_ns);
  bool idle();
  bool has_freed();  // memory that the server need not keep any more
  // Whether answers have been coming so quickly that the next is worth waiting for awake.
  bool hot(int64_t now_ns) const { return now_ns - arrival_ns_.load(std::memory_order_relaxed) < limits::kHotNs; }

  // How long to wait awake for the answer to what was last sent: each part of it takes its time, on both sides.
  int64_t spin_ns() const { return spin_ns_.load(std::memory_order_relaxed); }

  // Whether the server is at work on something large, which it has nearly all of.
  bool sent_large(int64_t now_ns) const { return now_ns - large_ns_.load(std::memory_order_relaxed) < limits::kSpinNs; }

  // Whether it has been given something that all of its threads work on, for longer than anybody waits awake; where
  // they are on this host they want the cores.
  bool sent_to_all(int64_t now_ns) const {
    return now_ns - shared_ns_.load(std::memory_order_relaxed) < limits::kSpinNs;
  }

  // Where there is no connection: parts for shards that are on another server by now go on to it. Memory that the
  // server may still write is left to cut_off() and fail().
  void release_moved();

  // A new connection, authenticated.
  void attach(int fd);
  // Everything that is under way fails with this, and so does what comes later. In two steps: after cut_off() nothing
  // is sent or received any more, but nothing has ended yet; *segments gets the memory that the server may still write.
  void cut_off(const Status& status, std::vector<std::shared_ptr<const Segment>>* segments);
  void fail();
  // Breaks the connection if the server has been told of any of that memory; everything is then sent again.
  void break_if_told(const std::vector<std::shared_ptr<const Segment>>& segments);
  void say_goodbye();
  // What the server refused the connection with; ok when it did not.
  const Status& refusal() const { return refusal_; }

  // Nothing is sent or received while these are held; for a caller that takes its memory back.
  struct Hold {
    std::unique_lock<std::mutex> receiving, sending;
  };
  Hold hold() { return {std::unique_lock(receiving_), std::unique_lock(mutex_)}; }
  // With the hold: numbers on their way out are at `to` now instead of [from, from + bytes).
  void rebase(const std::byte* from, size_t bytes, const std::byte* to);
  // With the hold: what is arriving for the trip must not go into the caller's memory any more.
  void abandon(const Trip& trip);
  // Ends a trip that changes nothing on the server: it is not sent, or its answer is not waited for. False when it has
  // begun, unless `begun` may be ended as well, or is over.
  bool withdraw(const Ref<Trip>& trip, bool begun, const Status& status);
  // Whether none of the trip has left yet; `change` runs if so.
  template <class F>
  bool change_unsent(Trip& trip, F change) {
    std::lock_guard lock(mutex_);
    if (trip.begun) return false;
    change();
    return true;
  }

 private:
  enum State : uint8_t { kDown, kGreeting, kReady };
  enum Stage : uint8_t { kHeader, kExtensions, kPart, kItems, kNumbers, kPad };

  // Sending, with mutex_.
  bool unsent_locked() const;
  bool fill();
  void add_parts();
  void have_left(std::vector<Ref<Trip>>* ended);
  bool is_small(const Trip& trip) const;
  void begin_frame(const Ref<Trip>& trip);
  bool add_part(const Trip::Part& part, size_t* bytes);
  void add_piece(const void* data, size_t bytes);
  void watch(bool reading, bool writing);
  std::string hello_frame() const;
  bool announce(const Trip& trip);
  bool may_lie(const Trip& trip) const;
  std::string arena_frame(uint32_t id, uint64_t bytes, uint64_t request) const;
  // Receiving, with receiving_.
  bool receive();
  bool follow(Code code);
  void reset_parser();
  void expect(Stage stage, std::byte* to, size_t bytes);
  bool parse();
  bool advance();
  void find_part();
  bool expect_numbers();
  bool end_part();
  bool welcomed(Code code);
  bool heard(Code code);
  void heard_of_arena(Code code);
  bool broken_rule(const std::string& what);
  void tear_down(const std::string& why);
  // With both.
  void disconnect(std::vector<Ref<Trip>>* ended);
  void take_moved(const Ref<Trip>& trip, std::vector<Ref<Trip>>* strays);
  // With neither, or with receiving_. A trip that is being sent again ends later: its numbers are needed until then.
  void finish(const Ref<Trip>& trip);
  void conclude(const Ref<Trip>& trip);

  Links& links_;
  const uint32_t server_;
  const uint8_t number_;
  std::atomic<uint8_t> state_{kDown};
  std::atomic<int> fd_{-1};
  std::atomic<bool> led_{false};

  std::mutex mutex_;  // of what follows, which is for sending
  Outbox<Ref<Trip>> outbox_;
  Ref<Trip> sending_;               // whose frame is being prepared, part by part
  std::vector<Ref<Trip>> leaving_;  // whose frames are prepared and on their way out
  bool in_frame_ = false;
  bool checksums_ = false;
  std::vector<uint32_t> frame_parts_;  // of the trip, that the frame has
  size_t next_part_ = 0;
  Buffer scratch_;  // headers, items, and numbers that had to be gathered
  size_t scratch_used_ = 0;
  std::vector<os::Piece> pieces_;  // ready to be sent
  size_t piece_ = 0;
  std::string raw_;      // a frame without a trip: hello, ask, goodbye
  bool shares_ = false;  // the server is on the same host and may be given memory
  struct Announced {
    std::weak_ptr<const Segment> segment;
    uint64_t request = 0;
    bool known = false;  // the server has answered: until then numbers travel
  };
  std::map<uint32_t, Announced> announced_;  // what it has been given on this connection
  std::shared_ptr<const Segment> passing_;   // what goes beside the next byte
  std::vector<uint64_t> asked_;
  uint64_t asking_ = 0;                 // the request that asks
  std::atomic<int64_t> arrival_ns_{0};  // when something last arrived
  std::atomic<int64_t> large_ns_{0};    // when something large was last sent
  std::atomic<int64_t> shared_ns_{0};   // the same, of something that lies in arenas
  std::atomic<int64_t> spin_ns_{limits::kSpinNs};
  int64_t asked_ns_ = 0;  // when it was last asked
  int64_t ask_ns_ = 0;    // how long to wait before asking (again)
  uint64_t oldest_ = 0;   // the request that was waited for then
  bool watching_reading_ = false, watching_writing_ = false;
  Status failed_;
  std::vector<Ref<Trip>> ended_by_failure_;

  std::mutex receiving_;  // of what follows
  Buffer ahead_;          // read and not used yet
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  Stage stage_ = kHeader;
  std::byte* target_ = nullptr;  // where the bytes of the stage go
  size_t need_ = 0, got_ = 0;
  std::byte head_[limits::kSectionBytes], pad_[limits::kSectionBytes];
  wire::Header in_header_;
  wire::Part in_part_;
  uint64_t frame_left_ = 0;
  uint32_t parts_left_ = 0;
  Ref<Trip> in_trip_;                   // null: nobody waits for it any more
  Trip::Part* in_trip_part_ = nullptr;  // likewise
  std::string in_items_;
  Buffer in_numbers_, raw_items_;
  std::byte* landed_ = nullptr;    // where the numbers went, if not into in_numbers_
  bool discarded_ = false;         // some of the numbers went nowhere
  std::vector<Ref<Trip>> strays_;  // that go on as soon as the locks are free
  std::string complaint_;          // why the connection will be broken
  Status refusal_;
};

}  // namespace windlass
