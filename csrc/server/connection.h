// Connection: one client's connection to this server, and the thread that serves it.
//
// The thread reads a frame's header (server/channel.h); what is about shards becomes an Incoming, which reads and
// serves its parts; the rest (hello, open, attach, arena, ...) is answered here. A part is complete and its checksums
// are right before its shard hears of it.
//
// Thread safety: run() is the thread's own; the rest from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/channel.h"
#include "server/host.h"
#include "wire/frame.h"

namespace windlass {

class Connection : public std::enable_shared_from_this<Connection> {
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
  // Whether the frame is a request about shards, of the session that said hello.
  bool expects(const wire::Header& header) const;
  const std::shared_ptr<Guest>& guest() const { return guest_; }  // once it has said hello

  // A part of the request waits in this shard; and does not wait any more.
  void parked_at(uint64_t request, const std::shared_ptr<Hosted>& object, uint32_t shard);
  void parked_no_more(uint64_t request);

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

  std::mutex parked_mutex_;
  std::vector<uint64_t> parked_;                                         // requests with a part that is parked
  std::vector<std::pair<std::shared_ptr<Hosted>, uint32_t>> parked_at_;  // and where
};

}  // namespace windlass
