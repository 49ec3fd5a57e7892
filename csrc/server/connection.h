// Connection: one client's connection to this server, and the thread that serves it.
//
// The thread reads a frame's header (server/channel.h); what is about shards becomes an Incoming, which reads and
// serves its parts; the rest (hello, open, attach, arena, ...) is answered here. A part is complete and its checksums
// are right before its shard hears of it.
//
// Thread safety: run() is the thread's own; the rest from any thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/channel.h"
#include "server/host.h"
#include "server/object/ticket.h"
#include "wire/frame.h"

namespace windlass {

class RemoteTicket;

class Connection : public Sink, public std::enable_shared_from_this<Connection> {
 public:
  Connection(Host& host, int fd, std::string peer, std::string key);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void run();
  void shut_down() { channel_.shut_down(); }
  Traffic traffic() const { return channel_.traffic(); }
  // Whether nothing that came on this connection is under way any more, by then.
  bool wait_ended(int64_t deadline_ns) const;

  Host& host() { return host_; }
  Channel& channel() { return channel_; }
  // Sends a frame without waiting for the client: what its socket does not take at once is sent by a thread that ends
  // when it has, those of higher priority first.
  void post(const std::byte* frame, size_t bytes, uint8_t priority);
  // Whether the frame is a request about shards, of the session that said hello.
  bool expects(const wire::Header& header) const;
  const std::shared_ptr<Guest>& guest() const { return guest_; }  // once it has said hello

  // Answers tickets that came on this connection, those of one request together, without waiting for the client.
  void deliver(Ticket* const* tickets, size_t n) override;

  // A part of the request waits in this shard; and does not wait any more.
  void parked_at(const RemoteTicket* ticket, uint32_t shard);
  void parked_no_more(const RemoteTicket* ticket);

 private:
  Status serve();
  Status serve_frame();
  Status serve_control(const wire::Header& header);
  Status control(const wire::Header& header, const std::string& body, std::vector<std::string>* answers);
  Status hello(const wire::Header& header, const std::string& body, std::string* answer);
  Status arena(const std::string& body);
  std::string held(const std::string& asked);
  void answer_control(const wire::Header& header, const Status& status, const std::vector<std::string>& bodies);
  void forget_parked();

  Host& host_;
  Channel channel_;
  const std::string peer_, key_;
  std::atomic<uint32_t> ended_{0};
  std::shared_ptr<Guest> guest_;

  std::atomic<uint32_t> unflushed_{0};  // frames that a thread is seeing to

  std::mutex parked_mutex_;
  struct Held {
    uint32_t parts = 0;  // that are parked
    std::shared_ptr<ServedObject> object;
    uint32_t shard = 0;  // of one of them
  };
  std::unordered_map<uint64_t, Held> parked_;                                              // by request
  std::map<std::pair<ServedObject*, uint32_t>, std::shared_ptr<ServedObject>> parked_at_;  // where any was ever parked
};

}  // namespace windlass
