// The direct paths that need no staging: on symmetric arrays, on those of other threads, and by
// reading another process's memory.
#include <errno.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "direct_host.hpp"
#include "errors.hpp"

namespace collectives {

std::uint64_t DirectHost::token_of(const void* p, std::size_t bytes,
                                   const std::vector<SymmetricSegment>& segments) const {
  const auto* at = static_cast<const std::byte*>(p);
  for (const SymmetricSegment& s : segments) {
    if (at >= s.base[me_] && at + bytes <= s.base[me_] + s.bytes)
      return (s.id << 40) + static_cast<std::uint64_t>(at - s.base[me_]) + 1;
  }
  return 0;
}

DirectHost::Tokens DirectHost::tokens(const std::vector<SymmetricSegment>& segments) const {
  const Call& call = *call_;
  const std::size_t e = element_;
  Tokens t;
  if (call.collective == Collective::all_to_all && call.in.is_table()) {
    // Sizes are known pair by pair: the announcement carries the longest block, so that all cut
    // alike.
    t.amount = std::max(call.in.longest(n_), call.out.longest(n_)) * e;
    return t;
  }
  const std::size_t size = largest_message();
  if (shared_addresses_ && size >= tuning_.symmetric_min) {
    t.token = kAddresses;
    return t;
  }
  if (!segments.empty() && size >= tuning_.symmetric_min) t = symmetric_tokens(segments);
  if (t.token == 0 && can_pull_ && !reduces(call.collective)) {
    const bool same = call.collective == Collective::broadcast ||
                      call.collective == Collective::all_gather ||
                      call.collective == Collective::gather;
    const std::size_t total =
        same && call.collective != Collective::broadcast ? call.out.total(n_) * element_ : size;
    if (total >= (same ? tuning_.pull_shared_min : tuning_.pull_split_min)) t.token = kPull;
  }
  return t;
}

DirectHost::Tokens DirectHost::symmetric_tokens(
    const std::vector<SymmetricSegment>& segments) const {
  const Call& call = *call_;
  const std::size_t e = element_;
  Tokens t;
  switch (call.collective) {
    case Collective::all_reduce:
      t.token = token_of(call.input, call.count * e, segments);
      t.amount = t.token == 0 ? 0 : token_of(call.output, call.count * e, segments);
      if (t.amount == 0) t.token = 0;
      break;
    case Collective::reduce:
    case Collective::broadcast:
      t.token = token_of(call.input, call.count * e, segments);
      break;
    case Collective::all_gather:
      t.amount = call.input == call.output + call.out.offset(me_) * e;
      t.token = t.amount ? token_of(call.output, call.out.total(n_) * e, segments)
                         : token_of(call.input, call.out.length(me_) * e, segments);
      break;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      t.token = token_of(call.input, call.in.total(n_) * e, segments);
      break;
    default:
      break;
  }
  if (t.token == 0) t.amount = 0;
  return t;
}

// Gives the watch some time to find out why rank q's memory is not what it was, and to throw that.
void DirectHost::raise_if_told(int q) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(200);
  waiter_.until([&] { return Clock::now() > end; },
                [&] {
                  Where w;
                  w.phase = "the memory";
                  w.peer = gate_.number(q);
                  return w;
                });
}

// Copies from rank q's memory: mapped here, or of another process.
void DirectHost::fetch(int q, std::byte* to, const std::byte* from, std::size_t bytes, bool pull) {
  // Equal addresses are the same memory only in one process: those of forked ranks often are equal.
  if (bytes == 0 || (to == from && (!pull || q == me_))) return;
  if (!pull || q == me_) return copy_bytes(to, from, bytes, nontemporal_);
  while (bytes != 0) {
    const iovec local{to, bytes}, remote{const_cast<std::byte*>(from), bytes};
    const ssize_t got =
        process_vm_readv(area(q).process.load(std::memory_order_relaxed), &local, 1, &remote, 1, 0);
    if (got <= 0) {
      const int error = errno;
      // A peer that died, or gave up this call and freed its array: the watch says which.
      raise_if_told(q);
      throw Error(error == ESRCH ? ErrorKind::peer_died : ErrorKind::system,
                  "cannot read the memory of " + gate_.name(q) + ": " + std::strerror(error),
                  gate_.number(q));
    }
    to += got;
    from += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

bool DirectHost::given_up() {
  return gate_.region().abort_word().load(std::memory_order_acquire) != 0;
}

// Works on the peers' arrays themselves: symmetric ones, those of threads of this process, or, for
// movements, by reading another process's memory.
void DirectHost::in_place_of_peers(const std::vector<SymmetricSegment>& segments,
                                   const Tokens& tokens) {
  const std::uint64_t number = ++symmetric_calls_;
  // A rank that gives up sets the abort word and then looks who has entered; of the two stores, one
  // is seen by the other. (What is read of another process is checked afterwards instead.)
  const bool pull = tokens.token == kPull;
  if (!pull) {
    area(me_).entered.value.store(number, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  if (pull || !given_up()) work_in_place(segments, tokens);
  set(area(me_).left, number);
  // Nobody goes on before all are done with everybody's arrays.
  for (int d = 1; d < n_; ++d) {
    const int q = me_ + d < n_ ? me_ + d : me_ + d - n_;
    wait_counter(&RankArea::left, q, number, "the end of a call on symmetric arrays");
  }
  // Unless one gave up: then it may not have had what others were to read, or have taken it away
  // under those who read another process's memory. It says so before its call returns, so what was
  // read before this look is good.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (given_up()) {
    raise_if_told(me_);
    throw Error(ErrorKind::aborted, "a rank gave up this call while others read its array");
  }
}

void DirectHost::wait_for_readers(const std::function<bool(int)>& ended,
                                  std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see in_place_of_peers
  const auto end = Clock::now() + patience;
  for (int q = 0; q < n_; ++q) {
    const RankArea& his = area(q);
    while (his.entered.value.load(std::memory_order_acquire) >
               his.left.value.load(std::memory_order_acquire) &&
           !ended(q) && (shared_addresses_ || Clock::now() < end))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Reductions give each rank a share, which it reduces and writes to all.
void DirectHost::work_in_place(const std::vector<SymmetricSegment>& segments,
                               const Tokens& tokens) {
  const Call& call = *call_;
  const bool pull = tokens.token == kPull;
  const std::byte* inputs[kMaxLocal];
  std::byte* outputs[kMaxLocal];
  const auto at = [&](std::uint64_t t, int q) {
    for (const SymmetricSegment& s : segments)
      if (s.id == t >> 40) return s.base[q] + ((t & ((std::uint64_t{1} << 40) - 1)) - 1);
    return static_cast<std::byte*>(nullptr);
  };
  for (int q = 0; q < n_; ++q) {
    if (tokens.token == kAddresses || pull) {
      inputs[q] = gate_.arrival(q).input;
      outputs[q] = gate_.arrival(q).output;
    } else {
      const bool own_block = call.collective == Collective::all_gather && tokens.amount != 0;
      inputs[q] = at(tokens.token, q) + (own_block ? call.out.offset(q) * element_ : 0);
      outputs[q] = call.collective == Collective::all_reduce ? at(tokens.amount, q) : nullptr;
    }
  }
  const std::size_t bytes = largest_message();
  nontemporal_ = call.input != call.output && bytes >= tuning_.nontemporal_min;
  const std::byte* operands[kMaxLocal];
  std::byte* outs[kMaxLocal];
  switch (call.collective) {
    case Collective::all_reduce: {
      const std::size_t each = round_up((bytes + n_ - 1) / n_, kLineSize);
      const std::size_t begin = std::min(bytes, each * me_);
      const std::size_t part = std::min(bytes, begin + each) - begin;
      for (int q = 0; q < n_; ++q) {
        operands[q] = inputs[q] + begin;
        outs[q] = outputs[(me_ + q) % n_] + begin;
      }
      if (part != 0) combine(outs, n_, operands, n_, part / element_, nontemporal_);
      break;
    }
    case Collective::reduce:
      for (int q = 0; q < n_; ++q) operands[q] = inputs[q];
      outs[0] = call.output;
      if (me_ == call.root) combine(outs, 1, operands, n_, call.count, nontemporal_);
      break;
    case Collective::reduce_scatter:
      for (int q = 0; q < n_; ++q) operands[q] = inputs[q] + call.in.offset(me_) * element_;
      outs[0] = call.output;
      if (call.in.length(me_) != 0)
        combine(outs, 1, operands, n_, call.in.length(me_), nontemporal_);
      break;
    case Collective::broadcast:
      fetch(call.root, call.output, inputs[call.root], bytes, pull);
      break;
    case Collective::scatter:
      fetch(call.root, call.output, inputs[call.root] + call.in.offset(me_) * element_,
            call.in.length(me_) * element_, pull);
      break;
    case Collective::gather:
      if (me_ != call.root) break;
      [[fallthrough]];
    case Collective::all_gather:
      for (int d = 0; d < n_; ++d) {
        const int q = (me_ + d) % n_;
        fetch(q, call.output + call.out.offset(q) * element_, inputs[q],
              call.out.length(q) * element_, pull);
      }
      break;
    case Collective::all_to_all:
      for (int d = 0; d < n_; ++d) {
        const int q = (me_ + d) % n_;
        fetch(q, call.output + call.out.offset(q) * element_,
              inputs[q] + call.in.offset(me_) * element_, call.out.length(q) * element_, pull);
      }
      break;
    default:
      break;
  }
  if (nontemporal_) store_fence();
}

// ---- pairs of an all_to_all_v -----------------------------------------------------------------

void DirectHost::tell_pairs() {
  std::uint64_t* lengths = gate_.region().pair_lengths(me_, gate_.sequence());
  for (int q = 0; q < n_; ++q) {
    lengths[q] = call_->in.length(q);
    lengths[n_ + q] = call_->out.length(q);
  }
}

// All ranks compare all pairs, so that all raise the same before anything is written.
void DirectHost::check_pairs() {
  for (int p = 0; p < n_; ++p) {
    const std::uint64_t* sends = gate_.region().pair_lengths(p, gate_.sequence());
    for (int q = 0; q < n_; ++q) {
      const std::uint64_t expects = gate_.region().pair_lengths(q, gate_.sequence())[n_ + p];
      if (sends[q] != expects)
        throw Error(ErrorKind::mismatch,
                    "all_to_all_v: " + gate_.name(p) + " sends " + std::to_string(sends[q]) +
                        " elements to " + gate_.name(q) + ", which expects " +
                        std::to_string(expects) +
                        ". Nothing was written; the communicator stays usable");
    }
  }
}

}  // namespace collectives
