// Latent attention, around the attention of one key head whose keys and values are latents: it gets queries
// of latents, and gives sums of latents, of which each head makes its own result.
#include "decode_step.h"

namespace acclimate::inference::decode {

// Rotates the elements that come after those of a query or a key that are not rotated.
void Step::rotate_latent(const Attention& attention, const Cache& cache, int64_t position, ThreadState& state,
                         float* x) const {
  if (attention.table < 0) {
    return;
  }
  const int64_t pairs = attention.pairs, row = position * pairs;
  rotate(decoder_.dtype, attention.interleaved, attention.rounds_products, cache.cos[attention.table] + row,
         cache.sin[attention.table] + row, pairs, x);
  if (attention.latent->splits_pairs) {
    float* rotated = at_least(state.branch, 2 * pairs);
    std::copy(x, x + 2 * pairs, rotated);
    for (int64_t i = 0; i < pairs; ++i) {
      x[i] = rotated[2 * i];
      x[pairs + i] = rotated[2 * i + 1];
    }
  }
}

// The key of a token: its latent, and the key that all heads share. `projected` is of the token.
void Step::prepare_latent(const Attention& attention, const Cache& cache, int64_t position,
                          const float* projected, ThreadState& state, float* to) const {
  const Latent& latent = *attention.latent;
  const float* from = projected + attention.projections.width - latent.size() - latent.rotated;
  normalize(latent.norm, decoder_.dtype, from, latent.size(), 0, to);
  std::copy(from + latent.size(), from + latent.size() + latent.rotated, to + latent.size());
  rotate_latent(attention, cache, position, state, to + latent.size());
}

// The query of a head, before it is multiplied by the weights of the head's keys.
void Step::prepare_latent_query(const Attention& attention, const Cache& cache, int64_t position,
                                const float* from, ThreadState& state, float* to) const {
  const Latent& latent = *attention.latent;
  std::copy(from, from + latent.query_size(), to);
  rotate_latent(attention, cache, position, state, to + latent.key_size);
  if (attention.query_factors >= 0) {
    scale(decoder_.dtype, cache.factors[attention.query_factors][position], to, latent.query_size());
  }
}

// Puts latents into the cache, and queries of latents into `absorbed_`.
void Step::project_latents(Team& team, const Attention& own, size_t index, const Call& call) {
  const Attention* const attention = &own;
  const Latent& latent = *attention->latent;
  const Call* const given = &call;
  const int64_t batch = call.batch, heads = attention->heads, size = attention->head_size;
  const int64_t width = attention->projections.width, latent_size = latent.size();
  const int64_t before = width - latent_size - latent.rotated;  // columns for queries
  const LayerCache& cache = call.cache.layers[index];
  const int64_t at = call.place - cache.first;
  float* key = at_least(thread_states_[0]->results, size);
  for (int64_t i = 0; i < batch; ++i) {
    prepare_latent(*attention, call.cache, call.place - call.starts[i], projected_.data() + i * width,
                   *thread_states_[0], key);
    store_key(cache, i, at, key, size);
    store_value(cache, i, at, key, latent_size);
    normalize(latent.query_norm, decoder_.dtype, projected_.data() + i * width, before, 0,
              latent_inner_.data() + i * before);
  }
  if (!latent.queries.parts.empty()) {
    multiply(team, latent.queries, latent_inner_.data(), batch, latent_queries_.data());
  }
  const float* const queries = latent.queries.parts.empty() ? latent_inner_.data() : latent_queries_.data();
  team.share(
      heads,
      [=, this](int64_t head, int thread) {
        ThreadState& state = *thread_states_[thread];
        const Latent& own = *attention->latent;
        const int64_t query_size = own.query_size();
        const Weight weight = own.keys.of(head);
        float* prepared = at_least(state.heads, batch * query_size);
        float* results = at_least(state.results, batch * size);
        for (int64_t i = 0; i < batch; ++i) {
          float* query = prepared + i * query_size;
          prepare_latent_query(*attention, given->cache, given->place - given->starts[i],
                               queries + (i * heads + head) * query_size, state, query);
          std::copy(query + own.key_size, query + query_size, results + i * size + latent_size);
        }
        const Form form = form_of(weight, decoder_.dtype);
        compute(weight, rows_as_input(form, prepared, batch, own.key_size, query_size, state.query), 0,
                latent_size, results, size);
        for (int64_t i = 0; i < batch; ++i) {
          round_values(decoder_.dtype, results + i * size, latent_size);
        }
      },
      [=, this](int64_t head, int thread) {
        copy_results(thread, batch, size, absorbed_.data() + head * size, heads * size);
      });
}

// Makes the heads' results in `expanded_` of their sums of latents in `wide_`.
void Step::expand_latents(Team& team, const Attention& given, int64_t batch) {
  const Attention* const attention = &given;
  const int64_t heads = attention->heads, size = attention->result_size();
  team.share(
      heads,
      [=, this](int64_t head, int thread) {
        ThreadState& state = *thread_states_[thread];
        const Weight weight = attention->latent->values.of(head);
        const int64_t k = weight.k;
        float* results = at_least(state.results, batch * size);
        const Form form = form_of(weight, decoder_.dtype);
        compute(weight, rows_as_input(form, wide_.data() + head * k, batch, k, heads * k, state.query), 0,
                size, results, size);
        round_values(decoder_.dtype, results, batch * size);
      },
      [=, this](int64_t head, int thread) {
        copy_results(thread, batch, size, expanded_.data() + head * size, heads * size);
      });
}

}  // namespace acclimate::inference::decode
