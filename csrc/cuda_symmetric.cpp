// Symmetric buffers: device memory of equal size on every rank, which all ranks have mapped, if
// their GPUs reach each other.
#include "cuda_engine.hpp"

namespace collectives {

using namespace device;

std::string DeviceCommunicator::make_segment(std::uint64_t bytes) {
  Impl& m = *impl_;
  m.check(true);
  const WhileCapturing relaxed;
  const OnDevice current(m.config.device);
  auto made = std::make_unique<Segment>();
  made->bytes = bytes;
  made->memory =
      std::make_unique<Arenas>(m.config.rank, m.config.nranks, m.config.device, Home::device);
  m.free_what_ended();
  made->memory->allocate(bytes, m.stream);
  std::string handle = m.home == Home::device ? made->memory->handle() : "";
  m.made = std::move(made);
  return handle;
}

std::uintptr_t DeviceCommunicator::open_segment(std::uint64_t id,
                                                const std::vector<std::string>& handles) {
  Impl& m = *impl_;
  const WhileCapturing relaxed;
  const OnDevice current(m.config.device);
  if (m.made == nullptr) throw Error(ErrorKind::invalid, "open_segment() without make_segment()");
  Segment& made = *m.made;
  made.id = id;
  made.own = made.memory->own();
  if (m.home == Home::device) {
    made.memory->map(handles);
    made.at.assign(made.memory->all(), made.memory->all() + m.config.nranks);
  }
  const auto at = reinterpret_cast<std::uintptr_t>(made.own);
  const std::lock_guard lock(m.run_mutex);
  m.prepared.clear();
  m.segments[id] = std::move(made);
  m.made.reset();
  return at;
}

void DeviceCommunicator::release_segment(std::uint64_t id) {
  if (impl_->birth.in_child()) return;
  const WhileCapturing relaxed;
  const OnDevice current(impl_->config.device);
  Impl& m = *impl_;
  const std::lock_guard lock(m.run_mutex);
  m.made.reset();
  const auto found = m.segments.find(id);
  if (found == m.segments.end()) return;
  m.prepared.clear();
  const Segment& segment = found->second;
  if (m.recorded) cudaEventSynchronize(m.last_event);  // kernels may be at work in peers' arrays
  if (segment.buffer != 0) {
    --m.registered;
  } else {
    m.freed.push_back({id, segment.own, segment.own + segment.bytes, buffer_of(segment.own)});
    if (m.freed.size() > kFreedKnown) m.freed.pop_front();
  }
  m.segments.erase(found);
}

void DeviceCommunicator::Impl::refuse_freed(const void* address) {
  const auto* const at = static_cast<const unsigned char*>(address);
  for (auto one = freed.begin(); one != freed.end();) {
    if (at < one->begin || at >= one->end) {
      ++one;
      continue;
    }
    const u64 now = buffer_of(at);
    if (now == 0 || now == one->buffer)
      throw Error(
          ErrorKind::mismatch,
          "symmetric buffer no. " + std::to_string(one->id) + " of rank " +
              std::to_string(config.rank) +
              " was freed, and a call is on its memory; keep the array that empty() gave, or "
              "a view of it, as long as calls use it. Nothing of this call was written");
    one = freed.erase(one);  // other memory is there now
  }
}

}  // namespace collectives
