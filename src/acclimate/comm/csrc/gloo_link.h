// Links between hosts through a gloo group, and the status store in the group's c10d store.
#pragma once

#include <future>
#include <set>
#include <thread>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hosts.h"

namespace acclimate_comm {

class GlooLink final : public Link {
 public:
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  void all_gather(const void* own, void* all, size_t bytes, milliseconds timeout) override {
    if (bytes == 0) return;
    run([&](c10d::Backend& gloo) {
      at::Tensor input = bytes_at(own, bytes), output = bytes_at(all, bytes * gloo.getSize());
      c10d::AllgatherOptions options;
      options.timeout = timeout;
      return gloo._allgather_base(output, input, options);
    });
  }

  void broadcast(void* data, size_t bytes, int root, milliseconds timeout) override {
    if (bytes == 0) return;
    run([&](c10d::Backend& gloo) {
      std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      options.timeout = timeout;
      return gloo.broadcast(tensors, options);
    });
  }

  void all_to_all(const void* from, const std::vector<size_t>& sent, void* to,
                  const std::vector<size_t>& received, milliseconds timeout) override {
    run([&](c10d::Backend& gloo) {
      std::vector<int64_t> input_splits(sent.begin(), sent.end());
      std::vector<int64_t> output_splits(received.begin(), received.end());
      at::Tensor input = bytes_at(from, total(sent)), output = bytes_at(to, total(received));
      c10d::AllToAllOptions options;
      options.timeout = timeout;
      return gloo.alltoall_base(output, input, output_splits, input_splits, options);
    });
  }

  std::unique_ptr<Transfer> send(const void* data, size_t bytes, int to, int tag) override {
    return start(data, bytes, false,
                 [&](c10d::Backend& gloo, auto& tensors) { return gloo.send(tensors, to, tag); });
  }

  std::unique_ptr<Transfer> receive(void* data, size_t bytes, int from, int tag) override {
    return start(data, bytes, true, [&](c10d::Backend& gloo, auto& tensors) {
      return from < 0 ? gloo.recvAnysource(tensors, tag) : gloo.recv(tensors, from, tag);
    });
  }

  void cut() override {
    c10::intrusive_ptr<c10d::Backend> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(gloo_);
    for (c10d::Work* work : transfers_) work->abort();
  }

 private:
  class GlooTransfer final : public Transfer {
   public:
    GlooTransfer(GlooLink& link, c10::intrusive_ptr<c10d::Work> work, bool is_received)
        : link_(link), work_(std::move(work)), is_received_(is_received) {}
    ~GlooTransfer() override {
      const std::lock_guard lock(link_.mutex_);
      link_.transfers_.erase(work_.get());
    }
    int wait(milliseconds timeout) override {
      bool is_done = false;
      translated([&] { is_done = work_->wait(timeout); });
      if (!is_done) throw LinkError(false, "the connection was closed");
      return is_received_ ? work_->sourceRank() : -1;
    }

   private:
    GlooLink& link_;
    c10::intrusive_ptr<c10d::Work> work_;
    bool is_received_;
  };

  static at::Tensor bytes_at(const void* data, size_t bytes) {
    // gloo supports few dtypes, so it gets bytes.
    return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
  }

  static size_t total(const std::vector<size_t>& sizes) {
    size_t sum = 0;
    for (const size_t size : sizes) sum += size;
    return sum;
  }

  template <class Body>
  static void translated(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      const bool is_timeout = text.find("imed out") != std::string::npos;
      // The first line is the message; gloo's source file and line come before it.
      const size_t begin = text.rfind("] ", text.find('\n'));
      const size_t start = text[0] == '[' && begin != std::string::npos ? begin + 2 : 0;
      throw LinkError(is_timeout, text.substr(start, text.find('\n', start) - start));
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo() {
    const std::lock_guard lock(mutex_);
    if (!gloo_) throw LinkError(false, "the connection was closed before");
    return gloo_;
  }

  template <class Body>
  void run(const Body& body) {
    const auto gloo = this->gloo();
    translated([&] { body(*gloo)->wait(); });
  }

  template <class Body>
  std::unique_ptr<Transfer> start(const void* data, size_t bytes, bool is_received, const Body& body) {
    const auto gloo = this->gloo();
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    c10::intrusive_ptr<c10d::Work> work;
    translated([&] { work = body(*gloo, tensors); });
    const std::lock_guard lock(mutex_);
    transfers_.insert(work.get());
    return std::make_unique<GlooTransfer>(*this, std::move(work), is_received);
  }

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::set<c10d::Work*> transfers_;
};

class TorchStatusStore final : public StatusStore {
 public:
  explicit TorchStatusStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void put(const std::string& key, const std::string& value) override {
    ask([key, value](c10d::Store& store) {
      store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
      return std::string();
    });
  }

  std::string get(const std::string& key) override {
    return ask([key](c10d::Store& store) -> std::string {
      if (!store.check({key})) return "";
      const std::vector<uint8_t> value = store.get(key);
      return {value.begin(), value.end()};
    });
  }

 private:
  static constexpr std::chrono::milliseconds kLongest{500};

  // Runs in its own thread: a host that was cut off may take minutes to answer.
  template <class Question>
  std::string ask(const Question& question) {
    if (is_lost_) return "";
    auto answer = std::make_shared<std::promise<std::string>>();
    auto future = answer->get_future();
    std::thread([store = store_, question, answer] {
      try {
        answer->set_value(question(*store));
      } catch (...) {
        answer->set_exception(std::current_exception());
      }
    }).detach();
    try {
      if (future.wait_for(kLongest) == std::future_status::ready) return future.get();
    } catch (const std::exception&) {  // the store ended with its host
    }
    is_lost_ = true;
    return "";
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<bool> is_lost_{false};
};

}  // namespace acclimate_comm
