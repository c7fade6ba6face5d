// How kernels are launched: with a function, which every compiler knows, not with <<< >>>.
#pragma once

#include <cuda_runtime.h>

#include <initializer_list>

#include "cuda_call.hpp"

namespace collectives::device {

struct Grid {
  int blocks, threads;
  // The kernel may be started before the one on the stream before it has ended, and waits for that
  // itself (wait_for_previous). It starts once all blocks of the other have ended or called
  // let_next_start().
  bool early = false;
  int shared_bytes = 0;  // of shared memory, beside what the kernel declares
};

// `stream` is a cudaStream_t; the result is a cudaError_t.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), Grid grid, void* stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.dynamicSmemBytes = static_cast<std::size_t>(grid.shared_bytes);
  cudaLaunchAttribute early = {};
  if (grid.early) {
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // the next call must not see it again
  return error;
}

// Loads kernels, and says how many blocks of each one multiprocessor holds at a time at least.
template <class Call>
int residency_of(std::initializer_list<void (*)(Call)> kernels, int* blocks,
                 int threads = kThreads) {
  *blocks = 1 << 10;
  for (const auto kernel : kernels) {
    int own = 0;
    const int error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&own, kernel, threads, 0);
    if (error != cudaSuccess) return error;
    *blocks = own < *blocks ? own : *blocks;
  }
  return cudaSuccess;
}

}  // namespace collectives::device
