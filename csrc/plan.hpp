// Lowering: a schedule becomes, for one rank, programs of steps (one a channel), and with a dtype
// and counts a plan of byte ranges that an engine runs. Programs hold no pointers and no bytes, so
// one is made per (schedule, rank) and serves every size; spans are computed from a layout as steps
// run.
//
// A message larger than a FIFO slot cannot exist: the data are cut into *segments* so small that
// the largest message of the schedule fits a slot, and the program runs once per segment. Segments
// are dealt to *lanes*; lanes have FIFOs of their own and advance independently, which is what
// pipelines trees and rings.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "schedule.hpp"

namespace collectives {

enum class Space : std::uint8_t { none, input, output, scratch };

// Where one value of a chunk lives on this rank. In `scratch`, `index` is a scratch cell (one
// segment of one chunk); elsewhere the chunk's own place in that buffer.
//
// `output` may be the same memory as `input`, chunk on chunk: no step writes a chunk of `output`
// before the last step that reads its `input`, and `input` itself is never written. Only chunks
// that this rank must hold at the end are ever in `output`; all others that it combines or passes
// on live in scratch.
struct Place {
  Space space = Space::none;
  int index = 0;
};

// One chunk's part of a message.
//   send            from `src`
//   recv            into `dst` (Space::none: not kept, only forwarded); with `reduce`, combined
//                   with the operand at `src`; `dst` and `src` may be one place
//   copy            src -> dst on this rank
//   combine         dst = src of all pieces of the step, left to right, rounded once; all pieces
//                   are of one chunk; `dst` and `complete` of the first piece count; `dst` may be
//                   the place of ANY of the sources (in place, the own contribution can stand in
//                   the middle), so work element by element
// A message may have several pieces of one chunk (order="rank": one for each contribution).
struct Piece {
  int chunk = 0;
  Place src;
  Place dst;
  bool reduce = false;
  bool incoming_first = false;  // operand order: incoming op own, instead of own op incoming
  bool complete = false;        // this combination yields the final value: avg divides here
};

enum class StepKind : std::uint8_t { send, recv, recv_send, copy, combine };

// recv_send receives a message and passes its outcome (combined where pieces say so) to `send_peer`
// without a detour through memory; what `dst` says is stored too.
struct Step {
  StepKind kind = StepKind::send;
  int recv_peer = -1;
  int send_peer = -1;
  int first_piece = 0;  // pieces [first_piece, first_piece + npieces) of the program
  int npieces = 0;
  int round = 0;  // of the schedule, for error messages
  // Of a send: its one piece may stay where it lies until the peer asks for it. False where a
  // receive of the same round writes there, which would wait for the peer, as the peer may for us.
  bool lends = true;
};

struct Program {
  std::vector<Step> steps;
  std::vector<Piece> pieces;
};

enum class Order : std::uint8_t {
  any,   // the schedule's own order: documented, the same on every rank
  rank,  // contributions travel uncombined and are combined once, in rank order, left to right
};

// All that one rank does, for any size.
struct RankProgram {
  std::vector<Program> channels;
  // Per lane and channel: cells are numbered within a channel.
  int scratch_cells = 0;
  // Over ALL ranks: what the segment size follows from, so it is equal everywhere.
  int max_message_pieces = 1;
};

// Lowers the schedule for `rank`. Within a round a rank sends, then receives, then combines. A
// value reduced by several sources in one round becomes receives into scratch and one combine. A
// receive and the send that follows it become one recv_send where they carry the same values and
// connections of `depth` messages (what the transport has, the same on all ranks) allow it: depth 1
// leaves about one receive in each cycle of ranks unfused. Deterministic: the programs of all ranks
// meet, and end at any depth >= `depth`. Throws ScheduleError where the schedule is not legal;
// whether it does its collective is for verify() to say.
RankProgram lower(const Schedule& s, int rank, Order order, int depth = 1);
// The programs of all ranks, in one pass.
std::vector<RankProgram> lower_all(const Schedule& s, Order order, int depth = 1);

// The programs of all ranks run to the end when each connection and channel holds at most `depth`
// messages, and every receive meets a send of the same chunks; throws ScheduleError naming the
// ranks, steps and rounds otherwise.
void check_deadlock(const std::vector<RankProgram>& ranks, int depth);

}  // namespace collectives
