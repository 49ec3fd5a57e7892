#include "messages/heartbeat.h"

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/test.h"

namespace windlass::heartbeat_test {
namespace {

constexpr int64_t kMs = 1'000'000;

struct Ends {
  Ends() {
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    ours = fds[0];
    theirs = fds[1];
  }
  ~Ends() {
    if (theirs >= 0) close(theirs);
  }
  std::string read(size_t bytes) {
    std::string text(bytes, '\0');
    CHECK_EQ(recv(theirs, text.data(), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
    return text;
  }
  int ours = -1, theirs = -1;
};

TEST(a_heart_beats_at_once_and_then_every_period) {
  Ends ends;
  const int64_t begin = os::now_ns();
  Heartbeat heart(ends.ours, "beat", 20 * kMs);
  CHECK(ends.read(4) == "beat");
  CHECK(ends.read(12) == "beatbeatbeat");
  CHECK(os::now_ns() - begin >= 60 * kMs - kMs);
  CHECK(!heart.wait(os::now_ns() + kMs));
}

TEST(a_heart_whose_other_end_is_closed_has_ended) {
  Ends ends;
  Heartbeat heart(ends.ours, "beat", 3'600'000 * kMs);
  CHECK(ends.read(4) == "beat");
  close(std::exchange(ends.theirs, -1));
  CHECK(heart.wait(os::now_ns() + 5000 * kMs));
  CHECK(heart.ended());
}

TEST(a_heart_that_is_stopped_closes_its_connection) {
  Ends ends;
  {
    Heartbeat heart(ends.ours, "beat", 3'600'000 * kMs);
    CHECK(ends.read(4) == "beat");
    heart.stop();
    CHECK(heart.wait(os::now_ns() + 5000 * kMs));
  }
  char byte = 0;
  CHECK_EQ(recv(ends.theirs, &byte, 1, 0), 0);
}

TEST(a_heart_ignores_what_it_is_told_and_goes_on_when_its_beats_are_not_read) {
  Ends ends;
  Heartbeat heart(ends.ours, std::string(1 << 20, 'x'), kMs);  // more than a socket takes
  CHECK_EQ(send(ends.theirs, "hello", 5, 0), 5);
  CHECK(!heart.wait(os::now_ns() + 50 * kMs));
  for (int i = 0; i < 3; ++i) CHECK(ends.read(1 << 20) == std::string(1 << 20, 'x'));
}

}  // namespace
}  // namespace windlass::heartbeat_test
