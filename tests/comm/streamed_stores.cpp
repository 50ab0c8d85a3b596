// Two processes on a core each: one copies a pattern around the caches and publishes it by a plain store, the
// other counts the words of an earlier pattern that it still reads.
#include <emmintrin.h>
#ifdef WITHOUT_FENCE
#define _mm_sfence() asm volatile("" ::: "memory")
#endif

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "copies.h"

namespace {

struct Shared {
  alignas(64) std::atomic<uint64_t> published;
  alignas(64) std::atomic<uint64_t> read;
  alignas(4096) uint64_t words[8192];
};

void run_on(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

void wait_for(const std::atomic<uint64_t>& counter, uint64_t value) {
  for (int spins = 0; counter.load(std::memory_order_acquire) < value; spins++) {
    if (spins % 1000 == 999) sched_yield();
  }
}

void write_rounds(Shared& shared, uint64_t rounds) {
  std::vector<uint64_t> pattern(std::size(shared.words));
  for (uint64_t round = 1; round <= rounds; round++) {
    for (uint64_t& word : pattern) word = round;
    acclimate_comm::stream(shared.words, pattern.data(), sizeof shared.words);
    shared.published.store(round, std::memory_order_release);
    wait_for(shared.read, round);
  }
}

uint64_t count_stale(Shared& shared, uint64_t rounds) {
  uint64_t stale = 0;
  for (uint64_t round = 1; round <= rounds; round++) {
    wait_for(shared.published, round);
    const volatile uint64_t* const words = shared.words;
    // Those written last first.
    for (size_t i = std::size(shared.words); i-- > 0;) stale += words[i] != round;
    shared.read.store(round, std::memory_order_release);
  }
  return stale;
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t rounds = strtoull(arguments[1], nullptr, 10);
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Shared& shared = *static_cast<Shared*>(memory);
  const pid_t writer = fork();
  if (writer == 0) {
    run_on(atoi(arguments[2]));
    write_rounds(shared, rounds);
    _exit(0);
  }
  run_on(atoi(arguments[3]));
  printf("%llu\n", static_cast<unsigned long long>(count_stale(shared, rounds)));
  waitpid(writer, nullptr, 0);
}
