// Staged calls: slices of device arrays through pinned memory, in the turn of the queue.
#include "cuda_staging.hpp"

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "cuda_memory.hpp"
#include "device.hpp"
#include "staging.hpp"
#include "staging_cut.hpp"

namespace collectives {

using namespace device;
using std::chrono::microseconds;
using std::chrono::steady_clock;

namespace {

constexpr int kSlots = 2;

// Polls of an event before the thread naps: most copies of a slice end meanwhile.
constexpr int kBusyPolls = 200;
constexpr microseconds kNap{20};
constexpr microseconds kLookEvery{5000};

// For the self-tests of copies, and of streams: as long as the turns that some processes take on
// one GPU.
constexpr double kTestSeconds = 20;
constexpr std::chrono::milliseconds kStreamsTest{500};

// Seconds for which a kernel believes in a host that does not stir: a slice waits for its peers as
// long as the communicator's timeout at most, at each of a few steps.
double patience(double timeout_s) { return 60 + 8 * std::min(timeout_s, 1e8); }

// The streams of copies down and up, which all communicators of a process have in common on a GPU:
// nothing there waits for a peer. A GPU works on a few streams at a time only, and on one behind
// another beyond that (CUDA_DEVICE_MAX_CONNECTIONS), where a copy could come behind the kernel that
// waits for it.
class CopyStreams {
 public:
  static std::shared_ptr<CopyStreams> of(int device) {
    static std::mutex mutex;
    static auto* const all = new std::map<int, std::weak_ptr<CopyStreams>>;
    const std::lock_guard lock(mutex);
    std::weak_ptr<CopyStreams>& known = (*all)[device];
    std::shared_ptr<CopyStreams> found = known.lock();
    if (found == nullptr) known = found = std::make_shared<CopyStreams>(device);
    return found;
  }

  explicit CopyStreams(int device) : device_(device) {
    const OnDevice current(device);
    for (cudaStream_t* one : {&down, &up})
      check_cuda(cudaStreamCreateWithFlags(one, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CopyStreams() {
    const OnDevice current(device_, std::nothrow);
    for (const cudaStream_t one : {down, up}) cudaStreamDestroy(one);
  }
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  cudaStream_t down = nullptr, up = nullptr;

 private:
  const int device_;
};

}  // namespace

struct Staging::State {
  class Held;
  struct Slot {
    std::byte *in = nullptr, *out = nullptr;
    cudaEvent_t filled = nullptr, emptied = nullptr;
  };

  State(int device, std::size_t slot_bytes);
  ~State() { close(); }

  void check();
  void close();
  void beat() { __atomic_fetch_add(&control->beat, 1, __ATOMIC_RELAXED); }
  void end(u64 number) { __atomic_store_n(&control->ended, number, __ATOMIC_RELEASE); }
  u64 ended() const { return __atomic_load_n(&control->ended, __ATOMIC_ACQUIRE); }
  void test_copies();
  void test_streams();
  cudaEvent_t event();
  void give_back(cudaEvent_t used) {
    const std::lock_guard lock(mutex);
    events.push_back(used);
  }

  int device;
  std::size_t slot_bytes;
  Slot slots[kSlots];
  std::shared_ptr<CopyStreams> streams;
  cudaStream_t down = nullptr, up = nullptr;  // of `streams`
  StagingControl *control = nullptr, *mapped = nullptr;
  std::byte* pinned = nullptr;
  u64 issued = 0;
  std::atomic<u64> straight{0};
  bool closed = false;
  bool apart = true;  // streams do not stand behind each other
  // Where calls go along rails; used while a call has its turn.
  DeviceCommunicator* near = nullptr;
  Communicator* rail = nullptr;
  std::vector<int> rail_ranks;
  std::unique_ptr<Memory> scratch;
  std::mutex mutex;
  std::exception_ptr error;            // the first
  std::vector<cudaEvent_t> events;     // that nobody uses
  std::deque<cudaEvent_t> waits_left;  // behind each kernel that waits, until it was seen to end
};

Staging::State::State(int d, std::size_t bytes) : device(d), slot_bytes((bytes + 63) / 64 * 64) {
  std::string why;
  const int count = device_count(&why);
  if (count == 0) throw Error(ErrorKind::unsupported, why);
  // One rank of a process at a time: what one allocates waits for the kernel by which another tests
  // the copies, and holds up the very calls that would end it.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const WhileCapturing relaxed;
  const OnDevice current(device);
  check_cuda(static_cast<cudaError_t>(load_staging_wait()), "loading the kernels");
  streams = CopyStreams::of(device);
  down = streams->down;
  up = streams->up;
  void* p = nullptr;
  constexpr unsigned kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
  check_cuda(cudaHostAlloc(&p, sizeof(StagingControl), kFlags), "cudaHostAlloc");
  control = static_cast<StagingControl*>(p);
  std::memset(p, 0, sizeof(StagingControl));
  check_cuda(cudaHostGetDevicePointer(&p, control, 0), "cudaHostGetDevicePointer");
  mapped = static_cast<StagingControl*>(p);
  check_cuda(cudaHostAlloc(&p, 2 * kSlots * slot_bytes, kFlags), "cudaHostAlloc");
  pinned = static_cast<std::byte*>(p);
  for (int i = 0; i < kSlots; ++i) {
    slots[i].in = pinned + 2 * i * slot_bytes;
    slots[i].out = slots[i].in + slot_bytes;
    for (cudaEvent_t* one : {&slots[i].filled, &slots[i].emptied})
      check_cuda(cudaEventCreateWithFlags(one, cudaEventDisableTiming), "cudaEventCreate");
  }
  test_copies();
  test_streams();
}

// While one lives, a stream of its own waits in a kernel.
class Staging::State::Held {
 public:
  explicit Held(State& state) : state_(state) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const u64 patience_ns = static_cast<u64>(2 * kTestSeconds * 1e9);
    result_ = launch_staging_wait(state.mapped, ++state.issued, patience_ns, stream_);
  }
  ~Held() {
    state_.end(state_.issued);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  int result() const { return result_; }

 private:
  State& state_;
  cudaStream_t stream_ = nullptr;
  int result_ = cudaSuccess;
};

// A stream waits in a kernel; do copies in both directions go on meanwhile? All else rests on it.
void Staging::State::test_copies() {
  void* there = nullptr;
  check_cuda(cudaMalloc(&there, sizeof(u64)), "cudaMalloc");
  const u64 word = 0x9e3779b97f4a7c15ULL;
  std::memcpy(slots[0].in, &word, sizeof word);
  std::memset(slots[0].out, 0, sizeof word);
  auto held = std::make_unique<Held>(*this);
  int result = held->result();
  cudaError_t done = cudaErrorNotReady;
  if (result == cudaSuccess)
    result = cudaMemcpyAsync(there, slots[0].in, sizeof word, cudaMemcpyHostToDevice, up);
  if (result == cudaSuccess) result = cudaEventRecord(slots[0].emptied, up);
  if (result == cudaSuccess) result = cudaStreamWaitEvent(down, slots[0].emptied, 0);
  if (result == cudaSuccess)
    result = cudaMemcpyAsync(slots[0].out, there, sizeof word, cudaMemcpyDeviceToHost, down);
  if (result == cudaSuccess) result = cudaEventRecord(slots[0].filled, down);
  const auto since = steady_clock::now();
  while (result == cudaSuccess && done == cudaErrorNotReady &&
         steady_clock::now() - since < std::chrono::duration<double>(kTestSeconds)) {
    done = cudaEventQuery(slots[0].filled);
    std::this_thread::sleep_for(kNap);
  }
  cudaGetLastError();
  held.reset();
  cudaFree(there);
  check_cuda(static_cast<cudaError_t>(result), "the self-test of staging");
  if (done == cudaErrorNotReady)
    throw Error(ErrorKind::unsupported,
                "GPU " + std::to_string(device) +
                    " copies nothing while a kernel of another stream waits; set "
                    "CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses CUDA");
  check_cuda(done, "the self-test of staging");
  if (std::memcmp(slots[0].out, &word, sizeof word) != 0)
    throw Error(ErrorKind::system, "the self-test of staging read other bytes than it wrote");
}

// Has each of some more streams a queue of its own? With CUDA's 8 for all of a process, one of them
// stands behind the stream that waits, and stays there.
void Staging::State::test_streams() {
  constexpr int kStreams = 16;
  cudaStream_t streams[kStreams] = {};
  void* there = nullptr;
  check_cuda(cudaMalloc(&there, sizeof(u64)), "cudaMalloc");
  check_cuda(cudaMemsetAsync(there, 0, sizeof(u64), down), "cudaMemsetAsync");  // loads it
  check_cuda(cudaStreamSynchronize(down), "cudaStreamSynchronize");
  for (cudaStream_t& one : streams)
    check_cuda(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), "cudaStreamCreate");
  auto held = std::make_unique<Held>(*this);
  int result = held->result();
  for (const cudaStream_t one : streams)
    if (result == cudaSuccess) result = cudaMemsetAsync(there, 0, sizeof(u64), one);
  const auto since = steady_clock::now();
  int at = 0;
  while (result == cudaSuccess && at < kStreams && steady_clock::now() - since < kStreamsTest) {
    result = cudaStreamQuery(streams[at]);
    if (result == cudaSuccess) ++at;
    if (result == cudaErrorNotReady) {
      result = cudaSuccess;
      std::this_thread::sleep_for(kNap);
    }
  }
  cudaGetLastError();
  apart = at == kStreams;
  held.reset();
  for (const cudaStream_t one : streams) {
    cudaStreamSynchronize(one);
    cudaStreamDestroy(one);
  }
  cudaFree(there);
  check_cuda(static_cast<cudaError_t>(result), "the self-test of streams");
}

cudaEvent_t Staging::State::event() {
  const std::lock_guard lock(mutex);
  while (!waits_left.empty() && cudaEventQuery(waits_left.front()) == cudaSuccess) {
    events.push_back(waits_left.front());
    waits_left.pop_front();
  }
  cudaGetLastError();
  cudaEvent_t found = nullptr;
  if (events.empty()) {
    check_cuda(cudaEventCreateWithFlags(&found, cudaEventDisableTiming), "cudaEventCreate");
    return found;
  }
  found = events.back();
  events.pop_back();
  return found;
}

void Staging::State::check() {
  if (closed) throw Error(ErrorKind::closed, "this communicator is closed");
  const std::lock_guard lock(mutex);
  if (error) std::rethrow_exception(error);
  if (const u64 number = __atomic_load_n(&control->gave_up, __ATOMIC_ACQUIRE))
    throw Error(ErrorKind::deadline,
                "the stream of device call " + std::to_string(number - 1) +
                    " went on without its result: the thread that works on it did not stir");
}

// Kernels that wait read the control words: none may be left.
void Staging::State::close() {
  if (closed) return;
  closed = true;
  const WhileCapturing relaxed;
  const OnDevice current(device, std::nothrow);
  while (control != nullptr && ended() < issued) std::this_thread::sleep_for(microseconds(100));
  for (const cudaEvent_t one : waits_left) {
    cudaEventSynchronize(one);
    cudaEventDestroy(one);
  }
  for (const cudaStream_t one : {down, up})
    if (one != nullptr) cudaStreamSynchronize(one);
  scratch.reset();
  for (const cudaEvent_t one : events) cudaEventDestroy(one);
  for (const Slot& slot : slots)
    for (const cudaEvent_t one : {slot.filled, slot.emptied})
      if (one != nullptr) cudaEventDestroy(one);
  if (pinned != nullptr) cudaFreeHost(pinned);
  if (control != nullptr) cudaFreeHost(control);
}

// ---- a call, when its turn has come -------------------------------------------------------------

class Staging::Turn final : public Communicator::Task {
 public:
  Turn(std::shared_ptr<State> state, Call call, Communicator::Options options, Way way,
       cudaEvent_t ready, u64 number)
      : state_(std::move(state)),
        call_(std::move(call)),
        options_(options),
        way_(way),
        ready_(ready),
        number_(number) {}

  void run(Communicator& comm) override;

  void end(std::exception_ptr error) noexcept override {
    bool first = false;
    {
      const std::lock_guard lock(state_->mutex);
      first = error && !state_->error;
      if (first) state_->error = error;
      state_->events.push_back(ready_);
    }
    if (first && state_->near != nullptr) stop_near(error);
    state_->end(number_);  // publishes the error, too
  }

 private:
  using Slot = State::Slot;

  void run_slices(Communicator& comm);

  // What is behind this call on the stream must not write what it has not got.
  void stop_near(const std::exception_ptr& error) noexcept {
    try {
      try {
        std::rethrow_exception(error);
      } catch (const Error& e) {
        state_->near->stop(e.what(), e.kind());
      } catch (const std::exception& e) {
        state_->near->stop(e.what(), ErrorKind::aborted);
      }
    } catch (const std::exception&) {
      // The GPU fails, and so will what is on the stream.
    }
  }

  // The kernels within the node that this call builds on have done their part.
  void check_near(Communicator& comm) {
    if (state_->near == nullptr || !state_->near->gave_up()) return;
    comm.look_around();  // who died, say
    throw Error(ErrorKind::aborted, "the kernels of rank " + std::to_string(comm.rank()) +
                                        " gave up their part of a call within its node");
  }

  // True if MPI takes the arrays as they are. `agree_on`: with all ranks of `on`, which then decide
  // alike.
  template <class AgreeOn>
  bool goes_straight(Communicator& on, const AgreeOn& agree_on) {
    if (!on.why_not_straight(call_, options_).empty()) return false;
    // In place, blocks would come to where others still leave from.
    return call_.collective != Collective::all_to_all || way_ == Way::rail ||
           agree_on(call_.input == call_.output ? 1 : 0) == 0;
  }

  // One of the calls that this one is made of: on host memory, or straight.
  void call_on(Communicator& comm, const Call& call, bool straight) {
    Communicator::Options options = options_;
    options.straight = straight;
    if (way_ != Way::rail) return comm.run_in_turn(call, options);
    Communicator& rail = *state_->rail;
    rail.is_part_of(&comm);
    try {
      rail.run_in_turn(call, options);
    } catch (const Error& e) {
      if (comm.broken()) throw;  // what all ranks were told, with their numbers
      std::string words = "among ranks";
      for (const int rank : state_->rail_ranks) words += " " + std::to_string(rank);
      const auto peer = static_cast<std::size_t>(e.peer());
      throw Error(e.kind(), words + ", numbered from 0: " + e.what(),
                  e.peer() < 0 ? -1 : state_->rail_ranks.at(peer));
    }
  }

  // Throws what peers tell meanwhile.
  void wait(Communicator& comm, cudaEvent_t event, const char* what) {
    auto looked = steady_clock::now();
    for (int polls = 0;; ++polls) {
      const cudaError_t result = cudaEventQuery(event);
      if (result == cudaSuccess) return;
      if (result != cudaErrorNotReady) check_cuda(result, what);
      cudaGetLastError();
      if (polls < kBusyPolls) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(kNap);
      if (steady_clock::now() - looked < kLookEvery) continue;
      looked = steady_clock::now();
      state_->beat();
      if (state_->near != nullptr)
        comm.look_around();
      else
        comm.look();
    }
  }

  void fill(const Slice& slice, const Slot& slot) {
    std::byte* to = slot.in;
    if (slice.input_in_output) {
      // The slot's result of before may still be on its way to the GPU.
      to = slot.out;
      check_cuda(cudaStreamWaitEvent(state_->down, slot.emptied, 0), "cudaStreamWaitEvent");
    }
    for (const Part& piece : slice.down)
      if (piece.length != 0)
        check_cuda(cudaMemcpyAsync(to + piece.host * size_, call_.input + piece.device * size_,
                                   piece.length * size_, cudaMemcpyDeviceToHost, state_->down),
                   "copying from the GPU");
    check_cuda(cudaEventRecord(slot.filled, state_->down), "cudaEventRecord");
  }

  void empty(const Slice& slice, const Slot& slot) {
    for (const Part& piece : slice.up)
      if (piece.length != 0)
        check_cuda(
            cudaMemcpyAsync(call_.output + piece.device * size_, slot.out + piece.host * size_,
                            piece.length * size_, cudaMemcpyHostToDevice, state_->up),
            "copying to the GPU");
    check_cuda(cudaEventRecord(slot.emptied, state_->up), "cudaEventRecord");
  }

  // An all_gather leaves the own block to this.
  void copy_own_block(int rank) {
    const std::uint64_t length = call_.out.length(rank);
    std::byte* to = call_.output + call_.out.offset(rank) * size_;
    if (length != 0 && to != call_.input)
      check_cuda(
          cudaMemcpyAsync(to, call_.input, length * size_, cudaMemcpyDeviceToDevice, state_->up),
          "copying within the GPU");
  }

  const std::shared_ptr<State> state_;
  const Call call_;
  const Communicator::Options options_;
  const Way way_;
  const cudaEvent_t ready_;
  const u64 number_;
  const std::size_t size_ = size_of(call_.dtype);
};

void Staging::Turn::run(Communicator& comm) {
  State& s = *state_;
  {
    // Behind a call that failed ranks may be out of step.
    const std::lock_guard lock(s.mutex);
    if (s.error) std::rethrow_exception(s.error);
  }
  const OnDevice current(s.device);
  try {
    run_slices(comm);
  } catch (...) {
    // The caller's arrays may go when the stream goes on: no copy may still be under way.
    cudaStreamSynchronize(s.down);
    cudaStreamSynchronize(s.up);
    cudaGetLastError();
    throw;
  }
}

void Staging::Turn::run_slices(Communicator& comm) {
  State& s = *state_;
  wait(comm, ready_, "what the stream did before the call");
  check_near(comm);
  if (call_.collective == Collective::barrier) return comm.run_in_turn(call_, options_);
  // All ranks are in this very call; the largest `amount` of any.
  const auto agree_on = [&](std::uint64_t amount) {
    Communicator::Options agreement = options_;
    agreement.agreed = &amount;
    comm.run_in_turn(call_, agreement);
    return amount;
  };
  if (way_ == Way::agreement) {
    agree_on(0);
    return;
  }
  const bool along_rail = way_ == Way::rail;  // which comes behind an agreement of its own
  Communicator& on = along_rail ? *s.rail : comm;
  if (goes_straight(on, agree_on)) {
    call_on(comm, call_, true);
    ++s.straight;
    return;
  }
  Cut cut(call_, on.rank(), on.size(), s.slot_bytes, along_rail);
  const bool uneven_pairs =
      !along_rail && call_.collective == Collective::all_to_all && call_.in.is_table();
  // Before anything is written; and so that all cut alike.
  const auto agree = [&] { cut.lay_out(agree_on(cut.longest())); };
  if (uneven_pairs) agree();
  Slice now = cut.slice(0);
  fill(now, s.slots[0]);
  if (!along_rail && !uneven_pairs && cut.slices() > 1) agree();
  const std::uint64_t slices = cut.slices();
  for (std::uint64_t i = 0; i < slices; ++i) {
    const Slot& slot = s.slots[i % kSlots];
    Slice next;
    if (i + 1 < slices) {
      // The other slot's input was read by the call before.
      next = cut.slice(i + 1);
      fill(next, s.slots[(i + 1) % kSlots]);
    }
    wait(comm, slot.filled, "copying from the GPU");
    if (i >= kSlots) wait(comm, slot.emptied, "copying to the GPU");
    now.call.input = now.input_in_output ? slot.out + now.down[0].host * size_ : slot.in;
    now.call.output = slot.out;
    if (now.up.empty() && call_.collective == Collective::broadcast) now.call.output = slot.in;
    call_on(comm, now.call, false);
    s.beat();
    if (i == 0 && now.input_in_output) copy_own_block(on.rank());
    empty(now, slot);
    now = std::move(next);
  }
  wait(comm, s.slots[(slices - 1) % kSlots].emptied, "copying to the GPU");
}

// ---- the interface ------------------------------------------------------------------------------

Staging::Staging(int device, std::size_t slot_bytes)
    : state_(std::make_shared<State>(device, slot_bytes)) {}
Staging::~Staging() { state_->close(); }

void Staging::join(DeviceCommunicator& near, Communicator& rail, std::vector<int> ranks) {
  state_->near = &near;
  state_->rail = &rail;
  state_->rail_ranks = std::move(ranks);
}

int Staging::rail_size() const { return static_cast<int>(state_->rail_ranks.size()); }

std::string Staging::probe(GpuSlots& slots, MpiTransport& mpi, double timeout_s) {
  const OnDevice current(state_->device);
  const State::Held held(*state_);
  check_cuda(static_cast<cudaError_t>(held.result()), "launching a kernel");
  return slots.probe(mpi, timeout_s);
}

std::shared_ptr<GpuSlots> Staging::make_slots(int nranks) {
  return std::make_shared<GpuSlots>(state_->device, nranks, 2 * kSlots * state_->slot_bytes,
                                    state_->down, state_->streams);
}

void Staging::go_straight(Communicator& comm, std::shared_ptr<MpiTransport> mpi,
                          const std::shared_ptr<GpuSlots>& slots, std::uint64_t from) {
  // The communicator may outlive this.
  const std::weak_ptr<State> state = state_;
  const auto moved = [state] {
    if (const std::shared_ptr<State> s = state.lock()) s->beat();
  };
  comm.go_straight(std::move(mpi), GpuSlots::hands(slots, moved), from, slots->scratch_bytes(),
                   GpuSlots::operands());
}

std::uintptr_t Staging::make_scratch(std::size_t bytes) {
  state_->scratch.reset();
  if (bytes == 0) return 0;
  const WhileCapturing relaxed;
  const OnDevice current(state_->device);
  if (!is_shared(state_->device)) free_dropped_memory(state_->device);
  state_->scratch = std::make_unique<Memory>(state_->device, bytes, Home::device);
  return reinterpret_cast<std::uintptr_t>(state_->scratch->get());
}

void Staging::refuse_capture(std::uintptr_t stream) const {
  const OnDevice current(state_->device);
  if (is_captured(reinterpret_cast<cudaStream_t>(stream)))
    throw Error(ErrorKind::unsupported,
                "a call between nodes cannot be captured in a CUDA graph: a thread of the host "
                "takes part in it, which a replay would not start. Make the call between two "
                "graphs");
}

void Staging::run(Communicator& comm, const Call& call, const Communicator::Options& options,
                  std::uintptr_t used, Way way) {
  State& s = *state_;
  s.check();
  comm.look();
  refuse_capture(used);
  const auto stream = reinterpret_cast<cudaStream_t>(used);
  const OnDevice current(s.device);
  Communicator::Options on_device = options;
  on_device.on_device = true;
  const cudaEvent_t ready = s.event();
  cudaEvent_t passed = nullptr;
  try {
    passed = s.event();
    check_cuda(cudaEventRecord(ready, stream), "cudaEventRecord");
  } catch (...) {
    s.give_back(ready);
    if (passed != nullptr) s.give_back(passed);
    throw;
  }
  const u64 number = s.issued + 1;
  Call made = call;
  if (way == Way::rail) made.divisor = comm.size();
  comm.submit(std::make_shared<Turn>(state_, std::move(made), on_device, way, ready, number));
  s.issued = number;
  {
    const std::lock_guard lock(s.mutex);
    s.waits_left.push_back(passed);
  }
  const u64 patience_ns = static_cast<u64>(patience(comm.timeout()) * 1e9);
  check_cuda(static_cast<cudaError_t>(launch_staging_wait(s.mapped, number, patience_ns, stream)),
             "launching a kernel");
  check_cuda(cudaEventRecord(passed, stream), "cudaEventRecord");
}

bool Staging::streams_apart() const { return state_->apart; }

std::uint64_t Staging::straight_calls() const { return state_->straight; }

void Staging::check() { state_->check(); }

bool Staging::idle() {
  if (state_->ended() < state_->issued) return false;
  state_->check();
  return true;
}

void Staging::close() { state_->close(); }

}  // namespace collectives
