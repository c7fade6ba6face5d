// Element-wise reduction of k buffers into one or more, vectorised for the CPU at hand.
//
// Numerics: operands are combined left to right in the order given. float16, bfloat16 and float8 are
// widened to float32, combined there, and rounded once (to nearest even) when stored; integers wrap.
// min and max propagate NaN. sum, prod, min, max and avg on booleans mean or, and, and, or (avg: error).
// The bits of an element depend on its operands alone: never on its position, the alignment, the length
// or the instruction set, so every rank that combines equal operands in equal order gets equal bits.
// (NaN operands: the payload of the first NaN in operand order is kept, quieted, on every path.)
#pragma once

#include <cstddef>

#include "types.hpp"

namespace collectives {

struct Reduction {
  Dtype dtype = Dtype::float32;
  Op op = Op::sum;
};

// What happens to the accumulator before it is rounded and stored.
struct Finish {
  int divisor = 1;            // avg divides by the number of ranks in its last step; 1 leaves it alone
  bool nontemporal = false;   // stores bypass the caches: for results larger than they are
};

// dsts[d][i] = srcs[0][i] op srcs[1][i] op ... for all d; nsrc >= 1, ndst >= 1. A dst may be one of the
// srcs (exactly: same address); otherwise none may overlap. Any alignment, any count.
using ReduceFn = void (*)(void* const* dsts, int ndst, const void* const* srcs, int nsrc,
                          std::size_t count, const Finish& finish);

// The fastest implementation for this CPU (AVX-512, AVX2 or portable), chosen once at first use.
// COLLECTIVES_SIMD=portable|avx2|avx512 forces one (an error if the CPU lacks it), for tests.
ReduceFn reduce_fn(Reduction reduction);

// dst[i] = src[i] * (re + im·i): rounded to the dtype; for premul_sum. In place allowed.
void scale(Dtype dtype, void* dst, const void* src, std::size_t count, double re, double im);

// memcpy whose stores bypass the caches when `nontemporal`.
void copy_bytes(void* dst, const void* src, std::size_t bytes, bool nontemporal);

// Orders non-temporal stores before later normal ones (sfence); call before a flag that publishes them.
void store_fence();

// "avx512", "avx2" or "portable": what reduce_fn uses here.
const char* simd_level();

}  // namespace collectives
