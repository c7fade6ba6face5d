// Thread blocks on a CPU: a block is one OS thread, its threads are fibers that take turns there.
#pragma once

#include <functional>

#include "cuda_runtime_api.h"

#pragma GCC visibility push(default)
namespace emulated {

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline constexpr int kBlocksOfProcessor = 2;

struct Block {
  Dim3 grid, index, threads;
  unsigned loses;  // see lost()
};
struct Here {
  Dim3 thread;
  const Block* block;
};
// The fiber that runs on this OS thread.
const Here& here();

// Is what this fiber stores there lost on the way? (EMULATED_LOSES says on which.)
bool lost(const void* address);

// Gives the turn to the other fibers of the block: for a thread that polls.
void poll();
// All fibers of the block meet; true if any brought true.
bool sync_block(bool own);
// So many fibers of the block meet at a barrier of their own, 1 to 15.
// `stays`: until all have come; else the caller goes on, and only counts.
void meet_at(int id, int fibers, bool stays);
// The fibers of a warp in `mask` meet. Each gets what `lane` brought.
unsigned long long warp_exchange(unsigned mask, unsigned long long own, int lane);
unsigned warp_ballot(unsigned mask, bool own);

// Runs one block to its end on the calling OS thread.
void run_block(const Block& block, const std::function<void()>& kernel);
// Puts a kernel on a stream.
cudaError_t launch(Dim3 grid, Dim3 threads, cudaStream_t stream, std::function<void()> kernel);
// Notes that a kernel has so many blocks, and whether it may start before the one before it has
// ended: it does not here.
void note_launch(unsigned blocks, bool early);

}  // namespace emulated
#pragma GCC visibility pop
