// One step of a decoder. The calling thread leads: it keeps the residual stream, and a team shares the
// products and attention.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "decode_program.h"
#include "pool.h"
#include "thread_choice.h"

namespace acclimate::inference::decode {

// The keys and values of one layer. A layer with a window has only those that its next queries see.
struct LayerCache {
  int64_t capacity;
  int64_t first;  // the place of the token at index 0
  uint8_t* keys;  // [batch][key_heads][capacity][head_size]
  uint8_t* values;  // [batch][key_heads][value_size][capacity]
  // Of keys and values in 8 bits, as in Int8Rows; null: they are in the decoder's dtype.
  uint8_t* key_exponents;  // [batch][key_heads][capacity][blocks]
  uint8_t* value_exponents;  // [batch][key_heads][blocks][capacity]
  // Of a delta rule, before and after the tokens: [batch][heads][key_size][value_size].
  const float* state;
  float* new_state;

  bool is_int8() const { return key_exponents != nullptr; }

  // Whether there is room for `length` tokens from `place` on, and what they see is there.
  bool has_room(int64_t place, int64_t length, int64_t window) const {
    const int64_t seen = window > 0 ? std::max<int64_t>(place + 1 - window, 0) : 0;
    return capacity >= 0 && first >= 0 && first <= std::min(place, seen) && place - first <= capacity &&
           length <= capacity - (place - first);
  }
};

struct Cache {
  int64_t places;  // with angles and factors
  std::vector<const float*> cos, sin;  // by table: [places][pairs]
  std::vector<const float*> factors;  // of queries: [places]
  std::vector<LayerCache> layers;
};

// A proof's part in one layer, or of what all layers leave; null in texts.
struct LayerTrace {
  const float* given = nullptr;  // the layer's inputs, in place of its own: [rows][hidden]
  float* inputs = nullptr;  // its own
  const int64_t* forced =
      nullptr;  // the experts that are used, in place of its router's choice: [rows][used]
  int64_t* chosen = nullptr;  // that choice
  float* logits = nullptr;  // of the router: [rows][experts]
};

struct Call {
  const int64_t* tokens;  // of each sequence: [batch][length]
  const int64_t* starts;  // the place of each sequence's first token
  int64_t batch, place;
  Cache cache;
  float* logits;  // after the last place: [batch][vocabulary], or null
  int64_t* best;  // [batch], or null
  float* largest = nullptr;  // the logits of `best`
  int64_t length = 1;  // the places from `place` on that are read together
  std::vector<LayerTrace> traces = {};  // by layer, and of the last one's results
};

template <class T>
T* at_least(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) {
    memory.resize(count);
  }
  return memory.data();
}

// Kernels read whole vectors from the start of a line.
struct alignas(64) Line {
  uint8_t bytes[64];
};

// Rows of k rounded values that are `stride` apart, as the input of a product with a dense weight.
Input rows_as_input(Form form, const float* from, int64_t rows, int64_t k, int64_t stride,
                    std::vector<Line>& memory);

// The experts of some tokens. A pair is a token and one of its experts; the pairs of an expert follow each
// other.
struct Chosen {
  std::vector<int64_t> experts;  // those that a token uses
  std::vector<int64_t> begins;  // the first pair of each, and the number of pairs
  std::vector<int64_t> tokens;  // of each pair
  std::vector<float> weights;  // of each pair

  int64_t pairs() const { return static_cast<int64_t>(tokens.size()); }
  int64_t count(size_t index) const { return begins[index + 1] - begins[index]; }
  // From each token's experts and their weights: [tokens][used].
  void group(const int64_t* chosen, const float* chosen_weights, int64_t tokens_count, int64_t used,
             int64_t all_experts);
};

class Step {
 public:
  explicit Step(Reader& from);
  ~Step();

  // Computes one token of each sequence. A second caller waits for the first.
  void run(const Call& call, int threads);

  int64_t tables() const { return decoder_.tables; }
  int64_t factors() const { return decoder_.factors; }
  int64_t layers() const { return static_cast<int64_t>(decoder_.layers.size()); }
  int64_t window(int64_t layer) const { return decoder_.layers[layer].window(); }
  bool has_state(int64_t layer) const { return decoder_.layers[layer].delta_rule.has_value(); }
  int64_t head_width() const { return decoder_.head->width; }

  // Whether each token is in the vocabulary, and each position in the table of learned positions.
  bool has_rows(const Call& call) const;

  // Whether `prefill` works: weights are bf16 or quantised, and the processor has vectors for it.
  bool can_prefill() const;

  // Computes several tokens of each sequence, which are multiplied by a weight together.
  void prefill(const Call& call, int threads);

 private:
  // Throws std::runtime_error unless the sizes in the description fit together.
  void check() const;

  // The largest logit so far, and its token: of equal logits the first one, as in torch. NaN is the largest.
  struct Best {
    float logit;
    int64_t token;

    void take(const Best& other);
  };
  // An input of one or several products, in each form that their weights take.
  struct Inputs {
    Input by_form[3];

    const Input& of(const Weight& weight, Dtype dtype) const {
      return by_form[static_cast<int>(form_of(weight, dtype))];
    }
  };
  // The rows of a product that are computed together.
  struct Pieces {
    int64_t rows, groups, units;

    // As many pieces as are wanted, but at most one for each group of rows.
    Pieces(int64_t row_count, int64_t wanted)
        : rows(row_count),
          groups((rows + group_rows - 1) / group_rows),
          units(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(groups, 1))) {}
    Pieces(const Product& product, int64_t bytes_of_group, int threads);
    // Threads of the same speed get equal numbers of pieces.
    static int64_t even(int64_t wanted, int64_t threads) {
      return (wanted + threads - 1) / threads * threads;
    }
    int64_t begin(int64_t unit) const { return std::min(groups * unit / units * group_rows, rows); }
    int64_t most_rows() const { return (groups + units - 1) / units * group_rows; }
  };
  // The memory of one thread for the unit that it computes.
  struct ThreadState {
    std::vector<float> results, gate, normed, branch, heads, scores, wide, logits, peaks, start, products;
    std::vector<Line> query, weights, repacked, gathered;
    std::vector<std::pair<float, int64_t>> ranked;
    Best unit_best[max_rows];
    Best best[max_rows];  // of all its units
  };
  class Prefill;

  // Copies the rows of a unit's results, which follow one another, to rows that are `stride` apart.
  void copy_results(int thread, int64_t rows, int64_t columns, float* to, int64_t stride) const {
    const float* own = thread_states_[thread]->results.data();
    for (int64_t i = 0; i < rows; ++i) {
      std::copy(own + i * columns, own + (i + 1) * columns, to + i * stride);
    }
  }
  // Shares pieces of the columns of `rows` rows: compute(state, first, last) leaves them in state.results.
  template <class Compute>
  void share_columns(Team& team, const Pieces& pieces, int64_t rows, float* to, const Compute& compute) {
    team.share(
        pieces.units,
        [=, this](int64_t unit, int thread) {
          compute(*thread_states_[thread], pieces.begin(unit), pieces.begin(unit + 1));
        },
        [=, this](int64_t unit, int thread) {
          const int64_t first = pieces.begin(unit);
          copy_results(thread, rows, pieces.begin(unit + 1) - first, to + first, pieces.rows);
        });
  }

  void make_thread_states(int threads, int64_t batch);
  void make_memory(const Call& call, int threads);
  void keep_best(const Call& call) const;
  void work(const Call& call, Team& team, int parts_for);
  void embed(const Call& call);
  void make_token_inputs(const Call& call, Team& team);
  void finish_token_inputs(int64_t token, ThreadState& state, float* row) const;
  void use_token_input(const TokenInput& used, const float* inputs, const float* gate, float* to) const;
  void finish_layer(const Layer& layer, const float* product, ThreadState& state, float* x) const;
  void end_layer(Team& team, const Layer& layer, int64_t batch);
  void look_up(int64_t token, float* row) const;
  void finish_embedding(int64_t position, ThreadState& state, float* row) const;
  void sum_over_ranks(float* values, int64_t count);
  Inputs inputs_for(const float* x, int64_t batch, Dtype dtype,
                    std::initializer_list<const Product*> products);
  Input input_for(const Weight& weight, const float* x, int64_t batch, Dtype dtype);
  void multiply(const Product& product, const Inputs& inputs, Dtype dtype, int64_t first, int64_t last,
                int64_t batch, float* to, int64_t stride) const;
  void multiply(Team& team, const Product& product, const float* x, int64_t batch, float* to) {
    multiply_as(decoder_.dtype, team, product, x, batch, to);
  }
  void multiply_as(Dtype dtype, Team& team, const Product& product, const float* x, int64_t batch, float* to);
  void store_keys(Team& team, const Attention& attention, size_t index, const Call& call);
  void mix(Team& team, const Layer& layer, size_t index, const Call& call, int threads);
  void convolve(Team& team, const Convolution& convolution, size_t index, const Call& call);
  void convolve_channels(const Taps& taps, const LayerCache& cache, int64_t sequence, int64_t place,
                         const float* inputs, int64_t first, int64_t count, ThreadState& state,
                         float* to) const;
  void store_channels(const Taps& taps, const LayerCache& cache, int64_t sequence, int64_t place,
                      const float* inputs, int64_t first, int64_t count) const;
  void update_states(Team& team, const DeltaRule& rule, size_t index, const Call& call);
  float strength_of(const DeltaRule& rule, const float* projected, int64_t head) const;
  float decay_of(const DeltaRule& rule, const float* projected, int64_t head) const;
  void finish_head(const DeltaRule& rule, const float* projected, int64_t head, ThreadState& state,
                   float* result) const;
  void update_head(const DeltaRule& rule, const float* projected, const float* query, const float* key,
                   const float* value, int64_t head, const float* before, ThreadState& state, float* after,
                   float* result) const;
  void attend(Team& team, const Attention& attention, size_t index, const Call& call, int64_t parts);
  void attend_part(const Attention& attention, size_t index, const Call& call, ThreadState& state,
                   int64_t sequence, int64_t key_head, int64_t part, int64_t parts) const;
  void normalize_rows(const Attention& attention, int64_t batch);
  void sum_squares(const Attention& attention, const float* row, float* sums) const;
  void normalize_row(const Attention& attention, const float* sums, float* row) const;
  void prepare_query(const Attention& attention, const Cache& cache, int64_t position, const float* all,
                     int64_t head, float* to) const;
  void prepare_head(const Attention& attention, const Norm& norm, const Cache& cache, int64_t position,
                    const float* all, int64_t head, float* to) const;
  void prepare_value(const Attention& attention, const float* all, int64_t head, float* to) const;
  void store_key(const LayerCache& cache, int64_t row, int64_t at, const float* key, int64_t size) const;
  void store_value(const LayerCache& cache, int64_t row, int64_t at, const float* value, int64_t size) const;
  void multiply_keys(const LayerCache& cache, int64_t row, int64_t at, int64_t size, const float* queries,
                     int64_t rows, int64_t count, ThreadState& state, float* scores) const;
  void mix_values(const LayerCache& cache, int64_t row, int64_t at, int64_t size, const float* weights,
                  int64_t rows, int64_t count, ThreadState& state, float* mixed) const;
  void merge(const Attention& attention, const Call& call, int64_t parts);
  void rotate_latent(const Attention& attention, const Cache& cache, int64_t position, ThreadState& state,
                     float* x) const;
  void prepare_latent(const Attention& attention, const Cache& cache, int64_t position,
                      const float* projected, ThreadState& state, float* to) const;
  void prepare_latent_query(const Attention& attention, const Cache& cache, int64_t position,
                            const float* from, ThreadState& state, float* to) const;
  void project_latents(Team& team, const Attention& attention, size_t index, const Call& call);
  void expand_latents(Team& team, const Attention& attention, int64_t batch);
  void join_attention(const Layer& layer, const float* attended, const float* start, float* x, float* branch,
                      float* normed) const;
  void join_mlp(const Layer& layer, const float* result, float* branch, float* x, ThreadState& state) const;
  void feed_forward(Team& team, const Layer& layer, size_t index, const Call& call);
  void use_mlp(Team& team, const Mlp& mlp, int64_t batch, float* to);
  void use_experts(Team& team, const Layer& layer, size_t index, const Call& call);
  void choose_experts(const Router& router, float* logits, const LayerTrace& trace, int64_t row,
                      ThreadState& state, int64_t* chosen, float* weights) const;
  void trace_input(const LayerTrace& trace, int64_t row, float* x) const;
  void normalize_for_router(const ExpertNorms& norms, const float* x, float* to) const;
  void multiply_experts(Team& team, const Experts& experts, const Chosen& chosen, const float* x,
                        int64_t batch);
  void sum_experts(Team& team, const Experts& experts, const Chosen& chosen, int64_t batch);
  void sum_rows(const Experts& experts, const Chosen& chosen, const Input& input, ThreadState& state,
                int64_t batch, int64_t first, int64_t last, float* sums) const;
  void compute_inner(const Experts& experts, int64_t expert, const Input& input, int64_t first, int64_t last,
                     ThreadState& state, float* up) const;
  void add_shared(const Layer& layer, const float* shared, float gate, float* result, float* scratch) const;
  void finish(const Call& call, Team& team, const float* x);
  void compute_logits(const Call& call, ThreadState& state, const Inputs& inputs, int64_t first,
                      int64_t last) const;
  void keep_unit_best(const Call& call, ThreadState& state);
  int64_t parts_of(const Attention& attention, const Call& call, int threads) const;

  Decoder decoder_;
  int64_t widest_ = 0, widest_projections_ = 0, widest_inner_ = 0, widest_values_ = 0;
  int64_t most_experts_ = 0, most_used_ = 0, widest_expert_ = 0;  // of a layer
  int64_t widest_queries_ = 0, widest_absorbed_ = 0, widest_expanded_ = 0;  // of latent attention
  std::mutex mutex_;
  ThreadChoice thread_choice_;
  std::vector<std::unique_ptr<ThreadState>> thread_states_;
  // The leader's.
  std::vector<float> x_, start_, normed_, branch_, wide_, latent_inner_, token_input_, expert_given_;
  std::vector<Line> input_memory_[3];  // by form
  std::vector<int64_t> chosen_experts_;
  std::vector<float> chosen_weights_, gates_, shared_;
  // By layer, since a late thread may still read what was chosen in the layer before.
  std::vector<Chosen> chosen_;
  // Written in one phase, read in the next.
  std::vector<float> projected_, attended_, summed_, inner_, mixed_, peaks_, sums_, routed_, expert_inner_;
  std::vector<float> squares_;  // of queries and keys: [batch][2]
  std::vector<float> latent_queries_, absorbed_, expanded_, token_inputs_, token_gates_;
};

}  // namespace acclimate::inference::decode
