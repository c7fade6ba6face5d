// What the host half and the kernel of staged calls both know.
#pragma once

#include "cuda_call.hpp"

namespace collectives::device {

// In pinned host memory. Calls are numbered from 1, and end in this order.
struct StagingControl {
  u64 ended;    // written by the host: calls that have ended, well or not
  u64 beat;     // written by the host now and then, while it works on a call
  u64 gave_up;  // written by a kernel whose host did not stir: the number of its call
};

// One thread that waits until `ended` reaches `number`; leaves without it when `beat` has not
// changed for `patience_ns`. `stream` is a cudaStream_t; the result is a cudaError_t.
int launch_staging_wait(StagingControl* control, u64 number, u64 patience_ns, void* stream);
// Loads the kernel.
int load_staging_wait();

}  // namespace collectives::device
