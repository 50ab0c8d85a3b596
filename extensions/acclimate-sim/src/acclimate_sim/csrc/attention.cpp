// Chooses the algorithm of scaled_dot_product_attention: the CPU's, so that both give the same numbers at the
// same speed. For a device without a choice, torch uses the slow, composed algorithm.
#include "host_alias.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cmath>

namespace sim {
namespace {

using at::SDPBackend;
using at::Tensor;
using std::optional;

#ifdef SIM_IN_A_NAMED_SLOT

// As torch does before the composed algorithm, which adds the mask.
optional<Tensor> added(const optional<Tensor>& mask, const Tensor& query) {
  if (!mask || mask->scalar_type() != at::kBool) return mask;
  return at::zeros_like(*mask, query.options()).masked_fill(mask->logical_not(), -INFINITY);
}

// For a device type that torch knows, torch would use that hardware's algorithms, so this is always the
// composed one.
Tensor composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const optional<Tensor>& mask, double dropout, bool is_causal,
                          optional<double> scale, bool grouped) {
  const auto [result, weights] = at::_scaled_dot_product_attention_math(
      query, key, value, added(mask, query), dropout, is_causal, std::nullopt, scale, grouped);
  return result;
}
SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) { m.impl("scaled_dot_product_attention", composed_attention); }
SIM_LIBRARY_IMPL(aten, SIM_JOIN(Autograd, SIM_SLOT), m) {
  m.impl("scaled_dot_product_attention", composed_attention);
}

}  // namespace
}  // namespace sim

#else

// Without an operator: the tensors may be fake, or wrapped by a transform, and have a shape but no memory.
SDPBackend hosts_choice(const Tensor& query, const Tensor& key, const Tensor& value,
                        const optional<Tensor>& mask, double dropout, bool is_causal, optional<double> scale,
                        bool grouped) {
  const auto choice =
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, is_causal, scale, grouped);
  return static_cast<SDPBackend>(choice);
}

// The fused operators have neither a rule for vmap nor a forward derivative; the composed ones have both.
bool needs_composed(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
bool inside_a_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const optional<Tensor>& mask, double dropout, bool is_causal, optional<double> scale,
                         bool grouped) {
  if (inside_a_transform() || needs_composed(query) || needs_composed(key) || needs_composed(value) ||
      (mask && needs_composed(*mask))) {
    return static_cast<int64_t>(SDPBackend::math);
  }
  // The device's fused attention is the host's flash attention, so permission for either is permission.
  auto& context = at::globalContext();
  const bool only_overrideable = context.userEnabledOverrideableSDP() && !context.userEnabledFlashSDP();
  if (only_overrideable) context.setSDPUseFlash(true);
  SDPBackend choice = SDPBackend::error;
  try {
    choice = hosts_choice(query, key, value, mask, dropout, is_causal, scale, grouped);
  } catch (...) {
    if (only_overrideable) context.setSDPUseFlash(false);
    throw;
  }
  if (only_overrideable) context.setSDPUseFlash(false);
  if (choice == SDPBackend::flash_attention) choice = SDPBackend::overrideable;
  return static_cast<int64_t>(choice);
}

using Attention =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Attention fused_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const optional<Tensor>& bias, double dropout, bool is_causal, bool,
                          optional<double> scale) {
  TORCH_CHECK(dropout == 0.0, "sim: the fused attention has no dropout, but dropout_p is ", dropout,
              ". Call scaled_dot_product_attention, which then takes the composed one.");
  const auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, bias, scale);
  // The results for dropout, which is not supported: two tensors, as results must not alias each other.
  const Tensor seed = at::zeros({}, query.options().dtype(at::kLong)), offset = at::zeros_like(seed);
  return {output, logsumexp.contiguous(), {}, {}, query.sym_size(-2), key.sym_size(-2), seed, offset, {}};
}

// The gradient of the bias, which the CPU's operator does not return: that of the softmax's argument.
Tensor bias_gradient(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& bias, const Tensor& output, const Tensor& logsumexp, bool is_causal,
                     optional<double> scale) {
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
  const auto wide = logsumexp.scalar_type();
  const auto heads = [&](const Tensor& shared) {  // of grouped queries, repeated for each
    return shared.to(wide).repeat_interleave(query.size(1) / shared.size(1), 1);
  };
  const Tensor grad = grad_out.to(wide);
  Tensor scores = at::matmul(query.to(wide), heads(key).mT()) * factor + bias.to(wide);
  if (is_causal) {
    const auto seen = scores.new_ones({scores.size(-2), scores.size(-1)}, at::kBool).tril();
    scores = scores.masked_fill(seen.logical_not(), -INFINITY);
  }
  const Tensor weights = (scores - logsumexp.unsqueeze(-1)).exp();
  const Tensor of_weights = at::matmul(grad, heads(value).mT());
  const Tensor mean = (grad * output.to(wide)).sum(-1, /*keepdim=*/true);
  return (weights * (of_weights - mean)).sum_to_size(bias.sizes()).to(bias.scalar_type());
}

// torch promises a gradient with the strides of its tensor; the CPU's gradient has other strides.
Tensor laid_out_like(const Tensor& tensor, const Tensor& gradient) {
  return at::empty_like(tensor).copy_(gradient);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4> wanted, const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&,
    c10::SymInt, c10::SymInt, double dropout, bool is_causal, const Tensor&, const Tensor&,
    optional<double> scale) {
  if (!grad_out.defined()) return {};
  const auto mask = bias.defined() ? optional<Tensor>(bias) : std::nullopt;
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad_out, query, key, value, output, logsumexp, dropout, is_causal, mask, scale);
  Tensor of_bias;
  if (wanted[3] && mask) {
    of_bias = bias_gradient(grad_out, query, key, value, bias, output, logsumexp, is_causal, scale);
  }
  return {laid_out_like(query, of_query), laid_out_like(key, of_key), laid_out_like(value, of_value),
          of_bias};
}

SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) {
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", fused_attention_backward);
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &::sim::choose_attention)
}

#endif
