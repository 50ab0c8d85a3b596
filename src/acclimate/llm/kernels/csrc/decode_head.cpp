// The output head: logits, or the token with the largest one, for which most rows need not be read.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <optional>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

constexpr int64_t head_rows = 512;  // logits that a thread computes at once
// With more sequences, the screen often rules out too few rows.
constexpr int64_t most_sequences = 2;
constexpr int64_t steps_after_failure = 8;  // until a screen that ruled out too little is tried again
constexpr int64_t least_share = 4;  // the screen fails if more than 1 / least_share of the groups remain
// The largest logit, if any logit is not a number: no other is larger.
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

float a_little_less(float value) { return value - std::fabs(value) * 0x1p-6f - 1e-30f; }

// A product below this has a logit below `best`, since the rounding of each operation changes it by less than
// 1/128. A cap of 0 means none.
float limit_of(float best, float factor, float cap) {
  if (cap > 0) {
    const float share = a_little_less(best / cap);
    best = share > -1 ? cap * std::atanh(share) : minus_infinity;
  }
  return a_little_less(best / factor);
}

void raise(std::atomic<float>& value, float least) {
  float before = value.load(std::memory_order_relaxed);
  while (least > before && !value.compare_exchange_weak(before, least, std::memory_order_relaxed)) {
  }
}

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

bool Step::suits_screen() const {
  const Product& head = *decoder_.head;
  // A logit must never fall when the product grows, nor may rounding make many alike, as in float16.
  return decoder_.dtype != Dtype::f16 && head.parts.size() == 1 && head.parts[0].first == 0 &&
         head.parts[0].count == head.parts[0].weight.n && head.parts[0].bias == nullptr &&
         decoder_.logit_factor > 1e-6f && Screen::suits(head.parts[0].weight);
}

// Makes the coarse copy of the head, or makes it again if the head has changed.
void Step::update_screen(const Call& call, int threads) {
  if (call.batch > most_sequences) {
    screen_.reset();  // the whole head is read, so the copy saves no memory traffic
  }
  // The first token does not wait for the copy; it reads the head with which the copy is compared later.
  const bool is_greedy = call.best != nullptr && call.logits == nullptr;
  const bool may_screen = can_screen_ && is_greedy && call.batch <= most_sequences;
  screens_ = may_screen && call.length == 1;
  releases_head_ =
      may_screen && call.length > 1 && decoder_.head->parts[0].weight.format == WeightFormat::dense;
  checks_screen_ = screen_ != nullptr && !screen_is_checked_ && call.length > 1 &&
                   (call.best != nullptr || call.logits != nullptr);
  screen_is_current_.store(true, std::memory_order_relaxed);
  if (!screens_) {
    return;
  }
  for (std::atomic<float>& largest : largest_) {
    largest.store(minus_infinity, std::memory_order_relaxed);
  }
  bool is_new = false;
  if (screen_ == nullptr) {
    try {
      screen_ = std::make_unique<Screen>(decoder_.head->parts[0].weight);
      is_new = true;
    } catch (const std::bad_alloc&) {
      can_screen_ = screens_ = false;
      return;
    }
  } else if (!screen_is_checked_) {
    auto check = [&](int thread, int count) {
      if (!screen_->is_current(thread, count)) {
        screen_is_current_.store(false, std::memory_order_relaxed);
      }
    };
    run_threads(threads, check);
  }
  if (is_new || !screen_is_current_.load(std::memory_order_relaxed)) {
    auto fill = [&](int thread, int count) { screen_->fill(thread, count); };
    run_threads(threads, fill);
  }
  screen_is_checked_ = true;
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
  if (screens_ && find_best(call, state, normed, first, last, threads)) {
    return;
  }
  const Weight& weight = head.parts[0].weight;
  // The head's pages are released also if the next step tries the coarse copy again.
  const bool releases =
      releases_head_ || (screens_ && state.unscreened_steps == 0 && weight.format == WeightFormat::dense);
  std::optional<FilePages> pages;
  if (checks_screen_ || releases) {
    pages.emplace();
  }
  // If the caller does not want logits, only those of a few rows are kept at a time.
  float* memory = at_least(state.logits, batch * head_rows);
  for (int64_t row = first; row < last; row += head_rows) {
    const int64_t count = std::min(head_rows, last - row);
    multiply(head, state, normed, row, row + count, batch, memory - row, head_rows);
    if (checks_screen_) {
      if (!screen_->is_current(*pages, row, row + count)) {
        screen_is_current_.store(false, std::memory_order_relaxed);
      }
    } else if (releases) {
      pages->was_read(weight.data + row * weight.stride, count * weight.stride);
    }
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

// Finds the best of some rows, and reads only the rows that can be the best of all; returns false if these
// are too many. Contains a barrier for all threads.
bool Step::find_best(const Call& call, ThreadState& state, const float* x, int64_t first, int64_t last,
                     int threads) {
  const bool is_found = state.unscreened_steps == 0 && approximate(call, state, x, first, last);
  const int64_t groups = (last - first + group_rows - 1) / group_rows;
  if (is_found) {
    // The row with the best bound gives all threads a first limit.
    for (int64_t i = 0; i < call.batch; ++i) {
      const float* most = state.most.data() + i * groups;
      try_group(call, state, x, first, last, i, std::max_element(most, most + groups) - most);
    }
  }
  barrier_.wait(threads);
  if (!is_found) {
    state.unscreened_steps = state.unscreened_steps == 0 ? steps_after_failure : state.unscreened_steps - 1;
    return false;
  }
  state.candidates.clear();
  for (int64_t i = 0; i < call.batch; ++i) {
    const float limit =
        limit_of(largest_[i].load(std::memory_order_relaxed), decoder_.logit_factor, decoder_.logit_cap);
    for (int64_t group = 0; group < groups; ++group) {
      const float most = state.most[i * groups + group];
      if (!(most < limit)) {
        state.candidates.push_back({most, group, i});
      }
    }
  }
  if (static_cast<int64_t>(state.candidates.size()) > groups / least_share) {
    state.unscreened_steps = steps_after_failure;
    state.best.assign(call.batch, minus_infinity);  // of equal logits an earlier one may be found
    return false;
  }
  std::sort(state.candidates.begin(), state.candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.most > b.most; });
  for (const Candidate& candidate : state.candidates) {
    try_group(call, state, x, first, last, candidate.sequence, candidate.group);
  }
  return true;
}

// Computes an upper bound of the products of each group; returns false for an infinite or NaN input.
bool Step::approximate(const Call& call, ThreadState& state, const float* x, int64_t first, int64_t last) {
  const int64_t batch = call.batch, k = decoder_.head->k;
  const Input rounded = input_for(screen_->coarse(), decoder_.dtype, state, x, batch);
  if (rounded.form != Form::int8) {
    return false;
  }
  state.screened = screen_->with_starts(rounded, state.starts);
  for (int64_t i = 0; i < batch; ++i) {
    state.lengths[i] = Screen::lengths_of(x + i * k, rounded, i);
  }
  const int64_t all_groups = (last - first + group_rows - 1) / group_rows;
  float* memory = at_least(state.logits, batch * head_rows);
  float* most = at_least(state.most, batch * all_groups);
  for (int64_t row = first; row < last; row += head_rows) {
    const int64_t count = std::min(head_rows, last - row), groups = (count + group_rows - 1) / group_rows;
    compute(screen_->coarse(), state.screened, row, row + count, memory, head_rows);
    for (int64_t i = 0; i < batch; ++i) {
      float* products = memory + i * head_rows;
      float* to = most + i * all_groups + (row - first) / group_rows;
      std::fill(products + count, products + groups * group_rows, minus_infinity);
      largest_of_groups(products, groups, to);
      for (int64_t group = 0; group < groups; ++group) {
        to[group] = at_most(to[group], row / group_rows + group, state.lengths[i]);
      }
    }
  }
  return true;
}

// An upper bound of a product; infinite if none is known.
float Step::at_most(float product, int64_t group, Screen::Lengths lengths) const {
  const float most = product + screen_->margin(group, lengths);
  return most == most ? most : std::numeric_limits<float>::infinity();
}

// Computes those logits of a group of rows that may be the best of a sequence.
void Step::try_group(const Call& call, ThreadState& state, const float* x, int64_t first, int64_t last,
                     int64_t sequence, int64_t group) {
  const int64_t row = first + group * group_rows, count = std::min(group_rows, last - row);
  const auto limit = [&] {
    return limit_of(largest_[sequence].load(std::memory_order_relaxed), decoder_.logit_factor,
                    decoder_.logit_cap);
  };
  if (state.most[sequence * ((last - first + group_rows - 1) / group_rows) + group] < limit()) {
    return;
  }
  const Weight& head = decoder_.head->parts[0].weight;
  // Two inputs, so that sums have the same order as with the inputs of all sequences; that of a single input
  // differs.
  const int64_t other = std::min(sequence, std::max<int64_t>(call.batch - 2, 0));
  const Input exact =
      input_for(head, decoder_.dtype, state, x, call.batch).rows(other, std::min<int64_t>(call.batch, 2));
  float products[group_rows], logits[2 * group_rows];
  compute(screen_->coarse(), state.screened.rows(sequence, 1), row, row + count, products, group_rows);
  bool is_computed = false;
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t token = row + lane;
    if (at_most(products[lane], row / group_rows, state.lengths[sequence]) < limit()) {
      continue;
    }
    if (head.format == WeightFormat::dense) {
      compute(head, exact, token, token + 1, logits + lane, group_rows);
    } else if (!is_computed) {
      compute(head, exact, row, row + count, logits, group_rows);  // all rows of a group together
      is_computed = true;
    }
    float logit = logits[(sequence - other) * group_rows + lane];
    round_values(decoder_.dtype, &logit, 1);
    if (decoder_.logit_factor != 1.0f) {
      scale(decoder_.dtype, decoder_.logit_factor, &logit, 1);
    }
    if (decoder_.logit_cap > 0) {
      soft_cap_rounded(decoder_.dtype, decoder_.logit_cap, &logit, 1);
    }
    if (std::isnan(logit) || logit > state.best[sequence] ||
        (logit == state.best[sequence] && token < state.best_token[sequence])) {
      state.best[sequence] = logit;
      state.best_token[sequence] = token;
      raise(largest_[sequence], logit);
    }
  }
}

}  // namespace acclimate::inference::decode
