// send and recv with tags over the FIFOs of a transport.
//
// A message is cut into slices of one slot; slices of one message follow each other. A message
// waits in the FIFO until a matching receive is posted (so memory stays bounded and a sender of
// more than the FIFO holds waits for its receiver); it is set aside only when a receive with
// another tag is posted behind it. Receives match in order of posting; one from any peer takes the
// first message with its tag that no receive from that peer asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine_host.hpp"
#include "recorder.hpp"
#include "types.hpp"

namespace collectives {

struct TransferState {  // one posted operation
  int peer = 0;         // kAnyPeer until a message has matched
  std::uint32_t tag = 0;
  Dtype dtype = Dtype::uint8;
  bool sends = false;
  const std::byte* source = nullptr;  // of a send
  std::byte* target = nullptr;        // of a receive
  std::size_t bytes = 0;
  std::size_t moved = 0;
  bool discard = false;  // sizes differ: the message is read and dropped
  bool done = false;
  std::exception_ptr error;
  CallRecord* record = nullptr;
  std::uint64_t recorded = 0;  // its number there
  int closed_seen = 0;         // looks at which its peer had closed
};
using PostedTransfer = std::shared_ptr<TransferState>;

class PointToPoint {
 public:
  static constexpr int kAnyPeer = -1;

  PointToPoint(const Links& links, int me, int channel)
      : links_(links), me_(me), channel_(channel) {}

  // All of these may be called by any thread: the ports of the channel are used under one lock.
  PostedTransfer post_send(int peer, std::uint32_t tag, Dtype dtype, const void* data,
                           std::size_t bytes);
  PostedTransfer post_recv(int peer, std::uint32_t tag, Dtype dtype, void* data, std::size_t bytes);
  // Moves what can be moved; true if anything did.
  bool progress();
  // Nothing moves any more once this has returned: the arrays of what is posted may go.
  void stop();
  bool done(const PostedTransfer& t);
  // Its peer has closed: at the third look the transfer ends with `error`, unless it has begun.
  void peer_has_closed(const PostedTransfer& t, std::exception_ptr error);
  // True if what was sent to a peer has left: see SendPort::flushed.
  bool flushed(int peer);
  // Whom a transfer is with; kAnyPeer while that is open.
  int peer(const PostedTransfer& t);
  bool idle();

 private:
  struct Stashed {
    std::uint32_t tag;
    Dtype dtype;
    std::vector<std::byte> data;
    std::size_t total;
    std::size_t moved;
  };
  struct Peer {
    std::deque<PostedTransfer> sends;
    std::list<PostedTransfer> recvs;
    std::list<Stashed> stash;
    PostedTransfer receiving;     // its message is arriving
    Stashed* stashing = nullptr;  // or this one
    bool listening = false;       // a receive of one message is announced to the transport
    SendPort* to = nullptr;       // once used
    RecvPort* from = nullptr;
  };

  SendPort& port_to(int peer, Peer& p);
  RecvPort& port_from(int peer, Peer& p);
  bool progress_sends(int peer, Peer& p);
  bool progress_recvs(int peer, Peer& p);
  bool match_stash(int peer, Peer& p);
  std::list<PostedTransfer>* find_recv(Peer& p, std::uint32_t tag,
                                       std::list<PostedTransfer>::iterator* at);
  void check_match(int peer, TransferState& t, Dtype dtype, std::size_t total);

  const Links& links_;
  int me_, channel_;
  std::mutex mutex_;
  bool stopped_ = false;
  std::map<int, Peer> peers_;
  std::list<PostedTransfer> any_;  // receives from any peer
};

}  // namespace collectives
