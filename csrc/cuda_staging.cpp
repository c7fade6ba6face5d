// Staged calls: slices of device arrays through pinned memory, in the turn of the queue.
#include "cuda_staging.hpp"

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "cuda_allocation.hpp"
#include "cuda_memory.hpp"
#include "cuda_staging_tests.hpp"
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

// One rank of a process at a time tests: what one allocates waits for the kernel by which another
// does, and holds up the very calls that would end it.
std::mutex one_at_a_time;

}  // namespace

struct Staging::State {
  struct Slot {
    std::byte *in = nullptr, *out = nullptr;
    cudaEvent_t filled = nullptr, emptied = nullptr;
  };

  State(int device, std::size_t slot_bytes, int threads);
  ~State() { close(); }

  void set_up();
  void check();
  void close();
  void beat() { __atomic_fetch_add(&control->beat, 1, __ATOMIC_RELAXED); }
  void end(u64 number) { __atomic_store_n(&control->ended, number, __ATOMIC_RELEASE); }
  bool all_ended() const { return ended() >= __atomic_load_n(&issued, __ATOMIC_ACQUIRE); }
  u64 ended() const { return __atomic_load_n(&control->ended, __ATOMIC_ACQUIRE); }
  WaitWords words() { return {control, mapped, &issued}; }
  cudaEvent_t event();
  void give_back(cudaEvent_t used) {
    if (used == nullptr) return;
    const std::lock_guard lock(mutex);
    events.push_back(used);
  }

  const Birth birth;
  int device;
  std::size_t slot_bytes;
  Slot slots[kSlots];
  std::shared_ptr<CopyStreams> streams;
  cudaStream_t down = nullptr, up = nullptr;  // of `streams`
  StagingControl *control = nullptr, *mapped = nullptr;
  std::byte* pinned = nullptr;
  std::mutex run_mutex;  // calls are numbered in the order of the queue, whatever threads make them
  u64 issued = 0;
  std::atomic<u64> straight{0};
  bool closed = false;
  std::optional<Sharer> sharer;  // if there are other ranks of this process
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

Staging::State::State(int d, std::size_t bytes, int threads)
    : device(d), slot_bytes((bytes + 63) / 64 * 64) {
  if (threads > 1) sharer.emplace();
  try {
    set_up();
  } catch (...) {
    close();  // what was made so far
    throw;
  }
}

void Staging::State::set_up() {
  std::string why;
  const int count = device_count(&why);
  if (count == 0) throw Error(ErrorKind::unsupported, why);
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
  test_copies(device, words(), slots[0].in, slots[0].out, down, up);
}

cudaEvent_t Staging::State::event() {
  const WhileCapturing relaxed;
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
  birth.check();
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
  if (birth.in_child()) return;
  const std::lock_guard lock(run_mutex);
  if (closed) return;
  closed = true;
  const WhileCapturing relaxed;
  const OnDevice current(device, std::nothrow);
  while (control != nullptr && !all_ended()) std::this_thread::sleep_for(microseconds(100));
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
  drop_memory(device, pinned, Home::pinned);
  drop_memory(device, control, Home::pinned);
  sharer.reset();
  free_what_nobody_shares();
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

  // Makes the call on the arrays as they are, if MPI takes them; false if it does not. All ranks of
  // `on` decide alike.
  bool run_straight(Communicator& comm, Communicator& on) {
    if (!on.goes_straight(call_, options_)) return false;
    const bool whole = way_ != Way::rail;
    // In place, blocks would come to where others still leave from. (Tables cannot be in place.)
    const bool in_place = whole && call_.collective == Collective::all_to_all &&
                          !call_.in.is_table() && call_.input == call_.output;
    constexpr std::uint64_t kNot = std::uint64_t{1} << 63;
    std::uint64_t longest = std::max(call_.in.longest(on.size()), call_.out.longest(on.size()));
    if (in_place || !takes(call_.input) || !takes(call_.output)) longest |= kNot;
    Communicator::Options options = options_;
    options.agreed = &longest;
    call_on(comm, call_, options);
    if (longest >= kNot) return false;
    options.agreed = nullptr;
    options.straight = true;
    options.longest = longest;
    call_on(comm, call_, options);
    ++state_->straight;
    return true;
  }

  // Is an array in memory that any MPI can map and register? (Or nowhere, if this rank has none.)
  static bool takes(const std::byte* array) {
    return array == nullptr || allocation_of(array).why.empty();
  }

  // One of the calls that this one is made of: on host memory, or straight.
  void call_on(Communicator& comm, const Call& call, const Communicator::Options& options) {
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
  const WhileCapturing relaxed;
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
  if (run_straight(comm, on)) return;
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
    call_on(comm, now.call, options_);
    s.beat();
    if (i == 0 && now.input_in_output) copy_own_block(on.rank());
    empty(now, slot);
    now = std::move(next);
  }
  wait(comm, s.slots[(slices - 1) % kSlots].emptied, "copying to the GPU");
}

// ---- the interface ------------------------------------------------------------------------------

Staging::Staging(int device, std::size_t slot_bytes, int threads)
    : state_(std::make_shared<State>(device, slot_bytes, threads)) {}
Staging::~Staging() { state_->close(); }

void Staging::join(DeviceCommunicator& near, Communicator& rail, std::vector<int> ranks) {
  state_->near = &near;
  state_->rail = &rail;
  state_->rail_ranks = std::move(ranks);
}

int Staging::rail_size() const { return static_cast<int>(state_->rail_ranks.size()); }

std::string Staging::probe(GpuSlots& slots, MpiTransport& mpi, double timeout_s, bool strictly) {
  State& s = *state_;
  const WhileCapturing relaxed;
  const OnDevice current(s.device);
  HeldStream held(s.words(), timeout_s);
  if (strictly) held.copy_behind(s.device, slots.begin(), slots.scratch_bytes());
  const std::string why = slots.probe(mpi, timeout_s, s.slots[0].in, s.slots[0].out);
  if (held.end()) return why;
  return strictly ? "MPI copies by way of memory that is not pinned, or waits for the GPU: where a "
                    "program looks at a result behind a call that has not ended, both would wait "
                    "for each other"
                  : "MPI waits for the GPU while a kernel of another stream waits there";
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
  free_what_nobody_shares();
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
  s.birth.check();
  const std::lock_guard lock(s.run_mutex);
  s.check();
  comm.look();
  refuse_capture(used);
  const auto stream = reinterpret_cast<cudaStream_t>(used);
  const OnDevice current(s.device);
  check_owner(s.device, stream);
  Communicator::Options on_device = options;
  on_device.on_device = true;
  const u64 number = s.issued + 1;
  Call made = call;
  if (way == Way::rail) made.divisor = comm.size();
  cudaEvent_t ready = nullptr, passed = nullptr;
  try {
    ready = s.event();
    passed = s.event();
    check_cuda(cudaEventRecord(ready, stream), "cudaEventRecord");
    comm.submit(std::make_shared<Turn>(state_, std::move(made), on_device, way, ready, number));
  } catch (...) {
    s.give_back(ready);
    s.give_back(passed);
    throw;
  }
  __atomic_store_n(&s.issued, number, __ATOMIC_RELEASE);
  {
    const std::lock_guard own(s.mutex);
    s.waits_left.push_back(passed);
  }
  const u64 patience_ns = static_cast<u64>(patience(comm.timeout()) * 1e9);
  check_cuda(static_cast<cudaError_t>(launch_staging_wait(s.mapped, number, patience_ns, stream)),
             "launching a kernel");
  check_cuda(cudaEventRecord(passed, stream), "cudaEventRecord");
}

bool Staging::streams_apart() {
  const WhileCapturing relaxed;
  const std::lock_guard lock(one_at_a_time);
  const OnDevice current(state_->device);
  return test_streams(state_->words(), state_->down);
}

std::uint64_t Staging::straight_calls() const { return state_->straight; }

void Staging::check() { state_->check(); }

bool Staging::idle() {
  state_->birth.check();
  if (!state_->all_ended()) return false;
  state_->check();
  return true;
}

void Staging::close() { state_->close(); }

}  // namespace collectives
