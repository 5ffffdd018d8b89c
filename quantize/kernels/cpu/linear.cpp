// The quantized linears of linear.h behind plain C symbols, with threads. Built on the machine that runs it (native.py).

#include "linear.h"

#include <vector>

namespace {

using namespace linear;

template <typename Kernel, typename X, typename Float>
void run(const Kernel& kernel, const X& x, int64_t tokens, int64_t outputs, int64_t inputs, Float* out) {
  const Out<Float> rows{out, outputs, outputs};
  const int64_t blocks = blocks_of(outputs);
  // Pieces of work small enough that a piece's weights stay in cache while all tokens meet them.
  constexpr int64_t PIECE = 6;
#pragma omp parallel for schedule(static) if (tokens * outputs * inputs > 200000)
  for (int64_t begin = 0; begin < blocks; begin += PIECE)
    some_blocks(kernel, x, tokens, begin, std::min(blocks, begin + PIECE), rows);
}

// bf16 tokens in two digits, groups of `group` inputs, rows padded to a multiple of 8.
struct DigitRows {
  std::vector<int8_t> bytes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  Digits digits;

  DigitRows(const uint16_t* x, int64_t tokens, int64_t inputs, int64_t group) {
    const int64_t padded = (inputs + 7) / 8 * 8, groups = (padded + group - 1) / group;
    bytes.resize(2 * tokens * padded);
    scales.resize(tokens * groups);
    sums.resize(tokens * groups);
    digits = {bytes.data(), bytes.data() + tokens * padded, scales.data(), sums.data(), padded, group};
#pragma omp parallel for schedule(static) if (tokens * inputs > 100000)
    for (int64_t token = 0; token < tokens; ++token) to_digits(x + token * inputs, inputs, digits, token, 0, groups);
  }
};

template <typename Float>
void dynamic_int8(const Float* x, const int8_t* codes, const float* scale, const int32_t* weight_sums, Float* out,
                  int64_t tokens, int64_t outputs, int64_t inputs) {
  const int64_t padded = (inputs + 3) / 4 * 4;
  std::vector<uint8_t> token_codes(tokens * padded);
  std::vector<float> token_scales(tokens);
  const Codes rows{token_codes.data(), token_scales.data(), padded};
#pragma omp parallel for schedule(static) if (tokens * inputs > 100000)
  for (int64_t token = 0; token < tokens; ++token) to_codes(x + token * inputs, inputs, rows, token);
  run(DynamicInt8{codes, scale, weight_sums}, rows, tokens, outputs, inputs, out);
}

}  // namespace

extern "C" {

void quantgate_int8(const uint16_t* x, const uint8_t* codes, const float* scale, int64_t group, uint16_t* out,
                    int64_t tokens, int64_t outputs, int64_t inputs) {
  const DigitRows rows(x, tokens, inputs, group);
  run(Int8{codes, scale}, rows.digits, tokens, outputs, inputs, out);
}

// scale: bf16 or float32; zero_point: null when symmetric. group: of the tokens' digits, `spread` to a weight's group.
void quantgate_int4(const uint16_t* x, const uint8_t* nibbles, const void* scale, int64_t scale_is_bf16,
                    const int8_t* zero_point, int64_t group, int64_t spread, uint16_t* out, int64_t tokens,
                    int64_t outputs, int64_t inputs) {
  const DigitRows rows(x, tokens, inputs, group);
  if (scale_is_bf16)
    run(Int4<uint16_t>{nibbles, (const uint16_t*)scale, zero_point, spread}, rows.digits, tokens, outputs, inputs, out);
  else
    run(Int4<float>{nibbles, (const float*)scale, zero_point, spread}, rows.digits, tokens, outputs, inputs, out);
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
