#include "transport_shm.hpp"

#include <cstring>

namespace collectives {

// The sender writes the payload and the header's fields, then `sequence` with release: a receiver
// that acquires the expected sequence sees them all. The receiver stores `released` with release
// after its last read of the slot; the sender acquires it before it writes the slot again.
class ShmTransport::Send final : public SendPort {
 public:
  Send(Region& region, int me, int peer, int channel, bool crowded)
      : region_(region),
        doorbell_(region.rank(peer).doorbell),
        control_(region.fifo_control(me, peer, channel)),
        me_(me),
        peer_(peer),
        channel_(channel),
        crowded_(crowded),
        depth_(region.shape().fifo_depth) {}

  char* acquire(std::size_t bytes) override {
    if (sent_ - released_ >= depth_) {
      released_ = control_.released.load(std::memory_order_acquire);
      if (sent_ - released_ >= depth_) return nullptr;
    }
    FifoSlotHeader& slot = region_.fifo_header(me_, peer_, channel_, sent_);
    if (bytes <= sizeof slot.small) return reinterpret_cast<char*>(slot.small);
    return reinterpret_cast<char*>(region_.fifo_data(me_, peer_, channel_, sent_));
  }

  void commit(const Header& header) override {
    FifoSlotHeader& slot = region_.fifo_header(me_, peer_, channel_, sent_);
    slot.tag = header.tag;
    slot.bytes = header.bytes;
    slot.user = header.user;
    slot.sequence.store(++sent_, std::memory_order_release);
    if (crowded_) std::atomic_thread_fence(std::memory_order_seq_cst);  // see Doorbell
    doorbell_.ring(me_);
  }

  bool flushed() override {
    return true;
  }  // a committed message lives in the slot: the caller's buffers are free

 private:
  Region& region_;
  Doorbell& doorbell_;
  FifoControl& control_;
  int me_, peer_, channel_;
  bool crowded_;
  std::uint64_t depth_;
  std::uint64_t sent_ = 0, released_ = 0;
};

class ShmTransport::Recv final : public RecvPort {
 public:
  Recv(Region& region, int me, int peer, int channel, bool crowded)
      : region_(region),
        doorbell_(region.rank(peer).doorbell),
        control_(region.fifo_control(peer, me, channel)),
        me_(me),
        peer_(peer),
        channel_(channel),
        crowded_(crowded) {}

  void expect(std::uint64_t) override {}

  const char* peek(Header* header) override {
    FifoSlotHeader& slot = region_.fifo_header(peer_, me_, channel_, taken_);
    if (slot.sequence.load(std::memory_order_acquire) != taken_ + 1) return nullptr;
    header->bytes = slot.bytes;
    header->user = slot.user;
    header->tag = slot.tag;
    if (slot.bytes <= sizeof slot.small) return reinterpret_cast<const char*>(slot.small);
    return reinterpret_cast<const char*>(region_.fifo_data(peer_, me_, channel_, taken_));
  }

  void release() override {
    control_.released.store(++taken_, std::memory_order_release);
    if (crowded_) std::atomic_thread_fence(std::memory_order_seq_cst);  // see Doorbell
    doorbell_.ring(me_);
  }

 private:
  Region& region_;
  Doorbell& doorbell_;
  FifoControl& control_;
  int me_, peer_, channel_;
  bool crowded_;
  std::uint64_t taken_ = 0;
};

ShmTransport::ShmTransport(std::shared_ptr<Region> region, int local_rank,
                           std::vector<int> local_of, bool threads, bool crowded)
    : region_(std::move(region)),
      local_rank_(local_rank),
      local_of_(std::move(local_of)),
      threads_(threads),
      crowded_(crowded) {}

ShmTransport::~ShmTransport() = default;

SendPort& ShmTransport::send_port(int peer, int channel) {
  const std::lock_guard lock(ports_mutex_);
  auto& port = sends_[{peer, channel}];
  if (!port)
    port = std::make_unique<Send>(*region_, local_rank_, local_of_[peer], channel, crowded_);
  return *port;
}

RecvPort& ShmTransport::recv_port(int peer, int channel) {
  const std::lock_guard lock(ports_mutex_);
  auto& port = recvs_[{peer, channel}];
  if (!port)
    port = std::make_unique<Recv>(*region_, local_rank_, local_of_[peer], channel, crowded_);
  return *port;
}

}  // namespace collectives
