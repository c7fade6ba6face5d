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

// What the ranks of one world share.
struct Shared {
  explicit Shared(int n) : handles(n) {
    RegionShape shape;
    shape.nranks = n;
    shape.channels = Communicator::kChannels;
    shape.fifo_slot = 16 << 10;
    shape.stage_slot = 32 << 10;
    region = Region::make_private(shape);
  }
  std::shared_ptr<Region> region;
  std::vector<std::string> handles;  // of a symmetric segment
  std::atomic<int> came{0};
};

CommunicatorConfig config_of(int rank, int n, const Shared& shared) {
  CommunicatorConfig config;
  config.rank = rank;
  config.nranks = n;
  config.node.assign(n, 0);
  for (int r = 0; r < n; ++r) config.local_of.push_back(n == 1 ? -1 : r);
  config.region = n == 1 ? nullptr : shared.region;
  config.threads = true;
  config.tuning.crowded = true;
  config.tuning.spins = 1;
  config.tuning.segment_bytes = 4 << 10;  // several segments, so that lanes and slots are used
  config.tuning.chunk_bytes = 8 << 10;
  config.slot_bytes = 16 << 10;
  config.timeout_s = 60;
  return config;
}

// One call that is queued; the array lives until the work is done.
std::shared_ptr<Work> queue_sum(Communicator& comm, std::vector<double>& x, const char* algorithm) {
  Call call;
  call.dtype = Dtype::float64;
  call.input = reinterpret_cast<const std::byte*>(x.data());
  call.output = reinterpret_cast<std::byte*>(x.data());
  call.count = x.size();
  Communicator::Options options;
  options.algorithm = comm.intern(algorithm);
  return comm.submit(call, options);
}

void finish(const std::vector<std::shared_ptr<Work>>& works,
            const std::vector<std::vector<double>>& arrays, int n) {
  for (std::size_t i = 0; i < works.size(); ++i) {
    works[i]->wait(60);
    if (works[i]->error()) std::rethrow_exception(works[i]->error());
    if (arrays[i].back() != n) fail("a queued call came out wrong");
  }
}

// While queued calls run, the caller names new algorithms and makes and drops symmetric memory.
void change_beside_the_queue(Communicator& comm, Shared& shared) {
  const int n = comm.size(), rank = comm.rank();
  std::vector<std::vector<double>> arrays(20, std::vector<double>(3000, 1.0));
  std::vector<std::shared_ptr<Work>> works;
  for (auto& x : arrays) works.push_back(queue_sum(comm, x, "direct_two_shot"));
  for (int i = 0; i < 50; ++i) comm.intern("unused " + std::to_string(i));
  shared.handles[rank] = comm.make_segment(1 << 16);
  ++shared.came;
  while (shared.came < n) std::this_thread::yield();
  comm.open_segment(1, 1 << 16, shared.handles);
  finish(works, arrays, n);
  comm.release_segment(1);
}

void rank_body(int rank, int n, Shared& shared) {
  try {
    Communicator comm(config_of(rank, n, shared));
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
        comm.post({false, previous, 7, Dtype::int32, in.data(), in.size() * 4}, false),
        comm.post({true, next, 7, Dtype::int32, out.data(), out.size() * 4}, false)};
    comm.wait(posted);
    if (in.back() != previous)
      fail("a message of rank " + std::to_string(previous) + " arrived wrong");
    // Queued calls.
    std::vector<std::vector<double>> arrays(10, std::vector<double>(100, 1.0));
    std::vector<std::shared_ptr<Work>> works;
    for (auto& x : arrays) works.push_back(queue_sum(comm, x, "ring"));
    finish(works, arrays, n);
    change_beside_the_queue(comm, shared);
  } catch (const std::exception& error) {
    fail("rank " + std::to_string(rank) + " of " + std::to_string(n) + ": " + error.what());
  }
}

// A communicator from its making to its end, with a queued call on the way.
void short_life(int rank, int n, Shared& shared) {
  try {
    Communicator comm(config_of(rank, n, shared));
    std::vector<std::vector<double>> arrays(1, std::vector<double>(50, 1.0));
    finish({queue_sum(comm, arrays[0], "ring")}, arrays, n);
  } catch (const std::exception& error) {
    fail(std::string{"a short life: "} + error.what());
  }
}

// rank 0 aborts from a thread of its own while all wait for a call that it never makes.
void abort_beside_a_wait(int rank, int n, Shared& shared) {
  Communicator comm(config_of(rank, n, shared));
  std::thread aborting;
  if (rank == 0) aborting = std::thread([&] { comm.abort("enough"); });
  std::vector<double> x(100, 1.0);
  // Outlives what it throws: a sanitizer does not see how libstdc++ counts its exceptions.
  std::shared_ptr<Work> work;
  try {
    if (rank == n - 1) {
      while (!comm.broken()) queue_sum(comm, x, "ring")->wait(60);
    } else {
      for (;;) {
        work = queue_sum(comm, x, "ring");
        work->wait(60);
        if (work->error()) std::rethrow_exception(work->error());
      }
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::aborted && error.kind() != ErrorKind::closed) fail(error.what());
  }
  if (aborting.joinable()) aborting.join();
}

void on_threads(int n, void (*body)(int, int, Shared&)) {
  Shared shared(n);
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(body, r, n, std::ref(shared));
  for (auto& t : threads) t.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 5;
  for (int n = 1; n <= most; ++n) on_threads(n, rank_body);
  for (int i = 0; i < 500; ++i) on_threads(2, short_life);  // a leak checker looks at the end
  for (int i = 0; i < 20; ++i) on_threads(3, abort_beside_a_wait);
  std::printf("%ld calls, %d failures\n", calls.load(), failures.load());
  return failures != 0;
}
