// Lion for one vector; included once per instruction set, after step_kernel.h.

struct LionRule {
  static constexpr int states = 1;
  using Coefficients = LionCoefficients;
  struct Vectors {
    V gradient_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
  };

  ACCLIMATE_INLINE static Vectors broadcast_all(const Coefficients& c) {
    return {
        broadcast(c.gradient_scale),
        broadcast(c.decay),
        broadcast(c.beta1),
        broadcast(c.one_minus_beta1),
        broadcast(c.beta2),
        broadcast(c.one_minus_beta2),
        broadcast(c.lr),
    };
  }

  // The same order of operations as in acclimate.ops.optimizers.lion.
  ACCLIMATE_INLINE static void step(const Vectors& c, V& p, V g, V& m, V&) {
    g = g * c.gradient_scale;
    const V direction = sign(m * c.beta1 + g * c.one_minus_beta1);
    p = p * c.decay - direction * c.lr;
    m = m * c.beta2 + g * c.one_minus_beta2;
  }
};
