// core_test [--accurate] [--seed=N] [--slowest=N] [part of a name]
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "base/test.h"

namespace windlass::test {
namespace {
int g_failures = 0;
bool g_accurate = false;
uint64_t g_seed = 1;
}  // namespace

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

std::string Number::text() const {
  char text[32];
  if (kind_ == kReal) {
    std::snprintf(text, sizeof text, "%.9g", real_);
  } else if (kind_ == kUnsigned) {
    std::snprintf(text, sizeof text, "%" PRIu64, whole_);
  } else {
    std::snprintf(text, sizeof text, "%" PRId64, static_cast<int64_t>(whole_));
  }
  return text;
}

void fail(const char* file, int line, std::string_view what) {
  ++g_failures;
  std::fprintf(stderr, "%s:%d: %.*s\n", file, line, static_cast<int>(what.size()), what.data());
}

void fail(const char* file, int line, const char* what, std::string_view why) {
  fail(file, line, std::string(what) + " '" + std::string(why) + "'");
}

void fail_unequal(const char* file, int line, const char* what, Number a, Number b) {
  fail(file, line, std::string(what) + ": " + a.text() + " and " + b.text());
}

bool accurate() { return g_accurate; }
uint64_t seed() { return g_seed; }

}  // namespace windlass::test

int main(int argc, char** argv) {
  using namespace windlass::test;
  const char* only = nullptr;
  size_t slowest = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--accurate") == 0) {
      g_accurate = true;
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      g_seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else if (std::strncmp(argv[i], "--slowest=", 10) == 0) {
      slowest = std::strtoull(argv[i] + 10, nullptr, 10);
    } else {
      only = argv[i];
    }
  }
  int passed = 0, failed = 0;
  struct Took {
    double seconds, processor_s;
    const char* name;
  };
  std::vector<Took> took;
  for (const Case& c : cases()) {
    if (only != nullptr && std::strstr(c.name, only) == nullptr) continue;
    const int before = g_failures;
    const auto begun = std::chrono::steady_clock::now();
    const std::clock_t used = std::clock();
    c.run();
    took.push_back({std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(),
                    static_cast<double>(std::clock() - used) / CLOCKS_PER_SEC, c.name});
    const bool ok = g_failures == before;
    ok ? ++passed : ++failed;
    if (!ok) std::fprintf(stderr, "FAILED %s (--seed=%" PRIu64 ")\n", c.name, g_seed);
  }
  std::sort(took.begin(), took.end(), [](const Took& a, const Took& b) { return a.seconds > b.seconds; });
  for (size_t i = 0; i < std::min(slowest, took.size()); ++i)
    std::printf("%7.2f s, of processors %7.2f s  %s\n", took[i].seconds, took[i].processor_s, took[i].name);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
