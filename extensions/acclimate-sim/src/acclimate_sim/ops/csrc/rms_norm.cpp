// The kernel of RMSNormBuilder, against torch's stable ABI: it compiles in seconds, and one library serves
// torch 2.10 and later. Sim memory is host memory, so the kernel is a loop; a real device would launch one
// here.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
void normalise(const Tensor& x, const Tensor& weight, double eps, Tensor& out) {
  const int64_t length = x.size(x.dim() - 1), rows = length ? x.numel() / length : 0;
  const auto* from = static_cast<const T*>(x.data_ptr());
  const auto* scale = static_cast<const T*>(weight.data_ptr());
  auto* to = static_cast<T*>(out.data_ptr());
  for (int64_t row = 0; row < rows; row++, from += length, to += length) {
    float sum = 0;
    for (int64_t i = 0; i < length; i++) sum += static_cast<float>(from[i]) * static_cast<float>(from[i]);
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(length) + static_cast<float>(eps));
    for (int64_t i = 0; i < length; i++) {
      to[i] = static_cast<T>(static_cast<float>(from[i]) * factor * static_cast<float>(scale[i]));
    }
  }
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1, "rms_norm: x has to be (…, n) and weight (n,)");
  STD_TORCH_CHECK(weight.size(0) == x.size(x.dim() - 1), "rms_norm: weight has to have x's last size");
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(),
                  "rms_norm: x and weight have to be contiguous");
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "rms_norm: x and weight have to be of one dtype");
  STD_TORCH_CHECK(x.get_device_index() == weight.get_device_index(),
                  "rms_norm: x and weight have to be on one device");
  Tensor out = torch::stable::empty_like(x);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      normalise<float>(x, weight, eps, out);
      break;
    case ScalarType::BFloat16:
      normalise<BFloat16>(x, weight, eps, out);
      break;
    default:
      STD_TORCH_CHECK(false, "rms_norm: x has to be float32 or bfloat16");
  }
  return out;
}

}  // namespace

// PrivateUse1 is the dispatch key of the device type that Python calls "sim".
STABLE_TORCH_LIBRARY_IMPL(acclimate_sim, PrivateUse1, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); }
