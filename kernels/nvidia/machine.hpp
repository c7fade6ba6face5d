// What the kernels are built for. (tests/emulated/machine.hpp is its twin for a CPU.)
#pragma once

namespace collectives::device {

inline constexpr int kThreads = 512;       // of a block
inline constexpr int kWideThreads = 1024;  // of a block that copies much: for few blocks to fill a link

}  // namespace collectives::device
