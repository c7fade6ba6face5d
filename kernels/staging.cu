// Holds a stream back until the host has done what a staged call is: csrc/staging.hpp.
#include "cuda_staging.hpp"
#include "launch.cuh"
#include "primitives.cuh"

namespace collectives::device {
namespace {

// Polls of memory behind PCIe, of about a microsecond each, between two looks at the clock.
constexpr int kPollsOfHost = 64;

__global__ void staging_wait(StagingControl* control, u64 number, u64 patience_ns) {
  u64 beat = load_relaxed(&control->beat), since = clock_ns();
  for (;;) {
    for (int i = 0; i < kPollsOfHost; ++i) {
      // What the host had copied to the device before it wrote this is what the stream goes on to
      // read.
      if (load_acquire(&control->ended) >= number) return;
      poll_again();
    }
    const u64 now = clock_ns(), seen = load_relaxed(&control->beat);
    if (seen != beat) {
      beat = seen;
      since = now;
    } else if (now - since > patience_ns) {
      store_release(&control->gave_up, number);
      return;
    }
  }
}

}  // namespace

int launch_staging_wait(StagingControl* control, u64 number, u64 patience_ns, void* stream) {
  return launch(staging_wait, {1, 1}, stream, control, number, patience_ns);
}

int load_staging_wait() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, staging_wait);
}

}  // namespace collectives::device
