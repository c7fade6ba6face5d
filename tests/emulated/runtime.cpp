// The emulated CUDA runtime: memory that other processes can map, streams, events, graphs,
// launches. See README.md for what it promises and what it leaves out.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime_api.h"
#include "fibers.hpp"

namespace {

int setting(const char* name, int otherwise) {
  const char* words = std::getenv(name);
  return words != nullptr && *words != 0 ? std::atoi(words) : otherwise;
}
int devices() {
  static const int n = setting("EMULATED_GPUS", 2);
  return n;
}
int processors() {
  static const int n = setting("EMULATED_PROCESSORS", 8);
  return n;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// Something that will be done.
class Completion {
 public:
  void finish() {
    const std::lock_guard lock(mutex_);
    done_ = true;
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }
  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  std::chrono::steady_clock::time_point when() {
    wait();
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point when_;
};

using Work = std::function<void()>;

// OS threads that run one thing after another, as many as are needed at once.
class Pool {
 public:
  void run(Work work) {
    std::unique_lock lock(mutex_);
    waiting_.push_back(std::move(work));
    if (idle_ >= waiting_.size()) {
      changed_.notify_one();
      return;
    }
    std::thread([this] { serve(); }).detach();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!waiting_.empty()) {
        const Work work = std::move(waiting_.front());
        waiting_.pop_front();
        lock.unlock();
        work();
        lock.lock();
      }
      ++idle_;
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      --idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> waiting_;
  std::size_t idle_ = 0;
};
// Lives as long as the process, as threads that nobody joins use it. (So do the others below.)
Pool& pool() {
  static auto* const one = new Pool;
  return *one;
}

// Places for blocks on a device: those beyond them wait, as they do on a GPU.
class Places {
 public:
  explicit Places(int n) : free_(n) {}
  void take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return free_ > 0; });
    --free_;
  }
  void give() {
    const std::lock_guard lock(mutex_);
    ++free_;
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int free_;
};
Places& places(int device) {
  static auto* const all = [] {
    auto* made = new std::vector<std::unique_ptr<Places>>;
    for (int d = 0; d < devices(); ++d)
      made->push_back(std::make_unique<Places>(processors() * emulated::kBlocksOfProcessor));
    return made;
  }();
  return *(*all)[static_cast<std::size_t>(device)];
}

}  // namespace

// Work that was recorded in place of being done.
struct EmulatedGraph {
  unsigned long long id = 0;
  bool valid = true;
  std::vector<Work> nodes;
};

struct EmulatedStream {
  explicit EmulatedStream(int device) : device(device) {}

  void put(Work work) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    ++submitted;
    if (running) return;
    running = true;
    pool().run([this] { serve(); });
  }
  void wait_all() {
    std::unique_lock lock(mutex);
    const unsigned long long until = submitted;
    changed.wait(lock, [&] { return finished >= until; });
  }

  const int device;
  std::shared_ptr<EmulatedGraph> capture;  // while one goes on

 private:
  void serve() {
    std::unique_lock lock(mutex);
    while (!queue.empty()) {
      const Work work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++finished;
      changed.notify_all();
    }
    running = false;
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  unsigned long long submitted = 0, finished = 0;
  bool running = false;
};

struct EmulatedEvent {
  std::shared_ptr<Completion> last;
  std::shared_ptr<EmulatedGraph> capture;  // the last record went to this graph
};

namespace {

struct Streams {
  std::mutex mutex;
  std::set<EmulatedStream*> all;
  std::map<int, EmulatedStream*> defaults;
};
Streams& streams() {
  static auto* const one = new Streams;
  return *one;
}
EmulatedStream* stream_of(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy) return stream;
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  EmulatedStream*& found = s.defaults[current_device];
  if (found == nullptr) s.all.insert(found = new EmulatedStream(current_device));
  return found;
}

// Does the work in the stream's turn, or records it.
cudaError_t put(cudaStream_t stream, Work work) {
  EmulatedStream* s = stream_of(stream);
  if (s->capture != nullptr) {
    s->capture->nodes.push_back(std::move(work));
  } else {
    s->put(std::move(work));
  }
  return cudaSuccess;
}

void wait_for_device(int device) {
  Streams& s = streams();
  std::vector<EmulatedStream*> on_device;
  {
    const std::lock_guard lock(s.mutex);
    for (EmulatedStream* one : s.all)
      if (one->device == device) on_device.push_back(one);
  }
  for (EmulatedStream* one : on_device) one->wait_all();
}

// ---- memory: a memfd for each allocation, so that processes can map it
// ---------------------------

struct Allocation {
  std::size_t bytes;
  int device, file;
  bool opened;  // another process's
};
struct Memory {
  std::mutex mutex;
  std::map<char*, Allocation> all;
  std::map<char*, std::size_t> pinned;
};
Memory& memory() {
  static auto* const one = new Memory;
  return *one;
}
std::size_t whole_pages(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

cudaError_t map_file(int file, std::size_t bytes, bool opened, int device, void** pointer) {
  void* at = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  const std::lock_guard lock(memory().mutex);
  memory().all[static_cast<char*>(at)] = {bytes, device, file, opened};
  *pointer = at;
  return cudaSuccess;
}

// The allocation that an address lies in, or the end.
std::map<char*, Allocation>::iterator allocation_of(const void* pointer) {
  auto& all = memory().all;
  char* const at = const_cast<char*>(static_cast<const char*>(pointer));
  auto next = all.upper_bound(at);
  if (next == all.begin()) return all.end();
  --next;
  return at < next->first + next->second.bytes ? next : all.end();
}

bool is_pinned(const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  char* const at = const_cast<char*>(static_cast<const char*>(pointer));
  auto next = memory().pinned.upper_bound(at);
  if (next == memory().pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

struct Ipc {
  char magic[8];
  long pid;
  int file, device;
  std::size_t bytes;
};
static_assert(sizeof(Ipc) <= sizeof(cudaIpcMemHandle_t));
constexpr char kMagic[8] = "EMULATE";

void zero_pages(char* from, std::size_t bytes) {
  // Gives whole pages back: a large memset to zero then costs nothing.
  char* const begin = reinterpret_cast<char*>(whole_pages(reinterpret_cast<std::size_t>(from)));
  char* const end =
      reinterpret_cast<char*>(reinterpret_cast<std::size_t>(from + bytes) / 4096 * 4096);
  if (begin >= end || madvise(begin, static_cast<std::size_t>(end - begin), MADV_REMOVE) != 0) {
    std::memset(from, 0, bytes);
    return;
  }
  std::memset(from, 0, static_cast<std::size_t>(begin - from));
  std::memset(end, 0, static_cast<std::size_t>(from + bytes - end));
}

}  // namespace

// ---- launches -----------------------------------------------------------------------------------

cudaError_t emulated::launch(Dim3 grid, Dim3 threads, cudaStream_t stream,
                             std::function<void()> kernel) {
  if (grid.x == 0 || threads.x == 0 || threads.x > 1024) return fail(cudaErrorInvalidValue);
  const int device = stream_of(stream)->device;
  if (device != current_device) return fail(cudaErrorInvalidResourceHandle);
  return put(stream, [grid, threads, device, kernel = std::move(kernel)] {
    Places& free = places(device);
    // Whoever finishes one is still in it when the wait for it has ended.
    const auto rest = std::make_shared<std::vector<Completion>>(grid.x - 1);
    const auto run = [&](unsigned index) {
      free.take();
      run_block({grid, Dim3(index, 0, 0), threads}, kernel);
      free.give();
    };
    for (unsigned b = 1; b < grid.x; ++b)
      pool().run([rest, &run, b] {
        run(b);
        (*rest)[b - 1].finish();
      });
    run(0);
    for (Completion& one : *rest) one.wait();
  });
}

extern "C" {

// ---- errors -------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    default:
      return "cudaErrorInvalidValue";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated CUDA runtime"; }

// ---- devices ------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  if (what != cudaDevAttrMultiProcessorCount) return fail(cudaErrorInvalidValue);
  *value = processors();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* words, int length, int device) {
  std::snprintf(words, static_cast<std::size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* words) {
  unsigned found = 0;
  if (std::sscanf(words, "0000:%02x:00.0", &found) != 1) return fail(cudaErrorInvalidValue);
  *device = static_cast<int>(found);
  return *device < devices() ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int device, int peer) {
  *value = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return peer != current_device ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() {
  wait_for_device(current_device);
  return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int file = memfd_create("emulated-gpu", MFD_CLOEXEC);
  if (file < 0) return fail(cudaErrorMemoryAllocation);
  if (ftruncate(file, static_cast<off_t>(whole_pages(bytes))) != 0) {
    close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  return map_file(file, bytes, false, current_device, pointer);
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Allocation freed{};
  {
    const std::lock_guard lock(memory().mutex);
    const auto found = memory().all.find(static_cast<char*>(pointer));
    if (found == memory().all.end() || found->second.opened) return fail(cudaErrorInvalidValue);
    freed = found->second;
  }
  wait_for_device(freed.device);  // as the real one does
  const std::lock_guard lock(memory().mutex);
  memory().all.erase(static_cast<char*>(pointer));
  munmap(pointer, whole_pages(freed.bytes));
  close(freed.file);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  void* at =
      mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  const std::lock_guard lock(memory().mutex);
  memory().pinned[static_cast<char*>(at)] = bytes;
  *pointer = at;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().pinned.find(static_cast<char*>(pointer));
  if (found == memory().pinned.end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, whole_pages(found->second));
  memory().pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** mapped, void* pointer, unsigned) {
  *mapped = pointer;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  const auto found = allocation_of(pointer);
  const bool known = found != memory().all.end();
  *attributes = {known ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered,
                 known ? found->second.device : -1, const_cast<void*>(pointer),
                 const_cast<void*>(pointer)};
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (kind == cudaMemcpyHostToDevice && stream_of(stream)->capture == nullptr && !is_pinned(from)) {
    // Pageable memory is read before the call returns.
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                    static_cast<const char*>(from) + bytes);
    return put(stream, [to, copy] { std::memcpy(to, copy->data(), copy->size()); });
  }
  return put(stream, [to, from, bytes] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return put(stream, [to, value, bytes] {
    if (value == 0) {
      zero_pages(static_cast<char*>(to), bytes);
    } else {
      std::memset(to, value, bytes);
    }
  });
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  const std::lock_guard lock(memory().mutex);
  const auto found = allocation_of(pointer);
  if (found == memory().all.end() || found->second.opened) return fail(cudaErrorInvalidValue);
  Ipc ipc{};
  std::memcpy(ipc.magic, kMagic, sizeof kMagic);
  ipc.pid = getpid();
  ipc.file = found->second.file;
  ipc.device = found->second.device;
  ipc.bytes = found->second.bytes;
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle->reserved, &ipc, sizeof ipc);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned) {
  Ipc ipc{};
  std::memcpy(&ipc, handle.reserved, sizeof ipc);
  if (std::memcmp(ipc.magic, kMagic, sizeof kMagic) != 0 || ipc.pid == getpid())
    return fail(cudaErrorInvalidResourceHandle);
  const std::string path = "/proc/" + std::to_string(ipc.pid) + "/fd/" + std::to_string(ipc.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return fail(cudaErrorInvalidResourceHandle);
  return map_file(file, ipc.bytes, true, ipc.device, pointer);
}
cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().all.find(static_cast<char*>(pointer));
  if (found == memory().all.end() || !found->second.opened) return fail(cudaErrorInvalidValue);
  munmap(pointer, whole_pages(found->second.bytes));
  close(found->second.file);
  memory().all.erase(found);
  return cudaSuccess;
}

// ---- streams and events -------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream(current_device);
  const std::lock_guard lock(streams().mutex);
  streams().all.insert(*stream);
  return cudaSuccess;
}
// (The stream itself stays: its last piece of work may still look at it.)
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream->wait_all();
  const std::lock_guard lock(streams().mutex);
  streams().all.erase(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream_of(stream)->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  stream_of(stream)->wait_all();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new EmulatedEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->capture = stream_of(stream)->capture;
  if (event->capture != nullptr) return cudaSuccess;
  const auto completion = event->last = std::make_shared<Completion>();
  return put(stream, [completion] { completion->finish(); });
}
// Nodes of a graph are replayed in the order of their recording, so a wait within a capture only
// makes the stream part of it.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  EmulatedStream* s = stream_of(stream);
  if (event->capture != nullptr) {
    if (s->capture == nullptr) s->capture = event->capture;
    return s->capture == event->capture ? cudaSuccess : fail(cudaErrorStreamCaptureUnsupported);
  }
  if (s->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  if (event->last == nullptr) return cudaSuccess;
  return put(stream, [completion = event->last] { completion->wait(); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  return event->last == nullptr || event->last->done() ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->last != nullptr) event->last->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (begin->last == nullptr || end->last == nullptr) return fail(cudaErrorInvalidValue);
  *ms = std::chrono::duration<float, std::milli>(end->last->when() - begin->last->when()).count();
  return cudaSuccess;
}

// ---- graphs -------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(now, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static std::mutex mutex;
  static unsigned long long captures = 0;
  EmulatedStream* s = stream_of(stream);
  if (s->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  s->capture = std::make_shared<EmulatedGraph>();
  const std::lock_guard lock(mutex);
  s->capture->id = ++captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  EmulatedStream* s = stream_of(stream);
  if (s->capture == nullptr) return fail(cudaErrorInvalidValue);
  const auto captured = s->capture;
  *graph = new EmulatedGraph(*captured);
  const std::lock_guard lock(streams().mutex);
  for (EmulatedStream* one : streams().all)
    if (one->capture == captured) one->capture = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  const EmulatedStream* s = stream_of(stream);
  *status = s->capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = s->capture != nullptr ? s->capture->id : 0;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Work& node : exec->nodes) put(stream, node);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

}  // extern "C"
