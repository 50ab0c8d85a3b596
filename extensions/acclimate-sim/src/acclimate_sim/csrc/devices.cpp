#include "devices.h"

#include <c10/util/Exception.h>

namespace sim {
namespace {
Settings g_settings;
thread_local c10::DeviceIndex t_current = 0;
}  // namespace

const Settings& settings() { return g_settings; }

void configure(const Settings& chosen) {
  TORCH_CHECK_VALUE(chosen.device_count >= 1 && chosen.device_count <= kMaxDevices,
                    "sim: ", chosen.device_count, " devices were requested; 1 to ", kMaxDevices,
                    " are possible");
  g_settings = chosen;
}

void check_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < g_settings.device_count, "sim: there is no device ", index,
              ". The device index is out of range; devices that exist here: 0 to ",
              g_settings.device_count - 1);
}

void check_dtype(c10::ScalarType dtype) {
  // A TypeError, as torch raises for float64 on MPS.
  TORCH_CHECK_TYPE(!(g_settings.refused_dtypes >> static_cast<int>(dtype) & 1), "sim: this device has no ",
                   dtype, " (ACCLIMATE_SIM says no=…). Use another dtype.");
}

c10::DeviceIndex current_device() noexcept { return t_current; }
void set_current_device(c10::DeviceIndex index) noexcept { t_current = index; }

}  // namespace sim
