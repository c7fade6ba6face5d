// fork() copies a communicator's memory, but not its threads, and its peers know only the parent.
// So what was made before a fork is not used in the child: calls raise, and nothing is torn down
// there (a destructor would wait for threads that do not exist, or tell the peers that the rank has
// closed).
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace collectives {

// How many forks lie between this process and the one that loaded the core: a number that differs
// from the one noted at an object's birth means another process. Costs a load; getpid() is a system
// call.
const std::atomic<unsigned>& forks();

// Noted when an object is made.
class Birth {
 public:
  bool in_child() const { return forks().load(std::memory_order_relaxed) != forks_; }
  // Throws Error(closed), in words, where a forked child calls.
  void check() const {
    if (in_child()) refuse_child();
  }

 private:
  [[noreturn]] static void refuse_child();

  unsigned forks_ = forks().load(std::memory_order_relaxed);
};

// A T that a forked child leaks.
template <class T, class... Args>
std::shared_ptr<T> make_for_this_process(Args&&... args) {
  const Birth birth;
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [birth](T* object) {
    if (!birth.in_child()) delete object;
  });
}

}  // namespace collectives
