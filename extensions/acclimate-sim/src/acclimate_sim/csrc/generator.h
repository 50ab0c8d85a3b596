// The generator of a device, which wraps a host generator.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace sim {

// The same seed gives the same numbers as on the host, which makes results comparable.
struct Generator final : public c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device);
  Generator(c10::DeviceIndex device, at::Generator host);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  Generator* clone_impl() const override;
  static c10::DeviceType device_type();

  at::Generator host;
};

const at::Generator& default_generator(c10::DeviceIndex device);

// The host generator behind a sim one.
at::Generator host_generator(const at::Generator& generator);

// Some operators draw only from the host's default generator (native_dropout). While this object exists, the
// host's default generator has the state of the device's generator; afterwards each has its own state again.
class HostGeneratorLoan {
 public:
  explicit HostGeneratorLoan(c10::DeviceIndex device);
  ~HostGeneratorLoan();
  HostGeneratorLoan(const HostGeneratorLoan&) = delete;
  HostGeneratorLoan& operator=(const HostGeneratorLoan&) = delete;

 private:
  void exchange();
  at::CPUGeneratorImpl *host_, *device_;
};

}  // namespace sim
