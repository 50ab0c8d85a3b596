// The arguments of acclimate::adagrad_, checked; the schema is in acclimate.ops.optimizers.adagrad.plain.
#pragma once

#include "../../csrc/group.h"

namespace acclimate {

// The coefficients of one step of Adagrad for a tensor.
struct AdagradCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float l2;  // weight decay that is added to the gradient
  float eps;
  float negative_lr;  // -lr / (1 + (t - 1) * lr decay)
};

struct AdagradSettings {
  explicit AdagradSettings(Arguments& arguments)
      : lr(arguments.scalar<double>()),
        lr_decay(arguments.scalar<double>()),
        weight_decay(arguments.scalar<double>()),
        eps(arguments.scalar<double>()),
        maximize(arguments.scalar<bool>()),
        gradient_scale(arguments.scalar<double>()),
        isa(arguments.scalar<int64_t>()) {}

  AdagradCoefficients coefficients(double step) const {
    return {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(weight_decay),
        static_cast<float>(eps),
        static_cast<float>(-lr / (1.0 + (step - 1.0) * lr_decay)),
    };
  }

  // In the order of the schema.
  double lr, lr_decay, weight_decay, eps;
  bool maximize;
  double gradient_scale;
  int64_t isa;
};

// Members are initialised in the order of the schema.
struct AdagradCall {
  explicit AdagradCall(Arguments arguments)
      : parameters(arguments.list()),
        gradients(arguments.list()),
        sums(arguments.list()),
        steps(arguments.list()),
        outputs(arguments.list()),
        settings(arguments),
        group(parameters, gradients, {{sums, "sum"}}, outputs),
        coefficients(
            count_steps(steps, group.size(), [this](double step) { return settings.coefficients(step); })) {}

  TensorList parameters, gradients, sums, steps, outputs;
  AdagradSettings settings;
  Group group;
  std::vector<AdagradCoefficients> coefficients;
};

}  // namespace acclimate
