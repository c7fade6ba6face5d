// Whether the ranks of a region are still there.
//
// A process is watched through a pidfd, which tells of its end even while it is a zombie, and never
// of another process that got its number. One pidfd serves all communicators of this process.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "region.hpp"

namespace collectives {

class Process;  // an open pidfd, shared by everybody here who watches that process

class Liveness {
 public:
  // `threads`: the ranks are threads of this process, of which only leaving can be seen.
  Liveness(std::shared_ptr<Region> region, int me, bool threads);

  // Opens what is needed to watch the peers, once; all of them must be in the region by now.
  void watch();
  // True if rank `q` of the region has ended. Any thread.
  bool dead(int q);
  // The same, and it had not closed its end.
  bool died(int q) { return dead(q) && !left(q); }
  // True if it has closed its end.
  bool left(int q) const;
  int process(int q) const;

 private:
  std::shared_ptr<Region> region_;
  int me_;
  bool threads_;
  std::once_flag once_;
  std::vector<std::shared_ptr<Process>> processes_;  // by local rank
};

}  // namespace collectives
