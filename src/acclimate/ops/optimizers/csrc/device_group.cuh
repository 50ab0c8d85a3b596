// Puts what a kernel has to know of a whole parameter group into device memory, with one copy.
#pragma once

#include <cuda_runtime.h>

#include "group.h"

namespace acclimate {

inline void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error), ".");
}

// The stream of torch's current device on which work is queued. Refuses a stream that is being captured: the
// host counts the steps, and a replay would not.
inline cudaStream_t current_stream(int32_t device_index) {
  void* handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &handle));
  const cudaStream_t stream = static_cast<cudaStream_t>(handle);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "Asking for the state of a stream");
  STD_TORCH_CHECK(
      status == cudaStreamCaptureStatusNone,
      "This optimizer counts steps on the host, so a captured graph would repeat one step forever. "
      "Step outside the graph, or use torch.optim with capturable=True.");
  return stream;
}

// Arrays packed one after another, then copied together.
class DeviceTables {
 public:
  // Returns where in the packed memory the array will be.
  template <class T>
  size_t add(const std::vector<T>& values) {
    const size_t at = (packed_.size() + 15) / 16 * 16;
    packed_.resize(at + values.size() * sizeof(T));
    if (!values.empty()) {
      std::memcpy(packed_.data() + at, values.data(), values.size() * sizeof(T));
    }
    return at;
  }

  // torch's allocator keeps the memory until the stream is past its use.
  void upload(int32_t device_index, cudaStream_t stream) {
    const int64_t size = static_cast<int64_t>(packed_.size());
    memory_ = torch::stable::empty({&size, 1}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                   torch::stable::Device(torch::headeronly::DeviceType::CUDA, device_index));
    check(
        cudaMemcpyAsync(memory_->data_ptr(), packed_.data(), packed_.size(), cudaMemcpyHostToDevice, stream),
        "Copying the tensors' addresses to the device");
  }

  template <class T>
  const T* at(size_t offset) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(memory_->data_ptr()) + offset);
  }

 private:
  std::vector<char> packed_;
  std::optional<torch::stable::Tensor> memory_;
};

constexpr int threads_per_block = 256;

// The row that holds a block of the group: the last one that starts at or before it.
__device__ __forceinline__ int64_t row_of(const int64_t* first_blocks, int64_t rows, int64_t block) {
  int64_t low = 0, high = rows;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first_blocks[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace acclimate
