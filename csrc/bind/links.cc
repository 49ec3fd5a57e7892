#include "client/links.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"

namespace windlass::bind {

void bind_links(nb::module_& m) {
  nb::class_<Links>(m, "Links", "A client's connections to its servers. Python makes them.")
      .def(nb::new_([](const std::vector<std::string>& servers, const std::string& app, uint32_t rank,
                       uint32_t world_size, int checksums, bool shares) {
             return std::make_shared<Links>(servers, app, rank, world_size, checksums, shares);
           }),
           nb::arg("servers"), nb::arg("app"), nb::arg("rank"), nb::arg("world_size"), nb::arg("checksums"),
           nb::arg("shares"))
      .def(
          "need_dial",
          [](Links& links) -> std::optional<std::pair<uint32_t, uint32_t>> {
            Links::Wanted wanted{};
            bool open = false;
            {
              nb::gil_scoped_release release;
              open = links.need_dial(&wanted);
            }
            if (!open) return std::nullopt;
            return std::pair<uint32_t, uint32_t>(wanted.server, wanted.lane);
          },
          "Waits for a connection to be wanted: (server, lane); None when the links are closed.")
      .def(
          "attach",
          [](Links& links, uint32_t server, uint32_t lane, int fd) {
            if (server >= links.servers().size() || lane >= limits::kLanes) {
              os::close_socket(fd);
              throw StatusError{Status(Code::kInvalidArgument, "attach: no such lane")};
            }
            links.attach({server, static_cast<uint8_t>(lane)}, fd);
          },
          nb::arg("server"), nb::arg("lane"), nb::arg("fd"), nb::call_guard<nb::gil_scoped_release>(),
          "Takes an authenticated socket.")
      .def(
          "lost",
          [](Links& links, uint32_t server, int code, const std::string& message) {
            links.lost(server, Status(static_cast<Code>(code), message));
          },
          nb::arg("server"), nb::arg("code"), nb::arg("message"), nb::call_guard<nb::gil_scoped_release>(),
          "The server is out of reach for good: everything on its way there fails.")
      .def("trouble", &Links::trouble, nb::arg("server"), nb::arg("why"), "Why it cannot be reached at the moment.")
      .def(
          "wait_ready",
          [](Links& links, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = links.wait_ready(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"))
      .def(
          "moved",
          [](Links& links, uint32_t object, uint32_t shard, uint32_t server, uint32_t term) {
            Status status;
            {
              nb::gil_scoped_release release;
              status = links.moved(object, shard, server, term);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("object"), nb::arg("shard"), nb::arg("server"), nb::arg("term"),
          "A shard has a new server: what waits for one that is out of reach goes on.")
      .def("stop", &Links::stop)
      .def_prop_ro("incarnation", &Links::incarnation);
}

}  // namespace windlass::bind
