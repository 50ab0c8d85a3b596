// acclimate::lamb_ on CUDA: three launches for a whole parameter group.
//
// The first updates the moments and sums the squares of weights and updates over parts of a tensor. The
// second adds the parts in a fixed order, so that results are the same in every run. The third updates the
// weights.
#include <array>
#include <cmath>

#include "device_group.cuh"

// The arguments of acclimate::lamb_, checked; the schema is in acclimate.ops.optimizers.lamb.
namespace acclimate {

// The coefficients of one step of LAMB for a tensor.
struct LambCoefficients {
  float gradient_scale;  // multiplies the gradient: -1 to maximize, 1 / loss scale
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float momentum_scale;  // 1 / (1 - beta1^t)
  float variance_scale;  // 1 / (1 - beta2^t)
  float eps_inside;  // added to the second moment
  float eps_outside;  // added to its root
  float weight_decay;
  float rate;
  float min_ratio, max_ratio;
};

struct LambSettings {
  static constexpr std::array state_names{"exp_avg", "exp_avg_sq"};

  explicit LambSettings(Arguments& arguments) {
    arguments.read(ratios, lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio, bias_correction,
                   corrects_rate, eps_inside_sqrt, maximize, gradient_scale);
  }

  LambCoefficients coefficients(double step) const {
    const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
    const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
    return {
        static_cast<float>(maximize ? -gradient_scale : gradient_scale),
        static_cast<float>(beta1),
        static_cast<float>(1.0 - beta1),
        static_cast<float>(beta2),
        static_cast<float>(1.0 - beta2),
        corrects_rate ? 1.0f : static_cast<float>(1.0 / correction1),
        corrects_rate ? 1.0f : static_cast<float>(1.0 / correction2),
        static_cast<float>(eps_inside_sqrt ? eps : 0.0),
        static_cast<float>(eps_inside_sqrt ? 0.0 : eps),
        static_cast<float>(weight_decay),
        static_cast<float>(corrects_rate ? lr * std::sqrt(correction2) / correction1 : lr),
        static_cast<float>(min_ratio),
        static_cast<float>(max_ratio),
    };
  }

  torch::stable::Tensor ratios;
  double lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio;
  bool bias_correction, corrects_rate, eps_inside_sqrt, maximize;
  double gradient_scale;
};

using LambCall = GroupCall<LambSettings>;

}  // namespace acclimate

#include "simd_cuda.h"

// The blocks of a tensor in one partial sum of squares.
constexpr int64_t blocks_per_part = 256;

struct LambTables {
  const Row* rows;
  const LambCoefficients* coefficients;
  const int64_t* first_parts;  // the first part of each row
  int64_t row_count;
  bool one_for_all;

  ACCLIMATE_INLINE const LambCoefficients& coefficients_of(int64_t row) const {
    return coefficients[one_for_all ? 0 : row];
  }
};

ACCLIMATE_INLINE float update_of(const LambCoefficients& c, float p, float m, float v) {
  const float denominator = sqrtf(v * c.variance_scale + c.eps_inside) + c.eps_outside;
  return (m * c.momentum_scale) / denominator + p * c.weight_decay;
}

// Sums a pair of numbers over the threads of a block; thread 0 gets the result.
ACCLIMATE_INLINE float2 block_sum(float2 value) {
  __shared__ float2 sums[threads_per_block];
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int half = threads_per_block / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      sums[threadIdx.x].x += sums[threadIdx.x + half].x;
      sums[threadIdx.x].y += sums[threadIdx.x + half].y;
    }
    __syncthreads();
  }
  return sums[0];
}

__global__ void __launch_bounds__(threads_per_block) move_moments(LambTables tables, float2* parts) {
  const int64_t index = row_of(tables.first_parts, tables.row_count, blockIdx.x);
  const Row row = tables.rows[index];
  const LambCoefficients c = tables.coefficients_of(index);
  const int64_t from = (blockIdx.x - tables.first_parts[index]) * blocks_per_part * block_elements;
  const int64_t to = min(row.elements, from + blocks_per_part * block_elements);
  float2 squares{0.0f, 0.0f};
  for (int64_t i = from + threadIdx.x * elements_per_access; i < to;
       i += threads_per_block * elements_per_access) {
    const int count = static_cast<int>(min(static_cast<int64_t>(elements_per_access), to - i));
    V p[elements_per_access], g[elements_per_access], m[elements_per_access], v[elements_per_access];
    load(row.parameter.data, row.parameter.dtype, i, count, row.is_aligned, p);
    load(row.gradient.data, row.gradient.dtype, i, count, row.is_aligned, g);
    load(row.state[0].data, row.state[0].dtype, i, count, row.is_aligned, m);
    load(row.state[1].data, row.state[1].dtype, i, count, row.is_aligned, v);
#pragma unroll
    for (int k = 0; k < elements_per_access; ++k) {  // missing elements are zeros
      const float gradient = g[k].x * c.gradient_scale;
      m[k].x = m[k].x * c.beta1 + gradient * c.one_minus_beta1;
      v[k].x = v[k].x * c.beta2 + (gradient * c.one_minus_beta2) * gradient;
    }
    store(row.state[0].data, row.state[0].dtype, i, count, row.is_aligned, m);
    store(row.state[1].data, row.state[1].dtype, i, count, row.is_aligned, v);
    // Loaded again as the third launch will read them, because 16-bit state has been rounded.
    load(row.state[0].data, row.state[0].dtype, i, count, row.is_aligned, m);
    load(row.state[1].data, row.state[1].dtype, i, count, row.is_aligned, v);
#pragma unroll
    for (int k = 0; k < elements_per_access; ++k) {
      const float update = update_of(c, p[k].x, m[k].x, v[k].x);
      if (k < count) {  // the update of a zero may be NaN
        squares.x += p[k].x * p[k].x;
        squares.y += update * update;
      }
    }
  }
  squares = block_sum(squares);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = squares;
  }
}

// One CUDA block for each row.
__global__ void __launch_bounds__(threads_per_block)
    find_ratios(LambTables tables, const float2* parts, float* ratios) {
  const int64_t index = blockIdx.x;
  const LambCoefficients c = tables.coefficients_of(index);
  float2 squares{0.0f, 0.0f};
  for (int64_t part = tables.first_parts[index] + threadIdx.x; part < tables.first_parts[index + 1];
       part += threads_per_block) {
    squares.x += parts[part].x;
    squares.y += parts[part].y;
  }
  squares = block_sum(squares);
  if (threadIdx.x == 0) {
    const float weight = sqrtf(squares.x), update = sqrtf(squares.y);
    float ratio = 1.0f;
    if (weight != 0.0f && update != 0.0f) {
      ratio = weight / update;
      ratio = ratio < c.min_ratio ? c.min_ratio : ratio > c.max_ratio ? c.max_ratio : ratio;  // NaN stays
    }
    ratios[index] = ratio;
  }
}

__global__ void __launch_bounds__(threads_per_block) move_weights(LambTables tables, const float* ratios) {
  const int64_t index = row_of(tables.first_parts, tables.row_count, blockIdx.x);
  const Row row = tables.rows[index];
  const LambCoefficients c = tables.coefficients_of(index);
  const float rate = ratios[index] * c.rate;
  const int64_t from = (blockIdx.x - tables.first_parts[index]) * blocks_per_part * block_elements;
  const int64_t to = min(row.elements, from + blocks_per_part * block_elements);
  for (int64_t i = from + threadIdx.x * elements_per_access; i < to;
       i += threads_per_block * elements_per_access) {
    const int count = static_cast<int>(min(static_cast<int64_t>(elements_per_access), to - i));
    V p[elements_per_access], m[elements_per_access], v[elements_per_access];
    load(row.parameter.data, row.parameter.dtype, i, count, row.is_aligned, p);
    load(row.state[0].data, row.state[0].dtype, i, count, row.is_aligned, m);
    load(row.state[1].data, row.state[1].dtype, i, count, row.is_aligned, v);
#pragma unroll
    for (int k = 0; k < elements_per_access; ++k) {
      p[k].x = p[k].x - update_of(c, p[k].x, m[k].x, v[k].x) * rate;
    }
    store(row.parameter.data, row.parameter.dtype, i, count, row.is_aligned, p);
    if (row.output.data != nullptr) {
      store(row.output.data, row.output.dtype, i, count, row.is_aligned, p);
    }
  }
}

#include "simd_end.h"

namespace acclimate {
namespace {

void lamb_(StableIValue* stack, uint64_t, uint64_t) {
  LambCall call{Arguments(stack)};
  const torch::stable::Tensor& trust_ratios = call.settings.ratios;
  STD_TORCH_CHECK(trust_ratios.numel() == static_cast<int64_t>(call.group.size()) &&
                      trust_ratios.is_contiguous() && dtype(trust_ratios.get(), "ratio") == Dtype::f32 &&
                      (call.group.size() == 0 || device(trust_ratios.get()) == device(call.parameters[0])),
                  "The ratios are not one float32 number for each parameter, on its device.");
  const std::vector<LambCoefficients> coefficients = call.count_steps();
  std::vector<int64_t> first_parts{0};
  for (const Row& row : call.group.rows()) {
    constexpr int64_t part_elements = cuda::blocks_per_part * block_elements;
    first_parts.push_back(first_parts.back() + (row.elements + part_elements - 1) / part_elements);
  }
  if (call.group.size() > 0) {
    const int32_t device_index = call.group.device_index();
    const torch::stable::accelerator::DeviceGuard guard(device_index);
    const cudaStream_t stream = current_stream(device_index);
    const unsigned parts = static_cast<unsigned>(first_parts.back());
    const unsigned rows = static_cast<unsigned>(call.group.size());
    DeviceTables memory;
    const size_t row_table = memory.add(call.group.rows());
    const size_t coefficient_table = memory.add(coefficients);
    const size_t part_table = memory.add(first_parts);
    const size_t sums = memory.add(std::vector<float2>(parts));
    memory.upload(device_index, stream);
    const cuda::LambTables tables{memory.at<Row>(row_table), memory.at<LambCoefficients>(coefficient_table),
                                  memory.at<int64_t>(part_table), static_cast<int64_t>(rows),
                                  coefficients.size() == 1};
    float2* const squares = const_cast<float2*>(memory.at<float2>(sums));
    float* const ratios = static_cast<float*>(trust_ratios.data_ptr());
    if (parts > 0) {
      cuda::move_moments<<<parts, threads_per_block, 0, stream>>>(tables, squares);
    }
    cuda::find_ratios<<<rows, threads_per_block, 0, stream>>>(tables, squares, ratios);
    if (parts > 0) {
      cuda::move_weights<<<parts, threads_per_block, 0, stream>>>(tables, ratios);
    }
    check(cudaGetLastError(), "Launching a LAMB step");
  }
  call.group.write_back();
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CUDA, m) { m.impl("lamb_", &lamb_); }

}  // namespace
}  // namespace acclimate
