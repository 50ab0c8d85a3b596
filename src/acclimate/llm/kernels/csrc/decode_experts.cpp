// Experts: which ones each token uses, and their products.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

using Ranked = std::pair<float, int64_t>;

// Of weights: products are divided into pieces of at most about this size. Smaller ones are not read at full
// speed: with 64 KB, a step in bf16 took 1.5 times as long.
constexpr int64_t bytes_together = 1 << 20;

// Of the weights of one expert.
int64_t bytes_of(const Stack& stack) {
  const bool is_dense = stack.first.format == WeightFormat::dense;
  return stack.first.stride * (is_dense ? stack.first.n : (stack.first.n + group_rows - 1) / group_rows);
}

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
      case Operation::Kind::normalize:
      case Operation::Kind::normalize_at_least: {
        float total = 0;
        for (int64_t i = 0; i < n; ++i) {
          total += x[i];
        }
        for (int64_t i = 0; i < n; ++i) {
          x[i] /= operation.kind == Operation::Kind::normalize ? total + operation.value
                                                               : std::max(total, operation.value);
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

// Chooses the experts of one row, a token's; changes its logits.
void Step::choose_experts(const Router& router, float* logits, const LayerTrace& trace, int64_t row,
                          ThreadState& state, int64_t* chosen, float* weights) const {
  const int64_t count = router.logits.width;
  if (trace.logits != nullptr) {
    std::copy(logits, logits + count, trace.logits + row * count);
  }
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
  }
  if (trace.chosen != nullptr) {
    std::copy(chosen, chosen + router.used, trace.chosen + row * router.used);
  }
  if (trace.forced != nullptr) {
    std::copy(trace.forced + row * router.used, trace.forced + (row + 1) * router.used, chosen);
  }
  for (int64_t i = 0; i < router.used; ++i) {
    weights[i] = logits[chosen[i]];
  }
  apply(router.weights, decoder_.dtype, weights, router.used);
  for (int64_t i = 0; router.factors != nullptr && i < router.used; ++i) {
    weights[i] *= router.factors[chosen[i]];
  }
}

// The router's input of a token whose residual stream is x.
void Step::normalize_for_router(const ExpertNorms& norms, const float* x, float* to) const {
  normalize(norms.router, decoder_.dtype, x, decoder_.hidden, 0, to);
  if (norms.router_factor != 1.0f) {
    scale(decoder_.dtype, norms.router_factor, to, decoder_.hidden);
  }
}

// Columns first to last between the products of an expert, rounded: up[i * (last - first) + column - first].
void Step::compute_inner(const Experts& experts, int64_t expert, const Input& input, int64_t first,
                         int64_t last, ThreadState& state, float* up) const {
  const Gating& gating = experts.gating;
  const Weight weight = experts.inner.of(expert);
  const float* bias = experts.inner.bias(expert);
  const int64_t count = last - first;
  const auto bias_from = [bias](int64_t column) { return bias == nullptr ? nullptr : bias + column; };
  float* gate = at_least(state.gate, input.m * 2 * count);
  if (!gating.is_gated) {
    compute(weight, input, first, last, up, count);
  } else if (experts.interleaved) {
    compute(weight, input, 2 * first, 2 * last, gate, 2 * count);
  } else {
    compute(weight, input, first, last, gate, count);
    compute(weight, input, experts.width() + first, experts.width() + last, up, count);
  }
  for (int64_t i = 0; i < input.m; ++i) {
    float *own_up = up + i * count, *own_gate = gate + i * count;
    if (!gating.is_gated) {
      add_bias(decoder_.dtype, bias_from(first), own_up, count, own_up);
    } else if (experts.interleaved) {
      own_gate = gate + i * 2 * count;
      add_bias(decoder_.dtype, bias_from(2 * first), own_gate, 2 * count, own_gate);
      for (int64_t column = 0; column < count; ++column) {
        own_up[column] = own_gate[2 * column + 1];
        own_gate[column] = own_gate[2 * column];
      }
    } else {
      add_bias(decoder_.dtype, bias_from(first), own_gate, count, own_gate);
      add_bias(decoder_.dtype, bias_from(experts.width() + first), own_up, count, own_up);
    }
    apply_gating(gating, decoder_.dtype, own_gate, own_up, count);
  }
}

// The first products of all experts that are used.
void Step::multiply_experts(Team& team, const Experts& used_experts, const Chosen& used, const float* x,
                            int64_t batch) {
  const Experts* const experts = &used_experts;
  const Chosen* const chosen = &used;
  const Input input = input_for(experts->inner.first, x, batch, decoder_.dtype);
  const int64_t width = experts->width(), used_count = static_cast<int64_t>(chosen->experts.size());
  const int64_t for_threads = (2 * team.threads() + used_count - 1) / used_count;
  const Pieces pieces(width, std::max(for_threads, bytes_of(experts->inner) / bytes_together));
  team.share(
      pieces.units * used_count,
      [=, this](int64_t unit, int thread) {
        ThreadState& state = *thread_states_[thread];
        const int64_t index = unit / pieces.units, piece = unit % pieces.units;
        const int64_t first = pieces.begin(piece), last = pieces.begin(piece + 1);
        const int64_t count = chosen->count(index);
        const Input own =
            gathered(input, chosen->tokens.data() + chosen->begins[index], count, state.gathered);
        float* up = at_least(state.results, count * (last - first));
        compute_inner(*experts, chosen->experts[index], own, first, last, state, up);
      },
      [=, this](int64_t unit, int thread) {
        const int64_t index = unit / pieces.units, piece = unit % pieces.units;
        const int64_t first = pieces.begin(piece), columns = pieces.begin(piece + 1) - first;
        const int64_t pair = chosen->begins[index];
        copy_results(thread, chosen->count(index), columns, expert_inner_.data() + pair * width + first,
                     width);
      });
}

// Columns first to last of the tokens' results: sums[token * (last - first) + column - first], rounded.
void Step::sum_rows(const Experts& experts, const Chosen& chosen, const Input& input, ThreadState& state,
                    int64_t batch, int64_t first, int64_t last, float* sums) const {
  const int64_t columns = last - first;
  std::fill(sums, sums + batch * columns, 0.0f);
  float* products = at_least(state.products, batch * columns);
  for (size_t index = 0; index < chosen.experts.size(); ++index) {
    const int64_t expert = chosen.experts[index], begin = chosen.begins[index];
    compute(experts.down.of(expert), input.rows(begin, chosen.count(index)), first, last, products, columns);
    const float* bias = experts.down.bias(expert);
    for (int64_t i = 0; i < chosen.count(index); ++i) {
      float* own = products + i * columns;
      add_bias(decoder_.dtype, bias == nullptr ? nullptr : bias + first, own, columns, own);
      float factor = chosen.weights[begin + i];
      if (experts.rounds_weighted) {
        scale(decoder_.dtype, factor, own, columns);
        factor = 1.0f;
      }
      accumulate(factor, own, sums + chosen.tokens[begin + i] * columns, columns);
    }
  }
  round_values(decoder_.dtype, sums, batch * columns);
}

// The second products of all experts that are used, weighted and summed for each token.
void Step::sum_experts(Team& team, const Experts& used_experts, const Chosen& used, int64_t batch) {
  const Experts* const experts = &used_experts;
  const Chosen* const chosen = &used;
  const Input input = input_for(experts->down.first, expert_inner_.data(), chosen->pairs(), decoder_.dtype);
  const int64_t bytes = bytes_of(experts->down) * static_cast<int64_t>(chosen->experts.size());
  const int64_t threads = team.threads(), wanted = std::max(2 * threads, bytes / bytes_together);
  const Pieces pieces(decoder_.hidden, Pieces::even(wanted, threads));
  share_columns(team, pieces, batch, summed_.data(),
                [=, this](ThreadState& state, int64_t first, int64_t last) {
                  float* sums = at_least(state.results, batch * (last - first));
                  sum_rows(*experts, *chosen, input, state, batch, first, last, sums);
                });
}

void Step::use_experts(Team& team, const Layer& layer, size_t index, const Call& call) {
  const Experts& experts = *layer.experts;
  Chosen& chosen = chosen_[index];
  const int64_t batch = call.batch;
  const Router& router = experts.router;
  const int64_t hidden = decoder_.hidden, count = router.logits.width;
  for (int64_t i = 0; experts.norms.has_value() && i < batch; ++i) {
    normalize_for_router(*experts.norms, x_.data() + i * hidden, expert_given_.data() + i * hidden);
  }
  const float* const given = experts.norms.has_value() ? expert_given_.data() : normed_.data();
  multiply_as(router.rounds_logits ? decoder_.dtype : Dtype::f32, team, router.logits, given, batch,
              routed_.data());
  for (int64_t i = 0; i < batch; ++i) {
    choose_experts(router, routed_.data() + i * count, call.traces[index], i, *thread_states_[0],
                   chosen_experts_.data() + i * router.used, chosen_weights_.data() + i * router.used);
  }
  chosen.group(chosen_experts_.data(), chosen_weights_.data(), batch, router.used, count);
  for (int64_t i = 0; experts.norms.has_value() && i < batch; ++i) {
    normalize(experts.norms->inner, decoder_.dtype, x_.data() + i * hidden, hidden, 0,
              expert_given_.data() + i * hidden);
  }
  multiply_experts(team, experts, chosen, given, batch);
  sum_experts(team, experts, chosen, batch);
  if (experts.down_is_summed) {
    sum_over_ranks(summed_.data(), batch * hidden);
  }
  if (!layer.mlp.has_value()) {
    return;
  }
  use_mlp(team, *layer.mlp, batch, shared_.data());
  if (!layer.mlp_gate.parts.empty()) {
    multiply(team, layer.mlp_gate, normed_.data(), batch, gates_.data());
    sigmoid(decoder_.dtype, gates_.data(), batch);
  }
  float* scratch = at_least(thread_states_[0]->normed, hidden);
  for (int64_t i = 0; i < batch; ++i) {
    add_shared(layer, shared_.data() + i * hidden, gates_[i], summed_.data() + i * hidden, scratch);
  }
}

// Adds the result of an MLP beside experts to theirs.
void Step::add_shared(const Layer& layer, const float* shared, float gate, float* result,
                      float* scratch) const {
  const int64_t hidden = decoder_.hidden;
  const std::optional<ExpertNorms>& norms = layer.experts->norms;
  if (norms.has_value()) {
    normalize(norms->result, decoder_.dtype, result, hidden, 0, result);
    normalize(norms->shared_result, decoder_.dtype, shared, hidden, 0, scratch);
  } else {
    std::copy(shared, shared + hidden, scratch);
  }
  if (!layer.mlp_gate.parts.empty()) {
    scale(decoder_.dtype, gate, scratch, hidden);
  }
  add_branch(decoder_.dtype, result, scratch, 1.0f, hidden);
}

}  // namespace acclimate::inference::decode
