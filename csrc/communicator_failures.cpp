// How a communicator notices trouble while it waits, and how ranks tell each other.
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "communicator.hpp"
#include "errors.hpp"

namespace collectives {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The abort word: 1 + the local rank that gave up, the kind of its error, and a mark while its
// reason is being written.
constexpr std::uint32_t kUnfinished = 0x80000000u;
constexpr int kKindShift = 16;

constexpr milliseconds kPollPeersEvery{20};

// Waits nest in lengthy calls: the outermost gives up the GIL and takes it back.
thread_local void* slow_token = nullptr;
thread_local int slow_depth = 0;

// Where pidfd_open is forbidden, or there are no descriptors left: gone, or a zombie, which its
// parent has not waited for.
bool has_ended(int process) {
  if (kill(process, 0) != 0) return errno == ESRCH;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto state = text.rfind(") ");
  return state != std::string::npos && (text[state + 2] == 'Z' || text[state + 2] == 'X');
}

}  // namespace

void Communicator::abort(const std::string& reason) {
  if (birth_.in_child()) check_open();
  give_up("aborted: " + reason);
  tell_peers(ErrorKind::aborted, reason);
}

// Tells all ranks, once, that this one leaves the common path, and why: their waits end at once
// with the same kind of error.
void Communicator::tell_peers(ErrorKind kind, const std::string& text) noexcept {
  const std::string whole = "rank " + std::to_string(config_.rank) + " gave up: " + text;
  if (config_.region) {
    const std::uint32_t word =
        (1 + config_.local_of[config_.rank]) | static_cast<std::uint32_t>(kind) << kKindShift;
    std::uint32_t nobody = 0;
    auto& shared = config_.region->abort_word();
    if (shared.compare_exchange_strong(nobody, word | kUnfinished)) {
      std::strncpy(config_.region->abort_reason(), whole.c_str(), Region::kAbortReason - 1);
      shared.store(word, std::memory_order_release);  // publishes the reason
    }
    for (int q = 0; q < config_.region->shape().nranks; ++q)
      config_.region->rank(q).doorbell.wake();
  }
  if (config_.mpi) config_.mpi->poison(whole);
}

// The ranks are no longer in the same state: later calls raise.
void Communicator::give_up(const std::string& reason) {
  std::lock_guard lock(reason_mutex_);
  if (broken_) return;
  broken_reason_ = reason;
  broken_ = true;
}

// A call ended half-way: the ranks are out of step.
void Communicator::leave_path(ErrorKind kind, const std::string& text) {
  if (broken_) return;  // told already
  give_up(text);
  tell_peers(kind, text);
}

void Communicator::fail(ErrorKind kind, const std::string& text) {
  give_up(text);
  tell_peers(kind, text);
  throw Error(kind, text);
}

std::string Communicator::broken_reason() const {
  std::lock_guard lock(reason_mutex_);
  return broken_reason_;
}

// True if a rank of the region has given up.
bool Communicator::told_to_stop() const {
  if (!config_.region) return false;
  const std::uint32_t word = config_.region->abort_word().load(std::memory_order_acquire);
  return word != 0 && (word & kUnfinished) == 0;
}

void Communicator::raise_told(const std::string& doing) {
  const std::uint32_t word = config_.region->abort_word().load(std::memory_order_acquire);
  const std::string text = config_.region->abort_reason() + (" (" + doing + ")");
  give_up(text);
  // A death is a death for everybody; other reasons are the other rank's own.
  const auto kind = static_cast<ErrorKind>(word >> kKindShift);
  throw Error(kind == ErrorKind::peer_died ? kind : ErrorKind::aborted, text);
}

void Communicator::enter_slow() {
  if (slow_depth++ == 0 && on_enter_slow) slow_token = on_enter_slow();
}

void Communicator::leave_slow() {
  if (--slow_depth != 0) return;
  if (on_leave_slow) on_leave_slow(slow_token);
  slow_token = nullptr;
}

void Communicator::check(const Where& where, steady_clock::time_point since) {
  if (gate_) gate_->look_around();
  check_peers(where, since);
}

void Communicator::check_peers(const Where& where, steady_clock::time_point since) {
  const auto now = steady_clock::now();
  const auto place = [&] {
    std::string s = "rank " + std::to_string(config_.rank) + " waits for " + where.phase;
    if (where.peer >= 0) s += " of rank " + std::to_string(where.peer);
    if (where.channel >= 0) s += ", channel " + std::to_string(where.channel);
    if (where.step >= 0) s += ", step " + std::to_string(where.step);
    if (where.round >= 0) s += " (round " + std::to_string(where.round) + ")";
    if (where.expected != 0)
      s += ", epoch expected " + std::to_string(where.expected) + ", seen " +
           std::to_string(where.seen);
    return s;
  };
  if (told_to_stop()) raise_told(place());
  if (broken_) throw Error(ErrorKind::aborted, broken_reason() + " (" + place() + ")");
  if (config_.mpi) {
    std::string text;
    int peer = -1;
    if (config_.mpi->poisoned(&text, &peer)) fail(ErrorKind::aborted, text + " (" + place() + ")");
  }
  const double waited = duration<double>(now - since).count();
  if (waited > config_.timeout_s) {
    const std::string text =
        "gave up after " + std::to_string(waited).substr(0, 6) + " s: " + place() +
        ". Raise the limit with timeout= or COLLECTIVES_TIMEOUT if the peer is only slow";
    fail(ErrorKind::deadline, text);
  }
  std::unique_lock lock(poll_mutex_);
  if (now - last_poll_ < kPollPeersEvery) return;
  last_poll_ = now;
  lock.unlock();
  if (on_tick) on_tick(slow_token);
  lock.lock();
  if (!config_.region) return;
  const int n = config_.region->shape().nranks, me = config_.local_of[config_.rank];
  if (pidfds_.empty() && !config_.threads) {
    pidfds_.assign(n, -1);
    for (int q = 0; q < n; ++q) {
      const int process = config_.region->rank(q).process.load(std::memory_order_acquire);
      if (q != me && process > 0)
        pidfds_[q] = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    }
  }
  for (int q = 0; q < n; ++q) {
    if (q == me) continue;
    RankArea& his = config_.region->rank(q);
    const auto state = static_cast<RankState>(his.state.load(std::memory_order_acquire));
    const std::string name = "rank " + std::to_string(numbers_[q]);
    if (state == RankState::closed) {
      // What it did before it closed is visible by now; only the second look can conclude that
      // nothing more will come.
      if (where.peer == numbers_[q] && ++closed_seen_ > 2)
        fail(ErrorKind::closed, name + " has closed the communicator while " + place());
      continue;
    }
    bool dead = state == RankState::dead;
    if (!dead && !config_.threads && q < static_cast<int>(pidfds_.size())) {
      const int process = his.process.load(std::memory_order_relaxed);
      if (pidfds_[q] >= 0) {
        pollfd p{pidfds_[q], POLLIN, 0};
        dead = poll(&p, 1, 0) == 1;
      } else if (process > 0) {
        dead = has_ended(process);
      }
    }
    if (dead) {
      his.state.store(static_cast<std::uint32_t>(RankState::dead), std::memory_order_release);
      fail(ErrorKind::peer_died,
           name + (config_.threads ? "" : " (process " + std::to_string(his.process.load()) + ")") +
               " died while " + place());
    }
  }
}

}  // namespace collectives
