#include "server/net/arenas.h"

#include <string>

#include "base/limits.h"
#include "base/os.h"

namespace windlass {

Mapping::~Mapping() {
  os::unmap_shared(data_, bytes_);
  os::close_file(file_);
}

Status Arenas::add(uint32_t id, uint64_t bytes, int file, uint64_t bytes_max) {
  std::lock_guard lock(mutex_);
  Entry& entry = all_[id];
  if (entry.mapping != nullptr && os::same_file(entry.mapping->file(), file) && entry.mapping->bytes() == bytes) {
    os::close_file(file);  // the other lane has brought it already
    return {};
  }
  if (entry.mapping != nullptr) bytes_ -= entry.mapping->bytes();
  entry.mapping = nullptr;
  entry.refused = map(id, bytes, file, bytes_max, &entry.mapping);
  if (entry.refused.ok()) {
    bytes_ += bytes;
  } else {
    os::close_file(file);
    if (all_.size() > limits::kArenasMax) all_.erase(id);  // remember no more than that
  }
  return all_.count(id) != 0 ? all_[id].refused : Status(Code::kResourceExhausted, "too many arenas");
}

Status Arenas::map(uint32_t id, uint64_t bytes, int file, uint64_t bytes_max, std::shared_ptr<const Mapping>* out) {
  const std::string what = "arena " + std::to_string(id) + ": ";
  if (all_.size() > limits::kArenasMax)
    return Status(Code::kResourceExhausted, what + "at most " + std::to_string(limits::kArenasMax) + " of a session");
  if (bytes == 0 || bytes % 4096 != 0)
    return Status(Code::kInvalidArgument, what + std::to_string(bytes) + " bytes are no whole pages");
  if (bytes > bytes_max || bytes_ > bytes_max - bytes) {
    return Status(Code::kResourceExhausted, what + std::to_string(bytes) + " bytes, with " + std::to_string(bytes_) +
                                                " that this session has shared already; at most " +
                                                std::to_string(bytes_max) + " in all");
  }
  if (const std::string wrong = os::complaint_about_shared_file(file, bytes); !wrong.empty())
    return Status(Code::kInvalidArgument, what + wrong);
  std::byte* const data = os::map_shared(file, bytes);
  if (data == nullptr)
    return Status(Code::kResourceExhausted, what + std::to_string(bytes) + " bytes cannot be mapped");
  *out = std::make_shared<const Mapping>(data, bytes, file);
  return {};
}

void Arenas::drop(uint32_t id) {
  std::lock_guard lock(mutex_);
  const auto it = all_.find(id);
  if (it == all_.end()) return;
  if (it->second.mapping != nullptr) bytes_ -= it->second.mapping->bytes();
  all_.erase(it);
}

bool Arenas::empty() const {
  std::lock_guard lock(mutex_);
  return all_.empty();
}

void Arenas::clear() {
  std::lock_guard lock(mutex_);
  all_.clear();
  bytes_ = 0;
}

Status Arenas::find(uint32_t id, uint64_t offset, uint64_t bytes, std::shared_ptr<const Mapping>* mapping) const {
  const auto what = [&] { return "arena " + std::to_string(id) + ": "; };
  std::lock_guard lock(mutex_);
  const auto it = all_.find(id);
  if (it == all_.end()) return Status(Code::kInvalidArgument, what() + "it was never shared with this server");
  if (it->second.mapping == nullptr) return it->second.refused;
  const uint64_t size = it->second.mapping->bytes();
  if (offset > size || bytes > size - offset || offset % 8 != 0) {
    return Status(Code::kInvalidArgument, what() + "an array at " + std::to_string(offset) + " of " +
                                              std::to_string(bytes) + " bytes does not fit its " +
                                              std::to_string(size));
  }
  *mapping = it->second.mapping;
  return {};
}

}  // namespace windlass
