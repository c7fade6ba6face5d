// What the checks and the benchmark of reduce.hpp share: levels, random bits, buffers, failures.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/reduce.hpp"
#include "../../csrc/reduce_levels.hpp"
#include "../../csrc/types.hpp"

namespace reduce_test {

namespace cc = collectives;
using cc::Dtype;
using cc::Op;

inline bool quick = false;
inline int checks = 0;

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  std::fputs("FAILED: ", stderr);
  std::vfprintf(stderr, format, args);
  std::fputc('\n', stderr);
  va_end(args);
  std::exit(1);
}

inline void expect(bool ok, const std::string& what) {
  ++checks;
  if (!ok) fail("%s", what.c_str());
}

// Those that this CPU has, the plainest first.
inline const std::vector<const cc::Kernels*>& levels() {
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

inline std::uint64_t random_state = 0x9e3779b97f4a7c15;
inline std::uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1d;
}
inline int random_below(int n) {
  return static_cast<int>((random_bits() >> 33) % static_cast<unsigned>(n));
}

template <class To, class From>
To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline std::string hex(const unsigned char* p, std::size_t size) {
  std::string out = "0x";
  char digits[3];
  for (std::size_t i = size; i-- > 0;) {
    std::snprintf(digits, sizeof digits, "%02x", p[i]);
    out += digits;
  }
  return out;
}

inline constexpr std::size_t kMargin = 128;  // bytes around each buffer that must stay as they are

struct Buffer {
  std::vector<unsigned char> storage;
  unsigned char* at(std::size_t offset) {
    const auto base = reinterpret_cast<std::uintptr_t>(storage.data());
    return storage.data() + (64 - base % 64) % 64 + kMargin + offset;
  }
  explicit Buffer(std::size_t bytes) : storage(bytes + 2 * kMargin + 256) {}
};

}  // namespace reduce_test
