// Request: what the header and the extensions of a frame ask for, and how one of its parts is served.
//
// A part is complete and its checksums are compared before its shard hears of it. It runs at the shard's turn, or is
// parked there if it came before its time.
//
// Thread safety: read_extensions() first; then several threads may serve parts.
#pragma once

#include <memory>

#include "server/answers.h"
#include "server/connection.h"
#include "server/hosted.h"
#include "server/lent.h"

namespace windlass {

class Request {
 public:
  Request(std::shared_ptr<Connection> from, const wire::Header& header);

  // The extensions, as they came.
  Status read_extensions(const std::byte* bytes);
  const wire::Header& header() const { return header_; }
  // Whether its arrays are in the client's arenas.
  bool lies() const { return (header_.flags & wire::kInArenas) != 0; }
  // About how much there is to do.
  uint64_t work_bytes() const;

  // Sends the answer from where the weights lie; false when it has to be served.
  bool lend(const wire::Part& part, Lent* lent) const;
  void serve(const wire::Part& part, std::byte* bytes, Answers* answers);

 private:
  void find_arrays(const wire::Places& places);
  Status check_sums(const Order& order) const;
  Status locate(const Order& order, Shard** shard) const;
  bool park(const Order& order, const Status& checked, uint64_t out_bytes, Shard& shard, Reply* reply);

  const std::shared_ptr<Connection> from_;
  const wire::Header header_;
  const std::shared_ptr<Hosted> object_;
  Hyper hyper_;
  size_t hypers_ = 0;
  Lying lying_;       // where the client's arrays are
  Status misplaced_;  // what is wrong with that
};

}  // namespace windlass
