// The memory of an operator's arguments with other numbers, to see whether it refused those that it was
// given.
#pragma once

#include "host_alias.h"

#include <ATen/core/ivalue.h>

#include <vector>

namespace sim {

// While it exists, each integer and truth value of the device's tensors is 0 and each other number 0.5: a
// place that exists, a class, a probability, a count. Then they are what they were.
class OtherNumbers {
 public:
  OtherNumbers(const std::vector<c10::IValue>& arguments, const HostAliases& aliases);
  ~OtherNumbers();
  OtherNumbers(const OtherNumbers&) = delete;
  OtherNumbers& operator=(const OtherNumbers&) = delete;

 private:
  struct Kept {
    c10::Storage storage;
    const void* at;
    std::vector<char> bytes;
  };
  void replace(const at::Tensor& tensor);
  std::vector<Kept> kept_;
};

}  // namespace sim
