// Checks a team: `late` holds a thread up in its unit, `often` runs many phases. Prints what was wrong.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "pool.h"

using acclimate::inference::Team;

namespace {

void pause_for(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// The second thread stays in its unit until the phase has ended.
const char* late() {
  static std::atomic<bool> is_inside{false}, may_leave{false};
  static std::atomic<int> committed[2], by_helper{0};
  {
    Team team(2);
    team.share(
        2,
        [](int64_t, int thread) {
          if (thread == 1) {
            is_inside = true;
            while (!may_leave) {
              pause_for(100);
            }
          }
          while (!is_inside) {
            pause_for(100);
          }
        },
        [](int64_t unit, int thread) {
          ++committed[unit];
          by_helper += thread;
        });
    if (committed[0] != 1 || committed[1] != 1 || by_helper != 0) {
      return "a unit was not committed once by the leader";
    }
    may_leave = true;
  }
  return committed[0] + committed[1] == 2 ? "nothing" : "a late unit was committed again";
}

// Units of different lengths, some of which sleep; threads that no processor is free for.
const char* often(int threads, int phases) {
  std::vector<int64_t> results(300), memory(threads);
  int64_t* const to = results.data();
  int64_t* const own = memory.data();
  for (int phase = 0; phase < phases; ++phase) {
    const int64_t units = phase * 7919 % 300 + 1;
    std::fill(results.begin(), results.end(), 0);
    Team team(threads);
    const auto compute = [=](int64_t unit, int thread) {
      own[thread] = phase + unit;
      if ((phase + unit) % 97 == 0) {
        pause_for(200);
      }
    };
    const auto commit = [=](int64_t unit, int thread) { to[unit] += own[thread] + 1; };
    if (phase % 3 == 0) {
      team.share(units, [=](int64_t unit, int thread) {
        compute(unit, thread);
        commit(unit, thread);
      });
    } else {
      team.share(units, compute, commit);
      Team inner(threads);  // the threads are taken: its leader is alone
      if (inner.threads() != (team.threads() > 1 ? 1 : inner.threads())) {
        return "two teams have the same threads";
      }
    }
    for (int64_t unit = 0; unit < 300; ++unit) {
      if (results[unit] != (unit < units ? phase + unit + 1 : 0)) {
        return "a unit has another result";
      }
    }
  }
  return "nothing";
}

}  // namespace

int main(int, char** arguments) {
  const char* wrong = std::strcmp(arguments[1], "late") == 0
                          ? late()
                          : often(std::atoi(arguments[2]), std::atoi(arguments[3]));
  std::printf("%s\n", wrong);
}
