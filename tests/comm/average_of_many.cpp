// Prints the average over so many ranks of int8 numbers that are 0 on all but the first, which has `value`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "reduce.h"

namespace acclimate_comm {
Reduce find_reduce_plain(Dtype dtype, Op op);
}

int main(int, char** arguments) {
  using namespace acclimate_comm;
  const int ranks = atoi(arguments[1]);
  const int8_t value = static_cast<int8_t>(atoi(arguments[2])), zero = 0;
  std::vector<const void*> sources(ranks, &zero);
  sources[0] = &value;
  int8_t average = 0;
  find_reduce_plain(Dtype::kInt8, Op::kAvg)(&average, sources.data(), ranks, 1, ranks);
  printf("%d\n", average);
}
