// Whether a device's context still works (ACCLIMATE_SIM=asserts).
//
// On CUDA a kernel that is given an index out of range cannot raise an error: the call has returned. It notes
// an assert. The host learns of it when it next waits for the device, and from then on every call of the
// process on this device raises.
#pragma once

#include "devices.h"

#include <string>

namespace sim {

// A kernel has noted an assert; `op` is the operator's name, which the error then tells.
void note_assert(c10::DeviceIndex device, const std::string& op);

// The host waits for the device: raises if a kernel has noted an assert, and lets all later calls raise.
void host_learns_of_asserts(c10::DeviceIndex device);

// Raises if the host has learnt of an assert.
void require_context(c10::DeviceIndex device);

}  // namespace sim
