// Products by stored weights, and their dequantization, on CPUs with AVX-512.
//
//     y = x W̃ᵀ        x [tokens, columns], W̃ [rows, columns] in the form in which it is stored
//
// A few rows of W̃ are decoded into a buffer that the cache holds, and multiplied by all tokens, so
// that every weight is read once. 4-bit codes are looked up in a register that holds the 16 weights
// of a block. An output is a sum over lanes in an order that the columns alone decide: it depends
// neither on the tokens beside it nor on the number of threads.
//
// It is compiled without contraction, as dequantized weights are those of PyTorch to the bit.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "the processor has no AVX-512 (BW, DQ, VL)"
#endif

namespace {

constexpr int kTile = 4;                 // rows, and tokens, whose sums are held in registers
constexpr int64_t kBufferBytes = 1 << 18;  // of decoded rows, in a core's L2
constexpr int kNestedBlock = 256;
constexpr float kLeastStep = 1.17549435e-38f;
constexpr int64_t kFewSteps = 10;        // `FEW_STEPS` of `pcg.formats.int8`

struct Bf16 {
  uint16_t bits;
};

// The kinds of `pcg.formats.native`.
enum Kind : int64_t {
  kPlain, kInt8, kInt8Weight, kHighFirst, kLowFirst, kInt4Half, kInt4Bf16, kFp8, kQ8_0, kQ4_0,
  kQ4_1, kQ4_K, kQ6_K,
};

// Tensors are addresses; 0 for none.
struct Matrix {
  int64_t kind, rows, columns;
  int64_t codes, row_bytes;
  int64_t scales, groups, group, group_rows;  // scales of a row, and the columns and rows of each
  int64_t zeros;                              // of 4-bit integers
  int64_t values;                             // of the 16 codes
  int64_t scale_values;                       // of scales of 8 bits
  int64_t nested, first, row_blocks;    // scales of scales, by the block's number
  int64_t offset;                             // the bits of an fp32 number
  int64_t sums;                               // of the codes of a row, int32
};

template <class T>
inline const T* at(int64_t address) {
  return reinterpret_cast<const T*>(address);
}

inline float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _cvtsh_ss(bits);
}

inline __m512i words(__m512 v) { return _mm512_castps_si512(v); }

// Rounds to the nearest, ties to even, as PyTorch does; NaN stays NaN.
inline __m256i rounded(__m512 v) {
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(words(v), 16), _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(_mm512_add_epi32(words(v), odd), _mm512_set1_epi32(0x7fff));
  sum = _mm512_srli_epi32(sum, 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(sum, is_nan, 0x7fc0));
}

inline __m512 widened(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

// Stores without a mask are twice as fast.
inline void put(float* out, __m512 v) { _mm512_storeu_ps(out, v); }
inline void put(float* out, __m512 v, __mmask16 lanes) { _mm512_mask_storeu_ps(out, lanes, v); }
inline void put(Bf16* out, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded(v));
}
inline void put(Bf16* out, __m512 v, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(out, lanes, rounded(v));
}

inline __m512 get(const float* p, __mmask16 lanes = 0xffff) {
  return _mm512_maskz_loadu_ps(lanes, p);
}

inline __m512 get(const Bf16* p, __mmask16 lanes = 0xffff) {
  return widened(_mm256_maskz_loadu_epi16(lanes, p));
}

// ---- Decoding ----

// The 16 weights of a block, by code.
template <class E>
struct Table;

template <>
struct Table<float> {
  __m512 weights;
  explicit Table(__m512 v) : weights(v) {}
  __m512 read(__m128i codes) const {
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), weights);
  }
  void put(float* out, __m128i codes) const { _mm512_storeu_ps(out, read(codes)); }
  void put(float* out, __m128i codes, __mmask16 lanes) const {
    _mm512_mask_storeu_ps(out, lanes, read(codes));
  }
};

template <>
struct Table<Bf16> {
  __m256i weights;
  explicit Table(__m512 v) : weights(rounded(v)) {}
  __m256i read(__m128i codes) const {
    return _mm256_permutexvar_epi16(_mm256_cvtepu8_epi16(codes), weights);
  }
  void put(Bf16* out, __m128i codes) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), read(codes));
  }
  void put(Bf16* out, __m128i codes, __mmask16 lanes) const {
    _mm256_mask_storeu_epi16(out, lanes, read(codes));
  }
};

inline __m128i low_halves(__m128i bytes) { return _mm_and_si128(bytes, _mm_set1_epi8(15)); }

inline __m128i high_halves(__m128i bytes) { return low_halves(_mm_srli_epi16(bytes, 4)); }

// Two codes in a byte, of weights beside each other.
template <bool high_first, class E>
void decode_pairs(const uint8_t* codes, int64_t count, __m512 weights, E* out) {
  const Table<E> table(weights);
  const auto read = [&](__m128i bytes, auto run) {
    const __m128i low = low_halves(bytes), high = high_halves(bytes);
    const __m128i first = high_first ? high : low, second = high_first ? low : high;
    run(_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second));
  };
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
    read(bytes, [&](__m128i a, __m128i b) {
      table.put(out + i, a);
      table.put(out + i + 16, b);
    });
  }
  if (i < count) {
    const __mmask16 bytes = first_lanes((count - i + 1) / 2);
    read(_mm_maskz_loadu_epi8(bytes, codes + i / 2), [&](__m128i a, __m128i b) {
      table.put(out + i, a, first_lanes(count - i));
      if (count - i > 16) table.put(out + i + 16, b, first_lanes(count - i - 16));
    });
  }
}

// 32 codes, in the low halves of 16 bytes and then in the high halves.
template <class E>
inline void decode_halves(const uint8_t* codes, __m512 weights, E* out) {
  const Table<E> table(weights);
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  table.put(out, low_halves(bytes));
  table.put(out + 16, high_halves(bytes));
}

inline __m512 codes16() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline __m512 signed16(const void* p, __mmask16 lanes = 0xffff) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, p)));
}

// The value of e4m3 codes: their bits as fp32 have an exponent that is 120 too small.
inline __m512 fp8(const uint8_t* p, __mmask16 lanes) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, p));
  const __m512i magnitude = _mm512_and_epi32(code, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_xor_epi32(code, magnitude), 24);
  // The largest magnitude is NaN.
  const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
  const __m512 shifted = _mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20));
  const __m512i value = words(_mm512_mul_ps(shifted, _mm512_set1_ps(0x1p120f)));
  const __m512i all = _mm512_mask_set1_epi32(value, is_nan, 0x7fc00000);
  return _mm512_castsi512_ps(_mm512_or_epi32(all, sign));
}

// A scale of nf4, fp4, mxfp4 or nvfp4.
inline float scale_of_block(const Matrix& m, int64_t row, int64_t block) {
  const int64_t place = row * m.groups + block;
  if (!m.scale_values) return at<float>(m.scales)[place];
  float scale = at<float>(m.scale_values)[at<uint8_t>(m.scales)[place]];
  if (m.nested) {
    float offset;
    std::memcpy(&offset, &m.offset, sizeof offset);
    const int64_t number = m.first + row * m.row_blocks + block;
    scale = scale * at<float>(m.nested)[number / kNestedBlock] + offset;
  }
  return scale;
}

inline __m512 integers_of_block(const Matrix& m, int64_t row, int64_t block) {
  const int64_t place = row * m.groups + block;
  const float zero = at<uint8_t>(m.zeros)[place];
  const __m512 steps = _mm512_sub_ps(codes16(), _mm512_set1_ps(zero));
  const uint16_t bits = at<uint16_t>(m.scales)[place];
  if (m.kind == kInt4Bf16) {
    const __m512 scale = _mm512_castsi512_ps(_mm512_set1_epi32(bits << 16));
    return widened(rounded(_mm512_mul_ps(steps, scale)));
  }
  const __m512 product = _mm512_mul_ps(steps, _mm512_set1_ps(_cvtsh_ss(bits)));
  return _mm512_cvtph_ps(_mm512_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

template <class E>
void decode_q4_k(const uint8_t* block, E* out) {
  const float scale = half(block), least = half(block + 2);
  const uint8_t *low = block + 4, *middle = block + 8, *high = block + 12, *codes = block + 16;
  for (int i = 0; i < 8; i++) {
    const int j = i & 3;
    const int s = i < 4 ? low[j] & 63 : (high[j] & 15) | (low[j] >> 6 << 4);
    const int t = i < 4 ? middle[j] & 63 : high[j] >> 4 | (middle[j] >> 6 << 4);
    const __m512 steps = _mm512_mul_ps(codes16(), _mm512_set1_ps(s * scale));
    const Table<E> table(_mm512_sub_ps(steps, _mm512_set1_ps(t * least)));
    for (int k = 0; k < 2; k++) {
      const void* p = codes + i / 2 * 32 + k * 16;
      const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
      table.put(out + i * 32 + k * 16, i & 1 ? high_halves(bytes) : low_halves(bytes));
    }
  }
}

template <class E>
void decode_q6_k(const uint8_t* block, E* out) {
  const float scale = half(block + 208);
  for (int i = 0; i < 16; i++) {  // 16 weights with a scale
    const int part = i / 8, line = i % 8 / 2, side = i % 2 * 16;
    const uint8_t* low = block + part * 64 + line % 2 * 32 + side;
    const uint8_t* top = block + 128 + part * 32 + side;
    const __m128i lows = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    const __m128i tops = _mm_loadu_si128(reinterpret_cast<const __m128i*>(top));
    const __m128i shifted = _mm_srl_epi16(tops, _mm_cvtsi32_si128(2 * line));
    const __m128i two = _mm_and_si128(shifted, _mm_set1_epi8(3));
    const __m128i four = line < 2 ? low_halves(lows) : high_halves(lows);
    const __m128i code = _mm_or_si128(four, _mm_slli_epi16(two, 4));
    const __m512i steps = _mm512_sub_epi32(_mm512_cvtepu8_epi32(code), _mm512_set1_epi32(32));
    const float step = static_cast<int8_t>(block[192 + i]) * scale;
    put(out + i * 16, _mm512_mul_ps(_mm512_cvtepi32_ps(steps), _mm512_set1_ps(step)));
  }
}

template <class E>
void decode(const Matrix& m, int64_t row, E* out) {
  const uint8_t* codes = at<uint8_t>(m.codes) + row * m.row_bytes;
  const int64_t columns = m.columns;
  switch (m.kind) {
    case kInt8:
    case kInt8Weight: {
      const __m512 scale = _mm512_set1_ps(at<float>(m.scales)[row]);
      int64_t i = 0;
      for (; i + 16 <= columns; i += 16) put(out + i, _mm512_mul_ps(signed16(codes + i), scale));
      const __mmask16 rest = first_lanes(columns - i);
      put(out + i, _mm512_mul_ps(signed16(codes + i, rest), scale), rest);
      return;
    }
    case kFp8: {
      const float* scales = at<float>(m.scales) + row / m.group_rows * m.groups;
      for (int64_t i = 0; i < columns;) {
        const __m512 scale = _mm512_set1_ps(*scales++);
        const int64_t end = i + m.group < columns ? i + m.group : columns;
        for (; i + 16 <= end; i += 16) put(out + i, _mm512_mul_ps(fp8(codes + i, 0xffff), scale));
        if (i < end) {
          const __mmask16 rest = first_lanes(end - i);
          put(out + i, _mm512_mul_ps(fp8(codes + i, rest), scale), rest);
          i = end;
        }
      }
      return;
    }
    case kHighFirst:
    case kLowFirst: {
      const __m512 values = get(at<float>(m.values));
      for (int64_t g = 0; g < m.groups; g++, codes += m.group / 2, out += m.group) {
        const __m512 weights = _mm512_mul_ps(values, _mm512_set1_ps(scale_of_block(m, row, g)));
        m.kind == kHighFirst ? decode_pairs<true>(codes, m.group, weights, out)
                             : decode_pairs<false>(codes, m.group, weights, out);
      }
      return;
    }
    case kInt4Half:
    case kInt4Bf16:
      for (int64_t g = 0; g < m.groups; g++, codes += m.group / 2, out += m.group)
        decode_pairs<false>(codes, m.group, integers_of_block(m, row, g), out);
      return;
    case kQ8_0:
      for (int64_t i = 0; i < columns; i += 32, codes += 34) {
        const __m512 scale = _mm512_set1_ps(half(codes));
        put(out + i, _mm512_mul_ps(signed16(codes + 2), scale));
        put(out + i + 16, _mm512_mul_ps(signed16(codes + 18), scale));
      }
      return;
    case kQ4_0:
      for (int64_t i = 0; i < columns; i += 32, codes += 18) {
        const __m512 steps = _mm512_sub_ps(codes16(), _mm512_set1_ps(8));
        decode_halves(codes + 2, _mm512_mul_ps(steps, _mm512_set1_ps(half(codes))), out + i);
      }
      return;
    case kQ4_1:
      for (int64_t i = 0; i < columns; i += 32, codes += 20) {
        const __m512 steps = _mm512_mul_ps(codes16(), _mm512_set1_ps(half(codes)));
        decode_halves(codes + 4, _mm512_add_ps(steps, _mm512_set1_ps(half(codes + 2))), out + i);
      }
      return;
    case kQ4_K:
      for (int64_t i = 0; i < columns; i += 256, codes += 144) decode_q4_k(codes, out + i);
      return;
    case kQ6_K:
      for (int64_t i = 0; i < columns; i += 256, codes += 210) decode_q6_k(codes, out + i);
      return;
    default:
      return;
  }
}

// ---- Sums ----

// Lanes of weights that are multiplied at a time: 16 of fp32, 32 of bf16, 64 of int8.
inline __m512 lanes(const float* p) { return _mm512_loadu_ps(p); }
inline __m512i lanes(const Bf16* p) { return _mm512_loadu_si512(p); }
inline __m512i lanes(const uint8_t* p) { return _mm512_loadu_si512(p); }

inline __m512 lanes(const float* p, int64_t count) { return get(p, first_lanes(count)); }

inline __m512i lanes(const Bf16* p, int64_t count) {
  return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
}

inline __m512i lanes(const uint8_t* p, int64_t count) {
  return _mm512_maskz_loadu_epi8((1ull << count) - 1, p);
}

// Products are added in place by assembly, as compilers move sums from register to register.
inline void add(const float*, __m512& sum, __m512 w, __m512 x) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

inline void add(const Bf16*, __m512& sum, __m512i w, __m512i x) {
#ifdef __AVX512BF16__
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#else
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const auto even = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
  const auto odd = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_epi32(v, high)); };
  sum = _mm512_fmadd_ps(odd(w), odd(x), _mm512_fmadd_ps(even(w), even(x), sum));
#endif
}

#ifdef __AVX512VNNI__
inline void add(const uint8_t*, __m512& sum, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}
#endif

struct FloatSum {
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};

struct IntegerSum {
  static __m512 add(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(words(a), words(b)));
  }
};

// The sums over the lanes of [rows][tokens] vectors, [tokens][rows]: lane i + 8 is added to i, then
// i + 4, i + 2 and i + 1.
template <class Sum>
inline __m512 totals(const __m512 (&v)[kTile][kTile]) {
  __m512 quarters[kTile];
  for (int i = 0; i < kTile; i++) {
    const __m512* r = v[i];
    const auto fold = [](__m512 a, __m512 b) {
      return Sum::add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 first = fold(r[0], r[1]), second = fold(r[2], r[3]);
    quarters[i] = Sum::add(_mm512_shuffle_f32x4(first, second, 0x88),
                           _mm512_shuffle_f32x4(first, second, 0xdd));
  }
  const auto fold = [](__m512 a, __m512 b) {
    return Sum::add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  };
  const __m512 first = fold(quarters[0], quarters[1]), second = fold(quarters[2], quarters[3]);
  return Sum::add(_mm512_shuffle_ps(first, second, 0x88), _mm512_shuffle_ps(first, second, 0xdd));
}

// Names instead of arrays, as compilers keep arrays of sums in memory.
#define FOUR_SUMS(t) \
  __m512 s##t##0 = _mm512_setzero_ps(), s##t##1 = s##t##0, s##t##2 = s##t##0, s##t##3 = s##t##0;
#define ADD_TOKEN(t, ...)                                   \
  if constexpr (T > t) {                                    \
    const auto inputs = lanes(x + t * x_stride + __VA_ARGS__); \
    add(x, s##t##0, w0, inputs);                            \
    add(x, s##t##1, w1, inputs);                            \
    add(x, s##t##2, w2, inputs);                            \
    add(x, s##t##3, w3, inputs);                            \
  }
#define ADD_TILE(...)                                                              \
  {                                                                                \
    const auto w0 = lanes(w[0] + __VA_ARGS__), w1 = lanes(w[1] + __VA_ARGS__);     \
    const auto w2 = lanes(w[2] + __VA_ARGS__), w3 = lanes(w[3] + __VA_ARGS__);     \
    ADD_TOKEN(0, __VA_ARGS__)                                                      \
    ADD_TOKEN(1, __VA_ARGS__)                                                      \
    ADD_TOKEN(2, __VA_ARGS__)                                                      \
    ADD_TOKEN(3, __VA_ARGS__)                                                      \
  }

// The sums of four rows and T tokens, [tokens][rows].
template <int T, class E>
inline __m512 tile(const E* const (&w)[kTile], const E* x, int64_t x_stride, int64_t columns) {
  constexpr int64_t step = 64 / sizeof(E);
  FOUR_SUMS(0) FOUR_SUMS(1) FOUR_SUMS(2) FOUR_SUMS(3)
  int64_t i = 0;
  for (; i + step <= columns; i += step) ADD_TILE(i)
  if (i < columns) ADD_TILE(i, columns - i)
  return totals<std::conditional_t<std::is_same_v<E, uint8_t>, IntegerSum, FloatSum>>(
      {{s00, s10, s20, s30}, {s01, s11, s21, s31}, {s02, s12, s22, s32}, {s03, s13, s23, s33}});
}

// Calls put(row, rows, token, tokens, sums) for all rows and tokens of a block.
template <class E, class Put>
void multiply_rows(const E* w, int64_t w_stride, int64_t rows, const E* x, int64_t x_stride,
                   int64_t tokens, int64_t columns, Put put) {
  for (int64_t t = 0; t < tokens; t += kTile) {
    const int64_t some = tokens - t < kTile ? tokens - t : kTile;
    const E* inputs = x + t * x_stride;
    for (int64_t n = 0; n < rows; n += kTile) {
      const int64_t few = rows - n < kTile ? rows - n : kTile;
      const E* first = w + n * w_stride;
      // Behind the last row, it is read again.
      const E* const four[kTile] = {first, first + (few > 1 ? 1 : 0) * w_stride,
                                    first + (few > 2 ? 2 : 0) * w_stride,
                                    first + (few > 3 ? 3 : 0) * w_stride};
      put(n, few, t, some,
          some == 1   ? tile<1>(four, inputs, x_stride, columns)
          : some == 2 ? tile<2>(four, inputs, x_stride, columns)
          : some == 3 ? tile<3>(four, inputs, x_stride, columns)
                      : tile<4>(four, inputs, x_stride, columns));
    }
  }
}

// Rows of a block: few for few tokens, so that decoded rows stay in L1.
inline int64_t rows_at_once(int64_t tokens, int64_t row_bytes) {
  const int64_t most = tokens <= kTile ? 0 : kBufferBytes / row_bytes / kTile * kTile;
  return most < kTile ? kTile : most > 64 ? 64 : most;
}

// Calls run(first row, end) for blocks of rows, in threads.
template <class Run>
void by_blocks(int64_t rows, int64_t block, int threads, Run run) {
  const int64_t blocks = (rows + block - 1) / block;
  if (threads > blocks) threads = static_cast<int>(blocks);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < threads; i++) {
    for (int64_t b = blocks * i / threads; b < blocks * (i + 1) / threads; b++)
      run(b * block, rows < (b + 1) * block ? rows : (b + 1) * block);
  }
}

// Writes the sums of some rows to y.
inline void put_sums(float* y, int64_t y_stride, int64_t rows, int64_t tokens, __m512 sums) {
  float numbers[16];
  _mm512_storeu_ps(numbers, sums);
  for (int64_t t = 0; t < tokens; t++, y += y_stride) {
    if (rows == kTile) {
      _mm_storeu_ps(y, _mm_loadu_ps(numbers + t * kTile));
    } else {
      for (int64_t n = 0; n < rows; n++) y[n] = numbers[t * kTile + n];
    }
  }
}

inline void put_sums(Bf16* y, int64_t y_stride, int64_t rows, int64_t tokens, __m512 sums) {
  Bf16 numbers[16];
  put(numbers, sums);
  for (int64_t t = 0; t < tokens; t++, y += y_stride)
    std::memcpy(y, numbers + t * kTile, (rows == kTile ? kTile : rows) * sizeof(Bf16));
}

enum Use { kRows, kInputs };

template <class E, Use use>
E* buffer(int64_t size) {
  static thread_local std::vector<E> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}

template <class E>
void multiply(const Matrix& m, const E* x, int64_t x_stride, int64_t tokens, E* y, int64_t y_stride,
              int threads) {
  const int64_t columns = m.columns, block = rows_at_once(tokens, columns * sizeof(E));
  by_blocks(m.rows, block, threads, [&](int64_t start, int64_t stop) {
    const E* w = at<E>(m.codes) + start * columns;
    if (m.kind != kPlain) {
      E* decoded = buffer<E, kRows>(block * columns);
      for (int64_t row = start; row < stop; row++)
        decode(m, row, decoded + (row - start) * columns);
      w = decoded;
    }
    multiply_rows(w, columns, stop - start, x, x_stride, tokens, columns,
                  [&](int64_t n, int64_t rows, int64_t t, int64_t some, __m512 sums) {
                    put_sums(y + t * y_stride + start + n, y_stride, rows, some, sums);
                  });
  });
}

#ifdef __AVX512VNNI__

// x in 8 bits with an offset of 128, and the step of each row: the tokens, then the rests of some,
// which add to the outputs of their owners.
struct Rounded {
  const uint8_t* codes;
  const float* steps;
  const int64_t* owners;  // of the rests
  int64_t tokens, rests, columns;
};

// Rounds a row; returns the sum of the codes' magnitudes. With `whole_step` the row is what a
// rounding by it left, whose codes are in `codes`.
template <class E>
int64_t round_row(const E* x, int64_t columns, uint8_t* codes, float* step,
                  const uint8_t* whole = nullptr, float whole_step = 0) {
  const auto inputs = [&](int64_t i, __mmask16 some) {
    const __m512 v = get(x + i, some);
    if (!whole) return v;
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, whole + i));
    const __m512 steps = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128)));
    return _mm512_maskz_sub_ps(some, v, _mm512_mul_ps(steps, _mm512_set1_ps(whole_step)));
  };
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < columns; i += 16) {
    const __m512i bits = words(inputs(i, first_lanes(columns - i)));
    most = _mm512_max_ps(most, _mm512_castsi512_ps(_mm512_and_epi32(bits, magnitude)));
  }
  const float size = _mm512_reduce_max_ps(most) / 127;
  *step = size > kLeastStep ? size : kLeastStep;
  const __m512 divisor = _mm512_set1_ps(*step);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < columns; i += 16) {
    const __mmask16 some = first_lanes(columns - i);
    const __m512i steps = _mm512_cvtps_epi32(_mm512_div_ps(inputs(i, some), divisor));
    sum = _mm512_add_epi32(sum, _mm512_abs_epi32(steps));
    const __m512i code = _mm512_add_epi32(steps, _mm512_set1_epi32(128));
    _mm_mask_storeu_epi8(codes + i, some, _mm512_cvtepi32_epi8(code));
  }
  return _mm512_reduce_add_epi32(sum);
}

template <class E>
Rounded rounded_inputs(const E* x, int64_t x_stride, int64_t tokens, int64_t columns, int threads) {
  uint8_t* codes = buffer<uint8_t, kInputs>(2 * tokens * columns);
  float* steps = buffer<float, kInputs>(2 * tokens);
  int64_t* owners = buffer<int64_t, kInputs>(2 * tokens);
  int64_t* sums = owners + tokens;
  by_blocks(tokens, 1, threads, [&](int64_t t, int64_t) {
    sums[t] = round_row(x + t * x_stride, columns, codes + t * columns, steps + t);
  });
  int64_t rests = 0;
  for (int64_t t = 0; t < tokens; t++)
    if (sums[t] < kFewSteps * columns) owners[rests++] = t;
  by_blocks(rests, 1, threads, [&](int64_t r, int64_t) {
    const int64_t t = owners[r], row = tokens + r;
    round_row(x + t * x_stride, columns, codes + row * columns, steps + row, codes + t * columns,
              steps[t]);
  });
  return {codes, steps, owners, tokens, rests, columns};
}

inline float wide(float number) { return number; }
inline float wide(Bf16 number) {
  const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Writes the sums of some rows to y, and adds those of rests.
template <class E>
void put_or_add(E* y, int64_t y_stride, const Rounded& x, int64_t rows, int64_t t, int64_t some,
                __m512 sums) {
  float numbers[16];
  _mm512_storeu_ps(numbers, sums);
  for (int64_t i = 0; i < some; i++) {
    const bool is_rest = t + i >= x.tokens;
    E* out = y + (is_rest ? x.owners[t + i - x.tokens] : t + i) * y_stride;
    float* row = numbers + i * kTile;
    for (int64_t n = 0; is_rest && n < rows; n++) row[n] = wide(out[n]) + row[n];
    E written[16];
    put(written, _mm512_castps128_ps512(_mm_loadu_ps(row)));
    std::memcpy(out, written, rows * sizeof(E));
  }
}

template <class E>
void multiply_integers(const Matrix& m, const Rounded& x, E* y, int64_t y_stride, int threads) {
  const int32_t* sums_of_codes = at<int32_t>(m.sums);
  const float* scales = at<float>(m.scales);
  const int64_t rounded = x.tokens + x.rests;
  by_blocks(m.rows, rows_at_once(rounded, m.columns), threads, [&](int64_t start, int64_t stop) {
    const uint8_t* w = at<uint8_t>(m.codes) + start * m.row_bytes;
    multiply_rows(w, m.row_bytes, stop - start, x.codes, x.columns, rounded, m.columns,
                  [&](int64_t n, int64_t rows, int64_t t, int64_t some, __m512 sums) {
      const int64_t row = start + n;
      const __mmask16 all = first_lanes(rows);
      const __m128i of_codes = _mm_maskz_loadu_epi32(all, sums_of_codes + row);
      const __m512i offsets = _mm512_broadcast_i32x4(_mm_slli_epi32(of_codes, 7));
      const __m512 products = _mm512_cvtepi32_ps(_mm512_sub_epi32(words(sums), offsets));
      float steps[kTile] = {};
      for (int64_t i = 0; i < some; i++) steps[i] = x.steps[t + i];
      const __m512i by_token = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      const __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(steps));
      const __m512 step = _mm512_permutexvar_ps(by_token, four);
      const __m512 scale = _mm512_broadcast_f32x4(_mm_maskz_loadu_ps(all, scales + row));
      const __m512 outputs = _mm512_mul_ps(_mm512_mul_ps(products, step), scale);
      if (t + some <= x.tokens) {
        put_sums(y + t * y_stride + row, y_stride, rows, some, outputs);
      } else {
        put_or_add(y + row, y_stride, x, rows, t, some, outputs);
      }
    });
  });
}

#endif

template <class E>
void multiply_all(const Matrix* m, int64_t count, const E* x, int64_t x_stride, int64_t tokens,
                  E* y, int64_t y_stride, int threads) {
#ifdef __AVX512VNNI__
  Rounded rounded{};
#endif
  for (; count--; y += m++->rows) {
#ifdef __AVX512VNNI__
    if (m->kind == kInt8) {
      if (!rounded.codes) rounded = rounded_inputs(x, x_stride, tokens, m->columns, threads);
      multiply_integers(*m, rounded, y, y_stride, threads);
      continue;
    }
#endif
    multiply(*m, x, x_stride, tokens, y, y_stride, threads);
  }
}

}  // namespace

extern "C" int pcg_has_vnni() {
#ifdef __AVX512VNNI__
  return 1;
#else
  return 0;
#endif
}

// y [tokens, rows of all matrices] = x W̃ᵀ, both of fp32 or of bf16. Strides count elements, from
// one token to the next.
extern "C" void pcg_multiply(const int64_t* matrices, int64_t count, const void* x,
                             int64_t x_stride, int64_t tokens, void* y, int64_t y_stride,
                             int is_bf16, int threads) {
  const Matrix* m = reinterpret_cast<const Matrix*>(matrices);
  const auto run = [&](auto one) {
    using E = decltype(one);
    E* out = static_cast<E*>(y);
    multiply_all(m, count, static_cast<const E*>(x), x_stride, tokens, out, y_stride, threads);
  };
  is_bf16 ? run(Bf16()) : run(0.0f);
}

// Rows of a matrix, [stop - start, columns], in fp32 or bf16.
extern "C" void pcg_dequantize(const int64_t* matrix, int64_t start, int64_t stop, void* out,
                               int is_bf16, int threads) {
  const Matrix& m = *reinterpret_cast<const Matrix*>(matrix);
  const auto run = [&](auto one) {
    using E = decltype(one);
    by_blocks(stop - start, 1, threads, [&](int64_t row, int64_t) {
      decode(m, start + row, static_cast<E*>(out) + row * m.columns);
    });
  };
  is_bf16 ? run(Bf16()) : run(0.0f);
}
