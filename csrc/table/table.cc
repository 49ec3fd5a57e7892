#include "table/table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/breaks.h"
#include "base/fingerprint.h"
#include "rule/bounded.h"
#include "rule/schedule.h"

namespace windlass {
namespace {

constexpr size_t kBlockRows = 512;  // rows that are handed to a kernel at once
constexpr size_t kCopiedNumbers =
    8192;  // of their gradients, where those are copied: they stay in the first-level cache
constexpr size_t kAskAtOnceBytes = 512 << 10;
constexpr size_t kSlabBytes = 16 << 10;  // about; a slab holds a power of two of rows

// A row lies within one cache line if it fits, and starts on a half line if it does not.
size_t stride_of(size_t bytes) {
  if (bytes == 12) return 12;  // a head with one number: two of sixteen straddle a line, and a quarter is saved
  if (bytes > 64) return (bytes + 31) / 32 * 32;
  size_t stride = 4;
  while (stride < bytes) stride *= 2;
  return stride;
}

// Whether a row may occur twice in a request. Exact as long as a bit for each row of the shard stays in the
// second-level cache.
bool may_repeat(const std::vector<uint32_t>& rows, uint32_t shard_rows) {
  constexpr uint32_t kMostRows = 1 << 20;
  if (shard_rows > kMostRows) return true;
  static thread_local std::vector<uint64_t> seen;  // all zero between two requests
  if (seen.size() * 64 < shard_rows) seen.resize((shard_rows + 63) / 64);
  bool twice = false;
  for (size_t i = 0; i < rows.size() && !twice; ++i) {
    uint64_t& bits = seen[rows[i] / 64];
    twice = (bits >> (rows[i] % 64) & 1) != 0;
    bits |= uint64_t{1} << (rows[i] % 64);
  }
  for (const uint32_t row : rows) seen[row / 64] = 0;
  return twice;
}

// Which entries of a request are the first with their row. first[i] == i for those, else the earlier one.
// Returns whether any row repeats.
bool find_repeats(const std::vector<uint32_t>& rows, std::vector<uint32_t>* first) {
  static thread_local std::vector<uint32_t> slots;  // entry + 1; 0: empty
  size_t size = 64;
  while (size < rows.size() * 2) size *= 2;
  slots.assign(size, 0);
  first->resize(rows.size());
  bool repeats = false;
  for (uint32_t i = 0; i < rows.size(); ++i) {
    size_t slot = rows[i] * 0x9E3779B1u & (size - 1);
    while (slots[slot] != 0 && rows[slots[slot] - 1] != rows[i]) slot = (slot + 1) & (size - 1);
    if (slots[slot] == 0) {
      slots[slot] = i + 1;
      (*first)[i] = i;
    } else {
      (*first)[i] = slots[slot] - 1;
      repeats = true;
    }
  }
  return repeats;
}

}  // namespace

std::string describe(const TableSpec& s) {
  return "table(dim=" + std::to_string(s.dim) + ", rule=" + describe(s.rule) + ", init=" + describe(s.init) +
         ", seed=" + std::to_string(s.seed) + ", reject_nonfinite=" + (s.reject_nonfinite ? "True" : "False") +
         ", sync=" + describe(s.sync) + ")";
}

Table::Table(std::string name, TableSpec spec, TablePools* pools)
    : name_(std::move(name)),
      spec_(std::move(spec)),
      pools_(pools),
      layout_(layout_of(spec_.rule)),
      row_seed_(mix_in(mix_text(name_), spec_.seed)),
      shards_(std::make_unique<TableShard[]>(limits::kTableShards)) {
  weight_stride_ = stride_of(spec_.dim * sizeof(float));
  state_stride_ = layout_.vectors != 0 ? stride_of(layout_.vectors * spec_.dim * sizeof(float)) : 0;
  head_stride_ = stride_of(sizeof(RowHead) + layout_.row_scalars * sizeof(float));
  const size_t row_bytes = weight_stride_ + state_stride_ + head_stride_;
  while ((row_bytes << (slab_shift_ + 1)) <= kSlabBytes) ++slab_shift_;
  slab_mask_ = (1u << slab_shift_) - 1;
  const auto whole_lines = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  state_at_ = whole_lines(weight_stride_ << slab_shift_);
  head_at_ = state_at_ + whole_lines(state_stride_ << slab_shift_);
  slab_bytes_ = head_at_ + whole_lines(head_stride_ << slab_shift_);
}

Table::~Table() {
  for (uint32_t i = 0; i < limits::kTableShards; ++i) clear(i);
  pools_->trim();
}

Status check_spec(const std::string& name, const TableSpec& spec) {
  if (spec.dim == 0 || spec.dim > limits::kTableDimMax) {
    return Status(Code::kInvalidArgument, "table '" + name + "': dim must be between 1 and " +
                                              std::to_string(limits::kTableDimMax) + ", not " +
                                              std::to_string(spec.dim));
  }
  WL_RETURN_IF_ERROR(check_rule("table '" + name + "'", spec.rule));
  if (spec.rule.foreign.whole || spec.rule.foreign.shard_scalars != 0) {
    return Status(Code::kInvalidArgument,
                  "table '" + name + "': " + describe(spec.rule) + " is for a tensor in one piece, not for rows");
  }
  return check_sync("table '" + name + "'", spec.sync);
}

Status Table::create(const std::string& name, const TableSpec& spec, TablePools* pools, std::unique_ptr<Table>* out) {
  WL_RETURN_IF_ERROR(check_spec(name, spec));
  out->reset(new Table(name, spec, pools));
  return {};
}

Status Table::out_of_memory() const {
  return pools_->budget->exhausted(slab_bytes_, "table '" + name_ + "' cannot grow");
}

// Counts what has changed of a shard since the last time.
void Table::tell_size(TableShard& s) {
  const uint64_t rows = s.index.size(), bytes = s.slabs.size() * slab_bytes_ + s.index.bytes();
  if (rows != s.told_rows) rows_.fetch_add(rows - std::exchange(s.told_rows, rows), std::memory_order_relaxed);
  if (bytes != s.told_bytes) bytes_.fetch_add(bytes - std::exchange(s.told_bytes, bytes), std::memory_order_relaxed);
}

void Table::initial(uint64_t hash, float* out) const {
  kernels().fill(spec_.init, mix_in(row_seed_, unmix(hash)), 0, out, spec_.dim);
}

// Adds an uninitialised row for a hash that has none; kAbsent when there is no memory.
uint32_t Table::new_row(TableShard& s, uint64_t hash) {
  uint32_t row = 0;
  const bool recycled = !s.free_rows.empty();
  if (recycled) {
    row = s.free_rows.back();
  } else {
    row = s.rows;
    if (row >= limits::kShardRowsMax) return Index::kAbsent;
    if ((row >> slab_shift_) >= s.slabs.size()) {
      std::byte* slab = pools_->slabs.take(slab_bytes_);
      if (slab == nullptr) return Index::kAbsent;
      s.slabs.push_back(slab);
    }
  }
  if (!s.index.insert(pools_->index, place_of(hash), row)) return Index::kAbsent;
  recycled ? s.free_rows.pop_back() : static_cast<void>(++s.rows);
  return row;
}

uint32_t Table::make_row(TableShard& s, uint64_t hash) {
  const uint32_t row = new_row(s, hash);
  if (row == Index::kAbsent) return row;
  initial(hash, weights(s, row));
  *head(s, row) = {};
  start_state(s, row);
  return row;
}

void Table::start_state(const TableShard& s, uint32_t row) const {
  const float start = spec_.rule.initial_state;
  if (state_stride_ != 0) std::fill_n(state(s, row), layout_.vectors * spec_.dim, start);
  std::fill_n(head(s, row)->scalars(), layout_.row_scalars, start);
}

Status Table::make_missing(TableShard& s, const Keyed* keyed, size_t n, uint32_t* rows) {
  bool full = false;
  for (size_t i = 0; i < n && !full; ++i) {
    if (rows[i] != Index::kAbsent) continue;
    rows[i] = s.index.find(place_of(keyed[i].hash));  // the same key may have been made a moment ago
    if (rows[i] == Index::kAbsent) rows[i] = make_row(s, keyed[i].hash);
    full = rows[i] == Index::kAbsent;
    if (!full && s.changes != nullptr) s.changes->add(keyed + i, 1);
  }
  tell_size(s);
  return full ? out_of_memory() : Status();
}

Status Table::read(uint32_t shard, const Keyed* keyed, size_t n, const Arrays& arrays, bool create) {
  TableShard& s = shards_[shard];
  static thread_local std::vector<uint32_t> rows;
  rows.resize(n);
  // Where the rows fit into the second-level cache they are prefetched as soon as they are known.
  const size_t row_bytes = spec_.dim * sizeof(float);
  if (n * row_bytes <= kAskAtOnceBytes) {
    s.index.find_all(keyed, n, rows.data(), [&](uint32_t row) {
      const char* w = reinterpret_cast<const char*>(weights(s, row));
      for (size_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(w + at, 0, 2);
    });
  } else {
    s.index.find_all(keyed, n, rows.data());
  }
  if (create) WL_RETURN_IF_ERROR(make_missing(s, keyed, n, rows.data()));
  write_out(s, keyed, n, rows.data(), arrays);
  return {};
}

void Table::write_out(const TableShard& s, const Keyed* keyed, size_t n, const uint32_t* rows,
                      const Arrays& arrays) const {
  const size_t dim = spec_.dim;
  const size_t row_bytes = dim * size_of(arrays.out_dtype);
  std::byte* const out = static_cast<std::byte*>(arrays.out);
  const bool plain = arrays.out_dtype == Dtype::kFloat32;
  const float* from[kBlockRows];
  float* to[kBlockRows];
  for (size_t at = 0; at < n; at += kBlockRows) {
    size_t m = 0;
    for (size_t i = at; i < std::min(at + kBlockRows, n); ++i) {
      std::byte* const target = out + keyed[i].at * row_bytes;
      if (rows[i] == Index::kAbsent) {  // absent and not to be made: write only its value
        std::vector<float> value(dim);
        initial(keyed[i].hash, value.data());
        kernels().from_f32(arrays.out_dtype, value.data(), target, dim);
        continue;
      }
      from[m] = weights(s, rows[i]);
      to[m++] = reinterpret_cast<float*>(target);
    }
    if (plain) {
      kernels().copy_rows(from, to, m, spec_.dim, arrays.stream);
    } else {
      for (size_t i = 0; i < m; ++i) kernels().from_f32(arrays.out_dtype, from[i], to[i], dim);
    }
  }
  if (arrays.stream) kernels().fence();
}

// Where the rows of a shard lie. A copy of the table's strides and offsets: the compiler would read the table's own
// again for every row, since writes in between might change them.
struct Place {
  float* w;
  float* state;
  RowHead* head;
};
class Table::Places {
 public:
  Places(const Table& t, const TableShard& s)
      : slabs_(s.slabs.data()),
        n_(s.slabs.size()),
        weight_stride_(t.weight_stride_),
        state_stride_(t.state_stride_),
        head_stride_(t.head_stride_),
        state_at_(t.state_at_),
        head_at_(t.head_at_),
        shift_(t.slab_shift_),
        mask_(t.slab_mask_) {}

  Place operator[](uint32_t row) const {
    std::byte* const slab = slabs_[row >> shift_];
    const size_t i = row & mask_;
    return {reinterpret_cast<float*>(slab + i * weight_stride_),
            reinterpret_cast<float*>(slab + state_at_ + i * state_stride_),
            reinterpret_cast<RowHead*>(slab + head_at_ + i * head_stride_)};
  }

  // Prefetches the directory of slabs, where a request of n rows uses most of it.
  void ask(size_t n) const {
    constexpr size_t kLine = 64 / sizeof(*slabs_);
    if (n_ > n * kLine) return;
    for (size_t i = 0; i < n_; i += kLine) __builtin_prefetch(slabs_ + i);
  }

 private:
  std::byte* const* const slabs_;
  const size_t n_, weight_stride_, state_stride_, head_stride_, state_at_, head_at_;
  const uint32_t shift_, mask_;
};

Status Table::apply(uint32_t shard, const Hyper& hyper, const Keyed* keyed, size_t n, const Arrays& arrays) {
  TableShard& s = shards_[shard];
  const size_t dim = spec_.dim;
  const std::byte* const in = static_cast<const std::byte*>(arrays.in);
  const size_t in_bytes = dim * size_of(arrays.in_dtype);
  const bool plain = arrays.in_dtype == Dtype::kFloat32;
  const auto gradient = [&](size_t i) { return in + keyed[i].at * in_bytes; };
  // Lent numbers that must be finite are looked at where they are used: in a copy, which nobody can change.
  const bool looks = spec_.reject_nonfinite && arrays.lent && !broken(Break::kNonfinite);
  const auto copy = [&](size_t i, float* to) {
    kernels().to_f32(arrays.in_dtype, gradient(i), to, dim);
    return !looks || kernels().finite(Dtype::kFloat32, to, dim);
  };

  // Make every row first, so that no weight has changed when memory runs out.
  static thread_local std::vector<uint32_t> rows, first;
  rows.resize(n);
  Places(*this, s).ask(n);
  s.index.find_all(keyed, n, rows.data());
  WL_RETURN_IF_ERROR(make_missing(s, keyed, n, rows.data()));
  if (s.changes != nullptr) s.changes->add(keyed, n);
  for (size_t i = 0; s.capture != nullptr && i < n; ++i) keep(s, keyed[i].hash, rows[i]);

  // Several gradients for one row become one, in order of occurrence.
  static thread_local std::vector<float> combined;        // rows of it
  static thread_local std::vector<uint32_t> combined_of;  // entry -> its row in `combined` + 1
  static thread_local std::vector<uint32_t> times;        // of each row in `combined`
  const bool repeats = may_repeat(rows, s.rows) && find_repeats(rows, &first);
  if (repeats) {
    combined.clear();
    times.clear();
    combined_of.assign(n, 0);
    std::vector<float> one(dim);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t f = first[i];
      if (f == i) continue;
      if (combined_of[f] == 0) {
        combined.resize(combined.size() + dim);
        if (!copy(f, combined.data() + combined.size() - dim)) return found_nonfinite(shard, false);
        times.push_back(1);
        combined_of[f] = static_cast<uint32_t>(times.size());
      }
      const size_t row = combined_of[f] - 1;
      if (!copy(i, one.data())) return found_nonfinite(shard, false);
      kernels().combine(layout_.combine, combined.data() + row * dim, one.data(), dim);
      ++times[row];
    }
    for (size_t row = 0; row < times.size() && layout_.combine == Combine::kMean; ++row)
      kernels().divide(combined.data() + row * dim, static_cast<float>(times[row]), dim);
    if (looks && !kernels().finite(Dtype::kFloat32, combined.data(), combined.size()))
      return found_nonfinite(shard, false);
  }

  if (spec_.rule.kind == RuleKind::kForeign) {
    std::vector<uint32_t> own;  // entries, one per row
    for (uint32_t i = 0; i < n; ++i) {
      if (!repeats || first[i] == i) own.push_back(i);
    }
    const auto write = [&](uint32_t i, float* to) {
      if (repeats && combined_of[i] != 0) {
        std::memcpy(to, combined.data() + (combined_of[i] - 1) * dim, dim * sizeof(float));
        return true;
      }
      return copy(i, to);
    };
    WL_RETURN_IF_ERROR(apply_foreign(shard, hyper, rows, own, write));
    if (arrays.out != nullptr) write_out(s, keyed, n, rows.data(), arrays);
    return {};
  }

  const Hyper now = at_update(spec_.rule, hyper, ++s.count);
  const RuleKernels& rule = kernels(spec_.rule.kind);
  const bool bounded = Bounds::any(spec_.rule);
  const Bounds bounds(spec_.rule);
  std::vector<float> copied;  // gradients of a block
  const bool in_pass = looks && plain && !repeats && !bounded && dim <= kLookingRowMax;
  const bool copies = !plain || (looks && !in_pass);
  const size_t block = copies ? std::clamp<size_t>(kCopiedNumbers / dim, 1, kBlockRows) : kBlockRows;
  if (copies) copied.resize(std::min(block, n) * dim);
  float* w[kBlockRows];
  float* state_of[kBlockRows];
  RowHead* heads[kBlockRows];
  const float* g[kBlockRows];
  const float* from[kBlockRows];
  float* to[kBlockRows];
  const Places places(*this, s);
  for (size_t at = 0; at < n; at += block) {
    const size_t end = std::min(at + block, n);
    size_t m = 0, n_copied = 0;
    for (size_t i = at; i < end; ++i) {
      if (repeats && first[i] != i) continue;
      const Place place = places[rows[i]];
      w[m] = place.w;
      state_of[m] = place.state;
      heads[m] = place.head;
      if (repeats && combined_of[i] != 0) {
        g[m] = combined.data() + (combined_of[i] - 1) * dim;
      } else if (!copies) {
        g[m] = reinterpret_cast<const float*>(gradient(i));
      } else {
        g[m] = to[n_copied] = copied.data() + n_copied * dim;
        from[n_copied] = reinterpret_cast<const float*>(gradient(i));
        if (!plain) kernels().to_f32(arrays.in_dtype, from[n_copied], to[n_copied], dim);
        ++n_copied;
      }
      ++m;
    }
    if (copies && plain) kernels().copy_rows(from, to, n_copied, spec_.dim, false);
    const Rows some{w, state_of, heads, g, m, spec_.dim, static_cast<uint32_t>(s.version)};
    size_t applied = m;
    if (in_pass) {
      applied = rule.looking_rows(now, some);
    } else if (looks && !kernels().finite(Dtype::kFloat32, copied.data(), n_copied * dim)) {
      applied = 0;
    } else {
      bounded ? bounds.rows(rule, now, some) : rule.rows(now, some);
    }
    if (applied != m) {
      const bool any = at != 0 || applied != 0;
      if (!any) --s.count;
      return found_nonfinite(shard, any);
    }
  }
  if (arrays.out != nullptr) write_out(s, keyed, n, rows.data(), arrays);
  return {};
}

// The function works on a copy of the rows, as in Tensor::apply_foreign().
Status Table::apply_foreign(uint32_t shard, const Hyper& hyper, const std::vector<uint32_t>& rows,
                            const std::vector<uint32_t>& entries,
                            const std::function<bool(uint32_t, float*)>& gradient) {
  TableShard& s = shards_[shard];
  if (foreign_ == nullptr) return Status(Code::kInternal, "table '" + name_ + "': its rule is not there");
  const size_t dim = spec_.dim, bytes = dim * sizeof(float), scalars = layout_.row_scalars;
  const bool bounded = Bounds::any(spec_.rule);
  const Bounds bounds(spec_.rule);
  const auto next = [](uint32_t count) { return count == 0xFFFFFFFFu ? count : count + 1; };
  bool finite = true;
  const auto fill = [&](ForeignCall& call) {
    for (size_t i = 0; i < entries.size(); ++i) {
      const uint32_t row = rows[entries[i]];
      std::memcpy(call.w + i * dim, weights(s, row), bytes);
      finite = gradient(entries[i], call.g + i * dim) && finite;
      if (bounded) bounds.gradient(call.g + i * dim, call.g + i * dim, dim);
      for (size_t v = 0; v < layout_.vectors; ++v) std::memcpy(call.state[v] + i * dim, state(s, row) + v * dim, bytes);
      if (scalars != 0) std::memcpy(call.row_scalars + i * scalars, head(s, row)->scalars(), scalars * sizeof(float));
      call.counts[i] = next(head(s, row)->count);
    }
    call.count = s.count + 1;
    call.hyper = at_update(spec_.rule, hyper, call.count);
  };
  const auto take = [&](const ForeignCall& call) {
    if (!finite) return;
    for (size_t i = 0; i < entries.size(); ++i) {
      const uint32_t row = rows[entries[i]];
      std::memcpy(weights(s, row), call.w + i * dim, bytes);
      if (bounded) bounds.weights(weights(s, row), dim);
      for (size_t v = 0; v < layout_.vectors; ++v) std::memcpy(state(s, row) + v * dim, call.state[v] + i * dim, bytes);
      RowHead* const h = head(s, row);
      if (scalars != 0) std::memcpy(h->scalars(), call.row_scalars + i * scalars, scalars * sizeof(float));
      h->count = next(h->count);
      h->touched = static_cast<uint32_t>(s.version);
    }
    ++s.count;
  };
  const ForeignRule::Size size{.elements = entries.size() * dim,
                               .vectors = layout_.vectors,
                               .row_scalars = layout_.row_scalars,
                               .row = dim,
                               .counted = true};
  WL_RETURN_IF_ERROR(foreign_->apply(size, fill, take));
  return finite ? Status() : found_nonfinite(shard, false);
}

bool Table::scan(uint32_t shard, uint64_t* from, size_t most, std::vector<uint64_t>* keys,
                 std::vector<float>* out) const {
  const TableShard& s = shards_[shard];
  std::vector<Index::Entry> found;
  const bool more = s.index.scan(*from, most, &found);
  for (size_t i = 0; i < found.size(); ++i) {
    if (i + 16 < found.size()) __builtin_prefetch(weights(s, found[i + 16].row));
    const float* w = weights(s, found[i].row);
    keys->push_back(key_of(shard, found[i].hash));
    out->insert(out->end(), w, w + spec_.dim);
  }
  if (!found.empty()) *from = found.back().hash + 1;
  return more;
}

uint64_t Table::fingerprint(uint32_t shard) const {
  const TableShard& s = shards_[shard];
  const uint64_t salt = mix_text(name_);
  uint64_t sum = 0, from = 0;
  for (bool more = true; more;) {
    std::vector<Index::Entry> found;
    more = s.index.scan(from, 4096, &found);
    for (const Index::Entry& e : found) {
      const RowHead* h = head(s, e.row);
      if (!h->is_changed()) continue;
      sum += fingerprint_of_row(salt, key_of(shard, e.hash), *h, h->scalars(), weights(s, e.row), state(s, e.row));
    }
    if (!found.empty()) from = found.back().hash + 1;
  }
  return sum + fingerprint_of_count(shard, s.count);
}

uint64_t Table::fingerprint_of_row(uint64_t salt, uint64_t key, const RowHead& head, const float* scalars,
                                   const float* weights, const float* state) const {
  const uint64_t row_salt = mix_in(salt, key);
  uint64_t sum = kernels().fingerprint(row_salt, 0, weights, spec_.dim);
  if (layout_.vectors != 0)
    sum += kernels().fingerprint(row_salt, limits::kTableDimMax, state, layout_.vectors * spec_.dim);
  sum += windlass::fingerprint_of(row_salt, 4 * uint64_t{limits::kTableDimMax}, scalars, layout_.row_scalars);
  if (layout_.counts) sum += windlass::fingerprint_of(row_salt, 5 * uint64_t{limits::kTableDimMax}, &head.count, 1);
  return sum;
}

uint64_t Table::fingerprint_of_count(uint32_t shard, uint64_t count) const {
  if (!scheduled(spec_.rule) || count == 0) return 0;
  return windlass::fingerprint_of(mix_in(mix_text(name_), 101), shard, &count, 1);
}

}  // namespace windlass
