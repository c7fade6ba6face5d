// The one exception of the core: a kind, which the bindings turn into a Python class, and a
// sentence for people.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace collectives {

enum class ErrorKind {
  invalid,      // an argument is wrong: ValueError
  mismatch,     // ranks disagree about a call
  deadline,     // a wait outlasted the communicator's timeout
  peer_died,    // a process this rank needs is gone
  aborted,      // someone called abort()
  closed,       // the communicator, or a peer's end of it, is closed
  unsupported,  // this cannot run here
  system,       // the operating system or MPI refused something
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace collectives
