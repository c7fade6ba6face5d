// Which bytes a chunk is, for one call: the step from a schedule's chunks to offsets and lengths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "types.hpp"

namespace collectives {

// The blocks of a blocked collective: one a rank, equal, split as numpy.array_split does, or given
// one by one. Lengths and offsets are in elements.
class Blocks {
 public:
  Blocks() = default;
  static Blocks equal(std::uint64_t each) { return Blocks(each, 0); }
  static Blocks split(std::uint64_t total, int n) { return Blocks(total / n, total % n); }
  // `offsets` empty: one behind the other.
  static Blocks table(std::vector<std::uint64_t> lengths, std::vector<std::uint64_t> offsets = {}) {
    Blocks b;
    b.offsets_ = std::move(offsets);
    if (b.offsets_.empty()) {
      std::uint64_t at = 0;
      for (const std::uint64_t length : lengths) {
        b.offsets_.push_back(at);
        at += length;
      }
    }
    b.lengths_ = std::move(lengths);
    return b;
  }

  std::uint64_t length(int q) const {
    return lengths_.empty() ? each_ + (static_cast<std::uint64_t>(q) < extra_) : lengths_[q];
  }
  std::uint64_t offset(int q) const {
    return lengths_.empty() ? q * each_ + std::min<std::uint64_t>(q, extra_) : offsets_[q];
  }
  std::uint64_t longest(int n) const {
    if (lengths_.empty()) return each_ + (extra_ > 0);
    return n == 0 ? 0 : *std::max_element(lengths_.begin(), lengths_.begin() + n);
  }
  std::uint64_t total(int n) const {
    std::uint64_t sum = 0;
    for (int q = 0; q < n; ++q) sum += length(q);
    return sum;
  }
  bool is_table() const { return !lengths_.empty(); }
  const std::vector<std::uint64_t>& lengths() const { return lengths_; }

 private:
  Blocks(std::uint64_t each, std::uint64_t extra) : each_(each), extra_(extra) {}
  std::uint64_t each_ = 0, extra_ = 0;
  std::vector<std::uint64_t> lengths_, offsets_;
};

// One collective call on one rank. `count` is the vector's length for all_reduce, broadcast and
// reduce; the others are described by blocks: `in` where the input has a block a rank
// (reduce_scatter, scatter, all_to_all), `out` where the output has (all_gather, gather,
// all_to_all).
struct Call {
  Collective collective = Collective::all_reduce;
  Dtype dtype = Dtype::float32;
  Op op = Op::sum;
  int root = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::uint64_t count = 0;
  Blocks in, out;
  int divisor = 0;  // of avg, where what ranks bring are sums already; 0: the number of ranks

  int divides_by(int nranks) const { return divisor != 0 ? divisor : nranks; }
};

// Spans of the chunks of a call, segment by segment, in elements.
class Layout {
 public:
  struct Span {
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
  };

  Layout() = default;
  // `segment`: elements of a chunk that one pass of the program handles. `longest`: the longest
  // block of any rank (agreed: all ranks must cut alike).
  Layout(const Call& call, int rank, int nranks, int nchunks, std::uint64_t segment,
         std::uint64_t longest)
      : collective_(call.collective),
        rank_(rank),
        nranks_(nranks),
        nchunks_(nchunks),
        segment_(segment),
        count_(call.count),
        in_(call.in),
        out_(call.out) {
    flat_ = !blocked(call.collective);
    per_block_ = call.collective == Collective::all_to_all ? 1 : std::max(1, nchunks / nranks);
    const std::uint64_t sub =
        flat_ ? (count_ + nchunks - 1) / nchunks : (longest + per_block_ - 1) / per_block_;
    segments_ = std::max<std::uint64_t>(1, (sub + segment - 1) / segment);
    align_ = std::max<std::uint64_t>(1, 64 / size_of(call.dtype));
  }

  static bool blocked(Collective c) { return blocks_in(c) || blocks_out(c); }
  // Has the input a block a rank, or the output?
  static bool blocks_in(Collective c) {
    return c == Collective::reduce_scatter || c == Collective::scatter ||
           c == Collective::all_to_all;
  }
  static bool blocks_out(Collective c) {
    return c == Collective::all_gather || c == Collective::gather || c == Collective::all_to_all;
  }

  std::uint64_t segments() const { return segments_; }
  std::uint64_t segment() const { return segment_; }

  Span input(int chunk, std::uint64_t s) const {
    if (flat_) return flat(chunk, s);
    switch (collective_) {
      case Collective::all_gather:
      case Collective::gather:  // my own block is my whole input
        return within(0, out_.length(chunk / per_block_), chunk % per_block_, s);
      case Collective::all_to_all:  // chunk = source · n + destination
        return within(in_.offset(chunk % nranks_), in_.length(chunk % nranks_), 0, s);
      default:
        return within(in_.offset(chunk / per_block_), in_.length(chunk / per_block_),
                      chunk % per_block_, s);
    }
  }

  Span output(int chunk, std::uint64_t s) const {
    if (flat_) return flat(chunk, s);
    switch (collective_) {
      case Collective::reduce_scatter:
      case Collective::scatter:  // my own block is my whole output
        return within(0, in_.length(chunk / per_block_), chunk % per_block_, s);
      case Collective::all_to_all:
        return within(out_.offset(chunk / nranks_), out_.length(chunk / nranks_), 0, s);
      default:
        return within(out_.offset(chunk / per_block_), out_.length(chunk / per_block_),
                      chunk % per_block_, s);
    }
  }

  // Length of a chunk that may be on its way through this rank.
  std::uint64_t length(int chunk, std::uint64_t s) const {
    if (flat_) return flat(chunk, s).length;
    if (collective_ == Collective::all_to_all)
      return chunk / nranks_ == rank_ ? input(chunk, s).length : output(chunk, s).length;
    const bool by_output =
        collective_ == Collective::all_gather || collective_ == Collective::gather;
    return by_output ? output(chunk, s).length : input(chunk, s).length;
  }

 private:
  Span flat(int chunk, std::uint64_t s) const {
    const std::uint64_t stride = segment_ * nchunks_;
    const std::uint64_t base = s * stride;
    const std::uint64_t total = std::min(stride, count_ > base ? count_ - base : 0);
    std::uint64_t each = (total + nchunks_ - 1) / nchunks_;
    if (each >= 4 * align_)
      each = std::min((each + align_ - 1) / align_ * align_, std::max(segment_, each));
    const std::uint64_t begin = std::min(total, each * chunk);
    return {base + begin, std::min(total, begin + each) - begin};
  }

  Span within(std::uint64_t offset, std::uint64_t length, int sub, std::uint64_t s) const {
    const std::uint64_t each = (length + per_block_ - 1) / per_block_;
    const std::uint64_t begin = std::min(length, each * sub);
    const std::uint64_t end = std::min(length, begin + each);
    const std::uint64_t from = std::min(end, begin + s * segment_);
    return {offset + from, std::min(end - from, segment_)};
  }

  Collective collective_ = Collective::all_reduce;
  int rank_ = 0, nranks_ = 1, nchunks_ = 1, per_block_ = 1;
  std::uint64_t segment_ = 1, segments_ = 1, count_ = 0, align_ = 1;
  bool flat_ = true;
  Blocks in_, out_;
};

}  // namespace collectives
