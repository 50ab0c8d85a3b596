// The interface of a device type to torch's core: its devices, streams, events, generators and allocators. A
// new device must implement these two classes before any operator.
#include "allocator.h"
#include "devices.h"
#include "generator.h"
#include "pinned.h"
#include "streams.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#ifdef SIM_IN_A_NAMED_SLOT
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#endif
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace sim {
namespace {

struct DeviceGuardImpl final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }

  // -- devices --
  c10::DeviceIndex deviceCount() const noexcept override { return settings().device_count; }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0) return;
    check_index(device.index());
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits &= ~settings().refused_dtypes;
    return capability;
  }

  // -- streams --
  c10::Stream getStream(c10::Device device) const noexcept override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(0, device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {  // virtual on some torch releases only
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  // Work is done when its call returns. After a query returns true, the caller need not wait.
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for_stream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for_stream(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { host_waits_for_device(device); }

  // -- events --
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ",
                static_cast<int>(device), " does not match recording stream's device index ",
                static_cast<int>(stream.device_index()), ".");
    if (!*event) {
      auto* made = new Event;
      made->measures_time = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = made;
    }
    record_event(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for_event(*static_cast<Event*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits_for_event(*static_cast<Event*>(event));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    const auto &first = *static_cast<Event*>(start), &last = *static_cast<Event*>(end);
    TORCH_CHECK(first.measures_time && last.measures_time,
                "Both events must be created with argument 'enable_timing=True'.");
    return last.time_ms - first.time_ms;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

struct Hooks final : public at::SIM_JOIN(SIM_SLOT, HooksInterface) {
#ifdef SIM_IN_A_NAMED_SLOT
  Hooks() = default;
  explicit Hooks(const at::SIM_JOIN(SIM_SLOT, HooksArgs) &) {}  // which some of torch's registries pass
  bool SIM_JOIN(has, SIM_SLOT)() const override { return true; }
#endif

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return settings().device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_index(device);
    set_current_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0 && device < settings().device_count) set_current_device(device);
    return before;
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(resolve(device));
  }

  at::Device getDeviceFromPtr(void* data) const override {
    const auto device = device_of(data);
    TORCH_CHECK(device >= 0, "sim: ", data, " is not an address of sim memory");
    return {kSim, device};
  }
  // Releases after 2.13 call it instead of the operator _has_compatible_shallow_copy_type; see
  // tensors.cpp.
  bool hasCompatibleShallowCopyType(c10::DispatchKeySet self, c10::DispatchKeySet from) const {
    return self == from || !settings().replaces_parameters;
  }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

#ifndef SIM_IN_A_NAMED_SLOT  // torch resizes storages of the devices that it names by itself, where it can
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard on(storage.device());
    auto data = device_allocator()->allocate(bytes);
    if (data.get() && impl->data()) std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
#endif
};

using namespace at;  // where the registry of a named slot's hooks is
SIM_REGISTER_GUARD(SIM_SLOT, DeviceGuardImpl);
SIM_REGISTER_HOOKS(SIM_SLOT, Hooks);

}  // namespace
}  // namespace sim
