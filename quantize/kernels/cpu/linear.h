// Quantized linears as tiles without threads: who calls gives each of its threads a range of output blocks. linear.cpp and
// the engine's whole step share them.
//
// The one idea: 16 outputs are 16 lanes (lanes.h). A weight is stored as [outputs / 16][inputs / 4][16][4] bytes, so
// that one instruction multiplies 16 lanes of weights with one broadcast step of a token and adds into 16 outputs:
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

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

// Every loop over a tile must be gone before the compiler decides what lives in registers, or it keeps the sums on the
// stack: half the speed.
#define UNROLL _Pragma("GCC unroll 16")

namespace linear {

using namespace lanes;

inline int64_t blocks_of(int64_t outputs) { return (outputs + LANES - 1) / LANES; }

// Into the second cache: where a tile's weights end, those of the next begin. One token meets every byte once, in one
// stream, which the processor fetches by itself, and better.
inline void fetch(const void* at) { _mm_prefetch((const char*)at, _MM_HINT_T1); }

inline Ints broadcast_step(const void* step) {
  int32_t value;
  std::memcpy(&value, step, 4);
  return all(value);
}

// Where results go: [tokens, outputs], rows `stride` apart.
template <typename Float>
struct Out {
  Float* data;
  int64_t stride, outputs;
  void put(int64_t token, int64_t block, Floats value) const {
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
inline Ints put_together(const Ints (&of_digits)[N]) {
  if constexpr (N == 1)
    return of_digits[0];
  else
    return add(shift_left<8>(of_digits[0]), of_digits[1]);
}

// The larger of `most` and |x|, as bits, which are ordered as the floats are, with NaN above infinity: the instruction
// for floats forgets a NaN when it meets the next number.
inline Ints larger_bits(Ints most, Floats x) {
  return larger(most, bits(magnitude(x)));
}

inline float largest_of(Ints bits) {
  const int32_t most = largest(bits);
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
    Ints most_bits = no_ints();
    for (int64_t k = begin; k < end; k += LANES) {
      const Mask there = first_lanes(std::max<int64_t>(0, std::min(inputs, end) - k));
      most_bits = larger_bits(most_bits, load(x + k, there));
    }
    const float most = largest_of(most_bits);
    const float scale = most / LARGEST;
    const float inverse = scale >= 1.17549435e-38f ? 1.0f / scale : 0.0f;  // of less it would overflow
    Ints total = no_ints();
    for (int64_t k = begin; k < end; k += LANES) {
      const Mask there = first_lanes(std::max<int64_t>(0, std::min(inputs, end) - k)), kept = first_lanes(end - k);
      Ints q = to_ints(multiply(load(x + k, there), all(inverse)));
      q = smaller(larger(q, all(-LARGEST)), all(LARGEST));
      total = add(total, q);
      if constexpr (N == 1) {
        store(digits.digit[0] + row + k, kept, q);
      } else {
        const Ints low = shift_right<24>(shift_left<24>(q));
        store(digits.digit[1] + row + k, kept, low);
        store(digits.digit[0] + row + k, kept, shift_right<8>(subtract(q, low)));
      }
    }
    // What is not finite must stay visible: 0 * inf and NaN are NaN.
    digits.scale[token * groups + g] = most <= 3.4e38f ? scale : most;
    digits.sums[token * groups + g] = sum(total);
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
  Ints most = no_ints();
  for (int64_t k = 0; k < inputs; k += LANES) most = larger_bits(most, load(x + k, first_lanes(inputs - k)));
  float scale = largest_of(most) / 127.5f;
  if (scale == 0.0f) scale = 1.1920928955078125e-07f;
  codes.scale[token] = scale;
  for (int64_t k = 0; k < codes.padded; k += LANES) {
    const Mask there = first_lanes(std::max<int64_t>(0, inputs - k));
    Ints code = to_ints(divide(load(x + k, there), all(scale)));
    code = smaller(larger(code, all(-128)), all(127));
    store((int8_t*)out + k, first_lanes(codes.padded - k), add(code, all(128)));
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
    Floats sum[T][B] = {};
    for (int64_t g = 0; g < groups; ++g) {
      Ints products[T][B][N] = {};
      const int64_t end = std::min((g + 1) * x.group / 4, steps);
      for (int64_t step = g * x.group / 4; step < end; ++step) {
        Ints weight[B];
        UNROLL for (int b = 0; b < B; ++b) {
          const uint8_t* at = codes + ((block + b) * steps + step) * 64;
          weight[b] = load_bits(at);
          if constexpr (T > 1) fetch(at + B * steps * 64);
        }
        UNROLL for (int t = 0; t < T; ++t) {
          const int64_t at = (token + t) * x.padded + step * 4;
          Ints digit[N];
          UNROLL for (int n = 0; n < N; ++n) digit[n] = broadcast_step(x.digit[n] + at);
          UNROLL for (int b = 0; b < B; ++b)
            UNROLL for (int n = 0; n < N; ++n) products[t][b][n] = add_products(products[t][b][n], weight[b], digit[n]);
        }
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * groups + g;
        const Ints excess = all(x.sums[at] * 128);
        const Floats factor = all(x.scale[at]);
        UNROLL for (int b = 0; b < B; ++b) {
          const Ints total = put_together(products[t][b]);
          sum[t][b] = multiply_add(to_floats(subtract(total, excess)), factor, sum[t][b]);
        }
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const Floats factor = load(scale + (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t) out.put(token + t, block + b, multiply(sum[t][b], factor));
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
    Floats sum[T][B] = {};
    for (int64_t g = 0; g < groups; ++g) {
      Ints products[T][B][N] = {};
      const int64_t end = std::min((g + 1) * x.group / 8, pairs);
      for (int64_t pair = g * x.group / 8; pair < end; ++pair) {
        Ints even[B], odd[B];
        UNROLL for (int b = 0; b < B; ++b) {
          const uint8_t* at = nibbles + ((block + b) * pairs + pair) * 64;
          const Ints both = load_bits(at);
          fetch(at + B * pairs * 64);
          even[b] = low_nibbles(both);
          odd[b] = high_nibbles(both);
        }
        UNROLL for (int t = 0; t < T; ++t) {
          const int64_t at = (token + t) * x.padded + pair * 8;
          Ints digit[N], next[N];
          UNROLL for (int n = 0; n < N; ++n) digit[n] = broadcast_step(x.digit[n] + at);
          UNROLL for (int n = 0; n < N; ++n) next[n] = broadcast_step(x.digit[n] + at + 4);
          UNROLL for (int b = 0; b < B; ++b) {
            Ints* sums = products[t][b];
            UNROLL for (int n = 0; n < N; ++n) sums[n] = add_products_of_nibbles(sums[n], even[b], digit[n]);
            UNROLL for (int n = 0; n < N; ++n) sums[n] = add_products_of_nibbles(sums[n], odd[b], next[n]);
          }
        }
      }
      const int64_t weight_group = spread == 1 ? g : g / spread;
      UNROLL for (int b = 0; b < B; ++b) {
        const int64_t of_block = ((block + b) * weight_groups + weight_group) * LANES;
        const Floats factor = load(scale + of_block);
        Ints offset = all(8);
        if (zero_point != nullptr) offset = add(offset, load(zero_point + of_block));
        UNROLL for (int t = 0; t < T; ++t) {
          const int64_t at = (token + t) * groups + g;
          const Ints excess = multiply(offset, all(x.sums[at]));
          const Floats exact = to_floats(subtract(put_together(products[t][b]), excess));
          sum[t][b] = multiply_add(multiply(exact, all(x.scale[at])), factor, sum[t][b]);
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
    Ints sum[T][B] = {};
    for (int64_t step = 0; step < steps; ++step) {
      Ints weight[B];
      UNROLL for (int b = 0; b < B; ++b) {
        const int8_t* at = codes + ((block + b) * steps + step) * 64;
        weight[b] = load_bits(at);
        if constexpr (T > 1) fetch(at + B * steps * 64);
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const Ints four = broadcast_step(x.codes + (token + t) * x.padded + step * 4);
        UNROLL for (int b = 0; b < B; ++b) sum[t][b] = add_products(sum[t][b], four, weight[b]);
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const Ints excess = shift_left<7>(load_bits(weight_sums + (block + b) * LANES));
      const Floats factor = load(scale + (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t) {
        const Floats exact = to_floats(subtract(sum[t][b], excess));
        out.put(token + t, block + b, multiply(multiply(exact, all(x.scale[token + t])), factor));
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
// bound by memory, which likes one stream; several are bound by what fits into the registers of sums and digits.
template <typename Kernel, typename Out>
inline void some_blocks(const Kernel& kernel, const Digits<1>& x, int64_t tokens, int64_t begin, int64_t end,
                        const Out& out) {
  if (tokens == 1)
    tiles_of<1, Kernel::STREAMS>(kernel, x, tokens, begin, end, out);
  else
    tiles_of<WIDE ? 8 : 4, WIDE ? 2 : 1>(kernel, x, tokens, begin, end, out);
}

template <typename Kernel, typename Out>
inline void some_blocks(const Kernel& kernel, const Digits<2>& x, int64_t tokens, int64_t begin, int64_t end,
                        const Out& out) {
  if (tokens == 1)
    tiles_of<1, 1>(kernel, x, tokens, begin, end, out);
  else if (tokens < 4 || !WIDE)
    tiles_of<2, WIDE ? 2 : 1>(kernel, x, tokens, begin, end, out);
  else
    tiles_of<4, 2>(kernel, x, tokens, begin, end, out);
}

template <typename Out>
inline void some_blocks(const DynamicInt8& kernel, const Codes& x, int64_t tokens, int64_t begin, int64_t end,
                        const Out& out) {
  if (tokens == 1)
    tiles_of<1, 1>(kernel, x, tokens, begin, end, out);
  else
    tiles_of<WIDE ? 6 : 4, WIDE ? 3 : 1>(kernel, x, tokens, begin, end, out);
}

}  // namespace linear
