#include "cuda_record.hpp"

#include "errors.hpp"
#include "region.hpp"

namespace collectives::device {

Leave cause_of(const Record& record) {
  const auto leave = static_cast<Leave>(record.leave);
  return leave == Leave::peer_left ? static_cast<Leave>(record.seen) : leave;
}

namespace {

std::string describe(const Envelope& envelope) {
  const auto dtype = static_cast<Dtype>(envelope.word >> 32 & 0xff);
  return std::to_string(envelope.count) + " x " + std::string{name_of(dtype)} + " with tag " +
         std::to_string(envelope.word & 0xffffffff) + " (message no. " +
         std::to_string((envelope.word >> 40) + 1) + " between them)";
}

}  // namespace

std::string describe_refusal(int sender, int receiver, const Envelope& sent,
                             const Envelope& expected) {
  return "rank " + std::to_string(sender) + " sent rank " + std::to_string(receiver) + " " +
         describe(sent) + ", and rank " + std::to_string(receiver) + " expected " +
         describe(expected) +
         ". On the GPU the messages of two ranks are received in the order in which they were "
         "sent, whatever their tags. Nothing of it was written; the communicator cannot be used "
         "further on the GPU";
}

namespace {

Signature signature_of(u64 count, u64 signature_word) {
  Signature call;
  call.count = count;
  call.collective = signature_word & 0xff;
  call.dtype = signature_word >> 8 & 0xff;
  call.op = signature_word >> 16 & 0xff;
  call.order = signature_word >> 24 & 0xff;
  call.root = static_cast<std::int32_t>(signature_word >> 32 & 0xffff);
  return call;
}

// What tells a call from this rank's, where its words do not.
std::string difference(const std::string& theirs, const std::string& own) {
  const bool alike = own.compare(0, theirs.size() - 1, theirs, 0, theirs.size() - 1) == 0;
  return alike ? ", which has another algorithm, or its arrays at another place of symmetric or "
                 "registered memory"
               : "";
}

}  // namespace

std::string describe_call(u64 count, u64 signature_word) {
  const u64 algorithm = signature_word >> 48;
  return signature_of(count, signature_word).describe() +
         (algorithm != 0 ? ", algorithm no. " + std::to_string(algorithm) : std::string());
}

void raise_record(const Record& r, int rank, const std::string& last_call, const Told& told) {
  const auto leave = static_cast<Leave>(r.leave);
  std::string text = "on the GPU, in call " + std::to_string(r.epoch - kMeetings) + " of rank " +
                     std::to_string(rank) + " (the last was " + last_call + "): ";
  const std::string peer = "rank " + std::to_string(r.peer);
  const bool of_transfers = (r.epoch & kOfTransfers) != 0;
  if (of_transfers)
    text = "on the GPU, in a send or recv of rank " + std::to_string(rank) + " (no. " +
           std::to_string(r.epoch & ~kOfTransfers) + " of its own): ";
  if (leave == Leave::mismatch && of_transfers)
    throw Error(
        ErrorKind::mismatch,
        text + describe_refusal(r.peer, rank, {r.seen, r.theirs[1]}, {r.expected, r.theirs[0]}),
        r.peer);
  if (leave == Leave::mismatch)
    throw Error(ErrorKind::mismatch,
                text + peer + " is in another call: " + describe_call(r.theirs[0], r.theirs[1]) +
                    difference(signature_of(r.theirs[0], r.theirs[1]).describe(), last_call) +
                    ". Nothing of this call was written; the communicator cannot be used further");
  std::string where;
  switch (static_cast<Phase>(r.phase)) {
    case Phase::arrival:
      where = peer + " to enter the call";
      break;
    case Phase::message:
      where = "a message from " + peer;
      break;
    case Phase::slot:
      where = "a free slot at " + peer;
      break;
    case Phase::packet:
      where = "packets from " + peer;
      break;
    case Phase::envelope:
    case Phase::none:
      where = peer;
      break;
  }
  if (r.strand >= 0) where += ", strand " + std::to_string(r.strand);
  if (r.step >= 0)
    where += ", step " + std::to_string(r.step) + ", round " + std::to_string(r.round) +
             ", segment " + std::to_string(r.expected);
  else
    where += ", seen " + std::to_string(r.seen) + ", expected " + std::to_string(r.expected);
  switch (leave) {
    case Leave::deadline:
      throw Error(ErrorKind::deadline,
                  text + "waited " + std::to_string(r.waited_ns / 1000000) + " ms" + " for " +
                      where +
                      (of_transfers
                           ? ". It died, is late, sends or receives arrays on the host, or waits "
                             "for this rank in a call before; sends and receives of a stream go in "
                             "its order: put those that must go on together into one sendrecv, "
                             "`with comm.group()` or torch's batch_isend_irecv"
                           : ". It died, is late, calls with arrays on the host, or has captured "
                             "the call into a graph and not launched that"),
                  r.peer);
    case Leave::peer_left: {
      const auto his = static_cast<Leave>(r.seen);
      const int about = r.about < 0 && his == Leave::peer_died ? told.dead : r.about;
      const std::string whom = "rank " + std::to_string(about);
      text += peer + " gave up: ";
      switch (his) {
        case Leave::mismatch:
        case Leave::differ:
          throw Error(
              ErrorKind::mismatch,
              text + (told.differs.empty() ? "the ranks are in different calls" : told.differs));
        case Leave::aborted:
          throw Error(ErrorKind::aborted, text + "it was aborted");
        case Leave::peer_died:
          throw Error(ErrorKind::peer_died,
                      text + "the process of " + (about < 0 ? "a rank" : whom) + " has ended",
                      about);
        default:
          throw Error(ErrorKind::deadline,
                      text + "its wait for " + (about < 0 ? "a rank" : whom) + " ran out of time",
                      about);
      }
    }
    case Leave::differ:
      throw Error(ErrorKind::mismatch,
                  text + "left while it waited for " + where + ": " + told.reason);
    case Leave::peer_died:
      throw Error(ErrorKind::peer_died,
                  text + "left while it waited for " + where + ": " + told.reason, told.dead);
    default:
      throw Error(ErrorKind::aborted,
                  text + "aborted while it waited for " + where + ": " + told.reason);
  }
}

}  // namespace collectives::device
