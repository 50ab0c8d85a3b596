// Gated convolutions. The cache keeps each token's inputs of all channels as one key.
#include "decode_step.h"

namespace acclimate::inference::decode {

// The results of a token, multiplied by its gates: of its inputs, and of those of the tokens before it.
void Step::convolve_token(const Convolution& convolution, const LayerCache& cache, int64_t sequence,
                          int64_t place, const float* inputs, const float* gate, ThreadState& state,
                          float* to) const {
  const int64_t channels = convolution.channels, bytes = channels * size_of(decoder_.dtype);
  // Before the first place there are zeros.
  const int64_t earlier = std::min(convolution.width - 1, place);
  float* before = at_least(state.wide, earlier * channels);
  const int64_t row = sequence * cache.capacity + place - earlier - cache.first;
  dequantize({WeightFormat::dense, decoder_.dtype, earlier, channels, cache.keys + row * bytes, bytes}, 0,
             earlier, before);
  if (convolution.bias == nullptr) {
    std::fill(to, to + channels, 0.0f);
  } else {
    std::copy(convolution.bias, convolution.bias + channels, to);
  }
  const float* weights = convolution.weights + (convolution.width - 1 - earlier) * channels;
  for (int64_t i = 0; i < earlier; ++i) {
    add_products(weights + i * channels, before + i * channels, to, channels);
  }
  add_products(weights + earlier * channels, inputs, to, channels);
  round_values(decoder_.dtype, to, channels);
  multiply_values(decoder_.dtype, gate, to, channels);
}

// Puts the inputs of the tokens into the cache, and their results into `wide_`.
void Step::convolve(Team& team, const Convolution& own, size_t index, const Call& call) {
  const Convolution* const convolution = &own;
  const Call* const given = &call;
  const int64_t channels = own.channels;
  team.share(
      call.batch,
      [=, this](int64_t sequence, int thread) {
        ThreadState& state = *thread_states_[thread];
        const float* from = projected_.data() + sequence * convolution->projections.width;
        float* inputs = at_least(state.results, 2 * channels);
        std::copy(from, from + channels, inputs);
        multiply_values(decoder_.dtype, from + channels, inputs, channels);
        convolve_token(*convolution, given->cache.layers[index], sequence, given->place, inputs,
                       from + 2 * channels, state, inputs + channels);
      },
      [=, this](int64_t sequence, int thread) {
        const LayerCache& cache = given->cache.layers[index];
        const float* inputs = thread_states_[thread]->results.data();
        store_key(cache, sequence, given->place - cache.first, inputs, channels);
        std::copy(inputs + channels, inputs + 2 * channels, wide_.data() + sequence * channels);
      });
}

}  // namespace acclimate::inference::decode
