// Status: how the core says that something went wrong.
//
// Every function of the core that can fail returns a Status (or fills one in); nothing throws. A code maps one to one
// onto an exception class of windlass/_errors.py, and the message says which object, what was expected and what was
// seen. An ok Status allocates nothing.
//
// Thread safety: a value; copies are independent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace windlass {

// The order is that of `ERRORS` in windlass/_errors.py; a test compares the two. The numbers are on the wire.
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,    // a value that can never be right
  kShapeMismatch,      // an array of another shape or dtype than the object's
  kSpecMismatch,       // an object opened with another spec than it was created with
  kNotFound,           // no such object
  kClosed,             // the cluster has been closed
  kTimeout,            // the caller's deadline passed first
  kBufferInUse,        // a registered array that another request still uses
  kResourceExhausted,  // a limit on memory or count was reached
  kNonFinite,          // NaN or infinity where reject_nonfinite was asked for
  kForkedProcess,      // used in the child of a fork
  kServerLost,         // a server that cannot be reached, or came back without what it held
  kAccessDenied,       // a token that is missing or wrong; a reader that would change something
  kProtocolError,      // bytes that do not follow docs/formats/wire.md
  kCorrupt,            // a block whose checksum is wrong; the client sends it again
  kOutOfSequence,      // a push whose predecessors are missing; the client sends again
  kStaleMap,           // a shard that is elsewhere, or has another term
  kCancelled,          // the caller cancelled the request
  kWouldDeadlock,      // waiting for what only the caller itself can bring about
  kInternal,           // our own bug
  kFunctionFailed,     // a user's rule or function raised, or took too long
  kDeleted,            // an object that was deleted
};
inline constexpr auto kLastCode = static_cast<uint8_t>(Code::kDeleted);

// Shards that refused a push: nothing of it was applied there.
struct Refused {
  std::string object;  // its name
  bool is_table = false;
  uint32_t request = 0;  // which one of its step; 0 of a request by itself
  std::vector<uint32_t> shards;
  std::vector<uint64_t>
      places;                  // of a tensor: first element and number of each range. Of a table: places in the request
  std::vector<uint64_t> keys;  // and the keys there
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, std::vector<Refused> refused = {})
      : error_(std::make_shared<const Error>(Error{code, std::move(message), std::move(refused)})) {}

  bool ok() const { return error_ == nullptr; }
  Code code() const { return ok() ? Code::kOk : error_->code; }
  const std::string& message() const {
    static const std::string empty;
    return ok() ? empty : error_->message;
  }
  // Of a push that was refused by some shards or all of them.
  const std::vector<Refused>& refused() const {
    static const std::vector<Refused> none;
    return ok() ? none : error_->refused;
  }

 private:
  struct Error {
    Code code;
    std::string message;
    std::vector<Refused> refused;
  };
  std::shared_ptr<const Error> error_;
};

}  // namespace windlass

// Leaves the enclosing function with the first Status that is not ok.
#define WL_RETURN_IF_ERROR(expr)             \
  do {                                       \
    ::windlass::Status wl_status_ = (expr);  \
    if (!wl_status_.ok()) return wl_status_; \
  } while (0)
