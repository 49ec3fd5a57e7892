// Times the limit loops, with which `windlass bench` compares our figures.
#include "bind/bench.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/os.h"
#include "bench/gate.h"
#include "bench/loops.h"
#include "bench/rules.h"

namespace windlass::bind {
namespace {

[[noreturn]] void wrong(const char* why) { throw nb::value_error(why); }

using Seconds = std::vector<double>;  // of every repeat

// Seconds of each of `repeats` runs of work(thread, threads), each started on all threads at once. The last thread to
// reach a meeting reads the time for all: a thread that noticed late could miss what the others did meanwhile.
template <class Work>
Seconds each_of(int threads, int repeats, Work work) {
  if (threads < 1 || repeats < 1) wrong("a limit: threads and repeats must be at least 1");
  nb::gil_scoped_release release;
  std::atomic<int> arrived{0};
  std::atomic<int> round{0};
  int64_t met_at = 0;
  Seconds seconds;
  seconds.reserve(static_cast<size_t>(repeats));
  const auto meet = [&](int* my_round) {
    const int next = ++*my_round;
    if (arrived.fetch_add(1) + 1 == threads) {
      const int64_t before = std::exchange(met_at, os::now_ns());
      if (next % 2 == 0) seconds.push_back(static_cast<double>(met_at - before) * 1e-9);
      arrived.store(0);
      round.store(next);
    } else {
      while (round.load() != next) {
      }
    }
  };
  const auto run = [&](int thread) {
    int my_round = 0;
    for (int r = 0; r < repeats; ++r) {
      meet(&my_round);
      work(thread, threads);
      meet(&my_round);
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  for (std::thread& t : others) t.join();
  return seconds;
}

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowNumbers = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct Share {
  size_t from, n;
  Share(size_t total, int thread, int threads) {
    const size_t unit = 1024;
    const size_t each = (total / static_cast<size_t>(threads) + unit - 1) / unit * unit;
    from = std::min(total, each * static_cast<size_t>(thread));
    n = std::min(total - from, each);
  }
};

// A built-in rule by the value of its _core.RuleKind.
RuleKind rule_of(uint8_t number) {
  const auto kind = static_cast<RuleKind>(number);
  if (kind >= RuleKind::kCount || kind == RuleKind::kForeign) wrong("a limit: no such rule");
  return kind;
}

Hyper hyper_of(const std::vector<double>& numbers) {
  Hyper hyper;
  if (numbers.size() > limits::kRuleHyperMax) wrong("too many numbers for a rule");
  std::copy(numbers.begin(), numbers.end(), hyper.v);
  return hyper;
}

Seconds limit_rule(uint8_t rule, const std::vector<double>& numbers, Floats w, const std::vector<Floats>& state,
                   Floats g, size_t row, int threads, int repeats, bool looks) {
  const RuleKind kind = rule_of(rule);
  const Layout& layout = layout_of(kind);
  const Hyper hyper = hyper_of(numbers);
  const size_t n = w.size(), arrays = layout.vectors + (layout.row_scalars != 0 ? 1u : 0u);
  if (looks && row > kLookingRowMax) wrong("limit_rule: rows are too long to be looked at");
  if (g.size() != n || row == 0 || n % row != 0 || 1024 % row != 0 || state.size() != arrays)
    wrong("limit_rule: arrays do not fit the rule");
  float* pointers[limits::kRuleVectorsMax + 1] = {};
  for (size_t v = 0; v < arrays; ++v) {
    if (state[v].size() != (v < layout.vectors ? n : n / row * layout.row_scalars)) wrong("limit_rule: a short state");
    pointers[v] = state[v].data();
  }
  return each_of(threads, repeats, [&](int t, int of) {
    const Share s(n, t, of);
    (void)bare_dense(kind, hyper, w.data(), pointers, g.data(), s.from, s.n, row, looks);
  });
}

Seconds limit_rule_rows(uint8_t rule, const std::vector<double>& numbers, Table w, Table state, Bytes heads,
                        RowNumbers rows, Table g, int repeats, bool looks) {
  const RuleKind kind = rule_of(rule);
  const Layout& layout = layout_of(kind);
  const Hyper hyper = hyper_of(numbers);
  const size_t dim = w.shape(1);
  if (g.shape(0) != rows.size() || g.shape(1) != dim || state.shape(1) < layout.vectors * dim ||
      state.shape(0) < (layout.vectors != 0 ? w.shape(0) : 0) || heads.shape(0) != w.shape(0) ||
      heads.shape(1) != sizeof(RowHead) + layout.row_scalars * sizeof(float))
    wrong("limit_rule_rows: arrays do not fit the rule");
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows.data()[i] >= w.shape(0)) wrong("limit_rule_rows: no such row");
  }
  if (looks && dim > kLookingRowMax) wrong("limit_rule_rows: rows are too long to be looked at");
  const BareRows r{w.data(),
                   state.data(),
                   reinterpret_cast<std::byte*>(heads.data()),
                   heads.shape(1),
                   rows.data(),
                   g.data(),
                   rows.size(),
                   static_cast<uint32_t>(dim),
                   looks};
  return each_of(1, repeats, [&](int, int) { (void)bare_rows(kind, hyper, r); });
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def(
      "limit_rule", &limit_rule, nb::arg("rule"), nb::arg("numbers"), nb::arg("w"), nb::arg("state"), nb::arg("g"),
      nb::arg("row"), nb::arg("threads"), nb::arg("repeats"), nb::arg("looks") = false,
      "Seconds of a rule's kernel on plain arrays, `row` numbers to a row; numbers per row are the last of the state. "
      "looks: as for reject_nonfinite it looks at every number that it uses.");
  m.def("limit_rule_rows", &limit_rule_rows, nb::arg("rule"), nb::arg("numbers"), nb::arg("w"), nb::arg("state"),
        nb::arg("heads"), nb::arg("rows"), nb::arg("g"), nb::arg("repeats"), nb::arg("looks") = false,
        "The same on rows of plain arrays, by their numbers.");
  m.def(
      "limit_fused_sgd",
      [](Floats w, Floats g, Floats out, bool stream, int threads, int repeats) {
        return each_of(threads, repeats, [&](int t, int of) {
          const Share s(w.size(), t, of);
          loops().fused_sgd(w.data() + s.from, g.data() + s.from, out.data() + s.from, s.n, 1e-6f, stream);
        });
      },
      nb::arg("w"), nb::arg("g"), nb::arg("out"), nb::arg("stream"), nb::arg("threads"), nb::arg("repeats"));
  m.def(
      "limit_fused_sgd_of_two",
      [](Floats w, Floats g0, Floats g1, Floats out0, Floats out1, bool stream, int threads, int repeats) {
        return each_of(threads, repeats, [&](int t, int of) {
          const Share s(w.size(), t, of);
          loops().fused_sgd_of_two(w.data() + s.from, g0.data() + s.from, g1.data() + s.from, out0.data() + s.from,
                                   out1.data() + s.from, s.n, 1e-6f, stream);
        });
      },
      nb::arg("w"), nb::arg("g0"), nb::arg("g1"), nb::arg("out0"), nb::arg("out1"), nb::arg("stream"),
      nb::arg("threads"), nb::arg("repeats"));
  m.def(
      "limit_update_sgd",
      [](Floats w, Floats g, int threads, int repeats) {
        return each_of(threads, repeats, [&](int t, int of) {
          const Share s(w.size(), t, of);
          loops().update_sgd(w.data() + s.from, g.data() + s.from, s.n, 1e-6f);
        });
      },
      nb::arg("w"), nb::arg("g"), nb::arg("threads"), nb::arg("repeats"));
  m.def(
      "limit_copy",
      [](Floats from, Floats to, int threads, int repeats) {
        return each_of(threads, repeats, [&](int t, int of) {
          const Share s(from.size(), t, of);
          std::memcpy(to.data() + s.from, from.data() + s.from, s.n * sizeof(float));
        });
      },
      nb::arg("source"), nb::arg("to"), nb::arg("threads"), nb::arg("repeats"));
  m.def(
      "limit_fused_adam",
      [](Floats w, Floats m1, Floats v, Floats g, Floats out, bool stream, int threads, int repeats) {
        return each_of(threads, repeats, [&](int t, int of) {
          const Share s(w.size(), t, of);
          loops().fused_adam(w.data() + s.from, m1.data() + s.from, v.data() + s.from, g.data() + s.from,
                             out.data() + s.from, s.n, 1e-6f, stream);
        });
      },
      nb::arg("w"), nb::arg("m"), nb::arg("v"), nb::arg("g"), nb::arg("out"), nb::arg("stream"), nb::arg("threads"),
      nb::arg("repeats"));
  m.def(
      "limit_gather",
      [](Table table, RowNumbers rows, Table out, bool stream, int repeats) {
        return each_of(1, repeats, [&](int, int) {
          loops().gather(table.data(), table.shape(1), rows.data(), out.data(), rows.size(),
                         static_cast<uint32_t>(out.shape(1)), stream);
        });
      },
      nb::arg("table"), nb::arg("rows"), nb::arg("out"), nb::arg("stream"), nb::arg("repeats"));
  m.def(
      "limit_row_adagrad",
      [](Table table, Bytes heads, RowNumbers rows, Table g, int repeats) {
        return each_of(1, repeats, [&](int, int) {
          loops().row_adagrad(table.data(), table.shape(1), reinterpret_cast<RowHead*>(heads.data()), heads.shape(1),
                              rows.data(), g.data(), rows.size(), static_cast<uint32_t>(g.shape(1)), 1e-6f, 1e-10f);
        });
      },
      nb::arg("table"), nb::arg("heads"), nb::arg("rows"), nb::arg("g"), nb::arg("repeats"));
  m.def(
      "time_gate",
      [](const std::tuple<uint8_t, uint32_t, double>& sync, uint32_t workers, size_t pulls, int repeats) {
        const auto [kind, number, seconds] = sync;
        if (kind >= Sync::kKinds) wrong("time_gate: no such policy");
        nb::gil_scoped_release release;
        GateTimes times = time_gate({static_cast<Sync::Kind>(kind), number, seconds}, workers, pulls, repeats);
        return std::pair(std::move(times.pull_seconds), std::move(times.asked_seconds));
      },
      nb::arg("sync"), nb::arg("workers"), nb::arg("pulls"), nb::arg("repeats"),
      "Seconds per pull at a gate, one per repeat: asked once, and with everybody who waits asked again after every "
      "close.");
}

}  // namespace windlass::bind

NB_MODULE(_native, m) {
  m.doc() = "The limits of windlass bench: plain loops, bare programs at the ends of a socket, and a gate by itself.";
  windlass::bind::bind_limits(m);
  windlass::bind::bind_wire_limits(m);
}
