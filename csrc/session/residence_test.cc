#include "session/residence.h"

#include "base/test.h"

namespace windlass::residence_test {

TEST(a_shard_serves_its_own_term_and_no_other) {
  Residence home{.term = 3};
  CHECK(home.serves(3) && !home.serves(2) && !home.serves(4));
  for (const Residence::State state :
       {Residence::kFrozen, Residence::kElsewhere, Residence::kArriving, Residence::kArrived}) {
    home.state = state;
    CHECK(!home.serves(3));
  }
}

TEST(a_copy_opens_for_its_own_term_and_then_counts) {
  Residence home{.state = Residence::kArrived, .server = 1, .term = 3, .next_term = 5};
  CHECK(!home.opens(3) && !home.opens(4) && !home.opens(6));
  CHECK(home.state == Residence::kArrived);
  CHECK(home.opens(5));
  CHECK(home.serves(5) && !home.serves(3));
  Residence half{.state = Residence::kArriving, .term = 3, .next_term = 5};
  CHECK(!half.opens(5));
}

}  // namespace windlass::residence_test
