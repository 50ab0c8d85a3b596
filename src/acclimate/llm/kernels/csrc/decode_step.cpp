#include "decode_step.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace acclimate::inference::decode {
namespace {

constexpr int64_t shortest_part = 128;  // keys that are worth a thread of their own

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

}  // namespace

Step::Step(Reader& from) : decoder_(from) {
  check();
  widest_ = decoder_.hidden;
  const auto see = [&](const Product& product) {
    widest_ = std::max({widest_, product.k, product.width});
    int64_t done = 0;
    for (const Part& part : product.parts) {
      if (part.weight.format != WeightFormat::dense &&
          (part.first % group_rows != 0 || done % group_rows != 0)) {
        throw std::runtime_error("a part of a quantised weight begins within a group of rows");
      }
      if (part.first < 0 || part.count < 0 || part.first + part.count > part.weight.n) {
        throw std::runtime_error("a part of a weight is outside of it");
      }
      done += part.count;
    }
  };
  for (const Layer& layer : decoder_.layers) {
    const Attention& attention = layer.attention;
    see(attention.projections);
    see(attention.output);
    if (layer.mlp.has_value()) {
      for (const Product* product : {&layer.mlp->gate, &layer.mlp->up, &layer.mlp->down, &layer.mlp_gate}) {
        see(*product);
      }
      widest_inner_ = std::max(widest_inner_, layer.mlp->up.width);
    }
    if (layer.experts.has_value()) {
      const Router& router = layer.experts->router;
      see(router.logits);
      most_experts_ = std::max(most_experts_, router.logits.width);
      widest_pairs_ = std::max(widest_pairs_, router.used * layer.experts->width());
    }
    widest_projections_ = std::max(widest_projections_, attention.projections.width);
    widest_values_ = std::max(widest_values_, attention.heads * attention.value_size);
  }
  can_screen_ = suits_screen();
}

void Step::check() const {
  const auto need = [](bool fits) {
    if (!fits) {
      throw std::runtime_error("the sizes in a decoder's description do not fit together");
    }
  };
  const auto is_product = [&](const Product& product, int64_t k, int64_t width) {
    need(product.width == width && !product.parts.empty());
    for (const Part& part : product.parts) {
      need(part.weight.k == k);
    }
  };
  need(decoder_.hidden > 0 && decoder_.tables >= 0 && decoder_.embedding.k == decoder_.hidden);
  need(decoder_.dtype >= Dtype::f32 && decoder_.dtype <= Dtype::f16);
  need(decoder_.positions.data == nullptr || decoder_.positions.k == decoder_.hidden);
  need(decoder_.position_offset >= 0 && decoder_.first_token >= 0);
  need(decoder_.embedding_is_summed ? decoder_.first_token <= decoder_.tokens - decoder_.embedding.n
                                    : decoder_.tokens == decoder_.embedding.n);
  for (const Layer& layer : decoder_.layers) {
    const Attention& attention = layer.attention;
    const int64_t heads = attention.heads, key_heads = attention.key_heads;
    const int64_t size = attention.head_size, value_size = attention.value_size;
    need(key_heads > 0 && heads > 0 && heads % key_heads == 0 && size > 0 && value_size > 0);
    need(attention.table >= -1 && attention.table < decoder_.tables && attention.window >= 0);
    need(attention.query_factors >= -1 && attention.query_factors < decoder_.factors);
    need(attention.table < 0 || (attention.pairs >= 0 && 2 * attention.pairs <= size));
    is_product(attention.projections, decoder_.hidden, heads * size + key_heads * (size + value_size));
    is_product(attention.output, heads * value_size, decoder_.hidden);
    need(layer.mlp.has_value() || layer.experts.has_value());
    if (layer.mlp.has_value()) {
      const Mlp& mlp = *layer.mlp;
      is_product(mlp.up, decoder_.hidden, mlp.up.width);
      need(mlp.is_gated != mlp.gate.parts.empty());
      if (mlp.is_gated) {
        is_product(mlp.gate, decoder_.hidden, mlp.up.width);
      }
      is_product(mlp.down, mlp.up.width, decoder_.hidden);
    }
    if (!layer.mlp_gate.parts.empty()) {
      need(layer.mlp.has_value());
      is_product(layer.mlp_gate, decoder_.hidden, 1);
    }
    if (layer.experts.has_value()) {
      const Experts& experts = *layer.experts;
      const Router& router = experts.router;
      const int64_t count = experts.inner.count, inner = experts.inner.first.n, width = experts.width();
      is_product(router.logits, decoder_.hidden, count);
      need(count > 0 && experts.down.count == count && router.used > 0 && router.used <= count);
      need(router.groups >= 0 && (router.groups == 0 || count % router.groups == 0));
      need(router.groups == 0 || (router.used_groups > 0 && router.used_groups <= router.groups &&
                                  router.best_of_group > 0 && router.best_of_group <= count / router.groups));
      need(width > 0 && inner == (experts.gating.is_gated ? 2 * width : width));
      need(experts.inner.first.k == decoder_.hidden && experts.down.first.n == decoder_.hidden);
      // Ups begin within a group of rows if gates do not fill their last one.
      need(experts.inner.first.format == WeightFormat::dense || !experts.gating.is_gated ||
           experts.interleaved || width % group_rows == 0);
    }
  }
  is_product(*decoder_.head, decoder_.hidden, decoder_.head->width);
}

Step::~Step() = default;

void Step::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  screen_is_checked_ = false;
}

void Step::run(const Call& call, int threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t batch = call.batch;
  make_thread_states(threads);
  update_screen(call, threads);
  int64_t most_heads = 1, mixed = 1;
  for (const Layer& layer : decoder_.layers) {
    const Attention& attention = layer.attention;
    const int64_t parts = parts_of(attention, call, threads);
    most_heads = std::max(most_heads, attention.heads * parts);
    mixed = std::max(mixed, attention.heads * parts * attention.value_size);
  }
  at_least(projected_, batch * widest_projections_);
  at_least(attended_, batch * decoder_.hidden);
  at_least(summed_, batch * decoder_.hidden);
  at_least(inner_, batch * widest_inner_);
  at_least(routed_, batch * most_experts_);
  at_least(expert_inner_, batch * widest_pairs_);
  at_least(shared_, most_experts_ > 0 ? batch * decoder_.hidden : 0);
  at_least(mixed_, batch * mixed);
  at_least(peaks_, batch * most_heads);
  at_least(sums_, batch * most_heads);
  auto work = [&](int thread, int count) { this->work(call, thread, count); };
  run_threads(threads, work);
  keep_best(call);
}

void Step::make_thread_states(int threads) {
  while (static_cast<int>(thread_states_.size()) < threads) {
    thread_states_.push_back(std::make_unique<ThreadState>());
  }
  for (const auto& state : thread_states_) {
    state->best.clear();  // there may be fewer threads than last time
  }
}

// Every thread keeps all of the residual stream: computing it again is cheaper than one more barrier.
void Step::work(const Call& call, int thread, int threads) {
  ThreadState& state = *thread_states_[thread];
  embed(call, state, thread, threads);
  for (size_t index = 0; index < decoder_.layers.size(); ++index) {
    const Layer& layer = decoder_.layers[index];
    project(layer, call, state, thread, threads);
    barrier_.wait(threads);
    attend(layer, index, call, state, thread, threads);
    barrier_.wait(threads);
    merge(layer.attention, call, state, threads);
    const Product& output = layer.attention.output;
    auto [first, last] = share(output.width, thread, threads);
    multiply(output, state, state.wide.data(), first, last, call.batch, attended_.data(), decoder_.hidden);
    barrier_.wait(threads);
    if (layer.attention.output_is_summed) {
      sum_over_ranks(attended_.data(), call.batch * decoder_.hidden, thread, threads);
    }
    feed_forward(layer, call, state, thread, threads);
    add_branches(layer, call, state);
  }
  finish(call, state, thread, threads);
}

// Sums a vector for each row; all threads have written their parts of it.
void Step::sum_over_ranks(float* values, int64_t count, int thread, int threads) {
  if (thread == 0) {
    decoder_.exchange(values, count);
    round_values(decoder_.dtype, values, count);
  }
  barrier_.wait(threads);
}

void Step::embed(const Call& call, ThreadState& state, int thread, int threads) {
  const int64_t hidden = decoder_.hidden;
  float* x = at_least(state.x, call.batch * hidden);
  const bool is_summed = decoder_.embedding_is_summed;
  if (!is_summed || thread == 0) {
    float* rows = is_summed ? summed_.data() : x;
    for (int64_t i = 0; i < call.batch; ++i) {
      look_up(call.tokens[i], rows + i * hidden);
    }
  }
  if (is_summed) {
    sum_over_ranks(summed_.data(), call.batch * hidden, thread, threads);
    std::copy(summed_.data(), summed_.data() + call.batch * hidden, x);
  }
  for (int64_t i = 0; i < call.batch; ++i) {
    finish_embedding(call.place - call.starts[i], state, x + i * hidden);
  }
}

// -- products -------------------------------------------------------------------------------------

Input Step::input_for(const Weight& weight, Dtype dtype, ThreadState& state, const float* x,
                      int64_t batch) const {
  const Form form = form_of(weight, dtype);
  const int index = static_cast<int>(form);
  if (state.is_ready[index]) {
    return state.input[index];
  }
  const int64_t k = weight.k, stride = input_stride(form, k);
  Line* memory = at_least(state.memory[index], static_cast<int64_t>(input_bytes(form, batch, k) + 63) / 64);
  if (form == Form::bf16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(memory);
    for (int64_t i = 0; i < batch; ++i) {
      fill_bf16(x + i * k, k, stride, to + i * stride);
    }
    state.input[index] = {form, batch, k, stride, memory, nullptr, nullptr, nullptr};
  } else {
    state.input[index] = prepare(form, Dtype::f32, x, k, batch, k, memory);
  }
  state.is_ready[index] = true;
  return state.input[index];
}

// Computes columns first to last of a product, to[i * stride + column], rounded to a dtype. The input is
// prepared once until forget_input.
void Step::multiply_as(Dtype dtype, const Product& product, ThreadState& state, const float* x, int64_t first,
                       int64_t last, int64_t batch, float* to, int64_t stride) const {
  int64_t begin = 0;
  for (const Part& part : product.parts) {
    const int64_t from = std::max(first, begin), until = std::min(last, begin + part.count);
    if (from < until) {
      const Input input = input_for(part.weight, dtype, state, x, batch);
      const int64_t row = part.first + from - begin;
      compute(part.weight, input, row, row + until - from, to + from, stride);
      const float* bias = part.bias == nullptr ? nullptr : part.bias + row;
      for (int64_t i = 0; i < batch; ++i) {
        float* result = to + i * stride + from;
        add_bias(dtype, bias, result, until - from, result);
      }
    }
    begin += part.count;
  }
}

// -- attention ------------------------------------------------------------------------------------

void Step::project(const Layer& layer, const Call& call, ThreadState& state, int thread, int threads) {
  const int64_t hidden = decoder_.hidden;
  float* start = at_least(state.start, call.batch * hidden);
  for (int64_t i = 0; i < call.batch; ++i) {
    normalize(layer.attention_norm, decoder_.dtype, state.x.data() + i * hidden, hidden, 0,
              start + i * hidden);
  }
  state.forget_input();
  const Product& product = layer.attention.projections;
  const auto [first, last] = share(product.width, thread, threads);
  multiply(product, state, start, first, last, call.batch, projected_.data(), product.width);
}

// The number of parts into which the keys of a head are divided, so that each thread has work.
int64_t Step::parts_of(const Attention& attention, const Call& call, int threads) const {
  const int64_t units = call.batch * attention.key_heads;
  const int64_t keys = attention.window > 0 ? std::min(attention.window, call.place + 1) : call.place + 1;
  return std::clamp((threads + units - 1) / units, int64_t{1}, std::max<int64_t>(keys / shortest_part, 1));
}

void Step::attend(const Layer& layer, size_t index, const Call& call, ThreadState& state, int thread,
                  int threads) {
  const Attention& attention = layer.attention;
  const int64_t parts = parts_of(attention, call, threads);
  const int64_t units = call.batch * attention.key_heads * parts;
  for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; ++unit) {
    const int64_t head = unit / parts;
    attend_part(attention, index, call, state, head / attention.key_heads, head % attention.key_heads,
                unit % parts, parts);
  }
}

void Step::attend_part(const Attention& attention, size_t index, const Call& call, ThreadState& state,
                       int64_t sequence, int64_t key_head, int64_t part, int64_t parts) {
  const int64_t size = attention.head_size, value_size = attention.value_size, heads = attention.heads;
  const int64_t group = heads / attention.key_heads, capacity = call.cache.capacity;
  const int64_t bytes = size_of(decoder_.dtype);
  const float* queries = projected_.data() + sequence * attention.projections.width;
  const float* keys = queries + heads * size;
  const float* values = keys + attention.key_heads * size;
  const int64_t row = sequence * attention.key_heads + key_head;
  uint8_t* key_cache = call.cache.keys[index] + row * capacity * size * bytes;
  uint8_t* value_cache = call.cache.values[index] + row * capacity * value_size * bytes;
  const int64_t end = call.place + 1;
  int64_t begin = call.starts[sequence];
  if (attention.window > 0) {
    begin = std::max(begin, end - attention.window);
  }
  // Parts begin at whole vectors, but the first one.
  const auto edge = [&](int64_t p) {
    return p == 0 ? begin : p == parts ? end : std::max(begin, (begin + (end - begin) * p / parts) / 32 * 32);
  };
  const int64_t first = edge(part), count = edge(part + 1) - first;
  float* own_heads = at_least(state.heads, (max_rows + 1) * std::max(size, value_size));
  const int64_t position = call.place - call.starts[sequence];
  if (part == parts - 1) {
    prepare_head(attention, attention.key_norm, call.cache, position, keys, key_head, attention.key_heads,
                 state, own_heads);
    store(decoder_.dtype, own_heads, size, key_cache, call.place * size, 1);
    store(decoder_.dtype, values + key_head * value_size, value_size, value_cache, call.place, capacity);
  }
  const Weight key_weight{WeightFormat::dense, decoder_.dtype, count, size, key_cache + first * size * bytes,
                          size * bytes};
  const Weight value_weight{WeightFormat::dense,         decoder_.dtype,  value_size, count,
                            value_cache + first * bytes, capacity * bytes};
  for (int64_t done = 0; done < group; done += max_rows) {
    const int64_t rows = std::min(group - done, max_rows), head = key_head * group + done;
    float* peaks = peaks_.data() + (sequence * heads + head) * parts + part;
    float* sums = sums_.data() + (sequence * heads + head) * parts + part;
    float* mixed = mixed_.data() + ((sequence * heads + head) * parts + part) * value_size;
    if (count <= 0) {
      for (int64_t i = 0; i < rows; ++i) {
        peaks[i * parts] = minus_infinity;
        sums[i * parts] = 0;
        std::fill(mixed + i * parts * value_size, mixed + (i * parts + 1) * value_size, 0.0f);
      }
      continue;
    }
    const Form form = form_of(key_weight, decoder_.dtype);
    const auto prepared = [&](std::vector<Line>& memory, const float* from, int64_t k, int64_t from_stride) {
      const int64_t stride = input_stride(form, k);
      Line* to = at_least(memory, static_cast<int64_t>(input_bytes(form, rows, k) + 63) / 64);
      for (int64_t i = 0; i < rows; ++i) {
        if (form == Form::bf16) {
          fill_bf16(from + i * from_stride, k, stride, reinterpret_cast<uint16_t*>(to) + i * stride);
        } else {
          fill_f32(from + i * from_stride, k, stride, reinterpret_cast<float*>(to) + i * stride);
        }
      }
      return Input{form, rows, k, stride, to, nullptr, nullptr, nullptr};
    };
    for (int64_t i = 0; i < rows; ++i) {
      prepare_query(attention, call.cache, position, queries, head + i, state, own_heads + i * size);
    }
    float* scores = at_least(state.scores, rows * count);
    compute(key_weight, prepared(state.query, own_heads, size, size), 0, count, scores, count);
    for (int64_t i = 0; i < rows; ++i) {
      float* line = scores + i * count;
      float factor = attention.scale;
      if (attention.softcap > 0) {
        for (int64_t j = 0; j < count; ++j) {
          line[j] *= factor;
        }
        soft_cap(attention.softcap, line, count);
        factor = 1.0f;
      }
      const float top = largest(line, count) * factor;
      peaks[i * parts] = top;
      sums[i * parts] = exponentials(factor, top, line, count);
    }
    compute(value_weight, prepared(state.weights, scores, count, count), 0, value_size, mixed,
            parts * value_size);
  }
}

// Joins the parts of each head to the input of the output projection.
void Step::merge(const Attention& attention, const Call& call, ThreadState& state, int threads) {
  const int64_t parts = parts_of(attention, call, threads), size = attention.value_size;
  const int64_t width = attention.heads * size;
  float* wide = at_least(state.wide, call.batch * std::max(width, widest_inner_));
  for (int64_t i = 0; i < call.batch * attention.heads; ++i) {
    const float* peaks = peaks_.data() + i * parts;
    const float* sums = sums_.data() + i * parts;
    float top = *std::max_element(peaks, peaks + parts), total = 0;
    if (attention.sinks != nullptr) {
      const float sink = attention.sinks[i % attention.heads];
      top = std::max(top, sink);
      total = std::exp(sink - top);
    }
    for (int64_t part = 0; part < parts; ++part) {
      total += sums[part] * std::exp(peaks[part] - top);
    }
    float* to = wide + i * size;
    std::fill(to, to + size, 0.0f);
    for (int64_t part = 0; part < parts; ++part) {
      const float factor = std::exp(peaks[part] - top) / total;
      accumulate(factor, mixed_.data() + (i * parts + part) * size, to, size);
    }
    round_values(decoder_.dtype, to, size);
  }
  state.forget_input();
}

// -- the rest of a layer --------------------------------------------------------------------------

void Step::feed_forward(const Layer& layer, const Call& call, ThreadState& state, int thread, int threads) {
  const int64_t hidden = decoder_.hidden, batch = call.batch;
  float* branch = at_least(state.branch, batch * hidden);
  float* normed = at_least(state.normed, batch * hidden);
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t row = i * hidden;
    join_attention(layer, attended_.data() + row, state.start.data() + row, state.x.data() + row,
                   branch + row, normed + row);
  }
  state.forget_input();
  if (layer.experts.has_value()) {
    return use_experts(layer, call, state, thread, threads);
  }
  multiply_inner(*layer.mlp, state, batch, thread, threads);
  barrier_.wait(threads);
  state.forget_input();
  const Product& down = layer.mlp->down;
  const auto [from, until] = share(down.width, thread, threads);
  multiply(down, state, inner_.data(), from, until, batch, summed_.data(), hidden);
  barrier_.wait(threads);
  if (layer.mlp->down_is_summed) {
    sum_over_ranks(summed_.data(), batch * hidden, thread, threads);
  }
}

// A thread's columns between the products of an MLP.
void Step::multiply_inner(const Mlp& mlp, ThreadState& state, int64_t batch, int thread, int threads) {
  const float* normed = state.normed.data();
  const int64_t width = mlp.up.width;
  const auto [first, last] = share(width, thread, threads);
  multiply(mlp.up, state, normed, first, last, batch, inner_.data(), width);
  float* gate = nullptr;
  if (mlp.is_gated) {
    gate = at_least(state.gate, batch * width);
    multiply(mlp.gate, state, normed, first, last, batch, gate, width);
  }
  for (int64_t i = 0; i < batch; ++i) {
    activate(mlp.activation, decoder_.dtype, gate == nullptr ? nullptr : gate + i * width + first,
             inner_.data() + i * width + first, last - first);
  }
}

void Step::add_branches(const Layer& layer, const Call& call, ThreadState& state) const {
  for (int64_t i = 0; i < call.batch; ++i) {
    const int64_t row = i * decoder_.hidden;
    const float* result = summed_.data() + row;
    if (layer.experts.has_value() && layer.mlp.has_value()) {
      float* both = at_least(state.products, decoder_.hidden);
      std::copy(result, result + decoder_.hidden, both);
      add_shared(layer, shared_.data() + row, layer.mlp_gate.parts.empty() ? 1.0f : state.mlp_gates[i], both,
                 at_least(state.wide, decoder_.hidden));
      result = both;
    }
    join_mlp(layer, result, state.branch.data() + row, state.x.data() + row, state);
  }
}

}  // namespace acclimate::inference::decode
