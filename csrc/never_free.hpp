// Memory that MPI may still use when nobody else does: a message may leave from it, or come there.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

namespace collectives {

// Keeps what owns memory until the process ends, where a leak checker finds it.
template <class T>
void never_free(T owner) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<T>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(owner));
}

}  // namespace collectives
