// Element types of the optimizers' tensors, and conversions that are equal on every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace acclimate {

enum class Dtype : int32_t { f32, bf16, f16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

}  // namespace acclimate
