// Numbers and names of collectives, reductions and dtypes, and the error of a group, whose message has the
// names.
#pragma once

#include <stdexcept>
#include <string>

#include "layout.h"

namespace acclimate_comm {

enum class Reason : uint32_t { kTimeout, kPeerGone, kMismatch, kAborted, kForked, kSystem };

// Any failure of a group. After every failure except a mismatch the group is unusable.
class CommError : public std::runtime_error {
 public:
  CommError(Reason reason, const std::string& text) : std::runtime_error(text), reason(reason) {}
  Reason reason;
};

enum class Kind : uint8_t {
  kNone,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kBarrier,
  kSend,
  kReceive
};

// The first eight are c10d::ReduceOp's numbers.
enum class Op : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kNone };

// c10::ScalarType's numbers, which are part of torch's stable ABI.
enum class Dtype : uint8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBFloat16 = 15,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
  kNone = 255
};

std::string dtype_name(uint8_t dtype);
std::string describe(const Call& call);  // all_reduce(SUM) of 8 float32
std::string with_tag(const Call& call);  // send of 8 float32 with tag 0
// The error of both ranks of a message when send and recv do not match.
CommError different_messages(int from, const Call& sent, int to, const Call& wanted);

}  // namespace acclimate_comm
