// A whole decoder step in one call: from the tokens' embeddings to the logits that are wanted, through every layer.
//
// One idea: at decode a layer's pieces are so short that starting each of them costs more than it computes, so one team of
// threads goes through all layers together. A phase is cut by outputs, tokens or heads, in the same way on every thread,
// and a barrier of a few hundred nanoseconds stands between phases. The residual stream, norms, rotary, attention and
// activations are float32; a linear gets its tokens in the form that its weights multiply (float32, bfloat16, two int8
// digits, or one or an int8 code where the variant quantizes activations). Plain C interface, called through ctypes.

#include "../../quantize/kernels/cpu/linear.h"
#include "dense_linear.h"
#include "paged_attention.cpp"

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

namespace step {

enum Kind : int32_t { FP32 = 0, BF16 = 1, INT8 = 2, INT4_BF16_SCALE = 3, INT4_FP32_SCALE = 4, INT8_DYNAMIC = 5 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

struct Linear {
  int32_t kind, digits, spread;  // digits: 1 or 2, else 0; spread: groups of digits per group of the weight
  const void *weight, *scale, *extra;  // extra: zero points, or the sums of the weights (INT8_DYNAMIC)
  const float* bias;                   // [outputs] or null
  int64_t outputs, inputs, padded, group;
};

struct Norm {  // x / sqrt(mean(x^2) + eps) * weight; null weight: no norm
  const float* weight;
  float eps;
};

struct Layer {
  Norm before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
  Linear qkv[3], gate_up[2], output, down;  // qkv and gate_up: one linear or several, whose outputs lie side by side
  int32_t num_qkv, num_gate_up, activation, rotary;
  const float *cos, *sin;  // [positions, rotary / 2]
  paged::Shape attention;
  paged::Cache cache;
};

struct Model {
  const Layer* layers;
  Norm final_norm;
  Linear head;
  int64_t num_layers, hidden, intermediate;
  float softcap;  // of the logits, 0: none
  int32_t num_threads;
};

class Barrier {
 public:
  void wait(int threads) {
    const unsigned before = generation.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      generation.store(before + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < SPINS; ++spins) {
      if (generation.load(std::memory_order_acquire) != before) return;
      _mm_pause();
    }
    // A thread that waits long has lost its partner's core: let whoever has work run.
    const uint64_t since = __rdtsc();
    while (generation.load(std::memory_order_acquire) == before) sched_yield();
    lost.fetch_add(__rdtsc() - since, std::memory_order_relaxed);
  }

  uint64_t take_lost() { return lost.exchange(0, std::memory_order_relaxed); }

 private:
  static constexpr int SPINS = 4000;

  std::atomic<uint64_t> lost{0};  // ticks that threads waited beyond their spins
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<unsigned> generation{0};
};

// How many threads a step is worth. Tiny steps are over before a second thread has met the first. And where other processes
// want the cores, each thread gets its own at another time, and they wait for each other at every phase: after two steps
// in a row that one thread would have done as fast, it works alone for a while. No bit of the result depends on it.
class Team {
 public:
  int size(int threads, int64_t products) {
    if (products < FEW_PRODUCTS) return 1;
    return alone > 0 ? --alone, 1 : threads;
  }

  // lost: the ticks that all threads waited, together. One thread alone would take as long as a step of which they lost
  // (threads - 1) / threads.
  void judge(uint64_t threads, uint64_t ticks, uint64_t lost) {
    if (threads * lost < (threads - 1) * (threads - 1) * ticks) {
      bad = 0;
    } else if (++bad == 2) {
      alone = ALONE;
      bad = 1;
    }
  }

 private:
  static constexpr int64_t FEW_PRODUCTS = 1 << 18;
  static constexpr int ALONE = 16;  // steps

  int bad = 0, alone = 0;
};

enum Form { AS_FP32, AS_BF16, AS_ONE_DIGIT, AS_TWO_DIGITS, AS_CODES, NUM_FORMS };

inline Form form_of(const Linear& l) {
  if (l.digits != 0) return l.digits == 1 ? AS_ONE_DIGIT : AS_TWO_DIGITS;
  return l.kind == FP32 ? AS_FP32 : l.kind == BF16 ? AS_BF16 : AS_CODES;
}

// A layer's tokens in every form that the linears after this point multiply.
struct Forms {
  bool is_needed[NUM_FORMS] = {};
  float* fp32;
  uint16_t* bf16;
  linear::Digits<1> one;
  linear::Digits<2> two;
  linear::Codes codes;

  // Those of the tokens from `token` on, as the inputs of `l`.
  Forms from(int64_t token, const Linear& l) const {
    Forms f = *this;
    f.fp32 += token * l.inputs, f.bf16 += token * l.inputs;
    if (is_needed[AS_ONE_DIGIT]) f.one = one.from(token);
    if (is_needed[AS_TWO_DIGITS]) f.two = two.from(token);
    if (is_needed[AS_CODES]) f.codes.codes += token * l.padded, f.codes.scale += token;
    return f;
  }

  // How many inputs a thread takes at least, so that it has all of what shares a scale.
  int64_t part() const {
    return std::lcm(is_needed[AS_ONE_DIGIT] ? one.group : 8, is_needed[AS_TWO_DIGITS] ? two.group : 64);
  }
};

// The memory behind forms: one set serves every layer, because a barrier stands between one's use and the next. What is
// wider has a set of its own (Scratch), so that a core writes the same lines at every layer.
struct FormMemory {
  std::vector<float> fp32, code_scales;
  std::vector<uint16_t> bf16;
  linear::DigitMemory<1> one;
  linear::DigitMemory<2> two;
  std::vector<uint8_t> codes;

  template <typename T>
  static void grow(std::vector<T>& memory, int64_t size) {
    if ((int64_t)memory.size() < size) memory.resize(size);
  }

  void grow(const Linear& l, int64_t tokens) {
    if (l.kind == FP32) grow(fp32, tokens * l.inputs);
    if (l.kind == BF16) grow(bf16, tokens * l.inputs);
    if (l.kind == INT8_DYNAMIC) grow(codes, tokens * l.padded), grow(code_scales, tokens);
    if (l.digits == 1) one.rows(tokens, l.padded, l.group);
    if (l.digits == 2) two.rows(tokens, l.padded, l.group);
  }

  Forms forms(const Linear* linears, int count, int64_t tokens) {
    Forms f{};
    f.fp32 = fp32.data();
    f.bf16 = bf16.data();
    for (const Linear* l = linears; l < linears + count; l++) {
      f.is_needed[form_of(*l)] = true;
      if (l->kind == INT8_DYNAMIC) f.codes = {codes.data(), code_scales.data(), l->padded};
      if (l->digits == 1) f.one = one.rows(tokens, l->padded, l->group);
      if (l->digits == 2) f.two = two.rows(tokens, l->padded, l->group);
    }
    return f;
  }
};

struct LayerForms { Forms qkv, output, gate_up, down; };

struct Work {  // of one thread in its team
  int id, threads;
  Barrier* barrier;
  std::vector<float> row;

  int64_t begin(int64_t count) const { return count * id / threads; }
  int64_t end(int64_t count) const { return count * (id + 1) / threads; }
  void meet() const { if (threads > 1) barrier->wait(threads); }
};

inline void convert(const float* row, int64_t token, int64_t inputs, int64_t from, int64_t to, const Forms& forms) {
  if (forms.is_needed[AS_FP32]) memcpy(forms.fp32 + token * inputs + from, row + from, (to - from) * sizeof(float));
  if (forms.is_needed[AS_BF16]) {
    uint16_t* out = forms.bf16 + token * inputs;
    for (int64_t k = from; k < to; k += 16)
      lanes::store(out + k, lanes::first_lanes(to - k), lanes::load(row + k, lanes::first_lanes(to - k)));
  }
  const auto to_digits = [&](const auto& digits) {
    linear::to_digits(row, inputs, digits, token, from / digits.group, (to + digits.group - 1) / digits.group);
  };
  if (forms.is_needed[AS_ONE_DIGIT]) to_digits(forms.one);
  if (forms.is_needed[AS_TWO_DIGITS]) to_digits(forms.two);
  if (forms.is_needed[AS_CODES]) linear::to_codes(row, inputs, forms.codes, token);
}

// Calls fill(token, row, from, to), which makes at least [from, to) of a token's inputs, and turns them into the forms.
// With fewer tokens than threads each thread makes a part of every token; what `fill` needs of the rest it makes itself.
template <typename Fill>
inline void prepare(Work& work, int64_t tokens, int64_t inputs, const Forms& forms, const Fill& fill) {
  if ((int64_t)work.row.size() < inputs + 16) work.row.resize(inputs + 16);
  float* row = work.row.data();
  if (tokens >= work.threads || forms.is_needed[AS_CODES]) {
    for (int64_t t = work.begin(tokens); t < work.end(tokens); t++) {
      fill(t, row, 0, inputs);
      convert(row, t, inputs, 0, inputs, forms);
    }
  } else {
    const int64_t part = forms.part(), parts = (inputs + part - 1) / part;
    const int64_t from = work.begin(parts) * part, to = std::min(inputs, work.end(parts) * part);
    for (int64_t t = 0; t < tokens && from < to; t++) {
      fill(t, row, from, to);
      convert(row, t, inputs, from, to, forms);
    }
  }
  work.meet();
}

inline float inverse_root(const float* x, int64_t n, float eps) {
  lanes::Floats squares = lanes::no_floats();
  for (int64_t k = 0; k < n; k += 16) {
    const lanes::Floats v = lanes::load(x + k, lanes::first_lanes(n - k));
    squares = lanes::multiply_add(v, v, squares);
  }
  return 1.0f / std::sqrt(lanes::sum(squares) / n + eps);
}

inline void normalise(float* x, int64_t n, const Norm& norm) {
  const float factor = inverse_root(x, n, norm.eps);
  for (int64_t k = 0; k < n; k++) x[k] = x[k] * factor * norm.weight[k];
}

// Outputs of blocks [begin, end) of one linear, into rows `stride` apart.
inline void multiply(const Linear& l, const Forms& forms, int64_t tokens, int64_t begin, int64_t end, float* out,
                     int64_t stride) {
  const linear::Out<float> rows{out, stride, l.outputs};
  const int64_t first = begin * linear::LANES, last = std::min(l.outputs, end * linear::LANES);
  const auto meet_digits = [&](const auto& kernel) {
    if (l.digits == 1)
      linear::some_blocks(kernel, forms.one, tokens, begin, end, rows);
    else
      linear::some_blocks(kernel, forms.two, tokens, begin, end, rows);
  };
  switch (l.kind) {
    case FP32:
      dense::some_outputs(dense::Problem<dense::Fp32, float>{forms.fp32, (const float*)l.weight, out, l.inputs,
                                                             stride}, tokens, first, last);
      break;
    case BF16:
      dense::some_outputs(dense::Problem<dense::Bf16, float>{forms.bf16, (const uint16_t*)l.weight, out,
                                                             l.inputs, stride}, tokens, first, last);
      break;
    case INT8:
      meet_digits(linear::Int8{(const uint8_t*)l.weight, (const float*)l.scale});
      break;
    case INT4_BF16_SCALE:
      meet_digits(linear::Int4<uint16_t>{(const uint8_t*)l.weight, (const uint16_t*)l.scale, (const int8_t*)l.extra,
                                         l.spread});
      break;
    case INT4_FP32_SCALE:
      meet_digits(linear::Int4<float>{(const uint8_t*)l.weight, (const float*)l.scale, (const int8_t*)l.extra, l.spread});
      break;
    default:
      linear::some_blocks(linear::DynamicInt8{(const int8_t*)l.weight, (const float*)l.scale, (const int32_t*)l.extra},
                          forms.codes, tokens, begin, end, rows);
  }
  if (l.bias != nullptr)
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t n = first; n < last; n++) out[t * stride + n] += l.bias[n];
}

// From so many tokens on a thread takes its own tokens through all outputs instead of all tokens through its own outputs:
// reading every weight on every core then costs less than handing activations from core to core. Each has so many that
// dense linears add as they do for all of them.
constexpr int64_t OWN_TOKENS = 192;

// This thread's part of linears with one input, whose outputs lie side by side in rows of `out`, in pieces whose weights
// stay in cache while all tokens meet them.
inline void multiply_all(const Work& work, const Linear* linears, int count, const Forms& forms, int64_t tokens,
                         float* out, int64_t stride) {
  constexpr int64_t PIECE = 6;
  int64_t total = 0;
  for (int i = 0; i < count; i++) total += linear::blocks_of(linears[i].outputs);
  const bool own = tokens >= std::max<int64_t>(OWN_TOKENS, dense::MANY * work.threads);
  const int64_t first = own ? work.begin(tokens) : 0, last = own ? work.end(tokens) : tokens;
  const int64_t begin = own ? 0 : work.begin(total), end = own ? total : work.end(total);
  int64_t before = 0;
  out += first * stride;
  for (int i = 0; i < count; i++) {
    const int64_t blocks = linear::blocks_of(linears[i].outputs);
    const int64_t from = std::max<int64_t>(0, begin - before), to = std::min(blocks, end - before);
    const Forms own_forms = forms.from(first, linears[i]);
    for (int64_t block = from; block < to; block += PIECE)
      multiply(linears[i], own_forms, last - first, block, std::min(to, block + PIECE), out, stride);
    out += linears[i].outputs;
    before += blocks;
  }
  work.meet();
}

inline void rotate(float* head, const float* cos, const float* sin, int rotary) {
  const int half = rotary / 2;
  for (int i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

inline paged::vec activate(paged::vec x, int32_t kind) {
  switch (kind) {
    case SILU: {
      const paged::vec e = -x > 87.0f ? paged::vec{} + 87.0f : -x;
      return x / (1.0f + paged::exp16(e));
    }
    case GELU_TANH: {  // tanh(u) = 1 - 2 / (1 + exp(2u))
      paged::vec u = 2.0f * 0.7978845608028654f * (x + 0.044715f * x * x * x);
      u = u > 87.0f ? paged::vec{} + 87.0f : u;
      return 0.5f * x * (2.0f - 2.0f / (1.0f + paged::exp16(u)));
    }
    case GELU:
      for (int i = 0; i < 16; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067811865476f));
      return x;
    default:
      return x < 0.0f ? paged::vec{} : x;  // NaN stays
  }
}

struct Scratch {
  std::vector<float> residual[2], delta, qkv, attended, gate_up;
  std::vector<paged::Tile> tiles;
  std::vector<std::atomic<int64_t>> next_item;
  FormMemory memory, wide;  // of the inputs of `down`
  std::vector<LayerForms> layers;
  Forms head;
  Barrier barrier;
  Team team;
  int64_t products;  // of most of the step's linears

  // Room for the step; done by one thread, before the team starts.
  void prepare_for(const Model& model, const paged::Step& step, int64_t num_wanted) {
    const int64_t tokens = step.num_tokens;
    const paged::Shape& shape = model.layers[0].attention;
    for (auto& one : residual) one.resize(tokens * model.hidden);
    delta.resize(tokens * model.hidden);
    qkv.resize(tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    attended.resize(tokens * shape.heads * shape.head_dim);
    gate_up.resize(tokens * 2 * model.intermediate);
    if ((int64_t)next_item.size() != model.num_layers) next_item = std::vector<std::atomic<int64_t>>(model.num_layers);
    for (auto& item : next_item) item.store(0, std::memory_order_relaxed);
    paged::list_tiles(step, tiles);
    memory.grow(model.head, num_wanted);
    products = 0;
    for (const Layer* layer = model.layers; layer < model.layers + model.num_layers; layer++) {
      for (int i = 0; i < layer->num_qkv; i++) memory.grow(layer->qkv[i], tokens);
      for (int i = 0; i < layer->num_gate_up; i++) memory.grow(layer->gate_up[i], tokens);
      memory.grow(layer->output, tokens);
      wide.grow(layer->down, tokens);
      for (const Linear& l : {layer->qkv[0], layer->gate_up[0], layer->output, layer->down})
        products += l.outputs * l.inputs * tokens;
    }
    layers.clear();
    for (const Layer* layer = model.layers; layer < model.layers + model.num_layers; layer++)
      layers.push_back({memory.forms(layer->qkv, layer->num_qkv, tokens), memory.forms(&layer->output, 1, tokens),
                        memory.forms(layer->gate_up, layer->num_gate_up, tokens), wide.forms(&layer->down, 1, tokens)});
    head = memory.forms(&model.head, 1, num_wanted);
  }
};

// residual[1 - now] = residual[now] + delta (through `after`, if there is such a norm), and its norm, in forms.
inline void add_and_normalise(Work& work, Scratch& s, int& now, bool add, const Norm& after, const Norm& before,
                              int64_t tokens, int64_t hidden, const Forms& forms) {
  const float* old = s.residual[now].data();
  float* fresh = s.residual[1 - now].data();
  prepare(work, tokens, hidden, forms, [&](int64_t t, float* row, int64_t from, int64_t to) {
    if (add) {
      memcpy(row, s.delta.data() + t * hidden, hidden * sizeof(float));
      if (after.weight != nullptr) normalise(row, hidden, after);
      for (int64_t k = 0; k < hidden; k++) row[k] += old[t * hidden + k];
    } else {
      memcpy(row, old + t * hidden, hidden * sizeof(float));
    }
    memcpy(fresh + t * hidden + from, row + from, (to - from) * sizeof(float));
    normalise(row, hidden, before);
  });
  now = 1 - now;
}

void attention(Work& work, Scratch& s, const Layer& layer, const paged::Step& step, const int64_t* positions,
               std::atomic<int64_t>& next_item) {
  const paged::Shape& shape = layer.attention;
  const int d = shape.head_dim, heads = shape.heads, kv_heads = shape.kv_heads;
  const int64_t stride = (heads + 2 * kv_heads) * d, tokens = step.num_tokens;
  float* qkv = s.qkv.data();
  const auto ready = [&](int64_t t, int first, int last) {  // heads in the order of the row: queries, then keys
    for (int h = first; h < last; h++) {
      float* head = qkv + t * stride + h * d;
      const Norm& norm = h < heads ? layer.query_norm : layer.key_norm;
      if (norm.weight != nullptr) normalise(head, d, norm);
      const int64_t at = positions[t] * (layer.rotary / 2);
      rotate(head, layer.cos + at, layer.sin + at, layer.rotary);
    }
  };
  const paged::Rows query{qkv, stride, d}, key{qkv + heads * d, stride, d}, value{qkv + (heads + kv_heads) * d, stride, d};
  if (tokens >= work.threads) {
    for (int64_t t = work.begin(tokens); t < work.end(tokens); t++) {
      ready(t, 0, heads + kv_heads);
      paged::write_tokens(step, shape, layer.cache, key, value, t, t + 1);
    }
  } else {
    for (int64_t t = 0; t < tokens; t++) {
      ready(t, work.begin(heads), work.end(heads));
      if (t % work.threads != work.id) continue;
      ready(t, heads, heads + kv_heads);
      paged::write_tokens(step, shape, layer.cache, key, value, t, t + 1);
    }
  }
  work.meet();
  paged::attend_items(step, shape, layer.cache, s.tiles, next_item, query, s.attended.data());
  work.meet();
}

void run(Work& work, Scratch& s, const Model& model, const paged::Step& step, const int64_t* positions,
         const int64_t* wanted, int64_t num_wanted, float* logits) {
  const int64_t tokens = step.num_tokens, hidden = model.hidden, intermediate = model.intermediate;
  const Norm none{nullptr, 0.0f};
  int now = 0;
  for (int64_t i = 0; i < model.num_layers; i++) {
    const Layer& layer = model.layers[i];
    const LayerForms& forms = s.layers[i];
    const paged::Shape& shape = layer.attention;
    const int64_t width = shape.heads * shape.head_dim;
    add_and_normalise(work, s, now, i > 0, i > 0 ? model.layers[i - 1].after_mlp : none, layer.before_attention, tokens,
                      hidden, forms.qkv);
    multiply_all(work, layer.qkv, layer.num_qkv, forms.qkv, tokens, s.qkv.data(),
                 (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    attention(work, s, layer, step, positions, s.next_item[i]);
    prepare(work, tokens, width, forms.output, [&](int64_t t, float* row, int64_t from, int64_t to) {
      memcpy(row + from, s.attended.data() + t * width + from, (to - from) * sizeof(float));
    });
    multiply_all(work, &layer.output, 1, forms.output, tokens, s.delta.data(), hidden);
    add_and_normalise(work, s, now, true, layer.after_attention, layer.before_mlp, tokens, hidden, forms.gate_up);
    multiply_all(work, layer.gate_up, layer.num_gate_up, forms.gate_up, tokens, s.gate_up.data(), 2 * intermediate);
    prepare(work, tokens, intermediate, forms.down, [&](int64_t t, float* row, int64_t from, int64_t to) {
      const float* gate = s.gate_up.data() + t * 2 * intermediate;
      const float* up = gate + intermediate;
      int64_t k = from;
      for (; k + 16 <= to; k += 16)
        paged::store(row + k, activate(paged::load(gate + k), layer.activation) * paged::load(up + k));
      for (; k < to; k++) row[k] = activate(paged::vec{} + gate[k], layer.activation)[0] * up[k];
    });
    multiply_all(work, &layer.down, 1, forms.down, tokens, s.delta.data(), hidden);
  }
  prepare(work, num_wanted, hidden, s.head, [&](int64_t w, float* row, int64_t, int64_t) {
    const int64_t t = wanted[w];
    memcpy(row, s.delta.data() + t * hidden, hidden * sizeof(float));
    const Norm& after = model.layers[model.num_layers - 1].after_mlp;
    if (after.weight != nullptr) normalise(row, hidden, after);
    for (int64_t k = 0; k < hidden; k++) row[k] += s.residual[now][t * hidden + k];
    normalise(row, hidden, model.final_norm);
  });
  const int64_t vocabulary = model.head.outputs;
  multiply_all(work, &model.head, 1, s.head, num_wanted, logits, vocabulary);
  if (model.softcap != 0.0f) {
    const int64_t count = num_wanted * vocabulary;
    for (int64_t i = work.begin(count); i < work.end(count); i++)
      logits[i] = model.softcap * std::tanh(logits[i] / model.softcap);
  }
}

// A thread's memory between its steps, as large as its largest one; null before the first.
std::unique_ptr<Scratch>& scratch_of_thread() {
  static thread_local std::unique_ptr<Scratch> scratch;
  return scratch;
}

}  // namespace step

// embeddings [tokens, hidden] float32; positions [tokens]; wanted [num_wanted]: the tokens whose logits
// [num_wanted, vocabulary] are computed.
extern "C" void decoder_step(const step::Model* model, const paged::Step* tables, const int64_t* positions,
                             const float* embeddings, const int64_t* wanted, int64_t num_wanted, float* logits) {
  std::unique_ptr<step::Scratch>& scratch = step::scratch_of_thread();
  if (scratch == nullptr) scratch = std::make_unique<step::Scratch>();
  step::Scratch& s = *scratch;
  s.prepare_for(*model, *tables, num_wanted);
  memcpy(s.residual[0].data(), embeddings, tables->num_tokens * model->hidden * sizeof(float));
  const int threads = s.team.size(model->num_threads, s.products);
  const uint64_t since = __rdtsc();
#pragma omp parallel num_threads(threads)
  {
    step::Work work{omp_get_thread_num(), omp_get_num_threads(), &s.barrier, {}};
    step::run(work, s, *model, *tables, positions, wanted, num_wanted, logits);
  }
  if (threads > 1) s.team.judge(threads, __rdtsc() - since, s.barrier.take_lost());
}

// Gives back what the calling thread keeps between steps. (What its team keeps does not grow with a step's tokens.)
extern "C" void decoder_step_release() { step::scratch_of_thread().reset(); }
