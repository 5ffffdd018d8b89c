// Second moments of bf16 activations, summed in float32 (see gram.py, whose torch path is the reference).
//
// The one idea: H = XᵀX is a matrix product whose inner dimension is tokens, so that one instruction (AVX-512 BF16) takes
// two tokens of 16 channels at once. Tokens are packed in pairs, [panel][token pair][channel in panel][2], a thousand at a
// time, so that the panels of a tile stay in the nearest caches; only tiles that touch the upper triangle are computed.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t PANEL = 32;   // channels in a tile's rows of registers
constexpr int64_t NARROW = 12;  // channels in a tile's columns
constexpr int64_t PAIRS = 512;  // token pairs packed at once: the sums, too large for a cache, are passed over seldom

inline __m512bh both(__m512i bits) {
  __m512bh pairs;
  std::memcpy(&pairs, &bits, sizeof(pairs));
  return pairs;
}

inline __mmask32 first_lanes(int64_t count) {
  return count >= 32 ? ~__mmask32(0) : count > 0 ? (__mmask32(1) << count) - 1 : 0;
}

// `Width` channels from `first` on of all token pairs, zeros beyond the last channel and the last token.
template <int64_t Width>
void pack(const uint16_t* x, int64_t tokens, int64_t channels, int64_t first, uint16_t* panel) {
  alignas(64) uint16_t order[64];
  for (int64_t place = 0; place < 64; ++place) order[place] = place % 2 * 32 + place / 2;
  const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
  const __mmask32 there = first_lanes(std::min(channels - first, Width));
  const __mmask32 low_part = first_lanes(std::min<int64_t>(2 * Width, 32)), high_part = first_lanes(2 * Width - 32);
  for (int64_t pair = 0; pair < PAIRS; ++pair, panel += Width * 2) {
    const uint16_t* row = x + 2 * pair * channels + first;
    const __m512i even = _mm512_maskz_loadu_epi16(2 * pair < tokens ? there : 0, row);
    const __m512i odd = _mm512_maskz_loadu_epi16(2 * pair + 1 < tokens ? there : 0, row + channels);
    _mm512_mask_storeu_epi16(panel, low_part, _mm512_permutex2var_epi16(even, low, odd));
    if (high_part) _mm512_mask_storeu_epi16(panel + 32, high_part, _mm512_permutex2var_epi16(even, high, odd));
  }
}

// sum[row, column] += narrow[row] · wide[column], for NARROW rows and PANEL columns.
void multiply(const uint16_t* wide, const uint16_t* narrow, float* sum) {
  __m512 sums[NARROW][2] = {};
  for (int64_t pair = 0; pair < PAIRS; ++pair) {
    const __m512bh low = both(_mm512_loadu_si512(wide + pair * PANEL * 2));
    const __m512bh high = both(_mm512_loadu_si512(wide + pair * PANEL * 2 + 32));
    const uint16_t* tokens = narrow + pair * NARROW * 2;
    _Pragma("GCC unroll 12") for (int64_t row = 0; row < NARROW; ++row) {
      int32_t step;
      std::memcpy(&step, tokens + row * 2, 4);
      const __m512bh value = both(_mm512_set1_epi32(step));
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], low, value);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], high, value);
    }
  }
  _Pragma("GCC unroll 12") for (int64_t row = 0; row < NARROW; ++row) {
    _mm512_storeu_ps(sum + row * PANEL, sums[row][0]);
    _mm512_storeu_ps(sum + row * PANEL + 16, sums[row][1]);
  }
}

}  // namespace

// x bf16 [tokens, channels]; sum float32 [channels, channels], on and above the diagonal added to (below it, some of the
// entries near the diagonal are too).
extern "C" void gram_add(const uint16_t* x, int64_t tokens, int64_t channels, float* sum) {
  const int64_t wides = (channels + PANEL - 1) / PANEL, narrows = (channels + NARROW - 1) / NARROW;
  // Kept from call to call, since fresh pages cost more than the packing.
  static thread_local std::vector<uint16_t> kept;
  kept.resize(std::max<size_t>(kept.size(), (wides * PANEL + narrows * NARROW) * PAIRS * 2));
  uint16_t* const wide = kept.data();
  uint16_t* const narrow = wide + wides * PANEL * PAIRS * 2;
#pragma omp parallel
  for (int64_t first = 0; first < tokens; first += 2 * PAIRS) {
    const uint16_t* rows = x + first * channels;
    const int64_t count = std::min(tokens - first, 2 * PAIRS);
#pragma omp for
    for (int64_t panel = 0; panel < wides; ++panel)
      pack<PANEL>(rows, count, channels, panel * PANEL, &wide[panel * PAIRS * PANEL * 2]);
#pragma omp for
    for (int64_t panel = 0; panel < narrows; ++panel)
      pack<NARROW>(rows, count, channels, panel * NARROW, &narrow[panel * PAIRS * NARROW * 2]);
#pragma omp for schedule(dynamic)
    for (int64_t panel = wides - 1; panel >= 0; --panel) {  // the longest first, so that no thread waits for one
      const int64_t column = panel * PANEL, width = std::min(channels - column, PANEL);
      for (int64_t other = 0; other * NARROW < column + width; ++other) {
        alignas(64) float tile[NARROW * PANEL];
        multiply(&wide[panel * PAIRS * PANEL * 2], &narrow[other * PAIRS * NARROW * 2], tile);
        const int64_t height = std::min(channels - other * NARROW, NARROW);
        for (int64_t row = 0; row < height; ++row) {
          float* out = sum + (other * NARROW + row) * channels + column;
          for (int64_t lane = 0; lane < width; ++lane) out[lane] += tile[row * PANEL + lane];
        }
      }
    }
  }
}
