// Memory that kernels work in, and what is checked about it: allocation, arenas that peers map,
// errors in words.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cuda_call.hpp"
#include "device.hpp"

namespace collectives::device {

// Throws Error(system) with what was tried and CUDA's own words.
void check_cuda(cudaError_t error, const char* what);

// Makes a device current for the calling thread, and restores the one before.
class OnDevice {
 public:
  explicit OnDevice(int device);
  OnDevice(int device, std::nothrow_t) noexcept;  // where something ends: errors are of no use
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0, device_ = 0;
};

// While one lives, calls that CUDA calls unsafe during another stream's capture are allowed on this
// thread: what is done here touches no captured stream.
class WhileCapturing {
 public:
  WhileCapturing();
  ~WhileCapturing();
  WhileCapturing(const WhileCapturing&) = delete;
  WhileCapturing& operator=(const WhileCapturing&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Is the stream being captured into a CUDA graph?
bool is_captured(cudaStream_t stream);

// Throws in words if the stream is one of another GPU: a launch would succeed, there.
void check_owner(int device, cudaStream_t stream);

Geometry make_geometry(int nranks, int strands, Home home);

// Memory that is freed with its last holder: ranks that are threads hold each other's arenas, so
// that a rank may close while a peer's kernel still writes to it. It is not freed where it ends:
// that may be in the middle of anything, since Python's collector drops arrays when it likes, and
// cudaFree waits for every kernel on the GPU.
class Memory {
 public:
  // What it is has no promised content, but memory of the host is of zeros.
  Memory(int device, u64 bytes, Home home);
  // Shared memory that another process has made.
  Memory(int device, u64 bytes, const std::string& handle);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  // As kernels address it.
  unsigned char* get() const { return pointer_; }
  // Of shared memory: what other processes open it by, as long as this one keeps the way in.
  std::string handle() const;
  void close_handle();

 private:
  void map_shared();

  int device_;
  Home home_;
  u64 bytes_;
  void* host_ = nullptr;  // memory of the host, as the host addresses it
  unsigned char* pointer_ = nullptr;
  int file_ = -1;
  std::uint64_t cookie_ = 0;
};

// Frees memory, in time: as that which Memory held.
void drop_memory(int device, void* pointer, Home home);
// Frees all Memory of a GPU that has ended, but for that of the host while there is a Sharer. To be
// called where that GPU may be waited for; new Memory does if there is too little.
void free_dropped_memory(int device);
// That of all GPUs, unless there is a Sharer.
void free_what_nobody_shares();

// There are ranks beside others of this process: kernels may wait for any of its threads, on
// whatever GPU, so that none may wait for a GPU. (Freeing does, and freeing pinned memory for all
// GPUs; meanwhile the driver lets no other thread launch anything.)
class Sharer {
 public:
  Sharer();
  ~Sharer();
  Sharer(const Sharer&) = delete;
  Sharer& operator=(const Sharer&) = delete;
};
// Is there a Sharer?
bool is_shared();

// One rank's arena, and the way to the others'.
class Arenas {
 public:
  Arenas(int rank, int nranks, int device, Home home);
  ~Arenas();
  Arenas(const Arenas&) = delete;
  Arenas& operator=(const Arenas&) = delete;

  // What peers need to map this rank's arena: threads of this process take the pointer, other
  // processes an IPC handle, or a memfd's.
  std::string handle() const;
  // Of zeros. `stream`: a private one, for what must be done before peers look.
  void allocate(u64 bytes, cudaStream_t stream);
  void map(const std::vector<std::string>& handles);
  // All ranks have mapped this one's: nobody else shall.
  void close_handle() { held_.front()->close_handle(); }
  unsigned char* const* all() const { return arena_.data(); }
  // After map(): are the arenas in memory of GPUs, and do all peers sit on this one or behind
  // NVLink? (Of the links between GPUs, it alone does atomics.)
  bool all_by_nvlink() const { return by_nvlink_; }
  // After map(): the process of a rank.
  pid_t process(int rank) const { return process_[rank]; }
  unsigned char* own() const { return held_.front()->get(); }

 private:
  void map_here(int peer, int device, unsigned char* pointer, const std::string& pair);
  void map_ipc(int peer, const char* handle, const std::string& pair);

  int rank_, device_;
  Home home_;
  u64 bytes_ = 0;
  bool by_nvlink_ = false;
  std::vector<std::shared_ptr<Memory>> held_;  // the first is this rank's own
  std::vector<unsigned char*> arena_;
  std::vector<pid_t> process_;
  std::vector<void*> opened_;
};

}  // namespace collectives::device
