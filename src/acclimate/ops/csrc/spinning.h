// What threads that wait for each other in a loop need.
#pragma once

#if defined(__linux__)
#include <sched.h>
#include <sys/types.h>
#endif

namespace acclimate {

// Tells the processor that a thread spins.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
// Moves a thread (0: this one) from a processor to another that this thread may use. The system can leave two
// threads that wait for each other on one processor for long, where each waits until the other one sleeps.
inline void move_away(pid_t thread, int processor) {
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof(all), &all) != 0) {
    return;
  }
  others = all;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) > 0) {
    sched_setaffinity(thread, sizeof(others), &others);
    // From here on the system may move it again.
    sched_setaffinity(thread, sizeof(all), &all);
  }
}
#endif

}  // namespace acclimate
