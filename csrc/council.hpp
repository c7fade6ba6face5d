// What ranks that share a region settle among themselves when nothing else may work any more: who
// goes on after a failure, and the bytes that a new communicator is set up from.
//
// Everything here is wait-free and survives the death of any rank at any instruction: a decision is
// one compare-and-swap on a word of the region, and what it decides on was written before, into the
// seat of the rank that proposed it. (Consensus from compare-and-swap: Herlihy, "Wait-free
// synchronization", 1991, section 3.) The loops that wait are in collectives/bootstrap/mailboxes.py
// and collectives/shrinking.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "liveness.hpp"
#include "region.hpp"

namespace collectives {

class Council {
 public:
  Council(std::shared_ptr<Region> region, std::shared_ptr<Liveness> liveness, int me)
      : region_(std::move(region)), liveness_(std::move(liveness)), me_(me) {}

  int me() const { return me_; }
  int size() const { return region_->shape().nranks; }
  // "" while rank q is there, else "died" or "closed".
  std::string gone(int q);
  int process(int q) const { return liveness_->process(q); }
  // What the rank said that gave up first, "" if none has.
  std::string told() const;

  // ---- who goes on: attempts are numbered from 1 ------------------------------------------------
  void join(std::uint64_t attempt);
  std::uint64_t joined(int q) const;
  // Proposes `members`; returns those that were decided, by this rank or by a faster one.
  std::vector<int> propose(std::uint64_t attempt, const std::vector<int>& members);
  // What was decided; nothing before. Empty if the others are so many attempts ahead that it is
  // forgotten.
  std::optional<std::vector<int>> decided(std::uint64_t attempt) const;
  // How an attempt ended, as the first who settled it said; 0: not settled; later attempts count as
  // kOutdated.
  static constexpr std::uint32_t kOutdated = 0xff;
  std::uint32_t settle(std::uint64_t attempt, std::uint32_t outcome);
  std::uint32_t settled(std::uint64_t attempt) const;

  // ---- letters ----------------------------------------------------------------------------------
  // Every rank has two boxes for exchanges of the whole region, which it fills in turn: it posts a
  // letter when all have posted the one before, hence read the last but one. Parts of the region
  // have two boxes of their own, since a rank outside may not yet have read what came before.
  static constexpr std::size_t kLetter = kMailBytes;
  struct Subject {
    bool part = false;  // not of the whole region
    std::uint64_t tag = 0, round = 0;
  };
  void post(const Subject& subject, const std::string& data);
  std::optional<std::string> fetch(int q, const Subject& subject) const;

 private:
  std::shared_ptr<Region> region_;
  std::shared_ptr<Liveness> liveness_;
  int me_;
};

}  // namespace collectives
