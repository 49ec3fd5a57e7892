// What the control plane needs of the core: heartbeats, and the contents of a spec.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/spec.h"
#include "messages/heartbeat.h"
#include "messages/messages.h"

namespace windlass::bind {
namespace {

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// The bytes of each shard, weights and rule state; 0 for a table's, which are empty at first.
std::vector<uint64_t> shard_bytes(const ObjectSpec& spec) {
  uint32_t shards = 0;
  raise_if_error(spec.shards(&shards));
  std::vector<uint64_t> bytes(shards);
  if (spec.is_table) return bytes;
  const TensorSpec& tensor = spec.tensor;
  const Cut cut = cut_of(tensor);
  const Layout layout = layout_of(tensor.rule);
  for (uint32_t i = 0; i < shards; ++i) {
    const uint64_t elements = cut.end_of(i) - cut.first_of(i);
    bytes[i] = elements * (size_of(tensor.dtype) + layout.vectors * sizeof(float)) +
               elements / std::max<uint64_t>(cut.row, 1) * layout.row_scalars * sizeof(float) +
               layout.shard_scalars * sizeof(float);
  }
  return bytes;
}

// What a row takes: its key, its head, weights and rule state.
uint64_t row_bytes(const TableSpec& table) {
  const Layout layout = layout_of(table.rule);
  return sizeof(uint64_t) + sizeof(RowHead) +
         sizeof(float) * (layout.row_scalars + uint64_t{table.dim} * (1u + layout.vectors));
}

}  // namespace

void bind_control(nb::module_& m) {
  m.def(
      "read_spec",
      [](const nb::bytes& bytes) {
        const ObjectSpec spec = read_spec(bytes);
        const TensorSpec& tensor = spec.tensor;
        const std::string form =
            spec.is_table ? "" : name_of(tensor.dtype) + describe_shape(tensor.shape.data(), tensor.shape.size());
        return std::make_tuple(spec.name, spec.is_table, spec.describe(), shard_bytes(spec), tensor.like, form);
      },
      nb::arg("spec"),
      "(app/name, whether it is a table, a description, bytes per shard; of a tensor the one that it is like, if any, "
      "and "
      "its dtype and shape in words)");
  m.def(
      "read_object",
      [](const nb::bytes& bytes) {
        const ObjectSpec o = read_spec(bytes);
        const Init& init = o.is_table ? o.table.init : o.tensor.init;
        const RuleSpec& rule = o.is_table ? o.table.rule : o.tensor.rule;
        const Sync& sync = o.sync();
        const nb::tuple values = nb::make_tuple(static_cast<int>(sync.kind), sync.number, sync.seconds);
        const std::vector<uint64_t> shape = o.is_table ? std::vector<uint64_t>{o.table.dim} : o.tensor.shape;
        return nb::make_tuple(o.name, o.is_table, shape, o.is_table ? Dtype::kFloat32 : o.tensor.dtype, rule,
                              o.rule_text, nb::make_tuple(init.kind, init.a, init.b),
                              o.is_table ? o.table.seed : o.tensor.seed,
                              o.is_table ? o.table.reject_nonfinite : o.tensor.reject_nonfinite, values, o.tensor.like,
                              o.describe(), o.is_table ? row_bytes(o.table) : 0);
      },
      nb::arg("spec"),
      nb::sig(
          "def read_object(spec: bytes) -> tuple[str, bool, list[int], Dtype, RuleSpec, str, tuple[InitKind, float, "
          "float], int, bool, tuple[int, int, float], str, str, int]"),
      "All of a spec: app/name, whether it is a table, shape (of a table: of a row), dtype, rule, its maker's text on "
      "it, initialiser, seed, reject_nonfinite, policy, the tensor it is like, a description, bytes per row of a "
      "table.");
  m.def(
      "same_spec", [](const nb::bytes& a, const nb::bytes& b) { return read_spec(a) == read_spec(b); }, nb::arg("a"),
      nb::arg("b"), "Whether an object of the one spec can be opened with the other.");
  m.def(
      "write_map",
      [](uint32_t object, const std::vector<std::tuple<uint32_t, uint32_t, uint32_t>>& runs) {
        Map map;
        map.object = object;
        for (const auto& [first, server, term] : runs) map.runs.push_back({first, server, term});
        wire::Writer writer;
        encode(map, &writer);
        return bytes_of(writer.take());
      },
      nb::arg("object"), nb::arg("runs"), "The bytes of a map; runs are (first shard, server, term).");
  m.def(
      "read_map",
      [](const nb::bytes& bytes) {
        const std::string text = text_of(bytes);
        wire::Reader reader(text);
        Map map;
        raise_if_error(decode(&reader, &map));
        std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> runs;
        for (const Map::Owned& run : map.runs) runs.emplace_back(run.first, run.server, run.term);
        return std::make_pair(map.object, runs);
      },
      nb::arg("bytes"), "The object and the runs of a map, which other bytes may follow.");
  nb::class_<Heartbeat>(m, "Heartbeat", "Writes the same bytes every period, from a thread without the GIL.")
      .def(
          "__init__",
          [](Heartbeat* self, int fd, const nb::bytes& beat, double seconds) {
            new (self) Heartbeat(fd, text_of(beat), static_cast<int64_t>(seconds * 1e9));
          },
          nb::arg("fd"), nb::arg("beat"), nb::arg("seconds"))
      .def(
          "wait", [](const Heartbeat& beat, double timeout) { return beat.wait(deadline_in(timeout)); },
          nb::arg("timeout"), nb::call_guard<nb::gil_scoped_release>(),
          "Until the connection is broken or stopped; False when time is up first.")
      .def("stop", &Heartbeat::stop);
}

}  // namespace windlass::bind
