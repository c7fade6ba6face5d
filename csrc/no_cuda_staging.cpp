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
struct GpuSlots::State {};

GpuSlots::GpuSlots(int, int, std::size_t, void*, std::shared_ptr<void>) { refuse(); }
GpuSlots::~GpuSlots() = default;
std::size_t GpuSlots::slot_bytes() const { refuse(); }
std::size_t GpuSlots::scratch_bytes() const { refuse(); }
char* GpuSlots::take(std::size_t) { refuse(); }
void GpuSlots::abandon() { refuse(); }
std::string GpuSlots::probe(MpiTransport&, double, std::byte*, std::byte*) { refuse(); }

Staging::Staging(int, std::size_t, int) { refuse(); }
Staging::~Staging() = default;
void Staging::run(Communicator&, const Call&, const Communicator::Options&, std::uintptr_t, Way) {
  refuse();
}
void Staging::join(DeviceCommunicator&, Communicator&, std::vector<int>) { refuse(); }
void Staging::refuse_capture(std::uintptr_t) const { refuse(); }
int Staging::rail_size() const { refuse(); }
std::uintptr_t Staging::make_scratch(std::size_t) { refuse(); }
std::shared_ptr<GpuSlots> Staging::make_slots(int) { refuse(); }
void Staging::go_straight(Communicator&, std::shared_ptr<MpiTransport>,
                          const std::shared_ptr<GpuSlots>&, std::uint64_t) {
  refuse();
}
std::string Staging::probe(GpuSlots&, MpiTransport&, double, bool) { refuse(); }
bool Staging::streams_apart() { refuse(); }
std::uint64_t Staging::straight_calls() const { refuse(); }
void Staging::check() { refuse(); }
bool Staging::idle() { refuse(); }
void Staging::close() { refuse(); }

}  // namespace collectives
