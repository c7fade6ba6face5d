// The kernels of reduce.hpp for CPUs with AVX2 and F16C (Intel since 2013, AMD since 2015).
#include "reduce_levels.hpp"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

SIMD_TARGET_BEGIN("avx2,f16c,bmi2")

namespace collectives {
namespace {

template <class T>
using Vec = typename VectorOf<T, 32>::type;

// Not intrinsics: compilers know that sums commute, and may swap the operands of _mm256_add_ps.
#define SIMD_BINARY(name, type, instruction)                        \
  static SIMD_INLINE Vec<type> name(Vec<type> a, Vec<type> b) {     \
    Vec<type> result;                                               \
    asm(instruction " %2, %1, %0" : "=x"(result) : "x"(a), "x"(b)); \
    return result;                                                  \
  }

// Read from 8 - n on: n lanes of all ones, then zeros.
alignas(32) constexpr std::int32_t kLaneMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1};

struct Simd {
  static constexpr int kBytes = 32;
  static constexpr int kAccumulators = 8;

  SIMD_BINARY(add, float, "vaddps")
  SIMD_BINARY(add, double, "vaddpd")
  SIMD_BINARY(sub, float, "vsubps")
  SIMD_BINARY(sub, double, "vsubpd")
  SIMD_BINARY(mul, float, "vmulps")
  SIMD_BINARY(mul, double, "vmulpd")
  SIMD_BINARY(div, float, "vdivps")
  SIMD_BINARY(div, double, "vdivpd")
  SIMD_BINARY(sub_add, float, "vaddsubps")
  SIMD_BINARY(sub_add, double, "vaddsubpd")

  static SIMD_INLINE Vec<float> duplicate_even(Vec<float> a) {
    return (Vec<float>)_mm256_moveldup_ps((__m256)a);
  }
  static SIMD_INLINE Vec<float> duplicate_odd(Vec<float> a) {
    return (Vec<float>)_mm256_movehdup_ps((__m256)a);
  }
  static SIMD_INLINE Vec<float> swap_pairs(Vec<float> a) {
    return (Vec<float>)_mm256_permute_ps((__m256)a, 0xb1);
  }
  static SIMD_INLINE Vec<double> duplicate_even(Vec<double> a) {
    return (Vec<double>)_mm256_movedup_pd((__m256d)a);
  }
  static SIMD_INLINE Vec<double> duplicate_odd(Vec<double> a) {
    return (Vec<double>)_mm256_permute_pd((__m256d)a, 0xf);
  }
  static SIMD_INLINE Vec<double> swap_pairs(Vec<double> a) {
    return (Vec<double>)_mm256_permute_pd((__m256d)a, 0x5);
  }

  static SIMD_INLINE void widen_float16(Vec<std::uint16_t> half, Vec<float>& low,
                                        Vec<float>& high) {
    const __m256i bits = (__m256i)half;
    low = (Vec<float>)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    high = (Vec<float>)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
  }
  static SIMD_INLINE Vec<std::uint16_t> narrow_float16(Vec<float> low, Vec<float> high) {
    const __m128i l = _mm256_cvtps_ph((__m256)low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i h = _mm256_cvtps_ph((__m256)high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vec<std::uint16_t>)_mm256_inserti128_si256(_mm256_castsi128_si256(l), h, 1);
  }

  static SIMD_INLINE __m256i first(std::size_t bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kLaneMasks + 8 - bytes / 4));
  }
  template <class T>
  static SIMD_INLINE Vec<Byte> load_partial(const Byte* p, std::size_t bytes) {
    if constexpr (sizeof(T) >= 4) {
      return (Vec<Byte>)_mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(bytes));
    } else {
      Vec<Byte> raw = {};
      copy_small<kBytes>(reinterpret_cast<Byte*>(&raw), p, bytes);
      return raw;
    }
  }
  template <class T>
  static SIMD_INLINE void store_partial(Byte* p, std::size_t bytes, Vec<Byte> raw) {
    if constexpr (sizeof(T) >= 4) {
      _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first(bytes), (__m256i)raw);
    } else {
      copy_small<kBytes>(p, reinterpret_cast<const Byte*>(&raw), bytes);
    }
  }
  static SIMD_INLINE void stream(Byte* p, Vec<Byte> raw) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)raw);
  }
};

}  // namespace
}  // namespace collectives

#include "reduce_kernels.hpp"

namespace collectives {
namespace {
constexpr Kernels kKernels = make_kernels("avx2");
}
}  // namespace collectives

SIMD_TARGET_END

namespace collectives {

namespace {

// CPUID by hand for two of them: clang 14 does not know __builtin_cpu_supports("f16c"). Every CPU
// with AVX2 that was built has both, but emulators and masked virtual machines differ.
bool cpu_has_all() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool bmi2 = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_BMI2) != 0;
  return f16c && bmi2 && __builtin_cpu_supports("avx2");
}

}  // namespace

const Kernels* avx2_kernels() {
  // Once: in a virtual machine CPUID traps, which takes tens of microseconds.
  static const bool supported = cpu_has_all();
  return supported ? &kKernels : nullptr;
}

}  // namespace collectives

#else

namespace collectives {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace collectives

#endif
