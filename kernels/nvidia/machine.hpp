// What the kernels are built for. (tests/emulated/machine.hpp is its twin for a CPU.)
#pragma once

namespace collectives::device {

inline constexpr int kThreads = 512;                // of a block
inline constexpr int kWholeThreads = 2 * kThreads;  // of a block of direct_one_shot's all_reduce
inline constexpr int kBulkBytes = 210 << 10;        // of shared memory, for bulk copies
// Bytes of a bulk copy at most: two packs of 16 for each thread but those of one warp.
inline constexpr int kBulkTile = 2 * 16 * (kThreads - 32);

}  // namespace collectives::device
