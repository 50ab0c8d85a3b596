// Threads that spin for about a millisecond while they wait for work, and then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "../../../ops/csrc/relax.h"

namespace acclimate::inference {

// Waits until a number changes: spins for up to a millisecond, which is faster than being woken, then sleeps
// in the kernel.
class Signal {
 public:
  int32_t now() const { return value_.load(std::memory_order_acquire); }

  void send() {
    value_.fetch_add(1, std::memory_order_release);
    value_.notify_all();
  }

  // Returns once the number differs from `seen`.
  void wait(int32_t seen) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    for (int count = 1; now() == seen; ++count) {
      acclimate::relax();
      if (count % 256 == 0 && std::chrono::steady_clock::now() > deadline) {
        value_.wait(seen, std::memory_order_acquire);
      }
    }
  }

 private:
  alignas(64) std::atomic<int32_t> value_{0};
};

// Lets threads wait for each other, again and again. The pool may give fewer threads than it was asked for,
// so each call says how many there are.
class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) {
      return;
    }
    const int32_t round = passed_.now();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      passed_.send();
    } else {
      passed_.wait(round);
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  Signal passed_;
};

using Work = void (*)(void* context, int thread, int threads);

// Calls work(context, thread, threads) once for each of up to `threads` threads, the caller being thread 0,
// and returns when all have returned. There are fewer threads if no more can be started, and only the caller
// if another thread of the process is using the others: so calls never wait for each other, not even nested
// ones. A work that throws ends the process. After a fork the child starts threads of its own when it needs
// them.
void run(int threads, Work work, void* context);

// The same for a function object: run_threads(4, [&](int thread, int threads) { … }).
template <class Function>
void run_threads(int threads, Function& function) {
  run(
      threads,
      [](void* context, int thread, int count) { (*static_cast<Function*>(context))(thread, count); },
      &function);
}

}  // namespace acclimate::inference
