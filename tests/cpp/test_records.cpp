// Records of calls while they are written: a reader must not take a half-written one for a call.
#include <cstdio>

#include "call_record.hpp"
#include "recorder.hpp"

using namespace collectives;

int main() {
  int failures = 0;
  const auto check = [&](bool right, const char* what) {
    if (right) return;
    ++failures;
    std::fprintf(stderr, "FAIL: %s\n", what);
  };
  Call call{};
  call.collective = Collective::all_reduce;
  call.count = 7;

  CallRecord record{};
  record.describe(call, call.count, 0, Order::any);
  check(record.sequence == 0, "a record is of no call before its sequence is stored");
  record.sequence = 5;
  record.describe(call, 8, 0, Order::any);
  check(record.sequence == 0, "a record that is written anew is not of the call before");

  Recorder recorder({"test", 0, 2, "shm", 1});
  for (std::uint64_t n = 1; n <= 2 * Recorder::kCalls; ++n) {
    recorder.begin(n, call, 0, Order::any);
    CallRecord* const transfer =
        recorder.transfer(Recorder::kSend, Dtype::float32, n, 1, static_cast<std::uint32_t>(n));
    check(transfer->sequence == n, "a transfer has its number");
  }
  CallRecord* const again = recorder.transfer(Recorder::kRecv, Dtype::float32, 3, 1, 0);
  check(again->sequence == 2 * Recorder::kCalls + 1 && again->count == 3, "records are used again");
  check(recorder.json().find("\"sequence\"") != std::string::npos, "what is written is told");
  std::printf("%d failures\n", failures);
  return failures != 0;
}
