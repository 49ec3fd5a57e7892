// Arenas: memory that a client on the same host has shared with this server.
//
// A file is checked before it is mapped, and the places that a request names before they are used: a client that lies
// gets an error and cannot cause a fault. A mapping stays for as long as somebody uses it.
//
// Thread safety: every method from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace windlass {

class Mapping {
 public:
  Mapping(std::byte* data, uint64_t bytes, int file) : data_(data), bytes_(bytes), file_(file) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  int file() const { return file_; }

 private:
  std::byte* const data_;
  const uint64_t bytes_;
  const int file_;
};

class Arenas {
 public:
  // Owns the file from here on, even on error; find() then returns that error.
  Status add(uint32_t id, uint64_t bytes, int file, uint64_t bytes_max);
  void drop(uint32_t id);
  void clear();
  bool empty() const;
  // Finds [offset, offset + bytes) of an arena; *mapping keeps it mapped.
  Status find(uint32_t id, uint64_t offset, uint64_t bytes, std::shared_ptr<const Mapping>* mapping) const;

 private:
  Status map(uint32_t id, uint64_t bytes, int file, uint64_t bytes_max, std::shared_ptr<const Mapping>* out);

  struct Entry {
    std::shared_ptr<const Mapping> mapping;  // null if it was refused
    Status refused;
  };
  mutable std::mutex mutex_;
  std::map<uint32_t, Entry> all_;
  uint64_t bytes_ = 0;
};

}  // namespace windlass
