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

void Step::keep_best(const Call& call) const {
  if (call.best == nullptr) {
    return;
  }
  for (int64_t i = 0; i < call.batch; ++i) {
    float best = minus_infinity;
    int64_t token = 0;
    for (const auto& state : thread_states_) {
      // The first of equal logits wins, as in torch.
      if (static_cast<int64_t>(state->best.size()) > i &&
          (state->best[i] > best || std::isnan(state->best[i]))) {
        best = state->best[i];
        token = state->best_token[i];
      }
    }
    call.best[i] = token;
    call.largest[i] = best;
  }
}

void Step::finish(const Call& call, ThreadState& state, int thread, int threads) {
  const int64_t hidden = decoder_.hidden, batch = call.batch;
  float* normed = at_least(state.normed, batch * hidden);
  for (int64_t i = 0; i < batch; ++i) {
    normalize(decoder_.norm, decoder_.dtype, state.x.data() + i * hidden, hidden, 0, normed + i * hidden);
  }
  state.forget_input();
  state.best.assign(batch, minus_infinity);
  state.best_token.assign(batch, 0);
  const Product& head = *decoder_.head;
  const auto [first, last] = share(head.width, thread, threads);
  // If the caller does not want logits, only those of a few rows are kept at a time.
  float* memory = at_least(state.logits, batch * head_rows);
  for (int64_t row = first; row < last; row += head_rows) {
    const int64_t count = std::min(head_rows, last - row);
    multiply(head, state, normed, row, row + count, batch, memory - row, head_rows);
    for (int64_t i = 0; i < batch; ++i) {
      float* logits = memory + i * head_rows;
      if (decoder_.logit_factor != 1.0f) {
        scale(decoder_.dtype, decoder_.logit_factor, logits, count);
      }
      if (decoder_.logit_cap > 0) {
        soft_cap_rounded(decoder_.dtype, decoder_.logit_cap, logits, count);
      }
      if (call.logits != nullptr) {
        std::copy(logits, logits + count, call.logits + i * head.width + row);
      }
      if (has_nan(logits, count)) {
        state.best[i] = not_a_number;
      }
      const float top = largest(logits, count);
      if (top > state.best[i]) {
        state.best[i] = top;
        state.best_token[i] = row + (std::find(logits, logits + count, top) - logits);
      }
    }
  }
}

}  // namespace acclimate::inference::decode
