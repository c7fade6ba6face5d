// Functions of the CUDA driver, which is found at run time: nothing links to it.
#pragma once

#include <cuda_runtime_api.h>

namespace collectives::device {

// The driver's function of a name, as it was in a version of CUDA (11040: 11.4); nullptr if it has
// none.
template <class Function>
Function of_driver(const char* name, [[maybe_unused]] unsigned version = 11040) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
#elif CUDART_VERSION >= 12000
  cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#else
  if (cudaGetDriverEntryPoint(name, &found, cudaEnableDefault) == cudaSuccess)
    result = cudaDriverEntryPointSuccess;
#endif
  cudaGetLastError();
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace collectives::device
