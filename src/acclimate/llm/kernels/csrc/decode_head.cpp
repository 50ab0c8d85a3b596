// The output head: logits, or the token with the largest one.
#include <algorithm>
#include <cmath>
#include <limits>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

constexpr int64_t head_rows = 512;  // logits that a thread computes at once
// The largest logit, if any logit is not a number: no other is larger.
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

}  // namespace

void Step::Best::take(const Best& other) {
  if (std::isnan(other.logit) || other.logit > logit || (other.logit == logit && other.token < token)) {
    *this = other;
  }
}

void Step::keep_best(const Call& call) const {
  if (call.best == nullptr) {
    return;
  }
  for (int64_t i = 0; i < call.batch; ++i) {
    Best best{minus_infinity, 0};
    for (const auto& state : thread_states_) {
      best.take(state->best[i]);
    }
    call.best[i] = best.token;
    call.largest[i] = best.logit;
  }
}

void Step::finish(const Call& call, Team& team, const float* x) {
  const int64_t hidden = decoder_.hidden, batch = call.batch;
  for (int64_t i = 0; i < batch; ++i) {
    float* normed = normed_.data() + i * hidden;
    normalize(decoder_.norm, decoder_.dtype, x + i * hidden, hidden, 0, normed);
    if (decoder_.head_input_factor != 1.0f) {
      scale(decoder_.dtype, decoder_.head_input_factor, normed, hidden);
    }
  }
  const Product& head = *decoder_.head;
  const Inputs inputs = inputs_for(normed_.data(), batch, decoder_.dtype, {&head});
  const Call* const given = &call;
  const int64_t width = head.width;
  team.share((width + head_rows - 1) / head_rows,
             [=, this](int64_t unit, int thread) {
               compute_logits(*given, *thread_states_[thread], inputs, unit * head_rows,
                              std::min((unit + 1) * head_rows, width));
             },
             [=, this](int64_t unit, int thread) {
               const int64_t first = unit * head_rows, rows = std::min(head_rows, width - first);
               const float* own = thread_states_[thread]->logits.data();
               for (int64_t i = 0; i < batch && given->logits != nullptr; ++i) {
                 std::copy(own + i * head_rows, own + i * head_rows + rows,
                           given->logits + i * width + first);
               }
               keep_unit_best(*given, *thread_states_[thread]);
             });
}

// Computes at most head_rows logits of each sequence, and the best of them.
void Step::compute_logits(const Call& call, ThreadState& state, const Inputs& inputs, int64_t first,
                          int64_t last) const {
  const int64_t count = last - first;
  float* all = at_least(state.logits, call.batch * head_rows);
  multiply(*decoder_.head, inputs, decoder_.dtype, first, last, call.batch, all, head_rows);
  for (int64_t i = 0; i < call.batch; ++i) {
    float* logits = all + i * head_rows;
    if (decoder_.logit_factor != 1.0f) {
      scale(decoder_.dtype, decoder_.logit_factor, logits, count);
    }
    if (decoder_.logit_cap > 0) {
      soft_cap_rounded(decoder_.dtype, decoder_.logit_cap, logits, count);
    }
    const float top = largest(logits, count);
    state.unit_best[i] = {top, first + (std::find(logits, logits + count, top) - logits)};
    if (has_nan(logits, count)) {
      state.unit_best[i] = {not_a_number, first};
    }
  }
}

void Step::keep_unit_best(const Call& call, ThreadState& state) {
  for (int64_t i = 0; i < call.batch; ++i) {
    state.best[i].take(state.unit_best[i]);
  }
}

}  // namespace acclimate::inference::decode
