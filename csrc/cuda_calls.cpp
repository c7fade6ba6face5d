// Calls of the GPU engine: chooses the kernel, prepares what it is told, keeps calls in order.
#include <algorithm>
#include <cstring>

#include "cuda_engine.hpp"
#include "region.hpp"

namespace collectives {

using namespace device;

namespace {

// Below this, pieces are not cut for more lanes: a message's signals would take longer than its
// bytes.
constexpr std::uint64_t kMinSegmentBytes = 4 << 10;

FlatBlocks flat_blocks(const Blocks& blocks, int n) {
  FlatBlocks f{};
  f.table = blocks.is_table();
  if (f.table) {
    for (int q = 0; q < n; ++q) {
      f.length[q] = blocks.length(q);
      f.offset[q] = blocks.offset(q);
    }
  } else {
    f.each = blocks.length(n);  // of a block behind those that are one longer
    for (int q = 0; q < n; ++q) f.extra += blocks.length(q) - f.each;
  }
  return f;
}

Combine combine_of(Op op) {
  switch (op) {
    case Op::prod:
      return Combine::prod;
    case Op::min:
      return Combine::min;
    case Op::max:
      return Combine::max;
    case Op::band:
      return Combine::band;
    case Op::bor:
      return Combine::bor;
    case Op::bxor:
      return Combine::bxor;
    default:
      return Combine::sum;
  }
}

}  // namespace

Arithmetic device::arithmetic_of(Dtype dtype, Op op) {
  Arithmetic made{};
  made.reducer = {static_cast<u32>(dtype), static_cast<u32>(combine_of(op))};
  made.element = static_cast<u32>(size_of(dtype));
  made.divisor = 1;
  return made;
}

// ---- programs -----------------------------------------------------------------------------------

const Uploaded& DeviceCommunicator::Impl::uploaded(const ProgramKey& key) {
  const auto found = programs.find(key);
  if (found != programs.end()) return found->second;
  const auto& [name, collective, root, order] = key;
  Schedule schedule;
  const auto written = defined.find({name, collective});
  if (written != defined.end()) {
    const auto at = written->second.find(root);
    if (at == written->second.end())
      throw Error(ErrorKind::unsupported,
                  "algorithm '" + name + "' was not defined for root " + std::to_string(root));
    schedule = at->second;
  } else {
    World w;
    w.nranks = config.nranks;
    w.root = root;
    w.node = config.node;
    schedule = build_schedule(name, collective, w);
  }
  Uploaded u;
  u.nchunks = schedule.nchunks;
  if (collective == Collective::all_to_all)
    for (const Round& round : schedule.rounds)
      for (const Transfer& t : round) u.forwards |= t.chunk != t.src * config.nranks + t.dst;
  // A program that ends with `depth` slots ends with k times as many where each step is done for k
  // segments.
  constexpr int depth = kDepth / kTogether;
  u.program = std::make_shared<const RankProgram>(lower(schedule, config.rank, order, depth));
  std::vector<Step> steps;
  std::vector<Piece> pieces;
  for (const Program& p : u.program->channels) {
    u.channels.push_back({static_cast<int>(steps.size()), static_cast<int>(p.steps.size()),
                          static_cast<int>(pieces.size()), static_cast<int>(p.pieces.size())});
    steps.insert(steps.end(), p.steps.begin(), p.steps.end());
    pieces.insert(pieces.end(), p.pieces.begin(), p.pieces.end());
  }
  for (const Step& step : steps)
    if (step.kind == StepKind::combine && step.npieces > kMaxRanks)
      throw Error(ErrorKind::unsupported, "algorithm '" + name + "' combines " +
                                              std::to_string(step.npieces) + " values at once; " +
                                              "the GPU engine takes " + std::to_string(kMaxRanks));
  const auto aligned = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t step_bytes = aligned(steps.size() * sizeof(Step));
  std::vector<unsigned char> image(step_bytes + pieces.size() * sizeof(Piece) + 1);
  std::memcpy(image.data(), steps.data(), steps.size() * sizeof(Step));
  std::memcpy(image.data() + step_bytes, pieces.data(), pieces.size() * sizeof(Piece));
  const WhileCapturing relaxed;
  check_cuda(cudaMalloc(&u.memory, image.size()), "cudaMalloc");
  check_cuda(cudaMemcpyAsync(u.memory, image.data(), image.size(), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  auto* base = static_cast<unsigned char*>(u.memory);
  u.steps = reinterpret_cast<const Step*>(base);
  u.pieces = reinterpret_cast<const Piece*>(base + step_bytes);
  return programs.emplace(key, std::move(u)).first->second;
}

unsigned char* DeviceCommunicator::Impl::scratch(std::uint64_t bytes) {
  if (bytes > scratch_bytes) {
    const WhileCapturing relaxed;
    void* p = nullptr;
    bytes = (bytes + (1 << 20) - 1) >> 20 << 20;
    check_cuda(cudaMalloc(&p, bytes), "allocating scratch memory on the GPU");
    scratches.push_back(p);
    scratch_bytes = bytes;
  }
  return scratches.empty() ? nullptr : static_cast<unsigned char*>(scratches.back());
}

// ---- calls --------------------------------------------------------------------------------------

Signature DeviceCommunicator::Impl::sign(const Call& call, const DeviceOptions& options,
                                         const DirectPath& direct) const {
  Signature s;
  s.collective = static_cast<std::uint8_t>(call.collective);
  s.dtype = static_cast<std::uint8_t>(call.dtype);
  s.op = reduces(call.collective) ? static_cast<std::uint8_t>(call.op) : 0;
  s.order = static_cast<std::uint8_t>(options.order);
  using Kind = DirectPath::Kind;
  if (direct.kind == Kind::lines || direct.kind == Kind::lines_twice) {
    s.order |= Signature::kInLines;
  } else if (direct.kind == Kind::two_shot || direct.kind == Kind::exchange) {
    if (options.blocks > 0) s.order |= Signature::kInFewBlocks;
  } else if (direct.kind == Kind::copies) {
    s.order |= Signature::kByCopies;
  }
  s.root = rooted(call.collective) ? call.root : 0;
  s.count = Layout::blocked(call.collective)
                ? std::max(call.in.total(config.nranks), call.out.total(config.nranks))
                : call.count;
  if (direct.kind == DirectPath::Kind::exchange && call.in.is_table()) {
    // Pairs have lengths of their own, which their two ranks compare.
    s.count = 0;
    s.order |= Signature::kUneven;
    options.algorithm.copy(s.algorithm, sizeof s.algorithm - 1);
    return s;
  }
  for (const Blocks* blocks : {&call.in, &call.out})
    if (blocks->is_table())
      for (int q = 0; q < config.nranks; ++q)
        s.counts_hash = (s.counts_hash ^ (blocks->length(q) + 1)) * 0xff51afd7ed558ccdULL +
                        (s.counts_hash >> 29);
  std::string algorithm = options.algorithm;
  if (const auto written = defined.find({algorithm, call.collective}); written != defined.end())
    if (const auto at = written->second.find(s.root); at != written->second.end())
      algorithm = signed_name(at->second);
  // Peers reach into each other's arrays at equal offsets.
  if (direct.input != nullptr || direct.output != nullptr)
    algorithm += " on symmetric " + direct.place(call);  // fits in, with 12 digits each
  algorithm.copy(s.algorithm, sizeof s.algorithm - 1);
  return s;
}

// Calls of one rank run one after the other, on whatever streams they are put.
void DeviceCommunicator::Impl::follow(cudaStream_t next) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(next, &status, &capture), "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) capture = 0;
  // To ask during a capture would end it.
  if (capture == 0 && (next != last_stream || last_capture != 0)) check_owner(config.device, next);
  // (That of each thread is another.)
  const bool same = next == last_stream && next != cudaStreamPerThread;
  if (capture == 0) {
    if (recorded && !(same && last_capture == 0))
      check_cuda(cudaStreamWaitEvent(next, last_event, 0), "cudaStreamWaitEvent");
  } else if (capture != 0 && capture == last_capture && !same) {
    // Two branches of one graph: the second call waits for the first.
    check_cuda(cudaEventRecord(branch_event, last_stream), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(next, branch_event, 0), "cudaStreamWaitEvent");
  }
  last_stream = next;
  last_capture = capture;
}

void DeviceCommunicator::Impl::leave_mark(cudaStream_t used) {
  if (last_capture != 0) return;
  recorded = true;
  check_cuda(cudaEventRecord(last_event, used), "cudaEventRecord");
  calls->mark();
  transfers->mark();
}

std::size_t PreparedHash::operator()(const PreparedKey& key) const {
  u64 hash = 0;
  for (const u64 word : key.words) hash = (hash ^ word) * 0xff51afd7ed558ccdULL + (hash >> 29);
  return hash ^ hash >> 32;
}

Prepared& DeviceCommunicator::Impl::ready(const Call& call, const DeviceOptions& options) {
  constexpr std::size_t kMost = 512;  // kinds of calls; a program makes a few
  if (options.id == 0 || call.in.is_table() || call.out.is_table()) {
    not_kept = prepare(call, options);
    return not_kept;
  }
  PreparedKey key;
  auto& w = key.words;
  w[0] = options.id;
  w[1] = static_cast<u64>(call.collective) | static_cast<u64>(call.dtype) << 8 |
         static_cast<u64>(call.op) << 16 | static_cast<u64>(options.order) << 24 |
         static_cast<u64>(call.root) << 32;
  w[2] = call.count;
  w[3] = call.in.total(config.nranks);
  w[4] = call.out.total(config.nranks);
  static_assert(sizeof options.factor == 2 * sizeof(u64));
  std::memcpy(&w[5], options.factor, sizeof options.factor);
  w[9] = last_capture != 0;
  if (!segments.empty()) {  // whether the arrays are symmetric buffers, and which
    w[7] = reinterpret_cast<std::uintptr_t>(call.input);
    w[8] = reinterpret_cast<std::uintptr_t>(call.output);
  }
  const auto found = prepared.find(key);
  if (found != prepared.end()) return found->second;
  if (prepared.size() >= kMost) prepared.clear();
  return prepared.emplace(key, prepare(call, options)).first->second;
}

void DeviceCommunicator::Impl::check_stream(cudaStream_t used) const {
  if (config.sharing > 1 && (used == nullptr || used == cudaStreamLegacy))
    throw Error(ErrorKind::invalid,
                "ranks that are threads and share a GPU need a stream each, and this call is on "
                "the default stream, which they have in common: use `with "
                "cupy.cuda.Stream(non_blocking=True):` or `with torch.cuda.stream(...)`");
}

void DeviceCommunicator::Impl::run(const Call& call, const DeviceOptions& options,
                                   cudaStream_t used) {
  birth.check();
  const std::lock_guard lock(run_mutex);
  check(true);
  check_stream(used);
  const OnDevice current(config.device);
  if (!freed.empty()) {
    refuse_freed(reinterpret_cast<const void*>(call.input));
    refuse_freed(reinterpret_cast<const void*>(call.output));
  }
  if (registered != 0 && options.algorithm == "direct_two_shot") forget_freed(call);
  follow(used);
  Prepared& made = ready(call, options);
  last_signature = made.signature;
  CallRecord* const record =
      calls->begin(call, made.signature.count, made.recorded_as, options.order, last_capture != 0);
  const auto give = [&](auto& c) -> auto& {
    c.input = reinterpret_cast<const unsigned char*>(call.input);
    c.output = reinterpret_cast<unsigned char*>(call.output);
    return c;
  };
  const auto launch = [&](auto& c, auto kernel) {
    check_cuda(static_cast<cudaError_t>(kernel(give(c), made.grid, used)), "launching a kernel");
  };
  try {
    if (auto* one_shot = std::get_if<OneShotCall>(&made.call))
      launch(*one_shot, one_shot->twice ? launch_two_shot_lines : launch_one_shot);
    else if (auto* two_shot = std::get_if<TwoShotCall>(&made.call))
      launch(*two_shot, two_shot->root < 0 ? launch_two_shot : launch_rooted);
    else if (auto* copies_call = std::get_if<CopiesCall>(&made.call))
      put_copies(give(*copies_call), used);
    else if (auto* exchange = std::get_if<ExchangeCall>(&made.call))
      launch(*exchange, launch_exchange);
    else
      launch(std::get<PlanCall>(made.call), launch_plan);
  } catch (...) {
    Recorder::end_transfer(record, CallState::failed);
    throw;
  }
  leave_mark(used);
}

Prepared DeviceCommunicator::Impl::prepare(const Call& call, const DeviceOptions& options) {
  const std::string undefined =
      reduces(call.collective) ? why_unsupported(call.op, call.dtype) : std::string{};
  if (!undefined.empty()) throw Error(ErrorKind::unsupported, undefined);
  Prepared made;
  const DirectPath direct = direct_path(call, options);
  made.signature = sign(call, options, direct);
  made.recorded_as = recorder->gpu_algorithm(options.algorithm);
  const Signature& signature = made.signature;
  const std::uint64_t hash = signature.hash();
  CallHead head{};
  head.count = signature.count;
  head.hash = static_cast<u32>(hash ^ hash >> 32);
  u64 algorithm = 0;
  for (const char c : std::string{signature.algorithm})
    algorithm = algorithm * 31 + static_cast<unsigned char>(c);
  head.signature_word =
      static_cast<u64>(signature.collective) | static_cast<u64>(signature.dtype) << 8 |
      static_cast<u64>(signature.op) << 16 | static_cast<u64>(signature.order) << 24 |
      static_cast<u64>(signature.root & 0xffff) << 32 | (algorithm & 0xffff) << 48;
  Arithmetic arithmetic = arithmetic_of(call.dtype, call.op);
  if (reduces(call.collective) && call.op == Op::avg) arithmetic.divisor = config.nranks;
  arithmetic.scaled = reduces(call.collective) && call.op == Op::premul_sum;
  arithmetic.factor[0] = options.factor[0];
  arithmetic.factor[1] = options.factor[1];
  if (arithmetic.scaled && options.factor[1] != 0 && call.dtype != Dtype::complex64 &&
      call.dtype != Dtype::complex128)
    throw Error(ErrorKind::invalid, "a complex factor needs complex arrays");

  switch (direct.kind) {
    case DirectPath::Kind::none:
      prepare_program(call, options, head, arithmetic, &made);
      break;
    case DirectPath::Kind::packets:
    case DirectPath::Kind::lines:
    case DirectPath::Kind::lines_twice:
      prepare_one_shot(direct, call, options, head, arithmetic, &made);
      break;
    case DirectPath::Kind::two_shot:
      prepare_shares(direct, call, options, head, arithmetic, &made);
      break;
    case DirectPath::Kind::copies:
      prepare_copies(call, options.chunk, head, arithmetic, &made);
      break;
    case DirectPath::Kind::exchange:
      prepare_pairs(call, options, head, &made);
      break;
  }
  return made;
}

void DeviceCommunicator::Impl::prepare_program(const Call& call, const DeviceOptions& options,
                                               const CallHead& head, const Arithmetic& arithmetic,
                                               Prepared* made) {
  const int n = config.nranks;
  PlanCall& c = made->call.emplace<PlanCall>();
  c.world = world;
  c.head = head;
  c.arithmetic = arithmetic;
  // A barrier, and an empty call, are the agreement alone.
  if (call.collective != Collective::barrier && head.count != 0) {
    const Uploaded& u = uploaded({options.algorithm, call.collective,
                                  rooted(call.collective) ? call.root : 0, options.order});
    const RankProgram& program = *u.program;
    const std::uint64_t e = arithmetic.element;
    c.channels = static_cast<int>(program.channels.size());
    if (c.channels > std::min(blocks, kMaxChannels))
      throw Error(ErrorKind::unsupported, "algorithm '" + options.algorithm + "' uses " +
                                              std::to_string(c.channels) + " channels; with " +
                                              std::to_string(blocks) +
                                              " thread blocks, this rank's kernels take " +
                                              std::to_string(std::min(blocks, kMaxChannels)));
    const std::uint64_t unit = std::max<std::uint64_t>(1, 16 / e);  // elements of a pack
    const std::uint64_t cap =
        world.geometry.slot_bytes / program.max_message_pieces / 16 * 16 / e / unit * unit;
    if (cap == 0)
      throw Error(ErrorKind::unsupported, "algorithm '" + options.algorithm + "' sends " +
                                              std::to_string(program.max_message_pieces) +
                                              " chunks in one message, too many for slots of " +
                                              std::to_string(world.geometry.slot_bytes) + " bytes");
    FlatLayout& l = c.layout;
    l.collective = call.collective;
    l.flat = !Layout::blocked(call.collective);
    l.rank = config.rank;
    l.nranks = n;
    l.nchunks = u.nchunks;
    l.per_block = call.collective == Collective::all_to_all ? 1 : std::max(1, u.nchunks / n);
    l.count = call.count;
    l.align = std::max<std::uint64_t>(1, 64 / e);
    l.in = flat_blocks(call.in, n);
    l.out = flat_blocks(call.out, n);
    const std::uint64_t longest = std::max(call.in.longest(n), call.out.longest(n));
    const std::uint64_t chunk = l.flat ? (call.count + l.nchunks - 1) / l.nchunks
                                       : (longest + l.per_block - 1) / l.per_block;
    const std::uint64_t lanes = std::max(1, blocks / c.channels);
    std::uint64_t segment = std::max((chunk + lanes - 1) / lanes, kMinSegmentBytes / e);
    segment = std::min(cap, (segment + unit - 1) / unit * unit);
    l.segment = segment;
    l.segments = std::max<std::uint64_t>(1, (chunk + segment - 1) / segment);
    c.lanes = static_cast<int>(std::min<std::uint64_t>(lanes, l.segments));
    c.steps = u.steps;
    c.pieces = u.pieces;
    std::copy(u.channels.begin(), u.channels.end(), c.channel);
    c.cells = program.scratch_cells;
    c.cell_bytes = (segment * e + 63) / 64 * 64;
    c.together =
        static_cast<int>(std::min<std::uint64_t>(kTogether, (l.segments + c.lanes - 1) / c.lanes));
    made->grid = c.lanes * c.channels;
    c.scratch = scratch(c.cell_bytes * c.cells * c.together * made->grid);
  }
}

}  // namespace collectives
