// The host half of the GPU engine: chooses the kernel, prepares its call, keeps its errors.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "cuda_call.hpp"
#include "cuda_memory.hpp"
#include "cuda_record.hpp"
#include "device.hpp"
#include "region.hpp"
#include "schedule.hpp"

namespace collectives {
namespace {

using namespace device;

// Below this, pieces are not cut for more lanes: a message's signals would take longer than its
// bytes.
constexpr std::uint64_t kMinSegmentBytes = 4 << 10;
constexpr int kOneShotBlocks = 128;

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

// A program in device memory.
struct Uploaded {
  std::shared_ptr<const RankProgram> program;
  int nchunks = 1;
  bool forwards = false;  // all_to_all: blocks pass through ranks that they are not for
  void* memory = nullptr;
  const Step* steps = nullptr;
  const Piece* pieces = nullptr;
  std::vector<ChannelRange> channels;
};

}  // namespace

struct DeviceCommunicator::Impl {
  using ProgramKey = std::tuple<std::string, Collective, int, Order>;

  explicit Impl(const DeviceConfig& c);
  ~Impl();

  void run(const Call& call, const DeviceOptions& options, cudaStream_t stream);
  void close();
  void abort(const std::string& reason);
  void check();
  const Uploaded& uploaded(const ProgramKey& key);
  unsigned char* scratch(std::uint64_t bytes);
  Signature sign(const Call& call, const DeviceOptions& options) const;
  void follow(cudaStream_t stream);
  void leave_mark(cudaStream_t stream);
  void launch_program(const Call& call, const DeviceOptions& options, const CallHead& head,
                      const Arithmetic& arithmetic, cudaStream_t stream);

  DeviceConfig config;
  int blocks = 0;
  cudaStream_t stream = nullptr;  // private: set-up only
  cudaEvent_t last_event = nullptr;
  cudaStream_t last_stream = nullptr;
  unsigned long long last_capture = 0;  // id of the capture that the last call went to, 0: none
  bool recorded = false;
  Control* control = nullptr;
  std::unique_ptr<Arenas> arenas;
  DeviceWorld world{};
  Signature last_signature;
  std::map<ProgramKey, Uploaded> programs;
  std::map<std::pair<std::string, Collective>, std::map<int, Schedule>> defined;
  std::vector<void*> scratches;  // the last is in use; captured graphs may hold earlier ones
  std::uint64_t scratch_bytes = 0;
  std::mutex reason_mutex;
  std::string abort_reason;
  bool closed = false;
};

DeviceCommunicator::Impl::Impl(const DeviceConfig& c) : config(c) {
  std::string why;
  const int count = device_count(&why);
  if (count == 0) throw Error(ErrorKind::unsupported, why);
  if (config.device < 0 || config.device >= count)
    throw Error(ErrorKind::invalid, "there is no GPU " + std::to_string(config.device) +
                                        ": this process sees " + std::to_string(count));
  if (config.nranks > kMaxRanks)
    throw Error(ErrorKind::unsupported, "the GPU engine takes up to " + std::to_string(kMaxRanks) +
                                            " ranks, not " + std::to_string(config.nranks));
  const WhileCapturing relaxed;
  const OnDevice current(config.device);
  int resident = 0, processors = 0;
  check_cuda(static_cast<cudaError_t>(load_kernels(&resident)), "loading the kernels");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, config.device),
             "cudaDeviceGetAttribute");
  // All blocks of all ranks of this GPU must be resident at once: they wait for each other.
  blocks = std::min(kMaxStrands, resident * processors / std::max(1, config.sharing));
  if (config.max_blocks > 0) blocks = std::min(blocks, config.max_blocks);
  if (blocks < 1)
    throw Error(ErrorKind::unsupported,
                std::to_string(config.sharing) + " ranks share GPU " +
                    std::to_string(config.device) + ", which holds " +
                    std::to_string(resident * processors) +
                    " blocks of their kernels at a time: use fewer ranks or more GPUs");
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaEventCreateWithFlags(&last_event, cudaEventDisableTiming), "cudaEventCreate");
  void* pinned = nullptr;
  check_cuda(cudaHostAlloc(&pinned, sizeof(Control), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  control = static_cast<Control*>(pinned);
  std::memset(pinned, 0, sizeof(Control));
  arenas = std::make_unique<Arenas>(config.rank, config.nranks, config.device);
  arenas->allocate(make_geometry(config.nranks, kMaxStrands), stream);
}

DeviceCommunicator::Impl::~Impl() { close(); }

// Waits for this rank's own kernels, then frees. (Errors are of no use to anybody here.)
void DeviceCommunicator::Impl::close() {
  if (closed) return;
  closed = true;
  const WhileCapturing relaxed;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(config.device);
  if (recorded) cudaEventSynchronize(last_event);
  for (auto& [key, program] : programs)
    if (program.memory != nullptr) cudaFree(program.memory);
  for (void* p : scratches) cudaFree(p);
  arenas.reset();
  {
    std::lock_guard lock(reason_mutex);  // abort() may come from any thread
    if (control != nullptr) cudaFreeHost(control);
    control = nullptr;
  }
  if (last_event != nullptr) cudaEventDestroy(last_event);
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaSetDevice(before);
}

// ---- errors -------------------------------------------------------------------------------------

void DeviceCommunicator::Impl::check() {
  if (closed) throw Error(ErrorKind::closed, "this communicator is closed");
  if (*static_cast<volatile u32*>(&control->record.state) != 0) {
    std::atomic_thread_fence(std::memory_order_acquire);
    std::lock_guard lock(reason_mutex);
    raise_record(control->record, config.rank, last_signature.describe(), abort_reason);
  }
  if (*static_cast<volatile u32*>(&control->abort) != 0) {
    std::lock_guard lock(reason_mutex);
    throw Error(ErrorKind::aborted, abort_reason);
  }
}

// Kernels of this rank look at the abort word; peers that wait for a call that never comes look at
// their poison.
void DeviceCommunicator::Impl::abort(const std::string& reason) {
  std::lock_guard lock(reason_mutex);
  if (control == nullptr) return;
  if (abort_reason.empty()) abort_reason = reason;
  *static_cast<volatile u32*>(&control->abort) = 1;
  const WhileCapturing relaxed;
  const OnDevice current(config.device);
  const u32 word = (static_cast<u32>(Leave::aborted) << 16) | static_cast<u32>(config.rank + 1);
  for (int q = 0; q < config.nranks; ++q)
    if (q != config.rank && world.arena[q] != nullptr)
      cudaMemcpyAsync(world.arena[q] + offsetof(State, poison), &word, sizeof word,
                      cudaMemcpyDefault, stream);
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
  u.program = std::make_shared<const RankProgram>(lower(schedule, config.rank, order, kDepth));
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

Signature DeviceCommunicator::Impl::sign(const Call& call, const DeviceOptions& options) const {
  Signature s;
  s.collective = static_cast<std::uint8_t>(call.collective);
  s.dtype = static_cast<std::uint8_t>(call.dtype);
  s.op = reduces(call.collective) ? static_cast<std::uint8_t>(call.op) : 0;
  s.order = static_cast<std::uint8_t>(options.order);
  s.root = rooted(call.collective) ? call.root : 0;
  s.count = Layout::blocked(call.collective)
                ? std::max(call.in.total(config.nranks), call.out.total(config.nranks))
                : call.count;
  for (const Blocks* blocks : {&call.in, &call.out})
    if (blocks->is_table())
      for (int q = 0; q < config.nranks; ++q)
        s.counts_hash = (s.counts_hash ^ (blocks->length(q) + 1)) * 0xff51afd7ed558ccdULL +
                        (s.counts_hash >> 29);
  options.algorithm.copy(s.algorithm, sizeof s.algorithm - 1);
  return s;
}

// Calls of one rank run one after the other, on whatever streams they are put.
void DeviceCommunicator::Impl::follow(cudaStream_t next) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(next, &status, &capture), "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) capture = 0;
  const bool same = next == last_stream;
  if (capture == 0 && last_capture == 0) {
    if (recorded && !same)
      check_cuda(cudaStreamWaitEvent(next, last_event, 0), "cudaStreamWaitEvent");
  } else if (capture != 0 && capture == last_capture && !same) {
    // Two branches of one graph: the second call waits for the first.
    check_cuda(cudaEventRecord(last_event, last_stream), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(next, last_event, 0), "cudaStreamWaitEvent");
  }
  last_stream = next;
  last_capture = capture;
}

void DeviceCommunicator::Impl::leave_mark(cudaStream_t used) {
  recorded = last_capture == 0;
  if (recorded) check_cuda(cudaEventRecord(last_event, used), "cudaEventRecord");
}

void DeviceCommunicator::Impl::run(const Call& call, const DeviceOptions& options,
                                   cudaStream_t used) {
  check();
  if (config.sharing > 1 && (used == nullptr || used == cudaStreamLegacy))
    throw Error(ErrorKind::invalid,
                "ranks that are threads and share a GPU need a stream each, and this call is on "
                "the default stream, which they have in common: use `with "
                "cupy.cuda.Stream(non_blocking=True):` or `with torch.cuda.stream(...)`");
  const std::string undefined =
      reduces(call.collective) ? why_unsupported(call.op, call.dtype) : std::string{};
  if (!undefined.empty()) throw Error(ErrorKind::unsupported, undefined);
  const OnDevice current(config.device);
  last_signature = sign(call, options);
  const std::uint64_t hash = last_signature.hash();
  CallHead head{};
  head.count = last_signature.count;
  head.hash = static_cast<u32>(hash ^ hash >> 32);
  u64 algorithm = 0;
  for (const char c : options.algorithm) algorithm = algorithm * 31 + static_cast<unsigned char>(c);
  head.signature_word =
      static_cast<u64>(last_signature.collective) | static_cast<u64>(last_signature.dtype) << 8 |
      static_cast<u64>(last_signature.op) << 16 | static_cast<u64>(last_signature.order) << 24 |
      static_cast<u64>(last_signature.root & 0xffff) << 32 | (algorithm & 0xffff) << 48;
  Arithmetic arithmetic{};
  arithmetic.reducer = {static_cast<u32>(call.dtype), static_cast<u32>(combine_of(call.op))};
  arithmetic.element = static_cast<u32>(size_of(call.dtype));
  arithmetic.divisor = reduces(call.collective) && call.op == Op::avg ? config.nranks : 1;
  arithmetic.scaled = reduces(call.collective) && call.op == Op::premul_sum;
  arithmetic.factor[0] = options.factor[0];
  arithmetic.factor[1] = options.factor[1];
  if (arithmetic.scaled && options.factor[1] != 0 && call.dtype != Dtype::complex64 &&
      call.dtype != Dtype::complex128)
    throw Error(ErrorKind::invalid, "a complex factor needs complex arrays");

  follow(used);
  const std::uint64_t bytes = call.count * arithmetic.element;
  const bool fits_units =
      call.dtype != Dtype::complex128 || (call.op != Op::prod && options.factor[1] == 0);
  if (call.collective == Collective::all_reduce && options.algorithm == "direct_one_shot" &&
      bytes != 0 && bytes <= world.geometry.packet_units * 8 && fits_units) {
    OneShotCall c{};
    c.world = world;
    c.head = head;
    c.arithmetic = arithmetic;
    c.input = reinterpret_cast<const unsigned char*>(call.input);
    c.output = reinterpret_cast<unsigned char*>(call.output);
    c.bytes = bytes;
    const std::uint64_t threads = (bytes + 7) / 8;
    // Small blocks: two are resident where the interpreter has one, but a bound is a bound.
    const bool once = config.sharing > 1 || config.max_blocks > 0;
    const int most = std::min(kOneShotBlocks, blocks * (once ? 1 : 2));
    const int grid =
        static_cast<int>(std::min<std::uint64_t>(most, (threads + kThreads - 1) / kThreads));
    check_cuda(static_cast<cudaError_t>(launch_one_shot(c, grid, used)), "launching a kernel");
  } else {
    launch_program(call, options, head, arithmetic, used);
  }
  leave_mark(used);
}

void DeviceCommunicator::Impl::launch_program(const Call& call, const DeviceOptions& options,
                                              const CallHead& head, const Arithmetic& arithmetic,
                                              cudaStream_t used) {
  const int n = config.nranks;
  PlanCall c{};
  c.world = world;
  c.head = head;
  c.arithmetic = arithmetic;
  c.input = reinterpret_cast<const unsigned char*>(call.input);
  c.output = reinterpret_cast<unsigned char*>(call.output);
  int grid = 1;
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
    grid = c.lanes * c.channels;
    c.scratch = scratch(c.cell_bytes * c.cells * grid);
  }
  check_cuda(static_cast<cudaError_t>(launch_plan(c, grid, used)), "launching a kernel");
}

// ---- the interface ------------------------------------------------------------------------------

DeviceCommunicator::DeviceCommunicator(const DeviceConfig& config)
    : impl_(std::make_unique<Impl>(config)) {}
DeviceCommunicator::~DeviceCommunicator() = default;

int DeviceCommunicator::blocks() const { return impl_->blocks; }

std::string DeviceCommunicator::handle() const {
  const WhileCapturing relaxed;
  const OnDevice current(impl_->config.device);
  return impl_->arenas->handle();
}

void DeviceCommunicator::open(const std::vector<std::string>& handles, int blocks) {
  const WhileCapturing relaxed;
  const OnDevice current(impl_->config.device);
  Impl& m = *impl_;
  m.arenas->map(handles);
  m.blocks = blocks;
  m.world.rank = m.config.rank;
  m.world.nranks = m.config.nranks;
  for (int q = 0; q < m.config.nranks; ++q) m.world.arena[q] = m.arenas->all()[q];
  void* mapped = nullptr;
  check_cuda(cudaHostGetDevicePointer(&mapped, m.control, 0), "cudaHostGetDevicePointer");
  m.world.control = static_cast<Control*>(mapped);
  m.world.timeout_ns = static_cast<u64>(std::min(m.config.timeout_s, 1e9) * 1e9);
  m.world.geometry = make_geometry(m.config.nranks, kMaxStrands);
  // What peers must read here in the self-test.
  const u64 token = 0x9e3779b97f4a7c15ULL * static_cast<u64>(m.config.rank + 1);
  check_cuda(cudaMemcpyAsync(m.arenas->own() + offsetof(State, token), &token, sizeof token,
                             cudaMemcpyHostToDevice, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(m.stream), "cudaStreamSynchronize");
}

void DeviceCommunicator::probe_write() {
  const WhileCapturing relaxed;
  Impl& m = *impl_;
  const OnDevice current(m.config.device);
  u64 tokens[kMaxRanks];
  for (int q = 0; q < kMaxRanks; ++q) tokens[q] = 0x9e3779b97f4a7c15ULL * static_cast<u64>(q + 1);
  unsigned char* room = m.scratch(sizeof tokens + kMaxRanks * sizeof(u32));
  check_cuda(cudaMemcpyAsync(room, tokens, sizeof tokens, cudaMemcpyHostToDevice, m.stream),
             "cudaMemcpyAsync");
  check_cuda(static_cast<cudaError_t>(launch_probe(m.world, reinterpret_cast<const u64*>(room),
                                                   reinterpret_cast<u32*>(room + sizeof tokens),
                                                   m.stream)),
             "launching the self-test");
  check_cuda(cudaStreamSynchronize(m.stream), "the self-test of peer access");
}

std::string DeviceCommunicator::probe_check() {
  const WhileCapturing relaxed;
  Impl& m = *impl_;
  const OnDevice current(m.config.device);
  u32 wrong[kMaxRanks];
  u64 probe[kMaxRanks];
  check_cuda(cudaMemcpyAsync(wrong, m.scratch(0) + kMaxRanks * sizeof(u64), sizeof wrong,
                             cudaMemcpyDeviceToHost, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaMemcpyAsync(probe, m.arenas->own() + offsetof(State, probe), sizeof probe,
                             cudaMemcpyDeviceToHost, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(m.stream), "cudaStreamSynchronize");
  const u64 mine = 0x9e3779b97f4a7c15ULL * static_cast<u64>(m.config.rank + 1);
  std::string words;
  for (int q = 0; q < m.config.nranks; ++q) {
    const bool reads = wrong[q] == 0, written = probe[q] == (mine ^ static_cast<u64>(q));
    if (reads && written) continue;
    words += std::string{words.empty() ? "" : "; "} + "rank " + std::to_string(m.config.rank) +
             (reads ? " does not see what rank " + std::to_string(q) + " wrote to its GPU memory"
                    : " does not read the GPU memory of rank " + std::to_string(q));
  }
  return words;
}

void DeviceCommunicator::meet() {
  constexpr u64 kPatience = 20'000'000'000ull;  // processes that share a GPU take turns
  const WhileCapturing relaxed;
  Impl& m = *impl_;
  const OnDevice current(m.config.device);
  PlanCall c{};
  c.world = m.world;
  c.world.timeout_ns = kPatience;
  check_cuda(static_cast<cudaError_t>(launch_plan(c, m.blocks, m.stream)), "launching a kernel");
  check_cuda(cudaStreamSynchronize(m.stream), "the first meeting of the ranks' kernels");
  if (m.control->record.state == 0) return;
  throw Error(ErrorKind::unsupported,
              "the kernels of the " + std::to_string(m.config.nranks) +
                  " ranks do not all run at the same time on GPU " +
                  std::to_string(m.config.device) +
                  (m.config.sharing > 1
                       ? ": " + std::to_string(m.config.sharing) +
                             " threads share it. Set CUDA_DEVICE_MAX_CONNECTIONS=32 before "
                             "anything uses CUDA, or pass more devices"
                       : ""));
}

void DeviceCommunicator::define(const std::string& algorithm, const Schedule& schedule) {
  impl_->defined[{algorithm, schedule.collective}][schedule.world.root] = schedule;
}

std::uint64_t DeviceCommunicator::one_shot_max() const {
  return std::uint64_t{impl_->world.geometry.packet_units} * 8;
}

void DeviceCommunicator::run(const Call& call, const DeviceOptions& options,
                             std::uintptr_t stream) {
  impl_->run(call, options, reinterpret_cast<cudaStream_t>(stream));
}

void DeviceCommunicator::check() { impl_->check(); }

bool DeviceCommunicator::idle() {
  Impl& m = *impl_;
  m.check();
  if (!m.recorded) return true;
  const OnDevice current(m.config.device);
  const cudaError_t state = cudaEventQuery(m.last_event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check_cuda(state, "a kernel");
  m.check();
  return true;
}

void DeviceCommunicator::abort(const std::string& reason) { impl_->abort(reason); }

void DeviceCommunicator::close() { impl_->close(); }

}  // namespace collectives
