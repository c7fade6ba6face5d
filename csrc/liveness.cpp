#include "liveness.hpp"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <string>
#include <string_view>

namespace collectives {
namespace {

// Where pidfd_open is forbidden, or there are no descriptors left: gone, or a zombie, which its
// parent has not waited for.
bool has_ended(int process) {
  if (kill(process, 0) != 0) return errno == ESRCH;
  const std::string path = "/proc/" + std::to_string(process) + "/stat";
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  char bytes[512];
  const ssize_t length = read(file, bytes, sizeof bytes);
  close(file);
  const std::string_view text(bytes, length > 0 ? static_cast<std::size_t>(length) : 0);
  const auto state = text.rfind(") ");
  return state != text.npos && state + 2 < text.size() &&
         (text[state + 2] == 'Z' || text[state + 2] == 'X');
}

}  // namespace

class Process {
 public:
  explicit Process(int pid) : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}
  ~Process() {
    if (fd_ >= 0) close(fd_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool ended() const {
    if (fd_ < 0) return has_ended(pid_);
    pollfd p{fd_, POLLIN, 0};
    return poll(&p, 1, 0) == 1;
  }

  // The handle of a process that runs, or of one that has just ended.
  static std::shared_ptr<Process> of(int pid) {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Process>> known;
    const std::lock_guard lock(mutex);
    for (auto at = known.begin(); at != known.end();)
      at = at->second.expired() ? known.erase(at) : std::next(at);
    auto process = known[pid].lock();
    // One that has ended may be an earlier process of the same number.
    if (!process || process->ended()) known[pid] = process = std::make_shared<Process>(pid);
    return process;
  }

 private:
  int pid_;
  int fd_;
};

Liveness::Liveness(std::shared_ptr<Region> region, int me, bool threads)
    : region_(std::move(region)), me_(me), threads_(threads) {}

void Liveness::watch() {
  std::call_once(once_, [this] {
    const int n = region_->shape().nranks;
    processes_.resize(n);
    if (threads_) return;
    for (int q = 0; q < n; ++q)
      if (q != me_ && process(q) > 0) processes_[q] = Process::of(process(q));
  });
}

bool Liveness::dead(int q) {
  auto& state = region_->rank(q).state;
  const auto is = [&state](RankState what) {
    return static_cast<RankState>(state.load(std::memory_order_acquire)) == what;
  };
  if (is(RankState::dead)) return true;
  if (threads_ || q == me_) return false;
  watch();
  if (!processes_[q] || !processes_[q]->ended()) return false;
  // Only now is its state its last: it may have closed between a look at that and its end.
  if (!is(RankState::closed))
    state.store(static_cast<std::uint32_t>(RankState::dead), std::memory_order_release);
  return true;
}

bool Liveness::left(int q) const {
  const auto state = region_->rank(q).state.load(std::memory_order_acquire);
  return static_cast<RankState>(state) == RankState::closed;
}

int Liveness::process(int q) const {
  return region_->rank(q).process.load(std::memory_order_acquire);
}

}  // namespace collectives
