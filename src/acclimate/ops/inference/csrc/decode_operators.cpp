// acclimate::decode_*: a decoder's step; the schemas are in acclimate.ops.inference.decode_operators.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

using torch::stable::Tensor;

struct Started {
  std::vector<int64_t> program;
  std::shared_ptr<Step> step;  // null after a fork, until it is needed
};

std::mutex mutex;
std::map<int64_t, Started> steps;
int64_t last_number = 0;

// At a fork another thread may be in the middle of a step, which no thread of the child will end. So the
// child leaves the parent's steps as they are, and reads the programs again.
void before_fork() { mutex.lock(); }

void after_fork_in_parent() { mutex.unlock(); }

void after_fork_in_child() {
  for (auto& [number, started] : steps) {
    new std::shared_ptr<Step>(std::move(started.step));  // never freed
  }
  mutex.unlock();
}

[[maybe_unused]] const int watches_forks =
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

const int64_t* numbers(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.const_data_ptr()); }

int64_t start(const Tensor& program) {
  const int64_t* first = numbers(program);
  Started started{{first, first + program.numel()}, nullptr};
  Reader reader(started.program.data(), program.numel());
  started.step = std::make_shared<Step>(reader);
  const std::lock_guard<std::mutex> lock(mutex);
  steps[++last_number] = std::move(started);
  return last_number;
}

std::shared_ptr<Step> found_step(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = steps.find(number);
  STD_TORCH_CHECK(found != steps.end(), "There is no decoder ", number, ".");
  Started& started = found->second;
  if (started.step == nullptr) {
    Reader reader(started.program.data(), static_cast<int64_t>(started.program.size()));
    started.step = std::make_shared<Step>(reader);
  }
  return started.step;
}

void step(int64_t number, const Tensor& cache, const Tensor& tokens, const Tensor& starts, int64_t place,
          Tensor logits, Tensor best, Tensor largest, int64_t threads) {
  const std::shared_ptr<Step> step = found_step(number);
  Reader reader(numbers(cache), cache.numel());
  Call call{numbers(tokens), numbers(starts), starts.numel(), place, {}, nullptr, nullptr};
  call.length = tokens.numel() / std::max<int64_t>(call.batch, 1);
  call.cache.capacity = reader.number();
  const int64_t tables = reader.number(), layers = reader.number();
  for (int64_t i = 0; i < tables; ++i) {
    call.cache.cos.push_back(reader.address<float>());
    call.cache.sin.push_back(reader.address<float>());
  }
  for (int64_t i = 0; i < layers; ++i) {
    call.cache.keys.push_back(const_cast<uint8_t*>(reader.address<uint8_t>()));
    call.cache.values.push_back(const_cast<uint8_t*>(reader.address<uint8_t>()));
  }
  STD_TORCH_CHECK(call.batch <= max_rows && place + call.length <= call.cache.capacity,
                  "The cache has no room for a step.");
  if (logits.numel() > 0) {
    call.logits = static_cast<float*>(logits.mutable_data_ptr());
  }
  if (best.numel() > 0) {
    call.best = static_cast<int64_t*>(best.mutable_data_ptr());
    call.largest = static_cast<float*>(largest.mutable_data_ptr());
  }
  if (call.length == 1) {
    step->run(call, static_cast<int>(threads));
  } else {
    step->read(call, static_cast<int>(threads));
  }
}

void begin(int64_t number) { found_step(number)->begin(); }

bool can_read(int64_t number) { return found_step(number)->can_read(); }

void end(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  steps.erase(number);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("decode_start", TORCH_BOX(&start));
  m.impl("decode_begin", TORCH_BOX(&begin));
  m.impl("decode_step", TORCH_BOX(&step));
  m.impl("decode_can_read", TORCH_BOX(&can_read));
  m.impl("decode_end", TORCH_BOX(&end));
}

}  // namespace acclimate::inference::decode
