#include "recorder.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>

namespace collectives {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

double read_clock(clockid_t which) {
  timespec t{};
  clock_gettime(which, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double unix_time() { return read_clock(CLOCK_REALTIME); }

// The cycle counter beside a clock that nobody sets, when this process made its first communicator
// and now: the line through both converts one into the other.
struct Instant {
  std::uint64_t ticks = collectives::ticks();
  double time = read_clock(CLOCK_MONOTONIC);
};
const Instant& first_instant() {
  static const Instant first;
  return first;
}
class Clock {
 public:
  Clock() {
    const Instant& first = first_instant();
    do now_ = Instant{};  // a rate needs some distance; this loops only in the first millisecond
    while (now_.time - first.time < 1e-3);
    seconds_per_tick_ = (now_.time - first.time) / static_cast<double>(now_.ticks - first.ticks);
    unix_now_ = unix_time();
  }
  double of(std::uint64_t t) const {
    return unix_now_ -
           static_cast<double>(static_cast<std::int64_t>(now_.ticks - t)) * seconds_per_tick_;
  }

 private:
  Instant now_;
  double unix_now_ = 0;
  double seconds_per_tick_ = 0;
};

// ---- JSON -------------------------------------------------------------------------------------

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class Object {
 public:
  Object& text(const char* name, const std::string& value) { return raw(name, quoted(value)); }
  Object& number(const char* name, std::int64_t value) { return raw(name, std::to_string(value)); }
  Object& count(const char* name, std::uint64_t value) { return raw(name, std::to_string(value)); }
  Object& seconds(const char* name, double value) {
    char digits[48];
    std::snprintf(digits, sizeof digits, "%.6f", value);
    return raw(name, digits);
  }
  Object& raw(const char* name, const std::string& value) {
    out_ += (out_.empty() ? "" : ", ") + quoted(name) + ": " + value;
    return *this;
  }
  std::string done() const { return "{" + out_ + "}"; }

 private:
  std::string out_;
};

std::string list(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : ",\n") + part;
  return "[" + out + "]";
}

const char* name_of(CallState state) {
  switch (state) {
    case CallState::entered:
      return "entered";
    case CallState::captured:
      return "captured";
    case CallState::running:
      return "running";
    case CallState::done:
      return "done";
    case CallState::failed:
      return "failed";
    case CallState::empty:
      break;
  }
  return "empty";
}

std::string name_of_collective(std::uint8_t number) {
  if (number == Recorder::kSend) return "send";
  if (number == Recorder::kRecv) return "recv";
  return std::string{name_of(static_cast<Collective>(number))};
}

// A copy of a record that nobody writes to.
struct Seen {
  std::uint64_t sequence, begin, end, count, thread;
  std::uint32_t tag;
  int peer, algorithm;
  std::uint8_t collective, dtype, op, order;
  CallState state;

  // False if there is none, or it changed while it was read.
  bool read(const CallRecord& r) {
    constexpr auto plain = std::memory_order_relaxed;
    sequence = r.sequence.load(std::memory_order_acquire);
    state = r.state.load(std::memory_order_acquire);
    begin = r.begin.load(plain);
    end = r.end.load(plain);
    count = r.count.load(plain);
    thread = r.thread.load(plain);
    tag = r.tag.load(plain);
    peer = r.peer.load(plain);
    algorithm = r.algorithm.load(plain);
    collective = r.collective.load(plain);
    dtype = r.dtype.load(plain);
    op = r.op.load(plain);
    order = r.order.load(plain);
    std::atomic_thread_fence(std::memory_order_acquire);
    return sequence != 0 && state != CallState::empty && r.sequence.load(plain) == sequence;
  }
  bool transfer() const { return collective >= Recorder::kSend; }
};

// ---- all of this process ----------------------------------------------------------------------

struct Registry {
  std::mutex mutex;
  std::vector<const Recorder*> alive;
  std::string start;  // JSON
};
Registry& registry() {
  static Registry* const one = new Registry;  // outlives everything: a dump may come at exit
  return *one;
}

}  // namespace

Recorder::Recorder(Identity identity) : identity_(std::move(identity)) {
  first_instant();
  const std::lock_guard lock(registry().mutex);
  registry().alive.push_back(this);
}

Recorder::~Recorder() {
  const std::lock_guard lock(registry().mutex);
  auto& alive = registry().alive;
  alive.erase(std::find(alive.begin(), alive.end(), this));
}

CallRecord* Recorder::transfer(std::uint8_t kind, Dtype dtype, std::uint64_t count, int peer,
                               std::uint32_t tag) {
  constexpr auto plain = std::memory_order_relaxed;
  const std::uint64_t number = transfers_begun_.fetch_add(1, plain) + 1;
  CallRecord& r = transfers_[number % kCalls];
  r.start(count);
  r.peer.store(peer, plain);
  r.tag.store(tag, plain);
  r.collective.store(kind, plain);
  r.dtype.store(static_cast<std::uint8_t>(dtype), plain);
  r.state.store(CallState::entered, plain);
  r.sequence.store(number, std::memory_order_release);
  return &r;
}

void Recorder::end_transfer(CallRecord* record, CallState state) {
  record->end.store(ticks(), std::memory_order_relaxed);
  record->state.store(state, std::memory_order_release);
}

void Recorder::waiting(const Where& where, steady_clock::time_point since) {
  const std::lock_guard lock(mutex_);
  waiting_.phase = where.phase;
  waiting_.sequence = current().sequence.load(std::memory_order_relaxed);
  waiting_.peer = where.peer;
  waiting_.channel = where.channel;
  waiting_.step = where.step;
  waiting_.round = where.round;
  waiting_.expected = where.expected;
  waiting_.seen = where.seen;
  waiting_.since = since;
}

void Recorder::error(const char* kind, const std::string& text, int peer) {
  const std::lock_guard lock(mutex_);
  error_kind_ = kind;
  error_text_ = text;
  error_peer_ = peer;
  error_time_ = unix_time();
}

void Recorder::name_algorithm(std::size_t number, const std::string& name) {
  const std::lock_guard lock(mutex_);
  algorithms_.resize(std::max(algorithms_.size(), number + 1));
  algorithms_[number] = name;
}

GpuCalls& Recorder::gpu() {
  const std::lock_guard lock(mutex_);
  if (gpu_ == nullptr) gpu_ = std::make_unique<GpuCalls>();
  return *gpu_;
}

GpuCalls& Recorder::gpu_transfers() {
  const std::lock_guard lock(mutex_);
  if (gpu_transfers_ == nullptr) gpu_transfers_ = std::make_unique<GpuCalls>();
  return *gpu_transfers_;
}

int Recorder::gpu_algorithm(const std::string& name) {
  if (name.empty()) return -1;  // a barrier
  const std::lock_guard lock(mutex_);
  const auto at = std::find(gpu_algorithms_.begin(), gpu_algorithms_.end(), name);
  if (at != gpu_algorithms_.end()) return static_cast<int>(at - gpu_algorithms_.begin());
  gpu_algorithms_.push_back(name);
  return static_cast<int>(gpu_algorithms_.size()) - 1;
}

std::string Recorder::describe_current() const {
  Seen r;
  if (!r.read(*current_.load(std::memory_order_acquire))) return "";
  std::string text = name_of_collective(r.collective) + " #" + std::to_string(r.sequence);
  if (static_cast<Collective>(r.collective) != Collective::barrier)
    text += " (" + std::string{name_of(static_cast<Dtype>(r.dtype))} + ", " +
            std::to_string(r.count * size_of(static_cast<Dtype>(r.dtype))) + " bytes)";
  const std::lock_guard lock(mutex_);
  if (r.algorithm >= 0 && static_cast<std::size_t>(r.algorithm) < algorithms_.size())
    text += " by " + algorithms_[r.algorithm];
  return text;
}

std::string Recorder::records(const std::array<CallRecord, kCalls>& ring,
                              const std::vector<std::string>& algorithms,
                              const GpuCalls* outcomes) const {
  const Clock clock;
  std::vector<Seen> seen;
  for (const CallRecord& record : ring) {
    Seen r{};
    if (!r.read(record)) continue;
    if (outcomes != nullptr) r.state = outcomes->outcome(r.sequence, r.state);
    seen.push_back(r);
  }
  std::sort(seen.begin(), seen.end(),
            [](const Seen& a, const Seen& b) { return a.sequence < b.sequence; });
  std::vector<std::string> parts;
  for (const Seen& r : seen) {
    const auto collective = static_cast<Collective>(r.collective);
    const auto dtype = static_cast<Dtype>(r.dtype);
    Object o;
    o.count("sequence", r.sequence).text("collective", name_of_collective(r.collective));
    if (r.transfer() || collective != Collective::barrier) {
      o.count("count", r.count).count("bytes", r.count * size_of(dtype));
      o.text("dtype", std::string{name_of(dtype)});
    }
    if (r.transfer()) o.number("peer", r.peer).count("tag", r.tag);
    if (!r.transfer()) {
      if (reduces(collective)) o.text("op", std::string{name_of(static_cast<Op>(r.op))});
      if (rooted(collective)) o.number("root", r.peer);
      if (static_cast<Order>(r.order) == Order::rank) o.text("order", "rank");
      if (r.algorithm >= 0 && static_cast<std::size_t>(r.algorithm) < algorithms.size())
        o.text("algorithm", algorithms[r.algorithm]);
    }
    o.text("state", name_of(r.state)).seconds("begin", clock.of(r.begin));
    if (r.end != 0) o.seconds("end", clock.of(r.end));
    o.count("thread", r.thread);
    parts.push_back(o.done());
  }
  return list(parts);
}

std::string Recorder::json() const {
  static const char* const states[] = {"open", "broken", "closed"};
  const std::lock_guard lock(mutex_);
  Object o;
  o.text("name", identity_.name).number("rank", identity_.rank).number("size", identity_.size);
  o.text("transports", identity_.transports).seconds("timeout", identity_.timeout_s);
  o.text("state", states[static_cast<int>(state_.load(std::memory_order_relaxed))]);
  o.seconds("time", unix_time());
  Seen now;
  const bool inside = now.read(*current_.load(std::memory_order_acquire)) &&
                      (now.state == CallState::entered || now.state == CallState::running);
  if (inside && waiting_.phase != nullptr && waiting_.sequence == now.sequence) {
    Object w;
    w.count("sequence", waiting_.sequence).text("for", waiting_.phase);
    w.seconds("seconds", duration<double>(steady_clock::now() - waiting_.since).count());
    if (waiting_.peer >= 0) w.number("peer", waiting_.peer);
    if (waiting_.channel >= 0) w.number("channel", waiting_.channel);
    if (waiting_.step >= 0) w.number("step", waiting_.step);
    if (waiting_.round >= 0) w.number("round", waiting_.round);
    if (waiting_.expected != 0) w.count("expected", waiting_.expected).count("seen", waiting_.seen);
    o.raw("waiting", w.done());
  }
  if (!error_kind_.empty()) {
    Object e;
    e.text("kind", error_kind_).text("message", error_text_).seconds("time", error_time_);
    if (error_peer_ >= 0) e.number("peer", error_peer_);
    o.raw("error", e.done());
  }
  o.raw("calls", records(calls_, algorithms_)).raw("transfers", records(transfers_, {}));
  const auto waiting = [&o](const char* name, const GpuCalls& calls) {
    const std::uint64_t call = calls.waits_for();
    if (call == 0) return;
    Object w;
    w.count("sequence", call).seconds("since", Clock().of(calls.waits_since()));
    o.raw(name, w.done());
  };
  if (gpu_ != nullptr) {
    o.raw("gpu_calls", records(gpu_->calls(), gpu_algorithms_, gpu_.get()));
    if (gpu_->broken()) o.raw("gpu_broken", "true");
    waiting("gpu_waiting", *gpu_);
  }
  if (gpu_transfers_ != nullptr && gpu_transfers_->begun() != 0) {
    o.raw("gpu_transfers", records(gpu_transfers_->calls(), {}, gpu_transfers_.get()));
    waiting("gpu_transfers_waiting", *gpu_transfers_);
  }
  return o.done();
}

void Recorder::note_start(const std::string& json) {
  const std::lock_guard lock(registry().mutex);
  registry().start = json;
}

std::string Recorder::process_json(const std::string& reason) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  std::vector<std::string> parts;
  std::string start;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    start = all.start;
    for (const Recorder* recorder : all.alive) parts.push_back(recorder->json());
  }
  Object o;
  o.text("format", "collectives flight recorder").number("version", 1);
  o.text("host", host).number("pid", getpid()).seconds("time", unix_time());
  o.text("reason", reason);
  if (!start.empty()) o.raw("start", start);
  o.raw("communicators", list(parts));
  return o.done() + "\n";
}

}  // namespace collectives
