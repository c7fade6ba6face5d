// Element types, reductions and collectives: the words every layer above and below shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace collectives {

enum class Dtype : std::uint8_t {
  float16,
  bfloat16,
  float32,
  float64,
  float8_e4m3,  // "fn" flavour: no infinities, one NaN; what ml_dtypes calls float8_e4m3fn
  float8_e5m2,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
  complex64,
  complex128,
};
inline constexpr int kDtypeCount = 17;

enum class Op : std::uint8_t { sum, avg, prod, min, max, band, bor, bxor, premul_sum };
inline constexpr int kOpCount = 9;

enum class Collective : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
};
inline constexpr int kCollectiveCount = 9;

std::size_t size_of(Dtype dtype);
std::string_view name_of(Dtype dtype);
std::string_view name_of(Op op);
std::string_view name_of(Collective collective);

// The value with this name; throws std::invalid_argument that offers the nearest right name.
Dtype dtype_from_name(std::string_view name);
Op op_from_name(std::string_view name);
Collective collective_from_name(std::string_view name);

// The member of `known` with the smallest edit distance to `name` ("" where none is near).
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// Empty if `op` is defined on `dtype`, else why not and what to use instead.
std::string why_unsupported(Op op, Dtype dtype);

// True where a collective combines contributions (all_reduce, reduce_scatter, reduce).
constexpr bool reduces(Collective c) {
  return c == Collective::all_reduce || c == Collective::reduce_scatter || c == Collective::reduce;
}

// True where one rank is the source or the sink.
constexpr bool rooted(Collective c) {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather ||
         c == Collective::scatter;
}

}  // namespace collectives
