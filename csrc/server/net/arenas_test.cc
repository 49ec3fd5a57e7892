#include "server/net/arenas.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "base/os.h"
#include "base/test.h"

namespace windlass::arenas_test {
namespace {

constexpr uint64_t kBytes = 1 << 20;
constexpr uint64_t kNoCap = ~uint64_t{0};

int sealed() {
  std::string why;
  const int fd = os::make_shared_file(kBytes, &why);
  CHECK(fd >= 0);
  return fd;
}

int memory_file(bool allocated, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0);
  CHECK_EQ(allocated ? fallocate(fd, 0, 0, kBytes) : ftruncate(fd, kBytes), 0);
  if (seals != 0) CHECK_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
  return fd;
}

Status find(const Arenas& arenas, uint32_t id, uint64_t offset, uint64_t bytes) {
  std::shared_ptr<const Mapping> mapping;
  return arenas.find(id, offset, bytes, &mapping);
}

bool open_file(int fd) { return fcntl(fd, F_GETFD) >= 0; }

}  // namespace

TEST(an_arena_is_the_clients_own_memory) {
  Arenas arenas;
  const int file = sealed();
  std::byte* const mine = os::map_shared(file, kBytes);
  CHECK_OK(arenas.add(7, kBytes, dup(file), kNoCap));
  CHECK_OK(arenas.add(7, kBytes, dup(file), kNoCap));  // the other lane brings it, too
  std::shared_ptr<const Mapping> theirs;
  CHECK_OK(arenas.find(7, 64, kBytes - 64, &theirs));
  std::memset(mine, 5, kBytes);
  CHECK(theirs->data()[kBytes - 1] == std::byte{5});
  theirs->data()[64] = std::byte{9};
  CHECK(mine[64] == std::byte{9});
  arenas.drop(7);
  CHECK(theirs->data()[64] == std::byte{9});  // for as long as somebody uses it
  CHECK_CODE(find(arenas, 7, 0, 1), Code::kInvalidArgument);
  os::unmap_shared(mine, kBytes);
  close(file);
}

TEST(places_outside_an_arena_are_refused) {
  Arenas arenas;
  CHECK_OK(arenas.add(1, kBytes, sealed(), kNoCap));
  CHECK_OK(find(arenas, 1, 0, kBytes));
  CHECK_OK(find(arenas, 1, kBytes, 0));
  for (const auto& [offset, bytes] : std::initializer_list<std::pair<uint64_t, uint64_t>>{
           {0, kBytes + 1}, {8, kBytes}, {kBytes + 8, 0}, {~uint64_t{7}, 16}, {16, ~uint64_t{0}}, {3, 8}}) {
    CHECK_CODE(find(arenas, 1, offset, bytes), Code::kInvalidArgument);
  }
  CHECK_CODE(find(arenas, 2, 0, 8), Code::kInvalidArgument);
}

TEST(a_file_that_could_change_or_is_not_there_is_refused_and_closed) {
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  int pipes[2];
  CHECK_EQ(pipe(pipes), 0);
  close(pipes[1]);
  struct Wrong {
    int fd;
    uint64_t bytes;
    const char* why;
  };
  for (const Wrong& w :
       std::initializer_list<Wrong>{{memory_file(true, 0), kBytes, "not sealed"},
                                    {memory_file(true, F_SEAL_GROW | F_SEAL_SEAL), kBytes, "not sealed"},
                                    {memory_file(true, seals & ~F_SEAL_SEAL), kBytes, "not sealed"},
                                    {memory_file(false, seals), kBytes, "holes"},
                                    {memory_file(true, seals | F_SEAL_WRITE), kBytes, "written"},
                                    {sealed(), kBytes / 2, "expected"},
                                    {sealed(), 2 * kBytes, "expected"},
                                    {sealed(), kBytes + 1, "pages"},
                                    {open("/proc/self/exe", O_RDONLY | O_CLOEXEC), kBytes, "in memory"},
                                    {pipes[0], kBytes, "in memory"}}) {
    Arenas arenas;
    const Status status = arenas.add(1, w.bytes, w.fd, kNoCap);
    CHECK_CODE(status, Code::kInvalidArgument);
    CHECK(status.message().find(w.why) != std::string::npos);
    CHECK(!open_file(w.fd));
    CHECK_CODE(find(arenas, 1, 0, 8), Code::kInvalidArgument);  // and requests are told the same
  }
}

TEST(a_session_shares_no_more_than_it_may) {
  Arenas arenas;
  CHECK_OK(arenas.add(1, kBytes, sealed(), 2 * kBytes));
  CHECK_OK(arenas.add(2, kBytes, sealed(), 2 * kBytes));
  CHECK_CODE(arenas.add(3, kBytes, sealed(), 2 * kBytes), Code::kResourceExhausted);
  CHECK_CODE(find(arenas, 3, 0, 8), Code::kResourceExhausted);
  arenas.drop(1);
  CHECK_OK(arenas.add(3, kBytes, sealed(), 2 * kBytes));
  CHECK_OK(arenas.add(2, kBytes, sealed(), 2 * kBytes));  // another file in the place of the one before
  arenas.clear();
  CHECK_OK(arenas.add(4, kBytes, sealed(), kBytes));
}

}  // namespace windlass::arenas_test
