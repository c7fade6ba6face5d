#include "cuda_memory.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.hpp"
#include "errors.hpp"

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
OnDevice::~OnDevice() {
  if (before_ != device_) cudaSetDevice(before_);
}

WhileCapturing::WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }
WhileCapturing::~WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }

Geometry make_geometry(int nranks, int strands) {
  // Slots: large enough that a message's signals (about 3 µs) are small beside its bytes.
  const u32 slot = nranks <= 2   ? 64 << 10
                   : nranks <= 4 ? 32 << 10
                   : nranks <= 8 ? 16 << 10
                                 : 8 << 10;
  // One-shot kernels send everything to everybody: what is worth it (tuning/device.py), and a rest
  // for those who want to measure.
  const u32 packets = nranks <= 2 ? 512 << 10 : 256 << 10;
  const u32 lines = nranks <= 2 ? 4 << 20 : nranks <= 4 ? 1 << 20 : 512 << 10;
  const auto aligned = [](u64 bytes) { return (bytes + 4095) / 4096 * 4096; };
  Geometry g;
  g.strands = strands;
  g.slot_bytes = slot;
  g.packet_units = packets / 8;
  g.controls = aligned(sizeof(State));
  g.slots = g.controls + aligned(sizeof(FifoControl) * nranks * strands);
  g.packets = g.slots + u64(nranks) * strands * kDepth * g.slot_bytes;
  g.lines_each = lines / (kLineUnits * 8) + 1;
  g.lines = g.packets + u64(2) * nranks * g.packet_units * 16;
  g.bytes = g.lines + u64(2) * nranks * g.lines_each * 128;
  return g;
}

namespace {

struct Dropped {
  int device;
  void* pointer;
};
std::mutex dropped_mutex;
std::vector<Dropped>& dropped() {  // lives as long as the process, as arrays may end with it
  static auto* const all = new std::vector<Dropped>;
  return *all;
}

}  // namespace

void free_dropped_memory() {
  std::vector<Dropped> mine;
  {
    const std::lock_guard lock(dropped_mutex);
    mine.swap(dropped());
  }
  int before = 0;
  cudaGetDevice(&before);
  for (const Dropped& one : mine) {
    cudaSetDevice(one.device);
    cudaFree(one.pointer);
  }
  if (!mine.empty()) cudaSetDevice(before);
}

Memory::Memory(int device, u64 bytes) : device_(device) {
  free_dropped_memory();
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw Error(ErrorKind::system, "cannot allocate " + std::to_string(bytes >> 20) +
                                       " MiB on GPU " + std::to_string(device) + ": " +
                                       cudaGetErrorString(error));
  }
  pointer_ = static_cast<unsigned char*>(p);
}
Memory::~Memory() {
  const std::lock_guard lock(dropped_mutex);
  dropped().push_back({device_, pointer_});
}

namespace {

// Arenas of ranks of this process, by address.
std::mutex registry_mutex;
std::map<const void*, std::weak_ptr<Memory>>& registry() {
  static auto* const all = new std::map<const void*, std::weak_ptr<Memory>>;
  return *all;
}

}  // namespace

Arenas::Arenas(int rank, int nranks, int device)
    : rank_(rank), device_(device), arena_(nranks, nullptr), process_(nranks, getpid()) {}

Arenas::~Arenas() {
  for (void* p : opened_) cudaIpcCloseMemHandle(p);
}

void Arenas::allocate(u64 bytes, cudaStream_t stream) {
  held_.push_back(std::make_shared<Memory>(device_, bytes));
  const std::lock_guard lock(registry_mutex);
  registry()[own()] = held_.front();
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

std::string Arenas::handle() const {
  cudaIpcMemHandle_t ipc;
  std::memset(&ipc, 0, sizeof ipc);
  const bool exported = cudaIpcGetMemHandle(&ipc, own()) == cudaSuccess;
  if (!exported) cudaGetLastError();  // threads of one process do without
  std::string s = std::to_string(getpid()) + ' ' + std::to_string(device_) + ' ' +
                  std::to_string(reinterpret_cast<std::uintptr_t>(own())) + ' ' +
                  (exported ? '1' : '0');
  for (const char c : ipc.reserved) s += ' ' + std::to_string(static_cast<unsigned char>(c));
  return s + ' ' + bus_of(device_);
}

void Arenas::map(const std::vector<std::string>& handles) {
  by_nvlink_ = true;
  for (const std::string& handle : handles)
    by_nvlink_ = by_nvlink_ && is_by_nvlink(device_, handle.substr(handle.rfind(' ') + 1));
  for (int q = 0; q < static_cast<int>(handles.size()); ++q) {
    if (q == rank_) {
      arena_[q] = own();
      continue;
    }
    const char* at = handles[q].c_str();
    const auto next = [&at] {
      char* end = nullptr;
      const unsigned long long value = std::strtoull(at, &end, 10);
      at = end;
      return value;
    };
    const auto pid = process_[q] = static_cast<pid_t>(next());
    const int device = static_cast<int>(next());
    const auto pointer = static_cast<std::uintptr_t>(next());
    const bool exported = next() != 0;
    const std::string pair = "rank " + std::to_string(rank_) + " (GPU " + std::to_string(device_) +
                             ") and rank " + std::to_string(q) + " (GPU " + std::to_string(device) +
                             ")";
    if (pid == getpid()) {
      if (device != device_) {
        const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
        cudaGetLastError();
        if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled)
          throw Error(ErrorKind::unsupported,
                      pair + " have no peer access: " + cudaGetErrorString(error));
      }
      arena_[q] = reinterpret_cast<unsigned char*>(pointer);
      const std::lock_guard lock(registry_mutex);
      const auto known = registry().find(arena_[q]);
      if (known != registry().end()) held_.push_back(known->second.lock());
      continue;
    }
    cudaIpcMemHandle_t ipc;
    for (char& c : ipc.reserved) c = static_cast<char>(next());
    void* mapped = nullptr;
    const cudaError_t error =
        exported ? cudaIpcOpenMemHandle(&mapped, ipc, cudaIpcMemLazyEnablePeerAccess)
                 : cudaErrorNotSupported;
    cudaGetLastError();
    if (error != cudaSuccess)
      throw Error(ErrorKind::unsupported,
                  pair + " cannot map each other's memory: " + cudaGetErrorString(error));
    opened_.push_back(mapped);
    arena_[q] = static_cast<unsigned char*>(mapped);
  }
}

}  // namespace device
}  // namespace collectives
