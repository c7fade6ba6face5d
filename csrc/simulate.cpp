#include "simulate.hpp"

#include <algorithm>
#include <cmath>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "schedule.hpp"

namespace collectives {
namespace {

// Events nearer to each other than this, relative to the time, are one: sums of equal terms in
// different order differ by some units in the last place.
constexpr double kSameTime = 1e-12;
// A rate that changes by less is kept: nothing but rounding changed.
constexpr double kSameRate = 1e-9;

// Flows, and the links that they share.
class Sharing {
 public:
  Sharing(const SimulatedWorld& world, std::size_t most_flows)
      : world_(world), links_(world.capacity.size()) {
    for (std::size_t r = 0; r + 1 < world.route_begin.size(); ++r)
      longest_ = std::max(longest_, world.route_begin[r + 1] - world.route_begin[r]);
    flows_.reserve(std::min<std::size_t>(most_flows, 1 << 20));
  }

  struct Flow {
    int owner = 0;
    int route = 0;
    double weight = 1;
    double left = 0;   // bytes
    double rate = 0;   // bytes a second
    double since = 0;  // when `left` was right
    double next = 0;   // its rate in the making; < 0: not known yet
    std::uint32_t version = 0;
    std::uint64_t seen = 0;
  };

  int start(int owner, int route, double bytes, double weight, double now) {
    int f;
    if (free_.empty()) {
      f = static_cast<int>(flows_.size());
      flows_.emplace_back();
      places_.resize(flows_.size() * longest_);
    } else {
      f = free_.back();
      free_.pop_back();
    }
    Flow& flow = flows_[f];
    flow.owner = owner;
    flow.route = route;
    flow.weight = weight;
    flow.left = bytes;
    flow.rate = 0;
    flow.since = now;
    ++flow.version;
    const int begin = world_.route_begin[route];
    for (int hop = 0; hop < hops(route); ++hop) {
      Link& link = links_[world_.route_links[begin + hop]];
      place(f, hop) = static_cast<int>(link.flows.size());
      link.flows.push_back({f, hop});
      touch(world_.route_links[begin + hop]);
    }
    return f;
  }

  void end(int f) {
    const int route = flows_[f].route;
    const int begin = world_.route_begin[route];
    for (int hop = 0; hop < hops(route); ++hop) {
      Link& link = links_[world_.route_links[begin + hop]];
      const int at = place(f, hop);
      link.flows[at] = link.flows.back();
      place(link.flows[at].flow, link.flows[at].hop) = at;
      link.flows.pop_back();
      touch(world_.route_links[begin + hop]);
    }
    ++flows_[f].version;
    free_.push_back(f);
  }

  const Flow& flow(int f) const { return flows_[f]; }

  // Finds the rates anew where something changed; calls changed(flow, when it ends) for each flow
  // whose rate did.
  template <typename Changed>
  void settle(double now, const Changed& changed) {
    for (const int first : touched_) {
      links_[first].touched = false;
      if (links_[first].seen == stamp_ + 1) continue;
      if (links_[first].flows.empty()) continue;
      gather(first);
      fill();
      for (const int f : group_) {
        Flow& flow = flows_[f];
        if (std::abs(flow.next - flow.rate) <= kSameRate * flow.rate) continue;
        flow.left = std::max(0.0, flow.left - flow.rate * (now - flow.since));
        flow.since = now;
        flow.rate = flow.next;
        ++flow.version;
        changed(f, now + flow.left / flow.rate);
      }
    }
    touched_.clear();
    ++stamp_;
  }

 private:
  struct Member {
    int flow;
    int hop;
  };
  struct Link {
    std::vector<Member> flows;
    bool touched = false;
    std::uint64_t seen = 0;
    double left = 0;    // capacity that is not given out
    double weight = 0;  // of the flows without a rate
  };

  int hops(int route) const { return world_.route_begin[route + 1] - world_.route_begin[route]; }
  int& place(int f, int hop) { return places_[static_cast<std::size_t>(f) * longest_ + hop]; }
  void touch(int link) {
    if (links_[link].touched) return;
    links_[link].touched = true;
    touched_.push_back(link);
  }

  // All links and flows that are joined to link `first` by links they share.
  void gather(int first) {
    reached_.assign(1, first);
    group_.clear();
    links_[first].seen = stamp_ + 1;
    for (std::size_t i = 0; i < reached_.size(); ++i) {
      const int l = reached_[i];
      links_[l].left = world_.capacity[l];
      links_[l].weight = 0;
      for (const Member& m : links_[l].flows) {
        Flow& flow = flows_[m.flow];
        links_[l].weight += flow.weight;
        if (flow.seen == stamp_ + 1) continue;
        flow.seen = stamp_ + 1;
        flow.next = -1;
        group_.push_back(m.flow);
        for (int k = world_.route_begin[flow.route]; k < world_.route_begin[flow.route + 1]; ++k) {
          Link& link = links_[world_.route_links[k]];
          if (link.seen == stamp_ + 1) continue;
          link.seen = stamp_ + 1;
          reached_.push_back(world_.route_links[k]);
        }
      }
    }
  }

  // Progressive filling. The share of a link only grows while others are given out, so a share that
  // has grown since it was queued goes back into the queue.
  void fill() {
    using Entry = std::pair<double, int>;
    queue_.clear();
    for (const int l : reached_) queue_.emplace_back(links_[l].left / links_[l].weight, l);
    const auto later = [](const Entry& a, const Entry& b) { return a.first > b.first; };
    std::make_heap(queue_.begin(), queue_.end(), later);
    std::size_t missing = group_.size();
    while (missing > 0) {
      std::pop_heap(queue_.begin(), queue_.end(), later);
      const auto [share, l] = queue_.back();
      queue_.pop_back();
      Link& link = links_[l];
      if (link.weight <= 1e-9) continue;
      const double now = link.left / link.weight;
      if (now > share * (1 + kSameTime)) {
        queue_.emplace_back(now, l);
        std::push_heap(queue_.begin(), queue_.end(), later);
        continue;
      }
      for (const Member& m : link.flows) {
        Flow& flow = flows_[m.flow];
        if (flow.next >= 0) continue;
        flow.next = share * flow.weight;
        --missing;
        for (int k = world_.route_begin[flow.route]; k < world_.route_begin[flow.route + 1]; ++k) {
          Link& other = links_[world_.route_links[k]];
          other.left = std::max(0.0, other.left - flow.next);
          other.weight -= flow.weight;
        }
      }
    }
  }

  const SimulatedWorld& world_;
  int longest_ = 1;
  std::vector<Flow> flows_;
  std::vector<int> places_;  // of flow f and hop h, in the link's list
  std::vector<int> free_;
  std::vector<Link> links_;
  std::vector<int> touched_, reached_, group_;
  std::vector<std::pair<double, int>> queue_;
  std::uint64_t stamp_ = 0;
};

// What tells connections apart. In a world of one node that stands for all, ways differ where the
// receivers do.
struct Ends {
  int src, dst, route, channel;
  bool operator==(const Ends& o) const {
    return src == o.src && dst == o.dst && route == o.route && channel == o.channel;
  }
};
struct HashEnds {
  std::size_t operator()(const Ends& e) const {
    std::uint64_t h = 0;
    for (const int part : {e.src, e.dst, e.route, e.channel})
      h = (h ^ static_cast<unsigned>(part)) * 0x9E3779B97F4A7C15ull;
    return h ^ (h >> 32);
  }
};

enum class Kind : std::uint8_t { enters, flown, arrives, combined };

struct Event {
  double time;
  std::uint64_t number;  // events of one time in the order they were made
  int id;                // process, flow or connection
  std::uint32_t version;
  Kind kind;
};
struct Later {
  bool operator()(const Event& a, const Event& b) const {
    return a.time != b.time ? a.time > b.time : a.number > b.number;
  }
};

class Simulator {
 public:
  explicit Simulator(const SimulatedWorld& world)
      : world_(world), sharing_(world, world.messages.size()) {
    check();
    lanes_ = std::max(1, std::min(world.lanes, world.segments));
    programs_.resize(static_cast<std::size_t>(world.nranks) * world.nchannels);
    connection_of_.resize(world.messages.size());
    std::unordered_map<Ends, int, HashEnds> known, wires;
    std::vector<int> wire_of;  // by connection of lane 0
    for (std::size_t i = 0, end = 0; i < world.messages.size(); i = end) {
      while (end < world.messages.size() && world.messages[end].round == world.messages[i].round)
        ++end;
      for (std::size_t k = i; k < end; ++k) {
        const SimulatedMessage& m = world.messages[k];
        const auto [at, added] =
            known.emplace(Ends{m.src, m.dst, m.route, m.channel}, static_cast<int>(known.size()));
        if (added) {
          const int next = static_cast<int>(wires.size());
          wire_of.push_back(wires.emplace(Ends{m.src, m.dst, m.route, 0}, next).first->second);
        }
        connection_of_[k] = at->second;
        programs_[program(m.src, m.channel)].push_back({static_cast<int>(k), false});
      }
      for (std::size_t k = i; k < end; ++k) {
        const SimulatedMessage& m = world.messages[k];
        programs_[program(m.dst, m.channel)].push_back({static_cast<int>(k), true});
      }
    }
    connections_.resize(known.size() * lanes_);
    for (std::size_t c = 0; c < connections_.size(); ++c)
      connections_[c].wire = wire_of[c / lanes_];
    wires_.resize(wires.size());
    ring_.resize(connections_.size() * world.slots);
    processes_.resize(programs_.size() * lanes_);
    for (std::size_t p = 0; p < processes_.size(); ++p) {
      processes_[p].segment = static_cast<int>(p % lanes_);
      if (programs_[p / lanes_].empty()) processes_[p].segment = world.segments;
    }
    combining_until_.assign(world.nranks, 0);
    finish_.assign(world.late_s.begin(), world.late_s.end());
  }

  SimulatedTimes run() {
    for (std::size_t p = 0; p < processes_.size(); ++p) {
      if (processes_[p].segment < world_.segments)
        push(world_.late_s[rank_of(static_cast<int>(p))], Kind::enters, static_cast<int>(p));
    }
    SimulatedTimes times;
    while (!events_.empty()) {
      now_ = events_.top().time;
      const double until = now_ + now_ * kSameTime;
      while (!events_.empty() && events_.top().time <= until) {
        const Event event = events_.top();
        events_.pop();
        ++times.events;
        handle(event);
        while (!ready_.empty()) {
          const int process = ready_.back();
          ready_.pop_back();
          advance(process);
        }
      }
      sharing_.settle(
          now_, [&](int f, double end) { push(end, Kind::flown, f, sharing_.flow(f).version); });
    }
    for (std::size_t p = 0; p < processes_.size(); ++p) {
      if (processes_[p].segment < world_.segments) stuck(static_cast<int>(p));
    }
    times.finish_s = finish_;
    times.seconds = *std::max_element(finish_.begin(), finish_.end());
    times.steps = steps_;
    return times;
  }

 private:
  struct Move {
    int message;
    bool receive;
  };
  struct Process {
    std::size_t at = 0;
    int segment = 0;
    int waits_for = -1;  // connection whose message or slot it needs
    bool receives = false;
    bool combines = false;
    int chain = 0;  // messages that led here, in the first segment
  };
  struct Connection {
    std::uint64_t sent = 0, flown = 0, arrived = 0, taken = 0;
    int sender = -1, receiver = -1;  // processes, once they got there
    int wire = 0;
    int next = -1;  // the connection whose message follows on the wire
  };
  // From one rank to another: messages of all channels and lanes leave one after the other.
  struct Wire {
    int first = -1, last = -1;  // connections with messages to send
  };
  struct Slot {
    int message = 0;
    int chain = 0;  // messages that led to it and itself, in the first segment
  };

  void check() const {
    const auto bad = [](const std::string& what) { throw std::invalid_argument(what); };
    if (world_.nranks < 1 || world_.nchannels < 1 || world_.segments < 1 || world_.lanes < 1 ||
        world_.slots < 1)
      bad("ranks, channels, segments, lanes and slots must be at least 1");
    const int routes = static_cast<int>(world_.route_begin.size()) - 1;
    if (static_cast<int>(world_.combine_s_byte.size()) != world_.nranks ||
        static_cast<int>(world_.late_s.size()) != world_.nranks ||
        static_cast<int>(world_.latency.size()) != routes)
      bad("a figure for each rank and each route is needed");
    for (int r = 0; r < routes; ++r) {
      if (world_.route_begin[r] >= world_.route_begin[r + 1])
        bad("route " + std::to_string(r) + " has no link");
    }
    for (const int l : world_.route_links) {
      if (l < 0 || l >= static_cast<int>(world_.capacity.size()) || !(world_.capacity[l] > 0))
        bad("link " + std::to_string(l) + " is unknown or has no capacity");
    }
    int round = 0;
    for (const SimulatedMessage& m : world_.messages) {
      if (m.src < 0 || m.src >= world_.nranks || m.dst < 0 || m.dst >= world_.nranks ||
          m.channel < 0 || m.channel >= world_.nchannels || m.route < 0 || m.route >= routes ||
          m.round < round || !(m.weight > 0))
        bad("a message has a rank, channel or route out of range, or an earlier round than the one "
            "before");
      round = m.round;
    }
  }

  std::size_t program(int rank, int channel) const {
    return static_cast<std::size_t>(rank) * world_.nchannels + channel;
  }
  Slot& slot(int c, std::uint64_t number) {
    return ring_[static_cast<std::size_t>(c) * world_.slots + number % world_.slots];
  }
  int rank_of(int process) const { return process / lanes_ / world_.nchannels; }
  void push(double time, Kind kind, int id, std::uint32_t version = 0) {
    events_.push({time, number_++, id, version, kind});
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case Kind::enters:
        ready_.push_back(event.id);
        return;
      case Kind::flown: {
        const Sharing::Flow& flow = sharing_.flow(event.id);
        if (flow.version != event.version) return;
        const int c = flow.owner;
        sharing_.end(event.id);
        leave(c);
        return;
      }
      case Kind::arrives: {
        Connection& c = connections_[event.id];
        ++c.arrived;
        if (c.receiver < 0) return;  // it has not come so far
        const Process& receiver = processes_[c.receiver];
        if (receiver.receives && receiver.waits_for == event.id) ready_.push_back(c.receiver);
        return;
      }
      case Kind::combined:
        processes_[event.id].combines = false;
        take(event.id);
        ready_.push_back(event.id);
    }
  }

  void queue(int c) {
    Wire& wire = wires_[connections_[c].wire];
    connections_[c].next = -1;
    (wire.first < 0 ? wire.first : connections_[wire.last].next) = c;
    wire.last = c;
  }

  // The oldest message of the connection, the first on its wire, has left; the next one follows.
  void leave(int c) {
    Connection& connection = connections_[c];
    const int message = slot(c, connection.flown).message;
    ++connection.flown;
    push(now_ + world_.latency[world_.messages[message].route], Kind::arrives, c);
    Wire& wire = wires_[connection.wire];
    wire.first = connection.next;
    if (connection.flown < connection.sent) queue(c);
    if (wire.first >= 0) fly(wire.first);
  }

  void fly(int c) {
    const Connection& connection = connections_[c];
    const SimulatedMessage& m = world_.messages[slot(c, connection.flown).message];
    if (m.bytes > 0)
      sharing_.start(c, m.route, m.bytes, m.weight, now_);
    else
      leave(c);
  }

  // Takes the message out that the process has received, and goes one move on.
  void take(int p) {
    Process& process = processes_[p];
    const Move& move = programs_[p / lanes_][process.at];
    const int c = connection_of_[move.message] * lanes_ + p % lanes_;
    Connection& connection = connections_[c];
    ++connection.taken;
    step(p);
    if (connection.sender >= 0) {
      const Process& sender = processes_[connection.sender];
      if (!sender.receives && sender.waits_for == c && connection.sender != p)
        ready_.push_back(connection.sender);
    }
  }

  void step(int p) {
    Process& process = processes_[p];
    process.waits_for = -1;
    const int rank = rank_of(p);
    if (++process.at < programs_[p / lanes_].size()) return;
    process.at = 0;
    process.segment += lanes_;
    if (process.segment >= world_.segments) finish_[rank] = std::max(finish_[rank], now_);
  }

  void advance(int p) {
    Process& process = processes_[p];
    if (process.combines) return;
    const std::vector<Move>& moves = programs_[p / lanes_];
    while (process.segment < world_.segments) {
      const Move& move = moves[process.at];
      const SimulatedMessage& m = world_.messages[move.message];
      const int c = connection_of_[move.message] * lanes_ + p % lanes_;
      Connection& connection = connections_[c];
      process.receives = move.receive;
      if (!move.receive) {
        connection.sender = p;
        if (connection.sent - connection.taken >= static_cast<std::uint64_t>(world_.slots)) {
          process.waits_for = c;
          return;
        }
        slot(c, connection.sent) = {move.message, process.chain + 1};
        if (process.segment == 0) steps_ = std::max(steps_, process.chain + 1);
        const bool idle = connection.flown == connection.sent;
        ++connection.sent;
        step(p);
        if (idle) {
          const bool free = wires_[connection.wire].first < 0;
          queue(c);
          if (free) fly(c);
        }
        continue;
      }
      connection.receiver = p;
      if (connection.arrived <= connection.taken) {
        process.waits_for = c;
        return;
      }
      process.chain = std::max(process.chain, slot(c, connection.taken).chain);
      const int rank = rank_of(p);
      const double busy = m.combined * world_.combine_s_byte[rank];
      if (busy > 0) {
        process.waits_for = -1;
        process.combines = true;
        combining_until_[rank] = std::max(now_, combining_until_[rank]) + busy;
        push(combining_until_[rank], Kind::combined, p);
        return;
      }
      take(p);
    }
  }

  [[noreturn]] void stuck(int p) const {
    const Process& process = processes_[p];
    const Move& move = programs_[p / lanes_][process.at];
    const SimulatedMessage& m = world_.messages[move.message];
    throw ScheduleError("rank " + std::to_string(rank_of(p)) + " waits for ever in round " +
                        std::to_string(m.round) +
                        (move.receive ? " for a message" : " for a slot") + " of the connection " +
                        std::to_string(m.src) + " -> " + std::to_string(m.dst) + " on channel " +
                        std::to_string(m.channel));
  }

  const SimulatedWorld& world_;
  Sharing sharing_;
  int lanes_ = 1;
  std::vector<std::vector<Move>> programs_;  // by rank and channel
  std::vector<int> connection_of_;           // by message, of lane 0
  std::vector<Process> processes_;           // by program and lane
  std::vector<Connection> connections_;
  std::vector<Wire> wires_;
  std::vector<Slot> ring_;  // the slots of connections
  std::vector<int> ready_;  // processes that may get on
  std::vector<double> combining_until_, finish_;
  std::priority_queue<Event, std::vector<Event>, Later> events_;
  std::uint64_t number_ = 0;
  double now_ = 0;
  int steps_ = 0;
};

}  // namespace

SimulatedTimes simulate(const SimulatedWorld& world) { return Simulator(world).run(); }

}  // namespace collectives
