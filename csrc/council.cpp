#include "council.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace collectives {
namespace {

// A word of the table: the attempt it is about, and what was said of it.
constexpr int kShift = 16;
std::uint64_t word_of(std::uint64_t attempt, std::uint64_t said) {
  return attempt << kShift | said;
}
std::uint64_t attempt_of(std::uint64_t word) { return word >> kShift; }
std::uint64_t said_in(std::uint64_t word) { return word & ((1u << kShift) - 1); }

// Writes `said` of `attempt` unless somebody has said something of it, or of a later one; returns
// what stands there.
std::uint64_t say_first(std::atomic<std::uint64_t>& cell, std::uint64_t attempt,
                        std::uint64_t said) {
  std::uint64_t seen = cell.load(std::memory_order_acquire);
  while (attempt_of(seen) < attempt) {
    // Publishes the proposal that it points to.
    if (cell.compare_exchange_weak(seen, word_of(attempt, said), std::memory_order_acq_rel,
                                   std::memory_order_acquire))
      return word_of(attempt, said);
  }
  return seen;
}

}  // namespace

std::string Council::gone(int q) {
  if (q == me_) return "";
  if (liveness_->died(q)) return "died";
  return liveness_->left(q) ? "closed" : "";
}

std::string Council::told() const {
  return region_->gave_up() ? std::string{region_->abort_reason()} : "";
}

void Council::join(std::uint64_t attempt) {
  region_->seat(me_).attempt.store(attempt, std::memory_order_release);
}

std::uint64_t Council::joined(int q) const {
  return region_->seat(q).attempt.load(std::memory_order_acquire);
}

std::vector<int> Council::propose(std::uint64_t attempt, const std::vector<int>& members) {
  std::uint64_t(&mine)[kMemberWords] = region_->seat(me_).proposal[attempt % kAttempts];
  std::fill(std::begin(mine), std::end(mine), 0);
  for (const int q : members) {
    if (q < 0 || q >= size())
      throw Error(ErrorKind::invalid, "member " + std::to_string(q) + " of a region of " +
                                          std::to_string(size()) + " ranks");
    mine[q / 64] |= std::uint64_t{1} << q % 64;
  }
  say_first(region_->council().decision[attempt % kAttempts], attempt,
            static_cast<std::uint64_t>(1 + me_));
  return decided(attempt).value_or(std::vector<int>{});
}

std::optional<std::vector<int>> Council::decided(std::uint64_t attempt) const {
  const std::uint64_t word =
      region_->council().decision[attempt % kAttempts].load(std::memory_order_acquire);
  if (attempt_of(word) < attempt) return std::nullopt;
  std::vector<int> members;
  if (attempt_of(word) > attempt) return members;
  const int proposer = static_cast<int>(said_in(word)) - 1;
  const auto& proposal = region_->seat(proposer).proposal[attempt % kAttempts];
  for (int q = 0; q < size(); ++q)
    if (proposal[q / 64] >> q % 64 & 1) members.push_back(q);
  return members;
}

std::uint32_t Council::settle(std::uint64_t attempt, std::uint32_t outcome) {
  const std::uint64_t word =
      say_first(region_->council().outcome[attempt % kAttempts], attempt, outcome);
  return attempt_of(word) == attempt ? static_cast<std::uint32_t>(said_in(word)) : kOutdated;
}

std::uint32_t Council::settled(std::uint64_t attempt) const {
  const std::uint64_t word =
      region_->council().outcome[attempt % kAttempts].load(std::memory_order_acquire);
  if (attempt_of(word) > attempt) return kOutdated;
  return attempt_of(word) == attempt ? static_cast<std::uint32_t>(said_in(word)) : 0;
}

void Council::post(const Subject& subject, const std::string& data) {
  if (data.size() > kMailBytes)
    throw Error(ErrorKind::invalid, "a letter of " + std::to_string(data.size()) +
                                        " bytes; a box holds " + std::to_string(kMailBytes));
  Seat& seat = region_->seat(me_);
  Letter& letter = seat.letter[subject.part][++seat.posted[subject.part] & 1];
  const std::uint64_t mark = letter.mark.load(std::memory_order_relaxed);
  letter.mark.store(mark + 1, std::memory_order_relaxed);  // odd: being written
  std::atomic_thread_fence(std::memory_order_release);
  letter.tag = subject.tag;
  letter.round = subject.round;
  letter.bytes = data.size();
  std::memcpy(letter.data, data.data(), data.size());
  letter.mark.store(mark + 2, std::memory_order_release);  // publishes the letter
}

std::optional<std::string> Council::fetch(int q, const Subject& subject) const {
  for (const Letter& letter : region_->seat(q).letter[subject.part]) {
    const std::uint64_t mark = letter.mark.load(std::memory_order_acquire);
    if (mark % 2 != 0 || letter.tag != subject.tag || letter.round != subject.round) continue;
    std::string data(letter.data, std::min<std::uint64_t>(letter.bytes, kMailBytes));
    // A rank that gave up this exchange may have begun another letter meanwhile.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (letter.mark.load(std::memory_order_relaxed) == mark && mark != 0) return data;
  }
  return std::nullopt;
}

}  // namespace collectives
