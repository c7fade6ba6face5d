// Side streams in a build without CUDA: there is nothing for them to run on.
#include "errors.hpp"
#include "side_stream.hpp"

namespace collectives {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::unsupported,
              "this build of collectives has no GPU support; pass arrays on the host");
}

}  // namespace

class Mark::Impl {};
class SideStream::Events {};

Mark::Mark(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Mark::~Mark() = default;
void Mark::hold(std::uintptr_t) const { refuse(); }
bool Mark::done() const { refuse(); }
void Mark::wait() const { refuse(); }
double Mark::seconds_since(const Mark&) const { refuse(); }

SideStream::SideStream(int, std::uintptr_t) { refuse(); }
SideStream::~SideStream() = default;
std::uintptr_t SideStream::handle() const { refuse(); }
std::shared_ptr<Mark> SideStream::mark(std::uintptr_t) const { refuse(); }
std::shared_ptr<Mark> SideStream::begin(std::uintptr_t) const { refuse(); }
std::shared_ptr<Mark> SideStream::end() const { refuse(); }
bool let_wait(int, std::uintptr_t, std::uintptr_t) { refuse(); }
double slowdown(int, std::uintptr_t, std::uintptr_t) { refuse(); }

}  // namespace collectives
