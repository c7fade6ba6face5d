// The life of a communicator, and its calls. Trouble is in communicator_failures.cpp, sends,
// receives and symmetric memory in communicator_memory.cpp, asynchronous calls in
// communicator_queue.cpp, what calls on a GPU's memory by MPI need besides in
// communicator_straight.cpp.
#include "communicator.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "busy.hpp"
#include "errors.hpp"
#include "never_free.hpp"

namespace collectives {
namespace {

// Bytes of a straight call's segment at least, if the call has as many: some dozen microseconds of
// a fast network, as a kernel takes to be launched and seen to end. Not measured between real
// nodes.
constexpr std::size_t kStraightSegment = 128 << 10;

constexpr std::chrono::milliseconds kReadersLeaveWithin{1000};
constexpr std::size_t kMaxPlans = 512;
constexpr int kDefined = 4;              // in direct_shape_: an algorithm of the user's
constexpr std::size_t kMaxNames = 1024;  // of algorithms; the room is reserved

// The composition that Assembly does by hand where it is small.
constexpr const char* kByNode = "hierarchical(direct_two_shot, direct_one_shot)";

// True if two numberings part the ranks alike.
bool parted_alike(const std::vector<int>& one, const std::vector<int>& other) {
  if (one.size() != other.size()) return false;
  std::map<int, int> there, back;
  for (std::size_t r = 0; r < one.size(); ++r) {
    if (there.emplace(one[r], other[r]).first->second != other[r]) return false;
    if (back.emplace(other[r], one[r]).first->second != one[r]) return false;
  }
  return true;
}

}  // namespace

std::uint64_t hash_of(const std::vector<std::uint64_t>& counts) {
  std::uint64_t h = 0x9e3779b97f4a7c15ULL;
  for (const std::uint64_t c : counts) h = (h ^ c) * 0xff51afd7ed558ccdULL + (h >> 29);
  return h | 1;
}

void* (*Communicator::on_enter_slow)() = nullptr;
void (*Communicator::on_leave_slow)(void*) = nullptr;
void (*Communicator::on_tick)(void*&) = nullptr;

// ---- life -------------------------------------------------------------------------------------

Communicator::Communicator(CommunicatorConfig config)
    : config_(std::move(config)), timeout_s_(config_.timeout_s) {
  const int n = config_.nranks;
  names_.reserve(kMaxNames);
  direct_shape_.reserve(kMaxNames);
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
  const Waiter::Manner manner{config_.tuning.spins, config_.tuning.crowded, config_.mpi != nullptr};
  waiter_ = std::make_unique<Waiter>(*this, doorbell, manner);
  p2p_waiter_ = std::make_unique<Waiter>(transfer_watch_, doorbell, manner);
  recorder_ = std::make_shared<Recorder>(Recorder::Identity{
      config_.name, config_.rank, config_.nranks, transports(), config_.timeout_s});
  engine_ = std::make_unique<HostEngine>(*waiter_, std::make_unique<HostHands>());
  groups_are_nodes_ = parted_alike(config_.group, config_.node);
  if (n > 1)
    assembly_ =
        std::make_unique<Assembly>(links_, *waiter_, config_.rank, config_.group, kControlChannel);
  p2p_ = std::make_unique<PointToPoint>(links_, config_.rank, kPointToPointChannel);
  if (config_.region) {
    liveness_ = std::make_shared<Liveness>(config_.region, local_rank, config_.threads);
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
      gate_->record_to(recorder_.get());
      council_ = std::make_shared<Council>(config_.region, liveness_, local_rank);
    }
  }
}

void Communicator::watch_peers() {
  if (liveness_) liveness_->watch();
}

Communicator::~Communicator() { close(); }

void Communicator::end_queue() {
  if (birth_.in_child()) return;
  {
    std::lock_guard lock(queue_mutex_);
    stop_ = true;
    queue_changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (transfer_thread_.joinable()) transfer_thread_.join();
  p2p_->stop();  // the arrays of transfers that nobody waits for may go now
  over_ = true;
}

void Communicator::close() {
  if (birth_.in_child() || closed_.exchange(true)) return;
  end_queue();
  // (Plans stay: another thread may be in a call.)
  straight_.reset();  // and its memory on the GPU, which the queue's thread alone uses
  recorder_->closed();
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
  birth_.check();
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
  if (names_.size() == kMaxNames)
    throw Error(ErrorKind::invalid, "more than " + std::to_string(kMaxNames) +
                                        " different algorithms on one communicator");
  recorder_->name_algorithm(names_.size(), algorithm);
  names_.push_back(algorithm);
  direct_shape_.push_back(algorithm == "direct_one_shot"   ? 1
                          : algorithm == "direct_two_shot" ? 2
                          : algorithm == kByNode           ? 3
                                                           : 0);
  return static_cast<int>(names_.size()) - 1;
}

void Communicator::define(const std::string& algorithm, const Schedule& schedule) {
  const int number = intern(algorithm);
  std::lock_guard lock(defined_mutex_);
  defined_[{algorithm, schedule.collective}].insert_or_assign(
      schedule.world.root, Defined{schedule, signed_name(schedule)});
  direct_shape_[number] = kDefined;
}

Signature Communicator::sign(const Call& call, const Options& options) const {
  Signature s;
  s.collective = static_cast<std::uint8_t>(call.collective);
  s.root = rooted(call.collective) ? call.root : 0;
  if (options.algorithm >= 0) {
    const auto put = [&](const std::string& name) {
      std::memcpy(s.algorithm, name.data(), std::min(name.size(), sizeof s.algorithm - 1));
    };
    if (direct_shape_[options.algorithm] != kDefined) {
      put(names_[options.algorithm]);
    } else {
      std::lock_guard lock(defined_mutex_);
      const std::string& name = names_[options.algorithm];
      const auto roots = defined_.find({name, call.collective});
      const bool known = roots != defined_.end() && roots->second.count(s.root) != 0;
      put(known ? roots->second.at(s.root).name : name);
    }
  }
  if (options.on_device) s.order |= Signature::kOnDevice;
  if (options.agreed != nullptr) s.order |= Signature::kInSlices;
  if (call.collective == Collective::barrier) return s;
  s.dtype = static_cast<std::uint8_t>(call.dtype);
  if (reduces(call.collective)) s.op = static_cast<std::uint8_t>(call.op);
  s.order |= static_cast<std::uint8_t>(options.order);
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
      if (call.in.is_table())
        s.order |= Signature::kUneven;
      else
        s.count = call.in.total(config_.nranks);
      break;
    default:
      s.count = call.count;
      s.counts_hash = options.parts;
  }
  return s;
}

void Communicator::run(const Call& call, const Options& options, bool lengthy) {
  check_open();
  look("began a call");
  if (queued_.load(std::memory_order_acquire) != 0) {
    const auto work = submit(call, options);
    // Not the waiter of calls, which the queue's thread may be using.
    try {
      // Each call before this one has a deadline of its own.
      while (!work->done()) {
        const std::uint64_t before = ended_.load(std::memory_order_acquire);
        p2p_waiter_->until(
            [&] { return work->done() || ended_.load(std::memory_order_acquire) != before; },
            [] { return Where{"earlier asynchronous calls"}; });
      }
    } catch (const Error& error) {
      leave_queued(*work, error);
      if (work->error()) throw;
      return;  // it had ended well when this thread heard of what came after it
    } catch (const std::exception& error) {  // a signal handler's exception
      leave_queued(*work, error);
      throw;
    }
    if (work->error()) std::rethrow_exception(work->error());
    return;
  }
  Busy busy(busy_);
  const Lengthy scope(lengthy ? this : nullptr);
  ++issued_;
  execute(call, options);
}

// The caller's arrays go when `run` returns, so the queue must have left the call by then: it does
// at once, as all calls raise from here on.
void Communicator::leave_queued(Work& work, const std::exception& error) {
  leave_path(ErrorKind::aborted, error.what());
  work.wait(-1);
}

void Communicator::execute(const Call& call, const Options& options) {
  ++calls_;
  const std::uint64_t agreed = agreed_;
  recorder_->begin(calls_, call, options.algorithm, options.order);
  if (Layout::blocked(call.collective))
    recorder_->count(std::max(call.in.total(config_.nranks), call.out.total(config_.nranks)));
  try {
    run_recorded(call, options);
  } catch (const Error& error) {
    recorder_->failed();
    note_error(name_of(error.kind()), error.what(), error.peer());
    // What is refused before the peers hear of it is no call of theirs.
    if (error.kind() == ErrorKind::unsupported && agreed_ == agreed) --calls_;
    throw;
  } catch (const std::exception& error) {
    recorder_->failed();
    note_error("interrupted", error.what(), -1);
    throw;
  }
  recorder_->done();
}

void Communicator::note_error(const char* kind, const std::string& text, int peer) {
  recorder_->report(kind, text, peer);
}

void Communicator::run_recorded(const Call& call, const Options& options) {
  struct Scaled {
    HostEngine& engine;
    std::vector<std::byte> bytes;
    ~Scaled() {
      if (engine.lends()) never_free(std::move(bytes));
    }
  } scaled{*engine_, {}};
  try {
    if (call.op == Op::premul_sum && reduces(call.collective) && options.agreed == nullptr) {
      const std::uint64_t count = call.collective == Collective::reduce_scatter
                                      ? call.in.total(config_.nranks)
                                      : call.count;
      scaled.bytes.resize(count * size_of(call.dtype));
      scale(call.dtype, scaled.bytes.data(), call.input, count, options.factor[0],
            options.factor[1]);
      Call scaled_call = call;
      scaled_call.input = scaled.bytes.data();
      return dispatch(scaled_call, options);
    }
    dispatch(call, options);
  } catch (const Error& error) {
    const bool before_data =
        error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::unsupported;
    leave_call(before_data, error.kind(), error.what());
    throw;
  } catch (const std::exception& error) {  // a signal handler's exception, no memory
    leave_call(false, ErrorKind::aborted, error.what());
    throw;
  }
}

// After a call that ended half-way, or before any data moved, while the caller's arrays are there.
void Communicator::leave_call(bool before_data, ErrorKind kind, const std::string& text) {
  if (gate_) gate_->end();
  if (config_.nranks == 1) return;  // nobody is out of step
  if (!before_data) leave_path(kind, text);
  if (!direct_ || !broken_) return;
  tell_region();  // another thread that broke this may not have come to that yet
  direct_->wait_for_readers([this](int q) { return liveness_->left(q) || liveness_->dead(q); },
                            kReadersLeaveWithin);
}

void Communicator::dispatch(const Call& call, const Options& options) {
  if (config_.nranks == 1) return run_alone(call, options);
  const bool again = options.algorithm == last_.algorithm && options.order == last_.order &&
                     call.collective == last_.collective && call.dtype == last_.dtype &&
                     call.op == last_.op && call.root == last_.root && call.count == last_.count &&
                     options.parts == last_.parts && options.on_device == last_.on_device &&
                     (options.agreed != nullptr) == last_.agreement &&
                     !Layout::blocked(call.collective);
  if (!again) {
    last_ = {options.algorithm,
             options.order,
             call.collective,
             call.dtype,
             call.op,
             call.root,
             call.count,
             options.parts,
             options.on_device,
             options.agreed != nullptr,
             sign(call, options),
             0};
    last_.hash = last_.signature.hash();
  }
  const Signature& signature = last_.signature;
  const std::uint64_t hash = last_.hash;
  const int shape = options.algorithm == kDefault ? 0 : direct_shape_[options.algorithm];
  const bool direct = shape == 1 || shape == 2;
  if (options.agreed != nullptr)
    *options.agreed = agree(signature, hash, *options.agreed);
  else if (options.straight)
    run_general(call, options, signature, hash);
  else if (direct_ && (options.algorithm == kDefault || direct))
    direct_->run(call, shape == 2, signature, hash, segments_now());
  else if (options.algorithm == kDefault)
    agree(signature, hash, 0);  // which is a barrier
  else if (direct && assembly_->fits(call, config_.tuning.assembled_max))
    assembly_->run(call, signature, hash);
  else if (shape == 3 && !direct_ && groups_are_nodes_ &&
           call.collective == Collective::all_reduce && options.order == Order::any &&
           assembly_->fits_by_group(call, config_.tuning.assembled_by_node_max))
    assembly_->all_reduce_by_group(call, signature, hash);
  else
    run_general(call, options, signature, hash);
}

void Communicator::run_alone(const Call& call, const Options&) {
  const std::size_t e = size_of(call.dtype);
  std::uint64_t count = call.count;
  if (Layout::blocked(call.collective)) count = std::max(call.in.total(1), call.out.total(1));
  if (call.collective != Collective::barrier && call.input != call.output && count != 0)
    std::memmove(call.output, call.input, count * e);
}

Schedule Communicator::schedule_of(const ProgramKey& key) {
  const std::string& name = names_[key.algorithm];
  {
    std::lock_guard lock(defined_mutex_);
    const auto roots = defined_.find({name, key.collective});
    if (roots != defined_.end()) {
      const auto at = roots->second.find(key.root);
      if (at == roots->second.end())
        throw Error(ErrorKind::unsupported, "algorithm '" + name + "' was not defined for root " +
                                                std::to_string(key.root));
      return at->second.schedule;
    }
  }
  World world;
  world.nranks = config_.nranks;
  world.root = key.root;
  world.node = config_.node;
  return build_schedule(name, key.collective, world);
}

Communicator::Lowered& Communicator::lowered(const ProgramKey& key) {
  const auto found = programs_.find(key);
  if (found != programs_.end()) return found->second;
  const Schedule schedule = schedule_of(key);
  Lowered result;
  result.nchunks = schedule.nchunks;
  if (key.collective == Collective::all_to_all)
    for (const Round& round : schedule.rounds)
      for (const Transfer& t : round) result.forwards |= t.chunk != t.src * config_.nranks + t.dst;
  result.program =
      std::make_shared<const RankProgram>(lower(schedule, config_.rank, key.order, kFifoDepth));
  if (static_cast<int>(result.program->channels.size()) > kProgramChannels)
    throw Error(ErrorKind::unsupported, "algorithm '" + names_[key.algorithm] + "' uses " +
                                            std::to_string(result.program->channels.size()) +
                                            " channels; at most " +
                                            std::to_string(kProgramChannels) + " exist");
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
  const std::uint64_t most = assembly_->meet(signature, hash, amount);
  recorder_->running();
  return most;
}

// Elements of the longest chunk of a call.
std::uint64_t Communicator::longest_chunk(const Call& call, const Lowered& low,
                                          std::uint64_t longest) const {
  const auto chunks = static_cast<std::uint64_t>(low.nchunks);
  if (!Layout::blocked(call.collective)) return call.count / chunks;
  if (call.collective == Collective::all_to_all) return longest;
  return longest / std::max<std::uint64_t>(1, chunks / config_.nranks);
}

std::unique_ptr<HostPlan> Communicator::make_plan(const Call& call, const Lowered& low,
                                                  const std::string& algorithm,
                                                  std::uint64_t longest, bool straight) {
  const int n = config_.nranks;
  const std::size_t e = size_of(call.dtype);
  const Links& links = straight ? straight_->links : links_;
  const std::uint64_t align = std::max<std::uint64_t>(1, 64 / e);
  std::uint64_t cap = links.slot_bytes / low.program->max_message_pieces / e;
  if (straight) cap = straight_segment(low, e);
  if (cap == 0)
    throw Error(ErrorKind::unsupported, "algorithm '" + algorithm + "' sends " +
                                            std::to_string(low.program->max_message_pieces) +
                                            " chunks in one message, too many for slots of " +
                                            std::to_string(links.slot_bytes) + " bytes");
  std::uint64_t segment = cap;
  if (straight) {
    // A quarter of what a chunk has, so that segments overlap, if that is worth a message.
    segment = std::min(cap, std::max(longest_chunk(call, low, longest) / 4 + 1,
                                     std::uint64_t{kStraightSegment} / e));
  } else {
    segment = std::min(cap, std::max<std::uint64_t>(align, config_.tuning.segment_bytes / e));
  }
  if (segment > align) segment = segment / align * align;
  Layout layout(call, config_.rank, n, low.nchunks, segment, longest);
  const int channels = std::max<int>(1, static_cast<int>(low.program->channels.size()));
  const int wanted = straight ? kStraightChannels : config_.tuning.lanes;
  const int lanes = std::max(1, std::min(wanted, links.max_channels / channels));
  return std::make_unique<HostPlan>(low.program, std::move(layout), call, links, lanes, n);
}

void Communicator::run_general(const Call& call, const Options& options, const Signature& signature,
                               std::uint64_t hash) {
  const int n = config_.nranks;
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
  longest = options.straight ? options.longest : agree(signature, hash, longest);
  ++agreed_;
  if (call.collective != Collective::barrier && signature.count == 0 && !uneven_pairs) return;
  if (uneven_pairs && longest == 0) return;

  const auto make = [&] {
    return make_plan(call, low, names_[options.algorithm], longest, options.straight);
  };
  HostEngine& engine = options.straight ? *straight_->engine : *engine_;
  const std::uint64_t tag = hash * 0x9e3779b97f4a7c15ULL + agreed_;
  try {
    if (call.in.is_table() || call.out.is_table()) {
      const auto plan = make();
      engine.run(*plan, call, tag);
      return;
    }
    const PlanKey key{program_key, call.dtype, signature.count, options.straight};
    auto& plan = plans_[key];
    if (!plan) {
      if (plans_.size() > kMaxPlans) {
        plans_.clear();
        auto& again = plans_[key];
        again = make();
        engine.run(*again, call, tag);
        return;
      }
      plan = make();
    }
    engine.run(*plan, call, tag);
  } catch (const Error& error) {
    leave_path(error.kind(), error.what());
    throw;
  }
}

}  // namespace collectives
