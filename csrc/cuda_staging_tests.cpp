// Self-tests of staging: what a GPU does while one of its streams waits in a kernel.
#include "cuda_staging_tests.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cuda_memory.hpp"
#include "errors.hpp"

namespace collectives::device {

using std::chrono::steady_clock;

namespace {

constexpr std::chrono::microseconds kNap{20};
constexpr std::chrono::seconds kCopiesWithin{20};
// As long as the turns that some processes take on one GPU.
constexpr std::chrono::milliseconds kStreamsWithin{500};
constexpr std::chrono::milliseconds kCopierBegins{20};
constexpr std::size_t kCopiedBehind = 64 << 10;

// Memory of the GPU for as long as one lives.
struct Word {
  Word() { check_cuda(cudaMalloc(&at, sizeof(u64)), "cudaMalloc"); }
  ~Word() { cudaFree(at); }
  Word(const Word&) = delete;
  Word& operator=(const Word&) = delete;
  void* at = nullptr;
};

}  // namespace

HeldStream::HeldStream(const WaitWords& words, double patience_s) : words_(words) {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  const u64 patience_ns = static_cast<u64>(patience_s * 1e9);
  const int result = launch_staging_wait(words.mapped, ++*words.issued, patience_ns, stream_);
  if (result == cudaSuccess) return;
  end();
  check_cuda(static_cast<cudaError_t>(result), "launching a kernel");
}

void HeldStream::copy_behind(int device, const void* from, std::size_t bytes) {
  copier_ = std::thread([this, device, from, bytes] {
    const OnDevice current(device, std::nothrow);
    std::vector<std::byte> to(std::min(bytes, kCopiedBehind));
    cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, stream_);
    cudaStreamSynchronize(stream_);
    cudaGetLastError();
  });
  std::this_thread::sleep_for(kCopierBegins);
}

bool HeldStream::end() {
  if (stream_ == nullptr) return true;
  __atomic_store_n(&words_.control->ended, *words_.issued, __ATOMIC_RELEASE);
  if (copier_.joinable()) copier_.join();
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
  stream_ = nullptr;
  return __atomic_exchange_n(&words_.control->gave_up, 0, __ATOMIC_ACQ_REL) == 0;
}

// Do copies in both directions go on meanwhile? All else rests on it.
void test_copies(int device, const WaitWords& words, std::byte* from, std::byte* to,
                 cudaStream_t down, cudaStream_t up) {
  const Word there;
  const u64 word = 0x9e3779b97f4a7c15ULL;
  std::memcpy(from, &word, sizeof word);
  std::memset(to, 0, sizeof word);
  cudaEvent_t went = nullptr, came = nullptr;
  for (cudaEvent_t* one : {&went, &came})
    check_cuda(cudaEventCreateWithFlags(one, cudaEventDisableTiming), "cudaEventCreate");
  HeldStream held(words);
  cudaError_t result = cudaMemcpyAsync(there.at, from, sizeof word, cudaMemcpyHostToDevice, up);
  if (result == cudaSuccess) result = cudaEventRecord(went, up);
  if (result == cudaSuccess) result = cudaStreamWaitEvent(down, went, 0);
  if (result == cudaSuccess)
    result = cudaMemcpyAsync(to, there.at, sizeof word, cudaMemcpyDeviceToHost, down);
  if (result == cudaSuccess) result = cudaEventRecord(came, down);
  cudaError_t done = cudaErrorNotReady;
  const auto since = steady_clock::now();
  while (result == cudaSuccess && done == cudaErrorNotReady &&
         steady_clock::now() - since < kCopiesWithin) {
    done = cudaEventQuery(came);
    std::this_thread::sleep_for(kNap);
  }
  cudaGetLastError();
  held.end();
  for (const cudaStream_t one : {up, down}) cudaStreamSynchronize(one);
  for (const cudaEvent_t one : {went, came}) cudaEventDestroy(one);
  check_cuda(result, "the self-test of staging");
  if (done == cudaErrorNotReady)
    throw Error(ErrorKind::unsupported,
                "GPU " + std::to_string(device) +
                    " copies nothing while a kernel of another stream waits; set "
                    "CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses CUDA");
  check_cuda(done, "the self-test of staging");
  if (std::memcmp(to, &word, sizeof word) != 0)
    throw Error(ErrorKind::system, "the self-test of staging read other bytes than it wrote");
}

bool test_streams(const WaitWords& words, cudaStream_t down) {
  constexpr int kStreams = 16;
  const Word there;
  check_cuda(cudaMemsetAsync(there.at, 0, sizeof(u64), down), "cudaMemsetAsync");  // loads it
  check_cuda(cudaStreamSynchronize(down), "cudaStreamSynchronize");
  cudaStream_t streams[kStreams] = {};
  for (cudaStream_t& one : streams)
    check_cuda(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), "cudaStreamCreate");
  HeldStream held(words);
  cudaError_t result = cudaSuccess;
  for (const cudaStream_t one : streams)
    if (result == cudaSuccess) result = cudaMemsetAsync(there.at, 0, sizeof(u64), one);
  const auto since = steady_clock::now();
  int at = 0;
  while (result == cudaSuccess && at < kStreams && steady_clock::now() - since < kStreamsWithin) {
    result = cudaStreamQuery(streams[at]);
    if (result == cudaSuccess) ++at;
    if (result != cudaErrorNotReady) continue;
    result = cudaSuccess;
    std::this_thread::sleep_for(kNap);
  }
  cudaGetLastError();
  held.end();
  for (const cudaStream_t one : streams) {
    cudaStreamSynchronize(one);
    cudaStreamDestroy(one);
  }
  check_cuda(result, "the self-test of streams");
  return at == kStreams;
}

}  // namespace collectives::device
