// Connection: one client's connection to this server, and the thread that serves it.
//
// The thread reads a frame's header (server/net/channel.h). A request about shards becomes an Incoming, which reads and
// serves its blocks, or part of a FrameBatch; the rest (hello, open, attach, arena, ...) is answered here.
//
// Requests that had to wait are answered by whoever ended their wait, as far as the socket takes the answers at once.
// What is left is the sender's: a second thread, of connections that have needed one. It makes an answer when the one
// before has left, so a client that does not read costs one answer, and others nothing.
//
//     deliver() -> post() -> due_ -> send_what_fits()  -> socket
//                                 '- run_sender()      -> socket, as the client reads
//
// Thread safety: run() is the thread's own; the rest from any thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/host.h"
#include "server/net/channel.h"
#include "server/object/ticket.h"
#include "wire/frame.h"

namespace windlass {

class Answers;
class WaitingBlock;

class Connection : public Sink, public std::enable_shared_from_this<Connection> {
 public:
  Connection(Host& host, int fd, std::string peer, std::string key);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void run();
  // Instead of run(): tells the client why it is not taken on.
  void refuse(const Status& why);
  void shut_down() { channel_.shut_down(); }
  Traffic traffic() const { return channel_.traffic(); }
  // Waits until nothing that came on this connection is under way any more; false at the deadline.
  bool wait_ended(int64_t deadline_ns) const;

  Host& host() { return host_; }
  Channel& channel() { return channel_; }
  // Before a request that may have to wait: whether there is a thread that will send its answer.
  bool has_sender();
  // Back-pressure: whether as many requests of the client wait here as it may have without an answer. Forgets those
  // that it has given up.
  bool is_window_full(bool reads);
  // Whether the frame is a request about shards, from the session that said hello.
  bool expects(const wire::Header& header) const;
  const std::shared_ptr<ClientSession>& client() const { return client_; }  // once it has said hello

  // Answers tickets of this connection, those of one request together, without waiting for the client.
  void deliver(Ticket* const* tickets, size_t n) override;

  // waits(): entries of a block wait in their shards. waits_no_more(): it is about to be destroyed.
  void waits(const std::shared_ptr<WaitingBlock>& block);
  void waits_no_more(const WaitingBlock& block);
  // All entries of a block have ended or are due: sends its answer, without waiting for the client.
  void post(std::shared_ptr<WaitingBlock> block);

 private:
  Status serve();
  Status serve_frame();
  Status serve_control(const wire::Header& header);
  Status control(const wire::Header& header, const std::string& body, std::vector<std::string>* answers);
  Status hello(const wire::Header& header, const std::string& body, std::string* answer);
  Status arena(const std::string& body);
  std::string held(const std::string& asked);
  void answer_control(const wire::Header& header, const Status& status, const std::vector<std::string>& bodies);
  void forget_waiting(bool overdue_only);
  std::vector<std::shared_ptr<WaitingBlock>> waiting_blocks();
  void insert_due(std::shared_ptr<WaitingBlock> block);
  std::shared_ptr<WaitingBlock> next_due(uint64_t bytes_max);
  void send_what_fits();
  void run_sender();
  void answer(WaitingBlock& block, Answers* answers, Freed* freed);
  void answer_some(std::shared_ptr<WaitingBlock> block, Answers* answers, Freed* freed);
  void end_sender();

  Host& host_;
  Channel channel_;
  const std::string peer_, key_;
  std::atomic<uint32_t> ended_{0};
  std::shared_ptr<ClientSession> client_;

  std::mutex waiting_mutex_;
  struct Listed {
    std::weak_ptr<WaitingBlock> block;
    std::atomic<uint32_t>* counter;  // that counts the request; null if another of its blocks does
  };
  std::unordered_multimap<uint64_t, Listed> waiting_;           // by request
  std::atomic<uint32_t> reads_waiting_{0}, others_waiting_{0};  // requests

  // Answers of blocks that waited. Whoever has making_ makes them, one after the other, in the order of due_.
  std::atomic<bool> has_sender_{false};
  std::atomic<uint32_t> calls_{0};  // to the sender; it sleeps on this
  std::mutex making_;
  std::mutex due_mutex_;  // guards what follows; taken last
  std::deque<std::shared_ptr<WaitingBlock>> due_;
  bool over_ = false;
};

}  // namespace windlass
