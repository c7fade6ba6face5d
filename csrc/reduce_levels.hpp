// What the instruction-set levels of reduce.hpp share: the table that each fills, and vector types.
//
// A level is one translation unit (reduce.cpp: portable, reduce_avx2.cpp, reduce_avx512.cpp). It
// defines a struct Simd of primitives and includes reduce_kernels.hpp, which makes every kernel out
// of them. The AVX levels switch their instruction set on in the source, between SIMD_TARGET_BEGIN
// and SIMD_TARGET_END, so no file needs compiler flags of its own. Everything between the two has
// internal linkage and no header is included there, so the linker can never pick AVX code for a
// function that other files share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "reduce.hpp"

#define SIMD_INLINE inline __attribute__((always_inline))
#define SIMD_NOINLINE __attribute__((noinline))
#define SIMD_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define SIMD_TARGET_BEGIN(isa) \
  SIMD_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define SIMD_TARGET_END SIMD_PRAGMA(clang attribute pop)
#define SIMD_UNROLL SIMD_PRAGMA(clang loop unroll(full))
#else
#define SIMD_TARGET_BEGIN(isa) SIMD_PRAGMA(GCC push_options) SIMD_PRAGMA(GCC target(isa))
#define SIMD_TARGET_END SIMD_PRAGMA(GCC pop_options)
#define SIMD_UNROLL SIMD_PRAGMA(GCC unroll 16)
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "16-bit and 8-bit floats are taken out of wider lanes in little-endian order");

namespace collectives {

using ScaleFn = void (*)(void* dst, const void* src, std::size_t count, double re, double im);

struct Kernels {
  const char* level;
  ReduceFn reduce[kDtypeCount][kOpCount];  // null where why_unsupported() says why
  ScaleFn scale[kDtypeCount];              // null for integers and bool
  void (*copy_nontemporal)(void* dst, const void* src, std::size_t bytes);
};

// The kernels of a level, or null where this CPU (or build) lacks it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// One source and nothing to do to it: copies it to every destination, bit for bit.
void copy_to_all(void* const* dsts, int ndst, const void* src, std::size_t bytes, bool nontemporal);

// The bits of a result must not depend on the floating-point mode of the calling thread
// (torch.set_flush_denormal, or a library built with -ffast-math, sets flush-to-zero;
// feenableexcept unmasks traps). Kernels on floats look, which costs about a nanosecond, and where
// it is not the standard mode run themselves again inside in_standard_float_mode, which sets it and
// puts the thread's own back.
void in_standard_float_mode(ReduceFn kernel, void* const* dsts, int ndst, const void* const* srcs,
                            int nsrc, std::size_t count, const Finish& finish);
void in_standard_float_mode(ScaleFn kernel, void* dst, const void* src, std::size_t count,
                            double re, double im);

namespace {

#if defined(__x86_64__)
constexpr unsigned kStandardMxcsr = 0x1f80;  // round to nearest even, subnormals kept, traps masked
constexpr unsigned kMxcsrStatus = 0x003f;    // sticky flags, which no result depends on
SIMD_INLINE bool float_mode_is_standard() {
  return (_mm_getcsr() & 0xffffu & ~kMxcsrStatus) == kStandardMxcsr;
}
#else
SIMD_INLINE bool float_mode_is_standard() { return true; }
#endif

using Byte = unsigned char;

// A vector of T filling `bytes`: GCC's and clang's own, with element-wise operators.
template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};

// Copies 0 <= bytes < kBelow (16 or 32): what memcpy does, without the call.
template <int kBelow>
SIMD_INLINE void copy_small(Byte* dst, const Byte* src, std::size_t bytes) {
  if constexpr (kBelow > 16) {
    if (bytes & 16) {
      __builtin_memcpy(dst, src, 16);
      dst += 16;
      src += 16;
    }
  }
  if (bytes & 8) {
    __builtin_memcpy(dst, src, 8);
    dst += 8;
    src += 8;
  }
  if (bytes & 4) {
    __builtin_memcpy(dst, src, 4);
    dst += 4;
    src += 4;
  }
  if (bytes & 2) {
    __builtin_memcpy(dst, src, 2);
    dst += 2;
    src += 2;
  }
  if (bytes & 1) *dst = *src;
}

}  // namespace
}  // namespace collectives
