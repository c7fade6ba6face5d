// Words in memory by which streams wait, without a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda_call.hpp"

namespace collectives::device {

// Has the driver what it takes?
bool has_words();

// Streams write words in order, and wait for words, without a kernel: writes `value` to each of
// `to`, behind what is on the stream, then waits until each of `from` has it or more. Throws
// Error(unsupported) if the driver cannot.
void exchange_words(cudaStream_t stream, const std::vector<u64*>& to, const std::vector<u64*>& from,
                    u64 value);

}  // namespace collectives::device
