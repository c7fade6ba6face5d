#include "gate.hpp"

#include <algorithm>

#include "errors.hpp"

namespace collectives {

Gate::Gate(std::shared_ptr<Region> region, int me, std::vector<int> names, bool crowded)
    : region_(std::move(region)),
      me_(me),
      n_(region_->shape().nranks),
      names_(std::move(names)),
      crowded_(crowded) {}

void Gate::announce(std::uint64_t token, std::uint64_t amount, const std::byte* input,
                    std::byte* output) {
  RankArea& mine = region_->rank(me_);
  Arrival& arrival = mine.arrival[sequence_ & 1];
  mine.signature[sequence_ & 1] = *signature_;
  arrival.hash = hash_;
  arrival.token = token;
  arrival.amount = amount;
  arrival.input = input;
  arrival.output = output;
  // Publishes the fields above, the signature and everything staged for this call.
  arrival.sequence.store(sequence_, std::memory_order_release);
  announced_ = true;
  ring_all();
}

void Gate::meet(Waiter& waiter) {
  bool agree = true;
  for (int d = 1; d < n_; ++d) {
    const int q = me_ + d < n_ ? me_ + d : me_ + d - n_;
    const Arrival& his = arrival(q);
    waiter.until([&] { return his.sequence.load(std::memory_order_acquire) == sequence_; },
                 [&] {
                   Where w;
                   w.phase = "the arrival";
                   w.peer = names_[q];
                   w.local = q;
                   w.expected = sequence_;
                   w.seen = his.sequence.load(std::memory_order_relaxed);
                   return w;
                 });
    agree &= his.hash == hash_;
  }
  if (!agree) throw_mismatch();
  if (recorder_ != nullptr) recorder_->running();
}

std::vector<int> Gate::missing() {
  std::vector<int> numbers;
  if (signature_ == nullptr || !announced_) return numbers;
  for (int q = 0; q < n_; ++q) {
    const auto& his = region_->rank(q).arrival;
    // One that is a call ahead has been here.
    if (std::max(his[0].sequence.load(std::memory_order_relaxed),
                 his[1].sequence.load(std::memory_order_relaxed)) < sequence_)
      numbers.push_back(names_[q]);
  }
  return numbers;
}

void Gate::look_around() {
  if (signature_ == nullptr || !may_announce_late_) return;
  if (!announced_) announce();
  bool all = true, agree = true;
  for (int q = 0; q < n_; ++q) {
    const Arrival& his = arrival(q);
    if (his.sequence.load(std::memory_order_acquire) != sequence_)
      all = false;
    else
      agree &= his.hash == hash_;
  }
  if (!agree && all) throw_mismatch();
}

void Gate::mismatch(Waiter& waiter) {
  if (!announced_) announce();
  meet(waiter);
  throw_mismatch();
}

void Gate::throw_mismatch() {
  // Ranks that agree are listed together.
  std::string text =
      "the ranks disagree about call " + std::to_string(sequence_) + " of this communicator: ";
  std::vector<bool> listed(n_, false);
  for (int q = 0; q < n_; ++q) {
    if (listed[q]) continue;
    std::string who;
    for (int p = q; p < n_; ++p) {
      if (arrival(p).hash != arrival(q).hash) continue;
      listed[p] = true;
      who += (who.empty() ? "" : ", ") + std::to_string(names_[p]);
    }
    if (q != 0) text += "; ";
    text += (who.find(',') == std::string::npos ? "rank " : "ranks ") + who + ": " +
            region_->rank(q).signature[sequence_ & 1].describe();
  }
  throw Error(ErrorKind::mismatch, text + ". Nothing was written; the communicator stays usable");
}

}  // namespace collectives
