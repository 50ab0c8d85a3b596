// acclimate::adam_ on the host.
#include "../../csrc/group_step.h"
#include "adam_coefficients.h"

#include "../../csrc/simd/plain.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"

#if defined(__x86_64__)
#include "../../csrc/simd/avx2.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512_bf16.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"
#elif defined(__aarch64__)
#include "../../csrc/simd/neon.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"
#endif

namespace acclimate {
namespace {

// The schema is in acclimate.ops.adam.schema.
void adam_(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const TensorList parameters(arguments.list());
  const TensorList gradients(arguments.list());
  const TensorList momenta(arguments.list());
  const TensorList variances(arguments.list());
  const TensorList steps(arguments.list());
  const TensorList outputs(arguments.list());
  const double lr = arguments.scalar<double>();
  const double beta1 = arguments.scalar<double>();
  const double beta2 = arguments.scalar<double>();
  const double eps = arguments.scalar<double>();
  const double weight_decay = arguments.scalar<double>();
  const bool decoupled = arguments.scalar<bool>();
  const bool bias_correction = arguments.scalar<bool>();
  const bool maximize = arguments.scalar<bool>();
  const double gradient_scale = arguments.scalar<double>();
  const Isa isa = choose_isa(arguments.scalar<int64_t>());

  Group group(parameters, gradients, {{momenta, "exp_avg"}, {variances, "exp_avg_sq"}}, outputs);
  STD_TORCH_CHECK(steps.size() == group.size(), "Expected a step for each parameter.");
  std::vector<AdamCoefficients> coefficients(group.size());
  std::vector<double> counts(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    counts[i] = count_step(steps[i]);
    coefficients[i] = i > 0 && counts[i] == counts[i - 1]
        ? coefficients[i - 1]
        : adam_coefficients(lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, maximize,
                            gradient_scale, counts[i]);
  }
  const auto step_range = ACCLIMATE_STEP_RANGE(isa, AdamRule);
  group.run([&](const Row& row, size_t i, int64_t begin, int64_t end) {
    step_range(row, coefficients[i], begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("adam_", &adam_);
}

}  // namespace
}  // namespace acclimate
