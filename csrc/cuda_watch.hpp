// Watches the processes of the other ranks, so that a kernel that waits for a dead one is told.
#pragma once

#include <sys/types.h>

#include <functional>
#include <thread>
#include <vector>

namespace collectives::device {

// Sleeps until one of the processes ends, and tells which rank it was; once. Processes are of this
// machine. Where the kernel has no pidfds, it looks every half second.
class ProcessWatch {
 public:
  struct Process {
    int rank;
    pid_t pid;
  };

  ProcessWatch(std::vector<Process> processes, std::function<void(Process)> ended);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

 private:
  void run();

  std::vector<Process> processes_;
  std::function<void(Process)> ended_;
  std::vector<int> files_;  // pidfds
  int stop_ = -1;           // an eventfd
  std::thread thread_;
};

}  // namespace collectives::device
