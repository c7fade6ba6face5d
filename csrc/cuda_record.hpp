// What a kernel wrote down when it gave up, as an exception.
#pragma once

#include <string>

#include "cuda_call.hpp"

namespace collectives::device {

// What began it: the reason of the peer that gave up first, if one did.
Leave cause_of(const Record& record);
// `last_call`: the call that this rank made last, in words; `abort_reason`: why its host said so.
[[noreturn]] void raise_record(const Record& record, int rank, const std::string& last_call,
                               const std::string& abort_reason);

}  // namespace collectives::device
