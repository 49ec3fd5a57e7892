#include "client/op/tensor.h"

#include <bit>
#include <cstring>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "client/op/step.h"
#include "tensor/planes.h"

namespace windlass::bind {
namespace {

Selection to_selection(const std::string& name, nb::handle rows) {
  Selection s;
  if (rows.is_none()) return s;
  if (nb::isinstance<nb::tuple>(rows)) {
    s.kind = Selection::kRange;
    s.begin = nb::cast<uint64_t>(rows[0]);
    s.end = nb::cast<uint64_t>(rows[1]);
    return s;
  }
  const In list = nb::cast<In>(rows);
  const Array a = to_array({"tensor", name, "rows"}, list);
  if (a.dtype != Dtype::kInt64 || a.dims != 1)
    throw StatusError{
        Status(Code::kShapeMismatch, "tensor '" + name + "': row numbers must be int64 in one dimension")};
  s.kind = Selection::kList;
  s.list = static_cast<const int64_t*>(a.data);
  s.n = a.shape[0];
  return s;
}

struct Prepared {
  TensorRequest request;
  Array in, out;
  std::optional<In> kept_in;
  std::optional<Out> kept_out;
  size_t bytes = 0;
  std::vector<uint32_t> only;

  // Leaves out all other shards; None: none.
  void keep(nb::handle shards) {
    if (shards.is_none()) return;
    only = nb::cast<std::vector<uint32_t>>(shards);
    request.only = &only;
  }
};

// Fills `p`, whose request points into it.
void prepare(TensorClient& t, Prepared* p, nb::handle grad, nb::handle out, nb::handle rows, nb::handle hyper,
             double weight, uint8_t priority = 0) {
  const std::string& name = t.name();
  p->request.priority = priority;
  if (any_array({"tensor", name, "gradient"}, grad, &p->kept_in, &p->in)) {
    p->request.in = &p->in;
    p->request.hyper = to_hyper(hyper);
    p->request.weight = weight;
    p->bytes = p->in.bytes();
  }
  if (any_array({"tensor", name, "out"}, out, &p->kept_out, &p->out)) {
    p->request.out = &p->out;
    p->bytes = std::max(p->bytes, p->out.bytes());
  }
  p->request.closes = p->request.in != nullptr && p->request.out != nullptr;
  p->request.rows = to_selection(name, rows);
}

void call_now(TensorClient& t, nb::handle grad, nb::handle out, nb::handle rows, nb::handle hyper, double weight,
              double timeout) {
  const int64_t deadline = deadline_in(timeout);
  Prepared p;
  prepare(t, &p, grad, out, rows, hyper, weight);
  Ref<TensorCall> call;
  const auto begin = [&](int64_t until) { return t.start(p.request, How::kWait, &call, until); };
  if (t.remote()) return start_and_finish(&call, deadline, [&] { return begin(deadline); });
  start(false, p.bytes, deadline, begin);
  finish(call, deadline);
}

std::unique_ptr<Future> call_later(TensorClient& t, nb::handle grad, nb::handle out, nb::handle rows, nb::handle hyper,
                                   double weight, double timeout, uint8_t priority, nb::handle only) {
  const int64_t deadline = deadline_in(timeout);
  Prepared p;
  prepare(t, &p, grad, out, rows, hyper, weight, priority);
  p.keep(only);
  Ref<TensorCall> call;
  start(t.remote(), p.bytes, deadline, [&](int64_t until) { return t.start(p.request, How::kFuture, &call, until); });
  return std::make_unique<Future>(call);
}

void add_to_step(std::shared_ptr<TensorClient> t, StepClient& step, nb::handle grad, nb::handle out, nb::handle rows,
                 nb::handle hyper, double weight, nb::handle only) {
  Prepared p;
  prepare(*t, &p, grad, out, rows, hyper, weight);
  p.keep(only);
  raise_if_error(step.add(std::move(t), p.request));
}

// Adds whole tensors from `from` on, up to the first that is not plain or has arrays that are not; returns its index.
// `tensors` are windlass.Tensor of `cluster`; a list is empty if there are no such arrays.
size_t add_many(StepClient& step, nb::handle cluster, nb::list tensors, nb::list grads, nb::list outs, size_t from) {
  // Interned once: attributes are read thousands of times a second.
  static PyObject* const kCluster = PyUnicode_InternFromString("_cluster");
  static PyObject* const kRows = PyUnicode_InternFromString("_rows");
  static PyObject* const kHyper = PyUnicode_InternFromString("_hyper");
  static PyObject* const kCore = PyUnicode_InternFromString("_core");
  const auto get = [](nb::handle of, PyObject* name) {
    const nb::object found = nb::steal(PyObject_GetAttr(of.ptr(), name));
    if (!found.is_valid()) PyErr_Clear();
    return found;
  };
  const bool pushes = nb::len(grads) != 0, pulls = nb::len(outs) != 0;
  nb::object last;
  Hyper hyper;
  for (const size_t n = nb::len(tensors); from < n; ++from) {
    const nb::handle tensor = tensors[from];
    const nb::object rows = get(tensor, kRows), core = get(tensor, kCore);
    if (!get(tensor, kCluster).is(cluster) || !rows.is_valid() || !rows.is_none() || !core.is_valid()) break;
    Array in, out;
    TensorRequest request;
    if (pushes) {
      if (!plain_array(grads[from], false, &in)) break;
      nb::object h = get(tensor, kHyper);
      if (!h.is_valid()) break;
      if (!h.is(last)) hyper = to_hyper(h);
      last = std::move(h);
      request.in = &in;
      request.hyper = hyper;
    }
    if (pulls) {
      if (!plain_array(outs[from], true, &out)) break;
      request.out = &out;
    }
    request.closes = pushes && pulls;
    raise_if_error(step.add(nb::cast<std::shared_ptr<TensorClient>>(core), request));
  }
  return from;
}

// Versions are bytes in Python, eight per shard: a plain value, which may outlive the interpreter's modules.
std::pair<nb::bytes, bool> pull_newer(TensorClient& t, nb::handle out, nb::handle rows,
                                      const std::optional<nb::bytes>& newer_than, double timeout) {
  const int64_t deadline = deadline_in(timeout);
  Prepared p;
  prepare(t, &p, nb::none(), out, rows, nb::none(), 1.0);
  p.request.versioned = true;
  Versions since;
  if (newer_than) {
    const size_t expected = t.cut().shards * sizeof(since[0]);
    if (newer_than->size() != expected)
      throw StatusError{Status(Code::kInvalidArgument, "pull of tensor '" + t.name() + "': expected " +
                                                           std::to_string(expected) + " bytes of versions, saw " +
                                                           std::to_string(newer_than->size()))};
    since.resize(t.cut().shards);
    std::memcpy(since.data(), newer_than->data(), expected);
    p.request.newer_than = &since;
  }
  Ref<TensorCall> call;
  start(t.remote(), p.bytes, deadline, [&](int64_t until) { return t.start(p.request, How::kWait, &call, until); });
  finish(call, deadline);
  const Versions& seen = call->versions();
  return {nb::bytes(seen.data(), seen.size() * sizeof(seen[0])), call->changed()};
}

// Whole arrays in the order of tensor/planes.h, None for one that is left out, and a count of updates per shard. `kept`
// holds arrays that are not plain.
template <class A>
PlaneArrays to_planes(TensorClient& t, nb::list arrays, nb::handle counts, std::vector<std::optional<A>>* kept) {
  const auto wrong = [&](const std::string& why) {
    return StatusError{Status(Code::kShapeMismatch, "tensor '" + t.name() + "': " + why)};
  };
  const std::vector<uint64_t> bytes = plane_bytes(t.spec(), t.cut());
  if (nb::len(arrays) != bytes.size())
    throw wrong("expected " + std::to_string(bytes.size()) + " arrays, saw " + std::to_string(nb::len(arrays)));
  kept->resize(bytes.size() + 1);
  PlaneArrays planes;
  for (size_t i = 0; i < bytes.size(); ++i) {
    Array a;
    const bool given = any_array({"tensor", t.name(), i == 0 ? "weights" : "state"}, arrays[i], &(*kept)[i], &a);
    if (given && (a.dtype != (i == 0 ? t.spec().dtype : Dtype::kFloat32) || a.bytes() != bytes[i]))
      throw wrong("expected " + std::to_string(bytes[i]) + " bytes, saw " + std::to_string(a.bytes()) + " of " +
                  name_of(a.dtype));
    planes.planes.push_back(given ? static_cast<std::byte*>(a.data) : nullptr);
  }
  Array a;
  if (any_array({"tensor", t.name(), "updates"}, counts, &kept->back(), &a)) {
    if (a.dtype != Dtype::kInt64 || a.elements() != t.cut().shards)
      throw wrong("expected " + std::to_string(t.cut().shards) + " int64 counts of updates, saw " +
                  std::to_string(a.elements()) + " of " + name_of(a.dtype));
    planes.counts = static_cast<uint64_t*>(a.data);
  }
  return planes;
}

template <class A>
void with_planes(TensorClient& t, nb::list arrays, nb::handle counts, double timeout,
                 Status (TensorClient::*method)(const PlaneArrays&, int64_t)) {
  const int64_t deadline = deadline_in(timeout);
  std::vector<std::optional<A>> kept;
  const PlaneArrays planes = to_planes<A>(t, arrays, counts, &kept);
  Status status;
  {
    nb::gil_scoped_release release;
    status = (t.*method)(planes, deadline);
  }
  raise_if_error(std::move(status));
}

// Iterates over the row numbers in chunks.
class TensorKeys {
 public:
  TensorKeys(std::shared_ptr<TensorClient> tensor, const nb::bytes& where)
      : tensor_(std::move(tensor)), where_(where.c_str(), where.size()) {}

  nb::ndarray<nb::numpy, uint64_t> next(size_t most, double timeout) {
    const int64_t deadline = deadline_in(timeout);
    std::vector<uint64_t> keys;
    Status status;
    {
      nb::gil_scoped_release release;
      status = tensor_->scan(&cursor_, most, where_, deadline, &keys);
    }
    raise_if_error(std::move(status));
    const size_t n = keys.size();
    return to_numpy(std::move(keys), {n});
  }

 private:
  const std::shared_ptr<TensorClient> tensor_;
  const std::string where_;
  ScanCursor cursor_;
};

// `number` is an int if the tensor is int64, else a float.
nb::object vector(TensorClient& t, VectorOp op, TensorClient* other, nb::handle number, double timeout) {
  const int64_t deadline = deadline_in(timeout);
  const bool whole = t.spec().dtype == Dtype::kInt64;
  const uint64_t a =
      whole ? static_cast<uint64_t>(nb::cast<int64_t>(number)) : std::bit_cast<uint64_t>(nb::cast<double>(number));
  uint64_t dot = 0;
  Status status;
  {
    nb::gil_scoped_release release;
    status = t.vector(op, other, a, deadline, &dot);
  }
  raise_if_error(std::move(status));
  if (writes(op)) return nb::none();
  return whole ? nb::int_(static_cast<int64_t>(dot)) : nb::object(nb::float_(std::bit_cast<double>(dot)));
}

}  // namespace

void bind_tensor(nb::module_& m) {
  nb::class_<TensorKeys>(m, "TensorKeys", "Walks the numbers of rows in chunks.")
      .def("next", &TensorKeys::next, nb::arg("most"), nb::arg("timeout"));

  nb::enum_<VectorOp>(m, "VectorOp", "What is done with a tensor and another that is like it.")
      .value("DOT", VectorOp::kDot)
      .value("AXPY", VectorOp::kAxpy)
      .value("SCALE", VectorOp::kScale)
      .value("COPY", VectorOp::kCopy)
      .value("ADD", VectorOp::kAdd)
      .value("MULTIPLY", VectorOp::kMultiply)
      .value("FILL", VectorOp::kFill);
  nb::class_<TensorClient>(m, "Tensor", "A session's handle on a tensor.")
      .def(nb::new_([](std::shared_ptr<Session> session, const std::string& name, const std::vector<uint64_t>& shape,
                       Dtype dtype, const RuleSpec& rule, InitKind init, double a, double b, uint64_t seed,
                       bool reject_nonfinite, const SyncNumbers& sync, const std::string& like, double timeout,
                       const std::string& rule_text) {
             const int64_t deadline = deadline_in(timeout);
             TensorSpec spec{shape, dtype, rule, {init, a, b}, seed, reject_nonfinite, to_sync(sync), like};
             std::shared_ptr<TensorClient> client;
             Status status;
             {
               nb::gil_scoped_release release;
               status = TensorClient::open(std::move(session), name, spec, &client, deadline, rule_text);
             }
             raise_if_error(std::move(status));
             return client;
           }),
           nb::arg("session"), nb::arg("name"), nb::arg("shape"), nb::arg("dtype"), nb::arg("rule"), nb::arg("init"),
           nb::arg("a"), nb::arg("b"), nb::arg("seed"), nb::arg("reject_nonfinite"), nb::arg("sync"), nb::arg("like"),
           nb::arg("timeout"), nb::arg("rule_text") = "")
      .def("call_now", &call_now, nb::arg("grad").none(), nb::arg("out").none(), nb::arg("rows").none(),
           nb::arg("hyper").none(), nb::arg("weight"), nb::arg("timeout"),
           "Pull, push or push_pull, by which of grad and out are given; returns when done.")
      .def("call_later", &call_later, nb::arg("grad").none(), nb::arg("out").none(), nb::arg("rows").none(),
           nb::arg("hyper").none(), nb::arg("weight"), nb::arg("timeout"), nb::arg("priority") = 0,
           nb::arg("only").none() = nb::none(), "The same as a future; `only`: shards, all others are left out.")
      .def("add_to", &add_to_step, nb::arg("step"), nb::arg("grad").none(), nb::arg("out").none(),
           nb::arg("rows").none(), nb::arg("hyper").none(), nb::arg("weight"), nb::arg("only").none() = nb::none(),
           "The same as part of a step; out must outlive it.")
      .def("pull_newer", &pull_newer, nb::arg("out"), nb::arg("rows").none(), nb::arg("newer_than").none(),
           nb::arg("timeout"), "The versions of its shards that it saw, as bytes, and whether any was newer.")
      .def("call", &call_function<TensorClient>, nb::arg("name"), nb::arg("arguments"), nb::arg("timeout"),
           nb::sig("def call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]"),
           "A function of the user's, called with every shard: its results.")
      .def(
          "snapshot",
          [](TensorClient& t, nb::list arrays, nb::handle updates, double timeout) {
            with_planes<Out>(t, arrays, updates, timeout, &TensorClient::snapshot);
          },
          nb::arg("arrays"), nb::arg("updates"), nb::arg("timeout"),
          "Weights, state arrays and counts of updates, written into these.")
      .def(
          "counts",
          [](TensorClient& t, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            std::vector<int64_t> counts;
            Status status;
            {
              nb::gil_scoped_release release;
              status = t.counts(deadline, &counts);
            }
            raise_if_error(std::move(status));
            return counts;
          },
          nb::arg("timeout"), "How many updates the rule has made, of each shard.")
      .def(
          "put",
          [](TensorClient& t, nb::list arrays, nb::handle updates, double timeout) {
            with_planes<In>(t, arrays, updates, timeout, &TensorClient::put);
          },
          nb::arg("arrays"), nb::arg("updates").none(), nb::arg("timeout"), "The same the other way; None is left out.")
      .def("vector", &vector, nb::arg("operation"), nb::arg("other").none(), nb::arg("number"), nb::arg("timeout"),
           "A vector operation with another tensor that is like this one; returns what dot gives, else None.")
      .def(
          "fingerprint", [](TensorClient& t, double timeout) { return ask(t, &TensorClient::fingerprint, timeout); },
          nb::arg("timeout"))
      .def_static("add_many", &add_many, nb::arg("step"), nb::arg("cluster"), nb::arg("tensors"), nb::arg("grads"),
                  nb::arg("outs"), nb::arg("begin"),
                  "Adds whole tensors to a step, up to the first that is not plain; returns where that is.")
      .def_prop_ro(
          "object", [](TensorClient& t) { return t.map().object; }, "Its number on servers elsewhere.")
      .def("owner", &owner_of<TensorClient>, nb::arg("shard"),
           "The server that has a shard, as this client knows, and since which term.")
      .def_prop_ro("shards", [](TensorClient& t) { return t.cut().shards; })
      .def_prop_ro(
          "shard_elements", [](TensorClient& t) { return t.cut().per_shard; },
          "Elements of a shard; the last may have fewer.")
      .def("query", &query<TensorClient>, nb::arg("query"), nb::arg("timeout"), "The answer to a query, as bytes.")
      .def(
          "keys",
          [](std::shared_ptr<TensorClient> t, const nb::bytes& where) {
            return std::make_unique<TensorKeys>(std::move(t), where);
          },
          nb::arg("where"), "The numbers of rows for which an expression holds.")
      .def_prop_ro("remote", [](TensorClient& t) { return t.remote(); });
}

}  // namespace windlass::bind
