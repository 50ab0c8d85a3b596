// One rank's side of a group. In each round every rank publishes its contribution and waits for every other.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "layout.h"
#include "route.h"

namespace acclimate_comm {

using Clock = std::chrono::steady_clock;

// Returns a time-out of at most 100 years. A clock that counts nanoseconds since the start of the machine, or
// since 1970 as in gloo, overflows after 292 years.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365 * 100));
}

// How often a wait polls before its first yield and after each yield, and how long it yields before it
// sleeps.
struct Patience {
  int spins;
  int spins_after_yield;
  std::chrono::microseconds yields;
};

struct Geometry {
  size_t slot_bytes;
  size_t ring_bytes;
};

// The processes of a group's ranks: which of them still run.
class Peers {
 public:
  explicit Peers(const std::vector<pid_t>& pids);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  bool runs(int rank) const;
  pid_t pid(int rank) const { return pids_[rank]; }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> descriptors_;  // pidfds; -1 if the system has none
};

// A number that each fork increments in the child, so that a group can detect that it is used after a fork.
unsigned fork_generation();

class Group {
 public:
  // Maps the file. The descriptor stays the caller's.
  Group(int descriptor, int rank, const std::vector<pid_t>& pids, Geometry geometry,
        std::chrono::milliseconds timeout, bool has_spare_cores);
  // Uses memory that the caller owns; all ranks may be in one process.
  Group(unsigned char* memory, int rank, const std::vector<pid_t>& pids, Geometry geometry,
        std::chrono::milliseconds timeout, bool has_spare_cores);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Layout& layout() const { return layout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = bounded(timeout); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  bool was_forked() const { return fork_generation() != forks_; }

  // Starts a collective; throws in a forked child and after a failure.
  void begin(const Call& call, std::chrono::milliseconds timeout, bool in_background = false);
  // Called when this rank's arguments are wrong: takes part in the round, so that the other ranks raise too.
  void refuse(Call call, std::chrono::milliseconds timeout, bool in_background = false);

  // The parity of the round being prepared, and the address for this rank's contribution of `bytes` bytes.
  int parity() const { return static_cast<int>((round_ + 1) & 1); }
  unsigned char* contribution(size_t bytes) { return contribution_of(rank_, parity(), bytes); }
  // Publishes the contribution, waits for every other rank's, and compares the calls.
  void exchange();
  // A rank's contribution to the last exchanged round.
  const unsigned char* contributed(int rank, size_t bytes) const {
    return contribution_of(rank, static_cast<int>(round_ & 1), bytes);
  }

  // The route of the contributions to the running collective.
  Route& route() { return route_; }
  const Route& route() const { return route_; }

  // Makes the group unusable for all ranks, which raise this text.
  [[noreturn]] void fail(Reason reason, const std::string& text);
  void abort(const std::string& why);
  // Announces that this rank takes part in no more rounds, and wakes the ranks that wait for it.
  void leave();
  // The message of the group's first failure; empty before.
  std::string failure() const;
  void throw_if_failed() const;
  // Fails the group if a rank that this round still needs has ended or left.
  void check_peers(const char* doing);
  void check_peer(int rank, const std::string& doing);

 private:
  unsigned char* contribution_of(int rank, int parity, size_t bytes) const {
    return bytes <= kInlineBytes ? layout_.lines(rank).posts[parity].payload : layout_.slot(rank, parity);
  }
  void await(int rank, std::atomic<uint64_t>& stamp);
  void publish_processor();
  bool move_from_others();
  bool shares_processor_with(int rank) const;
  void await_slowly(int rank, std::atomic<uint64_t>& stamp, bool may_yield);
  void sleep_until_published(int rank, std::atomic<uint64_t>& stamp, Clock::time_point deadline);
  [[noreturn]] void throw_mismatch();
  [[noreturn]] void peer_is_gone(int rank, const std::string& doing);
  void wake_everybody();
  unsigned char* map(int descriptor, size_t bytes);

  size_t mapped_bytes_ = 0;
  unsigned char* memory_;
  int rank_;
  int size_;
  Layout layout_;
  Peers peers_;
  std::chrono::milliseconds timeout_;
  bool has_spare_cores_;
  Patience foreground_;
  Patience background_;
  Clock::time_point crowded_until_{};  // until then, other work wants the processor, so waits do not yield
  Clock::time_point next_move_{};
  unsigned forks_;
  pid_t process_;

  uint64_t round_ = 0;  // the last one exchanged
  Call call_;
  Route route_;
  const Patience* patience_;
  std::chrono::milliseconds call_timeout_{0};
  Clock::time_point waited_since_{};
};

// "60 s" or "1500 ms".
std::string time_of(std::chrono::milliseconds time);
// The error message for two ranks whose calls differ.
std::string different_calls(const std::string& rank, const Call& call, const std::string& other,
                            const Call& others);
// Sleeps while a word of shared memory holds `value`, for at most `longest`.
void futex_wait(const void* word, uint32_t value, std::chrono::milliseconds longest);
void futex_wake(const void* word);

}  // namespace acclimate_comm
