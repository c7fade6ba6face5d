// Reduction on the GPU with the numerics of csrc/reduce.hpp, bit for bit: operands left to right,
// narrow floats accumulated in float32 and rounded once, the first NaN's payload kept and quieted,
// -0 and +0 equal in min and max, integers wrapping.
//
// A *unit* is 8 bytes (16 for complex128): what a thread computes on. A Format widens a unit to
// parts and narrows them back; an op combines parts. Memory goes in packs of 16 bytes where all
// operands are aligned to it, else element by element; the bits are the same.
//
// NaNs are looked for once in a unit: sums and conversions take all its parts to be numbers, and
// do them again, one by one, where some result is none. A branch for each part would take longer
// than the sum.
#pragma once

#include "cuda_call.hpp"
#include "primitives.cuh"

namespace collectives::device {

// ---- arithmetic with the host's NaNs ------------------------------------------------------------

template <int kParts, class T>
__device__ __forceinline__ bool all_numbers(const T* parts) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < kParts; ++i) all &= parts[i] == parts[i];
  return all;
}

__device__ inline float with_first_nan(float r, float a, float b) {
  if (r == r) return r;
  if (a != a) return __uint_as_float(__float_as_uint(a) | 0x00400000u);
  if (b != b) return __uint_as_float(__float_as_uint(b) | 0x00400000u);
  return __uint_as_float(0xffc00000u);
}
__device__ inline double with_first_nan(double r, double a, double b) {
  constexpr long long kQuiet = 0x0008000000000000ll;
  if (r == r) return r;
  if (a != a) return __longlong_as_double(__double_as_longlong(a) | kQuiet);
  if (b != b) return __longlong_as_double(__double_as_longlong(b) | kQuiet);
  return __longlong_as_double(static_cast<long long>(0xfff8000000000000ull));
}
__device__ inline float plain_add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plain_add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline float add(float a, float b) { return with_first_nan(plain_add(a, b), a, b); }
__device__ inline double add(double a, double b) { return with_first_nan(plain_add(a, b), a, b); }
__device__ inline float sub(float a, float b) { return with_first_nan(__fsub_rn(a, b), a, b); }
__device__ inline double sub(double a, double b) { return with_first_nan(__dsub_rn(a, b), a, b); }
__device__ inline float mul(float a, float b) { return with_first_nan(__fmul_rn(a, b), a, b); }
__device__ inline double mul(double a, double b) { return with_first_nan(__dmul_rn(a, b), a, b); }
__device__ inline float div(float a, float b) { return with_first_nan(__fdiv_rn(a, b), a, b); }
__device__ inline double div(double a, double b) { return with_first_nan(__ddiv_rn(a, b), a, b); }

// ---- conversions --------------------------------------------------------------------------------

__device__ inline float float_of_half(u32 half) {
  if ((half & 0x7c00u) == 0x7c00u) {  // the hardware would replace a NaN's payload
    const u32 magnitude = (half & 0x03ffu) << 13;
    return __uint_as_float((half & 0x8000u) << 16 | 0x7f800000u | magnitude |
                           (magnitude != 0 ? 0x00400000u : 0u));
  }
  return float_of_half_bits(half);
}
__device__ inline u32 half_of_float(float value) {
  const u32 bits = __float_as_uint(value);
  if (value != value) return (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3ffu) | 0x7e00u);
  return half_bits_of_float(value);
}
// To nearest even in the upper 16 bits; NaNs keep theirs, which are quiet by now.
__device__ inline u32 bfloat_of_float(float value) {
  const u32 bits = __float_as_uint(value);
  return (value != value ? bits : bits + ((bits >> 16 & 1u) + 0x7fffu)) >> 16;
}
// As in csrc/reduce_kernels.hpp: adding 2^23 units of the last place leaves no room for less.
template <int kMantissa>
__device__ inline float round_to_mantissa(float value) {
  constexpr u32 kLowest = (127 - 14) << 23, kHighest = (127 + 16) << 23;
  const u32 bits = __float_as_uint(value), sign = bits & 0x80000000u;
  u32 exponent = bits & 0x7f800000u;
  exponent = exponent < kLowest ? kLowest : exponent > kHighest ? kHighest : exponent;
  const float shifter = __uint_as_float((exponent + ((23 - kMantissa) << 23)) | sign);
  return __uint_as_float(__float_as_uint(sub(add(value, shifter), shifter)) | sign);
}
__device__ inline float float_of_e5m2(u32 byte) { return float_of_half(byte << 8); }
__device__ inline u32 e5m2_of_float(float value) {
  return half_of_float(round_to_mantissa<2>(value)) >> 8;
}
__device__ inline float float_of_e4m3(u32 byte) {
  const u32 magnitude = (byte & 0x7fu) << 8;
  u32 half = (byte & 0x80u) << 8 | magnitude >> 1;
  if (magnitude == 0x7f00u) half |= 0x7e00u;
  return mul(float_of_half(half), 256.0f);
}
__device__ inline u32 e4m3_of_float(float value) {
  const u32 half = half_of_float(round_to_mantissa<3>(mul(value, 0x1p-8f)));
  const u32 magnitude = half & 0x7fffu;
  const u32 kept = magnitude > 0x3f00u ? 0x7f00u : magnitude << 1;  // 0x3f00: 448 / 256
  return (kept | (half & 0x8000u)) >> 8;
}

// ---- formats ------------------------------------------------------------------------------------

struct Unit16 {
  u64 low, high;
};

template <class T>
struct IntegerFormat {
  using Unit = u64;
  using Part = T;
  static constexpr int kElement = sizeof(T), kParts = 8 / sizeof(T);
  static constexpr bool kFloat = false, kComplex = false;
  __device__ static T widen(u64 u, int i) { return static_cast<T>(u >> (8 * sizeof(T) * i)); }
  __device__ static u64 narrow(T part) {
    // By way of the unsigned type of the same width, lest the sign run over.
    constexpr u64 kMask = ~0ull >> (64 - 8 * sizeof(T));
    return static_cast<u64>(part) & kMask;
  }
};
struct BooleanFormat : IntegerFormat<unsigned char> {
  __device__ static unsigned char widen(u64 u, int i) { return (u >> (8 * i) & 0xff) != 0; }
};
template <int kBytes, float (*kWiden)(u32), u32 (*kNarrow)(float)>
struct NarrowFormat {
  using Unit = u64;
  using Part = float;
  static constexpr int kElement = kBytes, kParts = 8 / kBytes;
  static constexpr bool kFloat = true, kComplex = false;
  __device__ static float widen(u64 u, int i) { return kWiden(bits(u, i)); }
  __device__ static u64 narrow(float part) { return kNarrow(part); }

 protected:
  __device__ static u32 bits(u64 u, int i) {
    return static_cast<u32>(u >> (8 * kBytes * i)) & (kBytes == 1 ? 0xffu : 0xffffu);
  }
};
// With conversions of all parts of a unit by instructions for two, if they are numbers.
template <float (*kWiden)(u32), u32 (*kNarrow)(float), float (*kNumber)(u32),
          u32 (*kTwo)(float, float)>
struct HalfFormat : NarrowFormat<2, kWiden, kNarrow> {
  using Base = NarrowFormat<2, kWiden, kNarrow>;
  __device__ static void widen_all(u64 u, float* parts) {
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[i] = kNumber(Base::bits(u, i));
    if (all_numbers<4>(parts)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[i] = kWiden(Base::bits(u, i));
  }
  __device__ static u64 narrow_all(const float* parts) {
    u64 u = kTwo(parts[0], parts[1]) | static_cast<u64>(kTwo(parts[2], parts[3])) << 32;
    if (all_numbers<4>(parts)) return u;
    u = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) u |= static_cast<u64>(kNarrow(parts[i])) << (16 * i);
    return u;
  }
};
__device__ inline float float_of_bfloat(u32 bits) { return __uint_as_float(bits << 16); }
using Float16Format =
    HalfFormat<float_of_half, half_of_float, float_of_half_bits, half_bits_of_floats>;
using Bfloat16Format =
    HalfFormat<float_of_bfloat, bfloat_of_float, float_of_bfloat, bfloat_bits_of_floats>;
using E4m3Format = NarrowFormat<1, float_of_e4m3, e4m3_of_float>;
using E5m2Format = NarrowFormat<1, float_of_e5m2, e5m2_of_float>;
struct Float32Format {
  using Unit = u64;
  using Part = float;
  static constexpr int kElement = 4, kParts = 2;
  static constexpr bool kFloat = true, kComplex = false;
  __device__ static float widen(u64 u, int i) {
    return __uint_as_float(static_cast<u32>(u >> (32 * i)));
  }
  __device__ static u64 narrow(float part) { return __float_as_uint(part); }
};
struct Float64Format {
  using Unit = u64;
  using Part = double;
  static constexpr int kElement = 8, kParts = 1;
  static constexpr bool kFloat = true, kComplex = false;
  __device__ static double widen(u64 u, int) {
    return __longlong_as_double(static_cast<long long>(u));
  }
  __device__ static u64 narrow(double part) { return static_cast<u64>(__double_as_longlong(part)); }
};
struct Complex64Format : Float32Format {
  static constexpr int kElement = 8;
  static constexpr bool kComplex = true;
};
struct Complex128Format {
  using Unit = Unit16;
  using Part = double;
  static constexpr int kElement = 16, kParts = 2;
  static constexpr bool kFloat = true, kComplex = true;
  __device__ static double widen(const Unit16& u, int i) {
    return __longlong_as_double(static_cast<long long>(i == 0 ? u.low : u.high));
  }
};

// ---- operations ---------------------------------------------------------------------------------

struct SumOp {
  template <class F>
  __device__ static void combine(typename F::Part* a, const typename F::Part* b) {
    if constexpr (F::kFloat) {
      typename F::Part sum[F::kParts];
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) sum[i] = plain_add(a[i], b[i]);
      const bool numbers = all_numbers<F::kParts>(sum);
      if (!numbers) {
#pragma unroll
        for (int i = 0; i < F::kParts; ++i) sum[i] = with_first_nan(sum[i], a[i], b[i]);
      }
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) a[i] = sum[i];
    } else {
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) a[i] = static_cast<typename F::Part>(a[i] + b[i]);
    }
  }
};
struct ProdOp {
  template <class F>
  __device__ static void combine(typename F::Part* a, const typename F::Part* b) {
    if constexpr (F::kComplex) {
      const auto re = sub(mul(a[0], b[0]), mul(a[1], b[1]));
      a[1] = add(mul(a[0], b[1]), mul(a[1], b[0]));
      a[0] = re;
    } else {
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) {
        if constexpr (F::kFloat) {
          a[i] = mul(a[i], b[i]);
        } else {
          a[i] = static_cast<typename F::Part>(static_cast<u64>(a[i]) * b[i]);
        }
      }
    }
  }
};
template <bool kMin>
struct ExtremeOp {
  template <class F>
  __device__ static void combine(typename F::Part* a, const typename F::Part* b) {
#pragma unroll
    for (int i = 0; i < F::kParts; ++i) {
      const auto chosen = (kMin ? b[i] < a[i] : b[i] > a[i]) ? b[i] : a[i];
      if constexpr (F::kFloat) {
        a[i] = a[i] != a[i] || b[i] != b[i] ? add(a[i], b[i]) : chosen;
      } else {
        a[i] = chosen;
      }
    }
  }
};
using MinOp = ExtremeOp<true>;
using MaxOp = ExtremeOp<false>;
template <Combine kOp>
struct BitOp {
  template <class F>
  __device__ static void combine(typename F::Part* a, const typename F::Part* b) {
#pragma unroll
    for (int i = 0; i < F::kParts; ++i) {
      if constexpr (kOp == Combine::band) {
        a[i] &= b[i];
      } else if constexpr (kOp == Combine::bor) {
        a[i] |= b[i];
      } else {
        a[i] ^= b[i];
      }
    }
  }
};
using AndOp = BitOp<Combine::band>;
using OrOp = BitOp<Combine::bor>;
using XorOp = BitOp<Combine::bxor>;

// A value in the making: the parts of one unit.
template <class F, class O>
struct Accumulator {
  using FormatType = F;
  using Unit = typename F::Unit;
  using Part = typename F::Part;
  static constexpr bool kSum = F::kFloat && sizeof(O) && __is_same(O, SumOp);

  Part parts[F::kParts];

  static constexpr bool kHalf = __is_same(F, Float16Format) || __is_same(F, Bfloat16Format);

  __device__ void load(Unit u) {
    if constexpr (kHalf) {
      F::widen_all(u, parts);
    } else {
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) parts[i] = F::widen(u, i);
    }
  }
  __device__ void combine(const Accumulator& other) { O::template combine<F>(parts, other.parts); }
  __device__ Unit store() const {
    if constexpr (sizeof(Unit) == 16) {
      return {static_cast<u64>(__double_as_longlong(parts[0])),
              static_cast<u64>(__double_as_longlong(parts[1]))};
    } else if constexpr (kHalf) {
      return F::narrow_all(parts);
    } else {
      u64 u = 0;
#pragma unroll
      for (int i = 0; i < F::kParts; ++i)
        u |= static_cast<u64>(F::narrow(parts[i])) << (8 * (8 / F::kParts) * i);
      return u;
    }
  }
  __device__ void divide(int divisor) {
    if constexpr (kSum) {
#pragma unroll
      for (int i = 0; i < F::kParts; ++i) parts[i] = div(parts[i], static_cast<Part>(divisor));
    }
  }
  // premul_sum: the product is rounded to the dtype before it is summed.
  __device__ void scale(double re, double im) {
    if constexpr (kSum) {
      const Part r = static_cast<Part>(re), m = static_cast<Part>(im);
      if (F::kComplex && im != 0) {
        const Part factor[2] = {r, m};
        ProdOp::combine<F>(parts, factor);
      } else {
#pragma unroll
        for (int i = 0; i < F::kParts; ++i) parts[i] = mul(parts[i], r);
      }
      load(store());
    }
  }
};

// Those whose speed counts: kernels are made for each.
using Float32Sum = Accumulator<Float32Format, SumOp>;
using Bfloat16Sum = Accumulator<Bfloat16Format, SumOp>;
using Float16Sum = Accumulator<Float16Format, SumOp>;

template <class T>
struct Named {
  using Type = T;
};
// Calls f with the name of that one of them which a reducer asks for, or of void.
template <class Function>
auto with_fast_sum(const Reducer& reducer, Function f) {
  if (reducer.op == static_cast<u32>(Combine::sum)) {
    switch (static_cast<Format>(reducer.format)) {
      case Format::float32:
        return f(Named<Float32Sum>{});
      case Format::bfloat16:
        return f(Named<Bfloat16Sum>{});
      case Format::float16:
        return f(Named<Float16Sum>{});
      default:
        break;
    }
  }
  return f(Named<void>{});
}

// Calls f with the Accumulator of a reducer. (An operation that a format lacks is refused before a
// kernel starts.)
template <class F, class Function>
__device__ inline void dispatch_float(Combine op, Function&& f) {
  switch (op) {
    case Combine::prod:
      return f(Accumulator<F, ProdOp>());
    case Combine::min:
      return f(Accumulator<F, MinOp>());
    case Combine::max:
      return f(Accumulator<F, MaxOp>());
    default:
      return f(Accumulator<F, SumOp>());
  }
}
template <class F, class Function>
__device__ inline void dispatch_complex(Combine op, Function&& f) {
  if (op == Combine::prod) return f(Accumulator<F, ProdOp>());
  return f(Accumulator<F, SumOp>());
}
// Sums and products wrap, so signed integers do them as unsigned ones; bits are bits.
template <class T, class Unsigned, class Function>
__device__ inline void dispatch_integer(Combine op, Function&& f) {
  switch (op) {
    case Combine::prod:
      return f(Accumulator<IntegerFormat<Unsigned>, ProdOp>());
    case Combine::min:
      return f(Accumulator<IntegerFormat<T>, MinOp>());
    case Combine::max:
      return f(Accumulator<IntegerFormat<T>, MaxOp>());
    case Combine::band:
      return f(Accumulator<IntegerFormat<unsigned char>, AndOp>());
    case Combine::bor:
      return f(Accumulator<IntegerFormat<unsigned char>, OrOp>());
    case Combine::bxor:
      return f(Accumulator<IntegerFormat<unsigned char>, XorOp>());
    default:
      return f(Accumulator<IntegerFormat<Unsigned>, SumOp>());
  }
}
template <class Function>
__device__ inline void dispatch_boolean(Combine op, Function&& f) {
  switch (op) {
    case Combine::prod:
    case Combine::min:
    case Combine::band:
      return f(Accumulator<BooleanFormat, AndOp>());
    case Combine::bxor:
      return f(Accumulator<BooleanFormat, XorOp>());
    default:
      return f(Accumulator<BooleanFormat, OrOp>());
  }
}

template <class Function>
__device__ inline void dispatch(const Reducer& reducer, Function&& f) {
  const Combine op = static_cast<Combine>(reducer.op);
  switch (static_cast<Format>(reducer.format)) {
    case Format::float16:
      return dispatch_float<Float16Format>(op, f);
    case Format::bfloat16:
      return dispatch_float<Bfloat16Format>(op, f);
    case Format::float32:
      return dispatch_float<Float32Format>(op, f);
    case Format::float64:
      return dispatch_float<Float64Format>(op, f);
    case Format::float8_e4m3:
      return dispatch_float<E4m3Format>(op, f);
    case Format::float8_e5m2:
      return dispatch_float<E5m2Format>(op, f);
    case Format::int8:
      return dispatch_integer<signed char, unsigned char>(op, f);
    case Format::int16:
      return dispatch_integer<short, unsigned short>(op, f);
    case Format::int32:
      return dispatch_integer<int, unsigned>(op, f);
    case Format::int64:
      return dispatch_integer<long long, u64>(op, f);
    case Format::uint8:
      return dispatch_integer<unsigned char, unsigned char>(op, f);
    case Format::uint16:
      return dispatch_integer<unsigned short, unsigned short>(op, f);
    case Format::uint32:
      return dispatch_integer<unsigned, unsigned>(op, f);
    case Format::uint64:
      return dispatch_integer<u64, u64>(op, f);
    case Format::boolean:
      return dispatch_boolean(op, f);
    case Format::complex64:
      return dispatch_complex<Complex64Format>(op, f);
    case Format::complex128:
      return dispatch_complex<Complex128Format>(op, f);
  }
}

// ---- memory -------------------------------------------------------------------------------------

__device__ inline bool aligned_to(const void* p, u32 bytes) {
  return (reinterpret_cast<unsigned long long>(p) & (bytes - 1)) == 0;
}

template <int kBytes>
__device__ inline u64 load_small(const unsigned char* p) {
  if (aligned_to(p, kBytes)) {
    if constexpr (kBytes == 1) return __ldcg(p);
    if constexpr (kBytes == 2) return __ldcg(reinterpret_cast<const unsigned short*>(p));
    if constexpr (kBytes == 4) return __ldcg(reinterpret_cast<const u32*>(p));
    if constexpr (kBytes == 8) return __ldcg(reinterpret_cast<const u64*>(p));
  }
  u64 v = 0;
  for (int i = 0; i < kBytes; ++i) v |= static_cast<u64>(__ldcg(p + i)) << (8 * i);
  return v;
}
template <int kBytes>
__device__ inline void store_small(unsigned char* p, u64 v) {
  if (aligned_to(p, kBytes)) {
    if constexpr (kBytes == 1) *p = static_cast<unsigned char>(v);
    if constexpr (kBytes == 2) *reinterpret_cast<unsigned short*>(p) = v;
    if constexpr (kBytes == 4) *reinterpret_cast<u32*>(p) = static_cast<u32>(v);
    if constexpr (kBytes == 8) *reinterpret_cast<u64*>(p) = v;
    return;
  }
  for (int i = 0; i < kBytes; ++i) p[i] = static_cast<unsigned char>(v >> (8 * i));
}
// One element, in the low bytes of a unit; the others are zero.
template <class F>
__device__ inline typename F::Unit load_element(const unsigned char* p) {
  if constexpr (F::kElement == 16) {
    return {load_small<8>(p), load_small<8>(p + 8)};
  } else {
    return load_small<F::kElement>(p);
  }
}
template <class F>
__device__ inline void store_element(unsigned char* p, const typename F::Unit& u) {
  if constexpr (F::kElement == 16) {
    store_small<8>(p, u.low);
    store_small<8>(p + 8, u.high);
  } else {
    store_small<F::kElement>(p, u);
  }
}

}  // namespace collectives::device
