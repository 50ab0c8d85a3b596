// Several tokens of each sequence at once. Units are large, and write what others read: a thread that is late
// is waited for.
#include <cmath>

#include "decode_step.h"

namespace acclimate::inference::decode {
namespace {

constexpr int64_t rows_together = 16;  // of the residual stream
constexpr int64_t inputs_together = 528;  // of a product: it takes 12 at a time
constexpr int64_t least_inputs = 264;  // below this, repacking weights costs more than more threads save
constexpr int64_t columns_together = 64;  // of a product: a repacked tile stays in the second cache
constexpr int64_t queries_together = 128;
constexpr int64_t most_scores = 1 << 20;  // that a thread keeps
constexpr int64_t keys_together = 2048;  // of a product with values

int64_t tiles_of(int64_t count, int64_t together) { return (count + together - 1) / together; }

// The number of values from one input of a product to the next.
int64_t stride_of(int64_t k) { return input_stride(Form::bf16, k); }

bool is_dense(const Weight& weight) { return weight.format == WeightFormat::dense; }

bool is_arranged(const Weight& weight) { return !is_dense(weight) || weight.dtype == Dtype::bf16; }

bool is_arranged(const Product& product) {
  return std::all_of(product.parts.begin(), product.parts.end(),
                     [](const Part& part) { return is_arranged(part.weight); });
}

bool is_dense(const Product& product) {
  return std::all_of(product.parts.begin(), product.parts.end(),
                     [](const Part& part) { return is_dense(part.weight); });
}

}  // namespace

bool Step::can_prefill() const {
  // A prompt's last token alone passes layers without keys of their own. The model's modules do that.
  bool can = multiplies_many() && decoder_.dtype == Dtype::bf16 && !decoder_.token_inputs.has_value();
  for (const Layer& layer : decoder_.layers) {
    can = can && is_arranged(layer.projections()) && is_arranged(layer.mixer_output());
    can = can && !(layer.attention.has_value() && layer.attention->is_shared);
    if (layer.attention.has_value() && layer.attention->latent.has_value()) {
      const Latent& latent = *layer.attention->latent;
      can = can && is_arranged(latent.queries);
      can = can && is_arranged(latent.keys.first) && is_arranged(latent.values.first);
    }
    if (layer.mlp.has_value()) {
      const Mlp& mlp = *layer.mlp;
      can = can && is_arranged(mlp.gate) && is_arranged(mlp.up) && is_arranged(mlp.down);
    }
    if (layer.experts.has_value()) {
      can = can && is_arranged(layer.experts->inner.first) && is_arranged(layer.experts->down.first);
    }
  }
  return can;
}

// The state that the threads of one call share. Values are rounded as in a step: products and the residual
// stream are kept in float32, and the inputs of the next product in bf16.
class Step::Prefill {
 public:
  Prefill(Step& step, const Call& call)
      : step_(step),
        decoder_(step.decoder_),
        call_(call),
        rows_(call.batch * call.length),
        hidden_(decoder_.hidden),
        x_(rows_ * hidden_),
        attended_(rows_ * hidden_),
        normed_(rows_ * stride_of(hidden_)) {
    int64_t queries = 0, values = 0, inner = 0, projections = 0, used = 0, between = 0;
    int64_t before = 0, made = 0, results = 0;
    bool keeps_start = false, has_shared = false, has_norms = false;
    for (const Layer& layer : decoder_.layers) {
      if (layer.attention.has_value()) {
        const Attention& attention = *layer.attention;
        queries = std::max(queries, attention.heads * whole_blocks(attention.head_size));
        if (attention.latent.has_value()) {
          const Latent& latent = *attention.latent;
          before = std::max(before, latent.queries.parts.empty() ? 0 : stride_of(latent.queries.k));
          made = std::max(made, latent.queries.width);
          results = std::max(results, stride_of(attention.heads * latent.value_size()));
        }
      }
      values = std::max(values, stride_of(layer.mixed()));
      projections = std::max(projections, layer.projections().width);
      inner = std::max(inner, layer.mlp.has_value() ? stride_of(layer.mlp->up.width) : 0);
      if (layer.experts.has_value()) {
        used = std::max(used, layer.experts->router.used);
        between = std::max(between, layer.experts->router.used * stride_of(layer.experts->width()));
        has_shared = has_shared || layer.mlp.has_value();
        has_norms = has_norms || layer.experts->norms.has_value();
      }
      keeps_start = keeps_start || layer.mlp_shares_norm;
    }
    projected_.resize(rows_ * std::max(projections, hidden_));
    queries_.resize(rows_ * queries);
    mixed_.resize(rows_ * values);
    latent_inner_.resize(rows_ * before);
    latent_queries_.resize(rows_ * made);
    expanded_.resize(rows_ * results);
    inner_.resize(rows_ * inner);
    start_.resize(keeps_start ? rows_ * hidden_ : 0);
    chosen_experts_.resize(rows_ * used);
    chosen_weights_.resize(rows_ * used);
    gathered_.resize(rows_ * used * stride_of(hidden_));
    expert_inner_.resize(rows_ * between);
    expert_given_.resize(has_norms ? rows_ * stride_of(hidden_) : 0);
    shared_.resize(has_shared ? rows_ * hidden_ : 0);
    gates_.resize(has_shared ? rows_ : 0);
  }

  void work(Team& team) {
    Place place{team, rows_};
    for_rows(place,
             [&](int64_t row, ThreadState&) { step_.look_up(call_.tokens[row], x_.data() + row * hidden_); });
    if (decoder_.embedding_is_summed) {
      sum_over_ranks(place, x_);
    }
    for_rows(place, [&](int64_t row, ThreadState& state) {
      step_.finish_embedding(position_of(row), state, x_.data() + row * hidden_);
      begin_layer(0, row, state);
    });
    for (size_t index = 0; index < decoder_.layers.size(); ++index) {
      const Layer& layer = decoder_.layers[index];
      multiply(place, layer.projections(), normed_, projected_, layer.projections().width);
      const bool is_last = index + 1 == decoder_.layers.size();
      // The last layer needs only the results of each sequence's last token, or none.
      const int64_t asked = !is_last ? call_.length : gives_logits() ? 1 : 0;
      const bool is_latent = layer.attention.has_value() && layer.attention->latent.has_value();
      prepare_mixing(place, layer, index, asked);
      if (asked == 0) {
        return;
      }
      if (layer.attention.has_value()) {
        attend(place, *layer.attention, index, call_.length - asked);
      } else if (layer.convolution.has_value()) {
        convolve(place, *layer.convolution, index, call_.length - asked);
      } else {
        finish_results(place, *layer.delta_rule, call_.length - asked);
      }
      if (is_last) {
        keep_last_rows(place, layer);
      }
      if (is_latent) {
        expand_latents(place, *layer.attention);
      }
      multiply(place, layer.mixer_output(), is_latent ? expanded_ : mixed_, attended_, hidden_);
      if (layer.mixer_is_summed()) {
        sum_over_ranks(place, attended_);
      }
      for_rows(place, [&](int64_t row, ThreadState& state) { join_attention(layer, row, state); });
      if (layer.experts.has_value()) {
        use_experts(place, layer, index);
      }
      const bool is_shared = layer.experts.has_value() && layer.mlp.has_value();
      if (layer.mlp.has_value()) {
        std::vector<float>& result = is_shared ? shared_ : projected_;
        feed_forward(place, *layer.mlp);
        multiply(place, layer.mlp->down, inner_, result, hidden_);
        if (layer.mlp->down_is_summed) {
          sum_over_ranks(place, result);
        }
      }
      for_rows(place, [&](int64_t row, ThreadState& state) {
        if (is_shared) {
          step_.add_shared(layer, shared_.data() + row * hidden_, gates_[row],
                           projected_.data() + row * hidden_, at_least(state.normed, hidden_));
        }
        step_.join_mlp(layer, projected_.data() + row * hidden_, attended_.data() + row * hidden_,
                       x_.data() + row * hidden_, state);
        step_.finish_layer(layer, nullptr, state, x_.data() + row * hidden_);
        begin_layer(index + 1, row, state);
      });
    }
    step_.finish(call_, team, x_.data());
  }

 private:
  struct Place {
    Team& team;
    int64_t rows;  // of the residual stream that are computed
  };

  bool gives_logits() const { return call_.logits != nullptr || call_.best != nullptr; }

  // Calls unit(index, state) for each index below `units`, each in one thread.
  template <class Unit>
  void share(Place& place, int64_t units, const Unit& unit) {
    place.team.share(units, [&](int64_t index, int thread) { unit(index, *step_.thread_states_[thread]); });
  }

  template <class Row>
  void for_rows(Place& place, const Row& row) {
    share(place, tiles_of(place.rows, rows_together), [&](int64_t unit, ThreadState& state) {
      for (int64_t i = unit * rows_together; i < std::min((unit + 1) * rows_together, place.rows); ++i) {
        row(i, state);
      }
    });
  }

  void sum_over_ranks(const Place& place, std::vector<float>& values) {
    step_.sum_over_ranks(values.data(), place.rows * hidden_);
  }

  int64_t sequence_of(int64_t row) const { return row / call_.length; }
  int64_t place_of(int64_t row) const { return call_.place + row % call_.length; }
  bool is_padding(int64_t row) const { return place_of(row) < call_.starts[sequence_of(row)]; }
  // Padding has no position of its own.
  int64_t position_of(int64_t row) const {
    return std::max<int64_t>(place_of(row) - call_.starts[sequence_of(row)], 0);
  }

  // Moves the last row of each sequence to the front; later steps read only those rows.
  void keep_last_rows(Place& place, const Layer& layer) {
    const auto keep = [&](auto& values, int64_t stride) {
      for (int64_t i = 0; i < call_.batch && !values.empty(); ++i) {
        const auto from = values.begin() + ((i + 1) * call_.length - 1) * stride;
        std::copy(from, from + stride, values.begin() + i * stride);
      }
    };
    keep(x_, hidden_);
    keep(start_, hidden_);
    keep(mixed_, stride_of(layer.mixed()));
    place.rows = call_.batch;
  }

  // -- rows -----------------------------------------------------------------------------------------

  void begin_layer(size_t index, int64_t row, ThreadState& state) {
    step_.trace_input(call_.traces[index], row, x_.data() + row * hidden_);
    if (index == decoder_.layers.size()) {
      return;
    }
    const Layer& layer = decoder_.layers[index];
    float* start = layer.mlp_shares_norm ? start_.data() + row * hidden_ : at_least(state.start, hidden_);
    normalize(layer.mixer_norm, decoder_.dtype, x_.data() + row * hidden_, hidden_, 0, start);
    const int64_t stride = stride_of(hidden_);
    fill_bf16(start, hidden_, stride, normed_.data() + row * stride);
    if (!layer.attention.has_value() && is_padding(row)) {
      std::fill(normed_.data() + row * stride, normed_.data() + (row + 1) * stride, uint16_t{0});
    }
  }

  void join_attention(const Layer& layer, int64_t row, ThreadState& state) {
    float* branch = at_least(state.branch, hidden_);
    float* normed = at_least(state.normed, hidden_);
    float* attended = attended_.data() + row * hidden_;
    const float* start = layer.mlp_shares_norm ? start_.data() + row * hidden_ : nullptr;
    step_.join_attention(layer, attended, start, x_.data() + row * hidden_, branch, normed);
    if (layer.parallel) {
      std::copy(branch, branch + hidden_, attended);
    }
    const int64_t stride = stride_of(hidden_);
    fill_bf16(normed, hidden_, stride, normed_.data() + row * stride);
  }

  // -- products -------------------------------------------------------------------------------------

  // Some columns of a product for some inputs.
  struct Tile {
    int64_t first, last;  // columns
    int64_t begin, inputs;

    int64_t columns() const { return last - first; }
  };

  // How a product is divided.
  struct Tiles {
    int64_t width, rows, columns, together, inputs, column_parts, input_parts;

    Tiles(const Product& product, int64_t rows, int threads)
        : width(product.width),
          rows(rows),
          columns(columns_together),
          together(is_dense(product) ? 12 : rows_together) {
      take_inputs(inputs_together);
      while (columns > 2 * group_rows && tiles_of(width, columns) * input_parts < 3 * threads) {
        columns /= 2;
      }
      column_parts = tiles_of(width, columns);
      if (units() < 3 * threads) {
        take_inputs(least_inputs);
      }
    }
    // Divides the inputs into equal parts of at most `most`.
    void take_inputs(int64_t most) {
      inputs = tiles_of(tiles_of(rows, tiles_of(rows, most)), together) * together;
      input_parts = tiles_of(rows, inputs);
    }
    int64_t units() const { return column_parts * input_parts; }

    Tile at(int64_t unit) const {
      const int64_t first = unit / input_parts * columns, begin = unit % input_parts * inputs;
      return {first, std::min(first + columns, width), begin, std::min(inputs, rows - begin)};
    }

    // The distance from the results of one input to those of the next; products write whole groups of
    // columns.
    int64_t stride() const { return columns + group_rows; }
    float* memory(std::vector<float>& held) const { return at_least(held, inputs * stride()); }
  };

  // Rounds the inputs of the next product with a quantised weight to 8 bits.
  void quantize(Place& place, const std::vector<uint16_t>& x, int64_t rows, int64_t k) {
    const int64_t parts = tiles_of(rows, rows_together), stride = stride_of(k);
    const int64_t lines =
        tiles_of(static_cast<int64_t>(input_bytes(Form::int8, rows_together, k)), sizeof(Line));
    Line* memory = at_least(quantized_memory_, parts * lines);
    quantized_.resize(parts);
    share(place, parts, [&](int64_t unit, ThreadState&) {
      const int64_t first = unit * rows_together;
      quantized_[unit] = prepare(Form::int8, Dtype::bf16, x.data() + first * stride, stride,
                                 std::min(rows_together, rows - first), k, memory + unit * lines);
    });
  }

  // Writes the products of inputs in bf16 with rows first to last of a dense weight, or adds them. It writes
  // whole groups of rows.
  static void multiply_dense(const Weight& weight, int64_t first, int64_t last, const uint16_t* x,
                             int64_t x_stride, int64_t inputs, Finish finish, ThreadState& state, float* y,
                             int64_t stride) {
    const int64_t rows = last - first;
    void* repacked = at_least(state.repacked, tiles_of(repacked_bytes(rows, weight.k), 64));
    repack(weight, first, last, repacked);
    multiply_many(repacked, rows, weight.k, x, x_stride, inputs, finish, y, stride);
  }

  // Writes the products of some inputs with rows first to last of a weight to y[i * stride + row - first],
  // and perhaps more values, up to whole groups of rows. The inputs of a quantised weight are those of
  // quantize().
  void multiply_rows(const Weight& weight, int64_t first, int64_t last, const std::vector<uint16_t>& x,
                     int64_t begin, int64_t inputs, ThreadState& state, float* y, int64_t stride) const {
    if (is_dense(weight)) {
      const int64_t x_stride = stride_of(weight.k);
      multiply_dense(weight, first, last, x.data() + begin * x_stride, x_stride, inputs, Finish::replaces,
                     state, y, stride);
      return;
    }
    for (int64_t i = begin; i < begin + inputs;) {
      const int64_t place = i % rows_together, some = std::min(rows_together - place, begin + inputs - i);
      compute(weight, quantized_[i / rows_together].rows(place, some), first, last, y + (i - begin) * stride,
              stride);
      i += some;
    }
  }

  // Writes the rounded products to y[i * stride + column - first]. `y` may be `found`, which gets the
  // products before they are rounded.
  void multiply_tile(const Product& product, ThreadState& state, const std::vector<uint16_t>& x,
                     const Tile& tile, float* found, int64_t found_stride, float* y, int64_t stride) const {
    int64_t begin = 0;
    for (const Part& part : product.parts) {
      const int64_t from = std::max(tile.first, begin), until = std::min(tile.last, begin + part.count);
      if (from < until) {
        const int64_t row = part.first + from - begin, count = until - from;
        const int64_t column = from - tile.first;
        if (is_dense(part.weight) && part.bias == nullptr && count % group_rows == 0) {
          const int64_t x_stride = stride_of(part.weight.k);
          multiply_dense(part.weight, row, row + count, x.data() + tile.begin * x_stride, x_stride,
                         tile.inputs, Finish::rounds, state, y + column, stride);
        } else {
          multiply_rows(part.weight, row, row + count, x, tile.begin, tile.inputs, state, found + column,
                        found_stride);
          const float* bias = part.bias == nullptr ? nullptr : part.bias + row;
          for (int64_t i = 0; i < tile.inputs; ++i) {
            add_bias(decoder_.dtype, bias, found + i * found_stride + column, count, y + i * stride + column);
          }
        }
      }
      begin += part.count;
    }
  }

  void multiply(Place& place, const Product& product, const std::vector<uint16_t>& x, std::vector<float>& y,
                int64_t stride) {
    const Tiles tiles(product, place.rows, place.team.threads());
    if (!is_dense(product)) {
      quantize(place, x, place.rows, product.k);
    }
    share(place, tiles.units(), [&](int64_t unit, ThreadState& state) {
      const Tile tile = tiles.at(unit);
      multiply_tile(product, state, x, tile, tiles.memory(state.wide), tiles.stride(),
                    y.data() + tile.begin * stride + tile.first, stride);
    });
  }

  void feed_forward(Place& place, const Mlp& mlp) {
    const Tiles tiles(mlp.up, place.rows, place.team.threads());
    const int64_t stride = stride_of(mlp.up.width);
    if (!is_dense(mlp.up) || !is_dense(mlp.gate)) {
      quantize(place, normed_, place.rows, mlp.up.k);
    }
    share(place, tiles.units(), [&](int64_t unit, ThreadState& state) {
      const Tile tile = tiles.at(unit);
      float* up = tiles.memory(state.wide);
      float* gate = mlp.is_gated ? tiles.memory(state.gate) : nullptr;
      multiply_tile(mlp.up, state, normed_, tile, up, tiles.stride(), up, tiles.stride());
      if (gate != nullptr) {
        multiply_tile(mlp.gate, state, normed_, tile, gate, tiles.stride(), gate, tiles.stride());
      }
      for (int64_t i = 0; i < tile.inputs; ++i) {
        float* own_up = up + i * tiles.stride();
        uint16_t* to = inner_.data() + (tile.begin + i) * stride + tile.first;
        activate_bf16(mlp.activation, gate == nullptr ? nullptr : gate + i * tiles.stride(), own_up,
                      tile.columns(), to);
        if (tile.last == mlp.up.width) {
          std::fill(to + tile.columns(), to + stride - tile.first, uint16_t{0});
        }
      }
    });
  }

  // -- experts --------------------------------------------------------------------------------------

  // Computes some rows of a product with the kernels for few rows, which do not round weights.
  void multiply_few(const Product& product, const std::vector<uint16_t>& from, Dtype dtype, int64_t row,
                    int64_t count, ThreadState& state, float* y) {
    int64_t column = 0;
    for (const Part& part : product.parts) {
      const int64_t k = part.weight.k;
      const uint16_t* x = from.data() + row * stride_of(k);
      const Input input = rows_as(form_of(part.weight, dtype), x, count, k, state);
      compute(part.weight, input, part.first, part.first + part.count, y + column, product.width);
      for (int64_t i = 0; i < count; ++i) {
        float* own = y + i * product.width + column;
        add_bias(dtype, part.bias == nullptr ? nullptr : part.bias + part.first, own, part.count, own);
      }
      column += part.count;
    }
  }

  Input rows_as(Form form, const uint16_t* x, int64_t count, int64_t k, ThreadState& state) const {
    if (form == Form::bf16) {
      return {form, count, k, stride_of(k), x, nullptr, nullptr, nullptr};
    }
    Line* memory = at_least(state.gathered, tiles_of(static_cast<int64_t>(input_bytes(form, count, k)), 64));
    return prepare(form, Dtype::bf16, x, stride_of(k), count, k, memory);
  }

  // The experts' results, in `projected_`.
  void use_experts(Place& place, const Layer& layer, size_t index) {
    const Experts& experts = *layer.experts;
    const std::vector<uint16_t>& given = experts.norms.has_value() ? expert_given_ : normed_;
    normalize_for_experts(place, experts, [&](const float* x, float* to) {
      step_.normalize_for_router(*experts.norms, x, to);
    });
    choose(place, layer, call_.traces[index], given);
    normalize_for_experts(place, experts, [&](const float* x, float* to) {
      normalize(experts.norms->inner, decoder_.dtype, x, hidden_, 0, to);
    });
    multiply_experts(place, experts, given);
    sum_experts(place, experts);
    if (experts.down_is_summed) {
      sum_over_ranks(place, projected_);
    }
  }

  // Writes norms of the residual stream to `expert_given_`, if router and experts have their own.
  template <class Normalize>
  void normalize_for_experts(Place& place, const Experts& experts, const Normalize& normalize) {
    if (!experts.norms.has_value()) {
      return;
    }
    const int64_t stride = stride_of(hidden_);
    for_rows(place, [&](int64_t row, ThreadState& state) {
      float* normed = at_least(state.normed, hidden_);
      normalize(x_.data() + row * hidden_, normed);
      fill_bf16(normed, hidden_, stride, expert_given_.data() + row * stride);
    });
  }

  void choose(Place& place, const Layer& layer, const LayerTrace& trace, const std::vector<uint16_t>& given) {
    const Router& router = layer.experts->router;
    const int64_t count = router.logits.width, used = router.used;
    share(place, tiles_of(place.rows, rows_together), [&](int64_t unit, ThreadState& state) {
      const int64_t row = unit * rows_together, rows = std::min(rows_together, place.rows - row);
      float* logits = at_least(state.wide, rows * count);
      multiply_few(router.logits, given, router.rounds_logits ? decoder_.dtype : Dtype::f32, row, rows, state,
                   logits);
      for (int64_t i = 0; i < rows; ++i) {
        step_.choose_experts(router, logits + i * count, trace, row + i, state,
                             chosen_experts_.data() + (row + i) * used,
                             chosen_weights_.data() + (row + i) * used);
      }
      if (!layer.mlp_gate.parts.empty()) {
        multiply_few(layer.mlp_gate, normed_, decoder_.dtype, row, rows, state, gates_.data() + row);
        sigmoid(decoder_.dtype, gates_.data() + row, rows);
      }
    });
    chosen_.group(chosen_experts_.data(), chosen_weights_.data(), place.rows, used, count);
  }

  // Writes the products of columns first to last of a weight of an expert, rounded, to y[i * stride].
  void multiply_columns(const Weight& weight, const float* bias, const std::vector<uint16_t>& x,
                        int64_t begin, int64_t inputs, int64_t first, int64_t last, ThreadState& state,
                        float* y, int64_t stride) const {
    const int64_t count = last - first, k = weight.k;
    if (is_dense(weight) && inputs <= max_rows) {
      const Form form = form_of(weight, decoder_.dtype);
      compute(weight, rows_as(form, x.data() + begin * stride_of(k), inputs, k, state), first, last, y,
              stride);
    } else {
      multiply_rows(weight, first, last, x, begin, inputs, state, y, stride);
    }
    for (int64_t i = 0; i < inputs; ++i) {
      add_bias(decoder_.dtype, bias == nullptr ? nullptr : bias + first, y + i * stride, count,
               y + i * stride);
    }
  }

  // The first products, of each expert with its tokens.
  void multiply_experts(Place& place, const Experts& experts, const std::vector<uint16_t>& given) {
    const int64_t x_stride = stride_of(hidden_), pairs = chosen_.pairs();
    share(place, tiles_of(pairs, rows_together), [&](int64_t unit, ThreadState&) {
      for (int64_t i = unit * rows_together; i < std::min((unit + 1) * rows_together, pairs); ++i) {
        const uint16_t* from = given.data() + chosen_.tokens[i] * x_stride;
        std::copy(from, from + x_stride, gathered_.data() + i * x_stride);
      }
    });
    if (!is_dense(experts.inner.first)) {
      quantize(place, gathered_, pairs, hidden_);
    }
    const int64_t width = experts.width(), stride = stride_of(width),
                  parts = tiles_of(width, columns_together);
    const Gating& gating = experts.gating;
    share(place, parts * static_cast<int64_t>(chosen_.experts.size()), [&](int64_t unit, ThreadState& state) {
      const int64_t index = unit / parts, expert = chosen_.experts[index];
      const int64_t begin = chosen_.begins[index], inputs = chosen_.count(index);
      const int64_t first = unit % parts * columns_together;
      const int64_t last = std::min(first + columns_together, width), columns = last - first;
      const Weight weight = experts.inner.of(expert);
      const float* bias = experts.inner.bias(expert);
      constexpr int64_t found_stride = 2 * columns_together + group_rows;
      float* up = at_least(state.wide, inputs * found_stride);
      float* gate = gating.is_gated ? at_least(state.gate, inputs * found_stride) : nullptr;
      if (gate != nullptr && experts.interleaved) {
        multiply_columns(weight, bias, gathered_, begin, inputs, 2 * first, 2 * last, state, up,
                         found_stride);
        for (int64_t i = 0; i < inputs; ++i) {
          float *own_gate = gate + i * found_stride, *own_up = up + i * found_stride;
          for (int64_t column = 0; column < columns; ++column) {
            own_gate[column] = own_up[2 * column];
            own_up[column] = own_up[2 * column + 1];
          }
        }
      } else {
        const int64_t ups = gate == nullptr ? 0 : width;
        multiply_columns(weight, bias, gathered_, begin, inputs, ups + first, ups + last, state, up,
                         found_stride);
        if (gate != nullptr) {
          multiply_columns(weight, bias, gathered_, begin, inputs, first, last, state, gate, found_stride);
        }
      }
      for (int64_t i = 0; i < inputs; ++i) {
        float* own = up + i * found_stride;
        apply_gating(gating, decoder_.dtype, gate == nullptr ? nullptr : gate + i * found_stride, own,
                     columns);
        const int64_t end = last == width ? stride : last;
        fill_bf16(own, columns, end - first, expert_inner_.data() + (begin + i) * stride + first);
      }
    });
  }

  // The second products, weighted and summed for each token.
  void sum_experts(Place& place, const Experts& experts) {
    if (!is_dense(experts.down.first)) {
      quantize(place, expert_inner_, chosen_.pairs(), experts.width());
    }
    int64_t together = columns_together;
    while (together > group_rows && tiles_of(hidden_, together) < 3 * place.team.threads()) {
      together /= 2;
    }
    const int64_t stride = together + group_rows;
    share(place, tiles_of(hidden_, together), [&](int64_t unit, ThreadState& state) {
      const int64_t first = unit * together, last = std::min(first + together, hidden_);
      const int64_t columns = last - first;
      float* sums = at_least(state.wide, place.rows * columns);
      std::fill(sums, sums + place.rows * columns, 0.0f);
      for (size_t index = 0; index < chosen_.experts.size(); ++index) {
        const int64_t expert = chosen_.experts[index], begin = chosen_.begins[index];
        const int64_t inputs = chosen_.count(index);
        float* found = at_least(state.gate, inputs * stride);
        multiply_columns(experts.down.of(expert), experts.down.bias(expert), expert_inner_, begin, inputs,
                         first, last, state, found, stride);
        for (int64_t i = 0; i < inputs; ++i) {
          float* own = found + i * stride;
          float* to = sums + chosen_.tokens[begin + i] * columns;
          if (experts.rounds_weighted) {
            scale(decoder_.dtype, chosen_.weights[begin + i], own, columns);
            accumulate(1.0f, own, to, columns);
          } else {
            accumulate(chosen_.weights[begin + i], own, to, columns);
          }
        }
      }
      for (int64_t row = 0; row < place.rows; ++row) {
        add_bias(decoder_.dtype, nullptr, sums + row * columns, columns,
                 projected_.data() + row * hidden_ + first);
      }
    });
  }

  // -- convolutions ---------------------------------------------------------------------------------

  // Puts the inputs of a convolution into the cache, and in the place of their first factors.
  void prepare_inputs(Place& place, const Convolution& convolution, size_t index) {
    const int64_t channels = convolution.taps.channels;
    const LayerCache& cache = call_.cache.layers[index];
    for_rows(place, [&](int64_t row, ThreadState&) {
      float* inputs = projected_.data() + row * convolution.projections.width;
      multiply_values(decoder_.dtype, inputs + channels, inputs, channels);
      step_.store_key(cache, sequence_of(row), place_of(row) - cache.first, inputs, channels);
    });
  }

  // The results for the places of each sequence from `begin` on, in `mixed_`.
  void convolve(Place& place, const Convolution& convolution, size_t index, int64_t begin) {
    const int64_t channels = convolution.taps.channels, stride = stride_of(channels);
    for_rows(place, [&](int64_t row, ThreadState& state) {
      if (row % call_.length < begin) {
        return;
      }
      const float* inputs = projected_.data() + row * convolution.projections.width;
      float* results = at_least(state.heads, channels);
      step_.convolve_channels(convolution.taps, call_.cache.layers[index], sequence_of(row), place_of(row),
                              inputs, 0, channels, state, results);
      multiply_values(decoder_.dtype, inputs + 2 * channels, results, channels);
      fill_bf16(results, channels, stride, mixed_.data() + row * stride);
    });
  }

  // -- delta rules ----------------------------------------------------------------------------------

  // Puts into the cache the inputs of the convolution, and the states after the tokens. The heads' results
  // are in the place of their values.
  void update_states(Place& place, const DeltaRule& rule, size_t index) {
    const LayerCache& cache = call_.cache.layers[index];
    for_rows(place, [&](int64_t row, ThreadState&) {
      const float* inputs = projected_.data() + row * rule.projections.width;
      step_.store_key(cache, sequence_of(row), place_of(row) - cache.first, inputs, rule.taps.channels);
    });
    for_rows(place, [&](int64_t row, ThreadState& state) { prepare_token(rule, cache, row, state); });
    const int64_t parts = tiles_of(rule.value_size, columns_of_state);
    share(place, call_.batch * rule.heads * parts, [&](int64_t unit, ThreadState& state) {
      update_part(rule, cache, unit / parts, unit % parts * columns_of_state, state);
    });
  }

  // Makes queries, keys, values, strengths and decays of a token, in the place of what they are made of.
  void prepare_token(const DeltaRule& rule, const LayerCache& cache, int64_t row, ThreadState& state) {
    const int64_t channels = rule.taps.channels, size = rule.key_size;
    float* own = projected_.data() + row * rule.projections.width;
    float* convolved = at_least(state.heads, channels);
    step_.convolve_channels(rule.taps, cache, sequence_of(row), place_of(row), own, 0, channels, state,
                            convolved);
    activate(rule.activation, decoder_.dtype, nullptr, convolved, channels);
    for (int64_t i = 0; i < rule.first_value(); i += size) {
      divide_by_length(convolved + i, rule.eps, i < rule.first_key() ? rule.scale : 1.0f, size, own + i);
    }
    std::copy(convolved + rule.first_value(), convolved + channels, own + rule.first_value());
    for (int64_t head = 0; head < rule.heads; ++head) {
      own[rule.first_strength() + head] = step_.strength_of(rule, own, head);
      own[rule.first_decay() + head] = step_.decay_of(rule, own, head);
    }
  }

  // Computes some columns of a state after all tokens, and their results.
  void update_part(const DeltaRule& rule, const LayerCache& cache, int64_t unit, int64_t first,
                   ThreadState& state) {
    const int64_t keys = rule.key_size, values = rule.value_size, width = rule.projections.width;
    const int64_t columns = std::min(columns_of_state, values - first), head = unit % rule.heads;
    const int64_t group = rule.heads / rule.key_heads;
    float* own = projected_.data() + unit / rule.heads * call_.length * width;
    const float* query = own + head / group * keys;
    float* part = at_least(state.heads, keys * columns_of_state);
    const int64_t begin = unit * rule.state_size() + first;
    for (int64_t i = 0; i < keys; ++i) {
      float* line = part + i * columns_of_state;
      std::copy(cache.state + begin + i * values, cache.state + begin + i * values + columns, line);
      std::fill(line + columns, line + columns_of_state, 0.0f);
    }
    update_columns(
        {call_.length, width, keys, query, query + rule.first_key(), own + rule.first_decay() + head,
         own + rule.first_strength() + head, own + rule.first_value() + head * values + first, columns},
        part);
    for (int64_t i = 0; i < keys; ++i) {
      const float* line = part + i * columns_of_state;
      std::copy(line, line + columns, cache.new_state + begin + i * values);
    }
  }

  // The results for the places of each sequence from `begin` on, in `mixed_`.
  void finish_results(Place& place, const DeltaRule& rule, int64_t begin) {
    const int64_t size = rule.result_size(), stride = stride_of(size);
    for_rows(place, [&](int64_t row, ThreadState& state) {
      if (row % call_.length < begin) {
        return;
      }
      float* own = projected_.data() + row * rule.projections.width;
      for (int64_t head = 0; head < rule.heads; ++head) {
        step_.finish_head(rule, own, head, state, own + rule.first_value() + head * rule.value_size);
      }
      fill_bf16(own + rule.first_value(), size, stride, mixed_.data() + row * stride);
    });
  }

  // -- attention ------------------------------------------------------------------------------------

  // Puts into the cache what a layer keeps of the tokens; makes the queries of the last tokens of each
  // sequence.
  void prepare_mixing(Place& place, const Layer& layer, size_t index, int64_t asked) {
    if (layer.convolution.has_value()) {
      prepare_inputs(place, *layer.convolution, index);
      return;
    }
    if (layer.delta_rule.has_value()) {
      update_states(place, *layer.delta_rule, index);
      return;
    }
    const Attention& attention = *layer.attention;
    if (attention.latent.has_value()) {
      prepare_latents(place, attention, index);
      prepare_latent_queries(place, attention, asked);
      return;
    }
    if (attention.normalizes_rows()) {
      normalize_rows(place, attention);
    }
    for_rows(place, [&](int64_t row, ThreadState& state) {
      if (row % call_.length >= call_.length - asked) {
        prepare_queries(attention, row, state);
      }
    });
    prepare_keys(place, attention, index);
  }

  // Normalizes the queries of all heads together, and the keys.
  void normalize_rows(Place& place, const Attention& attention) {
    const int64_t width = attention.projections.width;
    squares_.resize(2 * place.rows);
    if (attention.query_norm.shared_columns > 0) {
      for_rows(place, [&](int64_t row, ThreadState&) {
        step_.sum_squares(attention, projected_.data() + row * width, squares_.data() + 2 * row);
      });
      decoder_.exchange(squares_.data(), 2 * place.rows);
    }
    for_rows(place, [&](int64_t row, ThreadState&) {
      step_.normalize_row(attention, squares_.data() + 2 * row, projected_.data() + row * width);
    });
  }

  // Queries are [key head][row][head of its group][size].
  void prepare_queries(const Attention& attention, int64_t row, ThreadState& state) {
    const int64_t size = attention.head_size, stride = whole_blocks(size);
    const int64_t group = attention.heads / attention.key_heads;
    const float* all = projected_.data() + row * attention.projections.width;
    float* head = at_least(state.heads, size);
    for (int64_t i = 0; i < attention.heads; ++i) {
      step_.prepare_query(attention, call_.cache, position_of(row), all, i, head);
      const int64_t place = (i / group * rows_ + row) * group + i % group;
      fill_bf16(head, size, stride, queries_.data() + place * stride);
    }
  }

  void prepare_keys(Place& place, const Attention& attention, size_t index) {
    const int64_t size = attention.head_size, value_size = attention.value_size;
    const LayerCache& cache = call_.cache.layers[index];
    const int64_t width = attention.projections.width;
    const int64_t begin = call_.place - cache.first;
    const int64_t parts = tiles_of(call_.length, rows_together);
    share(place, call_.batch * parts, [&](int64_t unit, ThreadState& state) {
      const int64_t sequence = unit / parts, first = unit % parts * rows_together;
      const int64_t count = std::min(rows_together, call_.length - first);
      const int64_t row = sequence * call_.length + first;
      const float* all = projected_.data() + row * width + attention.heads * size;
      float* key = at_least(state.heads, size);
      for (int64_t head = 0; head < attention.key_heads; ++head) {
        const int64_t cached = sequence * attention.key_heads + head;
        for (int64_t i = 0; i < count; ++i) {
          step_.prepare_head(attention, attention.key_norm, call_.cache, position_of(row + i),
                             all + i * width, head, key);
          step_.store_key(cache, cached, begin + first + i, key, size);
        }
        const float* values = all + attention.key_heads * size;
        int64_t stride = width, column = head * value_size;
        if (attention.value_norm.is_there) {
          float* normed = at_least(state.wide, count * value_size);
          for (int64_t i = 0; i < count; ++i) {
            step_.prepare_value(attention, values + i * width, head, normed + i * value_size);
          }
          values = normed;
          stride = value_size;
          column = 0;
        }
        store_values(cache, cached, begin + first, values + column, stride, value_size, count);
      }
    });
  }

  // Puts the values of at most rows_together tokens, rows of floats, into a row of the cache. In each of its
  // columns, of `capacity` places, the values of these tokens are contiguous.
  void store_values(const LayerCache& cache, int64_t cached, int64_t at, const float* rows, int64_t stride,
                    int64_t size, int64_t count) const {
    if (cache.is_int8()) {
      for (int64_t i = 0; i < count; ++i) {
        step_.store_value(cache, cached, at + i, rows + i * stride, size);
      }
      return;
    }
    const int64_t capacity = cache.capacity;
    uint16_t* to = reinterpret_cast<uint16_t*>(cache.values) + cached * capacity * size + at;
    float column[rows_together];
    for (int64_t c = 0; c < size; ++c) {
      for (int64_t i = 0; i < count; ++i) {
        column[i] = rows[i * stride + c];
      }
      fill_bf16(column, count, count, to + c * capacity);
    }
  }

  // -- latent attention -----------------------------------------------------------------------------

  void prepare_latents(Place& place, const Attention& attention, size_t index) {
    const int64_t size = attention.head_size, latent_size = attention.value_size;
    const LayerCache& cache = call_.cache.layers[index];
    const int64_t at = call_.place - cache.first;
    const int64_t parts = tiles_of(call_.length, rows_together);
    share(place, call_.batch * parts, [&](int64_t unit, ThreadState& state) {
      const int64_t sequence = unit / parts, first = unit % parts * rows_together;
      const int64_t count = std::min(rows_together, call_.length - first);
      float* own = at_least(state.heads, count * size);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = sequence * call_.length + first + i;
        step_.prepare_latent(attention, call_.cache, position_of(row),
                             projected_.data() + row * attention.projections.width, state, own + i * size);
        step_.store_key(cache, sequence, at + first + i, own + i * size, size);
      }
      store_values(cache, sequence, at + first, own, size, latent_size, count);
    });
  }

  // Queries of latents, of the last tokens of each sequence.
  void prepare_latent_queries(Place& place, const Attention& attention, int64_t asked) {
    const Latent& latent = *attention.latent;
    const bool has_inner = !latent.queries.parts.empty();
    const int64_t width = attention.projections.width, heads = attention.heads, size = attention.head_size;
    if (asked == 0) {
      return;
    }
    if (has_inner) {
      const int64_t k = latent.queries.k, stride = stride_of(k);
      for_rows(place, [&](int64_t row, ThreadState& state) {
        float* normed = at_least(state.normed, k);
        normalize(latent.query_norm, decoder_.dtype, projected_.data() + row * width, k, 0, normed);
        fill_bf16(normed, k, stride, latent_inner_.data() + row * stride);
      });
      multiply(place, latent.queries, latent_inner_, latent_queries_, latent.queries.width);
    }
    const std::vector<float>& queries = has_inner ? latent_queries_ : projected_;
    const int64_t queries_stride = has_inner ? latent.queries.width : width;
    const int64_t query_size = latent.query_size(), key_size = latent.key_size, latent_size = latent.size();
    const int64_t stride = stride_of(key_size), to_stride = whole_blocks(size);
    share_heads(
        place, heads, call_.batch * asked,
        [&](int64_t head, int64_t begin, int64_t count, ThreadState& state) {
          const auto row_of = [&](int64_t i) {
            return (begin + i) / asked * call_.length + call_.length - asked + (begin + i) % asked;
          };
          const auto to = [&](int64_t i) { return queries_.data() + (row_of(i) * heads + head) * to_stride; };
          auto* x = reinterpret_cast<uint16_t*>(at_least(state.weights, tiles_of(count * stride * 2, 64)));
          float* query = at_least(state.heads, query_size);
          for (int64_t i = 0; i < count; ++i) {
            const float* from = queries.data() + row_of(i) * queries_stride + head * query_size;
            step_.prepare_latent_query(attention, call_.cache, position_of(row_of(i)), from, state, query);
            fill_bf16(query, key_size, stride, x + i * stride);
            fill_bf16(query + key_size, latent.rotated, to_stride - latent_size, to(i) + latent_size);
          }
          multiply_head(latent.keys.of(head), x, count, state, to);
        });
  }

  // The heads' results, of their sums of latents in `mixed_`.
  void expand_latents(Place& place, const Attention& attention) {
    const Latent& latent = *attention.latent;
    const int64_t heads = attention.heads, k = latent.size(), stride = stride_of(k);
    const int64_t from_stride = stride_of(heads * k), size = latent.value_size();
    const int64_t to_stride = stride_of(heads * size);
    share_heads(
        place, heads, place.rows, [&](int64_t head, int64_t begin, int64_t count, ThreadState& state) {
          auto* x = reinterpret_cast<uint16_t*>(at_least(state.weights, tiles_of(count * stride * 2, 64)));
          const auto to = [&](int64_t i) { return expanded_.data() + (begin + i) * to_stride + head * size; };
          for (int64_t i = 0; i < count; ++i) {
            const uint16_t* from = mixed_.data() + (begin + i) * from_stride + head * k;
            std::copy(from, from + k, x + i * stride);
            std::fill(x + i * stride + k, x + (i + 1) * stride, uint16_t{0});
            if (head + 1 == heads) {
              std::fill(to(i) + size, expanded_.data() + (begin + i + 1) * to_stride, uint16_t{0});
            }
          }
          multiply_head(latent.values.of(head), x, count, state, to);
        });
  }

  // Calls unit(head, begin, count, state) for parts of all rows, for each head.
  template <class Unit>
  void share_heads(Place& place, int64_t heads, int64_t rows, const Unit& unit) {
    const int64_t parts = tiles_of(rows, queries_together);
    share(place, heads * parts, [&](int64_t index, ThreadState& state) {
      const int64_t begin = index % parts * queries_together;
      unit(index / parts, begin, std::min(queries_together, rows - begin), state);
    });
  }

  // Multiplies rows by a weight, and writes the rounded results of row i to to(i).
  template <class To>
  void multiply_head(const Weight& weight, const uint16_t* x, int64_t count, ThreadState& state,
                     const To& to) const {
    constexpr int64_t stride = columns_together + group_rows;
    float* found = at_least(state.wide, count * stride);
    const Input input = is_dense(weight) ? Input{} : rows_as(Form::int8, x, count, weight.k, state);
    for (int64_t column = 0; column < weight.n; column += columns_together) {
      const int64_t some = std::min(columns_together, weight.n - column);
      if (is_dense(weight)) {
        multiply_dense(weight, column, column + some, x, stride_of(weight.k), count, Finish::replaces, state,
                       found, stride);
      } else {
        compute(weight, input, column, column + some, found, stride);
      }
      for (int64_t i = 0; i < count; ++i) {
        fill_bf16(found + i * stride, some, some, to(i) + column);
      }
    }
  }

  // Computes attention for the places of each sequence from `begin` on.
  void attend(Place& place, const Attention& attention, size_t index, int64_t begin) {
    const int64_t group = attention.heads / attention.key_heads;
    const int64_t keys = call_.place + call_.length;
    const int64_t most =
        std::clamp(most_scores / whole_blocks(keys), group, std::max(group, queries_together));
    const int64_t together = std::min(most / group, call_.length - begin);
    const int64_t parts = tiles_of(call_.length - begin, together);
    const int64_t heads = call_.batch * attention.key_heads;
    // The last queries have the most keys: they come first.
    share(place, heads * parts, [&](int64_t unit, ThreadState& state) {
      const int64_t first = begin + (parts - 1 - unit / heads) * together;
      attend_part(attention, index, unit % heads / attention.key_heads, unit % attention.key_heads, first,
                  std::min(together, call_.length - first), state);
    });
  }

  // Keys in bf16, from a place of the cache on: those of the cache, or a copy of those in 8 bits.
  static Weight keys_of(const LayerCache& cache, int64_t place, int64_t count, int64_t size,
                        ThreadState& state) {
    if (!cache.is_int8()) {
      return {WeightFormat::dense, Dtype::bf16, count, size, cache.keys + place * size * 2, size * 2};
    }
    const auto* codes = reinterpret_cast<const int8_t*>(cache.keys);
    auto* copy = reinterpret_cast<uint16_t*>(at_least(state.query, tiles_of(count * size * 2, 64)));
    for (int64_t i = place; i < place + count; ++i) {
      widen_int8_row(codes + i * size, cache.key_exponents + i * int8_blocks(size), size,
                     copy + (i - place) * size);
    }
    return {WeightFormat::dense, Dtype::bf16, count, size, reinterpret_cast<uint8_t*>(copy), size * 2};
  }

  // The same for some elements of the values of `count` tokens, from `at` on.
  static Weight values_of(const LayerCache& cache, int64_t cached, int64_t at, int64_t size, int64_t column,
                          int64_t columns, int64_t count, ThreadState& state) {
    const int64_t capacity = cache.capacity, first = cached * size + column * capacity + at;
    if (!cache.is_int8()) {
      return {WeightFormat::dense, Dtype::bf16, columns, count, cache.values + first * 2, capacity * 2};
    }
    const auto* codes = reinterpret_cast<const int8_t*>(cache.values) + first;
    auto* copy = reinterpret_cast<uint16_t*>(at_least(state.query, tiles_of(columns * count * 2, 64)));
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t block = (column + i) / int8_columns;
      const uint8_t* exponents = cache.value_exponents + cached * int8_blocks(size) + block * capacity + at;
      widen_int8(codes + i * capacity, exponents, count, copy + i * count);
    }
    return {WeightFormat::dense, Dtype::bf16, columns, count, reinterpret_cast<uint8_t*>(copy), count * 2};
  }

  // Computes attention for the queries of one key head at some places of a sequence.
  void attend_part(const Attention& attention, size_t index, int64_t sequence, int64_t key_head,
                   int64_t first_place, int64_t places, ThreadState& state) {
    const int64_t size = attention.head_size, value_size = attention.value_size;
    const LayerCache& cache = call_.cache.layers[index];
    const int64_t group = attention.heads / attention.key_heads, capacity = cache.capacity;
    const int64_t row = sequence * call_.length + first_place, place = call_.place + first_place;
    const int64_t start = call_.starts[sequence], queries = places * group;
    const auto first_key = [&](int64_t query_place) {
      return attention.window > 0 ? std::max(start, query_place + 1 - attention.window) : start;
    };
    const int64_t first = std::min(first_key(place), place + places - 1), count = place + places - first;
    const int64_t stride = whole_blocks(count), mixed_stride = (value_size + 15) / 16 * 16;
    const int64_t cached = (sequence * attention.key_heads + key_head) * capacity;
    const int64_t at = first - cache.first;
    float* scores = at_least(state.scores, queries * stride);
    float* mixed = at_least(state.wide, queries * mixed_stride);
    auto* weights = reinterpret_cast<uint16_t*>(at_least(state.weights, tiles_of(queries * stride * 2, 64)));
    float* peaks = at_least(state.logits, 2 * queries);
    float* sums = peaks + queries;

    const uint16_t* query = queries_.data() + (key_head * rows_ + row) * group * whole_blocks(size);
    for (int64_t key = 0; key < count; key += columns_together) {
      const int64_t some = std::min(columns_together, count - key);
      multiply_dense(keys_of(cache, cached + at + key, some, size, state), 0, some, query, whole_blocks(size),
                     queries, Finish::replaces, state, scores + key, stride);
    }
    for (int64_t i = 0; i < queries; ++i) {
      float* line = scores + i * stride;
      const int64_t query_place = place + i / group;
      const bool sees = query_place >= start;  // padding sees nothing
      const int64_t end = sees ? query_place + 1 - first : 0;
      const int64_t begin = sees ? std::max<int64_t>(first_key(query_place) - first, 0) : 0;
      uint16_t* to = weights + i * stride;
      peaks[i] = 0.0f;
      sums[i] = 1.0f;
      if (sees) {
        sums[i] =
            weigh_bf16(attention.scale, attention.softcap, line + begin, end - begin, to + begin, peaks[i]);
      }
      std::fill(to, to + begin, uint16_t{0});
      std::fill(to + end, to + stride, uint16_t{0});
    }
    for (int64_t column = 0; column < value_size; column += columns_together) {
      const int64_t some = std::min(columns_together, value_size - column);
      for (int64_t key = 0; key < count; key += keys_together) {
        const int64_t length = std::min(keys_together, count - key);
        multiply_dense(values_of(cache, cached, at + key, value_size, column, some, length, state), 0, some,
                       weights + key, stride, queries, key > 0 ? Finish::adds : Finish::replaces, state,
                       mixed + column, mixed_stride);
      }
    }
    const int64_t to_stride = stride_of(attention.heads * value_size);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t head = key_head * group + i % group;
      float peak = peaks[i], total = 0;
      if (attention.sinks != nullptr) {
        peak = std::max(peak, attention.sinks[head]);
        total = std::exp(attention.sinks[head] - peak);
      }
      total += sums[i] * std::exp(peaks[i] - peak);
      const float factor = std::exp(peaks[i] - peak) / total;
      float* line = mixed + i * mixed_stride;
      for (int64_t c = 0; c < value_size; ++c) {
        line[c] *= factor;
      }
      const int64_t column = head * value_size;
      if (attention.is_gated) {
        const int64_t from = row + i / group;
        const float* gates = projected_.data() + from * attention.projections.width + attention.first_gate();
        float* gate = at_least(state.gate, value_size);
        std::copy(gates + column, gates + column + value_size, gate);
        sigmoid(decoder_.dtype, gate, value_size);
        round_values(decoder_.dtype, line, value_size);
        multiply_values(decoder_.dtype, gate, line, value_size);
      }
      const int64_t end = head + 1 == attention.heads ? to_stride : column + value_size;
      fill_bf16(line, value_size, end - column, mixed_.data() + (row + i / group) * to_stride + column);
    }
  }

  Step& step_;
  const Decoder& decoder_;
  const Call& call_;
  const int64_t rows_, hidden_;
  std::vector<float> x_, attended_, projected_, start_;
  std::vector<uint16_t> normed_, queries_, mixed_, inner_;
  std::vector<float> squares_;  // of queries and keys: [row][2]
  std::vector<float> latent_queries_;
  std::vector<uint16_t> latent_inner_, expanded_;
  std::vector<Input> quantized_;  // the inputs of a product in 8 bits: rows_together in each
  std::vector<Line> quantized_memory_;
  Chosen chosen_;
  std::vector<int64_t> chosen_experts_;  // of each row
  std::vector<float> chosen_weights_, shared_, gates_;
  std::vector<uint16_t> gathered_, expert_inner_;  // of each pair
  std::vector<uint16_t> expert_given_;  // of each row
};

void Step::prefill(const Call& call, int threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  make_memory(call, threads);
  {
    Prefill prefill(*this, call);
    Team team(threads);
    make_thread_states(team.threads(), call.batch);
    prefill.work(team);
  }
  keep_best(call);
}

}  // namespace acclimate::inference::decode
