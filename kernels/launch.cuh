// How kernels are launched: with a function, which every compiler knows, not with <<< >>>.
#pragma once

#include <cuda_runtime.h>

namespace collectives::device {

struct Grid {
  int blocks, threads;
};

// `stream` is a cudaStream_t; the result is a cudaError_t.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), Grid grid, void* stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // the next call must not see it again
  return error;
}

}  // namespace collectives::device
