// Mixed precision: which operators autocast runs in the lower precision, which in float32, as on CUDA.
//
// The lists are those of ATen/autocast_mode.h, whose macros define a typed wrapper for each operator and take
// a minute to compile. One boxed function for each policy does the same.
#include "devices.h"
#include "with_tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <sstream>
#include <string>

namespace at::autocast {  // exported by torch; declared here as their header is what takes the minute
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;
constexpr auto kAutocastKey = c10::DispatchKey::SIM_JOIN(Autocast, SIM_SLOT);
using Boxed = void(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*);

bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

template <class Function>
void for_each_tensor(const c10::OperatorHandle& op, const Stack& stack, Function visit) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack.size() - count; i < stack.size(); i++) {
    if (stack[i].isTensor()) visit(stack[i].toTensor());
    if (stack[i].isTensorList())
      for (const at::Tensor& tensor : stack[i].toTensorVector()) visit(tensor);
  }
}

void call_with_casts(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  const auto cast = [dtype](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kSim) : tensor;
  };
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    (*stack)[i] = with_tensors((*stack)[i], cast);
  }
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kAutocastKey);
  call_with_casts(op, stack, at::autocast::get_autocast_dtype(kSim));
}

void in_float32(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kAutocastKey);
  call_with_casts(op, stack, at::kFloat);
}

// Operators with a dtype argument compute in float32 when it is not given.
void with_float32_result(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kAutocastKey);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  if ((*stack)[first].isTensor() && is_eligible((*stack)[first].toTensor())) {
    for (size_t i = 0; i < arguments.size(); i++) {
      IValue& value = (*stack)[first + i];
      if (arguments[i].name() == "dtype" && value.isNone()) value = at::kFloat;
    }
  }
  op.callBoxed(stack);
}

// Operators on several tensors compute in float32 if any of them is float32.
void in_widest(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kAutocastKey);
  auto widest = at::autocast::get_autocast_dtype(kSim);
  for_each_tensor(op, *stack, [&](const at::Tensor& tensor) {
    if (is_eligible(tensor) && tensor.scalar_type() == at::kFloat) widest = at::kFloat;
  });
  call_with_casts(op, stack, widest);
}

void refuse_binary_cross_entropy(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: their input "
      "comes "
      "from a sigmoid in lower precision. Use binary_cross_entropy_with_logits or BCEWithLogitsLoss.");
}

// Registers a function for the operators in a string, separated by spaces.
template <Boxed* function>
void register_all(torch::Library& m, const char* names) {
  std::istringstream words(names);
  for (std::string name; words >> name;) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<function>());
  }
}

SIM_LIBRARY_IMPL(_, SIM_JOIN(Autocast, SIM_SLOT), m) { m.fallback(torch::CppFunction::makeFallthrough()); }
SIM_LIBRARY_IMPL(aten, SIM_JOIN(Autocast, SIM_SLOT), m) {
  register_all<in_lower_precision>(
      m,
      "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d "
      "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul "
      "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
      "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
      "scaled_dot_product_attention");
  register_all<in_float32>(
      m,
      "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
      "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
      "rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity "
      "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div "
      "l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
      "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist "
      "pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
      "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
      "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
      "_upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim");
  register_all<with_float32_result>(
      m,
      "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
      "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList");
  register_all<in_widest>(
      m, "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add");
  register_all<refuse_binary_cross_entropy>(m, "binary_cross_entropy");
}

}  // namespace
}  // namespace sim
