// The host half of the GPU engine: set-up, self-test, errors, the end.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cuda_engine.hpp"
#include "cuda_record.hpp"

namespace collectives {

using namespace device;

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
  try {
    set_up();
  } catch (...) {
    close();  // what was made so far
    throw;
  }
}

void DeviceCommunicator::Impl::set_up() {
  const WhileCapturing relaxed;
  const OnDevice current(config.device);
  int each = 0, capability = 0;
  OneShotResidency one_shot{};
  check_cuda(static_cast<cudaError_t>(load_kernels(&each, &one_shot)), "loading the kernels");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, config.device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, config.device),
             "cudaDeviceGetAttribute");
  hopper = capability >= 9 && has_hopper_code();
  if (hopper) check_cuda(static_cast<cudaError_t>(allow_bulk()), "cudaFuncSetAttribute");
  // All blocks of all ranks of this GPU must be resident at once: they wait for each other.
  const int sharing = std::max(1, config.sharing);
  one_shot_blocks = {one_shot.whole * processors / sharing, one_shot.shares * processors / sharing,
                     one_shot.twice * processors / sharing};
  blocks = std::min(kMaxStrands, each * processors / sharing);
  if (config.max_blocks > 0) blocks = std::min(blocks, config.max_blocks);
  if (blocks < 1)
    throw Error(ErrorKind::unsupported,
                std::to_string(config.sharing) + " ranks share GPU " +
                    std::to_string(config.device) + ", which holds " +
                    std::to_string(each * processors) +
                    " blocks of their kernels at a time: use fewer ranks or more GPUs");
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (cudaEvent_t* event : {&last_event, &branch_event})
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
  if (config.threads > 1) sharer.emplace();
  void* pinned = nullptr;
  check_cuda(cudaHostAlloc(&pinned, sizeof(Control), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  control = static_cast<Control*>(pinned);
  std::memset(pinned, 0, sizeof(Control));
}

// Where memory is made: ranks beside each other all come to it, so none has a kernel that waits.
void DeviceCommunicator::Impl::free_what_ended() {
  if (sharer.has_value() || !is_shared()) free_dropped_memory(config.device);
}

DeviceCommunicator::Impl::~Impl() { close(); }

// Waits for this rank's own kernels, then frees. (Errors are of no use to anybody here.)
void DeviceCommunicator::Impl::close() {
  if (birth.in_child()) return;  // the GPU, and the way to wake the watch, are the parent's
  const std::lock_guard alone(run_mutex);
  if (closed) return;
  const WhileCapturing relaxed;
  const OnDevice current(config.device, std::nothrow);
  const bool ended = !recorded || cudaEventSynchronize(last_event) == cudaSuccess;
  ended_well =
      ended && control != nullptr && *static_cast<volatile u32*>(&control->record.state) == 0;
  closed = true;
  watch.reset();  // till then: whom a kernel waits for may die
  copies_watch.reset();
  if (stream != nullptr) cudaStreamSynchronize(stream);  // what abort() writes to peers

  for (auto& [id, segment] : segments)  // symmetric buffers live as long as their arrays
    if (segment.buffer != 0) segment = {};
  for (auto& [key, program] : programs) drop_memory(config.device, program.memory, Home::device);
  for (void* p : scratches) drop_memory(config.device, p, Home::device);
  {
    std::lock_guard lock(reason_mutex);  // abort() may come from any thread
    world = {};
    drop_memory(config.device, control, Home::pinned);
    control = nullptr;
  }
  arenas.reset();
  progress.reset();
  sharer.reset();
  free_what_nobody_shares();
  for (const cudaEvent_t event : {last_event, branch_event})
    if (event != nullptr) cudaEventDestroy(event);
  if (stream != nullptr) cudaStreamDestroy(stream);
}

// ---- errors -------------------------------------------------------------------------------------

void DeviceCommunicator::Impl::check(bool before_call) {
  birth.check();
  bool gave_up = false;
  Leave why = Leave::none;
  {
    const std::lock_guard lock(reason_mutex);  // close() may come from any thread
    if (closed && !before_call && ended_well) return;
    if (closed || control == nullptr) throw Error(ErrorKind::closed, "this communicator is closed");
    gave_up = *static_cast<volatile u32*>(&control->record.state) != 0;
    why = static_cast<Leave>(*static_cast<volatile u32*>(&control->abort) >> kWhyShift);
  }
  // A peer that has ended is no matter if all calls with it have.
  if (!gave_up && (why == Leave::none || (why == Leave::peer_died && !before_call))) return;
  try {
    raise(gave_up, why);
  } catch (const Error& error) {
    if (calls != nullptr && !reported.exchange(true)) {
      const u64 number = gave_up ? epoch_of_record() : 0;
      const bool of_transfers = (number & kOfTransfers) != 0;
      calls->failed(number != 0 && !of_transfers ? number - kMeetings : 0);
      transfers->failed(of_transfers ? number & ~kOfTransfers : 0);
      recorder->report(name_of(error.kind()), error.what(), error.peer());
    }
    throw;
  }
}

u64 DeviceCommunicator::Impl::epoch_of_record() {
  const std::lock_guard lock(reason_mutex);
  return control == nullptr ? 0 : control->record.epoch;
}

// From the arena of a rank; false if it cannot be read: the error that is being reported must not
// be replaced by another.
bool DeviceCommunicator::Impl::read_arena(int rank, u64 at, std::size_t bytes, void* to) {
  const WhileCapturing relaxed;
  const OnDevice current(config.device);
  const unsigned char* arena = world.arena[rank];
  return arena != nullptr &&
         cudaMemcpyAsync(to, arena + at, bytes, cudaMemcpyDefault, stream) == cudaSuccess &&
         cudaStreamSynchronize(stream) == cudaSuccess;
}

// In words, what is known of a mismatch that a peer has found: the calls that the ranks have
// announced to this one and to that peer.
std::string DeviceCommunicator::Impl::differs() {
  const Record& record = control->record;
  if (static_cast<Leave>(record.leave) != Leave::peer_left || cause_of(record) != Leave::mismatch)
    return "";
  if (std::string words = refused(); !words.empty()) return words;
  if ((record.epoch & kOfTransfers) != 0) return "";
  const auto n = static_cast<std::size_t>(config.nranks);
  const u64 at =
      offsetof(State, arrivals) + (record.epoch & 1) * kMaxRanks * sizeof(device::Arrival);
  std::vector<std::string> calls(n);
  for (const int teller : {config.rank, record.peer}) {
    std::vector<device::Arrival> told(n);
    if (teller < 0 || !read_arena(teller, at, n * sizeof(told[0]), told.data())) continue;
    for (std::size_t q = 0; q < n; ++q)
      if (told[q].word >> 32 == (record.epoch & 0xffffffff))
        calls[q] = describe_call(told[q].signature[0], told[q].signature[1]);
  }
  std::string words;
  for (std::size_t q = 0; q < n; ++q)
    if (!calls[q].empty())
      words += (words.empty() ? "rank " : "; rank ") + std::to_string(q) + " is in " + calls[q];
  if (words.empty()) return words;
  return "the ranks are in different calls: " + words +
         ". Nothing of this call was written; the communicator cannot be used further on the GPU";
}

void DeviceCommunicator::Impl::raise(bool gave_up, Leave why) {
  std::atomic_thread_fence(std::memory_order_acquire);
  std::lock_guard lock(reason_mutex);
  if (control == nullptr) throw Error(ErrorKind::closed, "this communicator is closed");
  if (gave_up)
    raise_record(control->record, config.rank, last_signature.describe(),
                 {abort_reason, dead, differs()});
  throw Error(why == Leave::peer_died ? ErrorKind::peer_died
              : why == Leave::differ  ? ErrorKind::mismatch
                                      : ErrorKind::aborted,
              abort_reason, dead);
}

// Called by the watch's thread. Kernels that wait for the dead rank leave, and so do those that
// wait for them.
void DeviceCommunicator::Impl::died(int rank, pid_t process) {
  std::lock_guard lock(reason_mutex);
  if (control == nullptr || !abort_reason.empty()) return;
  dead = rank;
  abort_reason = "the process of rank " + std::to_string(rank) + " (pid " +
                 std::to_string(process) + ") ended";
  *static_cast<volatile u32*>(&control->abort) =
      static_cast<u32>(Leave::peer_died) << kWhyShift | static_cast<u32>(dead + 1) << kAboutShift;
}

// Kernels of this rank look at the abort word; peers that wait for a call that never comes look at
// their poison. Who aborts because of something that was found before passes that on: a death stays
// a death.
void DeviceCommunicator::Impl::abort(const std::string& reason, ErrorKind kind, int about) {
  if (birth.in_child()) return;
  std::lock_guard lock(reason_mutex);
  if (control == nullptr) return;
  if (abort_reason.empty()) abort_reason = reason;
  if (kind == ErrorKind::peer_died && dead < 0) dead = about;
  volatile u32& word = control->abort;
  auto why = static_cast<Leave>(word >> kWhyShift);
  if (*static_cast<volatile u32*>(&control->record.state) != 0) {
    std::atomic_thread_fence(std::memory_order_acquire);
    why = cause_of(control->record);
    about = control->record.about;
  } else if (why == Leave::none) {
    why = kind == ErrorKind::peer_died  ? Leave::peer_died
          : kind == ErrorKind::mismatch ? Leave::differ
                                        : Leave::aborted;
  }
  if (why == Leave::peer_died && about < 0) about = dead;
  const u32 told = static_cast<u32>(why) << kWhyShift | static_cast<u32>(about + 1) << kAboutShift;
  word = told;
  const WhileCapturing relaxed;
  const OnDevice current(config.device);
  const u32 poison = told | static_cast<u32>(config.rank + 1);
  for (int q = 0; q < config.nranks; ++q)
    if (q != config.rank) poison_rank(q, poison);
}

void DeviceCommunicator::Impl::poison_rank(int rank, u32 word) {
  if (world.arena[rank] != nullptr)
    cudaMemcpyAsync(world.arena[rank] + offsetof(State, progress) + offsetof(Progress, poison),
                    &word, sizeof word, cudaMemcpyDefault, stream);
}

void DeviceCommunicator::Impl::stop(const std::string& reason, ErrorKind kind) {
  abort(reason, kind, -1);
  std::lock_guard lock(reason_mutex);
  if (control == nullptr) return;
  const WhileCapturing relaxed;
  const OnDevice current(config.device);
  const u32 told = *static_cast<volatile u32*>(&control->abort);
  poison_rank(config.rank, told | static_cast<u32>(config.rank + 1));
  cudaStreamSynchronize(stream);
}

bool DeviceCommunicator::Impl::gave_up() {
  std::lock_guard lock(reason_mutex);  // close() may come from any thread
  return control != nullptr && *static_cast<volatile u32*>(&control->record.state) != 0;
}

// ---- the interface ------------------------------------------------------------------------------

DeviceCommunicator::DeviceCommunicator(const DeviceConfig& config)
    : impl_(std::make_unique<Impl>(config)) {}
DeviceCommunicator::~DeviceCommunicator() = default;

int DeviceCommunicator::blocks() const { return impl_->blocks; }
bool DeviceCommunicator::captured() const { return impl_->last_capture != 0; }
std::uint64_t DeviceCommunicator::exchanges() const { return impl_->exchanges; }

void DeviceCommunicator::allocate(Home home, int blocks) {
  const WhileCapturing relaxed;
  Impl& m = *impl_;
  const OnDevice current(m.config.device);
  m.watch.reset();
  {
    std::lock_guard lock(m.reason_mutex);  // abort() may come from any thread
    m.world = {};
  }
  m.arenas.reset();
  m.free_what_ended();
  m.home = home;
  m.blocks = blocks;
  m.arenas = std::make_unique<Arenas>(m.config.rank, m.config.nranks, m.config.device, home);
  m.arenas->allocate(make_geometry(m.config.nranks, blocks, home).bytes, m.stream);
  if (home == Home::device) return;
  m.progress = std::make_unique<Memory>(m.config.device, sizeof(Progress), Home::device);
  check_cuda(cudaMemsetAsync(m.progress->get(), 0, sizeof(Progress), m.stream), "cudaMemsetAsync");
  check_cuda(cudaStreamSynchronize(m.stream), "cudaStreamSynchronize");
}

std::uint64_t DeviceCommunicator::arena_bytes() const {
  return make_geometry(impl_->config.nranks, impl_->blocks, impl_->home).bytes;
}

std::string DeviceCommunicator::handle() const {
  const WhileCapturing relaxed;
  const OnDevice current(impl_->config.device);
  return impl_->arenas->handle();
}

void DeviceCommunicator::open(const std::vector<std::string>& handles) {
  const WhileCapturing relaxed;
  const OnDevice current(impl_->config.device);
  Impl& m = *impl_;
  m.arenas->map(handles);
  std::vector<ProcessWatch::Process> others;
  for (int q = 0; q < m.config.nranks; ++q)
    if (m.arenas->process(q) != getpid()) others.push_back({q, m.arenas->process(q)});
  if (!others.empty())
    m.watch = std::make_unique<ProcessWatch>(
        others, [&m](const ProcessWatch::Process& p) { m.died(p.rank, p.pid); });
  m.world.rank = m.config.rank;
  m.world.nranks = m.config.nranks;
  for (int q = 0; q < m.config.nranks; ++q) m.world.arena[q] = m.arenas->all()[q];
  void* mapped = nullptr;
  check_cuda(cudaHostGetDevicePointer(&mapped, m.control, 0), "cudaHostGetDevicePointer");
  m.world.control = static_cast<Control*>(mapped);
  static_assert(offsetof(State, progress) == 0);
  m.world.progress =
      reinterpret_cast<Progress*>(m.progress != nullptr ? m.progress->get() : m.arenas->own());
  m.world.timeout_ns = static_cast<u64>(std::min(m.config.timeout_s, 1e9) * 1e9);
  m.world.geometry = make_geometry(m.config.nranks, m.blocks, m.home);
  m.exchanges = 1;  // in the self-test
  // What peers must read here in the self-test.
  const u64 token = 0x9e3779b97f4a7c15ULL * static_cast<u64>(m.config.rank + 1);
  check_cuda(cudaMemcpyAsync(m.arenas->own() + offsetof(State, token), &token, sizeof token,
                             cudaMemcpyDefault, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(m.stream), "cudaStreamSynchronize");
}

void DeviceCommunicator::probe_write() {
  const WhileCapturing relaxed;
  Impl& m = *impl_;
  const OnDevice current(m.config.device);
  m.arenas->close_handle();
  u64 tokens[kMaxRanks];
  for (int q = 0; q < kMaxRanks; ++q) tokens[q] = 0x9e3779b97f4a7c15ULL * static_cast<u64>(q + 1);
  unsigned char* room = m.scratch(sizeof tokens + kMaxRanks * sizeof(u32));
  check_cuda(cudaMemcpyAsync(room, tokens, sizeof tokens, cudaMemcpyHostToDevice, m.stream),
             "cudaMemcpyAsync");
  check_cuda(static_cast<cudaError_t>(launch_probe(m.world, reinterpret_cast<const u64*>(room),
                                                   reinterpret_cast<u32*>(room + sizeof tokens),
                                                   m.stream)),
             "launching the self-test");
  check_cuda(cudaStreamSynchronize(m.stream), "the self-test");
  m.probe_copies();
}

std::string DeviceCommunicator::probe_check() {
  const WhileCapturing relaxed;
  Impl& m = *impl_;
  const OnDevice current(m.config.device);
  u32 wrong[kMaxRanks];
  u64 probe[kMaxRanks], moved[kMaxRanks];
  check_cuda(cudaMemcpyAsync(wrong, m.scratch(0) + kMaxRanks * sizeof(u64), sizeof wrong,
                             cudaMemcpyDeviceToHost, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaMemcpyAsync(probe, m.arenas->own() + offsetof(State, probe), sizeof probe,
                             cudaMemcpyDefault, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaMemcpyAsync(moved, m.arenas->own() + offsetof(State, moved), sizeof moved,
                             cudaMemcpyDefault, m.stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(m.stream), "cudaStreamSynchronize");
  for (int q = 0; q < m.config.nranks; ++q)
    m.writes_words = m.writes_words && (q == m.config.rank || moved[q] == m.exchanges);
  const std::string where = m.home == Home::device ? "GPU memory" : "pinned memory on the host";
  const u64 mine = 0x9e3779b97f4a7c15ULL * static_cast<u64>(m.config.rank + 1);
  std::string words;
  for (int q = 0; q < m.config.nranks; ++q) {
    const bool reads = wrong[q] == 0, written = probe[q] == (mine ^ static_cast<u64>(q));
    if (reads && written) continue;
    words += std::string{words.empty() ? "" : "; "} + "rank " + std::to_string(m.config.rank) +
             (reads ? " does not see what rank " + std::to_string(q) + " wrote to its " + where
                    : " does not read the " + where + " of rank " + std::to_string(q));
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

void DeviceCommunicator::record_to(std::shared_ptr<Recorder> recorder) {
  impl_->calls = &recorder->gpu();
  impl_->transfers = &recorder->gpu_transfers();
  impl_->recorder = std::move(recorder);
}

void DeviceCommunicator::define(const std::string& algorithm, const Schedule& schedule) {
  const std::lock_guard lock(impl_->run_mutex);
  impl_->prepared.clear();
  impl_->defined[{algorithm, schedule.collective}][schedule.world.root] = schedule;
}

bool DeviceCommunicator::keeps_lines() const { return impl_->arenas->all_by_nvlink(); }
void DeviceCommunicator::use_lines(bool all) { impl_->whole_lines = all; }
bool DeviceCommunicator::writes_words() const { return impl_->writes_words; }
void DeviceCommunicator::use_copies(bool all) {
  const std::lock_guard lock(impl_->run_mutex);
  impl_->prepared.clear();
  impl_->copies = all;
}

void DeviceCommunicator::run(const Call& call, const DeviceOptions& options,
                             std::uintptr_t stream) {
  impl_->run(call, options, reinterpret_cast<cudaStream_t>(stream));
}

void DeviceCommunicator::check() { impl_->check(false); }

bool DeviceCommunicator::idle() {
  Impl& m = *impl_;
  m.check(false);
  // Not while another thread puts a call there, or closes this.
  const std::unique_lock lock(m.run_mutex, std::try_to_lock);
  if (!lock) return false;
  if (m.closed) {
    m.check(false);
    return true;
  }
  if (!m.recorded) return true;
  const OnDevice current(m.config.device);
  const WhileCapturing relaxed;
  const std::uint64_t behind = m.calls->marked(), moved = m.transfers->marked();
  const cudaError_t state = cudaEventQuery(m.last_event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    m.calls->not_done(behind);
    m.transfers->not_done(moved);
    return false;
  }
  check_cuda(state, "a kernel");
  m.check(false);
  m.calls->done(behind);
  m.transfers->done(moved);
  return true;
}

void DeviceCommunicator::abort(const std::string& reason, ErrorKind kind, int about) {
  impl_->abort(reason, kind, about);
}

void DeviceCommunicator::stop(const std::string& reason, ErrorKind kind) {
  impl_->stop(reason, kind);
}

bool DeviceCommunicator::gave_up() { return impl_->gave_up(); }

void DeviceCommunicator::close() { impl_->close(); }

}  // namespace collectives
