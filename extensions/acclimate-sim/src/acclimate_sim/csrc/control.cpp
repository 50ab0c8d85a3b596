// The library's interface to Python: torch operators, which need neither pybind11 nor Python's headers.
#include "devices.h"
#include "generator.h"
#include "host_alias.h"
#include "pinned.h"

#include <torch/library.h>

namespace sim {
namespace {

void set_profile(int64_t devices, int64_t capacity, c10::List<int64_t> refused, bool replaces_parameters,
                 bool checks_synchronisation, bool asserts) {
  Settings chosen{static_cast<int>(devices), capacity, 0, replaces_parameters,
                  checks_synchronisation,    asserts};
  for (const int64_t dtype : refused) chosen.refused_dtypes |= uint64_t{1} << dtype;
  configure(chosen);
}

std::optional<at::Generator> generator_of(int64_t device) {
  check_index(device);
  return default_generator(static_cast<c10::DeviceIndex>(device));
}

at::Tensor host_view(const at::Tensor& tensor) {
  HostAliases aliases;
  return aliases.to_host(tensor);
}

int64_t number_of_dtype(at::ScalarType dtype) { return static_cast<int64_t>(dtype); }

TORCH_LIBRARY(sim, m) {
  m.def(
      "configure(int devices, int capacity_bytes, int[] refused_dtypes, bool replaces_parameters, "
      "bool checks_synchronisation, bool asserts) -> ()",
      set_profile);
  m.def("device_count() -> int", [] { return int64_t{settings().device_count}; });
  m.def("default_generator(int device) -> Generator?", generator_of);
  m.def("dtype_number(ScalarType dtype) -> int", number_of_dtype);
  m.def("register_pinned(int address, int bytes) -> ()", [](int64_t address, int64_t bytes) {
    register_pinned(static_cast<uintptr_t>(address), static_cast<size_t>(bytes));
  });
  m.def("unregister_pinned(int address) -> ()",
        [](int64_t address) { unregister_pinned(static_cast<uintptr_t>(address)); });
  m.def("host_view(Tensor(a) tensor) -> Tensor(a)");
}
SIM_LIBRARY_IMPL(sim, SIM_SLOT, m) { m.impl("host_view", host_view); }

}  // namespace
}  // namespace sim
