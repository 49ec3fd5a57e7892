#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>

#include "rule/kernels_test.h"

namespace windlass::copy_test {
namespace {

using test::same_bits;

std::vector<unsigned char> noise(test::Random& random, size_t bytes) {
  std::vector<unsigned char> v(bytes);
  for (unsigned char& x : v) x = static_cast<unsigned char>(random.next());
  return v;
}

}  // namespace

TEST(a_streamed_copy_is_a_copy_at_any_length_and_place) {
  test::Random random(test::seed());
  const std::vector<unsigned char> in = noise(random, 5000), before = noise(random, 5000);
  for (const Kernels* k : every_kernels()) {
    for (int i = 0; i < 3000; ++i) {
      const size_t bytes = i < 400 ? static_cast<size_t>(i) : random.below(4800);
      const size_t from = random.below(130), to = random.below(130);
      std::vector<unsigned char> out = before, want = before;
      k->stream(out.data() + to, in.data() + from, bytes);
      k->fence();
      std::memcpy(want.data() + to, in.data() + from, bytes);
      CHECK(same_bits(out, want));
    }
  }
}

TEST(rows_are_copied_wherever_they_lie_and_nothing_else_is) {
  test::Random random(test::seed());
  for (const uint32_t dim : {1, 3, 15, 16, 17, 32, 33, 64, 128, 200}) {
    for (const size_t n : {0, 1, 15, 16, 17, 100}) {
      for (const size_t shift : {0, 1, 4, 8}) {  // numbers; the rows of an output start on a line, or nowhere
        const std::vector<float> in = test::any_numbers(random, 120 * dim + 200);
        std::vector<const float*> from;
        std::vector<size_t> to;
        for (size_t r = 0; r < n; ++r) {
          from.push_back(in.data() + random.below(120 * dim));
          to.push_back(r * (dim + shift));
        }
        std::shuffle(to.begin(), to.end(), std::minstd_rand(static_cast<unsigned>(random.next())));
        const size_t size = n * (dim + shift) + 64;
        std::vector<float> want(size, 7.0f);
        for (size_t r = 0; r < n; ++r) std::memcpy(&want[16 + to[r]], from[r], dim * sizeof(float));
        for (const Kernels* k : every_kernels()) {
          for (const bool past_cache : {false, true}) {
            std::unique_ptr<float[], void (*)(void*)> out(
                static_cast<float*>(std::aligned_alloc(64, (size * 4 + 63) / 64 * 64)), std::free);
            std::fill_n(out.get(), size, 7.0f);
            std::vector<float*> targets;
            for (const size_t at : to) targets.push_back(out.get() + 16 + at);
            k->copy_rows(from.data(), targets.data(), n, dim, past_cache);
            k->fence();
            CHECK(same_bits(std::vector<float>(out.get(), out.get() + size), want));
          }
        }
      }
    }
  }
}

}  // namespace windlass::copy_test
