// Which algorithm scaled_dot_product_attention takes: the one that the host would, so that both give the same
// numbers at the same speed. torch takes the slow, composed one for a device that does not choose.
#include "host_alias.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>

namespace sim {
namespace {

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool grouped) {
  // Host tensors over the same bytes do not say that the mask wants a gradient, which only "math" gives.
  if (mask && mask->requires_grad()) return static_cast<int64_t>(sdp::SDPBackend::math);
  HostAliases aliases;
  const auto host = [&](const at::Tensor& tensor) { return on_sim(tensor) ? aliases.to_host(tensor) : tensor; };
  return at::_fused_sdp_choice(
      host(query), host(key), host(value), mask ? std::optional(host(*mask)) : mask, dropout, is_causal, scale,
      grouped);
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &::sim::choose_attention)
}
