#include "messages.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace acclimate_comm {
namespace {

using std::chrono::milliseconds;

constexpr size_t kUnit = 64;
constexpr milliseconds kSlice{100};
constexpr int kPollsBeforeSleep = 200;

// The start of each message in a ring. The receiver writes its verdict here before it frees the space.
struct MessageHeader {
  Call call;
  uint64_t bytes;
  uint32_t is_refused;
  Call wanted;
};
static_assert(sizeof(MessageHeader) <= kUnit);

size_t padded(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

std::exception_ptr refusal(int from, const Call& sent, int to, const Call& wanted) {
  return std::make_exception_ptr(different_messages(from, sent, to, wanted));
}

// Maps the linear positions of a ring to its memory.
class RingMemory {
 public:
  RingMemory(const Layout& layout, int from, int to)
      : ring(layout.ring(from, to)), data_(layout.ring_data(from, to)), size(layout.ring_bytes()) {}

  void write(uint64_t position, const void* from, size_t bytes) {
    const size_t offset = position % size, first = std::min(bytes, size - offset);
    memcpy(data_ + offset, from, first);
    memcpy(data_, static_cast<const char*>(from) + first, bytes - first);
  }
  void read(uint64_t position, void* to, size_t bytes) const {
    const size_t offset = position % size, first = std::min(bytes, size - offset);
    memcpy(to, data_ + offset, first);
    memcpy(static_cast<char*>(to) + first, data_, bytes - first);
  }
  MessageHeader& header(uint64_t position) const {
    return *reinterpret_cast<MessageHeader*>(data_ + position % size);  // both are whole units
  }

  Ring& ring;

 private:
  unsigned char* data_;

 public:
  const size_t size;
};

}  // namespace

struct Messages::Sending {
  const char* data;
  size_t bytes;
  Call call;
  milliseconds timeout;
  Clock::time_point deadline;
  Done done;
  bool has_begun = false;
  bool is_judged = false;
  uint64_t begin = 0;
  size_t pushed = 0;  // of the padded payload
  std::exception_ptr refused = nullptr;

  bool is_pushed() const { return has_begun && pushed == padded(bytes); }
  uint64_t end() const { return begin + kUnit + padded(bytes); }
};

struct Messages::Receiving {
  char* data;
  size_t bytes;
  Call call;
  int from;
  milliseconds timeout;
  Clock::time_point deadline;
  Done done;
  bool is_matched = false;
};

struct Messages::Incoming {
  bool has_begun = false;
  Call call{};
  size_t bytes = 0;
  size_t taken = 0;  // of the padded payload
  std::list<Receiving>::iterator target{};
  bool is_for_target = false;
  std::exception_ptr refused = nullptr;
  std::vector<char> kept{};
};

struct Messages::Stored {
  int from;
  Call call;
  std::vector<char> data;
};

Messages::Messages(Group& group) : group_(group), sends_(group.size()), incoming_(group.size()) {
  thread_ = std::thread([this] { run(); });
}

Messages::~Messages() {
  if (group_.was_forked()) {
    thread_.detach();  // the thread runs only in the parent process
    return;
  }
  stop();
}

void Messages::send(const void* data, size_t bytes, const Call& call, int to, Done done) {
  const auto limit = group_.timeout();
  {
    const std::lock_guard lock(mutex_);
    sends_[to].push_back(
        {static_cast<const char*>(data), bytes, call, limit, Clock::now() + limit, std::move(done)});
  }
  submitted();
}

void Messages::receive(void* data, size_t bytes, const Call& call, int from, Done done) {
  const auto limit = group_.timeout();
  {
    const std::lock_guard lock(mutex_);
    receives_.push_back(
        {static_cast<char*>(data), bytes, call, from, limit, Clock::now() + limit, std::move(done)});
  }
  submitted();
}

void Messages::submitted() {
  work_.notify_one();
  ring_bell(group_.rank());
}

void Messages::ring_bell(int rank) {
  RankLines& lines = group_.layout().lines(rank);
  lines.bell.fetch_add(1, std::memory_order_seq_cst);
  if (lines.bell_sleeps.load(std::memory_order_seq_cst) != 0) futex_wake(&lines.bell);
}

void Messages::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  submitted();
  thread_.join();
}

bool Messages::is_idle() const {
  return receives_.empty() && std::all_of(sends_.begin(), sends_.end(), [](auto& s) { return s.empty(); });
}

void Messages::run() {
  RankLines& lines = group_.layout().lines(group_.rank());
  int polls = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !is_idle(); });
    const uint32_t bell = lines.bell.load(std::memory_order_seq_cst);
    Finished finished;
    bool has_moved = false;
    try {
      if (stopping_)
        throw CommError(Reason::kAborted, "The group was destroyed before this message finished.");
      group_.throw_if_failed();
      has_moved = advance(finished);
      if (!has_moved && polls >= kPollsBeforeSleep) check(Clock::now());
    } catch (const CommError&) {
      fail_all(finished, std::current_exception());
    } catch (const std::exception&) {
      fail_all(finished, no_memory());
    }
    const bool is_over = stopping_;
    lock.unlock();
    for (const auto& tell : finished) tell();
    if (is_over) return;
    polls = has_moved ? 0 : polls + 1;
    if (polls > kPollsBeforeSleep) {
      lines.bell_sleeps.store(1, std::memory_order_seq_cst);
      futex_wait(&lines.bell, bell, kSlice);
      lines.bell_sleeps.store(0, std::memory_order_seq_cst);
    } else if (!has_moved) {
      sched_yield();
    }
    lock.lock();
  }
}

bool Messages::advance(Finished& finished) {
  bool has_moved = take_stored(finished);
  for (int rank = 0; rank < group_.size(); rank++) {
    has_moved |= advance_sends(rank, finished);
    has_moved |= advance_receives(rank, finished);
  }
  return has_moved;
}

// Fails the group if a message timed out, or waits for a rank that has ended.
void Messages::check(Clock::time_point now) {
  const auto fail_late = [this](const Call& call, const std::string& what, milliseconds limit) {
    group_.fail(Reason::kTimeout, "Rank " + std::to_string(group_.rank()) + " gave up after " +
                                      std::to_string(limit.count()) + " ms: " + what + " " + with_tag(call) +
                                      " did not finish.");
  };
  for (int rank = 0; rank < group_.size(); rank++) {
    for (const Sending& sending : sends_[rank]) {
      group_.check_peer(rank, with_tag(sending.call));
      if (now >= sending.deadline) {
        fail_late(sending.call, "to rank " + std::to_string(rank) + ",", sending.timeout);
      }
    }
  }
  for (const Receiving& receiving : receives_) {
    if (receiving.from != kAnyRank) group_.check_peer(receiving.from, with_tag(receiving.call));
    if (receiving.from == kAnyRank && group_.size() == 2) {
      group_.check_peer(1 - group_.rank(), with_tag(receiving.call));
    }
    if (now >= receiving.deadline) {
      const bool is_any = receiving.from == kAnyRank;
      fail_late(receiving.call,
                "from " + (is_any ? "any rank," : "rank " + std::to_string(receiving.from) + ","),
                receiving.timeout);
    }
  }
}

// Fails the group, because a message that arrived before its recv cannot be kept.
std::exception_ptr Messages::no_memory() {
  std::string lost;
  for (int from = 0; from < group_.size(); from++) {
    const Incoming& incoming = incoming_[from];
    if (incoming.has_begun && !incoming.is_for_target && incoming.kept.size() < incoming.bytes)
      lost = " to keep " + with_tag(incoming.call) + " from rank " + std::to_string(from) +
             " until its recv is called";
  }
  try {
    group_.fail(Reason::kAborted,
                "Rank " + std::to_string(group_.rank()) + " has too little memory" + lost + ".");
  } catch (const CommError&) {
    return std::current_exception();
  }
}

void Messages::fail_all(Finished& finished, const std::exception_ptr& failure) {
  for (auto& sends : sends_) {
    for (Sending& sending : sends) {
      finished.push_back([done = std::move(sending.done), failure] { done(failure, kAnyRank); });
    }
    sends.clear();
  }
  for (Receiving& receiving : receives_) {
    finished.push_back([done = std::move(receiving.done), failure] { done(failure, kAnyRank); });
  }
  receives_.clear();
  for (Incoming& incoming : incoming_) incoming.is_for_target = false;
}

// -- sending -----------------------------------------------------------------------------------------

bool Messages::advance_sends(int to, Finished& finished) {
  auto& sends = sends_[to];
  if (sends.empty()) return false;
  const RingMemory memory(group_.layout(), group_.rank(), to);
  const uint64_t read = memory.ring.read.load(std::memory_order_acquire);
  bool has_moved = false;
  // Read the verdicts before their space in the ring is reused.
  for (Sending& sending : sends) {
    if (!sending.has_begun || sending.is_judged || read < sending.begin + kUnit) continue;
    const MessageHeader& header = memory.header(sending.begin);
    if (header.is_refused) sending.refused = refusal(group_.rank(), sending.call, to, header.wanted);
    sending.is_judged = true;
  }
  while (!sends.empty() && sends.front().is_pushed() && read >= sends.front().end()) {
    Sending& sending = sends.front();
    finished.push_back(
        [done = std::move(sending.done), refused = sending.refused] { done(refused, kAnyRank); });
    sends.pop_front();
    has_moved = true;
  }
  for (Sending& sending : sends) {
    if (sending.is_pushed()) continue;
    has_moved |= push(sending, to, read);
    if (!sending.is_pushed()) break;
  }
  return has_moved;
}

bool Messages::push(Sending& sending, int to, uint64_t read) {
  RingMemory memory(group_.layout(), group_.rank(), to);
  uint64_t written = memory.ring.written.load(std::memory_order_relaxed);
  size_t room = memory.size - (written - read);
  const uint64_t before = written;
  if (!sending.has_begun) {
    if (room < kUnit) return false;
    MessageHeader header{sending.call, sending.bytes, 0, {}};
    memory.write(written, &header, sizeof header);
    sending.begin = written;
    sending.has_begun = true;
    written += kUnit;
    room -= kUnit;
  }
  const size_t now = std::min(room, padded(sending.bytes) - sending.pushed);
  if (sending.pushed < sending.bytes) {
    memory.write(written, sending.data + sending.pushed, std::min(now, sending.bytes - sending.pushed));
  }
  sending.pushed += now;
  written += now;
  if (written == before) return false;
  memory.ring.written.store(written, std::memory_order_release);
  ring_bell(to);
  return true;
}

// -- receiving ---------------------------------------------------------------------------------------

bool Messages::is_awaited(int from) const {
  return std::any_of(receives_.begin(), receives_.end(), [&](const Receiving& receiving) {
    return !receiving.is_matched && (receiving.from == from || receiving.from == kAnyRank);
  });
}

std::list<Messages::Receiving>::iterator Messages::match(int from, uint32_t tag) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const Receiving& receiving) {
    return !receiving.is_matched && (receiving.from == from || receiving.from == kAnyRank) &&
           receiving.call.root == tag;
  });
}

bool Messages::advance_receives(int from, Finished& finished) {
  bool has_moved = false;
  while (take(from, finished)) has_moved = true;
  return has_moved;
}

void Messages::begin_message(int from) {
  const RingMemory memory(group_.layout(), from, group_.rank());
  Incoming& incoming = incoming_[from];
  MessageHeader& header = memory.header(memory.ring.read.load(std::memory_order_relaxed));
  incoming = Incoming{};
  incoming.has_begun = true;
  incoming.call = header.call;
  incoming.bytes = header.bytes;
  const auto target = match(from, header.call.root);
  if (target == receives_.end()) {
    incoming.kept.resize(header.bytes);  // may throw std::bad_alloc
    return;
  }
  target->is_matched = true;
  incoming.target = target;
  incoming.is_for_target = true;
  if (target->call.numel != header.call.numel || target->call.dtype != header.call.dtype) {
    header.wanted = target->call;
    header.is_refused = 1;
    incoming.refused = refusal(from, header.call, group_.rank(), target->call);
  }
}

bool Messages::take(int from, Finished& finished) {
  RingMemory memory(group_.layout(), from, group_.rank());
  Incoming& incoming = incoming_[from];
  if (!incoming.has_begun && !is_awaited(from)) return false;
  uint64_t read = memory.ring.read.load(std::memory_order_relaxed);
  size_t there = memory.ring.written.load(std::memory_order_acquire) - read;
  if (there == 0) return false;
  if (!incoming.has_begun) {
    begin_message(from);
    read += kUnit;
    there -= kUnit;
  }
  const size_t now = std::min(there, padded(incoming.bytes) - incoming.taken);
  const bool is_discarded = incoming.refused != nullptr || (!incoming.is_for_target && incoming.kept.empty());
  if (incoming.taken < incoming.bytes && !is_discarded) {
    char* const target = incoming.is_for_target ? incoming.target->data : incoming.kept.data();
    memory.read(read, target + incoming.taken, std::min(now, incoming.bytes - incoming.taken));
  }
  incoming.taken += now;
  memory.ring.read.store(read + now, std::memory_order_release);
  ring_bell(from);
  if (incoming.taken < padded(incoming.bytes)) return true;
  if (incoming.is_for_target) {
    finished.push_back(
        [done = std::move(incoming.target->done), refused = incoming.refused, from] { done(refused, from); });
    receives_.erase(incoming.target);
  } else {
    stored_.push_back({from, incoming.call, std::move(incoming.kept)});
  }
  incoming = Incoming{};
  return true;
}

bool Messages::take_stored(Finished& finished) {
  bool has_moved = false;
  for (auto stored = stored_.begin(); stored != stored_.end();) {
    const auto target = match(stored->from, stored->call.root);
    if (target == receives_.end()) {
      ++stored;
      continue;
    }
    std::exception_ptr refused;
    if (target->call.numel != stored->call.numel || target->call.dtype != stored->call.dtype) {
      refused = refusal(stored->from, stored->call, group_.rank(), target->call);
    } else if (!stored->data.empty()) {
      memcpy(target->data, stored->data.data(), stored->data.size());
    }
    finished.push_back(
        [done = std::move(target->done), refused, from = stored->from] { done(refused, from); });
    receives_.erase(target);
    stored = stored_.erase(stored);
    has_moved = true;
  }
  return has_moved;
}

}  // namespace acclimate_comm
