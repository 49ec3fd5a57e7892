#include "server/host.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include "bind/bind.h"
#include "server/arrival.h"

namespace windlass::bind {
namespace {

// Bytes where they lie, good until more are asked for.
nb::object view_of(const std::byte* data, size_t bytes) {
  auto* const at = const_cast<char*>(reinterpret_cast<const char*>(data));
  return nb::steal(PyMemoryView_FromMemory(at, static_cast<Py_ssize_t>(bytes), PyBUF_READ));
}

nb::object next_chunk(Departure& departure) {
  Departure::Pieces pieces;
  bool more = false;
  Status status;
  {
    nb::gil_scoped_release release;
    status = departure.next(&pieces, &more);
  }
  raise_if_error(std::move(status));
  if (!more) return nb::none();
  return nb::make_tuple(view_of(pieces.head, limits::kSectionBytes), view_of(pieces.body, pieces.body_bytes));
}

Chunk chunk_of(const nb::bytes& head) {
  Chunk chunk;
  if (head.size() != limits::kSectionBytes)
    throw StatusError{Status(Code::kInvalidArgument, "shard: expected a header of 64 bytes")};
  raise_if_error(decode(static_cast<const std::byte*>(head.data()), &chunk));
  return chunk;
}

void take_chunk(Arrival& arrival, const nb::bytes& head, nb::handle body) {
  const Chunk chunk = chunk_of(head);
  Py_buffer view;
  if (PyObject_GetBuffer(body.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  Status status(Code::kInvalidArgument,
                "shard: expected a body of " + std::to_string(chunk.bytes) + " bytes, saw " + std::to_string(view.len));
  if (static_cast<uint64_t>(view.len) == chunk.bytes) {
    nb::gil_scoped_release release;
    status = arrival.take(chunk, static_cast<const std::byte*>(view.buf));
  }
  PyBuffer_Release(&view);
  raise_if_error(std::move(status));
}

std::pair<uint32_t, uint32_t> whereabouts(Host& host, uint32_t object, uint32_t shard) {
  const std::shared_ptr<Hosted> there = host.find(object);
  if (there == nullptr || shard >= there->shards())
    throw StatusError{Status(Code::kNotFound, "object " + std::to_string(object) + ", shard " + std::to_string(shard) +
                                                  " is not known here")};
  return there->whereabouts(shard);
}

void bind_moves(nb::module_& m) {
  nb::class_<Departure>(m, "Departure", "A shard that leaves for another server.")
      .def("next", &next_chunk, nb::sig("def next(self) -> tuple[memoryview, memoryview] | None"),
           "The next chunk, its header and its body, good until the next call; None when that was the last.")
      .def(
          "commit",
          [](Departure& departure) {
            Status status;
            {
              nb::gil_scoped_release release;
              status = departure.commit();
            }
            raise_if_error(std::move(status));
          },
          "The other server has all of it: from now on it is there.")
      .def("abort", &Departure::abort, nb::call_guard<nb::gil_scoped_release>(), "It stays, unless it has left.")
      .def_prop_ro("frozen", &Departure::frozen);
  nb::class_<Arrival>(m, "Arrival", "A shard that comes from another server.")
      .def_static(
          "body_bytes", [](const nb::bytes& head) { return chunk_of(head).bytes; }, nb::arg("head"),
          "How many bytes follow a chunk's header.")
      .def("take", &take_chunk, nb::arg("head"), nb::arg("body"), "The next chunk.")
      .def("close", &Arrival::close, nb::call_guard<nb::gil_scoped_release>(),
           "Leaves nothing behind of what is not complete.")
      .def_prop_ro("complete", &Arrival::complete);
}

}  // namespace

void bind_host(nb::module_& m) {
  bind_moves(m);
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
      .def(
          "depart",
          [](Host& host, uint32_t object, uint32_t shard, uint32_t server, uint32_t term) {
            std::unique_ptr<Departure> departure;
            Status status;
            {
              nb::gil_scoped_release release;
              status = host.depart(object, shard, server, term, &departure);
            }
            raise_if_error(std::move(status));
            return departure;
          },
          nb::arg("object"), nb::arg("shard"), nb::arg("server"), nb::arg("term"), nb::keep_alive<0, 1>(),
          nb::sig("def depart(self, object: int, shard: int, server: int, term: int) -> Departure | None"),
          "Begins to move a shard to another server; None when it is there already.")
      .def(
          "arrive", [](Host& host) { return std::make_unique<Arrival>(host); }, nb::keep_alive<0, 1>(),
          "A shard that is about to come.")
      .def("whereabouts", &whereabouts, nb::arg("object"), nb::arg("shard"), nb::call_guard<nb::gil_scoped_release>(),
           "The server that has a shard, as this one knows, and its term.")
      .def("set_quota", &Host::set_quota, nb::arg("app"), nb::arg("table_bytes_max"),
           "What the tables of an app may take here, from now on.")
      .def_prop_ro("quotas_used", &Host::quotas_used, "What the tables of apps that have a quota take, by app.")
      .def_prop_ro(
          "traffic",
          [](Host& host) {
            const Traffic t = host.traffic();
            return std::make_tuple(t.requests, t.bytes_in, t.bytes_out);
          },
          "Requests, bytes received and bytes sent, since the start.")
      .def_prop_ro("incarnation", &Host::incarnation)
      .def_prop_ro("lanes", &Host::connections)
      .def_prop_ro("sessions", &Host::guests)
      .def_prop_ro("memory_bytes", [](Host& host) { return host.server().memory_bytes(); });
}

}  // namespace windlass::bind
