// acclimate::adagrad_ on the host.
#include <array>

#include "group.h"

// The arguments, checked; the schema is in acclimate.ops.optimizers.adagrad.
namespace acclimate {

// The coefficients of one step of Adagrad for a tensor.
struct AdagradCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float l2;  // weight decay that is added to the gradient
  float eps;
  float negative_lr;  // -lr / (1 + (t - 1) * lr decay)
};

struct AdagradSettings {
  static constexpr std::array state_names{"sum"};

  explicit AdagradSettings(Arguments& arguments) {
    arguments.read(lr, lr_decay, weight_decay, eps, maximize, gradient_scale, isa);
  }

  AdagradCoefficients coefficients(double step) const {
    return {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(weight_decay),
        static_cast<float>(eps),
        static_cast<float>(-lr / (1.0 + (step - 1.0) * lr_decay)),
    };
  }

  double lr, lr_decay, weight_decay, eps;
  bool maximize;
  double gradient_scale;
  int64_t isa;
};

using AdagradCall = GroupCall<AdagradSettings>;

}  // namespace acclimate

#define ACCLIMATE_RULE "adagrad_rule.h"
#include "every_isa.h"

ACCLIMATE_HOST_OP(adagrad_, AdagradCall, AdagradRule)
