// Transfers whose parts take as long as the command line says, each way; prints which way the last one went.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "route.h"

namespace {

using namespace acclimate_comm;
using Clock = std::chrono::steady_clock;

void work(double microseconds) {
  const auto until = Clock::now() + std::chrono::duration<double, std::micro>(microseconds);
  while (Clock::now() < until) {
  }
}

}  // namespace

// bytes, parts, the time of a part around the caches and through them, and the transfers.
int main(int count, char** arguments) {
  if (count != 6) return 2;
  const size_t bytes = strtoull(arguments[1], nullptr, 10), parts = strtoull(arguments[2], nullptr, 10);
  const double around = atof(arguments[3]), through = atof(arguments[4]);
  Route route;
  bool is_around = true;
  for (int transfer = atoi(arguments[5]); transfer > 0; transfer--) {
    route.start(Flow::kReduce, bytes, parts);
    for (size_t part = 0; part < parts; part++) {
      is_around = route.is_around_caches();
      work(is_around ? around : through);
      route.published();
      route.resumed();
    }
    route.finish();
    // What short transfers of another flow find does not count for this one.
    route.start(Flow::kGather, bytes, 1);
    route.finish();
  }
  puts(is_around ? "around" : "through");
}
