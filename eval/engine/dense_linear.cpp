// The bfloat16 linears of dense_linear.h behind plain C symbols, with threads.

#include "dense_linear.h"

// x [tokens, inputs], w [outputs, inputs], bias [outputs] or null, y [tokens, outputs]: all bfloat16.
extern "C" void dense_linear(const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, int64_t tokens,
                             int64_t outputs, int64_t inputs, int32_t num_threads) {
  constexpr int64_t OUTPUTS = 24, TOKENS = 8;
  const dense::Problem<dense::Bf16, uint16_t> p{x, w, y, inputs, outputs};
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t begin = 0; begin < outputs; begin += OUTPUTS) {
    const int64_t end = std::min(outputs, begin + OUTPUTS);
    if (bias == nullptr) {
      dense::some_outputs(p, tokens, begin, end);
      continue;
    }
    float sums[TOKENS * OUTPUTS];
    for (int64_t first = 0; first < tokens; first += TOKENS) {
      const int64_t count = std::min(TOKENS, tokens - first);
      dense::some_outputs(dense::Problem<dense::Bf16, float>{x + first * inputs, w, sums - begin, inputs, OUTPUTS}, count,
                          begin, end);
      for (int64_t t = 0; t < count; t++)
        for (int64_t n = begin; n < end; n++)
          dense::write(y + (first + t) * outputs + n, sums[t * OUTPUTS + n - begin] + dense::from_bf16(bias[n]));
    }
  }
}
