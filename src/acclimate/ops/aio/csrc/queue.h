// Requests in order of submission, divided into pieces that workers take and complete.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "request.h"

namespace acclimate_aio {

enum class State : int64_t { kUnknown = -1, kPending = 0, kDone = 1 };

struct Outcome {
  State state = State::kUnknown;
  int error = 0;
  int64_t offset = 0;  // file offset of the first byte that was not moved
};

class Queue {
 public:
  explicit Queue(int64_t block_bytes) : block_bytes_(std::min(block_bytes, kLargestBlockBytes)) {}

  // Returns false and submits nothing if a request already has this ticket.
  bool submit(int64_t ticket, std::unique_ptr<Request> request) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [place, is_new] = requests_.emplace(ticket, std::move(request));
    if (is_new && !place->second->is_done()) {
      waiting_.push_back(place->second.get());
      work_.notify_all();
    }
    return is_new;
  }

  // Takes a piece for the kernel. Without `may_block`, false means that there is none now; with it, that the
  // queue was stopped and is empty.
  bool take(Piece& piece, bool may_block) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
          while (!waiting_.empty() && waiting_.front()->cursor == waiting_.front()->length)
            waiting_.pop_front();
          if (!waiting_.empty()) break;
          if (!may_block || stopped_) return false;
          work_.wait(lock);
        }
        cut(*waiting_.front(), block_bytes_, piece);
      }
      if (prepare(piece)) return true;
      complete(piece, -ENOMEM);
    }
  }

  // Completes a piece with the kernel's result.
  void complete(Piece& piece, int64_t answer) {
    int64_t moved;
    const int error = settle(piece, answer, moved);
    std::lock_guard<std::mutex> lock(mutex_);
    Request& request = *piece.request;
    if (error != 0) request.fail(error, piece.file_offset() + moved);
    --request.outstanding;
    if (request.is_done()) {
      // A failed request may still be queued, and is removed once it has been collected.
      if (error != 0 || request.error != 0) {
        waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), &request), waiting_.end());
      } else if (!waiting_.empty() && waiting_.front() == &request) {
        waiting_.pop_front();
      }
      done_.notify_all();
    }
  }

  // Waits for one request. The outcome is kept until forget(), so that a caller interrupted by a signal
  // before it has stored the outcome can call this again.
  Outcome wait(int64_t ticket, std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = requests_.end();
    // Looked up each time, since another thread may have forgotten it meanwhile.
    const auto is_settled = [&] {
      found = requests_.find(ticket);
      return found == requests_.end() || found->second->is_done();
    };
    if (!done_.wait_for(lock, timeout, is_settled)) return {State::kPending, 0, 0};
    if (found == requests_.end()) return {};
    return {State::kDone, found->second->error, found->second->error_offset};
  }

  // Frees a completed request; a pending one stays.
  void forget(int64_t ticket) {
    std::unique_ptr<Request> collected;  // freed after the lock, since freeing memory may be slow
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(ticket);
    if (found == requests_.end() || !found->second->is_done()) return;
    collected = std::move(found->second);
    requests_.erase(found);
  }

  // Lets the workers finish all submitted requests and then exit.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    work_.notify_all();
  }

 private:
  const int64_t block_bytes_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Request*> waiting_;
  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
  bool stopped_ = false;
};

// One method of having the kernel move pieces.
class Worker {
 public:
  virtual ~Worker() = default;
  // Takes and completes pieces until the queue is stopped and empty. Runs in its own thread.
  virtual void run(Queue& queue) = 0;
  // In a forked child: drops the resources that the kernel shares with its parent.
  virtual void abandon() {}
};

}  // namespace acclimate_aio
