// What nvcc adds to C++, for a host compiler: the words of the language, the built-in variables
// and functions that kernels use, and launches. A block's threads are fibers of one OS thread
// (fibers.hpp), so __shared__ is a variable of that OS thread.
#pragma once

// The library's own headers write __noinline__ in attributes, so they come before the macros.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"
#include "fibers.hpp"

#define __device__
#define __global__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict

// Kernels are of one dimension here.
template <unsigned (*kRead)()>
struct EmulatedVariable {
  struct {
    operator unsigned() const { return kRead(); }
  } x;
};
inline unsigned emulated_thread() { return emulated::here().thread.x; }
inline unsigned emulated_block() { return emulated::here().block->index.x; }
inline unsigned emulated_threads() { return emulated::here().block->threads.x; }
inline unsigned emulated_grid() { return emulated::here().block->grid.x; }
inline constexpr EmulatedVariable<emulated_thread> threadIdx{};
inline constexpr EmulatedVariable<emulated_block> blockIdx{};
inline constexpr EmulatedVariable<emulated_threads> blockDim{};
inline constexpr EmulatedVariable<emulated_grid> gridDim{};

using dim3 = emulated::Dim3;
using std::max;
using std::min;

struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// ---- values -------------------------------------------------------------------------------------

template <class To, class From>
inline To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return emulated_bits<double>(bits); }
inline long long __double_as_longlong(double value) { return emulated_bits<long long>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// ---- memory -------------------------------------------------------------------------------------

template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline unsigned atomicAdd(unsigned* p, unsigned more) {
  return __atomic_fetch_add(p, more, __ATOMIC_RELAXED);
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// ---- threads together ---------------------------------------------------------------------------

inline void __syncthreads() { emulated::sync_block(0); }
inline int __syncthreads_or(int own) { return emulated::sync_block(own != 0); }
// Any set of threads that go together; here each goes alone.
inline unsigned __activemask() { return 1u << (threadIdx.x & 31); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::warp_exchange(mask, 0, 0); }
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  static_assert(sizeof(T) <= 8);
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const int own = static_cast<int>(threadIdx.x & 31);
  bits = emulated::warp_exchange(mask, bits, own / width * width + lane % width);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __ballot_sync(unsigned mask, int own) { return emulated::warp_ballot(mask, own); }
inline int __any_sync(unsigned mask, int own) { return __ballot_sync(mask, own) != 0; }
inline int __all_sync(unsigned mask, int own) { return __ballot_sync(mask, own) == mask; }

// ---- launches -----------------------------------------------------------------------------------

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                                      void (*kernel)(Parameters...), Arguments&&... arguments) {
  auto copies = std::make_shared<std::tuple<std::decay_t<Parameters>...>>(
      std::forward<Arguments>(arguments)...);
  emulated::note_launch(config->gridDim.x, config->numAttrs != 0);
  return emulated::launch(config->gridDim, config->blockDim, config->stream,
                          [kernel, copies] { std::apply(kernel, *copies); });
}
template <class... Parameters>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
  *attributes = {32, 90};
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class... Parameters>
inline cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class... Parameters>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                                 void (*)(Parameters...), int,
                                                                 std::size_t) {
  *blocks = emulated::kBlocksOfProcessor;
  return cudaSuccess;
}
