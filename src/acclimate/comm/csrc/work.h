// The Work that a collective returns, and the queue that runs collectives in the order of their calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "group.h"

namespace acclimate_comm {

class ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type, title), outputs_(std::move(outputs)) {}

  void complete(const std::exception_ptr& failure) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
      failure_ = failure;
      future = future_;
    }
    if (future) settle(*future, failure);
    finish(failure);
  }
  void came_from(int source) {
    const std::lock_guard lock(mutex_);
    source_ = source;
  }
  bool wait(std::chrono::milliseconds timeout) override { return c10d::Work::wait(bounded(timeout)); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return source_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    const auto future = future_;
    // Not completed_, which is set only after complete() has looked for a future to settle.
    const bool is_over = is_over_;
    const auto failure = failure_;
    lock.unlock();
    if (is_over) settle(*future, failure);
    return future;
  }

 private:
  void settle(c10::ivalue::Future& future, const std::exception_ptr& failure) {
    if (failure) {
      future.setError(failure);
    } else {
      future.markCompleted(c10::IValue(outputs_));
    }
  }

  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool is_over_ = false;
  std::exception_ptr failure_;
  int source_ = -1;
};

// A synchronous collective runs in its caller's thread if the queue is empty.
class Queue {
 public:
  // Runs a collective; true where it runs in the background.
  using Body = std::function<void(bool is_background)>;

  Queue() = default;
  ~Queue() { stop(); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  template <class Inline>
  void run(const c10::intrusive_ptr<ShmWork>& work, bool may_wait, const Inline& body) {
    std::unique_lock lock(mutex_);
    if (thread_.get_id() == std::this_thread::get_id()) {
      // A future's callback made this call in the queue's thread, and may wait for it: run it here.
      tasks_.push_back({work, body});
      while (!work->isCompleted()) serve_next(lock);
      return;
    }
    if (!may_wait || is_busy_ || !tasks_.empty()) {
      start_thread();
      tasks_.push_back({work, body});
      lock.unlock();
      changed_.notify_one();
      return;
    }
    is_busy_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      body(false);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    is_busy_ = false;
    const bool has_more = !tasks_.empty();
    lock.unlock();
    if (has_more) changed_.notify_one();
    work->complete(failure);
    if (failure) std::rethrow_exception(failure);
  }

  // Finishes the queued collectives and ends the thread.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Task {
    c10::intrusive_ptr<ShmWork> work;
    Body body;
  };

  void start_thread() {
    if (thread_.joinable()) return;
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error& error) {
      throw CommError(Reason::kSystem, std::string("no thread can be started: ") + error.what());
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (serve_next(lock)) {
    }
  }

  // Runs the oldest call; false if the queue is empty.
  bool serve_next(std::unique_lock<std::mutex>& lock) {
    changed_.wait(lock, [this] { return !is_busy_ && (is_over_ || !tasks_.empty()); });
    if (tasks_.empty()) return false;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_busy_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      task.body(true);
    } catch (...) {
      failure = std::current_exception();
    }
    task.body = nullptr;
    lock.lock();
    is_busy_ = false;
    lock.unlock();
    // Set after is_busy_, so that a thread that waits for this one can run the next collective itself.
    task.work->complete(failure);
    task.work.reset();
    lock.lock();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_busy_ = false;
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace acclimate_comm
