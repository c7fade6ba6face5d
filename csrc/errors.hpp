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

inline const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid:
      return "invalid";
    case ErrorKind::mismatch:
      return "mismatch";
    case ErrorKind::deadline:
      return "deadline";
    case ErrorKind::peer_died:
      return "peer_died";
    case ErrorKind::aborted:
      return "aborted";
    case ErrorKind::closed:
      return "closed";
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::system:
      break;
  }
  return "system";
}

class Error : public std::runtime_error {
 public:
  // `peer`: the rank that it is about, -1 where that is none or not known.
  Error(ErrorKind kind, const std::string& what, int peer = -1)
      : std::runtime_error(what), kind_(kind), peer_(peer) {}
  ErrorKind kind() const { return kind_; }
  int peer() const { return peer_; }

 private:
  ErrorKind kind_;
  int peer_;
};

}  // namespace collectives
