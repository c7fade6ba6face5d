#include "engine_host.hpp"

#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "errors.hpp"

namespace collectives {
namespace {

// What MPI can withdraw it does at once; what is on its way already may come to its end meanwhile.
constexpr std::chrono::milliseconds kWithdrawWithin{100};

Finish finish_of(const Piece& piece, const Call& call, int nranks) {
  Finish finish;
  if (piece.complete && call.op == Op::avg) finish.divisor = call.divides_by(nranks);
  return finish;
}

std::size_t message_bytes(const Layout& layout, const Piece* first, const Piece* last,
                          std::uint64_t segment, std::size_t element) {
  std::size_t total = 0;
  for (const Piece* p = first; p != last; ++p) total += layout.length(p->chunk, segment) * element;
  return total;
}

}  // namespace

// Messages of one piece can leave from where it lies, and come to where it goes. (Of lengths that
// two ranks alone know they may have different ideas, and both must think the same of this.)
template <class Port>
bool HostPlan::is_bare(const Step& step, std::size_t bytes, const Port& port) const {
  return port.only_bare() || (agreed_ && step.npieces == 1 && bytes >= port.bare_min());
}

HostPlan::HostPlan(std::shared_ptr<const RankProgram> program, Layout layout, const Call& call,
                   const Links& links, int lanes, int nranks)
    : program_(std::move(program)),
      layout_(std::move(layout)),
      element_(size_of(call.dtype)),
      nranks_(nranks),
      agreed_(call.collective != Collective::all_to_all || !call.in.is_table()) {
  lanes_ = static_cast<int>(std::min<std::uint64_t>(lanes, layout_.segments()));
  cell_bytes_ = (layout_.segment() * element_ + 63) / 64 * 64;
  std::map<RecvPort*, std::uint64_t> expected;
  std::map<SendPort*, int> senders;
  std::set<Transport*> transports;
  const int channels = static_cast<int>(program_->channels.size());
  for (int lane = 0; lane < lanes_; ++lane) {
    const std::uint64_t passes = (layout_.segments() - lane + lanes_ - 1) / lanes_;
    for (int c = 0; c < channels; ++c) {
      Strand strand{&program_->channels[c], {}, lane, lane * channels + c, scratch_bytes_, {}};
      if (strand.program->steps.empty()) continue;
      scratch_bytes_ += cell_bytes_ * program_->scratch_cells;
      for (const Step& step : strand.program->steps) {
        BoundStep bound{&step, nullptr, nullptr};
        if (step.recv_peer >= 0) {
          bound.from = &links.to[step.recv_peer]->recv_port(step.recv_peer, strand.channel);
          expected[bound.from] += passes;
          transports.insert(links.to[step.recv_peer]);
        }
        if (step.send_peer >= 0) {
          bound.to = &links.to[step.send_peer]->send_port(step.send_peer, strand.channel);
          senders.emplace(bound.to, step.send_peer);
          transports.insert(links.to[step.send_peer]);
        }
        strand.steps.push_back(bound);
      }
      strands_.push_back(std::move(strand));
    }
  }
  expected_.assign(expected.begin(), expected.end());
  senders_.assign(senders.begin(), senders.end());
  transports_.assign(transports.begin(), transports.end());
}

void HostEngine::run(HostPlan& plan, const Call& call, std::uint64_t tag) {
  call_ = &call;
  tag_ = tag;
  scratch_ = hands_->begin({call.dtype, call.op}, reduces(call.collective), plan.scratch_bytes_);
  for (auto& strand : plan.strands_) {
    strand.at = 0;
    strand.segment = strand.lane;
    strand.lent.clear();
    strand.ticket = 0;
  }
  unfinished_ = plan.strands_.size();
  for (const auto& [port, messages] : plan.expected_) port->expect(messages);
  const auto where = [&plan] {
    for (const auto& strand : plan.strands_) {
      if (strand.at == strand.steps.size()) continue;
      const Step& step = *strand.steps[strand.at].step;
      Where w;
      if (strand.ticket != 0) {
        w.phase = "its own GPU";
        return w;
      }
      w.phase = step.recv_peer >= 0 ? "a message" : "a free slot";
      w.peer = step.recv_peer >= 0 ? step.recv_peer : step.send_peer;
      w.channel = strand.channel;
      w.step = static_cast<int>(strand.at);
      w.round = step.round;
      w.expected = strand.segment;
      return w;
    }
    return Where{};
  };
  try {
    while (unfinished_ > 0) {
      waiter_.until([&] { return poll(plan); }, where);
      hands_->moved();
    }
    for (const auto& [to, peer] : plan.senders_) {
      SendPort& port = *to;
      Where w;
      w.phase = "a receive";
      w.peer = peer;
      waiter_.until(
          [&] {
            for (Transport* t : plan.transports_) t->progress();
            return port.flushed();
          },
          [&w] { return w; });
    }
  } catch (...) {
    leave(plan);
    throw;
  }
  hands_->end();
}

// The caller's arrays may go now: nothing may come into them any more, nor leave from them. Where
// it may, the arrays must stay, and the scratch memory does.
void HostEngine::leave(HostPlan& plan) noexcept {
  if (!taken_back(plan)) {
    lends_ = true;
    hands_->abandon();
  }
}

bool HostEngine::taken_back(HostPlan& plan) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + kWithdrawWithin;
  bool all = true;
  for (const auto& [port, messages] : plan.expected_) all &= port->withdraw(deadline);
  try {
    for (const auto& strand : plan.strands_)
      for (const auto& lent : strand.lent)
        while (lent.port->completed() < lent.ticket) {
          if (Clock::now() > deadline) return false;
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
  } catch (const Error&) {  // MPI cannot tell any more
    return false;
  }
  return all;
}

bool HostEngine::poll(HostPlan& plan) {
  bool moved = false;
  for (Transport* t : plan.transports_) t->progress();
  for (auto& strand : plan.strands_) {
    while (strand.at < strand.steps.size() && advance(plan, strand)) {
      moved = true;
      if (++strand.at < strand.steps.size()) continue;
      strand.segment += plan.lanes_;
      if (strand.segment < plan.layout_.segments())
        strand.at = 0;
      else
        --unfinished_;
    }
  }
  return moved;
}

std::byte* HostEngine::address(const HostPlan& plan, const HostPlan::Strand& strand,
                               const Piece& piece, const Place& place) const {
  switch (place.space) {
    case Space::input:
      return const_cast<std::byte*>(call_->input) +
             plan.layout_.input(piece.chunk, strand.segment).offset * plan.element_;
    case Space::output:
      return call_->output +
             plan.layout_.output(piece.chunk, strand.segment).offset * plan.element_;
    case Space::scratch:
      return scratch_ + strand.scratch + place.index * plan.cell_bytes_;
    case Space::none:
      break;
  }
  return nullptr;
}

void HostEngine::check_message(const HostPlan::Strand& strand, const Step& step,
                               const Header& header, std::uint64_t expected) const {
  if (header.tag == tag_ && header.bytes == expected) return;
  throw Error(ErrorKind::mismatch,
              "a message from rank " + std::to_string(step.recv_peer) + " on channel " +
                  std::to_string(strand.channel) + " in round " + std::to_string(step.round) +
                  " belongs to another call or has " + std::to_string(header.bytes) +
                  " bytes instead of " + std::to_string(expected) +
                  ": the ranks no longer run the same calls");
}

// True if no message in flight is sent from these bytes. Asks the transport about those that are.
bool HostEngine::writable(HostPlan::Strand& strand, const std::byte* p, std::size_t bytes) {
  for (std::size_t i = 0; i < strand.lent.size();) {
    auto& lent = strand.lent[i];
    if (p + bytes <= lent.begin || lent.end <= p) {
      ++i;
      continue;
    }
    if (lent.port->completed() < lent.ticket) return false;
    lent = strand.lent.back();
    strand.lent.pop_back();
  }
  return true;
}

// One step of a strand for its segment; false if data, a slot or what was done to data are missing
// yet.
bool HostEngine::advance(HostPlan& plan, HostPlan::Strand& strand) {
  if (strand.ticket == 0) {
    if (!work(plan, strand)) return false;
    strand.ticket = hands_->ticket();
  }
  if (strand.ticket != 0 && !hands_->done(strand.ticket)) return false;
  strand.ticket = 0;
  conclude(plan, strand);
  return true;
}

// What a step does to data, once its message is there and there is room for the next.
bool HostEngine::work(HostPlan& plan, HostPlan::Strand& strand) {
  const HostPlan::BoundStep& bound = strand.steps[strand.at];
  const Step& step = *bound.step;
  const Piece* first = strand.program->pieces.data() + step.first_piece;
  const Piece* last = first + step.npieces;
  const std::uint64_t s = strand.segment;
  const std::size_t element = plan.element_;

  switch (step.kind) {
    case StepKind::send: {
      const std::size_t total = message_bytes(plan.layout_, first, last, s, element);
      strand.bytes = total;
      if (step.npieces == 1 && step.lends && plan.is_bare(step, total, *bound.to)) {
        const std::byte* from = address(plan, strand, *first, first->src);
        if (!bound.to->send_from(reinterpret_cast<const char*>(from), total)) return false;
        strand.lent.push_back({bound.to, bound.to->sent(), from, from + total});
        return true;
      }
      char* slot = bound.to->acquire(total);
      if (slot == nullptr) return false;
      std::size_t at = 0;
      for (const Piece* p = first; p != last; ++p) {
        const std::size_t bytes = plan.layout_.length(p->chunk, s) * element;
        if (bytes != 0) hands_->copy(slot + at, address(plan, strand, *p, p->src), bytes);
        at += bytes;
      }
      return true;
    }

    case StepKind::recv:
    case StepKind::recv_send: {
      const std::size_t total = message_bytes(plan.layout_, first, last, s, element);
      strand.bytes = total;
      Header header{static_cast<std::uint32_t>(total), 0, tag_};
      const char* message = nullptr;
      if (plan.is_bare(step, total, *bound.from)) {
        std::byte* kept = address(plan, strand, *first, first->dst);
        // (A longer message must find room, which a slot has.)
        if (plan.agreed_ && step.kind == StepKind::recv && step.npieces == 1 && !first->reduce &&
            kept != nullptr && !bound.from->posted()) {
          if (!writable(strand, kept, total)) return false;
          bound.from->post_into(reinterpret_cast<char*>(kept), total);
        }
        std::size_t bytes = 0;
        message = bound.from->peek_bare(&bytes);
        header.bytes = static_cast<std::uint32_t>(bytes);
      } else {
        message = bound.from->peek(&header);
      }
      if (message == nullptr) return false;
      check_message(strand, step, header, total);
      if (!strand.lent.empty())
        for (const Piece* p = first; p != last; ++p)
          if (const std::byte* kept = address(plan, strand, *p, p->dst))
            if (!writable(strand, kept, plan.layout_.length(p->chunk, s) * element)) return false;
      char* slot = nullptr;
      if (step.kind == StepKind::recv_send) {
        slot = bound.to->acquire(total);
        if (slot == nullptr) return false;
      }
      std::size_t at = 0;
      for (const Piece* p = first; p != last; ++p) {
        const std::uint64_t count = plan.layout_.length(p->chunk, s);
        const std::size_t bytes = count * element;
        if (bytes == 0) continue;
        void* outs[2];
        int nouts = 0;
        if (slot != nullptr) outs[nouts++] = slot + at;
        if (std::byte* kept = address(plan, strand, *p, p->dst)) outs[nouts++] = kept;
        if (p->reduce) {
          const void* own = address(plan, strand, *p, p->src);
          const void* operands[2] = {own, message + at};
          if (p->incoming_first) std::swap(operands[0], operands[1]);
          hands_->reduce(outs, nouts, operands, 2, count, finish_of(*p, *call_, plan.nranks_));
        } else {
          for (int i = 0; i < nouts; ++i)
            if (outs[i] != message + at) hands_->copy(outs[i], message + at, bytes);
        }
        at += bytes;
      }
      return true;
    }

    case StepKind::copy:
      for (const Piece* p = first; p != last; ++p) {
        std::byte* to = address(plan, strand, *p, p->dst);
        const std::byte* from = address(plan, strand, *p, p->src);
        const std::size_t bytes = plan.layout_.length(p->chunk, s) * element;
        if (to == from || bytes == 0) continue;
        if (!writable(strand, to, bytes)) return false;
        hands_->copy(to, from, bytes);
      }
      return true;

    case StepKind::combine: {
      const std::uint64_t count = plan.layout_.length(first->chunk, s);
      if (count == 0) return true;
      std::vector<const void*> operands;
      operands.reserve(step.npieces);
      for (const Piece* p = first; p != last; ++p)
        operands.push_back(address(plan, strand, *p, p->src));
      void* out = address(plan, strand, *first, first->dst);
      if (!writable(strand, static_cast<std::byte*>(out), count * element)) return false;
      hands_->reduce(&out, 1, operands.data(), step.npieces, count,
                     finish_of(*first, *call_, plan.nranks_));
      return true;
    }
  }
  return true;
}

// Its message is used up, and the next one leaves.
void HostEngine::conclude(const HostPlan& plan, const HostPlan::Strand& strand) {
  const HostPlan::BoundStep& bound = strand.steps[strand.at];
  const Step& step = *bound.step;
  if (bound.from != nullptr) bound.from->release();
  if (bound.to == nullptr) return;
  if (!plan.is_bare(step, strand.bytes, *bound.to))
    bound.to->commit({static_cast<std::uint32_t>(strand.bytes), 0, tag_});
  else if (step.kind == StepKind::recv_send || step.npieces > 1 || !step.lends)
    bound.to->commit_bare(strand.bytes);
}

}  // namespace collectives
