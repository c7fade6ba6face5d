// The loops of reduce.hpp, written once for every instruction set.
//
// The including file defines, in collectives::(anonymous), vectors and primitives:
//   template <class T> using Vec        a vector of T
//   struct Simd {
//     kBytes           size of a vector
//     kAccumulators    vectors of partial results that a block keeps in registers
//     add, sub, mul, div                on Vec<float> and Vec<double>; of two NaNs the first one
//                                       survives, quieted
//     duplicate_even, duplicate_odd, swap_pairs, sub_add   what complex products need;
//                                       sub_add is a - b at even places, a + b at odd ones
//     widen_float16, narrow_float16     Vec<uint16_t> to two Vec<float> and back, with the elements
//                                       in any arrangement
//     load_partial<T>, store_partial<T> the first 0 < bytes < kBytes bytes, whole elements of type
//                                       T; the rest reads as zero and is not written
//     stream           a store to an aligned address that bypasses the caches
//   }
// and includes this file once. Compilers may swap the operands of a + b, which decides whose NaN
// survives; that is why float arithmetic goes through Simd. All else uses the compilers' vector
// operators.
//
// Every element goes through the same vector code wherever it lies: the head before an aligned
// address and the tail are loaded partially into full vectors. A block keeps its accumulators in
// registers while it walks over all sources, so narrow floats are rounded once and each operand is
// read once. Cost: nsrc reads and ndst writes of memory; a few nanoseconds of overhead.
#pragma once

#include "reduce_levels.hpp"

namespace collectives {
namespace {

// ---- Formats: how elements lie in memory, and the parts (full vectors) to compute with ----

SIMD_INLINE Vec<Byte> load(const Byte* p) {
  Vec<Byte> raw;
  __builtin_memcpy(&raw, p, sizeof raw);
  return raw;
}

SIMD_INLINE void store(Byte* p, Vec<Byte> raw) { __builtin_memcpy(p, &raw, sizeof raw); }

// x in every element. (Not x + 0: that would turn -0 into +0.)
template <class T>
SIMD_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

template <class T>
struct Plain {
  using Element = T;
  using Part = T;
  static constexpr int kParts = 1;
  static constexpr bool kIsFloat = T(0.5) != T(0);
  static SIMD_INLINE void widen(Vec<Byte> raw, Vec<T> (&parts)[1]) { parts[0] = (Vec<T>)raw; }
  static SIMD_INLINE Vec<Byte> narrow(const Vec<T> (&parts)[1]) { return (Vec<Byte>)parts[0]; }
};

// Any non-zero byte is true; stored as 1.
struct Boolean {
  using Element = Byte;
  using Part = Byte;
  static constexpr int kParts = 1;
  static constexpr bool kIsFloat = false;
  static SIMD_INLINE void widen(Vec<Byte> raw, Vec<Byte> (&parts)[1]) {
    parts[0] = (Vec<Byte>)(raw != 0) & Byte(1);
  }
  static SIMD_INLINE Vec<Byte> narrow(const Vec<Byte> (&parts)[1]) { return parts[0]; }
};

struct Float16 {
  using Element = std::uint16_t;
  using Part = float;
  static constexpr int kParts = 2;
  static constexpr bool kIsFloat = true;
  static SIMD_INLINE void widen(Vec<Byte> raw, Vec<float> (&parts)[2]) {
    Simd::widen_float16((Vec<std::uint16_t>)raw, parts[0], parts[1]);
  }
  static SIMD_INLINE Vec<Byte> narrow(const Vec<float> (&parts)[2]) {
    return (Vec<Byte>)Simd::narrow_float16(parts[0], parts[1]);
  }
};

// The upper half of a float32. Even elements are shifted up, odd ones masked: no lane is crossed.
struct Bfloat16 {
  using Element = std::uint16_t;
  using Part = float;
  using Bits = Vec<std::uint32_t>;
  static constexpr int kParts = 2;
  static constexpr bool kIsFloat = true;
  static SIMD_INLINE void widen(Vec<Byte> raw, Vec<float> (&parts)[2]) {
    const Bits pairs = (Bits)raw;
    parts[0] = (Vec<float>)(pairs << 16);
    parts[1] = (Vec<float>)(pairs & 0xffff0000u);
  }
  static SIMD_INLINE Vec<Byte> narrow(const Vec<float> (&parts)[2]) {
    return (Vec<Byte>)((round(parts[0]) >> 16) | (round(parts[1]) & 0xffff0000u));
  }
  // To nearest even in the upper 16 bits. NaNs keep theirs: the arithmetic before has made them
  // quiet.
  static SIMD_INLINE Bits round(Vec<float> value) {
    const Bits bits = (Bits)value;
    const Bits rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
    return value != value ? bits : rounded;
  }
};

// |value| rounded to nearest even to `kMantissa` bits after the leading one, but never finer than
// float16's smallest normal number allows (exponent -14). Adding 2^23 units of the last place
// leaves no room for less than one, and the hardware rounds. Values of 2^16 and more only need to
// stay that large: all overflow.
template <int kMantissa>
SIMD_INLINE Vec<float> round_to_mantissa(Vec<float> value) {
  using Bits = Vec<std::int32_t>;
  constexpr std::int32_t kLowest = (127 - 14) << 23;
  constexpr std::int32_t kHighest = (127 + 16) << 23;
  const Bits bits = (Bits)value;
  const Bits sign = bits & INT32_MIN;
  Bits exponent = bits & 0x7f800000;
  exponent = exponent < kLowest ? broadcast(kLowest) : exponent;
  exponent = exponent > kHighest ? broadcast(kHighest) : exponent;
  const Vec<float> shifter = (Vec<float>)((exponent + ((23 - kMantissa) << 23)) | sign);
  const Vec<float> rounded = Simd::sub(Simd::add(value, shifter), shifter);
  return (Vec<float>)((Bits)rounded | sign);  // small negative values came out as +0
}

// The upper half of a float16. Overflow gives infinity.
struct Float8E5M2 {
  using Element = std::uint8_t;
  using Part = float;
  using Lanes = Vec<std::uint16_t>;
  static constexpr int kParts = 4;
  static constexpr bool kIsFloat = true;
  static SIMD_INLINE void widen(Vec<Byte> raw, Vec<float> (&parts)[4]) {
    const Lanes pairs = (Lanes)raw;
    Simd::widen_float16(pairs << 8, parts[0], parts[1]);
    Simd::widen_float16(pairs & std::uint16_t(0xff00), parts[2], parts[3]);
  }
  static SIMD_INLINE Vec<Byte> narrow(const Vec<float> (&parts)[4]) {
    const Lanes even =
        Simd::narrow_float16(round_to_mantissa<2>(parts[0]), round_to_mantissa<2>(parts[1]));
    const Lanes odd =
        Simd::narrow_float16(round_to_mantissa<2>(parts[2]), round_to_mantissa<2>(parts[3]));
    return (Vec<Byte>)((even >> 8) | (odd & std::uint16_t(0xff00)));
  }
};

// Sign, 4 exponent bits, 3 of mantissa; S1111111 is NaN and there are no infinities: overflow gives
// NaN. With the exponent put where float16 has its lower four, a value reads as float16 2^-8 times
// too small, exactly.
struct Float8E4M3 {
  using Element = std::uint8_t;
  using Part = float;
  using Lanes = Vec<std::uint16_t>;
  static constexpr int kParts = 4;
  static constexpr bool kIsFloat = true;
  static SIMD_INLINE void widen(Vec<Byte> raw, Vec<float> (&parts)[4]) {
    const Lanes pairs = (Lanes)raw;
    Simd::widen_float16(to_float16(pairs << 8), parts[0], parts[1]);
    Simd::widen_float16(to_float16(pairs), parts[2], parts[3]);
    SIMD_UNROLL
    for (int i = 0; i < 4; ++i) parts[i] = Simd::mul(parts[i], broadcast(256.0f));
  }
  static SIMD_INLINE Vec<Byte> narrow(const Vec<float> (&parts)[4]) {
    Vec<float> rounded[4];
    SIMD_UNROLL
    for (int i = 0; i < 4; ++i) {
      rounded[i] = round_to_mantissa<3>(Simd::mul(parts[i], broadcast(0x1p-8f)));
    }
    const Lanes even = from_float16(Simd::narrow_float16(rounded[0], rounded[1]));
    const Lanes odd = from_float16(Simd::narrow_float16(rounded[2], rounded[3]));
    return (Vec<Byte>)((even >> 8) | odd);
  }
  // The element in the upper byte of each lane, as float16, 2^-8 times too small.
  static SIMD_INLINE Lanes to_float16(Lanes lanes) {
    const Lanes magnitude = lanes & std::uint16_t(0x7f00);
    const Lanes half = (lanes & std::uint16_t(0x8000)) | (magnitude >> 1);
    return magnitude == std::uint16_t(0x7f00) ? half | std::uint16_t(0x7e00) : half;
  }
  // Back into the upper byte; the lower one is zero.
  static SIMD_INLINE Lanes from_float16(Lanes half) {
    constexpr std::uint16_t kMax = 0x3f00;  // 448 * 2^-8
    const Lanes magnitude = half & std::uint16_t(0x7fff);
    const Lanes kept = magnitude > kMax ? broadcast(std::uint16_t(0x7f00)) : magnitude << 1;
    return kept | (half & std::uint16_t(0x8000));
  }
};

// ---- Ops: how two parts combine ----

template <class T>
constexpr bool kFloating = Plain<T>::kIsFloat;

struct Sum {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    if constexpr (kFloating<T>) {
      a = Simd::add(a, b);
    } else {
      a = a + b;
    }
  }
};

struct Prod {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    if constexpr (kFloating<T>) {
      a = Simd::mul(a, b);
    } else {
      a = a * b;
    }
  }
};

// Of equal operands (-0 and +0 are) the first. A NaN wins over everything, by way of a sum.
struct Min {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    const Vec<T> least = b < a ? b : a;
    if constexpr (kFloating<T>) {
      a = ((a != a) | (b != b)) ? Simd::add(a, b) : least;
    } else {
      a = least;
    }
  }
};

struct Max {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    const Vec<T> greatest = b > a ? b : a;
    if constexpr (kFloating<T>) {
      a = ((a != a) | (b != b)) ? Simd::add(a, b) : greatest;
    } else {
      a = greatest;
    }
  }
};

struct And {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    a = a & b;
  }
};

struct Or {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    a = a | b;
  }
};

struct Xor {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    a = a ^ b;
  }
};

// (a.re b.re - a.im b.im, a.re b.im + a.im b.re), each product and sum rounded; parts hold re, im,
// re, im, ...
struct ComplexProd {
  template <class T>
  static SIMD_INLINE void combine(Vec<T>& a, const Vec<T>& b, T) {
    a = Simd::sub_add(Simd::mul(Simd::duplicate_even(a), b),
                      Simd::mul(Simd::duplicate_odd(a), Simd::swap_pairs(b)));
  }
};

// ---- Posts: what happens to a part before it is narrowed ----

struct Keep {
  SIMD_INLINE bool applies() const { return false; }
  template <class V>
  SIMD_INLINE void apply(V&) const {}
};

template <class T>
struct DivideBy {
  bool divides;
  T divisor;
  SIMD_INLINE bool applies() const { return divides; }
  SIMD_INLINE void apply(Vec<T>& part) const { part = Simd::div(part, broadcast(divisor)); }
};

template <class T>
struct MultiplyBy {
  T factor;
  SIMD_INLINE bool applies() const { return true; }
  SIMD_INLINE void apply(Vec<T>& part) const { part = Simd::mul(part, broadcast(factor)); }
};

template <class T>
struct ComplexMultiplyBy {
  Vec<T> factor;
  SIMD_INLINE bool applies() const { return true; }
  SIMD_INLINE void apply(Vec<T>& part) const { ComplexProd::combine(part, factor, T()); }
};

// ---- Loops ----

// The first N pointers of an array, held in registers; N = 0: the array itself, for counts known at
// run time. (Stores of bytes may alias the caller's array, so a compiler reloads from it after each
// of them.)
template <class P, int N>
struct Pointers {
  P held[N];
  static constexpr int count() { return N; }
  template <class Source>
  SIMD_INLINE Pointers(Source* all, int) {
    for (int i = 0; i < N; ++i) held[i] = static_cast<P>(all[i]);
  }
  SIMD_INLINE P operator[](int i) const { return held[i]; }
};

template <>
struct Pointers<const Byte*, 0> {
  const void* const* all;
  int n;
  SIMD_INLINE Pointers(const void* const* all_, int n_) : all(all_), n(n_) {}
  SIMD_INLINE int count() const { return n; }
  SIMD_INLINE const Byte* operator[](int i) const { return static_cast<const Byte*>(all[i]); }
};

template <>
struct Pointers<Byte*, 0> {
  void* const* all;
  int n;
  SIMD_INLINE Pointers(void* const* all_, int n_) : all(all_), n(n_) {}
  SIMD_INLINE int count() const { return n; }
  SIMD_INLINE Byte* operator[](int i) const { return static_cast<Byte*>(all[i]); }
};

struct Buffers {
  void* const* dsts;
  int ndst;
  const void* const* srcs;
  int nsrc;
  std::size_t bytes;
  bool nontemporal;
};

SIMD_INLINE std::size_t misalignment(const Byte* p) {
  return reinterpret_cast<std::uintptr_t>(p) % Simd::kBytes;
}

// kSrc and kDst: the numbers of buffers where they are known when compiling, else 0.
template <class Format, class Op, class Post, int kSrc, int kDst>
struct Loop {
  using Part = typename Format::Part;
  using Parts = Vec<Part>[Format::kParts];
  static constexpr std::size_t kV = Simd::kBytes;
  // Vectors in a block: more hide latencies better, until registers run out.
  static constexpr int kBlock = Simd::kAccumulators / Format::kParts;
  // From here on a store that splits a cache line costs more than stepping to an aligned address
  // first.
  static constexpr std::size_t kAlignFrom = 16 * kV;

  Pointers<const Byte*, kSrc> srcs;
  Pointers<Byte*, kDst> dsts;
  bool nontemporal;
  const Post& post;

  template <int kVectors>
  SIMD_INLINE void finish(Parts (&acc)[kVectors]) const {
    if (!post.applies()) return;
    SIMD_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      SIMD_UNROLL
      for (int p = 0; p < Format::kParts; ++p) post.apply(acc[v][p]);
    }
  }

  static SIMD_INLINE void combine(Parts& a, Vec<Byte> raw) {
    Parts b;
    Format::widen(raw, b);
    SIMD_UNROLL
    for (int p = 0; p < Format::kParts; ++p) Op::combine(a[p], b[p], Part());
  }

  template <int kVectors>
  SIMD_INLINE void block(std::size_t at) const {
    Parts acc[kVectors];
    SIMD_UNROLL
    for (int v = 0; v < kVectors; ++v) Format::widen(load(srcs[0] + at + v * kV), acc[v]);
    for (int s = 1; s < srcs.count(); ++s) {
      SIMD_UNROLL
      for (int v = 0; v < kVectors; ++v) combine(acc[v], load(srcs[s] + at + v * kV));
    }
    finish(acc);
    Vec<Byte> raw[kVectors];
    SIMD_UNROLL
    for (int v = 0; v < kVectors; ++v) raw[v] = Format::narrow(acc[v]);
    for (int d = 0; d < dsts.count(); ++d) {
      Byte* const to = dsts[d] + at;
      if (nontemporal && misalignment(to) == 0) {
        SIMD_UNROLL
        for (int v = 0; v < kVectors; ++v) Simd::stream(to + v * kV, raw[v]);
      } else {
        SIMD_UNROLL
        for (int v = 0; v < kVectors; ++v) store(to + v * kV, raw[v]);
      }
    }
  }

  // 0 < bytes < kV: the same in part of a vector.
  SIMD_INLINE void partial(std::size_t at, std::size_t bytes) const {
    using Element = typename Format::Element;
    Parts acc[1];
    Format::widen(Simd::template load_partial<Element>(srcs[0] + at, bytes), acc[0]);
    for (int s = 1; s < srcs.count(); ++s) {
      combine(acc[0], Simd::template load_partial<Element>(srcs[s] + at, bytes));
    }
    finish(acc);
    const Vec<Byte> raw = Format::narrow(acc[0]);
    for (int d = 0; d < dsts.count(); ++d) {
      Simd::template store_partial<Element>(dsts[d] + at, bytes, raw);
    }
  }

  SIMD_INLINE void all(std::size_t bytes) const {
    std::size_t at = 0;
    if (bytes >= kAlignFrom) {
      const std::size_t head = (kV - misalignment(dsts[0])) % kV;
      if (head != 0 && head % sizeof(typename Format::Element) == 0) {
        partial(0, head);
        at = head;
      }
    }
    for (; bytes - at >= kBlock * kV; at += kBlock * kV) block<kBlock>(at);
    for (; bytes - at >= kV; at += kV) block<1>(at);
    if (at < bytes) partial(at, bytes - at);
  }

  static SIMD_NOINLINE void run(const Buffers& b, const Post& post) {
    const Loop loop{{b.srcs, b.nsrc}, {b.dsts, b.ndst}, b.nontemporal, post};
    loop.all(b.bytes);
  }
};

// Sums, which are nearly all that is reduced, have loops of their own for the numbers of buffers
// that two ranks need. (The same for every op and format would treble the compile time.)
template <class Format, class Op, class Post>
SIMD_INLINE void run(const Buffers& b, const Post& post) {
  if constexpr (std::is_same_v<Op, Sum>) {
    if (b.nsrc == 2 && b.ndst == 1) return Loop<Format, Op, Post, 2, 1>::run(b, post);
    if (b.nsrc == 2 && b.ndst == 2) return Loop<Format, Op, Post, 2, 2>::run(b, post);
  }
  Loop<Format, Op, Post, 0, 0>::run(b, post);
}

// ---- The functions in the table ----

template <class Format, class Op>
void reduce(void* const* dsts, int ndst, const void* const* srcs, int nsrc, std::size_t count,
            const Finish& finish) {
  constexpr bool kDivides = Format::kIsFloat && std::is_same_v<Op, Sum>;
  if constexpr (Format::kIsFloat) {
    if (__builtin_expect(!float_mode_is_standard(), 0)) {
      in_standard_float_mode(&reduce<Format, Op>, dsts, ndst, srcs, nsrc, count, finish);
      return;
    }
  }
  const Buffers b{
      dsts, ndst, srcs, nsrc, count * sizeof(typename Format::Element), finish.nontemporal};
  const bool divide = kDivides && finish.divisor != 1;
  if (nsrc == 1 && !divide) {
    copy_to_all(dsts, ndst, srcs[0], b.bytes, b.nontemporal);
    return;
  }
  if constexpr (kDivides) {
    using Part = typename Format::Part;
    run<Format, Op>(b, DivideBy<Part>{divide, static_cast<Part>(finish.divisor)});
  } else {
    run<Format, Op>(b, Keep{});
  }
}

// A kernel on elements `k` times smaller: a complex sum is a sum of floats, a bitwise op one of
// bytes.
template <ReduceFn kernel, int k>
void in_units(void* const* dsts, int ndst, const void* const* srcs, int nsrc, std::size_t count,
              const Finish& finish) {
  kernel(dsts, ndst, srcs, nsrc, count * k, finish);
}

template <class Format>
void scale_real(void* dst, const void* src, std::size_t count, double re, double im) {
  if (__builtin_expect(!float_mode_is_standard(), 0)) {
    in_standard_float_mode(&scale_real<Format>, dst, src, count, re, im);
    return;
  }
  using Part = typename Format::Part;
  using Post = MultiplyBy<Part>;
  const Buffers b{&dst, 1, &src, 1, count * sizeof(typename Format::Element), false};
  Loop<Format, Sum, Post, 1, 1>::run(b, Post{static_cast<Part>(re)});
}

template <class T>
void scale_complex(void* dst, const void* src, std::size_t count, double re, double im) {
  if (im == 0.0) {  // componentwise, so that an infinite part does not turn the other into NaN
    scale_real<Plain<T>>(dst, src, count * 2, re, im);
    return;
  }
  if (__builtin_expect(!float_mode_is_standard(), 0)) {
    in_standard_float_mode(&scale_complex<T>, dst, src, count, re, im);
    return;
  }
  using Post = ComplexMultiplyBy<T>;
  Vec<T> factor;
  for (std::size_t i = 0; i < sizeof factor / sizeof(T); ++i) {
    factor[i] = static_cast<T>(i % 2 ? im : re);
  }
  const Buffers b{&dst, 1, &src, 1, count * 2 * sizeof(T), false};
  Loop<Plain<T>, Sum, Post, 1, 1>::run(b, Post{factor});
}

void copy_nontemporal(void* dst, const void* src, std::size_t bytes) {
  const Buffers b{&dst, 1, &src, 1, bytes, true};
  Loop<Plain<Byte>, Or, Keep, 1, 1>::run(b, Keep{});
}

// ---- The table ----

constexpr int index_of(Dtype dtype) { return static_cast<int>(dtype); }
constexpr int index_of(Op op) { return static_cast<int>(op); }

template <class Format>
constexpr void fill_floats(Kernels& k, Dtype dtype) {
  ReduceFn* const row = k.reduce[index_of(dtype)];
  row[index_of(Op::sum)] = row[index_of(Op::avg)] = row[index_of(Op::premul_sum)] =
      &reduce<Format, Sum>;
  row[index_of(Op::prod)] = &reduce<Format, Prod>;
  row[index_of(Op::min)] = &reduce<Format, Min>;
  row[index_of(Op::max)] = &reduce<Format, Max>;
  k.scale[index_of(dtype)] = &scale_real<Format>;
}

template <class T>
constexpr void fill_complex(Kernels& k, Dtype dtype) {
  ReduceFn* const row = k.reduce[index_of(dtype)];
  row[index_of(Op::sum)] = row[index_of(Op::avg)] = row[index_of(Op::premul_sum)] =
      &in_units<&reduce<Plain<T>, Sum>, 2>;
  row[index_of(Op::prod)] = &in_units<&reduce<Plain<T>, ComplexProd>, 2>;
  k.scale[index_of(dtype)] = &scale_complex<T>;
}

// T: the type itself. Unsigned: the same width, whose sums and products wrap.
template <class T, class Unsigned>
constexpr void fill_integers(Kernels& k, Dtype dtype) {
  constexpr int kSize = sizeof(T);
  ReduceFn* const row = k.reduce[index_of(dtype)];
  row[index_of(Op::sum)] = &reduce<Plain<Unsigned>, Sum>;
  row[index_of(Op::prod)] = &reduce<Plain<Unsigned>, Prod>;
  row[index_of(Op::min)] = &reduce<Plain<T>, Min>;
  row[index_of(Op::max)] = &reduce<Plain<T>, Max>;
  row[index_of(Op::band)] = &in_units<&reduce<Plain<Byte>, And>, kSize>;
  row[index_of(Op::bor)] = &in_units<&reduce<Plain<Byte>, Or>, kSize>;
  row[index_of(Op::bxor)] = &in_units<&reduce<Plain<Byte>, Xor>, kSize>;
}

constexpr void fill_booleans(Kernels& k) {
  ReduceFn* const row = k.reduce[index_of(Dtype::boolean)];
  row[index_of(Op::sum)] = row[index_of(Op::max)] = row[index_of(Op::bor)] = &reduce<Boolean, Or>;
  row[index_of(Op::prod)] = row[index_of(Op::min)] = row[index_of(Op::band)] =
      &reduce<Boolean, And>;
  row[index_of(Op::bxor)] = &reduce<Boolean, Xor>;
}

constexpr Kernels make_kernels(const char* level) {
  Kernels k{};
  k.level = level;
  fill_floats<Float16>(k, Dtype::float16);
  fill_floats<Bfloat16>(k, Dtype::bfloat16);
  fill_floats<Plain<float>>(k, Dtype::float32);
  fill_floats<Plain<double>>(k, Dtype::float64);
  fill_floats<Float8E4M3>(k, Dtype::float8_e4m3);
  fill_floats<Float8E5M2>(k, Dtype::float8_e5m2);
  fill_integers<std::int8_t, std::uint8_t>(k, Dtype::int8);
  fill_integers<std::int16_t, std::uint16_t>(k, Dtype::int16);
  fill_integers<std::int32_t, std::uint32_t>(k, Dtype::int32);
  fill_integers<std::int64_t, std::uint64_t>(k, Dtype::int64);
  fill_integers<std::uint8_t, std::uint8_t>(k, Dtype::uint8);
  fill_integers<std::uint16_t, std::uint16_t>(k, Dtype::uint16);
  fill_integers<std::uint32_t, std::uint32_t>(k, Dtype::uint32);
  fill_integers<std::uint64_t, std::uint64_t>(k, Dtype::uint64);
  fill_booleans(k);
  fill_complex<float>(k, Dtype::complex64);
  fill_complex<double>(k, Dtype::complex128);
  k.copy_nontemporal = &copy_nontemporal;
  return k;
}

}  // namespace
}  // namespace collectives
