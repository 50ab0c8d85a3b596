// The torch.distributed backend "shm".
#pragma once

#include <atomic>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives.h"
#include "messages.h"
#include "work.h"

namespace acclimate_comm {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

class ShmBackend final : public c10d::Backend {
 public:
  explicit ShmBackend(std::shared_ptr<Group> group);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void abort() override;
  void shutdown() override;

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input,
                              const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;

 private:
  class RunningCall;
  struct Outline;

  template <class Body>
  WorkPointer run(Outline outline, Body body);
  WorkPointer message(Tensors& tensors, int peer, int tag, bool is_sent);
  void throw_if_forked(const Call& call);
  void close();

  void all_reduce_one(RunningCall& running, const at::Tensor& tensor, Op op);
  void gather_one(RunningCall& running, const Tensors& outputs, const at::Tensor& input);
  void gather_into(RunningCall& running, const at::Tensor& output, const at::Tensor& input);
  void scatter_sums(RunningCall& running, const at::Tensor& output, const Tensors& inputs, Op op);

  std::shared_ptr<Group> group_;
  c10::intrusive_ptr<Options> options_;
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
  std::mutex messages_mutex_;
  std::unique_ptr<Messages> messages_;
  std::atomic<uint64_t> calls_{0};
  bool is_closed_ = false;
};

}  // namespace acclimate_comm
