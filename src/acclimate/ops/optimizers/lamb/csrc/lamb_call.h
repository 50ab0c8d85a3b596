// The arguments of acclimate::lamb_, checked; the schema is in acclimate.ops.optimizers.lamb.plain.
#pragma once

#include <cmath>

#include "../../csrc/group.h"

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
  explicit LambSettings(Arguments& arguments)
      : lr(arguments.scalar<double>()),
        beta1(arguments.scalar<double>()),
        beta2(arguments.scalar<double>()),
        eps(arguments.scalar<double>()),
        weight_decay(arguments.scalar<double>()),
        min_ratio(arguments.scalar<double>()),
        max_ratio(arguments.scalar<double>()),
        bias_correction(arguments.scalar<bool>()),
        corrects_rate(arguments.scalar<bool>()),
        eps_inside_sqrt(arguments.scalar<bool>()),
        maximize(arguments.scalar<bool>()),
        gradient_scale(arguments.scalar<double>()) {}

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

  // In the order of the schema.
  double lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio;
  bool bias_correction, corrects_rate, eps_inside_sqrt, maximize;
  double gradient_scale;
};

// Members are initialised in the order of the schema.
struct LambCall {
  explicit LambCall(Arguments arguments)
      : parameters(arguments.list()),
        gradients(arguments.list()),
        momenta(arguments.list()),
        variances(arguments.list()),
        steps(arguments.list()),
        outputs(arguments.list()),
        ratios(arguments.scalar<torch::stable::Tensor>()),
        settings(arguments),
        group(parameters, gradients, {{momenta, "exp_avg"}, {variances, "exp_avg_sq"}}, outputs) {
    STD_TORCH_CHECK(ratios.numel() == static_cast<int64_t>(group.size()) && ratios.is_contiguous() &&
                        dtype(ratios.get(), "ratio") == Dtype::f32 &&
                        (group.size() == 0 || device(ratios.get()) == device(parameters[0])),
                    "The ratios are not one float32 number for each parameter, on its device.");
    coefficients =
        count_steps(steps, group.size(), [this](double step) { return settings.coefficients(step); });
  }

  TensorList parameters, gradients, momenta, variances, steps, outputs;
  torch::stable::Tensor ratios;
  LambSettings settings;
  Group group;
  std::vector<LambCoefficients> coefficients;
};

}  // namespace acclimate
