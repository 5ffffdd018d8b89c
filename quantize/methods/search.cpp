// Which of several grids rounds a group of weights with the least error (see search.py, whose loop in torch is the
// reference). The one idea: a group is a few registers, so that all grids are tried while it is in the first cache.

#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

inline float cost(float weight, float importance, float step, float zero, float lowest, float highest, bool cubed) {
  float code = std::nearbyint(weight / step) + zero;
  code = code < lowest ? lowest : code > highest ? highest : code;
  const float error = std::fabs((code - zero) * step - weight);
  return error * error * (cubed ? error : 1.0f) * importance;
}

}  // namespace

// weight float32 [rows, groups * width]; importance float32 [groups * width]; scale and zero_point float32
// [grids, rows, groups]; the error is that to the third power where `cubed`, else its square. best int32 [rows, groups]:
// the first grid of the least error.
extern "C" void least_error(const float* weight, const float* importance, const float* scale, const float* zero_point,
                            int64_t rows, int64_t groups, int64_t width, int64_t grids, int32_t lowest, int32_t highest,
                            int32_t cubed, int32_t* best) {
  const float low = lowest, high = highest;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < groups; ++group) {
      const float* values = weight + (row * groups + group) * width;
      const float* counts = importance + group * width;
      float least = INFINITY;
      int32_t found = 0;
      for (int64_t grid = 0; grid < grids; ++grid) {
        const int64_t at = (grid * rows + row) * groups + group;
        Lanes sums = {};
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES)
          for (int64_t lane = 0; lane < LANES; ++lane)
            sums[lane] += cost(values[k + lane], counts[k + lane], scale[at], zero_point[at], low, high, cubed);
        float total = 0.0f;
        for (int64_t lane = 0; lane < LANES; ++lane) total += sums[lane];
        for (; k < width; ++k) total += cost(values[k], counts[k], scale[at], zero_point[at], low, high, cubed);
        if (total < least) least = total, found = static_cast<int32_t>(grid);
      }
      best[row * groups + group] = found;
    }
}
