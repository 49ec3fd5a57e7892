#include "client/op/table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind/bind.h"
#include "client/op/step.h"
#include "table/bags.h"

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

// Parts of rows, in the order of RowForm, as arrays with a row per key; None for one that is left out.
void put(TableClient& t, const In& keys, nb::list parts, nb::handle updates, double timeout) {
  const int64_t portion_ns = deadline_in(timeout) - os::now_ns();
  const auto wrong = [&](const std::string& why) {
    return StatusError{Status(Code::kShapeMismatch, "table '" + t.name() + "': " + why)};
  };
  const std::vector<uint32_t> sizes = RowForm::parts_of(t.spec());
  if (nb::len(parts) != sizes.size() || parts[0].is_none())
    throw wrong("expected weights and " + std::to_string(sizes.size() - 1) + " arrays of state");
  std::vector<std::optional<In>> kept(sizes.size() + 1);
  RowArrays rows;
  rows.keys = to_keys({"table", t.name(), "keys"}, keys);
  const auto read = [&](const char* role, nb::handle given, size_t i, Dtype dtype, uint64_t elements) -> void* {
    Array a;
    if (!any_array({"table", t.name(), role}, given, &kept[i], &a)) return nullptr;
    if (a.dtype == dtype && a.elements() == elements) return a.data;
    throw wrong(std::string(role) + ": expected " + std::to_string(elements) + " of " + name_of(dtype) + ", saw " +
                std::to_string(a.elements()) + " of " + name_of(a.dtype));
  };
  for (size_t i = 0; i < sizes.size(); ++i)
    rows.parts.push_back(static_cast<const float*>(
        read(i == 0 ? "weights" : "state", parts[i], i, Dtype::kFloat32, rows.keys.n * sizes[i])));
  rows.counts = static_cast<const int64_t*>(read("updates", updates, sizes.size(), Dtype::kInt64, rows.keys.n));
  Status status;
  {
    nb::gil_scoped_release release;
    status = t.put(rows, portion_ns);
  }
  raise_if_error(std::move(status));
}

// Iterates over a table in chunks.
class Export {
 public:
  Export(std::shared_ptr<TableClient> table, const nb::bytes& where, Scan::What what)
      : table_(std::move(table)), where_(where.c_str(), where.size()), what_(what) {}

  // Keys; weights; and with state an array for each part of it, and the counts of updates.
  nb::tuple next(size_t most, double timeout) {
    const int64_t deadline = deadline_in(timeout);
    std::vector<uint64_t> keys;
    std::vector<float> rows;
    std::vector<std::vector<float>> parts;
    std::vector<int64_t> counts;
    Status status;
    {
      nb::gil_scoped_release release;
      status = table_->scan(&cursor_, most, what_, where_, deadline, &keys, &rows);
      if (status.ok() && what_ == Scan::kRowsWithState) split(rows, keys.size(), &parts, &counts);
    }
    raise_if_error(std::move(status));
    const size_t n = keys.size(), dim = table_->spec().dim;
    nb::object key_array = nb::cast(to_numpy(std::move(keys), {n}));
    if (what_ != Scan::kRowsWithState)
      return nb::make_tuple(key_array, to_numpy(std::move(rows), {what_ == Scan::kKeys ? 0 : n, dim}));
    const std::vector<uint32_t> sizes = RowForm::parts_of(table_->spec());
    nb::list state;
    for (size_t i = 1; i < sizes.size(); ++i) state.append(to_numpy(std::move(parts[i]), {n, sizes[i]}));
    return nb::make_tuple(key_array, to_numpy(std::move(parts[0]), {n, dim}), state, to_numpy(std::move(counts), {n}));
  }

 private:
  // Of n rows in the form RowForm::all().
  void split(const std::vector<float>& rows, size_t n, std::vector<std::vector<float>>* parts,
             std::vector<int64_t>* counts) const {
    const std::vector<uint32_t> sizes = RowForm::parts_of(table_->spec());
    for (const uint32_t size : sizes) parts->emplace_back().reserve(n * size);
    counts->reserve(n);
    const float* from = rows.data();
    for (size_t row = 0; row < n; ++row) {
      for (size_t i = 0; i < sizes.size(); from += sizes[i++])
        (*parts)[i].insert((*parts)[i].end(), from, from + sizes[i]);
      uint32_t count = 0;
      std::memcpy(&count, from++, sizeof count);
      counts->push_back(count);
    }
  }

  const std::shared_ptr<TableClient> table_;
  const std::string where_;
  const Scan::What what_;
  ScanCursor cursor_;
};

nb::tuple unique_keys(const In& array, bool sorted) {
  const Keys keys = to_keys({"", "unique", "keys"}, array);
  std::vector<uint64_t> found(keys.n);
  std::vector<int64_t> inverse(keys.n);
  uint64_t n = 0;
  {
    nb::gil_scoped_release release;
    n = unique(keys, found.data(), inverse.data());
    if (n != kNoMemory && sorted && !sort_unique(found.data(), n, inverse.data(), keys.n)) n = kNoMemory;
  }
  if (n == kNoMemory) throw StatusError{Status(Code::kResourceExhausted, "unique: no memory to sort the keys")};
  found.resize(n);
  return nb::make_tuple(to_numpy(std::move(found), {static_cast<size_t>(n)}),
                        to_numpy(std::move(inverse), {static_cast<size_t>(keys.n)}));
}

// Rows that may lie apart, as those of a part of a larger matrix.
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

// Into `out` the gradients of rows that were summed in bags; without offsets every id is a bag.
void sum_bags_to(nb::handle rows, nb::handle offsets, const Rows& grads, nb::handle out, nb::handle order) {
  const std::string name = "bags";
  std::optional<In> kept[3];
  std::optional<Out> kept_out;
  Array row, begin, to, places;
  const bool ordered = any_array({"", name, "order"}, order, &kept[0], &places);
  const bool apart = !any_array({"", name, "offsets"}, offsets, &kept[1], &begin);
  const bool given =
      any_array({"", name, "rows"}, rows, &kept[2], &row) && any_array({"", name, "out"}, out, &kept_out, &to);
  const uint64_t n = grads.shape(0), dim = grads.shape(1);
  const bool fit = given && row.dtype == Dtype::kInt64 && (apart || begin.dtype == Dtype::kInt64) &&
                   (!ordered || (places.dtype == Dtype::kInt64 && places.elements() == row.elements())) &&
                   to.dtype == Dtype::kFloat32 && to.dims == 2 && dim == to.shape[1] &&
                   n == (apart ? row : begin).elements() && (n == 0 || dim <= 1 || grads.stride(1) == 1) &&
                   (n <= 1 || grads.stride(0) >= 0);
  if (!fit) throw StatusError{Status(Code::kShapeMismatch, "bags: expected int64 places and float32 rows that fit")};
  const Bags bags = {static_cast<const int64_t*>(row.data), row.elements(),
                     apart ? nullptr : static_cast<const int64_t*>(begin.data), n,
                     ordered ? static_cast<const int64_t*>(places.data) : nullptr};
  bool right = false, added = false;
  {
    nb::gil_scoped_release release;
    right = check_bags(bags, to.shape[0]);
    if (right)
      added = sum_bags(bags, static_cast<uint32_t>(dim), grads.data(), static_cast<uint64_t>(grads.stride(0)),
                       static_cast<float*>(to.data), to.shape[0]);
  }
  if (!right) throw StatusError{Status(Code::kInvalidArgument, "bags: offsets do not ascend from 0 to the ids' end")};
  if (!added) throw StatusError{Status(Code::kResourceExhausted, "bags: no memory to add them up")};
}

void gather_rows_to(nb::handle rows, nb::handle places, nb::handle out) {
  const std::string name = "rows";
  std::optional<In> kept[2];
  std::optional<Out> kept_out;
  Array from, row, to;
  const bool given = any_array({"", name, "rows"}, rows, &kept[0], &from) &&
                     any_array({"", name, "places"}, places, &kept[1], &row) &&
                     any_array({"", name, "out"}, out, &kept_out, &to);
  const bool fit = given && from.dtype == Dtype::kFloat32 && to.dtype == Dtype::kFloat32 &&
                   row.dtype == Dtype::kInt64 && from.dims == 2 && to.dims == 2 && from.shape[1] == to.shape[1] &&
                   to.shape[0] == row.elements();
  if (!fit) throw StatusError{Status(Code::kShapeMismatch, "rows: expected int64 places and float32 rows that fit")};
  const auto* const place = static_cast<const int64_t*>(row.data);
  bool right = false;
  {
    nb::gil_scoped_release release;
    right = check_bags({place, row.elements(), nullptr, row.elements(), nullptr}, from.shape[0]);
    if (right)
      gather_rows(place, row.elements(), static_cast<uint32_t>(to.shape[1]), static_cast<const float*>(from.data),
                  static_cast<float*>(to.data));
  }
  if (!right)
    throw StatusError{
        Status(Code::kInvalidArgument, "rows: a place is not one of the " + std::to_string(from.shape[0]) + " rows")};
}

}  // namespace

void bind_table(nb::module_& m) {
  m.def("sum_bags", &sum_bags_to, nb::arg("rows"), nb::arg("offsets").none(), nb::arg("grads"), nb::arg("out"),
        nb::arg("order") = nb::none(),
        "out[row] = the gradients of the bags that the row was summed in, added up. No offsets: every id is a bag.");
  m.def("gather_rows", &gather_rows_to, nb::arg("rows"), nb::arg("places"), nb::arg("out"), "out[i] = rows[places[i]]");
  m.def("unique", &unique_keys, nb::arg("keys"), nb::arg("sorted") = false,
        "Each key once, as uint64, and for every key its place there. Sorted: ascending, as signed numbers.");

  nb::enum_<Scan::What>(m, "Scanned", "What an export returns.")
      .value("ROWS", Scan::kRows)
      .value("KEYS", Scan::kKeys)
      .value("ROWS_WITH_STATE", Scan::kRowsWithState);
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
      .def("put", &put, nb::arg("keys"), nb::arg("parts"), nb::arg("updates").none(), nb::arg("timeout"),
           "Sets rows: weights, then the arrays of state; None is left out and starts anew.")
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
          [](std::shared_ptr<TableClient> t, const nb::bytes& where, Scan::What what) {
            return std::make_unique<Export>(std::move(t), where, what);
          },
          nb::arg("where"), nb::arg("what"), "All rows, or those for which an expression holds.");
}

}  // namespace windlass::bind
