// Explains a bus error: the process reads a page of a mapped file that was truncated or cannot be read.

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace {

char command[64];
char path[4096];
struct sigaction earlier;
std::atomic_flag is_explaining = ATOMIC_FLAG_INIT;

void say(const char* text) {
  // Nobody is left to tell about a failure.
  if (write(STDERR_FILENO, text, strlen(text)) < 0) {
    return;
  }
}

// Finds the file that is mapped at an address. A signal handler may make system calls, but not use stdio.
bool find_file(uintptr_t address) {
  const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) {
    return false;
  }
  // start-stop permissions offset device inode path
  uintptr_t start = 0, value = 0;
  size_t length = 0;
  bool is_in_addresses = true, is_in_path = false, is_inside = false, is_found = false;
  char buffer[1024];
  ssize_t count = 0;
  while (!is_found && (count = read(maps, buffer, sizeof buffer)) > 0) {
    for (ssize_t i = 0; i < count && !is_found; ++i) {
      const char c = buffer[i];
      if (c == '\n') {
        path[length] = '\0';
        is_found = is_inside && is_in_path;
        value = 0, length = 0, is_in_addresses = true, is_in_path = false;
      } else if (is_in_addresses && c == '-') {
        start = value, value = 0;
      } else if (is_in_addresses && c == ' ') {
        is_inside = start <= address && address < value;
        is_in_addresses = false;
      } else if (is_in_addresses) {
        value = value * 16 + static_cast<uintptr_t>(c <= '9' ? c - '0' : c - 'a' + 10);
      } else if (is_in_path || c == '/') {
        is_in_path = true;
        if (length + 1 < sizeof path) {
          path[length++] = c;
        }
      }
    }
  }
  close(maps);
  return is_found;
}

void explain(int, siginfo_t* info, void*) {
  if (is_explaining.test_and_set()) {
    for (;;) {
      pause();  // another thread explains, and ends the process
    }
  }
  if (!find_file(reinterpret_cast<uintptr_t>(info->si_addr))) {
    sigaction(SIGBUS, &earlier, nullptr);
    is_explaining.clear();
    return;  // the read is repeated, and handled as it was before
  }
  say("\n");
  say(command);
  say(": error: ");
  say(path);
  say(" was cut short, or its disk failed, while the model used its content; load the model again, and "
      "replace "
      "files instead of writing to them\n");
  _exit(2);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void acclimate_explain_bus_errors(const char* name) {
  strncpy(command, name, sizeof command - 1);
  struct sigaction action = {};
  action.sa_sigaction = explain;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &earlier);
}

#else

extern "C" void acclimate_explain_bus_errors(const char*) {}

#endif
