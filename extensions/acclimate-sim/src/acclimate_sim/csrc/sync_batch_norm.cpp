// The steps of a batch norm over several processes. torch has kernels of them for devices and none for the
// host, so here they are composed of ordinary operators. torch.nn.SyncBatchNorm sends their results between
// processes.
#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using std::optional;

// Statistics of 16-bit inputs are float32.
at::ScalarType type_of_figures(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}
Tensor widened(const Tensor& input) { return input.to(type_of_figures(input)); }

// All dimensions but that of the channels.
std::vector<int64_t> others(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < input.dim(); ++i)
    if (i != 1) dims.push_back(i);
  return dims;
}
Tensor by_channel(const Tensor& figures, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = figures.numel();
  return figures.to(type_of_figures(input)).view(shape);
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto [variance, mean] = at::var_mean(widened(input), others(input), 0);
  return {mean, at::rsqrt(variance + eps)};
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor& input, const Tensor& means, const Tensor& invstds,
                                        const optional<Tensor>& running_mean,
                                        const optional<Tensor>& running_var, double momentum, double eps,
                                        const Tensor& counts) {
  const Tensor count = counts.to(means.scalar_type()).view({-1, 1});
  const Tensor total = count.sum();
  const Tensor mean = (means * count).sum(0) / total;
  const Tensor variances = invstds.pow(-2) - eps;
  const Tensor variance = ((variances + (means - mean).square()) * count).sum(0) / total;
  if (running_mean && running_mean->defined()) running_mean->mul_(1 - momentum).add_(mean * momentum);
  if (running_var && running_var->defined())
    running_var->mul_(1 - momentum).add_(variance * total / (total - 1) * momentum);
  return {mean, at::rsqrt(variance + eps)};
}

std::tuple<Tensor, Tensor> gather_stats_of_equal_counts(const Tensor& input, const Tensor& means,
                                                        const Tensor& invstds,
                                                        const optional<Tensor>& running_mean,
                                                        const optional<Tensor>& running_var, double momentum,
                                                        double eps, int64_t count) {
  const Tensor counts = means.new_full({means.size(0)}, count);
  return gather_stats(input, means, invstds, running_mean, running_var, momentum, eps, counts);
}

Tensor normalized(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias,
                  const Tensor& mean, const Tensor& invstd, double /*eps*/) {
  Tensor out = (widened(input) - by_channel(mean, input)) * by_channel(invstd, input);
  if (weight && weight->defined()) out = out * by_channel(*weight, input);
  if (bias && bias->defined()) out = out + by_channel(*bias, input);
  return out.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad_out, const Tensor& input,
                                                           const Tensor& mean, const Tensor& invstd,
                                                           const optional<Tensor>& weight, bool for_input,
                                                           bool for_weight, bool for_bias) {
  const Tensor grad = widened(grad_out), away = widened(input) - by_channel(mean, input);
  const Tensor sum = grad.sum(others(input)), product = (grad * away).sum(others(input));
  const auto type = weight && weight->defined() ? weight->scalar_type() : sum.scalar_type();
  return {for_input ? sum : Tensor(), for_input ? product : Tensor(),
          for_weight ? (product * invstd).to(type) : Tensor(),
          for_bias ? sum.to(type, false, true) : Tensor()};
}

Tensor backward(const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                const optional<Tensor>& weight, const Tensor& sum, const Tensor& product,
                const Tensor& counts) {
  const Tensor total = counts.sum().to(mean.scalar_type());
  const Tensor away = widened(input) - by_channel(mean, input);
  const Tensor slope = by_channel(product / total * invstd.square(), input);
  Tensor scale = invstd;
  if (weight && weight->defined()) scale = scale * weight->to(invstd.scalar_type());
  const Tensor grad = widened(grad_out) - by_channel(sum / total, input) - away * slope;
  return (grad * by_channel(scale, input)).to(input.scalar_type());
}

SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) {
  m.impl("batch_norm_stats", stats);
  m.impl("batch_norm_gather_stats", gather_stats_of_equal_counts);
  m.impl("batch_norm_gather_stats_with_counts", gather_stats);
  m.impl("batch_norm_elemt", normalized);
  m.impl("batch_norm_backward_reduce", backward_reduce);
  m.impl("batch_norm_backward_elemt", backward);
}

}  // namespace
}  // namespace sim
