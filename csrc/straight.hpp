// Memory of a GPU that MPI sends from and receives to, and who works on data there. No CUDA here:
// built without it, making any throws Error(unsupported).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "hands.hpp"
#include "transport_mpi.hpp"

namespace collectives {

class GpuSlots final : public SlotMemory {
 public:
  // For `nranks` ranks, `bytes` in all, of which half is for slots and half for what calls keep on
  // the way. `stream` (a cudaStream_t) is what hands work on, which `keeps` keeps.
  GpuSlots(int device, int nranks, std::size_t bytes, void* stream, std::shared_ptr<void> keeps);
  ~GpuSlots() override;
  GpuSlots(const GpuSlots&) = delete;
  GpuSlots& operator=(const GpuSlots&) = delete;

  // Of a transport whose slots are here; 0 if there is no room for any.
  std::size_t slot_bytes() const;
  std::size_t scratch_bytes() const;
  char* take(std::size_t bytes) override;
  void abandon() override;

  // Sends words from here and receives them here, to and from ranks 1, 2, 4 ... away, and a
  // message that fills a slot, by way of pinned memory of a slot each. Empty, or what went wrong.
  // All ranks at the same time.
  std::string probe(MpiTransport& mpi, double timeout_s, std::byte* out, std::byte* in);
  // The memory, of which calls may read some.
  const void* begin() const;
  // `moved` is called when a call has moved on. The memory lives as long as they do.
  static std::unique_ptr<Hands> hands(const std::shared_ptr<GpuSlots>& slots,
                                      std::function<void()> moved);
  // Vectors that hands combine at once, at most.
  static int operands();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace collectives
