// Checks reduce.hpp bit for bit against a scalar reference, on every instruction-set level of this
// CPU, and times it.
//
//   test_reduce          all checks, a few seconds; prints the first failing case and exits with 1
//   test_reduce --quick  fewer counts and codes, for sanitizers
//   test_reduce --bench  GB/s read and written, and nanoseconds of small calls, per level
//
// The reference shares nothing with the code under test: narrow floats are decoded by formula and
// encoded by a search for the nearest of all values, and every rule about NaN is spelt out on bits.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/reduce.hpp"
#include "../../csrc/reduce_levels.hpp"
#include "../../csrc/types.hpp"

namespace cc = collectives;
using cc::Dtype;
using cc::Op;

namespace {

bool quick = false;
int checks = 0;

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  std::fputs("FAILED: ", stderr);
  std::vfprintf(stderr, format, args);
  std::fputc('\n', stderr);
  va_end(args);
  std::exit(1);
}

void expect(bool ok, const std::string& what) {
  ++checks;
  if (!ok) fail("%s", what.c_str());
}

// Those that this CPU has, the plainest first.
const std::vector<const cc::Kernels*>& levels() {
  static const std::vector<const cc::Kernels*> all = [] {
    std::vector<const cc::Kernels*> found;
    for (const cc::Kernels* k :
         {cc::portable_kernels(), cc::avx2_kernels(), cc::avx512_kernels()}) {
      if (k != nullptr) found.push_back(k);
    }
    return found;
  }();
  return all;
}

std::uint64_t random_state = 0x9e3779b97f4a7c15;
std::uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1d;
}
int random_below(int n) {
  return static_cast<int>((random_bits() >> 33) % static_cast<unsigned>(n));
}

template <class To, class From>
To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

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

const Narrow& narrow_of(Dtype dtype) {
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

void reference_bool(Op op, const Operands& in, unsigned char* out) {
  bool acc = *in[0] != 0;
  for (std::size_t s = 1; s < in.size(); ++s) {
    const bool b = *in[s] != 0;
    if (op == Op::sum || op == Op::max || op == Op::bor) acc = acc || b;
    if (op == Op::prod || op == Op::min || op == Op::band) acc = acc && b;
    if (op == Op::bxor) acc = acc != b;
  }
  *out = acc ? 1 : 0;
}

void reference(Dtype dtype, Op op, const Operands& in, unsigned char* out, int divisor) {
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

bool is_floating(Dtype d) { return static_cast<int>(d) <= static_cast<int>(Dtype::float8_e5m2); }
bool is_complex(Dtype d) { return d == Dtype::complex64 || d == Dtype::complex128; }

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

void random_element(Dtype dtype, unsigned char* p) {
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

std::string hex(const unsigned char* p, std::size_t size) {
  std::string out = "0x";
  char digits[3];
  for (std::size_t i = size; i-- > 0;) {
    std::snprintf(digits, sizeof digits, "%02x", p[i]);
    out += digits;
  }
  return out;
}

// ---- Checks ----

constexpr std::size_t kMaxCount = 4099;
constexpr int kMaxSources = 9;
constexpr int kMaxDestinations = 3;
constexpr std::size_t kMargin = 128;  // bytes around each buffer that must stay as they are
constexpr unsigned char kCanary = 0xa5;

std::vector<std::size_t> counts() {
  std::vector<std::size_t> c;
  for (std::size_t i = 0; i <= 70; i += quick ? 3 : 1) c.push_back(i);
  for (std::size_t i : {127, 128, 129, 1000}) c.push_back(i);
  if (!quick) c.push_back(kMaxCount);
  return c;
}

// Bytes by which source s and destination d are off a multiple of 64.
struct Alignment {
  const char* name;
  std::size_t (*source)(int s, std::size_t size);
  std::size_t (*destination)(int d, std::size_t size);
};
constexpr Alignment kAlignments[] = {
    {"aligned", [](int, std::size_t) -> std::size_t { return 0; },
     [](int, std::size_t) -> std::size_t { return 0; }},
    {"by elements", [](int s, std::size_t size) { return size * ((s * 7u + 3) % 16) % 64; },
     [](int d, std::size_t size) { return size * (d == 1 ? 5u : 5u + d * 64 / size) % 128; }},
    {"by bytes", [](int s, std::size_t) -> std::size_t { return (s * 5u + 1) % 64; },
     [](int d, std::size_t) -> std::size_t { return 3u + 8u * d; }},
};

struct Buffer {
  std::vector<unsigned char> storage;
  unsigned char* at(std::size_t offset) {
    const auto base = reinterpret_cast<std::uintptr_t>(storage.data());
    return storage.data() + (64 - base % 64) % 64 + kMargin + offset;
  }
  explicit Buffer(std::size_t bytes) : storage(bytes + 2 * kMargin + 256) {}
};

class CaseRunner {
 public:
  CaseRunner(Dtype dtype, Op op) : dtype_(dtype), op_(op), size_(cc::size_of(dtype)) {
    for (int s = 0; s < kMaxSources; ++s) {
      data_.emplace_back(kMaxCount * size_);
      for (std::size_t i = 0; i < kMaxCount; ++i)
        random_element(dtype, data_.back().data() + i * size_);
      sources_.emplace_back(kMaxCount * size_);
    }
    for (int d = 0; d < kMaxDestinations; ++d) destinations_.emplace_back(kMaxCount * size_);
  }

  void run() {
    for (int nsrc = 1; nsrc <= kMaxSources; ++nsrc) {
      std::vector<int> divisors = {1};
      if (op_ == Op::avg && nsrc > 1) divisors.push_back(nsrc);
      if (op_ == Op::avg && nsrc % 4 == 1) divisors.push_back(3);
      for (int divisor : divisors) {
        compute_reference(nsrc, divisor);
        for (const cc::Kernels* level : levels()) {
          for (const Alignment& alignment : kAlignments) {
            for (int ndst = 1; ndst <= kMaxDestinations; ++ndst) {
              for (std::size_t count : counts()) one(*level, alignment, nsrc, ndst, count, divisor);
            }
          }
        }
      }
    }
  }

 private:
  void compute_reference(int nsrc, int divisor) {
    expected_.assign(kMaxCount * size_, 0);
    Operands in(nsrc);
    for (std::size_t i = 0; i < kMaxCount; ++i) {
      for (int s = 0; s < nsrc; ++s) in[s] = data_[s].data() + i * size_;
      reference(dtype_, op_, in, expected_.data() + i * size_, divisor);
    }
  }

  void one(const cc::Kernels& level, const Alignment& alignment, int nsrc, int ndst,
           std::size_t count, int divisor) {
    const std::size_t bytes = count * size_;
    const int turn = turn_++;
    const bool nontemporal = turn % 2 != 0;
    const int in_place = turn % 5 - 1;  // this destination is also a source; -1 and >= ndst: none
    const void* srcs[kMaxSources];
    for (int s = 0; s < nsrc; ++s) {
      unsigned char* const p = sources_[s].at(alignment.source(s, size_));
      std::memcpy(p, data_[s].data(), bytes);
      srcs[s] = p;
    }
    void* dsts[kMaxDestinations];
    for (int d = 0; d < ndst; ++d) {
      unsigned char* const p = destinations_[d].at(alignment.destination(d, size_));
      dsts[d] = p;
      if (d == in_place) {
        const int s = turn / 5 % nsrc;
        std::memcpy(p, data_[s].data(), bytes);
        srcs[s] = p;
      } else {
        std::memset(p, kCanary, bytes);
      }
      std::memset(p - kMargin, kCanary, kMargin);
      std::memset(p + bytes, kCanary, kMargin);
    }
    cc::Finish finish;
    finish.divisor = divisor;
    finish.nontemporal = nontemporal;
    level.reduce[static_cast<int>(dtype_)][static_cast<int>(op_)](dsts, ndst, srcs, nsrc, count,
                                                                  finish);
    cc::store_fence();
    ++checks;
    const auto where = [&](int d) {
      return std::string(cc::name_of(dtype_)) + " " + std::string(cc::name_of(op_)) + ", " +
             level.level + ", nsrc " + std::to_string(nsrc) + ", ndst " + std::to_string(ndst) +
             ", count " + std::to_string(count) + ", divisor " + std::to_string(divisor) + ", " +
             alignment.name + (nontemporal ? ", nontemporal" : "") +
             (in_place >= 0 && in_place < ndst ? ", in place" : "") + ": destination " +
             std::to_string(d);
    };
    for (int d = 0; d < ndst; ++d) {
      const unsigned char* const p = static_cast<unsigned char*>(dsts[d]);
      if (std::memcmp(p, expected_.data(), bytes) != 0) {
        std::size_t i = 0;
        while (std::memcmp(p + i * size_, expected_.data() + i * size_, size_) == 0) ++i;
        std::string operands;
        for (int s = 0; s < nsrc; ++s) operands += " " + hex(data_[s].data() + i * size_, size_);
        fail("%s, element %zu of operands%s is %s, expected %s", where(d).c_str(), i,
             operands.c_str(), hex(p + i * size_, size_).c_str(),
             hex(expected_.data() + i * size_, size_).c_str());
      }
      for (std::size_t i = 0; i < kMargin; ++i) {
        if (p[bytes + i] != kCanary) fail("%s: wrote past the end, at +%zu", where(d).c_str(), i);
        if ((p - kMargin)[i] != kCanary) fail("%s: wrote before the start", where(d).c_str());
      }
    }
  }

  Dtype dtype_;
  Op op_;
  std::size_t size_;
  std::vector<std::vector<unsigned char>> data_;
  std::vector<Buffer> sources_, destinations_;
  std::vector<unsigned char> expected_;
  int turn_ = 0;
};

template <class Body>
void for_each_supported(Body body) {
  for (int d = 0; d < cc::kDtypeCount; ++d) {
    for (int o = 0; o < cc::kOpCount; ++o) {
      const auto dtype = static_cast<Dtype>(d);
      const auto op = static_cast<Op>(o);
      if (cc::why_unsupported(op, dtype).empty()) body(dtype, op);
    }
  }
}

void check_table() {
  for (const cc::Kernels* level : levels()) {
    for (int d = 0; d < cc::kDtypeCount; ++d) {
      for (int o = 0; o < cc::kOpCount; ++o) {
        const std::string why = cc::why_unsupported(static_cast<Op>(o), static_cast<Dtype>(d));
        expect((level->reduce[d][o] == nullptr) == !why.empty(),
               std::string(level->level) + ": the kernel table and why_unsupported disagree: " +
                   std::string(cc::name_of(static_cast<Dtype>(d))) + " " +
                   std::string(cc::name_of(static_cast<Op>(o))) + " " + why);
      }
    }
  }
}

// More sources than fit any register file, with the default entry point.
void check_many_sources() {
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::int64, Dtype::float8_e4m3}) {
    constexpr std::size_t kCount = 777;
    constexpr int kSources = 64;
    const std::size_t size = cc::size_of(dtype);
    std::vector<std::vector<unsigned char>> data;
    std::vector<const void*> srcs;
    for (int s = 0; s < kSources; ++s) {
      data.emplace_back(kCount * size);
      // Mild values, or every result would be NaN.
      for (std::size_t i = 0; i < kCount; ++i) {
        const float value = std::ldexp(static_cast<float>(random_below(2001) - 1000), -10);
        const std::int64_t whole = static_cast<std::int64_t>(random_bits());
        const unsigned code =
            dtype == Dtype::float32 || dtype == Dtype::int64 ? 0 : narrow_of(dtype).encode(value);
        const void* from = &code;
        if (dtype == Dtype::float32) from = &value;
        if (dtype == Dtype::int64) from = &whole;
        std::memcpy(data.back().data() + i * size, from, size);
      }
    }
    for (const auto& d : data) srcs.push_back(d.data());
    std::vector<unsigned char> expected(kCount * size), got(kCount * size);
    Operands in(kSources);
    for (std::size_t i = 0; i < kCount; ++i) {
      for (int s = 0; s < kSources; ++s) in[s] = data[s].data() + i * size;
      reference(dtype, Op::sum, in, expected.data() + i * size, 1);
    }
    void* dst = got.data();
    cc::reduce_fn({dtype, Op::sum})(&dst, 1, srcs.data(), kSources, kCount, cc::Finish{});
    expect(got == expected, "64 sources of " + std::string(cc::name_of(dtype)));
  }
}

// Operands that touch pages which must not be touched, from both sides.
void check_guard_pages() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  constexpr int kBuffers = 4;
  unsigned char* base[kBuffers];
  for (auto& b : base) {
    void* const p = mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("mmap failed");
    b = static_cast<unsigned char*>(p) + page;
    if (mprotect(b, page, PROT_READ | PROT_WRITE) != 0) fail("mprotect failed");
  }
  for_each_supported([&](Dtype dtype, Op op) {
    const std::size_t size = cc::size_of(dtype);
    for (const cc::Kernels* level : levels()) {
      for (std::size_t count = 0; count <= page / size; count += count < 70 ? 1 : 53) {
        for (bool at_end : {false, true}) {
          const std::size_t offset = at_end ? page - count * size : 0;
          const void* srcs[] = {base[0] + offset, base[1] + offset};
          void* dsts[] = {base[2] + offset, base[3] + offset};
          for (int ndst : {1, 2}) {
            cc::Finish finish;
            finish.nontemporal = count % 2 != 0;
            level->reduce[static_cast<int>(dtype)][static_cast<int>(op)](dsts, ndst, srcs, 2, count,
                                                                         finish);
            ++checks;
          }
          level->copy_nontemporal(dsts[0], srcs[0], count * size);
        }
      }
    }
  });
  for (auto& b : base) munmap(b - page, 3 * page);
}

// Every pair (code, y): all codes for 16 bits against chosen y, all pairs for 8 bits.
void check_codes(Dtype dtype) {
  const Narrow& n = narrow_of(dtype);
  const std::size_t size = cc::size_of(dtype);
  const unsigned ncodes = n.sign_bit() * 2;
  std::vector<unsigned> others;
  if (size == 1) {
    for (unsigned y = 0; y < ncodes; y += quick ? 5 : 1) others.push_back(y);
  } else {
    for (float y : {-0.0f, 0.0f, 1.0f, -1.0f, 0x1p-11f, 0x1.8p-9f, 3.0f, 0x1p-14f, 0x1p-24f,
                    0x1p-126f, 0x1p-133f, 2049.0f, -65504.0f, 0x1.fep127f, INFINITY, -INFINITY}) {
      others.push_back(n.encode(y));
    }
    others.push_back(n.encode(NAN) + 1);
    if (quick) others = {others[0], others[4]};
  }
  std::vector<unsigned char> xs(ncodes * size), ys(ncodes * size), got(ncodes * size);
  for (unsigned x = 0; x < ncodes; ++x) std::memcpy(&xs[x * size], &x, size);
  for (unsigned y : others) {
    for (unsigned x = 0; x < ncodes; ++x) std::memcpy(&ys[x * size], &y, size);
    for (Op op : {Op::sum, Op::prod, Op::min, Op::max}) {
      std::vector<unsigned char> expected(ncodes * size);
      for (unsigned x = 0; x < ncodes; ++x) {
        reference(dtype, op, {&xs[x * size], &ys[x * size]}, &expected[x * size], 1);
      }
      for (const cc::Kernels* level : levels()) {
        const void* srcs[] = {xs.data(), ys.data()};
        void* dst = got.data();
        level->reduce[static_cast<int>(dtype)][static_cast<int>(op)](&dst, 1, srcs, 2, ncodes,
                                                                     cc::Finish{});
        ++checks;
        for (unsigned x = 0; x < ncodes; ++x) {
          if (std::memcmp(&got[x * size], &expected[x * size], size) != 0) {
            fail("%s %s, %s: %s and %s give %s, expected %s", cc::name_of(dtype).data(),
                 cc::name_of(op).data(), level->level, hex(&xs[x * size], size).c_str(),
                 hex(&ys[x * size], size).c_str(), hex(&got[x * size], size).c_str(),
                 hex(&expected[x * size], size).c_str());
          }
        }
      }
    }
  }
}

// Rounding: 1 * f for floats f around every tie, every value, and at random; scale() multiplies in
// float32.
void check_rounding(Dtype dtype) {
  const Narrow& n = narrow_of(dtype);
  const unsigned one = n.encode(1.0f);
  const auto check = [&](float f) {
    const unsigned expected = n.encode(arithmetic('*', 1.0f, f));
    for (const cc::Kernels* level : levels()) {
      unsigned got = 0;
      level->scale[static_cast<int>(dtype)](&got, &one, 1, static_cast<double>(f), 0.0);
      if (got != expected) {
        fail("%s, %s: %a (0x%08x) rounds to 0x%x, expected 0x%x", cc::name_of(dtype).data(),
             level->level, static_cast<double>(f), bits_as<std::uint32_t>(f), got, expected);
      }
    }
    ++checks;
  };
  for (unsigned code = 0; code <= n.largest; code += quick && n.largest > 300 ? 37 : 1) {
    const double low = n.decoded[code];
    const double high = code == n.largest ? low + (low - n.decoded[code - 1]) : n.decoded[code + 1];
    for (double exact : {low, (low + high) / 2, high}) {
      const auto f = static_cast<float>(exact);
      for (float near : {f, std::nextafterf(f, 0.0f), std::nextafterf(f, INFINITY)}) {
        check(near);
        check(-near);
      }
    }
  }
  for (int i = 0; i < (quick ? 10000 : 500000); ++i) {
    // A double as factor would lose a signalling NaN's bits on the way, so NaNs here are quiet.
    const float f = bits_as<float>(static_cast<std::uint32_t>(random_bits()));
    check(is_nan(f) ? quieted(f) : f);
    check(random_float<float>() * 0x1p-6f);
  }
}

void check_scale() {
  constexpr std::size_t kCount = 321;
  for (Dtype dtype :
       {Dtype::float16, Dtype::bfloat16, Dtype::float32, Dtype::float64, Dtype::float8_e4m3,
        Dtype::float8_e5m2, Dtype::complex64, Dtype::complex128}) {
    const std::size_t size = cc::size_of(dtype);
    std::vector<unsigned char> data(kCount * size + 1), got(kCount * size + 1),
        expected(kCount * size);
    for (double im : {0.0, 0.75}) {
      if (im != 0.0 && !is_complex(dtype)) continue;
      const double re = 0.3;
      for (std::size_t i = 0; i < kCount; ++i) {
        unsigned char* const p = data.data() + 1 + i * size;
        unsigned char* const q = expected.data() + i * size;
        random_element(dtype, p);
        const auto times = [&](auto value, auto zero) {
          using F = decltype(zero);
          return arithmetic('*', value, static_cast<F>(re));
        };
        const auto complex_times = [&](auto zero) {
          using F = decltype(zero);
          const F a = read<F>(p), b = read<F>(p + sizeof(F)), c = static_cast<F>(re),
                  d = static_cast<F>(im);
          if (im == 0.0) {
            write(q, times(a, zero));
            write(q + sizeof(F), times(b, zero));
          } else {
            write(q, arithmetic('-', arithmetic('*', a, c), arithmetic('*', b, d)));
            write(q + sizeof(F), arithmetic('+', arithmetic('*', a, d), arithmetic('*', b, c)));
          }
        };
        if (dtype == Dtype::float32) {
          write(q, times(read<float>(p), 0.0f));
        } else if (dtype == Dtype::float64) {
          write(q, times(read<double>(p), 0.0));
        } else if (dtype == Dtype::complex64) {
          complex_times(0.0f);
        } else if (dtype == Dtype::complex128) {
          complex_times(0.0);
        } else {
          unsigned code = 0;
          std::memcpy(&code, p, size);
          code = narrow_of(dtype).encode(times(narrow_of(dtype).decoded[code], 0.0f));
          std::memcpy(q, &code, size);
        }
      }
      for (const cc::Kernels* level : levels()) {
        level->scale[static_cast<int>(dtype)](got.data() + 1, data.data() + 1, kCount, re, im);
        expect(std::memcmp(got.data() + 1, expected.data(), kCount * size) == 0,
               std::string(level->level) + ": scale of " + std::string(cc::name_of(dtype)));
        got = data;
        level->scale[static_cast<int>(dtype)](got.data() + 1, got.data() + 1, kCount, re, im);
        expect(
            std::memcmp(got.data() + 1, expected.data(), kCount * size) == 0,
            std::string(level->level) + ": scale in place of " + std::string(cc::name_of(dtype)));
      }
    }
  }
}

void check_copies() {
  for (const cc::Kernels* level : levels()) {
    for (std::size_t bytes : {0, 1, 63, 64, 65, 1000, 1024, 4096, 100003}) {
      for (std::size_t from : {0, 1, 33}) {
        for (std::size_t to : {0, 7, 32}) {
          std::vector<unsigned char> src(bytes + 64), dst(bytes + 64, kCanary);
          for (auto& b : src) b = static_cast<unsigned char>(random_bits());
          level->copy_nontemporal(dst.data() + to, src.data() + from, bytes);
          cc::store_fence();
          bool ok = std::memcmp(dst.data() + to, src.data() + from, bytes) == 0;
          for (std::size_t i = 0; i < to; ++i) ok = ok && dst[i] == kCanary;
          for (std::size_t i = to + bytes; i < dst.size(); ++i) ok = ok && dst[i] == kCanary;
          expect(ok, std::string(level->level) + ": copy of " + std::to_string(bytes) + " bytes");
        }
      }
    }
  }
}

// A caller's flush-to-zero mode must not change a bit, and must be there afterwards.
void check_float_mode() {
#if defined(__x86_64__)
  constexpr unsigned kFlushAndRoundUp = 0x1f80 | 0x8040 | 0x4000;
  const float tiny[] = {0x1p-130f, 1.0f, 0x1p-149f}, other[] = {0x1p-131f, 0x1p-30f, 0x1p-149f};
  const float expected[] = {0x1.8p-130f, 1.0f, 0x1p-148f},
              halved[] = {0x1.8p-131f, 0.5f, 0x1p-149f};
  for (const cc::Kernels* level : levels()) {
    float got[3], scaled[3];
    void* dst = got;
    const void* srcs[] = {tiny, other};
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(kFlushAndRoundUp);
    level->reduce[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)](&dst, 1, srcs, 2, 3,
                                                                               cc::Finish{});
    level->scale[static_cast<int>(Dtype::float32)](scaled, got, 3, 0.5, 0.0);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    expect(std::memcmp(got, expected, sizeof got) == 0, "sum under flush-to-zero");
    expect(std::memcmp(scaled, halved, sizeof scaled) == 0, "scale under flush-to-zero");
    expect((after & ~0x3fu) == kFlushAndRoundUp, "the caller's float mode came back");
  }
#endif
}

template <class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

void check_names() {
  for (int i = 0; i < cc::kDtypeCount; ++i) {
    expect(cc::dtype_from_name(cc::name_of(static_cast<Dtype>(i))) == static_cast<Dtype>(i),
           "dtype names");
  }
  for (int i = 0; i < cc::kOpCount; ++i) {
    expect(cc::op_from_name(cc::name_of(static_cast<Op>(i))) == static_cast<Op>(i), "op names");
  }
  for (int i = 0; i < cc::kCollectiveCount; ++i) {
    const auto c = static_cast<cc::Collective>(i);
    expect(cc::collective_from_name(cc::name_of(c)) == c, "collective names");
  }
  const auto equal = [](const std::string& got, const std::string& wanted) {
    expect(got == wanted, "got '" + got + "', expected '" + wanted + "'");
  };
  equal(error_of([] { cc::op_from_name("summ"); }),
        "unknown op 'summ'; did you mean 'sum'? known: sum, avg, prod, min, max, band, bor, bxor, "
        "premul_sum");
  equal(error_of([] { cc::op_from_name("xyz"); }),
        "unknown op 'xyz'; known: sum, avg, prod, min, max, band, bor, bxor, premul_sum");
  const auto near = [](std::string_view name) {
    std::vector<std::string> known;
    for (int i = 0; i < cc::kDtypeCount; ++i)
      known.emplace_back(cc::name_of(static_cast<Dtype>(i)));
    return cc::nearest_name(name, known);
  };
  equal(near("bf16"), "bfloat16");
  equal(near("Float32"), "float32");
  equal(near("float63"), "float64");
  equal(near("e4m3"), "float8_e4m3");
  equal(near("banana"), "");
  equal(near(""), "");
  equal(cc::nearest_name("allreduce", {"all_reduce", "reduce"}), "all_reduce");
  equal(error_of([] { cc::reduce_fn({Dtype::int32, Op::avg}); }),
        cc::why_unsupported(Op::avg, Dtype::int32));
  expect(!cc::why_unsupported(Op::min, Dtype::complex64).empty(), "no min of complex numbers");
  expect(!cc::why_unsupported(Op::bxor, Dtype::float32).empty(), "no bxor of floats");
  expect(!error_of([] { cc::scale(Dtype::int8, nullptr, nullptr, 0, 1.0, 0.0); }).empty(),
         "scale of integers");
  expect(!error_of([] { cc::scale(Dtype::float32, nullptr, nullptr, 0, 1.0, 1.0); }).empty(),
         "complex scale of floats");
}

// ---- Benchmark ----

volatile unsigned char sink;

// Seconds of this thread's processor time per call, the best of several runs: the machine may be
// shared.
double seconds(const std::function<void()>& body, double at_least) {
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  double best = 1e9;
  long calls = 1;
  for (int run = 0; run < 7;) {
    const double start = now();
    for (long i = 0; i < calls; ++i) body();
    const double elapsed = now() - start;
    if (elapsed < at_least) {
      calls *= 2;
      continue;
    }
    best = std::min(best, elapsed / static_cast<double>(calls));
    ++run;
  }
  return best;
}

void bench() {
  constexpr std::size_t kLargest = 16 << 20;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 6; ++i) {
    buffers.emplace_back(kLargest);
    std::memset(buffers.back().at(0), 0x3c, kLargest);
  }
  std::printf(
      "best of 7, processor time; GB/s: bytes read and written per second; nt: nontemporal "
      "stores\n");
  std::printf(
      "memcpy 16 MiB %.1f GB/s",
      2 * kLargest / 1e9 /
          seconds([&] { std::memcpy(buffers[0].at(0), buffers[1].at(0), kLargest); }, 0.02));
  std::printf(
      ", nontemporal %.1f GB/s\n",
      2 * kLargest / 1e9 /
          seconds([&] { cc::copy_bytes(buffers[0].at(0), buffers[1].at(0), kLargest, true); },
                  0.02));
  std::printf("%-9s %-13s %4s %4s %9s %9s %9s %11s\n", "level", "sum of", "nsrc", "ndst", "4 KiB",
              "256 KiB", "16 MiB", "16 MiB nt");
  const std::vector<Dtype> dtypes = {Dtype::float32,    Dtype::float64, Dtype::bfloat16,
                                     Dtype::float16,    Dtype::int32,   Dtype::float8_e4m3,
                                     Dtype::float8_e5m2};
  auto all = levels();
  std::reverse(all.begin(), all.end());
  for (const cc::Kernels* level : all) {
    for (Dtype dtype : dtypes) {
      for (const auto& [nsrc, ndst] : {std::pair{2, 1}, std::pair{2, 2}, std::pair{4, 1}}) {
        const cc::ReduceFn fn = level->reduce[static_cast<int>(dtype)][static_cast<int>(Op::sum)];
        std::printf("%-9s %-13s %4d %4d", level->level, cc::name_of(dtype).data(), nsrc, ndst);
        const void* srcs[4];
        void* dsts[2];
        for (int s = 0; s < 4; ++s) srcs[s] = buffers[s].at(0);
        for (int d = 0; d < 2; ++d) dsts[d] = buffers[4 + d].at(0);
        for (std::size_t bytes :
             {std::size_t(4) << 10, std::size_t(256) << 10, kLargest, kLargest + 1}) {
          cc::Finish finish;
          finish.nontemporal = bytes > kLargest;
          bytes &= ~std::size_t(1);
          const int sources = nsrc, destinations = ndst;
          const double s = seconds(
              [&] { fn(dsts, destinations, srcs, sources, bytes / cc::size_of(dtype), finish); },
              0.002);
          std::printf(" %9.1f", static_cast<double>((nsrc + ndst) * bytes) / 1e9 / s);
        }
        std::printf("\n");
      }
    }
  }
  std::printf("nanoseconds a call, float32 sum, nsrc 2, ndst 1\n");
  for (const cc::Kernels* level : all) {
    const cc::ReduceFn fn =
        level->reduce[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)];
    std::printf("%-9s", level->level);
    for (std::size_t count : {1, 4, 7, 16, 17, 64, 100, 256}) {
      const void* srcs[] = {buffers[0].at(0), buffers[1].at(0)};
      void* dst = buffers[4].at(0);
      const cc::Finish finish;
      const double s = seconds([&] { fn(&dst, 1, srcs, 2, count, finish); }, 0.002);
      std::printf("  %zu: %.1f", count, s * 1e9);
    }
    std::printf("\n");
  }
  sink = *buffers[4].at(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 ||
      (argc == 2 && std::string(argv[1]) != "--quick" && std::string(argv[1]) != "--bench")) {
    std::fprintf(stderr, "usage: %s [--quick | --bench]\n", argv[0]);
    return 2;
  }
  if (argc == 2 && std::string(argv[1]) == "--bench") {
    bench();
    return 0;
  }
  quick = argc == 2;
  check_names();
  check_table();
  check_float_mode();
  check_copies();
  check_scale();
  check_many_sources();
  check_guard_pages();
  for (Dtype dtype : {Dtype::float16, Dtype::bfloat16, Dtype::float8_e4m3, Dtype::float8_e5m2}) {
    check_codes(dtype);
    check_rounding(dtype);
  }
  for_each_supported([](Dtype dtype, Op op) { CaseRunner(dtype, op).run(); });
  std::string names;
  for (const cc::Kernels* level : levels()) names += std::string(" ") + level->level;
  std::printf("ok: %d checks on%s; reduce_fn uses %s\n", checks, names.c_str(), cc::simd_level());
  return 0;
}
