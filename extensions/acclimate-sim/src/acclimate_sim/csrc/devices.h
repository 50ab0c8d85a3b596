// The devices, the current one, and the dtypes that they refuse. All other files use this one.
#pragma once

#include "slot.h"

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace sim {

constexpr auto kSim = c10::DeviceType::SIM_SLOT;
constexpr auto kSimKey = c10::DispatchKey::SIM_SLOT;
constexpr int kMaxDevices = 16;

// The profile (ACCLIMATE_SIM), parsed by Python and set once, before the first tensor.
struct Settings {
  int device_count = 2;
  int64_t capacity_bytes = int64_t{1} << 34;  // of each device
  uint64_t refused_dtypes = 0;  // bit n: ScalarType n has no tensors here
  bool replaces_parameters = false;  // Module.to() makes new Parameters, as some vendors' devices do
  bool checks_synchronisation = false;
  bool asserts = false;  // a kernel that refuses numbers ends its device's context, as CUDA's asserts do
};

const Settings& settings();
void configure(const Settings& chosen);

void check_index(int64_t index);
void check_dtype(c10::ScalarType dtype);

// Each thread has its own current device, as on CUDA.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// An index as torch passes it: negative means the current device.
inline c10::DeviceIndex resolve(c10::DeviceIndex index) noexcept {
  return index < 0 ? current_device() : index;
}

}  // namespace sim
