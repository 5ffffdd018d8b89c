// Quantized linears for one CPU family: AVX-512 with BF16 and VNNI. Built on the machine that runs it (see native.py).
//
// The one idea: 16 outputs are the 16 lanes of a register. A weight is stored as [outputs / 16][inputs / step][16][step],
// step = 2 for bf16 products and 4 for int8 ones, so that one instruction multiplies a register of weights with one
// broadcast step of a token and adds into 16 outputs. Nothing is summed across lanes, and a weight is decoded once per
// tile of tokens. Outputs beyond the last full 16 are padding in the weight and masked in the store.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

// Every loop over a tile must be gone before the compiler decides what lives in registers, or it keeps the sums on the
// stack: half the speed.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int64_t LANES = 16;

struct Shape {
  int64_t tokens, outputs, inputs;
  int64_t blocks() const { return (outputs + LANES - 1) / LANES; }
};

inline void store(uint16_t* out, __mmask16 lanes, __m512 value) {
  _mm256_mask_storeu_epi16(out, lanes, (__m256i)_mm512_cvtneps_pbh(value));
}

inline void store(float* out, __mmask16 lanes, __m512 value) { _mm512_mask_storeu_ps(out, lanes, value); }

inline __m512 load(const uint16_t* bf16, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, bf16)), 16));
}

inline __m512 load(const float* values, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, values); }

inline __mmask16 first_lanes(int64_t count) {
  return count >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512i broadcast_step(const void* step) {
  int32_t value;
  std::memcpy(&value, step, 4);
  return _mm512_set1_epi32(value);
}

// int8 codes, one scale per output, applied at the end.
struct Int8 {
  const int8_t* codes;  // [blocks][inputs / 2][16][2]
  const float* scale;   // [blocks][16]
  const uint16_t* x;    // bf16 [tokens, inputs]
  uint16_t* out;        // bf16 [tokens, outputs]

  template <int T, int B>
  void tile(const Shape& shape, int64_t token, int64_t block) const {
    const int64_t steps = shape.inputs / 2;
    __m512 sum[T][B];
    UNROLL for (int t = 0; t < T; ++t)
      UNROLL for (int b = 0; b < B; ++b) sum[t][b] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step) {
      __m512bh weight[B];
      UNROLL for (int b = 0; b < B; ++b) {
        const int8_t* at = codes + ((block + b) * steps + step) * 32;
        const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
        const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(at + 16)));
        weight[b] = _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const __m512bh pair = (__m512bh)broadcast_step(x + (token + t) * shape.inputs + step * 2);
        UNROLL for (int b = 0; b < B; ++b) sum[t][b] = _mm512_dpbf16_ps(sum[t][b], weight[b], pair);
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const __mmask16 lanes = first_lanes(shape.outputs - (block + b) * LANES);
      const __m512 factor = _mm512_loadu_ps(scale + (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t)
        store(out + (token + t) * shape.outputs + (block + b) * LANES, lanes, _mm512_mul_ps(sum[t][b], factor));
    }
  }
};

// Codes of up to 4 bits, two per byte. A table turns nibbles into bf16; each group is summed by itself and then scaled,
// so no weight is ever rounded. A group's zero point is taken off as zero_point times the sum of the group's inputs.
template <typename Scale>  // bf16 or float32, as stored
struct Int4 {
  const uint8_t* nibbles;    // [blocks][inputs / 2][16], code + 8, the even input in the low nibble
  const Scale* scale;        // [blocks][groups][16]
  const int8_t* zero_point;  // likewise, or null
  const float* group_sums;   // [tokens, groups], when there are zero points
  int64_t group_size;
  const uint16_t* x;
  uint16_t* out;

  template <int T, int B>
  void tile(const Shape& shape, int64_t token, int64_t block) const {
    const int64_t steps = shape.inputs / 2, groups = shape.inputs / group_size, group_steps = group_size / 2;
    alignas(64) uint16_t values[32];
    for (int index = 0; index < 32; ++index) {
      const float value = static_cast<float>((index & 15) - 8);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      values[index] = static_cast<uint16_t>(bits >> 16);
    }
    const __m512i table = _mm512_load_si512(values);
    __m512 sum[T][B];
    UNROLL for (int t = 0; t < T; ++t)
      UNROLL for (int b = 0; b < B; ++b) sum[t][b] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; ++group) {
      __m512 part[T][B];
      UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int b = 0; b < B; ++b) part[t][b] = _mm512_setzero_ps();
      for (int64_t step = group * group_steps; step < (group + 1) * group_steps; ++step) {
        __m512bh weight[B];
        UNROLL for (int b = 0; b < B; ++b) {
          const uint8_t* at = nibbles + ((block + b) * steps + step) * LANES;
          const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
          // Per lane: the low word's index is the low nibble (bit 4 is noise, the table repeats), the high word's the
          // high nibble.
          const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
          weight[b] = (__m512bh)_mm512_permutexvar_epi16(index, table);
        }
        UNROLL for (int t = 0; t < T; ++t) {
          const __m512bh pair = (__m512bh)broadcast_step(x + (token + t) * shape.inputs + step * 2);
          UNROLL for (int b = 0; b < B; ++b) part[t][b] = _mm512_dpbf16_ps(part[t][b], weight[b], pair);
        }
      }
      UNROLL for (int b = 0; b < B; ++b) {
        const int64_t at = ((block + b) * groups + group) * LANES;
        if (zero_point != nullptr) {
          const __m128i zeros = _mm_loadu_si128((const __m128i*)(zero_point + at));
          const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(zeros));
          UNROLL for (int t = 0; t < T; ++t) {
            const __m512 inputs_sum = _mm512_set1_ps(group_sums[(token + t) * groups + group]);
            part[t][b] = _mm512_fnmadd_ps(inputs_sum, zero, part[t][b]);
          }
        }
        const __m512 factor = load(scale + at, 0xFFFF);
        UNROLL for (int t = 0; t < T; ++t) sum[t][b] = _mm512_fmadd_ps(part[t][b], factor, sum[t][b]);
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const __mmask16 lanes = first_lanes(shape.outputs - (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t)
        store(out + (token + t) * shape.outputs + (block + b) * LANES, lanes, sum[t][b]);
    }
  }
};

// int8 codes times int8 tokens. Tokens are stored as code + 128 (the instruction multiplies unsigned by signed), which
// adds 128 times the sum of the weights: taken off again, exactly.
template <typename Float>
struct DynamicInt8 {
  const int8_t* codes;          // [blocks][inputs / 4][16][4]
  const float* scale;           // [blocks][16]
  const int32_t* weight_sums;   // [blocks][16]
  const uint8_t* x;             // [tokens, inputs], code + 128
  const float* token_scale;     // [tokens]
  Float* out;                   // [tokens, outputs]

  template <int T, int B>
  void tile(const Shape& shape, int64_t token, int64_t block) const {
    const int64_t steps = shape.inputs / 4;
    __m512i sum[T][B];
    UNROLL for (int t = 0; t < T; ++t)
      UNROLL for (int b = 0; b < B; ++b) sum[t][b] = _mm512_setzero_si512();
    for (int64_t step = 0; step < steps; ++step) {
      __m512i weight[B];
      UNROLL for (int b = 0; b < B; ++b) weight[b] = _mm512_loadu_si512(codes + ((block + b) * steps + step) * 64);
      UNROLL for (int t = 0; t < T; ++t) {
        const __m512i four = broadcast_step(x + (token + t) * shape.inputs + step * 4);
        UNROLL for (int b = 0; b < B; ++b) sum[t][b] = _mm512_dpbusd_epi32(sum[t][b], four, weight[b]);
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      const __mmask16 lanes = first_lanes(shape.outputs - (block + b) * LANES);
      const __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(weight_sums + (block + b) * LANES), 7);
      const __m512 factor = _mm512_loadu_ps(scale + (block + b) * LANES);
      UNROLL for (int t = 0; t < T; ++t) {
        const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[t][b], excess));
        const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(exact, _mm512_set1_ps(token_scale[token + t])), factor);
        store(out + (token + t) * shape.outputs + (block + b) * LANES, lanes, scaled);
      }
    }
  }
};

template <typename Kernel, int T, int B>
void tokens_by_tile(const Kernel& kernel, const Shape& shape, int64_t& token, int64_t block) {
  for (; token + T <= shape.tokens; token += T) kernel.template tile<T, B>(shape, token, block);
}

// All tokens, T at a time, for B neighbouring blocks of outputs.
template <typename Kernel, int T, int B>
void all_tokens(const Kernel& kernel, const Shape& shape, int64_t block) {
  int64_t token = 0;
  tokens_by_tile<Kernel, T, B>(kernel, shape, token, block);
  if constexpr (T > 4) tokens_by_tile<Kernel, 4, B>(kernel, shape, token, block);
  if constexpr (T > 2) tokens_by_tile<Kernel, 2, B>(kernel, shape, token, block);
  tokens_by_tile<Kernel, 1, B>(kernel, shape, token, block);
}

template <int T, int B, typename Kernel>
void all_blocks(const Kernel& kernel, const Shape& shape) {
  const int64_t blocks = shape.blocks(), tiles = (blocks + B - 1) / B;
  const bool worth_threads = shape.tokens * shape.outputs * shape.inputs > 200000;
#pragma omp parallel for schedule(static) if (worth_threads)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = tile * B;
    if (first + B <= blocks) {
      all_tokens<Kernel, T, B>(kernel, shape, first);
    } else {
      for (int64_t block = first; block < blocks; ++block) all_tokens<Kernel, T, 1>(kernel, shape, block);
    }
  }
}

// How many tokens and blocks make a tile, by measurement: with few tokens more blocks at once hide the latency of the
// products, and beyond 16 registers of sums GCC 12 begins to spill them.
void run(const Int8& kernel, const Shape& shape) {
  if (shape.tokens <= 4) {
    all_blocks<4, 4>(kernel, shape);
  } else {
    all_blocks<8, 2>(kernel, shape);
  }
}

// Its sums take two registers each, one for the group.
template <typename Scale>
void run(const Int4<Scale>& kernel, const Shape& shape) {
  if (shape.tokens <= 4) {
    all_blocks<4, 3>(kernel, shape);
  } else {
    all_blocks<8, 1>(kernel, shape);
  }
}

template <typename Float>
void run(const DynamicInt8<Float>& kernel, const Shape& shape) {
  all_blocks<4, 4>(kernel, shape);
}

// Symmetric int8 per token, the formula of quantize_tokens: scale = max |x| / 127.5, round half to even.
template <typename Float>
void quantize_tokens(const Float* x, int64_t tokens, int64_t inputs, int64_t padded, uint8_t* codes, float* scales) {
#pragma omp parallel for schedule(static) if (tokens * inputs > 100000)
  for (int64_t token = 0; token < tokens; ++token) {
    const Float* row = x + token * inputs;
    uint8_t* out = codes + token * padded;
    __m512 largest = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += LANES)
      largest = _mm512_max_ps(largest, _mm512_abs_ps(load(row + k, first_lanes(inputs - k))));
    float scale = _mm512_reduce_max_ps(largest) / 127.5f;
    if (scale == 0.0f) scale = 1.1920928955078125e-07f;
    scales[token] = scale;
    for (int64_t k = 0; k < padded; k += LANES) {
      const __m512 steps = _mm512_div_ps(load(row + k, first_lanes(inputs - k)), _mm512_set1_ps(scale));
      __m512i code = _mm512_cvtps_epi32(steps);
      code = _mm512_min_epi32(_mm512_max_epi32(code, _mm512_set1_epi32(-128)), _mm512_set1_epi32(127));
      const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(code, _mm512_set1_epi32(128)));
      _mm_mask_storeu_epi8(out + k, first_lanes(padded - k), bytes);
    }
  }
}

// Sums of consecutive groups of bf16 values; groups are even.
void sum_groups(const uint16_t* x, int64_t count, int64_t group_size, float* sums) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
  for (int64_t group = 0; group * group_size < count; ++group) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < group_size; k += 32) {
      const int64_t left = group_size - k;
      const __mmask32 lanes = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1;
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(lanes, x + group * group_size + k), ones);
    }
    sums[group] = _mm512_reduce_add_ps(sum);
  }
}

template <typename Float>
void dynamic_int8(const Float* x, const int8_t* codes, const float* scale, const int32_t* weight_sums, Float* out,
                  int64_t tokens, int64_t outputs, int64_t inputs) {
  thread_local std::vector<uint8_t> token_codes;
  thread_local std::vector<float> token_scales;
  const int64_t padded = (inputs + 3) / 4 * 4;
  token_codes.resize(tokens * padded);
  token_scales.resize(tokens);
  quantize_tokens(x, tokens, inputs, padded, token_codes.data(), token_scales.data());
  const DynamicInt8<Float> kernel{codes, scale, weight_sums, token_codes.data(), token_scales.data(), out};
  run(kernel, Shape{tokens, outputs, padded});
}

}  // namespace

extern "C" {

void quantgate_int8(const uint16_t* x, const int8_t* codes, const float* scale, uint16_t* out, int64_t tokens,
                    int64_t outputs, int64_t inputs) {
  run(Int8{codes, scale, x, out}, Shape{tokens, outputs, inputs});
}

// scale: bf16 or float32; zero_point: null when symmetric.
void quantgate_int4(const uint16_t* x, const uint8_t* nibbles, const void* scale, int64_t scale_is_bf16,
                    const int8_t* zero_point, int64_t group_size, uint16_t* out, int64_t tokens, int64_t outputs,
                    int64_t inputs) {
  thread_local std::vector<float> sums;
  if (zero_point != nullptr) {
    sums.resize(tokens * (inputs / group_size));
    sum_groups(x, tokens * inputs, group_size, sums.data());
  }
  const Shape shape{tokens, outputs, inputs};
  if (scale_is_bf16) {
    run(Int4<uint16_t>{nibbles, (const uint16_t*)scale, zero_point, sums.data(), group_size, x, out}, shape);
  } else {
    run(Int4<float>{nibbles, (const float*)scale, zero_point, sums.data(), group_size, x, out}, shape);
  }
}

void quantgate_dynamic_int8_bf16(const uint16_t* x, const int8_t* codes, const float* scale, const int32_t* weight_sums,
                                 uint16_t* out, int64_t tokens, int64_t outputs, int64_t inputs) {
  dynamic_int8(x, codes, scale, weight_sums, out, tokens, outputs, inputs);
}

void quantgate_dynamic_int8_fp32(const float* x, const int8_t* codes, const float* scale, const int32_t* weight_sums,
                                 float* out, int64_t tokens, int64_t outputs, int64_t inputs) {
  dynamic_int8(x, codes, scale, weight_sums, out, tokens, outputs, inputs);
}
}
