// verify(): the proof of a schedule, by following every contribution to its end.
#include "messages.hpp"
#include "plan.hpp"
#include "schedule.hpp"
#include "symbolic.hpp"

namespace collectives {
namespace {

void check_end(const Schedule& s, const SymbolicRun& run) {
  const Expressions& expressions = run.expressions();
  const bool needs_all = reduces(s.collective) || s.collective == Collective::barrier;
  for (int c = 0; c < s.nchunks; ++c) {
    Expr agreed = kNothing;
    int first = -1;
    for (int r = 0; r < s.world.nranks; ++r) {
      if (!holds_at_end(s, r, c)) continue;
      const Expr e = run.held(r, c);
      const std::string where =
          title_of(s) + ", at the end: rank " + std::to_string(r) + ", chunk " + std::to_string(c);
      if (e == kNothing) throw ScheduleError(where + " was never received");
      if (needs_all && !expressions.complete(e)) {
        std::vector<int> missing;
        for (int q = 0; q < s.world.nranks; ++q) {
          if (!expressions.contains(e, q)) missing.push_back(q);
        }
        throw ScheduleError(where + " misses the contributions of " + list_of_ranks(missing));
      }
      if (s.collective == Collective::barrier) continue;  // nothing is computed
      if (first < 0) {
        first = r;
        agreed = e;
      } else if (e != agreed) {
        throw ScheduleError(where + " combined the contributions in another order than rank " +
                            std::to_string(first) + ", so their bits may differ");
      }
    }
  }
}

}  // namespace

void verify(const Schedule& s) {
  SymbolicRun run(s);
  for (std::size_t i = 0; i < s.rounds.size(); ++i) {
    run.evaluate(static_cast<int>(i));
    run.commit();
  }
  check_end(s, run);
  choose_fusions(s, group_messages(s), Order::any, 1);  // throws on a deadlock
}

}  // namespace collectives
