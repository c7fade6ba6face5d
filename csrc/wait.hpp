// Bounded waits: spin, then yield, then sleep on a futex, and look around for trouble on the way.
//
// A wait that succeeds within `spins` polls costs nothing but the polls. After that it leaves the
// fast path: it yields the core (with more ranks than cores the peer it waits for may need it),
// after 2 ms it sleeps on the rank's doorbell, and it asks the Watch about deadlines, aborts and
// dead peers at least every few milliseconds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace collectives {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A rank's doorbell in memory shared with its peers. A sleeper announces itself and whom it waits
// for; a rank that changes something rings those who wait for it.
//
// Whether the change or the announcement came first is settled by a fence on both sides, but only
// where ranks sleep all the time (more ranks than CPUs): elsewhere the fence would cost every call
// 8 ns for sleeps that begin after 2 ms. Without it a ring can be missed, so every sleep is bounded
// (kMaxNap): a miss costs a nap, not a hang.
struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::int32_t> waits_for{-1};  // index of a rank in the region, -1: any

  void ring(int from) {
    if (sleepers.load(std::memory_order_relaxed) == 0) return;
    const int who = waits_for.load(std::memory_order_relaxed);
    if (who < 0 || who == from) wake();
  }
  void wake();
  // Sleeps until rung, relative to a `rings` value read before the condition was last checked, or
  // until `nap` is over.
  void sleep(std::uint32_t seen, std::chrono::microseconds nap);
};

// What a wait is for, for error messages and for the flight recorder. Plain data: making one costs
// a few stores.
struct Where {
  const char* phase = "";  // "arrival", "slot", "message", ...
  int peer = -1;
  int local = -1;  // the peer's index in the region, where only it can end the wait
  int channel = -1;
  int step = -1;
  int round = -1;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
};

// One wait, so far.
struct Wait {
  std::chrono::steady_clock::time_point since;
  int closed_seen = 0;  // looks that found the peer's communicator closed
};

// Looks around while a rank waits. check() throws if the wait must end: deadline, abort, death,
// mismatch.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void check(const Where& where, Wait& wait) = 0;
  // Called when a wait leaves and re-enters the fast path (the bindings give up and take back the
  // GIL there).
  virtual void enter_slow() {}
  virtual void leave_slow() {}
};

class Waiter {
 public:
  struct Manner {
    int spins = 2000;      // polls before the fast path is left
    bool crowded = false;  // there are more ranks than CPUs, so a wait yields twice and sleeps
    // What is waited for may need these polls to come about, and rings no doorbell: a wait yields
    // for longer, and sleeps little at a time.
    bool polled = false;
  };
  Waiter(Watch& watch, Doorbell& doorbell, const Manner& manner)
      : watch_(watch), doorbell_(doorbell), manner_(manner) {}

  // Polls `ready` until it returns true; `where()` is called when the fast path is left.
  template <class Ready, class Describe>
  void until(Ready&& ready, Describe&& where) {
    for (int i = 0; i < manner_.spins; ++i) {
      if (ready()) return;
      if (i >= kHotSpins) cpu_relax();
    }
    if (ready()) return;
    slow(&call<Ready>, &ready, where());
  }

 private:
  // Polls without a pause first: a pause takes about 45 ns on recent x86, as long as a cache line
  // takes to cross.
  static constexpr int kHotSpins = 32;

  template <class Ready>
  static bool call(void* ready) {
    return (*static_cast<std::remove_reference_t<Ready>*>(ready))();
  }
  void slow(bool (*ready)(void*), void* context, const Where& where);

  Watch& watch_;
  Doorbell& doorbell_;
  Manner manner_;
};

}  // namespace collectives
