// Calls whose arrays are in memory of a GPU, which MPI sends from and receives to: which they are,
// and how they are cut. The engine and its plans are those of arrays on the host.
//
// Cost: the schedule's messages, and for each that is combined a kernel and a look at its end, some
// ten microseconds. Limits: kStraightChannels channels, as many operands as the hands take. The
// first call of an algorithm lowers it for all ranks, which for all_to_all takes memory as n³.
#include <algorithm>
#include <string>
#include <utility>

#include "communicator.hpp"
#include "errors.hpp"

namespace collectives {

void Communicator::go_straight(std::shared_ptr<MpiTransport> mpi, std::unique_ptr<Hands> hands,
                               std::uint64_t from, std::size_t scratch_bytes, int operands) {
  if (mpi->depth() != kFifoDepth)
    throw Error(ErrorKind::invalid, "FIFOs in memory of a GPU hold " + std::to_string(kFifoDepth) +
                                        " messages, not " + std::to_string(mpi->depth()));
  auto made = std::make_unique<Straight>();
  made->links.to.assign(config_.nranks, mpi.get());
  made->links.to[config_.rank] = nullptr;
  made->links.slot_bytes = mpi->slot_bytes();
  made->links.max_channels = kStraightChannels;
  made->mpi = std::move(mpi);
  made->engine = std::make_unique<HostEngine>(*waiter_, std::move(hands));
  made->from = from;
  made->scratch_bytes = scratch_bytes;
  made->operands = operands;
  straight_ = std::move(made);
}

const Communicator::Lowered& Communicator::lowered_for_straight(const ProgramKey& key) {
  Lowered& low = lowered(key);
  if (low.cells >= 0) return low;
  low.cells = 0;
  for (const RankProgram& program : lower_all(schedule_of(key), key.order, kFifoDepth)) {
    low.cells = std::max(low.cells, program.scratch_cells);
    for (const Program& channel : program.channels)
      for (const Step& step : channel.steps)
        if (step.kind == StepKind::combine) low.operands = std::max(low.operands, step.npieces);
  }
  return low;
}

// Elements of a chunk that one pass handles at most: its messages fit slots, and what is kept on
// the way fits the scratch memory. 0 if not one does.
std::uint64_t Communicator::straight_segment(const Lowered& low, std::size_t element) const {
  const auto pieces = static_cast<std::uint64_t>(low.program->max_message_pieces);
  std::uint64_t most = straight_->links.slot_bytes / pieces / element;
  if (low.cells > 0) {
    const auto cells = static_cast<std::uint64_t>(low.cells) * kStraightChannels;
    most = std::min<std::uint64_t>(most, straight_->scratch_bytes / cells / 64 * 64 / element);
  }
  return most;
}

bool Communicator::goes_straight(const Call& call, const Options& options) {
  if (straight_ == nullptr || call.collective == Collective::barrier) return false;
  // Those are multiplied on the host.
  if (call.op == Op::premul_sum && reduces(call.collective)) return false;
  const std::size_t element = size_of(call.dtype);
  const bool pairs = call.collective == Collective::all_to_all && call.in.is_table();
  if (!pairs && sign(call, options).count * element < straight_->from) return false;
  const ProgramKey key{options.algorithm, call.collective, rooted(call.collective) ? call.root : 0,
                       options.order};
  const Lowered& low = lowered_for_straight(key);
  return static_cast<int>(low.program->channels.size()) <= kStraightChannels &&
         low.operands <= straight_->operands && straight_segment(low, element) > 0;
}

}  // namespace collectives
