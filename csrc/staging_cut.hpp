// How a staged call is cut into slices, and what of each comes from the GPU and goes back to it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "layout.hpp"

namespace collectives {

struct Part {
  std::uint64_t device, host, length;  // elements: where in the array, where in the slot
};

// `input_in_output`: the input comes to where the result has it, in the slot's output.
struct Slice {
  std::vector<Part> down, up;
  bool input_in_output = false;
  Call call;
};

// A call of less than this goes in one slice; a longer one in several, of this at least, so that
// what comes from the GPU before the first is on the network, and goes back after the last, is a
// small part of it. Four slices leave a quarter of the copies uncovered.
inline constexpr std::uint64_t kLeastSlice = 1 << 20;
inline constexpr std::uint64_t kSlices = 4;

// How a call is cut: at most `each` elements of the vector, or of every block, in one slice. Equal
// on all ranks, since it is made of what they agree on.
class Cut {
 public:
  // `common`: all ranks know the lengths of all blocks, of all_to_all too.
  Cut(const Call& call, int rank, int n, std::uint64_t slot_bytes, bool common)
      : call_(call),
        rank_(rank),
        n_(n),
        blocked_(Layout::blocked(call.collective)),
        common_(common || call.collective != Collective::all_to_all) {
    bytes_ = size_of(call.dtype) * (blocked_ ? n : 1);
    most_ = slot_bytes / bytes_;
    if (most_ == 0)
      throw Error(ErrorKind::unsupported,
                  "slots of " + std::to_string(slot_bytes) + " bytes are too small for blocks of " +
                      std::to_string(n) + " ranks: raise COLLECTIVES_STAGING");
    lay_out(blocked_ ? std::max(call_.in.longest(n_), call_.out.longest(n_)) : call_.count);
  }

  // Cuts for a vector, or blocks, of at most `longest` elements.
  void lay_out(std::uint64_t longest) {
    longest_ = longest;
    const std::uint64_t least = std::max<std::uint64_t>(1, kLeastSlice / bytes_);
    each_ = std::min(most_, std::max(least, (longest + kSlices - 1) / kSlices));
    slices_ = std::max<std::uint64_t>(1, (longest + each_ - 1) / each_);
  }

  std::uint64_t longest() const { return longest_; }
  std::uint64_t slices() const { return slices_; }

  // The slice, with addresses still to be put in.
  Slice slice(std::uint64_t s) const {
    const bool root = rank_ == call_.root;
    Slice made;
    made.call = call_;
    const auto whole = [&](std::uint64_t length) {
      const std::uint64_t begin = std::min(length, s * each_);
      return std::vector<Part>{{begin, 0, std::min(length - begin, each_)}};
    };
    if (!blocked_) {
      const std::vector<Part> part = whole(call_.count);
      made.call.count = part[0].length;
      const bool reduces_to_root = call_.collective == Collective::reduce;
      const bool from_root = call_.collective == Collective::broadcast;
      if (!from_root || root) made.down = part;
      if (!reduces_to_root || root) made.up = part;
      if (from_root && root && call_.input == call_.output) made.up.clear();
      return made;
    }
    const bool scatters = call_.collective == Collective::scatter;
    const bool gathers = call_.collective == Collective::gather;
    std::vector<Part> in, out;
    if (blocks_in()) made.call.in = pieces(call_.in, s, &in);
    if (call_.collective == Collective::all_gather) {
      // The own block needs no copy on the host, and stays on the GPU.
      Part own{};
      made.call.out = pieces(call_.out, s, &out, &own);
      own.device -= call_.out.offset(rank_);
      made.input_in_output = true;
      made.down = {own};
      made.up = out;
      return made;
    }
    if (blocks_out()) made.call.out = pieces(call_.out, s, &out);
    made.down = blocks_in() ? in : whole(call_.out.length(rank_));
    made.up = blocks_out() ? out : whole(call_.in.length(rank_));
    if (scatters && !root) made.down.clear();
    if (gathers && !root) made.up.clear();
    return made;
  }

 private:
  bool blocks_in() const { return Layout::blocks_in(call_.collective); }
  bool blocks_out() const { return Layout::blocks_out(call_.collective); }

  // The slice's part of every block, packed; blocks that lie side by side are one piece. With
  // `own`, this rank's goes there and not among the others.
  Blocks pieces(const Blocks& blocks, std::uint64_t s, std::vector<Part>* found,
                Part* own = nullptr) const {
    std::vector<std::uint64_t> lengths;
    std::uint64_t at = 0;
    for (int q = 0; q < n_; ++q) {
      const std::uint64_t length = blocks.length(q), begin = std::min(length, s * each_);
      const Part piece{blocks.offset(q) + begin, at, std::min(length - begin, each_)};
      lengths.push_back(piece.length);
      at += piece.length;
      if (own != nullptr && q == rank_)
        *own = piece;
      else if (!found->empty() && found->back().device + found->back().length == piece.device &&
               found->back().host + found->back().length == piece.host)
        found->back().length += piece.length;
      else
        found->push_back(piece);
    }
    const bool alike = common_ && std::equal(lengths.begin() + 1, lengths.end(), lengths.begin());
    if (blocks.is_table() && !alike) return Blocks::table(std::move(lengths));
    return Blocks::split(at, n_);  // lengths differ by one at most, the longer ones first
  }

  const Call& call_;
  int rank_, n_;
  bool blocked_, common_;
  std::uint64_t bytes_;  // of an element, in all blocks
  std::uint64_t most_;   // elements that a slot holds of each
  std::uint64_t longest_ = 0, each_ = 0, slices_ = 1;
};

}  // namespace collectives
