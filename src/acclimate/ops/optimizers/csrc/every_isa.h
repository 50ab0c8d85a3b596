// Compiles an optimizer's rule for every instruction set, each in its own namespace. ACCLIMATE_RULE names the
// rule's header, relative to this file.
#pragma once

#include "group_step.h"

#include "simd_plain.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"

#if defined(__x86_64__)
#include "simd_avx2.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"

#include "simd_avx512.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"

#include "simd_avx512_bf16.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd_end.h"
#endif
