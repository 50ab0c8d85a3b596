// Collectives of ranks on several hosts: shared memory on each host, and links between the hosts' first
// ranks, their leaders.
#pragma once

#include "transport.h"

namespace acclimate_comm {

class LinkError : public std::runtime_error {
 public:
  LinkError(bool is_timeout, const std::string& text) : std::runtime_error(text), is_timeout(is_timeout) {}
  bool is_timeout;
};

// A pending transfer to or from one process.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns the rank that sent the bytes, or -1 for a send. Throws LinkError.
  virtual int wait(std::chrono::milliseconds timeout) = 0;
};

// Moves bytes between processes on any host. Every call can throw LinkError.
class Link {
 public:
  using milliseconds = std::chrono::milliseconds;

  virtual ~Link() = default;
  virtual void all_gather(const void* own, void* all, size_t bytes, milliseconds timeout) = 0;
  virtual void broadcast(void* data, size_t bytes, int root, milliseconds timeout) = 0;
  // `from` holds the parts for each process one after the other, `to` the parts from each.
  virtual void all_to_all(const void* from, const std::vector<size_t>& sent, void* to,
                          const std::vector<size_t>& received, milliseconds timeout) = 0;
  virtual std::unique_ptr<Transfer> send(const void* data, size_t bytes, int to, int tag) = 0;
  // Receives from any process if `from` is -1.
  virtual std::unique_ptr<Transfer> receive(void* data, size_t bytes, int from, int tag) = 0;
  // Closes the connections, so that the peers fail too.
  virtual void cut() = 0;
};

// A key-value store in which ranks report to each other when links fail.
class StatusStore {
 public:
  virtual ~StatusStore() = default;
  // If the store cannot be reached, `put` does nothing and `get` returns an empty string.
  virtual void put(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key) = 0;
};

// One host of a group.
struct HostRanks {
  std::string name;
  std::vector<int> ranks;  // ascending; the first is the leader
};

class Hosts final : public Transport {
 public:
  // `local` is the group of this host's ranks. `leaders` links the leaders in the order of the hosts, and is
  // nullptr except on a leader.
  Hosts(std::shared_ptr<Group> local, std::vector<HostRanks> hosts, int rank, std::unique_ptr<Link> leaders,
        std::unique_ptr<Link> everyone, std::unique_ptr<StatusStore> status, milliseconds timeout);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool was_forked() const override { return local_->was_forked(); }
  bool widens_halves() const override { return true; }
  Group* one_host() override { return nullptr; }
  void set_timeout(milliseconds timeout) override;
  void abort(const std::string& why) override;
  void leave() override;
  void begin(const Call& call, milliseconds timeout, bool is_background) override;
  void refuse(Call call, milliseconds timeout, bool is_background) override;

  void all_reduce(const void* from, void* to, Elements elements, Reduce reduce) override;
  void reduce(const void* from, void* to, Elements elements, Reduce reduce, int root) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void all_gather(const void* from, const Targets& to, size_t bytes) override;
  void reduce_scatter(const Sources& from, void* to, Elements elements, Reduce reduce) override;
  void gather(const void* from, const Targets& to, size_t bytes, int root) override;
  void scatter(const Sources& from, void* to, size_t bytes, int root) override;
  void barrier() override {}  // begin() waits for all ranks
  void all_to_all(const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                  const std::vector<size_t>& received, size_t bytes_each) override;

  // Runs one side of a message, from any thread.
  void pass_message(const Call& call, int peer, const std::function<void(Link&, milliseconds)>& body);

 private:
  struct HostCall;

  bool is_leader() const { return leaders_ != nullptr; }
  const std::vector<int>& own_ranks() const { return hosts_[static_cast<size_t>(host_)].ranks; }
  int host_of(int rank) const { return places_[static_cast<size_t>(rank)].first; }
  int index_of(int rank) const { return places_[static_cast<size_t>(rank)].second; }
  size_t most_ranks() const;

  template <class Body>
  void guarded(const Body& body);
  void agree();
  std::string difference(const std::vector<HostCall>& said) const;
  std::string what_is_known(const LinkError& error);
  std::string missing_hosts();
  [[noreturn]] void give_up(Reason reason, const std::string& text);
  void cut();
  void sum_between_hosts(void* data, Elements elements, Reduce reduce);
  void exchange(const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                const std::vector<size_t>& received);

  std::shared_ptr<Group> local_;
  std::vector<HostRanks> hosts_;
  int rank_;
  int size_ = 0;
  int host_ = 0;
  std::vector<std::pair<int, int>> places_;  // by rank: its host, and its number there
  std::unique_ptr<Link> leaders_;
  std::unique_ptr<Link> everyone_;
  std::unique_ptr<StatusStore> status_;
  milliseconds timeout_;
  milliseconds call_timeout_{0};
  Call call_;
};

}  // namespace acclimate_comm
