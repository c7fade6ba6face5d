// How a communicator notices trouble while it waits, and how ranks tell each other.
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "communicator.hpp"
#include "errors.hpp"

namespace collectives {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The abort word: 1 + the local rank that gave up, the kind of its error, and a mark
// (Region::kUnfinished) while its reason is being written.
constexpr int kKindShift = 16;

constexpr milliseconds kPollPeersEvery{20};

// A rank that waits and has not looked around for so long does not run.
constexpr milliseconds kStill{500};

// What ranks of other nodes are told: kind of the error, rank that died or -1, text.
std::string to_poison(ErrorKind kind, int dead, const std::string& text) {
  return std::to_string(static_cast<int>(kind)) + ' ' + std::to_string(dead) + ' ' + text;
}
struct Told {
  ErrorKind kind = ErrorKind::aborted;
  int dead = -1;
  std::string text;
};
Told from_poison(const std::string& poison) {
  const auto first = poison.find(' '), second = poison.find(' ', first + 1);
  if (first == std::string::npos || second == std::string::npos || poison[0] == '(')
    return {ErrorKind::aborted, -1, poison};  // which did not arrive
  Told told{static_cast<ErrorKind>(std::atoi(poison.c_str())), -1, poison.substr(second + 1)};
  // A death is a death for everybody; other reasons are the other rank's own.
  if (told.kind == ErrorKind::peer_died)
    told.dead = std::atoi(poison.c_str() + first);
  else
    told.kind = ErrorKind::aborted;
  return told;
}

// Waits nest in lengthy calls: the outermost gives up the GIL and takes it back.
thread_local void* slow_token = nullptr;
thread_local int slow_depth = 0;

}  // namespace

void Communicator::abort(const std::string& reason) {
  if (birth_.in_child()) check_open();
  const bool first = !broken_;
  give_up(ErrorKind::aborted, "aborted: " + reason, reason);
  tell_peers();
  if (first) note_error(name_of(ErrorKind::aborted), "aborted: " + reason, -1);
}

// Tells all ranks of the region, once, that this one leaves the common path, and why, whichever
// thread it is that comes to it: their waits end at once with the same kind of error. Returns what
// they are told.
std::string Communicator::tell_region() noexcept {
  ErrorKind kind;
  std::string whole = "rank " + std::to_string(config_.rank) + " gave up: ";
  {
    std::lock_guard lock(reason_mutex_);
    kind = broken_kind_;
    whole += told_;
  }
  if (config_.region) {
    const std::uint32_t word =
        (1 + config_.local_of[config_.rank]) | static_cast<std::uint32_t>(kind) << kKindShift;
    std::uint32_t nobody = 0;
    auto& shared = config_.region->abort_word();
    if (shared.compare_exchange_strong(nobody, word | Region::kUnfinished)) {
      const std::string_view reason = cut_short(whole, Region::kAbortReason - 1);
      std::memcpy(config_.region->abort_reason(), reason.data(), reason.size());
      shared.store(word, std::memory_order_release);  // publishes the reason
    }
    for (int q = 0; q < config_.region->shape().nranks; ++q)
      config_.region->rank(q).doorbell.wake();
  }
  return whole;
}

void Communicator::tell_peers() noexcept {
  const std::string whole = tell_region();
  if (!config_.mpi) return;
  const int dead = broken_kind_ == ErrorKind::peer_died ? who_died() : -1;
  config_.mpi->poison(to_poison(broken_kind_, dead, whole));
}

int Communicator::who_died() const {
  if (!liveness_) return -1;
  for (int q = 0; q < config_.region->shape().nranks; ++q)
    if (liveness_->died(q)) return numbers_[q];
  return -1;
}

// The ranks are no longer in the same state: later calls raise.
void Communicator::give_up(ErrorKind kind, const std::string& reason, const std::string& told) {
  std::lock_guard lock(reason_mutex_);
  if (broken_) return;
  p2p_->stop();  // whoever sees that this is broken may free what it has posted
  broken_reason_ = reason;
  told_ = told;
  broken_kind_ = kind;
  broken_ = true;
  recorder_->broken();
}

// A call ended half-way: the ranks are out of step.
void Communicator::leave_path(ErrorKind kind, const std::string& text) {
  if (broken_) return;  // told already
  give_up(kind, text);
  tell_peers();
}

void Communicator::fail(ErrorKind kind, const std::string& text, int peer) {
  give_up(kind, text);
  tell_peers();
  throw Error(kind, text, peer);
}

std::string Communicator::broken_reason() const {
  std::lock_guard lock(reason_mutex_);
  return broken_reason_;
}

std::string Communicator::why_broken() const {
  if (broken_) return broken_reason();
  if (told_to_stop()) return config_.region->abort_reason();
  std::string text;
  int peer = -1;
  return config_.mpi && config_.mpi->poisoned(&text, &peer) ? from_poison(text).text : "";
}

// True if a rank of the region has given up.
bool Communicator::told_to_stop() const { return config_.region && config_.region->gave_up(); }

void Communicator::raise_told(const std::string& doing) {
  const std::uint32_t word = config_.region->abort_word().load(std::memory_order_acquire);
  const std::string text = config_.region->abort_reason() + (" (" + doing + ")");
  // A death is a death for everybody, and so is a mismatch; other reasons are the other rank's own.
  const auto kind = static_cast<ErrorKind>(word >> kKindShift);
  const bool common = kind == ErrorKind::peer_died || kind == ErrorKind::mismatch;
  give_up(common ? kind : ErrorKind::aborted, text);
  if (!common) throw Error(ErrorKind::aborted, text, numbers_[(word & 0xffff) - 1]);
  throw Error(kind, text, kind == ErrorKind::peer_died ? who_died() : -1);
}

void Communicator::enter_device_call() {
  birth_.check();
  look();
  if (!config_.region) return;
  DeviceCalls& mine = config_.region->rank(config_.local_of[config_.rank]).device;
  mine.after.store(issued_, std::memory_order_relaxed);
  // Publishes `after`: whoever sees this call sees how many calls on host arrays came before it.
  mine.count.store(mine.count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void Communicator::look(const char* doing) {
  if (broken_) throw Error(ErrorKind::aborted, broken_reason());
  if (!told_to_stop()) return;
  try {
    raise_told("rank " + std::to_string(config_.rank) + " " + doing);
  } catch (const Error& error) {
    note_error(name_of(error.kind()), error.what(), error.peer());
    throw;
  }
}

// What another thread of this rank has found.
void Communicator::raise_broken(const std::string& place) {
  std::lock_guard lock(reason_mutex_);
  const bool died = broken_kind_ == ErrorKind::peer_died;
  throw Error(died ? ErrorKind::peer_died : ErrorKind::aborted,
              broken_reason_ + " (" + place + ")");
}

void Communicator::look_around(const char* doing) {
  const std::string place = "rank " + std::to_string(config_.rank) + " " + doing;
  if (broken_) raise_broken(place);
  look(doing);
  try {
    std::string text;
    int peer = -1;
    if (config_.mpi && config_.mpi->poisoned(&text, &peer)) {
      const Told told = from_poison(text);
      fail(told.kind, told.text + " (" + place + ")", told.dead >= 0 ? told.dead : peer);
    }
    if (!config_.region) return;
    for (int q = 0; q < config_.region->shape().nranks; ++q)
      if (q != config_.local_of[config_.rank] && liveness_->died(q)) fail_for_death(q, place);
  } catch (const Error& error) {
    note_error(name_of(error.kind()), error.what(), error.peer());
    throw;
  }
}

void Communicator::fail_for_death(int q, const std::string& place) {
  const std::string which =
      config_.threads ? "" : " (process " + std::to_string(liveness_->process(q)) + ")";
  fail(ErrorKind::peer_died, "rank " + std::to_string(numbers_[q]) + which + " died while " + place,
       numbers_[q]);
}

// Ranks that make the same calls in the same order put their k-th call on the GPU after the same
// number of calls on host arrays. This rank is in call `calls_` on host arrays and has put fewer
// calls on its GPU than rank q, which had made fewer than `calls_` on host arrays then: so q's next
// call after the common ones is on the GPU, and this rank's is this one. Neither would ever meet.
void Communicator::check_devices(int q) {
  const DeviceCalls& mine = config_.region->rank(config_.local_of[config_.rank]).device;
  const DeviceCalls& his = config_.region->rank(q).device;
  const std::uint64_t count = his.count.load(std::memory_order_acquire);
  if (count <= mine.count.load(std::memory_order_relaxed) ||
      his.after.load(std::memory_order_relaxed) >= calls_)
    return;
  fail(ErrorKind::mismatch, "rank " + std::to_string(config_.rank) + " calls with arrays on the " +
                                "host (" + last_.signature.describe() + "), rank " +
                                std::to_string(numbers_[q]) +
                                " with arrays on its GPU; pass all on the same side");
}

void Communicator::enter_slow() {
  recorder_->waits();
  if (slow_depth++ == 0 && on_enter_slow) slow_token = on_enter_slow();
}

void Communicator::leave_slow() {
  if (--slow_depth != 0) return;
  if (config_.region)
    config_.region->rank(config_.local_of[config_.rank])
        .waits_on.store(0, std::memory_order_relaxed);
  if (on_leave_slow) on_leave_slow(slow_token);
  slow_token = nullptr;
}

// What others read in blame().
void Communicator::publish_wait(const Where& where, steady_clock::time_point now) {
  if (!config_.region) return;
  RankArea& mine = config_.region->rank(config_.local_of[config_.rank]);
  const int peer = where.peer >= 0 ? config_.local_of[where.peer] : -1;
  mine.waits_on.store(1 + peer, std::memory_order_relaxed);
  mine.looked_at.store(now.time_since_epoch().count(), std::memory_order_relaxed);
}

// The rank that is waited for may itself wait for another: whom the chain of waits ends with, in
// words, and the ranks that have not come to this call at all.
std::string Communicator::blame(const Where& where, steady_clock::time_point now, int* peer) const {
  std::string text;
  if (gate_)
    for (const int number : gate_->missing())
      text += (text.empty() ? ". Not in this call: rank " : ", rank ") + std::to_string(number);
  if (!config_.region || where.peer < 0 || config_.local_of[where.peer] < 0) return text;
  int q = config_.local_of[where.peer];
  for (int hops = 0; hops < config_.region->shape().nranks; ++hops) {
    RankArea& his = config_.region->rank(q);
    const int next = his.waits_on.load(std::memory_order_relaxed) - 1;
    const auto looked = steady_clock::time_point(
        steady_clock::duration(his.looked_at.load(std::memory_order_relaxed)));
    // Who waits looks around every few milliseconds, if it runs.
    if (next < 0 || now - looked > kStill || numbers_[next] == config_.rank) {
      *peer = numbers_[q];
      break;
    }
    text += ". Rank " + std::to_string(numbers_[q]) + " waits for rank " +
            std::to_string(numbers_[next]);
    q = next;
  }
  return text;
}

// Once in a while, whichever thread asks.
bool Communicator::time_to_look(steady_clock::time_point now) {
  const std::lock_guard lock(poll_mutex_);
  if (now - last_poll_ < kPollPeersEvery) return false;
  last_poll_ = now;
  return true;
}

void Communicator::check(const Where& where, Wait& wait) {
  if (gate_) gate_->look_around();
  recorder_->waiting(where, wait.since);
  check_peers(where, wait);
}

void Communicator::check_peers(const Where& where, Wait& wait) {
  const auto now = steady_clock::now();
  const auto place = [&] {
    std::string s = "rank " + std::to_string(config_.rank) + " waits for " + where.phase;
    if (where.peer >= 0) s += " of rank " + std::to_string(where.peer);
    if (where.channel >= 0) s += ", channel " + std::to_string(where.channel);
    if (where.step >= 0) s += ", step " + std::to_string(where.step);
    if (where.round >= 0) s += " (round " + std::to_string(where.round) + ")";
    if (where.expected != 0)
      s += ", epoch expected " + std::to_string(where.expected) + ", seen " +
           std::to_string(where.seen);
    const std::string call = recorder_->describe_current();
    return call.empty() || where.channel == kPointToPointChannel ? s : s + ", in " + call;
  };
  publish_wait(where, now);
  if (told_to_stop()) raise_told(place());
  if (broken_) raise_broken(place());
  if (config_.mpi) {
    std::string text;
    int peer = -1;
    if (config_.mpi->poisoned(&text, &peer)) {
      const Told told = from_poison(text);
      fail(told.kind, told.text + " (" + place() + ")", told.dead >= 0 ? told.dead : peer);
    }
  }
  if (whole_ != nullptr) whole_->look_around();
  const double waited = duration<double>(now - wait.since).count();
  if (waited > timeout_s_) {
    int culprit = where.peer;
    const std::string others = blame(where, now, &culprit);
    const std::string text =
        "gave up after " + std::to_string(waited).substr(0, 6) + " s: " + place() + others +
        ". Raise the limit with timeout= or COLLECTIVES_TIMEOUT if the peer is only slow";
    fail(ErrorKind::deadline, text, culprit);
  }
  if (!time_to_look(now)) return;
  if (on_tick) on_tick(slow_token);
  const std::lock_guard lock(poll_mutex_);
  if (!config_.region) return;
  const int n = config_.region->shape().nranks, me = config_.local_of[config_.rank];
  for (int q = 0; q < n; ++q) {
    if (q == me) continue;
    check_devices(q);
    const std::string name = "rank " + std::to_string(numbers_[q]);
    if (liveness_->died(q)) fail_for_death(q, place());
    if (liveness_->left(q)) {
      // What it did before it closed is visible by now; only the second look can conclude that
      // nothing more will come.
      if (where.peer == numbers_[q] && ++wait.closed_seen > 2)
        fail(ErrorKind::closed, name + " has closed the communicator while " + place(),
             numbers_[q]);
    }
  }
}

}  // namespace collectives
