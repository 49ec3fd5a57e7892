// Requests on tables whose shards are on servers elsewhere. Each key travels once: gradients of a repeated key are
// combined before they leave, in order of occurrence, and its row is copied to every place that asked for it.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "client/remote.h"
#include "client/sharing.h"
#include "client/table.h"

namespace windlass {
namespace {

constexpr size_t kBlock = 256;         // rows that are handed to a kernel at once
constexpr size_t kListKeysMin = 1024;  // fewer travel

// A key as it is sent where its row lies in an arena, and where in the arrays that is.
struct Pair {
  uint64_t key, at;
};

class RemoteTableCall final : public TableCall, public Remote {
 public:
  RemoteTableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request)
      : TableCall(client, what, request), Remote(client->links()), sharing_(session().engine().arena()) {
    if (request.in != nullptr) in_bytes_ = request.in->bytes();
    if (request.out != nullptr) out_bytes_ = request.out->bytes();
    find_repeats();
  }

 protected:
  // Future.
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }
  void let_go() override { keep_input(true); }
  void cancel() override {
    if (pushes_ || erase_) return keep_input(true);
    // A server that has been told where the output is may still write there.
    withdraw_all(!sharing_.found());
    move_out(nullptr, 0, nullptr, [] {});
  }

  // Call.
  bool always_goes_on() const override { return true; }
  void give_way() override {
    if (!erase_) withdraw_all(false);
  }
  uint64_t kept_besides() const override { return groups_.total() * (sizeof(Keyed) + sizeof(uint32_t)); }
  std::string stuck() override { return Remote::stuck(); }
  bool take_back(bool* any) override {
    if (pushes_) return Remote::take_back(any);
    if (erase_) return false;
    return withdraw(false, Status(Code::kCancelled, what() + ": cancelled"), any);
  }
  Status launch(How how, int64_t deadline_ns) override {
    const bool numbered = pushes_ || erase_;
    const uint64_t rows = groups_.total() * client_->spec().dim * sizeof(float);
    const bool places = find_places();
    make_trips({.op = op_,
                .object = client_->map().object,
                .dtype_in = wire_in(),
                .dtype_out = arrays_.out_dtype,
                .flags = static_cast<uint16_t>((closes_ ? wire::kCloses : 0) | (create_ ? wire::kCreates : 0)),
                .bytes = erase_ ? groups_.total() * sizeof(uint64_t) : rows,
                .hyper = pushes_ ? &hyper_ : nullptr,
                .patient = waits_for_close(),
                .deadline_ns = deadline_ns,
                .places = places ? &sharing_.places : nullptr,
                .segments = sharing_.segments},
               *client_->owners(), shards_);
    for (uint32_t part = 0; part < shards_.size(); ++part) {
      const uint64_t bytes = uint64_t{unique_[part]} * client_->spec().dim * sizeof(float);
      if (!erase_ && bytes > limits::kNumbersBytesMax) {
        return Status(Code::kInvalidArgument, what() + ": " + std::to_string(bytes) + " bytes of rows for shard " +
                                                  std::to_string(shards_[part]) + ", at most " +
                                                  std::to_string(limits::kNumbersBytesMax) + "; use smaller batches");
      }
    }
    WL_RETURN_IF_ERROR(reserve(what(), deadline_ns));
    if (how == How::kFuture && pushes_ && ordinary()) keep_input(false);
    expect(trips());
    {
      std::lock_guard lock(session().order_mutex());
      std::vector<uint64_t>& sent = client_->progress()->sent;
      begin_iteration();
      if (waits_for_update()) write_weights(hyper_, iteration_, places ? &sharing_.places : nullptr);
      number([&](uint32_t shard, Trip::Part* part) {
        part->sequence = numbered ? ++sent[shard] : sent[shard];
        part->clock = pushes_ ? iteration_.clock : asked(part->part);
      });
      if (pushes_) tell_clock(session(), iteration_.clock);
      submit(this);
    }
    set_off(how);
    return {};
  }

  // Cargo.
  void describe(uint32_t part, bool lies, wire::Part* to) override {
    if (lies) {  // every key as often as it comes: the server does what we would
      to->flags |= wire::kPlaced | (list_ != nullptr ? wire::kListed : 0);
      to->items = static_cast<uint32_t>(size_of_part(part));
      to->items_bytes = static_cast<uint32_t>(list_ != nullptr ? sizeof(wire::ListedItems) : to->items * sizeof(Pair));
      return;
    }
    to->items = unique_[part];
    to->items_bytes = unique_[part] * static_cast<uint32_t>(sizeof(uint64_t)) + static_cast<uint32_t>(where_.size());
    if (pushes_) to->numbers_bytes = uint64_t{unique_[part]} * client_->spec().dim * size_of(wire_in());
  }
  void write_items(uint32_t part, bool lies, std::byte* to) override {
    const Keyed* const keyed = keyed_of(part);
    if (lies && list_ != nullptr) {
      const size_t from = static_cast<size_t>(keyed - groups_.begin(0)) * sizeof(Pair);
      wire::ListedItems list = sharing_.list;
      list.offset += from;
      list.bytes = size_of_part(part) * sizeof(Pair);
      list.crc = crc32c(list_ + from, list.bytes);
      std::memcpy(to, &list, sizeof list);
      return;
    }
    if (lies) return write_pairs(keyed, size_of_part(part), to);
    const uint32_t* const slot = slots_of(part);
    for (size_t i = 0; i < size_of_part(part); ++i) {
      const uint64_t key = unmix(keyed[i].hash);
      std::memcpy(to + (slot != nullptr ? slot[i] : i) * sizeof key, &key, sizeof key);
    }
    if (!where_.empty()) std::memcpy(to + unique_[part] * sizeof(uint64_t), where_.data(), where_.size());
  }
  const std::byte* numbers(uint32_t) override { return nullptr; }
  void gather(uint32_t part, std::byte* to) override {
    const Keyed* const keyed = keyed_of(part);
    const size_t n = size_of_part(part), dim = client_->spec().dim, bytes = dim * size_of(arrays_.in_dtype);
    const auto* const in = static_cast<const std::byte*>(arrays_.in);
    if (repeats_ && slots_of(part) != nullptr) return gather_repeats(part, reinterpret_cast<float*>(to));
    if (wire_in() != arrays_.in_dtype) {
      for (size_t i = 0; i < n; ++i) {
        kernels().to_f32(arrays_.in_dtype, in + keyed[i].at * bytes, reinterpret_cast<float*>(to) + i * dim, dim);
      }
    } else if (arrays_.in_dtype == Dtype::kFloat32) {
      const float* from[kBlock];
      float* into[kBlock];
      for (size_t at = 0; at < n; at += kBlock) {
        const size_t m = std::min(kBlock, n - at);
        for (size_t i = 0; i < m; ++i) {
          from[i] = reinterpret_cast<const float*>(in + keyed[at + i].at * bytes);
          into[i] = reinterpret_cast<float*>(to + (at + i) * bytes);
        }
        kernels().copy_rows(from, into, m, static_cast<uint32_t>(dim), false);
      }
    } else {
      for (size_t i = 0; i < n; ++i) std::memcpy(to + i * bytes, in + keyed[i].at * bytes, bytes);
    }
  }
  std::byte* landing(uint32_t, uint64_t) override { return nullptr; }
  Status land(uint32_t part, bool lies, const wire::Part& answer, const std::string& items,
              const std::byte* numbers) override {
    if (arrays_.out != nullptr || waits_for_update()) note_answer(answer, items, asked(part), client_->sync());
    if (erase_) erased_.fetch_add(answer.value, std::memory_order_relaxed);
    if (lies) return landed_in_place(part, answer);
    if (arrays_.out == nullptr) return {};
    const size_t dim = client_->spec().dim, bytes = dim * size_of(arrays_.out_dtype);
    if (answer.numbers_bytes != unique_[part] * bytes) {
      return Status(Code::kProtocolError, "shard " + std::to_string(answer.shard) + " has " +
                                              std::to_string(answer.numbers_bytes) + " bytes of rows");
    }
    if (!answers() || numbers == nullptr) return {};
    const Keyed* const keyed = keyed_of(part);
    const uint32_t* const slot = slots_of(part);
    const size_t n = size_of_part(part);
    auto* const out = static_cast<std::byte*>(arrays_.out);
    const auto row = [&](size_t i) { return numbers + (slot != nullptr ? slot[i] : i) * bytes; };
    if (arrays_.out_dtype != Dtype::kFloat32) {
      for (size_t i = 0; i < n; ++i) std::memcpy(out + keyed[i].at * bytes, row(i), bytes);
      return {};
    }
    const float* from[kBlock];
    float* into[kBlock];
    for (size_t at = 0; at < n; at += kBlock) {
      const size_t m = std::min(kBlock, n - at);
      for (size_t i = 0; i < m; ++i) {
        from[i] = reinterpret_cast<const float*>(row(at + i));
        into[i] = reinterpret_cast<float*>(out + keyed[at + i].at * bytes);
      }
      kernels().copy_rows(from, into, m, static_cast<uint32_t>(dim), arrays_.stream);
    }
    if (arrays_.stream) kernels().fence();
    return {};
  }
  void over(const Status& status) override { end(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    *shard = shards_[part];
    return client_->owners().get();
  }

 private:
  // Whether a server on the same host can use the rows where they are.
  bool find_places() {
    const bool combines = repeats_ && pushes_ && arrays_.in_dtype != Dtype::kFloat32;  // it would see another dtype
    if (std::max(in_bytes_, out_bytes_) < limits::kArenaBytesMin || combines || !links_->sharing() || shards_.empty())
      return false;
    if (!sharing_.find(arrays_.in, in_bytes_, arrays_.out, out_bytes_)) return false;
    if (sharing_.staged_in() != nullptr) arrays_.in = sharing_.staged_in();
    if (groups_.total() >= kListKeysMin) list_ = sharing_.take_list(groups_.total() * sizeof(Pair));
    if (list_ != nullptr) write_pairs(groups_.begin(0), groups_.total(), list_);
    return true;
  }
  static void write_pairs(const Keyed* keyed, size_t n, std::byte* to) {
    for (size_t i = 0; i < n; ++i) {
      const Pair pair = {unmix(keyed[i].hash), keyed[i].at};
      std::memcpy(to + i * sizeof pair, &pair, sizeof pair);
    }
  }
  Status landed_in_place(uint32_t part, const wire::Part& answer) {
    if (answer.numbers_bytes != 0)
      return Status(Code::kProtocolError, "shard " + std::to_string(answer.shard) + " has rows of its own");
    if (sharing_.staged_out() == nullptr || !answers()) return {};
    const size_t bytes = client_->spec().dim * size_of(arrays_.out_dtype);
    for (size_t i = 0; i < size_of_part(part); ++i) {
      const size_t at = keyed_of(part)[i].at * bytes;
      std::memcpy(static_cast<std::byte*>(arrays_.out) + at, sharing_.staged_out() + at, bytes);
    }
    return {};
  }
  const Keyed* keyed_of(uint32_t part) const { return groups_.begin(shards_[part]); }
  size_t size_of_part(uint32_t part) const { return groups_.size(shards_[part]); }
  // For every key of the part, its place among those that travel; nullptr where none repeats.
  const uint32_t* slots_of(uint32_t part) const {
    if (slots_.empty() || unique_[part] == size_of_part(part)) return nullptr;
    return slots_.data() + (keyed_of(part) - groups_.begin(0));
  }
  // Sums of short numbers travel in full.
  Dtype wire_in() const { return repeats_ ? Dtype::kFloat32 : arrays_.in_dtype; }

  void find_repeats() {
    unique_.resize(shards_.size());
    std::vector<uint32_t> table;  // entry + 1; 0: empty
    std::vector<uint64_t> hashes;
    for (uint32_t part = 0; part < shards_.size(); ++part) {
      const Keyed* const keyed = keyed_of(part);
      const size_t n = size_of_part(part);
      size_t size = 16;
      int bits = 4;
      while (size < n * 2) size *= 2, ++bits;
      table.assign(size, 0);
      hashes.resize(std::max(hashes.size(), n));
      uint32_t found = 0;
      uint32_t* slot = nullptr;  // from the first repeat on
      for (size_t i = 0; i < n; ++i) {
        const uint64_t h = keyed[i].hash;
        size_t at = place_of(h) >> (64 - bits);
        while (table[at] != 0 && hashes[table[at] - 1] != h) at = (at + 1) & (size - 1);
        if (table[at] == 0) {
          hashes[found] = h;
          table[at] = ++found;
        } else if (slot == nullptr) {
          slots_.resize(groups_.total());
          slot = slots_.data() + (keyed - groups_.begin(0));
          for (uint32_t k = 0; k < i; ++k) slot[k] = k;
        }
        if (slot != nullptr) slot[i] = table[at] - 1;
      }
      unique_[part] = found;
      repeats_ = repeats_ || found != n;
    }
  }
  void gather_repeats(uint32_t part, float* to) {
    const Keyed* const keyed = keyed_of(part);
    const uint32_t* const slot = slots_of(part);
    const size_t dim = client_->spec().dim, bytes = dim * size_of(arrays_.in_dtype);
    const auto* const in = static_cast<const std::byte*>(arrays_.in);
    const Combine combine = layout_of(client_->spec().rule).combine;
    std::vector<float> one(dim);
    std::vector<uint32_t> times(unique_[part]);
    uint32_t seen = 0;
    for (size_t i = 0; i < size_of_part(part); ++i) {
      float* const row = to + slot[i] * dim;
      ++times[slot[i]];
      if (slot[i] == seen) {
        kernels().to_f32(arrays_.in_dtype, in + keyed[i].at * bytes, row, dim);
        ++seen;
      } else {
        kernels().to_f32(arrays_.in_dtype, in + keyed[i].at * bytes, one.data(), dim);
        kernels().combine(combine, row, one.data(), dim);
      }
    }
    for (size_t i = 0; i < times.size() && combine == Combine::kMean; ++i) {
      if (times[i] > 1) kernels().divide(to + i * dim, static_cast<float>(times[i]), dim);
    }
  }
  void withdraw_all(bool begun) {
    bool any = false;
    withdraw(begun, Status(Code::kCancelled, what() + ": cancelled"), &any);
  }
  void keep_input(bool under_way) {
    const void* const from = arrays_.in;
    if (sharing_.staged_in() != nullptr && sharing_.found()) {
      if (under_way) move_out(nullptr, 0, nullptr, [] {});
      return;
    }
    if (pushes_ && kept_ == nullptr) {
      kept_ = std::make_unique_for_overwrite<std::byte[]>(in_bytes_ + 1);
      if (in_bytes_ != 0) std::memcpy(kept_.get(), from, in_bytes_);
    }
    const void* const to = pushes_ ? kept_.get() : from;
    if (!under_way) {
      arrays_.in = to;
      return;
    }
    move_out(from, in_bytes_, nullptr, [&] { arrays_.in = to; });  // rows are always gathered first
  }

  uint64_t in_bytes_ = 0, out_bytes_ = 0;
  Sharing sharing_;
  std::byte* list_ = nullptr;  // keys and places of all parts, where the server can read them
  bool repeats_ = false;
  std::vector<uint32_t> unique_;  // keys that travel, of each part
  std::vector<uint32_t> slots_;   // in the order of groups_
};

}  // namespace

Ref<TableCall> make_remote_call(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request) {
  return Ref<TableCall>(new RemoteTableCall(std::move(client), what, request));
}

}  // namespace windlass
