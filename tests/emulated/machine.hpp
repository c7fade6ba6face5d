// Small blocks, for a CPU: two warps, so that threads of one block still run apart.
#pragma once

namespace collectives::device {

inline constexpr int kThreads = 64;  // of a block

}  // namespace collectives::device
