#include "decode_step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <numeric>
#include <stdexcept>

namespace acclimate::inference::decode {
namespace {

// What is worth a thread of its own: so many products with numbers of keys and values, but at least and at
// most so many keys.
constexpr int64_t work_of_part = 1 << 17, fewest_keys = 32, enough_keys = 128;

// The number of keys that are worth a thread of their own.
int64_t shortest_part(const Attention& attention) {
  const int64_t group = attention.heads / attention.key_heads;
  const int64_t work = group * (attention.head_size + attention.value_size);
  return std::clamp(work_of_part / work, fewest_keys, enough_keys);
}

// Of weights: a product is divided into pieces of about this size. A processor takes about a microsecond
// until it reads from a new place at full speed: on Zen 4, pieces of 64 KB that are not read one after the
// other were read at 21 GB/s, of 256 KB at 28 GB/s, and whole weights at 32 GB/s.
constexpr int64_t bytes_together = 256 << 10;

// Of the weights of one group of rows.
int64_t bytes_of_group(const Product& product) {
  const Weight& weight = product.parts.front().weight;
  return weight.format == WeightFormat::dense ? weight.stride * group_rows : weight.stride;
}

}  // namespace

Step::Step(Reader& from) : decoder_(from) {
  check();
  widest_ = decoder_.hidden;
  const auto see = [&](const Product& product) {
    widest_ = std::max({widest_, product.k, product.width});
    for (const Part& part : product.parts) {
      if (part.first < 0 || part.count < 0 || part.first + part.count > part.weight.n) {
        throw std::runtime_error("a part of a weight is outside of it");
      }
    }
  };
  if (decoder_.token_inputs.has_value()) {
    see(decoder_.token_inputs->product);
  }
  for (const Layer& layer : decoder_.layers) {
    see(layer.projections());
    see(layer.mixer_output());
    widest_projections_ = std::max(widest_projections_, layer.projections().width);
    widest_values_ = std::max(widest_values_, layer.mixed());
    if (layer.token_input.has_value()) {
      see(layer.token_input->gate);
      see(layer.token_input->output);
    }
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
      most_used_ = std::max(most_used_, router.used);
      widest_expert_ = std::max(widest_expert_, layer.experts->width());
    }
    if (layer.attention.has_value() && layer.attention->latent.has_value()) {
      const Attention& attention = *layer.attention;
      const Latent& latent = *attention.latent;
      see(latent.queries);
      widest_queries_ = std::max(widest_queries_, attention.heads * latent.query_size());
      widest_absorbed_ = std::max(widest_absorbed_, attention.heads * attention.head_size);
      widest_expanded_ = std::max(widest_expanded_, attention.heads * latent.value_size());
    }
  }
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
  if (decoder_.token_inputs.has_value()) {
    const TokenInputs& inputs = *decoder_.token_inputs;
    need(inputs.size > 0 && inputs.width() % inputs.size == 0 && inputs.table.k == inputs.width());
    need(inputs.table.n == decoder_.tokens && !decoder_.embedding_is_summed);
    is_product(inputs.product, decoder_.hidden, inputs.width());
  }
  const auto check_taps = [&](const Taps& taps) {
    need(taps.channels > 0 && taps.width > 0 && taps.weights != nullptr);
  };
  const auto check_attention = [&](const Attention& attention) {
    const int64_t heads = attention.heads, key_heads = attention.key_heads;
    const int64_t size = attention.head_size, value_size = attention.value_size;
    need(key_heads > 0 && heads > 0 && heads % key_heads == 0 && size > 0 && value_size > 0);
    need(attention.table >= -1 && attention.table < decoder_.tables && attention.window >= 0);
    need(attention.query_factors >= -1 && attention.query_factors < decoder_.factors);
    need(attention.table < 0 || (attention.pairs >= 0 && 2 * attention.pairs <= size));
    if (attention.latent.has_value()) {
      const Latent& latent = *attention.latent;
      const int64_t queries = heads * latent.query_size();
      const int64_t rest = latent.size() + latent.rotated, before = attention.projections.width - rest;
      need(key_heads == 1 && value_size == latent.size() && size == rest && !attention.is_shared);
      need(!attention.is_gated);
      need(latent.keys.count == heads && latent.values.count == heads);
      need(latent.key_size > 0 && latent.rotated >= 0 && latent.keys.first.k == latent.key_size);
      need(latent.size() > 0 && latent.value_size() > 0 && latent.values.first.k == latent.size());
      need(latent.keys.first.format == WeightFormat::dense);
      need(latent.values.first.format == WeightFormat::dense);
      need(attention.table < 0 || 2 * attention.pairs == latent.rotated);
      is_product(attention.projections, decoder_.hidden, before + rest);
      if (latent.queries.parts.empty()) {
        need(before == queries);
      } else {
        is_product(latent.queries, before, queries);
      }
    } else {
      const int64_t own = attention.is_shared ? 0 : key_heads * (size + value_size);
      const int64_t gates = attention.is_gated ? heads * value_size : 0;
      is_product(attention.projections, decoder_.hidden, heads * size + own + gates);
    }
    is_product(attention.output, heads * attention.result_size(), decoder_.hidden);
  };
  for (const Layer& layer : decoder_.layers) {
    if (layer.token_input.has_value()) {
      const TokenInput& added = *layer.token_input;
      need(decoder_.token_inputs.has_value() && added.index >= 0);
      const TokenInputs& inputs = *decoder_.token_inputs;
      need((added.index + 1) * inputs.size <= inputs.width());
      is_product(added.gate, decoder_.hidden, inputs.size);
      is_product(added.output, inputs.size, decoder_.hidden);
    }
    need(layer.attention.has_value() + layer.convolution.has_value() + layer.delta_rule.has_value() == 1);
    if (layer.attention.has_value()) {
      check_attention(*layer.attention);
    } else if (layer.convolution.has_value()) {
      const Convolution& convolution = *layer.convolution;
      check_taps(convolution.taps);
      is_product(convolution.projections, decoder_.hidden, 3 * convolution.taps.channels);
      is_product(convolution.output, convolution.taps.channels, decoder_.hidden);
    } else {
      const DeltaRule& rule = *layer.delta_rule;
      const int64_t heads = rule.heads, key_heads = rule.key_heads;
      check_taps(rule.taps);
      need(key_heads > 0 && heads > 0 && heads % key_heads == 0 && rule.key_size > 0 && rule.value_size > 0);
      need(rule.taps.channels == 2 * key_heads * rule.key_size + rule.result_size());
      need(rule.decay_bias != nullptr && rule.rates != nullptr);
      is_product(rule.projections, decoder_.hidden, rule.first_decay() + heads);
      is_product(rule.output, rule.result_size(), decoder_.hidden);
    }
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
      // Their results are normalized before the shared MLP's is added.
      need(!experts.norms.has_value() || (layer.mlp.has_value() && !layer.parallel));
    }
  }
  is_product(*decoder_.head, decoder_.hidden, decoder_.head->width);
}

Step::~Step() = default;

void Step::run(const Call& call, int threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  make_memory(call, threads);
  const auto start = std::chrono::steady_clock::now();
  const std::clock_t ran_before = std::clock();  // of the process
  int64_t slept = 0;
  {
    Team team(thread_choice_.next(threads, call.batch));
    make_thread_states(team.threads(), call.batch);
    work(call, team, threads);
    slept = team.slept();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const double ran = static_cast<double>(std::clock() - ran_before) / CLOCKS_PER_SEC;
  thread_choice_.took({took.count(), ran, static_cast<double>(slept) * 1e-9});
  keep_best(call);
}

// No phase may enlarge what a unit reads, since a thread may still compute a unit of the phase before.
void Step::make_memory(const Call& call, int threads) {
  const int64_t batch = call.batch, hidden = decoder_.hidden;
  int64_t most_heads = 1, mixed = 1;
  for (const Layer& layer : decoder_.layers) {
    if (!layer.attention.has_value()) {
      continue;
    }
    const Attention& attention = *layer.attention;
    const int64_t parts = parts_of(attention, call, threads);
    most_heads = std::max(most_heads, attention.heads * parts);
    mixed = std::max(mixed, attention.heads * parts * attention.value_size);
  }
  at_least(projected_, batch * widest_projections_);
  at_least(attended_, batch * hidden);
  at_least(summed_, batch * hidden);
  at_least(inner_, batch * widest_inner_);
  at_least(mixed_, batch * mixed);
  at_least(peaks_, batch * most_heads);
  at_least(sums_, batch * most_heads);
  for (std::vector<float>* values : {&x_, &start_, &normed_, &branch_}) {
    at_least(*values, batch * hidden);
  }
  at_least(wide_, batch * widest_values_);
  if (decoder_.token_inputs.has_value()) {
    at_least(token_inputs_, batch * decoder_.token_inputs->width());
    at_least(token_input_, batch * decoder_.token_inputs->size);
    at_least(token_gates_, batch * decoder_.token_inputs->size);
  }
  at_least(latent_inner_, widest_queries_ > 0 ? batch * widest_projections_ : 0);
  at_least(latent_queries_, batch * widest_queries_);
  at_least(absorbed_, batch * widest_absorbed_);
  at_least(expanded_, batch * widest_expanded_);
  const int64_t pairs = batch * most_used_;
  at_least(routed_, batch * most_experts_);
  at_least(expert_inner_, pairs * widest_expert_);
  at_least(chosen_experts_, pairs);
  at_least(chosen_weights_, pairs);
  at_least(gates_, batch);
  at_least(shared_, most_experts_ > 0 ? batch * hidden : 0);
  at_least(expert_given_, most_experts_ > 0 ? batch * hidden : 0);
  at_least(chosen_, layers());
  for (int form = 0; form < 3; ++form) {
    const size_t bytes = std::max(input_bytes(static_cast<Form>(form), batch, widest_),
                                  input_bytes(static_cast<Form>(form), pairs, widest_expert_));
    at_least(input_memory_[form], static_cast<int64_t>(bytes + 63) / 64);
  }
}

void Step::make_thread_states(int threads, int64_t batch) {
  while (static_cast<int>(thread_states_.size()) < threads) {
    thread_states_.push_back(std::make_unique<ThreadState>());
  }
  for (const auto& state : thread_states_) {
    std::fill(state->best, state->best + batch, Best{minus_infinity, 0});
  }
}

void Step::work(const Call& call, Team& team, int parts_for) {
  const int64_t hidden = decoder_.hidden, batch = call.batch;
  embed(call);
  make_token_inputs(call, team);
  for (size_t index = 0; index < decoder_.layers.size(); ++index) {
    const Layer& layer = decoder_.layers[index];
    for (int64_t i = 0; i < batch; ++i) {
      trace_input(call.traces[index], i, x_.data() + i * hidden);
      normalize(layer.mixer_norm, decoder_.dtype, x_.data() + i * hidden, hidden, 0,
                start_.data() + i * hidden);
    }
    multiply(team, layer.projections(), start_.data(), batch, projected_.data());
    mix(team, layer, index, call, parts_for);
    const bool is_latent = layer.attention.has_value() && layer.attention->latent.has_value();
    const std::vector<float>& results = is_latent ? expanded_ : wide_;
    multiply(team, layer.mixer_output(), results.data(), batch, attended_.data());
    if (layer.mixer_is_summed()) {
      sum_over_ranks(attended_.data(), batch * hidden);
    }
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t row = i * hidden;
      join_attention(layer, attended_.data() + row, start_.data() + row, x_.data() + row,
                     branch_.data() + row, normed_.data() + row);
    }
    feed_forward(team, layer, index, call);
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t row = i * hidden;
      join_mlp(layer, summed_.data() + row, branch_.data() + row, x_.data() + row, *thread_states_[0]);
    }
    end_layer(team, layer, batch);
  }
  for (int64_t i = 0; i < batch; ++i) {
    trace_input(call.traces.back(), i, x_.data() + i * hidden);
  }
  finish(call, team, x_.data());
}

// Notes a row of a layer's input in a proof, and replaces it by the given one.
void Step::trace_input(const LayerTrace& trace, int64_t row, float* x) const {
  const int64_t hidden = decoder_.hidden;
  if (trace.inputs != nullptr) {
    std::copy(x, x + hidden, trace.inputs + row * hidden);
  }
  if (trace.given != nullptr) {
    std::copy(trace.given + row * hidden, trace.given + (row + 1) * hidden, x);
  }
}

// What is between a layer's first products and its output projection.
void Step::mix(Team& team, const Layer& layer, size_t index, const Call& call, int threads) {
  if (layer.convolution.has_value()) {
    convolve(team, *layer.convolution, index, call);
    return;
  }
  if (layer.delta_rule.has_value()) {
    update_states(team, *layer.delta_rule, index, call);
    return;
  }
  const Attention& attention = *layer.attention;
  const bool is_latent = attention.latent.has_value();
  if (is_latent) {
    project_latents(team, attention, index, call);
  } else if (attention.normalizes_rows()) {
    normalize_rows(attention, call.batch);
  }
  if (!is_latent && !attention.is_shared) {
    store_keys(team, attention, index, call);
  }
  const int64_t parts = parts_of(attention, call, threads);
  attend(team, attention, index, call, parts);
  merge(attention, call, parts);
  if (is_latent) {
    expand_latents(team, attention, call.batch);
  }
}

// Sums a vector for each row.
void Step::sum_over_ranks(float* values, int64_t count) {
  decoder_.exchange(values, count);
  round_values(decoder_.dtype, values, count);
}

void Step::embed(const Call& call) {
  const int64_t hidden = decoder_.hidden;
  for (int64_t i = 0; i < call.batch; ++i) {
    look_up(call.tokens[i], x_.data() + i * hidden);
  }
  if (decoder_.embedding_is_summed) {
    sum_over_ranks(x_.data(), call.batch * hidden);
  }
  for (int64_t i = 0; i < call.batch; ++i) {
    finish_embedding(call.place - call.starts[i], *thread_states_[0], x_.data() + i * hidden);
  }
}

// What tokens have for each layer.
void Step::make_token_inputs(const Call& call, Team& team) {
  if (!decoder_.token_inputs.has_value()) {
    return;
  }
  const TokenInputs& inputs = *decoder_.token_inputs;
  multiply(team, inputs.product, x_.data(), call.batch, token_inputs_.data());
  for (int64_t i = 0; i < call.batch; ++i) {
    finish_token_inputs(call.tokens[i], *thread_states_[0], token_inputs_.data() + i * inputs.width());
  }
}

// Adds what tokens have for a layer to its results, and multiplies these.
void Step::end_layer(Team& team, const Layer& layer, int64_t batch) {
  const int64_t hidden = decoder_.hidden;
  if (layer.token_input.has_value()) {
    const int64_t size = decoder_.token_inputs->size;
    multiply(team, layer.token_input->gate, x_.data(), batch, token_gates_.data());
    for (int64_t i = 0; i < batch; ++i) {
      use_token_input(*layer.token_input, token_inputs_.data() + i * decoder_.token_inputs->width(),
                      token_gates_.data() + i * size, token_input_.data() + i * size);
    }
    multiply(team, layer.token_input->output, token_input_.data(), batch, attended_.data());
  }
  for (int64_t i = 0; i < batch; ++i) {
    finish_layer(layer, attended_.data() + i * hidden, *thread_states_[0], x_.data() + i * hidden);
  }
}

// -- products -------------------------------------------------------------------------------------

Step::Pieces::Pieces(const Product& product, int64_t bytes_of_group, int threads) : Pieces(product.width, 1) {
  *this = Pieces(rows, even(std::max<int64_t>(groups * bytes_of_group / bytes_together, 1), threads));
}

// Prepares the inputs of products of the same width. Those of the products before are overwritten.
Step::Inputs Step::inputs_for(const float* x, int64_t batch, Dtype dtype,
                              std::initializer_list<const Product*> products) {
  Inputs inputs{};
  bool is_ready[3] = {};
  for (const Product* product : products) {
    for (const Part& part : product->parts) {
      const int index = static_cast<int>(form_of(part.weight, dtype));
      if (!is_ready[index]) {
        inputs.by_form[index] = input_for(part.weight, x, batch, dtype);
      }
      is_ready[index] = true;
    }
  }
  return inputs;
}

Input Step::input_for(const Weight& weight, const float* x, int64_t batch, Dtype dtype) {
  const Form form = form_of(weight, dtype);
  const int64_t k = weight.k, stride = input_stride(form, k);
  Line* memory = input_memory_[static_cast<int>(form)].data();
  if (form != Form::bf16) {
    return prepare(form, Dtype::f32, x, k, batch, k, memory);
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(memory);
  for (int64_t i = 0; i < batch; ++i) {
    fill_bf16(x + i * k, k, stride, to + i * stride);
  }
  return {form, batch, k, stride, memory, nullptr, nullptr, nullptr};
}

Input rows_as_input(Form form, const float* from, int64_t rows, int64_t k, int64_t stride,
                    std::vector<Line>& memory) {
  const int64_t own_stride = input_stride(form, k);
  Line* to = at_least(memory, static_cast<int64_t>(input_bytes(form, rows, k) + 63) / 64);
  for (int64_t i = 0; i < rows; ++i) {
    if (form == Form::bf16) {
      fill_bf16(from + i * stride, k, own_stride, reinterpret_cast<uint16_t*>(to) + i * own_stride);
    } else {
      fill_f32(from + i * stride, k, own_stride, reinterpret_cast<float*>(to) + i * own_stride);
    }
  }
  return Input{form, rows, k, own_stride, to, nullptr, nullptr, nullptr};
}

// Computes columns first to last of a product, to[i * stride + column - first], rounded to a dtype.
void Step::multiply(const Product& product, const Inputs& inputs, Dtype dtype, int64_t first, int64_t last,
                    int64_t batch, float* to, int64_t stride) const {
  int64_t begin = 0;
  for (const Part& part : product.parts) {
    const int64_t from = std::max(first, begin), until = std::min(last, begin + part.count);
    if (from < until) {
      const int64_t row = part.first + from - begin;
      compute(part.weight, inputs.of(part.weight, dtype), row, row + until - from, to + from - first, stride);
      const float* bias = part.bias == nullptr ? nullptr : part.bias + row;
      for (int64_t i = 0; i < batch; ++i) {
        float* result = to + i * stride + from - first;
        add_bias(dtype, bias, result, until - from, result);
      }
    }
    begin += part.count;
  }
}

void Step::multiply_as(Dtype dtype, Team& team, const Product& product, const float* x, int64_t batch,
                       float* to) {
  const Inputs inputs = inputs_for(x, batch, dtype, {&product});
  const Pieces pieces(product, bytes_of_group(product), team.threads());
  const Product* const factors = &product;
  share_columns(team, pieces, batch, to, [=, this](ThreadState& state, int64_t first, int64_t last) {
    float* own = at_least(state.results, batch * pieces.most_rows());
    multiply(*factors, inputs, dtype, first, last, batch, own, last - first);
  });
}

// -- attention ------------------------------------------------------------------------------------

// The number of parts into which the keys of a head are divided, so that each thread has work: as for one
// sequence, because a text must not depend on the others. A short sequence of several has fewer.
int64_t Step::parts_of(const Attention& attention, const Call& call, int threads) const {
  const int64_t heads = attention.key_heads;
  const int64_t keys = attention.window > 0 ? std::min(attention.window, call.place + 1) : call.place + 1;
  // With few heads, all threads get the same number of parts.
  const int64_t wanted = heads < 4 * threads ? threads / std::gcd(heads, int64_t{threads}) : 1;
  return std::clamp(wanted, int64_t{1}, std::max<int64_t>(keys / shortest_part(attention), 1));
}

// Normalizes the queries of all heads together, and the keys.
void Step::normalize_rows(const Attention& attention, int64_t batch) {
  const int64_t width = attention.projections.width;
  float* sums = at_least(squares_, 2 * batch);
  if (attention.query_norm.shared_columns > 0) {
    for (int64_t i = 0; i < batch; ++i) {
      sum_squares(attention, projected_.data() + i * width, sums + 2 * i);
    }
    decoder_.exchange(sums, 2 * batch);
  }
  for (int64_t i = 0; i < batch; ++i) {
    normalize_row(attention, sums + 2 * i, projected_.data() + i * width);
  }
}

// Puts the keys and values of the tokens into the cache.
void Step::store_keys(Team& team, const Attention& own, size_t index, const Call& call) {
  const Attention* const attention = &own;
  const Call* const given = &call;
  const int64_t size = attention->head_size, value_size = attention->value_size;
  const int64_t key_heads = attention->key_heads, width = attention->projections.width;
  const float* const keys = projected_.data() + attention->heads * size;
  team.share(
      call.batch * key_heads,
      [=, this](int64_t unit, int thread) {
        const int64_t sequence = unit / key_heads, head = unit % key_heads;
        ThreadState& state = *thread_states_[thread];
        float* key = at_least(state.results, size + value_size);
        prepare_head(*attention, attention->key_norm, given->cache, given->place - given->starts[sequence],
                     keys + sequence * width, head, key);
        const float* values = keys + sequence * width + key_heads * size;
        prepare_value(*attention, values, head, key + size);
      },
      [=, this](int64_t unit, int thread) {
        const LayerCache& cache = given->cache.layers[index];
        const int64_t at = given->place - cache.first;
        const float* key = thread_states_[thread]->results.data();
        store_key(cache, unit, at, key, size);
        store_value(cache, unit, at, key + size, value_size);
      });
}

void Step::attend(Team& team, const Attention& own, size_t index, const Call& call, int64_t parts) {
  const Attention* const attention = &own;
  const Call* const given = &call;
  const int64_t key_heads = attention->key_heads, value_size = attention->value_size;
  const int64_t group = attention->heads / key_heads;
  // The results of a unit: the mixed values, then the peaks and the sums.
  team.share(
      call.batch * key_heads * parts,
      [=, this](int64_t unit, int thread) {
        const int64_t head = unit / parts;
        attend_part(*attention, index, *given, *thread_states_[thread], head / key_heads, head % key_heads,
                    unit % parts, parts);
      },
      [=, this](int64_t unit, int thread) {
        const float* own = thread_states_[thread]->results.data();
        const int64_t first = unit / parts * group, part = unit % parts;
        for (int64_t i = 0; i < group; ++i) {
          const int64_t to = (first + i) * parts + part;
          std::copy(own + i * value_size, own + (i + 1) * value_size, mixed_.data() + to * value_size);
          peaks_[to] = own[group * value_size + i];
          sums_[to] = own[group * value_size + group + i];
        }
      });
}

void Step::attend_part(const Attention& attention, size_t index, const Call& call, ThreadState& state,
                       int64_t sequence, int64_t key_head, int64_t part, int64_t parts) const {
  const int64_t size = attention.head_size, value_size = attention.value_size, heads = attention.heads;
  const LayerCache& cache = call.cache.layers[index];
  const int64_t group = heads / attention.key_heads;
  const float* queries = attention.latent.has_value()
                             ? absorbed_.data() + sequence * heads * size
                             : projected_.data() + sequence * attention.projections.width;
  const int64_t row = sequence * attention.key_heads + key_head;
  const int64_t end = call.place + 1;
  int64_t begin = call.starts[sequence];
  if (attention.window > 0) {
    begin = std::max(begin, end - attention.window);
  }
  // Parts are whole vectors from the first key on, wherever that is in the cache.
  const int64_t own_parts = std::clamp<int64_t>((end - begin) / shortest_part(attention), 1, parts);
  const auto edge = [&](int64_t p) {
    return p < own_parts ? begin + (end - begin) * p / own_parts / 32 * 32 : end;
  };
  const int64_t first = edge(part), count = edge(part + 1) - first;
  float* own_heads = at_least(state.heads, max_rows * size);
  float* results = at_least(state.results, group * (value_size + 2));
  const int64_t position = call.place - call.starts[sequence];
  const int64_t at = first - cache.first;
  for (int64_t done = 0; done < group; done += max_rows) {
    const int64_t rows = std::min(group - done, max_rows), head = key_head * group + done;
    float* mixed = results + done * value_size;
    float* peaks = results + group * value_size + done;
    float* sums = peaks + group;
    if (count <= 0) {
      std::fill(mixed, mixed + rows * value_size, 0.0f);
      std::fill(peaks, peaks + rows, minus_infinity);
      std::fill(sums, sums + rows, 0.0f);
      continue;
    }
    for (int64_t i = 0; i < rows; ++i) {
      prepare_query(attention, call.cache, position, queries, head + i, own_heads + i * size);
    }
    float* scores = at_least(state.scores, rows * count);
    multiply_keys(cache, row, at, size, own_heads, rows, count, state, scores);
    for (int64_t i = 0; i < rows; ++i) {
      sums[i] = weigh(attention.scale, attention.softcap, scores + i * count, count, peaks[i]);
    }
    mix_values(cache, row, at, value_size, scores, rows, count, state, mixed);
  }
}

// Multiplies some queries by the keys of `count` tokens, from `at` on, in a row of the cache.
void Step::multiply_keys(const LayerCache& cache, int64_t row, int64_t at, int64_t size, const float* queries,
                         int64_t rows, int64_t count, ThreadState& state, float* scores) const {
  const int64_t place = row * cache.capacity + at;
  if (cache.is_int8()) {
    compute(Int8Rows{count, size, reinterpret_cast<const int8_t*>(cache.keys) + place * size, size,
                     cache.key_exponents + place * int8_blocks(size)},
            rows_as_input(Form::f32, queries, rows, size, size, state.query), scores, count);
    return;
  }
  const int64_t bytes = size * size_of(decoder_.dtype);
  const Weight keys{WeightFormat::dense, decoder_.dtype, count, size, cache.keys + place * bytes, bytes};
  const Form form = form_of(keys, decoder_.dtype);
  compute(keys, rows_as_input(form, queries, rows, size, size, state.query), 0, count, scores, count);
}

// Sums the values of these tokens with some rows of weights.
void Step::mix_values(const LayerCache& cache, int64_t row, int64_t at, int64_t size, const float* weights,
                      int64_t rows, int64_t count, ThreadState& state, float* mixed) const {
  const int64_t capacity = cache.capacity, first = row * capacity * size + at;
  if (!cache.is_int8()) {
    const int64_t bytes = size_of(decoder_.dtype);
    const Weight values{WeightFormat::dense,          decoder_.dtype,  size, count,
                        cache.values + first * bytes, capacity * bytes};
    const Form form = form_of(values, decoder_.dtype);
    compute(values, rows_as_input(form, weights, rows, count, count, state.weights), 0, size, mixed, size);
    return;
  }
  // A block's powers of two multiply the weights of their tokens, and not each of its elements.
  const auto* codes = reinterpret_cast<const int8_t*>(cache.values) + first;
  const uint8_t* exponents = cache.value_exponents + row * capacity * int8_blocks(size) + at;
  const Input input = rows_as_input(Form::f32, weights, rows, count, count, state.weights);
  float* const scaled = reinterpret_cast<float*>(state.weights.data());
  for (int64_t column = 0; column < size; column += int8_columns) {
    for (int64_t i = 0; i < rows; ++i) {
      scale_by_powers(weights + i * count, exponents, count, scaled + i * input.stride);
    }
    const int64_t some = std::min(int8_columns, size - column);
    compute(Int8Rows{some, count, codes + column * capacity, capacity, nullptr}, input, mixed + column, size);
    exponents += capacity;
  }
}

// Joins the parts of each head to the input of the output projection.
void Step::merge(const Attention& attention, const Call& call, int64_t parts) {
  const int64_t size = attention.value_size;
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
    float* to = wide_.data() + i * size;
    std::fill(to, to + size, 0.0f);
    for (int64_t part = 0; part < parts; ++part) {
      const float factor = std::exp(peaks[part] - top) / total;
      accumulate(factor, mixed_.data() + (i * parts + part) * size, to, size);
    }
    round_values(decoder_.dtype, to, size);
  }
  if (!attention.is_gated) {
    return;
  }
  const int64_t width = attention.heads * size;
  for (int64_t i = 0; i < call.batch; ++i) {
    float* gates = projected_.data() + i * attention.projections.width + attention.first_gate();
    sigmoid(decoder_.dtype, gates, width);
    multiply_values(decoder_.dtype, gates, wide_.data() + i * width, width);
  }
}

// -- the rest of a layer --------------------------------------------------------------------------

void Step::feed_forward(Team& team, const Layer& layer, size_t index, const Call& call) {
  if (layer.experts.has_value()) {
    use_experts(team, layer, index, call);
  } else {
    use_mlp(team, *layer.mlp, call.batch, summed_.data());
  }
}

void Step::use_mlp(Team& team, const Mlp& used, int64_t batch, float* to) {
  const Mlp* const mlp = &used;
  const Inputs inputs = inputs_for(normed_.data(), batch, decoder_.dtype, {&mlp->up, &mlp->gate});
  const int64_t bytes = bytes_of_group(mlp->up) + (mlp->is_gated ? bytes_of_group(mlp->gate) : 0);
  const Pieces pieces(mlp->up, bytes, team.threads());
  share_columns(team, pieces, batch, inner_.data(),
                [=, this](ThreadState& state, int64_t first, int64_t last) {
                  const int64_t rows = last - first;
                  float* inner = at_least(state.results, batch * pieces.most_rows());
                  multiply(mlp->up, inputs, decoder_.dtype, first, last, batch, inner, rows);
                  float* gate = nullptr;
                  if (mlp->is_gated) {
                    gate = at_least(state.gate, batch * pieces.most_rows());
                    multiply(mlp->gate, inputs, decoder_.dtype, first, last, batch, gate, rows);
                  }
                  for (int64_t i = 0; i < batch; ++i) {
                    activate(mlp->activation, decoder_.dtype, gate == nullptr ? nullptr : gate + i * rows,
                             inner + i * rows, rows);
                  }
                });
  multiply(team, mlp->down, inner_.data(), batch, to);
  if (mlp->down_is_summed) {
    sum_over_ranks(to, batch * decoder_.hidden);
  }
}

}  // namespace acclimate::inference::decode
