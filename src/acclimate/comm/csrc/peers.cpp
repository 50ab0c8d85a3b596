#include "peers.h"

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>

namespace acclimate_comm {
namespace {

constexpr int kGone = -2;

int open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (descriptor >= 0) return descriptor;
  return errno == ESRCH ? kGone : -1;
#else
  return -1;
#endif
}

// kill(pid, 0) succeeds for a zombie, so this reads the process state.
bool is_zombie(pid_t pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  FILE* file = fopen(path, "re");
  if (file == nullptr) return false;
  char text[512];
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = '\0';
  // The state follows the name, which is in parentheses and may contain parentheses.
  const char* end = nullptr;
  for (const char* at = text; *at != '\0'; at++) {
    if (*at == ')') end = at;
  }
  return end != nullptr && end[1] == ' ' && (end[2] == 'Z' || end[2] == 'X');
}

std::atomic<unsigned> g_forks{0};
[[maybe_unused]] const int g_registered =
    pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

unsigned fork_generation() { return g_forks.load(std::memory_order_relaxed); }

Peers::Peers(const std::vector<pid_t>& pids) : pids_(pids) {
  for (const pid_t pid : pids) descriptors_.push_back(open_pidfd(pid));
}

Peers::~Peers() {
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) close(descriptor);
  }
}

bool Peers::runs(int rank) const {
  const int descriptor = descriptors_[rank];
  if (descriptor == kGone) return false;
  if (descriptor >= 0) {
    pollfd ended{descriptor, POLLIN, 0};
    return poll(&ended, 1, 0) <= 0;
  }
  return kill(pids_[rank], 0) == 0 ? !is_zombie(pids_[rank]) : errno != ESRCH;
}

}  // namespace acclimate_comm
