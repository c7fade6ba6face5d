// Device memory that somebody else has allocated: what the driver knows of it, and the way to that
// of other processes.
#pragma once

#include <string>

#include "cuda_call.hpp"

namespace collectives::device {

// The allocation that an address lies in.
struct Allocation {
  u64 base = 0, bytes = 0;
  u64 buffer = 0;   // its number: no later allocation of this process gets it
  std::string why;  // why other processes cannot map it; empty if they can
};
Allocation allocation_of(const void* address);
// Its number alone, which costs a look-up in the driver; 0: nothing is allocated there.
u64 buffer_of(const void* address);

// The CUDA IPC handle of the allocation that begins at `base`, as text; empty if it has none.
std::string export_allocation(u64 base);

// An allocation of another process, mapped into this one for the current device.
class Opened {
 public:
  explicit Opened(const std::string& handle);
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  unsigned char* get() const { return pointer_; }

 private:
  int device_ = 0;
  unsigned char* pointer_ = nullptr;
};

}  // namespace collectives::device
