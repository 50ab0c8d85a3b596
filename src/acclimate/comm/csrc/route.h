// Whether what a rank contributes goes to the other ranks through the processor's caches or around them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace acclimate_comm {

// Around them is faster where the data would stay modified in the cache of one core (2 GB/s between the core
// complexes of an EPYC, where this gives 12 GB/s). Long transfers push it out into a cache that cores may
// share, and then through them can be faster by half. So long transfers try both, now and then: all ranks in
// the same call, as their calls are equal.
class Route {
 public:
  // A transfer starts.
  void start(size_t parts) {
    part_ = 0;
    is_long_ = parts >= 2 * kTriedParts;
    is_trial_ = is_long_ && long_transfers_++ % kTransfersBetweenTrials == kFirstTrial;
  }

  bool is_around_caches() const {
    if (!is_long_) return true;
    return is_trial_ && part_ < 2 * kTriedParts ? part_ < kTriedParts : is_around_;
  }

  // The rank published a part, and will wait for the others.
  void published() {
    if (!is_trial_) return;
    const int64_t time = now() - resumed_;
    if (part_ == kTriedParts - 2) around_time_ = time;
    if (part_ == kTriedParts - 1) around_time_ = std::min(around_time_, time);
    if (part_ == 2 * kTriedParts - 2) through_time_ = time;
    if (part_ == 2 * kTriedParts - 1) is_around_ = around_time_ <= std::min(through_time_, time);
  }

  // The others published it, too.
  void resumed() {
    part_++;
    if (is_trial_) resumed_ = now();
  }

 private:
  // The first two of each way find the caches as the other way left them.
  static constexpr size_t kTriedParts = 4;
  static constexpr uint64_t kTransfersBetweenTrials = 64;
  static constexpr uint64_t kFirstTrial = 1;  // the first transfer touches new memory

  static int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  bool is_around_ = true;
  bool is_long_ = false;
  bool is_trial_ = false;
  size_t part_ = 0;
  uint64_t long_transfers_ = 0;
  int64_t resumed_ = 0;
  int64_t around_time_ = 0;
  int64_t through_time_ = 0;
};

}  // namespace acclimate_comm
