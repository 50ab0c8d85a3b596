// Engines: the workers and threads that move one handle's requests.
#pragma once

#include <csignal>
#include <pthread.h>
#include <system_error>

#include "workers.h"

namespace acclimate_aio {

enum class Way : int64_t { kRing = 0, kLinuxAio = 1, kThreads = 2 };

constexpr unsigned kLargestDepth = 4096;
constexpr unsigned kLargestPool = 64;

class Engine {
 public:
  explicit Engine(int64_t block_bytes) : queue_(block_bytes) {}
  ~Engine() { stop(); }

  Queue& queue() { return queue_; }

  // 0, or the errno with which the kernel refuses this method.
  int start(Way way, unsigned depth, bool single_submit, unsigned count) {
    // Each thread of plain calls has one piece in flight.
    if (way == Way::kThreads) count = std::min(kLargestPool, depth * count);
    for (unsigned index = 0; index < count; ++index) {
      if (const int error = add(way, depth, single_submit); error != 0) return error;
    }
    // Python's threads handle signals.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      for (auto& worker : workers_) threads_.emplace_back([this, &worker] { worker->run(queue_); });
    } catch (const std::system_error& refusal) {
      // Fewer threads than requested still do the work.
      error = threads_.empty() ? refusal.code().value() : 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
  }

  void stop() {
    queue_.stop();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  void abandon() {
    for (auto& worker : workers_) worker->abandon();
  }

 private:
  template <typename Kind>
  int add_open(unsigned depth, bool single_submit) {
    auto worker = std::make_unique<Kind>(depth, single_submit);
    const int error = worker->open();
    if (error == 0) workers_.push_back(std::move(worker));
    return error;
  }

  int add(Way way, unsigned depth, bool single_submit) {
    switch (way) {
      case Way::kRing:
#if defined(IORING_FEAT_RW_CUR_POS)
        return add_open<RingWorker>(depth, single_submit);
#else
        return ENOSYS;
#endif
      case Way::kLinuxAio:
        return add_open<LinuxAioWorker>(depth, single_submit);
      case Way::kThreads:
        workers_.push_back(std::make_unique<PlainWorker>());
        return 0;
    }
    return EINVAL;
  }

  Queue queue_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
};

// Engines by number; the number of a stopped engine returns EBADF.
class Engines {
 public:
  int64_t add(std::shared_ptr<Engine> engine) {
    std::lock_guard<std::mutex> lock(mutex_);
    engines_.emplace(++last_, std::move(engine));
    return last_;
  }
  std::shared_ptr<Engine> find(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = engines_.find(id);
    return found == engines_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Engine> remove(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = engines_.find(id);
    if (found == engines_.end()) return nullptr;
    auto engine = std::move(found->second);
    engines_.erase(found);
    return engine;
  }
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Engine>> engines_;
  // Two builds of this library in one process do not share numbers.
  int64_t last_ = static_cast<int64_t>((reinterpret_cast<uintptr_t>(this) & 0x7fffffffffff) << 16);
};

// Never destroyed: threads may still wait when the process ends. A fork by another thread must not leave the
// mutex locked in the child.
inline Engines& engines() {
  static Engines* const all = [] {
    pthread_atfork([] { engines().lock(); }, [] { engines().unlock(); }, [] { engines().unlock(); });
    return new Engines;
  }();
  return *all;
}

}  // namespace acclimate_aio
