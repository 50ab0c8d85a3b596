// acclimate::lion_ on the host.
#include "../../csrc/group_step.h"

namespace acclimate {

// What is the same for all elements in one step of Lion.
struct LionCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float decay;           // multiplies the parameter: 1 - lr * weight decay
  float beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

}  // namespace acclimate

#include "../../csrc/simd/plain.h"
#include "../../csrc/step_kernel.h"
#include "lion_rule.h"
#include "../../csrc/simd/end.h"

#if defined(__x86_64__)
#include "../../csrc/simd/avx2.h"
#include "../../csrc/step_kernel.h"
#include "lion_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512.h"
#include "../../csrc/step_kernel.h"
#include "lion_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512_bf16.h"
#include "../../csrc/step_kernel.h"
#include "lion_rule.h"
#include "../../csrc/simd/end.h"
#elif defined(__aarch64__)
#include "../../csrc/simd/neon.h"
#include "../../csrc/step_kernel.h"
#include "lion_rule.h"
#include "../../csrc/simd/end.h"
#endif

namespace acclimate {
namespace {

// The schema is in acclimate.ops.lion.schema.
void lion_(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const TensorList parameters(arguments.list());
  const TensorList gradients(arguments.list());
  const TensorList momenta(arguments.list());
  const TensorList steps(arguments.list());
  const TensorList outputs(arguments.list());
  const double lr = arguments.scalar<double>();
  const double beta1 = arguments.scalar<double>();
  const double beta2 = arguments.scalar<double>();
  const double weight_decay = arguments.scalar<double>();
  const bool maximize = arguments.scalar<bool>();
  const double gradient_scale = arguments.scalar<double>();
  const Isa isa = choose_isa(arguments.scalar<int64_t>());

  Group group(parameters, gradients, {{momenta, "exp_avg"}}, outputs);
  STD_TORCH_CHECK(steps.size() == group.size(), "Expected a step for each parameter.");
  for (size_t i = 0; i < group.size(); ++i) {
    count_step(steps[i]);
  }
  const LionCoefficients coefficients{
      static_cast<float>(maximize ? -gradient_scale : gradient_scale),
      static_cast<float>(1.0 - lr * weight_decay),
      static_cast<float>(beta1),
      static_cast<float>(1.0 - beta1),
      static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2),
      static_cast<float>(lr),
  };
  const auto step_range = ACCLIMATE_STEP_RANGE(isa, LionRule);
  group.run([&](const Row& row, size_t, int64_t begin, int64_t end) {
    step_range(row, coefficients, begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("lion_", &lion_);
}

}  // namespace
}  // namespace acclimate
