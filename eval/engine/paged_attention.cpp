// Paged attention on a CPU: writes a step's keys and values into the block cache, then lets every query attend over its
// own request's blocks. One idea: a work item is (a tile of queries of one request, one kv head); it walks the keys in
// chunks of 64 with an online softmax (FlashAttention), all in float32, so decode and prefill are one path.
//
// Plain C interface (called through ctypes), GCC vector extensions (any instruction set). What is in namespace `paged`
// knows no threads, so that a file that includes this one can call it from a thread team of its own; the C function at
// the end is an OpenMP loop around it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace paged {
namespace {

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef int16_t svec __attribute__((vector_size(32)));
typedef int8_t bvec __attribute__((vector_size(16)));

constexpr int LANES = 16;
constexpr int KEYS = 64;      // keys per chunk
constexpr int QUERIES = 32;   // queries per tile
constexpr float MASKED = -1e30f;

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };  // INT8: of a cache only

inline vec load(const float* p) { vec x; memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, vec x) { memcpy(p, &x, sizeof x); }

// GCC takes a widening conversion of vectors apart, into halves and worse: where there is one instruction, it is named.
inline vec load_bf16(const uint16_t* p) {
#ifdef __AVX512F__
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  hvec h; memcpy(&h, p, sizeof h);
  uvec bits = __builtin_convertvector(h, uvec) << 16;
  return (vec)bits;
#endif
}

inline float from_bf16(uint16_t h) { uint32_t bits = (uint32_t)h << 16; float x; memcpy(&x, &bits, 4); return x; }

inline uint16_t to_bf16(float x) {  // to nearest even
  uint32_t bits; memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#ifdef __F16C__
inline float from_f16(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float from_f16(uint16_t h) { __fp16 x; memcpy(&x, &h, 2); return x; }
inline uint16_t to_f16(float x) { __fp16 y = x; uint16_t h; memcpy(&h, &y, 2); return h; }
#endif

inline vec load_f16(const uint16_t* p) {
#ifdef __AVX512F__
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  vec x;
  for (int i = 0; i < LANES; i++) x[i] = from_f16(p[i]);
  return x;
#endif
}

inline vec load_int8(const int8_t* p) {
#ifdef __AVX512F__
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  bvec b; memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(b, svec), ivec), vec);
#endif
}

inline float sum(vec x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return (x[0] + x[2]) + (x[1] + x[3]);
}

// Cephes' expf: relative error below 2e-7; exactly 0 below -87.
inline vec exp16(vec x) {
  ivec tiny = x < -87.0f;
  x = tiny ? vec{} - 87.0f : x;
  vec n = x * 1.44269504f;
  n = (n + 12582912.0f) - 12582912.0f;  // rounds to an integer
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec y = p * (vec)power;
  return tiny ? vec{} : y;
}

struct Step {
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* context_lens;  // [requests]
  const int32_t* block_tables;  // [requests, table_stride]
  const int64_t* slots;         // [tokens]
  int64_t table_stride;
  int32_t num_requests, num_tokens, block_size, num_threads;
};

struct Shape {
  int32_t heads, kv_heads, head_dim, window;  // window 0: none
  float scaling, softcap;                     // softcap 0: none
  int32_t dtype, kv_dtype;
};

struct Rows {  // [tokens, heads, head_dim], strides in elements, the last one is 1
  const void* data;
  int64_t token_stride, head_stride;
};

// One type per dtype: how a vector and a single element are read.
struct Float32 {
  using element = float;
  static vec read(const float* p) { return load(p); }
  static float one(float x) { return x; }
};
struct Bfloat16 {
  using element = uint16_t;
  static vec read(const uint16_t* p) { return load_bf16(p); }
  static float one(uint16_t x) { return from_bf16(x); }
};
struct Float16 {
  using element = uint16_t;
  static vec read(const uint16_t* p) { return load_f16(p); }
  static float one(uint16_t x) { return from_f16(x); }
};
struct Int8 {  // codes: the scale is left to the caller
  using element = int8_t;
  static vec read(const int8_t* p) { return load_int8(p); }
  static float one(int8_t x) { return x; }
};

template <typename Type>
inline void read_row_of(const void* base, int64_t offset, int d, int padded, float* out) {
  const auto* p = (const typename Type::element*)base + offset;
  int i = 0;
  for (; i + LANES <= d; i += LANES) store(out + i, Type::read(p + i));
  for (; i < d; i++) out[i] = Type::one(p[i]);
  for (; i < padded; i++) out[i] = 0.0f;
}

inline void read_row(const void* base, int64_t offset, int32_t dtype, int d, int padded, float* out) {
  switch (dtype) {
    case BFLOAT16: return read_row_of<Bfloat16>(base, offset, d, padded, out);
    case FLOAT16: return read_row_of<Float16>(base, offset, d, padded, out);
    case INT8: return read_row_of<Int8>(base, offset, d, padded, out);
    default: return read_row_of<Float32>(base, offset, d, padded, out);
  }
}

inline void write_row(void* base, int64_t offset, int32_t dtype, int d, const float* in) {
  uint16_t* p = (uint16_t*)base + offset;
  switch (dtype) {
    case BFLOAT16: for (int i = 0; i < d; i++) p[i] = to_bf16(in[i]); return;
    case FLOAT16: for (int i = 0; i < d; i++) p[i] = to_f16(in[i]); return;
    default: memcpy((float*)base + offset, in, d * sizeof(float));
  }
}

// read_row of a whole number of vectors, without its loops.
template <int V>
inline void read_vectors(const void* base, int64_t offset, int32_t dtype, float* out) {
  const auto copy = [&](auto type) {
    const auto* p = (const typename decltype(type)::element*)base + offset;
    for (int v = 0; v < V; v++) store(out + v * LANES, decltype(type)::read(p + v * LANES));
  };
  switch (dtype) {
    case BFLOAT16: return copy(Bfloat16{});
    case FLOAT16: return copy(Float16{});
    case INT8: return copy(Int8{});
    default: return copy(Float32{});
  }
}

// Codes of a row whose padding to whole vectors is 0, symmetric in [-127, 127]; gives their scale. What is not finite
// makes the scale so.
inline float quantize_row(const float* in, int d, int8_t* codes) {
  vec highest = {}, zero = {};
  for (int i = 0; i < d; i += LANES) {
    const vec x = load(in + i), size = x < 0.0f ? -x : x;
    highest = highest > size ? highest : size;
    zero += x * 0.0f;
  }
  float top = 0.0f;
  for (int i = 0; i < LANES; i++) top = std::max(top, highest[i]);
  const float scale = top / 127 + sum(zero), divisor = scale > 0 ? scale : 1.0f;
  for (int i = 0; i < d; i += LANES) {
    vec code = (load(in + i) / divisor + 12582912.0f) - 12582912.0f;  // to nearest even
    code = code > -127.0f ? code : vec{} - 127.0f;
    code = code < 127.0f ? code : vec{} + 127.0f;
    const ivec whole = __builtin_convertvector(code, ivec);
    const bvec bytes = __builtin_convertvector(__builtin_convertvector(whole, svec), bvec);
    memcpy(codes + i, &bytes, std::min(LANES, d - i));
  }
  return scale;
}

struct Cache {                        // one layer's
  void *keys, *values;                // [blocks, block_size, kv_heads, head_dim] in kv_dtype
  float *key_scales, *value_scales;   // [blocks, block_size, kv_heads] where kv_dtype is INT8
};

struct Tile { int32_t request, first, count; };  // queries [first, first + count) of the request's tokens in this step

struct Item { const Tile& tile; int kv_head; };

// Keys [begin, end) are seen by some query of the tile.
inline std::pair<int32_t, int32_t> seen_keys(const Step& s, const Shape& shape, const Tile& tile) {
  const int32_t num_queries = s.query_starts[tile.request + 1] - s.query_starts[tile.request];
  const int32_t before = s.context_lens[tile.request] - num_queries + tile.first;  // position of the tile's first query
  return {shape.window > 0 ? std::max(0, before - shape.window + 1) : 0, before + tile.count};
}

// Where the item's rows of up to KEYS keys from `first` on begin, in elements. Gives their count.
inline int locate(const Step& s, const Shape& shape, const Item& item, int32_t first, int64_t* offsets) {
  const int32_t* table = s.block_tables + item.tile.request * s.table_stride;
  const int count = std::max(0, std::min(KEYS, seen_keys(s, shape, item.tile).second - first));
  int32_t block = first / s.block_size, within = first % s.block_size;
  for (int j = 0; j < count; j++, within++) {
    if (within == s.block_size) block++, within = 0;
    offsets[j] = (((int64_t)table[block] * s.block_size + within) * shape.kv_heads + item.kv_head) * shape.head_dim;
  }
  return count;
}

// The sums of 16 vectors, one per lane, in order: each level adds halves and keeps the groups side by side.
inline vec sums_of(const vec* v) {
  vec a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; i++)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  for (int i = 0; i < 2; i++)
    c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(b[2 * i], b[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  return __builtin_shufflevector(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// scores [rows, KEYS] for few rows, 16 keys at a time; those past `keys` are computed from whatever lies there.
template <int V>
void few_scores(const float* q, const float* k, int rows, int keys, float* scores) {
  for (int r = 0; r < rows; r++) {
    vec query[V];
    for (int v = 0; v < V; v++) query[v] = load(q + (r * V + v) * LANES);
    for (int j = 0; j < keys; j += LANES) {
      vec products[LANES];
      for (int i = 0; i < LANES; i++) {
        products[i] = query[0] * load(k + (j + i) * V * LANES);
        for (int v = 1; v < V; v++) products[i] += query[v] * load(k + ((j + i) * V + v) * LANES);
      }
      store(scores + r * KEYS + j, sums_of(products));
    }
  }
}

// scores [rows, KEYS] from keys transposed to [head_dim, KEYS]; four rows at a time stay in registers, so up to three
// rows of padding are computed too.
void many_scores(const float* q, const float* kt, int rows, int d, int padded, float* scores) {
  constexpr int R = 4, W = KEYS / LANES;
  for (int r = 0; r < rows; r += R) {
    vec total[R][W] = {};
    for (int i = 0; i < d; i++) {
      vec k[W];
      for (int w = 0; w < W; w++) k[w] = load(kt + i * KEYS + w * LANES);
      for (int a = 0; a < R; a++)
        for (int w = 0; w < W; w++) total[a][w] += q[(r + a) * padded + i] * k[w];
    }
    for (int a = 0; a < R; a++)
      for (int w = 0; w < W; w++) store(scores + (r + a) * KEYS + w * LANES, total[a][w]);
  }
}

// out [rows, V * LANES] = out * decay [rows] + weights [rows, KEYS] x v [keys, V * LANES]
template <int V, int R>
void accumulate(const float* weights, const float* decay, const float* v, int keys, float* out) {
  vec total[R][V];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) total[r][i] = load(out + (r * V + i) * LANES) * decay[r];
  for (int j = 0; j < keys; j++) {
    vec row[V];
    for (int i = 0; i < V; i++) row[i] = load(v + (j * V + i) * LANES);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < V; i++) total[r][i] += weights[r * KEYS + j] * row[i];
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) store(out + (r * V + i) * LANES, total[r][i]);
}

template <int V, int R>
void accumulate_rows(int rows, const float* weights, const float* decay, const float* v, int keys, float* out) {
  if (rows == R) return accumulate<V, R>(weights, decay, v, keys, out);
  if constexpr (R > 1) accumulate_rows<V, R - 1>(rows, weights, decay, v, keys, out);
}

// Rows of the cache, in elements from its first, that are needed soon. They are fetched one by one while others are used:
// rows of one head lie too far apart for the hardware to see the pattern, the next block may lie anywhere, and more lines
// at once than a core can wait for would stop it.
struct Ahead {
  const char* base;
  const int64_t* offsets;
  int count, element, row_bytes;
  void fetch(int j) const {
    if (j >= count) return;
    const char* row = base + offsets[j] * element;
    for (int at = 0; at < row_bytes; at += 64) __builtin_prefetch(row + at);
  }
};

// Scores [R, KEYS] of R queries against `count` keys where they lie, and R weighted sums of values: decode's own way, in
// which a row of the cache is read once, straight into registers.
template <int V, int R, typename Kind>
void scores_in_place(const float* q, const typename Kind::element* keys, const int64_t* offsets, int count,
                     float* scores, const Ahead& ahead) {
  vec products[R][LANES] = {};
  for (int j = 0; j < count; j += LANES) {
    const int n = std::min(LANES, count - j);
    for (int i = 0; i < n; i++) {
      const typename Kind::element* key = keys + offsets[j + i];
      ahead.fetch(j + i);
      vec part[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) part[v] = Kind::read(key + v * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        vec product = load(q + r * V * LANES) * part[0];
#pragma GCC unroll 16
        for (int v = 1; v < V; v++) product += load(q + (r * V + v) * LANES) * part[v];
        products[r][i] = product;
      }
    }
    for (int r = 0; r < R; r++) store(scores + r * KEYS + j, sums_of(products[r]));
  }
}

template <int V, int R, typename Kind>
void accumulate_in_place(const float* weights, const float* decay, const typename Kind::element* values,
                         const int64_t* offsets, int count, float* out, const Ahead& ahead) {
  vec total[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) total[r][v] = load(out + (r * V + v) * LANES) * decay[r];
  for (int j = 0; j < count; j++) {
    ahead.fetch(j);
    const typename Kind::element* value = values + offsets[j];
    vec part[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) part[v] = Kind::read(value + v * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) total[r][v] += weights[r * KEYS + j] * part[v];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(out + (r * V + v) * LANES, total[r][v]);
}

// Calls use(Kind, rows as a constant) for `rows` rows from `first` on, as many at a time as the registers hold.
template <int R, typename Use>
void by_rows(int rows, const Use& use) {
  int r = 0;
  for (; r + R <= rows; r += R) use(r, std::integral_constant<int, R>{});
  if constexpr (R > 1)
    if (r < rows) by_rows<R - 1>(rows - r, [&](int at, auto count) { use(r + at, count); });
}

template <typename Use>
void with_kind(int32_t dtype, const Use& use) {
  switch (dtype) {
    case BFLOAT16: return use(Bfloat16{});
    case FLOAT16: return use(Float16{});
    case INT8: return use(Int8{});
    default: return use(Float32{});
  }
}

struct Scratch {
  std::vector<float> memory;
  float* take(size_t floats) {
    if (memory.size() < floats + LANES) memory.resize(floats + LANES);
    return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
  }
};

template <int V>
void attend(const Step& s, const Shape& shape, const Cache& cache, const Item& item, const Item& next, const Rows& query,
            void* out) {
  const Tile& tile = item.tile;
  const int kv_head = item.kv_head;
  const void *keys = cache.keys, *values = cache.values;
  const int d = shape.head_dim, padded = V * LANES, groups = shape.heads / shape.kv_heads;
  const int rows = tile.count * groups, padded_rows = (rows + LANES - 1) / LANES * LANES;
  static thread_local Scratch scratch;
  float* q = scratch.take((size_t)padded_rows * (2 * padded + KEYS + 3) + (size_t)2 * KEYS * padded);
  float* acc = q + padded_rows * padded;
  float* scores = acc + padded_rows * padded;
  float* highest = scores + padded_rows * KEYS;
  float* total = highest + padded_rows;
  float* decay = total + padded_rows;
  float* k = decay + padded_rows;
  float* v = k + KEYS * padded;
  std::fill(q, q + padded_rows * 2 * padded, 0.0f);
  std::fill(highest, highest + padded_rows, MASKED);
  std::fill(total, total + padded_rows, 0.0f);

  const int32_t start = s.query_starts[tile.request], num_queries = s.query_starts[tile.request + 1] - start;
  const int32_t before = s.context_lens[tile.request] - num_queries + tile.first;  // position of the tile's first query
  for (int i = 0; i < tile.count; i++)
    for (int g = 0; g < groups; g++) {
      float* row = q + (i * groups + g) * padded;
      int64_t offset = (start + tile.first + i) * query.token_stride + (kv_head * groups + g) * query.head_stride;
      read_row(query.data, offset, shape.dtype, d, padded, row);
      for (int e = 0; e < d; e++) row[e] *= shape.scaling;
    }

  const auto [begin, end] = seen_keys(s, shape, tile);
  const bool few = rows < 8, in_place = few && d == padded;
  constexpr int R = V <= 4 ? 4 : V <= 8 ? 2 : 1;
  const int element = shape.kv_dtype == INT8 ? 1 : shape.kv_dtype == FLOAT32 ? 4 : 2;
  float one[16 * LANES], key_scale[KEYS], value_scale[KEYS];
  int64_t offsets[2][KEYS];  // where the rows of this chunk and of the one after it, be it the next item's, begin
  locate(s, shape, item, begin, offsets[0]);
  int now = 0;
  for (int32_t first = begin; first < end; first += KEYS, now = 1 - now) {
    const int count = std::min(KEYS, end - first);
    const int soon = first + KEYS < end ? locate(s, shape, item, first + KEYS, offsets[1 - now])
                                        : locate(s, shape, next, seen_keys(s, shape, next.tile).first, offsets[1 - now]);
    const Ahead keys_ahead{(const char*)keys, offsets[1 - now], soon, element, d * element};
    const Ahead values_ahead{(const char*)values, offsets[1 - now], soon, element, d * element};
    for (int j = 0; j < count && !(in_place && shape.kv_dtype != INT8); j++) {
      const int64_t offset = offsets[now][j];
      float* key = few ? k + j * padded : one;
      if (!in_place) {
        keys_ahead.fetch(j), values_ahead.fetch(j);
        if (d == padded) {
          read_vectors<V>(values, offset, shape.kv_dtype, v + j * padded);
          read_vectors<V>(keys, offset, shape.kv_dtype, key);
        } else {
          read_row(values, offset, shape.kv_dtype, d, padded, v + j * padded);
          read_row(keys, offset, shape.kv_dtype, d, padded, key);
        }
      }
      if (shape.kv_dtype == INT8) {
        key_scale[j] = cache.key_scales[offset / d];
        value_scale[j] = cache.value_scales[offset / d];
      }
      if (!few)
        for (int e = 0; e < d; e++) k[e * KEYS + j] = one[e];
    }
    if (in_place) {
      with_kind(shape.kv_dtype, [&](auto kind) {
        using Kind = decltype(kind);
        by_rows<R>(rows, [&](int r, auto count_of_rows) {
          scores_in_place<V, decltype(count_of_rows)::value, Kind>(
              q + r * padded, (const typename Kind::element*)keys, offsets[now], count, scores + r * KEYS,
              keys_ahead);
        });
      });
    } else if (few) {
      few_scores<V>(q, k, rows, count, scores);
    } else {
      for (int e = 0; e < d; e++) std::fill(k + e * KEYS + count, k + (e + 1) * KEYS, 0.0f);
      many_scores(q, k, rows, d, padded, scores);
    }
    for (int r = 0; r < rows; r++) {
      float* row = scores + r * KEYS;
      const int32_t position = before + r / groups;
      if (shape.kv_dtype == INT8)
        for (int j = 0; j < count; j++) row[j] *= key_scale[j];
      if (shape.softcap > 0)
        for (int j = 0; j < count; j++) row[j] = shape.softcap * std::tanh(row[j] / shape.softcap);
      for (int j = count; j < KEYS; j++) row[j] = MASKED;
      for (int j = std::max(0, position + 1 - first); j < count; j++) row[j] = MASKED;
      if (shape.window > 0)
        for (int j = 0; j < std::min(count, position - shape.window + 1 - first); j++) row[j] = MASKED;
      vec tops = load(row);
      for (int w = LANES; w < KEYS; w += LANES) tops = tops > load(row + w) ? tops : load(row + w);
      float top = highest[r];
      for (int i = 0; i < LANES; i++) top = std::max(top, tops[i]);
      vec sums = {};
      for (int w = 0; w < KEYS; w += LANES) {
        vec weight = exp16(load(row + w) - top);
        store(row + w, weight);
        sums += weight;
      }
      if (shape.kv_dtype == INT8)
        for (int j = 0; j < count; j++) row[j] *= value_scale[j];
      decay[r] = exp16(vec{} + (highest[r] - top))[0];
      total[r] = total[r] * decay[r] + sum(sums);
      highest[r] = top;
    }
    if (in_place) {
      with_kind(shape.kv_dtype, [&](auto kind) {
        using Kind = decltype(kind);
        by_rows<R>(rows, [&](int r, auto count_of_rows) {
          accumulate_in_place<V, decltype(count_of_rows)::value, Kind>(
              scores + r * KEYS, decay + r, (const typename Kind::element*)values, offsets[now], count, acc + r * padded,
              values_ahead);
        });
      });
      continue;
    }
    for (int r = 0; r < rows; r += R)
      accumulate_rows<V, R>(std::min(R, rows - r), scores + r * KEYS, decay + r, v, count, acc + r * padded);
  }
  for (int r = 0; r < rows; r++) {
    const float inverse = 1.0f / total[r];
    for (int e = 0; e < padded; e++) acc[r * padded + e] *= inverse;
    const int64_t token = start + tile.first + r / groups, head = kv_head * groups + r % groups;
    write_row(out, (token * shape.heads + head) * d, shape.dtype, d, acc + r * padded);
  }
}

using Attend = void (*)(const Step&, const Shape&, const Cache&, const Item&, const Item&, const Rows&, void*);

Attend attend_for(int head_dim) {
  switch ((head_dim + LANES - 1) / LANES) {
    case 1: return attend<1>;
    case 2: return attend<2>;
    case 3: return attend<3>;
    case 4: return attend<4>;
    case 5: return attend<5>;
    case 6: return attend<6>;
    case 7: return attend<7>;
    case 8: return attend<8>;
    case 12: return attend<12>;
    case 16: return attend<16>;
    default: return nullptr;
  }
}

// The step's tiles, the same in every layer. A work item is a tile and a kv head: there are tiles x kv_heads of them.
inline void list_tiles(const Step& s, std::vector<Tile>& tiles) {
  tiles.clear();
  for (int32_t r = 0; r < s.num_requests; r++) {
    const int32_t count = s.query_starts[r + 1] - s.query_starts[r];
    // The last queries see the most keys: they go first, so that no thread ends with the longest tile.
    for (int32_t first = (count - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES)
      tiles.push_back({r, first, std::min(QUERIES, count - first)});
  }
}

// Writes key and value of the step's tokens [begin, end) to their slots.
inline void write_tokens(const Step& s, const Shape& shape, const Cache& cache, const Rows& key, const Rows& value,
                         int32_t begin, int32_t end) {
  const int d = shape.head_dim;
  const auto write = [&](const Rows& rows, int32_t t, int32_t h, void* codes, float* scales) {
    float row[16 * LANES];
    const int64_t to = s.slots[t] * shape.kv_heads + h;
    read_row(rows.data, t * rows.token_stride + h * rows.head_stride, shape.dtype, d, (d + LANES - 1) / LANES * LANES, row);
    if (shape.kv_dtype == INT8)
      scales[to] = quantize_row(row, d, (int8_t*)codes + to * d);
    else
      write_row(codes, to * d, shape.kv_dtype, d, row);
  };
  for (int32_t t = begin; t < end; t++)
    for (int32_t h = 0; h < shape.kv_heads; h++) {
      write(key, t, h, cache.keys, cache.key_scales);
      write(value, t, h, cache.values, cache.value_scales);
    }
}

// The step's items that no other thread has taken, once all keys and values are written. out [tokens, heads, head_dim] in
// dtype, contiguous; an item writes the rows of its tile's queries in the heads that share its kv head.
inline void attend_items(const Step& s, const Shape& shape, const Cache& cache, const std::vector<Tile>& tiles,
                         std::atomic<int64_t>& next_item, const Rows& query, void* out) {
  const int64_t items = (int64_t)tiles.size() * shape.kv_heads;
  const auto take = [&] { return next_item.fetch_add(1, std::memory_order_relaxed); };
  const auto named = [&](int64_t i) { return Item{tiles[i / shape.kv_heads], (int)(i % shape.kv_heads)}; };
  const Attend attend = attend_for(shape.head_dim);
  for (int64_t item = take(); item < items;) {
    const int64_t next = take();  // taken early, so that its first rows can be fetched meanwhile
    attend(s, shape, cache, named(item), named(std::min(next, items - 1)), query, out);
    item = next;
  }
}

}  // namespace
}  // namespace paged

// query, key, value: the step's tokens in dtype, [tokens, heads or kv_heads, head_dim].
extern "C" void paged_attention(const paged::Step* step, const paged::Shape* shape, const paged::Cache* cache,
                                const void* query, int64_t query_token_stride, int64_t query_head_stride,
                                const void* key, int64_t key_token_stride, int64_t key_head_stride,
                                const void* value, int64_t value_token_stride, int64_t value_head_stride, void* out) {
  const paged::Rows q{query, query_token_stride, query_head_stride};
  const paged::Rows k{key, key_token_stride, key_head_stride}, v{value, value_token_stride, value_head_stride};
  static thread_local std::vector<paged::Tile> tiles_of_thread;
  std::vector<paged::Tile>& tiles = tiles_of_thread;
  paged::list_tiles(*step, tiles);
  std::atomic<int64_t> next_item{0};

#pragma omp parallel num_threads(step->num_threads) if (step->num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int32_t t = 0; t < step->num_tokens; t++) paged::write_tokens(*step, *shape, *cache, k, v, t, t + 1);
    paged::attend_items(*step, *shape, *cache, tiles, next_item, q, out);
  }
}
