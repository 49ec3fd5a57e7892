#include "client/net/lane.h"

#include <algorithm>

#include "client/net/links.h"
#include "client/net/remote_route.h"

namespace windlass {

using wire::Op;

Lane::Lane(Links& links, uint32_t server, uint8_t number) : links_(links), server_(server), number_(number) {
  reset_parser();
}

Lane::~Lane() {
  if (fd() >= 0) os::close_socket(fd());
}

bool Lane::try_lead(bool keep_watch) {
  if (led_.exchange(true, std::memory_order_seq_cst)) return false;
  if (!keep_watch) {
    std::lock_guard lock(mutex_);
    watch(false, false);
  }
  return true;
}

void Lane::unlead() {
  led_.store(false, std::memory_order_seq_cst);
  attend();
}

void Lane::attend() {
  std::lock_guard lock(mutex_);
  if (state_ == kDown) return;
  const bool reading = !led_.load(std::memory_order_seq_cst) && (!outbox_.idle() || state_ == kGreeting);
  watch(reading, unsent_locked());
}

void Lane::watch(bool reading, bool writing) {
  if (state_ == kDown || (reading == watching_reading_ && writing == watching_writing_)) return;
  watching_reading_ = reading;
  watching_writing_ = writing;
  links_.watch().change(fd(), links_.tag(*this), reading, writing);
}

void Lane::maintain(int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (state_ == kDown || !raw_.empty()) return;
  for (auto it = announced_.begin(); it != announced_.end(); ++it) {
    if (!it->second.segment.expired()) continue;
    raw_ = arena_frame(it->first, 0, links_.next_request());
    announced_.erase(it);
    return;
  }
  if (state_ == kGreeting) {
    if (now_ns - asked_ns_ < ask_ns_) return;
    raw_ = hello_frame();
  } else {
    // The oldest request decides: answers to others say nothing about it.
    const Ref<Trip>* const oldest = outbox_.oldest_sent();
    if (oldest == nullptr || (*oldest)->sent_ns == 0) return;
    if ((*oldest)->header.request != oldest_) {
      oldest_ = (*oldest)->header.request;
      ask_ns_ = limits::kAskMs * int64_t{1'000'000};
    }
    if (now_ns - std::max((*oldest)->sent_ns, asked_ns_) < ask_ns_) return;
    asked_ = outbox_.to_ask(limits::kAskedMax);
    wire::Header header;
    header.op = static_cast<uint8_t>(Op::kAsk);
    header.request = asking_ = links_.next_request();
    header.session = links_.incarnation();
    header.app = links_.app_number(server_);
    const std::string body(reinterpret_cast<const char*>(asked_.data()), asked_.size() * sizeof(uint64_t));
    raw_ = frame_of(header, &body);
  }
  asked_ns_ = now_ns;
  ask_ns_ = std::min<int64_t>(2 * ask_ns_, limits::kAskMsMax * int64_t{1'000'000});
}

std::string Lane::hello_frame() const {
  wire::Header header;
  header.op = static_cast<uint8_t>(Op::kHello);
  header.request = wire::kHelloRequest;
  header.session = links_.incarnation();
  const std::string body = encode(links_.hello(*this));
  return frame_of(header, &body);
}

void Lane::attach(int fd) {
  {
    std::scoped_lock lock(receiving_, mutex_);
    if (state_ != kDown || !failed_.ok()) {
      os::close_socket(fd);
      return;
    }
    os::set_up_socket(fd, links_.stall_ms());
    os::close_after_fork(fd, true);
    checksums_ = links_.checksums(fd);
    shares_ = links_.shares(fd);
    fd_ = fd;
    state_ = kGreeting;
    raw_ = hello_frame();
    asked_ns_ = os::now_ns();
    ask_ns_ = limits::kAskMs * int64_t{1'000'000};
    watching_reading_ = watching_writing_ = false;
    links_.watch().add(fd, links_.tag(*this));
  }
  pump_send();
  attend();
}

void Lane::say_goodbye() {
  {
    std::lock_guard lock(mutex_);
    if (state_ != kReady || in_frame_) return;
    wire::Header header;
    header.op = static_cast<uint8_t>(Op::kGoodbye);
    header.request = links_.next_request();
    header.session = links_.incarnation();
    header.app = links_.app_number(server_);
    raw_ = frame_of(header, nullptr);
  }
  pump_send();
}

void Lane::cut_off(const Status& status, std::vector<std::shared_ptr<const Segment>>* segments) {
  std::scoped_lock lock(receiving_, mutex_);
  if (!failed_.ok()) return;
  failed_ = status;
  disconnect(&ended_by_failure_);
  outbox_.each([&](uint64_t, const Ref<Trip>& trip) {
    if (trip->in_place) segments->insert(segments->end(), trip->segments.begin(), trip->segments.end());
  });
}

void Lane::fail() {
  std::vector<Ref<Trip>> ended, unanswered, redirected;
  {
    std::scoped_lock lock(receiving_, mutex_);
    ended.swap(ended_by_failure_);
    outbox_.each([&](uint64_t, const Ref<Trip>& trip) {
      give_up(trip, failed_, &redirected);
      unanswered.push_back(trip);
    });
  }
  for (const Ref<Trip>& trip : ended) conclude(trip);
  for (const Ref<Trip>& trip : unanswered) finish(trip);
  RemoteRoute::go_on(redirected);
}

void Lane::release_moved() {
  std::vector<Ref<Trip>> ended, redirected;
  {
    std::scoped_lock lock(receiving_, mutex_);
    if (state_ != kDown || !failed_.ok()) return;
    outbox_.each([&](uint64_t, const Ref<Trip>& trip) {
      if (trip->in_place) return;
      take_moved(trip, &redirected);
      if (trip->unanswered == 0) ended.push_back(trip);
    });
  }
  for (const Ref<Trip>& trip : ended) finish(trip);
  RemoteRoute::go_on(redirected);
}

// Redirects parts of a trip whose shards are on another server by now; the trip is not being sent.
void Lane::take_moved(const Ref<Trip>& trip, std::vector<Ref<Trip>>* redirected) {
  for (Trip::Part& part : trip->parts) {
    if (part.answered || !trip->has_moved(part, server_)) continue;
    redirected->push_back(trip->redirect(part, server_, trip->begun));
    part.answered = true;
    --trip->unanswered;
  }
}

// Of a trip to a server that is given up, redirects what goes on elsewhere; the rest ends with this status, unless
// nobody misses the answer.
void Lane::give_up(const Ref<Trip>& trip, const Status& status, std::vector<Ref<Trip>>* redirected) {
  take_moved(trip, redirected);
  for (Trip::Part& part : trip->parts) {
    if (part.answered || status.code() != Code::kServerLost || !Trip::is_moot(part)) continue;
    part.answered = true;
    --trip->unanswered;
  }
  if (trip->unanswered != 0 && trip->status.ok()) trip->status = status;
}

void Lane::break_if_told(const std::vector<std::shared_ptr<const Segment>>& segments) {
  std::lock_guard lock(receiving_);
  bool told = false;
  {
    std::lock_guard sending(mutex_);
    for (const auto& segment : segments) told = told || announced_.count(segment->id()) != 0;
  }
  if (told && state_ != kDown) tear_down("memory that it was told of has moved");
}

// With both locks; *ended gets trips that only waited for their frame to be sent. A thread that polls the socket is
// woken first and looks at the state.
void Lane::disconnect(std::vector<Ref<Trip>>* ended) {
  if (state_ == kDown) return;
  if (sending_) leaving_.push_back(std::move(sending_));
  for (const Ref<Trip>& trip : leaving_) {
    trip->leaving = false;
    if (trip->ends_later) ended->push_back(trip);
  }
  leaving_.clear();
  links_.watch().remove(fd());
  os::shut_down(fd());
  os::close_socket(fd());
  fd_ = -1;
  state_ = kDown;
  outbox_.lost();
  pieces_.clear();
  piece_ = 0;
  in_frame_ = false;
  sending_ = Ref<Trip>();
  raw_.clear();
  announced_.clear();
  passing_ = nullptr;
  asked_.clear();
  reset_parser();
}

void Lane::tear_down(const std::string& why) {
  std::vector<Ref<Trip>> ended;
  {
    std::lock_guard lock(mutex_);
    disconnect(&ended);
  }
  for (const Ref<Trip>& trip : ended) conclude(trip);
  links_.want_dial(*this, why);
}

void Lane::finish(const Ref<Trip>& trip) {
  {
    std::lock_guard lock(mutex_);
    if (!outbox_.answered(trip->header.request)) return;  // it has ended already
    trip->ends_later = trip->leaving;
    if (trip->ends_later) return;
  }
  conclude(trip);
}

void Lane::conclude(const Ref<Trip>& trip) {
  const Ref<Future> owner = std::move(trip->owner);
  links_.trip_over(server_, trip->patient);
  trip->route->over(trip->status);
}

}  // namespace windlass
