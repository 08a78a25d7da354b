// The functions of AVX-512 that kernels call, by pairs of AVX2's registers.
//
// They hide the compiler's own of the same name. A mask has a bit for each lane; a lane without its
// bit is neither read nor written.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "the processor has neither AVX-512 (BW, DQ, VL) nor AVX2 with FMA and F16C"
#endif

namespace {

struct __m512 {
  __m256 a, b;
};

struct __m512i {
  __m256i a, b;
};

#define PAIRWISE(type, name, half)                                              \
  inline type name(type x, type y) { return {half(x.a, y.a), half(x.b, y.b)}; }
PAIRWISE(__m512, _mm512_add_ps, _mm256_add_ps)
PAIRWISE(__m512, _mm512_sub_ps, _mm256_sub_ps)
PAIRWISE(__m512, _mm512_mul_ps, _mm256_mul_ps)
PAIRWISE(__m512, _mm512_div_ps, _mm256_div_ps)
PAIRWISE(__m512, _mm512_max_ps, _mm256_max_ps)
PAIRWISE(__m512i, _mm512_madd_epi16, _mm256_madd_epi16)
PAIRWISE(__m512i, _mm512_add_epi32, _mm256_add_epi32)
PAIRWISE(__m512i, _mm512_sub_epi32, _mm256_sub_epi32)
PAIRWISE(__m512i, _mm512_and_epi32, _mm256_and_si256)
PAIRWISE(__m512i, _mm512_or_epi32, _mm256_or_si256)
PAIRWISE(__m512i, _mm512_xor_epi32, _mm256_xor_si256)
#undef PAIRWISE

inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

inline __m512i _mm512_abs_epi32(__m512i v) {
  return {_mm256_abs_epi32(v.a), _mm256_abs_epi32(v.b)};
}

inline __m512i _mm512_slli_epi32(__m512i v, int bits) {
  return {_mm256_slli_epi32(v.a, bits), _mm256_slli_epi32(v.b, bits)};
}

inline __m512i _mm512_srli_epi32(__m512i v, int bits) {
  return {_mm256_srli_epi32(v.a, bits), _mm256_srli_epi32(v.b, bits)};
}

inline __m512 _mm512_set1_ps(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline __m512i _mm512_set1_epi32(int v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0); }
inline __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }

inline __m512 _mm512_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h,
                             float i, float j, float k, float l, float m, float n, float o,
                             float p) {
  return {_mm256_setr_ps(a, b, c, d, e, f, g, h), _mm256_setr_ps(i, j, k, l, m, n, o, p)};
}

inline __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                 int j, int k, int l, int m, int n, int o, int p) {
  return {_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p)};
}

inline __m512 _mm512_broadcastss_ps(__m128 v) {
  const __m256 all = _mm256_broadcastss_ps(v);
  return {all, all};
}

inline __m512 _mm512_broadcast_f32x4(__m128 v) {
  const __m256 all = _mm256_set_m128(v, v);
  return {all, all};
}

inline __m512i _mm512_broadcast_i32x4(__m128i v) {
  const __m256i all = _mm256_broadcastsi128_si256(v);
  return {all, all};
}

// ---- Conversions ----

inline __m512 _mm512_castsi512_ps(__m512i v) {
  return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)};
}

inline __m512i _mm512_castps_si512(__m512 v) {
  return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)};
}

inline __m512 _mm512_castps128_ps512(__m128 v) { return _mm512_broadcast_f32x4(v); }
inline __m256i _mm512_castsi512_si256(__m512i v) { return v.a; }
inline __m256i _mm512_extracti64x4_epi64(__m512i v, int) { return v.b; }
inline __m512i _mm512_castsi256_si512(__m256i v) { return {v, v}; }
inline __m512i _mm512_inserti64x4(__m512i v, __m256i high, int) { return {v.a, high}; }

inline __m512 _mm512_cvtepi32_ps(__m512i v) {
  return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)};
}

inline __m512i _mm512_cvtps_epi32(__m512 v) {
  return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)};
}

inline __m512i _mm512_cvtepi8_epi16(__m256i v) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)),
          _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1))};
}

inline __m512i _mm512_cvtepu8_epi16(__m256i v) {
  return {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(v)),
          _mm256_cvtepu8_epi16(_mm256_extracti128_si256(v, 1))};
}

inline __m512i _mm512_cvtepi8_epi32(__m128i v) {
  return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}

inline __m512i _mm512_cvtepu8_epi32(__m128i v) {
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}

inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}

inline __m256i _mm512_cvtepi32_epi16(__m512i v) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low));
  return _mm256_permute4x64_epi64(mixed, 0xd8);
}

inline __m128i _mm512_cvtepi32_epi8(__m512i v) {
  const __m256i halves = _mm256_and_si256(_mm512_cvtepi32_epi16(v), _mm256_set1_epi16(0xff));
  return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

inline __m512 _mm512_cvtph_ps(__m256i v) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}

inline __m256i _mm512_cvtps_ph(__m512 v, int) {  // to the nearest
  return _mm256_setr_m128i(_mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT),
                           _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}

// ---- Masks ----

inline __mmask16 joined(__m256 a, __m256 b) {
  return static_cast<__mmask16>(_mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8);
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int) {  // lanes with a NaN
  return joined(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q));
}

inline __mmask16 _mm512_cmpeq_epi32_mask(__m512i x, __m512i y) {
  return joined(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)),
                _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b)));
}

inline __m512i chosen(__mmask16 lanes) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto of = [&](int byte) {
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(byte), bits), bits);
  };
  return {of(lanes & 0xff), of(lanes >> 8)};
}

inline __m512i _mm512_mask_set1_epi32(__m512i v, __mmask16 lanes, int number) {
  const __m512i some = chosen(lanes);
  const __m256i all = _mm256_set1_epi32(number);
  return {_mm256_blendv_epi8(v.a, all, some.a), _mm256_blendv_epi8(v.b, all, some.b)};
}

inline __m512 _mm512_maskz_sub_ps(__mmask16 lanes, __m512 x, __m512 y) {
  const __m512 some = _mm512_castsi512_ps(chosen(lanes)), all = _mm512_sub_ps(x, y);
  return {_mm256_and_ps(some.a, all.a), _mm256_and_ps(some.b, all.b)};
}

// ---- Reductions, lookups and shuffles ----

template <class T, class V, class Run>
inline T reduced(V v, Run run) {
  T numbers[16];
  std::memcpy(numbers, &v, sizeof v);
  for (int i = 1; i < 16; i++) numbers[0] = run(numbers[0], numbers[i]);
  return numbers[0];
}

inline float _mm512_reduce_max_ps(__m512 v) {
  return reduced<float>(v, [](float x, float y) { return x > y ? x : y; });
}

inline int _mm512_reduce_add_epi32(__m512i v) {
  return reduced<int>(v, [](int x, int y) { return x + y; });
}

// Entry i & 15 of a table for each lane.
inline __m512 _mm512_permutexvar_ps(__m512i i, __m512 table) {
  const auto read = [&](__m256i half) {
    const __m256 low = _mm256_permutevar8x32_ps(table.a, half);
    const __m256 high = _mm256_permutevar8x32_ps(table.b, half);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(half, 28)));
  };
  return {read(i.a), read(i.b)};
}

// The same of 16 bits: two tables of bytes.
inline __m256i _mm256_permutexvar_epi16(__m256i i, __m256i table) {
  const __m256i bytes = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                                         0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m256i split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(table, bytes), 0xd8);
  const __m256i low = _mm256_permute4x64_epi64(split, 0x44);
  const __m256i high = _mm256_permute4x64_epi64(split, 0xee);
  const __m256i code = _mm256_and_si256(i, _mm256_set1_epi16(15));
  const __m256i above = _mm256_slli_epi16(_mm256_shuffle_epi8(high, code), 8);
  return _mm256_or_si256(
      _mm256_and_si256(_mm256_shuffle_epi8(low, code), _mm256_set1_epi16(0xff)), above);
}

// Quarters of x by the lower bits of a number, and then of y by the upper ones.
inline __m512 _mm512_shuffle_f32x4(__m512 x, __m512 y, int order) {
  const auto quarter = [](const __m512& v, int place) {
    const __m256 half = place & 2 ? v.b : v.a;
    return place & 1 ? _mm256_extractf128_ps(half, 1) : _mm256_castps256_ps128(half);
  };
  return {_mm256_setr_m128(quarter(x, order & 3), quarter(x, order >> 2 & 3)),
          _mm256_setr_m128(quarter(y, order >> 4 & 3), quarter(y, order >> 6))};
}

inline __m512 _mm512_shuffle_ps(__m512 x, __m512 y, int order) {
  const auto run = [&](__m256 a, __m256 b) {
    switch (order) {
      case 0x44: return _mm256_shuffle_ps(a, b, 0x44);
      case 0xee: return _mm256_shuffle_ps(a, b, 0xee);
      case 0x88: return _mm256_shuffle_ps(a, b, 0x88);
      default: return _mm256_shuffle_ps(a, b, 0xdd);
    }
  };
  return {run(x.a, y.a), run(x.b, y.b)};
}

// ---- Memory ----

inline __m512 _mm512_loadu_ps(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

inline __m512i _mm512_loadu_si512(const void* p) {
  const __m256i* halves = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

inline void _mm512_storeu_ps(float* p, __m512 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}

inline void _mm512_storeu_si512(void* p, __m512i v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, v.b);
}

inline __m512 _mm512_maskz_loadu_ps(__mmask16 lanes, const float* p) {
  if (lanes == 0xffff) return _mm512_loadu_ps(p);
  const __m512i some = chosen(lanes);
  return {_mm256_maskload_ps(p, some.a), _mm256_maskload_ps(p + 8, some.b)};
}

inline void _mm512_mask_storeu_ps(float* p, __mmask16 lanes, __m512 v) {
  const __m512i some = chosen(lanes);
  _mm256_maskstore_ps(p, some.a, v.a);
  _mm256_maskstore_ps(p + 8, some.b, v.b);
}

// The first elements, as masks of memory in smaller units begin at the first.
template <class V>
inline V loaded(const void* p, uint64_t lanes, int bytes_of_lane) {
  V v{};
  std::memcpy(&v, p, __builtin_popcountll(lanes) * bytes_of_lane);
  return v;
}

inline __m128i _mm_maskz_loadu_epi8(__mmask16 lanes, const void* p) {
  if (lanes == 0xffff) return _mm_loadu_si128(static_cast<const __m128i*>(p));
  return loaded<__m128i>(p, lanes, 1);
}

inline __m128i _mm_maskz_loadu_epi32(__mmask16 lanes, const void* p) {
  return loaded<__m128i>(p, lanes, 4);
}

inline __m128 _mm_maskz_loadu_ps(__mmask16 lanes, const void* p) {
  return loaded<__m128>(p, lanes, 4);
}

inline __m256i _mm256_maskz_loadu_epi16(__mmask16 lanes, const void* p) {
  if (lanes == 0xffff) return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return loaded<__m256i>(p, lanes, 2);
}

inline __m512i _mm512_maskz_loadu_epi8(uint64_t lanes, const void* p) {
  return loaded<__m512i>(p, lanes, 1);
}

inline __m512i _mm512_maskz_loadu_epi16(uint32_t lanes, const void* p) {
  return loaded<__m512i>(p, lanes, 2);
}

inline void _mm_mask_storeu_epi8(void* p, __mmask16 lanes, __m128i v) {
  std::memcpy(p, &v, __builtin_popcount(lanes));
}

inline void _mm256_mask_storeu_epi16(void* p, __mmask16 lanes, __m256i v) {
  std::memcpy(p, &v, __builtin_popcount(lanes) * 2);
}

}  // namespace
