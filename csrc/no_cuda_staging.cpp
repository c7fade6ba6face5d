// Staging of a build without CUDA: says so.
#include "staging.hpp"

namespace collectives {

namespace {
[[noreturn]] void refuse() {
  throw Error(ErrorKind::unsupported,
              "this build of collectives has no GPU support; pass arrays on the host");
}
}  // namespace

struct Staging::State {};

Staging::Staging(int, std::size_t) { refuse(); }
Staging::~Staging() = default;
void Staging::run(Communicator&, const Call&, const Communicator::Options&, std::uintptr_t, Way) {
  refuse();
}
void Staging::join(DeviceCommunicator&, Communicator&, std::vector<int>) { refuse(); }
void Staging::refuse_capture(std::uintptr_t) const { refuse(); }
int Staging::rail_size() const { refuse(); }
std::uintptr_t Staging::make_scratch(std::size_t) { refuse(); }
void Staging::check() { refuse(); }
bool Staging::idle() { refuse(); }
void Staging::close() { refuse(); }

}  // namespace collectives
