#include "server/net/connection.h"

#include <algorithm>
#include <new>

#include "base/crc32c.h"
#include "server/net/answers.h"
#include "server/net/frame_batch.h"
#include "server/net/incoming.h"
#include "server/net/waiting_block.h"

namespace windlass {

using wire::Op;

namespace {

using wire::kSection;
constexpr size_t kLeastFrame = 2 * kSection;  // a header and a block

constexpr size_t kKeptPostedBytes = 2 * limits::kAnswerBytes;
thread_local Buffer t_posted;  // for answers of blocks that waited

}  // namespace

Connection::Connection(Host& host, int fd, std::string peer, std::string key)
    : host_(host), channel_(host, fd), peer_(std::move(peer)), key_(std::move(key)) {}

bool Connection::wait_ended(int64_t deadline_ns) const {
  while (ended_.load(std::memory_order_acquire) == 0) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(ended_, 0, left);
  }
  return true;
}

void Connection::run() {
  while (!channel_.broken() && channel_.wait_for_frame()) {
    Status status;
    try {
      status = serve();
    } catch (const std::bad_alloc&) {  // this client's request was one too many; the others go on
      status = Status(Code::kResourceExhausted, "no memory for a request");
    }
    if (status.ok()) continue;
    if (status.code() != Code::kServerLost) {
      wire::Header about;
      about.op = static_cast<uint8_t>(Op::kHello);
      answer_control(about, status, {});
    }
    break;
  }
  shut_down();
  forget_waiting(false);
  end_sender();
  ended_.store(1, std::memory_order_release);
  os::wake_all(ended_);
  if (client_ != nullptr) host_.leave(client_);
}

// Answers a hello that has not been read: it is a client's first request.
void Connection::refuse(const Status& why) {
  wire::Header hello;
  hello.op = static_cast<uint8_t>(Op::kHello);
  hello.request = wire::kHelloRequest;
  answer_control(hello, why, {});
  shut_down();
}

void Connection::deliver(Ticket* const* tickets, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    auto& ticket = static_cast<RemoteTicket&>(*tickets[i]);
    WaitingBlock& block = ticket.block();
    if (block.ended(ticket.index(), std::move(ticket.outcome()), ticket.due())) insert_due(block.shared_from_this());
  }
  send_what_fits();
}

// ---- answers of blocks that waited --------------------------------------------------------------------------------

bool Connection::has_sender() {
  if (has_sender_.load(std::memory_order_acquire)) return true;
  std::lock_guard lock(due_mutex_);
  if (has_sender_.load(std::memory_order_relaxed)) return true;
  if (over_ || !host_.run_beside([self = shared_from_this()] { self->run_sender(); })) return false;
  has_sender_.store(true, std::memory_order_release);
  return true;
}

void Connection::post(std::shared_ptr<WaitingBlock> block) {
  insert_due(std::move(block));
  send_what_fits();
}

// Higher priorities first, equal ones in order.
void Connection::insert_due(std::shared_ptr<WaitingBlock> block) {
  std::lock_guard lock(due_mutex_);
  if (over_) return;
  if (block->shows_update()) {
    if (client_->updates_due.load(std::memory_order_relaxed) == 0)
      client_->updates_asked.store(block->asked(), std::memory_order_relaxed);
    client_->updates_due.fetch_add(1, std::memory_order_release);
  }
  const auto behind = std::find_if(due_.rbegin(), due_.rend(), [&](const auto& other) {
    return other->frame().priority >= block->frame().priority;
  });
  due_.insert(behind.base(), std::move(block));
}

// The next block whose answer has at most so many bytes.
std::shared_ptr<WaitingBlock> Connection::next_due(uint64_t bytes_max) {
  std::lock_guard lock(due_mutex_);
  if (due_.empty() || due_.front()->answer_bytes() > bytes_max) return nullptr;
  std::shared_ptr<WaitingBlock> block = std::move(due_.front());
  due_.pop_front();
  return block;
}

void Connection::answer(WaitingBlock& block, Answers* answers, Freed* freed) {
  const bool showed_update = block.shows_update();
  answers->begin(block.frame());
  if (block.answer(answers, freed)) block.answered();
  if (showed_update && client_->updates_due.fetch_sub(1, std::memory_order_acq_rel) == 1)
    os::wake_all(client_->updates_due);
}

// A block, and small ones after it, as many as may leave together.
void Connection::answer_some(std::shared_ptr<WaitingBlock> block, Answers* answers, Freed* freed) {
  for (uint64_t made = 0; block != nullptr;) {
    answer(*block, answers, freed);
    made += block->answer_bytes() + limits::kSectionBytes;
    const uint64_t room = limits::kAnswerBytes - std::min<uint64_t>(made, limits::kAnswerBytes);
    block = made < limits::kAnswerBytes ? next_due(std::min<uint64_t>(room, limits::kBulkBytesMin)) : nullptr;
  }
  answers->flush();
}

void Connection::send_what_fits() {
  Freed freed;
  for (bool more = true; more;) {
    more = false;
    const std::unique_lock making(making_, std::try_to_lock);
    const std::unique_lock hold = making.owns_lock() ? channel_.try_hold() : std::unique_lock<std::mutex>();
    if (hold.owns_lock()) {
      // Those of one request leave together, and large ones one by one.
      AnswerQuota::Room room;
      std::shared_ptr<WaitingBlock> block = next_due(limits::kBulkBytesMin);
      if (block == nullptr) {
        uint64_t bytes = 0;
        bool calls = false;
        {
          std::lock_guard lock(due_mutex_);
          if (due_.empty()) break;
          bytes = due_.front()->answer_bytes();
          calls = due_.front()->calls();  // the user's function may take seconds: the sender runs it
        }
        if (!calls && host_.answers().take(Answers::memory_for(bytes), &room)) block = next_due(bytes);
      }
      if (block != nullptr) {
        Answers answers(channel_, block->frame(), &t_posted, true);
        answer_some(std::move(block), &answers, &freed);
        more = true;
        continue;
      }
    }
    std::lock_guard lock(due_mutex_);
    if (due_.empty()) break;
    calls_.fetch_add(1, std::memory_order_seq_cst);
    os::wake_all(calls_);
  }
  t_posted.shrink(kKeptPostedBytes);
  windlass::deliver(&freed);
}

void Connection::run_sender() {
  for (;;) {
    const uint32_t seen = calls_.load(std::memory_order_seq_cst);
    Freed freed;
    {
      std::lock_guard making(making_);
      channel_.flush();
      for (;;) {
        uint64_t bytes = 0;
        bool calls = false;
        {
          std::lock_guard lock(due_mutex_);
          if (over_) return;
          if (due_.empty()) break;
          bytes = due_.front()->answer_bytes();
          calls = due_.front()->calls();
        }
        AnswerQuota& quota = calls ? host_.results() : host_.answers();
        const uint64_t need = calls ? bytes : Answers::memory_for(bytes);
        AnswerQuota::Room room;
        if (bytes > limits::kBulkBytesMin && !quota.take(need, &room)) {
          t_posted.shrink(kKeptPostedBytes);
          const auto gone = [&] { return channel_.gone(); };
          if (!quota.await(need, client_->whose(), gone, &room)) return;
        }
        std::shared_ptr<WaitingBlock> block = next_due(bytes);
        if (block == nullptr) continue;  // another came before it
        Answers answers(channel_, block->frame(), &t_posted);
        answer_some(std::move(block), &answers, &freed);
        if (!freed.empty()) break;
      }
    }
    if (!freed.empty()) {
      windlass::deliver(&freed);
      continue;
    }
    t_posted.shrink(kKeptPostedBytes);
    os::wait(calls_, seen, -1);
  }
}

void Connection::end_sender() {
  std::deque<std::shared_ptr<WaitingBlock>> dropped;
  {
    std::lock_guard lock(due_mutex_);
    over_ = true;
    dropped.swap(due_);
    calls_.fetch_add(1, std::memory_order_seq_cst);
  }
  os::wake_all(calls_);
  for (const auto& block : dropped) {
    if (block->shows_update()) client_->updates_due.fetch_sub(1, std::memory_order_acq_rel);
  }
}

// ---- requests that wait -------------------------------------------------------------------------------------------

void Connection::waits(const std::shared_ptr<WaitingBlock>& block) {
  std::lock_guard lock(waiting_mutex_);
  const uint64_t request = block->frame().request;
  std::atomic<uint32_t>* counter = nullptr;
  if (waiting_.count(request) == 0) {
    counter = block->reads() ? &reads_waiting_ : &others_waiting_;
    counter->fetch_add(1, std::memory_order_relaxed);
  }
  waiting_.emplace(request, Listed{block, counter});
}

void Connection::waits_no_more(const WaitingBlock& block) {
  std::lock_guard lock(waiting_mutex_);
  std::atomic<uint32_t>* counter = nullptr;
  const auto [begin, end] = waiting_.equal_range(block.frame().request);
  for (auto it = begin; it != end;) {
    const bool gone = it->second.block.expired();
    if (gone && it->second.counter != nullptr) counter = it->second.counter;
    it = gone ? waiting_.erase(it) : std::next(it);
  }
  if (counter == nullptr) return;
  const auto other = waiting_.find(block.frame().request);
  if (other != waiting_.end()) {
    other->second.counter = counter;
  } else {
    counter->fetch_sub(1, std::memory_order_relaxed);
  }
}

std::vector<std::shared_ptr<WaitingBlock>> Connection::waiting_blocks() {
  std::vector<std::shared_ptr<WaitingBlock>> blocks;
  std::lock_guard lock(waiting_mutex_);
  for (const auto& [request, listed] : waiting_) blocks.push_back(listed.block.lock());
  std::erase(blocks, nullptr);
  return blocks;
}

void Connection::forget_waiting(bool overdue_only) {
  for (const std::shared_ptr<WaitingBlock>& block : waiting_blocks()) {
    if (!overdue_only || block->overdue()) block->forget();
  }
}

bool Connection::is_window_full(bool reads) {
  const std::atomic<uint32_t>& waiting = reads ? reads_waiting_ : others_waiting_;
  const size_t most = reads ? limits::kWindowMax : limits::kWindowMax + limits::kPatientMax;
  if (waiting.load(std::memory_order_relaxed) < most) return false;
  forget_waiting(true);
  return waiting.load(std::memory_order_relaxed) >= most;
}

bool Connection::expects(const wire::Header& header) const {
  return !header.answer() && header.request != 0 && client_ != nullptr && !wire::is_control(header.operation()) &&
         header.session == client_->incarnation && header.app == client_->app;
}

Status Connection::serve() {
  if (channel_.has_ahead(2 * kLeastFrame)) {
    const Ref<FrameBatch> batch(new FrameBatch(shared_from_this()));
    if (batch->take()) {
      batch->call_help(host_.server());
      batch->help();
      return batch->finish();
    }
  }
  return serve_frame();
}

Status Connection::serve_frame() {
  std::byte head[kSection];
  if (!channel_.read(head, kSection)) return connection_ended("within a header");
  wire::Header header;
  WL_RETURN_IF_ERROR(wire::decode(head, &header));
  channel_.count_requests(1);
  if (header.answer()) return Status(Code::kProtocolError, "frame: an answer, expected a request");
  if (header.request == 0) return Status(Code::kProtocolError, "frame: request 0");
  const Op op = header.operation();
  if (op == Op::kHello) return serve_control(header);
  if (client_ == nullptr) return Status(Code::kProtocolError, std::string(name_of(op)) + " before hello");
  if (header.session != client_->incarnation || header.app != client_->app) {
    return Status(Code::kProtocolError, std::string(name_of(op)) + ": of another session or app than said hello");
  }
  if (wire::is_control(op)) return serve_control(header);

  const Ref<Incoming> incoming(new Incoming(shared_from_this(), header));
  incoming->call_help(host_.server());
  incoming->help();
  return incoming->finish();
}

// Serves operations that are about no shard: one small block with a body.
Status Connection::serve_control(const wire::Header& header) {
  std::string body;
  uint64_t left = header.length;
  if (header.blocks > 1) return Status(Code::kProtocolError, "frame: expected one block");
  Status corrupt;
  if (header.blocks == 1) {
    std::byte head[kSection];
    wire::Block block;
    if (!channel_.read(head, kSection)) return connection_ended("within a frame");
    WL_RETURN_IF_ERROR(wire::decode(head, &block));
    left -= kSection;
    if (block.body_bytes > limits::kBodyBytesMax || block.bytes() != left || block.numbers_bytes != 0)
      return Status(Code::kProtocolError, "block: a body of " + std::to_string(block.body_bytes) + " bytes, at most " +
                                              std::to_string(limits::kBodyBytesMax));
    body.resize(wire::padded(block.body_bytes));
    if (!channel_.read(body.data(), body.size())) return connection_ended("within a body");
    body.resize(block.body_bytes);
    if (crc32c(body.data(), body.size()) != block.body_crc) {
      corrupt = Status(Code::kCorrupt, "the checksum of the body is wrong");
      // A file may have come with it, which would be taken for the next arena's.
      if (header.operation() == Op::kArena) channel_.files().lost = true;
    }
    left = 0;
  }
  if (left != 0) return Status(Code::kProtocolError, "frame: longer than its blocks");
  std::vector<std::string> answers;
  const Status status = corrupt.ok() ? control(header, body, &answers) : corrupt;
  if (header.operation() == Op::kGoodbye) return connection_ended("with goodbye");
  answer_control(header, status, answers);
  // Its client comes again with a new connection; hellos that it has sent on this one need not wait, too.
  if (client_ == nullptr && status.code() == Code::kTimeout) return connection_ended("with a hello in vain");
  return {};
}

Status Connection::control(const wire::Header& header, const std::string& body, std::vector<std::string>* answers) {
  switch (header.operation()) {
    case Op::kHello: answers->emplace_back(); return hello(header, body, &answers->back());
    case Op::kGoodbye: host_.goodbye(client_); return {};
    case Op::kAsk: answers->push_back(held(body)); return {};
    case Op::kArena: return arena(body);
    case Op::kEnter: {
      wire::Reader reader(body);
      const auto clock = reader.get<uint64_t>();
      if (!reader.at_end()) return Status(Code::kProtocolError, "enter: malformed");
      if (client_->reads) return no_clock("enter");
      ClockReport report;
      WL_RETURN_IF_ERROR(host_.enter(*client_, clock, &report));
      answers->push_back(encode(report));
      return {};
    }
    case Op::kOpen: {
      wire::Reader reader(body);
      ObjectSpec spec;
      Map map;
      WL_RETURN_IF_ERROR(decode(&reader, &spec));
      WL_RETURN_IF_ERROR(host_.open(spec, !client_->reads, &map));
      wire::Writer writer;
      encode(map, &writer);
      answers->push_back(writer.take());
      return {};
    }
    case Op::kAttach:
    case Op::kDetach:
    case Op::kDelete: {
      wire::Reader reader(body);
      ObjectSpec spec;
      Map map;
      WL_RETURN_IF_ERROR(decode(&reader, &map));
      WL_RETURN_IF_ERROR(decode(&reader, &spec));
      answers->emplace_back();
      if (header.operation() == Op::kDelete) return host_.remove(*client_, spec, map.object);
      if (header.operation() == Op::kAttach) return host_.attach(spec, map, !client_->reads);
      if (client_->reads) return Status(Code::kAccessDenied, "detach of '" + spec.own_name() + "'" + kOnlyReads);
      return host_.detach(spec, map);
    }
    case Op::kList: {
      std::vector<Catalogue::Entry> entries;
      WL_RETURN_IF_ERROR(host_.list(&entries));
      for (const Catalogue::Entry& entry : entries) {
        wire::Writer writer;
        encode(entry.map, &writer);
        encode(entry.spec, &writer);
        answers->push_back(writer.take());
      }
      return {};
    }
    default: return Status(Code::kInternal, "no such operation");
  }
}

Status Connection::hello(const wire::Header& header, const std::string& body, std::string* answer) {
  if (client_ != nullptr && header.session != client_->incarnation)
    return Status(Code::kProtocolError, "hello: a second time, as another session");
  Hello hello;
  WL_RETURN_IF_ERROR(decode(body, &hello));
  if (client_ == nullptr) WL_RETURN_IF_ERROR(host_.welcome(shared_from_this(), hello, key_, header.session, &client_));
  *answer = encode(Welcome{host_.incarnation(), client_->app});
  return {};
}

// The file came with the first byte of this frame, or of an earlier one that did not take it.
Status Connection::arena(const std::string& body) {
  wire::Reader reader(body);
  const auto id = reader.get<uint32_t>();
  reader.get<uint32_t>();
  const auto bytes = reader.get<uint64_t>();
  if (!reader.at_end() || id == 0) return Status(Code::kProtocolError, "arena: malformed");
  if (bytes == 0) {
    client_->arenas.drop(id);
    return {};
  }
  os::Files& files = channel_.files();
  if (files.lost) return Status(Code::kProtocolError, "arena: more files came than are expected");
  if (files.n == 0) return Status(Code::kProtocolError, "arena " + std::to_string(id) + ": no file came with it");
  const int file = files.fds[0];
  std::copy(files.fds + 1, files.fds + files.n, files.fds);
  --files.n;
  return client_->arenas.add(id, bytes, file, host_.arena_bytes_max());
}

// Answers which of the requests wait here, and for whom: for each its number, a rank (or kOutsider) and its clock.
std::string Connection::held(const std::string& asked) {
  wire::Reader reader(asked);
  wire::Writer writer;
  while (reader.left() >= sizeof(uint64_t)) {
    const auto id = reader.get<uint64_t>();
    std::vector<std::shared_ptr<WaitingBlock>> blocks;
    {
      std::lock_guard lock(waiting_mutex_);
      const auto [begin, end] = waiting_.equal_range(id);
      for (auto it = begin; it != end; ++it) blocks.push_back(it->second.block.lock());
    }
    View::Worker blocker{Gate::kOutsider, 0};
    bool any = false;
    for (const std::shared_ptr<WaitingBlock>& block : blocks) {
      if (block != nullptr && blocker.rank == Gate::kOutsider) any = block->waits_for(&blocker) || any;
    }
    if (!any) continue;
    writer.put(id);
    writer.put(blocker.clock);
    writer.put(blocker.rank);
    writer.put(uint32_t{0});
  }
  return writer.take();
}

void Connection::answer_control(const wire::Header& header, const Status& status,
                                const std::vector<std::string>& bodies) {
  Buffer buffer;
  Answers answers(channel_, header, &buffer);
  if (!status.ok()) {
    answers.add_all({0, header.op}, 0, status);
    return answers.flush();
  }
  const size_t n = std::max<size_t>(bodies.size(), 1);
  for (size_t i = 0; i < n; ++i) {
    Outcome outcome;
    outcome.value = i >= bodies.size() ? 0 : n;  // how many there are
    if (i < bodies.size()) outcome.body = bodies[i];
    if (answers.open(0) == nullptr) return;
    constexpr uint64_t kNowhere = 0;
    answers.add({static_cast<uint32_t>(i), header.op}, &outcome, 1, &kNowhere, false);
  }
  answers.flush();
}

}  // namespace windlass
