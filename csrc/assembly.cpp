#include "assembly.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "errors.hpp"
#include "reduce.hpp"

namespace collectives {

Assembly::Assembly(const Links& links, Waiter& waiter, int rank, const std::vector<int>& group,
                   int channel)
    : links_(links),
      waiter_(waiter),
      rank_(rank),
      n_(static_cast<int>(links.to.size())),
      channel_(channel),
      at_(n_, 0) {
  std::map<int, int> number;
  for (int r = 0; r < n_; ++r) {
    const int name = group.empty() ? r : group[r];
    const int g = number.emplace(name, static_cast<int>(groups_.size())).first->second;
    if (g == static_cast<int>(groups_.size())) groups_.emplace_back();
    groups_[g].push_back(r);
    if (r == rank) mine_ = g;
  }
  group_at_.assign(groups_.size() + 1, 0);
  two_ = n_ == 2 && groups_.size() == 2;
}

void Assembly::Head::merge(const Head& other) {
  amount = std::max(amount, other.amount);
  // Of ranks with equal hashes the smallest, on whichever way they were met: all ranks name the
  // same two.
  for (const int side : {0, 1}) {
    const bool further = side == 0 ? other.hash[0] < hash[0] : other.hash[1] > hash[1];
    if (further || (other.hash[side] == hash[side] && other.rank[side] < rank[side])) {
      hash[side] = other.hash[side];
      rank[side] = other.rank[side];
    }
  }
}

// ---- messages ---------------------------------------------------------------------------------

namespace {

// What a message carries at most beside the head. Open MPI sends over TCP up to 64 KiB without
// asking first, and an answer takes longer than a second message.
constexpr std::size_t kPart = 32 << 10;

}  // namespace

// Sends the head, and the data where the ranks agree so far: others would not know their length.
// The first message says how many follow.
void Assembly::send(int peer, const Head& head, const std::byte* data, std::size_t bytes) {
  if (!head.agreed()) bytes = 0;
  SendPort& port = links_.to[peer]->send_port(peer, channel_);
  // No more than the FIFO holds: the peer, who sends too, receives after that.
  const std::size_t most = static_cast<std::size_t>(links_.to[peer]->depth());
  const std::size_t each = std::max(kPart, (bytes + most - 1) / most);
  const std::size_t parts = std::max<std::size_t>(1, (bytes + each - 1) / each);
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t front = part == 0 ? sizeof head : 0;
    const std::size_t own = std::min(each, bytes - part * each);
    char* slot = nullptr;
    waiter_.until([&] { return (slot = port.acquire(front + own)) != nullptr; },
                  [&] { return where("a free slot", peer); });
    if (part == 0) std::memcpy(slot, &head, sizeof head);
    if (own != 0) std::memcpy(slot + front, data + part * each, own);
    port.commit({static_cast<std::uint32_t>(front + own),
                 static_cast<std::uint32_t>(parts - 1 - part), call_});
  }
}

// Waits for what the peer brings and merges its head. Where the ranks agree, its data, in order,
// fill `into_`.
void Assembly::receive(int peer, Head* head) {
  RecvPort& port = links_.to[peer]->recv_port(peer, channel_);
  std::size_t expected = 0, filled = 0;
  for (const Span& span : into_) expected += span.bytes;
  auto span = into_.begin();
  std::size_t within = 0;  // of `span`
  for (std::size_t part = 0, parts = 1; part < parts; ++part) {
    port.expect(1);
    Header header;
    const char* message = nullptr;
    // Asking for the message moves MPI along; nothing else of ours is under way.
    waiter_.until([&] { return (message = port.peek(&header)) != nullptr; },
                  [&] { return where("the arrival", peer); });
    std::size_t own = header.bytes;
    if (part == 0) {
      Head his;
      if (own < sizeof his) mistaken(peer, header, expected);
      std::memcpy(&his, message, sizeof his);
      head->merge(his);
      message += sizeof his;
      own -= sizeof his;
      parts = 1 + header.user;
    }
    if (head->agreed()) {
      const bool is_last = part + 1 == parts;
      const bool fits = is_last ? filled + own == expected : filled + own < expected;
      if (header.tag != call_ || !fits) mistaken(peer, header, expected);
      filled += own;
      while (own != 0) {
        const std::size_t some = std::min(own, span->bytes - within);
        std::memcpy(span->data + within, message, some);
        message += some;
        own -= some;
        within += some;
        if (within == span->bytes) ++span, within = 0;
      }
    }
    port.release();
  }
}

void Assembly::mistaken(int peer, const Header& header, std::size_t expected) const {
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(peer) + " enters call " + std::to_string(header.tag) +
                  " with a message of " + std::to_string(header.bytes) + " bytes and " +
                  std::to_string(header.user) + " behind it, expected are call " +
                  std::to_string(call_) + " and " + std::to_string(expected) +
                  " bytes: the ranks no longer run the same calls");
}

Where Assembly::where(const char* phase, int peer) const {
  Where w;
  w.phase = phase;
  w.peer = peer;
  w.expected = call_;
  return w;
}

// ---- meeting ----------------------------------------------------------------------------------

// The groups' blocks lie one after the other; `bytes(g)` is the length of group g's.
template <class Bytes>
void Assembly::lay_out(const Bytes& bytes) {
  std::size_t total = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    group_at_[g] = total;
    total += bytes(static_cast<int>(g));
  }
  group_at_.back() = total;
  if (all_.size() < total) all_.resize(total);
}

// What the ranks of a group bring goes to its first rank: `bytes(q)` of rank q, to `to(q)`.
template <class Bytes, class To>
void Assembly::collect(Head* head, const std::byte* mine, const Bytes& bytes, const To& to) {
  ++call_;
  const std::vector<int>& group = groups_[mine_];
  if (rank_ != group.front()) return send(group.front(), *head, mine, bytes(rank_));
  for (std::size_t i = 1; i < group.size(); ++i) {
    const int q = group[i];
    into_.assign(1, {to(q), bytes(q)});
    receive(q, head);
  }
}

// The first ranks exchange the blocks of their groups: all_ is complete on each of them. After the
// round with distance d a group has what 2d groups brought, its own and those before it.
void Assembly::disseminate(Head* head) {
  const int count = static_cast<int>(groups_.size());
  if (rank_ != groups_[mine_].front()) return;
  for (int d = 1; d < count; d *= 2) {
    const int to = groups_[(mine_ + d) % count].front();
    const int from_group = (mine_ - d + count) % count;
    const int from = groups_[from_group].front();
    // The blocks that travel: of so many groups up to `last`, one after the other backwards.
    const auto for_each_block = [&](int last, const auto& f) {
      for (int i = 0; i < std::min(d, count - d); ++i) {
        const int g = (last - i + count) % count;
        f(group_at_[g], group_at_[g + 1] - group_at_[g]);
      }
    };
    packed_.clear();
    for_each_block(mine_, [&](std::size_t at, std::size_t bytes) {
      packed_.insert(packed_.end(), all_.data() + at, all_.data() + at + bytes);
    });
    send(to, *head, packed_.data(), packed_.size());
    into_.clear();
    for_each_block(from_group, [&](std::size_t at, std::size_t bytes) {
      into_.push_back({all_.data() + at, bytes});
    });
    receive(from, head);
  }
}

// The first rank hands its data to the others of its group.
void Assembly::spread(Head* head, std::byte* data, std::size_t bytes) {
  const std::vector<int>& group = groups_[mine_];
  if (rank_ == group.front()) {
    for (std::size_t i = 1; i < group.size(); ++i) send(group[i], *head, data, bytes);
    return;
  }
  into_.assign(1, {data, bytes});
  receive(group.front(), head);
}

// Everybody gets what all brought.
Assembly::Head Assembly::exchange(Head head, const std::byte* mine,
                                  const std::vector<std::size_t>& lengths) {
  const auto length = [&](int q) { return lengths.empty() ? 0 : lengths[q]; };
  std::size_t at = 0;
  lay_out([&](int g) {
    const std::size_t begin = at;
    for (const int q : groups_[g]) {
      at_[q] = at;
      at += length(q);
    }
    return at - begin;
  });
  if (mine != nullptr && length(rank_) != 0)
    std::memcpy(all_.data() + at_[rank_], mine, length(rank_));
  collect(&head, mine, length, [&](int q) { return all_.data() + at_[q]; });
  disseminate(&head);
  spread(&head, all_.data(), at);
  return head;
}

std::uint64_t Assembly::meet(const Signature& signature, std::uint64_t hash, std::uint64_t amount,
                             const std::byte* mine, const std::vector<std::size_t>& lengths) {
  const Head head = exchange({amount, {hash, hash}, {rank_, rank_}}, mine, lengths);
  if (!head.agreed()) disagree(head, signature);
  return head.amount;
}

void Assembly::disagree(const Head& head, const Signature& signature) {
  // All know the same two ranks that differ, and now get their signatures.
  const std::uint64_t call = call_;
  std::vector<std::size_t> of_two(n_, 0);
  for (const int r : head.rank) of_two[r] = sizeof(Signature);
  exchange({0, {0, 0}, {0, 0}}, reinterpret_cast<const std::byte*>(&signature), of_two);
  std::string sides;
  for (const int r : head.rank) {
    Signature his;
    std::memcpy(&his, brought(r), sizeof his);
    sides += (sides.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + ": " + his.describe();
  }
  throw Error(ErrorKind::mismatch, "the ranks disagree about call " + std::to_string(call) +
                                       " of this communicator: " + sides +
                                       ". Nothing was written; the communicator stays usable");
}

// ---- small calls ------------------------------------------------------------------------------

// Bytes of rank q's input that others need.
std::size_t Assembly::contribution(const Call& call, int q) const {
  const std::size_t e = size_of(call.dtype);
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
      return call.count * e;
    case Collective::broadcast:
      return q == call.root ? call.count * e : 0;
    case Collective::all_gather:
    case Collective::gather:
      return call.out.length(q) * e;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return call.in.total(n_) * e;
    case Collective::scatter:
      return q == call.root ? call.in.total(n_) * e : 0;
    case Collective::barrier:
      break;
  }
  return 0;
}

bool Assembly::fits(const Call& call, std::size_t limit) const {
  // Blocks from tables may lie apart, and those of an uneven all_to_all are known to pairs only.
  const bool plain =
      !call.in.is_table() && (!call.out.is_table() || call.collective == Collective::all_gather ||
                              call.collective == Collective::gather);
  if (!plain) return false;
  limit = std::min(limit, links_.slot_bytes - sizeof(Head));
  if (two_) return std::max(share_of_two(call, 0).bytes, share_of_two(call, 1).bytes) <= limit / 2;
  std::size_t total = 0;
  for (int q = 0; q < n_; ++q) {
    const std::size_t bytes = contribution(call, q);
    if (bytes > limit || (total += bytes) > limit) return false;
  }
  return true;
}

Assembly::Share Assembly::share_of_two(const Call& call, int q) const {
  const std::size_t e = size_of(call.dtype);
  const bool is_root = q == call.root;
  const Share none{0, 0}, vector{0, call.count * e};
  switch (call.collective) {
    case Collective::all_reduce:
      return vector;
    case Collective::reduce:
      return is_root ? none : vector;
    case Collective::broadcast:
      return is_root ? vector : none;
    case Collective::all_gather:
      return {0, call.out.length(q) * e};
    case Collective::gather:
      return is_root ? none : Share{0, call.out.length(q) * e};
    case Collective::scatter:
      if (!is_root) return none;
      [[fallthrough]];
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return {call.in.offset(1 - q) * e, call.in.length(1 - q) * e};
    case Collective::barrier:
      break;
  }
  return none;
}

// The other's head says all that there is to agree on, and comes before its data: what needs no sum
// goes straight to where it belongs.
void Assembly::run_of_two(const Call& call, const Signature& signature, std::uint64_t hash) {
  const int other = 1 - rank_;
  const std::size_t e = size_of(call.dtype);
  const Share mine = share_of_two(call, rank_), his = share_of_two(call, other);
  const bool sums = reduces(call.collective);
  const bool blocks_in = Layout::blocks_in(call.collective);
  const bool blocks_out = Layout::blocks_out(call.collective);
  // What of the own input is for this rank, and where it and what the other brings belong.
  const std::uint64_t count = blocks_in    ? call.in.length(rank_)
                              : blocks_out ? call.out.length(rank_)
                                           : call.count;
  const std::byte* own = call.input + (blocks_in ? call.in.offset(rank_) * e : 0);
  std::byte* own_to = call.output + (blocks_out ? call.out.offset(rank_) * e : 0);
  std::byte* his_to = call.output + (blocks_out ? call.out.offset(other) * e : 0);
  const bool in_the_way = own < his_to + his.bytes && his_to < own + count * e;
  const bool staged = sums || in_the_way;
  if (staged && all_.size() < his.bytes) all_.resize(his.bytes);

  ++call_;
  Head head{0, {hash, hash}, {rank_, rank_}};
  send(other, head, call.input + mine.offset, mine.bytes);
  into_.assign(1, {staged ? all_.data() : his_to, his.bytes});
  receive(other, &head);
  if (!head.agreed()) disagree(head, signature);

  const bool is_root = rank_ == call.root;
  const bool to_root =
      call.collective == Collective::reduce || call.collective == Collective::gather;
  if (to_root && !is_root) return;
  if (sums) {
    if (count == 0) return;
    operands_.assign(2, own);
    operands_[other] = all_.data();
    void* out = call.output;
    Finish finish;
    if (call.op == Op::avg) finish.divisor = call.divides_by(n_);
    reduce_fn({call.dtype, call.op})(&out, 1, operands_.data(), 2, count, finish);
    return;
  }
  const bool has_own = is_root || !rooted(call.collective);
  if (has_own && own != own_to && count != 0) std::memmove(own_to, own, count * e);
  if (staged && his.bytes != 0) std::memcpy(his_to, all_.data(), his.bytes);
}

void Assembly::run(const Call& call, const Signature& signature, std::uint64_t hash) {
  if (two_) return run_of_two(call, signature, hash);
  lengths_.resize(n_);
  for (int q = 0; q < n_; ++q) lengths_[q] = contribution(call, q);
  meet(signature, hash, 0, call.input, lengths_);
  const std::size_t e = size_of(call.dtype);
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  };
  const auto combine = [&](std::size_t offset, std::uint64_t count) {
    if (count == 0) return;
    operands_.resize(n_);
    for (int q = 0; q < n_; ++q) operands_[q] = brought(q) + offset;
    void* out = call.output;
    Finish finish;
    if (call.op == Op::avg) finish.divisor = call.divides_by(n_);
    reduce_fn({call.dtype, call.op})(&out, 1, operands_.data(), n_, count, finish);
  };
  switch (call.collective) {
    case Collective::reduce:
      if (rank_ != call.root) return;
      [[fallthrough]];
    case Collective::all_reduce:
      return combine(0, call.count);
    case Collective::reduce_scatter:
      return combine(call.in.offset(rank_) * e, call.in.length(rank_));
    case Collective::broadcast:
      return copy(call.output, brought(call.root), call.count * e);
    case Collective::gather:
      if (rank_ != call.root) return;
      [[fallthrough]];
    case Collective::all_gather:
      for (int q = 0; q < n_; ++q)
        copy(call.output + call.out.offset(q) * e, brought(q), call.out.length(q) * e);
      return;
    case Collective::scatter:
      return copy(call.output, brought(call.root) + call.in.offset(rank_) * e,
                  call.in.length(rank_) * e);
    case Collective::all_to_all:
      for (int q = 0; q < n_; ++q)
        copy(call.output + call.out.offset(q) * e, brought(q) + call.in.offset(rank_) * e,
             call.out.length(q) * e);
      return;
    case Collective::barrier:
      return;
  }
}

bool Assembly::fits_by_group(const Call& call, std::size_t limit) const {
  const std::size_t bytes = call.count * size_of(call.dtype), count = groups_.size();
  return call.count <= limit && bytes <= limit / count &&
         bytes * count + sizeof(Head) <= links_.slot_bytes;
}

void Assembly::all_reduce_by_group(const Call& call, const Signature& signature,
                                   std::uint64_t hash) {
  if (two_) return run_of_two(call, signature, hash);
  const std::size_t bytes = call.count * size_of(call.dtype);
  const std::vector<int>& group = groups_[mine_];
  const auto reduce = reduce_fn({call.dtype, call.op});
  const bool first = rank_ == group.front();
  Head head{0, {hash, hash}, {rank_, rank_}};
  lay_out([&](int) { return bytes; });
  if (staged_.size() < group.size() * bytes) staged_.resize(group.size() * bytes);
  const auto staged = [&](std::size_t i) { return staged_.data() + i * bytes; };

  std::size_t next = 1;  // in the order in which they are asked
  collect(&head, call.input, [&](int) { return bytes; }, [&](int) { return staged(next++); });
  if (first && head.agreed() && call.count != 0) {
    operands_.assign(1, call.input);
    for (std::size_t i = 1; i < group.size(); ++i) operands_.push_back(staged(i));
    void* out = all_.data() + group_at_[mine_];
    reduce(&out, 1, operands_.data(), static_cast<int>(operands_.size()), call.count, Finish{});
  }
  disseminate(&head);
  if (first && head.agreed() && call.count != 0) {
    operands_.clear();
    for (std::size_t g = 0; g < groups_.size(); ++g)  // in order of their first ranks
      operands_.push_back(all_.data() + group_at_[g]);
    Finish finish;
    if (call.op == Op::avg) finish.divisor = call.divides_by(n_);
    void* out = call.output;
    reduce(&out, 1, operands_.data(), static_cast<int>(operands_.size()), call.count, finish);
  }
  spread(&head, call.output, bytes);
  if (!head.agreed()) disagree(head, signature);
}

}  // namespace collectives
