#include "cuda_watch.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "errors.hpp"
#include "threads.hpp"

namespace collectives::device {

ProcessWatch::ProcessWatch(std::vector<Process> processes, std::function<void(Process)> ended)
    : processes_(std::move(processes)), ended_(std::move(ended)) {
  stop_ = eventfd(0, EFD_CLOEXEC);
  if (stop_ < 0) throw Error(ErrorKind::system, "eventfd() failed");
  for (const Process& p : processes_)
    files_.push_back(static_cast<int>(syscall(SYS_pidfd_open, p.pid, 0)));
  thread_ = start_thread([this] { run(); });
}

ProcessWatch::~ProcessWatch() {
  const eventfd_t one = 1;
  eventfd_write(stop_, one);
  thread_.join();
  for (const int file : files_)
    if (file >= 0) close(file);
  close(stop_);
}

void ProcessWatch::run() {
  std::vector<pollfd> polled{{stop_, POLLIN, 0}};
  bool all = true;
  for (const int file : files_) {
    polled.push_back({file, POLLIN, 0});  // poll() passes over a negative one
    all = all && file >= 0;
  }
  for (;;) {
    const int ready = poll(polled.data(), polled.size(), all ? -1 : 500);
    if (ready < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      const bool gone = files_[i] >= 0 ? (ready > 0 && polled[i + 1].revents != 0)
                                       : kill(processes_[i].pid, 0) != 0 && errno == ESRCH;
      if (!gone) continue;
      ended_(processes_[i]);
      return;
    }
  }
}

}  // namespace collectives::device
