// Sets rows of a table: TableClient::put.
//
// Any number of rows is put in portions, one after the other, each with a copy of what it sends: it is numbered like a
// push, and may be sent again after its caller has given up. Of a repeated key the last row counts, within a portion
// because only that one travels, and between portions because they keep their order.
#include <algorithm>
#include <cstring>

#include "client/op/table.h"

namespace windlass {
namespace {

// A put of some rows.
class PutRowsCall final : public Call {
 public:
  PutRowsCall(std::shared_ptr<TableClient> client, const What& what, const RowArrays& from, uint64_t first, uint64_t n)
      : Call(client->shared_session(), client->progress(), what), client_(std::move(client)) {
    item_.sets_count = from.counts != nullptr ? 1 : 0;
    item_.planes = 0;
    for (size_t part = 0; part < from.parts.size(); ++part)
      item_.planes |= from.parts[part] != nullptr ? 1u << part : 0;
    row_bytes_ = row_form(item_).bytes(client_->spec());
    const Groups groups(from.keys.some(first, n));
    ok_ = groups.ok();
    starts_.push_back(0);
    for (uint32_t shard = 0; shard < limits::kTableShards; ++shard) {
      if (groups.size(shard) == 0) continue;
      add_last(groups.begin(shard), groups.size(shard));
      shards_.push_back(shard);
      starts_.push_back(keyed_.size());
    }
    write_rows(from, first);
    aim(wire::Op::kPut, client_->shared_object().get(), client_->owners(), shards_);
  }
  bool ok() const { return ok_; }

  Status fill(uint32_t part, bool, Entry* entry) override {
    entry->clock = session().clock();
    entry->keyed = keyed_.data() + starts_[part];
    entry->items = rows_of(part);
    entry->body = reinterpret_cast<const std::byte*>(&item_);
    entry->body_bytes = sizeof item_;
    entry->in = PutRowsCall::numbers(part);
    entry->numbers_bytes = rows_of(part) * row_bytes_;
    return {};
  }

  void describe(uint32_t part, bool, Parcel* to) override {
    to->items = rows_of(part);
    to->items_bytes = static_cast<uint32_t>(rows_of(part) * sizeof(uint64_t));
    to->argument_bytes = sizeof item_;
    to->same_argument = true;
    to->numbers_bytes = to->work_bytes = rows_of(part) * row_bytes_;
  }
  void write_items(uint32_t part, bool, std::byte* to) override {
    for (size_t i = starts_[part]; i < starts_[part + 1]; ++i, to += sizeof(uint64_t)) {
      const uint64_t key = unmix(keyed_[i].hash);
      std::memcpy(to, &key, sizeof key);
    }
  }
  void write_argument(uint32_t, std::byte* to) override { std::memcpy(to, &item_, sizeof item_); }
  bool joins(uint32_t) const override { return true; }
  const std::byte* numbers(uint32_t part) override { return rows_.data() + starts_[part] * row_bytes_; }

 protected:
  bool is_large() const override { return rows_.size() >= limits::kCrewBytesMin; }
  Status add_to_plan(Arena::Segments*, RemoteRoute::Plan* plan) override {
    plan->bytes = rows_.size();
    return {};
  }

 private:
  uint32_t rows_of(uint32_t part) const { return static_cast<uint32_t>(starts_[part + 1] - starts_[part]); }

  // Adds each key once, where it is last.
  void add_last(const Keyed* keyed, size_t n) {
    size_t size = 16;
    int bits = 4;
    while (size < n * 2) size *= 2, ++bits;
    slots_.assign(size, 0);
    for (size_t i = n; i-- > 0;) {
      size_t at = place_of(keyed[i].hash) >> (64 - bits);
      while (slots_[at] != 0 && keyed[slots_[at] - 1].hash != keyed[i].hash) at = (at + 1) & (size - 1);
      if (slots_[at] != 0) continue;
      slots_[at] = static_cast<uint32_t>(i + 1);
      keyed_.push_back(keyed[i]);
    }
  }

  // Writes the rows as they travel; from then on a key's place counts from its part's first row.
  void write_rows(const RowArrays& from, uint64_t first) {
    const std::vector<uint32_t> sizes = RowForm::parts_of(client_->spec());
    rows_.resize(keyed_.size() * row_bytes_);
    std::byte* to = rows_.data();
    for (const Keyed& keyed : keyed_) {
      const uint64_t row = first + keyed.at;
      for (size_t part = 0; part < sizes.size(); ++part) {
        if (from.parts[part] == nullptr) continue;
        std::memcpy(to, from.parts[part] + row * sizes[part], sizes[part] * sizeof(float));
        to += sizes[part] * sizeof(float);
      }
      if (from.counts == nullptr) continue;
      const auto count = static_cast<uint32_t>(from.counts[row]);
      std::memcpy(to, &count, sizeof count);
      to += sizeof count;
    }
    for (uint32_t part = 0; part < shards_.size(); ++part) {
      for (uint32_t i = 0; i < rows_of(part); ++i) keyed_[starts_[part] + i].at = i;
    }
  }

  const std::shared_ptr<TableClient> client_;
  wire::PutItem item_;
  uint64_t row_bytes_ = 0;
  bool ok_ = true;
  std::vector<uint32_t> shards_;
  std::vector<size_t> starts_;  // of each part in keyed_, and the end
  std::vector<Keyed> keyed_;
  std::vector<std::byte> rows_;
  std::vector<uint32_t> slots_;  // for add_last(): index in its keys plus one; 0: empty
};

}  // namespace

Status TableClient::check_finite(const What& what, const RowArrays& from) const {
  if (!spec_.reject_nonfinite) return {};
  const std::vector<uint32_t> sizes = RowForm::parts_of(spec_);
  for (size_t part = 0; part < sizes.size(); ++part) {
    if (from.parts[part] == nullptr || kernels().finite(Dtype::kFloat32, from.parts[part], from.keys.n * sizes[part]))
      continue;
    return Status(Code::kNonFinite, what.text() + (part == 0 ? ": the weights have" : ": the state has") +
                                        " NaN or infinity; nothing was put");
  }
  return {};
}

Status TableClient::put(const RowArrays& from, int64_t portion_ns) {
  const What what{"put", "table", name_};
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  WL_RETURN_IF_ERROR(check_finite(what, from));
  RowForm form{.parts = 0, .counted = from.counts != nullptr};
  for (size_t part = 0; part < from.parts.size(); ++part) form.parts |= from.parts[part] != nullptr ? 1u << part : 0;
  const uint64_t most = std::max<uint64_t>(1, limits::kPutBytes / (form.bytes(spec_) + sizeof(uint64_t)));
  for (uint64_t first = 0; first < from.keys.n; first += most) {
    const uint64_t n = std::min(most, from.keys.n - first);
    const int64_t deadline_ns = os::now_ns() + portion_ns;
    const Ref<PutRowsCall> call(new PutRowsCall(shared_from_this(), what, from, first, n));
    Status status = call->ok() ? call->start(nullptr, nullptr, How::kWait, deadline_ns)
                               : Status(Code::kResourceExhausted, what.text() + ": no memory to sort its keys");
    if (status.ok()) status = call->finish(deadline_ns);
    if (status.ok()) continue;
    const std::string done = std::to_string(first) + " of " + std::to_string(from.keys.n);
    return first == 0 ? status : Status(status.code(), status.message() + "; the first " + done + " rows were put");
  }
  return {};
}

}  // namespace windlass
