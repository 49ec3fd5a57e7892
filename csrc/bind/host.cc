#include "server/host.h"

#include <nanobind/stl/string.h>

#include "bind/bind.h"

namespace windlass::bind {

void bind_host(nb::module_& m) {
  nb::class_<Host>(m, "Host", "The native part of a server process.")
      .def(nb::init<int, uint64_t, uint64_t>(), nb::arg("threads"), nb::arg("memory_bytes_max"),
           nb::arg("arena_bytes_max"))
      .def(
          "adopt",
          [](Host& host, int fd, const std::string& peer, const nb::bytes& session_key) {
            const std::string key(session_key.c_str(), session_key.size());
            raise_if_error(host.adopt(fd, peer, key));
          },
          nb::arg("fd"), nb::arg("peer"), nb::arg("session_key"), "Takes an authenticated socket, also when it raises.")
      .def(
          "close",
          [](Host& host, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = host.close(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"))
      .def("set_cluster", &Host::set_cluster, nb::arg("cluster"), "Clients of another cluster are refused.")
      .def_prop_ro("incarnation", &Host::incarnation)
      .def_prop_ro("lanes", &Host::connections)
      .def_prop_ro("sessions", &Host::guests)
      .def_prop_ro("memory_bytes", [](Host& host) { return host.server().memory_bytes(); });
}

}  // namespace windlass::bind
