// What an engine does to the data of its own rank: on the host at once, on a GPU in the order of a
// stream. On the host it costs a virtual call beside the work, some nanoseconds a piece of a
// message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "never_free.hpp"
#include "reduce.hpp"

namespace collectives {

class Hands {
 public:
  virtual ~Hands() = default;
  // Before a call: what it combines by. Returns memory of `scratch_bytes`, whose content is lost.
  virtual std::byte* begin(Reduction reduction, bool reduces, std::size_t scratch_bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  // As ReduceFn.
  virtual void reduce(void* const* dsts, int ndst, const void* const* srcs, int nsrc,
                      std::size_t count, const Finish& finish) = 0;
  // A number for all that was asked for so far, to be passed to done(); 0 if it has been done.
  virtual std::uint64_t ticket() = 0;
  virtual bool done(std::uint64_t ticket) = 0;
  // Something of the call has come about.
  virtual void moved() = 0;
  // After the call: what came into its arrays is there for all who read them.
  virtual void end() = 0;
  // Messages may still leave from the memory that begin() gave, or come there: it is not freed.
  virtual void abandon() {}
};

class HostHands final : public Hands {
 public:
  std::byte* begin(Reduction reduction, bool reduces, std::size_t scratch_bytes) override {
    reduce_ = reduces ? reduce_fn(reduction) : nullptr;
    if (scratch_.size() < scratch_bytes) scratch_.resize(scratch_bytes);
    return scratch_.data();
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void reduce(void* const* dsts, int ndst, const void* const* srcs, int nsrc, std::size_t count,
              const Finish& finish) override {
    reduce_(dsts, ndst, srcs, nsrc, count, finish);
  }
  std::uint64_t ticket() override { return 0; }
  bool done(std::uint64_t) override { return true; }
  void moved() override {}
  void end() override {}
  void abandon() override { never_free(std::move(scratch_)); }

 private:
  ReduceFn reduce_ = nullptr;
  std::vector<std::byte> scratch_;
};

}  // namespace collectives
