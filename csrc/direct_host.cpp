#include "direct_host.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace collectives {
namespace {

// Bytes [from, from + limit) of a part that is `bytes` long: how many there are.
std::size_t clamped(std::size_t bytes, std::size_t from, std::size_t limit) {
  return bytes > from ? std::min(limit, bytes - from) : 0;
}

}  // namespace

DirectHost::DirectHost(Gate& gate, Waiter& waiter, const HostTuning& tuning, Reach reach)
    : gate_(gate),
      waiter_(waiter),
      tuning_(tuning),
      shared_addresses_(reach.addresses),
      can_pull_(reach.pull),
      me_(gate.me()),
      n_(gate.size()),
      line_buffer_(static_cast<std::size_t>(gate.size()) * kLinesBytes) {}

void DirectHost::set(Counter& counter, std::uint64_t value) {
  counter.value.store(value, std::memory_order_release);  // publishes what was written before it
  gate_.ring_all();
}

void DirectHost::wait_counter(Counter RankArea::*counter, int q, std::uint64_t value,
                              const char* what) {
  const auto& his = (area(q).*counter).value;
  waiter_.until([&] { return his.load(std::memory_order_acquire) >= value; },
                [&] {
                  Where w;
                  w.phase = what;
                  w.peer = gate_.number(q);
                  w.local = q;
                  w.expected = value;
                  w.seen = his.load(std::memory_order_relaxed);
                  return w;
                });
}

// Where rank q stages chunk `id`, and its lines of call `sequence`. With two ranks the memory
// changes hands every lap: a rank writes where it read last, into lines that its core holds
// already. Otherwise each line crosses twice, once when the writer takes it back from the reader
// and once when it is read. Measured between distant cores (exchange 120 ns): 16 KiB 3.5 -> 2.2 us,
// 1 MiB 108 -> 80 us.
std::byte* DirectHost::stage(int q, std::uint64_t id) const {
  Region& region = gate_.region();
  const bool swapped = n_ == 2 && (id / region.shape().stage_depth & 1) != 0;
  return region.stage(swapped ? 1 - q : q, id);
}

Line* DirectHost::lines_of(int q, std::uint64_t sequence) const {
  const bool swapped = n_ == 2 && (sequence >> 1 & 1) != 0;
  return area(swapped ? 1 - q : q).lines[sequence & 1];
}

// Until my staging slot for chunk `id` is free: every peer has drained the chunk that was in it.
void DirectHost::wait_slot(std::uint64_t id) {
  const std::uint64_t depth = gate_.region().shape().stage_depth;
  if (id < depth || drained_seen_ >= id - depth + 1) return;
  std::uint64_t least = ~std::uint64_t{0};
  for (int q = 0; q < n_; ++q) {
    if (q == me_) continue;
    wait_counter(&RankArea::drained, q, id - depth + 1, "a free staging slot");
    least = std::min(least, area(q).drained.value.load(std::memory_order_relaxed));
  }
  drained_seen_ = least;
}

void DirectHost::combine(std::byte* const* outs, int nouts, const std::byte* const* operands,
                         int nops, std::uint64_t count, bool nontemporal) {
  Finish finish;
  if (call_->op == Op::avg) finish.divisor = call_->divides_by(n_);
  finish.nontemporal = nontemporal;
  reduce_(reinterpret_cast<void* const*>(outs), nouts,
          reinterpret_cast<const void* const*>(operands), nops, count, finish);
}

std::size_t DirectHost::largest_message() const {
  const Call& call = *call_;
  std::uint64_t longest = 0;
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast:
      longest = call.count;
      break;
    case Collective::all_gather:
    case Collective::gather:
      longest = call.out.longest(n_);
      break;
    case Collective::all_to_all:
    case Collective::reduce_scatter:
    case Collective::scatter:
      longest = call.in.total(n_);
      break;
    case Collective::barrier:
      break;
  }
  return longest * element_;
}

void DirectHost::run(const Call& call, bool two_shot, const Signature& signature,
                     std::uint64_t hash, const std::vector<SymmetricSegment>& segments) {
  call_ = &call;
  element_ = size_of(call.dtype);
  gate_.begin(signature, hash);
  struct End {
    Gate& gate;
    ~End() { gate.end(); }
  } end{gate_};
  if (reduces(call.collective)) reduce_ = reduce_fn({call.dtype, call.op});
  const bool uneven_pairs = call.collective == Collective::all_to_all && call.in.is_table();
  if (!uneven_pairs && largest_message() <= tuning_.lines_max) {
    gate_.allow_late_announcement();
    return lines(hash);
  }

  switch (call.collective) {
    case Collective::all_reduce:
      shape_ = two_shot ? Shape::two_phase : Shape::shared;
      break;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
    case Collective::scatter:
      shape_ = Shape::split;
      break;
    default:
      shape_ = Shape::shared;
  }
  chunk_ = std::min(tuning_.chunk_bytes, gate_.region().shape().stage_slot);
  if (shape_ != Shape::shared) {
    const std::size_t whole = gate_.region().shape().stage_slot;
    share_ = std::max(kLineSize, std::min(tuning_.chunk_bytes, whole / n_) / kLineSize * kLineSize);
    chunk_ = share_ * n_;
  }

  // The first chunk goes to its staging slot before the announcement, so that one flag tells of
  // both.
  const Tokens mine = tokens(segments);
  if (mine.token == 0 && publishes(me_)) {
    wait_slot(chunks_);
    fill(0);
  }
  if (uneven_pairs) tell_pairs();
  gate_.announce(mine.token, mine.amount, call.input, call.output);
  gate_.meet(waiter_);
  // Who has come here has drained all chunks of earlier calls.
  drained_seen_ = std::max(drained_seen_, chunks_);
  bool agreed = mine.token != 0;
  std::uint64_t longest = mine.amount;
  for (int q = 0; q < n_; ++q) {
    const Arrival& his = gate_.arrival(q);
    agreed &= his.token == mine.token && his.amount == mine.amount;
    longest = std::max(longest, his.amount);
  }
  if (uneven_pairs) check_pairs();
  if (agreed) return in_place_of_peers(segments, mine);

  const std::size_t bytes = largest_message();
  nontemporal_ = call.input != call.output && bytes >= tuning_.nontemporal_min;
  if (shape_ == Shape::two_phase) {
    two_phase((bytes + chunk_ - 1) / chunk_);
  } else {
    std::size_t longest_part = bytes;
    if (shape_ == Shape::split)
      longest_part = uneven_pairs ? longest : call.in.longest(n_) * element_;
    const std::size_t step = shape_ == Shape::split ? share_ : chunk_;
    pipeline(std::max<std::uint64_t>(1, (longest_part + step - 1) / step));
  }
  if (nontemporal_) store_fence();
}

// ---- lines ------------------------------------------------------------------------------------

void DirectHost::lines(std::uint64_t hash) {
  const Call& call = *call_;
  const std::size_t e = element_;
  const std::uint64_t sequence = gate_.sequence();
  std::size_t bytes = 0;
  switch (call.collective) {
    case Collective::broadcast:
      if (me_ == call.root) bytes = call.count * e;
      break;
    case Collective::scatter:
      if (me_ == call.root) bytes = call.in.total(n_) * e;
      break;
    case Collective::all_gather:
    case Collective::gather:
      bytes = call.out.length(me_) * e;
      break;
    default:
      bytes = largest_message();
  }
  Line* mine = lines_of(me_, sequence);
  std::size_t at = 0;
  do {
    Line& line = *mine++;
    const std::size_t part = std::min(kLinePayload, bytes - at);
    if (part != 0) std::memcpy(line.payload, call.input + at, part);
    line.hash = hash;
    line.sequence.store(sequence,
                        std::memory_order_release);  // publishes this line's payload and hash
    at += part;
  } while (at < bytes);
  gate_.ring_all();

  // The peers' first lines tell that they are in the same call: nothing is written before all have.
  for (int d = 1; d < n_; ++d) {
    const int q = me_ + d < n_ ? me_ + d : me_ + d - n_;
    const Line& line = wait_line(q, 0);
    if (line.hash != hash) gate_.mismatch(waiter_);
  }
  const auto block = [&](int q, std::uint64_t offset, std::uint64_t length) {
    return q == me_ ? call.input + offset * e : read_lines(q, offset * e, length * e);
  };
  const auto combine_all = [&](std::uint64_t offset, std::uint64_t length) {
    if (length == 0) return;
    const std::byte* operands[kMaxLocal];
    for (int q = 0; q < n_; ++q) operands[q] = block(q, offset, length);
    std::byte* out = call.output;
    combine(&out, 1, operands, n_, length, false);
  };
  const auto take = [&](int q, std::uint64_t from, std::uint64_t length, std::uint64_t to) {
    const std::byte* source = block(q, from, length);
    std::byte* target = call.output + to * e;
    if (source != target && length != 0) std::memcpy(target, source, length * e);
  };
  switch (call.collective) {
    case Collective::all_reduce:
      combine_all(0, call.count);
      break;
    case Collective::reduce:
      if (me_ == call.root) combine_all(0, call.count);
      break;
    case Collective::reduce_scatter:
      combine_all(call.in.offset(me_), call.in.length(me_));
      break;
    case Collective::broadcast:
      take(call.root, 0, call.count, 0);
      break;
    case Collective::scatter:
      take(call.root, call.in.offset(me_), call.in.length(me_), 0);
      break;
    case Collective::gather:
      if (me_ != call.root) break;
      [[fallthrough]];
    case Collective::all_gather:
      for (int q = 0; q < n_; ++q) take(q, 0, call.out.length(q), call.out.offset(q));
      break;
    case Collective::all_to_all:
      for (int q = 0; q < n_; ++q)
        take(q, call.in.offset(me_), call.in.length(me_), call.out.offset(q));
      break;
    case Collective::barrier:
      break;
  }
}

const Line& DirectHost::wait_line(int q, std::size_t index) {
  const std::uint64_t sequence = gate_.sequence();
  const Line& line = lines_of(q, sequence)[index];
  waiter_.until([&] { return line.sequence.load(std::memory_order_acquire) == sequence; },
                [&] {
                  Where w;
                  w.phase = "the data";
                  w.peer = gate_.number(q);
                  w.local = q;
                  w.step = static_cast<int>(index);
                  w.expected = sequence;
                  w.seen = line.sequence.load(std::memory_order_relaxed);
                  return w;
                });
  return line;
}

// Bytes [offset, offset + bytes) of what rank q put into its lines: in place if they lie in one
// line, else gathered.
const std::byte* DirectHost::read_lines(int q, std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  std::size_t index = offset / kLinePayload, within = offset % kLinePayload;
  if (within + bytes <= kLinePayload)
    return reinterpret_cast<const std::byte*>(wait_line(q, index).payload) + within;
  std::byte* const gathered = line_buffer_.data() + static_cast<std::size_t>(q) * kLinesBytes;
  for (std::size_t at = 0; at < bytes; ++index, within = 0) {
    const Line& line = wait_line(q, index);
    const std::size_t part = std::min(kLinePayload - within, bytes - at);
    std::memcpy(gathered + at, line.payload + within, part);
    at += part;
  }
  return gathered;
}

// ---- staged -----------------------------------------------------------------------------------

// Does rank q put data into its staging slots in this call?
bool DirectHost::publishes(int q) const {
  switch (call_->collective) {
    case Collective::broadcast:
    case Collective::scatter:
      return q == call_->root;
    case Collective::gather:
    case Collective::reduce:
      return q != call_->root;
    default:
      return true;
  }
}

// Share `o` of chunk k of a vector: where it starts and how long it is, in bytes.
DirectHost::Part DirectHost::share(std::uint64_t k, int o) const {
  const std::size_t in_chunk = clamped(call_->count * element_, k * chunk_, chunk_);
  const std::size_t each = round_up((in_chunk + n_ - 1) / n_, kLineSize);
  const std::size_t begin = std::min(in_chunk, each * o);
  return {k * chunk_ + begin, std::min(in_chunk, begin + each) - begin};
}

// Part k of the block that goes from this rank to rank d (split), in bytes of the input.
DirectHost::Part DirectHost::outgoing(std::uint64_t k, int d) const {
  return {call_->in.offset(d) * element_ + k * share_,
          clamped(call_->in.length(d) * element_, k * share_, share_)};
}

// Copies chunk k of what this rank tells the others into its staging slot.
void DirectHost::fill(std::uint64_t k) {
  const Call& call = *call_;
  std::byte* slot = stage(me_, chunks_ + k);
  if (shape_ == Shape::shared) {
    std::size_t bytes = call.count * element_;
    if (call.collective == Collective::all_gather || call.collective == Collective::gather)
      bytes = call.out.length(me_) * element_;
    const std::size_t part = clamped(bytes, k * chunk_, chunk_);
    if (part != 0) std::memcpy(slot, call.input + k * chunk_, part);
    return;
  }
  for (int d = 0; d < n_; ++d) {
    if (d == me_) continue;
    const Part part = shape_ == Shape::two_phase ? share(k, d) : outgoing(k, d);
    if (part.bytes != 0) std::memcpy(slot + d * share_, call.input + part.offset, part.bytes);
  }
}

// Consumes chunk k of everybody's staging slots.
void DirectHost::drain(std::uint64_t k) {
  const Call& call = *call_;
  const std::uint64_t id = chunks_ + k;
  const auto staged = [&](int q) -> const std::byte* { return stage(q, id); };
  const std::byte* operands[kMaxLocal];
  switch (call.collective) {
    case Collective::reduce:
      if (me_ != call.root) return;
      [[fallthrough]];
    case Collective::all_reduce: {
      const std::size_t part = clamped(call.count * element_, k * chunk_, chunk_);
      for (int q = 0; q < n_; ++q) operands[q] = q == me_ ? call.input + k * chunk_ : staged(q);
      std::byte* out = call.output + k * chunk_;
      if (part != 0) combine(&out, 1, operands, n_, part / element_, nontemporal_);
      return;
    }
    case Collective::reduce_scatter: {
      const Part part = outgoing(k, me_);
      for (int q = 0; q < n_; ++q)
        operands[q] = q == me_ ? call.input + part.offset : staged(q) + me_ * share_;
      std::byte* out = call.output + k * share_;
      if (part.bytes != 0) combine(&out, 1, operands, n_, part.bytes / element_, nontemporal_);
      return;
    }
    case Collective::broadcast: {
      const std::size_t part = clamped(call.count * element_, k * chunk_, chunk_);
      const std::byte* source = me_ == call.root ? call.input + k * chunk_ : staged(call.root);
      std::byte* target = call.output + k * chunk_;
      if (part != 0 && source != target) copy_bytes(target, source, part, nontemporal_);
      return;
    }
    case Collective::gather:
      if (me_ != call.root) return;
      [[fallthrough]];
    case Collective::all_gather:
      for (int d = 0; d < n_; ++d) {
        const int q = (me_ + d) % n_;
        const std::size_t part = clamped(call.out.length(q) * element_, k * chunk_, chunk_);
        const std::byte* source = q == me_ ? call.input + k * chunk_ : staged(q);
        std::byte* target = call.output + call.out.offset(q) * element_ + k * chunk_;
        if (part != 0 && source != target) copy_bytes(target, source, part, nontemporal_);
      }
      return;
    case Collective::scatter: {
      const Part part = outgoing(k, me_);
      const std::byte* source =
          me_ == call.root ? call.input + part.offset : staged(call.root) + me_ * share_;
      std::byte* target = call.output + k * share_;
      if (part.bytes != 0 && source != target) copy_bytes(target, source, part.bytes, nontemporal_);
      return;
    }
    case Collective::all_to_all:
      for (int d = 0; d < n_; ++d) {
        const int q = (me_ + d) % n_;
        const std::size_t part = clamped(call.out.length(q) * element_, k * share_, share_);
        const std::byte* source =
            q == me_ ? call.input + outgoing(k, me_).offset : staged(q) + me_ * share_;
        std::byte* target = call.output + call.out.offset(q) * element_ + k * share_;
        if (part != 0 && source != target) copy_bytes(target, source, part, nontemporal_);
      }
      return;
    case Collective::barrier:
      return;
  }
}

// Chunk k + 1 is staged before chunk k is consumed: peers find it when they are done with theirs.
void DirectHost::pipeline(std::uint64_t chunks) {
  const bool mine = publishes(me_);
  const bool prefilled = gate_.arrival(me_).token == 0;
  std::uint64_t filled = mine && prefilled ? 1 : 0;
  for (std::uint64_t k = 0; k < chunks; ++k) {
    while (mine && filled < std::min(chunks, k + 2)) {
      wait_slot(chunks_ + filled);
      fill(filled);
      ++filled;
      set(area(me_).published, chunks_ + filled);
    }
    for (int d = 1; d < n_; ++d) {
      const int q = me_ + d < n_ ? me_ + d : me_ + d - n_;
      const bool announced_with_data = k == 0 && gate_.arrival(q).token == 0;
      if (publishes(q) && !announced_with_data)
        wait_counter(&RankArea::published, q, chunks_ + k + 1, "staged data");
    }
    drain(k);
    set(area(me_).drained, chunks_ + k + 1);
  }
  chunks_ += chunks;
}

// ---- all_reduce in two phases
// -----------------------------------------------------------------------------------------

void DirectHost::two_phase(std::uint64_t chunks) {
  const Call& call = *call_;
  Region& region = gate_.region();
  const std::uint64_t depth = region.shape().stage_depth;
  const bool prefilled = gate_.arrival(me_).token == 0;

  const auto copy_in = [&](std::uint64_t k) {
    if (k >= chunks) return;
    if (k != 0 || !prefilled) {
      wait_slot(chunks_ + k);
      fill(k);
    }
    set(area(me_).published, chunks_ + k + 1);
  };
  const auto reduce_share = [&](std::uint64_t k) {
    const Part part = share(k, me_);
    const std::byte* operands[kMaxLocal];
    for (int d = 0; d < n_; ++d) {
      const int q = me_ + d < n_ ? me_ + d : me_ + d - n_;
      operands[q] = q == me_ ? call.input + part.offset : stage(q, chunks_ + k) + me_ * share_;
      if (q == me_) continue;
      if (k != 0 || gate_.arrival(q).token != 0)
        wait_counter(&RankArea::published, q, chunks_ + k + 1, "staged data");
      if (results_ + k >= depth)
        wait_counter(&RankArea::collected, q, results_ + k - depth + 1, "a free result slot");
    }
    if (part.bytes != 0) {
      std::byte* outs[2] = {region.result(me_, results_ + k), call.output + part.offset};
      combine(outs, 2, operands, n_, part.bytes / element_, false);
    }
    set(area(me_).drained, chunks_ + k + 1);
    set(area(me_).reduced, results_ + k + 1);
  };
  const auto copy_out = [&](std::uint64_t k) {
    for (int d = 1; d < n_; ++d) {
      const int q = me_ + d < n_ ? me_ + d : me_ + d - n_;
      wait_counter(&RankArea::reduced, q, results_ + k + 1, "a reduced share");
      const Part part = share(k, q);
      if (part.bytes != 0)
        copy_bytes(call.output + part.offset, region.result(q, results_ + k), part.bytes,
                   nontemporal_);
    }
    set(area(me_).collected, results_ + k + 1);
  };

  copy_in(0);
  for (std::uint64_t k = 0; k < chunks; ++k) {
    copy_in(k + 1);
    reduce_share(k);
    if (k != 0) copy_out(k - 1);
  }
  copy_out(chunks - 1);
  chunks_ += chunks;
  results_ += chunks;
}

}  // namespace collectives
