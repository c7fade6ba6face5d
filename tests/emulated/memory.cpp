// The emulated CUDA runtime's memory: a memfd for each allocation, so that processes can map it;
// pinned memory, copies, IPC handles, and what the driver's interface says of addresses.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda.h"
#include "fibers.hpp"
#include "runtime.hpp"

namespace emulated {
namespace {

struct Allocation {
  std::size_t bytes;
  int device, file;
  bool opened;  // another process's
  bool pool;    // of cudaMallocAsync
  unsigned long long buffer;
};
// Memory of the host that kernels may use.
struct Pinned {
  std::size_t bytes;
  bool registered;
};
struct Memory {
  std::mutex mutex;
  std::map<char*, Allocation> all;
  std::map<char*, Pinned> pinned;
  std::map<std::size_t, void*> freed;  // by size: where the next one goes, as on a GPU
  unsigned long long buffers = 0;
};
Memory& memory() {
  static auto* const one = new Memory;
  return *one;
}
std::size_t whole_pages(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

cudaError_t map_file(int file, std::size_t bytes, bool opened, int device, void** pointer,
                     bool pool = false) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  void* const where = m.freed[bytes];
  void* at = mmap(where, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  m.all[static_cast<char*>(at)] = {bytes, device, file, opened, pool, ++m.buffers};
  *pointer = at;
  return cudaSuccess;
}

cudaError_t allocate(void** pointer, std::size_t bytes, bool pool) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int file = memfd_create("emulated-gpu", MFD_CLOEXEC);
  if (file < 0) return fail(cudaErrorMemoryAllocation);
  if (ftruncate(file, static_cast<off_t>(whole_pages(bytes))) != 0) {
    close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  return map_file(file, bytes, false, current_device, pointer, pool);
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

// Is it pinned memory of the host, or a GPU's?
bool is_known(const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  if (allocation_of(pointer) != memory().all.end()) return true;
  const char* const at = static_cast<const char*>(pointer);
  const auto next = memory().pinned.upper_bound(const_cast<char*>(at));
  return next != memory().pinned.begin() &&
         at < std::prev(next)->first + std::prev(next)->second.bytes;
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

// Attributes by their numbers in CUDA; results are CUDA's too: 0, or 1 for an invalid value.
int pointer_attribute(void* value, int attribute, unsigned long long address) {
  const std::lock_guard lock(memory().mutex);
  const auto found = allocation_of(reinterpret_cast<const void*>(address));
  if (found == memory().all.end()) return 1;
  const Allocation& one = found->second;
  switch (attribute) {
    case 7:  // CU_POINTER_ATTRIBUTE_BUFFER_ID
      *static_cast<unsigned long long*>(value) = one.buffer;
      return 0;
    case 8:  // CU_POINTER_ATTRIBUTE_IS_MANAGED
      *static_cast<int*>(value) = 0;
      return 0;
    case 10:  // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
      *static_cast<int*>(value) = !one.pool && !one.opened;
      return 0;
    case 17:  // CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
      *static_cast<void**>(value) = one.pool ? &memory() : nullptr;
      return 0;
    default:
      return 1;
  }
}
int address_range(unsigned long long* base, std::size_t* bytes, unsigned long long address) {
  const std::lock_guard lock(memory().mutex);
  const auto found = allocation_of(reinterpret_cast<const void*>(address));
  if (found == memory().all.end()) return 1;
  *base = reinterpret_cast<unsigned long long>(found->first);
  *bytes = found->second.bytes;
  return 0;
}

}  // namespace

bool lost(const void* address) {
  const unsigned loses = here().block->loses;
  if (loses == 0) return false;
  const std::lock_guard lock(memory().mutex);
  const auto found = allocation_of(address);
  const unsigned where =
      found == memory().all.end() ? kHost : static_cast<unsigned>(found->second.device);
  return (loses >> where & 1) != 0;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

// ---- memory -------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return allocate(pointer, bytes, false);
}
cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t) {
  return allocate(pointer, bytes, true);
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
  memory().freed[freed.bytes] = pointer;
  munmap(pointer, whole_pages(freed.bytes));
  close(freed.file);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  void* at =
      mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  const std::lock_guard lock(memory().mutex);
  memory().pinned[static_cast<char*>(at)] = {bytes, false};
  *pointer = at;
  return cudaSuccess;
}
// For tests: allocations of memory of GPUs, and of pinned memory, that were not freed.
__attribute__((visibility("default"))) int emulatedAllocations() {
  const std::lock_guard lock(memory().mutex);
  return static_cast<int>(memory().all.size() + memory().pinned.size());
}
cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  char* const from = static_cast<char*>(pointer);
  const std::lock_guard lock(memory().mutex);
  for (const auto& [at, one] : memory().pinned)
    if (from < at + one.bytes && at < from + bytes)
      return fail(cudaErrorHostMemoryAlreadyRegistered);
  memory().pinned[from] = {bytes, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  wait_for_all_devices();  // as the real one does
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().pinned.find(static_cast<char*>(pointer));
  if (found == memory().pinned.end() || !found->second.registered)
    return fail(cudaErrorHostMemoryNotRegistered);
  memory().pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  wait_for_all_devices();  // as the real one does
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().pinned.find(static_cast<char*>(pointer));
  if (found == memory().pinned.end() || found->second.registered)
    return fail(cudaErrorInvalidValue);
  munmap(pointer, whole_pages(found->second.bytes));
  memory().pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** mapped, void* pointer, unsigned) {
  const std::lock_guard lock(memory().mutex);
  if (memory().pinned.count(static_cast<char*>(pointer)) == 0) return fail(cudaErrorInvalidValue);
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
  if ((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDefault) && !is_capturing(stream) &&
      !is_known(from)) {
    // Pageable memory is read before the call returns.
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                    static_cast<const char*>(from) + bytes);
    return put(stream, [to, copy] { std::memcpy(to, copy->data(), copy->size()); });
  }
  const auto copy = [to, from, bytes] { std::memcpy(to, from, bytes); };
  return kind == cudaMemcpyDeviceToDevice ? put_copy(stream, copy) : put(stream, copy);
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
  if (found == memory().all.end() || found->second.opened || found->second.pool)
    return fail(cudaErrorInvalidValue);
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
  if (ipc.device != current_device && !have_peer_access(current_device, ipc.device))
    return fail(cudaErrorPeerAccessUnsupported);
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

// ---- the driver's interface -----------------------------------------------------------------

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::string wanted = name;
  *function = wanted == "cuPointerGetAttribute"  ? reinterpret_cast<void*>(&pointer_attribute)
              : wanted == "cuMemGetAddressRange" ? reinterpret_cast<void*>(&address_range)
              : wanted == "cuStreamBatchMemOp" && std::getenv("EMULATED_NO_WORDS") == nullptr
                  ? reinterpret_cast<void*>(&batch_mem_op)
                  : nullptr;
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
