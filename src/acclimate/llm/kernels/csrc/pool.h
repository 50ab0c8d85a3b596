// Threads that compute the units of one phase after another.
//
// A unit is claimed by the thread that gets to it. A thread that the system has taken from its processor
// holds back one unit and no more, and where the phase allows it not even that: the leader computes the unit
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace acclimate::inference {

// What the threads do in a phase. It is copied, because a thread may finish it after the phase has ended.
struct Task {
  using Function = void (*)(const void* captured, int64_t unit, int thread);

  static constexpr size_t most_captured = 512;
  alignas(16) std::byte captured[most_captured];
  Function compute;
  Function commit;  // null: units are not computed twice
};

// The caller, as the leader, and the threads of the process's pool until the object is destroyed. There are
// fewer than asked for if no more can be started, and only the caller if another thread of the process leads
// them: so calls never wait for each other, not even nested ones. After a fork the child starts threads of
// its own. A unit that throws ends the process.
class Team {
 public:
  explicit Team(int threads);
  // Returns when no thread computes any more.
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The leader is thread 0.
  int threads() const { return threads_; }

  // The nanoseconds that its threads have slept since it began, as they had nothing to do.
  int64_t slept() const;

  // Calls compute(unit, thread) for each unit below `units`, and returns when all are done.
  template <class Compute>
  void share(int64_t units, Compute compute) {
    if (threads_ == 1 || units == 1) {
      for (int64_t unit = 0; unit < units; ++unit) {
        compute(unit, 0);
      }
      return;
    }
    Task task{};
    keep(task, compute);
    task.compute = [](const void* captured, int64_t unit, int thread) {
      (*static_cast<const Compute*>(captured))(unit, thread);
    };
    task.commit = nullptr;
    run(units, task);
  }

  // The same for units that two threads may compute: compute() writes memory of its thread only, and
  // commit(), called once for each unit and in the thread that has computed it, writes what others read. The
  // leader computes a unit again if its thread is late, and goes on. So compute() may still run when share()
  // has returned, until the team ends: both functions capture values, their pointers are valid as long as the
  // team, and what compute() reads may change under it. It must then end without a crash; its result is
  // dropped.
  template <class Compute, class Commit>
  void share(int64_t units, Compute compute, Commit commit) {
    if (threads_ == 1 || units == 1) {
      for (int64_t unit = 0; unit < units; ++unit) {
        compute(unit, 0);
        commit(unit, 0);
      }
      return;
    }
    struct Both {
      Compute compute;
      Commit commit;
    };
    Task task{};
    keep(task, Both{compute, commit});
    task.compute = [](const void* captured, int64_t unit, int thread) {
      static_cast<const Both*>(captured)->compute(unit, thread);
    };
    task.commit = [](const void* captured, int64_t unit, int thread) {
      static_cast<const Both*>(captured)->commit(unit, thread);
    };
    run(units, task);
  }

 private:
  template <class Functions>
  static void keep(Task& task, const Functions& functions) {
    static_assert(std::is_trivially_copyable_v<Functions> && sizeof(Functions) <= Task::most_captured);
    std::memcpy(task.captured, &functions, sizeof(functions));
  }

  void run(int64_t units, const Task& task);

  class Pool* pool_;  // null: the leader is alone
  int threads_;
};

}  // namespace acclimate::inference
