// send and recv between two ranks. One thread per rank moves all of its messages, so that a message never
// waits for one of another pair.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "group.h"

namespace acclimate_comm {

constexpr int kAnyRank = -1;

// Called with the failure, or nullptr, and the rank that sent the message.
using Done = std::function<void(std::exception_ptr, int source)>;

class Messages {
 public:
  explicit Messages(Group& group);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // A send is done when the receiver has taken the message. `call.root` is the tag.
  void send(const void* data, size_t bytes, const Call& call, int to, Done done);
  void receive(void* data, size_t bytes, const Call& call, int from, Done done);
  // Ends the thread; pending messages fail.
  void stop();

 private:
  struct Sending;
  struct Receiving;
  struct Incoming;
  struct Stored;
  using Finished = std::vector<std::function<void()>>;

  void submitted();
  void run();
  bool advance(Finished& finished);
  bool advance_sends(int to, Finished& finished);
  bool push(Sending& sending, int to, uint64_t read);
  bool advance_receives(int from, Finished& finished);
  bool take(int from, Finished& finished);
  void begin_message(int from);
  bool take_stored(Finished& finished);
  bool is_awaited(int from) const;
  std::list<Receiving>::iterator match(int from, uint32_t tag);
  void fail_all(Finished& finished, const std::exception_ptr& failure);
  std::exception_ptr no_memory();
  void check(Clock::time_point now);
  void ring_bell(int rank);
  bool is_idle() const;

  Group& group_;
  std::mutex mutex_;
  std::condition_variable work_;
  bool stopping_ = false;
  std::vector<std::list<Sending>> sends_;  // by receiver
  std::list<Receiving> receives_;  // in the order of the calls
  std::vector<Incoming> incoming_;  // by sender
  std::deque<Stored> stored_;  // arrived before a receive with their tag was called
  std::thread thread_;
};

}  // namespace acclimate_comm
