// The one exception of the core: a kind, which the bindings turn into a Python class, and a
// sentence for people.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
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

// The beginning of a text of UTF-8, at most so many bytes, that ends with a whole character: Python
// takes no other.
inline std::string_view cut_short(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes != 0 && (text[bytes] & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
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
