// Flags that Python may attach to a tensor (torch._utils.set_tensor_metadata), saved and loaded with it.
#include "devices.h"

#include <c10/core/TensorImpl.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <string>
#include <unordered_map>

namespace sim {
namespace {

#ifndef SIM_IN_A_NAMED_SLOT  // torch keeps no flags for the devices that it names

using Flags = std::unordered_map<std::string, bool>;

struct Metadata final : c10::BackendMeta {
  explicit Metadata(Flags given) : flags(std::move(given)) {}
  const Flags flags;
};

void read_flags(const at::Tensor& tensor, Flags& flags) {
  if (const auto* kept = dynamic_cast<Metadata*>(tensor.unsafeGetTensorImpl()->get_backend_meta())) {
    flags.insert(kept->flags.begin(), kept->flags.end());
  }
}

void keep_flags(const at::Tensor& tensor, Flags& flags) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Metadata>(flags));
}

const bool g_metadata_registered =
    (torch::jit::TensorBackendMetaRegistry(kSim, read_flags, keep_flags), true);

#endif

}  // namespace
}  // namespace sim
