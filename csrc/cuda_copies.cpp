// direct_two_shot by copy engines, beside a stream that computes:
//
//   arrive    a kernel tells the peers which call this rank is in
//   gather    the peers' shares are copied to them; exchange; a kernel combines
//   spread    the result is copied to all peers; exchange; a kernel puts what came into place
//
// reduce_scatter has no spread, all_gather no gather; what is larger than a landing, where peers
// copy to, goes in chunks. In an exchange a stream writes a word for each peer behind its copies,
// and waits for theirs (cuda_call.hpp), so no multiprocessor is held while bytes are on their way:
// a kernel of cuBLAS takes all of them, and with two less half as long again.
//
// There are two landings from each peer, which take turns. Whoever copies with exchange i + 2 has
// seen all peers come to i + 1, that is, behind the kernel that used what came with i.
//
// Nothing is written to a user's array before a kernel has seen that all ranks agree; so what comes
// is put into place by a kernel, and not copied right there.
//
// A stream cannot give up, and nothing of the host's reaches the words but by way of another
// stream: a kernel that looks at them, and at what else may have ended the wait, and lets the
// stream go on.
//
// Cost: two crossings of the link, and 40 µs beside copies and combination (26 MiB on two H200 take
// 137 µs); seven calls of CUDA's on the host where a kernel takes one. Limits: not in CUDA graphs,
// whose replays would wait for old numbers; GPUs that reach each other's memory, and drivers that
// take words of 64 bits.
#include "cuda_copies.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <map>
#include <mutex>

#include "cuda_engine.hpp"
#include "cuda_words.hpp"
#include "threads.hpp"

namespace collectives {
namespace device {

namespace {

constexpr u64 kPartBytes = 32 << 10;  // of a block of a kernel
// Ranks that are threads and share a GPU: a stream that waits holds its queue, so all of theirs
// need queues of their own, three each of the 32 that there are (keep_streams_apart in device.py).
constexpr int kMostSharing = 8;

// ---- words --------------------------------------------------------------------------------------

// The words of a rank's exchanges: those that it writes at its peers, and those that they write.
struct Words {
  explicit Words(const DeviceWorld& w) {
    const auto word = [&](int owner, int writer) {
      return reinterpret_cast<u64*>(w.arena[owner] + offsetof(State, moved)) + writer;
    };
    for (int k = 1; k < w.nranks; ++k) {
      const int q = (w.rank + k) % w.nranks;
      theirs.push_back(word(q, w.rank));
      own.push_back(word(w.rank, q));
    }
  }
  std::vector<u64*> theirs, own;
};

// ---- queues -------------------------------------------------------------------------------------

// A stream gets a queue of copies of the GPU when it first has a copy to make, and two that do so
// at the same moment, from two threads, get the same one. In it the copies of one would wait for
// those of the other's peer, and so for ever if that is the other itself: of ranks that are threads
// (20 of 24 pairs of new streams on an H200, and none of 16,000 where one thread waits for the
// other here). Later calls keep the queue.
std::mutex& first_copies(int device) {
  static std::mutex all_mutex;
  static auto* const all = new std::map<int, std::mutex>;  // threads use it until the very end
  const std::lock_guard lock(all_mutex);
  return (*all)[device];
}

u64 id_of(cudaStream_t stream) {
  unsigned long long id = 0;  // a handle may be that of a stream that is gone
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

// ---- a call -------------------------------------------------------------------------------------

// One call, on its way through a stream.
class CopiesRun {
 public:
  // exchange    the number of the last one so far
  // max_blocks  of a kernel; 0: any number
  CopiesRun(const CopiesCall& call, cudaStream_t stream, u64 exchange, int max_blocks)
      : c_(call),
        step_(call.step),
        world_(step_.world),
        words_(world_),
        stream_(stream),
        exchange_(exchange),
        max_blocks_(max_blocks) {}

  // Tells the peers. If it throws, nothing is on the stream.
  void begin() { put(launch_copies_begin(goes_on(), stream_)); }

  void go_on() {
    for (u64 at = 0; at < c_.longest; at += c_.chunk) {
      if (c_.gathers) {
        copy_all([&](int q) { return Piece{input_of(q), q, at}; });
        exchange();
        combine(at, !c_.spreads && is_last(at));
      }
      if (c_.spreads) {
        const unsigned char* const own = c_.gathers ? output_of(world_.rank) : c_.input;
        copy_all([&](int) { return Piece{own, world_.rank, at}; });
        exchange();
        place(at, is_last(at));
      }
    }
  }

 private:
  struct Piece {
    const unsigned char* share;
    int owner;  // of the share
    u64 at;
  };

  int peer(int k) const { return (world_.rank + k) % world_.nranks; }
  // Where a share is in this rank's arrays.
  const unsigned char* input_of(int owner) const {
    return c_.input + (c_.input_is_share ? 0 : c_.share[owner].begin);
  }
  unsigned char* output_of(int owner) const {
    return c_.output + (c_.output_is_share ? 0 : c_.share[owner].begin);
  }
  u64 bytes_of(int owner, u64 at) const {
    const u64 all = c_.share[owner].bytes;
    return std::min(c_.chunk, all - std::min(all, at));
  }
  // Where a rank finds what `from` copies with the next exchange, or has copied with the last.
  unsigned char* landing(int owner, int from, u64 exchange) const {
    const Geometry& g = world_.geometry;
    const u64 seat = static_cast<u64>(from - (from > owner ? 1 : 0));
    return world_.arena[owner] + g.landings + (2 * seat + exchange % 2) * g.landing_bytes;
  }

  bool is_last(u64 at) const { return at + c_.chunk >= c_.longest; }
  // What a kernel is told, before the next exchange or behind the last.
  CopiesStep& goes_on(bool last = false) {
    step_.last = last;
    step_.moves = last ? 2 * exchange_ + 2 : 2 * exchange_ + 3;
    return step_;
  }
  void exchange() { exchange_words(stream_, words_.theirs, words_.own, ++exchange_); }

  template <class Of>
  void copy_all(Of of) {
    for (int k = 1; k < world_.nranks; ++k) {
      const Piece piece = of(peer(k));
      const u64 bytes = bytes_of(piece.owner, piece.at);
      if (bytes == 0) continue;
      check_cuda(cudaMemcpyAsync(landing(peer(k), world_.rank, exchange_ + 1),
                                 piece.share + piece.at, bytes, cudaMemcpyDeviceToDevice, stream_),
                 "copying to a peer");
    }
  }

  void combine(u64 at, bool last) {
    const u64 bytes = bytes_of(world_.rank, at);
    CopiesStep& step = goes_on(last);
    step.combines = true;
    step.count = world_.nranks;
    step.bytes[0] = bytes;
    for (int q = 0; q < world_.nranks; ++q)
      step.src[q] = q == world_.rank ? input_of(q) + at : landing(world_.rank, q, exchange_);
    step.dst[0] = output_of(world_.rank) + at;
    work(step, bytes);
  }

  void place(u64 at, bool last) {
    CopiesStep& step = goes_on(last);
    step.combines = false;
    step.count = 0;
    u64 longest = 0;
    const auto add = [&](int owner, const unsigned char* from) {
      unsigned char* const to = output_of(owner) + at;
      const u64 bytes = bytes_of(owner, at);
      if (bytes == 0 || from == to) return;
      step.src[step.count] = from;
      step.dst[step.count] = to;
      step.bytes[step.count++] = bytes;
      longest = std::max(longest, bytes);
    };
    if (!c_.gathers) add(world_.rank, c_.input + at);
    for (int k = 1; k < world_.nranks; ++k) add(peer(k), landing(world_.rank, peer(k), exchange_));
    work(step, longest);
  }

  void work(CopiesStep& step, u64 longest) {
    u64 blocks = std::max<u64>(1, (longest + kPartBytes - 1) / kPartBytes);
    if (max_blocks_ > 0) blocks = std::min(blocks, static_cast<u64>(max_blocks_));
    step.part = std::max<u64>(128, ((longest + blocks - 1) / blocks + 127) / 128 * 128);
    put(launch_copies_step(step, static_cast<int>(blocks), stream_));
  }
  static void put(int error) { check_cuda(static_cast<cudaError_t>(error), "launching a kernel"); }

  const CopiesCall& c_;
  CopiesStep step_;
  const DeviceWorld& world_;
  const Words words_;
  const cudaStream_t stream_;
  u64 exchange_;
  const int max_blocks_;
};

}  // namespace

// ---- the watch ----------------------------------------------------------------------------------

LookStreams& LookStreams::of(int device) {
  static std::mutex all_mutex;
  static auto* const all = new std::map<int, LookStreams>;  // threads use it until the very end
  const std::lock_guard lock(all_mutex);
  return (*all)[device];
}

bool LookStreams::add() {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  all_.push_back(stream);
  return true;
}

cudaStream_t LookStreams::found() const {
  for (const cudaStream_t one : all_) {
    if (cudaStreamQuery(one) == cudaSuccess) return one;
    cudaGetLastError();  // the next call must not see it again
  }
  return nullptr;
}

cudaStream_t LookStreams::idle() {
  constexpr std::size_t kMost = 64;  // queues that a GPU may have, and more
  const std::lock_guard lock(mutex_);
  if (const cudaStream_t one = found()) return one;
  return all_.size() < kMost && add() ? all_.back() : nullptr;
}

bool LookStreams::go_on(std::chrono::milliseconds patience) {
  constexpr std::size_t kFirst = 4;
  const std::lock_guard lock(mutex_);
  if (word_ == nullptr) {
    void* pinned = nullptr;
    check_cuda(cudaHostAlloc(&pinned, sizeof *word_, cudaHostAllocMapped | cudaHostAllocPortable),
               "cudaHostAlloc");
    check_cuda(cudaHostGetDevicePointer(reinterpret_cast<void**>(&word_), pinned, 0),
               "cudaHostGetDevicePointer");
  }
  while (all_.size() < kFirst && add()) {
  }
  for (const cudaStream_t one : all_) exchange_words(one, {word_}, {}, 1);
  const auto end = std::chrono::steady_clock::now() + patience;
  while (found() == nullptr)
    if (std::chrono::steady_clock::now() > end) return false;
  return true;
}

CopiesWatch::CopiesWatch(const volatile u64* moves, std::function<bool()> told,
                         std::function<void(Stuck)> look)
    : moves_(moves), told_(std::move(told)), look_(std::move(look)) {
  thread_ = start_thread([this] { run(); });
}

CopiesWatch::~CopiesWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CopiesWatch::expect(u64 last) {
  const std::lock_guard lock(mutex_);
  end_ = 2 * last + 2;
  changed_.notify_one();
}

void CopiesWatch::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    watch(lock);
    changed_.wait(lock, [&] { return stop_ || *moves_ < end_; });
  }
}

void CopiesWatch::watch(std::unique_lock<std::mutex>& lock) {
  using std::chrono::steady_clock;
  constexpr auto kPause = std::chrono::milliseconds(10);
  u64 seen = *moves_;
  auto since = steady_clock::now();
  while (!stop_ && *moves_ < end_) {
    changed_.wait_for(lock, kPause, [&] { return stop_; });
    const u64 now = *moves_;
    if (now != seen) {
      seen = now;
      since = steady_clock::now();
    }
    const bool waits = seen % 2 == 1 && steady_clock::now() - since >= kPause;
    if (stop_ || !(waits || told_())) continue;
    const auto waited = std::chrono::nanoseconds(steady_clock::now() - since).count();
    lock.unlock();
    look_({seen / 2, static_cast<u64>(waited)});
    lock.lock();
  }
}

}  // namespace device

using namespace device;

// Do this rank's streams write words, and is there one that goes on while another waits? Whether
// the peers see the words is looked at in probe_check().
void DeviceCommunicator::Impl::probe_copies() {
  constexpr auto kPatience = std::chrono::milliseconds(100);
  writes_words = false;
  if (home != Home::device || config.nranks == 1 || config.sharing > kMostSharing) return;
  control->go = 0;
  try {
    exchange_words(stream, Words(world).theirs, {}, 1);
    exchange_words(stream, {}, {&world.control->go}, 1);
    writes_words = LookStreams::of(config.device).go_on(kPatience);
  } catch (const std::exception&) {  // an old driver: calls go by kernels
  }
  *static_cast<volatile u64*>(&control->go) = 1;
  check_cuda(cudaStreamSynchronize(stream), "the self-test");
}

void DeviceCommunicator::Impl::prepare_copies(const Call& call, u64 chunk, const CallHead& head,
                                              const Arithmetic& arithmetic, Prepared* made) {
  CopiesCall& c = made->call.emplace<CopiesCall>();
  c.step.world = world;
  c.step.head = head;
  c.step.arithmetic = arithmetic;
  c.gathers = call.collective != Collective::all_gather;
  c.spreads = call.collective != Collective::reduce_scatter;
  c.longest = cut_into_shares(call, config.nranks, &c);
  c.chunk = std::min(c.longest, world.geometry.landing_bytes);
  if (chunk != 0) c.chunk = std::min(c.chunk, (chunk + 127) / 128 * 128);
}

void DeviceCommunicator::Impl::put_copies(const CopiesCall& call, cudaStream_t used) {
  if (copies_watch == nullptr) {
    const auto told = [this] {
      return *static_cast<volatile u32*>(&control->abort) != 0 ||
             *static_cast<volatile u32*>(&control->record.state) != 0;
    };
    const auto look = [this](CopiesWatch::Stuck stuck) {
      constexpr u64 kLongEnough = 2'000'000;  // for a kernel to ask the host
      const WhileCapturing relaxed;
      const OnDevice current(config.device, std::nothrow);
      const CopiesLook one{world, stuck.exchange, std::max(stuck.waited_ns, kLongEnough)};
      // (Whatever comes of it: there is a next time.)
      if (const cudaStream_t idle = LookStreams::of(config.device).idle())
        launch_copies_look(one, idle);
    };
    copies_watch = std::make_unique<CopiesWatch>(&control->moves, told, look);
  }
  std::unique_lock<std::mutex> alone;
  if (const u64 id = id_of(used); id != copies_stream) {
    alone = std::unique_lock(first_copies(config.device));
    copies_stream = id;
  }
  const u64 chunks = (call.longest + call.chunk - 1) / call.chunk;
  CopiesRun run(call, used, exchanges, config.max_blocks);
  run.begin();
  exchanges += chunks * (call.gathers && call.spreads ? 2 : 1);
  copies_watch->expect(exchanges);
  try {
    run.go_on();
  } catch (const std::exception& error) {  // what is on the stream must not wait for ever
    recorded =
        cudaEventRecord(last_event, used) == cudaSuccess || recorded;  // close() waits for it
    abort(error.what(), ErrorKind::aborted, -1);
    throw;
  }
}

}  // namespace collectives
