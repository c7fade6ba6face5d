// What a kernel wrote down when it gave up, as an exception.
#pragma once

#include <string>

#include "cuda_call.hpp"

namespace collectives::device {

// What began it: the reason of the peer that gave up first, if one did.
Leave cause_of(const Record& record);
// Kernels that ran before a rank's first call: the ranks' first meeting.
inline constexpr u64 kMeetings = 1;

// Why this rank's host ended its kernels, and the rank that died, if that is why. What else is
// known.
struct Told {
  const std::string& reason;
  int dead;
  std::string differs;  // what the others are in, or the receiver of a message expected, in words
};
// The call that `arrival` announces.
std::string describe_call(u64 count, u64 signature_word);
// What a rank sent, and what its receiver expected.
std::string describe_refusal(int sender, int receiver, const Envelope& sent,
                             const Envelope& expected);
// `last_call`: the call that this rank made last, in words.
[[noreturn]] void raise_record(const Record& record, int rank, const std::string& last_call,
                               const Told& told);

}  // namespace collectives::device
