// The kernels that an instruction set has. This file is compiled once for each, with flags for it and with
// its name in ACCLIMATE_ISA; the numbers only let the preprocessor compare names.
#define ACCLIMATE_NUMBER_plain 1
#define ACCLIMATE_NUMBER_avx2 2
#define ACCLIMATE_NUMBER_avx512 3
#define ACCLIMATE_NUMBER_avx512_vnni 4
#define ACCLIMATE_NUMBER_avx512_bf16 5
#define ACCLIMATE_NUMBER_neon 6
#define ACCLIMATE_NUMBER_neon_dot 7
#define ACCLIMATE_JOIN(a, b) a##b
#define ACCLIMATE_JOINED(a, b) ACCLIMATE_JOIN(a, b)
#define ACCLIMATE_IS(isa) (ACCLIMATE_JOINED(ACCLIMATE_NUMBER_, ACCLIMATE_ISA) == ACCLIMATE_NUMBER_##isa)

#if ACCLIMATE_IS(plain)
#include "simd_plain.h"
#elif ACCLIMATE_IS(avx2)
#include "simd_avx2.h"
#elif ACCLIMATE_IS(neon) || ACCLIMATE_IS(neon_dot)
#include "simd_neon.h"
#else
#include "simd_avx512.h"
#endif

// What a set lacks, a smaller set has.
#define ACCLIMATE_HAS_DENSE \
  (ACCLIMATE_IS(plain) || ACCLIMATE_IS(avx2) || ACCLIMATE_IS(avx512) || ACCLIMATE_IS(neon))
#define ACCLIMATE_HAS_BLOCKS                                                                       \
  (ACCLIMATE_IS(plain) || ACCLIMATE_IS(avx2) || ACCLIMATE_IS(avx512_vnni) || ACCLIMATE_IS(neon) || \
   ACCLIMATE_IS(neon_dot))
#define ACCLIMATE_HAS_WIDE (ACCLIMATE_IS(avx2) || ACCLIMATE_IS(avx512))
#define ACCLIMATE_HAS_BF16 ACCLIMATE_IS(avx512_bf16)

#if ACCLIMATE_HAS_DENSE
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#endif
#if ACCLIMATE_HAS_BLOCKS
#include "block_kernel.h"
#include "values_kernel.h"
#endif
#if ACCLIMATE_HAS_WIDE
#include "wide_kernel.h"
#endif
#if ACCLIMATE_HAS_BF16
#include "dense_kernel.h"
#include "many_kernel.h"
#include "prompt_kernel.h"
#endif

namespace acclimate::inference {

namespace isa = ACCLIMATE_ISA;

const Kernels ACCLIMATE_JOINED(ACCLIMATE_ISA, _kernels) = {
#if ACCLIMATE_IS(avx2)
    .dense = {isa::multiply_dense<isa::HalfStep<Dtype::f32>>, isa::multiply_dense<isa::HalfStep<Dtype::bf16>>,
              isa::multiply_dense<isa::HalfStep<Dtype::f16>>},
#elif ACCLIMATE_HAS_DENSE
    .dense = {isa::multiply_dense<isa::FloatStep<isa::F32Weight>>,
              isa::multiply_dense<isa::FloatStep<isa::Bf16Weight>>,
              isa::multiply_dense<isa::FloatStep<isa::F16Weight>>},
#elif ACCLIMATE_HAS_BF16
    .dense_bf16 = isa::multiply_dense<isa::Bf16Step>,
#endif
#if ACCLIMATE_HAS_BLOCKS
    .blocks = isa::multiply_blocks,
    .quantize = isa::quantize,
    .values = isa::values_of_group,
    .widen = isa::widen,
#endif
#if ACCLIMATE_HAS_WIDE
    .repack_rows = isa::widen_rows,
    .multiply_repacked = isa::multiply_wide,
    .repacked_value_bytes = sizeof(float),
#elif ACCLIMATE_HAS_BF16
    .repack_rows = isa::repack_rows,
    .multiply_repacked = isa::multiply_repacked,
    .repacked_value_bytes = sizeof(uint16_t),
    .prompt = {isa::weigh, isa::gate<isa::silu>, isa::gate<isa::gelu_tanh>},
#endif
#if ACCLIMATE_HAS_DENSE
    .int8_rows = isa::multiply_int8_rows,
#endif
};

}  // namespace acclimate::inference
