// Checks reduce.hpp bit for bit against a scalar reference, on every instruction-set level of this
// CPU, and times it.
//
//   test_reduce          all checks, a few seconds; prints the first failing case and exits with 1
//   test_reduce --quick  fewer counts and codes, for sanitizers
//   test_reduce --bench  GB/s read and written, and nanoseconds of small calls, per level
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "reduce_bench.hpp"
#include "reduce_reference.hpp"
#include "reduce_testing.hpp"

using namespace reduce_test;

namespace {

constexpr std::size_t kMaxCount = 4099;
constexpr int kMaxSources = 9;
constexpr int kMaxDestinations = 3;
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
