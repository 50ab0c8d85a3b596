// Adagrad for one vector; included once per instruction set, after step_kernel.h.

struct AdagradRule {
  static constexpr int states = 1;
  using Coefficients = AdagradCoefficients;
  struct Vectors {
    V gradient_scale, l2, eps, negative_lr;
    bool has_l2;
  };

  ACCLIMATE_INLINE static Vectors broadcast_all(const Coefficients& c) {
    return {
        broadcast(c.gradient_scale), broadcast(c.l2), broadcast(c.eps),
        broadcast(c.negative_lr),    c.l2 != 0.0f,
    };
  }

  // The same order of operations as in torch and in acclimate.ops.optimizers.adagrad.
  ACCLIMATE_INLINE static void step(const Vectors& c, V& p, V g, V& sum, V&) {
    g = g * c.gradient_scale;
    if (c.has_l2) {  // without decay, an infinite parameter must not make the gradient NaN
      g = g + p * c.l2;
    }
    sum = sum + g * g;
    p = p + (g * c.negative_lr) / (square_root(sum) + c.eps);
  }
};
