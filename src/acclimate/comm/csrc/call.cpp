#include "call.h"

namespace acclimate_comm {
namespace {

const char* kKinds[] = {"nothing",    "all_reduce", "reduce",  "broadcast", "all_gather", "reduce_scatter",
                        "all_to_all", "gather",     "scatter", "barrier",   "send",       "recv"};
const char* kOps[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
const char* kDtypes[] = {"uint8",           "int8",
                         "int16",           "int32",
                         "int64",           "float16",
                         "float32",         "float64",
                         "complex32",       "complex64",
                         "complex128",      "bool",
                         "qint8",           "quint8",
                         "qint32",          "bfloat16",
                         "quint4x2",        "quint2x4",
                         "bits1x8",         "bits2x4",
                         "bits4x2",         "bits8",
                         "bits16",          "float8_e5m2",
                         "float8_e4m3fn",   "float8_e5m2fnuz",
                         "float8_e4m3fnuz", "uint16",
                         "uint32",          "uint64"};

template <size_t N>
const char* name(const char* (&names)[N], uint8_t number) {
  return number < N ? names[number] : nullptr;
}

}  // namespace

std::string dtype_name(uint8_t dtype) {
  const char* known = name(kDtypes, dtype);
  return known != nullptr ? known : "dtype number " + std::to_string(dtype);
}

std::string describe(const Call& call) {
  const auto kind = static_cast<Kind>(call.kind);
  const char* known = name(kKinds, call.kind);
  std::string text = known != nullptr ? known : "an unknown collective";
  if (const char* op = name(kOps, call.op)) text += std::string("(") + op + ")";
  if (kind == Kind::kBarrier) return text;
  text += " of ";
  // all_to_all compares its sizes pair by pair, in a separate round.
  if (kind != Kind::kAllToAll) text += std::to_string(call.numel) + " ";
  text += dtype_name(call.dtype);
  if (kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter) {
    text += (kind == Kind::kReduce || kind == Kind::kGather ? " to rank " : " from rank ") +
            std::to_string(call.root);
  }
  const bool may_be_one_of_a_list =
      kind == Kind::kAllReduce || kind == Kind::kAllGather || kind == Kind::kReduceScatter;
  if (may_be_one_of_a_list && call.root != 0) text += ", then of " + std::to_string(call.root) + " more";
  return text;
}

std::string with_tag(const Call& call) { return describe(call) + " with tag " + std::to_string(call.root); }

CommError different_messages(int from, const Call& sent, int to, const Call& wanted) {
  return {Reason::kMismatch, "Rank " + std::to_string(from) + " called " + with_tag(sent) + " to rank " +
                                 std::to_string(to) + ", but rank " + std::to_string(to) + " called " +
                                 with_tag(wanted) + "."};
}

}  // namespace acclimate_comm
