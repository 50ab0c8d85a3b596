// Compiles an optimizer's rule for every instruction set, each in its own namespace. ACCLIMATE_RULE names the
// rule's header, relative to this file.
#pragma once

#include "group_step.h"

#include "simd/plain.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd/end.h"

#if defined(__x86_64__)
#include "simd/avx2.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd/end.h"

#include "simd/avx512.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd/end.h"

#include "simd/avx512_bf16.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd/end.h"
#elif defined(__aarch64__)
#include "simd/neon.h"
#include "step_kernel.h"
#include ACCLIMATE_RULE
#include "simd/end.h"
#endif
