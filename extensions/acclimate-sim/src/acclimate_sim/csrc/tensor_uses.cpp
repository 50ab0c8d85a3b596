#include "tensor_uses.h"

#include "allocator.h"
#include "devices.h"
#include "host_alias.h"

namespace sim {

TensorUses::TensorUses(c10::DeviceIndex device, const char* op) {
  if (settings().checks_synchronisation) work_.emplace(current_stream(device), op);
}

void TensorUses::uses(const at::Tensor& tensor, bool writes) const {
  if (!work_ || !on_sim(tensor) || tensor.numel() == 0) return;
  Block* block = block_of(tensor.storage().data_ptr());
  if (!block) return;
  const auto [begin, end] = extent(tensor);
  work_->uses(block->uses, begin, end, writes);
}

std::pair<size_t, size_t> extent(const at::Tensor& tensor) {
  if (tensor.is_nested()) return {0, tensor.storage().nbytes()};
  size_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const size_t first = tensor.storage_offset(), size = tensor.element_size();
  return {first * size, (first + last + 1) * size};
}

}  // namespace sim
