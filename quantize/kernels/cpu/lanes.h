// Sixteen lanes of float32 or int32: one register of AVX-512, or two of AVX2, with the few operations that linears need.
//
// The one idea: what is exact is exact on both. Integer products and sums are the same numbers, fused multiply-adds are the
// same lanes, so a quantized linear gives the same bits on either. bfloat16 is rounded to nearest even on both (AVX-512's
// instruction takes subnormal numbers for zero).

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace lanes {

constexpr int64_t LANES = 16;

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr bool WIDE = true;  // 32 registers of 16 lanes

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

inline Mask first_lanes(int64_t count) { return count >= LANES ? 0xFFFF : static_cast<Mask>((1u << count) - 1); }

inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Ints all(int32_t value) { return _mm512_set1_epi32(value); }

inline Floats load(const float* values, Mask mask) { return _mm512_maskz_loadu_ps(mask, values); }
inline Floats load(const uint16_t* bf16, Mask mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bf16)), 16));
}
inline Floats load(const float* values) { return _mm512_loadu_ps(values); }
inline Floats load(const uint16_t* bf16) { return load(bf16, 0xFFFF); }
inline Ints load(const int8_t* values) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)values)); }
inline Ints load_bits(const void* from) { return _mm512_loadu_si512(from); }  // 64 bytes, whatever they are

inline void store(float* out, Mask mask, Floats value) {
  mask == 0xFFFF ? _mm512_storeu_ps(out, value) : _mm512_mask_storeu_ps(out, mask, value);
}
inline void store(uint16_t* out, Mask mask, Floats value) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(value);
  mask == 0xFFFF ? _mm256_storeu_si256((__m256i*)out, rounded) : _mm256_mask_storeu_epi16(out, mask, rounded);
}
inline void store(int8_t* out, Mask mask, Ints value) {
  const __m128i bytes = _mm512_cvtepi32_epi8(value);
  mask == 0xFFFF ? _mm_storeu_si128((__m128i*)out, bytes) : _mm_mask_storeu_epi8(out, mask, bytes);
}

inline uint16_t to_bf16(float value) {
  const __m128bh rounded = _mm_cvtneps_pbh(_mm_set_ss(value));
  uint16_t word;
  std::memcpy(&word, &rounded, 2);
  return word;
}

inline Ints bits(Floats x) { return _mm512_castps_si512(x); }
inline Floats from_bits(Ints x) { return _mm512_castsi512_ps(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // to nearest, halves to even

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }

inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints smaller(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
inline Ints both_bits(Ints a, Ints b) { return _mm512_and_si512(a, b); }
template <int N>
inline Ints shift_left(Ints x) { return _mm512_slli_epi32(x, N); }
template <int N>
inline Ints shift_right(Ints x) { return _mm512_srai_epi32(x, N); }  // the sign comes after

// The lower and the upper nibble of every byte, as bytes.
inline Ints low_nibbles(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline int32_t sum(Ints x) { return _mm512_reduce_add_epi32(x); }
inline int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x); }

// sum + bytes * signed_bytes, four products to a lane. Not the intrinsic: GCC 12 copies every sum before it adds to it.
inline Ints add_products(Ints sum, Ints bytes, Ints signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
  return sum;
}
// The same of bytes below 16.
inline Ints add_products_of_nibbles(Ints sum, Ints nibbles, Ints signed_bytes) {
  return add_products(sum, nibbles, signed_bytes);
}

// sum + a * b of two bfloat16 numbers to a lane.
inline Floats add_bf16_products(Floats sum, Ints a, Ints b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// The sums of 16 vectors: out[i] is that of v[ORDER[i]].
constexpr int ORDER[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
inline void sums_of(const Floats* v, float* out) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)  // pairs (i, i + 8): per 128 bits, lanes 0 2 from v[i] and 1 3 from v[i + 8]
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
  for (int i = 0; i < 4; i++)  // per 128 bits: v[i], v[i + 8], v[i + 4], v[i + 12]
    b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[i], a[i + 4], 0x44), _mm512_shuffle_ps(a[i], a[i + 4], 0xee));
  for (int i = 0; i < 2; i++)  // 128-bit lanes of b[i] and b[i + 2], each halved
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));
  // 128-bit lanes: b[0], b[2], b[1], b[3]
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd)));
}

// 16 rows of 16 lanes each, turned: lane i of row j becomes lane j of row i.
inline void turn(Floats* rows) {
  Ints t[16], r[16];
  for (int i = 0; i < 16; i++) r[i] = bits(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // columns i, i + 1, i + 2, i + 3 of four rows, in each 128 bits
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; i++) rows[i] = from_bits(t[i]);
}

#else

constexpr bool WIDE = false;  // 16 registers of 8 lanes

struct Floats { __m256 low, high; };
struct Ints { __m256i low, high; };
using Mask = int64_t;  // how many lanes, from the first on, count

inline Mask first_lanes(int64_t count) { return std::min(count, LANES); }

inline Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Ints all(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }

inline Floats load(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
inline Floats load(const uint16_t* bf16) {
  const auto half = [](const uint16_t* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  };
  return {half(bf16), half(bf16 + 8)};
}
inline Ints load(const int8_t* values) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)values);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline Ints load_bits(const void* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}
template <typename Float>
inline Floats load(const Float* values, Mask mask) {
  if (mask == LANES) return load(values);
  Float padded[LANES] = {};
  for (Mask i = 0; i < mask; ++i) padded[i] = values[i];
  return load(padded);
}

inline void store_whole(float* out, Floats value) {
  _mm256_storeu_ps(out, value.low);
  _mm256_storeu_ps(out + 8, value.high);
}
inline void store_whole(uint16_t* out, Floats value) {
  const auto rounded = [](__m256 x) {  // in the lower words; a NaN stays one
    const __m256i raw = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(raw, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(raw, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, is_nan), 16);
  };
  const __m256i words = _mm256_packus_epi32(rounded(value.low), rounded(value.high));
  _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(words, 0xd8));
}
inline void store_whole(int8_t* out, Ints value) {  // the lowest byte of each
  const auto words = [](__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xff)); };
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words(value.low), words(value.high)), 0xd8);
  _mm_storeu_si128((__m128i*)out, _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}
template <typename T, typename Value>
inline void store(T* out, Mask mask, Value value) {
  if (mask == LANES) return store_whole(out, value);
  T whole[LANES];
  store_whole(whole, value);
  for (Mask i = 0; i < mask; ++i) out[i] = whole[i];
}

inline uint16_t to_bf16(float value) {
  uint16_t whole[LANES];
  store_whole(whole, all(value));
  return whole[0];
}

inline Ints bits(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline Floats from_bits(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats divide(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints subtract(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Ints multiply(Ints a, Ints b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Ints larger(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
inline Ints smaller(Ints a, Ints b) { return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)}; }
inline Ints both_bits(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
template <int N>
inline Ints shift_left(Ints x) { return {_mm256_slli_epi32(x.low, N), _mm256_slli_epi32(x.high, N)}; }
template <int N>
inline Ints shift_right(Ints x) { return {_mm256_srai_epi32(x.low, N), _mm256_srai_epi32(x.high, N)}; }
inline Floats magnitude(Floats x) { return from_bits(both_bits(bits(x), all(INT32_MAX))); }

inline Ints low_nibbles(Ints x) { return both_bits(x, all(0x0f0f0f0f)); }
inline Ints high_nibbles(Ints x) { return low_nibbles({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }

// In the order of AVX-512's reduction: halves upon halves.
inline float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t sum(Ints x) {
  int32_t lane[LANES], total = 0;
  std::memcpy(lane, &x, sizeof x);
  for (const int32_t each : lane) total += each;
  return total;
}
inline int32_t largest(Ints x) {
  int32_t lane[LANES];
  std::memcpy(lane, &x, sizeof x);
  return *std::max_element(lane, lane + LANES);
}

// There is an instruction for it that saturates; exact are products of words. Bytes 0 and 2 of a lane are taken together,
// then 1 and 3.
inline Ints add_products(Ints sum, Ints bytes, Ints signed_bytes) {
  const auto half = [](__m256i total, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
  };
  return {half(sum.low, bytes.low, signed_bytes.low), half(sum.high, bytes.high, signed_bytes.high)};
}
// Two products of a nibble are at most 2 * 15 * 128: nothing saturates.
inline Ints add_products_of_nibbles(Ints sum, Ints nibbles, Ints signed_bytes) {
  const auto half = [](__m256i total, __m256i a, __m256i b) {
    return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
  };
  return {half(sum.low, nibbles.low, signed_bytes.low), half(sum.high, nibbles.high, signed_bytes.high)};
}

inline Floats add_bf16_products(Floats sum, Ints a, Ints b) {
  const auto even = [](Ints x) { return from_bits(shift_left<16>(x)); };
  const auto odd = [](Ints x) { return from_bits(both_bits(x, all(int32_t(0xffff0000)))); };
  return multiply_add(odd(a), odd(b), multiply_add(even(a), even(b), sum));
}

constexpr int ORDER[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline void sums_of(const Floats* v, float* out) {
  for (int i = 0; i < LANES; i++) out[i] = sum(v[i]);
}

inline void turn(Floats* rows) {
  float turned[LANES][LANES], row[LANES];
  for (int j = 0; j < LANES; j++) {
    store_whole(row, rows[j]);
    for (int i = 0; i < LANES; i++) turned[i][j] = row[i];
  }
  for (int i = 0; i < LANES; i++) rows[i] = load(turned[i]);
}

#endif

inline Floats no_floats() { return all(0.0f); }
inline Ints no_ints() { return all(0); }

}  // namespace lanes
