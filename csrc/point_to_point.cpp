#include "point_to_point.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace collectives {
namespace {

// Header::tag of a slice: the message's length and dtype. Header::user: the user's tag.
std::uint64_t pack(std::size_t bytes, Dtype dtype) {
  return static_cast<std::uint64_t>(bytes) << 8 | static_cast<std::uint64_t>(dtype);
}
std::size_t bytes_of(std::uint64_t tag) { return tag >> 8; }
Dtype dtype_of(std::uint64_t tag) { return static_cast<Dtype>(tag & 0xff); }

}  // namespace

PostedTransfer PointToPoint::post_send(int peer, std::uint32_t tag, Dtype dtype, const void* data,
                                       std::size_t bytes) {
  auto t = std::make_shared<TransferState>();
  t->peer = peer;
  t->tag = tag;
  t->dtype = dtype;
  t->sends = true;
  t->source = static_cast<const std::byte*>(data);
  t->bytes = bytes;
  std::lock_guard lock(mutex_);
  Peer& p = peers_[peer];
  if (peer == me_) {  // to oneself: a copy
    Stashed s{tag, dtype, {}, bytes, bytes};
    s.data.assign(t->source, t->source + bytes);
    p.stash.push_back(std::move(s));
    t->done = true;
    match_stash(peer, p);
    return t;
  }
  p.sends.push_back(t);
  if (!stopped_) progress_sends(peer, p);
  return t;
}

PostedTransfer PointToPoint::post_recv(int peer, std::uint32_t tag, Dtype dtype, void* data,
                                       std::size_t bytes) {
  auto t = std::make_shared<TransferState>();
  t->peer = peer;
  t->tag = tag;
  t->dtype = dtype;
  t->target = static_cast<std::byte*>(data);
  t->bytes = bytes;
  std::lock_guard lock(mutex_);
  if (peer == kAnyPeer) {
    any_.push_back(t);
    for (std::size_t r = 0; r < links_.to.size() && !t->done; ++r)
      match_stash(static_cast<int>(r), peers_[static_cast<int>(r)]);
    return t;
  }
  Peer& p = peers_[peer];
  p.recvs.push_back(t);
  match_stash(peer, p);
  return t;
}

bool PointToPoint::done(const PostedTransfer& t) {
  std::lock_guard lock(mutex_);
  return t->done;
}

// What the peer did before it closed is visible by now; only a later look can conclude that nothing
// more will come.
void PointToPoint::peer_has_closed(const PostedTransfer& t, std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  Peer& p = peers_[t->peer];
  if (t->done || t->moved != 0 || p.receiving == t || ++t->closed_seen < 3) return;
  p.recvs.remove(t);
  p.sends.erase(std::remove(p.sends.begin(), p.sends.end(), t), p.sends.end());
  t->error = std::move(error);
  t->done = true;
}

int PointToPoint::peer(const PostedTransfer& t) {
  std::lock_guard lock(mutex_);
  return t->peer;
}

bool PointToPoint::idle() {
  std::lock_guard lock(mutex_);
  if (!any_.empty()) return false;
  for (const auto& [peer, p] : peers_)
    if (!p.sends.empty() || !p.recvs.empty() || p.receiving || p.stashing) return false;
  return true;
}

void PointToPoint::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
}

bool PointToPoint::flushed(int peer) {
  std::lock_guard lock(mutex_);
  links_.to[peer]->progress();
  return port_to(peer, peers_[peer]).flushed();
}

SendPort& PointToPoint::port_to(int peer, Peer& p) {
  if (p.to == nullptr) p.to = &links_.to[peer]->send_port(peer, channel_);
  return *p.to;
}

RecvPort& PointToPoint::port_from(int peer, Peer& p) {
  if (p.from == nullptr) p.from = &links_.to[peer]->recv_port(peer, channel_);
  return *p.from;
}

bool PointToPoint::progress() {
  std::lock_guard lock(mutex_);
  bool moved = false;
  if (stopped_) return moved;
  for (auto& [peer, p] : peers_) {  // a receive from any peer has made an entry for each
    if (peer == me_) continue;
    if (!p.sends.empty()) moved |= progress_sends(peer, p);
    if (!any_.empty() || !p.recvs.empty() || p.receiving || p.stashing)
      moved |= progress_recvs(peer, p);
  }
  return moved;
}

bool PointToPoint::progress_sends(int peer, Peer& p) {
  SendPort& port = port_to(peer, p);
  bool any = false;
  while (!p.sends.empty()) {
    TransferState& t = *p.sends.front();
    const std::size_t part = std::min(links_.slot_bytes, t.bytes - t.moved);
    if (t.moved < t.bytes || t.bytes == 0) {
      char* slot = port.acquire(part);
      if (slot == nullptr) break;
      if (part != 0) std::memcpy(slot, t.source + t.moved, part);
      port.commit({static_cast<std::uint32_t>(part), t.tag, pack(t.bytes, t.dtype)});
      t.moved += part;
      any = true;
    }
    if (t.moved == t.bytes) {
      t.done = true;
      p.sends.pop_front();
    }
  }
  if (!p.sends.empty()) links_.to[peer]->progress();
  return any;
}

void PointToPoint::check_match(int peer, TransferState& t, Dtype dtype, std::size_t total) {
  if (total == t.bytes && dtype == t.dtype) return;
  const auto words = [](std::size_t bytes, Dtype d) {
    return std::to_string(bytes / size_of(d)) + " x " + std::string{name_of(d)} + " (" +
           std::to_string(bytes) + " bytes)";
  };
  t.discard = true;
  t.error = std::make_exception_ptr(
      Error(ErrorKind::mismatch, "recv from rank " + std::to_string(peer) + " with tag " +
                                     std::to_string(t.tag) + " expects " + words(t.bytes, t.dtype) +
                                     ", but rank " + std::to_string(peer) + " sent " +
                                     words(total, dtype) + ". The message was dropped"));
}

// The first receive that takes a message of `p` with `tag`, and the list that it is in.
std::list<PostedTransfer>* PointToPoint::find_recv(Peer& p, std::uint32_t tag,
                                                   std::list<PostedTransfer>::iterator* at) {
  for (std::list<PostedTransfer>* list : {&p.recvs, &any_}) {
    *at = std::find_if(list->begin(), list->end(),
                       [&](const PostedTransfer& t) { return t->tag == tag; });
    if (*at != list->end()) return list;
  }
  return nullptr;
}

bool PointToPoint::match_stash(int peer, Peer& p) {
  bool any = false;
  for (auto s = p.stash.begin(); s != p.stash.end();) {
    std::list<PostedTransfer>::iterator at;
    std::list<PostedTransfer>* list = s->moved == s->total ? find_recv(p, s->tag, &at) : nullptr;
    if (list == nullptr) {
      ++s;
      continue;
    }
    TransferState& t = **at;
    t.peer = peer;
    check_match(peer, t, s->dtype, s->total);
    if (!t.discard && s->total != 0) std::memcpy(t.target, s->data.data(), s->total);
    t.done = true;
    list->erase(at);
    s = p.stash.erase(s);
    any = true;
  }
  return any;
}

bool PointToPoint::progress_recvs(int peer, Peer& p) {
  RecvPort& port = port_from(peer, p);
  bool any = false;
  while (!any_.empty() || !p.recvs.empty() || p.receiving || p.stashing) {
    if (!p.listening) {
      port.expect(1);
      p.listening = true;
    }
    Header header;
    const char* slice = port.peek(&header);
    if (slice == nullptr) {
      links_.to[peer]->progress();
      break;
    }
    const std::size_t total = bytes_of(header.tag);
    if (!p.receiving && p.stashing == nullptr) {  // the first slice of a message
      std::list<PostedTransfer>::iterator at;
      if (std::list<PostedTransfer>* list = find_recv(p, header.user, &at)) {
        p.receiving = *at;
        list->erase(at);
        p.receiving->peer = peer;
        check_match(peer, *p.receiving, dtype_of(header.tag), total);
      } else {
        p.stash.push_back(
            {header.user, dtype_of(header.tag), std::vector<std::byte>(total), total, 0});
        p.stashing = &p.stash.back();
      }
    }
    if (p.receiving) {
      TransferState& t = *p.receiving;
      if (!t.discard && header.bytes != 0) std::memcpy(t.target + t.moved, slice, header.bytes);
      t.moved += header.bytes;
      if (t.moved == total) {
        t.done = true;
        p.receiving.reset();
      }
    } else {
      if (header.bytes != 0)
        std::memcpy(p.stashing->data.data() + p.stashing->moved, slice, header.bytes);
      p.stashing->moved += header.bytes;
      if (p.stashing->moved == total) {
        p.stashing = nullptr;
        match_stash(peer, p);
      }
    }
    port.release();
    p.listening = false;
    any = true;
  }
  return any;
}

}  // namespace collectives
