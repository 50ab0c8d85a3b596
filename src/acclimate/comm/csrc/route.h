// Whether what a rank contributes goes to the other ranks through the processor's caches or around them.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "copies.h"

namespace acclimate_comm {

// Which ranks a transfer moves data between. Where each rank writes and reads as much as any other, its own
// time shows which way is faster for all.
enum class Flow { kReduce, kGather, kScatter, kUneven };

// Around the caches is faster where the data would stay modified in the cache of one core (2 GB/s between the
// core complexes of an EPYC, where this gives 12 GB/s). Between cores that share a cache, through it takes
// half the time. Both are found on one machine: the cores of a virtual one move. So transfers try both, now
// and then: all ranks in the same call, as their calls are equal.
//
// Long transfers push the data out into a cache that cores may share; they try both within one transfer.
// Shorter ones try both in transfers that follow each other, for each size and flow.
class Route {
 public:
  // A transfer starts.
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

  // The rank published a part, and will wait for the others.
  void published() {
    if (tried_ != kNotTried) busy_ += now() - resumed_;
    if (!is_trial_) return;
    const int64_t time = now() - resumed_;
    if (part_ == kTried - 2) around_time_ = time;
    if (part_ == kTried - 1) around_time_ = std::min(around_time_, time);
    if (part_ == 2 * kTried - 2) through_time_ = time;
    if (part_ == 2 * kTried - 1) is_around_ = around_time_ <= std::min(through_time_, time);
  }

  // The others published it, too.
  void resumed() {
    part_++;
    if (is_trial_ || tried_ != kNotTried) resumed_ = now();
  }

  // The transfer is over. What it waited for others does not count.
  void finish() {
    if (tried_ == kNotTried) return;
    busy_ += now() - resumed_;
    short_->record(tried_, static_cast<double>(busy_) / static_cast<double>(bytes_));
    tried_ = kNotTried;
  }

 private:
  // The first two of each way find the caches as the other way left them.
  static constexpr size_t kTried = 4;
  static constexpr size_t kNotTried = std::numeric_limits<size_t>::max();
  static constexpr uint64_t kTransfersBetweenTrials = 64, kShortTransfersBetweenTrials = 1024;
  static constexpr uint64_t kFirstTrial = 1;  // the first transfer touches new memory
  static constexpr size_t kSizes = 24, kFlows = static_cast<size_t>(Flow::kUneven);

  // Transfers of one flow whose sizes have the same number of bits.
  struct Short {
    uint64_t transfers = 0;
    bool is_around = true;
    double around = 0, through = 0;  // ns for each byte

    void record(size_t tried, double time) {
      // Through the caches loses more where it is wrong, so it has to be clearly faster.
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
  Short* short_ = nullptr;  // what the transfer under way belongs to, if it is not long
  size_t tried_ = kNotTried;  // which one of a trial it is
  size_t bytes_ = 0;
  int64_t busy_ = 0;
};

}  // namespace acclimate_comm
