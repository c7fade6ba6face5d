// The flight recorder: the last calls of each communicator, to be read when something goes wrong.
//
// The caller writes with plain stores into a ring in memory (a cache line a call); whoever reads
// (another thread, at any time) may find one record half written and drops it. Nothing is formatted
// before a dump is asked for. Begin and end of a call are read from the cycle counter.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call_record.hpp"
#include "gpu_calls.hpp"
#include "wait.hpp"

namespace collectives {

// Where dumps go by themselves: a directory, "" for nowhere.
void set_dump_directory(const std::string& directory);
// Writes Recorder::process_json() to a file of its own in that directory; "" if there is none, or
// it cannot be written (an error that is being reported must not be replaced by another).
std::string dump_process(const std::string& reason) noexcept;

class Recorder {
 public:
  static constexpr std::size_t kCalls = kRecords;
  static constexpr std::uint64_t kTimedCount = 1024;       // elements from which calls have an end
  static constexpr std::uint8_t kSend = 254, kRecv = 255;  // beside the numbers of collectives

  // What does not change, and the name that all ranks give this communicator.
  struct Identity {
    std::string name;
    int rank = 0, size = 1;
    std::string transports;
    double timeout_s = 0;
  };
  explicit Recorder(Identity identity);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // A call begins, on the thread that runs it.
  void begin(std::uint64_t sequence, const Call& call, int algorithm, Order order) {
    constexpr auto plain = std::memory_order_relaxed;
    CallRecord& r = calls_[sequence % kCalls];
    r.describe(call, call.count, algorithm, order);
    r.state.store(CallState::entered, plain);
    r.sequence.store(sequence, std::memory_order_release);
    current_.store(&r, std::memory_order_release);
  }
  // The elements of a call whose length is in its blocks.
  void count(std::uint64_t elements) { current().count.store(elements, std::memory_order_relaxed); }
  // All ranks are in the call.
  void running() { current().state.store(CallState::running, std::memory_order_relaxed); }
  // Reading the counter takes 8 ns, as long as all the rest: short calls go without an end.
  void done() {
    if (current().count.load(std::memory_order_relaxed) >= kTimedCount ||
        waited_.load(std::memory_order_relaxed))
      end(CallState::done);
    else
      current().state.store(CallState::done, std::memory_order_relaxed);
  }
  void failed() { end(CallState::failed); }

  // A send or a receive; its record is good until kCalls others have begun.
  CallRecord* transfer(std::uint8_t kind, Dtype dtype, std::uint64_t count, int peer,
                       std::uint32_t tag);
  static void end_transfer(CallRecord* record, CallState state);

  // The rings of calls on GPU arrays, and of sends and receives of these; made when first asked
  // for.
  GpuCalls& gpu();
  GpuCalls& gpu_transfers();
  // The number of an algorithm's name in that ring.
  int gpu_algorithm(const std::string& name);

  // From slow waits.
  void waits() { waited_.store(true, std::memory_order_relaxed); }
  void waiting(const Where& where, std::chrono::steady_clock::time_point since);
  // The first error that left the ranks out of step, or the last one.
  void error(const char* kind, const std::string& text, int peer);
  // An error that somebody is told of: kept, and dumped where dumps go.
  void report(const char* kind, const std::string& text, int peer) {
    error(kind, text, peer);
    dump_process(std::string{kind} + ": " + text);
  }
  void name_algorithm(std::size_t number, const std::string& name);
  void closed() { state_.store(State::closed, std::memory_order_relaxed); }
  void broken() { state_.store(State::broken, std::memory_order_relaxed); }

  // One call in words: "all_reduce #3 (float32, 4096 bytes, ring)". Of the thread that is in it.
  std::string describe_current() const;
  // All of it as a JSON object; its members are listed in docs/flight-recorder.md.
  std::string json() const;

  // Every recorder of this process that is alive, as one JSON object.
  static std::string process_json(const std::string& reason);
  // What this process knows of a start that is under way or has failed, as JSON, for the dumps that
  // are written from now on; "" for nothing.
  static void note_start(const std::string& json);

 private:
  enum class State { open, broken, closed };

  CallRecord& current() { return *current_.load(std::memory_order_relaxed); }

  void end(CallState state) {
    current().end.store(ticks(), std::memory_order_relaxed);
    current().state.store(state, std::memory_order_release);
    waited_.store(false, std::memory_order_relaxed);
  }
  // Oldest first. The mutex is held by the caller.
  std::string records(const std::array<CallRecord, kCalls>& ring,
                      const std::vector<std::string>& algorithms,
                      const GpuCalls* outcomes = nullptr) const;

  Identity identity_;
  std::array<CallRecord, kCalls> calls_{};
  std::atomic<CallRecord*> current_{calls_.data()};  // other threads describe it
  std::atomic<bool> waited_{false};                  // the current call has been in a slow wait
  std::array<CallRecord, kCalls> transfers_{};
  std::atomic<std::uint64_t> transfers_begun_{0};
  std::atomic<State> state_{State::open};

  // The wait that the current call is in, written about once a millisecond while it lasts.
  struct Waiting {
    const char* phase = nullptr;
    std::uint64_t sequence = 0;
    int peer = -1, channel = -1, step = -1, round = -1;
    std::uint64_t expected = 0, seen = 0;
    std::chrono::steady_clock::time_point since;
  };
  mutable std::mutex mutex_;  // of what follows
  Waiting waiting_;
  std::vector<std::string> algorithms_, gpu_algorithms_;
  std::unique_ptr<GpuCalls> gpu_, gpu_transfers_;
  std::string error_kind_, error_text_;
  int error_peer_ = -1;
  double error_time_ = 0;
};

// From now on this signal makes this process dump. The handler only writes to a pipe; a thread
// that needs neither Python nor any lock of a caller does the rest.
void dump_on_signal(int number);

}  // namespace collectives
