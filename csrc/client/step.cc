#include "client/step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/hash.h"
#include "client/remote.h"

namespace windlass {

// Whole tensors, in registered arrays, as one request per server.
class StepCall final : public Future, public Remote {
 public:
  explicit StepCall(std::shared_ptr<Session> session)
      : Remote(session->engine().links()), session_(std::move(session)), arena_(session_->engine().arena()) {}

  void make_room(size_t n) {
    entries_.reserve(n);
    parts_.reserve(n);
  }
  void add(const std::shared_ptr<TensorClient>& tensor, const TensorRequest& request);
  // Lends the arrays and sends everything.
  Status start(int64_t deadline_ns);
  Status finish(int64_t deadline_ns);

  // Until the next call of this thread's.
  static const std::vector<uint32_t>& all_shards(const TensorClient& tensor) {
    static thread_local std::vector<uint32_t> shards;
    if (shards.size() != tensor.cut().shards) {
      shards.resize(tensor.cut().shards);
      std::iota(shards.begin(), shards.end(), 0u);
    }
    return shards;
  }

  // Future.
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }

  // Cargo.
  void describe(uint32_t part, bool lies, wire::Part* to) override;
  void write_items(uint32_t part, bool lies, std::byte* to) override;
  const std::byte* numbers(uint32_t part) override;
  void gather(uint32_t, std::byte*) override {}
  std::byte* landing(uint32_t part, uint64_t bytes) override;
  Status land(uint32_t part, bool lies, const wire::Part& answer, const std::string& items,
              const std::byte* numbers) override;
  void over(const Status& status) override { end(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    *shard = parts_[part].shard;
    return entries_[parts_[part].entry].tensor->owners().get();
  }

 protected:
  void finished() override;
  void over() override { session_->engine().leave(); }

 private:
  struct Entry {
    std::shared_ptr<TensorClient> tensor;
    std::byte* in = nullptr;  // or null
    std::byte* out = nullptr;
    Hyper hyper;
    bool closes = false;
    double weight = 1;
    Iteration iteration;
    std::vector<uint64_t> closed;  // of a pull, at each shard, where its worker's clock is lower
    wire::StepItem item;
  };
  struct Part {
    uint32_t entry, shard;
  };
  void find_places(Entry* entry, std::vector<std::shared_ptr<const Segment>>* segments);
  void make_trips(int64_t deadline_ns);
  uint64_t elements(const Part& part) const {
    const Cut& cut = entries_[part.entry].tensor->cut();
    return cut.end_of(part.shard) - cut.first_of(part.shard);
  }

  const std::shared_ptr<Session> session_;
  Arena& arena_;
  std::vector<Entry> entries_;
  std::vector<Part> parts_;
  std::vector<Range> lent_;
  uint64_t bytes_ = 0;
  bool places_ = false;
  std::atomic<bool> given_up_{false};
};

void StepCall::add(const std::shared_ptr<TensorClient>& tensor, const TensorRequest& r) {
  Entry& entry = entries_.emplace_back();
  entry.tensor = tensor;
  entry.hyper = r.hyper;
  entry.closes = r.closes;
  entry.weight = r.weight;
  wire::StepItem& item = entry.item;
  item.object = tensor->map().object;
  item.op = static_cast<uint8_t>(r.in == nullptr    ? wire::Op::kPull
                                 : r.out == nullptr ? wire::Op::kPush
                                                    : wire::Op::kPushPull);
  uint64_t bytes = 0;
  if (r.in != nullptr) {
    entry.in = static_cast<std::byte*>(r.in->data);
    item.dtype_in = static_cast<uint8_t>(r.in->dtype);
    item.hypers = tensor->sync().rounds() ? limits::kPushNumbersMax : limits::kRuleHyperMax;
    item.places.in_bytes = bytes = r.in->bytes();
  }
  if (r.out != nullptr) {
    entry.out = static_cast<std::byte*>(r.out->data);
    item.dtype_out = static_cast<uint8_t>(r.out->dtype);
    item.places.out_bytes = r.out->bytes();
    bytes = std::max(bytes, r.out->bytes());
  }
  bytes_ += bytes;
}

void StepCall::find_places(Entry* entry, std::vector<std::shared_ptr<const Segment>>* segments) {
  const auto find = [&](std::byte* array, uint64_t bytes, uint32_t* id, uint64_t* offset) {
    if (bytes == 0) return;
    // It is on loan, so it is registered; where it is within a segment says in which block.
    const auto known = std::find_if(segments->rbegin(), segments->rend(), [&](const auto& segment) {
      return Range{segment->data(), segment->bytes()}.contains({array, bytes});
    });
    if (known != segments->rend()) {
      *id = (*known)->id();
      *offset = static_cast<uint64_t>(array - (*known)->data());
      return;
    }
    Place at;
    if (!arena_.locate({array, bytes}, &at)) {
      places_ = false;
      return;
    }
    *id = at.segment->id();
    *offset = at.offset;
    segments->push_back(std::move(at.segment));
  };
  wire::Places& p = entry->item.places;
  find(entry->in, p.in_bytes, &p.in_arena, &p.in_offset);
  find(entry->out, p.out_bytes, &p.out_arena, &p.out_offset);
}

void StepCall::make_trips(int64_t deadline_ns) {
  std::vector<std::shared_ptr<const Segment>> segments;
  places_ = links_->sharing() && bytes_ >= limits::kArenaBytesMin;
  for (Entry& entry : entries_) {
    if (places_) find_places(&entry, &segments);
  }
  wire::Places sums;  // every part has places of its own
  for (const Entry& entry : entries_) {
    sums.in_bytes += entry.item.places.in_bytes;
    sums.out_bytes += entry.item.places.out_bytes;
  }
  const Plan plan{.op = wire::Op::kStep,
                  .bytes = bytes_,
                  .deadline_ns = deadline_ns,
                  .places = places_ ? &sums : nullptr,
                  .segments = places_ ? std::move(segments) : std::vector<std::shared_ptr<const Segment>>()};
  for (uint32_t e = 0; e < entries_.size(); ++e) {
    const TensorClient& tensor = *entries_[e].tensor;
    for (uint32_t shard = 0; shard < tensor.cut().shards; ++shard) {
      const Owners::At at = tensor.owners()->of(shard);
      add_part(plan, at.server,
               {.part = static_cast<uint32_t>(parts_.size()),
                .term = at.term,
                .flags = static_cast<uint16_t>(entries_[e].closes ? wire::kCloses : 0)});
      parts_.push_back({e, shard});
    }
  }
}

Status StepCall::start(int64_t deadline_ns) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(engine.enter());
  Range block;                           // of the last that is lent
  for (const bool in : {true, false}) {  // neighbours in memory are lent as one
    for (const Entry& entry : entries_) {
      const uint64_t bytes = in ? entry.item.places.in_bytes : entry.item.places.out_bytes;
      const std::byte* const array = in ? entry.in : entry.out;
      if (bytes == 0) continue;
      const Range whole = lent_.empty() ? Range() : Range{lent_.back().begin, lent_.back().bytes + bytes};
      if (!lent_.empty() && whole.begin + whole.bytes == array + bytes && block.contains(whole)) {
        lent_.back() = whole;
        continue;
      }
      lent_.push_back({array, bytes});
      if (!block.contains(lent_.back()) && !arena_.registered(lent_.back(), &block)) block = {};
    }
  }
  Status status = arena_.lend(lent_.data(), lent_.size(), "step");
  if (!status.ok()) {
    engine.leave();
    return status;
  }
  make_trips(deadline_ns);
  if (trips() != 0) status = reserve("step", deadline_ns);
  if (!status.ok() || trips() == 0) {
    arena_.end(lent_.data(), lent_.size());
    engine.leave();
    return status;
  }
  expect(trips());
  {
    std::lock_guard lock(session_->order_mutex());
    for (Entry& entry : entries_) {
      if (entry.in != nullptr) {
        entry.iteration = entry.tensor->iteration_of_push(all_shards(*entry.tensor), entry.closes, entry.weight);
      } else {
        entry.iteration.clock = session_->clock();
        if (entry.tensor->sync().gated())
          entry.closed = entry.tensor->closed_beyond(all_shards(*entry.tensor), entry.iteration.clock);
      }
    }
    number([&](uint32_t, Trip::Part* p) {
      const Part& part = parts_[p->part];
      const Entry& entry = entries_[part.entry];
      uint64_t& sent = entry.tensor->progress()->sent[part.shard];
      p->sequence = entry.in != nullptr ? ++sent : sent;
      p->clock = entry.iteration.clock;
      if (!entry.closed.empty()) p->clock = std::max(p->clock, entry.closed[part.shard]);
    });
    submit(this);
  }
  Remote::set_off(How::kWait);
  return {};
}

Status StepCall::finish(int64_t deadline_ns) {
  if (wait_until(deadline_ns)) {
    const Status s = status();
    return s.ok() ? s : Status(s.code(), "step: " + s.message());
  }
  given_up_ = true;
  return Status(Code::kTimeout, "step: not done in time; " + stuck() + "; its pushes go on");
}

void StepCall::finished() {
  arena_.end(lent_.data(), lent_.size());
  const Status s = status();
  if (given_up_ && !s.ok()) entries_[0].tensor->progress()->unseen.add(Status(s.code(), "step: " + s.message()));
}

void StepCall::describe(uint32_t part, bool lies, wire::Part* to) {
  const Entry& entry = entries_[parts_[part].entry];
  to->flags |= wire::kWhole;
  to->items_bytes = entry.item.bytes();
  if (entry.in != nullptr && !lies)
    to->numbers_bytes = elements(parts_[part]) * size_of(static_cast<Dtype>(entry.item.dtype_in));
}

void StepCall::write_items(uint32_t part, bool lies, std::byte* to) {
  const Entry& entry = entries_[parts_[part].entry];
  wire::StepItem item = entry.item;
  item.shard = parts_[part].shard;
  if (!lies) item.places = {};
  std::memcpy(to, &item, sizeof item);
  double numbers[limits::kPushNumbersMax];
  std::copy_n(entry.hyper.v, limits::kRuleHyperMax, numbers);
  numbers[limits::kRuleHyperMax] = entry.iteration.weight;
  numbers[limits::kRuleHyperMax + 1] = entry.iteration.object_weight;
  numbers[limits::kRuleHyperMax + 2] = entry.iteration.other_weight;
  std::memcpy(to + sizeof item, numbers, item.hypers * sizeof(double));
}

const std::byte* StepCall::numbers(uint32_t part) {
  const Entry& entry = entries_[parts_[part].entry];
  return entry.in + entry.tensor->cut().first_of(parts_[part].shard) * size_of(static_cast<Dtype>(entry.item.dtype_in));
}

std::byte* StepCall::landing(uint32_t part, uint64_t bytes) {
  const Entry& entry = entries_[parts_[part].entry];
  const size_t size = size_of(static_cast<Dtype>(entry.item.dtype_out));
  if (entry.out == nullptr || bytes != elements(parts_[part]) * size) return nullptr;
  return entry.out + entry.tensor->cut().first_of(parts_[part].shard) * size;
}

Status StepCall::land(uint32_t part, bool lies, const wire::Part& answer, const std::string&,
                      const std::byte* numbers) {
  const Entry& entry = entries_[parts_[part].entry];
  const uint64_t size = size_of(static_cast<Dtype>(entry.item.dtype_out));
  const uint64_t expected = lies || entry.out == nullptr ? 0 : elements(parts_[part]) * size;
  if (entry.tensor->sync().may_drop()) session_->catch_up(answer.clock);
  if (numbers == nullptr && answer.numbers_bytes == expected) return {};
  return Status(Code::kProtocolError, "part " + std::to_string(answer.shard) + " of a step has " +
                                          std::to_string(answer.numbers_bytes) + " bytes of numbers, expected " +
                                          std::to_string(expected));
}

// ---- the client ---------------------------------------------------------------------------------------------------

StepClient::~StepClient() {
  if (session_->engine().forked()) return;
  for (std::byte* copy : copies_) session_->engine().arena().give(copy);
}

std::byte* StepClient::copy(const void* data, size_t bytes) {
  std::byte* const to = session_->engine().arena().take(bytes);
  if (to == nullptr) return nullptr;
  copies_.push_back(to);
  if (bytes != 0 && data != nullptr) std::memcpy(to, data, bytes);
  return to;
}

bool StepClient::registered(const Array& array) {
  const Range range = array.range();
  for (const Range& block : known_) {
    if (range.bytes != 0 && block.contains(range)) return true;
  }
  std::swap(known_[0], known_[1]);
  if (session_->engine().arena().registered(range, &known_[0])) return true;
  std::swap(known_[0], known_[1]);
  return false;
}

// The input as it is now, whatever the caller does with an ordinary array later.
bool StepClient::keep(Array* array) {
  if (registered(*array)) return true;
  array->data = copy(array->data, array->bytes());
  return array->data != nullptr;
}

// Somewhere for the output, whatever the caller does with an ordinary array meanwhile.
bool StepClient::stage(Array* array) {
  if (registered(*array)) return true;
  std::byte* const staged = copy(nullptr, array->bytes());
  if (staged == nullptr) return false;
  landings_.push_back({array->data, staged, array->bytes()});
  array->data = staged;
  return true;
}

Status StepClient::add(std::shared_ptr<TensorClient> tensor, const TensorRequest& request) {
  WL_RETURN_IF_ERROR(session_->engine().usable());
  WL_RETURN_IF_ERROR(tensor->take_unseen());
  const What what = tensor->what(request);
  WL_RETURN_IF_ERROR(tensor->check(request, what));
  Item& item = items_.emplace_back();
  item.together = tensor->remote() && request.rows.kind == Selection::kAll;
  item.tensor = std::move(tensor);
  TensorRequest& r = item.tensor_request = request;
  bool kept = true;
  if (r.in != nullptr) {
    item.in = *r.in;
    kept = keep(&item.in);
    r.in = &item.in;
  }
  if (kept && r.out != nullptr) {
    item.out = *r.out;
    kept = stage(&item.out);
    r.out = &item.out;
  }
  if (kept && r.rows.kind == Selection::kList) {
    r.rows.list = reinterpret_cast<const int64_t*>(copy(r.rows.list, r.rows.n * sizeof(int64_t)));
    kept = r.rows.list != nullptr;
  }
  if (kept) return {};
  items_.pop_back();
  return Status(Code::kResourceExhausted, what.text() + ": no memory for a copy of its arrays");
}

Status StepClient::add(std::shared_ptr<TableClient> table, const TableRequest& request) {
  WL_RETURN_IF_ERROR(session_->engine().usable());
  WL_RETURN_IF_ERROR(table->take_unseen());
  const What what = table->what(request);
  WL_RETURN_IF_ERROR(table->check(request, what));
  Item& item = items_.emplace_back();
  item.table = std::move(table);
  TableRequest& r = item.table_request = request;
  r.keys.data = copy(r.keys.data, r.keys.bytes());
  bool kept = r.keys.data != nullptr;
  if (kept && r.in != nullptr) {
    item.in = *r.in;
    kept = keep(&item.in);
    r.in = &item.in;
  }
  if (kept && r.out != nullptr) {
    item.out = *r.out;
    kept = stage(&item.out);
    r.out = &item.out;
  }
  if (kept) return {};
  items_.pop_back();
  return Status(Code::kResourceExhausted, what.text() + ": no memory for a copy of its arrays");
}

// A push that closed its shards would leave those behind it in the step to the next iteration.
void StepClient::let_the_last_close() {
  std::vector<const Progress*> pushed(std::bit_ceil(2 * items_.size() + 1));  // by hash; null: nobody
  const auto is_new = [&](const Progress* progress) {
    size_t at = mix(reinterpret_cast<uintptr_t>(progress));
    for (;; ++at) {
      const Progress*& here = pushed[at & (pushed.size() - 1)];
      if (here == progress) return false;
      if (here == nullptr) return here = progress, true;
    }
  };
  for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
    const bool tensor = item->tensor != nullptr;
    if ((tensor ? item->tensor_request.in : item->table_request.in) == nullptr) continue;
    const Handle& handle = tensor ? static_cast<const Handle&>(*item->tensor) : *item->table;
    if (is_new(handle.progress().get())) continue;
    (tensor ? item->tensor_request.closes : item->table_request.closes) = false;
  }
}

// Nothing leaves yet: what begins a new iteration does so before the first request of the step.
Status StepClient::prepare(Item& item, int64_t deadline_ns) {
  if (item.together) {
    if (item.tensor_request.in == nullptr) return {};
    return item.tensor->begin_push(StepCall::all_shards(*item.tensor), deadline_ns);
  }
  if (item.tensor != nullptr) {
    Ref<TensorCall> call;
    WL_RETURN_IF_ERROR(item.tensor->make(item.tensor_request, &call));
    item.call = call;
    return item.tensor_request.in != nullptr ? item.tensor->begin_push(call->shards(), deadline_ns) : Status();
  }
  Ref<TableCall> call;
  WL_RETURN_IF_ERROR(item.table->make(item.table_request, &call));
  item.call = call;
  return item.table_request.in != nullptr ? item.table->begin_push(call->shards(), deadline_ns) : Status();
}

Status StepClient::run(int64_t deadline_ns) {
  constexpr size_t kUnderWayMax = limits::kWindowMax / 2;  // others want a place as well
  Status first;
  const auto note = [&](const Status& status) {
    if (first.ok()) first = status;
  };
  let_the_last_close();
  Status cannot;
  size_t ready = 0;
  while (ready < items_.size() && (cannot = prepare(items_[ready], deadline_ns)).ok()) ++ready;
  std::vector<Ref<StepCall>> together;
  std::vector<Ref<Call>> alone, after_tick;
  size_t finished = 0;
  for (size_t i = 0; i < ready && first.ok();) {
    if (items_[i].together) {
      Ref<StepCall> call(new StepCall(session_));
      call->make_room(ready - i);
      for (; i < ready && items_[i].together; ++i) {
        const Item& item = items_[i];
        if (item.tensor->spec().reject_nonfinite)  // a registered array may have changed meanwhile
          note(item.tensor->check(item.tensor_request, item.tensor->what(item.tensor_request)));
        call->add(item.tensor, item.tensor_request);
      }
      if (first.ok()) note(call->start(deadline_ns));
      if (first.ok()) together.push_back(std::move(call));
      continue;
    }
    if (alone.size() - finished == kUnderWayMax) note(alone[finished++]->finish(deadline_ns));
    Item& item = items_[i++];
    const bool tensor = item.tensor != nullptr;
    const Array* const in = tensor ? item.tensor_request.in : item.table_request.in;
    const Array* const out = tensor ? item.tensor_request.out : item.table_request.out;
    const Status started = item.call->start(in, out, How::kWait, deadline_ns);
    note(started);
    if (started.ok()) (item.call->waits_for_close() ? after_tick : alone).push_back(item.call);
  }
  note(cannot);
  // Under BSP nothing is answered before the iteration is closed.
  if (first.ok()) note(session_->tick(deadline_ns));
  for (const Ref<StepCall>& call : together) note(call->finish(deadline_ns));
  for (; finished < alone.size(); ++finished) note(alone[finished]->finish(deadline_ns));
  for (const Ref<Call>& call : after_tick) note(call->finish(deadline_ns));
  if (first.ok()) {
    for (const Landing& l : landings_) std::memcpy(l.out, l.staged, l.bytes);
  }
  return first;
}

}  // namespace windlass
