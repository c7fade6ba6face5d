#include "wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace collectives {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr microseconds kYieldFor{2000};  // then sleep: waits this long are no longer about latency
constexpr int kCrowdedYields =
    2;  // then sleep: 4 ranks on 2 cores, 1 MiB: 300 us, with yields alone 425
constexpr microseconds kCheckEvery{1000};
constexpr microseconds kFirstNap{50};
constexpr microseconds kMaxNap{1000};
constexpr microseconds kPolledYieldFor{20000};  // a message of 1 MiB at 1 Gbit/s takes 8 ms
constexpr microseconds kMaxPolledNap{100};

}  // namespace

void Doorbell::wake() {
  rings.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAKE, 1 << 30, nullptr,
          nullptr, 0);
}

void Doorbell::sleep(std::uint32_t seen, microseconds nap) {
  timespec limit{0, static_cast<long>(nap.count()) * 1000};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAIT, seen, &limit, nullptr,
          0);
}

void Waiter::slow(bool (*ready)(void*), void* context, const Where& where) {
  struct Scope {
    Watch& watch;
    explicit Scope(Watch& w) : watch(w) { watch.enter_slow(); }
    ~Scope() { watch.leave_slow(); }
  } scope(watch_);

  // On a crowded node most waits end within two yields: those never ask for the time.
  const bool crowded = manner_.crowded && !manner_.polled;
  const microseconds yield_for = manner_.polled ? kPolledYieldFor : kYieldFor;
  const microseconds max_nap = manner_.polled ? kMaxPolledNap : kMaxNap;
  Wait wait{crowded ? steady_clock::time_point{} : steady_clock::now()};
  auto next_check = wait.since + kCheckEvery;
  for (int turn = 0;; ++turn) {
    if (ready(context)) return;
    if (crowded) {
      if (turn >= kCrowdedYields) break;
    } else if ((turn & 7) == 7) {  // the clock is read every few yields only: with a free core they
                                   // return at once
      const auto now = steady_clock::now();
      if (now >= next_check) {
        watch_.check(where, wait);
        next_check = now + kCheckEvery;
      }
      if (now - wait.since >= yield_for) break;
    }
    sched_yield();
  }
  microseconds nap = crowded ? kMaxNap : kFirstNap;
  if (crowded) {
    wait.since = steady_clock::now();
    next_check = wait.since + kCheckEvery;
  }
  for (;;) {
    const std::uint32_t seen = doorbell_.rings.load(std::memory_order_acquire);
    const bool alone = doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst) == 0;
    doorbell_.waits_for.store(alone ? where.local : -1, std::memory_order_relaxed);
    // The announcement is visible before the condition is looked at for the last time (see
    // Doorbell).
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool done = ready(context);
    if (!done) doorbell_.sleep(seen, nap);
    doorbell_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (done || ready(context)) return;
    nap = std::min(nap * 2, max_nap);
    const auto now = steady_clock::now();
    if (now >= next_check) {
      watch_.check(where, wait);
      next_check = now + kCheckEvery;
    }
  }
}

}  // namespace collectives
