// FIFOs in a shared region: the transport between processes of a node ("shm") and between threads
// ("threads").
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "region.hpp"
#include "transport.hpp"

namespace collectives {

class ShmTransport final : public Transport {
 public:
  // `local_of[peer]`: the peer's index in the region, -1 for peers that this transport does not
  // reach.
  ShmTransport(std::shared_ptr<Region> region, int local_rank, std::vector<int> local_of,
               bool threads, bool crowded);
  ~ShmTransport() override;

  std::string_view name() const override { return threads_ ? "threads" : "shm"; }
  std::size_t slot_bytes() const override { return region_->shape().fifo_slot; }
  int depth() const override { return region_->shape().fifo_depth; }
  SendPort& send_port(int peer, int channel) override;
  RecvPort& recv_port(int peer, int channel) override;

 private:
  class Send;
  class Recv;

  std::shared_ptr<Region> region_;
  int local_rank_;
  std::vector<int> local_of_;
  bool threads_;
  bool crowded_;
  std::mutex ports_mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<Send>> sends_;
  std::map<std::pair<int, int>, std::unique_ptr<Recv>> recvs_;
};

}  // namespace collectives
