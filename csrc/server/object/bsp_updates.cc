#include "server/object/bsp_updates.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "server/object/shard_capture.h"

namespace windlass {
namespace {

constexpr size_t kErrorsMax = 16;

const RuleKernels& rule_of(const Target& t) {
  return kernels(t.tensor != nullptr ? t.tensor->spec().rule.kind : t.table->spec().rule.kind);
}
bool takes_mean(const Target& t) { return !rule_of(t).layout.any_dtype; }

// into = into (+) g, as the rule combines gradients.
void combine_into(const RuleKernels& rule, float* into, const float* g, size_t n) {
  kernels().combine(rule.layout.combine, into, g, n);
}
template <class T>
void combine_into(const RuleKernels& rule, T* into, const T* g, size_t n) {
  Dense d;  // Sum, Max, Min and Assign combine gradients as they treat weights
  d.w = into;
  d.g = g;
  d.n = n;
  (std::is_same_v<T, double> ? rule.dense_f64 : rule.dense_i64)({}, d);
}

// Copies a span of one push, in the tensor's dtype and weighed.
template <class T>
void read_push(const BspUpdates::Push& push, const Span& span, bool mean, T* to) {
  if (span.n == 0) return;  // there may be no numbers at all
  mean = mean && !push.summed;
  const std::byte* const from = push.numbers + span.at * size_of(push.dtype);
  if constexpr (std::is_same_v<T, float>) {
    if (push.dtype != Dtype::kFloat32) {
      kernels().to_f32(push.dtype, from, to, span.n);
    } else if (!mean) {
      std::memcpy(to, from, span.n * sizeof(float));
    } else {
      return kernels().weigh(to, reinterpret_cast<const float*>(from), static_cast<float>(push.weight), false, span.n);
    }
    if (mean) kernels().scale(to, static_cast<float>(push.weight), span.n);
  } else {
    std::memcpy(to, from, span.n * sizeof(T));
  }
}

bool is_whole(const BspUpdates::Push& push, uint64_t first, uint64_t n) {
  return push.spans.size() == 1 && push.spans[0].first == first && push.spans[0].n == n;
}

template <class T>
T* room(std::vector<std::byte>* numbers, uint64_t n) {
  if (numbers->size() < n * sizeof(T)) numbers->resize(n * sizeof(T));
  return reinterpret_cast<T*>(numbers->data());
}

}  // namespace

void BspUpdates::Push::copy_numbers(uint64_t item_bytes, uint64_t all_bytes, StagingQuota::Room room) {
  struct Copy {
    std::unique_ptr<std::byte[]> numbers;
    StagingQuota::Room room;
  };
  const auto kept =
      std::make_shared<Copy>(Copy{std::make_unique_for_overwrite<std::byte[]>(all_bytes + 1), std::move(room)});
  std::byte* const copy = kept->numbers.get();
  uint64_t at = 0;
  for (Span& s : spans) {
    if (s.n != 0) std::memcpy(copy + at * item_bytes, numbers + s.at * item_bytes, s.n * item_bytes);
    s.at = at;
    at += s.n;
  }
  for (Keyed& k : keyed) {
    std::memcpy(copy + at * item_bytes, numbers + k.at * item_bytes, item_bytes);
    k.at = static_cast<uint32_t>(at++);
  }
  numbers = copy;
  charged = true;
  memory = kept;
}

// ---- the memory of the running sum --------------------------------------------------------------------------------

// What it takes with so many more rows; of a tensor it has one size.
uint64_t BspUpdates::sum_bytes(const Target& target, uint64_t more_items) const {
  if (target.table != nullptr) {
    constexpr uint64_t kPlaces = 4 * sizeof(uint32_t);  // in RowSum::table
    return (sum_.rows.keyed.size() + more_items) * (target.table->spec().dim * sizeof(float) + sizeof(Keyed) + kPlaces);
  }
  const Cut& cut = target.tensor->cut();
  return (cut.end_of(target.shard) - cut.first_of(target.shard)) * size_of(target.tensor->spec().dtype);
}

// Of what objects may take, so that it takes nothing from pushes that wait; of what those may take if there is no
// other.
bool BspUpdates::make_room(uint64_t bytes) {
  if (quota_ == nullptr) return true;
  if (sum_.room == nullptr) sum_.room = std::make_shared<StagingQuota::Room>();
  const uint64_t has = sum_.room->bytes();
  return bytes <= has || quota_->take_beyond(bytes - has, sum_.room.get()) ||
         quota_->take(bytes - has, sum_.room.get());
}

bool BspUpdates::make_room(const Push& push, const Gate& gate, const Target& target) {
  uint64_t items = push.items();
  for (const Push& other : pushes_) {
    if (target.table != nullptr && other.iteration == gate.made() && other.rank <= push.rank) items += other.items();
  }
  return make_room(sum_bytes(target, items));
}

bool BspUpdates::add(Push push, const Gate& gate) {
  if (push.iteration < gate.made()) return false;
  if (gate.clock_of(push.rank) > push.iteration) return false;
  drop_lost(push.rank, push.incarnation, gate);
  insert(std::move(push));
  return true;
}

void BspUpdates::drop_lost(uint32_t rank, uint64_t incarnation, const Gate& gate) {
  std::erase_if(pushes_, [&](const Push& p) {
    const bool another = p.incarnation != incarnation && p.incarnation != 0 && incarnation != 0;
    return another && p.rank == rank && !gate.has_closed(p.rank, p.iteration);
  });
}

void BspUpdates::insert(Push push) {
  const auto it = std::upper_bound(pushes_.begin(), pushes_.end(), push, [](const Push& a, const Push& b) {
    return a.iteration != b.iteration ? a.iteration < b.iteration : a.rank < b.rank;
  });
  pushes_.insert(it, std::move(push));
}

bool BspUpdates::is_next(uint32_t rank, uint64_t iteration, const Gate& gate) {
  if (iteration != gate.made()) return false;
  for (const Gate::Worker& w : gate.workers()) {
    if (w.rank >= rank) return true;
    if (w.waited && w.clock <= iteration) return false;
  }
  return true;
}

void BspUpdates::fold(const Gate& gate, const Target& target) {
  const uint64_t iteration = gate.made();
  if (iteration < gate.complete()) return;  // the update, which comes now, uses pushes where they are
  // The first rank that is waited for and has not closed the iteration.
  uint32_t limit = Gate::kOutsider;
  for (const Gate::Worker& w : gate.workers()) {
    if (!w.waited || w.clock > iteration) continue;
    limit = w.rank;
    break;
  }
  const auto of_iteration = [&](const Push& p) { return p.iteration == iteration && p.rank < limit; };
  size_t end = 0;  // after the last push whose memory should be freed
  for (size_t i = 0; i < pushes_.size() && of_iteration(pushes_[i]); ++i) {
    if (pushes_[i].memory == nullptr || pushes_[i].charged) end = i + 1;
  }
  while (end != 0 && end < pushes_.size() && of_iteration(pushes_[end]) && pushes_[end].rank == pushes_[end - 1].rank)
    ++end;
  secure(&end, target);
  for (size_t begin = 0; begin < end;) {
    size_t next = begin + 1;
    while (next < end && pushes_[next].rank == pushes_[begin].rank) ++next;
    if (gate.has_closed(pushes_[begin].rank, iteration)) {
      uint64_t items = 0;
      bool passing = false;  // in memory that is good for this turn: room was made before
      for (size_t i = begin; i < next; ++i) {
        items += pushes_[i].items();
        passing = passing || pushes_[i].memory == nullptr;
      }
      if (!make_room(sum_bytes(target, items)) && !passing) {
        end = begin;  // this one and those behind it wait where they are
        break;
      }
      add_worker(begin, next, target);
    }
    begin = next;
  }
  if (target.table != nullptr && sum_.room != nullptr) sum_.room->shrink(sum_bytes(target, 0));
  // A worker that is not waited for and has not closed was lost, or its view is still on the way.
  const auto last = std::remove_if(pushes_.begin(), pushes_.begin() + static_cast<ptrdiff_t>(end),
                                   [&](const Push& p) { return gate.has_closed(p.rank, iteration); });
  pushes_.erase(last, pushes_.begin() + static_cast<ptrdiff_t>(end));
}

// What is looked at must be what is used, and an update is made of all of a push or nothing: so the copy comes first.
// The other workers' pushes make the update without it.
void BspUpdates::secure(size_t* end, const Target& target) {
  const bool rejects =
      target.table != nullptr ? target.table->spec().reject_nonfinite : target.tensor->spec().reject_nonfinite;
  if (!rejects || broken(Break::kNonfinite)) return;
  for (size_t i = 0; i < *end;) {
    Push& push = pushes_[i];
    const uint64_t item = size_of(push.dtype) * (target.table != nullptr ? target.table->spec().dim : 1);
    if (push.lent && !push.charged) push.copy_numbers(item, push.items() * item);
    if (!push.lent || kernels().finite(push.dtype, push.numbers, push.items() * item / size_of(push.dtype))) {
      push.lent = false;
      ++i;
      continue;
    }
    const std::string& name = target.table != nullptr ? target.table->name() : target.tensor->name();
    note({push.iteration, push.rank, changed_on_loan("'" + name + "': the gradient", target.shard, false)});
    if (!push.summed) sum_.dropped += push.weight;
    pushes_.erase(pushes_.begin() + static_cast<ptrdiff_t>(i));
    --*end;
  }
}

void BspUpdates::note(Failure failure) {
  if (errors_.size() == kErrorsMax) errors_.erase(errors_.begin());
  errors_.push_back(std::move(failure));
}

void BspUpdates::add_worker(size_t begin, size_t end, const Target& target) {
  if (!sum_.any) sum_.hyper = pushes_[begin].hyper;
  sum_.last = sum_.any ? std::max(sum_.last, pushes_[begin].rank) : pushes_[begin].rank;
  for (size_t i = begin; i < end; ++i) sum_.weight += pushes_[i].weight;
  if (target.table != nullptr) {
    add_rows(begin, end, target);
  } else {
    switch (target.tensor->spec().dtype) {
      case Dtype::kFloat64: add_dense<double>(begin, end, target); break;
      case Dtype::kInt64: add_dense<int64_t>(begin, end, target); break;
      default: add_dense<float>(begin, end, target); break;
    }
  }
  sum_.any = true;
}

// Combines the pushes of one worker, then adds the result to the sum of the workers before it.
template <class T>
void BspUpdates::add_dense(size_t begin, size_t end, const Target& target) {
  const Cut& cut = target.tensor->cut();
  const RuleKernels& rule = rule_of(target);
  const bool mean = takes_mean(target);
  const uint64_t first = cut.first_of(target.shard), n = cut.end_of(target.shard) - first;
  T* const sum = room<T>(&sum_.numbers, n);
  bool whole = !sum_.any || sum_.covered.empty();
  for (size_t i = begin; i < end; ++i) whole = whole && is_whole(pushes_[i], first, n);
  if (whole && end - begin == 1) {  // the usual case
    const Push& push = pushes_[begin];
    if constexpr (std::is_same_v<T, float>) {
      if (mean && push.dtype == Dtype::kFloat32 && !push.summed) {
        const auto* const g = reinterpret_cast<const float*>(push.numbers) + push.spans[0].at;
        kernels().weigh(sum, g, static_cast<float>(push.weight), sum_.any, n);
        return;
      }
    }
  }
  if (whole) {  // some at a time, which stay in the first-level cache
    constexpr uint64_t kSome = 1024;
    T one[kSome], worker[kSome];
    for (uint64_t at = 0; at < n; at += kSome) {
      const uint64_t some = std::min(kSome, n - at);
      T* const into = sum_.any ? worker : sum + at;
      for (size_t i = begin; i < end; ++i) {
        read_push(pushes_[i], {first + at, some, pushes_[i].spans[0].at + at}, mean, i == begin ? into : one);
        if (i != begin) combine_into(rule, into, one, some);
      }
      if (sum_.any) combine_into(rule, sum + at, worker, some);
    }
    return;
  }
  const auto memory = std::make_unique_for_overwrite<T[]>(2 * n);
  T* const one = memory.get();
  T* const worker = one + n;
  std::vector<uint8_t> has(n, 0);
  for (size_t i = begin; i < end; ++i) {
    for (const Span& span : pushes_[i].spans) {
      const uint64_t at = span.first - first;
      T* const into = worker + at;
      read_push(pushes_[i], span, mean, one);
      for (uint64_t k = 0; k < span.n; ++k) {
        has[at + k] != 0 ? combine_into(rule, into + k, one + k, 1) : static_cast<void>(into[k] = one[k]);
        has[at + k] = 1;
      }
    }
  }
  if (sum_.covered.empty()) sum_.covered.assign(n, sum_.any ? 1 : 0);
  for (uint64_t k = 0; k < n; ++k) {
    if (has[k] == 0) continue;
    sum_.covered[k] != 0 ? combine_into(rule, sum + k, worker + k, 1) : static_cast<void>(sum[k] = worker[k]);
    sum_.covered[k] = 1;
  }
}

// ---- rows ---------------------------------------------------------------------------------------------------------

void BspUpdates::RowSum::clear() {
  keyed.clear();
  rows.clear();
  table.clear();
}

void BspUpdates::RowSum::grow() {
  size_t size = 64;
  while (size < 4 * (keyed.size() + 1)) size *= 2;
  table.assign(size, 0);
  for (uint32_t i = 0; i < keyed.size(); ++i) {
    size_t at = mix(keyed[i].hash) & (size - 1);
    while (table[at] != 0) at = (at + 1) & (size - 1);
    table[at] = i + 1;
  }
}

float* BspUpdates::RowSum::find(uint64_t hash, size_t dim, bool* fresh) {
  if (2 * (keyed.size() + 1) > table.size()) grow();
  size_t at = mix(hash) & (table.size() - 1);
  while (table[at] != 0 && keyed[table[at] - 1].hash != hash) at = (at + 1) & (table.size() - 1);
  *fresh = table[at] == 0;
  if (*fresh) {
    keyed.push_back({hash, static_cast<uint32_t>(keyed.size())});
    rows.resize(rows.size() + dim);
    table[at] = static_cast<uint32_t>(keyed.size());
  }
  return rows.data() + (table[at] - 1) * dim;
}

void BspUpdates::add_rows(size_t begin, size_t end, const Target& target) {
  const size_t dim = target.table->spec().dim;
  const RuleKernels& rule = rule_of(target);
  const bool mean = takes_mean(target);
  const auto merge = [&](RowSum* into, const RowSum& from) {
    for (size_t i = 0; i < from.keyed.size(); ++i) {
      bool fresh = false;
      float* const row = into->find(from.keyed[i].hash, dim, &fresh);
      const float* const g = from.rows.data() + i * dim;
      fresh ? static_cast<void>(std::memcpy(row, g, dim * sizeof(float))) : combine_into(rule, row, g, dim);
    }
  };
  std::vector<float> one(dim);
  RowSum worker;
  for (size_t i = begin; i < end; ++i) {
    const Push& push = pushes_[i];
    RowSum rows;  // repeated keys of one push are combined first
    std::vector<uint32_t> times;
    for (const Keyed& key : push.keyed) {
      bool fresh = false;
      float* const row = rows.find(key.hash, dim, &fresh);
      if (fresh) times.push_back(0);
      ++times[static_cast<size_t>(row - rows.rows.data()) / dim];
      const std::byte* const g = push.numbers + key.at * dim * size_of(push.dtype);
      kernels().to_f32(push.dtype, g, fresh ? row : one.data(), dim);
      if (!fresh) combine_into(rule, row, one.data(), dim);
    }
    for (size_t r = 0; rule.layout.combine == Combine::kMean && r < times.size(); ++r) {
      if (times[r] > 1) kernels().divide(rows.rows.data() + r * dim, static_cast<float>(times[r]), dim);
    }
    if (mean && !push.summed) kernels().scale(rows.rows.data(), static_cast<float>(push.weight), rows.rows.size());
    end - begin == 1 ? merge(&sum_.rows, rows) : merge(&worker, rows);
  }
  if (end - begin != 1) merge(&sum_.rows, worker);
}

// ---- the update ---------------------------------------------------------------------------------------------------

std::vector<Span> BspUpdates::covered_spans(const Target& target) const {
  const Cut& cut = target.tensor->cut();
  const uint64_t first = cut.first_of(target.shard), n = cut.end_of(target.shard) - first;
  std::vector<Span> spans;
  if (sum_.covered.empty()) return {{first, n, 0}};
  for (uint64_t k = 0; k < n;) {
    uint64_t end = k;
    while (end < n && sum_.covered[end] == sum_.covered[k]) ++end;
    if (sum_.covered[k] != 0) spans.push_back({first + k, end - k, k});
    k = end;
  }
  return spans;
}

Status BspUpdates::apply(const Target& target, double weight) {
  const bool mean = takes_mean(target);
  const auto by = static_cast<float>(weight);
  if (target.table != nullptr) {
    RowSum& rows = sum_.rows;
    if (mean) kernels().divide(rows.rows.data(), by, rows.rows.size());
    const Arrays arrays{rows.rows.data(), nullptr, Dtype::kFloat32, Dtype::kFloat32, false};
    return target.table->apply(target.shard, sum_.hyper, rows.keyed.data(), rows.keyed.size(), arrays);
  }
  Tensor& tensor = *target.tensor;
  const Cut& cut = tensor.cut();
  const uint64_t first = cut.first_of(target.shard), n = cut.end_of(target.shard) - first;
  if (mean) kernels().divide(reinterpret_cast<float*>(sum_.numbers.data()), by, n);
  const std::vector<Span> spans = covered_spans(target);
  const Dtype dtype = tensor.spec().dtype;
  return tensor.apply(target.shard, sum_.hyper, spans.data(), spans.size(),
                      {sum_.numbers.data(), nullptr, dtype, dtype, false});
}

// The usual case: every worker pushed the whole shard once, and nothing was added up yet. Makes the same sums in one
// pass.
bool BspUpdates::make_at_once(size_t end, const Gate& gate, const Target& target,
                              const std::vector<Waiting*>& waiting) {
  if (sum_.any || end == 0 || target.tensor == nullptr || target.tensor->spec().dtype != Dtype::kFloat32) return false;
  if (rule_of(target).mean == nullptr) return false;
  const Cut& cut = target.tensor->cut();
  const uint64_t first = cut.first_of(target.shard), n = cut.end_of(target.shard) - first;
  std::vector<Weighed> terms;
  double weight = 0;
  for (size_t i = 0; i < end; ++i) {
    const Push& p = pushes_[i];
    const bool once = i == 0 || p.rank != pushes_[i - 1].rank;
    if (!once || !is_whole(p, first, n) || p.dtype != Dtype::kFloat32 || p.summed) return false;
    if (!gate.has_closed(p.rank, gate.made())) return false;
    terms.push_back({reinterpret_cast<const float*>(p.numbers) + p.spans[0].at, static_cast<float>(p.weight)});
    weight += p.weight;
  }
  const double all = gate.weight(gate.made()) - sum_.dropped;
  std::vector<Mean::Copy> copies;
  for (Waiting* const w : waiting) {
    const Waiting::Wants wants = w->wants(gate.made() + 1);
    if (wants.out == nullptr) continue;
    copies.push_back({wants.out, wants.stream});
    w->served();
  }
  target.tensor->apply_mean(target.shard, pushes_[0].hyper, terms, static_cast<float>(all > 0 ? all : weight), copies);
  return true;
}

// Rows of one push that nothing is added to, as in a run of one worker: they are used where they lie. The mean of one
// push that weighs 1 has its bits, and the table itself combines the gradients of repeated keys as add_rows() does.
bool BspUpdates::make_of_rows(size_t end, const Gate& gate, const Target& target, Status* status) {
  if (sum_.any || end != 1 || target.table == nullptr) return false;
  const Push& push = pushes_[0];
  if (push.summed || !gate.has_closed(push.rank, gate.made())) return false;
  const double all = gate.weight(gate.made()) - sum_.dropped;
  if (takes_mean(target) && (push.weight != 1 || (all > 0 && all != 1))) return false;
  const Arrays arrays{push.numbers, nullptr, push.dtype, Dtype::kFloat32, false};
  *status = target.table->apply(target.shard, push.hyper, push.keyed.data(), push.keyed.size(), arrays);
  return true;
}

void BspUpdates::make(const Gate& gate, const Target& target, Shard& shard, bool last, Waiting* own) {
  const uint64_t iteration = gate.made();
  size_t end = 0;
  while (end < pushes_.size() && pushes_[end].iteration <= iteration) ++end;
  secure(&end, target);
  std::vector<Waiting*> waiting;
  if (last && target.tensor != nullptr) {  // nobody has a whole shard of a table written
    if (own != nullptr) waiting.push_back(own);
    shard.parked.each([&](Waiting& w) { waiting.push_back(&w); });
  }
  if (make_at_once(end, gate, target, waiting)) {
    ++shard.version;
    sum_.dropped = 0;
    pushes_.erase(pushes_.begin(), pushes_.begin() + static_cast<ptrdiff_t>(end));
    return;
  }
  Status of_rows;
  if (make_of_rows(end, gate, target, &of_rows)) {
    of_rows.ok() ? static_cast<void>(++shard.version) : note({iteration, Gate::kOutsider, of_rows});
    sum_.dropped = 0;
    pushes_.erase(pushes_.begin());
    return;
  }
  bool counted = true;  // a sum without room is gone by the end of this turn
  for (size_t begin = 0; begin < end;) {
    size_t next = begin + 1;
    while (next < end && pushes_[next].rank == pushes_[begin].rank) ++next;
    // A push that was never closed does not count: its worker was lost.
    if (gate.has_closed(pushes_[begin].rank, iteration)) {
      uint64_t items = 0;
      for (size_t i = begin; i < next; ++i) items += pushes_[i].items();
      counted = make_room(sum_bytes(target, items)) && counted;
      add_worker(begin, next, target);
    }
    begin = next;
  }
  pushes_.erase(pushes_.begin(), pushes_.begin() + static_cast<ptrdiff_t>(end));
  if (sum_.any) {
    const double weight = gate.weight(iteration) - sum_.dropped;
    const Status status = apply(target, weight > 0 ? weight : sum_.weight);
    if (status.ok()) {
      ++shard.version;
    } else {
      note({iteration, Gate::kOutsider, status});
    }
  }
  sum_.any = false;
  sum_.weight = sum_.dropped = 0;
  sum_.covered.clear();
  sum_.rows.clear();
  if (!pushes_.empty() && counted) return;
  sum_.numbers = {};  // an idle shard keeps no memory
  sum_.covered = {};
  sum_.rows = {};
  sum_.room = nullptr;
}

Status BspUpdates::error(uint64_t iteration, uint32_t rank) const {
  for (const Failure& failure : errors_) {
    if (failure.iteration == iteration && (failure.rank == rank || failure.rank == Gate::kOutsider))
      return failure.status;
  }
  return {};
}

uint64_t BspUpdates::first(const Gate& gate) const {
  if (sum_.any) return gate.made();
  return pushes_.empty() ? Gate::kNone : std::max(gate.made(), pushes_.front().iteration);
}

// ---- shards that move ---------------------------------------------------------------------------------------------

namespace {

struct PushHead {
  uint32_t rank = 0;
  uint8_t dtype = 0, summed = 0;
  uint16_t zero = 0;
  uint64_t incarnation = 0;
  uint64_t iteration = 0;
  double weight = 0;
  Hyper hyper;
  uint32_t items = 0;  // spans, first and n; or keys, by their hashes
  uint32_t zero2 = 0;
};

std::string write_push(const PushHead& head, const std::string& items, const std::string& numbers) {
  std::string body(reinterpret_cast<const char*>(&head), sizeof head);
  return body + items + numbers;
}

}  // namespace

std::vector<std::string> BspUpdates::copy(const Gate& gate, const Target& target, size_t bytes_max) const {
  std::vector<std::string> all;
  const auto add = [&](const Push& push) {
    PushHead head;
    head.rank = push.rank;
    head.incarnation = push.incarnation;
    head.dtype = static_cast<uint8_t>(push.dtype);
    head.summed = push.summed ? 1 : 0;
    head.iteration = push.iteration;
    head.weight = push.weight;
    head.hyper = push.hyper;
    const size_t size = size_of(push.dtype);
    std::string items, numbers;
    const auto end = [&] {
      all.push_back(write_push(head, items, numbers));
      items.clear();
      numbers.clear();
      head.items = 0;
    };
    for (const Span& s : push.spans) {  // a shard that a rule wants whole may have more than fits
      for (uint64_t done = 0; done < s.n;) {
        if (numbers.size() + size > bytes_max) end();
        const uint64_t part[2] = {s.first + done, std::min<uint64_t>(s.n - done, (bytes_max - numbers.size()) / size)};
        items.append(reinterpret_cast<const char*>(part), sizeof part);
        numbers.append(reinterpret_cast<const char*>(push.numbers + (s.at + done) * size), part[1] * size);
        ++head.items;
        done += part[1];
      }
    }
    const size_t row = target.table != nullptr ? target.table->spec().dim * size : 0;
    for (const Keyed& k : push.keyed) {
      if (!numbers.empty() && numbers.size() + row > bytes_max) end();
      items.append(reinterpret_cast<const char*>(&k.hash), sizeof k.hash);
      numbers.append(reinterpret_cast<const char*>(push.numbers + k.at * row), row);
      ++head.items;
    }
    end();
  };
  if (sum_.any) {
    Push sum;
    sum.rank = sum_.last;
    sum.iteration = gate.made();
    sum.weight = sum_.weight;
    sum.hyper = sum_.hyper;
    sum.summed = true;
    if (target.table != nullptr) {
      sum.keyed = sum_.rows.keyed;
      sum.numbers = reinterpret_cast<const std::byte*>(sum_.rows.rows.data());
    } else {
      sum.dtype = target.tensor->spec().dtype;
      sum.spans = covered_spans(target);
      sum.numbers = sum_.numbers.data();
    }
    add(sum);
  }
  for (const Push& push : pushes_) add(push);
  return all;
}

Status BspUpdates::put(const std::byte* body, size_t bytes, const Gate& gate, const Target& target) {
  const Status wrong(Code::kCorrupt, "shard: a push that waits for its update is cut short, or does not fit");
  PushHead head;
  if (bytes < sizeof head) return wrong;
  std::memcpy(&head, body, sizeof head);
  if (head.dtype > static_cast<uint8_t>(Dtype::kFloat16)) return wrong;
  Push push;
  push.rank = head.rank;
  push.incarnation = head.incarnation;
  push.iteration = head.iteration;
  push.weight = head.weight;
  push.hyper = head.hyper;
  push.dtype = static_cast<Dtype>(head.dtype);
  push.summed = head.summed != 0;
  push.lent = !push.summed;  // it may have been when it was copied
  const bool is_table = target.table != nullptr;
  const Dtype stored = is_table ? Dtype::kFloat32 : target.tensor->spec().dtype;
  if (!may_travel(push.dtype, stored)) return wrong;
  const size_t size = size_of(push.dtype);
  const std::byte* at = body + sizeof head;
  size_t left = bytes - sizeof head;
  const size_t item = is_table ? sizeof(uint64_t) : 2 * sizeof(uint64_t);
  if (head.items > left / item) return wrong;
  uint64_t n = 0;
  for (uint32_t i = 0; i < head.items; ++i, at += item, left -= item) {
    uint64_t values[2] = {};
    std::memcpy(values, at, item);
    if (is_table) {
      if (shard_of_hash(values[0]) != target.shard) return wrong;
      push.keyed.push_back({values[0], i});
      n += target.table->spec().dim;
    } else {
      const Cut& cut = target.tensor->cut();
      const uint64_t first = cut.first_of(target.shard), end = cut.end_of(target.shard);
      if (values[0] < first || values[0] >= end || values[1] > end - values[0] || values[1] > end - first - n)
        return wrong;
      push.spans.push_back({values[0], values[1], n});
      n += values[1];
    }
  }
  if (left != n * size) return wrong;
  push.numbers = at;
  StagingQuota::Room room;
  if (quota_ != nullptr && !quota_->take(left, &room) && !quota_->take_beyond(left, &room))
    return Status(Code::kResourceExhausted,
                  "shard: no memory for " + std::to_string(left) + " bytes of a push that waits for its update");
  push.copy_numbers(is_table ? target.table->spec().dim * size : size, left, std::move(room));
  if (push.iteration >= gate.made()) insert(std::move(push));
  return {};
}

void make_updates(Shard& shard, const Target& target, Waiting* own) {
  Gate& gate = *shard.gate;
  auto* const rounds = static_cast<BspUpdates*>(shard.staged.get());
  const uint64_t complete = gate.complete();
  if (gate.made() >= complete) return;
  while (gate.made() < complete) {
    // Iterations in which nobody pushed change nothing.
    const uint64_t next = rounds != nullptr ? rounds->first(gate) : Gate::kNone;
    gate.advance(std::min(next, complete));
    if (next >= complete) break;
    if (shard.capture != nullptr) shard.capture->before_write(shard);
    rounds->make(gate, target, shard, gate.made() + 1 == complete, own);
    if (shard.capture != nullptr) shard.capture->after_write();
    gate.advance(gate.made() + 1);
  }
  gate.forget(gate.made());
}

}  // namespace windlass
