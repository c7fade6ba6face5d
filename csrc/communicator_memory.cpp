// Sends and receives, and symmetric memory.
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "communicator.hpp"
#include "errors.hpp"

namespace collectives {
namespace {

// In the flight recorder, if the record has not gone to a later transfer since.
void end_record(const TransferState& t, CallState state) {
  if (t.record->sequence.load(std::memory_order_relaxed) == t.recorded)
    Recorder::end_transfer(t.record, state);
}

}  // namespace

// ---- point to point ---------------------------------------------------------------------------

PostedTransfer Communicator::post(const Message& m, bool background) {
  check_open();
  if (background) start_transfer_worker();
  CallRecord* const record =
      recorder_->transfer(m.sends ? Recorder::kSend : Recorder::kRecv, m.dtype,
                          m.bytes / size_of(m.dtype), m.peer, m.tag);
  const std::uint64_t number = record->sequence.load(std::memory_order_relaxed);
  auto t = m.sends ? p2p_->post_send(m.peer, m.tag, m.dtype, m.data, m.bytes)
                   : p2p_->post_recv(m.peer, m.tag, m.dtype, m.data, m.bytes);
  t->record = record;
  t->recorded = number;
  if (background && !p2p_->done(t)) wake_transfer_worker();
  return t;
}

void Communicator::transfer(const std::vector<Message>& messages) {
  check_open();
  const Lengthy scope(this);
  std::vector<PostedTransfer> posted;
  posted.reserve(messages.size());
  try {
    for (const Message& m : messages) posted.push_back(post(m, false));
  } catch (const std::exception& error) {
    leave_path(ErrorKind::aborted, error.what());
    throw;
  }
  wait_and_tell(posted);
}

void Communicator::wait(const std::vector<PostedTransfer>& posted) {
  if (birth_.in_child()) check_open();
  const Lengthy scope(this);
  wait_and_tell(posted);
}

void Communicator::wait_and_tell(const std::vector<PostedTransfer>& posted) {
  try {
    wait_for_all(posted);
  } catch (const Error& error) {
    note_error(name_of(error.kind()), error.what(), error.peer());
    for (const PostedTransfer& t : posted) end_record(*t, CallState::failed);
    throw;
  }
  for (const PostedTransfer& t : posted) end_record(*t, CallState::done);
}

bool Communicator::done(const PostedTransfer& t) {
  if (birth_.in_child()) check_open();
  if (p2p_->done(t) || over_) return true;
  if (!broken_ && time_to_look(std::chrono::steady_clock::now())) {
    try {
      look_around("has posted a transfer");
      look_at_peer(t);
    } catch (const Error&) {  // now it is broken
    }
  }
  return broken_ || p2p_->done(t);
}

// A transfer whose peer has closed ends, and that alone: it may be one that nobody waits for.
void Communicator::look_at_peer(const PostedTransfer& t) {
  const int peer = p2p_->peer(t);
  const int q = peer >= 0 ? config_.local_of[peer] : -1;
  if (!config_.region || q < 0 || peer == config_.rank || !liveness_->left(q)) return;
  p2p_->progress();
  p2p_->peer_has_closed(
      t, std::make_exception_ptr(
             Error(ErrorKind::closed,
                   "rank " + std::to_string(peer) + " has closed the communicator while rank " +
                       std::to_string(config_.rank) + " has posted a transfer with it",
                   peer)));
}

void Communicator::wait_for_all(const std::vector<PostedTransfer>& posted) {
  for (const PostedTransfer& t : posted) {
    const auto where = [&] {
      Where w;
      w.phase = t->sends ? "room for a message" : "a message";
      w.peer = p2p_->peer(t);
      w.channel = kPointToPointChannel;
      return w;
    };
    try {
      p2p_waiter_->until(
          [&] {
            p2p_->progress();
            if (p2p_->done(t)) return true;
            if (over_)
              throw Error(ErrorKind::closed,
                          "this communicator was closed while a transfer was under way");
            return false;
          },
          where);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      // A signal handler's exception: the caller's arrays go, and no message may come into them.
      leave_path(ErrorKind::aborted, error.what());
      throw;
    }
    if (t->sends && !t->error && t->peer != config_.rank)
      p2p_waiter_->until([&] { return over_ || p2p_->flushed(t->peer); }, where);
  }
  for (const PostedTransfer& t : posted)
    if (t->error) std::rethrow_exception(t->error);
}

// ---- symmetric memory -------------------------------------------------------------------------

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

std::string Communicator::make_segment(std::size_t bytes) {
  check_open();
  auto mapping = std::make_shared<Mapping>();
  mapping->bytes = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  const bool shared = !config_.threads && config_.nranks > 1;
  if (shared) mapping->fd = make_memfd("collectives-symmetric", mapping->bytes);
  void* base = mmap(nullptr, mapping->bytes, PROT_READ | PROT_WRITE,
                    shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, mapping->fd, 0);
  if (base == MAP_FAILED)
    system_failed("cannot map " + std::to_string(mapping->bytes) + " bytes of symmetric memory");
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
        if (base == MAP_FAILED) system_failed("cannot map a peer's symmetric memory");
        mapping->mapped.push_back(static_cast<std::byte*>(base));
        segment.base[q] = static_cast<std::byte*>(base);
      }
    }
    change_segments([&](Segments& list) { list.push_back(std::move(segment)); });
  }
  std::byte* own = mapping->own;
  mappings_[id] = std::move(mapping);
  return own;
}

void Communicator::change_segments(const std::function<void(Segments&)>& change) {
  std::lock_guard lock(segments_mutex_);
  auto changed = std::make_shared<Segments>(*segments_);
  change(*changed);
  segments_ = std::move(changed);
  segments_version_.fetch_add(1, std::memory_order_release);
}

const Communicator::Segments& Communicator::segments_now() {
  if (segments_version_.load(std::memory_order_acquire) != call_segments_version_) {
    std::lock_guard lock(segments_mutex_);
    call_segments_ = segments_;
    call_segments_version_ = segments_version_.load(std::memory_order_relaxed);
  }
  return *call_segments_;
}

void Communicator::release_segment(std::uint64_t id) {
  change_segments([&](Segments& list) {
    list.erase(std::remove_if(list.begin(), list.end(),
                              [&](const SymmetricSegment& s) { return s.id == id; }),
               list.end());
  });
  mappings_.erase(id);
}

}  // namespace collectives
