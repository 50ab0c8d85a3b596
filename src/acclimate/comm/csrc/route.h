// Chooses between ordinary and non-temporal stores for the data that a rank contributes.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "copies.h"

namespace acclimate_comm {

// The pattern of a transfer. If every rank writes and reads equal amounts, a rank's own time shows which
// stores are faster for all.
enum class Flow { kReduce, kGather, kScatter, kUneven };

// Non-temporal stores ("around" the caches) are faster where ordinary stores ("through" them) would leave the
// data modified in one core's cache: 12 GB/s instead of 2 GB/s between the core complexes of an EPYC. Between
// cores that share a cache, ordinary stores take half the time. One machine can show both, because the
// hypervisor moves virtual cores. So transfers try both from time to time, all ranks in the same call.
//
// Long transfers evict the data to a cache that cores may share, and try both within one transfer. Shorter
// ones try both in consecutive transfers, for each size and flow.
class Route {
 public:
  // Call when a transfer starts.
  void start(Flow flow, size_t bytes, size_t parts) {
    part_ = 0;
    busy_ = 0;
    is_long_ = parts >= 2 * kTried;
    is_trial_ = is_long_ && long_transfers_++ % kTransfersBetweenTrials == kFirstTrial;
    short_ = nullptr;
    tried_ = kNotTried;
    if (is_long_ || flow == Flow::kUneven || bytes < kLeastStreamedBytes) return;
    const size_t size = std::min<size_t>(std::bit_width(bytes), kSizes) - 1;
    short_ = &shorts_[static_cast<size_t>(flow)][size];
    const uint64_t since = short_->transfers++ % kShortTransfersBetweenTrials;
    if (since < kFirstTrial || since >= kFirstTrial + 2 * kTried) return;
    bytes_ = bytes;
    tried_ = since - kFirstTrial;
    resumed_ = now();
  }

  bool is_around_caches() const {
    if (is_long_) return is_trial_ && part_ < 2 * kTried ? part_ < kTried : is_around_;
    if (short_ == nullptr) return true;
    return tried_ != kNotTried ? tried_ < kTried : short_->is_around;
  }

  // Call when the rank has published a part, before it waits for the others.
  void published() {
    if (tried_ != kNotTried) busy_ += now() - resumed_;
    if (!is_trial_) return;
    const int64_t time = now() - resumed_;
    if (part_ == kTried - 2) around_time_ = time;
    if (part_ == kTried - 1) around_time_ = std::min(around_time_, time);
    if (part_ == 2 * kTried - 2) through_time_ = time;
    if (part_ == 2 * kTried - 1) is_around_ = around_time_ <= std::min(through_time_, time);
  }

  // Call when the others have published it too.
  void resumed() {
    part_++;
    if (is_trial_ || tried_ != kNotTried) resumed_ = now();
  }

  // Call when the transfer is over. The time spent waiting for others does not count.
  void finish() {
    if (tried_ == kNotTried) return;
    busy_ += now() - resumed_;
    short_->record(tried_, static_cast<double>(busy_) / static_cast<double>(bytes_));
    tried_ = kNotTried;
  }

 private:
  // The first two trials of each kind start with the caches that the other kind left.
  static constexpr size_t kTried = 4;
  static constexpr size_t kNotTried = std::numeric_limits<size_t>::max();
  static constexpr uint64_t kTransfersBetweenTrials = 64, kShortTransfersBetweenTrials = 1024;
  static constexpr uint64_t kFirstTrial = 1;  // the first transfer touches new memory, so it is not timed
  static constexpr size_t kSizes = 24, kFlows = static_cast<size_t>(Flow::kUneven);

  // Transfers of one flow whose sizes have the same number of bits.
  struct Short {
    uint64_t transfers = 0;
    bool is_around = true;
    double around = 0, through = 0;  // ns for each byte

    void record(size_t tried, double time) {
      // Ordinary stores cost more when they are the wrong choice, so they must be at least 10 % faster.
      constexpr double kClearly = 0.9;
      if (tried == kTried - 2) around = time;
      if (tried == kTried - 1) around = std::min(around, time);
      if (tried == 2 * kTried - 2) through = time;
      if (tried == 2 * kTried - 1) is_around = std::min(through, time) > kClearly * around;
    }
  };

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

  Short shorts_[kFlows][kSizes];
  Short* short_ = nullptr;  // the statistics of the running transfer, if it is short
  size_t tried_ = kNotTried;  // the index of the running transfer in its trial
  size_t bytes_ = 0;
  int64_t busy_ = 0;
};

}  // namespace acclimate_comm
