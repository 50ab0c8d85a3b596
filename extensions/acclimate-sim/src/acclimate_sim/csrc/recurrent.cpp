// The fused cells of LSTM and GRU. torch calls these on every device but the host, so the host has no kernel
// for them; here they are composed of ordinary operators.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using std::optional;

Tensor with_bias(const Tensor& gates, const optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
Tensor sigmoid_slope(const Tensor& y) { return y * (1 - y); }
Tensor tanh_slope(const Tensor& y) { return 1 - y * y; }

// Gates in the order of torch's weights: input, forget, cell, output. The workspace holds them for backward.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const optional<Tensor>& input_bias,
                                             const optional<Tensor>& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor in = at::sigmoid(gates[0]), forget = at::sigmoid(gates[1]);
  const Tensor cell = at::tanh(gates[2]), out = at::sigmoid(gates[3]);
  const Tensor cy = forget * cx + in * cell;
  return {out * at::tanh(cy), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const optional<Tensor>& grad_hy,
                                                      const optional<Tensor>& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) return {};
  const Tensor squashed = at::tanh(cy);
  const Tensor from_hy = has_hy ? *grad_hy * out * tanh_slope(squashed) : Tensor();
  const Tensor grad_cell = !has_hy ? *grad_cy : has_cy ? *grad_cy + from_hy : from_hy;
  const Tensor grad_out = has_hy ? *grad_hy * squashed * sigmoid_slope(out) : out * 0;
  const Tensor grad_gates =
      at::cat({grad_cell * cell * sigmoid_slope(in), grad_cell * cx * sigmoid_slope(forget),
               grad_cell * in * tanh_slope(cell), grad_out},
              1);
  return {grad_gates, grad_cell * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// Gates in the order of torch's weights: reset, update, new.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = at::sigmoid(in[0] + hidden[0]), update = at::sigmoid(in[1] + hidden[1]);
  const Tensor fresh = at::tanh(in[2] + reset * hidden[2]);
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace, bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden = kept[4];
  const Tensor grad_fresh = grad_hy * (1 - update) * tanh_slope(fresh);
  const Tensor grad_update = grad_hy * (hx - fresh) * sigmoid_slope(update);
  const Tensor grad_reset = grad_fresh * hidden * sigmoid_slope(reset);
  const Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
}  // namespace sim
