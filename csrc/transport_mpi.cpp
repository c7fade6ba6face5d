#include "transport_mpi.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "errors.hpp"
#include "never_free.hpp"

namespace collectives {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPoisonTag = 0;
constexpr std::size_t kPoisonBytes =
    2048;  // below every MPI's eager limit, so it leaves without the peer's help
constexpr auto kCloseWait = std::chrono::seconds(1);
constexpr int kCloseProbes = 64;

// Without a header a message can leave from the caller's memory, which saves a copy; below, the
// copy is cheaper than a rendezvous. Both ends apply it, so it is fixed.
constexpr std::size_t kBareMin = 16 << 10;

constexpr int tag_of(int channel) { return 1 + channel; }

// The buffers of one port. A message starts 16 bytes before a multiple of 64, so that the payload
// behind the header is aligned. Memory is taken when the first message needs it; of the host's,
// pages are touched as messages do.
class Slots {
 public:
  Slots(std::size_t slot_bytes, int depth, SlotMemory* given)
      : stride_(stride_of(slot_bytes, given != nullptr ? kGpuLine : kPage)),
        depth_(static_cast<std::size_t>(depth)),
        given_(given) {}
  ~Slots() {
    if (given_ == nullptr) std::free(memory_);
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  static std::size_t stride_of(std::size_t slot_bytes, std::size_t unit) {
    return (slot_bytes + kFront + unit - 1) / unit * unit;
  }

  char* payload(std::uint64_t slot) { return memory() + slot * stride_ + kFront; }
  char* message(std::uint64_t slot) { return payload(slot) - sizeof(Header); }
  bool holds(const char* p) const {
    return memory_ != nullptr && memory_ <= p && p < memory_ + stride_ * depth_;
  }
  // MPI may still use the memory: never free it.
  void abandon() {
    if (memory_ == nullptr) return;
    if (given_ != nullptr) {
      given_->abandon();
    } else {
      never_free(memory_);
    }
    memory_ = nullptr;
  }

  static constexpr std::size_t kFront = 64;
  static constexpr std::size_t kGpuLine = 256;

 private:
  static constexpr std::size_t kPage = 4096;

  char* memory() {
    if (memory_ != nullptr) return memory_;
    const std::size_t bytes = stride_ * depth_;
    memory_ = given_ != nullptr ? given_->take(bytes)
                                : static_cast<char*>(std::aligned_alloc(kPage, bytes));
    if (memory_ == nullptr) throw std::bad_alloc();
    return memory_;
  }

  std::size_t stride_, depth_;
  SlotMemory* given_;
  char* memory_ = nullptr;
};

// Polls until true or until the deadline.
template <class Ready>
bool poll_until(Clock::time_point deadline, Ready&& ready) {
  while (!ready()) {
    if (Clock::now() > deadline) return false;
    sched_yield();
  }
  return true;
}

// What a port knows of its connection.
struct Wire {
  Mpi* mpi;
  MpiComm comm;
  int peer;
  int mpi_rank;
  int channel;
  std::size_t slot_bytes;
  int depth;
  SlotMemory* slots;  // of a GPU, or nullptr
};

[[noreturn]] void bad_message(const Wire& wire, ErrorKind kind, const std::string& what) {
  throw Error(kind, "peer " + std::to_string(wire.peer) + ", channel " +
                        std::to_string(wire.channel) + ": " + what);
}

}  // namespace

// Messages [sent_, filled_) are in flight, in slots numbered modulo depth.
class MpiTransport::Send final : public SendPort {
 public:
  explicit Send(const Wire& wire)
      : wire_(wire),
        slots_(wire.slot_bytes, wire.depth, wire.slots),
        requests_(static_cast<std::size_t>(wire.depth)) {}

  char* acquire(std::size_t bytes) override {
    if (bytes > wire_.slot_bytes) {
      bad_message(wire_, ErrorKind::invalid,
                  "a message of " + std::to_string(bytes) + " bytes does not fit a slot of " +
                      std::to_string(wire_.slot_bytes));
    }
    if (filled_ - sent_ == requests_.size() && !reap()) return nullptr;
    return slots_.payload(filled_ % requests_.size());
  }

  void commit(const Header& header) override {
    const std::size_t slot = filled_ % requests_.size();
    char* message = slots_.message(slot);
    std::memcpy(message, &header, sizeof header);
    requests_[slot] = wire_.mpi->isend(message, sizeof header + header.bytes, wire_.mpi_rank,
                                       tag_of(wire_.channel), wire_.comm);
    ++filled_;
  }

  std::size_t bare_min() const override { return kBareMin; }
  bool only_bare() const override { return wire_.slots != nullptr; }

  void commit_bare(std::size_t bytes) override {
    const std::size_t slot = filled_ % requests_.size();
    requests_[slot] = wire_.mpi->isend(slots_.payload(slot), bytes, wire_.mpi_rank,
                                       tag_of(wire_.channel), wire_.comm);
    ++filled_;
  }

  bool send_from(const char* data, std::size_t bytes) override {
    if (filled_ - sent_ == requests_.size() && !reap()) return false;
    requests_[filled_ % requests_.size()] =
        wire_.mpi->isend(data, bytes, wire_.mpi_rank, tag_of(wire_.channel), wire_.comm);
    ++filled_;
    return true;
  }

  std::uint64_t sent() const override { return filled_; }
  std::uint64_t completed() override {
    flushed();
    return sent_;
  }

  bool flushed() override {
    while (sent_ != filled_) {
      if (!reap()) return false;
    }
    return true;
  }

  // True if nothing is in flight any more; otherwise the memory is MPI's from now on.
  bool close(Clock::time_point deadline) {
    if (poll_until(deadline, [&] { return flushed(); })) return true;
    for (MpiRequest& r : requests_) wire_.mpi->request_free(r);
    abandon();
    return false;
  }
  void abandon() {
    if (sent_ != filled_) slots_.abandon();
  }

 private:
  bool reap() {
    if (!wire_.mpi->test(requests_[sent_ % requests_.size()])) return false;
    ++sent_;
    return true;
  }

  Wire wire_;
  Slots slots_;
  std::vector<MpiRequest> requests_;
  std::uint64_t filled_ = 0;
  std::uint64_t sent_ = 0;
};

// One receive is posted at a time, when its message is asked for: by then it is known where the
// message belongs. Senders go on meanwhile, as far as their FIFO reaches.
class MpiTransport::Recv final : public RecvPort {
 public:
  explicit Recv(const Wire& wire) : wire_(wire), slot_(wire.slot_bytes, 1, wire.slots) {}

  void expect(std::uint64_t messages) override { announced_ += messages; }

  const char* peek(Header* header) override {
    if (state_ == State::idle) post(slot_.message(0), sizeof(Header) + wire_.slot_bytes);
    MpiStatus status;
    if (state_ == State::posted && test(&status)) {
      std::memcpy(&header_, where_, sizeof header_);
      if (status.bytes < sizeof header_ || status.bytes != sizeof header_ + header_.bytes) {
        bad_message(wire_, ErrorKind::mismatch,
                    "a message of " + std::to_string(status.bytes) +
                        " bytes arrived whose header announces " +
                        std::to_string(sizeof header_ + header_.bytes));
      }
    }
    if (state_ != State::arrived) return nullptr;
    *header = header_;
    return where_ + sizeof header_;
  }

  std::size_t bare_min() const override { return kBareMin; }
  bool only_bare() const override { return wire_.slots != nullptr; }
  bool posted() const override { return state_ != State::idle; }
  void post_into(char* into, std::size_t bytes) override { post(into, bytes); }

  const char* peek_bare(std::size_t* bytes) override {
    if (state_ == State::idle) post(slot_.payload(0), wire_.slot_bytes);
    MpiStatus status;
    if (state_ == State::posted && test(&status))
      header_.bytes = static_cast<std::uint32_t>(status.bytes);
    if (state_ != State::arrived) return nullptr;
    *bytes = header_.bytes;
    return where_;
  }

  void release() override { state_ = State::idle; }

  bool withdraw(Clock::time_point deadline) noexcept override {
    if (state_ != State::posted || slot_.holds(where_)) return true;
    try {
      wire_.mpi->cancel(request_);
      if (poll_until(deadline, [&] { return wire_.mpi->test(request_); })) state_ = State::idle;
    } catch (const std::exception&) {
      // MPI is failing: the caller is on its way to report why.
    }
    return state_ == State::idle;
  }

  // Cancels what is posted; false if something was, for then a call ended in the middle. Memory
  // that MPI does not let go of in time stays MPI's.
  bool close(Clock::time_point deadline) {
    if (state_ != State::posted) return true;
    wire_.mpi->cancel(request_);
    if (!poll_until(deadline, [&] { return wire_.mpi->test(request_); })) abandon();
    return false;
  }
  void abandon() {
    if (state_ == State::posted) slot_.abandon();
  }

 private:
  enum class State { idle, posted, arrived };

  void post(char* into, std::size_t bytes) {
    if (announced_ == 0) return;
    --announced_;
    where_ = into;
    request_ = wire_.mpi->irecv(into, bytes, wire_.mpi_rank, tag_of(wire_.channel), wire_.comm);
    state_ = State::posted;
  }

  bool test(MpiStatus* status) {
    try {
      if (!wire_.mpi->test(request_, status)) return false;
    } catch (const Error& e) {
      bad_message(wire_, e.kind(),
                  std::string("receiving failed (do all ranks use slots of ") +
                      std::to_string(wire_.slot_bytes) + " bytes?): " + e.what());
    }
    state_ = State::arrived;
    return true;
  }

  Wire wire_;
  Slots slot_;
  MpiRequest request_;
  char* where_ = nullptr;
  std::uint64_t announced_ = 0;
  State state_ = State::idle;
  Header header_;
};

MpiTransport::MpiTransport(std::shared_ptr<Mpi> mpi, MpiComm comm, MpiTransportOptions options)
    : mpi_(std::move(mpi)), options_(std::move(options)), ranks_(options_.mpi_ranks) {
  if (options_.depth < 1 || options_.slot_bytes < 1 ||
      options_.slot_bytes > (std::size_t{1} << 30)) {
    throw Error(ErrorKind::invalid,
                "the MPI transport needs depth >= 1 and slots of 1 byte to 1 GiB, got depth " +
                    std::to_string(options_.depth) + " and slots of " +
                    std::to_string(options_.slot_bytes) + " bytes");
  }
  const int size = mpi_->size(comm);
  const int rank = mpi_->rank(comm);
  if (ranks_.empty()) {
    for (int r = 0; r < size; ++r) ranks_.push_back(r);
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0 || ranks_[i] >= size) {
      throw Error(ErrorKind::invalid, "peer " + std::to_string(i) + " is mapped to MPI rank " +
                                          std::to_string(ranks_[i]) + " of a communicator of " +
                                          std::to_string(size));
    }
    if (ranks_[i] == rank) self_ = static_cast<int>(i);
  }
  comm_ = mpi_->comm_dup(comm, options_.timeout_s);
}

MpiTransport::~MpiTransport() {
  try {
    if (mpi_->usable()) {
      const auto deadline = Clock::now() + kCloseWait;
      bool clean = !poisoned_ && !poison_out_;
      for (auto& [key, port] : sends_) clean = port->close(deadline) && clean;
      for (auto& [key, port] : recvs_) clean = port->close(deadline) && clean;
      if (poison_out_ && !mpi_->test_all(poison_out_->requests)) {
        for (MpiRequest& r : poison_out_->requests) mpi_->request_free(r);
        never_free(std::move(poison_out_));
      }
      // After a failure the communicator is left to MPI: freeing is collective by the standard, so
      // peers that never come could hold us, and MPICH 5.0 ends the process when a large message
      // for it has arrived and was never received. Several probes, for each moves MPI only one
      // step.
      for (int i = 0; clean && i < kCloseProbes; ++i) {
        clean = !mpi_->iprobe(Mpi::any_source, Mpi::any_tag, comm_, nullptr);
      }
      if (clean) mpi_->comm_free(comm_);
      return;
    }
  } catch (const Error&) {
    // MPI is failing: a destructor has nobody to tell.
  }
  // Without MPI to tell what is complete, buffers that may be in use are left alone.
  for (auto& [key, port] : sends_) port->abandon();
  for (auto& [key, port] : recvs_) port->abandon();
  if (poison_out_) never_free(std::move(poison_out_));
}

int MpiTransport::rank_for_port(int peer, int channel) const {
  if (peer < 0 || peer >= size() || peer == self_) {
    throw Error(ErrorKind::invalid, "peer " + std::to_string(peer) + " is no peer of rank " +
                                        std::to_string(self_) + " among " + std::to_string(size()));
  }
  if (channel < 0 || channel > max_channel) {
    throw Error(ErrorKind::invalid, "channel " + std::to_string(channel) + " is outside 0 .. " +
                                        std::to_string(max_channel) + ", what MPI tags allow");
  }
  return ranks_[static_cast<std::size_t>(peer)];
}

SendPort& MpiTransport::send_port(int peer, int channel) {
  const int rank = rank_for_port(peer, channel);
  const std::lock_guard lock(ports_mutex_);
  std::unique_ptr<Send>& port = sends_[{peer, channel}];
  if (!port) {
    port = std::make_unique<Send>(Wire{mpi_.get(), comm_, peer, rank, channel, options_.slot_bytes,
                                       options_.depth, options_.slots.get()});
  }
  return *port;
}

RecvPort& MpiTransport::recv_port(int peer, int channel) {
  const int rank = rank_for_port(peer, channel);
  const std::lock_guard lock(ports_mutex_);
  std::unique_ptr<Recv>& port = recvs_[{peer, channel}];
  if (!port) {
    port = std::make_unique<Recv>(Wire{mpi_.get(), comm_, peer, rank, channel, options_.slot_bytes,
                                       options_.depth, options_.slots.get()});
  }
  return *port;
}

std::size_t MpiTransport::slot_that_fits(std::size_t bytes, int slots) {
  const std::size_t each = bytes / static_cast<std::size_t>(slots) / Slots::kGpuLine;
  return each < 2 ? 0 : each * Slots::kGpuLine - Slots::kFront;
}

std::size_t MpiTransport::scratch_bytes() const {
  const std::lock_guard lock(ports_mutex_);
  const auto depth = static_cast<std::size_t>(options_.depth);
  return (sends_.size() * depth + recvs_.size()) * options_.slot_bytes;
}

void MpiTransport::progress() { look_for_poison(); }

void MpiTransport::look_for_poison() {
  const std::unique_lock lock(poison_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread is looking
  MpiStatus status;
  // Any call moves MPI along; this one does so also after the first poison, whose successors stay
  // unreceived.
  if (!mpi_->iprobe(Mpi::any_source, kPoisonTag, comm_, &status) || poisoned_) return;
  auto text = std::make_unique<std::string>(status.bytes, '\0');
  MpiRequest request = mpi_->irecv(text->data(), text->size(), status.source, kPoisonTag, comm_);
  if (poll_until(Clock::now() + kCloseWait, [&] { return mpi_->test(request); })) {
    poison_text_ = *text;
  } else {
    poison_text_ = "(its message did not arrive)";
    never_free(std::move(text));
  }
  const auto peer = std::find(ranks_.begin(), ranks_.end(), status.source);
  poison_peer_ = peer == ranks_.end() ? -1 : static_cast<int>(peer - ranks_.begin());
  poisoned_.store(true, std::memory_order_release);
}

void MpiTransport::poison(std::string_view text) noexcept {
  try {
    const std::lock_guard lock(poison_mutex_);
    if (poison_out_ || !mpi_->usable()) return;
    poison_out_ = std::make_unique<Outgoing>();
    poison_out_->text = std::string(cut_short(text, kPoisonBytes));
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == self_) continue;
      poison_out_->requests.push_back(
          mpi_->isend(poison_out_->text.data(), poison_out_->text.size(),
                      ranks_[static_cast<std::size_t>(peer)], kPoisonTag, comm_));
    }
  } catch (const std::exception&) {
    // Best effort: the caller is already on its way to report the error that made it poison.
  }
}

bool MpiTransport::poisoned(std::string* text, int* peer) {
  if (!poisoned_.load(std::memory_order_acquire)) {
    if (!mpi_->usable()) return false;
    look_for_poison();
    if (!poisoned_.load(std::memory_order_acquire)) return false;
  }
  if (text != nullptr) *text = poison_text_;
  if (peer != nullptr) *peer = poison_peer_;
  return true;
}

}  // namespace collectives
