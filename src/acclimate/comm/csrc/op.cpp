// acclimate::inference_all_reduce_: an operator that sums over ranks without torch.distributed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <memory>
#include <mutex>

#include "collectives.h"

namespace acclimate_comm {
namespace {

using torch::stable::Tensor;

std::mutex g_mutex;
std::unique_ptr<Group> g_group;

// A forked child has no mapping to release.
void drop_group() {
  if (g_group && g_group->was_forked()) {
    g_group.release();
  } else {
    g_group.reset();
  }
}

// Checks numbers before they become sizes of memory, whose product could wrap.
void check_numbers(int64_t ranks, int64_t slot_bytes, int64_t ring_bytes) {
  constexpr int64_t kMostBytes = int64_t{1} << 32;
  STD_TORCH_CHECK(ranks > 0 && ranks <= kMostRanks, "a group has 1 to ", kMostRanks, " ranks, not ", ranks);
  STD_TORCH_CHECK(slot_bytes > 0 && slot_bytes <= kMostBytes && ring_bytes > 0 && ring_bytes <= kMostBytes,
                  "slots and rings have 1 to ", kMostBytes, " bytes, not ", slot_bytes, " and ", ring_bytes);
}

int64_t shm_comm_bytes(int64_t ranks, int64_t slot_bytes, int64_t ring_bytes) {
  check_numbers(ranks, slot_bytes, ring_bytes);
  return static_cast<int64_t>(Layout::bytes(static_cast<int>(ranks), slot_bytes, ring_bytes));
}

void shm_comm_open(int64_t descriptor, int64_t rank, std::vector<int64_t> processes, int64_t slot_bytes,
                   int64_t ring_bytes, int64_t timeout_ms, bool has_spare_cores, int64_t isa) {
  STD_TORCH_CHECK(use_isa(isa), "This machine cannot run the instruction set number ", isa, ".");
  const auto ranks = static_cast<int64_t>(processes.size());
  check_numbers(ranks, slot_bytes, ring_bytes);
  STD_TORCH_CHECK(rank >= 0 && rank < ranks, "the rank must be from 0 to ", ranks - 1, ", but is ", rank);
  const std::lock_guard lock(g_mutex);
  drop_group();
  g_group =
      std::make_unique<Group>(static_cast<int>(descriptor), static_cast<int>(rank),
                              std::vector<pid_t>(processes.begin(), processes.end()),
                              Geometry{static_cast<size_t>(slot_bytes), static_cast<size_t>(ring_bytes)},
                              std::chrono::milliseconds(timeout_ms), has_spare_cores);
}

void shm_comm_close() {
  const std::lock_guard lock(g_mutex);
  drop_group();
}

void sum_over_ranks(Group& group, const Tensor& tensor) {
  const auto dtype = static_cast<uint8_t>(tensor.scalar_type());
  const Call call{static_cast<uint8_t>(Kind::kAllReduce), static_cast<uint8_t>(Op::kSum), dtype, 0, 0,
                  static_cast<uint64_t>(tensor.numel())};
  const Reduce reduce = find_reduce(static_cast<Dtype>(dtype), Op::kSum);
  STD_TORCH_CHECK(reduce != nullptr, "inference_all_reduce has no kernel for ", describe(call));
  group.begin(call, std::chrono::milliseconds(0));
  void* const data = tensor.data_ptr();
  all_reduce(group, data, data, {static_cast<size_t>(tensor.numel()), tensor.element_size()}, reduce);
}

void inference_all_reduce_(Tensor tensor) {
  const std::lock_guard lock(g_mutex);
  STD_TORCH_CHECK(g_group != nullptr, "inference_all_reduce needs initialize(size, rank) first");
  if (tensor.is_contiguous()) {
    sum_over_ranks(*g_group, tensor);
    return;
  }
  const Tensor dense = torch::stable::contiguous(tensor);
  sum_over_ranks(*g_group, dense);
  torch::stable::copy_(tensor, dense);
}

}  // namespace
}  // namespace acclimate_comm

STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("shm_comm_bytes", TORCH_BOX(&acclimate_comm::shm_comm_bytes));
  m.impl("shm_comm_open", TORCH_BOX(&acclimate_comm::shm_comm_open));
  m.impl("shm_comm_close", TORCH_BOX(&acclimate_comm::shm_comm_close));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("inference_all_reduce_", TORCH_BOX(&acclimate_comm::inference_all_reduce_));
}
