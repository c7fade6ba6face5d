// Small blocks, for a CPU: two warps, so that threads of one block still run apart.
#pragma once

namespace collectives::device {

inline constexpr int kThreads = 64;  // of a block
inline constexpr int kWholeThreads = kThreads;
inline constexpr int kBulkBytes = 12 << 10;
inline constexpr int kBulkTile = 2 * 16 * (kThreads - 32);

}  // namespace collectives::device
