#include "group.h"

#include <linux/futex.h>
#include <linux/mempolicy.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../ops/csrc/spinning.h"

namespace acclimate_comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A rank that died wakes no one, so sleeping ranks check this often whether their peers still run.
constexpr milliseconds kSlice{100};

// A yield that takes this long gave the processor to other work, not to a rank that publishes and waits
// again.
constexpr microseconds kLongYield{200};
// For this long after such a yield, waits do not yield: the scheduler lets a thread that sleeps run again
// soon, but not one that yields.
constexpr milliseconds kCrowdLasts{100};

// How often a rank moves away from the processor of one that it waits for.
constexpr milliseconds kBetweenMoves{2};

const char* const kUnusable = " This group cannot be used any more: destroy it.";

// Moves whole pages to where this thread's memory policy puts new memory: the nodes that it is bound to, else
// the node of its core. No other process may have touched them, because the kernel does not move pages that
// several processes map. Does nothing if the kernel refuses, as in containers without CAP_SYS_NICE.
void place_near_this_thread(unsigned char* begin, size_t bytes) {
  constexpr size_t kMostNodes = 1024, kWordBits = 8 * sizeof(unsigned long);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin + bytes) / page * page;
  if (first >= end) return;
  int policy = MPOL_DEFAULT;
  unsigned long nodes[kMostNodes / kWordBits] = {};
  if (syscall(SYS_get_mempolicy, &policy, nodes, kMostNodes, nullptr, 0) != 0) return;
  if (policy == MPOL_DEFAULT) policy = MPOL_LOCAL;
  // mbind moves only pages that this process maps, and a page is mapped when it is touched.
  for (uintptr_t at = first; at < end; at += page) (void)*reinterpret_cast<volatile unsigned char*>(at);
  // The kernel subtracts one from the number of bits.
  syscall(SYS_mbind, first, end - first, policy, nodes, kMostNodes + 1, MPOL_MF_MOVE);
}

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

std::string time_of(milliseconds time) {
  const auto count = time.count();
  return count % 1000 == 0 ? std::to_string(count / 1000) + " s" : std::to_string(count) + " ms";
}

std::string different_calls(const std::string& rank, const Call& call, const std::string& other,
                            const Call& others) {
  return "Rank " + rank + " called " + describe(call) + ", but rank " + other + " called " +
         describe(others) +
         ". All ranks of a group have to call the same collectives in the same order, with equal sizes and "
         "dtypes.";
}

void futex_wait(const void* word, uint32_t value, milliseconds longest) {
  const timespec limit{static_cast<time_t>(longest.count() / 1000),
                       static_cast<long>(longest.count() % 1000 * 1000000)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

Group::Group(int descriptor, int rank, const std::vector<pid_t>& pids, Geometry geometry,
             milliseconds timeout, bool has_spare_cores)
    : Group(map(descriptor,
                Layout::bytes(static_cast<int>(pids.size()), geometry.slot_bytes, geometry.ring_bytes)),
            rank, pids, geometry, timeout, has_spare_cores) {
  mapped_bytes_ = Layout::bytes(size_, geometry.slot_bytes, geometry.ring_bytes);
  // Rank 0 allocated all of it, on its NUMA node. A rank writes its own part, and others read that part only
  // after all ranks have opened the group.
  place_near_this_thread(layout_.slot(rank, 0), 4 * geometry.slot_bytes);
  place_near_this_thread(reinterpret_cast<unsigned char*>(&layout_.ring(rank, 0)),
                         pids.size() * (sizeof(Ring) + geometry.ring_bytes));
}

Group::Group(unsigned char* memory, int rank, const std::vector<pid_t>& pids, Geometry geometry,
             milliseconds timeout, bool has_spare_cores)
    : memory_(memory),
      rank_(rank),
      size_(static_cast<int>(pids.size())),
      layout_(memory, size_, geometry.slot_bytes, geometry.ring_bytes),
      peers_(pids),
      timeout_(bounded(timeout)),
      has_spare_cores_(has_spare_cores),
      // If ranks share cores, the awaited rank may need this core, so yield at once. If not, a yield can
      // cost a time slice to other work on the core, so spin for about 0.5 ms first.
      foreground_(has_spare_cores ? Patience{20000, 8, microseconds(500)}
                                  : Patience{1, 1, microseconds(3000)}),
      // A spinning background thread would take the core from the computation that it should overlap with.
      background_(has_spare_cores ? Patience{300, 8, microseconds(50)} : Patience{1, 1, microseconds(100)}),
      forks_(fork_generation()),
      process_(getpid()),
      patience_(&foreground_) {}

unsigned char* Group::map(int descriptor, size_t bytes) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    throw CommError(Reason::kSystem, "the shared memory has " + std::to_string(status.st_size) +
                                         " bytes, but needs " + std::to_string(bytes));
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    throw CommError(Reason::kSystem, std::string("the shared memory cannot be mapped: ") + strerror(errno));
  }
  // A forked child would keep the memory alive, and must not take part.
  madvise(memory, bytes, MADV_DONTFORK);
  return static_cast<unsigned char*>(memory);
}

Group::~Group() {
  if (was_forked()) return;  // nothing is mapped here
  leave();
  if (mapped_bytes_ != 0) munmap(memory_, mapped_bytes_);
}

void Group::begin(const Call& call, milliseconds timeout, bool in_background) {
  if (was_forked()) {
    throw CommError(Reason::kForked,
                    "this process is a fork of process " + std::to_string(process_) +
                        ", which had already created the group. Create groups after the fork, or start "
                        "ranks with spawn or a launcher.");
  }
  throw_if_failed();
  call_ = call;
  call_timeout_ = timeout.count() > 0 ? timeout : timeout_;
  patience_ = in_background ? &background_ : &foreground_;
  waited_since_ = Clock::time_point{};
}

void Group::refuse(Call call, milliseconds timeout, bool in_background) {
  call.refused = 1;
  begin(call, timeout, in_background);
  try {
    exchange();
  } catch (const CommError& error) {
    if (error.reason != Reason::kMismatch)
      throw;  // for a mismatch, the caller raises the error about its arguments
  }
}

void Group::exchange() {
  const uint64_t round = ++round_;
  const int parity = static_cast<int>(round & 1);
  Post& own = layout_.lines(rank_).posts[parity];
  own.call = call_;
  publish_processor();
  // Sequentially consistent with the load below: a peer that falls asleep now is woken, or sees the stamp.
  own.stamp.store(round, std::memory_order_seq_cst);
  if (layout_.lines(rank_).sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&own.stamp);
  route_.published();
  bool is_equal = true;
  for (int peer = 0; peer < size_; peer++) {
    Post& post = layout_.lines(peer).posts[parity];
    if (peer != rank_) await(peer, post.stamp);
    is_equal = is_equal && post.call == call_;
  }
  route_.resumed();
  if (!is_equal || call_.refused) throw_mismatch();
}

void Group::publish_processor() {
  auto& published = layout_.lines(rank_).processor;
  const int here = sched_getcpu() + 1;
  if (published.load(std::memory_order_relaxed) != here) published.store(here, std::memory_order_relaxed);
}

// Whether a rank cannot run while this one spins. It may have moved since it last published.
bool Group::shares_processor_with(int rank) const {
  const int here = layout_.lines(rank_).processor.load(std::memory_order_relaxed);
  return here != 0 && layout_.lines(rank).processor.load(std::memory_order_relaxed) == here;
}

// Moves this rank to another processor, now and then; returns whether it did.
bool Group::move_from_others() {
  const auto now = Clock::now();
  if (now < next_move_) return false;
  next_move_ = now + kBetweenMoves;
  const int here = sched_getcpu();
  acclimate::move_away(0, here);
  publish_processor();
  return sched_getcpu() != here;
}

void Group::await(int rank, std::atomic<uint64_t>& stamp) {
  if (stamp.load(std::memory_order_acquire) >= round_) return;
  // Other work can leave ranks on one processor, where each wait would take as long as a rank spins.
  bool is_beside = has_spare_cores_ && shares_processor_with(rank);
  if (is_beside && rank_ > rank) {
    is_beside = !move_from_others();
  }
  const int spins = is_beside ? 0 : patience_->spins;
  for (int i = 0; i < spins; i++) {
    if (stamp.load(std::memory_order_acquire) >= round_) return;
    acclimate::relax();
  }
  await_slowly(rank, stamp, !is_beside);
}

void Group::await_slowly(int rank, std::atomic<uint64_t>& stamp, bool may_yield) {
  const auto start = Clock::now();
  if (waited_since_ == Clock::time_point{}) waited_since_ = start;
  const auto until = start + patience_->yields;
  for (auto now = start; may_yield && now >= crowded_until_ && now < until; now = Clock::now()) {
    sched_yield();
    const auto back = Clock::now();
    if (back - now >= kLongYield) crowded_until_ = back + kCrowdLasts;
    for (int i = 0; i < patience_->spins_after_yield; i++) {
      if (stamp.load(std::memory_order_acquire) >= round_) return;
      acclimate::relax();
    }
  }
  sleep_until_published(rank, stamp, waited_since_ + call_timeout_);
}

void Group::sleep_until_published(int rank, std::atomic<uint64_t>& stamp, Clock::time_point deadline) {
  auto& sleepers = layout_.lines(rank).sleepers;
  struct Counted {
    std::atomic<uint32_t>& count;
    explicit Counted(std::atomic<uint32_t>& counter) : count(counter) { count.fetch_add(1); }
    ~Counted() { count.fetch_sub(1); }
  } const counted(sleepers);
  for (;;) {
    const uint64_t seen = stamp.load(std::memory_order_seq_cst);
    if (seen >= round_) return;
    throw_if_failed();
    if (layout_.lines(rank_).presence.load(std::memory_order_acquire) != 0) {
      throw CommError(Reason::kAborted, "Rank " + std::to_string(rank_) +
                                            " destroyed the group while it waited for rank " +
                                            std::to_string(rank) + " in " + describe(call_) + ".");
    }
    check_peers(nullptr);
    const auto now = Clock::now();
    if (now >= deadline) {
      fail(Reason::kTimeout, "Rank " + std::to_string(rank_) + " gave up after " + time_of(call_timeout_) +
                                 ": rank " + std::to_string(rank) + " (process " +
                                 std::to_string(peers_.pid(rank)) + ") did not take part in " +
                                 describe(call_) + ".");
    }
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - now) + milliseconds(1);
    futex_wait(&stamp, static_cast<uint32_t>(seen), std::min(left, kSlice));
  }
}

void Group::check_peers(const char* doing) {
  const int parity = static_cast<int>(round_ & 1);
  for (int peer = 0; peer < size_; peer++) {
    const RankLines& lines = layout_.lines(peer);
    const bool left = lines.presence.load(std::memory_order_acquire) != 0;
    if (peer == rank_ || (!left && peers_.runs(peer))) continue;
    // The rank may have published before it ended; this round needs no more from it.
    if (lines.posts[parity].stamp.load(std::memory_order_acquire) >= round_) continue;
    peer_is_gone(peer, doing != nullptr ? doing : describe(call_));
  }
}

void Group::check_peer(int rank, const std::string& doing) {
  const bool left = layout_.lines(rank).presence.load(std::memory_order_acquire) != 0;
  if (left || !peers_.runs(rank)) peer_is_gone(rank, doing);
}

void Group::peer_is_gone(int rank, const std::string& doing) {
  const bool left = layout_.lines(rank).presence.load(std::memory_order_acquire) != 0;
  fail(Reason::kPeerGone, "Rank " + std::to_string(rank) + " (process " + std::to_string(peers_.pid(rank)) +
                              (left ? ") left the group" : ") ended") + " while rank " +
                              std::to_string(rank_) + " waited for it in " + doing + ".");
}

void Group::throw_mismatch() {
  const auto& posts = [this](int rank) -> const Post& { return layout_.lines(rank).posts[round_ & 1]; };
  // All ranks see the same posts, so they all raise the same error.
  for (int peer = 0; peer < size_; peer++) {
    if (posts(peer).call.refused != 0) {
      const std::string met =
          peer == rank_ ? "" : ", which rank " + std::to_string(rank_) + " met with " + describe(call_);
      throw CommError(Reason::kMismatch, "Rank " + std::to_string(peer) + " got wrong arguments for " +
                                             describe(posts(peer).call) + met + ". The error on rank " +
                                             std::to_string(peer) + " says why.");
    }
  }
  for (int peer = 1; peer < size_; peer++) {
    if (posts(peer).call == posts(0).call) continue;
    throw CommError(Reason::kMismatch, different_calls(std::to_string(0), posts(0).call, std::to_string(peer),
                                                       posts(peer).call));
  }
  throw CommError(Reason::kMismatch, "Ranks called different collectives.");
}

void Group::fail(Reason reason, const std::string& text) {
  Header& header = layout_.header();
  auto none = static_cast<uint32_t>(Failure::kNone);
  if (header.failure.compare_exchange_strong(none, static_cast<uint32_t>(Failure::kBeingWritten))) {
    header.failure_kind = static_cast<uint32_t>(reason);
    strncpy(header.text, text.c_str(), kTextBytes - 1);
    header.failure.store(static_cast<uint32_t>(Failure::kThere), std::memory_order_release);
  }
  wake_everybody();
  throw CommError(reason, text + kUnusable);
}

void Group::abort(const std::string& why) {
  if (was_forked()) return;
  try {
    fail(Reason::kAborted, why);
  } catch (const CommError&) {  // raised for the waiting ranks
  }
}

std::string Group::failure() const {
  const Header& header = layout_.header();
  return header.failure.load(std::memory_order_acquire) == static_cast<uint32_t>(Failure::kThere)
             ? header.text
             : "";
}

void Group::throw_if_failed() const {
  const std::string text = failure();
  if (!text.empty()) {
    throw CommError(static_cast<Reason>(layout_.header().failure_kind), text + kUnusable);
  }
}

void Group::leave() {
  if (was_forked()) return;
  layout_.lines(rank_).presence.store(static_cast<uint32_t>(Presence::kLeft), std::memory_order_release);
  wake_everybody();
}

// Ranks that this does not wake check every kSlice.
void Group::wake_everybody() {
  for (int rank = 0; rank < size_; rank++) {
    RankLines& lines = layout_.lines(rank);
    for (Post& post : lines.posts) futex_wake(&post.stamp);
    lines.bell.fetch_add(1);
    futex_wake(&lines.bell);
  }
}

}  // namespace acclimate_comm
