// Causal attention over whole bf16 sequences, for calibration passes (see causal_attention.py).
//
// The one idea: six queries meet all their keys before anything is normalised, so that both products are plain tiles of
// AVX-512 BF16 products, 6 x 64 sums in registers: queries times keys with 16 keys in a register's lanes, weights times
// values with 16 channels in them. Keys and values are laid out for that once per key-value head.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t ROWS = 6;    // queries in a tile
constexpr int64_t WIDE = 64;   // keys, or channels, in a tile
constexpr int64_t VECTORS = WIDE / LANES;

inline __m512bh pairs(__m512i bits) {
  __m512bh value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline __m512bh broadcast(const uint16_t* pair) {
  int32_t step;
  std::memcpy(&step, pair, 4);
  return pairs(_mm512_set1_epi32(step));
}

// exp(x) for x <= 0 as 2^n (1 + r + ...), |r| <= ln 2 / 2, with Taylor's terms to the sixth: relative error below 1e-7.
inline __m512 exp_of(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, n);
}

struct Shape {
  int64_t batch, heads, kv_heads, tokens, head_dim;
};

struct Rows {
  const uint16_t* start;
  int64_t batch_stride, head_stride, token_stride;
  const uint16_t* at(int64_t batch, int64_t head, int64_t token) const {
    return start + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

// The keys of one head as [tokens / 16][head_dim / 2][16][2], its values as [tokens / 2][head_dim][2]; zeros at the end.
void lay_out(const Shape& shape, const Rows& key, const Rows& value, int64_t batch, int64_t head, uint16_t* keys,
             uint16_t* values) {
  const int64_t d = shape.head_dim;
  for (int64_t token = 0; token < shape.tokens; ++token) {
    const uint16_t *k = key.at(batch, head, token), *v = value.at(batch, head, token);
    uint16_t* block = keys + token / LANES * d * LANES + token % LANES * 2;
    for (int64_t pair = 0; pair < d / 2; ++pair) std::memcpy(block + pair * LANES * 2, k + pair * 2, 4);
    uint16_t* row = values + token / 2 * d * 2 + token % 2;
    for (int64_t channel = 0; channel < d; ++channel) row[channel * 2] = v[channel];
  }
}

// scores[row][key] = query · key for ROWS queries and WIDE keys.
void multiply_keys(const uint16_t* const* queries, const uint16_t* keys, int64_t d, float* scores, int64_t stride) {
  __m512 sums[ROWS][VECTORS] = {};
  for (int64_t pair = 0; pair < d / 2; ++pair) {
    __m512bh k[VECTORS];
    for (int64_t v = 0; v < VECTORS; ++v) k[v] = pairs(_mm512_loadu_si512(keys + (v * d / 2 + pair) * LANES * 2));
    _Pragma("GCC unroll 6") for (int64_t row = 0; row < ROWS; ++row) {
      const __m512bh q = broadcast(queries[row] + pair * 2);
      _Pragma("GCC unroll 4") for (int64_t v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], k[v], q);
    }
  }
  _Pragma("GCC unroll 6") for (int64_t row = 0; row < ROWS; ++row)
    _Pragma("GCC unroll 4") for (int64_t v = 0; v < VECTORS; ++v)
      _mm512_storeu_ps(scores + row * stride + v * LANES, sums[row][v]);
}

// out[row][channel] = sum over keys of weight · value, for ROWS queries and Count * 16 channels.
template <int64_t Count>
void multiply_values(const uint16_t* weights, int64_t stride, const uint16_t* values, int64_t key_pairs, int64_t d,
                     __m512 (*sums)[VECTORS]) {
  __m512 local[ROWS][Count] = {};
  for (int64_t pair = 0; pair < key_pairs; ++pair) {
    __m512bh v[Count];
    for (int64_t c = 0; c < Count; ++c) v[c] = pairs(_mm512_loadu_si512(values + (pair * d + c * LANES) * 2));
    _Pragma("GCC unroll 6") for (int64_t row = 0; row < ROWS; ++row) {
      const __m512bh weight = broadcast(weights + row * stride + pair * 2);
      _Pragma("GCC unroll 4") for (int64_t c = 0; c < Count; ++c) local[row][c] = _mm512_dpbf16_ps(local[row][c], v[c], weight);
    }
  }
  for (int64_t row = 0; row < ROWS; ++row)
    for (int64_t c = 0; c < Count; ++c) sums[row][c] = local[row][c];
}

// exp(scale (score - largest)) as bf16 over the first `count` keys, zeros up to `padded`; returns the sum of the weights.
float weigh(float* scores, int64_t count, int64_t padded, float scale, uint16_t* weights) {
  const auto lanes = [count](int64_t first) {
    return count - first >= LANES ? __mmask16(0xFFFF) : __mmask16((1u << std::max<int64_t>(count - first, 0)) - 1);
  };
  const __m512 lowest = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
  __m512 largest = lowest;
  for (int64_t key = 0; key < count; key += LANES)
    largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(lowest, lanes(key), scores + key));
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 total = _mm512_setzero_ps();
  for (int64_t key = 0; key < padded; key += LANES) {
    const __m512 below = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + key), top), factor);
    const __m512 weight = _mm512_maskz_mov_ps(lanes(key), exp_of(_mm512_min_ps(below, _mm512_setzero_ps())));
    total = _mm512_add_ps(total, weight);
    _mm256_storeu_si256((__m256i*)(weights + key), (__m256i)_mm512_cvtneps_pbh(weight));
  }
  return _mm512_reduce_add_ps(total);
}

void attend(const Shape& shape, const Rows& query, float scale, int64_t batch, int64_t head, const uint16_t* keys,
            const uint16_t* values, float* scores, uint16_t* weights, uint16_t* out) {
  const int64_t d = shape.head_dim, stride = (shape.tokens + WIDE - 1) / WIDE * WIDE;
  for (int64_t first = 0; first < shape.tokens; first += ROWS) {
    const int64_t last = std::min(first + ROWS, shape.tokens) - 1;
    const int64_t padded = (last + WIDE) / WIDE * WIDE;
    const uint16_t* queries[ROWS];
    for (int64_t row = 0; row < ROWS; ++row) queries[row] = query.at(batch, head, std::min(first + row, last));
    for (int64_t key = 0; key < padded; key += WIDE) multiply_keys(queries, keys + key * d, d, scores + key, stride);
    float sums[ROWS];
    for (int64_t row = 0; row < ROWS; ++row) {
      const int64_t count = std::min(first + row, last) + 1;
      sums[row] = weigh(scores + row * stride, count, padded, scale, weights + row * stride);
    }
    for (int64_t channel = 0; channel < d; channel += WIDE) {
      __m512 result[ROWS][VECTORS];
      const int64_t count = std::min(d - channel, WIDE) / LANES, key_pairs = last / 2 + 1;
      const uint16_t* part = values + channel * 2;
      if (count == 4) multiply_values<4>(weights, stride, part, key_pairs, d, result);
      if (count == 3) multiply_values<3>(weights, stride, part, key_pairs, d, result);
      if (count == 2) multiply_values<2>(weights, stride, part, key_pairs, d, result);
      if (count == 1) multiply_values<1>(weights, stride, part, key_pairs, d, result);
      for (int64_t row = 0; first + row <= last; ++row) {
        uint16_t* to = out + ((batch * shape.tokens + first + row) * shape.heads + head) * d + channel;
        for (int64_t c = 0; c < count; ++c) {
          const __m512 mean = _mm512_div_ps(result[row][c], _mm512_set1_ps(sums[row]));
          _mm256_storeu_si256((__m256i*)(to + c * LANES), (__m256i)_mm512_cvtneps_pbh(mean));
        }
      }
    }
  }
}

}  // namespace

// query, key, value bf16 with the given strides [batch, head, token] in elements, channels side by side; out bf16
// [batch, tokens, heads, head_dim]. head_dim is a multiple of 16, heads of kv_heads.
extern "C" void causal_attention(const Shape* shape, const Rows* query, const Rows* key, const Rows* value, float scale,
                                 uint16_t* out) {
  const int64_t stride = (shape->tokens + WIDE - 1) / WIDE * WIDE, group = shape->heads / shape->kv_heads;
#pragma omp parallel
  {
    std::vector<uint16_t> keys(stride * shape->head_dim), values(stride * shape->head_dim), weights(ROWS * stride);
    std::vector<float> scores(ROWS * stride);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < shape->batch * shape->kv_heads; ++item) {
      const int64_t batch = item / shape->kv_heads, kv_head = item % shape->kv_heads;
      lay_out(*shape, *key, *value, batch, kv_head, keys.data(), values.data());
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        attend(*shape, *query, scale, batch, head, keys.data(), values.data(), scores.data(), weights.data(), out);
    }
  }
}
