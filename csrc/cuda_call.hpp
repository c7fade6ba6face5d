// What the host half and the kernels of the GPU engine both know: memory layout and call records.
//
// Each rank owns an *arena* of device memory, or of pinned memory of the host where GPUs do not
// reach each other, that all peers map: state, arrivals, FIFOs and packet buffers. A kernel writes
// into arenas, and into the caller's arrays; it reads its own arena and its own arrays. Those of
// peers it reads and writes only where they are symmetric buffers, or registered. Plain data, no
// CUDA headers: nvcc and the host compiler lay it out alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine.hpp"
#include "plan.hpp"
#include "types.hpp"

namespace collectives::device {

using u32 = std::uint32_t;
using u64 = unsigned long long;
static_assert(sizeof(u64) == 8);

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxStrands = 128;  // FIFOs from one rank to another at most: channels x lanes
inline constexpr int kMaxChannels = 16;
inline constexpr int kDepth = 4;     // slots of a FIFO
inline constexpr int kTogether = 2;  // segments that a strand of the interpreter works at in turns

// What a kernel waited for, or found, when it gave up.
enum class Leave : u32 {
  none,
  mismatch,  // a peer is in another call
  deadline,
  aborted,    // this rank's host said so
  peer_left,  // a peer gave up; `seen` holds its reason
  peer_died,  // this rank's host said so: a peer's process has ended
  differ      // this rank's host said so: the ranks are in different calls
};
enum class Phase : u32 { none, arrival, message, slot, packet, envelope };

// Written once by the first thread that gives up, in pinned host memory.
struct Record {
  u32 state;  // 1: complete
  u32 leave;  // Leave
  u32 phase;  // Phase
  std::int32_t peer, strand, step, round;
  u64 epoch, expected, seen, waited_ns;
  // mismatch: the peer's count, and its call as `signature_word` packs it; of a transfer: what this
  // rank expects and what came, as Envelope has it, with the counts in `expected` and `seen`
  u64 theirs[2];
  std::int32_t about;  // the rank that never came, or died; -1: unknown, or there is none
};
// In `epoch`: the rest of it numbers the transfers that this rank has put on streams.
inline constexpr u64 kOfTransfers = 1ull << 63;
// A word that says why a rank gave up: its Leave above kWhyShift; 1 + the rank that this is about,
// or 0, above kAboutShift; below that, in words for peers, 1 + the rank that says it.
inline constexpr u32 kAboutShift = 8, kWhyShift = 16;
static_assert(kMaxRanks < 1 << kAboutShift);
struct Control {
  u32 abort;  // set by the host: such a word, for kernels that wait
  u32 pad[27];
  u64 go;     // set by the host: what a stream waits for in the self-test
  u64 moves;  // how far calls by copy engines are, see CopiesStep
  Record record;
};

// What a rank tells each peer when it enters a call; by parity of the epoch, because a peer may be
// one call ahead, never two.
struct alignas(32) Arrival {
  u64 word;  // epoch (low 32 bits) above the hash of the signature (32 bits); written last
  u64 signature[2];
  u64 pad;
};

// What only the rank itself reads and writes, with atomics: so it is always in memory of its GPU.
// All but the poison, which lies in the arena: beside the rest, with which it is read, unless
// arenas are in memory of the host.
struct alignas(16) Progress {
  u64 epoch;   // calls that this rank has finished
  u32 left;    // Leave of this rank: all kernels after it leave at once
  u32 poison;  // such a word, by a peer that gave up
  u32 ticket;  // blocks of the running kernel that have been counted
};

// The head of an arena.
struct State {
  Progress progress;
  u64 token;             // self-test: what peers must read here
  u64 probe[kMaxRanks];  // self-test: what each peer wrote here
  // Written by each peer's stream: the number of the exchange that it has come to, of those of
  // calls by copy engines; kReleased and more where this rank gave up.
  u64 moved[kMaxRanks];
  Arrival arrivals[2][kMaxRanks];
};
inline constexpr u64 kReleased = 1ull << 62;

inline constexpr int kLineThreads = 8;  // that handle a line together
inline constexpr int kLineUnits = 15;   // of 8 bytes: the data of a line of 128 bytes

// Both ends of the FIFOs of one strand between this rank and one peer, in this rank's arena.
struct alignas(128) FifoControl {
  u32 filled[kDepth];  // written by the peer: number of the message in each slot, from 1
  u32 released;        // written by the peer: my messages that it has taken out
  u32 sent, received;  // mine, from call to call
};

// ---- sends and receives: between two ranks, in FIFOs of their own ------------------------------

inline constexpr int kTransferStrands = 64;  // FIFOs from one rank to another: blocks of a transfer
inline constexpr int kTransferDepth = 8;     // slots of each: small messages that need no receiver
inline constexpr int kMaxTransfers = 64;     // of a kernel

// What a transfer is: the sender's word, which the receiver compares with its own.
struct Envelope {
  u64 count;  // elements
  // The tag; above it the dtype (8 bits), and how many transfers of this pair and direction came
  // before (24 bits).
  u64 word;
};

// Both ends of the FIFOs of one strand between this rank and one peer, in this rank's arena.
struct alignas(128) TransferControl {
  u32 filled[kTransferDepth];  // written by the peer: number of the message in each slot, from 1
  u32 released;                // written by the peer: my messages that it has taken out
  u32 sent, received;          // mine, from call to call
  Envelope envelope[kTransferDepth];  // written by the peer: of the message in each slot, if it is
                                      // a first
};

// Written by the peer that a message was for, which expected another.
struct Refusal {
  u32 valid;
  Envelope sent, expected;
};
struct alignas(128) Pair {
  u32 sent, received;  // transfers with the peer so far
  Refusal refusal;     // of the last that was sent
};

// Where things lie in every arena.
struct Geometry {
  int strands = 0;       // FIFOs from one rank to another
  int mail_strands = 0;  // and those of sends and receives
  u32 slot_bytes = 0;
  u32 mail_bytes = 0;    // of a slot of sends and receives
  u32 packet_units = 0;  // packets of 8 bytes of data, for each peer and parity
  u32 lines_each = 0;    // lines, for each peer and parity
  u64 controls = 0, slots = 0, packets = 0, lines = 0;
  u64 pairs = 0, transfers = 0, mail = 0;  // of sends and receives
  // Of calls by copy engines: two landings from each peer, of so many bytes.
  u64 landings = 0, landing_bytes = 0;
  u64 bytes = 0;
};

struct DeviceWorld {
  int rank, nranks;
  unsigned char* arena[kMaxRanks];
  Progress* progress;
  Control* control;
  u64 timeout_ns;
  Geometry geometry;
};

struct CallHead {
  u64 count;
  u64 signature_word;  // collective, dtype, op, order, root and a part of the algorithm's hash
  u32 hash;            // of the whole signature
};

// ---- layout: the spans of chunks, as layout.hpp has them, in a form that kernels can take ------

struct FlatBlocks {
  u64 each, extra;  // as numpy.array_split does; with `table`, one by one
  u64 length[kMaxRanks], offset[kMaxRanks];
  bool table;
};

struct FlatLayout {
  Collective collective;
  bool flat;
  int rank, nranks, nchunks, per_block;
  u64 segment, segments, count, align;
  FlatBlocks in, out;
};

// ---- reductions -------------------------------------------------------------------------------

// One for each pair of format and operation that differ in their bits.
struct Reducer {
  u32 format;  // Dtype
  u32 op;      // Combine
};
using Format = Dtype;
enum class Combine : u32 { sum, prod, min, max, band, bor, bxor };

struct Arithmetic {
  Reducer reducer;
  u32 element;  // bytes
  int divisor;  // avg: of complete values
  bool scaled;  // premul_sum: every contribution is multiplied first
  double factor[2];
};

// Where a channel's program lies among all steps and pieces.
struct ChannelRange {
  std::int32_t first_step, steps, first_piece, pieces;
};

struct PlanCall {
  DeviceWorld world;
  CallHead head;
  FlatLayout layout;
  Arithmetic arithmetic;
  const Step* steps;
  const Piece* pieces;
  ChannelRange channel[kMaxChannels];
  int channels, lanes;
  int together;  // segments of a lane that a strand works at in turns
  const unsigned char* input;
  unsigned char* output;
  unsigned char* scratch;
  u64 cell_bytes;
  int cells;  // of a strand
};

// What one rank sends to another at once: bytes of the sender's input or the receiver's output, and
// the packets or lines that they take, of which there is at least one.
struct Parcels {
  u64 begin, bytes;
  u32 parcels;
};

struct OneShotCall {
  DeviceWorld world;
  CallHead head;
  Arithmetic arithmetic;
  const unsigned char* input;
  unsigned char* output;
  // To and from each rank, this one too. A reduction combines what it receives from all in
  // receive[rank].
  Parcels send[kMaxRanks], receive[kMaxRanks];
  u32 parcels;   // the most of any
  bool alike;    // each rank sends the same to all, and all send as much
  bool reduces;  // else what comes is put where `receive` says
  bool lines;    // else packets
  bool twice;    // all_reduce in two steps: send[q] and receive[q] are the share of rank q
  u32 threads;   // of a block
  bool early;    // may be launched before the kernel before it on the stream has ended
};

// How a rank gets the others' contributions to its share, and how they get the result.
enum class Gather : u32 { none, push, pull };
enum class Spread : u32 { none, push, write };

struct Share {
  u64 begin, bytes;
};

// An array divided into shares, one for each of the ranks that combine or hand on.
struct Shares {
  bool input_is_share, output_is_share;  // all_gather; reduce_scatter
  Share share[kMaxRanks];
};

struct TwoShotCall : Shares {
  DeviceWorld world;
  CallHead head;
  Arithmetic arithmetic;
  Gather gather;
  Spread spread;
  int root;  // of broadcast (which has no gather) and of reduce; else -1
  const unsigned char* input;
  unsigned char* output;
  const unsigned char* inputs[kMaxRanks];  // of all ranks, to pull from
  unsigned char* outputs[kMaxRanks];       // of all ranks, to write to
  u64 block_bytes, chunk_bytes;            // of a share: what a block has, what a message carries
  u32 chunks;                              // of a block
  bool bulk;  // by bulk copies: nothing goes through FIFOs, all is aligned to 16
};

struct ExchangeCall {
  DeviceWorld world;
  CallHead head;
  const unsigned char* input;
  unsigned char* output;
  Share send[kMaxRanks], receive[kMaxRanks];  // to and from each rank
  bool alike;                                 // all blocks are equal, as all ranks know
  u64 chunk_bytes;
  u32 chunks;  // of a block, for the pair that has the most
};

// ---- calls by copy engines: direct_two_shot beside a stream that computes -----------------------
//
// Copy engines bring the peers' shares, and streams wait for each other's words, so that no
// multiprocessor is held while bytes are on their way (cuda_copies.cpp). An *exchange* is that all
// ranks copy something to each other and say so. All are numbered, alike on all ranks.

// A kernel behind an exchange, or the first of a call.
struct CopiesStep {
  DeviceWorld world;
  CallHead head;
  Arithmetic arithmetic;
  // For Control::moves: 2 i + 1 if exchange i is what comes next in the call, 2 i + 2 if it was the
  // last.
  u64 moves;
  bool last;      // of the call's kernels
  u64 part;       // bytes of a block
  bool combines;  // dst[0] = src[0] op src[1] op ..., else dst[i] = src[i]
  int count;
  const unsigned char* src[kMaxRanks];
  unsigned char* dst[kMaxRanks];
  u64 bytes[kMaxRanks];
};

// A look at a stream that has been waiting, by a thread of the host.
struct CopiesLook {
  DeviceWorld world;
  u64 exchange;   // that it waits for
  u64 waited_ns;  // and for how long
};

// What one rank combines by itself: dst[..] = src[0] op src[1] op ...
struct CombineCall {
  const unsigned char* src[kMaxRanks];
  unsigned char* dst[2];
  int nsrc, ndst;
  u64 bytes;
  Arithmetic arithmetic;
};

struct PairTransfer {
  unsigned char* memory;  // that is read, or written
  u64 bytes, count;       // count: elements
  u64 part;               // bytes of each block, but the last
  u32 tag, dtype;
  std::int32_t peer, strands;
  std::int16_t ahead;   // transfers in this list before it with the same peer and direction
  std::int16_t before;  // the last of these, or -1
  bool sends;
};

struct TransferCall {
  DeviceWorld world;
  u64 number;  // of the first of these transfers, among those that the rank has put on streams
  int split;   // so many blocks send, and as many others receive; 0: all do both
  int count;
  PairTransfer list[kMaxTransfers];
};
static_assert(sizeof(TransferCall) <= 4096, "what a kernel's parameters may take");

// That divides by nothing and multiplies by nothing.
Arithmetic arithmetic_of(Dtype dtype, Op op);

// ---- kernels/*.cu: `stream` is a cudaStream_t; the result is a cudaError_t ---------------------

int launch_plan(const PlanCall& call, int blocks, void* stream);
int launch_combine(const CombineCall& call, void* stream);
int load_combine();
int launch_one_shot(const OneShotCall& call, int blocks, void* stream);
int launch_two_shot_lines(const OneShotCall& call, int blocks, void* stream);  // of `twice`
int launch_two_shot(const TwoShotCall& call, int blocks, void* stream);
int launch_rooted(const TwoShotCall& call, int blocks, void* stream);  // with a root
int launch_exchange(const ExchangeCall& call, int blocks, void* stream);
// Of a call by copy engines: tells the peers that this rank is in it; works; looks whether its
// stream must not wait any more, and lets it go on then.
int launch_copies_begin(const CopiesStep& step, void* stream);
int launch_copies_step(const CopiesStep& step, int blocks, void* stream);
int launch_copies_look(const CopiesLook& look, void* stream);
int launch_nothing(void* stream);  // a kernel that does nothing
int launch_transfer(const TransferCall& call, int blocks, void* stream);
// Writes `token ^ rank` into every peer's probe word and compares every peer's token with what it
// should be; `wrong` (device memory, one word a rank) says where it was not.
int launch_probe(const DeviceWorld& world, const u64* tokens, u32* wrong, void* stream);
// Load the kernels; blocks of each that one multiprocessor holds at a time.
int plan_residency(int* blocks);
// all_reduce's need fewer registers than those that have a share for each pair of ranks.
struct OneShotResidency {
  int whole, shares, twice;
};
int one_shot_residency(OneShotResidency* blocks);  // but `twice`
int two_shot_lines_residency(int* blocks);
int two_shot_residency(int* blocks);
int rooted_residency(int* blocks);
// Were the kernels compiled for Hopper or later? Those for earlier GPUs, which run there too, make
// no bulk copies and do not wait for the kernel that they may start before the end of.
bool has_hopper_code();
// For kernels that make bulk copies, on this GPU: those before Hopper cannot.
int allow_bulk();
// Has the call a kernel for its arithmetic alone?
bool two_shot_is_fast(const TwoShotCall& call);
int exchange_residency(int* blocks);
int load_copies();
int transfer_residency(int* blocks);
// Loads all kernels now; blocks that one multiprocessor holds at a time, of any kernel and of the
// one-shot ones.
int load_kernels(int* strands, OneShotResidency* one_shot);

}  // namespace collectives::device
