// The GPU engine of a build without CUDA: says so.
#include "device.hpp"

namespace collectives {
namespace {

constexpr const char* kWhy =
    "this build of collectives has no GPU support (no CUDA compiler was found when it was built); "
    "pass arrays on the host, or rebuild with COLLECTIVES_CUDA=ON";

[[noreturn]] void refuse() { throw Error(ErrorKind::unsupported, kWhy); }

}  // namespace

struct DeviceCommunicator::Impl {};

int device_count(std::string* why) {
  if (why != nullptr) *why = kWhy;
  return 0;
}

int gpu_of(std::uintptr_t) { return -1; }

DeviceCommunicator::DeviceCommunicator(const DeviceConfig&) { refuse(); }
DeviceCommunicator::~DeviceCommunicator() = default;
int DeviceCommunicator::blocks() const { refuse(); }
void DeviceCommunicator::allocate(Home, int) { refuse(); }
std::uint64_t DeviceCommunicator::arena_bytes() const { refuse(); }
std::string DeviceCommunicator::handle() const { refuse(); }
void DeviceCommunicator::open(const std::vector<std::string>&) { refuse(); }
void DeviceCommunicator::probe_write() { refuse(); }
std::string DeviceCommunicator::probe_check() { refuse(); }
void DeviceCommunicator::meet() { refuse(); }
void DeviceCommunicator::record_to(std::shared_ptr<Recorder>) { refuse(); }
void DeviceCommunicator::define(const std::string&, const Schedule&) { refuse(); }
bool DeviceCommunicator::keeps_lines() const { refuse(); }
void DeviceCommunicator::use_lines(bool) { refuse(); }
bool DeviceCommunicator::writes_words() const { refuse(); }
void DeviceCommunicator::use_copies(bool) { refuse(); }
bool DeviceCommunicator::captured() const { refuse(); }
std::uint64_t DeviceCommunicator::exchanges() const { refuse(); }
std::string DeviceCommunicator::make_segment(std::uint64_t) { refuse(); }
std::uintptr_t DeviceCommunicator::open_segment(std::uint64_t, const std::vector<std::string>&) {
  refuse();
}
void DeviceCommunicator::release_segment(std::uint64_t) { refuse(); }
std::string DeviceCommunicator::export_array(std::uintptr_t, std::uint64_t, std::string*) {
  refuse();
}
void DeviceCommunicator::open_array(std::uint64_t, std::uint64_t, const std::vector<std::string>&) {
  refuse();
}
void DeviceCommunicator::run(const Call&, const DeviceOptions&, std::uintptr_t) { refuse(); }
void DeviceCommunicator::transfer(const std::vector<DeviceTransfer>&, std::uintptr_t) { refuse(); }
void DeviceCommunicator::check() { refuse(); }
bool DeviceCommunicator::idle() { refuse(); }
void DeviceCommunicator::abort(const std::string&, ErrorKind, int) { refuse(); }
void DeviceCommunicator::stop(const std::string&, ErrorKind) { refuse(); }
bool DeviceCommunicator::gave_up() { refuse(); }
void DeviceCommunicator::close() { refuse(); }

}  // namespace collectives
