#include "backend.h"

#include <torch/csrc/utils/pybind.h>

#include "arguments.h"
#include "running_call.h"

namespace acclimate_comm {
using std::chrono::milliseconds;

ShmBackend::ShmBackend(std::shared_ptr<Group> group)
    : Backend(group->rank(), group->size()),
      group_(std::move(group)),
      options_(c10::make_intrusive<Options>("shm", group_->timeout())) {
  init();
}

ShmBackend::~ShmBackend() { close(); }

void ShmBackend::setTimeout(milliseconds timeout) {
  options_->timeout = bounded(timeout);
  group_->set_timeout(timeout);
}

void ShmBackend::abort() { group_->abort("Rank " + std::to_string(rank_) + " aborted the group."); }

void ShmBackend::shutdown() { close(); }

// Called before the queue is used: in a forked child the queue's thread does not exist, and its mutex may
// stay locked.
void ShmBackend::throw_if_forked(const Call& call) {
  if (!group_->was_forked()) return;
  try {
    group_->begin(call, milliseconds(0), false);
  } catch (const CommError& error) {
    raise(error);
  }
}

void ShmBackend::close() {
  if (is_closed_) return;
  is_closed_ = true;
  if (group_->was_forked()) {
    // Leaked on purpose: their threads do not exist in a forked child, and the destructor of a condition
    // variable would wait for the threads that waited on it.
    queue_.release();
    messages_.release();
    return;
  }
  queue_->stop();
  const std::lock_guard lock(messages_mutex_);
  if (messages_) messages_->stop();
  group_->leave();
}

// -- reductions --------------------------------------------------------------------------------------

void ShmBackend::all_reduce_one(RunningCall& running, const at::Tensor& tensor, Op op) {
  const Reducer reducer = reducer_of(tensor.scalar_type(), op);
  Target target(tensor, true);
  const at::Tensor wide = widened(target.memory(), reducer.dtype);
  running.start();
  acclimate_comm::all_reduce(running.group, wide.data_ptr(), wide.data_ptr(), elements_of(wide),
                             reducer.reduce);
  if (!wide.is_same(target.memory())) target.memory().copy_(wide);
  target.finish();
}

WorkPointer ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Outline outline(c10d::OpType::ALLREDUCE, "shm:all_reduce", Kind::kAllReduce, first(tensors), options,
                        tensors);
  return run(outline, [this, tensors, op = options.reduceOp](RunningCall& running) {
    all_reduce_one(running, only(tensors), op_of(op));
  });
}

WorkPointer ShmBackend::allreduce_coalesced(Tensors& tensors,
                                            const c10d::AllreduceCoalescedOptions& options) {
  const Outline outline(c10d::OpType::ALLREDUCE_COALESCED, "shm:all_reduce", Kind::kAllReduce, first(tensors),
                        options, tensors);
  return run(outline, [this, tensors, op = options.reduceOp](RunningCall& running) {
    size_t left = tensors.size();
    for (const at::Tensor& tensor : tensors) {
      running.next(call_of(Kind::kAllReduce, tensor, 0, number_of(op)), --left);
      all_reduce_one(running, tensor, op_of(op));
    }
  });
}

WorkPointer ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Outline outline(c10d::OpType::REDUCE, "shm:reduce", Kind::kReduce, first(tensors), options, tensors);
  return run(outline, [this, tensors, options](RunningCall& running) {
    const int root = rank_in(options.rootRank, size_, "the root");
    const at::Tensor& tensor = only(tensors);
    const Reducer reducer = reducer_of(tensor.scalar_type(), op_of(options.reduceOp));
    Target target(tensor, true);
    const at::Tensor wide = widened(target.memory(), reducer.dtype);
    running.start();
    reduce_to_root(running.group, wide.data_ptr(), wide.data_ptr(), elements_of(wide), reducer.reduce, root);
    if (running.group.rank() != root) return;
    if (!wide.is_same(target.memory())) target.memory().copy_(wide);
    target.finish();
  });
}

void ShmBackend::scatter_sums(RunningCall& running, const at::Tensor& output, const Tensors& inputs, Op op) {
  const Reducer reducer = reducer_of(output.scalar_type(), op);
  check_count(inputs.size(), size_, "inputs");
  Tensors wide;
  Sources sources;
  for (const at::Tensor& input : inputs) {
    check_like(input, output, "input");
    wide.push_back(widened(flat(input), reducer.dtype));
    sources.push_back(wide.back().data_ptr());
  }
  Target target(output);
  at::Tensor sum = target.memory();
  if (sum.scalar_type() != reducer.dtype) sum = at::empty(sum.sizes(), sum.options().dtype(reducer.dtype));
  running.start();
  acclimate_comm::reduce_scatter(running.group, sources, sum.data_ptr(), elements_of(sum), reducer.reduce);
  if (!sum.is_same(target.memory())) target.memory().copy_(sum);
  target.finish();
}

WorkPointer ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  const Outline outline(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", Kind::kReduceScatter,
                        first(outputs), options, outputs);
  return run(outline, [this, outputs, inputs, op = options.reduceOp](RunningCall& running) {
    TORCH_CHECK(inputs.size() == 1, "reduce_scatter takes one list of inputs");
    scatter_sums(running, only(outputs), inputs[0], op_of(op));
  });
}

WorkPointer ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  const Outline outline(c10d::OpType::_REDUCE_SCATTER_BASE, "shm:_reduce_scatter_base", Kind::kReduceScatter,
                        output, options, {output});
  return run(outline, [this, output, input, op = options.reduceOp](RunningCall& running) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    check_times(input, output, size_, "input", "output");
    scatter_sums(running, output, rows_for(output, input, size_), op_of(op));
  });
}

WorkPointer ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& options) {
  const Outline outline(c10d::OpType::COALESCED, "shm:reduce_scatter", Kind::kReduceScatter, first(outputs),
                        options, outputs);
  return run(outline, [this, outputs, inputs, op = options.reduceOp](RunningCall& running) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter needs as many inputs as outputs, ",
                outputs.size(), ", but got ", inputs.size());
    for (size_t i = 0; i < outputs.size(); i++) {
      check_times(inputs[i], outputs[i], size_, "input", "output");
    }
    for (size_t i = 0; i < outputs.size(); i++) {
      running.next(call_of(Kind::kReduceScatter, outputs[i], 0, number_of(op)), outputs.size() - 1 - i);
      scatter_sums(running, outputs[i], rows_for(outputs[i], inputs[i], size_), op_of(op));
    }
  });
}

// -- moves -------------------------------------------------------------------------------------------

WorkPointer ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Outline outline(c10d::OpType::BROADCAST, "shm:broadcast", Kind::kBroadcast, first(tensors), options,
                        tensors);
  return run(outline, [this, tensors, options](RunningCall& running) {
    const int root = rank_in(options.rootRank, size_, "the root");
    const at::Tensor& tensor = only(tensors);
    Target target(tensor, running.group.rank() == root);
    running.start();
    acclimate_comm::broadcast(running.group, target.data(), elements_of(tensor).bytes(), root);
    if (running.group.rank() != root) target.finish();
  });
}

void ShmBackend::gather_one(RunningCall& running, const Tensors& outputs, const at::Tensor& input) {
  TargetList targets(outputs, input, size_);
  const at::Tensor source = flat(input);
  running.start();
  acclimate_comm::all_gather(running.group, source.data_ptr(), targets.memory(), elements_of(source).bytes());
  targets.finish();
}

// Gathers into equal parts of one tensor.
void ShmBackend::gather_into(RunningCall& running, const at::Tensor& output, const at::Tensor& input) {
  check_times(output, input, size_, "output", "input");
  Target target(output);
  const at::Tensor source = flat(input);
  const size_t bytes = elements_of(source).bytes();
  running.start();
  acclimate_comm::all_gather(running.group, source.data_ptr(), parts_of(target.data(), bytes, size_), bytes);
  target.finish();
}

WorkPointer ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) {
  const Outline outline(c10d::OpType::ALLGATHER, "shm:all_gather", Kind::kAllGather, first(inputs), options,
                        outputs.empty() ? Tensors() : outputs[0]);
  return run(outline, [this, outputs, inputs](RunningCall& running) {
    const at::Tensor& input = only(inputs);
    TORCH_CHECK(outputs.size() == 1, "all_gather takes one list of outputs");
    gather_one(running, outputs[0], input);
  });
}

WorkPointer ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                        const c10d::AllgatherOptions& options) {
  const Outline outline(c10d::OpType::_ALLGATHER_BASE, "shm:_all_gather_base", Kind::kAllGather, input,
                        options, {output});
  return run(outline, [this, output, input](RunningCall& running) { gather_into(running, output, input); });
}

WorkPointer ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) {
  Tensors all;
  for (const Tensors& list : outputs) all.insert(all.end(), list.begin(), list.end());
  const Outline outline(c10d::OpType::ALLGATHER_COALESCED, "shm:all_gather", Kind::kAllGather, first(inputs),
                        options, all);
  return run(outline, [this, outputs, inputs](RunningCall& running) {
    check_count(outputs.size(), size_, "lists of outputs");
    for (const Tensors& list : outputs) {
      TORCH_CHECK(list.size() == inputs.size(), "each list of outputs must have one output per input, ",
                  inputs.size(), ", but one has ", list.size());
    }
    for (size_t i = 0; i < inputs.size(); i++) {
      Tensors of_input;
      for (const Tensors& list : outputs) of_input.push_back(list[i]);
      running.next(call_of(Kind::kAllGather, inputs[i]), inputs.size() - 1 - i);
      gather_one(running, of_input, inputs[i]);
    }
  });
}

WorkPointer ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  const Outline outline(c10d::OpType::COALESCED, "shm:all_gather_into_tensor", Kind::kAllGather,
                        first(inputs), options, outputs);
  return run(outline, [this, outputs, inputs](RunningCall& running) {
    TORCH_CHECK(outputs.size() == inputs.size(), "all_gather needs as many outputs as inputs, ",
                inputs.size(), ", but got ", outputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
      check_times(outputs[i], inputs[i], size_, "output", "input");
    }
    for (size_t i = 0; i < inputs.size(); i++) {
      running.next(call_of(Kind::kAllGather, inputs[i]), inputs.size() - 1 - i);
      gather_into(running, outputs[i], inputs[i]);
    }
  });
}

WorkPointer ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::GatherOptions& options) {
  const Outline outline(c10d::OpType::GATHER, "shm:gather", Kind::kGather, first(inputs), options,
                        outputs.empty() ? Tensors() : outputs[0]);
  return run(outline, [this, outputs, inputs, options](RunningCall& running) {
    const int root = rank_in(options.rootRank, size_, "the root");
    const at::Tensor& input = only(inputs);
    TargetList targets;
    if (rank_ == root) {
      TORCH_CHECK(outputs.size() == 1, "gather takes one list of outputs on its root");
      targets = TargetList(outputs[0], input, size_);
    }
    const at::Tensor source = flat(input);
    running.start();
    acclimate_comm::gather(running.group, source.data_ptr(), targets.memory(), elements_of(source).bytes(),
                           root);
    targets.finish();
  });
}

WorkPointer ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ScatterOptions& options) {
  const Outline outline(c10d::OpType::SCATTER, "shm:scatter", Kind::kScatter, first(outputs), options,
                        outputs);
  return run(outline, [this, outputs, inputs, options](RunningCall& running) {
    const int root = rank_in(options.rootRank, size_, "the root");
    const at::Tensor& output = only(outputs);
    Tensors sources;
    Sources memory;
    if (rank_ == root) {
      TORCH_CHECK(inputs.size() == 1, "scatter takes one list of inputs on its root");
      check_count(inputs[0].size(), size_, "inputs");
      for (const at::Tensor& input : inputs[0]) {
        check_like(input, output, "input");
        sources.push_back(flat(input));
        memory.push_back(sources.back().data_ptr());
      }
    }
    Target target(output);
    running.start();
    acclimate_comm::scatter(running.group, memory, target.data(), elements_of(output).bytes(), root);
    target.finish();
  });
}

WorkPointer ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                      const c10d::AllToAllOptions& options) {
  const Outline outline(c10d::OpType::ALLTOALL_BASE, "shm:all_to_all", Kind::kAllToAll, input, options,
                        {output});
  return run(outline, [this, output, input, output_splits, input_splits](RunningCall& running) {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(),
                "output and input must have one dtype, but the output is ", output.scalar_type(),
                " and the input ", input.scalar_type());
    const at::Tensor source = flat(input);
    Target target(output);
    const std::vector<size_t> sent = sizes_of(source, input_splits, size_);
    const std::vector<size_t> received = sizes_of(target.memory(), output_splits, size_);
    Sources from;
    Targets to;
    size_t from_offset = 0, to_offset = 0;
    for (int rank = 0; rank < size_; rank++) {
      from.push_back(static_cast<const char*>(source.data_ptr()) + from_offset);
      to.push_back(static_cast<char*>(target.data()) + to_offset);
      from_offset += sent[rank];
      to_offset += received[rank];
    }
    running.start();
    acclimate_comm::all_to_all(running.group, from, sent, to, received, input.element_size());
    target.finish();
  });
}

WorkPointer ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const Outline outline(c10d::OpType::ALLTOALL, "shm:all_to_all", Kind::kAllToAll, first(inputs), options,
                        outputs);
  return run(outline, [this, outputs, inputs](RunningCall& running) {
    check_count(inputs.size(), size_, "inputs");
    check_count(outputs.size(), size_, "outputs");
    Tensors sources;
    std::vector<Target> targets;
    Sources from;
    Targets to;
    std::vector<size_t> sent, received;
    for (int rank = 0; rank < size_; rank++) {
      for (const at::Tensor& tensor : {inputs[rank], outputs[rank]}) {
        TORCH_CHECK(tensor.scalar_type() == inputs[0].scalar_type(),
                    "all tensors must have one dtype, but one is ", tensor.scalar_type(), " and the first ",
                    inputs[0].scalar_type());
      }
      sources.push_back(flat(inputs[rank]));
      targets.emplace_back(outputs[rank]);
      from.push_back(sources.back().data_ptr());
      to.push_back(targets.back().data());
      sent.push_back(elements_of(inputs[rank]).bytes());
      received.push_back(elements_of(outputs[rank]).bytes());
    }
    running.start();
    acclimate_comm::all_to_all(running.group, from, sent, to, received, inputs[0].element_size());
    for (Target& target : targets) target.finish();
  });
}

WorkPointer ShmBackend::barrier(const c10d::BarrierOptions& options) {
  static const at::Tensor nothing = at::empty({0}, at::kByte);
  const Outline outline(c10d::OpType::BARRIER, "shm:barrier", Kind::kBarrier, nothing, options, {});
  return run(outline, [](RunningCall& running) {
    running.start();
    acclimate_comm::barrier(running.group);
  });
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  c10d::BarrierOptions waited = options;
  waited.asyncOp = false;
  barrier(waited)->wait();
}

// -- messages ----------------------------------------------------------------------------------------

WorkPointer ShmBackend::message(Tensors& tensors, int peer, int tag, bool is_sent) {
  const at::Tensor& tensor = only(tensors);
  TORCH_CHECK(peer != rank_, "rank ", rank_, " cannot send to or receive from itself");
  constexpr int kLargestTag = std::numeric_limits<int>::max();
  TORCH_CHECK(tag >= 0, "a tag must be from 0 to ", kLargestTag, ", but is ", tag);
  const Call call = call_of(is_sent ? Kind::kSend : Kind::kReceive, tensor, tag);
  throw_if_forked(call);
  calls_++;
  const auto type = is_sent            ? c10d::OpType::SEND
                    : peer == kAnyRank ? c10d::OpType::RECVANYSOURCE
                                       : c10d::OpType::RECV;
  auto work = c10::make_intrusive<ShmWork>(rank_, type, is_sent ? "shm:send" : "shm:recv", tensors);
  // The target keeps the memory until the message is sent or received.
  const auto target = std::make_shared<Target>(is_sent ? flat(tensor) : tensor);
  const auto done = [work, target, is_sent](std::exception_ptr failure, int source) {
    try {
      if (failure) std::rethrow_exception(failure);
      if (!is_sent) target->finish();
    } catch (const CommError& error) {
      try {
        raise(error);
      } catch (...) {
        failure = std::current_exception();
      }
    } catch (...) {
      failure = std::current_exception();
    }
    work->came_from(source);
    work->complete(failure);
  };
  {
    const std::lock_guard lock(messages_mutex_);
    if (!messages_) messages_ = std::make_unique<Messages>(*group_);
  }
  const size_t bytes = elements_of(tensor).bytes();
  if (is_sent) {
    messages_->send(target->data(), bytes, call, peer, done);
  } else {
    messages_->receive(target->data(), bytes, call, peer, done);
  }
  return work;
}

WorkPointer ShmBackend::send(Tensors& tensors, int to, int tag) {
  return message(tensors, rank_in(to, size_, "the receiver"), tag, true);
}

WorkPointer ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return message(tensors, rank_in(from, size_, "the sender"), tag, false);
}

WorkPointer ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(tensors, kAnyRank, tag, false);
}

// -- Python ------------------------------------------------------------------------------------------

namespace {

using pybind11::call_guard;
using pybind11::gil_scoped_release;

std::shared_ptr<Group> open_group(int descriptor, int rank, const std::vector<pid_t>& pids, size_t slot_bytes,
                                  size_t ring_bytes, int64_t timeout_ms, bool has_spare_cores) {
  try {
    return std::make_shared<Group>(descriptor, rank, pids, Geometry{slot_bytes, ring_bytes},
                                   milliseconds(timeout_ms), has_spare_cores);
  } catch (const CommError& error) {
    raise(error);
  }
}

c10::intrusive_ptr<c10d::Backend> backend_of(std::shared_ptr<Group> group) {
  return c10::make_intrusive<ShmBackend>(std::move(group));
}

}  // namespace
}  // namespace acclimate_comm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace comm = acclimate_comm;
  pybind11::class_<comm::Group, std::shared_ptr<comm::Group>>(module, "Group");
  module.def("open_group", &comm::open_group, comm::call_guard<comm::gil_scoped_release>());
  module.def("backend_of", &comm::backend_of, comm::call_guard<comm::gil_scoped_release>());
  module.def("bytes", &comm::Layout::bytes);
  module.def("use_isa", &comm::use_isa);
  module.attr("MOST_RANKS") = comm::kMostRanks;
}
