// Dense linears, as tiles without threads: y = x W^T, reading W once, as it lies, [outputs, inputs].
// One idea: for few tokens the weights' way from memory is the cost, so a weight meets all tokens while it is in a register,
// and sums are added across lanes at the end. For many tokens the products are the cost: a piece of W that stays in the
// second cache is turned so that 16 outputs are the 16 lanes of a register, and nothing is summed across lanes.
// bfloat16: exact products; float32: fused multiply-add; one rounding at the end.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../quantize/kernels/cpu/lanes.h"

namespace dense {

using namespace lanes;

inline float from_bf16(uint16_t h) { uint32_t bits = (uint32_t)h << 16; float x; memcpy(&x, &bits, 4); return x; }

inline void write(float* out, float value) { *out = value; }
inline void write(uint16_t* out, float value) { *out = to_bf16(value); }

struct Bf16 {
  using Element = uint16_t;
  using Vector = Ints;
  static constexpr int WIDTH = 32, STEP = 2;  // elements in a vector, and in one of its 16 lanes
  static Vector load(const Element* p) { return load_bits(p); }
  static Vector repeat(int32_t lane) { return all(lane); }
  static Floats add(Floats sum, Vector a, Vector b) { return add_bf16_products(sum, a, b); }
};

struct Fp32 {
  using Element = float;
  using Vector = Floats;
  static constexpr int WIDTH = 16, STEP = 1;
  static Vector load(const Element* p) { return lanes::load(p); }
  static Vector repeat(int32_t lane) { return from_bits(all(lane)); }
  static Floats add(Floats sum, Vector a, Vector b) { return multiply_add(a, b, sum); }
};

template <typename Kind>
inline typename Kind::Vector load_tail(const typename Kind::Element* p, int64_t count) {
  typename Kind::Element padded[Kind::WIDTH] = {};
  std::copy_n(p, count, padded);
  return Kind::load(padded);
}

// x [tokens, inputs], rows as far apart as they are long; y [tokens, outputs], rows `stride` apart.
template <typename Kind, typename Y>
struct Problem {
  const typename Kind::Element *x, *w;
  Y* y;
  int64_t inputs, stride;
};

// ROWS outputs from `n` on, for TOKENS tokens from `m` on; the sums stay in registers.
template <typename Kind, int TOKENS, int ROWS, typename Y>
inline void tile(const Problem<Kind, Y>& p, int64_t m, int64_t n) {
  constexpr int VECTORS = (ROWS * TOKENS + 15) / 16;
  Floats sum[16 * VECTORS];
#pragma GCC unroll 32
  for (int i = 0; i < 16 * VECTORS; i++) sum[i] = no_floats();
  const auto* x = p.x + m * p.inputs;
  const auto* w = p.w + n * p.inputs;
  int64_t k = 0;
  for (; k + Kind::WIDTH <= p.inputs; k += Kind::WIDTH) {
    typename Kind::Vector weight[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      weight[r] = Kind::load(w + r * p.inputs + k);
      // The next tile's rows, into the second cache.
      _mm_prefetch((const char*)(w + (ROWS + r) * p.inputs + k), _MM_HINT_T1);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      const typename Kind::Vector token = Kind::load(x + t * p.inputs + k);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sum[r * TOKENS + t] = Kind::add(sum[r * TOKENS + t], weight[r], token);
    }
  }
  if (k < p.inputs)
    for (int r = 0; r < ROWS; r++)
      for (int t = 0; t < TOKENS; t++)
        sum[r * TOKENS + t] = Kind::add(sum[r * TOKENS + t], load_tail<Kind>(w + r * p.inputs + k, p.inputs - k),
                                        load_tail<Kind>(x + t * p.inputs + k, p.inputs - k));
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; v++) {
    float total[16];
    sums_of(sum + 16 * v, total);
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; lane++) {
      const int i = 16 * v + ORDER[lane];
      if (i < ROWS * TOKENS) write(p.y + (m + i % TOKENS) * p.stride + n + i / TOKENS, total[lane]);
    }
  }
}

template <typename Kind, int TOKENS, int ROWS, typename Y>
void strip(const Problem<Kind, Y>& p, int64_t m, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + ROWS <= end; n += ROWS) tile<Kind, TOKENS, ROWS>(p, m, n);
  for (; n < end; n++) tile<Kind, TOKENS, 1>(p, m, n);
}

// `rows` rows of W from `n` on as [steps][blocks][16] lanes, zeros where there is no row.
template <typename Kind>
inline void turn_rows(const typename Kind::Element* w, int64_t inputs, int64_t rows, int64_t blocks, uint32_t* out) {
  const int64_t steps = inputs / Kind::STEP;
  for (int64_t block = 0; block < blocks; block++)
    for (int64_t step = 0; step < steps; step += 16) {
      const Mask there = first_lanes(steps - step);
      Floats r[16];  // bits that are only moved
      for (int i = 0; i < 16; i++)
        r[i] = block * 16 + i < rows
                   ? lanes::load((const float*)(w + (block * 16 + i) * inputs + step * Kind::STEP), there)
                   : no_floats();
      turn(r);
      for (int i = 0; i < 16 && step + i < steps; i++)
        store((float*)(out + ((step + i) * blocks + block) * 16), first_lanes(16), r[i]);
    }
}

// TOKENS tokens from `m` on against a turned piece of 16 * BLOCKS outputs from `n` on, `rows` of which there are.
template <typename Kind, int TOKENS, int BLOCKS, typename Y>
inline void turned_tile(const Problem<Kind, Y>& p, const uint32_t* turned, int64_t m, int64_t n, int64_t rows) {
  const int64_t steps = p.inputs / Kind::STEP;
  Floats sum[TOKENS][BLOCKS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) sum[t][b] = no_floats();
  const auto* x = p.x + m * p.inputs;
  for (int64_t step = 0; step < steps; step++) {
    typename Kind::Vector weight[BLOCKS];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++)
      weight[b] = Kind::load((const typename Kind::Element*)(turned + (step * BLOCKS + b) * 16));
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      int32_t lane;
      memcpy(&lane, x + t * p.inputs + step * Kind::STEP, 4);
      const auto token = Kind::repeat(lane);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) sum[t][b] = Kind::add(sum[t][b], weight[b], token);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) {
      const int64_t left = rows - b * 16;
      store(p.y + (m + t) * p.stride + n + b * 16, first_lanes(std::max<int64_t>(0, left)), sum[t][b]);
    }
}

template <typename Kind, typename Y>
void many_tokens(const Problem<Kind, Y>& p, int64_t tokens, int64_t begin, int64_t end) {
  constexpr int BLOCKS = WIDE ? 3 : 1, TOKENS = WIDE ? 8 : 4;
  static thread_local std::vector<uint32_t> memory;
  memory.resize(p.inputs / Kind::STEP * BLOCKS * 16 + 16);
  uint32_t* turned = (uint32_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
  for (int64_t n = begin; n < end; n += BLOCKS * 16) {
    const int64_t rows = std::min<int64_t>(BLOCKS * 16, end - n);
    turn_rows<Kind>(p.w + n * p.inputs, p.inputs, rows, BLOCKS, turned);
    int64_t m = 0;
    for (; m + TOKENS <= tokens; m += TOKENS) turned_tile<Kind, TOKENS, BLOCKS>(p, turned, m, n, rows);
    for (; m + 2 <= tokens; m += 2) turned_tile<Kind, 2, BLOCKS>(p, turned, m, n, rows);
    for (; m < tokens; m++) turned_tile<Kind, 1, BLOCKS>(p, turned, m, n, rows);
  }
}

constexpr int64_t MANY = 24;  // tokens from which on turning the weights pays

// Outputs [begin, end) for all tokens.
template <typename Kind, typename Y>
void some_outputs(const Problem<Kind, Y>& p, int64_t tokens, int64_t begin, int64_t end) {
  if (tokens >= MANY && p.inputs % Kind::STEP == 0) return many_tokens(p, tokens, begin, end);
  using Strip = void (*)(const Problem<Kind, Y>&, int64_t, int64_t, int64_t);
  static constexpr Strip STRIPS[9] = {nullptr,
                                      strip<Kind, 1, WIDE ? 8 : 4, Y>,
                                      strip<Kind, 2, WIDE ? 8 : 2, Y>,
                                      strip<Kind, 3, WIDE ? 8 : 1, Y>,
                                      strip<Kind, 4, WIDE ? 6 : 1, Y>,
                                      strip<Kind, 5, WIDE ? 4 : 1, Y>,
                                      strip<Kind, 6, WIDE ? 4 : 1, Y>,
                                      strip<Kind, 7, WIDE ? 3 : 1, Y>,
                                      strip<Kind, 8, WIDE ? 3 : 1, Y>};
  constexpr int64_t OUTPUTS = 24;  // few enough that all tokens find the weights in cache
  for (int64_t from = begin; from < end; from += OUTPUTS)
    for (int64_t m = 0; m < tokens; m += 8)
      STRIPS[std::min<int64_t>(8, tokens - m)](p, m, from, std::min(end, from + OUTPUTS));
}

}  // namespace dense
