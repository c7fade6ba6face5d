// What several threads of a rank do at once with its channels, and a rank that leaves a call that
// others are in. Made for sanitizers: one process, no Python, and an MPI of a few lines.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "communicator.hpp"
#include "errors.hpp"
#include "transport_mpi.hpp"

using namespace collectives;

namespace {

std::atomic<int> failures{0};

void fail(const std::string& what) {
  if (failures.fetch_add(1) < 20) std::fprintf(stderr, "FAIL: %s\n", what.c_str());
}

// ---- an MPI between threads -------------------------------------------------------------------

// Messages in flight, of all ranks, in the order in which they were posted.
class Post {
 public:
  struct Item {
    bool sends;
    int source, dest, tag;
    char* data;
    std::size_t bytes;
    bool done = false;
    bool asked = false;  // a thread is in test() with it
  };

  MpiRequest put(const Item& item) {
    const std::lock_guard lock(mutex_);
    items_.emplace(++last_, item);
    return {last_};
  }

  bool test(MpiRequest& request, MpiStatus* status) {
    if (!request) return true;
    {
      const std::lock_guard lock(mutex_);
      const auto at = items_.find(request.handle);
      if (at == items_.end() || at->second.asked)
        return fail("two threads ask for one request"), false;
      at->second.asked = true;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    const std::lock_guard lock(mutex_);
    Item& item = items_.at(request.handle);
    item.asked = false;
    match(item);
    if (!item.done) return false;
    if (status != nullptr) *status = {item.source, item.bytes, false};
    items_.erase(request.handle);
    request.handle = 0;
    return true;
  }

 private:
  // The first send and the first receive of a tag belong together.
  void match(const Item& like) {
    Item *send = nullptr, *receive = nullptr;
    for (auto& [number, item] : items_) {
      if (item.done || item.source != like.source || item.dest != like.dest || item.tag != like.tag)
        continue;
      Item*& first = item.sends ? send : receive;
      if (first == nullptr) first = &item;
    }
    if (send == nullptr || receive == nullptr) return;
    std::memcpy(receive->data, send->data, send->bytes);
    receive->bytes = send->bytes;
    send->done = receive->done = true;
  }

  std::mutex mutex_;
  std::map<std::uintptr_t, Item> items_;
  std::uintptr_t last_ = 0;
};

class SmallMpi final : public Mpi {
 public:
  SmallMpi(Post& post, int rank, int size) : post_(post), rank_(rank), size_(size) {}

  MpiAbi abi() const override { return MpiAbi::open_mpi; }
  const std::string& path() const override { return name_; }
  const std::string& version() const override { return name_; }
  bool initialized() override { return true; }
  bool finalized() override { return false; }
  MpiThreads threads() override { return MpiThreads::multiple; }
  MpiComm comm_world() const override { return 1; }
  int rank(MpiComm) override { return rank_; }
  int size(MpiComm) override { return size_; }
  MpiComm comm_dup(MpiComm comm, double) override { return comm; }
  void comm_free(MpiComm) override {}

  MpiRequest isend(const void* data, std::size_t bytes, int dest, int tag, MpiComm) override {
    auto* from = static_cast<char*>(const_cast<void*>(data));
    return post_.put({true, rank_, dest, tag, from, bytes});
  }
  // Takes no message of a program any more: its receives wait for what nobody sends.
  void withhold() { withholds_ = true; }

  MpiRequest irecv(void* data, std::size_t bytes, int source, int tag, MpiComm) override {
    if (withholds_ && tag < kControlTag) tag = -1;
    return post_.put({false, source, rank_, tag, static_cast<char*>(data), bytes});
  }
  bool test(MpiRequest& request, MpiStatus* status) override { return post_.test(request, status); }
  bool test_all(std::vector<MpiRequest>& requests) override {
    bool all = true;
    for (MpiRequest& r : requests) all &= test(r, nullptr);
    return all;
  }
  std::vector<int> test_some(std::vector<MpiRequest>&) override { return {}; }
  void cancel(MpiRequest&) override {}
  void request_free(MpiRequest& request) override { request.handle = 0; }
  bool iprobe(int, int, MpiComm, MpiStatus*) override { return false; }

  std::string why_unsupported(Op, Dtype) const override { return name_; }
  void barrier(MpiComm) override {}
  void all_reduce(const void*, void*, std::size_t, Dtype, Op, MpiComm) override {}
  void reduce_scatter(const void*, void*, std::size_t, Dtype, Op, MpiComm) override {}
  void reduce(const void*, void*, std::size_t, Dtype, Op, int, MpiComm) override {}
  void broadcast(void*, std::size_t, int, MpiComm) override {}
  void all_gather(const void*, void*, std::size_t, MpiComm) override {}
  void all_to_all(const void*, void*, std::size_t, MpiComm) override {}

 private:
  Post& post_;
  // Tags of programs are below, those of agreements and of sends and receives from there on.
  static constexpr int kControlTag = Communicator::kChannels - 1;
  int rank_, size_;
  bool withholds_ = false;
  std::string name_ = "an MPI between threads";
};

// ---- worlds -----------------------------------------------------------------------------------

template <class Body>
void on_threads(int n, Body&& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&body, r] {
      try {
        body(r);
      } catch (const std::exception& error) {
        fail("rank " + std::to_string(r) + ": " + error.what());
      }
    });
  for (auto& t : threads) t.join();
}

std::shared_ptr<Region> region_of(int n) {
  RegionShape shape;
  shape.nranks = n;
  shape.channels = Communicator::kChannels;
  shape.fifo_slot = 16 << 10;
  shape.stage_slot = 32 << 10;
  return Region::make_private(shape);
}

CommunicatorConfig config_of(int rank, int n, std::shared_ptr<Region> region) {
  CommunicatorConfig config;
  config.rank = rank;
  config.nranks = n;
  config.threads = true;
  config.tuning.crowded = true;
  config.tuning.spins = 1;
  config.slot_bytes = 16 << 10;
  config.timeout_s = 60;
  for (int r = 0; r < n; ++r) {
    config.node.push_back(region ? 0 : r);
    config.group.push_back(region ? 0 : r);
    config.local_of.push_back(region ? r : -1);
  }
  config.region = std::move(region);
  return config;
}

Call sum_of(std::vector<double>& x) {
  Call call;
  call.dtype = Dtype::float64;
  call.input = reinterpret_cast<const std::byte*>(x.data());
  call.output = reinterpret_cast<std::byte*>(x.data());
  call.count = x.size();
  return call;
}

// ---- cases ------------------------------------------------------------------------------------

// Several messages move in the background, and two threads wait for them.
void messages_over_mpi() {
  constexpr int kMessages = 8, kRounds = 6;
  constexpr std::size_t kCount = 30'000;  // several slots
  Post post;
  on_threads(2, [&](int me) {
    auto config = config_of(me, 2, nullptr);
    MpiTransportOptions options;
    options.slot_bytes = config.slot_bytes;
    config.mpi =
        std::make_shared<MpiTransport>(std::make_shared<SmallMpi>(post, me, 2), 1, options);
    Communicator comm(config);
    std::vector<std::vector<double>> arrays(kMessages, std::vector<double>(kCount));
    for (int round = 0; round < kRounds; ++round) {
      const auto content = [&](int k) { return round * 100.0 + k; };
      std::vector<PostedTransfer> posted;
      for (int k = 0; k < kMessages; ++k) {
        if (me == 0) arrays[k].assign(kCount, content(k));
        posted.push_back(comm.post({me == 0, 1 - me, static_cast<std::uint32_t>(k), Dtype::float64,
                                    arrays[k].data(), kCount * sizeof(double)},
                                   true));
      }
      on_threads(2, [&](int half) {
        for (int k = half; k < kMessages; k += 2) comm.wait({posted[k]});
      });
      for (int k = 0; k < kMessages; ++k)
        if (arrays[k] != std::vector<double>(kCount, content(k)))
          fail("a message is not what was sent");
    }
  });
}

// Both make ports of the transport for the first time.
void first_messages_beside_calls() {
  constexpr int n = 4;
  const auto region = region_of(n);
  on_threads(n, [&](int me) {
    Communicator comm(config_of(me, n, region));
    std::vector<double> x(3000, 1.0);
    Communicator::Options options;
    options.algorithm = comm.intern("ring");
    const auto work = comm.submit(sum_of(x), options);
    std::int32_t out = me, in = -1;
    for (int d = 1; d < n; ++d)
      comm.transfer({{false, (me + n - d) % n, 1, Dtype::int32, &in, sizeof in},
                     {true, (me + d) % n, 1, Dtype::int32, &out, sizeof out}});
    work->wait(60);
    if (in != (me + 1) % n || x.back() != n) fail("a message or a call beside it came out wrong");
  });
}

// A rank gives up while others are at work on its array, which goes then.
void leave_while_others_work(int turn) {
  constexpr std::size_t kCount = 1 << 20;
  const auto region = region_of(2);
  std::atomic<int> came{0};
  on_threads(2, [&](int me) {
    Communicator comm(config_of(me, 2, region));
    auto x = std::make_unique<std::vector<double>>(kCount, 1.0);
    Communicator::Options options;
    options.algorithm = comm.intern("direct_two_shot");
    ++came;
    while (came < 2) std::this_thread::yield();
    std::thread aborting;
    if (me == 0)
      aborting = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(turn * 100));
        comm.abort("enough");
      });
    try {
      for (;;) comm.run(sum_of(*x), options);
    } catch (const Error& error) {
      x.reset();
      if (error.kind() != ErrorKind::aborted) fail(error.what());
    }
    if (aborting.joinable()) aborting.join();
  });
}

// Rank 3 takes the first message of rank `from` late, when that rank's call has failed and its
// communicator is gone. What it was sent from, memory of the core's own, is there all the same.
void messages_that_are_taken_late(Collective collective, int from) {
  constexpr int n = 4;
  constexpr std::size_t kCount = (16 << 10) / sizeof(double);  // a bare message
  const bool scatters = collective == Collective::scatter;
  Post post;
  on_threads(n, [&](int me) {
    auto config = config_of(me, n, nullptr);
    config.timeout_s = 0.5;
    config.slot_bytes = 2 * kCount * sizeof(double);  // the tree sends two blocks at once
    MpiTransportOptions options;
    options.slot_bytes = config.slot_bytes;
    const auto mpi = std::make_shared<SmallMpi>(post, me, n);
    if (me == 3) mpi->withhold();
    config.mpi = std::make_shared<MpiTransport>(mpi, 1, options);
    Communicator comm(config);
    std::vector<double> x(n * kCount, 1.0), out(kCount);
    Call call;
    call.collective = collective;
    call.dtype = Dtype::float64;
    call.op = Op::premul_sum;
    call.root = scatters ? 0 : 3;
    call.input = reinterpret_cast<const std::byte*>(x.data());
    call.output = reinterpret_cast<std::byte*>(out.data());
    if (scatters)
      call.in = Blocks::equal(kCount);
    else
      call.count = kCount;
    Communicator::Options by_tree;
    by_tree.algorithm = comm.intern("binomial_tree");
    by_tree.factor[0] = 3;
    try {
      comm.run(call, by_tree);
      if (me == from) fail("a message that nobody took was taken");
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::deadline) fail(error.what());
      if (me == from && std::strstr(error.what(), "of rank 3") == nullptr)
        fail(std::string{"who takes no message is not named: "} + error.what());
      if (me == from && !comm.lends()) fail("a message that is under way was taken back");
      // This MPI cancels nothing, and rank 3 has asked for its block where that goes.
      if (me == 3 && scatters && !comm.lends()) fail("a message may come to where arrays were");
    }
  });
  // Would lie where the memory was.
  const std::vector<std::vector<double>> others(16, std::vector<double>(kCount, 2.0));
  std::vector<double> late(kCount);
  MpiRequest request = post.put(
      {false, from, 3, 1, reinterpret_cast<char*>(late.data()), late.size() * sizeof late[0]});
  if (!post.test(request, nullptr)) fail("no message was sent");
  if (late != std::vector<double>(kCount, scatters ? 1.0 : 3.0))
    fail("what a message was sent from has gone");
}

// Two ranks disagree about a length: the longer message is not written past the receiver's block.
void a_message_that_is_too_long() {
  constexpr std::size_t kSent = 4096, kExpected = 2048;
  Post post;
  on_threads(2, [&](int me) {
    auto config = config_of(me, 2, nullptr);
    config.slot_bytes = kSent * sizeof(double);
    MpiTransportOptions options;
    options.slot_bytes = config.slot_bytes;
    config.mpi =
        std::make_shared<MpiTransport>(std::make_shared<SmallMpi>(post, me, 2), 1, options);
    Communicator comm(config);
    std::vector<double> x(kSent, 1.0), out(kSent, -1.0);
    Call call;
    call.collective = Collective::all_to_all;
    call.dtype = Dtype::float64;
    call.input = reinterpret_cast<const std::byte*>(x.data());
    call.output = reinterpret_cast<std::byte*>(out.data());
    call.in = Blocks::table({0, me == 0 ? kSent : 0});
    call.out = Blocks::table({me == 1 ? kExpected : 0, 0});
    Communicator::Options options_of_call;
    options_of_call.algorithm = comm.intern("direct_two_shot");
    try {
      comm.run(call, options_of_call);
      if (me == 1) fail("a message that is too long was taken");
    } catch (const Error& error) {
      if (me == 0 || error.kind() != ErrorKind::mismatch) fail(error.what());
    }
    if (out != std::vector<double>(kSent, -1.0)) fail("a message was written past its block");
  });
}

}  // namespace

int main() {
  a_message_that_is_too_long();
  messages_that_are_taken_late(Collective::scatter, 2);  // passed on, from scratch memory
  messages_that_are_taken_late(Collective::reduce, 0);   // multiplied
  messages_over_mpi();
  for (int i = 0; i < 20; ++i) first_messages_beside_calls();
  for (int turn = 0; turn < 30; ++turn) leave_while_others_work(turn * 2);
  std::printf("%d failures\n", failures.load());
  return failures != 0;
}
