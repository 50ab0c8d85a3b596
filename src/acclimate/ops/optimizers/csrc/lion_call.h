// The arguments of acclimate::lion_, checked; the schema is in acclimate.ops.optimizers.lion.
#pragma once

#include <array>

#include "group.h"

namespace acclimate {

// The coefficients of one step of Lion.
struct LionCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float decay;  // multiplies the parameter: 1 - lr * weight decay
  float beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

struct LionSettings {
  static constexpr std::array state_names{"exp_avg"};

  explicit LionSettings(Arguments& arguments) {
    arguments.read(lr, beta1, beta2, weight_decay, maximize, gradient_scale, isa);
  }

  LionCoefficients coefficients(double) const {
    return {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(1.0 - lr * weight_decay),
        static_cast<float>(beta1),
        static_cast<float>(1.0 - beta1),
        static_cast<float>(beta2),
        static_cast<float>(1.0 - beta2),
        static_cast<float>(lr),
    };
  }

  double lr, beta1, beta2, weight_decay;
  bool maximize;
  double gradient_scale;
  int64_t isa;
};

using LionCall = GroupCall<LionSettings>;

}  // namespace acclimate
