// Dispatch for reduce.hpp, and its portable kernels: 16-byte vectors in plain C++.
#include "reduce.hpp"

#include <atomic>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "reduce_levels.hpp"

namespace collectives {
namespace {

template <class T>
using Vec = typename VectorOf<T, 16>::type;

// The bits of a float type, and in them the quiet bit and what x86 calls the default NaN.
template <class T>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Type = std::uint32_t;
  static constexpr Type kQuiet = 0x00400000, kDefaultNan = 0xffc00000;
};
template <>
struct FloatBits<double> {
  using Type = std::uint64_t;
  static constexpr Type kQuiet = 0x0008000000000000, kDefaultNan = 0xfff8000000000000;
};

struct Simd {
  static constexpr int kBytes = 16;
  static constexpr int kAccumulators = 4;

  // Which operand's NaN a sum returns depends on how the compiler placed the operands, and on the
  // CPU; so NaNs are put in by hand: the first operand's, else the second's, else (inf - inf, 0 *
  // inf) the default one of x86.
  template <class V>
  static SIMD_INLINE V with_first_nan(V result, V a, V b) {
    using Element = std::remove_reference_t<decltype(result[0])>;
    using Traits = FloatBits<Element>;
    using Bits = Vec<typename Traits::Type>;
    const Bits second = b != b ? (Bits)b | Traits::kQuiet : Bits{} + Traits::kDefaultNan;
    const Bits nan = a != a ? (Bits)a | Traits::kQuiet : second;
    return (V)(result != result ? nan : (Bits)result);
  }

  template <class V>
  static SIMD_INLINE V add(V a, V b) {
    return with_first_nan<V>(a + b, a, b);
  }
  template <class V>
  static SIMD_INLINE V sub(V a, V b) {
    return with_first_nan<V>(a - b, a, b);
  }
  template <class V>
  static SIMD_INLINE V mul(V a, V b) {
    return with_first_nan<V>(a * b, a, b);
  }
  template <class V>
  static SIMD_INLINE V div(V a, V b) {
    return with_first_nan<V>(a / b, a, b);
  }

  static SIMD_INLINE Vec<float> duplicate_even(Vec<float> a) {
    return Vec<float>{a[0], a[0], a[2], a[2]};
  }
  static SIMD_INLINE Vec<float> duplicate_odd(Vec<float> a) {
    return Vec<float>{a[1], a[1], a[3], a[3]};
  }
  static SIMD_INLINE Vec<float> swap_pairs(Vec<float> a) {
    return Vec<float>{a[1], a[0], a[3], a[2]};
  }
  static SIMD_INLINE Vec<float> sub_add(Vec<float> a, Vec<float> b) {
    const Vec<float> difference = sub(a, b), total = add(a, b);
    return Vec<float>{difference[0], total[1], difference[2], total[3]};
  }
  static SIMD_INLINE Vec<double> duplicate_even(Vec<double> a) { return Vec<double>{a[0], a[0]}; }
  static SIMD_INLINE Vec<double> duplicate_odd(Vec<double> a) { return Vec<double>{a[1], a[1]}; }
  static SIMD_INLINE Vec<double> swap_pairs(Vec<double> a) { return Vec<double>{a[1], a[0]}; }
  static SIMD_INLINE Vec<double> sub_add(Vec<double> a, Vec<double> b) {
    return Vec<double>{sub(a, b)[0], add(a, b)[1]};
  }

  using Bits = Vec<std::uint32_t>;

  static SIMD_INLINE void widen_float16(Vec<std::uint16_t> half, Vec<float>& even,
                                        Vec<float>& odd) {
    even = float_of((Bits)half & 0xffffu);
    odd = float_of((Bits)half >> 16);
  }
  static SIMD_INLINE Vec<std::uint16_t> narrow_float16(Vec<float> even, Vec<float> odd) {
    return (Vec<std::uint16_t>)(half_of(even) | (half_of(odd) << 16));
  }

  // One float16 in each lane's lower half.
  static SIMD_INLINE Vec<float> float_of(Bits half) {
    constexpr std::uint32_t kRebias = (127 - 15) << 23;
    const Bits magnitude = (half & 0x7fffu) << 13;
    const Bits normal = magnitude + kRebias;
    // 0.m · 2^-14 as 1.m · 2^-14 - 2^-14: exact, and no float32 subnormal arises, which would be
    // slow.
    const Bits subnormal =
        (Bits)((Vec<float>)(magnitude + (kRebias + (1u << 23))) - (Vec<float>{} + 0x1p-14f));
    const Bits special =
        (magnitude | 0x7f800000u) | (magnitude > (31u << 23) ? Bits{} + 0x00400000u : Bits{});
    const Bits finite = magnitude < (1u << 23) ? subnormal : normal;
    const Bits bits = magnitude >= (31u << 23) ? special : finite;
    return (Vec<float>)(bits | ((half & 0x8000u) << 16));
  }
  static SIMD_INLINE Bits half_of(Vec<float> value) {
    constexpr std::uint32_t kRebias = (127 - 15) << 23;
    const Bits magnitude = (Bits)value & 0x7fffffffu;
    const Bits normal = (magnitude + (((magnitude >> 13) & 1u) + 0xfffu) - kRebias) >> 13;
    // Adding 2^23 smallest float16 subnormals makes them the unit of the last place: the hardware
    // rounds.
    const Vec<float> unit = Vec<float>{} + 0.5f;
    const Bits subnormal = (Bits)((Vec<float>)magnitude + unit) - (Bits)unit;
    const Bits finite = magnitude < std::uint32_t((127 - 14) << 23) ? subnormal : normal;
    const Bits infinite = Bits{} + 0x7c00u;
    const Bits nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
    // From 65520 on, half way between the largest float16 and 2^16, all round up.
    const Bits large = magnitude > 0x7f800000u ? nan : infinite;
    const Bits half = magnitude >= 0x477ff000u ? large : finite;
    return half | (((Bits)value >> 16) & 0x8000u);
  }

  template <class T>
  static SIMD_INLINE Vec<Byte> load_partial(const Byte* p, std::size_t bytes) {
    Vec<Byte> raw = {};
    copy_small<kBytes>(reinterpret_cast<Byte*>(&raw), p, bytes);
    return raw;
  }
  template <class T>
  static SIMD_INLINE void store_partial(Byte* p, std::size_t bytes, Vec<Byte> raw) {
    copy_small<kBytes>(p, reinterpret_cast<const Byte*>(&raw), bytes);
  }
  static SIMD_INLINE void stream(Byte* p, Vec<Byte> raw) {
#if defined(__x86_64__)
    float lanes[4];
    __builtin_memcpy(lanes, &raw, sizeof raw);
    _mm_stream_ps(reinterpret_cast<float*>(p), _mm_loadu_ps(lanes));
#else
    __builtin_memcpy(p, &raw, sizeof raw);
#endif
  }
};

}  // namespace
}  // namespace collectives

#include "reduce_kernels.hpp"

namespace collectives {
namespace {

constexpr Kernels kKernels = make_kernels("portable");

const Kernels& choose_kernels() {
  const char* const forced = std::getenv("COLLECTIVES_SIMD");
  std::string name;
  for (const char* c = forced; c != nullptr && *c != '\0'; ++c)
    if (!std::isspace(static_cast<unsigned char>(*c)))
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  if (name.empty() || name == "auto") {
    if (const Kernels* k = avx512_kernels()) return *k;
    if (const Kernels* k = avx2_kernels()) return *k;
    return kKernels;
  }
  const Kernels* chosen = nullptr;
  if (name == "avx512") {
    chosen = avx512_kernels();
  } else if (name == "avx2") {
    chosen = avx2_kernels();
  } else if (name == "portable") {
    chosen = &kKernels;
  } else {
    const std::string near = nearest_name(name, {"auto", "portable", "avx2", "avx512"});
    throw std::invalid_argument("COLLECTIVES_SIMD='" + name + "' is no instruction set level; " +
                                (near.empty() ? "" : "did you mean '" + near + "'? ") +
                                "known: auto, portable, avx2, avx512");
  }
  if (chosen == nullptr) {
    throw std::runtime_error("COLLECTIVES_SIMD=" + name +
                             " is not supported by this CPU; unset it to use the best level");
  }
  return *chosen;
}

const Kernels& chosen_kernels() {
  static const Kernels& chosen = choose_kernels();
  return chosen;
}

}  // namespace

const Kernels* portable_kernels() { return &kKernels; }

#if defined(__x86_64__)
namespace {
class StandardFloatMode {
 public:
  StandardFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kStandardMxcsr); }
  ~StandardFloatMode() { _mm_setcsr(saved_); }
  StandardFloatMode(const StandardFloatMode&) = delete;
  StandardFloatMode& operator=(const StandardFloatMode&) = delete;

 private:
  unsigned saved_;
};
}  // namespace
#else
namespace {
struct StandardFloatMode {
  StandardFloatMode() {}
  ~StandardFloatMode() {}
};
}  // namespace
#endif

void in_standard_float_mode(ReduceFn kernel, void* const* dsts, int ndst, const void* const* srcs,
                            int nsrc, std::size_t count, const Finish& finish) {
  const StandardFloatMode mode;
  kernel(dsts, ndst, srcs, nsrc, count, finish);
}

void in_standard_float_mode(ScaleFn kernel, void* dst, const void* src, std::size_t count,
                            double re, double im) {
  const StandardFloatMode mode;
  kernel(dst, src, count, re, im);
}

ReduceFn reduce_fn(Reduction reduction) {
  const ReduceFn fn = chosen_kernels().reduce[index_of(reduction.dtype)][index_of(reduction.op)];
  if (fn == nullptr) throw std::invalid_argument(why_unsupported(reduction.op, reduction.dtype));
  return fn;
}

void scale(Dtype dtype, void* dst, const void* src, std::size_t count, double re, double im) {
  const ScaleFn fn = chosen_kernels().scale[index_of(dtype)];
  if (fn == nullptr) throw std::invalid_argument(why_unsupported(Op::premul_sum, dtype));
  const bool is_complex = dtype == Dtype::complex64 || dtype == Dtype::complex128;
  if (im != 0.0 && !is_complex) {
    throw std::invalid_argument("cannot scale " + std::string(name_of(dtype)) +
                                " by a complex factor; give a real one, or use a complex dtype");
  }
  fn(dst, src, count, re, im);
}

void copy_bytes(void* dst, const void* src, std::size_t bytes, bool nontemporal) {
  if (bytes == 0 || dst == src) return;
  if (nontemporal) {
    chosen_kernels().copy_nontemporal(dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

void copy_to_all(void* const* dsts, int ndst, const void* src, std::size_t bytes,
                 bool nontemporal) {
  for (int d = 0; d < ndst; ++d) copy_bytes(dsts[d], src, bytes, nontemporal);
}

void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

const char* simd_level() { return chosen_kernels().level; }

}  // namespace collectives
