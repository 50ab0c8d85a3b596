// Runs a collective in its caller's thread or in the background, and converts errors to torch's.
#pragma once

#include "arguments.h"
#include "backend.h"

namespace acclimate_comm {

// One running collective. The other ranks learn of it only at start().
class ShmBackend::RunningCall {
 public:
  RunningCall(Group& group, const Call& call, std::chrono::milliseconds timeout, bool is_background)
      : group(group), call_(call), timeout_(timeout), is_background_(is_background) {}

  void start() {
    group.begin(call_, timeout_, is_background_);
    has_started_ = true;
  }
  // Sets the next of several collectives of one call, after which so many are left.
  void next(const Call& call, size_t left) {
    call_ = call;
    call_.root = static_cast<uint32_t>(left);
    has_started_ = false;
  }
  // Tells the other ranks that the arguments are wrong, unless the collective has started.
  void refuse() {
    if (!has_started_) group.refuse(call_, timeout_, is_background_);
  }
  // Tells the other ranks that this rank cannot do its part.
  void give_up(const std::exception& error) {
    refuse();
    if (has_started_)
      group.abort("Rank " + std::to_string(group.rank()) + " failed in " + describe(call_) + ": " +
                  error.what() + ".");
  }

  Group& group;

 private:
  Call call_;
  std::chrono::milliseconds timeout_;
  bool is_background_;
  bool has_started_ = false;
};

// What a method of torch.distributed passes to run(), apart from its body.
struct ShmBackend::Outline {
  // Options: any of c10d's option structs, which all have `timeout` and `asyncOp`; some have a reduction or a
  // root, which the ranks compare. `example` has the dtype and number of elements that they compare.
  template <class Options>
  Outline(c10d::OpType type, const char* title, Kind kind, const at::Tensor& example, const Options& options,
          Tensors outputs)
      : type(type),
        title(title),
        call(call_of(kind, example)),
        timeout(bounded(options.timeout)),
        is_async(options.asyncOp),
        outputs(std::move(outputs)) {
    if constexpr (requires { options.reduceOp; }) call.op = static_cast<uint8_t>(number_of(options.reduceOp));
    if constexpr (requires { options.rootRank; }) call.root = static_cast<uint32_t>(options.rootRank);
  }

  c10d::OpType type;
  const char* title;
  Call call;
  std::chrono::milliseconds timeout;
  bool is_async;
  Tensors outputs;
};

template <class Body>
WorkPointer ShmBackend::run(Outline outline, Body body) {
  throw_if_forked(outline.call);
  calls_++;
  const bool may_wait = !outline.is_async;
  auto work = c10::make_intrusive<ShmWork>(rank_, outline.type, outline.title, std::move(outline.outputs));
  const auto running_call_of = [this, call = outline.call, timeout = outline.timeout](bool is_background) {
    return RunningCall(*group_, call, timeout, is_background);
  };
  const auto run_body = [running_call_of, body = std::move(body)](bool is_background) {
    RunningCall running = running_call_of(is_background);
    try {
      try {
        body(running);
      } catch (const CommError&) {
        throw;
      } catch (const c10::Error&) {
        running.refuse();
        throw;
      } catch (const std::exception& error) {  // such as std::bad_alloc
        running.give_up(error);
        throw;
      }
    } catch (const CommError& error) {
      raise(error);
    }
  };
  try {
    queue_->run(work, may_wait, run_body);
  } catch (const CommError& error) {  // there is no thread for it
    running_call_of(false).refuse();
    raise(error);
  }
  return work;
}

}  // namespace acclimate_comm
