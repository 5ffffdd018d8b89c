// GPTQ's column loop, 64 rows of the weight at a time (see gptq.py, whose compensate_columns is the reference).
//
// The one idea: rows do not depend on each other, so that 64 of them are the lanes of a few registers, and a column first
// gathers what all earlier columns owe it, column[j] = weight[j] - sum of error[i] * U[i, j] over i < j, in registers. The
// errors of a tile, [inputs][64], stay in the cache; nothing is written but codes.

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int REGISTERS = 4;
constexpr int64_t ROWS = LANES * REGISTERS;

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

}  // namespace

// weight float32 [rows, inputs]; upper_transposed [inputs, inputs], U of the inverse Hessian in processing order,
// transposed; order [inputs], the column processed at each step; scale and zero_point float32 [rows, groups]; codes
// int8 [rows, inputs], in the weight's own order of columns.
extern "C" void gptq_compensate(const float* weight, const float* upper_transposed, const int64_t* order,
                                const float* scale, const float* zero_point, int64_t rows, int64_t inputs,
                                int64_t groups, int32_t lowest, int32_t highest, int8_t* codes) {
  const int64_t width = inputs / groups;
  const int64_t tiles = (rows + ROWS - 1) / ROWS;
#pragma omp parallel
  {
    std::vector<float> errors(inputs * ROWS), columns(inputs * ROWS), steps(groups * ROWS), zeros(groups * ROWS);
#pragma omp for schedule(dynamic)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile * ROWS;
      const int64_t count = rows - first < ROWS ? rows - first : ROWS;
      for (int64_t lane = 0; lane < ROWS; ++lane) {
        // The last tile repeats its last row: what comes of the copies is not stored.
        const int64_t row = first + (lane < count ? lane : count - 1);
        for (int64_t j = 0; j < inputs; ++j) columns[j * ROWS + lane] = weight[row * inputs + order[j]];
        for (int64_t group = 0; group < groups; ++group) {
          steps[group * ROWS + lane] = scale[row * groups + group];
          zeros[group * ROWS + lane] = zero_point[row * groups + group];
        }
      }
      for (int64_t j = 0; j < inputs; ++j) {
        const float* owed = upper_transposed + j * inputs;
        Lanes sums[REGISTERS] = {};
        for (int64_t i = 0; i < j; ++i) {
          const Lanes* error = reinterpret_cast<const Lanes*>(&errors[i * ROWS]);
          for (int r = 0; r < REGISTERS; ++r) {
            Lanes value;
            __builtin_memcpy(&value, error + r, sizeof(value));
            sums[r] += value * owed[i];
          }
        }
        const int64_t group = order[j] / width;
        const float pivot = owed[j];
        alignas(64) float debt[ROWS];
        __builtin_memcpy(debt, sums, sizeof(debt));
        for (int64_t lane = 0; lane < ROWS; ++lane) {
          const float value = columns[j * ROWS + lane] - debt[lane];
          const float step = steps[group * ROWS + lane], zero = zeros[group * ROWS + lane];
          float code = std::nearbyint(value / step) + zero;
          code = code < lowest ? lowest : code > highest ? highest : code;
          errors[j * ROWS + lane] = (value - (code - zero) * step) / pivot;
          columns[j * ROWS + lane] = code;
        }
      }
      for (int64_t lane = 0; lane < count; ++lane)
        for (int64_t j = 0; j < inputs; ++j)
          codes[(first + lane) * inputs + order[j]] = static_cast<int8_t>(columns[j * ROWS + lane]);
    }
  }
}
