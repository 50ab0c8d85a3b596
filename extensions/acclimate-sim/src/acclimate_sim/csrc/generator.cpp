#include "generator.h"

#include "devices.h"

#include <mutex>
#include <vector>

namespace sim {
namespace {

std::mutex g_loan_lock;

at::CPUGeneratorImpl* host_impl(const at::Generator& generator) {
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

}  // namespace

Generator::Generator(c10::DeviceIndex device)
    : Generator(device, at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom())) {
  host.set_current_seed(c10::default_rng_seed_val);  // as every generator of torch starts
}
Generator::Generator(c10::DeviceIndex device, at::Generator wrapped)
    : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(kSimKey)), host(std::move(wrapped)) {}

void Generator::set_current_seed(uint64_t seed) { host.set_current_seed(seed); }
// The host's generator, which draws the numbers, has no counter to set.
void Generator::set_offset(uint64_t) {
  TORCH_CHECK(false, "sim does not support set_offset: its generators have no offset. Use set_state.");
}
uint64_t Generator::get_offset() const {
  TORCH_CHECK(false, "sim does not support get_offset: its generators have no offset. Use get_state.");
}
uint64_t Generator::current_seed() const { return host.current_seed(); }
uint64_t Generator::seed() { return host.seed(); }
void Generator::set_state(const c10::TensorImpl& state) { host.unsafeGetGeneratorImpl()->set_state(state); }
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  return host.unsafeGetGeneratorImpl()->get_state();
}
Generator* Generator::clone_impl() const { return new Generator(device_.index(), host.clone()); }
c10::DeviceType Generator::device_type() { return kSim; }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < kMaxDevices; i++) all.push_back(at::make_generator<Generator>(c10::DeviceIndex(i)));
    return all;
  }();
  check_index(resolve(device));
  return generators[resolve(device)];
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

HostGeneratorLoan::HostGeneratorLoan(c10::DeviceIndex device)
    : host_(host_impl(at::detail::getDefaultCPUGenerator())),
      device_(host_impl(host_generator(default_generator(device)))) {
  g_loan_lock.lock();
  exchange();
}
HostGeneratorLoan::~HostGeneratorLoan() {
  exchange();
  g_loan_lock.unlock();
}

void HostGeneratorLoan::exchange() {
  std::scoped_lock hold(host_->mutex_, device_->mutex_);
  const auto engine = host_->engine();
  host_->set_engine(device_->engine());
  device_->set_engine(engine);
  const auto sample = host_->next_float_normal_sample();
  host_->set_next_float_normal_sample(device_->next_float_normal_sample());
  device_->set_next_float_normal_sample(sample);
  const auto precise = host_->next_double_normal_sample();
  host_->set_next_double_normal_sample(device_->next_double_normal_sample());
  device_->set_next_double_normal_sample(precise);
}

}  // namespace sim
