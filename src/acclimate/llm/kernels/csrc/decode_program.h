// A decoder as acclimate.llm.decode.native writes it: numbers, and addresses that Python keeps alive.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "decode_math.h"
#include "layout.h"
#include "linear.h"

namespace acclimate::inference::decode {

class Reader {
 public:
  Reader(const int64_t* from, int64_t count) : from_(from), end_(from + count) {}

  int64_t number() {
    if (from_ == end_) {
      throw std::runtime_error("a decoder's description is cut off");
    }
    return *from_++;
  }
  bool flag() { return number() != 0; }
  float real() {
    const int64_t bits = number();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
  }
  template <class T>
  const T* address() {
    return reinterpret_cast<const T*>(static_cast<uintptr_t>(number()));
  }

 private:
  const int64_t *from_, *end_;
};

inline Weight read_weight(Reader& from) {
  Weight weight;
  const std::optional<WeightFormat> found = find_format(from.number());
  if (!found.has_value()) {
    throw std::runtime_error("a decoder's description has an unknown weight format");
  }
  weight.format = *found;
  weight.dtype = static_cast<Dtype>(from.number());
  weight.n = from.number();
  weight.k = from.number();
  weight.data = from.address<uint8_t>();
  weight.stride = from.number();
  return weight;
}

// Some rows of a weight: some columns of a linear module's output.
struct Part {
  Weight weight;
  int64_t first, count;
  const float* bias;
};

// Rows of weights with the same input, one part after the other.
struct Product {
  std::vector<Part> parts;
  int64_t width = 0, k = 0;

  explicit Product(Reader& from) {
    const int64_t count = from.number();
    for (int64_t i = 0; i < count; ++i) {
      Part part{read_weight(from), from.number(), from.number(), from.address<float>()};
      k = part.weight.k;
      width += part.count;
      parts.push_back(part);
    }
  }
};

inline Norm read_norm(Reader& from) {
  Norm norm;
  norm.is_there = from.flag();
  if (norm.is_there) {
    norm.is_layer = from.flag();
    norm.rounds_first = from.flag();
    norm.eps = from.real();
    norm.weight = from.address<float>();
    norm.bias = from.address<float>();
    norm.rows = from.number();
    norm.shared_columns = from.number();
    norm.counts = from.flag();
  }
  return norm;
}

// The weights of all experts of a layer for one product, or those of all heads.
struct Stack {
  explicit Stack(Reader& from)
      : count(from.number()),
        first(read_weight(from)),
        between(from.number()),
        biases(from.address<float>()) {}

  Weight of(int64_t index) const {
    Weight own = first;
    own.data += index * between;
    return own;
  }
  const float* bias(int64_t index) const { return biases == nullptr ? nullptr : biases + index * first.n; }

  int64_t count;
  Weight first;
  int64_t between;  // bytes from one weight to the next
  const float* biases;  // null: none
};

template <class Part>
std::optional<Part> read_optional(Reader& from) {
  return from.flag() ? std::optional<Part>(std::in_place, from) : std::nullopt;
}

// Attention whose keys and values are products of a latent of each token: a head's query is multiplied by the
// weights of its keys, and what it gets of the latents by those of its values.
struct Latent {
  explicit Latent(Reader& from)
      : queries(from),
        query_norm(read_norm(from)),
        norm(read_norm(from)),
        keys(from),
        values(from),
        key_size(from.number()),
        rotated(from.number()),
        splits_pairs(from.flag()) {}

  int64_t size() const { return keys.first.n; }
  int64_t query_size() const { return key_size + rotated; }
  int64_t value_size() const { return values.first.n; }

  Product queries;  // without parts: the first products give queries, else what is normalized before
  Norm query_norm, norm;
  Stack keys;  // [latent][key_size] of each head
  Stack values;  // [value_size][latent] of each head
  int64_t key_size;  // of each query and key: not rotated
  int64_t rotated;  // the elements after them
  bool splits_pairs;  // the first elements of all pairs then come before the second ones
};

struct Attention {
  explicit Attention(Reader& from)
      : projections(from),
        query_norm(read_norm(from)),
        key_norm(read_norm(from)),
        value_norm(read_norm(from)),
        norm_is_per_head(from.flag()),
        rotary_first(from.flag()),
        table(from.number()),
        pairs(from.number()),
        interleaved(from.flag()),
        rounds_products(from.flag()),
        query_factors(from.number()),
        heads(from.number()),
        key_heads(from.number()),
        head_size(from.number()),
        value_size(from.number()),
        scale(from.real()),
        window(from.number()),
        softcap(from.real()),
        sinks(from.address<float>()),
        output(from),
        output_is_summed(from.flag()),
        is_shared(from.flag()),
        is_gated(from.flag()),
        latent(read_optional<Latent>(from)) {}

  // Whether the queries of all heads are normalized together, and their keys.
  bool normalizes_rows() const { return query_norm.is_there && !norm_is_per_head; }
  // The first of the numbers that results are multiplied by.
  int64_t first_gate() const { return projections.width - heads * value_size; }
  // The numbers of a head's result.
  int64_t result_size() const { return latent.has_value() ? latent->value_size() : value_size; }

  // Queries, keys, values and gates; with a latent: it comes before the key that heads share.
  Product projections;
  Norm query_norm, key_norm, value_norm;  // that of values is of each head
  bool norm_is_per_head, rotary_first;
  int64_t table;  // -1: no rotation
  int64_t pairs;
  bool interleaved, rounds_products;
  int64_t query_factors;  // -1: none
  int64_t heads, key_heads, head_size, value_size;
  float scale;
  int64_t window;  // 0: none
  float softcap;  // 0: none
  const float* sinks;
  Product output;
  bool output_is_summed;  // over the ranks
  bool is_shared;  // keys and values are those of an earlier layer; the projections have none
  bool is_gated;  // the results are multiplied by the sigmoid of the last projections
  // There is one key head then, whose values are latents and whose keys are those and the rotated key.
  std::optional<Latent> latent;
};

// A causal convolution of each channel over tokens. The cache keeps its inputs as the keys of one head.
struct Taps {
  explicit Taps(Reader& from)
      : channels(from.number()),
        width(from.number()),
        weights(from.address<float>()),
        bias(from.address<float>()) {}

  int64_t channels;
  int64_t width;  // the tokens that a result is made of
  const float* weights;  // [width][channels]; the last ones are those of the token itself
  const float* bias;  // null: none
};

// A gated convolution.
struct Convolution {
  explicit Convolution(Reader& from)
      : projections(from), taps(from), output(from), output_is_summed(from.flag()) {}

  Product projections;  // two factors of the inputs, and what the results are multiplied by
  Taps taps;
  Product output;
  bool output_is_summed;  // over the ranks
};

// A gated delta rule: each head has a state, keys x values, that every token changes.
struct DeltaRule {
  explicit DeltaRule(Reader& from)
      : projections(from),
        taps(from),
        activation(static_cast<Activation>(from.number())),
        heads(from.number()),
        key_heads(from.number()),
        key_size(from.number()),
        value_size(from.number()),
        eps(from.real()),
        scale(from.real()),
        strength_factor(from.real()),
        decay_bias(from.address<float>()),
        rates(from.address<float>()),
        norm(read_norm(from)),
        gate_activation(static_cast<Activation>(from.number())),
        output(from),
        output_is_summed(from.flag()) {}

  // The numbers of all heads' results, and of a head's state.
  int64_t result_size() const { return heads * value_size; }
  int64_t state_size() const { return key_size * value_size; }
  int64_t first_key() const { return key_heads * key_size; }
  int64_t first_value() const { return 2 * first_key(); }
  int64_t first_gate() const { return taps.channels; }
  int64_t first_strength() const { return taps.channels + result_size(); }
  int64_t first_decay() const { return first_strength() + heads; }

  // The inputs of the convolution, which are queries and keys of all key heads and values of all heads;
  // gates, strengths and decays of all heads.
  Product projections;
  Taps taps;
  Activation activation;  // of the convolution's results
  int64_t heads, key_heads, key_size, value_size;
  float eps;  // added to the squared length of queries and keys
  float scale;  // of queries
  float strength_factor;
  const float* decay_bias;  // [heads]
  const float* rates;  // [heads]; logarithms
  Norm norm;  // of a head's result
  Activation gate_activation;
  Product output;
  bool output_is_summed;  // over the ranks
};

// An operation on the numbers of a token's experts; numbered as in acclimate.llm.decode.native.
struct Operation {
  enum class Kind : int64_t { softmax, sigmoid, normalize, scale, soft_cap, round, normalize_at_least };

  Kind kind;
  float value;
};

inline std::vector<Operation> read_operations(Reader& from) {
  std::vector<Operation> operations;
  const int64_t count = from.number();
  for (int64_t i = 0; i < count; ++i) {
    const auto kind = static_cast<Operation::Kind>(from.number());
    operations.push_back({kind, from.real()});
  }
  return operations;
}

// Chooses each token's experts, and says how much each counts.
struct Router {
  explicit Router(Reader& from)
      : logits(from),
        rounds_logits(from.flag()),
        scores(read_operations(from)),
        choice_bias(from.address<float>()),
        groups(from.number()),
        used_groups(from.number()),
        best_of_group(from.number()),
        others(from.real()),
        used(from.number()),
        weights(read_operations(from)),
        factors(from.address<float>()) {}

  Product logits;
  bool rounds_logits;  // to the decoder's dtype; else they are computed in float32
  std::vector<Operation> scores;
  const float* choice_bias;  // null: none
  int64_t groups, used_groups, best_of_group;  // 0: experts are in no groups
  float others;  // the score of the experts of other groups
  int64_t used;
  std::vector<Operation> weights;
  const float* factors;  // of the weights of all experts; null: none
};

inline Gating read_gating(Reader& from) {
  Gating gating{};
  gating.activation = static_cast<Activation>(from.number());
  gating.is_gated = from.flag();
  gating.steepness = from.real();
  gating.gate_limit = from.real();
  gating.up_limit = from.real();
  gating.adds = from.real();
  return gating;
}

// Norms of a layer whose router, experts and shared MLP have inputs and results of their own.
struct ExpertNorms {
  explicit ExpertNorms(Reader& from)
      : router(read_norm(from)),
        router_factor(from.real()),
        inner(read_norm(from)),
        result(read_norm(from)),
        shared_result(read_norm(from)) {}

  Norm router;
  float router_factor;
  Norm inner, result, shared_result;
};

struct Experts {
  explicit Experts(Reader& from)
      : router(from),
        inner(from),
        interleaved(from.flag()),
        gating(read_gating(from)),
        down(from),
        rounds_weighted(from.flag()),
        down_is_summed(from.flag()),
        norms(read_optional<ExpertNorms>(from)) {}

  // The columns between the two products.
  int64_t width() const { return down.first.k; }

  Router router;
  Stack inner;  // gates and ups, one after the other or in turns
  bool interleaved;
  Gating gating;
  Stack down;
  bool rounds_weighted;  // results of experts, before they are summed
  bool down_is_summed;  // over the ranks
  std::optional<ExpertNorms> norms;
};

struct Mlp {
  explicit Mlp(Reader& from)
      : activation(static_cast<Activation>(from.number())),
        is_gated(from.flag()),
        gate(from),
        up(from),
        down(from),
        down_is_summed(from.flag()) {}

  Activation activation;
  bool is_gated;
  Product gate, up, down;
  bool down_is_summed;  // over the ranks
};

// Numbers that a token has for each layer, beside its row of the embedding.
struct TokenInputs {
  explicit TokenInputs(Reader& from)
      : table(read_weight(from)),
        table_factor(from.real()),
        product(from),
        product_factor(from.real()),
        norm(read_norm(from)),
        size(from.number()),
        factor(from.real()) {}

  int64_t width() const { return product.width; }

  Weight table;  // a row is added to the product
  float table_factor;
  Product product;  // of the first layer's input
  float product_factor;
  Norm norm;  // of the numbers of one layer
  int64_t size;  // of one layer
  float factor;
};

// What a layer adds to its result: norm(output(activation(gate(x)) * the token's numbers)).
struct TokenInput {
  explicit TokenInput(Reader& from)
      : index(from.number()),
        gate(from),
        activation(static_cast<Activation>(from.number())),
        output(from),
        norm(read_norm(from)) {}

  int64_t index;  // which of the numbers
  Product gate;
  Activation activation;
  Product output;
  Norm norm;
};

struct Layer {
  explicit Layer(Reader& from)
      : mixer_norm(read_norm(from)),
        attention(read_optional<Attention>(from)),
        convolution(read_optional<Convolution>(from)),
        delta_rule(read_optional<DeltaRule>(from)),
        mixer_post_norm(read_norm(from)),
        mixer_factor(from.real()),
        mlp_norm(read_norm(from)),
        experts(read_optional<Experts>(from)),
        mlp(read_optional<Mlp>(from)),
        mlp_gate(from),
        mlp_post_norm(read_norm(from)),
        mlp_factor(from.real()),
        parallel(from.flag()),
        adds_branches_first(from.flag()),
        mlp_shares_norm(from.flag()),
        token_input(read_optional<TokenInput>(from)),
        factor(from.real()) {}

  // What mixes the tokens of a text.
  const Product& projections() const {
    return attention     ? attention->projections
           : convolution ? convolution->projections
                         : delta_rule->projections;
  }
  const Product& mixer_output() const {
    return attention ? attention->output : convolution ? convolution->output : delta_rule->output;
  }
  bool mixer_is_summed() const {
    return attention     ? attention->output_is_summed
           : convolution ? convolution->output_is_summed
                         : delta_rule->output_is_summed;
  }
  // The most tokens that a token sees, itself included; 0: all.
  int64_t window() const {
    return attention ? attention->window : convolution ? convolution->taps.width : delta_rule->taps.width;
  }
  // The numbers of a token that the mixer leaves to the output projection, or of latents.
  int64_t mixed() const {
    return attention     ? attention->heads * attention->value_size
           : convolution ? convolution->taps.channels
                         : delta_rule->result_size();
  }

  Norm mixer_norm;
  std::optional<Attention> attention;  // there is one of the three
  std::optional<Convolution> convolution;
  std::optional<DeltaRule> delta_rule;
  Norm mixer_post_norm;
  float mixer_factor;
  Norm mlp_norm;
  std::optional<Experts> experts;
  std::optional<Mlp> mlp;  // beside experts: of all tokens, and its result is added to theirs
  Product mlp_gate;  // one column, whose sigmoid the result of an MLP beside experts is multiplied by
  Norm mlp_post_norm;
  float mlp_factor;
  bool parallel, adds_branches_first, mlp_shares_norm;
  std::optional<TokenInput> token_input;
  float factor;  // of the result, at the end
};

// Replaces values by their sums over the ranks that share a model; waits for them.
using Exchange = void (*)(float* values, int64_t count);

struct Decoder {
  explicit Decoder(Reader& from)
      : dtype(static_cast<Dtype>(from.number())),
        hidden(from.number()),
        tables(from.number()),
        factors(from.number()),
        embedding(read_weight(from)),
        embedding_factor(from.real()),
        embedding_norm(read_norm(from)),
        exchange(reinterpret_cast<Exchange>(static_cast<uintptr_t>(from.number()))),
        embedding_is_summed(from.flag()),
        first_token(from.number()),
        tokens(from.number()),
        positions(read_weight(from)),
        position_offset(from.number()),
        token_inputs(read_optional<TokenInputs>(from)) {
    const int64_t count = from.number();
    for (int64_t i = 0; i < count; ++i) {
      layers.emplace_back(from);
    }
    norm = read_norm(from);
    head_input_factor = from.real();
    head = std::make_unique<Product>(from);
    logit_factor = from.real();
    logit_cap = from.real();
  }

  Dtype dtype;
  int64_t hidden, tables, factors;
  Weight embedding;
  float embedding_factor;
  Norm embedding_norm;
  Exchange exchange;  // null for one rank
  bool embedding_is_summed;  // over the ranks; each rank has the rows of some tokens
  int64_t first_token;  // of those
  int64_t tokens;  // the rows of all ranks
  Weight positions;  // of learned position embeddings; without data: none
  int64_t position_offset;
  std::optional<TokenInputs> token_inputs;
  std::vector<Layer> layers;
  Norm norm;
  float head_input_factor;
  std::unique_ptr<Product> head;
  float logit_factor, logit_cap;
};

}  // namespace acclimate::inference::decode
