// CrewTask: something that several threads can work on at once.
#pragma once

namespace windlass {

class CrewTask {
 public:
  // Works on the task until there is nothing left to start. From any thread.
  virtual void help() = 0;

 protected:
  ~CrewTask() = default;
};

}  // namespace windlass
