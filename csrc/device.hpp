// The GPU engine as the rest of the core sees it: no CUDA here. Built without CUDA, or run without
// a GPU, every way in throws Error(unsupported) in words.
//
// Setting one up is collective and goes in steps, between which the ranks exchange what they
// return (the Python package does that, over its bootstrap):
//   1. the constructor
//   2. allocate()                this rank's arena
//   3. handle(), then open()     maps the arenas of all ranks
//   4. probe_write(), then probe_check()   the self-test of this way, with a barrier before each;
//                                where it fails, from step 2 again with memory of the host
//   5. meet()                    do the kernels of all ranks really run at the same time?
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "errors.hpp"
#include "layout.hpp"
#include "plan.hpp"
#include "recorder.hpp"

namespace collectives {

// 0 without CUDA, a driver or a GPU; `why` then says which.
int device_count(std::string* why);

// The GPU whose memory is at an address; the current one for 0, -1 if there is none of a GPU.
int gpu_of(std::uintptr_t pointer);

// Where arenas are: in memory of the GPUs, which reach each other's; in pinned memory of the
// process, whose threads all ranks are; in pinned memory that processes share.
enum class Home { device, pinned, shared };

struct DeviceConfig {
  int rank = 0;
  int nranks = 1;
  std::vector<int> node;
  int device = 0;      // ordinal in this process
  int sharing = 1;     // ranks of this process on this GPU, this one counted
  int threads = 1;     // and on any GPU
  int max_blocks = 0;  // thread blocks of a kernel at most; 0: as many as help
  double timeout_s = 300;
};

struct DeviceOptions {
  // Equal only where algorithm and all of how it is done are; 0: calls are not remembered.
  std::uint64_t id = 0;
  std::string algorithm;
  Order order = Order::any;
  double factor[2] = {1, 0};  // premul_sum
  // How, where an algorithm has a kernel made by hand (equal on all ranks):
  int blocks = 0;           // at most; 0: as many as there are
  int straight_blocks = 0;  // the same where direct_two_shot needs no FIFOs; 0: as `blocks` says
  int threads = 0;          // of a block of direct_one_shot; 0: 512, or more where blocks are few
  std::uint64_t chunk = 0;  // of direct_two_shot: bytes of a message; 0: as much as a slot takes
  bool small = false;       // all_to_all by the kernel of direct_one_shot
  bool lines = false;       // in lines of 128 bytes, where links keep them whole: direct_one_shot,
                            // and direct_two_shot's all_reduce
  bool pull = false;        // direct_two_shot on symmetric buffers: read the peers' contributions
  bool bulk = false;        // and then through shared memory, by bulk copies, where GPUs make them
  bool copies = false;      // direct_two_shot by copy engines, if GPUs can and no graph is captured
};

// A send, or a receive.
struct DeviceTransfer {
  bool sends = false;
  int peer = 0;
  std::uint32_t tag = 0;
  Dtype dtype = Dtype::uint8;
  std::uintptr_t address = 0;
  std::uint64_t count = 0;
};

class DeviceCommunicator {
 public:
  explicit DeviceCommunicator(const DeviceConfig& config);
  ~DeviceCommunicator();
  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;

  // Thread blocks that this rank's kernels may have; all ranks take the smallest, in allocate().
  int blocks() const;
  // Again: gives up what was allocated before.
  void allocate(Home home, int blocks);
  // Of what is allocated for exchanges with the other ranks.
  std::uint64_t arena_bytes() const;
  std::string handle() const;
  void open(const std::vector<std::string>& handles);
  void probe_write();
  // Empty, or which pair cannot reach each other's arenas.
  std::string probe_check();
  // As many blocks as kernels will ever have, of all ranks, wait for each other. Throws
  // Error(unsupported) if they are not all resident.
  void meet();

  // Do all links of this rank keep lines of 128 bytes whole? (After open().) Lines are used if
  // all ranks say so.
  bool keeps_lines() const;
  void use_lines(bool all);
  // Do this rank's streams write words in all peers' memory? (After probe_check().) Calls go by
  // copy engines, where that is asked for, if all ranks say so.
  bool writes_words() const;
  void use_copies(bool all);

  // Did the last call go into a CUDA graph that is captured?
  bool captured() const;
  // How often calls by copy engines have told each other something, the self-test counted.
  std::uint64_t exchanges() const;

  // Symmetric buffers. Collective: make_segment() allocates, open_segment() maps what all ranks
  // have made and returns the address of this rank's. A segment is released by all ranks, who meet
  // after it: its memory is freed when the next one is made, and calls on it raise. What was made
  // and not opened goes with the next release too. Where arenas are in memory of the host, it is
  // this rank's alone, and used as any other memory is.
  std::string make_segment(std::uint64_t bytes);
  std::uintptr_t open_segment(std::uint64_t id, const std::vector<std::string>& handles);
  void release_segment(std::uint64_t id);

  // Arrays that lie in memory that others have allocated. Collective: export_array() says how peers
  // find this rank's, or why they cannot; open_array() maps those of all ranks, if none said so.
  // From then on it is used as a symmetric buffer is, until release_segment().
  std::string export_array(std::uintptr_t address, std::uint64_t bytes, std::string* why);
  void open_array(std::uint64_t id, std::uint64_t bytes, const std::vector<std::string>& handles);

  // Before the first call: where calls and errors are noted.
  void record_to(std::shared_ptr<Recorder> recorder);

  // The schedule of an algorithm that the registry does not know.
  void define(const std::string& algorithm, const Schedule& schedule);

  // Puts the call on `stream` (a cudaStream_t) and returns. Throws what an earlier call found.
  void run(const Call& call, const DeviceOptions& options, std::uintptr_t stream);
  // The same for sends and receives, which go on together; those of the same two ranks and
  // direction keep their order. Not collective.
  void transfer(const std::vector<DeviceTransfer>& list, std::uintptr_t stream);
  // Throws if a kernel gave up.
  void check();
  // True when all calls so far have ended; throws as check() does.
  bool idle();
  // Kernels that run or wait leave within milliseconds, here and at the peers, and raise `kind`:
  // aborted, peer_died or mismatch. `about`: the rank that died, if that is known. Any thread.
  void abort(const std::string& reason, ErrorKind kind = ErrorKind::aborted, int about = -1);
  // The same, and of this rank's kernels none that starts after it returns does anything.
  void stop(const std::string& reason, ErrorKind kind);
  // A kernel of this rank left without its result. Any thread.
  bool gave_up();
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace collectives
