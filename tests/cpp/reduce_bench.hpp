// What reductions cost on each level: `test_reduce --bench`.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "reduce_testing.hpp"

namespace reduce_test {

inline volatile unsigned char sink;

// Seconds of this thread's processor time per call, the best of several runs: the machine may be
// shared.
inline double seconds(const std::function<void()>& body, double at_least) {
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  double best = 1e9;
  long calls = 1;
  for (int run = 0; run < 7;) {
    const double start = now();
    for (long i = 0; i < calls; ++i) body();
    const double elapsed = now() - start;
    if (elapsed < at_least) {
      calls *= 2;
      continue;
    }
    best = std::min(best, elapsed / static_cast<double>(calls));
    ++run;
  }
  return best;
}

inline void bench() {
  constexpr std::size_t kLargest = 16 << 20;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 6; ++i) {
    buffers.emplace_back(kLargest);
    std::memset(buffers.back().at(0), 0x3c, kLargest);
  }
  std::printf(
      "best of 7, processor time; GB/s: bytes read and written per second; nt: nontemporal "
      "stores\n");
  std::printf(
      "memcpy 16 MiB %.1f GB/s",
      2 * kLargest / 1e9 /
          seconds([&] { std::memcpy(buffers[0].at(0), buffers[1].at(0), kLargest); }, 0.02));
  std::printf(
      ", nontemporal %.1f GB/s\n",
      2 * kLargest / 1e9 /
          seconds([&] { cc::copy_bytes(buffers[0].at(0), buffers[1].at(0), kLargest, true); },
                  0.02));
  std::printf("%-9s %-13s %4s %4s %9s %9s %9s %11s\n", "level", "sum of", "nsrc", "ndst", "4 KiB",
              "256 KiB", "16 MiB", "16 MiB nt");
  const std::vector<Dtype> dtypes = {Dtype::float32,    Dtype::float64, Dtype::bfloat16,
                                     Dtype::float16,    Dtype::int32,   Dtype::float8_e4m3,
                                     Dtype::float8_e5m2};
  auto all = levels();
  std::reverse(all.begin(), all.end());
  for (const cc::Kernels* level : all) {
    for (Dtype dtype : dtypes) {
      for (const auto& [nsrc, ndst] : {std::pair{2, 1}, std::pair{2, 2}, std::pair{4, 1}}) {
        const cc::ReduceFn fn = level->reduce[static_cast<int>(dtype)][static_cast<int>(Op::sum)];
        std::printf("%-9s %-13s %4d %4d", level->level, cc::name_of(dtype).data(), nsrc, ndst);
        const void* srcs[4];
        void* dsts[2];
        for (int s = 0; s < 4; ++s) srcs[s] = buffers[s].at(0);
        for (int d = 0; d < 2; ++d) dsts[d] = buffers[4 + d].at(0);
        for (std::size_t bytes :
             {std::size_t(4) << 10, std::size_t(256) << 10, kLargest, kLargest + 1}) {
          cc::Finish finish;
          finish.nontemporal = bytes > kLargest;
          bytes &= ~std::size_t(1);
          const int sources = nsrc, destinations = ndst;
          const double s = seconds(
              [&] { fn(dsts, destinations, srcs, sources, bytes / cc::size_of(dtype), finish); },
              0.002);
          std::printf(" %9.1f", static_cast<double>((nsrc + ndst) * bytes) / 1e9 / s);
        }
        std::printf("\n");
      }
    }
  }
  std::printf("nanoseconds a call, float32 sum, nsrc 2, ndst 1\n");
  for (const cc::Kernels* level : all) {
    const cc::ReduceFn fn =
        level->reduce[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)];
    std::printf("%-9s", level->level);
    for (std::size_t count : {1, 4, 7, 16, 17, 64, 100, 256}) {
      const void* srcs[] = {buffers[0].at(0), buffers[1].at(0)};
      void* dst = buffers[4].at(0);
      const cc::Finish finish;
      const double s = seconds([&] { fn(&dst, 1, srcs, 2, count, finish); }, 0.002);
      std::printf("  %zu: %.1f", count, s * 1e9);
    }
    std::printf("\n");
  }
  sink = *buffers[4].at(0);
}

}  // namespace reduce_test
