#include "process.hpp"

#include <pthread.h>

#include "errors.hpp"

namespace collectives {
namespace {

std::atomic<unsigned> count{0};

// Registered when the library is loaded, before anything can be made.
const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });

}  // namespace

const std::atomic<unsigned>& forks() {
  static_cast<void>(registered);
  return count;
}

void Birth::refuse_child() {
  throw Error(ErrorKind::closed,
              "this process was forked after the communicator was made, which belongs to the "
              "parent: call it there, or start the process by another method than fork (spawn) "
              "and give it ranks of its own");
}

}  // namespace collectives
