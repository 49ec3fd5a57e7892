// Bare programs at both ends of a socket, with which `windlass bench wire` compares our figures.
#include "bench/wire.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "bind/bench.h"

namespace windlass::bind {
namespace {

// Runs work(std::vector<double>*) without the GIL; returns the seconds it measured.
template <class Work>
std::vector<double> timed(Work work) {
  std::vector<double> seconds;
  Status status;
  {
    nb::gil_scoped_release release;
    status = work(&seconds);
  }
  if (!status.ok()) throw std::runtime_error(status.message());
  return seconds;
}

using FloatsIn = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_wire_limits(nb::module_& m) {
  m.def(
      "limit_wire_serve", [](int fd) { timed([&](auto*) { return limit_wire_serve(fd); }); }, nb::arg("fd"),
      "The other end of the limits below, in a process of its own, until the socket is closed.");
  m.def(
      "limit_wire_push",
      [](int fd, FloatsIn g, size_t piece_bytes, int repeats) {
        return timed([&](auto* s) { return limit_wire_push(fd, g.data(), g.size(), piece_bytes, repeats, s); });
      },
      nb::arg("fd"), nb::arg("g"), nb::arg("piece_bytes"), nb::arg("repeats"),
      "Seconds of each push; the other end reads so many bytes at once.");
  m.def(
      "limit_wire_pull",
      [](int fd, size_t request_bytes, FloatsOut out, size_t piece_bytes, int repeats) {
        return timed([&](auto* s) {
          return limit_wire_pull(fd, request_bytes, out.data(), out.size(), piece_bytes, repeats, s);
        });
      },
      nb::arg("fd"), nb::arg("request_bytes"), nb::arg("out"), nb::arg("piece_bytes"), nb::arg("repeats"),
      "Seconds of each pull; this end reads so many bytes at once.");
  m.def(
      "limit_wire_round_trips",
      [](int fd, size_t bytes, int repeats, bool spinning, double pause) {
        const auto pause_ns = static_cast<int64_t>(pause * 1e9);
        return timed([&](auto* s) { return limit_wire_round_trips(fd, bytes, repeats, spinning, pause_ns, s); });
      },
      nb::arg("fd"), nb::arg("bytes"), nb::arg("repeats"), nb::arg("spinning"), nb::arg("pause"),
      "Seconds of each round trip; each comes after a pause in seconds.");
  m.def(
      "limit_wire_expect_round_trips",
      [](int fd, size_t bytes, int repeats) {
        timed([&](auto*) { return limit_wire_expect_round_trips(fd, bytes, repeats, false); });
      },
      nb::arg("fd"), nb::arg("bytes"), nb::arg("repeats"), "The caller then makes the round trips itself.");
}

}  // namespace windlass::bind
