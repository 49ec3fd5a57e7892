#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <memory>
#include <span>
#include <vector>

#include "bind/bind.h"
#include "bind/spec.h"
#include "client/engine.h"
#include "server/host.h"
#include "server/object/capture.h"
#include "server/object/restore.h"

namespace windlass::bind {
namespace {

// The objects of a server process, or of the server inside this one, as checkpoints see them.
class Shelf {
 public:
  explicit Shelf(Host& host) : server_(host.server()) {}
  explicit Shelf(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), server_(engine_->server()) {}

  Server& server() const { return server_; }
  std::shared_ptr<ServedObject> find(uint32_t number) const {
    std::shared_ptr<ServedObject> found = server_.find(number);
    if (found == nullptr)
      throw StatusError{Status(Code::kNotFound, "checkpoint: object " + std::to_string(number) + " is not known here")};
    return found;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  Server& server_;
};

// Whoever has a shard's turn may be waiting for a function of Python's.
class PythonCapture final : public Capture {
 public:
  using Capture::Capture;
  ~PythonCapture() {
    nb::gil_scoped_release release;
    give_up();
  }
};

// Bytes of a capture, whose memory returns to it.
struct Lent {
  std::vector<std::byte> bytes;
  std::shared_ptr<SpareBuffers> home;
};

// Bytes of ours as an array of Python's.
nb::object array_of(std::vector<std::byte> bytes, const Capture& from) {
  auto* const lent = new Lent{std::move(bytes), from.spares()};
  nb::capsule owner(lent, [](void* p) noexcept {
    const std::unique_ptr<Lent> back(static_cast<Lent*>(p));
    back->home->give(std::move(back->bytes));
  });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(lent->bytes.data(), {lent->bytes.size()}, owner));
}

struct Bytes {
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view); }
  const std::byte* data() const { return static_cast<const std::byte*>(view.buf); }
  uint64_t size() const { return static_cast<uint64_t>(view.len); }
  Py_buffer view;
};

nb::object next(PythonCapture& capture, uint64_t bytes_most) {
  Capture::Next next;
  {
    nb::gil_scoped_release release;
    next = capture.next(bytes_most);
  }
  switch (next.kind) {
    case Capture::kOver: return nb::none();
    case Capture::kWait: return nb::make_tuple("wait");
    case Capture::kPart:
      if (capture.object().spec().is_table)
        return nb::make_tuple("rows", next.shard, next.rows, array_of(std::move(next.part.bytes), capture));
      return nb::make_tuple("piece", next.shard, next.part.piece, next.part.at,
                            array_of(std::move(next.part.bytes), capture));
    case Capture::kShard: break;
  }
  nb::list marks;
  for (const Watermark& w : next.watermarks) marks.append(nb::make_tuple(w.rank, w.incarnation, w.sequence, w.clock));
  return nb::make_tuple("shard", next.shard, next.version, next.count, next.made, next.all_rows, next.fingerprint,
                        marks);
}

void raise_after(Status status) { raise_if_error(std::move(status)); }

}  // namespace

void bind_checkpoint(nb::module_& m) {
  nb::class_<Shelf>(m, "Shelf", "The objects of a server, as checkpoints see them.")
      .def(nb::init<Host&>(), nb::arg("host"), nb::keep_alive<1, 2>())
      .def(nb::init<std::shared_ptr<Engine>>(), nb::arg("engine"))
      .def(
          "set_bytes_max", [](Shelf& shelf, uint64_t bytes) { shelf.server().captures().set_limit(bytes); },
          nb::arg("bytes"), "Limits what writers set aside; beyond it they wait.")
      .def_prop_ro(
          "aside_bytes", [](Shelf& shelf) { return shelf.server().captures().used(); },
          "What writers have set aside and nobody has taken yet.")
      .def_prop_ro(
          "aside_presses", [](Shelf& shelf) { return shelf.server().captures().presses(); },
          "Whether so much is set aside that taking it comes before everything else.")
      .def(
          "objects",
          [](Shelf& shelf) {
            nb::list all;
            for (const auto& object : shelf.server().objects())
              all.append(nb::make_tuple(object->map().object, object->spec().name));
            return all;
          },
          nb::sig("def objects(self) -> list[tuple[int, str]]"), "Numbers and names, app/name.")
      .def(
          "describe",
          [](Shelf& shelf, uint32_t number) {
            const ObjectSpec& spec = shelf.find(number)->spec();
            const RuleSpec& rule = spec.is_table ? spec.table.rule : spec.tensor.rule;
            const Layout layout = layout_of(rule);
            uint32_t shards = 0;
            raise_if_error(spec.shards(&shards));
            const std::vector<uint64_t> shape =
                spec.is_table ? std::vector<uint64_t>{spec.table.dim} : spec.tensor.shape;
            return nb::make_tuple(spec.name, write_spec(spec), spec.is_table, shape,
                                  name_of(spec.is_table ? Dtype::kFloat32 : spec.tensor.dtype), shards, layout.vectors,
                                  layout.row_scalars, layout.shard_scalars, rule.initial_state);
          },
          nb::arg("object"),
          nb::sig(
              "def describe(self, object: int) -> tuple[str, bytes, bool, list[int], str, int, int, int, int, float]"),
          "app/name, spec, whether it is a table, shape (of a table: of a row), dtype, shards; of its rule: state "
          "arrays, "
          "numbers per row, numbers per shard, what they start as.")
      .def(
          "make",
          [](Shelf& shelf, const nb::bytes& bytes) {
            const ObjectSpec spec = read_spec(bytes);
            std::shared_ptr<ServedObject> made;
            Status status;
            {
              nb::gil_scoped_release release;  // it may wait for a function of Python's
              status = shelf.server().open(spec, &made);
            }
            raise_after(std::move(status));
            return made->map().object;
          },
          nb::arg("spec"), "Makes an object on the server inside the process, or finds it; returns its number.")
      .def(
          "begin_at", [](Shelf& shelf, uint64_t clock) { shelf.server().begin_at(clock); }, nb::arg("clock"),
          "Workers inside the process begin at this clock from now on.")
      .def(
          "piece",
          [](Shelf& shelf, uint32_t object, uint32_t shard, size_t piece, uint64_t at, nb::handle from) {
            const auto there = shelf.find(object);
            const Bytes bytes(from);
            Status status;
            {
              nb::gil_scoped_release release;
              status = restore_piece(*there, shard, piece, at, bytes.data(), bytes.size());
            }
            raise_after(std::move(status));
          },
          nb::arg("object"), nb::arg("shard"), nb::arg("piece"), nb::arg("at"), nb::arg("from_"),
          "Writes bytes of one of a tensor's arrays.")
      .def(
          "rows",
          [](Shelf& shelf, uint32_t object, uint32_t shard, uint64_t rows, nb::sequence from, uint64_t in_all) {
            const auto there = shelf.find(object);
            std::vector<std::unique_ptr<const Bytes>> buffers;
            std::vector<std::span<const std::byte>> arrays;
            for (const nb::handle one : from) {
              buffers.push_back(std::make_unique<const Bytes>(one));
              arrays.emplace_back(buffers.back()->data(), buffers.back()->size());
            }
            Status status;
            {
              nb::gil_scoped_release release;
              status = restore_rows(*there, shard, rows, arrays, in_all);
            }
            raise_after(std::move(status));
          },
          nb::arg("object"), nb::arg("shard"), nb::arg("rows"), nb::arg("from_"), nb::arg("in_all") = 0,
          nb::sig("def rows(self, object: int, shard: int, rows: int, from_: Sequence[object], in_all: int = 0) -> "
                  "None"),
          "Writes rows of a table: arrays of keys, updates, touched, numbers per row, weights, state arrays. in_all: "
          "how many the shard will have, which may come in the order in which a capture had them.")
      .def(
          "counts",
          [](Shelf& shelf, uint32_t object, uint32_t shard, uint64_t version, uint64_t count, uint64_t made) {
            const auto there = shelf.find(object);
            uint64_t fingerprint = 0;
            Status status;
            {
              nb::gil_scoped_release release;
              status = restore_counts(*there, shard, version, count, made, &fingerprint);
            }
            raise_after(std::move(status));
            return fingerprint;
          },
          nb::arg("object"), nb::arg("shard"), nb::arg("version"), nb::arg("count"), nb::arg("made"),
          "The rest of a shard; returns its fingerprint.");
  m.def(
      "spec_facts",
      [](const nb::bytes& bytes) {
        const ObjectSpec spec = read_spec(bytes);
        uint32_t shards = 0;
        raise_if_error(spec.shards(&shards));
        const std::vector<uint64_t> shape = spec.is_table ? std::vector<uint64_t>{spec.table.dim} : spec.tensor.shape;
        return nb::make_tuple(spec.name, spec.is_table, shape,
                              name_of(spec.is_table ? Dtype::kFloat32 : spec.tensor.dtype), shards, spec.describe(),
                              describe(spec.sync()));
      },
      nb::arg("spec"), nb::sig("def spec_facts(spec: bytes) -> tuple[str, bool, list[int], str, int, str, str]"),
      "app/name, whether it is a table, shape (of a table: of a row), dtype, shards, all in words, its policy in "
      "words.");
  m.def(
      "fingerprint_of_name", [](const std::string& name) { return mix_text(name); }, nb::arg("name"),
      "What an object without numbers has as its fingerprint: those of its shards are added to it.");
  m.def(
      "renamed_spec",
      [](const nb::bytes& bytes, const std::string& name) {
        ObjectSpec spec = read_spec(bytes);
        spec.name = name;
        return write_spec(spec);
      },
      nb::arg("spec"), nb::arg("name"), nb::sig("def renamed_spec(spec: bytes, name: str) -> bytes"),
      "The same object under another name, app/name.");
  m.def(
      "cut_of",
      [](const nb::bytes& bytes) {
        const ObjectSpec spec = read_spec(bytes);
        std::vector<uint64_t> firsts;
        if (spec.is_table) return firsts;
        Cut cut;
        raise_if_error(check_spec(spec.own_name(), spec.tensor, &cut));
        for (uint32_t shard = 0; shard < cut.shards; ++shard) firsts.push_back(cut.first_of(shard));
        firsts.push_back(cut.elements);
        return firsts;
      },
      nb::arg("spec"), nb::sig("def cut_of(spec: bytes) -> list[int]"),
      "Of a tensor, the first element of each shard, and how many there are; of a table nothing.");
  m.def(
      "same_rule",
      [](const nb::bytes& a, const nb::bytes& b) {
        const auto rule = [](const nb::bytes& bytes) {
          const ObjectSpec spec = read_spec(bytes);
          return spec.is_table ? spec.table.rule : spec.tensor.rule;
        };
        return rule(a) == rule(b);
      },
      nb::arg("a"), nb::arg("b"), "Whether two specs have the same rule.");
  nb::class_<PythonCapture>(m, "Capture", "The shards of an object that are here, as they were at a cut.")
      .def(
          "__init__",
          [](PythonCapture* at, Shelf& shelf, uint32_t object, uint64_t clock, uint32_t part, uint32_t parts) {
            new (at) PythonCapture(shelf.find(object), clock, &shelf.server().captures(), part, parts);
          },
          nb::arg("shelf"), nb::arg("object"), nb::arg("clock"), nb::arg("part") = 0, nb::arg("parts") = 1,
          nb::keep_alive<1, 2>(), "Of the shards here, each parts-th, beginning with number `part`.")
      .def(
          "arm",
          [](PythonCapture& capture) {
            Status status;
            {
              nb::gil_scoped_release release;
              status = capture.arm();
            }
            raise_after(std::move(status));
          },
          "From now on nothing of the cut can be lost.")
      .def("next", &next, nb::arg("bytes_most"), nb::sig("def next(self, bytes_most: int) -> tuple | None"),
           "What is captured next: (\"piece\", shard, array, byte, bytes), (\"rows\", shard, rows, bytes), then per "
           "shard "
           "(\"shard\", shard, version, count, made, rows, fingerprint, [(rank, incarnation, sequence, clock)]); "
           "(\"wait\",) while the rest has not reached the cut; None at the end.")
      .def_prop_ro(
          "aside_bytes", [](const PythonCapture& c) { return c.set_aside(); },
          "What writers have set aside of it and nobody has taken yet.")
      .def_prop_ro("shards", [](const PythonCapture& c) { return c.shards(); }, "How many it captures.");
}

}  // namespace windlass::bind
