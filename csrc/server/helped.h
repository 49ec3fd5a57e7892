// Helped: something that several threads can work on at once.
#pragma once

#include "base/ref.h"

namespace windlass {

class Helped : public Counted {
 public:
  // Works on it until there is nothing left to start.
  virtual void help() = 0;
};

}  // namespace windlass
