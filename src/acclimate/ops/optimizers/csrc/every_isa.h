// Compiles an optimizer's rule for every instruction set, each in its own namespace, and runs a step over a
// whole parameter group with one of them: one call, one parallel region. ACCLIMATE_RULE names the rule's
// header, relative to this file.
#pragma once

#include "group.h"
#include "../../csrc/isa.h"

namespace acclimate {

// The fewest elements worth waking a thread for (about 10 us of work).
constexpr int64_t elements_per_thread = 16 << 10;

// The kernel to run: the requested one, or the best one for this machine.
inline Isa choose_isa(int64_t asked) {
  const Isa isa = asked == 0 ? best_isa() : static_cast<Isa>(asked);
  STD_TORCH_CHECK(runs_here(isa), "This machine cannot run the instruction set number ", asked, ".");
  return isa;
}

// Updates all rows on torch's intra-op threads. Coefficients: one set for each row, or one for all.
template <class Coefficients>
void run(Group& group, const std::vector<Coefficients>& coefficients,
         void (*step_range)(const Row&, const Coefficients&, int64_t, int64_t)) {
  const std::vector<Row>& rows = group.rows();
  const std::vector<int64_t>& first = group.first_blocks();
  torch::stable::parallel_for(
      0, first.back(), elements_per_thread / block_elements, [&](int64_t begin, int64_t end) {
        const auto after = std::upper_bound(first.begin(), first.end(), begin);
        for (size_t i = after - first.begin() - 1; begin < end; ++i) {
          const int64_t last = std::min(end, first[i + 1]);
          const int64_t from = (begin - first[i]) * block_elements;
          const int64_t to = std::min(rows[i].elements, (last - first[i]) * block_elements);
          if (from < to) {
            step_range(rows[i], coefficients[coefficients.size() == 1 ? 0 : i], from, to);
          }
          begin = last;
        }
      });
  group.write_back();
}

}  // namespace acclimate

#include "simd_plain.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"

#if defined(__x86_64__)
#include "simd_avx2.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"

#include "simd_avx512.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"

#define ACCLIMATE_AVX512_BF16
#include "simd_avx512.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"
#endif

// A case that returns an instruction set's step_range.
#define ACCLIMATE_STEP_RANGE(name, number, needs, Rule) \
  case Isa::name:                                       \
    return name::step_range<name::Rule>;

// Registers the op that applies a rule on the host.
#define ACCLIMATE_HOST_OP(op, Call, Rule)                                    \
  namespace acclimate {                                                      \
  namespace {                                                                \
  auto step_range_of(Isa isa) -> decltype(&plain::step_range<plain::Rule>) { \
    switch (isa) {                                                           \
      ACCLIMATE_ISAS(ACCLIMATE_STEP_RANGE, Rule)                             \
      default:                                                               \
        return nullptr;                                                      \
    }                                                                        \
  }                                                                          \
  void op(StableIValue* stack, uint64_t, uint64_t) {                         \
    Call call{Arguments(stack)};                                             \
    const auto step_range = step_range_of(choose_isa(call.settings.isa));    \
    run(call.group, call.count_steps(), step_range);                         \
  }                                                                          \
  STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) { m.impl(#op, &op); }         \
  }                                                                          \
  }
