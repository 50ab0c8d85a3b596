#include "context.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <mutex>

namespace sim {
namespace {

enum class Context : uint8_t { kWorks, kHasAsserted, kIsLost };
std::array<std::atomic<Context>, kMaxDevices> g_contexts{};
std::array<std::string, kMaxDevices> g_asserted_in;
std::mutex g_names_lock;

constexpr int kAssertError = 710;  // the number that CUDA gives it

[[noreturn]] void raise(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> hold(g_names_lock);
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kAssertError,
      c10::str(
          "sim error: device-side assert triggered\nKernel errors are reported at some later call, as on "
          "CUDA (ACCLIMATE_SIM=asserts). ",
          g_asserted_in[device], " refused numbers that it was given on sim:", static_cast<int>(device),
          ", which computes nothing more in this process."));
}

}  // namespace

void note_assert(c10::DeviceIndex device, const std::string& op) {
  std::lock_guard<std::mutex> hold(g_names_lock);
  auto works = Context::kWorks;
  if (g_contexts[device].compare_exchange_strong(works, Context::kHasAsserted)) g_asserted_in[device] = op;
}

void host_learns_of_asserts(c10::DeviceIndex device) {
  if (g_contexts[device] == Context::kWorks) return;
  g_contexts[device] = Context::kIsLost;
  raise(device);
}

void require_context(c10::DeviceIndex device) {
  if (g_contexts[device] == Context::kIsLost) raise(device);
}

}  // namespace sim
