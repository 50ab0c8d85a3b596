// Which of torch's device types the device is.
//
// PrivateUse1 is torch's type for an out-of-tree device. -DSIM_SLOT=XPU (or HPU, MPS, CUDA) replaces hardware
// that this build of torch has a name for but does not support, so that code for it can be tried out.
#pragma once

#ifdef SIM_SLOT
#define SIM_IN_A_NAMED_SLOT
#else
#define SIM_SLOT PrivateUse1
#define SIM_AUTOCAST  // torch has the rules of mixed precision for the devices that it names, but for HPU
#endif

// Wraps torch's macros, which paste tokens, so that a macro of this file is expanded first.
#define SIM_JOIN_EXPANDED(first, second) first##second
#define SIM_JOIN(first, second) SIM_JOIN_EXPANDED(first, second)
#define SIM_LIBRARY_IMPL(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define SIM_REGISTER_GUARD(slot, guard) C10_REGISTER_GUARD_IMPL(slot, guard)
#ifdef SIM_IN_A_NAMED_SLOT
#define SIM_REGISTER_NAMED(registry, name, hooks) C10_REGISTER_TYPED_CLASS(registry, name, hooks)
#define SIM_REGISTER_HOOKS(slot, hooks) SIM_REGISTER_AS(slot, hooks)
#define SIM_REGISTER_AS(slot, hooks) SIM_REGISTER_NAMED(slot##HooksRegistry, #slot "Hooks", hooks)
#else
#define SIM_REGISTER_HOOKS(slot, hooks) \
  const bool g_hooks_registered = (at::RegisterPrivateUse1HooksInterface(new hooks), true)
#endif
