// Lane: one of a client's two connections to a server.
//
// Any thread may send: what the socket does not take at once stays queued. One thread at a time receives, the leader: a
// caller that waits for its answer, or else the thread of Links. So an answer wakes the thread that waits for it, and
// answers that nobody waits for are still received.
//
// The leader tears down a connection that breaks; everything without an answer goes back into the outbox, and Links
// asks for a new connection. Sequences and the server's records make the repetition harmless.
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
#include "client/net/trip.h"
#include "messages/messages.h"
#include "session/outbox.h"

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

  // Queues a trip; the next pump_send() sends it.
  void submit(const Ref<Trip>& trip);
  // Sends what the socket takes without waiting.
  void pump_send();
  bool unsent();
  // Makes sure that somebody receives for what is under way: the leader, or the thread of Links.
  void attend();

  // Makes the caller the leader, if there is none. keep_watch: for the thread of Links, which goes on watching the
  // socket.
  bool try_lead(bool keep_watch = false);
  void unlead();
  bool watched();  // the thread of Links watches the socket
  bool ready() const { return state_.load(std::memory_order_acquire) == kReady; }
  bool connected() const { return state_.load(std::memory_order_acquire) != kDown; }
  int fd() const { return fd_.load(std::memory_order_relaxed); }
  // Leader only. Handles what has arrived; false if that was nothing. Tears down a broken connection.
  bool pump_receive();
  // Leader only. Asks the server about requests that have had no answer for long.
  void maintain(int64_t now_ns);
  bool idle();
  bool has_freed();  // whether memory was freed that the server need not map any more
  // Whether answers come so quickly that spinning for the next is worth it.
  bool hot(int64_t now_ns) const { return now_ns - arrival_ns_.load(std::memory_order_relaxed) < limits::kHotNs; }

  // How long to spin for the answer to what was last sent: each part of it takes some time, on both sides.
  int64_t spin_ns() const { return spin_ns_.load(std::memory_order_relaxed); }

  // Whether something large was sent a moment ago: the server has nearly all of it, and works on it.
  bool sent_large(int64_t now_ns) const { return now_ns - large_ns_.load(std::memory_order_relaxed) < limits::kSpinNs; }

  // Whether the server was just sent work for all of its threads, which takes longer than anybody spins; on this host
  // its threads need the cores.
  bool sent_to_all(int64_t now_ns) const {
    return now_ns - shared_ns_.load(std::memory_order_relaxed) < limits::kSpinNs;
  }

  // Without a connection: redirects parts whose shards are on another server by now. Memory that the server may still
  // write is for cut_off() and fail().
  void release_moved();

  // Takes a new connection, which is authenticated.
  void attach(int fd);
  // Fails everything that is under way, and everything submitted later, with this status. In two steps: after cut_off()
  // nothing is sent or received any more, but nothing has ended yet; *segments gets the memory that the server may
  // still write. fail() then ends it.
  void cut_off(const Status& status, std::vector<std::shared_ptr<const Segment>>* segments);
  void fail();
  // Breaks the connection if the server has been told of any of that memory; everything is then sent again.
  void break_if_told(const std::vector<std::shared_ptr<const Segment>>& segments);
  void say_goodbye();
  // The error with which the server refused the connection; ok if it did not.
  const Status& refusal() const { return refusal_; }

  // While these are held nothing is sent or received: for a caller that takes its memory back.
  struct Hold {
    std::unique_lock<std::mutex> receiving, sending;
  };
  Hold hold() { return {std::unique_lock(receiving_), std::unique_lock(mutex_)}; }
  // With the hold: numbers on their way out are at `to` now instead of [from, from + bytes).
  void rebase(const std::byte* from, size_t bytes, const std::byte* to);
  // With the hold: numbers that are arriving for the trip no longer go into the caller's memory.
  void abandon(const Trip& trip);
  // Ends a trip that changes nothing on the server: it is not sent, or its answer is dropped. False if it is over, or
  // if it has begun and `begun` is false.
  bool withdraw(const Ref<Trip>& trip, bool begun, const Status& status);
  // Runs `change` if none of the trip has been sent yet; else false.
  template <class F>
  bool change_unsent(Trip& trip, F change) {
    std::lock_guard lock(mutex_);
    if (trip.begun) return false;
    change();
    return true;
  }

 private:
  enum State : uint8_t { kDown, kGreeting, kReady };
  enum Stage : uint8_t { kHeader, kBlock, kBody, kNumbers, kPad };

  // For sending, with mutex_.
  bool unsent_locked() const;
  bool fill();
  void add_blocks();
  void have_left(std::vector<Ref<Trip>>* ended);
  bool is_small(const Trip& trip) const;
  void begin_frame(const Ref<Trip>& trip);
  // A block of the frame that is being prepared, as it was when the frame was begun, even if parts are answered
  // meanwhile.
  struct Outgoing {
    wire::Block head;         // without checksums
    size_t first = 0, n = 0;  // in frame_parts_
    uint64_t work_bytes = 0;
  };
  Outgoing outgoing(uint32_t label, const Trip::Common* before);
  bool add_block(const Outgoing& block, size_t* bytes);
  void write_body(const Outgoing& block, std::byte* to) const;
  void gather_numbers(const Outgoing& block, std::byte* to) const;
  void add_piece(const void* data, size_t bytes);
  void watch(bool reading, bool writing);
  static std::string frame_of(wire::Header header, const std::string* body);
  std::string hello_frame() const;
  bool announce(const Trip& trip);
  bool may_share(const Trip& trip) const;
  std::string arena_frame(uint32_t id, uint64_t bytes, uint64_t request) const;
  // For receiving, with receiving_.
  bool receive();
  bool follow(const Trip::Part& part, Code code, const PartAnswer& answer);
  void reset_parser();
  void expect(Stage stage, std::byte* to, size_t bytes);
  bool parse();
  bool advance();
  bool find_block();
  bool expect_numbers();
  bool end_block();
  bool answer_parts();
  bool answer_part(Trip::Part* part, Code code, const PartAnswer& answer, const std::byte* numbers);
  bool welcomed(Code code, const std::string& said);
  bool heard(Code code);
  void heard_of_arena(Code code);
  bool broken_rule(const std::string& what);
  void tear_down(const std::string& why);
  // With both locks.
  void disconnect(std::vector<Ref<Trip>>* ended);
  void take_moved(const Ref<Trip>& trip, std::vector<Ref<Trip>>* redirected);
  void give_up(const Ref<Trip>& trip, const Status& status, std::vector<Ref<Trip>>* redirected);
  // With neither lock, or with receiving_. A trip that is being sent again ends later: its numbers are needed until
  // then.
  void finish(const Ref<Trip>& trip);
  void conclude(const Ref<Trip>& trip);

  Links& links_;
  const uint32_t server_;
  const uint8_t number_;
  std::atomic<uint8_t> state_{kDown};
  std::atomic<int> fd_{-1};
  std::atomic<bool> led_{false};

  std::mutex mutex_;  // guards what follows, which is for sending
  Outbox<Ref<Trip>> outbox_;
  Ref<Trip> sending_;               // whose frame is being prepared, block by block
  std::vector<Ref<Trip>> leaving_;  // whose frames are prepared and being sent
  bool in_frame_ = false;
  bool checksums_ = false;
  std::vector<Outgoing> frame_blocks_;
  std::vector<uint32_t> frame_parts_;  // of the trip: the parts of those blocks
  size_t next_block_ = 0;
  Buffer scratch_;  // headers, items, and numbers that had to be gathered
  size_t scratch_used_ = 0;
  std::vector<os::Piece> pieces_;  // ready to be sent
  size_t piece_ = 0;
  std::string raw_;      // a frame without a trip: hello, ask, goodbye
  bool shares_ = false;  // the server is on the same host, and memory may be shared with it
  struct Announced {
    std::weak_ptr<const Segment> segment;
    uint64_t request = 0;
    bool known = false;  // the server has answered; until then numbers travel
  };
  std::map<uint32_t, Announced> announced_;  // segments that were shared on this connection
  std::shared_ptr<const Segment> passing_;   // whose file goes with the next byte
  std::vector<uint64_t> asked_;
  uint64_t asking_ = 0;                 // the request number of that ask
  std::atomic<int64_t> arrival_ns_{0};  // when something last arrived
  std::atomic<int64_t> large_ns_{0};    // when something large was last sent
  std::atomic<int64_t> shared_ns_{0};   // the same for a request whose arrays lie in arenas
  std::atomic<int64_t> spin_ns_{limits::kSpinNs};
  int64_t asked_ns_ = 0;  // when the server was last asked
  int64_t ask_ns_ = 0;    // how long to wait before asking (again)
  uint64_t oldest_ = 0;   // the oldest request at that time
  bool watching_reading_ = false, watching_writing_ = false;
  Status failed_;
  std::vector<Ref<Trip>> ended_by_failure_;

  std::mutex receiving_;  // guards what follows
  Buffer ahead_;          // read and not used yet
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  Stage stage_ = kHeader;
  std::byte* target_ = nullptr;  // where the bytes of the stage go
  size_t need_ = 0, got_ = 0;
  std::byte head_[limits::kSectionBytes], pad_[limits::kSectionBytes];
  wire::Header in_header_;
  wire::Block in_block_;
  uint64_t frame_left_ = 0;
  uint32_t blocks_left_ = 0;
  Ref<Trip> in_trip_;       // null: nobody waits for the answer any more
  bool is_wanted_ = false;  // the block is one of the trip's and has no answer yet
  PartAnswer in_answer_;    // for all parts of the block; its body is the block's
  Buffer in_numbers_, in_body_;
  std::byte* landed_ = nullptr;        // where the numbers went, if not into in_numbers_
  bool discarded_ = false;             // some of the numbers were thrown away
  std::vector<Ref<Trip>> redirected_;  // to be sent on as soon as the locks are free
  std::string complaint_;              // why the connection will be broken
  Status refusal_;
  bool was_ready_ = false;
};

}  // namespace windlass
