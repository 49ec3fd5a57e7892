#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <thread>

#include "bind/bind.h"
#include "client/net/links.h"
#include "client/op/step.h"
#include "client/op/table.h"
#include "client/op/tensor.h"

namespace windlass::bind {
namespace {

// Owns a registered array's memory: keeps the engine alive, and gives the block back to it.
struct Owner {
  std::shared_ptr<Engine> engine;
  std::byte* block;
  ~Owner() {
    if (!engine->forked()) engine->arena().give(block);
  }
};

nb::dlpack::dtype dlpack_of(Dtype t) {
  using enum nb::dlpack::dtype_code;
  switch (t) {
    case Dtype::kFloat32: return {static_cast<uint8_t>(Float), 32, 1};
    case Dtype::kFloat64: return {static_cast<uint8_t>(Float), 64, 1};
    case Dtype::kInt64: return {static_cast<uint8_t>(Int), 64, 1};
    case Dtype::kFloat16: return {static_cast<uint8_t>(Float), 16, 1};
    case Dtype::kBfloat16: return {static_cast<uint8_t>(UInt), 16, 1};
  }
  return {};
}

nb::ndarray<nb::numpy> empty(const std::shared_ptr<Engine>& engine, const std::vector<size_t>& shape, Dtype dtype) {
  raise_if_error(engine->usable());
  size_t bytes = size_of(dtype);
  for (const size_t d : shape) {
    if (d != 0 && bytes > (size_t{1} << 46) / d)
      throw StatusError{Status(Code::kInvalidArgument, "empty: the array is too large")};
    bytes *= d;
  }
  std::byte* block = engine->arena().take(bytes);
  if (block == nullptr)
    throw StatusError{Status(Code::kResourceExhausted, "empty: no memory for " + std::to_string(bytes) + " bytes (" +
                                                           engine->arena().failure() + ")")};
  nb::capsule owner(new Owner{engine, block}, [](void* p) noexcept { delete static_cast<Owner*>(p); });
  return nb::ndarray<nb::numpy>(block, shape.size(), shape.data(), owner, nullptr, dlpack_of(dtype));
}

// Writes a line to the log of the process, from a thread without the GIL. Keeps no Python object for that: the last
// reference to an engine may go on a thread of its own, after the interpreter has ended.
void log_overdue(const std::string& line) {
  nb::gil_scoped_acquire acquire;
  try {
    nb::module_::import_("logging").attr("getLogger")("windlass").attr("warning")("embedded: %s", line);
  } catch (nb::python_error& error) {
    // Pass an interrupt on to the caller that waits.
    if (error.matches(PyExc_KeyboardInterrupt)) return PyErr_SetInterrupt();
    error.discard_as_unraisable("windlass");
  }
}

// Takes the turn of one shard and keeps it until released: simulates a busy server, for tests.
class Hold {
 public:
  Hold(std::shared_ptr<Engine> engine, std::shared_ptr<void> object, Turn* turn) : state_(std::make_shared<State>()) {
    state_->engine = std::move(engine);
    state_->object = std::move(object);
    std::thread([state = state_, turn] { turn->run(*state); }).detach();
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->held; });
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }
  void release() {
    std::lock_guard lock(state_->mutex);
    state_->released = true;
    state_->changed.notify_all();
  }

 private:
  struct State final : Job {
    void run() override {
      std::unique_lock lock(mutex);
      held = true;
      changed.notify_all();
      changed.wait(lock, [this] { return released; });
    }
    std::shared_ptr<Engine> engine;
    std::shared_ptr<void> object;
    std::mutex mutex;
    std::condition_variable changed;
    bool held = false, released = false;
  };
  std::shared_ptr<State> state_;
};

}  // namespace

void bind_engine(nb::module_& m) {
  nb::enum_<Dtype>(m, "Dtype")
      .value("FLOAT32", Dtype::kFloat32)
      .value("FLOAT64", Dtype::kFloat64)
      .value("INT64", Dtype::kInt64)
      .value("BFLOAT16", Dtype::kBfloat16)
      .value("FLOAT16", Dtype::kFloat16);
  nb::enum_<RuleKind>(m, "RuleKind")
      .value("SGD", RuleKind::kSgd)
      .value("MOMENTUM", RuleKind::kMomentum)
      .value("ADAGRAD", RuleKind::kAdagrad)
      .value("ROW_ADAGRAD", RuleKind::kRowAdagrad)
      .value("ADAM", RuleKind::kAdam)
      .value("ADAMW", RuleKind::kAdamW)
      .value("SUM", RuleKind::kSum)
      .value("ASSIGN", RuleKind::kAssign)
      .value("MAX", RuleKind::kMax)
      .value("AVERAGE", RuleKind::kAverage)
      .value("FOREIGN", RuleKind::kForeign)
      .value("RMSPROP", RuleKind::kRmsProp)
      .value("RMSPROP_MOMENTUM", RuleKind::kRmsPropMomentum)
      .value("RMSPROP_CENTERED", RuleKind::kRmsPropCentered)
      .value("RMSPROP_CENTERED_MOMENTUM", RuleKind::kRmsPropCenteredMomentum)
      .value("ADADELTA", RuleKind::kAdadelta)
      .value("ADAMAX", RuleKind::kAdamax)
      .value("NADAM", RuleKind::kNAdam)
      .value("LION", RuleKind::kLion)
      .value("FTRL", RuleKind::kFtrl)
      .value("MIN", RuleKind::kMin);
  nb::class_<RuleSpec>(m, "RuleSpec", "What is fixed of a rule when an object is made.")
      .def(
          nb::new_([](RuleKind kind, float initial_state, float clip, float lowest, float highest,
                      const std::tuple<uint8_t, uint64_t, uint64_t, double>& schedule,
                      const std::tuple<std::string, uint8_t, uint8_t, uint32_t, bool, bool, bool>& foreign) {
            const auto& [falls, warmup, updates, end] = schedule;
            const auto& [name, vectors, row_scalars, shard_scalars, whole, by_row, begins] = foreign;
            return RuleSpec{.kind = kind,
                            .initial_state = initial_state,
                            .clip = clip,
                            .lowest = lowest,
                            .highest = highest,
                            .schedule = {static_cast<Schedule::Kind>(falls), warmup, updates, end},
                            .foreign = {name, vectors, row_scalars, shard_scalars, whole, by_row, begins}};
          }),
          nb::arg("kind"), nb::arg("initial_state") = 0.0f, nb::arg("clip") = 0.0f,
          nb::arg("lowest") = -std::numeric_limits<float>::infinity(),
          nb::arg("highest") = std::numeric_limits<float>::infinity(),
          nb::arg("schedule") = std::make_tuple(uint8_t{0}, uint64_t{0}, uint64_t{0}, 0.0),
          nb::arg("foreign") = std::make_tuple(std::string(), uint8_t{0}, uint8_t{0}, uint32_t{0}, false, false, false))
      .def_ro("kind", &RuleSpec::kind)
      .def_prop_ro("schedule",
                   [](const RuleSpec& r) {
                     const Schedule& s = r.schedule;
                     return std::make_tuple(static_cast<uint8_t>(s.kind), s.warmup, s.updates, s.end);
                   })
      .def_prop_ro("foreign",
                   [](const RuleSpec& r) {
                     const Foreign& f = r.foreign;
                     return std::make_tuple(f.name, f.vectors, f.row_scalars, f.shard_scalars, f.whole, f.by_row,
                                            f.begins);
                   })
      .def("same", [](const RuleSpec& a, const RuleSpec& b) { return a == b; }, nb::arg("other"));
  nb::enum_<InitKind>(m, "InitKind")
      .value("ZEROS", InitKind::kZeros)
      .value("CONSTANT", InitKind::kConstant)
      .value("UNIFORM", InitKind::kUniform)
      .value("NORMAL", InitKind::kNormal);

  nb::class_<Engine>(m, "Engine", "One server and one arena inside this process.")
      .def(nb::new_([](int threads, uint64_t memory_bytes_max) {
             return std::make_shared<Engine>(threads, memory_bytes_max);
           }),
           nb::arg("threads"), nb::arg("memory_bytes_max"))
      .def_static(
          "on",
          [](std::shared_ptr<Links> links, const std::shared_ptr<Engine>& arena_of) {
            return std::make_shared<Engine>(std::move(links), arena_of);
          },
          nb::arg("links"), nb::arg("arena_of").none(), "On servers elsewhere.")
      .def(
          "set_overdue",
          [](Engine& e, double seconds) {
            e.set_overdue({.every_ns = static_cast<int64_t>(seconds * 1e9), .say = log_overdue});
          },
          nb::arg("seconds"),
          "Whoever waits at a gate inside the process for so long logs for whom, and again after as long.")
      .def(
          "set_user_code", [](Engine& e, std::shared_ptr<UserCode> code) { e.server().set_user_code(std::move(code)); },
          nb::arg("code"), nb::call_guard<nb::gil_scoped_release>(),
          "Who runs rules and functions of the user's. Before any object is made.")
      .def("empty", &empty, nb::arg("shape"), nb::arg("dtype"), "A registered array, not zeroed.")
      .def(
          "registered",
          [](Engine& e, const In& a) {
            return e.arena().registered({static_cast<const std::byte*>(a.data()), a.nbytes()});
          },
          nb::arg("array"))
      .def(
          "renewals", [](Engine& e) { return e.arena().renewals(); }, nb::call_guard<nb::gil_scoped_release>(),
          "How often registered arrays have got fresh pages under their addresses; waits for those that are getting "
          "them.")
      .def(
          "wait_returned",
          [](Engine& e, const In& a, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            raise_if_error(e.usable());
            nb::gil_scoped_release release;
            return e.arena().wait_returned({static_cast<const std::byte*>(a.data()), a.nbytes()}, deadline);
          },
          nb::arg("array"), nb::arg("timeout"), "Until no request uses the array; False when the time is up.")
      .def(
          "close",
          [](Engine& e, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = e.close(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"))
      .def(
          "check", [](Engine& e) { raise_if_error(e.usable()); }, "Raises unless the engine can be used.")
      .def_prop_ro("closed", &Engine::closed)
      .def_prop_ro("forked", &Engine::forked)
      .def_prop_ro("remote", [](Engine& e) { return e.links() != nullptr; })
      .def_prop_ro("threads", [](Engine& e) { return e.links() != nullptr ? 0 : e.server().threads(); })
      .def_prop_ro("memory_bytes", [](Engine& e) { return e.links() != nullptr ? 0 : e.server().memory_bytes(); });

  nb::class_<Session>(m, "Session", "One worker on an engine.")
      .def(nb::new_([](std::shared_ptr<Engine> engine, uint32_t rank, uint32_t world_size) {
             std::shared_ptr<Session> session;
             Status status;
             {
               nb::gil_scoped_release release;  // whoever makes an object may be waiting for a function of Python's
               status = Session::open(std::move(engine), rank, world_size, &session);
             }
             raise_if_error(std::move(status));
             return session;
           }),
           nb::arg("engine"), nb::arg("rank"), nb::arg("world_size"))
      .def(
          "tick",
          [](Session& s, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = s.tick(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"), "Closes everything that is open.")
      .def(
          "settle",
          [](Session& s, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = s.settle(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"), "Waits until all that was pushed and closed has arrived.")
      .def(
          "remove",
          [](Session& s, const std::string& name, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = s.remove(name, deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("name"), nb::arg("timeout"), "Deletes an object on all servers.")
      .def(
          "enter",
          [](Session& s, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = s.enter(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"), "Begins at a clock that fits the others', where they have begun.")
      .def_prop_ro(
          "begun", [](Session& session) { return static_cast<int>(session.begun()); },
          "How much of the present iteration of BSP objects was pushed or closed: 0 none, 1 some, 2 all.")
      .def_prop_ro("only_rounds", &Session::only_rounds, "Whether all objects that it has used are under BSP.")
      .def_prop_ro("iteration", &Session::iteration,
                   "That the next push belongs to: beyond the clock where a push_pull has closed its object.")
      .def_prop_ro("has_open_pushes", &Session::has_open_pushes,
                   "Whether pushes wait for an iteration it has not closed.")
      .def(
          "leave",
          [](Session& s, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = s.leave(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"), "It is waited for no more.")
      .def("close", &Session::close, "Ends this worker alone; whatever it asks for from then on raises Closed.")
      .def_prop_ro("closed", &Session::closed)
      .def(
          "check", [](Session& s) { raise_if_error(s.usable()); }, "Raises unless the worker can be used.")
      .def(
          "raise_unseen", [](Session& s) { raise_if_error(s.take_unseen()); }, "Raises the error of a dropped future.")
      .def(
          "fingerprint", [](Session& s, double timeout) { return ask(s, &Session::fingerprint, timeout); },
          nb::arg("timeout"))
      .def(
          "objects",
          [](Session& s, bool counts, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            std::vector<Placed> all;
            std::vector<uint64_t> rows;
            Status status;
            {
              nb::gil_scoped_release release;
              status = s.list(deadline, &all);
              for (const Placed& placed : all) {
                rows.push_back(0);
                if (status.ok() && counts && placed.spec.is_table) status = s.rows_of(placed, deadline, &rows.back());
              }
            }
            raise_if_error(std::move(status));
            nb::list found;
            for (size_t i = 0; i < all.size(); ++i) {
              wire::Writer writer;
              encode(all[i].spec, &writer);
              const std::string spec = writer.take();
              found.append(nb::make_tuple(nb::bytes(spec.data(), spec.size()), rows[i]));
            }
            return found;
          },
          nb::arg("counts"), nb::arg("timeout"),
          nb::sig("def objects(self, counts: bool, timeout: float) -> list[tuple[bytes, int]]"),
          "The specs of all objects of all apps; counts: and how many rows each table has.")
      .def_prop_ro(
          "pull_stats",
          [](Session& s) {
            const PullStats stats = s.pull_stats();
            return std::make_tuple(stats.pulls, stats.waits, stats.waited_seconds);
          },
          "Pulls and push_pulls that were answered, how many of them waited at a gate, and for how long.")
      .def_prop_ro("clock", &Session::clock)
      .def_prop_ro("settled_clock", &Session::settled_clock,
                   "The clock below which everything that this worker has pushed and closed is answered.")
      .def(
          "await_settled",
          [](Session& s, uint64_t clock, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            nb::gil_scoped_release release;
            return s.await_settled(clock, deadline);
          },
          nb::arg("clock"), nb::arg("timeout"),
          "Waits until all that was begun before this clock is answered; false if that takes longer.")
      .def_prop_ro("rank", &Session::rank)
      .def_prop_ro("world_size", &Session::world_size)
      .def_prop_ro("incarnation", &Session::incarnation);

  nb::class_<StepClient>(m, "Step", "Requests that leave together.")
      .def(nb::new_([](std::shared_ptr<Session> session) { return std::make_unique<StepClient>(std::move(session)); }),
           nb::arg("session"))
      .def(
          "run",
          [](StepClient& step, double timeout) {
            const int64_t deadline = deadline_in(timeout);
            Status status;
            {
              nb::gil_scoped_release release;
              status = step.run(deadline);
            }
            raise_if_error(std::move(status));
          },
          nb::arg("timeout"));

  nb::class_<Future>(m, "Future", "A request under way.")
      .def("done", &Future::done)
      .def("cancel", &Future::cancel, nb::call_guard<nb::gil_scoped_release>())
      .def("seen", &Future::seen,
           "The clock asked for, the clock seen, seconds waited at the gate, and for which rank.")
      .def("wait", &Future::wait, nb::arg("timeout"));

  nb::class_<Hold>(m, "Hold", "Keeps the turn of a shard, for tests.").def("release", &Hold::release);
  m.def(
      "hold_tensor",
      [](const std::shared_ptr<TensorClient>& t, uint32_t shard) {
        if (t->remote() || shard >= t->cut().shards) throw StatusError{Status(Code::kInvalidArgument, "no such shard")};
        return std::make_unique<Hold>(t->session().shared_engine(), t, &t->tensor().shard(shard).turn);
      },
      nb::arg("tensor"), nb::arg("shard"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "hold_table",
      [](const std::shared_ptr<TableClient>& t, uint32_t shard) {
        if (t->remote() || shard >= limits::kTableShards)
          throw StatusError{Status(Code::kInvalidArgument, "no such shard")};
        return std::make_unique<Hold>(t->session().shared_engine(), t, &t->table().shard(shard).turn);
      },
      nb::arg("table"), nb::arg("shard"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace windlass::bind
