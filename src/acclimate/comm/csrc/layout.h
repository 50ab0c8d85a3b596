// The layout of the memory that the ranks of a group share: one anonymous file, mapped by each rank.
//
//   Header | one RankLines per rank | per rank: 2 slots, 2 results | per ordered pair of ranks: one Ring
//
// A slot holds its rank's contribution to a round, a result the part that its rank reduced for the others.
// There are two of each, so that a rank fills one while others still read the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace acclimate_comm {

constexpr int kMostRanks = 256;
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kTextBytes = 1024;
constexpr size_t kInlineBytes = 40;

// One collective as one rank called it. Peers compare it, so that a mismatch is an error and not a wrong
// result.
struct Call {
  uint8_t kind = 0;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint8_t refused = 0;  // 1 if this rank raised because its own arguments are wrong
  // Or the tag of a message. Of all_reduce, all_gather and reduce_scatter of a list of tensors: how many of
  // them follow this one.
  uint32_t root = 0;
  uint64_t numel = 0;

  bool operator==(const Call&) const = default;
};

// What a rank publishes in a round, on one cache line. Small contributions travel on the same line.
struct alignas(128) Post {
  std::atomic<uint64_t> stamp;  // the round; waiters sleep on its lower half
  Call call;
  unsigned char payload[kInlineBytes];
};
static_assert(offsetof(Post, payload) + kInlineBytes == 64, "stamp, call and payload are one cache line");

enum class Presence : uint32_t { kHere = 0, kLeft = 1 };

struct alignas(128) RankLines {
  Post posts[2];
  alignas(128) std::atomic<uint32_t> sleepers;  // ranks that sleep on one of the stamps
  std::atomic<int32_t> processor;  // where the rank last published, plus 1; 0: unknown
  alignas(128) std::atomic<uint32_t> presence;
  alignas(128) std::atomic<uint32_t> bell;  // rung when a ring to or from this rank moved
  std::atomic<uint32_t> bell_sleeps;
};

// The state of the group's first failure, which all ranks read.
enum class Failure : uint32_t { kNone = 0, kBeingWritten = 1, kThere = 2 };

struct Header {
  unsigned char token[16];  // written and compared by Python
  std::atomic<uint32_t> failure;
  uint32_t failure_kind;
  char text[kTextBytes];
};
static_assert(sizeof(Header) <= kHeaderBytes);

// Messages from one rank to another. Positions only grow; the index in `data` is the position modulo its
// size.
struct alignas(128) Ring {
  std::atomic<uint64_t> written;
  alignas(128) std::atomic<uint64_t> read;
};

class Layout {
 public:
  Layout(unsigned char* base, int ranks, size_t slot_bytes, size_t ring_bytes)
      : base_(base), ranks_(ranks), slot_bytes_(slot_bytes), ring_bytes_(ring_bytes) {}

  // memory.py repeats this formula; a group does not open if the two differ.
  static size_t bytes(int ranks, size_t slot_bytes, size_t ring_bytes) {
    const size_t n = static_cast<size_t>(ranks);
    return kHeaderBytes + n * sizeof(RankLines) + n * 4 * slot_bytes + n * n * (sizeof(Ring) + ring_bytes);
  }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankLines& lines(int rank) const { return reinterpret_cast<RankLines*>(base_ + kHeaderBytes)[rank]; }
  unsigned char* slot(int rank, int parity) const { return area(rank) + parity * slot_bytes_; }
  unsigned char* result(int rank, int parity) const { return area(rank) + (2 + parity) * slot_bytes_; }
  Ring& ring(int from, int to) const { return *reinterpret_cast<Ring*>(ring_at(from, to)); }
  unsigned char* ring_data(int from, int to) const { return ring_at(from, to) + sizeof(Ring); }

  int ranks() const { return ranks_; }
  size_t slot_bytes() const { return slot_bytes_; }
  size_t ring_bytes() const { return ring_bytes_; }

 private:
  unsigned char* area(int rank) const {
    return base_ + kHeaderBytes + ranks_ * sizeof(RankLines) + static_cast<size_t>(rank) * 4 * slot_bytes_;
  }
  unsigned char* ring_at(int from, int to) const {
    const size_t pair = static_cast<size_t>(from) * ranks_ + to;
    return area(ranks_) + pair * (sizeof(Ring) + ring_bytes_);
  }

  unsigned char* base_;
  int ranks_;
  size_t slot_bytes_;
  size_t ring_bytes_;
};

}  // namespace acclimate_comm
