// A test harness for the core, small enough to read in a minute: TEST registers a function, CHECK reports and goes
// on, and core_test runs them all (or those whose name contains an argument).
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace windlass::test {

struct Case {
  const char* name;
  void (*run)();
};

// A number of any type, as a failure shows it.
class Number {
 public:
  template <class T>
  explicit Number(T value) {
    if constexpr (std::is_floating_point_v<T>) {
      kind_ = kReal, real_ = static_cast<double>(value);
    } else if constexpr (std::is_unsigned_v<T>) {
      kind_ = kUnsigned, whole_ = value;
    } else {
      kind_ = kSigned, whole_ = static_cast<uint64_t>(static_cast<int64_t>(value));
    }
  }

  std::string text() const;

 private:
  enum { kSigned, kUnsigned, kReal } kind_;
  union {
    uint64_t whole_;
    double real_;
  };
};

std::vector<Case>& cases();

// All that a failure takes is out of line: thousands of checks would each compile it.
void fail(const char* file, int line, std::string_view what);
void fail(const char* file, int line, const char* what, std::string_view why);
void fail_unequal(const char* file, int line, const char* what, Number a, Number b);

bool accurate();  // --accurate: the long forms
uint64_t seed();  // --seed=N: where random tests start; a failure names it

// Sanitizer builds are slow, TSan most of all, and their memory use says little about ours. Tests of pure logic run in
// full in the release build and are shortened under sanitizers.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true, kUnderTsan = true;
inline constexpr uint64_t kSlowness = 10;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true, kUnderTsan = false;
inline constexpr uint64_t kSlowness = 2;
#else
inline constexpr bool kSanitized = false, kUnderTsan = false;
inline constexpr uint64_t kSlowness = 1;
#endif

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

// Reproducible random numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }

 private:
  uint64_t state_;
};

}  // namespace windlass::test

#define TEST(name)                                                      \
  static void name();                                                   \
  static const ::windlass::test::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) ::windlass::test::fail(__FILE__, __LINE__, #condition); \
  } while (0)

#define CHECK_EQ(a, b)                                                                                \
  do {                                                                                                \
    const auto wl_a_ = (a);                                                                           \
    const auto wl_b_ = (b);                                                                           \
    if (!(wl_a_ == wl_b_)) {                                                                          \
      using ::windlass::test::Number;                                                                 \
      ::windlass::test::fail_unequal(__FILE__, __LINE__, #a " == " #b, Number(wl_a_), Number(wl_b_)); \
    }                                                                                                 \
  } while (0)

#define CHECK_CODE(expr, expected)                                                                  \
  do {                                                                                              \
    const ::windlass::Status wl_s_ = (expr);                                                        \
    if (wl_s_.code() != (expected)) {                                                               \
      ::windlass::test::fail(__FILE__, __LINE__, #expr ": not " #expected " but", wl_s_.message()); \
    }                                                                                               \
  } while (0)

#define CHECK_OK(expr)                                                                                  \
  do {                                                                                                  \
    const ::windlass::Status wl_s_ = (expr);                                                            \
    if (!wl_s_.ok()) ::windlass::test::fail(__FILE__, __LINE__, #expr ": not OK but", wl_s_.message()); \
  } while (0)
