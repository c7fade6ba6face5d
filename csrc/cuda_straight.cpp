// Memory of a GPU that MPI sends from and receives to, and work on it in the order of a stream.
//
// Cost: a launch and an event for each piece that is combined. Limits: slots shrink with the number
// of ranks, of which each pair has ten; a call's scratch memory is what it was cut for.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "communicator.hpp"
#include "cuda_memory.hpp"
#include "never_free.hpp"
#include "straight.hpp"

namespace collectives {

using namespace device;
using std::chrono::steady_clock;

namespace {

// Slots of each pair of ranks: as many as its FIFOs hold on the sender's side, and one each on the
// receiver's.
constexpr int kSlotsOfPair = Communicator::kStraightChannels * (Communicator::kFifoDepth + 1);
constexpr std::size_t kMaxSlot = 1 << 20;

// Where a network's adapter writes into the GPU's memory, is that seen by kernels that have begun
// (the one that waits, and what is behind it)? Else it must be flushed, if the GPU can.
bool must_flush(int device) {
  int ordered = 0, options = 0;
  const auto get = [&](int* value, cudaDeviceAttr what) {
    if (cudaDeviceGetAttribute(value, what, device) != cudaSuccess) cudaGetLastError();
  };
  get(&ordered, cudaDevAttrGPUDirectRDMAWritesOrdering);
  get(&options, cudaDevAttrGPUDirectRDMAFlushWritesOptions);
  return ordered < cudaGPUDirectRDMAWritesOrderingOwner &&
         (options & cudaFlushGPUDirectRDMAWritesOptionHost) != 0;
}

// What is asked for goes on the stream; a ticket is an event behind it. Tickets end in order.
class DeviceHands final : public Hands {
 public:
  DeviceHands(int device, cudaStream_t stream, std::byte* scratch, std::shared_ptr<GpuSlots> slots,
              std::function<void()> moved)
      : device_(device),
        stream_(stream),
        scratch_(scratch),
        slots_(std::move(slots)),
        moved_(std::move(moved)) {}
  ~DeviceHands() override {
    const OnDevice current(device_, std::nothrow);
    for (const cudaEvent_t one : waiting_) cudaEventDestroy(one);
    for (const cudaEvent_t one : free_) cudaEventDestroy(one);
  }

  std::byte* begin(Reduction reduction, bool reduces, std::size_t scratch_bytes) override {
    if (reduces) arithmetic_ = arithmetic_of(reduction.dtype, reduction.op);
    if (scratch_bytes > slots_->scratch_bytes())
      throw Error(ErrorKind::system, "a call needs more scratch memory than it was cut for");
    return scratch_;
  }

  void copy(void* to, const void* from, std::size_t bytes) override {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
               "copying within the GPU");
    asked_ = true;
  }

  void reduce(void* const* dsts, int ndst, const void* const* srcs, int nsrc, std::size_t count,
              const Finish& finish) override {
    CombineCall call{};
    call.arithmetic = arithmetic_;
    call.arithmetic.divisor = finish.divisor;
    call.bytes = count * arithmetic_.element;
    call.nsrc = nsrc;
    call.ndst = ndst;
    for (int i = 0; i < nsrc; ++i) call.src[i] = static_cast<const unsigned char*>(srcs[i]);
    for (int i = 0; i < ndst; ++i) call.dst[i] = static_cast<unsigned char*>(dsts[i]);
    check_cuda(static_cast<cudaError_t>(launch_combine(call, stream_)), "launching a kernel");
    asked_ = true;
  }

  std::uint64_t ticket() override {
    if (!asked_) return 0;
    asked_ = false;
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    waiting_.push_back(event);
    check_cuda(cudaEventRecord(event, stream_), "cudaEventRecord");
    return ++issued_;
  }

  bool done(std::uint64_t ticket) override {
    while (ended_ < ticket) {
      const cudaError_t result = cudaEventQuery(waiting_.front());
      if (result == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
      }
      check_cuda(result, "combining on the GPU");
      free_.push_back(waiting_.front());
      waiting_.pop_front();
      ++ended_;
    }
    return true;
  }

  void moved() override { moved_(); }
  void abandon() override { slots_->abandon(); }  // the scratch is of their memory

  void end() override {
    if (flushes_)
      check_cuda(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                    cudaFlushGPUDirectRDMAWritesToOwner),
                 "cudaDeviceFlushGPUDirectRDMAWrites");
  }

 private:
  const int device_;
  const cudaStream_t stream_;
  std::byte* const scratch_;
  const std::shared_ptr<GpuSlots> slots_;
  const std::function<void()> moved_;
  const bool flushes_ = must_flush(device_);
  Arithmetic arithmetic_{};
  bool asked_ = false;
  std::uint64_t issued_ = 0, ended_ = 0;
  std::deque<cudaEvent_t> waiting_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace

struct GpuSlots::State {
  State(int d, int n, std::size_t bytes, void* s, std::shared_ptr<void> keeps)
      : device(d),
        half((bytes / 2 + 255) / 256 * 256),
        slots(std::max(1, n - 1) * kSlotsOfPair),
        stream(static_cast<cudaStream_t>(s)),
        keeps(std::move(keeps)),
        memory(std::make_shared<Memory>(d, 2 * half, Home::device)) {}

  char* begin() const { return reinterpret_cast<char*>(memory->get()); }

  int device;
  std::size_t half;
  int slots;
  cudaStream_t stream;
  std::shared_ptr<void> keeps;
  std::shared_ptr<Memory> memory;
  std::size_t taken = 0;
  std::mutex mutex;
};

GpuSlots::GpuSlots(int device, int nranks, std::size_t bytes, void* stream,
                   std::shared_ptr<void> keeps) {
  const WhileCapturing relaxed;
  const OnDevice current(device);
  free_what_nobody_shares();
  state_ = std::make_unique<State>(device, nranks, bytes, stream, std::move(keeps));
  // What CUDA loads at its first use waits for all kernels, and calls run while one waits for them.
  check_cuda(static_cast<cudaError_t>(load_combine()), "loading the kernels");
  const cudaStream_t used = state_->stream;
  CombineCall first{};
  first.arithmetic = arithmetic_of(Dtype::float32, Op::sum);
  first.bytes = 64;
  first.nsrc = 2;
  first.ndst = 1;
  for (int i = 0; i < 2; ++i)
    first.src[i] = reinterpret_cast<const unsigned char*>(state_->begin());
  first.dst[0] = reinterpret_cast<unsigned char*>(state_->begin() + state_->half);
  check_cuda(static_cast<cudaError_t>(launch_combine(first, used)), "launching a kernel");
  check_cuda(cudaMemcpyAsync(state_->begin(), state_->begin() + state_->half, 64,
                             cudaMemcpyDeviceToDevice, used),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(used), "cudaStreamSynchronize");
}
GpuSlots::~GpuSlots() = default;

std::size_t GpuSlots::slot_bytes() const {
  return std::min(kMaxSlot, MpiTransport::slot_that_fits(state_->half, state_->slots));
}
std::size_t GpuSlots::scratch_bytes() const { return state_->half; }

char* GpuSlots::take(std::size_t bytes) {
  const std::lock_guard lock(state_->mutex);
  if (bytes > state_->half - state_->taken)
    throw Error(ErrorKind::system, "more slots are used than memory was allocated for");
  char* const found = state_->begin() + state_->taken;
  state_->taken += bytes;
  return found;
}

void GpuSlots::abandon() { never_free(state_->memory); }

std::unique_ptr<Hands> GpuSlots::hands(const std::shared_ptr<GpuSlots>& slots,
                                       std::function<void()> moved) {
  const State& s = *slots->state_;
  std::byte* const scratch = reinterpret_cast<std::byte*>(s.begin() + s.half);
  return std::make_unique<DeviceHands>(s.device, s.stream, scratch, slots, std::move(moved));
}

int GpuSlots::operands() { return kMaxRanks; }

const void* GpuSlots::begin() const { return state_->begin(); }

std::string GpuSlots::probe(MpiTransport& mpi, double timeout_s, std::byte* sent,
                            std::byte* found) {
  const OnDevice current(state_->device);
  const int n = mpi.size(), rank = mpi.self();
  const auto deadline = steady_clock::now() + std::chrono::duration<double>(timeout_s);
  const auto copy = [&](void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, state_->stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(state_->stream), "cudaStreamSynchronize");
  };
  const auto words_of = [](int from, int to, std::size_t count) {
    std::vector<std::uint32_t> words(count);
    std::uint32_t x = 0x9e3779b9u ^ static_cast<std::uint32_t>(from << 16 ^ to);
    for (std::uint32_t& word : words) word = x = x * 1664525u + 1013904223u;
    return words;
  };
  for (int k = 1; k < n; k *= 2) {
    const int to = (rank + k) % n, from = (rank + n - k) % n;
    for (const std::size_t count : {std::size_t{2}, mpi.slot_bytes() / 4}) {
      SendPort& out = mpi.send_port(to, 0);
      RecvPort& in = mpi.recv_port(from, 0);
      const auto late = [&](const char* what) {
        return steady_clock::now() < deadline
                   ? std::string{}
                   : std::string{what} + " within " + std::to_string(timeout_s) + " s";
      };
      const std::size_t bytes = count * sizeof(std::uint32_t);
      std::memcpy(sent, words_of(rank, to, count).data(), bytes);
      in.expect(1);
      const char* got = nullptr;
      std::size_t length = 0;
      char* slot = nullptr;
      while ((slot = out.acquire(bytes)) == nullptr)
        if (const std::string why = late("a send did not end"); !why.empty()) return why;
      copy(slot, sent, bytes, cudaMemcpyHostToDevice);
      out.commit_bare(bytes);
      while ((got = in.peek_bare(&length)) == nullptr) {
        if (const std::string why = late("no message came"); !why.empty())
          return why + " from rank " + std::to_string(from);
        std::this_thread::yield();
      }
      copy(found, got, bytes, cudaMemcpyDeviceToHost);
      in.release();
      if (length != bytes || std::memcmp(found, words_of(from, rank, count).data(), bytes) != 0)
        return "what rank " + std::to_string(from) + " sent out of its GPU's memory, " +
               std::to_string(bytes) + " bytes, came as something else into that of rank " +
               std::to_string(rank);
      while (!out.flushed())
        if (const std::string why = late("a send did not end"); !why.empty()) return why;
    }
  }
  return "";
}

}  // namespace collectives
