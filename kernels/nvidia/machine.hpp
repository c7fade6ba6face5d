// What the kernels are built for. (tests/emulated/machine.hpp is its twin for a CPU.)
#pragma once

namespace collectives::device {

inline constexpr int kThreads = 512;  // of a block

}  // namespace collectives::device
