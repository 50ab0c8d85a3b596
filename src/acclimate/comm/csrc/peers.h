// The processes of a group's ranks: which of them still run.
#pragma once

#include <sys/types.h>

#include <vector>

namespace acclimate_comm {

class Peers {
 public:
  explicit Peers(const std::vector<pid_t>& pids);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  bool runs(int rank) const;
  pid_t pid(int rank) const { return pids_[rank]; }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> descriptors_;  // pidfds; -1 if the system has none
};

// A number that each fork increments in the child, so that a group can detect that it is used after a fork.
unsigned fork_generation();

}  // namespace acclimate_comm
