// One step of a decoder: all layers within one parallel region, whose threads meet at barriers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "decode_program.h"
#include "decode_screen.h"
#include "pool.h"

namespace acclimate::inference::decode {

// The keys are [batch][key_heads][capacity][head_size], the values [batch][key_heads][value_size][capacity].
struct Cache {
  int64_t capacity;
  std::vector<const float*> cos, sin;  // by table: [capacity][pairs]
  std::vector<const float*> factors;  // of queries: [capacity]
  std::vector<uint8_t*> keys, values;  // by layer
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
};

// A thread's share of `rows` rows, in whole groups.
inline std::pair<int64_t, int64_t> share(int64_t rows, int thread, int threads) {
  const int64_t groups = (rows + group_rows - 1) / group_rows;
  const auto begin = [&](int64_t t) { return std::min(groups * t / threads * group_rows, rows); };
  return {begin(thread), begin(thread + 1)};
}

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

  // Weights may have changed since the last call.
  void begin();

  // Computes one token of each sequence. A second caller waits for the first.
  void run(const Call& call, int threads);

  int64_t tables() const { return decoder_.tables; }
  int64_t factors() const { return decoder_.factors; }
  int64_t layers() const { return static_cast<int64_t>(decoder_.layers.size()); }
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

  // A group of the head's rows that may have the largest logit of a sequence.
  struct Candidate {
    float most;
    int64_t group, sequence;
  };
  // The state of one thread.
  struct ThreadState {
    std::vector<float> x, start, normed, branch, wide, gate, heads, scores, logits;
    std::vector<Line> memory[3];  // prepared inputs, by form
    bool is_ready[3] = {};
    Input input[3];
    std::vector<Line> query, weights, repacked, gathered;
    Chosen chosen;
    std::vector<int64_t> chosen_experts;
    std::vector<float> chosen_weights, mlp_gates, products;
    std::vector<std::pair<float, int64_t>> ranked;
    std::vector<float> best;
    std::vector<int64_t> best_token;
    std::vector<Candidate> candidates;
    std::vector<float> most;  // upper bounds of the products of each group of rows
    Input screened;  // the head's, for its coarse copy
    std::vector<int32_t> starts;  // of it
    Screen::Lengths lengths[max_rows];
    int64_t unscreened_steps = 0;  // to come

    void forget_input() { std::fill(is_ready, is_ready + 3, false); }
  };
  class Prefill;

  void make_thread_states(int threads);
  void keep_best(const Call& call) const;
  void work(const Call& call, int thread, int threads);
  void embed(const Call& call, ThreadState& state, int thread, int threads);
  void look_up(int64_t token, float* row) const;
  void finish_embedding(int64_t position, ThreadState& state, float* row) const;
  void sum_over_ranks(float* values, int64_t count, int thread, int threads);
  void multiply(const Product& product, ThreadState& state, const float* x, int64_t first, int64_t last,
                int64_t batch, float* to, int64_t stride) const {
    multiply_as(decoder_.dtype, product, state, x, first, last, batch, to, stride);
  }
  void multiply_as(Dtype dtype, const Product& product, ThreadState& state, const float* x, int64_t first,
                   int64_t last, int64_t batch, float* to, int64_t stride) const;
  Input input_for(const Weight& weight, Dtype dtype, ThreadState& state, const float* x, int64_t batch) const;
  void project(const Layer& layer, const Call& call, ThreadState& state, int thread, int threads);
  void attend(const Layer& layer, size_t index, const Call& call, ThreadState& state, int thread,
              int threads);
  void attend_part(const Attention& attention, size_t index, const Call& call, ThreadState& state,
                   int64_t sequence, int64_t key_head, int64_t part, int64_t parts);
  void prepare_query(const Attention& attention, const Cache& cache, int64_t position, const float* all,
                     int64_t head, ThreadState& state, float* to) const;
  void prepare_head(const Attention& attention, const Norm& norm, const Cache& cache, int64_t position,
                    const float* all, int64_t head, int64_t heads, ThreadState& state, float* to) const;
  void merge(const Attention& attention, const Call& call, ThreadState& state, int threads);
  void join_attention(const Layer& layer, const float* attended, const float* start, float* x, float* branch,
                      float* normed) const;
  void join_mlp(const Layer& layer, const float* result, float* branch, float* x, ThreadState& state) const;
  void feed_forward(const Layer& layer, const Call& call, ThreadState& state, int thread, int threads);
  void multiply_inner(const Mlp& mlp, ThreadState& state, int64_t batch, int thread, int threads);
  void use_experts(const Layer& layer, const Call& call, ThreadState& state, int thread, int threads);
  void choose_experts(const Router& router, float* logits, ThreadState& state, int64_t* chosen,
                      float* weights) const;
  void multiply_experts(const Experts& experts, const Input& input, ThreadState& state, int thread,
                        int threads);
  void sum_experts(const Experts& experts, ThreadState& state, int64_t batch, int64_t first, int64_t last,
                   float* sums, int64_t stride) const;
  void compute_inner(const Experts& experts, int64_t expert, const Input& input, int64_t first, int64_t last,
                     ThreadState& state, float* up, int64_t stride) const;
  void add_shared(const Layer& layer, const float* shared, float gate, float* result, float* scratch) const;
  void add_branches(const Layer& layer, const Call& call, ThreadState& state) const;
  void finish(const Call& call, ThreadState& state, int thread, int threads);
  bool suits_screen() const;
  void update_screen(const Call& call, int threads);
  bool find_best(const Call& call, ThreadState& state, const float* x, int64_t first, int64_t last,
                 int threads);
  bool approximate(const Call& call, ThreadState& state, const float* x, int64_t first, int64_t last);
  float at_most(float product, int64_t group, Screen::Lengths lengths) const;
  void try_group(const Call& call, ThreadState& state, const float* x, int64_t first, int64_t last,
                 int64_t sequence, int64_t group);
  int64_t parts_of(const Attention& attention, const Call& call, int threads) const;

  Decoder decoder_;
  int64_t widest_ = 0, widest_projections_ = 0, widest_inner_ = 0, widest_values_ = 0;
  int64_t most_experts_ = 0, widest_pairs_ = 0;  // of a layer; columns between the products of a token
  std::mutex mutex_;
  Barrier barrier_;
  std::unique_ptr<Screen> screen_;
  bool can_screen_ = false, screens_ = false, screen_is_checked_ = false;
  bool checks_screen_ = false;  // while it reads all of the head
  bool releases_head_ = false;  // from memory, as the next steps read its coarse copy
  std::atomic<bool> screen_is_current_{true};
  std::atomic<float> largest_[max_rows];  // of each sequence: the largest logit so far
  std::vector<std::unique_ptr<ThreadState>> thread_states_;
  // Written by one thread each, read by all after the next barrier.
  std::vector<float> projected_, attended_, summed_, inner_, mixed_, peaks_, sums_;
  std::vector<float> routed_, expert_inner_, shared_;
};

}  // namespace acclimate::inference::decode
