// Steps on a pretended machine: `processors shared slept others:steps ...`. `shared` is the part of the work
// that threads share, `slept` the part of a step in which they have nothing to do, and other threads want the
// processors too. Prints for each number of others how many of the last 200 steps each number of threads
// took.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "thread_choice.h"

using acclimate::inference::ThreadChoice;

int main(int count, char** arguments) {
  const int processors = std::atoi(arguments[1]);
  const double shared = std::atof(arguments[2]), slept = std::atof(arguments[3]);
  ThreadChoice choice;
  for (int i = 4; i < count; ++i) {
    const double others = std::atof(arguments[i]);
    const int steps = std::atoi(std::strchr(arguments[i], ':') + 1);
    std::map<int, int> taken;
    for (int step = 0; step < steps; ++step) {
      const int threads = choice.next(processors, 1);
      const double unhindered = 0.01 * (1 - shared + shared / threads);
      const double given = std::min(1.0, processors / (others + threads));
      const double idle = threads > 1 ? slept : 0;
      choice.took(
          {unhindered / given, unhindered * threads * (1 - idle), unhindered / given * threads * idle});
      taken[threads] += step >= steps - 200;
    }
    for (const auto& [threads, times] : taken) {
      if (times > 0) {
        std::printf("%d: %d, ", threads, times);
      }
    }
    std::printf("\n");
  }
}
