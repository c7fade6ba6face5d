#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks

#include "fibers.hpp"

#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace emulated {
namespace {

constexpr std::size_t kStack = 256 << 10;  // address space; pages come when they are used
constexpr int kWarp = 32;
// Turns of a whole block in which fibers polled and none ended, before it gives the core away, and
// before it sleeps.
constexpr int kFruitlessYield = 1, kFruitlessSleep = 64;

struct Meeting {
  unsigned arrived = 0, generation = 0;
  bool any = false, result = false;
};
// Fibers of a warp meet in groups that are told apart by their lowest lane.
struct WarpMeeting {
  unsigned arrived = 0, generation = 0;
  unsigned long long brought[2][kWarp] = {};
};

struct Fiber {
  Here here{};
  jmp_buf context;
  bool started = false, done = false, polls = false;
  const unsigned* waits_for = nullptr;  // a generation
  unsigned generation = 0;
};

// What an OS thread needs to run blocks, kept from block to block.
class Runner {
 public:
  ~Runner() {
    for (void* stack : stacks_) munmap(stack, kStack);
  }

  void run(const Block& block, const std::function<void()>& kernel) {
    const unsigned n = block.threads.x;
    while (stacks_.size() < n) {
      void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) abort();
      stacks_.push_back(stack);
    }
    fibers_ = std::vector<Fiber>(n);
    warps_ = std::vector<WarpMeeting>(n);
    meeting_ = Meeting{};
    named_ = {};
    kernel_ = &kernel;
    live_ = n;
    for (unsigned i = 0; i < n; ++i) fibers_[i].here = {Dim3(i, 0, 0), &block};
    int fruitless = 0;
    while (live_ != 0) {
      // The order of turns changes, so that what depends on it shows.
      random_ = random_ * 6364136223846793005u + 1442695040888963407u;
      const unsigned first = static_cast<unsigned>(random_ >> 33) % n;
      const bool backwards = (random_ >> 32 & 1) != 0;
      bool polled = false, ended = false;
      for (unsigned k = 0; k < n; ++k) {
        Fiber& f = fibers_[(first + (backwards ? n - k : k)) % n];
        if (f.done || (f.waits_for != nullptr && *f.waits_for == f.generation)) continue;
        f.waits_for = nullptr;
        f.polls = false;
        turn(f);
        polled = polled || f.polls;
        ended = ended || f.done;
      }
      // (Threads that poll together meet between two polls.)
      fruitless = polled && !ended ? fruitless + 1 : 0;
      if (fruitless >= kFruitlessSleep) {
        const timespec pause{0, 20'000};
        nanosleep(&pause, nullptr);
      } else if (fruitless >= kFruitlessYield) {
        sched_yield();
      }
    }
  }

  const Here& here() const { return current_->here; }

  void poll() {
    current_->polls = true;
    leave();
  }

  bool sync(bool own) {
    Meeting& m = meeting_;
    m.any = m.any || own;
    ++m.arrived;
    const unsigned generation = m.generation;
    if (!complete()) wait(&m.generation, generation);
    return m.result;
  }

  void meet_at(int id, unsigned fibers, bool stays) {
    Meeting& m = named_[static_cast<std::size_t>(id)];
    const unsigned generation = m.generation;
    if (++m.arrived < fibers) {
      if (stays) wait(&m.generation, generation);
      return;
    }
    m.arrived = 0;
    ++m.generation;
  }

  WarpMeeting& meet(unsigned mask, unsigned long long own, unsigned* parity) {
    const unsigned warp = current_->here.thread.x / kWarp * kWarp;
    WarpMeeting& m = warps_[warp + static_cast<unsigned>(__builtin_ctz(mask))];
    const unsigned generation = m.generation;
    *parity = generation & 1;
    m.brought[*parity][current_->here.thread.x % kWarp] = own;
    if (++m.arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
      m.arrived = 0;
      ++m.generation;
    } else {
      wait(&m.generation, generation);
    }
    return m;
  }

 private:
  // True if all fibers that still run have arrived. (Those that ended count as arrived.)
  bool complete() {
    Meeting& m = meeting_;
    if (m.arrived == 0 || m.arrived < live_) return false;
    m.result = m.any;
    m.any = false;
    m.arrived = 0;
    ++m.generation;
    return true;
  }

  void wait(const unsigned* what, unsigned generation) {
    current_->waits_for = what;
    current_->generation = generation;
    leave();
  }

  void turn(Fiber& f) {
    current_ = &f;
    if (_setjmp(scheduler_) != 0) return;
    if (f.started) _longjmp(f.context, 1);
    f.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks_[f.here.thread.x];
    start.uc_stack.ss_size = kStack;
    start.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&start, reinterpret_cast<void (*)()>(&Runner::enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
    setcontext(&start);
  }

  void leave() {
    if (_setjmp(current_->context) == 0) _longjmp(scheduler_, 1);
  }

  static void enter(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Runner*>(static_cast<uintptr_t>(high) << 32 | low);
    (*self->kernel_)();
    self->current_->done = true;
    --self->live_;
    self->complete();
    _longjmp(self->scheduler_, 1);
  }

  std::vector<void*> stacks_;
  std::vector<Fiber> fibers_;
  std::vector<WarpMeeting> warps_;
  Meeting meeting_;
  std::array<Meeting, 16> named_;
  Fiber* current_ = nullptr;
  const std::function<void()>* kernel_ = nullptr;
  unsigned live_ = 0;
  jmp_buf scheduler_;
  uint64_t random_ = reinterpret_cast<uintptr_t>(this);
};

Runner& runner() {
  static thread_local Runner one;
  return one;
}

}  // namespace

const Here& here() { return runner().here(); }
void poll() { runner().poll(); }
bool sync_block(bool own) { return runner().sync(own); }
void meet_at(int id, int fibers, bool stays) {
  runner().meet_at(id, static_cast<unsigned>(fibers), stays);
}
unsigned long long warp_exchange(unsigned mask, unsigned long long own, int lane) {
  unsigned parity = 0;
  const WarpMeeting& m = runner().meet(mask, own, &parity);
  return m.brought[parity][lane];
}
unsigned warp_ballot(unsigned mask, bool own) {
  unsigned parity = 0;
  const WarpMeeting& m = runner().meet(mask, own, &parity);
  unsigned votes = 0;
  for (int lane = 0; lane < kWarp; ++lane)
    if ((mask >> lane & 1) != 0 && m.brought[parity][lane] != 0) votes |= 1u << lane;
  return votes;
}

void run_block(const Block& block, const std::function<void()>& kernel) {
  runner().run(block, kernel);
}

}  // namespace emulated
