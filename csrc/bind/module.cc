#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/crc32c.h"
#include "base/limits.h"
#include "bind/bind.h"
#include "rule/kernels.h"

namespace nb = nanobind;

namespace {

// Exception classes by code; windlass/_errors.py hands them over when it is imported and keeps them alive.
nb::handle g_errors;

// Tells the exception that is being raised which shards refused the push; windlass/_errors.py makes not_applied of it.
void add_refused(const std::vector<windlass::Refused>& all) {
  nb::python_error raised;
  nb::list list;
  const auto bytes = [](const auto& numbers) { return nb::bytes(numbers.data(), numbers.size() * sizeof(numbers[0])); };
  for (const windlass::Refused& r : all)
    list.append(nb::make_tuple(r.object, r.is_table, r.request, bytes(r.shards), bytes(r.places), bytes(r.keys)));
  nb::setattr(raised.value(), "_refused", list);
  raised.restore();
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const windlass::bind::StatusError& e) {
    const auto code = static_cast<Py_ssize_t>(e.status.code());
    PyObject* type = g_errors.is_valid() ? PyList_GetItem(g_errors.ptr(), code) : PyExc_RuntimeError;
    if (type == nullptr) type = PyExc_RuntimeError;
    PyErr_SetString(type, e.status.message().c_str());
    if (!e.status.refused().empty()) add_refused(e.status.refused());
  }
}

// The checksum of any contiguous buffer. Other threads run meanwhile unless it is short.
uint32_t checksum(nb::handle data, uint32_t so_far) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto bytes = static_cast<size_t>(view.len);
  uint32_t sum = 0;
  if (bytes <= windlass::limits::kGilBytesMax) {
    sum = windlass::crc32c(view.buf, bytes, so_far);
  } else {
    nb::gil_scoped_release release;
    sum = windlass::crc32c(view.buf, bytes, so_far);
  }
  PyBuffer_Release(&view);
  return sum;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of windlass.";
  nb::register_exception_translator(translate);
  m.def(
      "set_errors", [](nb::list errors) { g_errors = errors; }, nb::arg("errors"),
      "The exception class of every code, in order; the caller keeps the list.");
  m.def(
      "quiet_leaks", [] { nb::set_leak_warnings(false); },
      "For the child of a fork: what the parent's other threads held is nobody's there.");
  m.def("isa", [] { return windlass::kernels().isa; }, "The instruction set the kernels use.");
  m.def("isa_complaint", &windlass::isa_complaint, "What is wrong with WINDLASS_ISA, or nothing.");
  m.def("crc32c", &checksum, nb::arg("data"), nb::arg("so_far") = 0,
        "The checksum that frames and files carry, of a contiguous buffer; so_far: that of the bytes before it.");
  m.def("cores", &windlass::os::cores, "Cores this process may run on.");
  windlass::bind::bind_user_code(m);
  windlass::bind::bind_engine(m);
  windlass::bind::bind_tensor(m);
  windlass::bind::bind_table(m);
  windlass::bind::bind_host(m);
  windlass::bind::bind_links(m);
  windlass::bind::bind_control(m);
  windlass::bind::bind_checkpoint(m);
  windlass::bind::bind_session(m);
}
