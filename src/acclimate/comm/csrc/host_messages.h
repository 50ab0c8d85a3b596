// send and recv between hosts. The sender first sends its call and the receiver confirms it, because gloo
// aborts a process that receives more than it expects.
#pragma once

#include <map>

#include "hosts.h"
#include "tensors.h"
#include "work.h"

namespace acclimate_comm {

class HostMessages {
 public:
  explicit HostMessages(Hosts& hosts) : hosts_(hosts) {}

  // Messages of the same tag and peer keep the order of the calls; peer -1 receives from any rank.
  void start(const c10::intrusive_ptr<ShmWork>& work, const std::shared_ptr<Target>& target, const Call& call,
             int peer, const std::function<void(const CommError&)>& raise) {
    const Key key{is_sent(call), peer, call.root};
    const std::lock_guard lock(mutex_);
    auto& chain = chains_[key];
    chain.push_back([this, work, target, call, peer, raise] {
      std::exception_ptr failure;
      try {
        try {
          pass(*work, *target, call, peer);
        } catch (const CommError& error) {
          raise(error);
        }
      } catch (...) {
        failure = std::current_exception();
      }
      work->complete(failure);
    });
    if (chain.size() > 1) return;
    try {
      std::thread([this, key] { serve(key); }).detach();
    } catch (...) {
      chains_.erase(key);  // no thread ends this chain, for which stop() would wait
      throw;
    }
  }

  // Call this after the links are cut, so that pending messages end soon.
  void stop() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return chains_.empty(); });
  }

 private:
  using Key = std::tuple<bool, int, uint32_t>;

  static bool is_sent(const Call& call) { return static_cast<Kind>(call.kind) == Kind::kSend; }

  // A key's thread ends with its last message, because programs may use a new tag for every message.
  void serve(const Key& key) {
    std::unique_lock lock(mutex_);
    auto& chain = chains_[key];
    while (!chain.empty()) {
      const auto& message = chain.front();
      lock.unlock();
      message();
      lock.lock();
      chain.pop_front();
    }
    chains_.erase(key);
    ended_.notify_all();
  }

  void pass(ShmWork& work, Target& target, const Call& call, int peer) {
    hosts_.pass_message(call, peer, [&](Link& link, std::chrono::milliseconds timeout) {
      if (is_sent(call)) {
        send(link, target.data(), call, peer, timeout);
      } else {
        work.came_from(receive(link, target.data(), call, peer, timeout));
      }
    });
    if (!is_sent(call)) target.finish();
  }

  // Each torch tag uses three gloo tags, so that content never matches a receive of another size.
  static constexpr int kTags = 3;

 public:
  static constexpr int kLargestTag = std::numeric_limits<int>::max() / kTags - 1;

 private:
  static int tag_of(const Call& call, int part) { return static_cast<int>(call.root) * kTags + part; }

  static size_t bytes_of(const Call& call) {
    return call.numel * c10::elementSize(static_cast<c10::ScalarType>(call.dtype));
  }

  static void compare(const Call& sent, int from, const Call& wanted, int to) {
    if (sent.numel != wanted.numel || sent.dtype != wanted.dtype)
      throw different_messages(from, sent, to, wanted);
  }

  void send(Link& link, const void* data, const Call& call, int to, std::chrono::milliseconds timeout) const {
    Call answer;
    const auto answered = link.receive(&answer, sizeof answer, to, tag_of(call, 1));
    link.send(&call, sizeof call, to, tag_of(call, 0))->wait(timeout);
    answered->wait(timeout);
    compare(call, hosts_.rank(), answer, to);
    if (call.numel != 0) link.send(data, bytes_of(call), to, tag_of(call, 2))->wait(timeout);
  }

  int receive(Link& link, void* data, const Call& call, int from, std::chrono::milliseconds timeout) const {
    Call sent;
    const int source = link.receive(&sent, sizeof sent, from, tag_of(call, 0))->wait(timeout);
    const int sender = from < 0 ? source : from;
    const bool is_equal = sent.numel == call.numel && sent.dtype == call.dtype;
    std::unique_ptr<Transfer> content;
    if (is_equal && call.numel != 0) content = link.receive(data, bytes_of(call), sender, tag_of(call, 2));
    link.send(&call, sizeof call, sender, tag_of(call, 1))->wait(timeout);
    compare(sent, sender, call, hosts_.rank());
    if (content) content->wait(timeout);
    return sender;
  }

  Hosts& hosts_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::map<Key, std::deque<std::function<void()>>> chains_;
};

}  // namespace acclimate_comm
