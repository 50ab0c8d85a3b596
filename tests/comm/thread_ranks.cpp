// Ranks as threads of one process over one piece of memory, so that ThreadSanitizer sees all of their
// accesses.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include <unistd.h>

#include "collectives.h"
#include "messages.h"

using namespace acclimate_comm;

namespace {

constexpr size_t kSlot = 16 * 1024;
constexpr size_t kRing = 4096;
constexpr std::chrono::milliseconds kGroupTimeout{0};  // that of the group
std::atomic<int> g_wrong{0};

void expect(bool is_right, const char* what, int rank) {
  if (!is_right && g_wrong.fetch_add(1) < 10) fprintf(stderr, "rank %d: wrong %s\n", rank, what);
}

Call call(Kind kind, size_t elements, int root = 0, Op op = Op::kNone) {
  return {static_cast<uint8_t>(kind),
          static_cast<uint8_t>(op),
          static_cast<uint8_t>(Dtype::kFloat32),
          0,
          static_cast<uint32_t>(root),
          elements};
}

void run_collectives(Group& group, int rounds) {
  const int rank = group.rank(), size = group.size();
  const Reduce sum = find_reduce(Dtype::kFloat32, Op::kSum);
  for (int round = 0; round < rounds; round++) {
    // From one element, which travels on the cache line of its stamp, to several slots.
    // Every 20th is long enough to try both routes.
    const size_t count = round % 20 == 0 ? 40000 : (round * 7919u) % 9000 + 1;
    std::vector<float> own(count, static_cast<float>(rank + round)), all(count * size, -1.0f);
    Targets parts;
    Sources sources;
    std::vector<size_t> bytes(size, count * 4);
    for (int other = 0; other < size; other++) parts.push_back(all.data() + other * count);
    group.begin(call(Kind::kAllGather, count), kGroupTimeout);
    all_gather(group, own.data(), parts, count * 4);
    for (int other = 0; other < size; other++) {
      expect(all[other * count + count - 1] == static_cast<float>(other + round), "all_gather", rank);
      sources.push_back(all.data() + other * count);
    }
    std::vector<float> scattered(count);
    group.begin(call(Kind::kReduceScatter, count, 0, Op::kSum), kGroupTimeout);
    reduce_scatter(group, sources, scattered.data(), {count, 4}, sum);
    expect(scattered[0] == static_cast<float>(size * (rank + round)), "reduce_scatter", rank);
    group.begin(call(Kind::kAllReduce, count, 0, Op::kSum), kGroupTimeout);
    all_reduce(group, own.data(), own.data(), {count, 4}, sum);
    expect(own[count / 2] == static_cast<float>(size * round + size * (size - 1) / 2), "all_reduce", rank);
    const int root = round % size;
    std::vector<float> sent(count, static_cast<float>(rank));
    group.begin(call(Kind::kBroadcast, count, root), kGroupTimeout);
    broadcast(group, sent.data(), count * 4, root);
    expect(sent[count - 1] == static_cast<float>(root), "broadcast", rank);
    std::vector<float> exchanged(count * size), mine(count * size, static_cast<float>(rank));
    Targets to;
    Sources from;
    for (int other = 0; other < size; other++) {
      to.push_back(exchanged.data() + other * count);
      from.push_back(mine.data() + other * count);
    }
    group.begin(call(Kind::kAllToAll, 0), kGroupTimeout);
    all_to_all(group, from, bytes, to, bytes, 4);
    expect(exchanged[count * size - 1] == static_cast<float>(size - 1), "all_to_all", rank);
    group.begin(call(Kind::kBarrier, 0), kGroupTimeout);
    barrier(group);
    // Ranks that differ all raise, and go on.
    if (round % 10 == 0) {
      bool has_raised = false;
      try {
        group.begin(call(Kind::kBroadcast, rank == 0 ? 1 : 2), kGroupTimeout);
        broadcast(group, sent.data(), 4, 0);
      } catch (const CommError& error) {
        has_raised = error.reason == Reason::kMismatch;
      }
      expect(has_raised, "mismatch", rank);
    }
  }
}

void run_messages(Group& group, int rounds) {
  Messages messages(group);
  const int after = (group.rank() + 1) % group.size();
  const int before = (group.rank() + group.size() - 1) % group.size();
  for (int round = 0; round < rounds; round++) {
    const size_t count = (round * 1237u) % 5000 + 1;
    std::vector<float> sent(count, static_cast<float>(round)), got(count);
    std::atomic<int> done{0};
    const auto tell = [&](std::exception_ptr failure, int) {
      expect(!failure, "message", group.rank());
      done.fetch_add(1);
    };
    messages.send(sent.data(), count * 4, call(Kind::kSend, count, 5), after, tell);
    messages.receive(got.data(), count * 4, call(Kind::kReceive, count, 5), before, tell);
    while (done.load() != 2) std::this_thread::yield();
    expect(got[count - 1] == static_cast<float>(round), "content of a message", group.rank());
  }
}

}  // namespace

int main(int, char** arguments) {
  const int size = atoi(arguments[1]), rounds = atoi(arguments[2]);
  const bool has_spare_cores = atoi(arguments[3]) != 0;
  const size_t bytes = Layout::bytes(size, kSlot, kRing);
  auto* const memory = static_cast<unsigned char*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  memset(memory, 0, bytes);
  const std::vector<pid_t> pids(size, getpid());
  std::vector<std::thread> threads;
  std::atomic<int> finished{0};
  for (int rank = 0; rank < size; rank++) {
    threads.emplace_back([&, rank] {
      Group group(memory, rank, pids, {kSlot, kRing}, std::chrono::seconds(120), has_spare_cores);
      run_collectives(group, rounds);
      run_messages(group, rounds);
      finished.fetch_add(1);
      while (finished.load() != size) std::this_thread::yield();
    });
  }
  for (std::thread& thread : threads) thread.join();
  free(memory);
  printf("%d wrong\n", g_wrong.load());
  return g_wrong.load() != 0;
}
