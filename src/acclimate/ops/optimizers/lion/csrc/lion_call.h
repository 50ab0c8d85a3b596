// The arguments of acclimate::lion_, checked; the schema is in acclimate.ops.optimizers.lion.plain.
#pragma once

#include "../../csrc/group.h"

namespace acclimate {

// The coefficients of one step of Lion.
struct LionCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float decay;  // multiplies the parameter: 1 - lr * weight decay
  float beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

struct LionSettings {
  explicit LionSettings(Arguments& arguments)
      : lr(arguments.scalar<double>()),
        beta1(arguments.scalar<double>()),
        beta2(arguments.scalar<double>()),
        weight_decay(arguments.scalar<double>()),
        maximize(arguments.scalar<bool>()),
        gradient_scale(arguments.scalar<double>()),
        isa(arguments.scalar<int64_t>()) {}

  LionCoefficients coefficients() const {
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

  // In the order of the schema.
  double lr, beta1, beta2, weight_decay;
  bool maximize;
  double gradient_scale;
  int64_t isa;
};

// Members are initialised in the order of the schema.
struct LionCall {
  explicit LionCall(Arguments arguments)
      : parameters(arguments.list()),
        gradients(arguments.list()),
        momenta(arguments.list()),
        steps(arguments.list()),
        outputs(arguments.list()),
        settings(arguments),
        group(parameters, gradients, {{momenta, "exp_avg"}}, outputs) {
    count_steps(steps, group.size(), [](double) { return 0; });  // Lion does not use the count
    coefficients.push_back(settings.coefficients());
  }

  TensorList parameters, gradients, momenta, steps, outputs;
  LionSettings settings;
  Group group;
  std::vector<LionCoefficients> coefficients;
};

}  // namespace acclimate
