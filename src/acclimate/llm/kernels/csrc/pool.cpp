#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace acclimate::inference {
namespace {

class Pool {
 public:
  void run(int threads, Work work, void* context) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (threads > 1 && lock.owns_lock()) {
      threads = start(threads);
    } else {
      threads = 1;
    }
    if (threads == 1) {
      work(context, 0, 1);
      return;
    }
    work_ = work;
    context_ = context;
    threads_ = threads;
    left_.store(threads - 1, std::memory_order_relaxed);
    const int32_t round = done_.now();
    for (int thread = 1; thread < threads; ++thread) {
      workers_[thread - 1].wake.send();
    }
    work(context, 0, threads);
    done_.wait(round);
  }

 private:
  // Each worker has a signal of its own, so that those a call does not need sleep on.
  struct Worker {
    Signal wake;
  };

  // Returns the number of threads that there are, with the caller.
  int start(int threads) {
    while (static_cast<int>(workers_.size()) < threads - 1) {
      Worker& worker = workers_.emplace_back();
      const int number = static_cast<int>(workers_.size());
      // Signals are for the threads that the program knows.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        std::thread([this, number, &worker] { serve(number, worker); }).detach();
      } catch (const std::system_error&) {
        workers_.pop_back();
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (static_cast<int>(workers_.size()) < number) {
        return number;
      }
    }
    return threads;
  }

  void serve(int number, Worker& worker) {
    for (int32_t seen = 0;; ++seen) {
      worker.wake.wait(seen);
      work_(context_, number, threads_);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        done_.send();
      }
    }
  }

  std::mutex mutex_;
  std::deque<Worker> workers_;
  Work work_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
  std::atomic<int> left_{0};
  Signal done_;
};

std::atomic<Pool*> current{nullptr};

// Never destroyed, as its threads run until the process ends. A forked child has none of them, and perhaps a
// locked mutex: it leaves the pool to its parent and makes another.
Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); }); });
  Pool* found = current.load(std::memory_order_acquire);
  if (found == nullptr) {
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) {
      return *made;
    }
    delete made;
  }
  return *found;
}

}  // namespace

void run(int threads, Work work, void* context) { pool().run(threads, work, context); }

}  // namespace acclimate::inference
