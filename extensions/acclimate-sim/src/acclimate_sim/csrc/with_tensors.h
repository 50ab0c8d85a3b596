// The tensors in an operator's arguments and results.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/List.h>

#include <optional>
#include <utility>

namespace sim {

// Returns a value with its tensors converted. They come singly, in lists, perhaps of optional tensors, and in
// lists of lists.
template <typename Convert>
c10::IValue with_tensors(c10::IValue value, const Convert& convert) {
  if (value.isTensor()) return convert(std::move(value).toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(convert(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::optional(convert(*tensor)) : tensor);
    }
    return tensors;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
    const auto lists = value.toList();
    c10::impl::GenericList converted(lists.elementType());
    for (size_t i = 0; i < lists.size(); i++) converted.push_back(with_tensors(lists.get(i), convert));
    return converted;
  }
  return value;
}

}  // namespace sim
