// Calls that kernels made by hand can do: direct_one_shot in packets or lines, direct_two_shot.
#include <algorithm>

#include "cuda_engine.hpp"

namespace collectives {

using namespace device;

namespace {

// Threads of a kernel: packets need all of them for 1 MiB, lines for 2 MiB.
constexpr u64 kOneShotThreads = u64(256) * kThreads;
// A kernel that is launched early has its places while the one before it may still wait for a peer,
// so it takes room that others may need, which that peer may wait for: only small ones are, a
// quarter of what the GPU's registers hold, so that two of them leave half.
constexpr u64 kEarlyPart = 4;
constexpr u64 kExchangeChunkBytes = 64 << 10;
// What a block of direct_two_shot has at least, of a share.
constexpr u64 kMinBlockBytes = 4 << 10;

u64 rounded(u64 bytes, u64 unit) { return (bytes + unit - 1) / unit * unit; }

// Bytes of what a pair of ranks exchanges at most, as all ranks know it.
u64 longest_share(const Call& call, int n) {
  if (!Layout::blocked(call.collective)) return call.count * size_of(call.dtype);
  return std::max(call.in.longest(n), call.out.longest(n)) * size_of(call.dtype);
}

// Of an array of so many bytes, what rank q combines.
Parcels share_of(u64 whole, int q, int n) {
  const u64 each = rounded((whole + n - 1) / n, 128), begin = std::min(whole, q * each);
  return {begin, std::min(each, whole - begin), 0};
}

// What direct_one_shot sends from each rank to each, as its schedule says; or direct_two_shot, if
// `twice`.
void share_out(const Call& call, int rank, int n, OneShotCall& c) {
  const u64 e = size_of(call.dtype), whole = call.count * e;
  const bool at_root = rank == call.root;
  const auto block = [&](const Blocks& blocks, int q) {
    return Parcels{blocks.offset(q) * e, blocks.length(q) * e, 0};
  };
  for (int q = 0; q < n; ++q) {
    const bool to_root = q == call.root;
    Parcels &send = c.send[q], &receive = c.receive[q];
    switch (call.collective) {
      case Collective::all_reduce:
        send = receive = c.twice ? share_of(whole, q, n) : Parcels{0, whole, 0};
        break;
      case Collective::reduce:
        if (to_root) send = {0, whole, 0};
        if (at_root) receive = {0, whole, 0};
        break;
      case Collective::broadcast:
        if (at_root) send = {0, whole, 0};
        if (to_root) receive = {0, whole, 0};
        break;
      case Collective::reduce_scatter:
        send = block(call.in, q);
        receive = {0, call.in.length(rank) * e, 0};
        break;
      case Collective::scatter:
        if (at_root) send = block(call.in, q);
        if (to_root) receive = {0, call.in.length(rank) * e, 0};
        break;
      case Collective::all_to_all:
        send = block(call.in, q);
        receive = block(call.out, q);
        break;
      case Collective::all_gather:
        send = {0, call.out.length(rank) * e, 0};
        receive = block(call.out, q);
        break;
      default:  // gather
        if (to_root) send = {0, call.out.length(rank) * e, 0};
        if (at_root) receive = block(call.out, q);
    }
  }
  const u64 each = c.lines ? kLineUnits * 8 : 8;
  const auto count = [&](Parcels& share) {
    share.parcels = static_cast<u32>(std::max<u64>(1, (share.bytes + each - 1) / each));
    c.parcels = std::max(c.parcels, share.parcels);
  };
  for (int q = 0; q < n; ++q) {
    count(c.send[q]);
    count(c.receive[q]);
  }
  c.alike = !c.twice;
  for (int q = 0; q < n; ++q)
    c.alike = c.alike && c.send[q].begin == c.send[0].begin && c.send[q].bytes == c.send[0].bytes &&
              c.send[q].parcels == c.parcels && c.receive[q].parcels == c.parcels;
}

// direct_two_shot out of and into the peers' arrays, or a half of it.
bool needs_no_fifos(const TwoShotCall& c) {
  return c.gather != Gather::push && c.spread != Spread::push;
}

bool has_root(Collective c) { return c == Collective::broadcast || c == Collective::reduce; }
bool is_two_shot(Collective c) {
  return c == Collective::all_reduce || c == Collective::reduce_scatter ||
         c == Collective::all_gather || has_root(c);
}

const unsigned char* input_of(const Call& call) {
  return reinterpret_cast<const unsigned char*>(call.input);
}
unsigned char* output_of(const Call& call) { return reinterpret_cast<unsigned char*>(call.output); }

}  // namespace

u64 device::cut_into_shares(const Call& call, int n, Shares* shares) {
  const u64 e = size_of(call.dtype);
  shares->input_is_share = call.collective == Collective::all_gather;
  shares->output_is_share = call.collective == Collective::reduce_scatter;
  if (call.collective == Collective::all_reduce) {
    for (int q = 0; q < n; ++q) {
      const Parcels share = share_of(call.count * e, q, n);
      shares->share[q] = {share.begin, share.bytes};
    }
    return rounded(shares->share[0].bytes, 128);
  }
  const Blocks& blocks = shares->output_is_share ? call.in : call.out;
  for (int q = 0; q < n; ++q) shares->share[q] = {blocks.offset(q) * e, blocks.length(q) * e};
  return blocks.longest(n) * e;
}

std::string DirectPath::place(const Call& call) const {
  std::string words;
  if (input != nullptr)
    words =
        "x no. " + std::to_string(input->id) + " + " + std::to_string(input_of(call) - input->own);
  if (output != nullptr)
    words += std::string{words.empty() ? "" : ", "} + "out no. " + std::to_string(output->id) +
             " + " + std::to_string(output_of(call) - output->own);
  return words;
}

const Segment* DeviceCommunicator::Impl::segment_of(const void* address, u64 bytes) const {
  const auto* const at = static_cast<const unsigned char*>(address);
  for (const auto& [id, segment] : segments)
    if (!segment.at.empty() && at >= segment.own && at + bytes <= segment.own + segment.bytes)
      return &segment;
  return nullptr;
}

DirectPath DeviceCommunicator::Impl::direct_path(const Call& call,
                                                 const DeviceOptions& options) const {
  DirectPath path;
  const int n = config.nranks;
  const u64 e = size_of(call.dtype);
  if (n == 1) return path;
  // complex128 goes in two units, whose sums are apart and whose products are not. (Each rank has a
  // factor of its own, so that does not count.)
  const bool fits_units = !reduces(call.collective) || call.dtype != Dtype::complex128 ||
                          (call.op != Op::prod && call.op != Op::premul_sum);
  const auto one_shot = [&] {
    const u64 bytes = longest_share(call, n);
    const bool fits_lines = bytes <= u64{world.geometry.lines_each} * kLineUnits * 8;
    const bool fits_packets = bytes <= u64{world.geometry.packet_units} * 8;
    if (bytes != 0 && fits_units && whole_lines && fits_lines && (options.lines || !fits_packets))
      return DirectPath::Kind::lines;
    if (bytes != 0 && fits_units && fits_packets) return DirectPath::Kind::packets;
    return DirectPath::Kind::none;
  };
  if (options.algorithm == "direct_one_shot") {
    if (call.collective != Collective::barrier) path.kind = one_shot();
    return path;
  }
  if (options.algorithm == "direct_two_shot" && call.collective == Collective::all_to_all) {
    // It has one step in any case, which needs no barrier in packets or lines: if all ranks know
    // the length of its blocks, or the flags would not tell who disagrees.
    if (options.small && !call.in.is_table() && !call.out.is_table()) path.kind = one_shot();
    if (path.kind == DirectPath::Kind::none) path.kind = DirectPath::Kind::exchange;
    return path;
  }
  if (options.algorithm != "direct_two_shot" || !is_two_shot(call.collective)) return path;
  const bool gathers = call.collective != Collective::all_gather;
  const bool spreads = call.collective != Collective::reduce_scatter;
  const u64 whole = (call.collective == Collective::reduce_scatter ? call.in.total(n)
                     : call.collective == Collective::all_gather   ? call.out.total(n)
                                                                   : call.count) *
                    e;
  if (whole == 0) return path;
  if (has_root(call.collective)) {
    path.kind = DirectPath::Kind::two_shot;
    path.gather = call.collective == Collective::reduce ? Gather::push : Gather::none;
    path.spread = Spread::push;
    return path;
  }
  const u64 lines = share_of(whole, 0, n).bytes / (kLineUnits * 8) + 1;
  if (call.collective == Collective::all_reduce && options.lines && whole_lines && fits_units &&
      2 * lines <= world.geometry.lines_each) {
    path.kind = DirectPath::Kind::lines_twice;
    return path;
  }
  if (options.copies && copies && last_capture == 0) {
    path.kind = DirectPath::Kind::copies;
    return path;
  }
  path.kind = DirectPath::Kind::two_shot;
  if (gathers && options.pull) path.input = segment_of(call.input, whole);
  if (spreads) path.output = segment_of(call.output, whole);
  path.gather = !gathers ? Gather::none : path.input != nullptr ? Gather::pull : Gather::push;
  path.spread = !spreads ? Spread::none : path.output != nullptr ? Spread::write : Spread::push;
  return path;
}

void DeviceCommunicator::Impl::prepare_one_shot(const DirectPath& path, const Call& call,
                                                const DeviceOptions& options, const CallHead& head,
                                                const Arithmetic& arithmetic, Prepared* made) {
  OneShotCall& c = made->call.emplace<OneShotCall>();
  c.world = world;
  c.head = head;
  c.arithmetic = arithmetic;
  c.reduces = reduces(call.collective);
  c.lines = path.kind != DirectPath::Kind::packets;
  c.twice = path.kind == DirectPath::Kind::lines_twice;
  share_out(call, config.rank, config.nranks, c);
  const u64 hands = u64{c.parcels} * (c.lines ? kLineThreads : 1);
  const bool whole = c.reduces && c.alike && !c.twice;
  const int largest = whole ? kWholeThreads : kThreads;
  c.threads = options.threads > 0 ? std::min(options.threads, largest) : kThreads;
  int limit = config.max_blocks;
  if (options.blocks > 0) limit = limit > 0 ? std::min(limit, options.blocks) : options.blocks;
  // (Each thread waits for its own packets or lines only, so ranks may differ in this.)
  if (limit > 0 && hands > static_cast<u64>(limit) * c.threads) c.threads = largest;
  const int at_once = c.twice ? one_shot_blocks.twice
                      : whole ? one_shot_blocks.whole
                              : one_shot_blocks.shares;
  const u64 resident = u64(at_once) * static_cast<u64>(largest) / c.threads;
  u64 most = std::min<u64>(kOneShotThreads / c.threads, resident);
  if (limit > 0) most = std::min(most, static_cast<u64>(limit));
  made->grid = static_cast<int>(std::min<u64>(most, (hands + c.threads - 1) / c.threads));
  // (Two of them may be there at once.)
  c.early = hopper && config.sharing == 1 &&
            kEarlyPart * static_cast<u64>(made->grid) <= resident &&
            (config.max_blocks == 0 || 2 * made->grid <= config.max_blocks);
}

void DeviceCommunicator::Impl::prepare_shares(const DirectPath& path, const Call& call,
                                              const DeviceOptions& options, const CallHead& head,
                                              const Arithmetic& arithmetic, Prepared* made) {
  const int n = config.nranks;
  const u64 e = arithmetic.element;
  TwoShotCall& c = made->call.emplace<TwoShotCall>();
  c.world = world;
  c.head = head;
  c.arithmetic = arithmetic;
  c.gather = path.gather;
  c.spread = path.spread;
  c.root = has_root(call.collective) ? call.root : -1;
  for (int q = 0; q < n; ++q) {
    if (path.input != nullptr) c.inputs[q] = path.input->at[q] + (input_of(call) - path.input->own);
    if (path.output != nullptr)
      c.outputs[q] = path.output->at[q] + (output_of(call) - path.output->own);
  }
  u64 longest = 0;
  if (c.root < 0) {
    longest = cut_into_shares(call, n, &c);
  } else {
    // Of two ranks, the one that gets all.
    const bool at_root = n == 2 && c.gather != Gather::none;
    for (int q = 0, number = 0; q < n; ++q) {
      if ((q == c.root) != at_root) continue;
      const Parcels share = share_of(call.count * e, number++, n - 1);
      c.share[q] = {share.begin, share.bytes};
      longest = std::max(longest, share.bytes);
    }
  }
  const bool straight = needs_no_fifos(c);
  const int limit =
      straight && options.straight_blocks > 0 ? options.straight_blocks : options.blocks;
  const int most = limit > 0 ? std::min(limit, blocks) : blocks;
  const u64 wanted = std::max<u64>(1, longest / kMinBlockBytes);
  const int grid = static_cast<int>(std::min<u64>(static_cast<u64>(most), wanted));
  c.block_bytes = std::max<u64>(128, rounded((longest + grid - 1) / grid, 128));
  if (straight) {
    c.chunk_bytes = c.block_bytes;
  } else {
    c.chunk_bytes = std::min(c.block_bytes, u64{world.geometry.slot_bytes});
    if (options.chunk != 0) c.chunk_bytes = std::min(c.chunk_bytes, rounded(options.chunk, 128));
  }
  c.chunks = static_cast<u32>((c.block_bytes + c.chunk_bytes - 1) / c.chunk_bytes);
  made->grid = grid;
  c.bulk = options.bulk && can_copy_in_bulk(call, c, grid);
}

// All ranks need not answer alike: the signals are the same.
bool DeviceCommunicator::Impl::can_copy_in_bulk(const Call& call, const TwoShotCall& c,
                                                int grid) const {
  if (!hopper || !needs_no_fifos(c)) return false;
  if (c.gather != Gather::none && !two_shot_is_fast(c)) return false;
  // A block has a multiprocessor's shared memory for itself.
  if (grid * std::max(1, config.sharing) > processors) return false;
  const auto is_aligned = [](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
  };
  bool aligned =
      is_aligned(call.input) && is_aligned(call.output) && c.share[config.rank].begin % 16 == 0;
  for (int q = 0; q < config.nranks; ++q)
    aligned = aligned && is_aligned(c.inputs[q]) && is_aligned(c.outputs[q]);
  return aligned;
}

void DeviceCommunicator::Impl::prepare_pairs(const Call& call, const DeviceOptions& options,
                                             const CallHead& head, Prepared* made) {
  const u64 e = size_of(call.dtype);
  ExchangeCall& c = made->call.emplace<ExchangeCall>();
  c.world = world;
  c.head = head;
  for (int q = 0; q < config.nranks; ++q) {
    c.send[q] = {call.in.offset(q) * e, call.in.length(q) * e};
    c.receive[q] = {call.out.offset(q) * e, call.out.length(q) * e};
  }
  const u64 longest = std::max(call.in.longest(config.nranks), call.out.longest(config.nranks)) * e;
  // Ranks do not know each other's lengths, but all must take as many blocks.
  int grid = options.blocks > 0 ? std::min(options.blocks, blocks) : blocks;
  c.alike = !call.in.is_table() && !call.out.is_table();
  if (c.alike)
    grid = static_cast<int>(std::clamp<u64>(longest / kMinBlockBytes, 1, static_cast<u64>(grid)));
  c.chunk_bytes = std::min(kExchangeChunkBytes, u64{world.geometry.slot_bytes});
  const u64 most = rounded((longest + grid - 1) / grid, 128);
  // One at least, if empty: after a meeting of its crew a block has something to tell (fifo.cuh).
  c.chunks = std::max(1u, static_cast<u32>((most + c.chunk_bytes - 1) / c.chunk_bytes));
  made->grid = grid;
}

}  // namespace collectives
