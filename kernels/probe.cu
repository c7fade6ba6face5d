// The self-test of peer access: really writes and reads, because the driver's answer can be wrong.
#include "cuda_call.hpp"
#include "launch.cuh"
#include "signal.cuh"

namespace collectives::device {
namespace {

__global__ void probe_kernel(const __grid_constant__ DeviceWorld world, const u64* tokens,
                             u32* wrong) {
  const int q = threadIdx.x;
  if (q >= world.nranks) return;
  State& there = state_of(world, q);
  wrong[q] = load_acquire(&there.token) != tokens[q];
  store_release(&there.probe[world.rank], tokens[q] ^ static_cast<u64>(world.rank));
}

__global__ void nothing_kernel() {}

}  // namespace

int launch_nothing(void* stream) { return launch(nothing_kernel, {1, 32}, stream); }

int launch_probe(const DeviceWorld& world, const u64* tokens, u32* wrong, void* stream) {
  return launch(probe_kernel, {1, 32}, stream, world, tokens, wrong);
}

// Lazily, a kernel would be loaded at its first launch, which can wait for the whole GPU: for the
// kernel of another rank, that is, which waits for this one.
int load_kernels(int* strands, OneShotResidency* one_shot) {
  cudaFuncAttributes attributes;
  int error = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, nothing_kernel);
  if (error == cudaSuccess) error = one_shot_residency(one_shot);
  if (error == cudaSuccess) error = two_shot_lines_residency(&one_shot->twice);
  if (error == cudaSuccess) error = load_copies();
  *strands = one_shot->shares;
  for (const auto residency : {plan_residency, two_shot_residency, rooted_residency,
                               exchange_residency, transfer_residency}) {
    int own = 0;
    if (error == cudaSuccess) error = residency(&own);
    *strands = min(*strands, own);
  }
  return error;
}

}  // namespace collectives::device
