// What the tests of moves share: a shard handed from one host to another, without sockets.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/test.h"
#include "server/host.h"
#include "server/move/arrival.h"

namespace windlass::test {

// A chunk as it travels.
struct Sent {
  std::string head, body;
};

inline Sent copy_of(const Departure::Pieces& pieces) {
  return {std::string(reinterpret_cast<const char*>(pieces.head), limits::kSectionBytes),
          std::string(reinterpret_cast<const char*>(pieces.body), pieces.body_bytes)};
}

// The rest of a departure; `between` is called before each chunk.
inline Status all_chunks(Departure& departure, std::vector<Sent>* out, const std::function<void()>& between = {}) {
  for (;;) {
    Departure::Pieces pieces;
    bool more = false;
    if (between) between();
    WL_RETURN_IF_ERROR(departure.next(&pieces, &more));
    if (!more) return {};
    out->push_back(copy_of(pieces));
  }
}

inline Status deliver(Arrival& arrival, const Sent& sent) {
  Chunk chunk;
  WL_RETURN_IF_ERROR(decode(reinterpret_cast<const std::byte*>(sent.head.data()), &chunk));
  if (chunk.bytes != sent.body.size()) return Status(Code::kCorrupt, "the stream ends");
  const std::vector<std::byte> body(reinterpret_cast<const std::byte*>(sent.body.data()),
                                    reinterpret_cast<const std::byte*>(sent.body.data()) + sent.body.size());
  return arrival.take(chunk, body.data());
}

// The whole move. The source commits once the target has everything.
inline Status move_shard(Host& from, Host& to, uint32_t object, uint32_t shard, uint32_t server, uint32_t term) {
  std::unique_ptr<Departure> departure;
  WL_RETURN_IF_ERROR(from.depart(object, shard, server, term, &departure));
  if (departure == nullptr) return {};
  Arrival arrival(to);
  for (;;) {
    Departure::Pieces pieces;
    bool more = false;
    WL_RETURN_IF_ERROR(departure->next(&pieces, &more));
    if (!more) break;
    WL_RETURN_IF_ERROR(deliver(arrival, copy_of(pieces)));
  }
  if (!arrival.complete()) return Status(Code::kInternal, "all was sent, and something is missing");
  return departure->commit();
}

}  // namespace windlass::test
