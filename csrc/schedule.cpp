// The registry of algorithms, names of compositions, and who holds what when.
#include "schedule.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <map>
#include <utility>

namespace collectives {
namespace {

std::vector<const Algorithm*>& registry() {
  // Never destroyed: algorithms live as long as the process.
  static auto& all = *new std::vector<const Algorithm*>;
  return all;
}

std::string quoted(const std::string& name) { return "\"" + name + "\""; }

// "name(a, b(c, d))" -> name and its parts "a", "b(c, d)".
struct Name {
  std::string base;
  std::vector<std::string> parts;
  bool composed = false;
};

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

Name parse_name(const std::string& text) {
  constexpr std::size_t kLongest = 4096;  // parts have parts, and each is parsed within another
  if (text.size() > kLongest)
    throw std::invalid_argument("an algorithm name of " + std::to_string(text.size()) +
                                " characters; up to " + std::to_string(kLongest) + " are read");
  const std::string whole = trimmed(text);
  const auto malformed = [&](const std::string& why) {
    return std::invalid_argument(
        "malformed algorithm name " + quoted(text) + ": " + why +
        "; write a name, or a composition such as \"hierarchical(direct_two_shot, ring)\"");
  };
  Name name;
  const auto open = whole.find('(');
  name.base = trimmed(whole.substr(0, open));
  if (name.base.empty()) throw malformed("the name is missing");
  if (name.base.find(')') != std::string::npos) throw malformed("a ')' without its '('");
  if (open == std::string::npos) return name;
  name.composed = true;
  if (whole.back() != ')') throw malformed("it does not end with ')'");
  int depth = 0;
  std::string part;
  for (std::size_t i = open + 1; i < whole.size(); ++i) {
    const char c = whole[i];
    if (depth == 0 && (c == ',' || c == ')')) {
      name.parts.push_back(trimmed(part));
      part.clear();
      if (name.parts.back().empty()) throw malformed("a part is empty");
      if (c == ')' && i + 1 != whole.size()) throw malformed("text follows the last ')'");
      if (c == ')') return name;
      continue;
    }
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    part += c;
  }
  throw malformed("the parentheses do not match");
}

std::string why_malformed(const World& world) {
  if (world.nranks < 1)
    return "a world needs at least one rank, got " + std::to_string(world.nranks);
  if (world.root < 0 || world.root >= world.nranks) {
    return "root " + std::to_string(world.root) + " is not one of the ranks 0 to " +
           std::to_string(world.nranks - 1);
  }
  if (!world.node.empty() && static_cast<int>(world.node.size()) != world.nranks) {
    return "the world names the nodes of " + std::to_string(world.node.size()) +
           " ranks, but has " + std::to_string(world.nranks);
  }
  return "";
}

// The algorithm's own limits, after the test that it knows the collective at all.
std::function<std::string(Collective, const World&)> limits_of(const Algorithm& algorithm) {
  return [name = algorithm.name, can = algorithm.collectives, limits = algorithm.why_unsupported](
             Collective collective, const World& world) -> std::string {
    if (std::find(can.begin(), can.end(), collective) == can.end()) {
      std::string message = name + " cannot do " + std::string(name_of(collective)) + "; it can do";
      for (const auto& c : can)
        message += (c == can.front() ? " " : ", ") + std::string(name_of(c));
      return message;
    }
    const std::string malformed = why_malformed(world);
    if (!malformed.empty()) return malformed;
    return limits ? limits(collective, world) : "";
  };
}

// The algorithm with this name, composed if the name has parts.
Algorithm resolve(const std::string& text) {
  const Name name = parse_name(text);
  std::vector<std::string> known;
  for (const Algorithm* a : algorithms()) {
    if (a->name == name.base) {
      if (!name.composed) return *a;
      if (!a->compose)
        throw std::invalid_argument(a->name + " takes no parts in parentheses, got " +
                                    quoted(text));
      Algorithm made = a->compose(name.parts);
      made.why_unsupported = limits_of(made);
      return made;
    }
    known.push_back(a->name);
  }
  std::string message = "unknown algorithm " + quoted(name.base);
  const std::string near = nearest_name(name.base, known);
  message += near.empty() ? "." : ", did you mean " + quoted(near) + "?";
  message += " Known:";
  for (const auto& k : known) message += (k == known.front() ? " " : ", ") + k;
  throw std::invalid_argument(message);
}

}  // namespace

RegisterAlgorithm::RegisterAlgorithm(Algorithm algorithm) {
  algorithm.why_unsupported = limits_of(algorithm);
  auto& all = registry();
  const auto at =
      std::lower_bound(all.begin(), all.end(), algorithm.name,
                       [](const Algorithm* a, const std::string& name) { return a->name < name; });
  all.insert(at, new Algorithm(std::move(algorithm)));  // lives as long as the process
}

const std::vector<const Algorithm*>& algorithms() { return registry(); }

Schedule build_schedule(const std::string& algorithm, Collective collective, const World& world) {
  const Algorithm a = resolve(algorithm);
  const std::string why = a.why_unsupported(collective, world);
  if (!why.empty()) throw std::invalid_argument(why);
  Schedule s = a.build(collective, world);
  s.algorithm = a.name;
  s.collective = collective;
  s.world = world;
  return s;
}

std::string why_unsupported(const std::string& algorithm, Collective collective,
                            const World& world) {
  try {
    return resolve(algorithm).why_unsupported(collective, world);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

std::vector<int> ranks_by_node(const World& world) {
  std::vector<int> ranks(world.nranks);
  for (int r = 0; r < world.nranks; ++r) ranks[r] = r;
  if (world.node.empty()) return ranks;
  std::map<int, int> first;  // node -> its lowest rank
  for (int r = 0; r < world.nranks; ++r) first.emplace(world.node[r], r);
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return first[world.node[a]] < first[world.node[b]]; });
  return ranks;
}

std::string signed_name(const Schedule& s) {
  std::uint64_t h = 0;
  const auto add = [&](int value) {
    h = (h ^ static_cast<std::uint32_t>(value)) * 0x9e3779b97f4a7c15ULL;
    h ^= h >> 29;
  };
  add(s.nchunks);
  add(s.nchannels);
  for (const Round& round : s.rounds) {
    add(static_cast<int>(round.size()));
    for (const Transfer& t : round)
      for (const int part : {t.src, t.dst, t.chunk, static_cast<int>(t.reduce), t.channel})
        add(part);
  }
  char digits[12];
  std::snprintf(digits, sizeof digits, "#%08" PRIx64, h >> 32);
  return s.algorithm + digits;
}

bool holds_at_start(const Schedule& s, int rank, int chunk) {
  const int n = s.world.nranks;
  switch (s.collective) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::reduce:
    case Collective::barrier:
      return true;
    case Collective::broadcast:
    case Collective::scatter:
      return rank == s.world.root;
    case Collective::all_gather:
    case Collective::gather:
      return chunk / (s.nchunks / n) == rank;
    case Collective::all_to_all:
      return chunk / n == rank;
  }
  return false;
}

bool holds_at_end(const Schedule& s, int rank, int chunk) {
  const int n = s.world.nranks;
  switch (s.collective) {
    case Collective::all_reduce:
    case Collective::all_gather:
    case Collective::broadcast:
    case Collective::barrier:
      return true;
    case Collective::reduce:
    case Collective::gather:
      return rank == s.world.root;
    case Collective::reduce_scatter:
    case Collective::scatter:
      return chunk / (s.nchunks / n) == rank;
    case Collective::all_to_all:
      return chunk % n == rank;
  }
  return false;
}

}  // namespace collectives
