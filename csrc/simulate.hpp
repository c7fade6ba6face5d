// An event-driven simulation of messages over links that they share.
//
// Ranks run their programs as the host engine does: a program is the messages of one rank on one
// channel, in the order of the rounds (in each round sends, then receives), once for every segment;
// segments are dealt to lanes, and programs of different channels and lanes advance independently.
// A connection holds `slots` messages until its receiver has taken them out. What one rank sends to
// another leaves message by message, those of several channels and lanes in turns. A receiver that
// combines is busy for as long as that takes; the programs of one rank share it, first come, first
// served.
//
// Messages on their way share links max-min fairly: no flow can get more without taking from one
// that has no more than it (D. Bertsekas, R. Gallager, "Data Networks", 2nd edition, 1992, section
// 6.5.2). Rates are found anew, by progressive filling, for the flows that are joined by shared
// links to one that starts or ends.
#pragma once

#include <cstdint>
#include <vector>

namespace collectives {

struct SimulatedMessage {
  int round = 0;
  int src = 0;
  int dst = 0;  // may be src, which then stands for a rank that does the same
  int channel = 0;
  int route = 0;
  double bytes = 0;     // of one segment
  double combined = 0;  // bytes of one segment that the receiver combines
  double weight = 1;    // it stands for so many equal messages, which `bytes` counts together
};

struct SimulatedWorld {
  int nranks = 1;
  int nchannels = 1;
  std::vector<SimulatedMessage> messages;  // by round
  // Routes: the links of route i are route_links[route_begin[i], route_begin[i + 1]).
  std::vector<int> route_begin;
  std::vector<int> route_links;
  std::vector<double> latency;         // by route: seconds from the last byte's departure on
  std::vector<double> capacity;        // by link: bytes a second
  std::vector<double> combine_s_byte;  // by rank: seconds to combine a byte
  std::vector<double> late_s;          // by rank: seconds after which it enters the call
  int segments = 1;
  int lanes = 1;
  int slots = 4;
};

struct SimulatedTimes {
  double seconds = 0;            // until the last rank has ended
  std::vector<double> finish_s;  // by rank
  int steps = 0;                 // messages on the longest chain of a segment
  std::uint64_t events = 0;
};

// Throws ScheduleError where ranks wait for each other for ever, std::invalid_argument for indices
// out of range or a route without a link.
SimulatedTimes simulate(const SimulatedWorld& world);

}  // namespace collectives
