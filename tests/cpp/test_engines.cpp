// Thread ranks run every algorithm of every collective through the engines and compare with what
// must come out. Made for sanitizers: one process, real concurrency, no Python.
//
//   test_engines [RANKS]    worlds of 1 .. RANKS ranks (default 5)
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "communicator.hpp"
#include "errors.hpp"

using namespace collectives;

namespace {

std::atomic<int> failures{0};
std::atomic<long> calls{0};

void fail(const std::string& what) {
  if (failures.fetch_add(1) < 20) std::fprintf(stderr, "FAIL: %s\n", what.c_str());
}

// What rank r contributes at position i.
std::int32_t value(int r, std::uint64_t i) {
  return static_cast<std::int32_t>((i * 7 + r * 13) % 101);
}

class Checker {
 public:
  Checker(Communicator& comm) : comm_(comm), n_(comm.size()), me_(comm.rank()) {}

  void run(Collective c, const std::string& algorithm, std::uint64_t count, int root, Order order) {
    const std::uint64_t blocks = count * n_;
    const bool big_in =
        c == Collective::reduce_scatter || c == Collective::scatter || c == Collective::all_to_all;
    const bool big_out =
        c == Collective::all_gather || c == Collective::gather || c == Collective::all_to_all;
    std::vector<std::int32_t> in(big_in ? blocks : count), out(big_out ? blocks : count, -1);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = value(me_, i);
    Call call;
    call.collective = c;
    call.dtype = Dtype::int32;
    call.root = root;
    call.input = reinterpret_cast<const std::byte*>(in.data());
    call.output = reinterpret_cast<std::byte*>(out.data());
    call.count = big_in || big_out ? 0 : count;
    if (big_in) call.in = Blocks::equal(count);
    if (big_out) call.out = Blocks::equal(count);
    Communicator::Options options;
    options.algorithm = comm_.intern(algorithm);
    options.order = order;
    comm_.run(call, options);
    ++calls;
    const bool rooted_away = (c == Collective::reduce || c == Collective::gather) && me_ != root;
    if (rooted_away) return;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (out[i] == expected(c, count, root, i)) continue;
      return fail(std::string{name_of(c)} + " by " + algorithm + " over " + std::to_string(n_) +
                  " ranks, count " + std::to_string(count) + ", root " + std::to_string(root) +
                  ": rank " + std::to_string(me_) + " has " + std::to_string(out[i]) + " at " +
                  std::to_string(i) + ", not " + std::to_string(expected(c, count, root, i)));
    }
  }

 private:
  std::int32_t sum(std::uint64_t i) const {
    std::int32_t total = 0;
    for (int r = 0; r < n_; ++r) total += value(r, i);
    return total;
  }

  std::int32_t expected(Collective c, std::uint64_t count, int root, std::uint64_t i) const {
    switch (c) {
      case Collective::all_reduce:
      case Collective::reduce:
        return sum(i);
      case Collective::reduce_scatter:
        return sum(me_ * count + i);
      case Collective::broadcast:
        return value(root, i);
      case Collective::all_gather:
      case Collective::gather:
        return value(static_cast<int>(i / count), i % count);
      case Collective::scatter:
        return value(root, me_ * count + i);
      case Collective::all_to_all:
        return value(static_cast<int>(i / count), me_ * count + i % count);
      case Collective::barrier:
        break;
    }
    return -1;
  }

  Communicator& comm_;
  int n_, me_;
};

void rank_body(int rank, int n, const std::shared_ptr<Region>& region) {
  try {
    CommunicatorConfig config;
    config.rank = rank;
    config.nranks = n;
    config.node.assign(n, 0);
    for (int r = 0; r < n; ++r) config.local_of.push_back(n == 1 ? -1 : r);
    config.region = n == 1 ? nullptr : region;
    config.threads = true;
    config.tuning.crowded = true;
    config.tuning.spins = 1;
    config.tuning.segment_bytes = 4 << 10;  // several segments, so that lanes and slots are used
    config.tuning.chunk_bytes = 8 << 10;
    config.slot_bytes = 16 << 10;
    config.timeout_s = 60;
    Communicator comm(config);
    Checker checker(comm);
    World world;
    world.nranks = n;
    for (const Algorithm* a : algorithms())
      for (int c = 0; c < kCollectiveCount; ++c) {
        const auto collective = static_cast<Collective>(c);
        for (int root = 0; root < (rooted(collective) ? n : 1); root += 2) {
          world.root = root;
          if (!a->why_unsupported(collective, world).empty()) continue;
          for (const std::uint64_t count : {0, 1, 5, 300, 9001})
            for (const Order order : {Order::any, Order::rank})
              checker.run(collective, a->name, collective == Collective::barrier ? 0 : count, root,
                          order);
        }
      }
    // A ring of messages, both ways at once, larger than the FIFO.
    std::vector<std::int32_t> out(50000, rank), in(out.size(), -1);
    const int next = (rank + 1) % n, previous = (rank - 1 + n) % n;
    std::vector<PostedTransfer> posted = {
        comm.post_recv(previous, 7, Dtype::int32, in.data(), in.size() * 4, false),
        comm.post_send(next, 7, Dtype::int32, out.data(), out.size() * 4, false)};
    comm.wait(posted);
    if (in.back() != previous)
      fail("a message of rank " + std::to_string(previous) + " arrived wrong");
    // Queued calls.
    std::vector<std::vector<double>> arrays(10, std::vector<double>(100, 1.0));
    std::vector<std::shared_ptr<Work>> works;
    for (auto& x : arrays) {
      Call call;
      call.dtype = Dtype::float64;
      call.input = reinterpret_cast<const std::byte*>(x.data());
      call.output = reinterpret_cast<std::byte*>(x.data());
      call.count = x.size();
      Communicator::Options options;
      options.algorithm = comm.intern("ring");
      works.push_back(comm.submit(call, options));
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->wait(60);
      if (works[i]->error()) std::rethrow_exception(works[i]->error());
      if (arrays[i][99] != n) fail("a queued call came out wrong");
    }
  } catch (const std::exception& error) {
    fail("rank " + std::to_string(rank) + " of " + std::to_string(n) + ": " + error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 5;
  for (int n = 1; n <= most; ++n) {
    RegionShape shape;
    shape.nranks = n;
    shape.channels = Communicator::kChannels;
    shape.fifo_slot = 16 << 10;
    shape.stage_slot = 32 << 10;
    const auto region = Region::make_private(shape);
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r) threads.emplace_back(rank_body, r, n, region);
    for (auto& t : threads) t.join();
  }
  std::printf("%ld calls, %d failures\n", calls.load(), failures.load());
  return failures != 0;
}
