#include "fallback.h"

#include "context.h"
#include "devices.h"
#include "generator.h"
#include "host_alias.h"
#include "other_numbers.h"
#include "tensor_uses.h"
#include "with_tensors.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

enum class Use : uint8_t { kRead, kWrite, kView };

// The facts that the fallback needs about an operator, computed once.
struct Operator {
  explicit Operator(const c10::OperatorHandle& op);

  std::string name;  // with its overload
  std::vector<Use> uses;  // by argument
  int generator = -1;  // the argument that is a generator
  bool draws_random = false;
  bool reads_back = false;  // it waits for the device, as its result depends on numbers
  int host_argument = -1;  // an argument that is on the host by definition
  int host_result = -1;  // and such a result
  bool (*special)(const Operator&, Stack*) = nullptr;  // runs in place of the host's kernel
};

// -- operators that differ from the host's kernel ------------------------------------------------

void call(const char* name, Stack* stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
}

// torch calls these two on every PrivateUse1 device; the host has no kernel with these names.
bool convolution(const Operator&, Stack* stack) {
  call("aten::convolution", stack);
  return true;
}

bool convolution_backward(const Operator&, Stack* stack) {
  // convolution_backward has one argument more, the sizes of the bias: one per output channel.
  const auto first = stack->end() - 10;
  const at::Tensor weight = first[2].toTensor();
  const bool transposed = first[6].toBool();
  const int64_t channels = transposed ? weight.size(1) * first[8].toInt() : weight.size(0);
  stack->insert(first + 3, IValue(std::vector<int64_t>{channels}));
  call("aten::convolution_backward", stack);
  return true;
}

// Accelerators accept integers here, and code for them relies on it (experts of a language model); the host's
// kernel accepts only floating point.
bool histogram_of_integers(const Operator&, Stack* stack) {
  IValue& values = *(stack->end() - 4);
  const auto dtype = values.toTensor().scalar_type();
  if (!c10::isIntegralType(dtype, /*includeBool=*/false)) return false;
  values = values.toTensor().to(at::kDouble);
  call("aten::histc", stack);
  stack->back() = stack->back().toTensor().to(dtype);
  return true;
}

Operator::Operator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  name = toString(op.operator_name());
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    uses.push_back(!alias ? Use::kRead : alias->isWrite() ? Use::kWrite : Use::kView);
    if (argument.name() == "generator") generator = static_cast<int>(uses.size()) - 1;
  }
  draws_random = op.hasTag(at::Tag::nondeterministic_seeded);
  // The shape of x[places] depends on their numbers only if these are truth values.
  reads_back = (op.hasTag(at::Tag::dynamic_output_shape) && name.rfind("aten::index", 0) != 0) ||
               op.hasTag(at::Tag::data_dependent_output);
  if (name == "aten::convolution_overrideable") special = convolution;
  if (name == "aten::convolution_backward_overrideable") special = convolution_backward;
  if (name == "aten::histc") special = histogram_of_integers;
  if (name == "aten::_pack_padded_sequence") {
    host_argument = 1;  // lengths
    host_result = 1;  // batch sizes
  }
  // The sizes and strides of a nested tensor's parts are on the host.
  if (name.rfind("aten::_nested_", 0) == 0) host_argument = -2;
  if (name == "aten::_nested_tensor_size" || name == "aten::_nested_tensor_strides" ||
      name == "aten::_nested_tensor_storage_offsets") {
    host_result = 0;
  }
  if (name == "aten::_ctc_loss.Tensor" || name == "aten::_ctc_loss_backward.Tensor") host_argument = -2;
}

const Operator& find(const c10::OperatorHandle& op) {
  // Keyed by the address of the schema, which is stable while the operator exists; the name is compared, as
  // another operator may later have the same address.
  thread_local std::unordered_map<const void*, std::unique_ptr<Operator>> known;
  auto& found = known[&op.schema()];
  const auto& identity = op.operator_name();
  const auto matches = [&] {
    const auto& name = found->name;
    const size_t plain = identity.name.size();
    return name.compare(0, plain, identity.name) == 0 &&
           (identity.overload_name.empty()
                ? name.size() == plain
                : name.compare(plain + 1, std::string::npos, identity.overload_name) == 0);
  };
  if (!found || !matches()) found = std::make_unique<Operator>(op);
  return *found;
}

// -- the device that an operator runs on -----------------------------------------------------------

// Tensors of one operator have to be on one device, as on CUDA. A host tensor without dimensions counts as a
// number, unless it is written to.
class DeviceCheck {
 public:
  explicit DeviceCheck(const Operator& op) : op_(op) {}

  void see(const at::Tensor& tensor, Use use) {
    if (!tensor.defined()) return;
    const auto device = tensor.device();
    if (device.type() == kSim) {
      if (!device_)
        device_ = device;
      else if (*device_ != device)
        other_ = device;
    } else if (tensor.dim() > 0 || use == Use::kWrite) {
      other_ = device;
    }
  }

  c10::Device device() const {
    TORCH_CHECK(!device_ || !other_,
                "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                " and ", *other_, "! (when checking arguments of ", op_.name, ")");
    return device_.value_or(c10::Device(kSim, current_device()));
  }

 private:
  const Operator& op_;
  std::optional<c10::Device> device_, other_;
};

c10::Device check_devices(const Operator& op, at::ArrayRef<IValue> arguments) {
  DeviceCheck check(op);
  std::optional<c10::Device> wanted;
  for (size_t i = 0; i < arguments.size(); i++) {
    const IValue& value = arguments[i];
    const bool on_host = op.host_argument == static_cast<int>(i) || op.host_argument == -2;
    if (value.isTensor()) {
      if (!on_host || on_sim(value.toTensor())) check.see(value.toTensor(), op.uses[i]);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) check.see(tensor, op.uses[i]);
    } else if (value.isOptionalTensorList()) {  // the indices of index and index_put, which may be the host's
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor && on_sim(*tensor)) check.see(*tensor, op.uses[i]);
      }
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      wanted = value.toDevice();
    }
  }
  auto device = wanted && wanted->has_index() ? *wanted
                : wanted                      ? c10::Device(kSim, current_device())
                                              : check.device();
  check_index(device.index());
  return device;
}

// -- arguments to the host and results back ----------------------------------------------------------

void note(const TensorUses& uses, const at::Tensor& tensor, Use use) {
  if (use == Use::kRead) uses.reads(tensor);
  if (use == Use::kWrite) uses.writes(tensor);  // a view is not a use
}

IValue to_host(const IValue& value, Use use, HostAliases& aliases, const TensorUses& uses) {
  if (value.isDevice() && value.toDevice().type() == kSim) return c10::Device(c10::DeviceType::CPU);
  if (value.isGenerator()) return host_generator(value.toGenerator());
  return with_tensors(value, [&](const at::Tensor& tensor) {
    if (!on_sim(tensor)) return tensor;
    note(uses, tensor, use);
    return aliases.to_host(tensor);
  });
}

bool is_nested(const IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().is_nested();
  if (!value.isTensorList()) return false;
  const auto tensors = value.toTensorVector();
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.is_nested(); });
}

IValue to_device(IValue value, c10::DeviceIndex device, HostAliases& aliases, const TensorUses& uses) {
  return with_tensors(std::move(value), [&](const at::Tensor& tensor) {
    at::Tensor made = aliases.to_device(tensor, device);
    uses.writes(made);
    return made;
  });
}

// -- numbers that an operator refuses (ACCLIMATE_SIM=asserts) ------------------------------------------

// Whether a kernel would note this error as an assert; the stack then has results of the right shapes.
//
// The same call with other numbers shows it. Factorizations tell of numbers without a result at once, on CUDA
// too, and so does an operator that reads its numbers back.
bool becomes_an_assert(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKey key,
                       const c10::Error& error, const std::vector<IValue>& arguments,
                       const HostAliases& aliases, Stack* stack) {
  if (op.reads_back || dynamic_cast<const c10::LinAlgError*>(&error) ||
      dynamic_cast<const c10::NotImplementedError*>(&error)) {
    return false;
  }
  if (op.name.rfind("aten::_assert_async", 0) == 0) return true;
  const OtherNumbers others(arguments, aliases);
  const size_t before = stack->size();
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  try {
    if (!op.special || !op.special(op, stack)) handle.redispatchBoxed(c10::DispatchKeySet(key), stack);
    return true;
  } catch (const c10::Error&) {
    stack->resize(before);
    return false;
  }
}

}  // namespace

void run_on_host(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = find(handle);
  const size_t count = op.uses.size();
  const auto device =
      check_devices(op, at::ArrayRef<IValue>(stack->data() + stack->size() - count, count)).index();
  require_context(device);
  if (op.reads_back) host_learns_of_asserts(device);
  HostAliases aliases;
  const TensorUses uses(device, op.name);
  auto key = c10::DispatchKey::CPU;
  for (size_t i = 0; i < count; i++) {
    IValue& value = (*stack)[stack->size() - count + i];
    if (is_nested(value)) key = c10::DispatchKey::NestedTensorCPU;
    value = to_host(value, op.uses[i], aliases, uses);
  }
  std::vector<IValue> arguments;  // the stack's are gone after an error
  if (settings().asserts) arguments.assign(stack->end() - count, stack->end());
  const size_t below = stack->size() - count;
  std::optional<HostGeneratorLoan> loan;
  if (op.draws_random) {
    if (op.generator < 0)
      loan.emplace(device);
    else if (IValue& value = (*stack)[stack->size() - count + op.generator]; value.isNone()) {
      value = host_generator(default_generator(device));
    }
  }
  try {
    if (!op.special || !op.special(op, stack)) {
      handle.redispatchBoxed(c10::DispatchKeySet(key), stack);
    }
  } catch (const c10::Error& error) {
    // The host's kernel allocates its result itself, and its allocator has no error type of its own.
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        std::string(error.what_without_backtrace()).find("can't allocate memory") == std::string::npos,
        "sim is out of memory: the result of ", op.name, " does not fit. ", error.what_without_backtrace());
    if (!settings().asserts) throw;
    stack->resize(below);
    if (!becomes_an_assert(op, handle, key, error, arguments, aliases, stack)) throw;
    note_assert(device, op.name);
  }
  loan.reset();
  const size_t results = handle.schema().returns().size();
  for (size_t i = 0; i < results; i++) {
    if (static_cast<int>(i) == op.host_result) continue;
    IValue& value = (*stack)[stack->size() - results + i];
    // A result that aliases an argument is not a new use of its bytes.
    const bool aliases_argument = handle.schema().returns()[i].alias_info() != nullptr;
    value = to_device(std::move(value), device, aliases, aliases_argument ? TensorUses() : uses);
  }
  aliases.write_back();
}

}  // namespace sim
