// Adam and AdamW for one vector; included once per instruction set, after step_kernel.h.

struct AdamRule {
  static constexpr int states = 2;
  using Coefficients = AdamCoefficients;
  struct Vectors {
    V gradient_scale, l2, decay, one_minus_beta1, lerp_rest, beta2, one_minus_beta2, variance_scale, eps,
        negative_step;
    bool has_l2, leans_on_momentum;
  };

  ACCLIMATE_INLINE static Vectors broadcast_all(const Coefficients& c) {
    return {
        broadcast(c.gradient_scale),
        broadcast(c.l2),
        broadcast(c.decay),
        broadcast(c.one_minus_beta1),
        broadcast(c.lerp_rest),
        broadcast(c.beta2),
        broadcast(c.one_minus_beta2),
        broadcast(c.variance_scale),
        broadcast(c.eps),
        broadcast(c.negative_step),
        c.l2 != 0.0f,
        c.one_minus_beta1 < 0.5f,
    };
  }

  // The same order of operations as in torch and in acclimate.ops.optimizers.adam.
  ACCLIMATE_INLINE static void step(const Vectors& c, V& p, V g, V& m, V& v) {
    g = g * c.gradient_scale;
    if (c.has_l2) {  // without decay, an infinite parameter must not make the gradient NaN
      g = g + p * c.l2;
    }
    p = p * c.decay;
    // Equal in exact arithmetic; like torch.lerp, each form is exact at one end.
    m = c.leans_on_momentum ? m + (g - m) * c.one_minus_beta1 : g - (g - m) * c.lerp_rest;
    v = v * c.beta2 + (g * c.one_minus_beta2) * g;
    const V denominator = square_root(v) * c.variance_scale + c.eps;
    p = p + (m * c.negative_step) / denominator;
  }
};
