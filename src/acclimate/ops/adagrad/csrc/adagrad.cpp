// acclimate::adagrad_ on the host.
#include "../../csrc/group_step.h"

namespace acclimate {

// What is the same for all elements of a tensor in one step of Adagrad.
struct AdagradCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float l2;              // weight decay, which joins the gradient
  float eps;
  float negative_lr;     // -lr / (1 + (t - 1) * lr decay)
};

}  // namespace acclimate

#include "../../csrc/simd/plain.h"
#include "../../csrc/step_kernel.h"
#include "adagrad_rule.h"
#include "../../csrc/simd/end.h"

#if defined(__x86_64__)
#include "../../csrc/simd/avx2.h"
#include "../../csrc/step_kernel.h"
#include "adagrad_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512.h"
#include "../../csrc/step_kernel.h"
#include "adagrad_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512_bf16.h"
#include "../../csrc/step_kernel.h"
#include "adagrad_rule.h"
#include "../../csrc/simd/end.h"
#elif defined(__aarch64__)
#include "../../csrc/simd/neon.h"
#include "../../csrc/step_kernel.h"
#include "adagrad_rule.h"
#include "../../csrc/simd/end.h"
#endif

namespace acclimate {
namespace {

// The schema is in acclimate.ops.adagrad.schema.
void adagrad_(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const TensorList parameters(arguments.list());
  const TensorList gradients(arguments.list());
  const TensorList sums(arguments.list());
  const TensorList steps(arguments.list());
  const TensorList outputs(arguments.list());
  const double lr = arguments.scalar<double>();
  const double lr_decay = arguments.scalar<double>();
  const double weight_decay = arguments.scalar<double>();
  const double eps = arguments.scalar<double>();
  const bool maximize = arguments.scalar<bool>();
  const double gradient_scale = arguments.scalar<double>();
  const Isa isa = choose_isa(arguments.scalar<int64_t>());

  Group group(parameters, gradients, {{sums, "sum"}}, outputs);
  STD_TORCH_CHECK(steps.size() == group.size(), "Expected a step for each parameter.");
  std::vector<AdagradCoefficients> coefficients(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    coefficients[i] = {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(weight_decay),
        static_cast<float>(eps),
        static_cast<float>(-lr / (1.0 + (count_step(steps[i]) - 1.0) * lr_decay)),
    };
  }
  const auto step_range = ACCLIMATE_STEP_RANGE(isa, AdagradRule);
  group.run([&](const Row& row, size_t i, int64_t begin, int64_t end) {
    step_range(row, coefficients[i], begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("adagrad_", &adagrad_);
}

}  // namespace
}  // namespace acclimate
