// Arrival: a shard that comes from another server, chunk by chunk.
//
// It is written to its final place, which nobody reads before it is complete; an arrival that fails leaves nothing
// behind. A complete copy does not count before a request comes under its term (session/residence.h).
//
// Thread safety: none; one thread's.
#pragma once

#include <memory>
#include <vector>

#include "messages/chunk.h"
#include "server/object/served_object.h"

namespace windlass {

class Host;

class Arrival {
 public:
  explicit Arrival(Host& host) : host_(host) {}
  Arrival(const Arrival&) = delete;
  Arrival& operator=(const Arrival&) = delete;
  ~Arrival() { close(); }

  // Takes the next chunk, whose header was decoded; `body` has chunk.bytes, which nobody else writes. After an error,
  // give up the rest.
  Status take(const Chunk& chunk, const std::byte* body);
  bool complete() const { return complete_; }
  // Drops what is not complete.
  void close();

 private:
  Status begin(const Chunk& chunk, const std::byte* body);
  Status take_array(const Chunk& chunk, const std::byte* body);
  Status take_rows(const Chunk& chunk, const std::byte* body);
  Status take_erased(const Chunk& chunk, const std::byte* body);
  Status take_records(const Chunk& chunk, const std::byte* body);
  Status take_gate(const Chunk& chunk, const std::byte* body);
  Status take_push(const Chunk& chunk, const std::byte* body);
  Status take_crowd(const Chunk& chunk, const std::byte* body);
  Status end(const Chunk& chunk, const std::byte* body);
  Status wrong(const std::string& what, uint64_t expected, uint64_t seen) const;

  Host& host_;
  Chunk first_;
  uint32_t next_ = 0;  // number of the next chunk
  std::shared_ptr<ServedObject> object_;
  Shard* shard_ = nullptr;  // once this arrival may write to it
  bool known_ = false;      // it is here already, under this term
  bool complete_ = false;
  bool closed_ = false;
  std::vector<Tensor::Piece> arrays_;
  size_t next_array_ = 0, array_at_ = 0;  // and how much of it has come
  std::vector<Record> records_;
  std::vector<Workers::Heard> crowd_;
  std::unique_ptr<Gate> gate_;
  std::unique_ptr<BspUpdates> rounds_;
};

}  // namespace windlass
