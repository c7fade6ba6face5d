// The direct algorithms by hand, for ranks that share a region: one_shot and two_shot of every
// collective.
//
// Same results, bit for bit, as the schedules direct_one_shot and direct_two_shot through the
// general engine (tests hold them equal): contributions are combined in rank order. What is special
// is how bytes move:
// clang-format off
//   lines       up to 1,152 bytes: data and flag share cache lines, so one hop does everything; no
//               acknowledgement is needed, since two sets of lines alternate and a rank's call k
//               needs every peer's call k-1
//   staged      each rank copies its part once into its own staging slots, in chunks; peers read it
//               there
//   two-phase   all_reduce of large arrays: each rank reduces its share of a chunk, all copy the
//               shares
//   symmetric   arrays made by Communicator.empty are mapped in all ranks and need no staging:
//               reductions read the peers' arrays and the owner of a share writes it to all
//   addresses   the same with arrays of other threads; they are read until their owner has seen
//               that all are through, also where it gives the call up
// clang-format on
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "gate.hpp"
#include "layout.hpp"
#include "reduce.hpp"

namespace collectives {

// Sizes at which ways change; set from Python (collectives/tuning), where measurements are kept.
struct HostTuning {
  std::size_t lines_max = kLinesBytes;
  std::size_t chunk_bytes = 128 << 10;  // staging chunk
  std::size_t nontemporal_min =
      8 << 20;  // results larger than this bypass the caches, unless in place
  std::size_t symmetric_min = 16 << 10;  // below, staging beats the extra barrier
  // Movements of at least this read the peer's memory, where they may: where all read the same, and
  // where each has its own part.
  std::size_t pull_shared_min = 2 << 20;
  std::size_t pull_split_min = 256 << 10;
  bool crowded = false;  // more ranks than CPUs: waits sleep early
  int spins = 2000;      // polls before a wait yields its core
  // Calls whose data, of all ranks together, are at most this travel with the agreement that ranks
  // enter a call, where not all share memory (see Assembly). Equal on all ranks.
  std::size_t assembled_max = 16 << 10;
  // The same where ranks combine by node first: the vectors of all nodes together.
  std::size_t assembled_by_node_max = 64 << 10;
  int lanes = 2;  // of the general engine
  std::size_t segment_bytes =
      64 << 10;  // largest piece of a chunk that the general engine moves at once
};

// Memory mapped at every local rank: made by Communicator::empty.
struct SymmetricSegment {
  std::uint64_t id = 0;
  std::size_t bytes = 0;
  std::vector<std::byte*> base;  // by local rank, in this process
};

class DirectHost {
 public:
  static constexpr int kMaxLocal = 256;  // ranks of one region

  struct Reach {
    bool addresses = false;  // the ranks are threads: an address means the same to all
    bool pull = false;       // every rank may read the memory of every other (process_vm_readv)
  };
  DirectHost(Gate& gate, Waiter& waiter, const HostTuning& tuning, Reach reach);

  // Runs the call; `two_shot` chooses all_reduce's shape. Calls gate.begin() itself.
  void run(const Call& call, bool two_shot, const Signature& signature, std::uint64_t hash,
           const std::vector<SymmetricSegment>& segments);
  // For a rank that leaves a call, after the abort word is set: until no rank works on its arrays,
  // or it has ended, or `patience` is over (never, among threads: they read what the caller frees).
  void wait_for_readers(const std::function<bool(int)>& ended, std::chrono::milliseconds patience);

 private:
  static constexpr std::size_t kLineSize = 64;
  static constexpr std::size_t round_up(std::size_t x, std::size_t to) {
    return (x + to - 1) / to * to;
  }
  static constexpr std::uint64_t kAddresses = 1,
                                 kPull = 2;  // tokens of symmetric memory are larger

  enum class Shape {
    shared,     // a staging slot holds one part that all readers read
    split,      // a staging slot holds a share for each reader
    two_phase,  // all_reduce: shares are reduced by their owners and collected by all
  };
  struct Tokens {
    std::uint64_t token = 0;  // which symmetric memory holds the array; 0: none
    std::uint64_t amount = 0;
  };
  struct Part {
    std::size_t offset = 0, bytes = 0;
  };

  std::size_t largest_message() const;
  Tokens tokens(const std::vector<SymmetricSegment>& segments) const;
  Tokens symmetric_tokens(const std::vector<SymmetricSegment>& segments) const;
  std::uint64_t token_of(const void* p, std::size_t bytes,
                         const std::vector<SymmetricSegment>& segments) const;

  void lines(std::uint64_t hash);
  const Line& wait_line(int q, std::size_t index);
  const std::byte* read_lines(int q, std::size_t offset, std::size_t bytes);

  std::byte* stage(int q, std::uint64_t id) const;
  Line* lines_of(int q, std::uint64_t sequence) const;
  bool publishes(int q) const;
  Part share(std::uint64_t k, int o) const;
  Part outgoing(std::uint64_t k, int d) const;
  void fill(std::uint64_t k);
  void drain(std::uint64_t k);
  void pipeline(std::uint64_t chunks);
  void two_phase(std::uint64_t chunks);
  void in_place_of_peers(const std::vector<SymmetricSegment>& segments, const Tokens& tokens);
  void work_in_place(const std::vector<SymmetricSegment>& segments, const Tokens& tokens);
  bool given_up();
  void tell_pairs();
  void check_pairs();
  void raise_if_told(int q);
  void fetch(int q, std::byte* to, const std::byte* from, std::size_t bytes, bool pull);

  void set(Counter& counter, std::uint64_t value);
  void wait_counter(Counter RankArea::*counter, int q, std::uint64_t value, const char* what);
  void wait_slot(std::uint64_t id);
  void combine(std::byte* const* outs, int nouts, const std::byte* const* operands, int nops,
               std::uint64_t count, bool nontemporal);
  RankArea& area(int q) const { return gate_.region().rank(q); }

  Gate& gate_;
  Waiter& waiter_;
  const HostTuning& tuning_;
  bool shared_addresses_, can_pull_;
  int me_, n_;
  std::uint64_t chunks_ = 0;        // staging chunks of all calls so far, the same on all ranks
  std::uint64_t results_ = 0;       // result chunks
  std::uint64_t drained_seen_ = 0;  // all peers have drained at least this many
  std::uint64_t symmetric_calls_ = 0;
  const Call* call_ = nullptr;
  ReduceFn reduce_ = nullptr;
  std::size_t element_ = 1;
  Shape shape_ = Shape::shared;
  std::size_t chunk_ = 0, share_ = 0;  // bytes that all readers, or one, get from a slot
  bool nontemporal_ = false;
  std::vector<std::byte> line_buffer_;
};

}  // namespace collectives
