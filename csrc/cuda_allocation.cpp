#include "cuda_allocation.hpp"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "cuda_driver.hpp"
#include "cuda_memory.hpp"

namespace collectives::device {
namespace {

// Functions of the driver, and the attributes that are asked for, by CUDA's numbers.
using PointerGetAttribute = int (*)(void* value, int attribute, u64 address);
using MemGetAddressRange = int (*)(u64* base, std::size_t* bytes, u64 address);
enum : int { kBufferId = 7, kIsManaged = 8, kIsIpcCapable = 10, kMemoryPool = 17 };

template <class T>
bool ask(int attribute, u64 address, T* value) {
  static const auto function = of_driver<PointerGetAttribute>("cuPointerGetAttribute");
  return function != nullptr && function(value, attribute, address) == 0;
}
bool ask_range(u64 address, Allocation* found) {
  static const auto function = of_driver<MemGetAddressRange>("cuMemGetAddressRange");
  std::size_t bytes = 0;
  const bool known = function != nullptr && function(&found->base, &bytes, address) == 0;
  found->bytes = bytes;
  return known;
}

}  // namespace

u64 buffer_of(const void* address) {
  u64 buffer = 0;
  return ask(kBufferId, reinterpret_cast<u64>(address), &buffer) ? buffer : 0;
}

Allocation allocation_of(const void* address) {
  const u64 at = reinterpret_cast<u64>(address);
  Allocation found;
  int managed = 0, capable = 0;
  void* pool = nullptr;
  if (!ask(kIsManaged, at, &managed)) {
    found.why = "the driver knows no allocation there";
  } else if (managed != 0) {
    found.why = "it is managed memory";
  } else if (ask(kMemoryPool, at, &pool) && pool != nullptr) {
    found.why = "it is of a pool of cudaMallocAsync";
  } else if (!ask(kIsIpcCapable, at, &capable) || capable == 0) {
    found.why =
        "CUDA IPC does not take it: it is virtual memory, as torch's expandable segments are, or "
        "not "
        "a GPU's";
  } else if (!ask_range(at, &found) || !ask(kBufferId, at, &found.buffer) || found.buffer == 0) {
    found.why = "the driver does not tell its allocation";
  }
  return found;
}

std::string export_allocation(u64 base) {
  cudaIpcMemHandle_t ipc;
  if (cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(base)) != cudaSuccess) {
    cudaGetLastError();
    return "";
  }
  std::string text;
  for (const char c : ipc.reserved) text += std::to_string(static_cast<unsigned char>(c)) + ' ';
  return text;
}

Opened::Opened(const std::string& handle) {
  cudaIpcMemHandle_t ipc;
  const char* from = handle.c_str();
  for (char& c : ipc.reserved) {
    char* end = nullptr;
    c = static_cast<char>(std::strtoul(from, &end, 10));
    from = end;
  }
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
  void* mapped = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&mapped, ipc, cudaIpcMemLazyEnablePeerAccess),
             "cudaIpcOpenMemHandle");
  pointer_ = static_cast<unsigned char*>(mapped);
}
Opened::~Opened() {
  const OnDevice current(device_, std::nothrow);
  cudaIpcCloseMemHandle(pointer_);
}

}  // namespace collectives::device
