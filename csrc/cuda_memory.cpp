#include "cuda_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "errors.hpp"
#include "region.hpp"
#include "words.hpp"

namespace collectives {

int device_count(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  if (why != nullptr)
    *why = std::string{"CUDA finds no GPU here ("} +
           (error == cudaSuccess ? "no device" : cudaGetErrorString(error)) + ")";
  return 0;
}

int gpu_of(std::uintptr_t pointer) {
  int device = 0;
  if (pointer == 0) return cudaGetDevice(&device) == cudaSuccess ? device : -1;
  cudaPointerAttributes found{};
  if (cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(pointer)) != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  const bool there = found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged;
  return there ? found.device : -1;
}

namespace device {

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next call must not see it again
  throw Error(ErrorKind::system, std::string{what} + ": " + cudaGetErrorName(error) + ", " +
                                     cudaGetErrorString(error));
}

OnDevice::OnDevice(int device) : device_(device) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
}
OnDevice::OnDevice(int device, std::nothrow_t) noexcept : before_(device), device_(device) {
  cudaGetDevice(&before_);
  if (before_ != device && cudaSetDevice(device) != cudaSuccess) cudaGetLastError();
}
OnDevice::~OnDevice() {
  if (before_ != device_) cudaSetDevice(before_);
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
  return status != cudaStreamCaptureStatusNone;
}

// (Drivers before CUDA 12.8 do not tell.)
void check_owner([[maybe_unused]] int device, [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  int owner = device;
  if (cudaStreamGetDevice(stream, &owner) != cudaSuccess) cudaGetLastError();
  if (owner != device)
    throw Error(
        ErrorKind::system,
        "the arrays of this call are on GPU " + std::to_string(device) +
            ", and its stream is one of GPU " + std::to_string(owner) +
            ": make the stream on the GPU of the arrays, and that GPU the current one (`with "
            "cupy.cuda.Device(" +
            std::to_string(device) + "):`, `torch.cuda.set_device(" + std::to_string(device) +
            ")`)");
#endif
}

WhileCapturing::WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }
WhileCapturing::~WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }

Geometry make_geometry(int nranks, int strands, Home home) {
  // Slots: large enough that a message's signals (about 3 µs) are small beside its bytes.
  const u32 slot = nranks <= 2   ? 64 << 10
                   : nranks <= 4 ? 32 << 10
                   : nranks <= 8 ? 16 << 10
                                 : 8 << 10;
  // What is worth it (tuning/device.py), and a rest for those who want to measure. From three ranks
  // on, lines for an all_reduce of 8 MiB in two steps.
  const u32 packets = nranks <= 2 ? 512 << 10 : 256 << 10;
  const u32 lines = nranks <= 4 ? 4 << 20 : nranks <= 8 ? 2 << 20 : 1 << 20;
  const auto aligned = [](u64 bytes) { return (bytes + 4095) / 4096 * 4096; };
  const u64 peers = static_cast<u64>(nranks) - 1;  // only sends and receives go to oneself too
  Geometry g;
  g.strands = strands;
  g.mail_strands = std::min(strands, kTransferStrands);
  g.slot_bytes = slot;
  g.mail_bytes = slot / 2;
  g.packet_units = packets / 8;
  g.controls = aligned(sizeof(State));
  g.slots = g.controls + aligned(sizeof(FifoControl) * nranks * strands);
  g.packets = g.slots + peers * strands * kDepth * g.slot_bytes;
  // Of the links, NVLink alone keeps lines whole.
  g.lines_each = home == Home::device ? lines / (kLineUnits * 8) + 1 : 0;
  g.lines = g.packets + 2 * peers * g.packet_units * 16;
  g.pairs = aligned(g.lines + 2 * peers * g.lines_each * 128);
  g.transfers = g.pairs + aligned(sizeof(Pair) * nranks);
  g.mail = g.transfers + aligned(sizeof(TransferControl) * nranks * g.mail_strands);
  g.landings = aligned(g.mail + u64(nranks) * g.mail_strands * kTransferDepth * g.mail_bytes);
  // For a bucket of gradients at a time, as programs cut them.
  g.landing_bytes = home == Home::device && peers > 0 ? aligned((16 << 20) / peers) : 0;
  g.bytes = g.landings + 2 * peers * g.landing_bytes;
  return g;
}

namespace {

struct Dropped {
  int device;
  Home home;
  void* pointer;
  u64 bytes;

  void free() const {  // with `device` as the current one
    if (home == Home::device) {
      cudaFree(pointer);
    } else if (home == Home::pinned) {
      cudaFreeHost(pointer);
    } else {
      cudaHostUnregister(pointer);
      munmap(pointer, bytes);
    }
  }
};
std::mutex dropped_mutex;
std::vector<Dropped>& dropped() {  // lives as long as the process, as arrays may end with it
  static auto* const all = new std::vector<Dropped>;
  return *all;
}

}  // namespace

static std::atomic<int> sharers{0};

Sharer::Sharer() { ++sharers; }
Sharer::~Sharer() { --sharers; }
bool is_shared() { return sharers > 0; }

void drop_memory(int device, void* pointer, Home home) {
  if (pointer == nullptr) return;
  const std::lock_guard lock(dropped_mutex);
  dropped().push_back({device, home, pointer, 0});
}

void free_dropped_memory(int device) {
  std::vector<Dropped> mine;
  {
    const std::lock_guard lock(dropped_mutex);
    std::vector<Dropped>& all = dropped();
    const auto stays = [&](const Dropped& one) {
      return one.device != device || (one.home != Home::device && is_shared());
    };
    const auto others = std::partition(all.begin(), all.end(), stays);
    mine.assign(others, all.end());
    all.erase(others, all.end());
  }
  const OnDevice current(device, std::nothrow);
  for (const Dropped& one : mine) one.free();
}

void free_what_nobody_shares() {
  if (is_shared()) return;
  std::set<int> devices;
  {
    const std::lock_guard lock(dropped_mutex);
    for (const Dropped& one : dropped()) devices.insert(one.device);
  }
  for (const int device : devices) free_dropped_memory(device);
}

namespace {

[[noreturn]] void no_memory(cudaError_t error, const char* what, u64 bytes, int device) {
  cudaGetLastError();
  throw Error(
      ErrorKind::system,
      std::string{"cannot "} + what + " " + std::to_string(bytes >> 20) + " MiB " +
          (device >= 0 ? "on GPU " + std::to_string(device) : std::string{"of the host's memory"}) +
          ": " + cudaGetErrorString(error));
}

}  // namespace

Memory::Memory(int device, u64 bytes, Home home) : device_(device), home_(home), bytes_(bytes) {
  void* p = nullptr;
  if (home == Home::device) {
    cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {  // better to wait than to fail
      cudaGetLastError();
      free_dropped_memory(device);
      error = cudaMalloc(&p, bytes);
    }
    if (error != cudaSuccess) no_memory(error, "allocate", bytes, device);
    pointer_ = static_cast<unsigned char*>(p);
    return;
  }
  if (home == Home::shared) {
    file_ = make_memfd("collectives-gpu", bytes);
    cookie_ = random_cookie();
    map_shared();
    return;
  }
  const cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) no_memory(error, "pin", bytes, -1);
  std::memset(p, 0, bytes);
  host_ = p;
  check_cuda(cudaHostGetDevicePointer(&p, host_, 0), "cudaHostGetDevicePointer");
  pointer_ = static_cast<unsigned char*>(p);
}

Memory::Memory(int device, u64 bytes, const std::string& handle)
    : device_(device), home_(Home::shared), bytes_(bytes) {
  file_ = open_memfd(handle, &cookie_);
  map_shared();
  close_handle();
}

void Memory::map_shared() {
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (at == MAP_FAILED) {
    close_handle();
    system_failed("cannot map " + std::to_string(bytes_) + " bytes of shared memory");
  }
  const cudaError_t error =
      cudaHostRegister(at, bytes_, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error != cudaSuccess) {
    munmap(at, bytes_);
    close_handle();
    no_memory(error, "pin", bytes_, -1);
  }
  host_ = at;
  void* mapped = nullptr;
  check_cuda(cudaHostGetDevicePointer(&mapped, host_, 0), "cudaHostGetDevicePointer");
  pointer_ = static_cast<unsigned char*>(mapped);
}

Memory::~Memory() {
  close_handle();
  const std::lock_guard lock(dropped_mutex);
  dropped().push_back({device_, home_, home_ == Home::device ? pointer_ : host_, bytes_});
}

std::string Memory::handle() const { return memfd_handle(file_, cookie_); }
void Memory::close_handle() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

namespace {

// Arenas of ranks of this process, by address.
std::mutex registry_mutex;
std::map<const void*, std::weak_ptr<Memory>>& registry() {
  static auto* const all = new std::map<const void*, std::weak_ptr<Memory>>;
  return *all;
}

}  // namespace

Arenas::Arenas(int rank, int nranks, int device, Home home)
    : rank_(rank),
      device_(device),
      home_(home),
      arena_(nranks, nullptr),
      process_(nranks, getpid()) {}

Arenas::~Arenas() {
  if (opened_.empty()) return;
  const OnDevice current(device_, std::nothrow);
  for (void* p : opened_) cudaIpcCloseMemHandle(p);
}

void Arenas::allocate(u64 bytes, cudaStream_t stream) {
  bytes_ = bytes;
  held_.push_back(std::make_shared<Memory>(device_, bytes, home_));
  {
    const std::lock_guard lock(registry_mutex);
    registry()[own()] = held_.front();
  }
  if (home_ != Home::device) return;
  check_cuda(cudaMemsetAsync(own(), 0, bytes, stream), "cudaMemsetAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

namespace {

// The place of a GPU in this machine: its ordinal is another in each process.
std::string bus_of(int device) {
  char words[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(words, sizeof words, device), "cudaDeviceGetPCIBusId");
  return words;
}
bool is_by_nvlink(int device, const std::string& bus) {
  int peer = -1, atomics = 0;
  const bool known = cudaDeviceGetByPCIBusId(&peer, bus.c_str()) == cudaSuccess;
  if (known && peer == device) return true;
  const bool asked =
      known && cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device,
                                         peer) == cudaSuccess;
  cudaGetLastError();
  return asked && atomics != 0;
}

}  // namespace

// "PROCESS GPU BUS POINTER WAY": the way in for other processes is the bytes of an IPC handle, a
// memfd's handle, or "-", where there is none.
std::string Arenas::handle() const {
  std::string s = std::to_string(getpid()) + ' ' + std::to_string(device_) + ' ' + bus_of(device_) +
                  ' ' + std::to_string(reinterpret_cast<std::uintptr_t>(own())) + ' ';
  if (home_ == Home::shared) return s + held_.front()->handle();
  cudaIpcMemHandle_t ipc;
  std::memset(&ipc, 0, sizeof ipc);
  if (home_ == Home::pinned || cudaIpcGetMemHandle(&ipc, own()) != cudaSuccess) {
    cudaGetLastError();  // threads of one process do without
    return s + '-';
  }
  for (const char c : ipc.reserved) s += std::to_string(static_cast<unsigned char>(c)) + ' ';
  return s;
}

void Arenas::map(const std::vector<std::string>& handles) {
  by_nvlink_ = home_ == Home::device;
  for (int q = 0; q < static_cast<int>(handles.size()); ++q) {
    Words words(handles[q]);
    process_[q] = words.number<pid_t>();
    const int device = words.number<int>();
    const std::string bus{words.next()};
    const auto pointer = words.number<std::uintptr_t>();
    const std::string way = words.rest();
    by_nvlink_ = by_nvlink_ && is_by_nvlink(device_, bus);
    const std::string pair = "rank " + std::to_string(rank_) + " (GPU " + std::to_string(device_) +
                             ") and rank " + std::to_string(q) + " (GPU " + std::to_string(device) +
                             ")";
    if (q == rank_) {
      arena_[q] = own();
    } else if (process_[q] == getpid()) {
      map_here(q, device, reinterpret_cast<unsigned char*>(pointer), pair);
    } else if (home_ == Home::device) {
      map_ipc(q, way.c_str(), pair);
    } else {
      held_.push_back(std::make_shared<Memory>(device_, bytes_, way));
      arena_[q] = held_.back()->get();
    }
  }
}

// The arena of a rank of this process.
void Arenas::map_here(int peer, int device, unsigned char* pointer, const std::string& pair) {
  const std::lock_guard lock(registry_mutex);
  if (home_ == Home::device && device != device_) {
    int can = 0;
    cudaError_t error = cudaDeviceCanAccessPeer(&can, device_, device);
    if (error == cudaSuccess && can == 0) error = cudaErrorPeerAccessUnsupported;
    // Asked for once: sanitizers report each time that it is there already.
    static std::set<std::pair<int, int>> enabled;
    if (error == cudaSuccess && enabled.count({device_, device}) == 0) {
      error = cudaDeviceEnablePeerAccess(device, 0);
      cudaGetLastError();
      if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
      if (error == cudaSuccess) enabled.insert({device_, device});
    }
    if (error != cudaSuccess)
      throw Error(ErrorKind::unsupported,
                  pair + " have no peer access: " + cudaGetErrorString(error));
  }
  arena_[peer] = pointer;
  const auto known = registry().find(pointer);
  if (known != registry().end()) held_.push_back(known->second.lock());
}

// The arena of a rank of another process, in its GPU's memory.
void Arenas::map_ipc(int peer, const char* handle, const std::string& pair) {
  void* mapped = nullptr;
  cudaError_t error = cudaErrorNotSupported;
  if (*handle != '-') {
    cudaIpcMemHandle_t ipc;
    char* at = const_cast<char*>(handle);
    for (char& c : ipc.reserved) c = static_cast<char>(std::strtoul(at, &at, 10));
    error = cudaIpcOpenMemHandle(&mapped, ipc, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
  }
  if (error != cudaSuccess)
    throw Error(ErrorKind::unsupported,
                pair + " cannot map each other's memory: " + cudaGetErrorString(error));
  opened_.push_back(mapped);
  arena_[peer] = static_cast<unsigned char*>(mapped);
}

}  // namespace device

}  // namespace collectives
