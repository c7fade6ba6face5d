// The simulation, on random messages: it ends, no rank ends before it entered, no link carries more
// than it can, and more lanes, slots or ranks that come late change nothing of that. Under
// sanitizers this looks for errors of memory in the tables that it keeps.
#include <algorithm>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/schedule.hpp"
#include "../../csrc/simulate.hpp"

using namespace collectives;

namespace {

int failures = 0;

void fail(const std::string& what) {
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

// In each round some ranks send to others, over one to three of the links.
SimulatedWorld random_world(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  SimulatedWorld world;
  world.nranks = 2 + below(9);
  world.nchannels = 1 + below(2);
  const int links = 1 + below(6);
  for (int l = 0; l < links; ++l) world.capacity.push_back(1 + below(10));
  const int routes = 1 + below(8);
  world.route_begin.push_back(0);
  for (int r = 0; r < routes; ++r) {
    std::vector<int> way(links);
    for (int l = 0; l < links; ++l) way[l] = l;
    std::shuffle(way.begin(), way.end(), random);
    way.resize(1 + below(std::min(3, links)));
    world.route_links.insert(world.route_links.end(), way.begin(), way.end());
    world.route_begin.push_back(static_cast<int>(world.route_links.size()));
    world.latency.push_back(below(3));
  }
  for (int r = 0; r < world.nranks; ++r) {
    world.combine_s_byte.push_back(below(2) * 0.25);
    world.late_s.push_back(below(4) == 0 ? below(50) : 0);
  }
  const int rounds = 1 + below(6);
  for (int round = 0; round < rounds; ++round) {
    for (int src = 0; src < world.nranks; ++src) {
      if (below(3) == 0) continue;
      const double bytes = below(20);
      world.messages.push_back({round, src, (src + 1 + below(world.nranks - 1)) % world.nranks,
                                below(world.nchannels), below(routes), bytes, below(2) ? bytes : 0,
                                1.0 + below(3)});
    }
  }
  world.segments = 1 + below(5);
  world.lanes = 1 + below(3);
  world.slots = 1 + below(4);
  return world;
}

void check(const SimulatedWorld& world, const std::string& name) {
  SimulatedTimes times;
  try {
    times = simulate(world);
  } catch (const ScheduleError& error) {
    // In each round all send first, so nobody can wait for ever.
    fail(name + ": " + error.what());
    return;
  }
  std::vector<double> carried(world.capacity.size(), 0);
  for (const SimulatedMessage& m : world.messages) {
    for (int k = world.route_begin[m.route]; k < world.route_begin[m.route + 1]; ++k)
      carried[world.route_links[k]] += m.bytes * world.segments;
  }
  const double first = *std::min_element(world.late_s.begin(), world.late_s.end());
  for (std::size_t l = 0; l < carried.size(); ++l) {
    if (carried[l] > world.capacity[l] * (times.seconds - first) * (1 + 1e-9) + 1e-9)
      fail(name + ": link " + std::to_string(l) + " carries more than it can");
  }
  for (int r = 0; r < world.nranks; ++r) {
    if (times.finish_s[r] < world.late_s[r]) fail(name + ": a rank ends before it enters");
  }
  if (simulate(world).finish_s != times.finish_s) fail(name + ": another run differs");
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    check(random_world(random), "seed " + std::to_string(seed));
  }
  SimulatedWorld bad;
  bad.messages.push_back({0, 0, 1, 0, 0, 1, 0, 1});
  try {
    simulate(bad);
    fail("a world without routes is no error");
  } catch (const std::invalid_argument&) {
  }
  std::printf("3000 worlds, %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
