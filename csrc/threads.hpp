// Threads of this library, beside those that the program made.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace collectives {

// A thread that no signal is delivered to: signals are for the threads of the program. Throws
// std::system_error, and then the caller's mask of signals is as before too.
template <class Function, class... Arguments>
std::thread start_thread(Function&& function, Arguments&&... arguments) {
  class Blocked {
   public:
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    Blocked(const Blocked&) = delete;
    Blocked& operator=(const Blocked&) = delete;

   private:
    sigset_t before_;
  };
  const Blocked blocked;
  return std::thread(std::forward<Function>(function), std::forward<Arguments>(arguments)...);
}

}  // namespace collectives
