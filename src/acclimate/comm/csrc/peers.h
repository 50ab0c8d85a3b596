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
  std::vector<int> descriptors_;  // pidfds; -1 where the system refuses them
};

// Rises in the child of every fork, so that a group can tell that it is used in one.
unsigned fork_generation();

}  // namespace acclimate_comm
