// The arguments of acclimate::adam_, checked; the schema is in acclimate.ops.optimizers.adam.
#pragma once

#include <array>
#include <cmath>

#include "group.h"

namespace acclimate {

// The coefficients of one step of Adam for a tensor.
struct AdamCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float l2;  // weight decay that is added to the gradient; 0 for none
  float decay;  // multiplies the parameter: 1 - lr * weight decay, decoupled
  float one_minus_beta1;
  float lerp_rest;  // 1 - one_minus_beta1, rounded as torch.lerp does
  float beta2;
  float one_minus_beta2;
  float variance_scale;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float negative_step;  // -lr / (1 - beta1^t)
};

struct AdamSettings {
  static constexpr std::array state_names{"exp_avg", "exp_avg_sq"};

  explicit AdamSettings(Arguments& arguments) {
    arguments.read(lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, maximize, gradient_scale,
                   isa);
  }

  AdamCoefficients coefficients(double step) const {
    const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
    const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
    const float one_minus_beta1 = static_cast<float>(1.0 - beta1);
    return {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(decoupled ? 0.0 : weight_decay),
        static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0),
        one_minus_beta1,
        1.0f - one_minus_beta1,
        static_cast<float>(beta2),
        static_cast<float>(1.0 - beta2),
        static_cast<float>(1.0 / std::sqrt(correction2)),
        static_cast<float>(eps),
        static_cast<float>(-lr / correction1),
    };
  }

  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, bias_correction, maximize;
  double gradient_scale;
  int64_t isa;
};

using AdamCall = GroupCall<AdamSettings>;

}  // namespace acclimate
