// Sharing: finds a request's arrays in the arena, so that a server on the same host can use them in place.
//
// Ordinary arrays are staged in the arena while the request is under way: the input is copied when it begins, the
// output when its answer comes.
//
// Thread safety: none; find() before the request begins.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "client/arena/arena.h"
#include "wire/frame.h"

namespace windlass {

class Sharing {
 public:
  // segments: gets the segments that the arrays lie in. registered: the arrays are registered, and may lie in segments
  // that are listed already.
  Sharing(Arena& arena, Arena::Segments& segments, bool registered)
      : arena_(arena), segments_(segments), registered_(registered) {}
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;
  ~Sharing() {
    for (std::byte* staged : {staged_in_, staged_out_, list_}) {
      if (staged != nullptr) arena_.give(staged);
    }
  }

  // False if there is no memory for copies: then the numbers are sent. Either array may be missing.
  bool find(const void* in, uint64_t in_bytes, void* out, uint64_t out_bytes) {
    places.in_bytes = in_bytes;
    places.out_bytes = out_bytes;
    found_ = (in_bytes == 0 || place(in, in_bytes, &staged_in_, &places.in_arena, &places.in_offset)) &&
             (out_bytes == 0 || place(out, out_bytes, &staged_out_, &places.out_arena, &places.out_offset));
    if (found_ && staged_in_ != nullptr) std::memcpy(staged_in_, in, in_bytes);
    return found_;
  }
  bool found() const { return found_; }
  // Memory for the request that the server can read, for as long as this object lives; nullptr if there is none.
  std::byte* take_list(uint64_t bytes) {
    uint32_t id = 0;
    uint64_t offset = 0;
    if (!place(nullptr, bytes, &list_, &id, &offset)) return nullptr;
    list = {.arena = id, .crc = 0, .offset = offset, .bytes = bytes};
    return list_;
  }
  wire::ListedItems list;
  const std::byte* staged_in() const { return staged_in_; }
  const std::byte* staged_out() const { return staged_out_; }

  wire::Places places;

 private:
  bool place(const void* array, uint64_t bytes, std::byte** staged, uint32_t* id, uint64_t* offset) {
    Place at;
    // Arrays of one step usually lie in few segments; a registered array in a known segment needs no lookup.
    const auto known = std::find_if(segments_.rbegin(), segments_.rend(), [&](const auto& segment) {
      return registered_ && array != nullptr &&
             Range{segment->data(), segment->bytes()}.contains({static_cast<const std::byte*>(array), bytes});
    });
    if (known != segments_.rend()) {
      *id = (*known)->id();
      *offset = static_cast<uint64_t>(static_cast<const std::byte*>(array) - (*known)->data());
      return true;
    }
    if (array == nullptr || !arena_.locate({static_cast<const std::byte*>(array), bytes}, &at)) {
      *staged = arena_.take(bytes);
      if (*staged == nullptr || !arena_.locate({*staged, bytes}, &at)) return false;
    }
    *id = at.segment->id();
    *offset = at.offset;
    if (std::find(segments_.begin(), segments_.end(), at.segment) == segments_.end())
      segments_.push_back(std::move(at.segment));
    return true;
  }

  Arena& arena_;
  Arena::Segments& segments_;  // valid while the request is being planned
  const bool registered_;
  bool found_ = false;
  std::byte *staged_in_ = nullptr, *staged_out_ = nullptr, *list_ = nullptr;
};

}  // namespace windlass
