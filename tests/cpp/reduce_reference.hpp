// The scalar reference that reduce.hpp is checked against, and operands to check it on.
//
// It shares nothing with the code under test: narrow floats are decoded by formula and encoded by a
// search for the nearest of all values, and every rule about NaN is spelt out on bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "reduce_testing.hpp"

namespace reduce_test {

// ---- The reference: floats ----

template <class F>
struct Ieee;
template <>
struct Ieee<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kDefaultNan = 0xffc00000u;
};
template <>
struct Ieee<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kDefaultNan = 0xfff8000000000000u;
};

template <class F>
bool is_nan(F x) {
  using Bits = typename Ieee<F>::Bits;
  const Bits magnitude = bits_as<Bits>(x) << 1 >> 1;
  const Bits infinity = ((Bits(1) << (sizeof(F) * 8 - 1 - Ieee<F>::kMantissa)) - 1)
                        << Ieee<F>::kMantissa;
  return magnitude > infinity;
}

template <class F>
F quieted(F nan) {
  using Bits = typename Ieee<F>::Bits;
  return bits_as<F>(Bits(bits_as<Bits>(nan) | Bits(1) << (Ieee<F>::kMantissa - 1)));
}

template <class F>
F arithmetic(char op, F a, F b) {
  if (is_nan(a)) return quieted(a);
  if (is_nan(b)) return quieted(b);
  volatile F result = op == '+' ? a + b : op == '-' ? a - b : op == '*' ? a * b : a / b;
  const F out = result;
  return is_nan(out) ? bits_as<F>(Ieee<F>::kDefaultNan) : out;
}

template <class F>
F reference_float(Op op, F a, F b) {
  switch (op) {
    case Op::prod:
      return arithmetic('*', a, b);
    case Op::min:
    case Op::max:
      if (is_nan(a)) return quieted(a);
      if (is_nan(b)) return quieted(b);
      if (op == Op::min) return b < a ? b : a;
      return b > a ? b : a;
    default:
      return arithmetic('+', a, b);
  }
}

// A float of fewer than 32 bits: its parameters, all its values, and the code nearest to a float.
struct Narrow {
  int exponent_bits, mantissa_bits;
  bool infinities;
  std::vector<float> decoded;  // by code
  unsigned largest = 0;        // the code of the largest finite value

  Narrow(int exponent, int mantissa, bool inf)
      : exponent_bits(exponent), mantissa_bits(mantissa), infinities(inf) {
    for (unsigned code = 0; code <= sign_bit() * 2 - 1; ++code) decoded.push_back(decode(code));
    while (std::isfinite(decoded[largest + 1])) ++largest;
  }
  unsigned sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }

  float decode(unsigned code) const {
    const unsigned magnitude = code & (sign_bit() - 1);
    const unsigned sign = code & sign_bit() ? 0x80000000u : 0;
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const unsigned mantissa = magnitude & ((1u << mantissa_bits) - 1);
    const bool top = exponent == (1 << exponent_bits) - 1;
    const bool nan = infinities ? top && mantissa != 0 : magnitude == sign_bit() - 1;
    if (nan) {
      return bits_as<float>(sign | 0x7fc00000u |
                            (infinities ? mantissa << (23 - mantissa_bits) : 0));
    }
    if (infinities && top) return bits_as<float>(sign | 0x7f800000u);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double value = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                       : std::ldexp(mantissa + (1u << mantissa_bits),
                                                    exponent - bias - mantissa_bits);
    return static_cast<float>(sign ? -value : value);
  }

  unsigned encode(float value) const {
    const std::uint32_t bits = bits_as<std::uint32_t>(value);
    const unsigned sign = bits >> 31 ? sign_bit() : 0;
    if (is_nan(value)) {
      if (!infinities) return sign | (sign_bit() - 1);
      const unsigned top = ((1u << exponent_bits) - 1) << mantissa_bits;
      return sign | top | 1u << (mantissa_bits - 1) | (bits & 0x7fffff) >> (23 - mantissa_bits);
    }
    const unsigned overflow = infinities ? largest + 1 : sign_bit() - 1;
    const double magnitude = std::fabs(static_cast<double>(value));
    // The first value that is larger; beyond the largest, the one that a wider exponent would give.
    const double ulp =
        static_cast<double>(decoded[largest]) - static_cast<double>(decoded[largest - 1]);
    const double beyond = decoded[largest] + ulp;
    if (magnitude >= beyond) return sign | overflow;
    const auto above = std::upper_bound(decoded.begin(), decoded.begin() + largest + 1, magnitude,
                                        [](double m, float v) { return m < v; });
    const unsigned high = static_cast<unsigned>(above - decoded.begin()), low = high - 1;
    const double high_value = high > largest ? beyond : static_cast<double>(decoded[high]);
    const double to_low = magnitude - decoded[low], to_high = high_value - magnitude;
    const unsigned nearest = to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
    return sign | (nearest > largest ? overflow : nearest);
  }
};

inline const Narrow& narrow_of(Dtype dtype) {
  static const Narrow float16(5, 10, true), bfloat16(8, 7, true), e4m3(4, 3, false),
      e5m2(5, 2, true);
  switch (dtype) {
    case Dtype::float16:
      return float16;
    case Dtype::bfloat16:
      return bfloat16;
    case Dtype::float8_e4m3:
      return e4m3;
    default:
      return e5m2;
  }
}

// ---- The reference: one element of any dtype ----

template <class T>
T read(const unsigned char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
template <class T>
void write(unsigned char* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

using Operands = std::vector<const unsigned char*>;

template <class F>
void reference_real(Op op, const Operands& in, unsigned char* out, int divisor) {
  F acc = read<F>(in[0]);
  for (std::size_t s = 1; s < in.size(); ++s) acc = reference_float(op, acc, read<F>(in[s]));
  if (divisor != 1) acc = arithmetic('/', acc, static_cast<F>(divisor));
  write(out, acc);
}

template <class F>
void reference_complex(Op op, const Operands& in, unsigned char* out, int divisor) {
  F re = read<F>(in[0]), im = read<F>(in[0] + sizeof(F));
  for (std::size_t s = 1; s < in.size(); ++s) {
    const F c = read<F>(in[s]), d = read<F>(in[s] + sizeof(F));
    if (op == Op::prod) {
      const F real = arithmetic('-', arithmetic('*', re, c), arithmetic('*', im, d));
      im = arithmetic('+', arithmetic('*', re, d), arithmetic('*', im, c));
      re = real;
    } else {
      re = arithmetic('+', re, c);
      im = arithmetic('+', im, d);
    }
  }
  if (divisor != 1) {
    re = arithmetic('/', re, static_cast<F>(divisor));
    im = arithmetic('/', im, static_cast<F>(divisor));
  }
  write(out, re);
  write(out + sizeof(F), im);
}

template <class Code>
void reference_narrow(Dtype dtype, Op op, const Operands& in, unsigned char* out, int divisor) {
  const Narrow& n = narrow_of(dtype);
  float acc = n.decoded[read<Code>(in[0])];
  for (std::size_t s = 1; s < in.size(); ++s) {
    acc = reference_float(op, acc, n.decoded[read<Code>(in[s])]);
  }
  if (divisor != 1) acc = arithmetic('/', acc, static_cast<float>(divisor));
  write(out, static_cast<Code>(n.encode(acc)));
}

template <class T>
void reference_integer(Op op, const Operands& in, unsigned char* out) {
  T acc = read<T>(in[0]);
  for (std::size_t s = 1; s < in.size(); ++s) {
    const T b = read<T>(in[s]);
    const std::uint64_t x = static_cast<std::uint64_t>(acc), y = static_cast<std::uint64_t>(b);
    switch (op) {
      case Op::prod:
        acc = static_cast<T>(x * y);
        break;
      case Op::min:
        acc = std::min(acc, b);
        break;
      case Op::max:
        acc = std::max(acc, b);
        break;
      case Op::band:
        acc = static_cast<T>(x & y);
        break;
      case Op::bor:
        acc = static_cast<T>(x | y);
        break;
      case Op::bxor:
        acc = static_cast<T>(x ^ y);
        break;
      default:
        acc = static_cast<T>(x + y);
    }
  }
  write(out, acc);
}

inline void reference_bool(Op op, const Operands& in, unsigned char* out) {
  bool acc = *in[0] != 0;
  for (std::size_t s = 1; s < in.size(); ++s) {
    const bool b = *in[s] != 0;
    if (op == Op::sum || op == Op::max || op == Op::bor) acc = acc || b;
    if (op == Op::prod || op == Op::min || op == Op::band) acc = acc && b;
    if (op == Op::bxor) acc = acc != b;
  }
  *out = acc ? 1 : 0;
}

inline void reference(Dtype dtype, Op op, const Operands& in, unsigned char* out, int divisor) {
  if (in.size() == 1 && divisor == 1) {
    std::memcpy(out, in[0], cc::size_of(dtype));
    return;
  }
  switch (dtype) {
    case Dtype::float16:
    case Dtype::bfloat16:
      return reference_narrow<std::uint16_t>(dtype, op, in, out, divisor);
    case Dtype::float8_e4m3:
    case Dtype::float8_e5m2:
      return reference_narrow<std::uint8_t>(dtype, op, in, out, divisor);
    case Dtype::float32:
      return reference_real<float>(op, in, out, divisor);
    case Dtype::float64:
      return reference_real<double>(op, in, out, divisor);
    case Dtype::int8:
      return reference_integer<std::int8_t>(op, in, out);
    case Dtype::int16:
      return reference_integer<std::int16_t>(op, in, out);
    case Dtype::int32:
      return reference_integer<std::int32_t>(op, in, out);
    case Dtype::int64:
      return reference_integer<std::int64_t>(op, in, out);
    case Dtype::uint8:
      return reference_integer<std::uint8_t>(op, in, out);
    case Dtype::uint16:
      return reference_integer<std::uint16_t>(op, in, out);
    case Dtype::uint32:
      return reference_integer<std::uint32_t>(op, in, out);
    case Dtype::uint64:
      return reference_integer<std::uint64_t>(op, in, out);
    case Dtype::boolean:
      return reference_bool(op, in, out);
    case Dtype::complex64:
      return reference_complex<float>(op, in, out, divisor);
    case Dtype::complex128:
      return reference_complex<double>(op, in, out, divisor);
  }
}

// ---- Data ----

inline bool is_floating(Dtype d) {
  return static_cast<int>(d) <= static_cast<int>(Dtype::float8_e5m2);
}
inline bool is_complex(Dtype d) { return d == Dtype::complex64 || d == Dtype::complex128; }

template <class F>
F random_float() {
  using Bits = typename Ieee<F>::Bits;
  const Bits any = static_cast<Bits>(random_bits());
  const Bits sign = any & Bits(1) << (sizeof(F) * 8 - 1);
  const Bits infinity = bits_as<Bits>(F(INFINITY));
  const Bits below = (Bits(1) << Ieee<F>::kMantissa) - 1;
  switch (random_below(12)) {
    case 0:
      return bits_as<F>(any);
    case 1:
      return bits_as<F>(sign);
    case 2:
      return bits_as<F>(Bits(sign | (any & below)));  // subnormal
    case 3:
      return bits_as<F>(Bits(sign | infinity));
    case 4:
      return bits_as<F>(Bits(sign | infinity | (any & below) | 1));  // NaN, quiet or signalling
    case 5:
      return bits_as<F>(Bits(sign | (infinity - 1 - (any & 3))));  // near overflow
    case 6:
      return static_cast<F>(random_below(9) - 4);
    default:
      return static_cast<F>((random_below(1 << 20) - (1 << 19)) *
                            std::ldexp(1.0, random_below(20) - 24));
  }
}

inline void random_element(Dtype dtype, unsigned char* p) {
  const std::size_t size = cc::size_of(dtype);
  if (dtype == Dtype::float32 || dtype == Dtype::complex64) {
    for (std::size_t i = 0; i < size; i += 4) write(p + i, random_float<float>());
  } else if (dtype == Dtype::float64 || dtype == Dtype::complex128) {
    for (std::size_t i = 0; i < size; i += 8) write(p + i, random_float<double>());
  } else if (dtype == Dtype::boolean) {
    *p = static_cast<unsigned char>(random_below(3) == 0 ? random_bits() : random_bits() & 1);
  } else if (is_floating(dtype) && random_below(2) == 0) {
    const unsigned code = narrow_of(dtype).encode(random_float<float>());
    std::memcpy(p, &code, size);
  } else {
    const std::uint64_t any = random_below(4) == 0 ? 0u - random_bits() % 3 : random_bits();
    std::memcpy(p, &any, size);
  }
}

}  // namespace reduce_test
