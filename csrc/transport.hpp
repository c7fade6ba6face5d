// What an engine needs of a transport: FIFOs of slots between pairs of ranks, one per channel and
// direction.
//
// A port is used by one thread at a time; a transport gives ports to any thread. Nothing here
// blocks: an engine polls, and waits with its own policy. Messages arrive in the order in which
// they were committed, whole, at most `slot_bytes` long.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace collectives {

// A message's header: `tag` tells calls apart (the engine puts the hash of the call's signature
// there).
struct Header {
  std::uint32_t bytes = 0;
  std::uint32_t user = 0;  // free for the caller: point-to-point tags, flags
  std::uint64_t tag = 0;
};

class SendPort {
 public:
  virtual ~SendPort() = default;
  // Memory for the next message, of `bytes`; nullptr while the FIFO is full.
  virtual char* acquire(std::size_t bytes) = 0;
  // Hands the acquired message over.
  virtual void commit(const Header& header) = 0;

  // A *bare* message has no header; its sender and receiver both know that it comes. Messages of at
  // least this many bytes may be bare. A transport that must copy anyway has no use for it.
  virtual std::size_t bare_min() const { return ~std::size_t{0}; }
  // True if all messages are bare: where slots are not memory of the host, which writes headers.
  virtual bool only_bare() const { return false; }
  // Hands over the acquired slot as a bare message.
  virtual void commit_bare(std::size_t bytes) { (void)bytes; }
  // Sends a bare message from where it lies; false while the FIFO is full. The data must stay until
  // completed() has reached the value that sent() has after this.
  virtual bool send_from(const char* data, std::size_t bytes) {
    (void)data, (void)bytes;
    return false;
  }
  virtual std::uint64_t sent() const { return 0; }
  virtual std::uint64_t completed() { return 0; }

  // True when the peer or the network has taken all committed messages, so that buffers may be
  // reused.
  virtual bool flushed() = 0;
};

class RecvPort {
 public:
  virtual ~RecvPort() = default;
  // Tells how many messages the current call will bring, so that receives can be posted ahead.
  virtual void expect(std::uint64_t messages) = 0;
  // The oldest message, nullptr while there is none. Valid until release().
  virtual const char* peek(Header* header) = 0;
  virtual void release() = 0;
  // After a call that failed: a message that was to come into the caller's memory no longer does.
  // False if it still may, at the deadline.
  virtual bool withdraw(std::chrono::steady_clock::time_point deadline) noexcept {
    (void)deadline;
    return true;
  }

  virtual std::size_t bare_min() const { return ~std::size_t{0}; }
  virtual bool only_bare() const { return false; }
  // Before the first peek at a bare message: receives it into the caller's memory, where
  // peek_bare() then finds it.
  virtual bool posted() const { return true; }
  virtual void post_into(char* into, std::size_t bytes) { (void)into, (void)bytes; }
  // The oldest message, which is bare.
  virtual const char* peek_bare(std::size_t* bytes) {
    (void)bytes;
    return nullptr;
  }
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;  // "threads", "shm", "mpi"
  virtual std::size_t slot_bytes() const = 0;
  virtual int depth() const = 0;  // messages a FIFO holds
  // Ports are made on first use and live as long as the transport.
  virtual SendPort& send_port(int peer, int channel) = 0;
  virtual RecvPort& recv_port(int peer, int channel) = 0;
  // Moves what needs a push (MPI progress); cheap where nothing does.
  virtual void progress() {}
};

}  // namespace collectives
