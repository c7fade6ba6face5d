// Names, sizes and the table of which op is defined on which dtype.
#include "types.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <stdexcept>
#include <utility>

namespace collectives {
namespace {

enum class Kind { floating, integer, boolean, complex };

struct DtypeTraits {
  std::string_view name;
  std::size_t size;
  Kind kind;
};

// In the order of enum Dtype.
constexpr std::array<DtypeTraits, kDtypeCount> kDtypes = {{
    {"float16", 2, Kind::floating},
    {"bfloat16", 2, Kind::floating},
    {"float32", 4, Kind::floating},
    {"float64", 8, Kind::floating},
    {"float8_e4m3", 1, Kind::floating},
    {"float8_e5m2", 1, Kind::floating},
    {"int8", 1, Kind::integer},
    {"int16", 2, Kind::integer},
    {"int32", 4, Kind::integer},
    {"int64", 8, Kind::integer},
    {"uint8", 1, Kind::integer},
    {"uint16", 2, Kind::integer},
    {"uint32", 4, Kind::integer},
    {"uint64", 8, Kind::integer},
    {"bool", 1, Kind::boolean},
    {"complex64", 8, Kind::complex},
    {"complex128", 16, Kind::complex},
}};

constexpr std::array<std::string_view, kOpCount> kOps = {"sum",  "avg", "prod", "min",       "max",
                                                         "band", "bor", "bxor", "premul_sum"};

constexpr std::array<std::string_view, kCollectiveCount> kCollectives = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "gather",     "scatter",        "all_to_all", "barrier"};

// Levenshtein distance, case ignored.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (lower(a[i - 1]) != lower(b[j - 1]));
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// True where `name` is `known` with letters left out, as "bf16" is of "bfloat16".
bool abbreviates(std::string_view name, std::string_view known) {
  std::size_t matched = 0;
  for (char c : known) {
    if (matched < name.size() && std::tolower(static_cast<unsigned char>(name[matched])) == c) {
      ++matched;
    }
  }
  return name.size() >= 3 && matched == name.size();
}

[[noreturn]] void throw_unknown(std::string_view what, std::string_view name,
                                const std::vector<std::string>& known) {
  std::string message = "unknown ";
  message.append(what).append(" '").append(name).append("'; ");
  const std::string near = nearest_name(name, known);
  if (!near.empty()) message += "did you mean '" + near + "'? ";
  message += "known:";
  for (const std::string& k : known) message.append(&k == &known.front() ? " " : ", ").append(k);
  throw std::invalid_argument(message);
}

template <class Enum>
Enum from_name(std::string_view what, std::string_view name, int count) {
  for (int i = 0; i < count; ++i) {
    if (name_of(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  }
  std::vector<std::string> known;
  for (int i = 0; i < count; ++i) known.emplace_back(name_of(static_cast<Enum>(i)));
  throw_unknown(what, name, known);
}

const DtypeTraits& traits_of(Dtype dtype) { return kDtypes.at(static_cast<std::size_t>(dtype)); }

// Why `op` makes no sense on numbers of this kind, and the way out; "" where it does.
std::string_view objection(Op op, Kind kind) {
  switch (op) {
    case Op::sum:
    case Op::prod:
      return "";
    case Op::min:
    case Op::max:
      if (kind != Kind::complex) return "";
      return "complex numbers have no order; reduce the real and imaginary parts, or the absolute "
             "values, as floats";
    case Op::avg:
      if (kind == Kind::integer || kind == Kind::boolean) {
        return "the quotient would be cut; use sum and divide, or convert to a float type";
      }
      return "";
    case Op::premul_sum:
      if (kind == Kind::integer || kind == Kind::boolean) {
        return "the scaled values would be cut; use sum and scale its result, or convert to a "
               "float type";
      }
      return "";
    case Op::band:
    case Op::bor:
    case Op::bxor:
      if (kind == Kind::integer || kind == Kind::boolean) return "";
      return "it works on bits; use an integer type of the same size (a view of the data, such as "
             "x.view(uint32))";
  }
  return "";
}

}  // namespace

std::size_t size_of(Dtype dtype) { return traits_of(dtype).size; }
std::string_view name_of(Dtype dtype) { return traits_of(dtype).name; }
std::string_view name_of(Op op) { return kOps.at(static_cast<std::size_t>(op)); }
std::string_view name_of(Collective collective) {
  return kCollectives.at(static_cast<std::size_t>(collective));
}

Dtype dtype_from_name(std::string_view name) {
  return from_name<Dtype>("dtype", name, kDtypeCount);
}
Op op_from_name(std::string_view name) { return from_name<Op>("op", name, kOpCount); }
Collective collective_from_name(std::string_view name) {
  return from_name<Collective>("collective", name, kCollectiveCount);
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  std::string_view best;
  std::size_t best_distance = 0;
  for (const std::string& candidate : known) {
    const std::size_t distance = edit_distance(name, candidate);
    const std::size_t longest = std::max(name.size(), candidate.size());
    // A third of the letters wrong is still a typo; more is another word, unless letters are only
    // missing.
    const std::size_t limit = std::max<std::size_t>(1, longest / 3);
    if (distance >= longest || (distance > limit && !abbreviates(name, candidate))) continue;
    if (best.empty() || distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return std::string(best);
}

std::string why_unsupported(Op op, Dtype dtype) {
  const std::string_view reason = objection(op, traits_of(dtype).kind);
  if (reason.empty()) return "";
  std::string message(name_of(op));
  message.append(" is not defined on ").append(name_of(dtype)).append(": ").append(reason);
  return message;
}

}  // namespace collectives
