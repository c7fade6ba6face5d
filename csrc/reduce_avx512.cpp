// The kernels of reduce.hpp for CPUs with AVX-512 F, BW, DQ, VL (Intel from 2017, AMD from 2022).
#include "reduce_levels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

SIMD_TARGET_BEGIN("avx2,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")

namespace collectives {
namespace {

template <class T>
using Vec = typename VectorOf<T, 64>::type;

// Not intrinsics: compilers know that sums commute, and may swap the operands of _mm512_add_ps.
#define SIMD_BINARY(name, type, instruction)                        \
  static SIMD_INLINE Vec<type> name(Vec<type> a, Vec<type> b) {     \
    Vec<type> result;                                               \
    asm(instruction " %2, %1, %0" : "=v"(result) : "v"(a), "v"(b)); \
    return result;                                                  \
  }

// Intrinsics with a full mask compile to the plain instructions. The forms without one make GCC
// warn of uninitialised variables in its own header (bug 105593).
constexpr __mmask16 kAll = 0xffff;
constexpr __mmask8 kAllDoubles = 0xff;

struct Simd {
  static constexpr int kBytes = 64;
  static constexpr int kAccumulators = 8;

  SIMD_BINARY(add, float, "vaddps")
  SIMD_BINARY(add, double, "vaddpd")
  SIMD_BINARY(sub, float, "vsubps")
  SIMD_BINARY(sub, double, "vsubpd")
  SIMD_BINARY(mul, float, "vmulps")
  SIMD_BINARY(mul, double, "vmulpd")
  SIMD_BINARY(div, float, "vdivps")
  SIMD_BINARY(div, double, "vdivpd")

  static SIMD_INLINE Vec<float> duplicate_even(Vec<float> a) {
    return (Vec<float>)_mm512_maskz_moveldup_ps(kAll, (__m512)a);
  }
  static SIMD_INLINE Vec<float> duplicate_odd(Vec<float> a) {
    return (Vec<float>)_mm512_maskz_movehdup_ps(kAll, (__m512)a);
  }
  static SIMD_INLINE Vec<float> swap_pairs(Vec<float> a) {
    return (Vec<float>)_mm512_maskz_permute_ps(kAll, (__m512)a, 0xb1);
  }
  static SIMD_INLINE Vec<float> sub_add(Vec<float> a, Vec<float> b) {
    return (Vec<float>)_mm512_mask_blend_ps(0xaaaa, (__m512)sub(a, b), (__m512)add(a, b));
  }
  static SIMD_INLINE Vec<double> duplicate_even(Vec<double> a) {
    return (Vec<double>)_mm512_maskz_movedup_pd(kAllDoubles, (__m512d)a);
  }
  static SIMD_INLINE Vec<double> duplicate_odd(Vec<double> a) {
    return (Vec<double>)_mm512_maskz_permute_pd(kAllDoubles, (__m512d)a, 0xff);
  }
  static SIMD_INLINE Vec<double> swap_pairs(Vec<double> a) {
    return (Vec<double>)_mm512_maskz_permute_pd(kAllDoubles, (__m512d)a, 0x55);
  }
  static SIMD_INLINE Vec<double> sub_add(Vec<double> a, Vec<double> b) {
    return (Vec<double>)_mm512_mask_blend_pd(0xaa, (__m512d)sub(a, b), (__m512d)add(a, b));
  }

  static SIMD_INLINE void widen_float16(Vec<std::uint16_t> half, Vec<float>& low,
                                        Vec<float>& high) {
    const __m512i bits = (__m512i)half;
    low = (Vec<float>)_mm512_maskz_cvtph_ps(kAll,
                                            _mm512_maskz_extracti64x4_epi64(kAllDoubles, bits, 0));
    high = (Vec<float>)_mm512_maskz_cvtph_ps(kAll,
                                             _mm512_maskz_extracti64x4_epi64(kAllDoubles, bits, 1));
  }
  static SIMD_INLINE Vec<std::uint16_t> narrow_float16(Vec<float> low, Vec<float> high) {
    const __m256i l =
        _mm512_maskz_cvtps_ph(kAll, (__m512)low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i h =
        _mm512_maskz_cvtps_ph(kAll, (__m512)high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vec<std::uint16_t>)_mm512_maskz_inserti64x4(kAllDoubles, _mm512_castsi256_si512(l), h,
                                                        1);
  }

  static SIMD_INLINE __mmask64 first(std::size_t bytes) {
    return _bzhi_u64(~0ull, static_cast<unsigned>(bytes));
  }
  template <class T>
  static SIMD_INLINE Vec<Byte> load_partial(const Byte* p, std::size_t bytes) {
    return (Vec<Byte>)_mm512_maskz_loadu_epi8(first(bytes), p);
  }
  template <class T>
  static SIMD_INLINE void store_partial(Byte* p, std::size_t bytes, Vec<Byte> raw) {
    _mm512_mask_storeu_epi8(p, first(bytes), (__m512i)raw);
  }
  static SIMD_INLINE void stream(Byte* p, Vec<Byte> raw) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)raw);
  }
};

}  // namespace
}  // namespace collectives

#include "reduce_kernels.hpp"

namespace collectives {
namespace {
constexpr Kernels kKernels = make_kernels("avx512");
}
}  // namespace collectives

SIMD_TARGET_END

namespace collectives {

const Kernels* avx512_kernels() {
  const bool supported = avx2_kernels() != nullptr && __builtin_cpu_supports("avx512f") &&
                         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                         __builtin_cpu_supports("avx512vl");
  return supported ? &kKernels : nullptr;
}

}  // namespace collectives

#else

namespace collectives {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace collectives

#endif
