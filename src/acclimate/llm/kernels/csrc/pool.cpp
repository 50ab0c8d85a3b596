#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../../../ops/csrc/spinning.h"

namespace acclimate::inference {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

namespace {

// A thread that waits longer sleeps: others may need the processor, also the thread that it waits for. Being
// woken takes about as long.
constexpr microseconds spins_for{50};
// A unit is late after twice the time that the leader takes for one, and not before this.
constexpr microseconds least_patience{10};
// How often threads are moved away from the leader's processor.
constexpr microseconds between_moves{2000};
// A leader that waits longer than its helpers save it works alone for a while, twice as long each time.
constexpr microseconds window{20000}, first_pause{20000}, longest_pause{320000};

// Spins until condition() holds, for a limited time; returns whether it holds.
template <class Condition>
bool spin(Clock::duration time, const Condition& condition) {
  const auto deadline = Clock::now() + time;
  for (int count = 1; !condition(); ++count) {
    acclimate::relax();
    if (count % 16 == 0 && Clock::now() > deadline) {
      return condition();
    }
  }
  return true;
}

// Where this thread runs now; -1 if unknown.
int own_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

int64_t nanoseconds_now() { return nanoseconds(Clock::now().time_since_epoch()).count(); }

// No time.
constexpr int64_t awake = std::numeric_limits<int64_t>::max();

// A phase and the numbers of units of its two halves that nobody has claimed, in one word. A thread claims
// the units of one half in their order, and those of the other when there are none: so two threads read
// weights one after the other, each in its own place. With one list of units they would alternate, and
// reading from a new place each time is a tenth slower.
constexpr int unit_bits = 20;
constexpr uint64_t unit_mask = (uint64_t{1} << unit_bits) - 1;
constexpr int64_t most_units = unit_mask;

constexpr uint64_t one_of(int half) { return uint64_t{1} << half * unit_bits; }
int64_t unclaimed(uint64_t ticket, int half) {
  return static_cast<int64_t>(ticket >> half * unit_bits & unit_mask);
}
bool has_units(uint64_t ticket) { return unclaimed(ticket, 0) + unclaimed(ticket, 1) > 0; }
// The half of which a thread claims the next unit.
int half_for(int number, uint64_t ticket) {
  const int own = number % 2;
  return unclaimed(ticket, own) > 0 ? own : 1 - own;
}

// What a helper holds is nothing, a unit of a phase, or one of these two, which have phase 0.
constexpr uint64_t nothing = 0, committing = 1, taken_away = 2;

}  // namespace

class Pool {
 public:
  // Returns the number of threads that there are, with the caller; 1: it leads nobody.
  int begin(int threads) {
    if (threads == 1 || !mutex_.try_lock()) {
      return 1;
    }
    threads = start(threads);
    if (threads == 1) {
      mutex_.unlock();
      return 1;
    }
    began_.store(nanoseconds_now(), std::memory_order_relaxed);
    slept_.store(0, std::memory_order_relaxed);
    return threads;
  }

  // How long threads of the team have slept since begin().
  int64_t slept(int threads) const {
    int64_t slept = slept_.load(std::memory_order_relaxed);
    for (int number = 1; number < threads; ++number) {
      const int64_t since = helpers_[number - 1].sleeps_since.load(std::memory_order_relaxed);
      slept += since == awake ? 0 : slept_since(since);
    }
    return slept;
  }

  void end() {
    // Helpers whose units were computed again still read memory of the caller.
    const auto none_is_late = [&] { return late_.load(std::memory_order_acquire) == 0; };
    if (!spin(spins_for, none_is_late)) {
      for (int32_t late; (late = late_.load(std::memory_order_acquire)) != 0;) {
        late_.wait(late, std::memory_order_acquire);
      }
    }
    mutex_.unlock();
  }

  void run(int64_t units, const Task& task, int threads) {
    for (int64_t first = 0; first < units; first += most_units) {
      run_some(first, std::min(units - first, most_units), task, threads);
    }
  }

 private:
  // One thread beside the leader.
  struct alignas(64) Helper {
    std::atomic<uint64_t> held{nothing};  // the unit that it computes, and its phase
    std::atomic<int> processor{-1};  // where it last began a unit
    alignas(64) std::atomic<int32_t> sleeps{0};
    std::atomic<int64_t> sleeps_since{awake};
    std::atomic<long> id{0};  // the kernel's
  };

  // Starts helpers; returns the number of threads that there are, with the caller.
  int start(int threads) {
    while (static_cast<int>(helpers_.size()) < threads - 1) {
      Helper& helper = helpers_.emplace_back();
      const int number = static_cast<int>(helpers_.size());
      // Signals are for the threads that the program knows.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        std::thread([this, number, &helper] { serve(number, helper); }).detach();
      } catch (const std::system_error&) {
        helpers_.pop_back();
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (static_cast<int>(helpers_.size()) < number) {
        return number;
      }
    }
    return threads;
  }

  // -- the leader ---------------------------------------------------------------------------------

  void run_some(int64_t first, int64_t units, const Task& task, int threads) noexcept {
    const auto start = Clock::now();
    // All units of the phase before are done, so that no helper reads these.
    task_ = task;
    first_ = first;
    units_ = units;
    done_.store(0, std::memory_order_relaxed);
    helping_.store(start < alone_until_ ? 0 : threads - 1, std::memory_order_relaxed);
    const uint64_t phase = ++phase_;
    const uint64_t halves = static_cast<uint64_t>(units - units / 2) | static_cast<uint64_t>(units / 2)
                                                                           << unit_bits;
    ticket_.store(phase << 2 * unit_bits | halves, std::memory_order_seq_cst);
    if (start >= alone_until_) {
      wake(static_cast<int>(std::min<int64_t>(threads - 1, units - 1)));
      spread(threads);
    }
    int32_t own = 0;
    uint64_t ticket = ticket_.load(std::memory_order_relaxed);
    while (has_units(ticket)) {
      const int half = half_for(0, ticket);
      if (ticket_.compare_exchange_weak(ticket, ticket - one_of(half), std::memory_order_relaxed)) {
        compute(claimed(ticket, half));
        ++own;
        ticket = ticket_.load(std::memory_order_relaxed);
      }
    }
    const auto all = static_cast<int32_t>(units);
    const auto now = Clock::now();
    const nanoseconds for_one = own > 0 ? (now - start) / own : now - start;
    nanoseconds waited{0};
    if (done_.fetch_add(own, std::memory_order_acq_rel) + own != all) {
      await(phase, all, std::max<nanoseconds>(2 * for_one, least_patience), threads);
      waited = Clock::now() - now;
    }
    judge(now + waited, now + waited - start, (all - own) * for_one, waited);
  }

  // Decides whether the leader goes on with its helpers.
  void judge(Clock::time_point now, nanoseconds took, nanoseconds saved, nanoseconds waited) {
    if (now < alone_until_) {
      return;
    }
    took_ += took;
    gain_ += saved - waited;
    if (took_ < window) {
      return;
    }
    if (gain_ < nanoseconds(0)) {
      alone_until_ = now + pause_;
      pause_ = std::min<nanoseconds>(2 * pause_, longest_pause);
    } else {
      pause_ = first_pause;
    }
    took_ = gain_ = nanoseconds(0);
  }

  // The unit that was claimed of a half, which had a ticket before.
  int64_t claimed(uint64_t ticket, int half) const {
    const int64_t end = half == 0 ? units_ - units_ / 2 : units_;
    return first_ + end - unclaimed(ticket, half);
  }

  void compute(int64_t unit) {
    task_.compute(task_.captured, unit, 0);
    if (task_.commit != nullptr) {
      task_.commit(task_.captured, unit, 0);
    }
  }

  // Waits for the helpers' units, or computes them again.
  void await(uint64_t phase, int32_t units, nanoseconds patience, int threads) {
    const auto all_are_done = [&] { return done_.load(std::memory_order_acquire) == units; };
    const bool may_take = task_.commit != nullptr;
    if (spin(may_take ? patience : nanoseconds(spins_for), all_are_done)) {
      return;
    }
    if (may_take) {
      for (int number = 1; number < threads; ++number) {
        take_from(helpers_[number - 1], phase);
      }
      // A helper may have lost its processor while it claimed a unit or committed one.
      if (spin(spins_for, all_are_done)) {
        return;
      }
    }
    const int64_t start = nanoseconds_now();
    for (int32_t done; (done = done_.load(std::memory_order_acquire)) != units;) {
      done_.wait(done, std::memory_order_acquire);
    }
    slept_.fetch_add(slept_since(start), std::memory_order_relaxed);
  }

  // How long a thread slept, of the time since begin().
  int64_t slept_since(int64_t start) const {
    return std::max<int64_t>(nanoseconds_now() - std::max(start, began_.load(std::memory_order_relaxed)), 0);
  }

  // Computes the unit of a helper that is late.
  void take_from(Helper& helper, uint64_t phase) {
    uint64_t held = helper.held.load(std::memory_order_acquire);
    if (held >> unit_bits != phase) {
      return;
    }
    late_.fetch_add(1, std::memory_order_relaxed);
    if (!helper.held.compare_exchange_strong(held, taken_away, std::memory_order_acq_rel)) {
      late_.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    compute(first_ + static_cast<int64_t>(held & unit_mask));
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  // Wakes helpers that sleep; `most` are needed.
  void wake(int most) {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) {
      return;
    }
    for (int number = 1; number <= most; ++number) {
      Helper& helper = helpers_[number - 1];
      if (helper.sleeps.load(std::memory_order_relaxed) != 0 && helper.sleeps.exchange(0) != 0) {
        sleepers_.fetch_sub(1);
        helper.sleeps.notify_one();
      }
    }
  }

  // -- a helper -----------------------------------------------------------------------------------

  void serve(int number, Helper& self) {
#if defined(__linux__)
    self.id.store(syscall(SYS_gettid), std::memory_order_release);
#endif
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      if (!is_for(number, ticket)) {
        rest(number, self);
        continue;
      }
      const int half = half_for(number, ticket);
      if (ticket_.compare_exchange_weak(ticket, ticket - one_of(half), std::memory_order_acq_rel)) {
        help(number, self, claimed(ticket, half));
      }
    }
  }

  // The number of helpers is read after the ticket: if it is that of a later phase, claiming a unit fails.
  bool is_for(int number, uint64_t ticket) const {
    return has_units(ticket) && number <= helping_.load(std::memory_order_acquire);
  }

  // Computes the unit that it has claimed. The phase lasts until the unit is done or taken away.
  void help(int number, Helper& self, int64_t unit) noexcept {
    const auto units = static_cast<int32_t>(units_);
    const Task task = task_;
    self.processor.store(own_processor(), std::memory_order_relaxed);
    if (task.commit == nullptr) {
      task.compute(task.captured, unit, number);
    } else {
      uint64_t held = phase_ << unit_bits | static_cast<uint64_t>(unit - first_);
      self.held.store(held, std::memory_order_release);
      task.compute(task.captured, unit, number);
      if (!self.held.compare_exchange_strong(held, committing, std::memory_order_acq_rel)) {
        self.held.store(nothing, std::memory_order_relaxed);
        if (late_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
          late_.notify_one();
        }
        return;
      }
      task.commit(task.captured, unit, number);
      self.held.store(nothing, std::memory_order_relaxed);
    }
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == units) {
      done_.notify_one();
    }
  }

  // Waits for units.
  void rest(int number, Helper& self) {
    const auto has_work = [&] { return is_for(number, ticket_.load(std::memory_order_seq_cst)); };
    if (spin(spins_for, has_work)) {
      return;
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    self.sleeps.store(1, std::memory_order_seq_cst);
    if (has_work()) {
      if (self.sleeps.exchange(0) != 0) {
        sleepers_.fetch_sub(1);
      }
      return;
    }
    const int64_t start = nanoseconds_now();
    self.sleeps_since.store(start, std::memory_order_relaxed);
    while (self.sleeps.load(std::memory_order_acquire) != 0) {
      self.sleeps.wait(1, std::memory_order_acquire);
    }
    self.sleeps_since.store(awake, std::memory_order_relaxed);
    slept_.fetch_add(slept_since(start), std::memory_order_relaxed);
  }

  // -- the processors of the threads ----------------------------------------------------------------

  // Moves helpers from the leader's processor to others that the leader may use. The system leaves two
  // threads of a team on one processor if another program keeps the rest busy, and they then are as fast as
  // one.
  void spread(int threads) {
#if defined(__linux__)
    const int own = own_processor();
    const auto is_here = [&](int number) {
      return helpers_[number - 1].processor.load(std::memory_order_relaxed) == own;
    };
    int number = 1;
    while (number < threads && !is_here(number)) {
      ++number;
    }
    const auto now = Clock::now();
    if (number == threads || now < next_move_) {
      return;
    }
    next_move_ = now + between_moves;
    for (; number < threads; ++number) {
      Helper& helper = helpers_[number - 1];
      const long id = helper.id.load(std::memory_order_acquire);
      if (is_here(number) && id != 0) {
        move_away(static_cast<pid_t>(id), own);
        helper.processor.store(-1, std::memory_order_relaxed);
      }
    }
#endif
  }

  std::mutex mutex_;
  std::deque<Helper> helpers_;
  // Written by the leader between phases.
  uint64_t phase_ = 0;
  Task task_{};
  int64_t first_ = 0, units_ = 0;
  Clock::time_point next_move_{}, alone_until_{};
  nanoseconds took_{0}, gain_{0}, pause_{first_pause};
  std::atomic<int64_t> began_{0}, slept_{0};  // nanoseconds
  std::atomic<int> helping_{0};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<int32_t> late_{0};  // helpers whose units were taken away
  alignas(64) std::atomic<int> sleepers_{0};
};

namespace {

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

Team::Team(int threads) : pool_(nullptr), threads_(1) {
  if (threads > 1) {
    Pool& shared = pool();
    threads_ = shared.begin(threads);
    pool_ = threads_ > 1 ? &shared : nullptr;
  }
}

Team::~Team() {
  if (pool_ != nullptr) {
    pool_->end();
  }
}

int64_t Team::slept() const { return pool_ == nullptr ? 0 : pool_->slept(threads_); }

void Team::run(int64_t units, const Task& task) { pool_->run(units, task, threads_); }

}  // namespace acclimate::inference
