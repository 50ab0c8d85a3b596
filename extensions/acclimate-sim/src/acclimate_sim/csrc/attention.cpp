// Which algorithm scaled_dot_product_attention takes: the one that the host would, so that both give the same
// numbers at the same speed. torch takes the slow, composed one for a device that does not choose.
#include "host_alias.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;

#ifdef SIM_IN_A_NAMED_SLOT

// Of a device that it names torch takes the algorithms made for that hardware, so here it is always the
// composed one.
Tensor composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& mask, double dropout, bool is_causal,
                          std::optional<double> scale, bool grouped) {
  const auto [result, weights] = at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, grouped);
  return result;
}
SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) { m.impl("scaled_dot_product_attention", composed_attention); }
SIM_LIBRARY_IMPL(aten, SIM_JOIN(Autograd, SIM_SLOT), m) {
  m.impl("scaled_dot_product_attention", composed_attention);
}

}  // namespace
}  // namespace sim

#else

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool grouped) {
  // Host tensors over the same bytes do not say that the mask wants a gradient, which only "math" gives.
  if (mask && mask->requires_grad()) return static_cast<int64_t>(sdp::SDPBackend::math);
  HostAliases aliases;
  const auto host = [&](const Tensor& tensor) { return on_sim(tensor) ? aliases.to_host(tensor) : tensor; };
  return at::_fused_sdp_choice(host(query), host(key), host(value), mask ? std::optional(host(*mask)) : mask,
                               dropout, is_causal, scale, grouped);
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &::sim::choose_attention)
}

#endif
