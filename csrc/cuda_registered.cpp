// Registered arrays: device memory that somebody else has allocated, mapped into all ranks as
// symmetric buffers are. They may lie at other places of other allocations on each rank.
#include <unistd.h>

#include "cuda_engine.hpp"
#include "words.hpp"

namespace collectives {

using namespace device;

// "PROCESS ADDRESS BASE BUFFER HANDLE"
std::string DeviceCommunicator::export_array(std::uintptr_t address, std::uint64_t bytes,
                                             std::string* why) {
  Impl& m = *impl_;
  m.check(true);
  const WhileCapturing relaxed;
  const OnDevice current(m.config.device);
  const Allocation found = allocation_of(reinterpret_cast<const void*>(address));
  std::string handle;
  *why = found.why;
  if (m.home != Home::device) {
    *why = "the ranks reach each other through memory of the host";
  } else if (bytes == 0) {
    *why = "it is empty";
  } else if (why->empty() && address + bytes > found.base + found.bytes) {
    *why = "it goes beyond its allocation";
  } else if (why->empty() && (handle = export_allocation(found.base)).empty()) {
    *why = "CUDA IPC does not export it";
  }
  return std::to_string(getpid()) + ' ' + std::to_string(address) + ' ' +
         std::to_string(found.base) + ' ' + std::to_string(found.buffer) + ' ' + handle;
}

void DeviceCommunicator::open_array(std::uint64_t id, std::uint64_t bytes,
                                    const std::vector<std::string>& handles) {
  Impl& m = *impl_;
  const WhileCapturing relaxed;
  const OnDevice current(m.config.device);
  Segment made;
  made.id = id;
  made.bytes = bytes;
  for (int q = 0; q < m.config.nranks; ++q) {
    Words words(handles[q]);
    const auto process = words.number<pid_t>();
    const u64 address = words.number<u64>(), base = words.number<u64>();
    const u64 buffer = words.number<u64>();
    const std::string handle = words.rest();
    auto* at = reinterpret_cast<unsigned char*>(address);
    if (q == m.config.rank) {
      made.own = at;
      made.buffer = buffer;
    } else if (process != getpid()) {
      // Arrays of one allocation open it once; a new one at an old address has another number.
      std::weak_ptr<Opened>& known = m.opened[{q, base, buffer}];
      std::shared_ptr<Opened> opened = known.lock();
      if (opened == nullptr) known = opened = std::make_shared<Opened>(handle);
      at = opened->get() + (address - base);
      made.opened.push_back(std::move(opened));
    }
    made.at.push_back(at);
  }
  const std::lock_guard lock(m.run_mutex);
  m.prepared.clear();
  m.segments[id] = std::move(made);
  ++m.registered;
}

// What is now where an array's allocation was freed is as any other array from here on: who passes
// that differs from those whose registered array lives.
void DeviceCommunicator::Impl::forget_freed(const Call& call) {
  for (auto& [id, segment] : segments) {
    if (segment.buffer == 0 || segment.at.empty()) continue;
    const auto inside = [&one = segment](const void* address) {
      const auto* const at = static_cast<const unsigned char*>(address);
      return at >= one.own && at < one.own + one.bytes;
    };
    if (!inside(call.input) && !inside(call.output)) continue;
    const u64 buffer = buffer_of(segment.own);
    if (buffer == segment.buffer) continue;
    if (buffer == 0)
      throw Error(ErrorKind::mismatch,
                  "registered array no. " + std::to_string(id) + " of rank " +
                      std::to_string(config.rank) +
                      " was freed, and a call is on its memory; close a registration on all ranks "
                      "before its array is freed. Nothing of this call was written");
    segment.at.clear();
    prepared.clear();
  }
}

}  // namespace collectives
