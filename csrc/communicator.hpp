// The core's communicator: one rank's end of a group of ranks that call collectives together.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "assembly.hpp"
#include "council.hpp"
#include "direct_host.hpp"
#include "engine_host.hpp"
#include "errors.hpp"
#include "gate.hpp"
#include "liveness.hpp"
#include "point_to_point.hpp"
#include "process.hpp"
#include "recorder.hpp"
#include "schedule.hpp"
#include "transport_mpi.hpp"
#include "transport_shm.hpp"

namespace collectives {

struct CommunicatorConfig {
  std::string name;  // the same on all ranks, and no other communicator's
  int rank = 0;
  int nranks = 1;
  std::vector<int> node;           // node of each rank
  std::vector<int> local_of;       // index in this rank's region, -1: not reached by shared memory
  std::vector<int> group;          // ranks with equal numbers share a region; empty: none do
  std::shared_ptr<Region> region;  // none where no other rank shares memory
  std::shared_ptr<MpiTransport> mpi;  // none where all ranks share a region
  bool threads = false;               // the ranks are threads of this process
  HostTuning tuning;
  bool can_pull = false;       // every rank of the region may read the memory of every other
  std::size_t slot_bytes = 0;  // the smallest of any transport of any rank: equal on all
  double timeout_s = 300;
};

// What a blocking or queued operation ends with.
class Work {
 public:
  bool done() const;
  // Waits; false if it is not done after `seconds` (negative: no limit).
  bool wait(double seconds);
  std::exception_ptr error() const;
  // When the operation began and ended, in seconds of the steady clock; 0 where it has not.
  std::pair<double, double> span() const;

 private:
  friend class Communicator;
  void begin();
  void finish(std::exception_ptr error);
  void check_process() const;
  Birth birth_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  double began_ = 0;
  double ended_ = 0;
  std::exception_ptr error_;
};

// A number that tells lists of counts apart; not 0.
std::uint64_t hash_of(const std::vector<std::uint64_t>& counts);

class Communicator : public Watch {
 public:
  static constexpr int kChannels =
      10;  // FIFOs between a pair: 8 for programs, one for control, one for send and recv

  explicit Communicator(CommunicatorConfig config);
  ~Communicator() override;

  int rank() const { return config_.rank; }
  int size() const { return config_.nranks; }
  const CommunicatorConfig& config() const { return config_; }
  // Seconds that a wait lasts at most, from the next look at the clock on. Any thread.
  double timeout() const { return timeout_s_; }
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  HostTuning& tuning() { return config_.tuning; }
  bool one_region() const { return direct_ != nullptr; }
  std::string transports() const;
  std::uint64_t calls() const { return calls_; }
  // Asynchronous calls that have not ended.
  int queued() const { return queued_.load(std::memory_order_acquire); }

  // A number for an algorithm name, to be used in run().
  int intern(const std::string& algorithm);
  // Plans are made anew: after a change of tuning().
  void forget_plans() { plans_.clear(); }
  // Gives the schedule of an algorithm that the registry does not know.
  void define(const std::string& algorithm, const Schedule& schedule);

  static constexpr int kDefault = -1;
  struct Options {
    int algorithm = 0;  // kDefault: a barrier without an algorithm of its own
    Order order = Order::any;
    double factor[2] = {1, 0};  // premul_sum
    std::uint64_t parts = 0;    // of calls that were packed into this one: hash_of their counts
    bool on_device = false;     // the arrays are staged: all ranks' must be, or none's
    // They are where MPI takes them: see go_straight(). All ranks have agreed on that, and on the
    // longest block of any.
    bool straight = false;
    std::uint64_t longest = 0;
    // If given, nothing is moved: the ranks only agree that they are in this call, and on the
    // largest of these numbers, which it then is.
    std::uint64_t* agreed = nullptr;
  };
  // Runs the call on the calling thread, behind asynchronous calls that are still queued.
  // `lengthy`: the call may take so long that other Python threads are to run meanwhile. The GIL is
  // given up only once this call has claimed the communicator.
  void run(const Call& call, const Options& options, bool lengthy = false);
  // Queues the call; the arrays must live until the work is done.
  std::shared_ptr<Work> submit(Call call, Options options);

  // What takes its turn in the queue and may be several calls: it runs on the queue's thread.
  class Task {
   public:
    virtual ~Task() = default;
    virtual void run(Communicator& comm) = 0;
    // Always called, last; with the error if run() threw, or could not be called.
    virtual void end(std::exception_ptr error) noexcept = 0;
  };
  void submit(std::shared_ptr<Task> task);
  // Calls with Options::straight have arrays in memory of a GPU from now on: `mpi`, whose slots are
  // there too, sends from there and receives there, and `hands` work on them. Collective.
  // from           bytes of a call, of all blocks together, from which on it goes so
  // scratch_bytes  of the hands' memory, the same on all ranks
  // operands       that they combine at once, at most
  void go_straight(std::shared_ptr<MpiTransport> mpi, std::unique_ptr<Hands> hands,
                   std::uint64_t from, std::size_t scratch_bytes, int operands);
  // Does a call go so, for all that all ranks know of it? They have the same answer.
  bool goes_straight(const Call& call, const Options& options);
  // FIFO channels of a pair that such calls use at most.
  static constexpr int kStraightChannels = 2;
  // Messages that a FIFO holds, on which programs count: every transport holds at least as many.
  // Fixed, because all ranks must lower alike.
  static constexpr int kFifoDepth = 4;

  // For Task::run.
  void run_in_turn(const Call& call, const Options& options) { execute(call, options); }

  struct Message {
    bool sends;
    int peer;
    std::uint32_t tag;
    Dtype dtype;
    void* data;  // only read where it sends
    std::size_t bytes;
  };
  // `background`: it moves whether or not anybody waits for it.
  PostedTransfer post(const Message& message, bool background);
  // Until all are done; throws the first error.
  void wait(const std::vector<PostedTransfer>& posted);
  // Sends and receives these. Whatever it throws, nothing moves into or out of their memory
  // afterwards.
  void transfer(const std::vector<Message>& messages);
  // True also if it will never be, since the communicator is broken: wait() then throws.
  bool done(const PostedTransfer& t);
  // Whom a transfer is with; PointToPoint::kAnyPeer while a receive from any peer waits.
  int peer(const PostedTransfer& t) { return p2p_->peer(t); }

  // Symmetric memory: this rank's part, then everybody's.
  std::string make_segment(std::size_t bytes);
  std::byte* open_segment(std::uint64_t id, std::size_t bytes,
                          const std::vector<std::string>& handles);
  void release_segment(std::uint64_t id);

  static constexpr const char* kOnGpu = "works on its GPU";
  // Before a call is put on the GPU: tells the peers, which may wait for this rank in a call on
  // host arrays (see check_devices). Throws what a peer told.
  void enter_device_call();
  // Throws what a peer told, and nothing else: for whoever waits for the GPU.
  void look(const char* doing = kOnGpu);
  // The same, and what a rank that waits finds: a process of the region that has ended, what ranks
  // of other nodes told. Any thread that may call MPI.
  void look_around(const char* doing = kOnGpu);
  // While this communicator waits, `whole`, of whose ranks it has some, looks around as well. For
  // the thread that makes its calls, which `whole` must outlive.
  void is_part_of(Communicator* whole) { whole_ = whole; }

  void abort(const std::string& reason);
  // Runs what is queued to its end, and nothing later.
  void end_queue();
  // Leaves the group: later calls raise, peers that wait for this rank are told.
  void close();
  bool closed() const { return closed_; }
  bool broken() const { return broken_; }
  // True if messages may still leave from the arrays of a call on the host that failed, or come
  // into them.
  bool lends() const { return engine_->lends(); }
  // Why calls raise, here or because another rank gave up; "" if they do not.
  std::string why_broken() const;
  // Watches the peers of the region from now on; all have made their communicator.
  void watch_peers();
  // Until no queued call is left; on a broken communicator they end at once, with its reason.
  bool drain(double seconds);
  // What ranks settle when calls no longer work; none unless all ranks share a region.
  std::shared_ptr<Council> council() const { return council_; }
  const std::shared_ptr<Recorder>& recorder() const { return recorder_; }

  // Installed by the bindings: the GIL is given up while a wait is slow, and signals are looked at.
  // Plain pointers: threads may still wait while the process ends and destroys its objects.
  static void* (*on_enter_slow)();
  static void (*on_leave_slow)(void*);
  static void (*on_tick)(void*&);

 private:
  // FIFO channels: programs use 0 .. kProgramChannels - 1.
  static constexpr int kProgramChannels = 8;
  static constexpr int kControlChannel = 8;
  static constexpr int kPointToPointChannel = 9;

  struct ProgramKey {
    int algorithm;
    Collective collective;
    int root;
    Order order;
    auto tie() const { return std::tie(algorithm, collective, root, order); }
    bool operator<(const ProgramKey& o) const { return tie() < o.tie(); }
  };
  struct PlanKey {
    ProgramKey program;
    Dtype dtype;
    std::uint64_t count;
    bool straight;
    bool operator<(const PlanKey& o) const {
      return std::tie(program, dtype, count, straight) <
             std::tie(o.program, o.dtype, o.count, o.straight);
    }
  };
  struct Lowered {
    std::shared_ptr<const RankProgram> program;
    int nchunks = 1;
    bool forwards = false;  // all_to_all: blocks pass through ranks that they are not for
    // Of any rank, filled in for straight calls:
    int cells = -1;    // scratch cells; -1: not yet
    int operands = 0;  // of a combine step
  };
  struct Straight {
    Links links;
    std::shared_ptr<MpiTransport> mpi;
    std::unique_ptr<HostEngine> engine;
    std::uint64_t from = 0;
    std::size_t scratch_bytes = 0;
    int operands = 0;
  };
  struct Mapping;

  // What sends and receives look at while they wait: they may run beside a collective of another
  // thread.
  struct TransferWatch final : Watch {
    explicit TransferWatch(Communicator& c) : comm(c) {}
    void check(const Where& where, Wait& wait) override { comm.check_peers(where, wait); }
    void enter_slow() override { comm.enter_slow(); }
    void leave_slow() override { comm.leave_slow(); }
    Communicator& comm;
  };

  // While it lives, this thread is as in a slow wait: without the GIL.
  struct Lengthy {
    Communicator* comm;
    explicit Lengthy(Communicator* c) : comm(c) {
      if (comm != nullptr) comm->enter_slow();
    }
    ~Lengthy() {
      if (comm != nullptr) comm->leave_slow();
    }
    Lengthy(const Lengthy&) = delete;
    Lengthy& operator=(const Lengthy&) = delete;
  };

  void check(const Where& where, Wait& wait) override;
  void check_peers(const Where& where, Wait& wait);
  void look_at_peer(const PostedTransfer& t);
  void enter_slow() override;
  void leave_slow() override;
  [[noreturn]] void fail(ErrorKind kind, const std::string& text, int peer = -1);
  // A rank of the region that has died, -1 if none has.
  int who_died() const;
  // `q`: of the region; `place`: what this rank does, in words.
  [[noreturn]] void fail_for_death(int q, const std::string& place);

  void wait_and_tell(const std::vector<PostedTransfer>& posted);
  void wait_for_all(const std::vector<PostedTransfer>& posted);
  void give_up(ErrorKind kind, const std::string& reason) { give_up(kind, reason, reason); }
  void give_up(ErrorKind kind, const std::string& reason, const std::string& told);
  void leave_path(ErrorKind kind, const std::string& text);
  void leave_after(const std::exception_ptr& error);
  void leave_call(bool before_data, ErrorKind kind, const std::string& text);
  std::string tell_region() noexcept;
  void tell_peers() noexcept;
  std::string broken_reason() const;
  void publish_wait(const Where& where, std::chrono::steady_clock::time_point now);
  std::string blame(const Where& where, std::chrono::steady_clock::time_point now, int* peer) const;
  bool told_to_stop() const;
  [[noreturn]] void raise_told(const std::string& doing);
  [[noreturn]] void raise_broken(const std::string& place);
  bool time_to_look(std::chrono::steady_clock::time_point now);
  void leave_queued(Work& work, const std::exception& error);
  void execute(const Call& call, const Options& options);
  void run_recorded(const Call& call, const Options& options);
  void note_error(const char* kind, const std::string& text, int peer);
  void dispatch(const Call& call, const Options& options);
  void run_general(const Call& call, const Options& options, const Signature& signature,
                   std::uint64_t hash);
  void run_alone(const Call& call, const Options& options);
  std::uint64_t agree(const Signature& signature, std::uint64_t hash, std::uint64_t amount);
  Lowered& lowered(const ProgramKey& key);
  const Lowered& lowered_for_straight(const ProgramKey& key);
  Schedule schedule_of(const ProgramKey& key);
  std::unique_ptr<HostPlan> make_plan(const Call& call, const Lowered& low,
                                      const std::string& algorithm, std::uint64_t longest,
                                      bool straight);
  std::uint64_t longest_chunk(const Call& call, const Lowered& low, std::uint64_t longest) const;
  std::uint64_t straight_segment(const Lowered& low, std::size_t element) const;
  Signature sign(const Call& call, const Options& options) const;
  void check_devices(int q);
  void check_open() const;
  void worker();
  void transfer_worker();
  void start_transfer_worker();
  void wake_transfer_worker();

  Birth birth_;
  CommunicatorConfig config_;
  std::vector<int> numbers_;  // rank number of each local rank
  std::unique_ptr<ShmTransport> shm_;
  Links links_;
  Doorbell lonely_doorbell_;
  TransferWatch transfer_watch_{*this};
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<Waiter> p2p_waiter_;
  std::unique_ptr<Gate> gate_;
  std::unique_ptr<DirectHost> direct_;
  std::unique_ptr<Assembly> assembly_;  // where there is no gate, since not all share memory
  std::unique_ptr<HostEngine> engine_;
  std::unique_ptr<Straight> straight_;
  std::unique_ptr<PointToPoint> p2p_;

  std::vector<std::string> names_;  // never moves: a queued call may read it while another is made
  // Of each name: 1 one shot, 2 two shot, 3 both by node, 4 the user's, 0 none of these.
  std::vector<int> direct_shape_;
  bool groups_are_nodes_ = false;  // the ranks of a node, and they alone, share a region
  mutable std::mutex defined_mutex_;
  struct Defined {
    Schedule schedule;
    std::string name;  // in signatures
  };
  std::map<std::pair<std::string, Collective>, std::map<int, Defined>> defined_;  // by root too
  std::map<ProgramKey, Lowered> programs_;
  std::map<PlanKey, std::unique_ptr<HostPlan>> plans_;
  std::uint64_t calls_ = 0;   // begun
  std::uint64_t agreed_ = 0;  // agreed upon and run by an engine: the same on all ranks
  std::uint64_t issued_ = 0;  // begun or queued

  // The last call's signature: programs repeat calls, and hashing takes as long as a cache line
  // takes to cross.
  struct Signed {
    int algorithm = kDefault - 1;
    Order order = Order::any;
    Collective collective = Collective::barrier;
    Dtype dtype = Dtype::uint8;
    Op op = Op::sum;
    int root = 0;
    std::uint64_t count = 0;
    std::uint64_t parts = 0;
    bool on_device = false, agreement = false;
    Signature signature;
    std::uint64_t hash = 0;
  };
  Signed last_;

  // Segments come and go while queued calls run: a call works on the list as it was at its begin.
  using Segments = std::vector<SymmetricSegment>;
  const Segments& segments_now();
  void change_segments(const std::function<void(Segments&)>& change);
  std::mutex segments_mutex_;
  std::shared_ptr<const Segments> segments_ = std::make_shared<const Segments>();
  std::atomic<std::uint64_t> segments_version_{0};
  std::shared_ptr<const Segments> call_segments_ = segments_;  // of the thread that runs a call
  std::uint64_t call_segments_version_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Mapping>> mappings_;
  std::shared_ptr<Mapping> pending_segment_;

  std::shared_ptr<Liveness> liveness_;  // none without a region
  std::shared_ptr<Council> council_;
  std::shared_ptr<Recorder> recorder_;
  std::mutex poll_mutex_;
  std::chrono::steady_clock::time_point last_poll_{};
  Communicator* whole_ = nullptr;

  std::atomic<double> timeout_s_{0};
  std::atomic<bool> busy_{false};
  std::atomic<bool> over_{false};  // nothing of it moves any more: it is closed, or goes
  std::atomic<bool> closed_{false};
  std::atomic<bool> broken_{false};
  mutable std::mutex reason_mutex_;
  std::string broken_reason_;  // why, as calls of this rank raise it
  std::string told_;           // and as the peers are told
  ErrorKind broken_kind_ = ErrorKind::aborted;

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  struct Job {
    Call call;
    Options options;
    std::shared_ptr<Work> work;
    std::shared_ptr<Task> task;  // in place of the call, if any
  };
  void enqueue(Job job);
  std::deque<Job> queue_;
  std::atomic<int> queued_{0};  // jobs that are queued or running
  std::atomic<std::uint64_t> ended_{0};
  bool background_p2p_ = false;
  bool stop_ = false;
  std::thread thread_;
  std::thread transfer_thread_;  // apart: a collective that waits for peers must not stop transfers
};

}  // namespace collectives
