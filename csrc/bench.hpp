// Timed loops in C++, so that libraries are compared without the cost of calling them from Python.
//
// Each iteration rewrites the input, meets the other ranks in a barrier that is not part of the
// time, and takes the clock before and after the call. Ranks of one host share a clock
// (CLOCK_MONOTONIC): the caller takes, per iteration, the latest end minus the latest start over
// the ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "communicator.hpp"

namespace collectives {

struct Stamp {
  std::uint64_t begin_ns = 0, end_ns = 0;
};

struct TouchedInput {
  std::byte* data =
      nullptr;  // rewritten with the bytes it has: cached lines become this core's own
  std::size_t bytes = 0;
};

// Reads a clock that all ranks of a region share, in nanoseconds. On x86 it is the time stamp
// counter, whose read costs a third of a system clock's: a small all_reduce takes only a few times
// as long.
class BenchClock {
 public:
  explicit BenchClock(Communicator& comm);
  std::uint64_t ticks() const;
  std::uint64_t nanoseconds(std::uint64_t ticks) const;

 private:
  bool counter_ = false;
  double scale_ = 1;
};

// `meet` is a barrier over the ranks that take part; `body` the call.
std::vector<Stamp> time_loop(const BenchClock& clock, int warmup, int iterations,
                             const TouchedInput& touched, const std::function<void()>& meet,
                             const std::function<void()>& body);

// Median time, in seconds, in which two ranks of a region exchange a cache line; 0 with fewer than
// two. Collective.
double cache_line_exchange(Communicator& comm, int rounds);

}  // namespace collectives
