// The operators acclimate::aio_*: engines that move bytes between files and memory. Python opens the files
// and turns what comes back into exceptions; nothing here throws to Python or ends the process.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <csignal>
#include <pthread.h>
#include <system_error>
#include <tuple>

#include "workers.h"

namespace acclimate_aio __attribute__((visibility("hidden"))) {

enum class Way : int64_t { kRing = 0, kLinuxAio = 1, kThreads = 2 };

constexpr unsigned kLargestDepth = 4096;
constexpr unsigned kLargestPool = 64;

class Engine {
 public:
  explicit Engine(int64_t block_bytes) : queue_(block_bytes) {}
  ~Engine() { stop(); }

  Queue& queue() { return queue_; }

  // 0, or the errno with which this way is refused.
  int start(Way way, unsigned depth, bool single_submit, unsigned count) {
    // Plain calls keep one piece on its way per thread.
    if (way == Way::kThreads) count = std::min(kLargestPool, depth * count);
    for (unsigned index = 0; index < count; ++index) {
      if (const int error = add(way, depth, single_submit); error != 0) return error;
    }
    // Signals belong to Python's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      for (auto& worker : workers_) threads_.emplace_back([this, &worker] { worker->run(queue_); });
    } catch (const std::system_error& refusal) {
      // Fewer threads than asked for still do the work.
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

// Engines by number, so that a number that is stale is an answer and not a crash.
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
  // Of two builds of this library in one process, neither knows the other's numbers.
  int64_t last_ = static_cast<int64_t>((reinterpret_cast<uintptr_t>(this) & 0x7fffffffffff) << 16);
};

// Never destroyed: threads may still wait when the process ends. A fork in another thread must not leave
// the mutex locked in the child for ever.
static Engines& engines() {
  static Engines* const all = [] {
    pthread_atfork([] { engines().lock(); }, [] { engines().unlock(); }, [] { engines().unlock(); });
    return new Engines;
  }();
  return *all;
}

static int64_t aio_start(int64_t way, int64_t block_bytes, int64_t depth, bool single_submit, int64_t workers) {
  auto engine = std::make_shared<Engine>(block_bytes);
  const auto clamped = static_cast<unsigned>(std::clamp<int64_t>(depth, 1, kLargestDepth));
  const int error =
      engine->start(static_cast<Way>(way), clamped, single_submit, static_cast<unsigned>(std::max<int64_t>(workers, 1)));
  return error != 0 ? -error : engines().add(std::move(engine));
}

// Direct writes that extend a file go one after the other on most file systems; reserving the room first
// lets them go side by side, and says at once when there is none.
static int reserve_room(const Request& request) {
  struct stat status;
  if (fstat(request.fd, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
  if (request.offset + request.length <= status.st_size) return 0;
  if (fallocate(request.fd, 0, request.offset, request.length) == 0) return 0;
  return errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? errno : 0;
}

static int64_t aio_submit(int64_t id, torch::stable::Tensor buffer, int64_t length, int64_t fd, int64_t direct_fd,
                          int64_t offset, bool writes) {
  const auto engine = engines().find(id);
  if (engine == nullptr) return -EBADF;
  auto request = std::make_unique<Request>();
  request->memory = static_cast<char*>(buffer.data_ptr());
  request->owner = std::make_shared<torch::stable::Tensor>(std::move(buffer));
  request->offset = offset;
  request->length = length;
  request->writes = writes;
  request->fd = static_cast<int>(fd);
  request->direct_fd = static_cast<int>(direct_fd);
  if (direct_fd >= 0) {
    request->alignment = alignment_of(request->direct_fd);
    if (!request->alignment.direct) request->direct_fd = -1;
  }
  if (writes && request->direct_fd >= 0 && length > kPageBytes) {
    if (const int error = reserve_room(*request); error != 0) request->fail(error, offset);
  }
  return engine->queue().submit(std::move(request));
}

static std::tuple<int64_t, int64_t, int64_t> aio_wait(int64_t id, int64_t ticket, int64_t timeout_ms) {
  const auto engine = engines().find(id);
  if (engine == nullptr) return {static_cast<int64_t>(State::kUnknown), EBADF, 0};
  const Outcome outcome = engine->queue().wait(ticket, std::chrono::milliseconds(timeout_ms));
  return {static_cast<int64_t>(outcome.state), outcome.error, outcome.offset};
}

static void aio_stop(int64_t id) {
  if (const auto engine = engines().remove(id)) engine->stop();
}

// In a forked child the workers do not exist: joining them would never end, so what they own is leaked.
static void aio_abandon(int64_t id) {
  if (auto engine = engines().remove(id)) {
    engine->abandon();
    new std::shared_ptr<Engine>(std::move(engine));
  }
}

}  // namespace acclimate_aio

// No key of a device: four of the five take no tensor.
STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("aio_start", TORCH_BOX(&acclimate_aio::aio_start));
  m.impl("aio_submit", TORCH_BOX(&acclimate_aio::aio_submit));
  m.impl("aio_wait", TORCH_BOX(&acclimate_aio::aio_wait));
  m.impl("aio_stop", TORCH_BOX(&acclimate_aio::aio_stop));
  m.impl("aio_abandon", TORCH_BOX(&acclimate_aio::aio_abandon));
}
