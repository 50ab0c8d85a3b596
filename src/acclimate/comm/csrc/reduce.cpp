#include "reduce.h"

#include <atomic>

#include "../../ops/csrc/isa.h"

namespace acclimate_comm {

using acclimate::Isa;

// Of reduce_kernels.cpp, compiled for each set.
Reduce find_reduce_plain(Dtype dtype, Op op);
#if defined(__x86_64__)
Reduce find_reduce_avx2(Dtype dtype, Op op);
Reduce find_reduce_avx512(Dtype dtype, Op op);
#endif

namespace {

std::atomic<Isa> g_isa{acclimate::best_isa()};

}  // namespace

bool use_isa(int64_t number) {
  const auto isa = static_cast<Isa>(number);
  if (!acclimate::runs_here(isa)) {
    return false;
  }
  g_isa = isa == Isa::best ? acclimate::best_isa() : isa;
  return true;
}

Reduce find_reduce(Dtype dtype, Op op) {
  Reduce found = nullptr;
#if defined(__x86_64__)
  // A set without reductions of its own uses those of the best set before it.
  const Isa isa = g_isa.load(std::memory_order_relaxed);
  if (isa >= Isa::avx512) {
    found = find_reduce_avx512(dtype, op);
  } else if (isa >= Isa::avx2) {
    found = find_reduce_avx2(dtype, op);
  }
#endif
  return found != nullptr ? found : find_reduce_plain(dtype, op);
}

}  // namespace acclimate_comm
