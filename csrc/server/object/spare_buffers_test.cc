#include "server/object/spare_buffers.h"

#include "base/test.h"

namespace windlass::spare_buffers_test {
namespace {

TEST(memory_that_was_given_back_is_taken_again_if_it_fits) {
  SpareBuffers spares;
  std::vector<std::byte> one = spares.take(1 << 20);
  CHECK(one.capacity() >= 1 << 20);
  one.resize(1 << 20);
  const std::byte* const where = one.data();
  spares.give(std::move(one));
  CHECK_EQ(spares.bytes(), uint64_t{1} << 20);
  CHECK(spares.take(2 << 20).data() != where);    // it is too small
  CHECK(spares.take(700 << 10).data() != where);  // more than a quarter of it would lie idle
  CHECK(spares.take(1000 << 10).data() == where);
  CHECK_EQ(spares.bytes(), uint64_t{0});
}

TEST(small_memory_and_memory_beyond_the_limit_is_not_kept) {
  SpareBuffers spares;
  spares.give(spares.take(100));
  CHECK_EQ(spares.bytes(), uint64_t{0});
  for (uint64_t bytes = 0; bytes < 2 * limits::kCaptureSpareBytes; bytes += 4 << 20)
    spares.give(std::vector<std::byte>(4 << 20));
  CHECK_EQ(spares.bytes(), limits::kCaptureSpareBytes);
}

}  // namespace
}  // namespace windlass::spare_buffers_test
