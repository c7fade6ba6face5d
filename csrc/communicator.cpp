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

// FIFO channels: programs use 0 .. kProgramChannels - 1.
constexpr int kProgramChannels = 8;
constexpr int kControlChannel = 8;
constexpr int kPointToPointChannel = 9;

// The abort word: 1 + the local rank that gave up, the kind of its error, and a mark while its
// reason is being written.
constexpr std::uint32_t kUnfinished = 0x80000000u;
constexpr int kKindShift = 16;

// What programs may count on; every transport holds at least as many messages (checked below).
// Fixed, because all ranks must lower alike.
constexpr int kFifoDepth = 4;

constexpr milliseconds kPollPeersEvery{20};
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

std::uint64_t hash_of(const std::vector<std::uint64_t>& values) {
  std::uint64_t h = 0x9e3779b97f4a7c15ULL;
  for (const std::uint64_t v : values) h = (h ^ v) * 0xff51afd7ed558ccdULL + (h >> 29);
  return h | 1;
}

}  // namespace

std::function<void*()> Communicator::on_enter_slow;
std::function<void(void*)> Communicator::on_leave_slow;
std::function<void(void*&)> Communicator::on_tick;

// ---- work
// --------------------------------------------------------------------------------------------------------------

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

void Work::finish(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  done_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

// ---- life
// --------------------------------------------------------------------------------------------------------------

struct Communicator::Mapping {
  std::uint64_t id = 0;
  std::size_t bytes = 0;
  int fd = -1;
  std::uint64_t cookie = 0;
  std::byte* own = nullptr;
  std::vector<std::byte*> mapped;  // peers' parts that this process mapped

  ~Mapping() {
    for (std::byte* p : mapped) munmap(p, bytes);
    if (own != nullptr) munmap(own, bytes);
    if (fd >= 0) ::close(fd);
  }
};

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

void Communicator::abort(const std::string& reason) {
  give_up("aborted: " + reason);
  aborted_ = true;
  tell_peers(ErrorKind::aborted, reason);
}

// Tells all ranks, once, that this one leaves the common path, and why: their waits end at once
// with the same kind of error.
void Communicator::tell_peers(ErrorKind kind, const std::string& text) noexcept {
  const std::string whole = "rank " + std::to_string(config_.rank) + " gave up: " + text;
  if (config_.region) {
    const std::uint32_t word =
        (1 + config_.local_of[config_.rank]) | static_cast<std::uint32_t>(kind) << kKindShift;
    std::uint32_t nobody = 0;
    auto& shared = config_.region->abort_word();
    if (shared.compare_exchange_strong(nobody, word | kUnfinished)) {
      std::strncpy(config_.region->abort_reason(), whole.c_str(), Region::kAbortReason - 1);
      shared.store(word, std::memory_order_release);  // publishes the reason
    }
    for (int q = 0; q < config_.region->shape().nranks; ++q)
      config_.region->rank(q).doorbell.wake();
  }
  if (config_.mpi) config_.mpi->poison(whole);
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

void Communicator::fail(ErrorKind kind, const std::string& text) {
  give_up(text);
  tell_peers(kind, text);
  throw Error(kind, text);
}

std::string Communicator::broken_reason() const {
  std::lock_guard lock(reason_mutex_);
  return broken_reason_;
}

// ---- looking around while waiting
// -------------------------------------------------------------------------------------

namespace {
thread_local void* slow_token = nullptr;
}

void Communicator::enter_slow() {
  if (on_enter_slow) slow_token = on_enter_slow();
}

void Communicator::leave_slow() {
  if (on_leave_slow) on_leave_slow(slow_token);
  slow_token = nullptr;
}

void Communicator::check(const Where& where, steady_clock::time_point since) {
  if (gate_) gate_->look_around();
  check_peers(where, since);
}

// True if a rank of the region has given up.
bool Communicator::told_to_stop() const {
  if (!config_.region) return false;
  const std::uint32_t word = config_.region->abort_word().load(std::memory_order_acquire);
  return word != 0 && (word & kUnfinished) == 0;
}

void Communicator::raise_told(const std::string& doing) {
  const std::uint32_t word = config_.region->abort_word().load(std::memory_order_acquire);
  const std::string text = config_.region->abort_reason() + (" (" + doing + ")");
  give_up(text);
  // A death is a death for everybody; other reasons are the other rank's own.
  const auto kind = static_cast<ErrorKind>(word >> kKindShift);
  throw Error(kind == ErrorKind::peer_died ? kind : ErrorKind::aborted, text);
}

void Communicator::check_peers(const Where& where, steady_clock::time_point since) {
  const auto now = steady_clock::now();
  const auto place = [&] {
    std::string s = "rank " + std::to_string(config_.rank) + " waits for " + where.phase;
    if (where.peer >= 0) s += " of rank " + std::to_string(where.peer);
    if (where.channel >= 0) s += ", channel " + std::to_string(where.channel);
    if (where.step >= 0) s += ", step " + std::to_string(where.step);
    if (where.round >= 0) s += " (round " + std::to_string(where.round) + ")";
    if (where.expected != 0)
      s += ", epoch expected " + std::to_string(where.expected) + ", seen " +
           std::to_string(where.seen);
    return s;
  };
  if (aborted_) throw Error(ErrorKind::aborted, broken_reason() + " (" + place() + ")");
  if (told_to_stop()) raise_told(place());
  if (config_.mpi) {
    std::string text;
    int peer = -1;
    if (config_.mpi->poisoned(&text, &peer)) fail(ErrorKind::aborted, text + " (" + place() + ")");
  }
  const double waited = duration<double>(now - since).count();
  if (waited > config_.timeout_s) {
    const std::string text =
        "gave up after " + std::to_string(waited).substr(0, 6) + " s: " + place() +
        ". Raise the limit with timeout= or COLLECTIVES_TIMEOUT if the peer is only slow";
    fail(ErrorKind::deadline, text);
  }
  std::unique_lock lock(poll_mutex_);
  if (now - last_poll_ < kPollPeersEvery) return;
  last_poll_ = now;
  lock.unlock();
  if (on_tick) on_tick(slow_token);
  lock.lock();
  if (!config_.region) return;
  const int n = config_.region->shape().nranks, me = config_.local_of[config_.rank];
  if (pidfds_.empty() && !config_.threads) {
    pidfds_.assign(n, -1);
    for (int q = 0; q < n; ++q) {
      const int process = config_.region->rank(q).process.load(std::memory_order_acquire);
      if (q != me && process > 0)
        pidfds_[q] = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    }
  }
  for (int q = 0; q < n; ++q) {
    if (q == me) continue;
    RankArea& his = config_.region->rank(q);
    const auto state = static_cast<RankState>(his.state.load(std::memory_order_acquire));
    const std::string name = "rank " + std::to_string(numbers_[q]);
    if (state == RankState::closed) {
      // What it did before it closed is visible by now; only the second look can conclude that
      // nothing more will come.
      if (where.peer == numbers_[q] && ++closed_seen_ > 2)
        fail(ErrorKind::closed, name + " has closed the communicator while " + place());
      continue;
    }
    bool dead = state == RankState::dead;
    if (!dead && !config_.threads && q < static_cast<int>(pidfds_.size())) {
      const int process = his.process.load(std::memory_order_relaxed);
      if (pidfds_[q] >= 0) {
        pollfd p{pidfds_[q], POLLIN, 0};
        dead = poll(&p, 1, 0) == 1;
      } else if (process > 0) {
        dead = kill(process, 0) != 0 && errno == ESRCH;
      }
    }
    if (dead) {
      his.state.store(static_cast<std::uint32_t>(RankState::dead), std::memory_order_release);
      fail(ErrorKind::peer_died,
           name + (config_.threads ? "" : " (process " + std::to_string(his.process.load()) + ")") +
               " died while " + place());
    }
  }
}

// ---- calls
// -------------------------------------------------------------------------------------------------------------

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

// A call ended half-way: the ranks are out of step.
void Communicator::leave_path(ErrorKind kind, const std::string& text) {
  if (broken_) return;  // told already
  give_up(text);
  tell_peers(kind, text);
}

// The ranks are no longer in the same state: later calls raise.
void Communicator::give_up(const std::string& reason) {
  std::lock_guard lock(reason_mutex_);
  if (broken_) return;
  broken_reason_ = reason;
  broken_ = true;
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

// ---- asynchronous
// ------------------------------------------------------------------------------------------------------

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

// ---- point to point
// ----------------------------------------------------------------------------------------------------

PostedTransfer Communicator::post_send(int peer, std::uint32_t tag, Dtype dtype, const void* data,
                                       std::size_t bytes, bool background) {
  check_open();
  auto t = p2p_->post_send(peer, tag, dtype, data, bytes);
  if (background && !p2p_->done(t)) {
    std::lock_guard lock(queue_mutex_);
    background_p2p_ = true;
    wake_worker();
  }
  return t;
}

PostedTransfer Communicator::post_recv(int peer, std::uint32_t tag, Dtype dtype, void* data,
                                       std::size_t bytes, bool background) {
  check_open();
  auto t = p2p_->post_recv(peer, tag, dtype, data, bytes);
  if (background && !p2p_->done(t)) {
    std::lock_guard lock(queue_mutex_);
    background_p2p_ = true;
    wake_worker();
  }
  return t;
}

void Communicator::wait(const std::vector<PostedTransfer>& posted) {
  for (const PostedTransfer& t : posted) {
    const auto where = [&] {
      Where w;
      w.phase = t->source != nullptr ? "room for a message" : "a message";
      w.peer = t->peer;
      w.channel = kPointToPointChannel;
      return w;
    };
    p2p_waiter_->until(
        [&] {
          p2p_->progress();
          return p2p_->done(t);
        },
        where);
    if (t->peer != config_.rank && t->target == nullptr &&
        links_.to[t->peer] == config_.mpi.get() && config_.mpi) {
      SendPort& port = config_.mpi->send_port(t->peer, kPointToPointChannel);
      p2p_waiter_->until(
          [&] {
            config_.mpi->progress();
            return port.flushed();
          },
          where);
    }
  }
  for (const PostedTransfer& t : posted)
    if (t->error) std::rethrow_exception(t->error);
}

// ---- symmetric memory
// --------------------------------------------------------------------------------------------------

std::string Communicator::make_segment(std::size_t bytes) {
  check_open();
  auto mapping = std::make_shared<Mapping>();
  mapping->bytes = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  const bool shared = !config_.threads && config_.nranks > 1;
  if (shared) mapping->fd = make_memfd("collectives-symmetric", mapping->bytes);
  void* base = mmap(nullptr, mapping->bytes, PROT_READ | PROT_WRITE,
                    shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, mapping->fd, 0);
  if (base == MAP_FAILED)
    throw Error(ErrorKind::system, "cannot map " + std::to_string(mapping->bytes) +
                                       " bytes of symmetric memory: " + std::strerror(errno));
  mapping->own = static_cast<std::byte*>(base);
  mapping->cookie = random_cookie();
  pending_segment_ = mapping;
  if (shared) return memfd_handle(mapping->fd, mapping->cookie);
  return std::to_string(reinterpret_cast<std::uintptr_t>(base));
}

std::byte* Communicator::open_segment(std::uint64_t id, std::size_t bytes,
                                      const std::vector<std::string>& handles) {
  auto mapping = std::move(pending_segment_);
  if (!mapping || mapping->bytes < bytes)
    throw Error(ErrorKind::invalid, "open_segment without make_segment");
  mapping->id = id;
  if (direct_) {
    SymmetricSegment segment;
    segment.id = id;
    segment.bytes = mapping->bytes;
    segment.base.assign(numbers_.size(), nullptr);
    for (std::size_t q = 0; q < numbers_.size(); ++q) {
      if (numbers_[q] == config_.rank) {
        segment.base[q] = mapping->own;
      } else if (config_.threads) {
        segment.base[q] = reinterpret_cast<std::byte*>(
            static_cast<std::uintptr_t>(std::stoull(handles[numbers_[q]])));
      } else {
        std::uint64_t cookie = 0;
        const int fd = open_memfd(handles[numbers_[q]], &cookie);
        void* base = mmap(nullptr, mapping->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ::close(fd);
        if (base == MAP_FAILED)
          throw Error(ErrorKind::system,
                      std::string{"cannot map a peer's symmetric memory: "} + std::strerror(errno));
        mapping->mapped.push_back(static_cast<std::byte*>(base));
        segment.base[q] = static_cast<std::byte*>(base);
      }
    }
    segments_.push_back(std::move(segment));
  }
  std::byte* own = mapping->own;
  mappings_[id] = std::move(mapping);
  return own;
}

void Communicator::release_segment(std::uint64_t id) {
  segments_.erase(std::remove_if(segments_.begin(), segments_.end(),
                                 [&](const SymmetricSegment& s) { return s.id == id; }),
                  segments_.end());
  mappings_.erase(id);
}

}  // namespace collectives
