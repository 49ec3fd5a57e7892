// The bare programs at the ends of a socket: what `windlass bench wire` holds our figures against.
#include "bench/wire.h"
#include "bind/bind.h"

namespace windlass::bind {
namespace {

// The seconds that work(double*) finds, without the GIL.
template <class Work>
double timed(Work work) {
  double seconds = 0;
  Status status;
  {
    nb::gil_scoped_release release;
    status = work(&seconds);
  }
  raise_if_error(std::move(status));
  return seconds;
}

using FloatsIn = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_bench_wire(nb::module_& m) {
  m.def(
      "limit_wire_serve", [](int fd) { timed([&](double*) { return limit_wire_serve(fd); }); }, nb::arg("fd"),
      "The other end of the limits below, in a process of its own, until the socket is closed.");
  m.def(
      "limit_wire_push",
      [](int fd, FloatsIn g, int repeats) {
        return timed([&](double* s) { return limit_wire_push(fd, g.data(), g.size(), repeats, s); });
      },
      nb::arg("fd"), nb::arg("g"), nb::arg("repeats"));
  m.def(
      "limit_wire_pull",
      [](int fd, size_t request_bytes, FloatsOut out, int repeats) {
        return timed([&](double* s) { return limit_wire_pull(fd, request_bytes, out.data(), out.size(), repeats, s); });
      },
      nb::arg("fd"), nb::arg("request_bytes"), nb::arg("out"), nb::arg("repeats"));
  m.def(
      "limit_wire_round_trips",
      [](int fd, size_t bytes, int count, bool spinning, double pause) {
        const auto pause_ns = static_cast<int64_t>(pause * 1e9);
        return timed([&](double* s) { return limit_wire_round_trips(fd, bytes, count, spinning, pause_ns, s); });
      },
      nb::arg("fd"), nb::arg("bytes"), nb::arg("count"), nb::arg("spinning"), nb::arg("pause"),
      "Median seconds of a round trip, each after a pause in seconds.");
  m.def(
      "limit_wire_expect_round_trips",
      [](int fd, size_t bytes, int count) {
        timed([&](double*) { return limit_wire_expect_round_trips(fd, bytes, count, false); });
      },
      nb::arg("fd"), nb::arg("bytes"), nb::arg("count"), "The caller then makes the round trips itself.");
}

}  // namespace windlass::bind
