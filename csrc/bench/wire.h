// The limits of `windlass bench wire`: bare programs at the two ends of a socket, which do the same work as our server
// and client without frames, sessions, shards or checksums.
//
//   push         gradient  ->  applied piece by piece as it comes  ->  1 byte
//   pull         request   ->  the weights, sent in place
//   round trip   bytes     ->  as many bytes, both sides blocking or both spinning
//
// How much the receiving side reads at once (the piece) can change the figure by half (TCP, 100 MB), and which is best
// depends on the size, so callers try several. These files make their own system calls, since those are what is
// measured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace windlass {

// The other end, in a process of its own: does what it is asked for until the asking end closes the socket.
Status limit_wire_serve(int fd);

// The asking end: seconds of each of `repeats`, first byte out to last byte in; fd is a blocking socket.
Status limit_wire_push(int fd, const float* g, size_t n, size_t piece_bytes, int repeats, std::vector<double>* seconds);
Status limit_wire_pull(int fd, size_t request_bytes, float* out, size_t n, size_t piece_bytes, int repeats,
                       std::vector<double>* seconds);

// Round trips of `bytes` each way, each after a pause.
Status limit_wire_round_trips(int fd, size_t bytes, int repeats, bool spinning, int64_t pause_ns,
                              std::vector<double>* seconds);
// Prepares the other end for `repeats` round trips; the caller makes them.
Status limit_wire_expect_round_trips(int fd, size_t bytes, int repeats, bool spinning);

}  // namespace windlass
