// Gated delta rules: each head's state is changed by every token.
#include <cmath>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

// As torch's softplus.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

// How much a head writes of what a token's value differs from what its key finds.
float Step::strength_of(const DeltaRule& rule, const float* projected, int64_t head) const {
  float strength = projected[rule.first_strength() + head];
  sigmoid(decoder_.dtype, &strength, 1);
  return strength * rule.strength_factor;
}

// What a head's state is multiplied by before a token.
float Step::decay_of(const DeltaRule& rule, const float* projected, int64_t head) const {
  const float rate = std::exp(rule.rates[head]);
  return std::exp(-rate * softplus(projected[rule.first_decay() + head] + rule.decay_bias[head]));
}

// Normalizes a head's result and multiplies it by its gates.
void Step::finish_head(const DeltaRule& rule, const float* projected, int64_t head, ThreadState& state,
                       float* result) const {
  const int64_t values = rule.value_size;
  round_values(decoder_.dtype, result, values);
  normalize(rule.norm, decoder_.dtype, result, values, 0, result);
  float* gate = at_least(state.gate, values);
  const float* gates = projected + rule.first_gate() + head * values;
  std::copy(gates, gates + values, gate);
  activate(rule.gate_activation, Dtype::f32, nullptr, gate, values);
  multiply_values(decoder_.dtype, gate, result, values);
}

// Computes one head's state after a token, of its convolved query, key and value, and the head's result.
void Step::update_head(const DeltaRule& rule, const float* projected, const float* query, const float* key,
                       const float* value, int64_t head, const float* before, ThreadState& state,
                       float* after, float* result) const {
  const int64_t keys = rule.key_size, values = rule.value_size;
  float* unit_query = at_least(state.branch, 2 * keys);
  float* unit_key = unit_query + keys;
  divide_by_length(query, rule.eps, rule.scale, keys, unit_query);
  divide_by_length(key, rule.eps, 1.0f, keys, unit_key);
  update_state(before, unit_query, unit_key, value, decay_of(rule, projected, head),
               strength_of(rule, projected, head), keys, values, at_least(state.normed, values), after,
               result);
  finish_head(rule, projected, head, state, result);
}

// Changes the states by the tokens, puts the inputs of the convolution into the cache, and the heads' results
// into `wide_`.
void Step::update_states(Team& team, const DeltaRule& own, size_t index, const Call& call) {
  const DeltaRule* const rule = &own;
  const Call* const given = &call;
  const int64_t heads = own.heads, keys = own.key_size, values = own.value_size, size = own.state_size();
  const int64_t group = heads / own.key_heads, all_keys = own.key_heads * keys;
  // The results of a unit: the state, then what the head leaves.
  team.share(
      call.batch * heads,
      [=, this](int64_t unit, int thread) {
        ThreadState& state = *thread_states_[thread];
        const int64_t sequence = unit / heads, head = unit % heads, first = head / group * keys;
        const LayerCache& cache = given->cache.layers[index];
        const float* from = projected_.data() + sequence * rule->projections.width;
        float* query = at_least(state.heads, 2 * keys + values);
        float* key = query + keys;
        float* value = key + keys;
        const auto convolve = [&](int64_t channel, int64_t count, float* to) {
          convolve_channels(rule->taps, cache, sequence, given->place, from, channel, count, state, to);
        };
        convolve(first, keys, query);
        convolve(all_keys + first, keys, key);
        convolve(2 * all_keys + head * values, values, value);
        activate(rule->activation, decoder_.dtype, nullptr, query, 2 * keys + values);
        float* results = at_least(state.results, size + values);
        update_head(*rule, from, query, key, value, head, cache.state + unit * size, state, results,
                    results + size);
      },
      [=, this](int64_t unit, int thread) {
        const int64_t sequence = unit / heads, head = unit % heads, first = head / group * keys;
        const LayerCache& cache = given->cache.layers[index];
        const float* from = projected_.data() + sequence * rule->projections.width;
        const float* results = thread_states_[thread]->results.data();
        std::copy(results, results + size, cache.new_state + unit * size);
        std::copy(results + size, results + size + values, wide_.data() + unit * values);
        const auto keep = [&](int64_t channel, int64_t count) {
          store_channels(rule->taps, cache, sequence, given->place, from, channel, count);
        };
        if (head % group == 0) {
          keep(first, keys);
          keep(all_keys + first, keys);
        }
        keep(2 * all_keys + head * values, values);
      });
}

}  // namespace acclimate::inference::decode
