#include "client/net/links.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/bind.h"

namespace windlass::bind {
namespace {

// A Python function that is called from threads without the GIL, and released on whichever thread the links end.
Links::Catalogue catalogue_of(const nb::callable& ask) {
  const std::shared_ptr<nb::callable> kept(new nb::callable(ask), [](nb::callable* callable) {
    if (!nb::is_alive()) return;  // the interpreter has ended, and with it the object
    if (PyGILState_Check() != 0) {
      delete callable;
      return;
    }
    // Who asks for the GIL while the interpreter ends is unwound where it stands, and that would end the process.
    (void)Py_AddPendingCall(
        [](void* p) {
          delete static_cast<nb::callable*>(p);
          return 0;
        },
        callable);
  });
  return
      [kept](wire::Op op, const std::string& body, int64_t deadline_ns, std::vector<std::string>* answers) -> Status {
        nb::gil_scoped_acquire acquire;
        try {
          const double seconds = static_cast<double>(std::max<int64_t>(deadline_ns - os::now_ns(), 0)) * 1e-9;
          const auto [code, said] = nb::cast<std::pair<int, std::vector<nb::bytes>>>(
              (*kept)(static_cast<int>(op), nb::bytes(body.data(), body.size()), seconds));
          for (const nb::bytes& bytes : said) answers->emplace_back(bytes.c_str(), bytes.size());
          return code == 0 ? Status() : Status(static_cast<Code>(code), answers->empty() ? "" : answers->front());
        } catch (const nb::python_error& error) {
          return Status(Code::kInternal, error.what());
        }
      };
}

Status refuse_all(wire::Op, const std::string&, int64_t, std::vector<std::string>*) {
  return Status(Code::kClosed, "the cluster has been closed");
}

}  // namespace

void bind_links(nb::module_& m) {
  nb::class_<Links>(m, "Links", "A client's connections to its servers. Python makes them.")
      .def(nb::new_([](const std::vector<std::string>& servers, const std::string& app, uint32_t rank,
                       uint32_t world_size, int checksums, bool shares, uint64_t cluster, uint64_t incarnation) {
             return std::make_shared<Links>(servers, app, rank, world_size, checksums, shares, cluster, incarnation);
           }),
           nb::arg("servers"), nb::arg("app"), nb::arg("rank"), nb::arg("world_size"), nb::arg("checksums"),
           nb::arg("shares"), nb::arg("cluster") = 0, nb::arg("incarnation") = 0)
      .def(
          "set_stall",
          [](Links& links, double seconds) {
            links.set_stall_ms(static_cast<int>(std::clamp(seconds * 1e3, 100.0, double{limits::kStallMs})));
          },
          nb::arg("seconds"), "How long a server may acknowledge nothing before its connection counts as broken.")
      .def(
          "set_catalogue",
          [](Links& links, const std::optional<nb::callable>& ask) {
            const Links::Catalogue before = links.take_catalogue(ask ? catalogue_of(*ask) : refuse_all);
          },
          nb::arg("ask").none(),
          "Who is asked where objects are: ask(operation, body, seconds) gives a code and the answers, or a message. "
          "None, when the cluster is closed: nobody is asked any more.")
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
            if (server >= links.servers() || lane >= limits::kLanes) {
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
      .def(
          "grow", [](Links& links, const std::vector<std::string>& servers) { raise_if_error(links.grow(servers)); },
          nb::arg("servers"), nb::call_guard<nb::gil_scoped_release>(),
          "All servers of a cluster, in the order of their numbers: those that are new are dialled.")
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
