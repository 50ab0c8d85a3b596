// acclimate::ccl_all_reduce_: the sum over ranks by oneCCL.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include <oneapi/ccl.hpp>

namespace acclimate_comm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Never destroyed: oneCCL's own globals may be destroyed first.
struct State {
  std::mutex mutex;
  std::shared_ptr<ccl::kvs> store;  // rank 0's key-value store, through which the ranks rendezvous
  std::unique_ptr<ccl::communicator> ranks;
};

State& state() {
  static State& made = *new State;
  return made;
}

std::optional<ccl::datatype> number_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Char:
      return ccl::datatype::int8;
    case ScalarType::Byte:
      return ccl::datatype::uint8;
    case ScalarType::Short:
      return ccl::datatype::int16;
    case ScalarType::Int:
      return ccl::datatype::int32;
    case ScalarType::Long:
      return ccl::datatype::int64;
    case ScalarType::Half:
      return ccl::datatype::float16;
    case ScalarType::BFloat16:
      return ccl::datatype::bfloat16;
    case ScalarType::Float:
      return ccl::datatype::float32;
    case ScalarType::Double:
      return ccl::datatype::float64;
    default:
      return std::nullopt;
  }
}

// Writes the address at which the ranks rendezvous, as bytes that rank 0 sends to the others.
void ccl_comm_address(Tensor address) {
  const std::lock_guard lock(state().mutex);
  ccl::init();
  state().store = ccl::create_main_kvs();
  const ccl::kvs::address_type bytes = state().store->get_address();
  STD_TORCH_CHECK(static_cast<size_t>(address.numel()) == bytes.size(), "oneCCL's address has ", bytes.size(),
                  " bytes");
  memcpy(address.data_ptr(), bytes.data(), bytes.size());
}

void ccl_comm_open(int64_t size, int64_t rank, Tensor address) {
  const std::lock_guard lock(state().mutex);
  ccl::init();
  if (rank != 0) {
    ccl::kvs::address_type bytes;
    STD_TORCH_CHECK(static_cast<size_t>(address.numel()) == bytes.size(), "oneCCL's address has ",
                    bytes.size(), " bytes");
    memcpy(bytes.data(), address.data_ptr(), bytes.size());
    state().store = ccl::create_kvs(bytes);
  }
  state().ranks = std::make_unique<ccl::communicator>(
      ccl::create_communicator(static_cast<int>(size), static_cast<int>(rank), state().store));
}

void ccl_all_reduce_(Tensor tensor) {
  const std::lock_guard lock(state().mutex);
  STD_TORCH_CHECK(state().ranks != nullptr, "inference_all_reduce needs initialize(size, rank) first");
  const auto dtype = number_type(tensor.scalar_type());
  STD_TORCH_CHECK(dtype.has_value(), "oneCCL does not sum dtype number ",
                  static_cast<int>(tensor.scalar_type()));
  const bool is_dense = tensor.is_contiguous();
  const Tensor dense = is_dense ? tensor : torch::stable::contiguous(tensor);
  ccl::allreduce(dense.data_ptr(), dense.data_ptr(), static_cast<size_t>(dense.numel()), *dtype,
                 ccl::reduction::sum, *state().ranks)
      .wait();
  if (!is_dense) torch::stable::copy_(tensor, dense);
}

}  // namespace
}  // namespace acclimate_comm

STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("ccl_comm_address", TORCH_BOX(&acclimate_comm::ccl_comm_address));
  m.impl("ccl_comm_open", TORCH_BOX(&acclimate_comm::ccl_comm_open));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("ccl_all_reduce_", TORCH_BOX(&acclimate_comm::ccl_all_reduce_));
}
