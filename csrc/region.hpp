// The memory that the ranks of one node share: flags, lines, staging slots and FIFOs, in one
// segment.
//
// Between processes it is a memfd: it has no name, so nothing can be left behind in /dev/shm,
// nobody else can open it, and the kernel frees it with the last process that maps it. Peers open
// it through /proc/PID/fd/FD and check a random cookie. Between threads of one process all ranks
// simply use the creator's mapping.
//
// Memory order, for every flag here: the owner writes data, then stores the flag with release; a
// reader loads the flag with acquire and then reads the data. Each flag has one writer. All
// counters only grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "wait.hpp"

namespace collectives {

inline constexpr int kLines = 24;
inline constexpr std::size_t kLinePayload = 48;
inline constexpr std::size_t kLinesBytes = kLines * kLinePayload;  // largest message in lines

// One cache line that is flag and data at once: a reader that sees `sequence` has the payload with
// the same miss.
struct alignas(64) Line {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t hash;
  unsigned char payload[kLinePayload];
};
static_assert(sizeof(Line) == 64);

// What a rank announces when it joins call `sequence`.
struct alignas(64) Arrival {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t hash;      // of the call's signature
  std::uint64_t token;     // symmetric buffer in use (0: none)
  const std::byte* input;  // the call's arrays, in the announcer's own address space
  std::byte* output;
  std::uint64_t amount;  // call-specific (largest block of an all_to_all_v)
};

// A call's signature in full, for messages: what a mismatch prints.
struct Signature {
  std::uint64_t count = 0;
  std::uint64_t counts_hash = 0;  // of the counts of a v-variant, or of calls packed into one
  std::int32_t root = 0;
  std::uint8_t collective = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  // An Order; kUneven: lengths that pairs of ranks alone know; for staged calls kOnDevice and
  // kInSlices; of a GPU's kernels, how they share out the call, which all ranks must do alike.
  static constexpr std::uint8_t kOrder = 1, kOnDevice = 2, kInSlices = 4, kInLines = 8,
                                kInFewBlocks = 16, kByCopies = 32, kUneven = 64;
  std::uint8_t order = 0;
  char algorithm[80] = {};

  std::uint64_t hash() const;
  std::string describe() const;
};

struct alignas(128) Counter {
  std::atomic<std::uint64_t> value;
};

// Calls that a rank has put on its GPU, and how many calls on host arrays it had made when it put
// the last of them there. `after` is written first.
struct alignas(128) DeviceCalls {
  std::atomic<std::uint64_t> count;
  std::atomic<std::uint64_t> after;
};

struct alignas(128) FifoControl {
  std::atomic<std::uint64_t> released;  // written by the receiver: messages it has taken out
};
struct alignas(64) FifoSlotHeader {
  std::atomic<std::uint64_t> sequence;  // of the message in the slot, from 1
  std::uint64_t tag;
  std::uint32_t bytes;
  std::uint32_t user;
  unsigned char small[40];  // payloads up to 40 bytes ride in the flag's cache line
};
static_assert(sizeof(FifoSlotHeader) == 64);

enum class RankState : std::uint32_t { starting, alive, closed, dead };

struct alignas(128) RankArea {
  Doorbell doorbell;
  std::atomic<std::uint32_t> state;
  std::atomic<std::int32_t> process;
  // From slow waits, about once a millisecond: 1 + the local rank that is waited for (0: none), and
  // when, in nanoseconds of the clock that all processes of a host share.
  std::atomic<std::int32_t> waits_on;
  std::atomic<std::int64_t> looked_at;
  alignas(128) Arrival arrival[2];  // by parity of the call's sequence
  alignas(128) Signature signature[2];
  Counter published;  // staging slots of mine that hold data
  Counter drained;    // chunks of everybody that I have consumed
  Counter reduced;    // result slots of mine that hold data
  Counter collected;  // result chunks of everybody that I have consumed
  Counter entered;    // calls on the arrays of peers that I have begun to work on
  Counter left;       // and been through with
  Counter bench;      // cache_line_exchange()
  DeviceCalls device;
  alignas(128) Line lines[2][kLines];
};

// What ranks settle with each other when calls no longer work (council.hpp). A seat has one writer,
// its rank; the table has all.
inline constexpr int kAttempts = 16;    // that are remembered
inline constexpr int kMemberWords = 4;  // a bit for each of up to 256 ranks
inline constexpr std::size_t kMailBytes = 32 << 10;
struct alignas(128) Letter {
  std::atomic<std::uint64_t> mark;  // odd while it is written
  std::uint64_t tag, round, bytes;
  char data[kMailBytes];
};
struct alignas(128) Seat {
  std::atomic<std::uint64_t> attempt;  // the last one that its rank has joined
  std::uint64_t posted[2];             // letters so far; read by its rank only
  std::uint64_t proposal[kAttempts][kMemberWords];
  Letter letter[2][2];  // of the whole region, and of parts of it; two to be filled in turn
};
struct alignas(128) CouncilTable {
  std::atomic<std::uint64_t> decision[kAttempts];
  std::atomic<std::uint64_t> outcome[kAttempts];
};

struct RegionShape {
  int nranks = 1;    // local ranks
  int channels = 1;  // FIFOs between each ordered pair
  int fifo_depth = 4;
  std::size_t fifo_slot = 64 << 10;
  int stage_depth = 4;  // staging and result slots of each rank
  std::size_t stage_slot = 256 << 10;
};

class Region {
 public:
  // Memory shared by threads of this process.
  static std::shared_ptr<Region> make_private(const RegionShape& shape);
  // A new memfd; `handle()` tells peers how to open it.
  static std::shared_ptr<Region> make_shared(const RegionShape& shape);
  // Maps a peer's region. Throws Error(system) if it cannot be reached or is not the one meant.
  static std::shared_ptr<Region> open(const RegionShape& shape, const std::string& handle);
  ~Region();

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const RegionShape& shape() const { return shape_; }
  std::string handle() const;
  void close_handle();  // once every peer has opened it

  std::atomic<std::uint32_t>& abort_word();  // 0, or who gave up (communicator_failures.cpp)
  // Clock ticks per second as the first rank that asked measured them (bench.cpp): all ranks must
  // use one value.
  std::atomic<std::uint64_t>& tick_rate();
  char* abort_reason();  // kAbortReason bytes
  // True once a rank has given up, and its reason can be read.
  bool gave_up();
  static constexpr std::uint32_t kUnfinished = 0x80000000u;  // in the word while it is written
  CouncilTable& council();
  Seat& seat(int r);
  RankArea& rank(int r);
  // What rank r sends to each rank in an all_to_all_v, and then what it expects of each; two sets,
  // by parity of the call's sequence.
  std::uint64_t* pair_lengths(int r, std::uint64_t sequence);
  std::byte* stage(int r, std::uint64_t slot);  // slot taken modulo the depth
  std::byte* result(int r, std::uint64_t slot);
  FifoControl& fifo_control(int src, int dst, int channel);
  FifoSlotHeader& fifo_header(int src, int dst, int channel, std::uint64_t slot);
  std::byte* fifo_data(int src, int dst, int channel, std::uint64_t slot);
  std::size_t bytes() const { return bytes_; }

  static constexpr std::size_t kAbortReason = 512;

 private:
  Region(const RegionShape& shape, void* base, int fd, std::uint64_t cookie);
  static std::size_t size_of(const RegionShape& shape);

  struct Head;
  Head& head();
  std::size_t fifo_index(int src, int dst, int channel) const;

  RegionShape shape_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  int fd_ = -1;
  std::uint64_t cookie_ = 0;
  // Offsets of the parts.
  std::size_t council_ = 0, seats_ = 0, ranks_ = 0, pair_lengths_ = 0, stages_ = 0, results_ = 0,
              fifo_controls_ = 0, fifo_headers_ = 0, fifo_data_ = 0;
};

// Throws Error(system): what failed, errno in words, and what can be done about it.
[[noreturn]] void system_failed(const std::string& what);

// True if this process may read the memory of process `pid`, tried on 8 bytes at `address` that
// hold `expected`.
bool can_read_process(int pid, std::uintptr_t address, std::uint64_t expected);

// A memfd of `bytes`, and the handle by which other processes of this user open it.
int make_memfd(const char* name, std::size_t bytes);
std::string memfd_handle(int fd, std::uint64_t cookie);
int open_memfd(const std::string& handle, std::uint64_t* cookie);
std::uint64_t random_cookie();

}  // namespace collectives
