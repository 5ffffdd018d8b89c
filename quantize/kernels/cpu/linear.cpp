// The quantized linears of linear.h behind plain C symbols, with threads. Built on the machine that runs it (native.py).

#include "linear.h"

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

// Blocks of `kernel` for bf16 tokens in N digits, groups of `group` inputs, rows padded to a multiple of 8.
template <int N, typename Kernel>
void run_digits(const Kernel& kernel, const uint16_t* x, int64_t group, uint16_t* out, int64_t tokens, int64_t outputs,
                int64_t inputs) {
  DigitMemory<N> memory;
  const Digits<N> digits = memory.rows(tokens, (inputs + 7) / 8 * 8, group);
#pragma omp parallel for schedule(static) if (tokens * inputs > 100000)
  for (int64_t token = 0; token < tokens; ++token)
    to_digits(x + token * inputs, inputs, digits, token, 0, digits.groups());
  run(kernel, digits, tokens, outputs, inputs, out);
}

template <typename Kernel>
void run_digits(const Kernel& kernel, const uint16_t* x, int64_t digits, int64_t group, uint16_t* out, int64_t tokens,
                int64_t outputs, int64_t inputs) {
  (digits == 1 ? run_digits<1, Kernel> : run_digits<2, Kernel>)(kernel, x, group, out, tokens, outputs, inputs);
}

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

// digits: how many a token's inputs become, 1 or 2, with a scale per `group` of them.
void quantgate_int8(const uint16_t* x, const uint8_t* codes, const float* scale, int64_t digits, int64_t group,
                    uint16_t* out, int64_t tokens, int64_t outputs, int64_t inputs) {
  run_digits(Int8{codes, scale}, x, digits, group, out, tokens, outputs, inputs);
}

// scale: bf16 or float32; zero_point: null when symmetric. group: of the tokens' digits, `spread` to a weight's group.
void quantgate_int4(const uint16_t* x, const uint8_t* nibbles, const void* scale, int64_t scale_is_bf16,
                    const int8_t* zero_point, int64_t digits, int64_t group, int64_t spread, uint16_t* out,
                    int64_t tokens, int64_t outputs, int64_t inputs) {
  if (scale_is_bf16)
    run_digits(Int4<uint16_t>{nibbles, (const uint16_t*)scale, zero_point, spread}, x, digits, group, out, tokens,
               outputs, inputs);
  else
    run_digits(Int4<float>{nibbles, (const float*)scale, zero_point, spread}, x, digits, group, out, tokens, outputs,
               inputs);
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
