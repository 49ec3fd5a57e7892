// The session logic, for the simulator: it runs the code that ships.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "session/outbox.h"
#include "session/record.h"
#include "sync/workers.h"

namespace windlass::bind {
namespace {

std::optional<uint64_t> value_of(const uint64_t* what) {
  return what == nullptr ? std::nullopt : std::optional<uint64_t>(*what);
}

using RanksAndClocks = std::vector<std::tuple<uint32_t, uint64_t>>;  // ranks and clocks

View view_of(const RanksAndClocks& workers) {
  View view{.known = true, .workers = {}};
  for (const auto& [rank, clock] : workers) view.workers.push_back({rank, clock});
  return view;
}

void bind_gates(nb::module_& m) {
  nb::class_<Gate>(m, "Gate", "Whom a pull at a shard waits for, and when an update there is complete.")
      .def(
          "__init__",
          [](Gate* self, int kind, uint32_t number) {
            new (self) Gate({.kind = static_cast<Sync::Kind>(kind), .number = number});
          },
          nb::arg("kind"), nb::arg("number") = 0)
      .def(
          "set_view", [](Gate& gate, const RanksAndClocks& workers) { gate.set_view(view_of(workers), 0); },
          nb::arg("workers"), "Who is waited for: ranks, ascending, and the least clock of each.")
      .def(
          "close", [](Gate& gate, uint32_t rank, uint64_t clock) { return gate.close(rank, clock, 1, 0); },
          nb::arg("rank"), nb::arg("clock"))
      .def(
          "opens", [](const Gate& gate, uint32_t rank, uint64_t clock) { return gate.opens(rank, clock, 0); },
          nb::arg("rank"), nb::arg("clock"))
      .def("clock_of", &Gate::clock_of, nb::arg("rank"))
      .def("waits_for", &Gate::waits_for, nb::arg("rank"))
      .def("has_closed", &Gate::has_closed, nb::arg("rank"), nb::arg("iteration"))
      .def("complete", &Gate::complete)
      .def("advance", &Gate::advance, nb::arg("made"))
      .def_prop_ro("made", &Gate::made)
      .def_prop_ro("highest", &Gate::highest);
  nb::class_<Workers>(m, "Workers", "The workers of an app as a server knows them.")
      .def(nb::init<std::string>(), nb::arg("app"))
      .def(
          "set_view",
          [](Workers& self, uint64_t number, const std::vector<std::tuple<uint32_t, uint64_t, bool>>& workers,
             const std::vector<uint32_t>& waited) {
            std::vector<Workers::Member> members;
            for (const auto& [rank, incarnation, starts] : workers) members.push_back({rank, incarnation, starts});
            return self.set_view(number, members, waited);
          },
          nb::arg("number"), nb::arg("workers"), nb::arg("waited"))
      .def("enter", &Workers::enter, nb::arg("rank"), nb::arg("incarnation"), nb::arg("clock"))
      .def(
          "view",
          [](const Workers& self) {
            RanksAndClocks found;
            for (const View::Worker& w : self.view(0).workers) found.emplace_back(w.rank, w.clock);
            return found;
          },
          "Ranks and clocks of who is waited for.")
      .def(
          "hear", [](Workers& self, const Workers& other) { return self.hear(other.heard()); }, nb::arg("other"),
          "What another server has heard of them; whether that says anything new.")
      .def("waits_for", &Workers::waits_for, nb::arg("rank"))
      .def("starts", &Workers::starts, nb::arg("rank"))
      .def("given_up", &Workers::given_up, nb::arg("incarnation"));
}

}  // namespace

void bind_session(nb::module_& m) {
  nb::enum_<Admission>(m, "Admission", "What becomes of a push.")
      .value("APPLY", Admission::kApply)
      .value("REPEAT", Admission::kRepeat)
      .value("GAP", Admission::kGap);
  nb::class_<Record>(m, "Record", "What a shard remembers of one session.")
      .def(nb::init<>())
      .def_rw("sequence", &Record::sequence)
      .def_rw("clock", &Record::clock)
      .def("admit", &Record::admit, nb::arg("pushed"))
      .def("close", &Record::close, nb::arg("closed"));
  bind_gates(m);
  using Box = Outbox<uint64_t>;
  nb::class_<Box>(m, "Outbox", "The requests of one lane that have no answer yet.")
      .def(nb::init<>())
      .def("add", &Box::add, nb::arg("id"), nb::arg("what"), nb::arg("priority") = 0)
      .def(
          "next", [](Box& box) { return value_of(box.next()); }, "The next to be sent, which counts as sent then.")
      .def(
          "find", [](Box& box, uint64_t id) { return value_of(box.find(id)); }, nb::arg("id"))
      .def("answered", &Box::answered, nb::arg("id"))
      .def("lost", &Box::lost)
      .def("again", &Box::again, nb::arg("id"))
      .def("to_ask", &Box::to_ask, nb::arg("most"))
      .def("heard", &Box::heard, nb::arg("asked"), nb::arg("held"))
      .def("__len__", &Box::size);
}

}  // namespace windlass::bind
