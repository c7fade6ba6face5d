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

std::vector<Stamp> time_loop(int warmup, int iterations, const TouchedInput& touched,
                             const std::function<void()>& meet, const std::function<void()>& body) {
  std::vector<Stamp> stamps(iterations);
  for (int i = -warmup; i < iterations; ++i) {
    touch(touched);
    meet();
    const std::uint64_t begin = now_ns();
    body();
    const std::uint64_t end = now_ns();
    if (i >= 0) stamps[i] = {begin, end};
  }
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
