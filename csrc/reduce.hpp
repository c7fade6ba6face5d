// Element-wise reduction of k buffers into one or more, vectorised for the CPU at hand.
//
// Numerics: operands are combined left to right in the order given. float16, bfloat16 and float8
// are widened to float32, combined there, and rounded once (to nearest even) when stored;
// float8_e4m3 overflows to NaN, the others to infinity; integers wrap. min and max propagate NaN,
// and of equal operands (-0 and +0) keep the first. Complex products are plain: (ac - bd, ad + bc),
// each operation rounded. Any non-zero byte is a true boolean, stored as 1; sum, prod, min and max
// on booleans mean or, and, and, or (avg: error).
//
// The bits of an element depend on its operands alone: never on its position, the alignment, the
// length, the instruction set or the calling thread's floating-point mode (flush-to-zero,
// rounding), so every rank that combines equal operands in equal order gets equal bits. Of NaN
// operands the first one's payload is kept, quieted, on every path; inf - inf and 0 * inf give the
// negative quiet NaN. One operand with nothing to do to it is a copy, bit for bit.
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
  // avg divides by the number of ranks in its last step; 1 leaves the accumulator alone. Sums of
  // floats and complex numbers (sum, avg, premul_sum) look at it, nothing else does.
  int divisor = 1;
  // Stores bypass the caches: for results larger than they are. Needs dsts[0] at a multiple of the
  // element size, other dsts at its alignment modulo 64; stores that cannot be aligned stay normal.
  // See store_fence().
  bool nontemporal = false;
};

// dsts[d][i] = srcs[0][i] op srcs[1][i] op ... for all d; nsrc >= 1, ndst >= 1. A dst may be one of
// the srcs (exactly: same address); otherwise none may overlap. Any alignment, any count.
using ReduceFn = void (*)(void* const* dsts, int ndst, const void* const* srcs, int nsrc,
                          std::size_t count, const Finish& finish);

// The fastest implementation for this CPU (AVX-512, AVX2 or portable), chosen once at first use; a
// table look-up. premul_sum is a sum: its operands have been through scale() already.
// COLLECTIVES_SIMD=portable|avx2|avx512 forces one (an error if the CPU lacks it), for tests.
// Throws std::invalid_argument with why_unsupported() where the op is not defined on the dtype.
ReduceFn reduce_fn(Reduction reduction);

// dst[i] = src[i] * (re + im·i), rounded to the dtype; for premul_sum. In place allowed. The factor
// is first rounded to what the dtype is computed in (float32 for narrow floats); with im = 0
// complex numbers are scaled by parts. Throws std::invalid_argument on integers and bool, and for
// im != 0 on real dtypes.
void scale(Dtype dtype, void* dst, const void* src, std::size_t count, double re, double im);

// memcpy whose stores bypass the caches when `nontemporal`.
void copy_bytes(void* dst, const void* src, std::size_t bytes, bool nontemporal);

// Orders non-temporal stores before later normal ones (sfence); call before a flag that publishes
// them.
void store_fence();

// "avx512", "avx2" or "portable": what reduce_fn uses here.
const char* simd_level();

}  // namespace collectives
