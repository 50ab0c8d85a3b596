// The arguments of acclimate::lamb_, checked; the schema is in acclimate.ops.optimizers.lamb.
#pragma once

#include <array>
#include <cmath>

#include "group.h"

namespace acclimate {

// The coefficients of one step of LAMB for a tensor.
struct LambCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float momentum_scale;  // 1 / (1 - beta1^t)
  float variance_scale;  // 1 / (1 - beta2^t)
  float eps_inside;  // added to the second moment
  float eps_outside;  // added to its root
  float weight_decay;
  float rate;
  float min_ratio, max_ratio;
};

struct LambSettings {
  static constexpr std::array state_names{"exp_avg", "exp_avg_sq"};

  explicit LambSettings(Arguments& arguments) {
    arguments.read(ratios, lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio, bias_correction,
                   corrects_rate, eps_inside_sqrt, maximize, gradient_scale);
  }

  LambCoefficients coefficients(double step) const {
    const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
    const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
    return {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(beta1),
        static_cast<float>(1.0 - beta1),
        static_cast<float>(beta2),
        static_cast<float>(1.0 - beta2),
        corrects_rate ? 1.0f : static_cast<float>(1.0 / correction1),
        corrects_rate ? 1.0f : static_cast<float>(1.0 / correction2),
        static_cast<float>(eps_inside_sqrt ? eps : 0.0),
        static_cast<float>(eps_inside_sqrt ? 0.0 : eps),
        static_cast<float>(weight_decay),
        static_cast<float>(corrects_rate ? lr * std::sqrt(correction2) / correction1 : lr),
        static_cast<float>(min_ratio),
        static_cast<float>(max_ratio),
    };
  }

  torch::stable::Tensor ratios;
  double lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio;
  bool bias_correction, corrects_rate, eps_inside_sqrt, maximize;
  double gradient_scale;
};

using LambCall = GroupCall<LambSettings>;

}  // namespace acclimate
