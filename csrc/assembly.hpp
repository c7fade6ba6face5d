// How ranks that do not all share memory enter a call together, and what small calls are made of.
//
// The ranks of a group (those that share memory) bring what they have to its first rank, the first
// ranks exchange it, and hand the whole to their groups. Everybody brings the hash of the call's
// signature, so that all know when they do not mean the same call, and nothing is written before;
// and, where that is little, the data of the call themselves. A small call is thus one crossing of
// the network for two nodes, which ends with every rank holding what all brought, to be combined in
// rank order: what direct_one_shot and direct_two_shot specify, bit for bit. A somewhat larger
// all_reduce is combined within groups first, as hierarchical(direct_two_shot, direct_one_shot)
// specifies.
//
// Two ranks that share no memory are a case of its own: each sends what the other needs and nothing
// else, from the caller's array, and what needs no sum comes to where it goes.
//
// Cost: ceil(log2 G) messages one after the other between G groups, by dissemination, of which the
//   last carry half of all that is brought; two hops within a group.
// Limits: all that is brought has to fit one slot, though it may travel in several messages.
// Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", Int. J.
//   Parallel Program. 17 (1988), doi:10.1007/BF01379320, for dissemination; its use for all_gather
//   is J. Bruck et al., doi:10.1109/71.642949.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine_host.hpp"
#include "layout.hpp"
#include "region.hpp"
#include "wait.hpp"

namespace collectives {

class Assembly {
 public:
  // `group[r]`: ranks with equal numbers reach each other faster than others; `channel`: of the
  // FIFOs to use, for this alone.
  Assembly(const Links& links, Waiter& waiter, int rank, const std::vector<int>& group,
           int channel);

  // All ranks meet in the same call; returns the largest `amount` of any. Throws
  // Error(mismatch) on every rank, with both sides in words, if hashes differ.
  std::uint64_t meet(const Signature& signature, std::uint64_t hash, std::uint64_t amount) {
    return meet(signature, hash, amount, nullptr, {});
  }

  // True if the call's data are at most `limit` bytes of all ranks together, so that run() may do
  // it. (Of two ranks, if no more than half of it goes either way.)
  bool fits(const Call& call, std::size_t limit) const;
  // Meets and does the call, which fits. The result is that of the direct algorithms.
  void run(const Call& call, const Signature& signature, std::uint64_t hash);

  // The same for an all_reduce, combined within groups first, of which each brings one vector.
  // Groups must be the nodes that the algorithm knows.
  bool fits_by_group(const Call& call, std::size_t limit) const;
  void all_reduce_by_group(const Call& call, const Signature& signature, std::uint64_t hash);

 private:
  // What a message says first. Sides: the smallest and the largest hash of all ranks so far, and
  // who has it.
  struct Head {
    std::uint64_t amount;
    std::uint64_t hash[2];
    std::int32_t rank[2];
    bool agreed() const { return hash[0] == hash[1]; }
    void merge(const Head& other);
  };

  std::uint64_t meet(const Signature& signature, std::uint64_t hash, std::uint64_t amount,
                     const std::byte* mine, const std::vector<std::size_t>& lengths);
  [[noreturn]] void disagree(const Head& head, const Signature& signature);
  template <class Bytes>
  void lay_out(const Bytes& bytes);
  template <class Bytes, class To>
  void collect(Head* head, const std::byte* mine, const Bytes& bytes, const To& to);
  void disseminate(Head* head);
  void spread(Head* head, std::byte* data, std::size_t bytes);
  Head exchange(Head head, const std::byte* mine, const std::vector<std::size_t>& lengths);
  void send(int peer, const Head& head, const std::byte* data, std::size_t bytes);
  void receive(int peer, Head* head);
  [[noreturn]] void mistaken(int peer, const Header& header, std::size_t expected) const;
  Where where(const char* phase, int peer) const;
  std::size_t contribution(const Call& call, int q) const;
  // Bytes of rank q's input that the other of two ranks needs.
  struct Share {
    std::size_t offset, bytes;
  };
  Share share_of_two(const Call& call, int q) const;
  void run_of_two(const Call& call, const Signature& signature, std::uint64_t hash);
  const std::byte* brought(int q) const { return all_.data() + at_[q]; }

  const Links& links_;
  Waiter& waiter_;
  int rank_, n_, channel_;
  bool two_ = false;                      // there are two ranks, and each is a group
  std::vector<std::vector<int>> groups_;  // their ranks; the first one speaks for them
  int mine_ = 0;                          // this rank's group
  std::uint64_t call_ = 0;
  // What ranks brought, in the order of groups, then of ranks: `at_[q]` is where rank q's begins,
  // `group_at_[g]` where group g's does.
  std::vector<std::byte> all_, packed_, staged_;
  struct Span {
    std::byte* data;
    std::size_t bytes;
  };
  std::vector<Span> into_;  // where what is received next goes
  std::vector<std::size_t> at_, group_at_, lengths_;
  std::vector<const void*> operands_;
};

}  // namespace collectives
