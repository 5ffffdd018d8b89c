// Dense linears, as tiles without threads: y = x W^T, reading W once, as it lies, [outputs, inputs].
// One idea: for few tokens the weights' way from memory is the cost, so a weight meets all tokens while it is in a register,
// and sums are added across lanes at the end. For many tokens the products are the cost: a piece of W that stays in the
// second cache is turned so that 16 outputs are the 16 lanes of a register, and nothing is summed across lanes.
// bfloat16: vdpbf16ps with exact products; float32: fused multiply-add; one rounding at the end.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../quantize/kernels/cpu/linear.h"

namespace dense {

inline float from_bf16(uint16_t h) { uint32_t bits = (uint32_t)h << 16; float x; memcpy(&x, &bits, 4); return x; }

inline void write(float* out, float value) { *out = value; }
inline void write(uint16_t* out, float value) {
  const __m128bh rounded = _mm_cvtneps_pbh(_mm_set_ss(value));
  memcpy(out, &rounded, 2);
}

// The sums of 16 vectors, one per lane: lane i is the sum of v[ORDER[i]].
inline __m512 sums_of(const __m512* v) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)  // pairs (i, i + 8): per 128 bits, lanes 0 2 from v[i] and 1 3 from v[i + 8]
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
  for (int i = 0; i < 4; i++)  // per 128 bits: v[i], v[i + 8], v[i + 4], v[i + 12]
    b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[i], a[i + 4], 0x44), _mm512_shuffle_ps(a[i], a[i + 4], 0xee));
  for (int i = 0; i < 2; i++)  // 128-bit lanes of b[i] and b[i + 2], each halved
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));
  // 128-bit lanes: b[0], b[2], b[1], b[3]
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

constexpr int ORDER[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

struct Bf16 {
  using Element = uint16_t;
  using Vector = __m512bh;
  static constexpr int WIDTH = 32, STEP = 2;  // elements in a register, and in one of its 16 lanes
  static Vector load(const Element* p) { return (Vector)_mm512_loadu_si512(p); }
  static Vector load_tail(const Element* p, int64_t count) {
    return (Vector)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
  }
  static __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};

struct Fp32 {
  using Element = float;
  using Vector = __m512;
  static constexpr int WIDTH = 16, STEP = 1;
  static Vector load(const Element* p) { return _mm512_loadu_ps(p); }
  static Vector load_tail(const Element* p, int64_t count) { return _mm512_maskz_loadu_ps((1u << count) - 1, p); }
  static __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

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
  __m512 sum[16 * VECTORS];
#pragma GCC unroll 32
  for (int i = 0; i < 16 * VECTORS; i++) sum[i] = _mm512_setzero_ps();
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
        sum[r * TOKENS + t] = Kind::add(sum[r * TOKENS + t], Kind::load_tail(w + r * p.inputs + k, p.inputs - k),
                                        Kind::load_tail(x + t * p.inputs + k, p.inputs - k));
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; v++) {
    float lanes[16];
    _mm512_storeu_ps(lanes, sums_of(sum + 16 * v));
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; lane++) {
      const int i = 16 * v + ORDER[lane];
      if (i < ROWS * TOKENS) write(p.y + (m + i % TOKENS) * p.stride + n + i / TOKENS, lanes[lane]);
    }
  }
}

template <typename Kind, int TOKENS, int ROWS, typename Y>
void strip(const Problem<Kind, Y>& p, int64_t m, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + ROWS <= end; n += ROWS) tile<Kind, TOKENS, ROWS>(p, m, n);
  for (; n < end; n++) tile<Kind, TOKENS, 1>(p, m, n);
}

// 16 rows of 16 lanes each, turned: lane i of row j becomes lane j of row i.
inline void turn(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // columns i, i + 1, i + 2, i + 3 of four rows, in each 128 bits
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

// `rows` rows of W from `n` on as [steps][blocks][16] lanes, zeros where there is no row.
template <typename Kind>
inline void turn_rows(const typename Kind::Element* w, int64_t inputs, int64_t rows, int64_t blocks, uint32_t* out) {
  const int64_t steps = inputs / Kind::STEP;
  for (int64_t block = 0; block < blocks; block++)
    for (int64_t step = 0; step < steps; step += 16) {
      const __mmask16 lanes = steps - step >= 16 ? 0xFFFF : (1u << (steps - step)) - 1;
      __m512i r[16];
      for (int i = 0; i < 16; i++)
        r[i] = block * 16 + i < rows
                   ? _mm512_maskz_loadu_epi32(lanes, w + (block * 16 + i) * inputs + step * Kind::STEP)
                   : _mm512_setzero_si512();
      turn(r);
      for (int i = 0; i < 16 && step + i < steps; i++)
        _mm512_storeu_si512(out + ((step + i) * blocks + block) * 16, r[i]);
    }
}

// TOKENS tokens from `m` on against a turned piece of 16 * BLOCKS outputs from `n` on, `rows` of which there are.
template <typename Kind, int TOKENS, int BLOCKS, typename Y>
inline void turned_tile(const Problem<Kind, Y>& p, const uint32_t* turned, int64_t m, int64_t n, int64_t rows) {
  const int64_t steps = p.inputs / Kind::STEP;
  __m512 sum[TOKENS][BLOCKS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) sum[t][b] = _mm512_setzero_ps();
  const auto* x = p.x + m * p.inputs;
  for (int64_t step = 0; step < steps; step++) {
    typename Kind::Vector weight[BLOCKS];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++)
      weight[b] = (typename Kind::Vector)_mm512_loadu_si512(turned + (step * BLOCKS + b) * 16);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      int32_t lane;
      memcpy(&lane, x + t * p.inputs + step * Kind::STEP, 4);
      const auto token = (typename Kind::Vector)_mm512_set1_epi32(lane);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) sum[t][b] = Kind::add(sum[t][b], weight[b], token);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) {
      const int64_t left = rows - b * 16;
      const __mmask16 lanes = linear::first_lanes(std::max<int64_t>(0, left));
      linear::store(p.y + (m + t) * p.stride + n + b * 16, lanes, sum[t][b]);
    }
}

template <typename Kind, typename Y>
void many_tokens(const Problem<Kind, Y>& p, int64_t tokens, int64_t begin, int64_t end) {
  constexpr int BLOCKS = 3, TOKENS = 8;
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
                                      strip<Kind, 1, 8, Y>,
                                      strip<Kind, 2, 8, Y>,
                                      strip<Kind, 3, 8, Y>,
                                      strip<Kind, 4, 6, Y>,
                                      strip<Kind, 5, 4, Y>,
                                      strip<Kind, 6, 4, Y>,
                                      strip<Kind, 7, 3, Y>,
                                      strip<Kind, 8, 3, Y>};
  constexpr int64_t OUTPUTS = 24;  // few enough that all tokens find the weights in cache
  for (int64_t from = begin; from < end; from += OUTPUTS)
    for (int64_t m = 0; m < tokens; m += 8)
      STRIPS[std::min<int64_t>(8, tokens - m)](p, m, from, std::min(end, from + OUTPUTS));
}

}  // namespace dense
