#include "other_numbers.h"

#include "with_tensors.h"

#include <ATen/Functions.h>

#include <cstring>

namespace sim {

OtherNumbers::OtherNumbers(const std::vector<c10::IValue>& arguments, const HostAliases& aliases) {
  for (const auto& argument : arguments) {
    with_tensors(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined() && aliases.made(tensor)) replace(tensor);
      return tensor;
    });
  }
}

OtherNumbers::~OtherNumbers() {
  for (Kept& kept : kept_) {
    auto* storage = kept.storage.unsafeGetStorageImpl();
    const bool is_the_same = storage->data() == kept.at && storage->nbytes() == kept.bytes.size();
    if (is_the_same) std::memcpy(storage->mutable_data(), kept.bytes.data(), kept.bytes.size());
  }
}

void OtherNumbers::replace(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  if (tensor.is_nested() || storage.nbytes() == 0) return;
  for (const Kept& kept : kept_) {
    if (kept.storage.is_alias_of(storage)) return;
  }
  auto* begin = static_cast<char*>(storage.mutable_data());
  kept_.push_back({storage, begin, {begin, begin + storage.nbytes()}});
  const auto length = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  at::Tensor whole = at::from_blob(begin, {length}, at::TensorOptions(tensor.scalar_type()));
  const bool has_fractions = whole.is_floating_point() || whole.is_complex();
  whole.fill_(has_fractions ? 0.5 : 0.0);
}

}  // namespace sim
