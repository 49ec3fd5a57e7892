#include "client/op/table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "client/op/step.h"

namespace windlass::bind {
namespace {

struct Prepared {
  TableRequest request;
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

void prepare(TableClient& t, Prepared* p, const In& keys, nb::handle grads, nb::handle out, nb::handle hyper,
             double weight, bool create, uint8_t priority = 0) {
  const std::string& name = t.name();
  p->request.priority = priority;
  p->request.keys = to_keys({"table", name, "keys"}, keys);
  p->bytes = p->request.keys.n * t.spec().dim * sizeof(float);
  if (any_array({"table", name, "gradients"}, grads, &p->kept_in, &p->in)) {
    p->request.in = &p->in;
    p->request.hyper = to_hyper(hyper);
    p->request.weight = weight;
  }
  if (any_array({"table", name, "out"}, out, &p->kept_out, &p->out)) {
    p->request.out = &p->out;
  }
  p->request.create = create;
  p->request.closes = p->request.in != nullptr && p->request.out != nullptr;
}

void call_now(TableClient& t, const In& keys, nb::handle grads, nb::handle out, nb::handle hyper, double weight,
              bool create, double timeout) {
  const int64_t deadline = deadline_in(timeout);
  Prepared p;
  prepare(t, &p, keys, grads, out, hyper, weight, create);
  Ref<TableCall> call;
  start(t.remote(), p.bytes, deadline, [&](int64_t until) { return t.start(p.request, How::kWait, &call, until); });
  finish(call, deadline);
}

std::unique_ptr<Future> call_later(TableClient& t, const In& keys, nb::handle grads, nb::handle out, nb::handle hyper,
                                   double weight, bool create, double timeout, uint8_t priority, nb::handle only) {
  const int64_t deadline = deadline_in(timeout);
  Prepared p;
  prepare(t, &p, keys, grads, out, hyper, weight, create, priority);
  p.keep(only);
  Ref<TableCall> call;
  start(t.remote(), p.bytes, deadline, [&](int64_t until) { return t.start(p.request, How::kFuture, &call, until); });
  return std::make_unique<Future>(call);
}

void add_to_step(std::shared_ptr<TableClient> t, StepClient& step, const In& keys, nb::handle grads, nb::handle out,
                 nb::handle hyper, double weight, bool create, nb::handle only) {
  Prepared p;
  prepare(*t, &p, keys, grads, out, hyper, weight, create);
  p.keep(only);
  raise_if_error(step.add(std::move(t), p.request));
}

uint64_t erase(TableClient& t, const In& keys, const nb::bytes& where, double timeout) {
  const int64_t deadline = deadline_in(timeout);
  TableRequest request;
  request.keys = to_keys({"table", t.name(), "keys"}, keys);
  request.erase = true;
  request.where.assign(where.c_str(), where.size());
  Ref<TableCall> call;
  start(t.remote(), request.keys.n * 64, deadline,
        [&](int64_t until) { return t.start(request, How::kWait, &call, until); });
  finish(call, deadline);
  return call->erased();
}

// Iterates over a table in chunks.
class Export {
 public:
  Export(std::shared_ptr<TableClient> table, const nb::bytes& where, bool keys_only)
      : table_(std::move(table)), where_(where.c_str(), where.size()), keys_only_(keys_only) {}

  nb::tuple next(size_t most, double timeout) {
    const int64_t deadline = deadline_in(timeout);
    std::vector<uint64_t> keys;
    std::vector<float> weights;
    Status status;
    {
      nb::gil_scoped_release release;
      status = table_->scan(&cursor_, most, where_, deadline, &keys, keys_only_ ? nullptr : &weights);
    }
    raise_if_error(std::move(status));
    const size_t n = keys.size(), dim = table_->spec().dim;
    return nb::make_tuple(to_numpy(std::move(keys), {n}), to_numpy(std::move(weights), {keys_only_ ? 0 : n, dim}));
  }

 private:
  const std::shared_ptr<TableClient> table_;
  const std::string where_;
  const bool keys_only_;
  ScanCursor cursor_;
};

nb::tuple unique_keys(const In& array) {
  const Keys keys = to_keys({"", "unique", "keys"}, array);
  std::vector<uint64_t> found(keys.n);
  std::vector<int64_t> inverse(keys.n);
  uint64_t n = 0;
  {
    nb::gil_scoped_release release;
    n = unique(keys, found.data(), inverse.data());
  }
  if (n == kNoMemory) throw StatusError{Status(Code::kResourceExhausted, "unique: no memory to sort the keys")};
  found.resize(n);
  return nb::make_tuple(to_numpy(std::move(found), {static_cast<size_t>(n)}),
                        to_numpy(std::move(inverse), {static_cast<size_t>(keys.n)}));
}

}  // namespace

void bind_table(nb::module_& m) {
  m.def("unique", &unique_keys, nb::arg("keys"), "Each key once, as uint64, and for every key its place there.");

  nb::class_<Export>(m, "Export", "Walks a table in chunks.")
      .def("next", &Export::next, nb::arg("most"), nb::arg("timeout"));

  nb::class_<TableClient>(m, "Table", "A session's handle on a table.")
      .def(nb::new_([](std::shared_ptr<Session> session, const std::string& name, uint32_t dim, const RuleSpec& rule,
                       InitKind init, double a, double b, uint64_t seed, bool reject_nonfinite, const SyncNumbers& sync,
                       double timeout, const std::string& rule_text) {
             const int64_t deadline = deadline_in(timeout);
             const TableSpec spec{dim, rule, {init, a, b}, seed, reject_nonfinite, to_sync(sync)};
             std::shared_ptr<TableClient> client;
             Status status;
             {
               nb::gil_scoped_release release;
               status = TableClient::open(std::move(session), name, spec, &client, deadline, rule_text);
             }
             raise_if_error(std::move(status));
             return client;
           }),
           nb::arg("session"), nb::arg("name"), nb::arg("dim"), nb::arg("rule"), nb::arg("init"), nb::arg("a"),
           nb::arg("b"), nb::arg("seed"), nb::arg("reject_nonfinite"), nb::arg("sync"), nb::arg("timeout"),
           nb::arg("rule_text") = "")
      .def("call_now", &call_now, nb::arg("keys"), nb::arg("grads").none(), nb::arg("out").none(),
           nb::arg("hyper").none(), nb::arg("weight"), nb::arg("create"), nb::arg("timeout"),
           "Pull, push or push_pull, by which of grads and out are given; returns when done.")
      .def("call_later", &call_later, nb::arg("keys"), nb::arg("grads").none(), nb::arg("out").none(),
           nb::arg("hyper").none(), nb::arg("weight"), nb::arg("create"), nb::arg("timeout"), nb::arg("priority") = 0,
           nb::arg("only").none() = nb::none(), "The same as a future; `only`: shards, all others are left out.")
      .def("add_to", &add_to_step, nb::arg("step"), nb::arg("keys"), nb::arg("grads").none(), nb::arg("out").none(),
           nb::arg("hyper").none(), nb::arg("weight"), nb::arg("create"), nb::arg("only").none() = nb::none(),
           "The same as part of a step; out must outlive it.")
      .def("call", &call_function<TableClient>, nb::arg("name"), nb::arg("arguments"), nb::arg("timeout"),
           nb::sig("def call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]"),
           "A function of the user's, called with every shard: its results.")
      .def("erase", &erase, nb::arg("keys"), nb::arg("where"), nb::arg("timeout"),
           "Takes rows out, or those for which an expression holds; returns how many.")
      .def("query", &query<TableClient>, nb::arg("query"), nb::arg("timeout"), "The answer to a query, as bytes.")
      .def(
          "rows", [](TableClient& t, double timeout) { return ask(t, &TableClient::rows, timeout); },
          nb::arg("timeout"))
      .def(
          "fingerprint", [](TableClient& t, double timeout) { return ask(t, &TableClient::fingerprint, timeout); },
          nb::arg("timeout"))
      .def_prop_ro(
          "object", [](TableClient& t) { return t.map().object; }, "Its number on servers elsewhere.")
      .def("owner", &owner_of<TableClient>, nb::arg("shard"),
           "The server that has a shard, as this client knows, and since which term.")
      .def(
          "export",
          [](std::shared_ptr<TableClient> t, const nb::bytes& where, bool keys_only) {
            return std::make_unique<Export>(std::move(t), where, keys_only);
          },
          nb::arg("where"), nb::arg("keys_only"), "All rows, or those for which an expression holds.");
}

}  // namespace windlass::bind
