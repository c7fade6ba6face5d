// What a rank's end of the GPU engine consists of. Its functions are in cuda_communicator.cpp
// (set-up, errors), cuda_calls.cpp (calls), cuda_transfers.cpp (sends and receives),
// cuda_symmetric.cpp and cuda_registered.cpp (what peers map).
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "cuda_allocation.hpp"
#include "cuda_call.hpp"
#include "cuda_copies.hpp"
#include "cuda_memory.hpp"
#include "cuda_watch.hpp"
#include "device.hpp"
#include "process.hpp"
#include "region.hpp"
#include "schedule.hpp"

namespace collectives {
namespace device {

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

// What all ranks have mapped: a symmetric buffer, or a registered array.
struct Segment {
  std::uint64_t id = 0, bytes = 0;
  unsigned char* own = nullptr;
  std::vector<unsigned char*> at;  // of all ranks; empty: peers cannot reach it
  std::unique_ptr<Arenas> memory;
  u64 buffer = 0;  // of a registered array: the number of this rank's allocation
  std::vector<std::shared_ptr<Opened>> opened;
};

// A symmetric buffer that was freed, for calls on its address.
struct FreedSegment {
  std::uint64_t id = 0;
  const unsigned char *begin = nullptr, *end = nullptr;
  u64 buffer = 0;  // the number of the allocation
};
inline constexpr std::size_t kFreedKnown = 16;  // the last so many

// Which kernel made by hand does a call, if any, and which symmetric buffers it uses.
struct DirectPath {
  enum class Kind { none, packets, lines, lines_twice, two_shot, copies, exchange };
  Kind kind = Kind::none;
  Gather gather = Gather::none;
  Spread spread = Spread::none;
  const Segment *input = nullptr, *output = nullptr;

  std::string place(const Call& call) const;  // in words
};

// Of direct_two_shot's all_reduce, reduce_scatter and all_gather; returns the bytes of the longest.
u64 cut_into_shares(const Call& call, int nranks, Shares* shares);

// All that a call's kernel is told, but where the caller's arrays are.
struct Prepared {
  std::variant<PlanCall, OneShotCall, TwoShotCall, CopiesCall, ExchangeCall> call;
  int grid = 1;
  Signature signature;
  int recorded_as = -1;  // the algorithm's number in the flight recorder
};
// What it depends on.
struct PreparedKey {
  std::array<u64, 14> words{};
  bool operator==(const PreparedKey& other) const { return words == other.words; }
};
struct PreparedHash {
  std::size_t operator()(const PreparedKey& key) const;
};

}  // namespace device

struct DeviceCommunicator::Impl {
  using ProgramKey = std::tuple<std::string, Collective, int, Order>;

  explicit Impl(const DeviceConfig& c);
  ~Impl();
  void set_up();

  void run(const Call& call, const DeviceOptions& options, cudaStream_t stream);
  void transfer(const std::vector<DeviceTransfer>& list, cudaStream_t stream);
  device::PairTransfer prepare_transfer(const DeviceTransfer& one) const;
  void check_own(const std::vector<DeviceTransfer>& list) const;
  // What the receiver of a message of this rank did not expect, in words; "" if there is none.
  std::string refused();
  bool read_arena(int rank, device::u64 at, std::size_t bytes, void* to);
  std::string differs();
  // Throws if ranks that share a GPU would share this stream too.
  void check_stream(cudaStream_t stream) const;
  void close();
  void abort(const std::string& reason, ErrorKind kind, int about);
  void stop(const std::string& reason, ErrorKind kind);
  bool gave_up();
  void poison_rank(int rank, device::u32 word);
  void died(int rank, pid_t process);
  // Throws if a kernel gave up, and, for a call that comes now, if none can work any more.
  void check(bool before_call);
  [[noreturn]] void raise(bool gave_up, device::Leave why);
  device::u64 epoch_of_record();
  const device::Uploaded& uploaded(const ProgramKey& key);
  // Registered arrays that the call is on and that were freed.
  void forget_freed(const Call& call);
  // Throws if the address is in a symmetric buffer that was freed.
  void refuse_freed(const void* address);
  void free_what_ended();
  // The symmetric buffer or registered array that `bytes` bytes at an address lie in, or none.
  const device::Segment* segment_of(const void* address, device::u64 bytes) const;
  unsigned char* scratch(std::uint64_t bytes);
  Signature sign(const Call& call, const DeviceOptions& options,
                 const device::DirectPath& direct) const;
  void follow(cudaStream_t stream);
  void leave_mark(cudaStream_t stream);
  device::DirectPath direct_path(const Call& call, const DeviceOptions& options) const;
  // The call made ready: from the calls before, if one was alike.
  device::Prepared& ready(const Call& call, const DeviceOptions& options);
  device::Prepared prepare(const Call& call, const DeviceOptions& options);
  void prepare_one_shot(const device::DirectPath& path, const Call& call,
                        const DeviceOptions& options, const device::CallHead& head,
                        const device::Arithmetic& arithmetic, device::Prepared* made);
  void prepare_shares(const device::DirectPath& path, const Call& call,
                      const DeviceOptions& options, const device::CallHead& head,
                      const device::Arithmetic& arithmetic, device::Prepared* made);
  void prepare_copies(const Call& call, device::u64 chunk, const device::CallHead& head,
                      const device::Arithmetic& arithmetic, device::Prepared* made);
  void put_copies(const device::CopiesCall& call, cudaStream_t stream);
  void probe_copies();
  bool can_copy_in_bulk(const Call& call, const device::TwoShotCall& c, int grid) const;
  void prepare_pairs(const Call& call, const DeviceOptions& options, const device::CallHead& head,
                     device::Prepared* made);
  void prepare_program(const Call& call, const DeviceOptions& options, const device::CallHead& head,
                       const device::Arithmetic& arithmetic, device::Prepared* made);

  const Birth birth;
  DeviceConfig config;
  int blocks = 0;       // of kernels whose blocks speak with their like on all ranks
  int processors = 0;   // of the GPU
  bool hopper = false;  // or later: bulk copies, and kernels that start early
  device::OneShotResidency one_shot_blocks{};  // as many as run at a time
  bool whole_lines = false;  // between all ranks, 128 bytes that are written at once arrive at once
  bool writes_words = false;             // this rank's streams write words of all peers
  bool copies = false;                   // all ranks' do: calls may go by copy engines
  cudaStream_t stream = nullptr;         // private: set-up only
  std::optional<device::Sharer> sharer;  // if there are other ranks of this process
  cudaEvent_t last_event = nullptr;      // behind the last call that was not captured
  cudaEvent_t branch_event = nullptr;    // between branches of a graph
  cudaStream_t last_stream = nullptr;
  unsigned long long last_capture = 0;  // id of the capture that the last call went to, 0: none
  bool recorded = false;                // last_event is
  device::Control* control = nullptr;
  Home home = Home::device;  // of the arenas
  std::unique_ptr<device::Arenas> arenas;
  std::unique_ptr<device::Memory> progress;  // where it is not in the arena
  device::DeviceWorld world{};
  Signature last_signature;
  std::mutex run_mutex;                      // threads may share a communicator
  device::u64 exchanges = 0;                 // of calls by copy engines so far
  std::optional<device::u64> copies_stream;  // id of the one that the last of them went to
  // Calls made ready, by a thread that has the mutex; forgotten when what they rest on changes.
  std::unordered_map<device::PreparedKey, device::Prepared, device::PreparedHash> prepared;
  device::Prepared not_kept;
  std::map<ProgramKey, device::Uploaded> programs;
  std::map<std::pair<std::string, Collective>, std::map<int, Schedule>> defined;
  std::map<std::uint64_t, device::Segment> segments;
  std::unique_ptr<device::Segment> made;  // until open_segment()
  int registered = 0;                     // arrays among the segments
  std::deque<device::FreedSegment> freed;
  // Allocations of other ranks, by rank, base and number.
  std::map<std::tuple<int, device::u64, device::u64>, std::weak_ptr<device::Opened>> opened;
  std::vector<void*> scratches;  // the last is in use; captured graphs may hold earlier ones
  std::uint64_t scratch_bytes = 0;
  std::mutex reason_mutex;
  std::string abort_reason;
  int dead = -1;  // the rank whose process ended, if that is the reason
  std::atomic<bool> reported{false};
  std::atomic<bool> closed{false};
  bool ended_well = false;  // all calls have, before it was closed
  std::shared_ptr<Recorder> recorder;
  GpuCalls* calls = nullptr;                          // the recorder's
  GpuCalls* transfers = nullptr;                      // its sends and receives
  std::unique_ptr<device::ProcessWatch> watch;        // of the ranks that are other processes
  std::unique_ptr<device::CopiesWatch> copies_watch;  // of this rank's stream
};

}  // namespace collectives
