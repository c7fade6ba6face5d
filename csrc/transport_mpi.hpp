// FIFOs over MPI messages, for peers on other hosts (and anywhere else MPI reaches).
//
// A message is one MPI message, exact length: Header (16 bytes) and payload from the slot in which
// the engine built it, or, bare, the payload alone, from the caller's memory and into the caller's
// memory where both lie in one piece. A channel is a tag. A sender has at most `depth` messages in
// flight a port; a receiver posts one receive at a time, when its message is asked for, so nothing
// stays posted between calls. No call here blocks: MPI_Isend, MPI_Irecv, MPI_Test and MPI_Iprobe
// only.
//
// With memory of a GPU for slots, and an MPI that takes pointers to it, arrays may be there: all
// messages are bare then.
//
// Memory: depth + 1 slots a pair and channel, touched as used. Cost a message: one MPI message.
// Limits: all ranks use the same slot_bytes (Open MPI 5 writes a longer message past the end of the
// receive instead of cutting it off) and the same depth; post_into() takes only lengths that the
// sender keeps to; channels 0 .. max_channel.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mpi.hpp"
#include "transport.hpp"

namespace collectives {

// Where a transport's slots are, if not in memory of its own. Outlives the slots.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;
  // Never given back. Throws Error(system) if there is none left.
  virtual char* take(std::size_t bytes) = 0;
  // MPI may still use what was taken: it is never freed.
  virtual void abandon() = 0;
};

struct MpiTransportOptions {
  std::size_t slot_bytes = 256 << 10;
  int depth = 4;
  std::vector<int> mpi_ranks;         // peer index -> rank in the communicator; empty: the same
  double timeout_s = 300;             // for the ranks to meet in the constructor
  std::shared_ptr<SlotMemory> slots;  // of a GPU, if arrays are there
};

class MpiTransport final : public Transport {
 public:
  static constexpr int max_channel =
      Mpi::max_tag - 1;  // tag 0 is the poison, tag 1 + channel carries messages

  // Collective over `comm`, which is duplicated and not kept.
  MpiTransport(std::shared_ptr<Mpi> mpi, MpiComm comm, MpiTransportOptions options = {});
  // Cancels what is posted and frees the duplicate, unless MPI is finalized already. Waits at most
  // a second for sends that a peer has not taken; their memory is left to MPI after that.
  ~MpiTransport() override;

  std::string_view name() const override { return "mpi"; }
  std::size_t slot_bytes() const override { return options_.slot_bytes; }
  int depth() const override { return options_.depth; }
  SendPort& send_port(int peer, int channel) override;
  RecvPort& recv_port(int peer, int channel) override;
  // Moves MPI along and looks for poison (one MPI_Iprobe).
  void progress() override;

  // False if only the main thread may use this transport (MPI_THREAD_SINGLE or FUNNELED).
  bool any_thread() { return mpi_->any_thread(); }
  MpiThreads threads() { return mpi_->threads(); }
  int size() const { return static_cast<int>(ranks_.size()); }
  int self() const { return self_; }  // own peer index
  Mpi& mpi() { return *mpi_; }

  // Tells every peer, once, that this rank gives up and why (cut to 2 KiB). Best effort: does not
  // wait, does not throw.
  void poison(std::string_view text) noexcept;
  // True once a peer has sent poison; *text is what the first one said, *peer its index. Any thread
  // that may call MPI.
  bool poisoned(std::string* text = nullptr, int* peer = nullptr);

  // Bytes of a slot, if so many are to lie in memory of a GPU of `bytes`; 0 if they cannot.
  static std::size_t slot_that_fits(std::size_t bytes, int slots);
  // Bytes of slots that ports hold now.
  std::size_t scratch_bytes() const;

  class Send;
  class Recv;

 private:
  // The peer's rank in the communicator; throws where peer, channel or the state of MPI is wrong.
  int rank_for_port(int peer, int channel) const;
  void look_for_poison();

  std::shared_ptr<Mpi> mpi_;
  MpiTransportOptions options_;
  std::vector<int> ranks_;
  int self_ = -1;
  MpiComm comm_ = 0;

  mutable std::mutex ports_mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<Send>> sends_;
  std::map<std::pair<int, int>, std::unique_ptr<Recv>> recvs_;

  struct Outgoing {  // the poison on its way; the text must outlive the requests
    std::string text;
    std::vector<MpiRequest> requests;
  };
  std::mutex poison_mutex_;
  std::atomic<bool> poisoned_{false};  // set last: publishes the two below
  std::string poison_text_;
  int poison_peer_ = -1;
  std::unique_ptr<Outgoing> poison_out_;
};

}  // namespace collectives
