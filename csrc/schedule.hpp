// A schedule: what all ranks do in one collective, written once, without transport, bytes or dtype.
//
// Vocabulary. A collective works on *chunks*. In a *round* every rank may send chunks it holds and
// store, or reduce into its own, chunks that it receives; all transfers of a round read what their
// ranks held when the round began. Rounds order the steps of one rank; they are no barrier between
// ranks.
// Chunks travel on a *channel*; a chunk is only ever touched by the transfers of one
// channel, so the steps of different channels are independent and run side by side.
//
// Numerics. What a rank holds for a chunk is an *expression* over the contributions of ranks:
//   - the contribution of rank r is a leaf;
//   - the transfers of one round that reduce into the same chunk of the same rank make one
//     combination of the value held there and all values that arrive, evaluated left to right and
//     rounded once;
//   - its operands stand in *canonical order*: ascending by the smallest rank that contributed to
//     each.
// So two ranks that exchange values evaluate the same expression, whoever sent first, and a direct
// reduction of all ranks is (((0 + 1) + 2) + ...) everywhere. verify() proves that all holders of a
// chunk end with equal expressions. In a barrier "reduce" means "has heard of", so hearing twice is
// no error there.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "types.hpp"

namespace collectives {

// In one round `src` sends `chunk` to `dst`, which stores it, or reduces it into the value it
// holds. Transfers of a round with equal src, dst and channel travel as one message, in the order
// written.
struct Transfer {
  int src = 0;
  int dst = 0;
  int chunk = 0;
  bool reduce = false;
  int channel = 0;
};
using Round = std::vector<Transfer>;

// The ranks a schedule is for.
struct World {
  int nranks = 1;
  int root = 0;           // broadcast, reduce, gather, scatter
  std::vector<int> node;  // node[r]: index of the node that rank r is on; empty: one node
};

// How chunks relate to ranks, by collective (n ranks, k chunks per block):
//   all_reduce, broadcast, reduce, barrier   `nchunks` chunks of one vector, any number
//   reduce_scatter, all_gather, gather, scatter   n·k chunks, chunk c is of the block of rank c / k
//   all_to_all   n·n chunks, chunk s·n + d goes from rank s to rank d
struct Schedule {
  std::string algorithm;
  Collective collective = Collective::all_reduce;
  World world;
  int nchunks = 1;
  int nchannels = 1;
  std::vector<Round> rounds;
};

// The name that ranks compare in calls by a schedule of the user's: the algorithm's, and what tells
// schedules apart that are not the same transfer by transfer.
std::string signed_name(const Schedule& s);

// Does rank hold chunk at the start / must it hold it (complete) at the end?
bool holds_at_start(const Schedule& s, int rank, int chunk);
bool holds_at_end(const Schedule& s, int rank, int chunk);

struct ScheduleError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Follows every contribution through the schedule. Throws ScheduleError naming the round (the first
// is 0) and the transfer that sends a chunk its rank does not hold, counts a contribution twice,
// stores into a chunk that another transfer of the round writes too, reduces where the collective
// only moves data, crosses channels, names a rank, chunk or channel out of range, or sends to
// itself. (Sending a chunk in the round that overwrites it is legal: reads precede writes.) At the
// end, throws naming rank, chunk and missing contributions. Also proves that for each chunk all
// holders evaluated the same expression, so their bits are equal, and that the ranks' programs meet
// without deadlock when each connection can hold one message.
void verify(const Schedule& s);

// Communication cost in units of the whole vector (all_reduce, broadcast, reduce, barrier: the
// vector; blocked collectives: the sum of all blocks, n times one block; all_to_all: n blocks, what
// one rank sends in all).
struct Cost {
  int steps = 0;                  // messages on the longest chain that wait for each other
  double sent_max = 0;            // largest amount any rank sends, in vectors
  double sent_total = 0;          // all ranks together
  double reduced_max = 0;         // largest amount any rank combines
  double internode_sent_max = 0;  // largest amount any node sends to other nodes
  int messages_max = 0;           // largest number of messages any rank sends
};
Cost cost(const Schedule& s);

// An algorithm: how to build a schedule for any world that it supports.
struct Algorithm {
  std::string name;
  std::string summary;                  // one line: how it works
  std::string when;                     // one line: when to use it
  std::string source;                   // paper (authors, title, year, DOI) it comes from
  std::vector<Collective> collectives;  // what it can do
  // Empty if it can do this collective in this world, else the reason. May be left unset by an
  // algorithm without limits of its own; registration adds the test of `collectives`, so it is
  // always callable afterwards.
  std::function<std::string(Collective, const World&)> why_unsupported;
  // Sets rounds, nchunks and nchannels; build_schedule() fills in algorithm, collective and world.
  std::function<Schedule(Collective, const World&)> build;
  // For a composition "name(part, part)": the algorithm made of these parts. Unset: takes no parts.
  std::function<Algorithm(const std::vector<std::string>& parts)> compose;
};

// Registers an algorithm from a static initialiser of its own file in csrc/algorithms/.
struct RegisterAlgorithm {
  explicit RegisterAlgorithm(Algorithm algorithm);
};
const std::vector<const Algorithm*>& algorithms();  // in order of name

// Builds the named schedule: a registered name, or a composition "hierarchical(intra, inter)".
// Throws std::invalid_argument for an unknown name (with the nearest right one) or an unsupported
// world.
Schedule build_schedule(const std::string& algorithm, Collective collective, const World& world);
// Empty if supported, else why not (also for an unknown name).
std::string why_unsupported(const std::string& algorithm, Collective collective,
                            const World& world);

// For authors of algorithms: the ranks, those of one node side by side (nodes in order of their
// lowest rank), so that neighbours in this order are neighbours in the machine wherever that is
// possible.
std::vector<int> ranks_by_node(const World& world);

}  // namespace collectives
