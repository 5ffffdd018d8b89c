// Quantized and dense linears for one CPU family (AVX-512 with BF16 and VNNI), as tiles without threads: who calls gives
// each of its threads a range of output blocks. linear.cpp and the engine's whole step share them.
//
// The one idea: 16 outputs are the 16 lanes of a register. A weight is stored as [outputs / 16][inputs / 4][16][4] bytes, so
// that one instruction multiplies a register of weights with one broadcast step of a token and adds into 16 outputs:
// nothing is summed across lanes, and a weight is decoded once per tile of tokens. Outputs beyond the last full 16 are
// padding in the weight and masked in the store.
//
// 16-bit activations meet the integer instruction as two 8-bit digits. Per token and group of inputs,
// q = round(x * 32639 / max |x|) = 256 * high + low with both digits in [-128, 127], so the whole dot product of a group is
// exact in int32 (for groups of up to 128 inputs: |sum| <= 128 * 32639 * 255 < 2^31) and x is off by at most
// max |x| / 65278 of its group: a 256th of what rounding the largest value of the group to bf16 costs.
//
// Where the variant says so (compute a8) one digit is all there is: q = round(x * 127 / max |x|), half the multiplications,
// and x is off by half a step, which is at most max |x| / 254 of its group: for the largest value twice what bf16 costs, for
// one of a tenth of it 20 times.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// Every loop over a tile must be gone before the compiler decides what lives in registers, or it keeps the sums on the
// stack: half the speed.
#define UNROLL _Pragma("GCC unroll 16")

namespace linear {

constexpr int64_t LANES = 16;

inline int64_t blocks_of(int64_t outputs) { return (outputs + LANES - 1) / LANES; }

inline __mmask16 first_lanes(int64_t count) {
  return count >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

inline void store(uint16_t* out, __mmask16 lanes, __m512 value) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(value);
  lanes == 0xFFFF ? _mm256_storeu_si256((__m256i*)out, rounded) : _mm256_mask_storeu_epi16(out, lanes, rounded);
}
inline void store(float* out, __mmask16 lanes, __m512 value) {
  lanes == 0xFFFF ? _mm512_storeu_ps(out, value) : _mm512_mask_storeu_ps(out, lanes, value);
}
inline void store(int8_t* out, __mmask16 lanes, __m512i value) {
  const __m128i bytes = _mm512_cvtepi32_epi8(value);
  lanes == 0xFFFF ? _mm_storeu_si128((__m128i*)out, bytes) : _mm_mask_storeu_epi8(out, lanes, bytes);
}

inline __m512 load(const uint16_t* bf16, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, bf16)), 16));
}
inline __m512 load(const float* values, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, values); }

// Into the second cache: where a tile's weights end, those of the next begin. One token meets every byte once, in one
// stream, which the processor fetches by itself, and better.
inline void fetch(const void* at) { _mm_prefetch((const char*)at, _MM_HINT_T1); }

inline __m512i broadcast_step(const void* step) {
  int32_t value;
  std::memcpy(&value, step, 4);
  return _mm512_set1_epi32(value);
}

// sum + bytes * signed_bytes, four products to a lane. Not the intrinsic: GCC 12 copies every sum before it adds to it.
inline __m512i add_products(__m512i sum, __m512i bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
  return sum;
}

// Where results go: [tokens, outputs], rows `stride` apart.
template <typename Float>
struct Out {
  Float* data;
  int64_t stride, outputs;
  void put(int64_t token, int64_t block, __m512 value) const {
    store(data + token * stride + block * LANES, first_lanes(outputs - block * LANES), value);
  }
};

// Tokens as whole numbers of N digits, 1 or 2. Inputs beyond the last are zeros, in the digits and so in every sum.
template <int N>
struct Digits {
  static constexpr int LARGEST = N == 1 ? 127 : 127 * 256 + 127;
  int8_t* digit[N];  // [tokens, padded] each, the higher one first
  float* scale;      // [tokens, groups]
  int32_t* sums;     // [tokens, groups], of the whole numbers
  int64_t padded, group;
  int64_t groups() const { return (padded + group - 1) / group; }

  // The rows from `token` on.
  Digits from(int64_t token) const {
    Digits later = *this;
    for (int8_t*& each : later.digit) each += token * padded;
    later.scale += token * groups(), later.sums += token * groups();
    return later;
  }
};

// The memory behind digits.
template <int N>
struct DigitMemory {
  std::vector<int8_t> bytes;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  // Room for `tokens` rows of this shape, and them in it; of an earlier shape nothing is kept.
  Digits<N> rows(int64_t tokens, int64_t padded, int64_t group) {
    Digits<N> rows{{}, nullptr, nullptr, padded, group};
    const auto grown = [](auto& memory, int64_t size) {
      if ((int64_t)memory.size() < size) memory.resize(size);
      return memory.data();
    };
    int8_t* first = grown(bytes, N * tokens * padded);
    for (int n = 0; n < N; ++n) rows.digit[n] = first + n * tokens * padded;
    rows.scale = grown(scales, tokens * rows.groups());
    rows.sums = grown(sums, tokens * rows.groups());
    return rows;
  }
};

// The sum of products of a whole number, from those of its digits.
template <int N>
inline __m512i put_together(const __m512i (&of_digits)[N]) {
  if constexpr (N == 1)
    return of_digits[0];
  else
    return _mm512_add_epi32(_mm512_slli_epi32(of_digits[0], 8), of_digits[1]);
}

// The larger of `largest` and |x|, as bits, which are ordered as the floats are, with NaN above infinity: the instruction
// for floats forgets a NaN when it meets the next number.
inline __m512i larger_bits(__m512i largest, __m512 x) {
  return _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(x)));
}

inline float largest_of(__m512i bits) {
  const int32_t most = _mm512_reduce_max_epi32(bits);
  float value;
  std::memcpy(&value, &most, 4);
  return value;
}

// Groups [first, last) of one token x [inputs], written into row `token`.
template <typename Float, int N>
inline void to_digits(const Float* x, int64_t inputs, const Digits<N>& digits, int64_t token, int64_t first,
                      int64_t last) {
  constexpr int LARGEST = Digits<N>::LARGEST;
  const int64_t groups = digits.groups(), row = token * digits.padded;
  for (int64_t g = first; g < last; ++g) {
    const int64_t begin = g * digits.group, end = std::min(begin + digits.group, digits.padded);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t k = begin; k < end; k += LANES) {
      const __mmask16 lanes = first_lanes(std::max<int64_t>(0, std::min(inputs, end) - k));
      largest = larger_bits(largest, load(x + k, lanes));
    }
    const float most = largest_of(largest);
    const float scale = most / LARGEST;
    const float inverse = scale >= 1.17549435e-38f ? 1.0f / scale : 0.0f;  // of less it would overflow
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = begin; k < end; k += LANES) {
      const __mmask16 lanes = first_lanes(std::max<int64_t>(0, std::min(inputs, end) - k));
      const __mmask16 kept = first_lanes(end - k);
      __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + k, lanes), _mm512_set1_ps(inverse)));
      q = _mm512_min_epi32(_mm512_max_epi32(q, _mm512_set1_epi32(-LARGEST)), _mm512_set1_epi32(LARGEST));
      sum = _mm512_add_epi32(sum, q);
      if constexpr (N == 1) {
        store(digits.digit[0] + row + k, kept, q);
      } else {
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
        store(digits.digit[1] + row + k, kept, low);
        store(digits.digit[0] + row + k, kept, _mm512_srai_epi32(_mm512_sub_epi32(q, low), 8));
      }
    }
    // What is not finite must stay visible: 0 * inf and NaN are NaN.
    digits.scale[token * groups + g] = most <= 3.4e38f ? scale : most;
    digits.sums[token * groups + g] = _mm512_reduce_add_epi32(sum);
  }
}

// Tokens as one int8 code and one scale each, the formula of quantize_tokens: scale = max |x| / 127.5, half to even.
struct Codes {
  uint8_t* codes;  // [tokens, padded], code + 128
  float* scale;    // [tokens]
  int64_t padded;
};

template <typename Float>
inline void to_codes(const Float* x, int64_t inputs, const Codes& codes, int64_t token) {
  uint8_t* out = codes.codes + token * codes.padded;
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < inputs; k += LANES)
    largest = larger_bits(largest, load(x + k, first_lanes(inputs - k)));
  float scale = largest_of(largest) / 127.5f;
  if (scale == 0.0f) scale = 1.1920928955078125e-07f;
  codes.scale[token] = scale;
  for (int64_t k = 0; k < codes.padded; k += LANES) {
    const __mmask16 lanes = first_lanes(std::max<int64_t>(0, inputs - k));
    __m512i code = _mm512_cvtps_epi32(_mm512_div_ps(load(x + k, lanes), _mm512_set1_ps(scale)));
    code = _mm512_min_epi32(_mm512_max_epi32(code, _mm512_set1_epi32(-128)), _mm512_set1_epi32(127));
    store((int8_t*)out + k, first_lanes(codes.padded - k), _mm512_add_epi32(code, _mm512_set1_epi32(128)));
  }
}

// int8 codes, one scale per output. Stored as code + 128, since the instruction multiplies unsigned by signed; the excess,
// 128 times the sum of the inputs, is taken off again, exactly.
struct Int8 {
  static constexpr int STREAMS = 1;  // blocks in a tile of a token of one digit
  const uint8_t* codes;  // [blocks][padded / 4][16][4]
  const float* scale;    // [blocks][16]

  template <int T, int B, int N, typename Out>
  inline void tile(const Digits<N>& x, int64_t token, int64_t block, const Out& out) const {
    const int64_t steps = x.padded / 4, groups = x.groups();
    __m512 sum[T][B] = {};
    for (int64_t g = 0; g < groups; ++g) {
      __m512i products[T][B][N] = {};
      const int64_t end = std::min((g + 1) * x.group / 4, steps);
      for (int64_t step = g * x.group / 4; step < end; ++step) {
        __m512i weight[B];
        UNROLL for (int b = 0; b < B; ++b) {
          const uint8_t* at = codes + ((block + b) * steps + step) * 64;
          weight[b] = _mm512_loadu_si512(at);
          if constexpr (T > 1) fetch(at + B * steps * 64);
        }
        UNROLL for (int t = 0; t < T; ++t) {
          const int64_t at = (token + t) * x.padded + step * 4;
          __m512i digit[N];
          UNROLL for (int n = 0; n < N; ++n) digit[n] = broadcast_step(x.digit[n] + at);
          UNROLL for (int b = 0; b < B; ++b)
            UNROLL for (int n = 0; n < N; ++n) products[t][b][n] = add_products(products[t][b][n], weight[b], digit[n]);
        }
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * groups + g;
        const __m512i excess = _mm512_set1_epi32(x.sums[at] * 128);
        const __m512 factor = _mm512_set1_ps(x.scale[at]);
        UNROLL for (int b = 0; b < B; ++b) {
          const __m512i total = put_together(products[t][b]);
          sum[t][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(total, excess)), factor, sum[t][b]);
        }
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const __m512 factor = _mm512_loadu_ps(scale + (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t) out.put(token + t, block + b, _mm512_mul_ps(sum[t][b], factor));
    }
  }
};

// Codes of up to 4 bits, two per byte, a scale per output and group. Stored as code + 8; the excess, 8 times the sum of the
// group's inputs, and the zero point, are taken off exactly.
template <typename Scale>  // bf16 or float32, as stored
struct Int4 {
  static constexpr int STREAMS = 2;  // its nibbles take longer to part than to read
  const uint8_t* nibbles;    // [blocks][padded / 8][16][4], low nibbles first
  const Scale* scale;        // [blocks][weight groups][16]
  const int8_t* zero_point;  // likewise, or null
  int64_t spread;            // groups of the tokens' digits per weight group

  template <int T, int B, int N, typename Out>
  inline void tile(const Digits<N>& x, int64_t token, int64_t block, const Out& out) const {
    const int64_t pairs = x.padded / 8, groups = x.groups(), weight_groups = (groups + spread - 1) / spread;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 sum[T][B] = {};
    for (int64_t g = 0; g < groups; ++g) {
      __m512i products[T][B][N] = {};
      const int64_t end = std::min((g + 1) * x.group / 8, pairs);
      for (int64_t pair = g * x.group / 8; pair < end; ++pair) {
        __m512i even[B], odd[B];
        UNROLL for (int b = 0; b < B; ++b) {
          const uint8_t* at = nibbles + ((block + b) * pairs + pair) * 64;
          const __m512i both = _mm512_loadu_si512(at);
          fetch(at + B * pairs * 64);
          even[b] = _mm512_and_si512(both, nibble);
          odd[b] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        }
        UNROLL for (int t = 0; t < T; ++t) {
          const int64_t at = (token + t) * x.padded + pair * 8;
          __m512i digit[N], next[N];
          UNROLL for (int n = 0; n < N; ++n) digit[n] = broadcast_step(x.digit[n] + at);
          UNROLL for (int n = 0; n < N; ++n) next[n] = broadcast_step(x.digit[n] + at + 4);
          UNROLL for (int b = 0; b < B; ++b) {
            UNROLL for (int n = 0; n < N; ++n) products[t][b][n] = add_products(products[t][b][n], even[b], digit[n]);
            UNROLL for (int n = 0; n < N; ++n) products[t][b][n] = add_products(products[t][b][n], odd[b], next[n]);
          }
        }
      }
      const int64_t weight_group = spread == 1 ? g : g / spread;
      UNROLL for (int b = 0; b < B; ++b) {
        const int64_t of_block = ((block + b) * weight_groups + weight_group) * LANES;
        const __m512 factor = load(scale + of_block, 0xFFFF);
        __m512i offset = _mm512_set1_epi32(8);
        if (zero_point != nullptr)
          offset = _mm512_add_epi32(offset,
                                    _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(zero_point + of_block))));
        UNROLL for (int t = 0; t < T; ++t) {
          const int64_t at = (token + t) * groups + g;
          const __m512i excess = _mm512_mullo_epi32(offset, _mm512_set1_epi32(x.sums[at]));
          const __m512i total = put_together(products[t][b]);
          const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(total, excess));
          sum[t][b] = _mm512_fmadd_ps(_mm512_mul_ps(exact, _mm512_set1_ps(x.scale[at])), factor, sum[t][b]);
        }
      }
    }
    UNROLL for (int t = 0; t < T; ++t)
      UNROLL for (int b = 0; b < B; ++b) out.put(token + t, block + b, sum[t][b]);
  }
};

// int8 codes times int8 tokens, one scale for each: the integer product is exact. Tokens are stored as code + 128; the
// excess, 128 times the sum of the weights, is taken off again, exactly.
struct DynamicInt8 {
  const int8_t* codes;         // [blocks][padded / 4][16][4]
  const float* scale;          // [blocks][16]
  const int32_t* weight_sums;  // [blocks][16]

  template <int T, int B, typename Out>
  inline void tile(const Codes& x, int64_t token, int64_t block, const Out& out) const {
    const int64_t steps = x.padded / 4;
    __m512i sum[T][B] = {};
    for (int64_t step = 0; step < steps; ++step) {
      __m512i weight[B];
      UNROLL for (int b = 0; b < B; ++b) {
        const int8_t* at = codes + ((block + b) * steps + step) * 64;
        weight[b] = _mm512_loadu_si512(at);
        if constexpr (T > 1) fetch(at + B * steps * 64);
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const __m512i four = broadcast_step(x.codes + (token + t) * x.padded + step * 4);
        UNROLL for (int b = 0; b < B; ++b) sum[t][b] = add_products(sum[t][b], four, weight[b]);
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(weight_sums + (block + b) * LANES), 7);
      const __m512 factor = _mm512_loadu_ps(scale + (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t) {
        const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[t][b], excess));
        out.put(token + t, block + b,
                _mm512_mul_ps(_mm512_mul_ps(exact, _mm512_set1_ps(x.scale[token + t])), factor));
      }
    }
  }
};

// All tokens for B neighbouring blocks of outputs, T at a time.
template <int T, int B, typename Kernel, typename X, typename Out>
inline void all_tokens(const Kernel& kernel, const X& x, int64_t tokens, int64_t block, const Out& out) {
  int64_t token = 0;
  for (; token + T <= tokens; token += T) kernel.template tile<T, B>(x, token, block, out);
  if constexpr (T > 6)
    for (; token + 4 <= tokens; token += 4) kernel.template tile<4, B>(x, token, block, out);
  if constexpr (T > 2)
    for (; token + 2 <= tokens; token += 2) kernel.template tile<2, B>(x, token, block, out);
  for (; token < tokens; ++token) kernel.template tile<1, B>(x, token, block, out);
}

template <int T, int B, typename Kernel, typename X, typename Out>
inline void tiles_of(const Kernel& kernel, const X& x, int64_t tokens, int64_t begin, int64_t end, const Out& out) {
  int64_t block = begin;
  for (; block + B <= end; block += B) all_tokens<T, B>(kernel, x, tokens, block, out);
  for (; block < end; ++block) all_tokens<T, 1>(kernel, x, tokens, block, out);
}

// Blocks [begin, end) of the outputs for all tokens. How many tokens and blocks make a tile, by measurement: one token is
// bound by memory, which likes one stream; several are bound by what fits into 32 registers of sums and digits.
template <typename Kernel, typename Out>
inline void some_blocks(const Kernel& kernel, const Digits<1>& x, int64_t tokens, int64_t begin, int64_t end,
                        const Out& out) {
  if (tokens == 1)
    tiles_of<1, Kernel::STREAMS>(kernel, x, tokens, begin, end, out);
  else
    tiles_of<8, 2>(kernel, x, tokens, begin, end, out);
}

template <typename Kernel, typename Out>
inline void some_blocks(const Kernel& kernel, const Digits<2>& x, int64_t tokens, int64_t begin, int64_t end,
                        const Out& out) {
  if (tokens == 1)
    tiles_of<1, 1>(kernel, x, tokens, begin, end, out);
  else if (tokens < 4)
    tiles_of<2, 2>(kernel, x, tokens, begin, end, out);
  else
    tiles_of<4, 2>(kernel, x, tokens, begin, end, out);
}

template <typename Out>
inline void some_blocks(const DynamicInt8& kernel, const Codes& x, int64_t tokens, int64_t begin, int64_t end,
                        const Out& out) {
  if (tokens == 1)
    tiles_of<1, 1>(kernel, x, tokens, begin, end, out);
  else
    tiles_of<6, 3>(kernel, x, tokens, begin, end, out);
}

}  // namespace linear
