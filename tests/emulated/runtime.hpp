// What the parts of the emulated runtime know of each other: devices.cpp, memory.cpp, streams.cpp.
#pragma once

#include <functional>

#include "cuda_runtime_api.h"

namespace emulated {

// ---- devices ----

int devices();
// Queues that the streams of a process share; 0: each has its own.
int connections();
int processors(int device);
inline thread_local int current_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;
cudaError_t fail(cudaError_t error);

bool have_peer_access(int device, int peer);
constexpr unsigned kHost = 31;     // bit of the memory of the host among those that lose
unsigned losing_ways(int device);  // bits of the devices, and of the host, to which flags are lost

// ---- streams ----

using Work = std::function<void()>;

// Does the work in the stream's turn, or records it.
cudaError_t put(cudaStream_t stream, Work work);
cudaError_t put_copy(cudaStream_t stream, Work work);  // within the devices
bool is_capturing(cudaStream_t stream);
void wait_for_device(int device);
// Meanwhile no thread can put anything on a stream.
void wait_for_all_devices();

}  // namespace emulated
