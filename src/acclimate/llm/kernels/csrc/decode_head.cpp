// The output head: logits, or the token with the largest one, for which most rows need not be read.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

constexpr int64_t head_rows = 512;  // logits that a thread computes at once; a tile of the screen's
constexpr int64_t candidates_together = 8;
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

bool Step::suits_screen() const {
  const Product& head = *decoder_.head;
  // A logit must never fall when the product grows, nor may rounding make many alike, as in float16.
  return decoder_.dtype != Dtype::f16 && head.parts.size() == 1 && head.parts[0].first == 0 &&
         head.parts[0].count == head.parts[0].weight.n && head.parts[0].bias == nullptr &&
         decoder_.logit_factor > 1e-6f && Screen::suits(head.parts[0].weight);
}

// Makes the coarse copy of the head, or makes it again if the head has changed.
void Step::update_screen(const Call& call, Team& team) {
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
    const int parts = team.threads();
    team.share(parts, [=, this](int64_t part, int) {
      if (!screen_->is_current(part, parts)) {
        screen_is_current_.store(false, std::memory_order_relaxed);
      }
    });
  }
  if (is_new || !screen_is_current_.load(std::memory_order_relaxed)) {
    const int parts = team.threads();
    team.share(parts, [=, this](int64_t part, int) { screen_->fill(part, parts); });
  }
  screen_is_checked_ = true;
}

void Step::finish(const Call& call, Team& team, const float* x) {
  const int64_t hidden = decoder_.hidden, batch = call.batch;
  for (int64_t i = 0; i < batch; ++i) {
    normalize(decoder_.norm, decoder_.dtype, x + i * hidden, hidden, 0, normed_.data() + i * hidden);
  }
  if (screens_ && find_best(call, team, normed_.data())) {
    return;
  }
  const Product& head = *decoder_.head;
  const Weight& weight = head.parts[0].weight;
  const Inputs inputs = inputs_for(normed_.data(), batch, {&head});
  const Call* const given = &call;
  const int64_t width = head.width;
  // The head's pages are released also if the next step tries the coarse copy again.
  const bool releases =
      releases_head_ || (screens_ && unscreened_steps_ == 0 && weight.format == WeightFormat::dense);
  const bool checks = checks_screen_;
  if (!checks && !releases) {
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
    return;
  }
  // Pages are released in order, so a thread reads many.
  const int64_t parts = team.threads(), tiles = (width + head_rows - 1) / head_rows;
  team.share(parts, [=, this, &weight](int64_t part, int thread) {
    ThreadState& state = *thread_states_[thread];
    FilePages pages;
    const int64_t last = std::min(tiles * (part + 1) / parts * head_rows, width);
    for (int64_t row = tiles * part / parts * head_rows; row < last; row += head_rows) {
      const int64_t count = std::min(head_rows, last - row);
      compute_logits(*given, state, inputs, row, row + count);
      for (int64_t i = 0; i < batch && given->logits != nullptr; ++i) {
        const float* own = state.logits.data() + i * head_rows;
        std::copy(own, own + count, given->logits + i * width + row);
      }
      keep_unit_best(*given, state);
      if (!checks) {
        pages.was_read(weight.data + row * weight.stride, count * weight.stride);
      } else if (!screen_->is_current(pages, row, row + count)) {
        screen_is_current_.store(false, std::memory_order_relaxed);
      }
    }
  });
}

// Computes at most head_rows logits of each sequence, and the best of them.
void Step::compute_logits(const Call& call, ThreadState& state, const Inputs& inputs, int64_t first,
                          int64_t last) const {
  const int64_t count = last - first;
  float* all = at_least(state.logits, call.batch * head_rows);
  multiply(*decoder_.head, inputs, first, last, call.batch, all, head_rows);
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

// Finds the best token of each sequence, and reads only the rows that can be the best; returns false if these
// are too many.
bool Step::find_best(const Call& call, Team& team, const float* x) {
  if (unscreened_steps_ > 0 || !approximate(call, team, x)) {
    unscreened_steps_ = unscreened_steps_ == 0 ? steps_after_failure : unscreened_steps_ - 1;
    return false;
  }
  const int64_t batch = call.batch;
  const int64_t groups = (decoder_.head->width + group_rows - 1) / group_rows;
  const Inputs inputs = inputs_for(x, batch, {decoder_.head.get()});
  // The row with the best bound gives a first limit.
  ThreadState& state = *thread_states_[0];
  std::fill(state.unit_best, state.unit_best + batch, Best{minus_infinity, 0});
  for (int64_t i = 0; i < batch; ++i) {
    const float* most = most_.data() + i * groups;
    const int64_t group = std::max_element(most, most + groups) - most;
    try_group(call, state, inputs, screened_, {most[group], group, i});
  }
  keep_unit_best(call, state);
  candidates_.clear();
  for (int64_t i = 0; i < batch; ++i) {
    raise(largest_[i], state.best[i].logit);
    const float limit =
        limit_of(largest_[i].load(std::memory_order_relaxed), decoder_.logit_factor, decoder_.logit_cap);
    for (int64_t group = 0; group < groups; ++group) {
      const float most = most_[i * groups + group];
      if (!(most < limit)) {
        candidates_.push_back({most, group, i});
      }
    }
  }
  if (static_cast<int64_t>(candidates_.size()) > groups / least_share) {
    unscreened_steps_ = steps_after_failure;
    std::fill(state.best, state.best + batch, Best{minus_infinity, 0});
    return false;
  }
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return a.most > b.most; });
  const Call* const given = &call;
  const int64_t count = static_cast<int64_t>(candidates_.size());
  team.share((count + candidates_together - 1) / candidates_together,
             [=, this, screened = screened_](int64_t unit, int thread) {
               ThreadState& own = *thread_states_[thread];
               std::fill(own.unit_best, own.unit_best + given->batch, Best{minus_infinity, 0});
               const int64_t last = std::min((unit + 1) * candidates_together, count);
               for (int64_t i = unit * candidates_together; i < last; ++i) {
                 try_group(*given, own, inputs, screened, candidates_[i]);
               }
             },
             [=, this](int64_t, int thread) {
               ThreadState& own = *thread_states_[thread];
               keep_unit_best(*given, own);
               for (int64_t i = 0; i < given->batch; ++i) {
                 raise(largest_[i], own.unit_best[i].logit);
               }
             });
  return true;
}

// Computes an upper bound of the products of each group; returns false for an infinite or NaN input.
bool Step::approximate(const Call& call, Team& team, const float* x) {
  const int64_t batch = call.batch, k = decoder_.head->k, width = decoder_.head->width;
  const Form form = form_of(screen_->coarse(), decoder_.dtype);
  const Input rounded =
      prepare(form, Dtype::f32, x, k, batch, k, input_memory_[static_cast<int>(form)].data());
  if (rounded.form != Form::int8) {
    return false;
  }
  screened_ = screen_->with_starts(rounded, starts_);
  for (int64_t i = 0; i < batch; ++i) {
    lengths_[i] = Screen::lengths_of(x + i * k, rounded, i);
  }
  const int64_t all_groups = (width + group_rows - 1) / group_rows, most_groups = head_rows / group_rows;
  at_least(most_, batch * all_groups);
  team.share((width + head_rows - 1) / head_rows,
             [=, this, screened = screened_](int64_t unit, int thread) {
               const int64_t row = unit * head_rows, rows = std::min(head_rows, width - row);
               const int64_t groups = (rows + group_rows - 1) / group_rows;
               ThreadState& state = *thread_states_[thread];
               float* memory = at_least(state.logits, batch * head_rows);
               float* most = at_least(state.results, batch * most_groups);
               compute(screen_->coarse(), screened, row, row + rows, memory, head_rows);
               for (int64_t i = 0; i < batch; ++i) {
                 float* products = memory + i * head_rows;
                 float* to = most + i * most_groups;
                 std::fill(products + rows, products + groups * group_rows, minus_infinity);
                 largest_of_groups(products, groups, to);
                 for (int64_t group = 0; group < groups; ++group) {
                   to[group] = at_most(to[group], row / group_rows + group, lengths_[i]);
                 }
               }
             },
             [=, this](int64_t unit, int thread) {
               const float* most = thread_states_[thread]->results.data();
               const int64_t first = unit * most_groups, groups = std::min(most_groups, all_groups - first);
               for (int64_t i = 0; i < batch; ++i) {
                 std::copy(most + i * most_groups, most + i * most_groups + groups,
                           most_.data() + i * all_groups + first);
               }
             });
  return true;
}

// An upper bound of a product; infinite if none is known.
float Step::at_most(float product, int64_t group, Screen::Lengths lengths) const {
  const float most = product + screen_->margin(group, lengths);
  return most == most ? most : std::numeric_limits<float>::infinity();
}

// Computes those logits of a group of rows that may be the best of a sequence.
void Step::try_group(const Call& call, ThreadState& state, const Inputs& inputs, const Input& screened,
                     const Candidate& candidate) const {
  const int64_t sequence = candidate.sequence;
  const int64_t row = candidate.group * group_rows;
  const int64_t count = std::min(group_rows, decoder_.head->width - row);
  Best& best = state.unit_best[sequence];
  const auto limit = [&] {
    const float all = largest_[sequence].load(std::memory_order_relaxed);
    return limit_of(best.logit > all ? best.logit : all, decoder_.logit_factor, decoder_.logit_cap);
  };
  if (candidate.most < limit()) {
    return;
  }
  const Weight& head = decoder_.head->parts[0].weight;
  // Two inputs, so that sums have the same order as with the inputs of all sequences; that of a single input
  // differs.
  const int64_t other = std::min(sequence, std::max<int64_t>(call.batch - 2, 0));
  const Input exact = inputs.of(head, decoder_.dtype).rows(other, std::min<int64_t>(call.batch, 2));
  float products[group_rows], logits[2 * group_rows];
  compute(screen_->coarse(), screened.rows(sequence, 1), row, row + count, products, group_rows);
  bool is_computed = false;
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t token = row + lane;
    if (at_most(products[lane], row / group_rows, lengths_[sequence]) < limit()) {
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
    best.take({logit, token});
  }
}

}  // namespace acclimate::inference::decode
