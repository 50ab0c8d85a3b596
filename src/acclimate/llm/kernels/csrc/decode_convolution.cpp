// Causal convolutions. The cache keeps each token's inputs of all channels as one key.
#include "decode_step.h"

namespace acclimate::inference::decode {

// The results of some channels for a token: of its inputs, and of those of the tokens before it.
void Step::convolve_channels(const Taps& taps, const LayerCache& cache, int64_t sequence, int64_t place,
                             const float* inputs, int64_t first, int64_t count, ThreadState& state,
                             float* to) const {
  const int64_t bytes = size_of(decoder_.dtype), stride = taps.channels * bytes;
  // Before the first place there are zeros.
  const int64_t earlier = std::min(taps.width - 1, place);
  float* before = at_least(state.wide, earlier * count);
  const int64_t row = sequence * cache.capacity + place - earlier - cache.first;
  dequantize({WeightFormat::dense, decoder_.dtype, earlier, count, cache.keys + row * stride + first * bytes,
              stride},
             0, earlier, before);
  if (taps.bias == nullptr) {
    std::fill(to, to + count, 0.0f);
  } else {
    std::copy(taps.bias + first, taps.bias + first + count, to);
  }
  const float* weights = taps.weights + (taps.width - 1 - earlier) * taps.channels + first;
  for (int64_t i = 0; i < earlier; ++i) {
    add_products(weights + i * taps.channels, before + i * count, to, count);
  }
  add_products(weights + earlier * taps.channels, inputs + first, to, count);
  round_values(decoder_.dtype, to, count);
}

// Puts a token's inputs of some channels into the cache.
void Step::store_channels(const Taps& taps, const LayerCache& cache, int64_t sequence, int64_t place,
                          const float* inputs, int64_t first, int64_t count) const {
  const int64_t row = sequence * cache.capacity + place - cache.first;
  store(decoder_.dtype, inputs + first, count, cache.keys, row * taps.channels + first, 1);
}

// Puts the inputs of the tokens into the cache, and their results, multiplied by their gates, into `wide_`.
void Step::convolve(Team& team, const Convolution& own, size_t index, const Call& call) {
  const Convolution* const convolution = &own;
  const Call* const given = &call;
  const int64_t channels = own.taps.channels;
  team.share(
      call.batch,
      [=, this](int64_t sequence, int thread) {
        ThreadState& state = *thread_states_[thread];
        const float* from = projected_.data() + sequence * convolution->projections.width;
        float* inputs = at_least(state.results, 2 * channels);
        std::copy(from, from + channels, inputs);
        multiply_values(decoder_.dtype, from + channels, inputs, channels);
        convolve_channels(convolution->taps, given->cache.layers[index], sequence, given->place, inputs, 0,
                          channels, state, inputs + channels);
        multiply_values(decoder_.dtype, from + 2 * channels, inputs + channels, channels);
      },
      [=, this](int64_t sequence, int thread) {
        const LayerCache& cache = given->cache.layers[index];
        const float* inputs = thread_states_[thread]->results.data();
        store_key(cache, sequence, given->place - cache.first, inputs, channels);
        std::copy(inputs + channels, inputs + 2 * channels, wide_.data() + sequence * channels);
      });
}

}  // namespace acclimate::inference::decode
