// Moves this thread from its processor, with the mask of each processor given. Prints whether it is
// elsewhere, and whether its mask is as before.
#include <cstdio>
#include <cstdlib>

#include "spinning.h"

int main(int count, char** arguments) {
  cpu_set_t mask, after;
  CPU_ZERO(&mask);
  for (int i = 1; i < count; ++i) {
    CPU_SET(std::atoi(arguments[i]), &mask);
  }
  sched_setaffinity(0, sizeof(mask), &mask);
  bool moved = false;
  for (int tries = 0; tries < 5 && !moved; ++tries) {  // the system may move it back
    const int here = sched_getcpu();
    acclimate::move_away(0, here);
    moved = sched_getcpu() != here;
  }
  sched_getaffinity(0, sizeof(after), &after);
  std::printf("%s %s\n", moved ? "moved" : "stayed", CPU_EQUAL(&mask, &after) ? "same" : "changed");
}
