// A group's transport: shared memory if all ranks are on one host, else shared memory and links between
// hosts.
#pragma once

#include "collectives.h"

namespace acclimate_comm {

class Transport {
 public:
  using milliseconds = std::chrono::milliseconds;

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual bool was_forked() const = 0;
  // Half-precision sums are rounded once only if one rank computes them, or if they are fp32 in between.
  virtual bool widens_halves() const = 0;
  // The group that send and recv use; nullptr if the ranks are on several hosts.
  virtual Group* one_host() = 0;

  virtual void set_timeout(milliseconds timeout) = 0;
  virtual void abort(const std::string& why) = 0;
  virtual void leave() = 0;

  // As in Group. Every collective starts after begin().
  virtual void begin(const Call& call, milliseconds timeout, bool is_background) = 0;
  virtual void refuse(Call call, milliseconds timeout, bool is_background) = 0;

  // As in collectives.h.
  virtual void all_reduce(const void* from, void* to, Elements elements, Reduce reduce) = 0;
  virtual void reduce(const void* from, void* to, Elements elements, Reduce reduce, int root) = 0;
  virtual void broadcast(void* data, size_t bytes, int root) = 0;
  virtual void all_gather(const void* from, const Targets& to, size_t bytes) = 0;
  virtual void reduce_scatter(const Sources& from, void* to, Elements elements, Reduce reduce) = 0;
  virtual void gather(const void* from, const Targets& to, size_t bytes, int root) = 0;
  virtual void scatter(const Sources& from, void* to, size_t bytes, int root) = 0;
  virtual void barrier() = 0;
  virtual void all_to_all(const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                          const std::vector<size_t>& received, size_t bytes_each) = 0;
};

class OneHost final : public Transport {
 public:
  explicit OneHost(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  bool was_forked() const override { return group_->was_forked(); }
  bool widens_halves() const override { return false; }
  Group* one_host() override { return group_.get(); }
  void set_timeout(milliseconds timeout) override { group_->set_timeout(timeout); }
  void abort(const std::string& why) override { group_->abort(why); }
  void leave() override { group_->leave(); }
  void begin(const Call& call, milliseconds timeout, bool is_background) override {
    group_->begin(call, timeout, is_background);
  }
  void refuse(Call call, milliseconds timeout, bool is_background) override {
    group_->refuse(call, timeout, is_background);
  }
  void all_reduce(const void* from, void* to, Elements elements, Reduce reduce) override {
    acclimate_comm::all_reduce(*group_, from, to, elements, reduce);
  }
  void reduce(const void* from, void* to, Elements elements, Reduce reduce, int root) override {
    reduce_to_root(*group_, from, to, elements, reduce, root, size());
  }
  void broadcast(void* data, size_t bytes, int root) override {
    acclimate_comm::broadcast(*group_, data, bytes, root);
  }
  void all_gather(const void* from, const Targets& to, size_t bytes) override {
    acclimate_comm::all_gather(*group_, from, to, bytes);
  }
  void reduce_scatter(const Sources& from, void* to, Elements elements, Reduce reduce) override {
    acclimate_comm::reduce_scatter(*group_, from, to, elements, reduce);
  }
  void gather(const void* from, const Targets& to, size_t bytes, int root) override {
    acclimate_comm::gather(*group_, from, to, bytes, root);
  }
  void scatter(const Sources& from, void* to, size_t bytes, int root) override {
    acclimate_comm::scatter(*group_, from, to, bytes, root);
  }
  void barrier() override { acclimate_comm::barrier(*group_); }
  void all_to_all(const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                  const std::vector<size_t>& received, size_t bytes_each) override {
    acclimate_comm::all_to_all(*group_, from, sent, to, received, bytes_each);
  }

 private:
  std::shared_ptr<Group> group_;
};

}  // namespace acclimate_comm
