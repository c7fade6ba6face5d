// Every registered algorithm, in every world that it supports: proved by verify(), lowered for all
// ranks in both orders, checked for deadlock, and then *executed*: ranks run their programs step by
// step in random interleavings over FIFOs, on values that are hashes of expressions, in separate
// and in shared (in place) buffers. What each rank ends with must be exactly the expression that
// the symbolic run promised. Then broken schedules, which must be refused.
//
//   test_schedule            everything; exit code 0 if all passed
//   test_schedule ring       only algorithms whose name contains "ring"
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/plan.hpp"
#include "../../csrc/schedule.hpp"
#include "../../csrc/symbolic.hpp"
#include "schedule_executor.hpp"

using namespace collectives;

namespace {

int failures = 0;

void fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  if (++failures > 40) {
    std::printf("too many failures\n");
    std::exit(1);
  }
}

// ---- one case -----------------------------------------------------------------------------------

std::string describe(const std::string& algorithm, Collective collective, const World& world) {
  std::string text = algorithm + ", " + std::string(name_of(collective)) +
                     ", n=" + std::to_string(world.nranks) +
                     ", root=" + std::to_string(world.root) + ", nodes=[";
  for (const int node : world.node) text += std::to_string(node) + " ";
  return text + "]";
}

long cases = 0, executions = 0;

void check_case(const std::string& algorithm, Collective collective, const World& world) {
  ++cases;
  std::string at = "build";
  try {
    const Schedule s = build_schedule(algorithm, collective, world);
    at = "verify";
    verify(s);
    SymbolicRun run(s);
    for (std::size_t i = 0; i < s.rounds.size(); ++i) {
      run.evaluate(static_cast<int>(i));
      run.commit();
    }
    const int n = world.nranks;
    const bool direct = algorithm.rfind("direct_", 0) == 0;
    for (const Order order : {Order::any, Order::rank}) {
      for (const int depth : {1, 4}) {
        at = std::string(order == Order::any ? "order any" : "order rank") + ", depth " +
             std::to_string(depth) + ", lower";
        const std::vector<RankProgram> programs = lower_all(s, order, depth);
        if (depth == 1) check_deadlock(programs, 1);
        check_deadlock(programs, 4);
        if (depth == 4 && n > 17) continue;
        for (const bool in_place : {false, true}) {
          if (in_place && collective == Collective::all_to_all) continue;
          at += in_place ? ", in place" : ", out of place";
          ++executions;
          Executor executor(s, programs, in_place, depth, static_cast<unsigned>(cases * 7 + depth));
          executor.run();
          std::map<Expr, std::uint64_t> known;
          for (int c = 0; c < s.nchunks; ++c) {
            for (int r = 0; r < n; ++r) {
              if (!in_place && holds_at_start(s, r, c) && executor.input(r, c).hash != leaf(r))
                throw Failure{"input was changed"};
              if (!holds_at_end(s, r, c) || collective == Collective::barrier) continue;
              const bool ordered = reduces(collective) && (order == Order::rank || direct);
              const std::uint64_t expected =
                  ordered ? rank_order(n) : hash_of(run.expressions(), run.held(r, c), known);
              const Symbol& got = executor.output(r, c);
              const std::string where =
                  "rank " + std::to_string(r) + ", chunk " + std::to_string(c);
              if (got.hash != expected) throw Failure{where + " ends with another expression"};
              if (reduces(collective) && got.finished != (n > 1))
                throw Failure{where + " was not announced as complete"};
            }
          }
        }
      }
    }
    // One rank alone is lowered to the same program as all together.
    at = "lower one";
    const int r = static_cast<int>(cases % n);
    const RankProgram one = lower(s, r, Order::any), all = lower_all(s, Order::any)[r];
    for (std::size_t ch = 0; ch < all.channels.size(); ++ch) {
      if (one.channels[ch].steps.size() != all.channels[ch].steps.size())
        throw Failure{"differs from lower_all"};
    }
  } catch (const Failure& f) {
    fail(describe(algorithm, collective, world) + ": " + at + ": " + f.what);
  } catch (const std::exception& e) {
    fail(describe(algorithm, collective, world) + ": " + at + ": " + e.what());
  }
}

std::vector<World> worlds(int n, bool is_rooted) {
  std::vector<std::vector<int>> layouts(1);  // the first: one node
  const auto layout = [&](const auto& node_of) {
    std::vector<int> nodes(n);
    for (int r = 0; r < n; ++r) nodes[r] = node_of(r);
    layouts.push_back(nodes);
  };
  if (n > 1) {
    layout([](int r) { return r / 4; });  // 4 + 4 + ... + rest
    layout([](int r) {
      return r % 6 < 3 ? r / 6 * 3 : r % 6 < 5 ? r / 6 * 3 + 1 : r / 6 * 3 + 2;
    });                                                              // 3 + 2 + 1 + ...
    if (n <= 17) layout([](int r) { return r % 3; });                // round robin
    if (n <= 17) layout([](int r) { return r; });                    // each alone
    if (n <= 17) layout([n](int r) { return r == n - 1 ? 5 : 9; });  // one apart, odd numbers
    if (n <= 17) layout([](int r) { return (r * 7 + 3) % 5 / 2; });  // scattered, uneven
    if (n > 17) layout([n](int r) { return r % (n / 8); });          // round robin on nodes of 8
  }
  std::vector<int> roots = {0};
  if (is_rooted) {
    for (const int root : {1, n / 2, n - 1}) {
      if (root > 0 && root < n && std::find(roots.begin(), roots.end(), root) == roots.end())
        roots.push_back(root);
    }
    if (n > 17) roots = {0, n / 2 + 1};
  }
  std::vector<World> all;
  for (const auto& nodes : layouts) {
    for (const int root : roots) all.push_back({n, root, nodes});
  }
  return all;
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Algorithm* a : algorithms()) {
    all.push_back(a->name);
    if (a->name != "hierarchical") continue;
    all.insert(
        all.end(),
        {"hierarchical(ring, ring)", "hierarchical(halving_doubling, double_binary_tree)",
         "hierarchical(direct_two_shot, recursive_doubling)", "hierarchical(pat, pat)",
         "hierarchical(ring, direct_two_shot)", "hierarchical(direct_two_shot, halving_doubling)",
         "hierarchical(direct_two_shot, direct_one_shot)", "hierarchical(pat, binomial_tree)",
         "hierarchical(bruck, direct_two_shot)", "hierarchical(direct_two_shot, bruck)"});
  }
  return all;
}

// ---- broken schedules ---------------------------------------------------------------------------

Schedule handmade(Collective collective, int n, int nchunks, std::vector<Round> rounds) {
  return {"my_ring", collective, {n, 0, {}}, nchunks, 1, std::move(rounds)};
}

template <class F>
void refused(const std::string& what, const std::string& expected, const F& run) {
  try {
    run();
  } catch (const std::exception& e) {
    if (std::string(e.what()).find(expected) == std::string::npos)
      fail(what + ": expected \"" + expected + "\", got \"" + e.what() + "\"");
    return;
  }
  fail(what + " was not noticed");
}

void check_broken() {
  const auto bad = [](const std::string& what, const std::string& expected, const Schedule& s) {
    refused(what, expected, [&] { verify(s); });
  };
  constexpr auto kReduce = Collective::all_reduce;
  constexpr auto kGather = Collective::all_gather;
  const std::string title = "my_ring, all_reduce over 4 ranks";
  bad("a double count",
      title +
          ", round 2: transfer 1 -> 2 of chunk 3 counts the contributions of ranks [0, 1] twice",
      handmade(kReduce, 4, 4, {{{0, 1, 3, true}}, {{1, 2, 3, true}}, {{1, 2, 3, true}}}));
  bad("a double count by two sources",
      title + ", round 1: transfer 1 -> 2 of chunk 0 counts the contributions of ranks [0] twice",
      handmade(kReduce, 4, 1, {{{0, 1, 0, true}}, {{0, 2, 0, true}, {1, 2, 0, true}}}));
  bad("a contribution sent back",
      title + ", round 1: transfer 1 -> 0 of chunk 0 counts the contributions of ranks [0] twice",
      handmade(kReduce, 4, 1, {{{0, 1, 0, true}}, {{1, 0, 0, true}}}));
  bad("sending what is not held",
      "round 0: transfer 0 -> 2 of chunk 1 sends what rank 0 does not hold yet",
      handmade(kGather, 3, 3, {{{0, 2, 1}}}));
  bad("sending what only arrives in this round",
      "round 0: transfer 1 -> 2 of chunk 0 sends what rank 1 does not hold yet",
      handmade(kGather, 3, 3, {{{0, 1, 0}, {1, 2, 0}}}));
  bad("a self-send", "round 0: transfer 1 -> 1 of chunk 0 sends to itself",
      handmade(kReduce, 2, 1, {{{1, 1, 0}}}));
  bad("a source out of range",
      "round 0: transfer 2 -> 0 of chunk 0 is wrong: rank 2 is out of range 0 to 1",
      handmade(kReduce, 2, 1, {{{2, 0, 0}}}));
  bad("a destination out of range", "rank -1 is out of range",
      handmade(kReduce, 2, 1, {{{0, -1, 0}}}));
  bad("a chunk out of range", "chunk 7 is out of range 0 to 0",
      handmade(kReduce, 2, 1, {{{0, 1, 7}}}));
  bad("a channel out of range", "channel 1 is out of range 0 to 0",
      handmade(kReduce, 2, 1, {{{0, 1, 0, true, 1}}}));
  Schedule crossing = handmade(kReduce, 2, 2, {{{0, 1, 0, true, 0}}, {{1, 0, 0, false, 1}}});
  crossing.nchannels = 2;
  bad("crossing channels", "round 1: transfer 1 -> 0 of chunk 0 crosses channels", crossing);
  bad("two stores", "round 0: transfer 2 -> 0 of chunk 0 writes a chunk that transfer 1 -> 0",
      handmade(kReduce, 3, 1, {{{1, 0, 0}, {2, 0, 0}}}));
  bad("a store meets a reduction", "writes a chunk that transfer 1 -> 0",
      handmade(kReduce, 3, 1, {{{1, 0, 0, true}, {2, 0, 0}}}));
  bad("reducing in all_gather", "reduces, but all_gather only moves data",
      handmade(kGather, 2, 2, {{{0, 1, 0, true}}}));
  bad("blocks that do not fit", "3 chunks, but each rank's block must have equally many",
      handmade(kGather, 2, 3, {}));
  bad("all_to_all with too few chunks", "one for each pair of ranks",
      handmade(Collective::all_to_all, 3, 3, {}));
  bad("nothing sent", "at the end: rank 0, chunk 0 misses the contributions of ranks [1, 2]",
      handmade(kReduce, 3, 1, {}));
  bad("a block that never comes", "at the end: rank 1, chunk 0 was never received",
      handmade(kGather, 2, 2, {{{1, 0, 1}}}));
  bad("another order on another rank",
      "rank 1, chunk 0 combined the contributions in another order than rank 0",
      handmade(
          kReduce, 3, 1,
          {{{1, 0, 0, true}, {2, 0, 0, true}, {0, 1, 0, true}}, {{2, 1, 0, true}}, {{1, 2, 0}}}));
  bad("a root that is no rank", "root 5 is not a rank",
      {"my_ring", Collective::broadcast, {2, 5, {}}, 1, 1, {}});

  // A good ring with one transfer lost, doubled or misdirected at a time is never accepted.
  const Schedule ring = build_schedule("ring", kReduce, {4, 0, {}});
  for (std::size_t i = 0; i < ring.rounds.size(); ++i) {
    for (std::size_t k = 0; k < ring.rounds[i].size(); ++k) {
      const auto broken = [&](const std::string& what, const auto& how) {
        Schedule s = ring;
        how(s.rounds[i], s.rounds[i][k]);
        bad("ring, round " + std::to_string(i) + ", transfer " + std::to_string(k) + " " + what,
            "ring, all_reduce over 4 ranks", s);
      };
      broken("lost",
             [&](Round& round, Transfer&) { round.erase(round.begin() + static_cast<long>(k)); });
      broken("doubled", [&](Round& round, Transfer& t) { round.push_back(Transfer(t)); });
      broken("of the wrong chunk", [&](Round&, Transfer& t) { t.chunk = (t.chunk + 1) % 4; });
      if (i < 3) broken("storing", [&](Round&, Transfer& t) { t.reduce = false; });
      if (i >= 3) broken("reducing", [&](Round&, Transfer& t) { t.reduce = true; });
      // (A contribution that takes another way to its sum is no mistake, so only complete values
      // are misdirected.)
      if (i >= 3)
        broken("to the wrong rank", [&](Round&, Transfer& t) { t.dst = (t.dst + 1) % 4; });
    }
  }

  // Programs that do not meet.
  const std::vector<RankProgram> fused = lower_all(ring, Order::any, 2);
  check_deadlock(fused, 2);
  refused("a ring of nothing but recv_send with one message a connection",
          "deadlock where connections hold 1 message", [&] { check_deadlock(fused, 1); });
  refused("a missing send",
          "rank 1 (channel 0, step 0, round 0) receives a message that rank 0 never sends", [&] {
            auto p =
                lower_all(build_schedule("ring", Collective::broadcast, {4, 0, {}}), Order::any);
            p[0].channels[0].steps.clear();
            check_deadlock(p, 4);
          });
  refused("a missing receive", "never receives", [&] {
    auto p = fused;
    p[2].channels[0].steps.pop_back();
    check_deadlock(p, 4);
  });
  refused("another chunk", "expects other chunks than", [&] {
    auto p = fused;
    p[0].channels[0].pieces[0].chunk = 2;
    check_deadlock(p, 4);
  });

  // Names.
  const auto build = [](const std::string& name, Collective c = Collective::all_reduce) {
    return [=] { build_schedule(name, c, {4, 0, {}}); };
  };
  refused("a misspelt name",
          "unknown algorithm \"double_binary_three\", did you mean \"double_binary_tree\"?",
          build("double_binary_three"));
  refused("an algorithm that cannot", "ring cannot do all_to_all; it can do all_reduce,",
          build("ring", Collective::all_to_all));
  refused("parts where none belong", "ring takes no parts in parentheses", build("ring(ring)"));
  refused("an open parenthesis", "malformed algorithm name", build("hierarchical(ring"));
  refused("an empty part", "a part is empty", build("hierarchical(ring,)"));
  refused("text behind", "malformed algorithm name", build("hierarchical(ring, ring) x"));
  refused("a misspelt part", "did you mean \"direct_two_shot\"?",
          build("hierarchical(direct_two_shoot, ring)"));
  refused("a third part", "hierarchical takes two parts", build("hierarchical(ring, ring, ring)"));
  refused("a part that cannot", "intra", build("hierarchical(double_binary_tree, ring)"));
  if (build_schedule(" hierarchical( pat ,hierarchical(ring, ring)) ", kReduce,
                     {4, 0, {0, 0, 1, 1}})
          .algorithm != "hierarchical(pat, hierarchical(ring, ring))") {
    fail("a nested composition lost its name");
  }
}

// ---- costs, coverage, timing --------------------------------------------------------------------

void check_costs() {
  const auto close = [](double a, double b) { return a - b < 1e-9 && b - a < 1e-9; };
  const auto expect = [&](const char* name, Collective collective, int n, int steps, double sent) {
    const Cost c = cost(build_schedule(name, collective, {n, 0, {}}));
    if (c.steps == steps && close(c.sent_max, sent)) return;
    fail(std::string(name) + ", " + std::string(name_of(collective)) + ", n=" + std::to_string(n) +
         ": costs " + std::to_string(c.steps) + " steps and " + std::to_string(c.sent_max) +
         " vectors, expected " + std::to_string(steps) + " and " + std::to_string(sent));
  };
  expect("ring", Collective::all_reduce, 7, 12, 12.0 / 7);
  expect("ring", Collective::reduce_scatter, 7, 6, 6.0 / 7);
  expect("ring", Collective::broadcast, 7, 6, 1);
  expect("direct_one_shot", Collective::all_reduce, 7, 1, 6);
  expect("direct_two_shot", Collective::all_reduce, 7, 2, 12.0 / 7);
  expect("direct_two_shot", Collective::all_to_all, 7, 1, 6.0 / 7);
  expect("halving_doubling", Collective::all_reduce, 16, 8, 30.0 / 16);
  expect("halving_doubling", Collective::reduce_scatter, 13, 4, 12.0 / 13);
  expect("recursive_doubling", Collective::all_reduce, 16, 4, 4);
  expect("recursive_doubling", Collective::barrier, 13, 4, 4);
  expect("bruck", Collective::all_gather, 13, 4, 12.0 / 13);
  expect("bruck", Collective::all_to_all, 16, 4, 2);
  // Their last round sends nothing that came in the round before, and yet after it.
  expect("bruck", Collective::all_gather, 5, 3, 4.0 / 5);
  expect("bruck", Collective::all_to_all, 3, 2, 2.0 / 3);
  expect("pat", Collective::reduce_scatter, 6, 3, 5.0 / 6);
  expect("pat", Collective::all_gather, 13, 4, 12.0 / 13);
  expect("pat", Collective::reduce_scatter, 13, 4, 12.0 / 13);
  expect("binomial_tree", Collective::broadcast, 16, 4, 4);
  expect("binomial_tree", Collective::reduce, 16, 4, 1);
  const Cost tree = cost(build_schedule("double_binary_tree", Collective::all_reduce, {64, 0, {}}));
  if (tree.sent_max > 2 || tree.steps > 14) fail("double_binary_tree sends or waits too much");
  World nodes{32, 0, {}};
  for (int r = 0; r < 32; ++r) nodes.node.push_back(r / 8);
  const Cost rails =
      cost(build_schedule("hierarchical(direct_two_shot, ring)", Collective::all_reduce, nodes));
  if (!close(rails.internode_sent_max, 2 * 3.0 / 4))
    fail("hierarchical sends too much between nodes: " + std::to_string(rails.internode_sent_max));
}

void check_coverage() {
  for (int c = 0; c < kCollectiveCount; ++c) {
    for (int n = 1; n <= 20; ++n) {
      const World world{n, n - 1, {}};
      const auto& all = algorithms();
      const bool served = std::any_of(all.begin(), all.end(), [&](const Algorithm* a) {
        return a->why_unsupported(static_cast<Collective>(c), world).empty();
      });
      if (!served)
        fail("nothing does " + std::string(name_of(static_cast<Collective>(c))) + " over " +
             std::to_string(n) + " ranks");
    }
  }
}

template <class F>
double milliseconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

void print_timings(const std::string& only) {
  std::printf("%-52s %-15s %8s %8s %8s %8s\n", "milliseconds at n=64 (nodes of 8)", "", "build",
              "verify", "lower", "by rank");
  World world{64, 0, {}};
  for (int r = 0; r < 64; ++r) world.node.push_back(r / 8);
  for (const std::string& name : names()) {
    if (name.find(only) == std::string::npos) continue;
    for (int c = 0; c < kCollectiveCount; ++c) {
      const auto collective = static_cast<Collective>(c);
      if (!why_unsupported(name, collective, world).empty()) continue;
      Schedule s;
      const double build = milliseconds([&] { s = build_schedule(name, collective, world); });
      const double check = milliseconds([&] { verify(s); });
      const double one = milliseconds([&] { lower(s, 5, Order::any); });
      const double ordered = milliseconds([&] { lower(s, 5, Order::rank); });
      std::printf("%-52s %-15s %8.2f %8.2f %8.2f %8.2f\n", name.c_str(),
                  std::string(name_of(collective)).c_str(), build, check, one, ordered);
      if (check > 200) fail(name + ": verify is too slow");  // 50 on an idle machine
    }
  }
}

void print_large(const std::string& only) {
  for (const int n : {256, 1024}) {
    World world{n, 0, {}};
    for (int r = 0; r < n; ++r) world.node.push_back(r / 8);
    for (const std::string& name : names()) {
      if (name.find(only) == std::string::npos ||
          !why_unsupported(name, Collective::all_reduce, world).empty())
        continue;
      Schedule s;
      const double build =
          milliseconds([&] { s = build_schedule(name, Collective::all_reduce, world); });
      const double check = milliseconds([&] { verify(s); });
      const double one = milliseconds([&] { lower(s, 5, Order::any); });
      std::printf("n=%-5d %-45s build %7.0f ms, verify %7.0f ms, lower %7.0f ms\n", n, name.c_str(),
                  build, check, one);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool large =
      argc > 1 && std::string(argv[1]) == "--large";  // verify() and lower() up to 1024 ranks
  const std::string only = argc > 1 && !large ? argv[1] : argc > 2 ? argv[2] : "";
  if (large) {
    print_large(only);
    return 0;
  }
  std::vector<int> sizes;
  for (int n = 1; n <= 17; ++n) sizes.push_back(n);
  sizes.insert(sizes.end(), {24, 32, 64});
  for (const std::string& name : names()) {
    if (name.find(only) == std::string::npos) continue;
    const long before = cases;
    const double ms = milliseconds([&] {
      for (int c = 0; c < kCollectiveCount; ++c) {
        const auto collective = static_cast<Collective>(c);
        for (const int n : sizes) {
          for (const World& world : worlds(n, rooted(collective))) {
            if (why_unsupported(name, collective, world).empty())
              check_case(name, collective, world);
          }
        }
      }
    });
    std::printf("%-52s %6ld cases %8.0f ms\n", name.c_str(), cases - before, ms);
    std::fflush(stdout);
  }
  if (only.empty()) {
    check_broken();
    check_costs();
    check_coverage();
  }
  print_timings(only);
  std::printf("%ld cases, %ld executions, %d failures\n", cases, executions, failures);
  return failures == 0 ? 0 : 1;
}
