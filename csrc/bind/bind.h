// What the binding files of windlass._core share. The core never includes a Python header; only this folder does.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/os.h"
#include "client/net/owners.h"
#include "client/op/call.h"
#include "table/group.h"

namespace windlass::bind {

namespace nb = nanobind;

using In = nb::ndarray<nb::ro, nb::device::cpu>;
using Out = nb::ndarray<nb::device::cpu>;

// A Status on its way to Python; the translator in module.cc turns it into the exception of its code.
struct StatusError {
  Status status;
};
inline void raise_if_error(Status status) {
  if (!status.ok()) throw StatusError{std::move(status)};
}

inline int64_t deadline_in(double seconds) {
  constexpr double kSecondsMax = 1e9;
  if (!(seconds >= 0))
    throw StatusError{
        Status(Code::kInvalidArgument, "timeout must be at least 0 seconds, not " + std::to_string(seconds))};
  return os::now_ns() + static_cast<int64_t>(std::min(seconds, kSecondsMax) * 1e9);
}

// Which array of which object; only errors put it into words.
struct Where {
  const char* kind;
  const std::string& name;
  const char* role;
  std::string text() const { return (*kind != 0 ? std::string(kind) + " '" + name + "', " : name + ", ") + role; }
};

Array to_array(const Where& where, const nb::dlpack::dtype& dtype, const void* data, size_t dims, const int64_t* shape,
               const int64_t* strides);

template <class A>
Array to_array(const Where& where, const A& a) {
  return to_array(where, a.dtype(), a.data(), a.ndim(), a.shape_ptr(), a.stride_ptr());
}

Keys to_keys(const Where& where, const In& a);

// Reads a contiguous numpy array of a native dtype directly; false if the object is anything else.
bool plain_array(nb::handle object, bool writable, Array* a);

// Reads any array of the caller's; *kept holds one that is not plain. None: changes nothing and returns false.
template <class A>
bool any_array(const Where& where, nb::handle object, std::optional<A>* kept, Array* a) {
  if (object.is_none()) return false;
  if (plain_array(object, std::is_same_v<A, Out>, a)) return true;
  *kept = nb::cast<A>(object);
  *a = to_array(where, **kept);
  return true;
}

Hyper to_hyper(nb::handle tuple);

using SyncNumbers = std::tuple<int, uint32_t, double>;  // kind, number, seconds
inline Sync to_sync(const SyncNumbers& numbers) {
  const auto [kind, number, seconds] = numbers;
  return {static_cast<Sync::Kind>(kind), number, seconds};
}

// Waits for a started call, without the GIL unless it is done already.
template <class C>
void finish(const Ref<C>& call, int64_t deadline) {
  Status status;
  if (call->done()) {
    status = call->finish(deadline);
  } else {
    nb::gil_scoped_release release;
    status = call->finish(deadline);
  }
  raise_if_error(std::move(status));
}

// Starts a call and waits for it, all without the GIL.
template <class C, class F>
void start_and_finish(Ref<C>* call, int64_t deadline, F f) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = f();
    if (status.ok()) status = (*call)->finish(deadline);
  }
  raise_if_error(std::move(status));
}

// Calls a method of the core that returns a number and may have to wait.
template <class T>
uint64_t ask(T& of, Status (T::*method)(int64_t deadline_ns, uint64_t* out), double timeout) {
  const int64_t deadline = deadline_in(timeout);
  uint64_t value = 0;
  Status status;
  {
    nb::gil_scoped_release release;
    status = (of.*method)(deadline, &value);
  }
  raise_if_error(std::move(status));
  return value;
}

// Calls a user's function; returns its result for each shard.
template <class T>
nb::list call_function(T& of, const std::string& name, const nb::bytes& arguments, double timeout) {
  const int64_t deadline = deadline_in(timeout);
  const wire::CallItem item{name, std::string(arguments.c_str(), arguments.size())};
  std::vector<std::string> results;
  Status status;
  {
    nb::gil_scoped_release release;
    status = of.call(item, deadline, &results);
  }
  raise_if_error(std::move(status));
  nb::list all;
  for (const std::string& result : results) all.append(nb::bytes(result.data(), result.size()));
  return all;
}

// Asks a query; returns the bytes of its answer.
template <class T>
nb::bytes query(T& of, const nb::bytes& question, double timeout) {
  const int64_t deadline = deadline_in(timeout);
  const std::string bytes(question.c_str(), question.size());
  std::string answer;
  Status status;
  {
    nb::gil_scoped_release release;
    status = of.query(bytes, deadline, &answer);
  }
  raise_if_error(std::move(status));
  return nb::bytes(answer.data(), answer.size());
}

template <class T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

// Where this client believes a shard is: server and term.
template <class T>
std::pair<uint32_t, uint32_t> owner_of(T& of, uint32_t shard) {
  if (!of.remote() || shard >= of.owners()->shards())
    throw StatusError{
        Status(Code::kInvalidArgument, "owner: there is no shard " + std::to_string(shard) + " on servers elsewhere")};
  const Owners::At at = of.owners()->of(shard);
  return {at.server, at.term};
}

// Begins a request: f gets the deadline until which it may wait, and returns kTimeout if nothing has begun by then. A
// small request inside the process keeps the GIL for a first try that does not wait: whoever it waits for may need the
// GIL.
template <class F>
void start(bool remote, size_t bytes, int64_t deadline_ns, F f) {
  if (!remote && bytes <= limits::kGilBytesMax) {
    if (Status status = f(int64_t{0}); status.code() != Code::kTimeout) return raise_if_error(std::move(status));
  }
  Status status;
  {
    nb::gil_scoped_release release;
    status = f(deadline_ns);
  }
  raise_if_error(std::move(status));
}

// A future. Its error is kept for the next call on the object if nobody waits for it.
class Future {
 public:
  explicit Future(Ref<Call> call) : call_(std::move(call)) {}
  Future(const Future&) = delete;
  Future& operator=(const Future&) = delete;
  ~Future() { call_->drop(); }
  bool done() const { return call_->done(); }
  void wait(double timeout) {
    const int64_t deadline = deadline_in(timeout);
    Status status;
    {
      nb::gil_scoped_release release;
      status = call_->wait(deadline);
    }
    raise_if_error(std::move(status));
  }
  bool cancel() { return call_->take_back(); }
  std::tuple<uint64_t, uint64_t, double, int64_t> seen() const {
    const Seen seen = call_->seen();
    const int64_t rank = seen.rank == Gate::kOutsider ? -1 : int64_t{seen.rank};
    return {seen.asked, seen.clock, static_cast<double>(seen.waited_ns) * 1e-9, rank};
  }
  Call& call() { return *call_; }

 private:
  const Ref<Call> call_;
};

void bind_user_code(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_tensor(nb::module_& m);
void bind_table(nb::module_& m);
void bind_host(nb::module_& m);
void bind_links(nb::module_& m);
void bind_control(nb::module_& m);
void bind_checkpoint(nb::module_& m);
void bind_session(nb::module_& m);

}  // namespace windlass::bind
