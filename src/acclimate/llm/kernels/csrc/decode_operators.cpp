// acclimate::decode_*: a decoder's step; the schemas are in acclimate.llm.kernels.operators.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
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

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t most_threads = 1024;

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

void check_memory(const Tensor& tensor, ScalarType dtype, const char* role) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype, "The ", role,
                  " of a decoder are not contiguous on the host, or of another dtype.");
}

const int64_t* numbers(const Tensor& tensor, const char* role) {
  check_memory(tensor, ScalarType::Long, role);
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

// Null for an empty tensor: the result is not wanted.
template <class T>
T* results(const Tensor& tensor, ScalarType dtype, int64_t count, const char* role) {
  check_memory(tensor, dtype, role);
  STD_TORCH_CHECK(tensor.numel() == 0 || tensor.numel() == count, "A decoder has ", count, " ", role,
                  ", not ", tensor.numel(), ".");
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.mutable_data_ptr());
}

int64_t start(const Tensor& program) {
  const int64_t* first = numbers(program, "numbers");
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

LayerTrace read_trace(Reader& reader) {
  LayerTrace trace;
  trace.given = reader.address<float>();
  trace.inputs = const_cast<float*>(reader.address<float>());
  trace.forced = reader.address<int64_t>();
  trace.chosen = const_cast<int64_t*>(reader.address<int64_t>());
  trace.logits = const_cast<float*>(reader.address<float>());
  return trace;
}

// Returns false, and does nothing, if a token or a position has no row in its table.
bool step(int64_t number, const Tensor& cache, const Tensor& tokens, const Tensor& starts, int64_t place,
          Tensor logits, Tensor best, Tensor largest, int64_t threads) {
  const std::shared_ptr<Step> step = found_step(number);
  Reader reader(numbers(cache, "addresses"), cache.numel());
  Call call{
      numbers(tokens, "tokens"), numbers(starts, "starts"), starts.numel(), place, {}, nullptr, nullptr};
  STD_TORCH_CHECK(
      call.batch > 0 && call.batch <= max_rows && tokens.numel() > 0 && tokens.numel() % call.batch == 0,
      "A step takes the tokens of 1 to ", max_rows, " sequences, not ", tokens.numel(), " of ", call.batch,
      ".");
  call.length = tokens.numel() / call.batch;
  const int64_t copy = reader.number();
  STD_TORCH_CHECK(copy == 0 || copy == 1, "States have two copies.");
  call.cache.places = reader.number();
  STD_TORCH_CHECK(place >= 0 && place <= call.cache.places && call.length <= call.cache.places - place,
                  "There are no angles for the places of a step.");
  STD_TORCH_CHECK(call.length == 1 || step->can_prefill(), "The decoder reads one token at a time.");
  for (int64_t i = 0; i < call.batch; ++i) {
    // Of several tokens, all may be padding.
    STD_TORCH_CHECK(call.starts[i] >= 0 && (call.length > 1 || call.starts[i] <= place),
                    "A sequence starts at ", call.starts[i], ", which is not before the token at ", place,
                    ".");
  }
  const int64_t tables = reader.number(), factors = reader.number(), layers = reader.number();
  STD_TORCH_CHECK(tables == step->tables() && factors == step->factors() && layers == step->layers(),
                  "The cache is another decoder's.");
  for (int64_t i = 0; i < tables; ++i) {
    call.cache.cos.push_back(reader.address<float>());
    call.cache.sin.push_back(reader.address<float>());
  }
  for (int64_t i = 0; i < factors; ++i) {
    call.cache.factors.push_back(reader.address<float>());
  }
  for (int64_t i = 0; i < layers; ++i) {
    const int64_t capacity = reader.number(), first = reader.number();
    uint8_t* parts[4];  // keys and values, and the exponents of those in 8 bits
    for (uint8_t*& part : parts) {
      part = const_cast<uint8_t*>(reader.address<uint8_t>());
    }
    float* states[2];
    for (float*& state : states) {
      state = const_cast<float*>(reader.address<float>());
    }
    STD_TORCH_CHECK((states[0] != nullptr && states[1] != nullptr) || !step->has_state(i),
                    "The cache lacks a recurrent state.");
    call.cache.layers.push_back(
        {capacity, first, parts[0], parts[1], parts[2], parts[3], states[copy], states[1 - copy]});
    STD_TORCH_CHECK((parts[2] == nullptr) == (parts[3] == nullptr),
                    "Keys are in 8 bits, and values are not, or the reverse.");
    STD_TORCH_CHECK(call.cache.layers.back().has_room(place, call.length, step->window(i)),
                    "The cache has no room for a step, or lacks tokens that it sees: layer ", i,
                    " has room for ", capacity, " tokens from ", first, " on, and a window of ",
                    step->window(i), "; the step is at ", place, ".");
    call.traces.push_back(read_trace(reader));
  }
  call.traces.push_back(read_trace(reader));
  call.logits = results<float>(logits, ScalarType::Float, call.batch * step->head_width(), "logits");
  call.best = results<int64_t>(best, ScalarType::Long, call.batch, "best tokens");
  call.largest = results<float>(largest, ScalarType::Float, call.batch, "largest logits");
  STD_TORCH_CHECK((call.best == nullptr) == (call.largest == nullptr),
                  "Best tokens and their logits are asked for together.");
  if (!step->has_rows(call)) {
    return false;
  }
  const int count = static_cast<int>(std::clamp<int64_t>(threads, 1, most_threads));
  if (call.length == 1) {
    step->run(call, count);
  } else {
    step->prefill(call, count);
  }
  return true;
}

bool can_prefill(int64_t number) { return found_step(number)->can_prefill(); }

void end(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  steps.erase(number);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("decode_start", TORCH_BOX(&start));
  m.impl("decode_step", TORCH_BOX(&step));
  m.impl("decode_can_prefill", TORCH_BOX(&can_prefill));
  m.impl("decode_end", TORCH_BOX(&end));
}

}  // namespace acclimate::inference::decode
