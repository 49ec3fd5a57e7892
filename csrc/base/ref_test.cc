#include "base/ref.h"

#include "base/test.h"

namespace windlass::ref_test {
namespace {

int alive = 0;

struct Thing : Counted {
  Thing() { ++alive; }
  ~Thing() override { --alive; }
};
struct Special final : Thing {};

}  // namespace

TEST(a_counted_object_lives_as_long_as_its_references) {
  {
    Ref<Thing> a(new Thing), none;
    CHECK(a && !none);
    Ref<Thing> b = a, c = std::move(a);
    CHECK(!a && b.get() == c.get());
    b = none;
    CHECK_EQ(alive, 1);
    c = c;
    CHECK_EQ(alive, 1);
    c = Ref<Thing>();
    CHECK_EQ(alive, 0);
    const Ref<Special> special(new Special);
    const Ref<Thing> base = special;
    CHECK_EQ(alive, 1);
  }
  CHECK_EQ(alive, 0);
}

}  // namespace windlass::ref_test
