#include "server/connection.h"

#include <algorithm>

#include "base/crc32c.h"
#include "server/answers.h"
#include "server/incoming.h"
#include "server/remote_ticket.h"
#include "server/several.h"

namespace windlass {

using wire::Op;

namespace {

constexpr size_t kSection = limits::kSectionBytes;
constexpr size_t kLeastFrame = 2 * kSection;  // a header and a part

constexpr size_t kKeptPostedBytes = size_t{4} << 20;
thread_local Buffer t_posted;  // of answers to others

Status ended(const char* where) { return Status(Code::kServerLost, std::string("the connection ended ") + where); }

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
    const Status status = serve();
    if (status.ok()) continue;
    if (status.code() != Code::kServerLost) {
      wire::Header about;
      about.op = static_cast<uint8_t>(Op::kHello);
      answer_control(about, status, {});
    }
    break;
  }
  shut_down();
  forget_parked();
  ended_.store(1, std::memory_order_release);
  os::wake_all(ended_);
  if (guest_ != nullptr) host_.leave(guest_);
}

void Connection::deliver(Ticket* const* tickets, size_t n) {
  const auto of = [&](size_t i) -> RemoteTicket& { return static_cast<RemoteTicket&>(*tickets[i]); };
  for (size_t i = 0; i < n;) {
    const uint64_t request = of(i).request();
    Answers answers(channel_, of(i).frame(), &t_posted, this);
    for (; i < n && of(i).request() == request; ++i) of(i).add_to(&answers);
    answers.flush();
  }
  t_posted.shrink(kKeptPostedBytes);
}

void post_to(Connection& connection, const std::byte* frame, size_t bytes, uint8_t priority) {
  connection.post(frame, bytes, priority);
}

void Connection::post(const std::byte* frame, size_t bytes, uint8_t priority) {
  if (channel_.send_now(frame, bytes, priority) || unflushed_.fetch_add(1, std::memory_order_acq_rel) != 0) return;
  host_.run_beside([self = shared_from_this()] {
    uint32_t seen = 0;
    do {
      seen = self->unflushed_.load(std::memory_order_acquire);
      self->channel_.flush();
    } while (!self->unflushed_.compare_exchange_strong(seen, 0, std::memory_order_acq_rel));
  });
}

void Connection::parked_at(const RemoteTicket* ticket, uint32_t shard) {
  std::lock_guard lock(parked_mutex_);
  Held& held = parked_[ticket->request()];
  if (held.parts++ == 0) {
    held.object = ticket->shared_object();
    held.shard = shard;
  }
  parked_at_.try_emplace({ticket->shared_object().get(), shard}, ticket->shared_object());
}

void Connection::parked_no_more(const RemoteTicket* ticket) {
  std::lock_guard lock(parked_mutex_);
  const auto it = parked_.find(ticket->request());
  if (it != parked_.end() && --it->second.parts == 0) parked_.erase(it);
}

void Connection::forget_parked() {
  decltype(parked_at_) places;
  {
    std::lock_guard lock(parked_mutex_);
    places.swap(parked_at_);
  }
  for (const auto& [at, object] : places) {
    Shard* const shard = object->find(at.second);
    with_turn(shard->turn, [&] {
      shard->parked.drop_if([&](const Waiting& w) {
        return &const_cast<Ticket&>(static_cast<const Ticket&>(w)).sink() == static_cast<const Sink*>(this);
      });
    });
  }
}

bool Connection::expects(const wire::Header& header) const {
  return !header.answer() && header.request != 0 && guest_ != nullptr && !wire::is_control(header.operation()) &&
         header.session == guest_->incarnation && header.app == guest_->app;
}

Status Connection::serve() {
  if (channel_.has_ahead(2 * kLeastFrame)) {
    const Ref<Several> several(new Several(shared_from_this()));
    if (several->take()) {
      several->call_help(host_.server());
      several->help();
      return several->finish();
    }
  }
  return serve_frame();
}

Status Connection::serve_frame() {
  std::byte head[kSection];
  if (!channel_.read(head, kSection)) return ended("within a header");
  wire::Header header;
  WL_RETURN_IF_ERROR(wire::decode(head, &header));
  channel_.count_requests(1);
  if (header.answer()) return Status(Code::kProtocolError, "frame: an answer, expected a request");
  if (header.request == 0) return Status(Code::kProtocolError, "frame: request 0");
  const Op op = header.operation();
  if (op == Op::kHello) return serve_control(header);
  if (guest_ == nullptr) return Status(Code::kProtocolError, std::string(name_of(op)) + " before hello");
  if (header.session != guest_->incarnation || header.app != guest_->app) {
    return Status(Code::kProtocolError, std::string(name_of(op)) + ": of another session or app than said hello");
  }
  if (wire::is_control(op)) return serve_control(header);

  channel_.expect_pause(header.parts);
  const Ref<Incoming> incoming(new Incoming(shared_from_this(), header));
  if (header.extension_bytes != 0) {
    std::byte extensions[limits::kExtensionBytesMax];
    if (!channel_.read(extensions, header.extension_bytes)) return ended("within extensions");
    WL_RETURN_IF_ERROR(incoming->request().read_extensions(extensions));
  }
  incoming->call_help(host_.server());
  incoming->help();
  return incoming->finish();
}

// Operations that are about no shard: one part, small, with a body.
Status Connection::serve_control(const wire::Header& header) {
  std::string body;
  uint64_t left = header.length;
  if (header.extension_bytes != 0 || header.parts > 1) return Status(Code::kProtocolError, "frame: expected one part");
  Status corrupt;
  if (header.parts == 1) {
    std::byte head[kSection];
    wire::Part part;
    if (!channel_.read(head, kSection)) return ended("within a frame");
    WL_RETURN_IF_ERROR(wire::decode(head, &part));
    left -= kSection;
    if (part.items_bytes > limits::kBodyBytesMax || part.bytes() != left || part.numbers_bytes != 0)
      return Status(Code::kProtocolError, "part: a body of " + std::to_string(part.items_bytes) + " bytes, at most " +
                                              std::to_string(limits::kBodyBytesMax));
    body.resize(wire::padded(part.items_bytes));
    if (!channel_.read(body.data(), body.size())) return ended("within a body");
    body.resize(part.items_bytes);
    if (crc32c(body.data(), body.size()) != part.items_crc) {
      corrupt = Status(Code::kCorrupt, "the checksum of the body is wrong");
      // Whether a file came with it is not known, and the next arena's could be taken for it.
      if (header.operation() == Op::kArena) channel_.files().lost = true;
    }
    left = 0;
  }
  if (left != 0) return Status(Code::kProtocolError, "frame: longer than its parts");
  std::vector<std::string> answers;
  const Status status = corrupt.ok() ? control(header, body, &answers) : corrupt;
  if (header.operation() == Op::kGoodbye) return ended("with goodbye");
  answer_control(header, status, answers);
  return {};
}

Status Connection::control(const wire::Header& header, const std::string& body, std::vector<std::string>* answers) {
  switch (header.operation()) {
    case Op::kHello: answers->emplace_back(); return hello(header, body, &answers->back());
    case Op::kGoodbye: host_.goodbye(guest_); return {};
    case Op::kAsk: answers->push_back(held(body)); return {};
    case Op::kArena: return arena(body);
    case Op::kEnter: {
      wire::Reader reader(body);
      const auto clock = reader.get<uint64_t>();
      if (!reader.at_end()) return Status(Code::kProtocolError, "enter: malformed");
      Standing standing;
      WL_RETURN_IF_ERROR(host_.enter(*guest_, clock, &standing));
      answers->push_back(encode(standing));
      return {};
    }
    case Op::kOpen: {
      wire::Reader reader(body);
      ObjectSpec spec;
      Map map;
      WL_RETURN_IF_ERROR(decode(&reader, &spec));
      WL_RETURN_IF_ERROR(host_.open(spec, &map));
      wire::Writer writer;
      encode(map, &writer);
      answers->push_back(writer.take());
      return {};
    }
    case Op::kAttach:
    case Op::kDetach: {
      wire::Reader reader(body);
      ObjectSpec spec;
      Map map;
      WL_RETURN_IF_ERROR(decode(&reader, &map));
      WL_RETURN_IF_ERROR(decode(&reader, &spec));
      answers->emplace_back();
      return header.operation() == Op::kAttach ? host_.attach(spec, map) : host_.detach(spec, map);
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
  if (guest_ != nullptr && header.session != guest_->incarnation)
    return Status(Code::kProtocolError, "hello: a second time, as another session");
  Hello hello;
  WL_RETURN_IF_ERROR(decode(body, &hello));
  if (guest_ == nullptr) WL_RETURN_IF_ERROR(host_.welcome(shared_from_this(), hello, key_, header.session, &guest_));
  *answer = encode(Welcome{host_.incarnation(), guest_->app});
  return {};
}

// The file came beside the first byte of this very frame, or of one before that did not ask for it.
Status Connection::arena(const std::string& body) {
  wire::Reader reader(body);
  const auto id = reader.get<uint32_t>();
  reader.get<uint32_t>();
  const auto bytes = reader.get<uint64_t>();
  if (!reader.at_end() || id == 0) return Status(Code::kProtocolError, "arena: malformed");
  if (bytes == 0) {
    guest_->arenas.drop(id);
    return {};
  }
  os::Files& files = channel_.files();
  if (files.lost) return Status(Code::kProtocolError, "arena: more files came than are expected");
  if (files.n == 0) return Status(Code::kProtocolError, "arena " + std::to_string(id) + ": no file came with it");
  const int file = files.fds[0];
  std::copy(files.fds + 1, files.fds + files.n, files.fds);
  --files.n;
  return guest_->arenas.add(id, bytes, file, host_.arena_bytes_max());
}

// Which of the requests are here and wait, and for whom: per request its number, a rank (or kOutsider) and its clock.
std::string Connection::held(const std::string& asked) {
  wire::Reader reader(asked);
  wire::Writer writer;
  while (reader.left() >= sizeof(uint64_t)) {
    const auto id = reader.get<uint64_t>();
    Held held;
    {
      std::lock_guard lock(parked_mutex_);
      const auto it = parked_.find(id);
      if (it == parked_.end()) continue;
      held = it->second;
    }
    View::Worker blocker{Gate::kOutsider, 0};
    Shard* const shard = held.object->find(held.shard);
    with_turn(shard->turn, [&] {
      shard->parked.each([&](Waiting& w) {
        auto& ticket = static_cast<Ticket&>(w);
        if (&ticket.sink() == this && ticket.order().second == id && ticket.gated() && shard->gate != nullptr)
          blocker = shard->gate->blocker(ticket.batch().caller.rank, ticket.asked(), os::now_ns());
      });
    });
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
  const size_t n = std::max<size_t>(bodies.size(), 1);
  for (size_t i = 0; i < n; ++i) {
    Outcome outcome;
    outcome.status = status;
    outcome.value = status.ok() && i >= bodies.size() ? 0 : n;  // how many there are
    if (i < bodies.size()) outcome.body = bodies[i];
    if (answers.open(0) == nullptr) return;
    answers.add(static_cast<uint32_t>(i), outcome);
    if (!status.ok()) break;
  }
  answers.flush();
}

}  // namespace windlass
