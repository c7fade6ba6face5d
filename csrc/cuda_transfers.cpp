// Sends and receives on the GPU: prepares what the kernel is told.
#include <algorithm>
#include <vector>

#include "cuda_engine.hpp"
#include "cuda_record.hpp"

namespace collectives {

using namespace device;

namespace {

// What a block of a transfer has at least.
constexpr u64 kMinTransferBytes = 4 << 10;

}  // namespace

PairTransfer DeviceCommunicator::Impl::prepare_transfer(const DeviceTransfer& one) const {
  PairTransfer t{};
  t.memory = reinterpret_cast<unsigned char*>(one.address);
  t.count = one.count;
  t.bytes = one.count * size_of(one.dtype);
  t.tag = one.tag;
  t.dtype = static_cast<u32>(one.dtype);
  t.peer = one.peer;
  // Both ranks of a pair cut alike: `blocks` is the same on all.
  t.strands = static_cast<int>(
      std::clamp<u64>(t.bytes / kMinTransferBytes, 1, std::min(blocks, kTransferStrands)));
  const u64 strands = static_cast<u64>(t.strands);
  t.part = ((t.bytes + strands - 1) / strands + 127) / 128 * 128;
  t.before = -1;
  t.sends = one.sends;
  return t;
}

// Calls of a rank follow each other. So what a rank sends itself lies in the FIFO until its
// receive, which may be in a later call if it fits in there.
void DeviceCommunicator::Impl::check_own(const std::vector<DeviceTransfer>& list) const {
  auto received = std::count_if(list.begin(), list.end(), [&](const DeviceTransfer& t) {
    return !t.sends && t.peer == config.rank;
  });
  for (const DeviceTransfer& one : list) {
    if (!one.sends || one.peer != config.rank || received-- > 0) continue;
    const PairTransfer t = prepare_transfer(one);
    const u64 room = u64{world.geometry.mail_bytes} * kTransferDepth * static_cast<u64>(t.strands);
    if (t.bytes > room)
      throw Error(ErrorKind::unsupported,
                  "rank " + std::to_string(config.rank) + " sends itself " +
                      std::to_string(t.bytes) + " bytes, and a send of more than " +
                      std::to_string(room) +
                      " waits on the stream for its receive, which would come behind it: use "
                      "sendrecv, or put both into `with comm.group()`");
  }
}

void DeviceCommunicator::Impl::transfer(const std::vector<DeviceTransfer>& list,
                                        cudaStream_t used) {
  birth.check();
  const std::lock_guard lock(run_mutex);
  check(true);
  check_stream(used);
  if (list.size() > kMaxTransfers)
    throw Error(ErrorKind::unsupported,
                "up to " + std::to_string(kMaxTransfers) +
                    " sends and receives on the GPU can go on together, not " +
                    std::to_string(list.size()) + ": use several groups");
  check_own(list);
  if (!freed.empty())
    for (const DeviceTransfer& one : list) refuse_freed(reinterpret_cast<const void*>(one.address));
  TransferCall call{};
  call.world = world;
  int grid = 1, sends = 0;
  for (const DeviceTransfer& one : list) {
    PairTransfer t = prepare_transfer(one);
    for (int i = call.count - 1; i >= 0 && t.before < 0; --i) {
      const PairTransfer& earlier = call.list[i];
      if (earlier.peer != t.peer || earlier.sends != t.sends) continue;
      t.before = static_cast<std::int16_t>(i);
      t.ahead = static_cast<std::int16_t>(earlier.ahead + 1);
    }
    grid = std::max(grid, t.strands);
    sends += t.sends;
    call.list[call.count++] = t;
  }
  if (sends != 0 && sends != call.count && 2 * grid <= blocks) {
    call.split = grid;
    grid *= 2;
  }
  const OnDevice current(config.device);
  follow(used);
  call.number = transfers->begun() + 1;
  std::vector<CallRecord*> records;
  for (const DeviceTransfer& one : list) {
    Call described;
    described.dtype = one.dtype;
    described.root = one.peer;
    described.count = one.count;
    records.push_back(transfers->begin_transfer(one.sends ? Recorder::kSend : Recorder::kRecv,
                                                described, one.tag, last_capture != 0));
  }
  const auto launched = static_cast<cudaError_t>(launch_transfer(call, grid, used));
  if (launched != cudaSuccess)
    for (CallRecord* record : records) Recorder::end_transfer(record, CallState::failed);
  check_cuda(launched, "launching a kernel");
  leave_mark(used);
}

std::string DeviceCommunicator::Impl::refused() {
  std::vector<Pair> pairs(static_cast<std::size_t>(config.nranks));
  if (!read_arena(config.rank, world.geometry.pairs, pairs.size() * sizeof(Pair), pairs.data()))
    return "";
  for (int q = 0; q < config.nranks; ++q) {
    const Refusal& r = pairs[static_cast<std::size_t>(q)].refusal;
    if (r.valid != 0) return describe_refusal(config.rank, q, r.sent, r.expected);
  }
  return "";
}

void DeviceCommunicator::transfer(const std::vector<DeviceTransfer>& list, std::uintptr_t stream) {
  impl_->transfer(list, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace collectives
