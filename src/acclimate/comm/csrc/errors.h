#pragma once

#include <stdexcept>
#include <string>

namespace acclimate_comm {

enum class Reason : uint32_t { kTimeout, kPeerGone, kMismatch, kAborted, kForked, kArgument, kSystem };

// Any failure of a group. After every failure except a mismatch and a bad argument the group is unusable.
class CommError : public std::runtime_error {
 public:
  CommError(Reason reason, const std::string& text) : std::runtime_error(text), reason(reason) {}
  Reason reason;
};

}  // namespace acclimate_comm
