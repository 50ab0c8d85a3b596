// Experts: which ones each token uses, and their products.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

using Ranked = std::pair<float, int64_t>;

// As torch.topk chooses on a host, also among equal scores, which are common in bf16: the same functions of
// the standard library on the same values in the same order.
void rank(const float* scores, int64_t count, int64_t used, std::vector<Ranked>& ranked) {
  ranked.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    ranked[i] = {scores[i], i};
  }
  const auto is_before = [](const Ranked& a, const Ranked& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  };
  if (used * 64 <= count) {
    std::partial_sort(ranked.begin(), ranked.begin() + used, ranked.end(), is_before);
  } else {
    std::nth_element(ranked.begin(), ranked.begin() + used - 1, ranked.end(), is_before);
  }
}

void apply(const std::vector<Operation>& operations, Dtype dtype, float* x, int64_t n) {
  for (const Operation& operation : operations) {
    switch (operation.kind) {
      case Operation::Kind::softmax:
        softmax(x, n);
        break;
      case Operation::Kind::sigmoid:
        sigmoid(Dtype::f32, x, n);
        break;
      case Operation::Kind::normalize: {
        float total = 0;
        for (int64_t i = 0; i < n; ++i) {
          total += x[i];
        }
        for (int64_t i = 0; i < n; ++i) {
          x[i] /= total + operation.value;
        }
        break;
      }
      case Operation::Kind::scale:
        scale(Dtype::f32, operation.value, x, n);
        break;
      case Operation::Kind::soft_cap:
        soft_cap(operation.value, x, n);
        break;
      case Operation::Kind::round:
        round_values(dtype, x, n);
        break;
    }
  }
}

// Some rows of an input, one after the other.
Input gathered(const Input& input, const int64_t* rows, int64_t count, std::vector<Line>& memory) {
  bool follow = true;
  for (int64_t i = 1; i < count; ++i) {
    follow = follow && rows[i] == rows[0] + i;
  }
  if (follow) {
    return input.rows(rows[0], count);
  }
  const int64_t blocks = input.stride / 32;
  const int64_t row_bytes = input.stride * (input.form == Form::f32 ? 4 : input.form == Form::bf16 ? 2 : 1);
  const int64_t scales = input.form == Form::int8 ? blocks : 0;
  // Two scales and two sums of each block.
  uint8_t* to = reinterpret_cast<uint8_t*>(at_least(memory, (count * (row_bytes + scales * 16) + 63) / 64));
  Input some = input;
  some.m = count;
  some.values = to;
  float* own_scales = reinterpret_cast<float*>(to + count * row_bytes);
  float* own_scaled_sums = own_scales + count * scales;
  int32_t* own_sums = reinterpret_cast<int32_t*>(own_scaled_sums + count * scales);
  for (int64_t i = 0; i < count; ++i) {
    const Input row = input.rows(rows[i], 1);
    std::memcpy(to + i * row_bytes, row.values, row_bytes);
    if (input.form == Form::int8) {
      std::copy(row.scales, row.scales + blocks, own_scales + i * blocks);
      std::copy(row.scaled_sums, row.scaled_sums + blocks, own_scaled_sums + i * blocks);
      std::copy(row.sums, row.sums + 2 * blocks, own_sums + i * 2 * blocks);
    }
  }
  if (input.form == Form::int8) {
    some.scales = own_scales;
    some.scaled_sums = own_scaled_sums;
    some.sums = own_sums;
  }
  return some;
}

}  // namespace

void Chosen::group(const int64_t* chosen, const float* chosen_weights, int64_t tokens_count, int64_t used,
                   int64_t all_experts) {
  std::vector<int64_t> place(all_experts + 1, 0);
  const int64_t pairs = tokens_count * used;
  for (int64_t i = 0; i < pairs; ++i) {
    ++place[chosen[i] + 1];
  }
  experts.clear();
  begins.clear();
  for (int64_t expert = 0; expert < all_experts; ++expert) {
    const int64_t count = place[expert + 1];
    place[expert + 1] += place[expert];
    if (count > 0) {
      experts.push_back(expert);
      begins.push_back(place[expert]);
    }
  }
  begins.push_back(pairs);
  tokens.resize(pairs);
  weights.resize(pairs);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t to = place[chosen[i]]++;
    tokens[to] = i / used;
    weights[to] = chosen_weights[i];
  }
}

// Chooses the experts of one token; changes its logits.
void Step::choose_experts(const Router& router, float* logits, ThreadState& state, int64_t* chosen,
                          float* weights) const {
  const int64_t count = router.logits.width;
  apply(router.scores, decoder_.dtype, logits, count);
  const float* choice = logits;
  if (router.choice_bias != nullptr || router.groups > 0) {
    float* own = at_least(state.scores, count);
    for (int64_t i = 0; i < count; ++i) {
      own[i] = logits[i] + (router.choice_bias == nullptr ? 0.0f : router.choice_bias[i]);
    }
    choice = own;
    if (router.groups > 0) {
      const int64_t size = count / router.groups;
      float* groups = at_least(state.logits, router.groups);
      for (int64_t group = 0; group < router.groups; ++group) {
        rank(own + group * size, size, router.best_of_group, state.ranked);
        groups[group] = 0;
        for (int64_t i = 0; i < router.best_of_group; ++i) {
          groups[group] += state.ranked[i].first;
        }
      }
      rank(groups, router.groups, router.used_groups, state.ranked);
      for (int64_t i = router.used_groups; i < router.groups; ++i) {
        float* others = own + state.ranked[i].second * size;
        std::fill(others, others + size, router.others);
      }
    }
  }
  rank(choice, count, router.used, state.ranked);
  for (int64_t i = 0; i < router.used; ++i) {
    chosen[i] = state.ranked[i].second;
    weights[i] = logits[chosen[i]];
  }
  apply(router.weights, decoder_.dtype, weights, router.used);
}

// Columns first to last between the products of an expert, rounded: up[i * stride + column - first].
void Step::compute_inner(const Experts& experts, int64_t expert, const Input& input, int64_t first,
                         int64_t last, ThreadState& state, float* up, int64_t stride) const {
  const Gating& gating = experts.gating;
  const Weight weight = experts.inner.of(expert);
  const float* bias = experts.inner.bias(expert);
  const int64_t count = last - first;
  const auto bias_from = [bias](int64_t column) { return bias == nullptr ? nullptr : bias + column; };
  if (!gating.is_gated) {
    compute(weight, input, first, last, up, stride);
    for (int64_t i = 0; i < input.m; ++i) {
      add_bias(decoder_.dtype, bias_from(first), up + i * stride, count, up + i * stride);
      apply_gating(gating, decoder_.dtype, nullptr, up + i * stride, count);
    }
    return;
  }
  float* gate = at_least(state.gate, std::max<int64_t>(input.m, 2) * 2 * count);
  if (experts.interleaved) {
    compute(weight, input, 2 * first, 2 * last, gate, 2 * count);
    for (int64_t i = 0; i < input.m; ++i) {
      float* both = gate + i * 2 * count;
      add_bias(decoder_.dtype, bias_from(2 * first), both, 2 * count, both);
      for (int64_t column = 0; column < count; ++column) {
        up[i * stride + column] = both[2 * column + 1];
        both[column] = both[2 * column];
      }
      apply_gating(gating, decoder_.dtype, both, up + i * stride, count);
    }
    return;
  }
  const int64_t width = experts.width();
  compute(weight, input, first, last, gate, count);
  compute(weight, input, width + first, width + last, up, stride);
  for (int64_t i = 0; i < input.m; ++i) {
    float *own_gate = gate + i * count, *own_up = up + i * stride;
    add_bias(decoder_.dtype, bias_from(first), own_gate, count, own_gate);
    add_bias(decoder_.dtype, bias_from(width + first), own_up, count, own_up);
    apply_gating(gating, decoder_.dtype, own_gate, own_up, count);
  }
}

// A thread's part of the first products: of all groups of rows of all experts that are used.
void Step::multiply_experts(const Experts& experts, const Input& input, ThreadState& state, int thread,
                            int threads) {
  const Chosen& chosen = state.chosen;
  const int64_t width = experts.width(), groups = (width + group_rows - 1) / group_rows;
  const int64_t units = groups * static_cast<int64_t>(chosen.experts.size());
  const int64_t begin = units * thread / threads, end = units * (thread + 1) / threads;
  for (int64_t index = begin / groups; index * groups < end; ++index) {
    const int64_t first = std::max(begin - index * groups, int64_t{0}) * group_rows;
    const int64_t last = std::min((end - index * groups) * group_rows, width);
    if (first == last) {
      continue;
    }
    const int64_t pair = chosen.begins[index];
    const Input own = gathered(input, chosen.tokens.data() + pair, chosen.count(index), state.gathered);
    compute_inner(experts, chosen.experts[index], own, first, last, state,
                  expert_inner_.data() + pair * width + first, width);
  }
}

// Columns first to last of the tokens' results: sums[token * stride + column - first], rounded.
void Step::sum_experts(const Experts& experts, ThreadState& state, int64_t batch, int64_t first, int64_t last,
                       float* sums, int64_t stride) const {
  const Chosen& chosen = state.chosen;
  const int64_t columns = last - first;
  for (int64_t i = 0; i < batch; ++i) {
    std::fill(sums + i * stride, sums + i * stride + columns, 0.0f);
  }
  const Input input =
      input_for(experts.down.first, decoder_.dtype, state, expert_inner_.data(), chosen.pairs());
  float* products = at_least(state.products, batch * std::max(columns, decoder_.hidden));
  for (size_t index = 0; index < chosen.experts.size(); ++index) {
    const int64_t expert = chosen.experts[index], begin = chosen.begins[index];
    compute(experts.down.of(expert), input.rows(begin, chosen.count(index)), first, last, products, columns);
    const float* bias = experts.down.bias(expert);
    for (int64_t i = 0; i < chosen.count(index); ++i) {
      float* own = products + i * columns;
      add_bias(decoder_.dtype, bias == nullptr ? nullptr : bias + first, own, columns, own);
      if (experts.rounds_weighted) {
        scale(decoder_.dtype, chosen.weights[begin + i], own, columns);
        accumulate(1.0f, own, sums + chosen.tokens[begin + i] * stride, columns);
      } else {
        accumulate(chosen.weights[begin + i], own, sums + chosen.tokens[begin + i] * stride, columns);
      }
    }
  }
  for (int64_t i = 0; i < batch; ++i) {
    round_values(decoder_.dtype, sums + i * stride, columns);
  }
}

void Step::use_experts(const Layer& layer, const Call& call, ThreadState& state, int thread, int threads) {
  const Experts& experts = *layer.experts;
  const Router& router = experts.router;
  const int64_t hidden = decoder_.hidden, batch = call.batch, count = router.logits.width;
  const Dtype logits_dtype = router.rounds_logits ? decoder_.dtype : Dtype::f32;
  const float* normed = state.normed.data();
  const auto [from, until] = share(count, thread, threads);
  multiply_as(logits_dtype, router.logits, state, normed, from, until, batch, routed_.data(), count);
  if (layer.mlp.has_value()) {
    multiply_inner(*layer.mlp, state, batch, thread, threads);
    if (!layer.mlp_gate.parts.empty()) {
      float* gates = at_least(state.mlp_gates, batch);
      multiply(layer.mlp_gate, state, normed, 0, 1, batch, gates, 1);
      sigmoid(decoder_.dtype, gates, batch);
    }
  }
  barrier_.wait(threads);
  // Every thread chooses for itself, which takes less time than one more barrier.
  int64_t* chosen = at_least(state.chosen_experts, batch * router.used);
  float* weights = at_least(state.chosen_weights, batch * router.used);
  float* logits = at_least(state.heads, count);
  for (int64_t i = 0; i < batch; ++i) {
    std::copy(routed_.data() + i * count, routed_.data() + (i + 1) * count, logits);
    choose_experts(router, logits, state, chosen + i * router.used, weights + i * router.used);
  }
  state.chosen.group(chosen, weights, batch, router.used, count);
  multiply_experts(experts, input_for(experts.inner.first, decoder_.dtype, state, normed, batch), state,
                   thread, threads);
  barrier_.wait(threads);
  const auto [first, last] = share(hidden, thread, threads);
  state.forget_input();
  sum_experts(experts, state, batch, first, last, summed_.data() + first, hidden);
  if (layer.mlp.has_value()) {
    state.forget_input();
    multiply(layer.mlp->down, state, inner_.data(), first, last, batch, shared_.data(), hidden);
  }
  barrier_.wait(threads);
  if (experts.down_is_summed) {
    sum_over_ranks(summed_.data(), batch * hidden, thread, threads);
  }
  if (layer.mlp.has_value() && layer.mlp->down_is_summed) {
    sum_over_ranks(shared_.data(), batch * hidden, thread, threads);
  }
}

// Adds the result of an MLP beside experts to theirs.
void Step::add_shared(const Layer& layer, const float* shared, float gate, float* result,
                      float* scratch) const {
  const int64_t hidden = decoder_.hidden;
  std::copy(shared, shared + hidden, scratch);
  if (!layer.mlp_gate.parts.empty()) {
    scale(decoder_.dtype, gate, scratch, hidden);
  }
  add_branch(decoder_.dtype, result, scratch, 1.0f, hidden);
}

}  // namespace acclimate::inference::decode
