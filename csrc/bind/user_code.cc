#include "server/object/user_code.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"

namespace windlass::bind {
namespace {

// Functions need the GIL: a thread that waits for them releases it.
class PythonCode final : public UserCode {
 public:
  using UserCode::UserCode;

 protected:
  void let_go(const std::function<void()>& wait) override {
    if (PyGILState_Check() == 0) return wait();
    nb::gil_scoped_release release;
    wait();
  }
};

using Call = UserCode::Call;
using Floats = nb::ndarray<nb::numpy, float>;
using Counts = nb::ndarray<nb::numpy, uint32_t>;

// An array of the call, which keeps the call alive.
template <class A, class T>
A array_of(const UserCode::Ref& call, T* data, std::vector<size_t> shape) {
  auto* const owner = new UserCode::Ref(call);
  nb::capsule keeps(owner, [](void* p) noexcept { delete static_cast<UserCode::Ref*>(p); });
  return A(data, shape.size(), shape.data(), keeps);
}

size_t rows_of(const Call& call) { return call.size.elements / call.size.row; }

nb::list state_of(const UserCode::Ref& call) {
  nb::list all;
  for (int v = 0; v < call->size.vectors; ++v)
    all.append(array_of<Floats>(call, call->arrays.state[v], {call->size.elements}));
  return all;
}

nb::object numbers_of(const UserCode::Ref& call) {
  UserCode::Part& part = call->part;
  const size_t rows = part.numbers.size() / size_of(part.dtype) / part.row;
  const std::vector<size_t> shape = {rows, part.row};
  switch (part.dtype) {
    case Dtype::kFloat64: {
      using Doubles = nb::ndarray<nb::numpy, double>;
      return nb::cast(array_of<Doubles>(call, reinterpret_cast<double*>(part.numbers.data()), shape));
    }
    case Dtype::kInt64: {
      using Wholes = nb::ndarray<nb::numpy, int64_t>;
      return nb::cast(array_of<Wholes>(call, reinterpret_cast<int64_t*>(part.numbers.data()), shape));
    }
    default: return nb::cast(array_of<Floats>(call, reinterpret_cast<float*>(part.numbers.data()), shape));
  }
}

nb::object keys_of(const UserCode::Ref& call) {
  if (!call->part.is_table) return nb::none();
  using Keys = nb::ndarray<nb::numpy, uint64_t>;
  return nb::cast(array_of<Keys>(call, call->part.keys.data(), {call->part.keys.size()}));
}

}  // namespace

void bind_user_code(nb::module_& m) {
  nb::class_<Call>(m, "UserCall", "A function of the user's that is to be called.")
      .def_prop_ro(
          "finds", [](const Call& c) { return c.kind == Call::kFind; }, "Whether only its name is asked for.")
      .def_prop_ro(
          "reads", [](const Call& c) { return c.kind == Call::kRead; }, "Whether it is a function that reads.")
      .def_prop_ro("arguments",
                   [](const Call& c) { return nb::bytes(c.part.arguments.data(), c.part.arguments.size()); })
      .def_prop_ro("numbers", &numbers_of, nb::rv_policy::automatic, "What a function reads: rows, as a copy.")
      .def_prop_ro("keys", &keys_of, nb::rv_policy::automatic, "Of a table's rows; else None.")
      .def_prop_ro("shard", [](const Call& c) { return c.part.shard; })
      .def(
          "give", [](Call& c, const nb::bytes& result) { c.result.assign(result.c_str(), result.size()); },
          nb::arg("result"), "What a function that reads has found.")
      .def_ro("text", &Call::text)
      .def_prop_ro(
          "given_up", [](const Call& c) { return c.given_up.load(); }, "Whether nobody waits for it any more.")
      .def_ro("what", &Call::what)
      .def_rw("function", &Call::function)
      .def_prop_ro("layout",
                   [](const Call& c) {
                     const Foreign& f = c.foreign;
                     return std::make_tuple(f.vectors, f.row_scalars, f.shard_scalars, f.whole, f.by_row, f.begins);
                   })
      .def_prop_ro("row", [](const Call& c) { return c.size.row; })
      .def_prop_ro("rows", &rows_of)
      .def_prop_ro(
          "w", [](const UserCode::Ref& c) { return array_of<Floats>(c, c->arrays.w, {c->size.elements}); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "g", [](const UserCode::Ref& c) { return array_of<Floats>(c, c->arrays.g, {c->size.elements}); },
          nb::rv_policy::automatic)
      .def_prop_ro("state", &state_of)
      .def_prop_ro(
          "row_scalars",
          [](const UserCode::Ref& c) {
            return array_of<Floats>(c, c->arrays.row_scalars, {rows_of(*c), size_t{c->size.row_scalars}});
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "shard_scalars",
          [](const UserCode::Ref& c) {
            return array_of<Floats>(c, c->arrays.shard_scalars, {size_t{c->size.shard_scalars}});
          },
          nb::rv_policy::automatic)
      .def_prop_ro("counts",
                   [](const UserCode::Ref& c) -> nb::object {
                     if (!c->size.counted) return nb::none();
                     return nb::cast(array_of<Counts>(c, c->arrays.counts, {rows_of(*c)}));
                   })
      .def_prop_ro("first", [](const Call& c) { return c.kind == Call::kRead ? c.part.first : c.arrays.first; })
      .def_prop_ro("count", [](const Call& c) { return c.arrays.count; })
      .def_prop_ro("hyper", [](const Call& c) {
        return std::vector<double>(c.arrays.hyper.v, c.arrays.hyper.v + limits::kRuleHyperMax);
      });

  nb::class_<UserCode>(m, "UserCode", "Calls of functions of the user's, which one thread of Python's runs.")
      .def(nb::new_([](double seconds) -> std::shared_ptr<UserCode> { return std::make_shared<PythonCode>(seconds); }),
           nb::arg("seconds"))
      .def(
          "next",
          [](UserCode& code, double seconds) {
            const int64_t deadline = deadline_in(seconds);
            nb::gil_scoped_release release;
            return code.next(deadline);
          },
          nb::arg("seconds"), nb::sig("def next(self, seconds: float) -> UserCall | None"),
          "The next call; None when there is none for so long, or never again.")
      .def(
          "end",
          [](UserCode& code, const UserCode::Ref& call, uint8_t error, const std::string& message) {
            code.end(call, error == 0 ? Status() : Status(static_cast<Code>(error), message));
          },
          nb::arg("call"), nb::arg("error") = 0, nb::arg("message") = "",
          "How it went: 0, or the number of an error in windlass._errors.ERRORS.")
      .def(
          "wait_given_up",
          [](UserCode& code, double seconds) {
            const int64_t deadline = deadline_in(seconds);
            nb::gil_scoped_release release;
            return code.wait_given_up(deadline);
          },
          nb::arg("seconds"), "Whether a call that runs was given up.")
      .def_prop_ro("closed", &UserCode::closed)
      .def("close", &UserCode::close);
}

}  // namespace windlass::bind
