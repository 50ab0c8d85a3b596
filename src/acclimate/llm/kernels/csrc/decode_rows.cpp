// The operations on one row of the residual stream, or on one head of it. They are the same whether tokens
// come one by one or together.
#include "decode_step.h"

namespace acclimate::inference::decode {

bool Step::has_rows(const Call& call) const {
  const int64_t* end = call.tokens + call.batch * call.length;
  const bool has_tokens =
      std::all_of(call.tokens, end, [&](int64_t token) { return token >= 0 && token < decoder_.tokens; });
  const int64_t first = *std::min_element(call.starts, call.starts + call.batch);
  return has_tokens && (decoder_.positions.data == nullptr ||
                        call.place + call.length - first + decoder_.position_offset <= decoder_.positions.n);
}

// A token's row of the embedding; zeros, if another rank has it.
void Step::look_up(int64_t token, float* row) const {
  const int64_t local = token - decoder_.first_token;
  if (decoder_.embedding_is_summed && (local < 0 || local >= decoder_.embedding.n)) {
    std::fill(row, row + decoder_.hidden, 0.0f);
    return;
  }
  dequantize(decoder_.embedding, local, local + 1, row);
  round_values(decoder_.dtype, row, decoder_.hidden);
}

void Step::finish_embedding(int64_t position, ThreadState& state, float* row) const {
  const int64_t hidden = decoder_.hidden;
  if (decoder_.embedding_factor != 1.0f) {
    scale(decoder_.dtype, decoder_.embedding_factor, row, hidden);
  }
  if (decoder_.embedding_norm.is_there) {
    normalize(decoder_.embedding_norm, decoder_.dtype, row, hidden, 0, row);
  }
  if (decoder_.positions.data != nullptr) {
    const int64_t place = position + decoder_.position_offset;
    float* added = at_least(state.branch, hidden);
    dequantize(decoder_.positions, place, place + 1, added);
    add_branch(decoder_.dtype, row, added, 1.0f, hidden);
  }
}

// Of a row of projections, the squares of its queries and of its keys, which ranks add.
void Step::sum_squares(const Attention& attention, const float* row, float* sums) const {
  const int64_t queries = attention.heads * attention.head_size;
  sums[0] = counted_squares(attention.query_norm, row, queries);
  const int64_t keys = attention.key_norm.is_there ? attention.key_heads * attention.head_size : 0;
  sums[1] = counted_squares(attention.key_norm, row + queries, keys);
}

// Normalizes a row of projections in place: the queries of all heads together, and the keys.
void Step::normalize_row(const Attention& attention, const float* sums, float* row) const {
  const int64_t queries = attention.heads * attention.head_size;
  const auto normalize_part = [&](const Norm& norm, int64_t count, float squares, float* part) {
    if (norm.shared_columns > 0) {
      normalize_shared(norm, decoder_.dtype, part, count, squares, part);
    } else if (norm.is_there) {
      normalize(norm, decoder_.dtype, part, count, 0, part);
    }
  };
  normalize_part(attention.query_norm, queries, sums[0], row);
  normalize_part(attention.key_norm, attention.key_heads * attention.head_size, sums[1], row + queries);
}

// One query or key head: normalized, if heads are one by one, and rotated.
void Step::prepare_head(const Attention& attention, const Norm& norm, const Cache& cache, int64_t position,
                        const float* all, int64_t head, float* to) const {
  const int64_t size = attention.head_size;
  const auto rotated = [&] {
    if (attention.table >= 0) {
      const int64_t row = position * attention.pairs;
      rotate(decoder_.dtype, attention.interleaved, attention.rounds_products,
             cache.cos[attention.table] + row, cache.sin[attention.table] + row, attention.pairs, to);
    }
  };
  std::copy(all + head * size, all + (head + 1) * size, to);
  if (attention.rotary_first) {
    rotated();
  }
  if (norm.is_there && attention.norm_is_per_head) {
    normalize(norm, decoder_.dtype, to, size, head, to);
  }
  if (!attention.rotary_first) {
    rotated();
  }
}

void Step::prepare_query(const Attention& attention, const Cache& cache, int64_t position, const float* all,
                         int64_t head, float* to) const {
  if (attention.latent.has_value()) {  // queries of latents are prepared already
    std::copy(all + head * attention.head_size, all + (head + 1) * attention.head_size, to);
    return;
  }
  prepare_head(attention, attention.query_norm, cache, position, all, head, to);
  if (attention.query_factors >= 0) {
    scale(decoder_.dtype, cache.factors[attention.query_factors][position], to, attention.head_size);
  }
}

// One value head, normalized.
void Step::prepare_value(const Attention& attention, const float* all, int64_t head, float* to) const {
  const int64_t size = attention.value_size;
  if (attention.value_norm.is_there) {
    normalize(attention.value_norm, decoder_.dtype, all + head * size, size, head, to);
  } else {
    std::copy(all + head * size, all + (head + 1) * size, to);
  }
}

// Puts a key into a row of the cache, which is a head of a sequence.
void Step::store_key(const LayerCache& cache, int64_t row, int64_t at, const float* key, int64_t size) const {
  const int64_t place = row * cache.capacity + at, blocks = int8_blocks(size);
  if (cache.is_int8()) {
    store_int8(key, size, reinterpret_cast<int8_t*>(cache.keys) + place * size, 1,
               cache.key_exponents + place * blocks, 1);
  } else if (decoder_.dtype == Dtype::bf16) {
    fill_bf16(key, size, size, reinterpret_cast<uint16_t*>(cache.keys) + place * size);
  } else {
    store(decoder_.dtype, key, size, cache.keys, place * size, 1);
  }
}

void Step::store_value(const LayerCache& cache, int64_t row, int64_t at, const float* value,
                       int64_t size) const {
  const int64_t capacity = cache.capacity, first = row * capacity * size + at;
  if (cache.is_int8()) {
    store_int8(value, size, reinterpret_cast<int8_t*>(cache.values) + first, capacity,
               cache.value_exponents + row * capacity * int8_blocks(size) + at, capacity);
  } else {
    store(decoder_.dtype, value, size, cache.values, first, capacity);
  }
}

// Adds the output of attention or of a convolution to the residual stream, or to `branch` in a parallel
// layer, and normalizes the input of the MLP. Other layers use `branch` as memory at most.
void Step::join_attention(const Layer& layer, const float* attended, const float* start, float* x,
                          float* branch, float* normed) const {
  const int64_t hidden = decoder_.hidden;
  const float* given = layer.parallel && layer.mlp_shares_norm ? start : x;
  if (layer.parallel || layer.mixer_post_norm.is_there) {
    normalize(layer.mixer_post_norm, decoder_.dtype, attended, hidden, 0, branch);
    attended = branch;
  }
  if (!layer.parallel) {
    add_branch(decoder_.dtype, x, attended, layer.mixer_factor, hidden);
  }
  normalize(layer.mlp_norm, decoder_.dtype, given, hidden, 0, normed);
}

// Adds the MLP's output to the residual stream, and in a parallel layer attention's branch too.
void Step::join_mlp(const Layer& layer, const float* result, float* branch, float* x,
                    ThreadState& state) const {
  const int64_t hidden = decoder_.hidden;
  if (layer.mlp_post_norm.is_there) {
    float* normed = at_least(state.normed, hidden);
    normalize(layer.mlp_post_norm, decoder_.dtype, result, hidden, 0, normed);
    result = normed;
  }
  if (layer.parallel && layer.adds_branches_first) {
    add_branch(decoder_.dtype, branch, result, 1.0f, hidden);
    add_branch(decoder_.dtype, x, branch, 1.0f, hidden);
  } else {
    if (layer.parallel) {
      add_branch(decoder_.dtype, x, branch, layer.mixer_factor, hidden);
    }
    add_branch(decoder_.dtype, x, result, layer.mlp_factor, hidden);
  }
}

// Makes what a token has for each layer of the product of the first layer's input.
void Step::finish_token_inputs(int64_t token, ThreadState& state, float* row) const {
  const TokenInputs& inputs = *decoder_.token_inputs;
  const int64_t width = inputs.width();
  scale(decoder_.dtype, inputs.product_factor, row, width);
  for (int64_t first = 0; first < width; first += inputs.size) {
    normalize(inputs.norm, decoder_.dtype, row + first, inputs.size, 0, row + first);
  }
  float* added = at_least(state.branch, width);
  dequantize(inputs.table, token, token + 1, added);
  round_values(decoder_.dtype, added, width);
  scale(decoder_.dtype, inputs.table_factor, added, width);
  add_branch(decoder_.dtype, row, added, 1.0f, width);
  scale(decoder_.dtype, inputs.factor, row, width);
}

// Multiplies what a token has for a layer by gates.
void Step::use_token_input(const TokenInput& used, const float* inputs, const float* gate, float* to) const {
  const int64_t size = decoder_.token_inputs->size;
  std::copy(inputs + used.index * size, inputs + (used.index + 1) * size, to);
  activate(used.activation, decoder_.dtype, gate, to, size);
}

// Adds what a layer makes of a token's numbers to the residual stream, if it does, and multiplies that.
void Step::finish_layer(const Layer& layer, const float* product, ThreadState& state, float* x) const {
  const int64_t hidden = decoder_.hidden;
  if (layer.token_input.has_value()) {
    float* normed = at_least(state.normed, hidden);
    normalize(layer.token_input->norm, decoder_.dtype, product, hidden, 0, normed);
    add_branch(decoder_.dtype, x, normed, 1.0f, hidden);
  }
  if (layer.factor != 1.0f) {
    scale(decoder_.dtype, layer.factor, x, hidden);
  }
}

}  // namespace acclimate::inference::decode
