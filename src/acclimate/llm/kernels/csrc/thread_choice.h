// How many threads take the steps of one piece of work that is repeated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

namespace acclimate::inference {

// Beside other programs, fewer threads can be faster. The system lets threads take turns: of P processors
// with R other threads that want to run, each of k threads gets P / (R + k), so two get less than twice what
// one gets. R follows from the time that threads waited for a processor. How long a step takes with half or
// twice the threads, without such waits, is seen in a trial. As long as no thread waits, all take part in
// every step.
class ThreadChoice {
 public:
  // Where the time of a step went, in seconds.
  struct Times {
    double took;  // until it ended
    double ran;  // processor time of all threads
    double slept;  // of all threads, as they had nothing to do
  };

  // The threads for the next step: at most `most`. Steps of another `work` are not compared.
  int next(int most, int64_t work) {
    if (most != most_ || work != work_) {
      most_ = most;
      work_ = work;
      chosen_ = most;
      trial_ = left_ = 0;
      others_ = 0;
      unhindered_.clear();
      begin_window();
    }
    return trial_ != 0 ? trial_ : chosen_;
  }

  // Tells of that step.
  void took(const Times& times) {
    sum_.took += times.took;
    sum_.ran += times.ran;
    sum_.slept += times.slept;
    ++steps_;
    if (most_ > 1 && sum_.took >= window && steps_ >= fewest_steps) {
      judge();
      begin_window();
    }
  }

 private:
  // What is seen at a time, in seconds and steps. In less, the turns of other programs would show.
  static constexpr double window = 0.1;
  static constexpr int fewest_steps = 4;
  static constexpr int pause = 20;  // windows between two trials
  // How much the latest window counts for the number of other threads.
  static constexpr double freshness = 0.25;
  // Threads that get less of a processor's time than this have neighbours.
  static constexpr double whole = 0.93;
  static constexpr double least_gain = 1.03;

  void begin_window() {
    sum_ = Times{};
    steps_ = 0;
  }

  // The part of a processor that each of some threads gets.
  double share(int threads) const { return std::min(1.0, most_ / (others_ + threads)); }

  // Steps per second.
  double speed(int threads) const { return share(threads) / unhindered_.at(threads); }

  bool is_faster(int threads) const {
    return unhindered_.contains(threads) && speed(threads) > least_gain * speed(chosen_);
  }

  void judge() {
    const int threads = trial_ != 0 ? trial_ : chosen_;
    const double wanted = std::max(threads * sum_.took - sum_.slept, sum_.ran);
    const double given = std::clamp(sum_.ran / wanted, 0.01, 1.0);
    unhindered_[threads] = given * sum_.took / steps_;
    // One thread that runs all the time does not tell whether another would.
    if (threads == most_ || given < whole || threads > chosen_) {
      const double others = std::max(0.0, most_ / given - threads);
      others_ += (trial_ > chosen_ ? 1.0 : freshness) * (others - others_);
    }
    const int half = (chosen_ + 1) / 2, twice = std::min(2 * chosen_, most_);
    trial_ = 0;
    if (is_faster(half)) {
      chosen_ = half;
    } else if (is_faster(twice)) {
      chosen_ = twice;
    }
    if (--left_ <= 0 && (share(chosen_) < whole || chosen_ < most_)) {
      is_upwards_ = chosen_ < most_ && (chosen_ == 1 || !is_upwards_);
      trial_ = is_upwards_ ? twice : half;
      left_ = pause;
    }
  }

  int most_ = 0, chosen_ = 0, trial_ = 0;  // 0: no trial
  int64_t work_ = -1;
  double others_ = 0;  // threads that want to run
  std::map<int, double> unhindered_;  // the seconds of a step, by threads
  Times sum_{};
  int64_t steps_ = 0;
  int left_ = 0;
  bool is_upwards_ = false;
};

}  // namespace acclimate::inference
