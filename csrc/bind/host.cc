#include "server/host.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "server/move/arrival.h"

namespace windlass::bind {
namespace {

// Bytes in place, valid until the next call.
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
  const std::shared_ptr<ServedObject> there = host.find(object);
  if (there == nullptr || shard >= there->shards())
    throw StatusError{Status(Code::kNotFound, "object " + std::to_string(object) + ", shard " + std::to_string(shard) +
                                                  " is not known here")};
  return there->whereabouts(shard);
}

std::pair<Map, ObjectSpec> read_object(const nb::bytes& map_and_spec) {
  const std::string text(map_and_spec.c_str(), map_and_spec.size());
  std::pair<Map, ObjectSpec> object;
  wire::Reader reader(text);
  raise_if_error(decode(&reader, &object.first));
  raise_if_error(decode(&reader, &object.second));
  return object;
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
      .def(nb::init<int, uint64_t, uint64_t, uint64_t>(), nb::arg("threads"), nb::arg("memory_bytes_max"),
           nb::arg("arena_bytes_max"), nb::arg("staging_bytes_max") = limits::kStagingBytesMax)
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
      .def("set_user_code", &Host::set_user_code, nb::arg("code"),
           "Who runs rules and functions of the user's. Before the first connection.")
      .def("set_cluster", &Host::set_cluster, nb::arg("cluster"), nb::arg("index"),
           "Which cluster this server belongs to, and its number there: clients of another are refused.")
      .def(
          "know_object",
          [](Host& host, const nb::bytes& map_and_spec) {
            const auto [map, spec] = read_object(map_and_spec);
            host.know_object(spec, map);
          },
          nb::arg("map_and_spec"), "The scheduler's word on an object: clients may attach it from now on.")
      .def(
          "hold",
          [](Host& host, const nb::bytes& map_and_spec, uint32_t index) {
            const auto [map, spec] = read_object(map_and_spec);
            Status status;
            {
              nb::gil_scoped_release release;
              status = host.hold(spec, map, index);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("map_and_spec"), nb::arg("index"), "Makes an object that no client has attached yet.")
      .def("forget_object", &Host::forget_object, nb::arg("object"), nb::call_guard<nb::gil_scoped_release>(),
           "Likewise: it could not be made everywhere, and is no more.")
      .def(
          "attach",
          [](Host& host, const nb::bytes& map_and_spec) {
            const auto [map, spec] = read_object(map_and_spec);
            Status status;
            {
              nb::gil_scoped_release release;
              status = host.attach(spec, map);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("map_and_spec"), "An object of which some shards are here; it is made, unless it is known already.")
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
      .def(
          "set_view",
          [](Host& host, const std::string& app, uint64_t number,
             const std::vector<std::tuple<uint32_t, uint64_t, bool>>& workers, const std::vector<uint32_t>& waited,
             uint64_t clock) {
            std::vector<Workers::Member> members;
            for (const auto& [rank, incarnation, starts] : workers)
              members.push_back({rank, incarnation, starts, clock});
            nb::gil_scoped_release release;
            host.set_view(app, number, members, waited);
          },
          nb::arg("app"), nb::arg("number"), nb::arg("workers"), nb::arg("waited"), nb::arg("clock") = 0,
          "Who trains together: (rank, incarnation, whether it starts with the app); ranks whose place is kept; the "
          "clock "
          "at which the app starts.")
      .def(
          "sync_stats",
          [](Host& host) {
            std::vector<std::tuple<std::string, uint64_t, std::vector<uint64_t>, uint64_t, double,
                                   std::map<uint32_t, double>, uint64_t>>
                all;
            for (const auto& [app, s] : host.sync_stats()) {
              const std::vector<uint64_t> staleness(s.staleness, s.staleness + SyncStats::kBuckets);
              all.emplace_back(app, s.reads, staleness, s.waits, s.waited_seconds, s.waited_for, s.late);
            }
            return all;
          },
          "Per app: shards that were read, how many of them how stale, how many reads waited, seconds, seconds by the "
          "rank waited for, and pushes that came too late.")
      .def(
          "overdue",
          [](Host& host, double seconds) {
            nb::gil_scoped_release release;
            return host.overdue(static_cast<int64_t>(seconds * 1e9));
          },
          nb::arg("seconds"), "A line for everybody who has waited for so long since it was last said.")
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
      .def_prop_ro(
          "table_sizes",
          [](Host& host) {
            std::map<uint32_t, std::pair<uint64_t, uint64_t>> all;
            for (const auto& [object, size] : host.table_sizes()) all[object] = {size.rows, size.bytes};
            return all;
          },
          "Rows and bytes of tables, as far as they are here, by the numbers of the objects.")
      .def_prop_ro("incarnation", &Host::incarnation)
      .def_prop_ro("lanes", &Host::connections)
      .def_prop_ro("sessions", &Host::clients)
      .def_prop_ro("memory_bytes", [](Host& host) { return host.server().memory_bytes(); });
}

}  // namespace windlass::bind
