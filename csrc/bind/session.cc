// The session logic, for the simulator: it runs the very code that ships.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "session/outbox.h"
#include "session/record.h"

namespace windlass::bind {
namespace {

std::optional<uint64_t> value_of(const uint64_t* what) {
  return what == nullptr ? std::nullopt : std::optional<uint64_t>(*what);
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
  using Box = Outbox<uint64_t>;
  nb::class_<Box>(m, "Outbox", "The requests of one lane that have no answer yet.")
      .def(nb::init<>())
      .def("add", &Box::add, nb::arg("id"), nb::arg("what"))
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
