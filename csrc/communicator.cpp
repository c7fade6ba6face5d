#include "communicator.hpp"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace collectives {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// What programs may count on; every transport holds at least as many messages (checked below).
// Fixed, because all ranks must lower alike.
constexpr int kFifoDepth = 4;

constexpr std::size_t kMaxPlans = 512;

// Marks the communicator as in use by one thread; a second one is refused rather than interleaved.
// A plain load and store: this is on the path of every call, and has to find misuse, not to be a
// lock.
class Busy {
 public:
  explicit Busy(std::atomic<bool>& flag) : flag_(flag) {
    if (flag_.load(std::memory_order_relaxed))
      throw Error(ErrorKind::invalid,
                  "two threads called this communicator at the same time; give each its own with "
                  "duplicate(), or use async_op=True from one thread");
    flag_.store(true, std::memory_order_relaxed);
  }
  ~Busy() { flag_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& flag_;
};

double steady_seconds() { return duration<double>(steady_clock::now().time_since_epoch()).count(); }

std::uint64_t hash_of(const std::vector<std::uint64_t>& values) {
  std::uint64_t h = 0x9e3779b97f4a7c15ULL;
  for (const std::uint64_t v : values) h = (h ^ v) * 0xff51afd7ed558ccdULL + (h >> 29);
  return h | 1;
}

}  // namespace

std::function<void*()> Communicator::on_enter_slow;
std::function<void(void*)> Communicator::on_leave_slow;
std::function<void(void*&)> Communicator::on_tick;

// ---- work -------------------------------------------------------------------------------------

bool Work::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

bool Work::wait(double seconds) {
  std::unique_lock lock(mutex_);
  if (seconds < 0) {
    changed_.wait(lock, [this] { return done_; });
    return true;
  }
  return changed_.wait_for(lock, duration<double>(seconds), [this] { return done_; });
}

std::exception_ptr Work::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

std::pair<double, double> Work::span() const {
  std::lock_guard lock(mutex_);
  return {began_, ended_};
}

void Work::begin() {
  std::lock_guard lock(mutex_);
  began_ = steady_seconds();
}

void Work::finish(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  done_ = true;
  ended_ = steady_seconds();
  error_ = std::move(error);
  changed_.notify_all();
}

// ---- life -------------------------------------------------------------------------------------

Communicator::Communicator(CommunicatorConfig config) : config_(std::move(config)) {
  const int n = config_.nranks;
  links_.to.assign(n, nullptr);
  links_.max_channels = kProgramChannels;
  bool everyone = config_.region != nullptr;
  int local_rank = -1;
  if (config_.region) {
    numbers_.assign(config_.region->shape().nranks, -1);
    for (int r = 0; r < n; ++r) {
      if (config_.local_of[r] >= 0) numbers_[config_.local_of[r]] = r;
      everyone &= config_.local_of[r] >= 0;
    }
    local_rank = config_.local_of[config_.rank];
    shm_ = std::make_unique<ShmTransport>(config_.region, local_rank, config_.local_of,
                                          config_.threads, config_.tuning.crowded);
  }
  links_.slot_bytes = config_.slot_bytes;
  for (const Transport* t :
       {static_cast<Transport*>(shm_.get()), static_cast<Transport*>(config_.mpi.get())})
    if (t != nullptr && (t->depth() < kFifoDepth || t->slot_bytes() < links_.slot_bytes))
      throw Error(ErrorKind::invalid,
                  std::string{t->name()} + " FIFOs hold " + std::to_string(t->depth()) +
                      " messages of " + std::to_string(t->slot_bytes()) + " bytes; programs need " +
                      std::to_string(kFifoDepth) + " of " + std::to_string(links_.slot_bytes));
  for (int r = 0; r < n; ++r) {
    if (r == config_.rank) continue;
    const bool shared = shm_ && config_.local_of[r] >= 0;
    links_.to[r] =
        shared ? static_cast<Transport*>(shm_.get()) : static_cast<Transport*>(config_.mpi.get());
    if (links_.to[r] == nullptr)
      throw Error(ErrorKind::unsupported,
                  "rank " + std::to_string(r) + " shares no memory with rank " +
                      std::to_string(config_.rank) + " and there is no MPI between them");
  }
  Doorbell& doorbell =
      config_.region ? config_.region->rank(local_rank).doorbell : lonely_doorbell_;
  waiter_ = std::make_unique<Waiter>(*this, doorbell, config_.tuning.spins, config_.tuning.crowded);
  p2p_waiter_ = std::make_unique<Waiter>(transfer_watch_, doorbell, config_.tuning.spins,
                                         config_.tuning.crowded);
  engine_ = std::make_unique<HostEngine>(*waiter_);
  p2p_ = std::make_unique<PointToPoint>(links_, config_.rank, kPointToPointChannel);
  if (config_.region) {
    RankArea& mine = config_.region->rank(local_rank);
    mine.process.store(static_cast<std::int32_t>(getpid()), std::memory_order_relaxed);
    mine.state.store(static_cast<std::uint32_t>(RankState::alive), std::memory_order_release);
    if (everyone && n > 1) {
      if (numbers_.size() > static_cast<std::size_t>(DirectHost::kMaxLocal))
        throw Error(ErrorKind::unsupported,
                    std::to_string(numbers_.size()) + " ranks of one node; at most " +
                        std::to_string(DirectHost::kMaxLocal) + " can share memory");
      gate_ = std::make_unique<Gate>(config_.region, local_rank, numbers_, config_.tuning.crowded);
      direct_ = std::make_unique<DirectHost>(*gate_, *waiter_, config_.tuning,
                                             DirectHost::Reach{config_.threads, config_.can_pull});
    }
  }
}

Communicator::~Communicator() {
  close();
  for (const int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

void Communicator::close() {
  if (closed_.exchange(true)) return;
  {
    std::lock_guard lock(queue_mutex_);
    stop_ = true;
    queue_changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (config_.region) {
    RankArea& mine = config_.region->rank(config_.local_of[config_.rank]);
    mine.state.store(static_cast<std::uint32_t>(RankState::closed), std::memory_order_release);
    for (int q = 0; q < config_.region->shape().nranks; ++q)
      config_.region->rank(q).doorbell.wake();
  }
}

std::string Communicator::transports() const {
  std::string s = shm_ ? std::string{shm_->name()} : "";
  if (config_.mpi) s += s.empty() ? "mpi" : "+mpi";
  return s.empty() ? "self" : s;
}

void Communicator::check_open() const {
  if (closed_) throw Error(ErrorKind::closed, "this communicator is closed");
  if (broken_)
    throw Error(ErrorKind::aborted,
                "this communicator cannot be used any more: " + broken_reason());
}

// ---- calls ------------------------------------------------------------------------------------

int Communicator::intern(const std::string& algorithm) {
  const auto at = std::find(names_.begin(), names_.end(), algorithm);
  if (at != names_.end()) return static_cast<int>(at - names_.begin());
  if (algorithm.size() >= sizeof Signature::algorithm)
    throw Error(ErrorKind::invalid, "algorithm name '" + algorithm + "' is longer than " +
                                        std::to_string(sizeof Signature::algorithm - 1) +
                                        " characters");
  names_.push_back(algorithm);
  direct_shape_.push_back(algorithm == "direct_one_shot"   ? 1
                          : algorithm == "direct_two_shot" ? 2
                                                           : 0);
  return static_cast<int>(names_.size()) - 1;
}

void Communicator::define(const std::string& algorithm, const Schedule& schedule) {
  defined_[{algorithm, schedule.collective}].insert_or_assign(schedule.world.root, schedule);
}

Signature Communicator::sign(const Call& call, const Options& options) const {
  Signature s;
  s.collective = static_cast<std::uint8_t>(call.collective);
  s.root = rooted(call.collective) ? call.root : 0;
  if (options.algorithm >= 0) {
    const std::string& name = names_[options.algorithm];
    std::memcpy(s.algorithm, name.data(), std::min(name.size(), sizeof s.algorithm - 1));
  }
  if (call.collective == Collective::barrier) return s;
  s.dtype = static_cast<std::uint8_t>(call.dtype);
  if (reduces(call.collective)) s.op = static_cast<std::uint8_t>(call.op);
  s.order = static_cast<std::uint8_t>(options.order);
  switch (call.collective) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      s.count = call.in.total(config_.nranks);
      if (call.in.is_table()) s.counts_hash = hash_of(call.in.lengths());
      break;
    case Collective::all_gather:
    case Collective::gather:
      s.count = call.out.total(config_.nranks);
      if (call.out.is_table()) s.counts_hash = hash_of(call.out.lengths());
      break;
    case Collective::all_to_all:
      // Uneven: each pair has its own count, which no third rank knows.
      if (!call.in.is_table()) s.count = call.in.total(config_.nranks);
      break;
    default:
      s.count = call.count;
  }
  return s;
}

void Communicator::run(const Call& call, const Options& options) {
  check_open();
  if (told_to_stop()) raise_told("rank " + std::to_string(config_.rank) + " began a call");
  if (queued_.load(std::memory_order_acquire) != 0) {
    const auto work = submit(call, options);
    waiter_->until([&] { return work->done(); },
                   [] { return Where{"earlier asynchronous calls"}; });
    if (work->error()) std::rethrow_exception(work->error());
    return;
  }
  Busy busy(busy_);
  execute(call, options);
}

void Communicator::execute(const Call& call, const Options& options) {
  ++calls_;
  closed_seen_ = 0;
  if (call.op == Op::premul_sum && reduces(call.collective)) {
    const std::uint64_t count =
        call.collective == Collective::reduce_scatter ? call.in.total(config_.nranks) : call.count;
    std::vector<std::byte> scaled(count * size_of(call.dtype));
    scale(call.dtype, scaled.data(), call.input, count, options.factor[0], options.factor[1]);
    Call scaled_call = call;
    scaled_call.input = scaled.data();
    return dispatch(scaled_call, options);
  }
  dispatch(call, options);
}

void Communicator::dispatch(const Call& call, const Options& options) {
  if (config_.nranks == 1) return run_alone(call, options);
  const bool again = options.algorithm == last_.algorithm && options.order == last_.order &&
                     call.collective == last_.collective && call.dtype == last_.dtype &&
                     call.op == last_.op && call.root == last_.root && call.count == last_.count &&
                     !Layout::blocked(call.collective);
  if (!again) {
    last_ = {options.algorithm, options.order, call.collective,     call.dtype, call.op,
             call.root,         call.count,    sign(call, options), 0};
    last_.hash = last_.signature.hash();
  }
  const Signature& signature = last_.signature;
  const std::uint64_t hash = last_.hash;
  try {
    if (direct_ && (options.algorithm == kDefault || direct_shape_[options.algorithm] != 0))
      direct_->run(call, options.algorithm != kDefault && direct_shape_[options.algorithm] == 2,
                   signature, hash, segments_);
    else if (options.algorithm == kDefault)
      agree(signature, hash, 0);  // which is a barrier
    else
      run_general(call, options, signature, hash);
  } catch (const Error& error) {
    if (gate_) gate_->end();
    const bool before_data =
        error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::unsupported;
    if (!before_data) leave_path(error.kind(), error.what());
    throw;
  } catch (const std::exception& error) {  // a signal handler's exception, no memory
    if (gate_) gate_->end();
    leave_path(ErrorKind::aborted, error.what());
    throw;
  }
}

void Communicator::run_alone(const Call& call, const Options&) {
  const std::size_t e = size_of(call.dtype);
  std::uint64_t count = call.count;
  if (Layout::blocked(call.collective)) count = std::max(call.in.total(1), call.out.total(1));
  if (call.collective != Collective::barrier && call.input != call.output && count != 0)
    std::memmove(call.output, call.input, count * e);
}

const Communicator::Lowered& Communicator::lowered(const ProgramKey& key) {
  const auto found = programs_.find(key);
  if (found != programs_.end()) return found->second;
  const std::string& name = names_[key.algorithm];
  Schedule schedule;
  const auto custom = defined_.find({name, key.collective});
  if (custom != defined_.end()) {
    const auto at = custom->second.find(key.root);
    if (at == custom->second.end())
      throw Error(ErrorKind::unsupported,
                  "algorithm '" + name + "' was not defined for root " + std::to_string(key.root));
    schedule = at->second;
  } else {
    World world;
    world.nranks = config_.nranks;
    world.root = key.root;
    world.node = config_.node;
    schedule = build_schedule(name, key.collective, world);
  }
  Lowered result;
  result.nchunks = schedule.nchunks;
  if (key.collective == Collective::all_to_all)
    for (const Round& round : schedule.rounds)
      for (const Transfer& t : round) result.forwards |= t.chunk != t.src * config_.nranks + t.dst;
  result.program =
      std::make_shared<const RankProgram>(lower(schedule, config_.rank, key.order, kFifoDepth));
  if (static_cast<int>(result.program->channels.size()) > kProgramChannels)
    throw Error(ErrorKind::unsupported,
                "algorithm '" + name + "' uses " + std::to_string(result.program->channels.size()) +
                    " channels; at most " + std::to_string(kProgramChannels) + " exist");
  return programs_.emplace(key, std::move(result)).first->second;
}

// All ranks agree that they are in the same call; returns the largest `amount` of any.
std::uint64_t Communicator::agree(const Signature& signature, std::uint64_t hash,
                                  std::uint64_t amount) {
  if (gate_) {
    gate_->begin(signature, hash);
    gate_->announce(0, amount);
    gate_->meet(*waiter_);
    for (int q = 0; q < gate_->size(); ++q) amount = std::max(amount, gate_->arrival(q).amount);
    gate_->end();
    return amount;
  }
  // Dissemination: after ceil(log2 n) rounds every rank knows the smallest and the largest hash of
  // all.
  struct Message {
    std::uint64_t call, amount;
    std::uint64_t hash[2];
    std::int32_t rank[2];
    Signature signature[2];
  };
  const std::uint64_t call = ++control_calls_;
  Message mine{call, amount, {hash, hash}, {config_.rank, config_.rank}, {signature, signature}};
  const int n = config_.nranks;
  for (int d = 1; d < n; d *= 2) {
    const int to = (config_.rank + d) % n, from = (config_.rank - d + n) % n;
    SendPort& out = links_.to[to]->send_port(to, kControlChannel);
    RecvPort& in = links_.to[from]->recv_port(from, kControlChannel);
    in.expect(1);
    const auto where = [&](int peer) {
      return [&, peer] {
        Where w;
        w.phase = "the arrival";
        w.peer = peer;
        w.expected = call;
        return w;
      };
    };
    char* slot = nullptr;
    waiter_->until([&] { return (slot = out.acquire(sizeof mine)) != nullptr; }, where(to));
    std::memcpy(slot, &mine, sizeof mine);
    out.commit({sizeof mine, 0, call});
    Header header;
    const char* message = nullptr;
    waiter_->until(
        [&] {
          links_.to[from]->progress();
          return (message = in.peek(&header)) != nullptr;
        },
        where(from));
    Message his;
    std::memcpy(&his, message, sizeof his);
    in.release();
    mine.amount = std::max(mine.amount, his.amount);
    const auto take = [&](int side) {
      mine.hash[side] = his.hash[side];
      mine.rank[side] = his.rank[side];
      mine.signature[side] = his.signature[side];
    };
    if (his.hash[0] < mine.hash[0]) take(0);
    if (his.hash[1] > mine.hash[1]) take(1);
  }
  if (mine.hash[0] != mine.hash[1])
    throw Error(ErrorKind::mismatch,
                "the ranks disagree about call " + std::to_string(call) +
                    " of this communicator: rank " + std::to_string(mine.rank[0]) + ": " +
                    mine.signature[0].describe() + "; rank " + std::to_string(mine.rank[1]) + ": " +
                    mine.signature[1].describe() +
                    ". Nothing was written; the communicator stays usable");
  return mine.amount;
}

void Communicator::run_general(const Call& call, const Options& options, const Signature& signature,
                               std::uint64_t hash) {
  const int n = config_.nranks;
  const std::size_t e = size_of(call.dtype);
  const bool uneven_pairs = call.collective == Collective::all_to_all && call.in.is_table();
  std::uint64_t longest = std::max(call.in.longest(n), call.out.longest(n));
  // The program is made first: an algorithm that cannot run raises before the peers are asked.
  const ProgramKey program_key{options.algorithm, call.collective,
                               rooted(call.collective) ? call.root : 0, options.order};
  const Lowered& low = lowered(program_key);
  if (uneven_pairs && low.forwards)
    throw Error(ErrorKind::unsupported,
                "algorithm '" + names_[options.algorithm] +
                    "' passes blocks through ranks that do not know their lengths; "
                    "all_to_all_v needs one that sends directly (direct_two_shot)");
  longest = agree(signature, hash, longest);
  if (call.collective != Collective::barrier && signature.count == 0 && !uneven_pairs) return;
  if (uneven_pairs && longest == 0) return;

  const auto make = [&] {
    const std::uint64_t align = std::max<std::uint64_t>(1, 64 / e);
    const std::uint64_t cap = links_.slot_bytes / low.program->max_message_pieces / e;
    if (cap == 0)
      throw Error(ErrorKind::unsupported, "algorithm '" + names_[options.algorithm] + "' sends " +
                                              std::to_string(low.program->max_message_pieces) +
                                              " chunks in one message, too many for slots of " +
                                              std::to_string(links_.slot_bytes) + " bytes");
    std::uint64_t segment = std::min<std::uint64_t>(
        cap, std::max<std::uint64_t>(align, config_.tuning.segment_bytes / e));
    if (segment > align) segment = segment / align * align;
    Layout layout(call, config_.rank, n, low.nchunks, segment, longest);
    const int channels = std::max<int>(1, static_cast<int>(low.program->channels.size()));
    const int lanes = std::max(1, std::min(config_.tuning.lanes, links_.max_channels / channels));
    return std::make_unique<HostPlan>(low.program, std::move(layout), call, links_, lanes, n);
  };
  const std::uint64_t tag = hash * 0x9e3779b97f4a7c15ULL + calls_;
  try {
    if (call.in.is_table() || call.out.is_table()) {
      const auto plan = make();
      engine_->run(*plan, call, tag);
      return;
    }
    const PlanKey key{program_key, call.dtype, signature.count, 0};
    auto& plan = plans_[key];
    if (!plan) {
      if (plans_.size() > kMaxPlans) {
        plans_.clear();
        auto& again = plans_[key];
        again = make();
        engine_->run(*again, call, tag);
        return;
      }
      plan = make();
    }
    engine_->run(*plan, call, tag);
  } catch (const Error& error) {
    leave_path(error.kind(), error.what());
    throw;
  }
}

// ---- asynchronous -----------------------------------------------------------------------------

std::shared_ptr<Work> Communicator::submit(Call call, Options options) {
  check_open();
  auto work = std::make_shared<Work>();
  std::lock_guard lock(queue_mutex_);
  queued_.fetch_add(1, std::memory_order_relaxed);
  queue_.push_back({std::move(call), options, work});
  wake_worker();
  return work;
}

void Communicator::wake_worker() {
  if (!thread_.joinable()) thread_ = std::thread([this] { worker(); });
  queue_changed_.notify_all();
}

void Communicator::worker() {
  std::unique_lock lock(queue_mutex_);
  for (;;) {
    if (queue_.empty() && !background_p2p_) {
      if (stop_) return;
      queue_changed_.wait(lock);
      continue;
    }
    if (!queue_.empty()) {
      Job job = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      job.work->begin();
      try {
        Busy busy(busy_);
        execute(job.call, job.options);
      } catch (...) {
        error = std::current_exception();
      }
      queued_.fetch_sub(1, std::memory_order_release);
      job.work->finish(error);
      lock.lock();
      continue;
    }
    lock.unlock();
    const bool moved = p2p_->progress();
    const bool idle = p2p_->idle();
    lock.lock();
    if (idle) background_p2p_ = false;
    if (stop_) return;
    if (!moved && !idle) queue_changed_.wait_for(lock, std::chrono::microseconds(50));
  }
}

}  // namespace collectives
