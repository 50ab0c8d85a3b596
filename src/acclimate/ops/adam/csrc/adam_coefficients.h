// What is the same for all elements of a tensor in one step of Adam.
#pragma once

#include <cmath>

namespace acclimate {

struct AdamCoefficients {
  float gradient_scale;   // multiplies the gradient: -1 to maximize, 1 / loss scale
  float l2;               // weight decay that joins the gradient; 0 for none
  float decay;            // multiplies the parameter: 1 - lr * weight decay, decoupled
  float one_minus_beta1;
  float lerp_rest;        // 1 - one_minus_beta1, rounded as torch.lerp does
  float beta2;
  float one_minus_beta2;
  float variance_scale;   // 1 / sqrt(1 - beta2^t)
  float eps;
  float negative_step;    // -lr / (1 - beta1^t)
};

inline AdamCoefficients adam_coefficients(
    double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
    bool bias_correction, bool maximize, double gradient_scale, double step) {
  const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
  const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
  return {
      static_cast<float>(maximize ? -gradient_scale : gradient_scale),
      static_cast<float>(decoupled ? 0.0 : weight_decay),
      static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0),
      static_cast<float>(1.0 - beta1),
      1.0f - static_cast<float>(1.0 - beta1),
      static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2),
      static_cast<float>(1.0 / std::sqrt(correction2)),
      static_cast<float>(eps),
      static_cast<float>(-lr / correction1),
  };
}

}  // namespace acclimate
