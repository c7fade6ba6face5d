#include "bench.hpp"

#include <sched.h>
#include <time.h>

#include <algorithm>

namespace collectives {
namespace {

std::uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000u + static_cast<std::uint64_t>(t.tv_nsec);
}

// Reads and writes back every cache line, like the computation that makes the next input.
void touch(const TouchedInput& input) {
  volatile std::byte* p = input.data;
  for (std::size_t i = 0; i < input.bytes; i += 64) p[i] = p[i];
}

}  // namespace

BenchClock::BenchClock(Communicator& comm) {
#if defined(__x86_64__)
  const auto& region = comm.config().region;
  if (!region) return;  // ranks on several hosts: only the system clock's seconds agree
  auto& rate = region->tick_rate();
  std::uint64_t known = rate.load(std::memory_order_acquire);
  if (known == 0) {
    const std::uint64_t ns = now_ns(), ticks = __builtin_ia32_rdtsc();
    while (now_ns() - ns < 20000000) cpu_relax();
    const double seconds = static_cast<double>(now_ns() - ns) * 1e-9;
    const auto measured =
        static_cast<std::uint64_t>(static_cast<double>(__builtin_ia32_rdtsc() - ticks) / seconds);
    rate.compare_exchange_strong(known, measured);
    known = rate.load();
  }
  counter_ = true;
  scale_ = 1e9 / static_cast<double>(known);
#else
  (void)comm;
#endif
}

std::uint64_t BenchClock::ticks() const {
#if defined(__x86_64__)
  if (counter_) {
    unsigned cpu;
    return __builtin_ia32_rdtscp(&cpu);  // waits for earlier instructions
  }
#endif
  return now_ns();
}

std::uint64_t BenchClock::nanoseconds(std::uint64_t ticks) const {
  return counter_ ? static_cast<std::uint64_t>(static_cast<double>(ticks) * scale_) : ticks;
}

std::vector<Stamp> time_loop(const BenchClock& clock, int warmup, int iterations,
                             const TouchedInput& touched, const std::function<void()>& meet,
                             const std::function<void()>& body) {
  std::vector<Stamp> stamps(iterations);
  for (int i = -warmup; i < iterations; ++i) {
    touch(touched);
    meet();
    const std::uint64_t begin = clock.ticks();
    body();
    const std::uint64_t end = clock.ticks();
    if (i >= 0) stamps[i] = {begin, end};
  }
  for (Stamp& s : stamps) s = {clock.nanoseconds(s.begin_ns), clock.nanoseconds(s.end_ns)};
  return stamps;
}

double cache_line_exchange(Communicator& comm, int rounds) {
  const auto& region = comm.config().region;
  if (!region || region->shape().nranks < 2) return 0;
  const int me = comm.config().local_of[comm.rank()];
  if (me > 1) return 0;
  // Rank 0 and 1 of the region write their own counter and wait for the other's.
  constexpr int kBatch = 50;
  std::vector<double> samples;
  auto& mine = region->rank(me).bench.value;
  auto& his = region->rank(1 - me).bench.value;
  std::uint64_t epoch = mine.load();
  for (int i = 0; i < rounds; ++i) {
    const std::uint64_t begin = now_ns();
    for (int k = 0; k < kBatch; ++k) {
      mine.store(++epoch, std::memory_order_release);
      for (int spin = 0; his.load(std::memory_order_acquire) < epoch; ++spin)
        if (spin > 10000) sched_yield();
    }
    samples.push_back(static_cast<double>(now_ns() - begin) * 1e-9 / kBatch);
  }
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

}  // namespace collectives
