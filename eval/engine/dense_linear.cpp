// bfloat16 linear layers at decode: y = x W^T + b for a few tokens, reading W as it lies, [outputs, inputs].
// One idea: at this size the weights' way from memory is the cost, so every weight is read once, in order, and meets all
// tokens while it is in a register (vdpbf16ps: exact products, float32 sums, one rounding at the end).

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

inline __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh load_tail(const uint16_t* p, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, p); }

inline float from_bf16(uint16_t h) { uint32_t bits = (uint32_t)h << 16; float x; memcpy(&x, &bits, 4); return x; }

// The sums of 16 vectors, one per lane: lane i is the sum of v[i].
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

// Which v[i] each lane of sums_of holds.
constexpr int ORDER[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

struct Problem {
  const uint16_t* x;     // [tokens, inputs]
  const uint16_t* w;     // [outputs, inputs]
  const uint16_t* bias;  // [outputs] or null
  uint16_t* y;           // [tokens, outputs]
  int64_t outputs, inputs;
};

constexpr int64_t AHEAD = 4096;  // bytes: beyond what the hardware fetches by itself while the tokens are multiplied

// ROWS outputs from `n` on, for TOKENS tokens from `m` on; the sums stay in registers.
template <int TOKENS, int ROWS>
inline void tile(const Problem& p, int64_t m, int64_t n) {
  constexpr int VECTORS = (ROWS * TOKENS + 15) / 16;
  __m512 sum[16 * VECTORS];
#pragma GCC unroll 32
  for (int i = 0; i < 16 * VECTORS; i++) sum[i] = _mm512_setzero_ps();
  const uint16_t* x = p.x + m * p.inputs;
  const uint16_t* w = p.w + n * p.inputs;
  int64_t k = 0;
  for (; k + 32 <= p.inputs; k += 32) {
    __m512bh weight[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      weight[r] = load(w + r * p.inputs + k);
      _mm_prefetch((const char*)(w + r * p.inputs + k) + AHEAD, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      const __m512bh token = load(x + t * p.inputs + k);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sum[r * TOKENS + t] = _mm512_dpbf16_ps(sum[r * TOKENS + t], weight[r], token);
    }
  }
  if (k < p.inputs) {
    const __mmask32 mask = (1u << (p.inputs - k)) - 1;
    for (int r = 0; r < ROWS; r++)
      for (int t = 0; t < TOKENS; t++)
        sum[r * TOKENS + t] = _mm512_dpbf16_ps(sum[r * TOKENS + t], load_tail(w + r * p.inputs + k, mask),
                                               load_tail(x + t * p.inputs + k, mask));
  }
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; v++) {
    uint16_t lanes[16];
    __m512 total = sums_of(sum + 16 * v);
    if (p.bias) {
      float bias[16];
      for (int lane = 0; lane < 16; lane++) {
        const int i = 16 * v + ORDER[lane];
        bias[lane] = i < ROWS * TOKENS ? from_bf16(p.bias[n + i / TOKENS]) : 0.0f;
      }
      total = _mm512_add_ps(total, _mm512_loadu_ps(bias));
    }
    const __m256bh rounded = _mm512_cvtneps_pbh(total);
    memcpy(lanes, &rounded, sizeof lanes);
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; lane++) {
      const int i = 16 * v + ORDER[lane];
      if (i < ROWS * TOKENS) p.y[(m + i % TOKENS) * p.outputs + n + i / TOKENS] = lanes[lane];
    }
  }
}

template <int TOKENS, int ROWS>
void strip(const Problem& p, int64_t m, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + ROWS <= end; n += ROWS) tile<TOKENS, ROWS>(p, m, n);
  for (; n < end; n++) tile<TOKENS, 1>(p, m, n);
}

using Strip = void (*)(const Problem&, int64_t, int64_t, int64_t);
constexpr Strip STRIPS[9] = {nullptr,     strip<1, 8>, strip<2, 8>, strip<3, 8>, strip<4, 6>,
                             strip<5, 4>, strip<6, 4>, strip<7, 3>, strip<8, 3>};

constexpr int64_t OUTPUTS = 24;  // outputs per piece of work: small enough that all tokens find the weights in cache

}  // namespace

extern "C" int32_t dense_linear_supported() { return 1; }

extern "C" void dense_linear(const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, int64_t tokens,
                             int64_t outputs, int64_t inputs, int32_t num_threads) {
  const Problem p{x, w, bias, y, outputs, inputs};
  const int64_t pieces = (outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t begin = piece * OUTPUTS, end = std::min(outputs, begin + OUTPUTS);
    for (int64_t m = 0; m < tokens; m += 8) STRIPS[std::min<int64_t>(8, tokens - m)](p, m, begin, end);
  }
}

#else

extern "C" int32_t dense_linear_supported() { return 0; }
extern "C" void dense_linear(const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t,
                             int32_t) {}

#endif
