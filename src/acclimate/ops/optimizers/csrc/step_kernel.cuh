// The loop that element-wise optimizers share on CUDA; included after simd_cuda.h and a rule, before
// simd_end.h.

// A CUDA block steps this many blocks of the group, whatever tensors they are of: small tensors share one.
constexpr int64_t blocks_per_cuda_block = 256;

template <class Rule>
__global__ void __launch_bounds__(threads_per_block)
    step_rows(const Row* rows, const typename Rule::Coefficients* coefficients, const int64_t* first_blocks,
              int64_t row_count, bool one_for_all) {
  int64_t begin = blockIdx.x * blocks_per_cuda_block;
  const int64_t end = min(begin + blocks_per_cuda_block, first_blocks[row_count]);
  for (int64_t index = row_of(first_blocks, row_count, begin); begin < end; ++index) {
    const Row row = rows[index];
    const int64_t last = min(end, first_blocks[index + 1]);
    const int64_t to = min(row.elements, (last - first_blocks[index]) * block_elements);
    const int64_t from = (begin - first_blocks[index]) * block_elements;
    const typename Rule::Vectors rule = Rule::broadcast_all(coefficients[one_for_all ? 0 : index]);
    for (int64_t i = from + threadIdx.x * elements_per_access; i < to;
         i += threads_per_block * elements_per_access) {
      const int count = static_cast<int>(min(static_cast<int64_t>(elements_per_access), to - i));
      V p[elements_per_access], g[elements_per_access], s[max_states][elements_per_access];
      load(row.parameter.data, row.parameter.dtype, i, count, row.is_aligned, p);
      load(row.gradient.data, row.gradient.dtype, i, count, row.is_aligned, g);
      for (int k = 0; k < Rule::states; ++k) {
        load(row.state[k].data, row.state[k].dtype, i, count, row.is_aligned, s[k]);
      }
#pragma unroll
      for (int k = 0; k < elements_per_access; ++k) {
        Rule::step(rule, p[k], g[k], s[0][k], s[1][k]);
      }
      store(row.parameter.data, row.parameter.dtype, i, count, row.is_aligned, p);
      for (int k = 0; k < Rule::states; ++k) {
        store(row.state[k].data, row.state[k].dtype, i, count, row.is_aligned, s[k]);
      }
      if (row.output.data != nullptr) {
        store(row.output.data, row.output.dtype, i, count, row.is_aligned, p);
      }
    }
    begin = last;
  }
}

// One launch for the group. Coefficients: one for each row, or one for all.
template <class Rule>
void step_group(Group& group, const std::vector<typename Rule::Coefficients>& coefficients) {
  const int64_t blocks = group.first_blocks().back();
  if (blocks > 0) {
    const torch::stable::accelerator::DeviceGuard guard(group.device_index());
    const cudaStream_t stream = current_stream(group.device_index());
    DeviceTables tables;
    const size_t rows = tables.add(group.rows());
    const size_t per_row = tables.add(coefficients);
    const size_t first_blocks = tables.add(group.first_blocks());
    tables.upload(group.device_index(), stream);
    const int64_t grid = (blocks + blocks_per_cuda_block - 1) / blocks_per_cuda_block;
    step_rows<Rule><<<static_cast<unsigned>(grid), threads_per_block, 0, stream>>>(
        tables.at<Row>(rows), tables.at<typename Rule::Coefficients>(per_row),
        tables.at<int64_t>(first_blocks), static_cast<int64_t>(group.size()), coefficients.size() == 1);
    check(cudaGetLastError(), "Launching an optimizer step");
  }
  group.write_back();
}

// Registers the op that applies a rule on CUDA; used after simd_end.h.
#define ACCLIMATE_CUDA_OP(op, Call, Rule)                             \
  namespace acclimate {                                               \
  namespace {                                                         \
  void op(StableIValue* stack, uint64_t, uint64_t) {                  \
    Call call{Arguments(stack)};                                      \
    cuda::step_group<cuda::Rule>(call.group, call.count_steps());     \
  }                                                                   \
  STABLE_TORCH_LIBRARY_IMPL(acclimate, CUDA, m) { m.impl(#op, &op); } \
  }                                                                   \
  }
