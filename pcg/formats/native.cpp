// Products by stored weights, and their dequantization, on CPUs with AVX-512 or AVX2.
//
//     y = x W̃ᵀ        x [tokens, columns], W̃ [rows, columns] in the form in which it is stored
//
// For few tokens, weights are decoded in registers. For more, some columns of a few rows are decoded
// into a buffer that L1 holds, and multiplied by all tokens. 4-bit codes are looked up in a register that holds the 16 weights
// of a block. An output is a sum over lanes in an order that the columns alone decide: it depends
// neither on the tokens beside it nor on the number of threads.
//
// It is compiled without contraction, as dequantized weights are those of PyTorch to the bit.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_AVX512
#else
#include "avx512.h"
#endif

namespace {

constexpr int kTile = 4;                 // rows, and tokens, whose sums are held in registers
#ifdef HAS_AVX512
constexpr int64_t kTileTokens = kTile;
constexpr int64_t kFewTokens = 8;        // by which codes are decoded again for each tile
#else
constexpr int64_t kTileTokens = 2;       // 16 registers hold no more
constexpr int64_t kFewTokens = 1;
#endif
constexpr int64_t kTokens = 128;         // whose inputs L2 holds; weights are decoded for each
constexpr int64_t kBlock = 16;           // rows that are decoded together
constexpr int64_t kColumnBytes = 2048;   // of each, as many as L1 holds of all
constexpr int64_t kAhead = 8192;         // bytes
constexpr int kNestedBlock = 256;
constexpr float kLeastStep = 1.17549435e-38f;
constexpr int64_t kFewSteps = 10;        // `FEW_STEPS` of `pcg.formats.int8`

// The kinds of `pcg.formats.native`.
enum Kind : int64_t {
  kInt8, kInt8Weight, kHighFirst, kLowFirst, kInt4Half, kInt4Bf16, kFp8, kQ8_0, kQ4_0, kQ4_1,
  kQ4_K, kQ6_K, kFloat,
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

// The same for a factor of products, which take denormal numbers for 0 in any case.
inline __m256i rounded_factor(__m512 v) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  return rounded(v);
#endif
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
  using Pairs = __m512i;  // 16 bytes, of two codes each
  static Pairs pairs(__m128i bytes) { return _mm512_cvtepu8_epi32(bytes); }
  __m512 low(Pairs p) const { return _mm512_permutexvar_ps(p, weights); }  // which reads four bits
  __m512 high(Pairs p) const { return low(_mm512_srli_epi32(p, 4)); }
  __m512 weights;
  explicit Table(__m512 v) : weights(v) {}
  static Table factors(__m512 v) { return Table(v); }
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
  using Pairs = __m256i;
  static Pairs pairs(__m128i bytes) { return _mm256_cvtepu8_epi16(bytes); }
  __m256i low(Pairs p) const { return _mm256_permutexvar_epi16(p, weights); }
  __m256i high(Pairs p) const { return low(_mm256_srli_epi16(p, 4)); }
  __m256i weights;
  explicit Table(__m512 v) : weights(rounded(v)) {}
  explicit Table(__m256i v) : weights(v) {}
  static Table factors(__m512 v) { return Table(rounded_factor(v)); }
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
  if (!m.scale_values) return at<const float>(m.scales)[place];
  float scale = at<const float>(m.scale_values)[at<const uint8_t>(m.scales)[place]];
  if (m.nested) {
    float offset;
    std::memcpy(&offset, &m.offset, sizeof offset);
    const int64_t number = m.first + row * m.row_blocks + block;
    scale = scale * at<const float>(m.nested)[number / kNestedBlock] + offset;
  }
  return scale;
}

inline __m512 integers_of_block(const Matrix& m, int64_t row, int64_t block) {
  const int64_t place = row * m.groups + block;
  const float zero = at<const uint8_t>(m.zeros)[place];
  const __m512 steps = _mm512_sub_ps(codes16(), _mm512_set1_ps(zero));
  const uint16_t bits = at<const uint16_t>(m.scales)[place];
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
  const uint8_t* codes = at<const uint8_t>(m.codes) + row * m.row_bytes;
  const int64_t columns = m.columns;
  switch (m.kind) {
    case kInt8:
    case kInt8Weight: {
      const __m512 scale = _mm512_set1_ps(at<const float>(m.scales)[row]);
      int64_t i = 0;
      for (; i + 16 <= columns; i += 16) put(out + i, _mm512_mul_ps(signed16(codes + i), scale));
      const __mmask16 rest = first_lanes(columns - i);
      put(out + i, _mm512_mul_ps(signed16(codes + i, rest), scale), rest);
      return;
    }
    case kFp8: {
      const float* scales = at<const float>(m.scales) + row / m.group_rows * m.groups;
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
      const __m512 values = get(at<const float>(m.values));
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

// ---- Weights in registers, for a product of few tokens ----

// 32 neighbouring weights of a row, as `decode` writes them: vectors of 16 in fp32, or one of bf16.
struct Floats32 {
  __m512 first, second;
};

inline Floats32 joined(__m512 a, __m512 b, float) { return {a, b}; }
inline __m512i joined(__m256i a, __m256i b, Bf16) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
inline __m512i joined(__m512 a, __m512 b, Bf16) {
  return joined(rounded_factor(a), rounded_factor(b), Bf16());
}

inline void put_32(float* out, const Floats32& w) {
  _mm512_storeu_ps(out, w.first);
  _mm512_storeu_ps(out + 16, w.second);
}

inline void put_32(Bf16* out, __m512i w) { _mm512_storeu_si512(out, w); }

// Reads a row from a column on, a multiple of 32, 32 columns at a time.
template <Kind kind, class E>
class Reader {
 public:
  Reader(const Matrix& m, int64_t row, int64_t column = 0)
      : m_(m), row_(row), codes_(at<const uint8_t>(m.codes) + row * m.row_bytes) {
    codes_ += m.row_bytes * column / m.columns;
    if constexpr (kind == kHighFirst || kind == kLowFirst) values_ = get(at<const float>(m.values));
    if constexpr (kind == kInt8Weight) scale_ = _mm512_set1_ps(at<const float>(m.scales)[row]);
    if constexpr (has_groups) {
      group_ = column / m.group;
      if (column % m.group) start_group();
      left_ -= column % m.group;
    }
  }

  __attribute__((always_inline)) auto next() {
    if constexpr (kind == kQ4_0 || kind == kQ4_1) {
      constexpr int head = kind == kQ4_0 ? 2 : 4;
      uint32_t bits = 0;
      std::memcpy(&bits, codes_, head);
      const __m128 numbers = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits)));
      const __m512 scale = _mm512_broadcastss_ps(numbers);
      const __m512 offset = _mm512_broadcastss_ps(_mm_movehdup_ps(numbers));
      const __m512 weights =
          kind == kQ4_0 ? _mm512_mul_ps(_mm512_sub_ps(codes16(), _mm512_set1_ps(8)), scale)
                        : _mm512_add_ps(_mm512_mul_ps(codes16(), scale), offset);
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes_ + head));
      codes_ += head + 16;
      const auto table = Table<E>::factors(weights);
      const auto codes = table.pairs(bytes);
      return joined(table.low(codes), table.high(codes), E());
    } else if constexpr (kind == kQ8_0 || kind == kInt8Weight) {
      constexpr int head = kind == kQ8_0 ? 2 : 0;
      const __m512 scale = head ? _mm512_set1_ps(half(codes_)) : scale_;
      const __m512 first = _mm512_mul_ps(signed16(codes_ + head), scale);
      const __m512 second = _mm512_mul_ps(signed16(codes_ + head + 16), scale);
      codes_ += head + 32;
      return joined(first, second, E());
    } else if constexpr (kind == kFp8) {
      if (left_ == 0) start_group();
      const __m512 first = _mm512_mul_ps(fp8(codes_, 0xffff), scale_);
      const __m512 second = _mm512_mul_ps(fp8(codes_ + 16, 0xffff), scale_);
      left_ -= 32;
      codes_ += 32;
      return joined(first, second, E());
    } else {
      if (left_ == 0) start_group();
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes_));
      left_ -= 32;
      codes_ += 16;
      const __m128i low = low_halves(bytes), high = high_halves(bytes);
      const __m128i a = kind == kHighFirst ? high : low, b = kind == kHighFirst ? low : high;
      return joined(table_.read(_mm_unpacklo_epi8(a, b)), table_.read(_mm_unpackhi_epi8(a, b)),
                    E());
    }
  }

 private:
  static constexpr bool has_pairs =
      kind == kHighFirst || kind == kLowFirst || kind == kInt4Half || kind == kInt4Bf16;
  static constexpr bool has_groups = has_pairs || kind == kFp8;

  __attribute__((always_inline)) void start_group() {
    if constexpr (kind == kFp8) {
      const int64_t place = row_ / m_.group_rows * m_.groups + group_;
      scale_ = _mm512_set1_ps(at<const float>(m_.scales)[place]);
    } else if constexpr (kind == kHighFirst || kind == kLowFirst) {
      const __m512 scale = _mm512_set1_ps(scale_of_block(m_, row_, group_));
      table_ = Table<E>::factors(_mm512_mul_ps(values_, scale));
    } else {
      table_ = Table<E>::factors(integers_of_block(m_, row_, group_));
    }
    group_++;
    left_ = m_.group;
  }

  const Matrix& m_;
  int64_t row_;
  const uint8_t* codes_;
  int64_t group_ = 0, left_ = 0;  // the next group, and columns of the present one
  __m512 values_ = _mm512_setzero_ps(), scale_ = values_;
  Table<E> table_{values_};
};

// Fetches bytes that are read soon, in the order of their addresses: memory is read at half the speed
// where four rows are fetched side by side.
inline void fetch(const void* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += kLine)
    _mm_prefetch(static_cast<const char*>(row) + b, _MM_HINT_T0);
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

// A register of sums. Products are added in place by assembly, as compilers move sums from register
// to register.
#ifdef HAS_AVX512
using Sums = __m512;
inline void add(const float*, Sums& sum, __m512 w, __m512 x) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}
#else
using Sums = __m256;
inline void add(const float*, Sums& sum, __m512 w, __m512 x) {
  sum = _mm256_fmadd_ps(w.b, x.b, _mm256_fmadd_ps(w.a, x.a, sum));
}
#endif

inline void add(const Bf16* p, Sums& sum, __m512i w, __m512i x) {
#ifdef __AVX512BF16__
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#else
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const auto even = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
  const auto odd = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_epi32(v, high)); };
  add(reinterpret_cast<const float*>(p), sum, even(w), even(x));
  add(reinterpret_cast<const float*>(p), sum, odd(w), odd(x));
#endif
}

inline void add(const uint8_t*, Sums& sum, __m512i w, __m512i x) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
#else
  const auto products = [](__m256i a, __m256i b) {
    return _mm512_madd_epi16(_mm512_cvtepi8_epi16(a), _mm512_cvtepu8_epi16(b));
  };
  const __m512i low = products(_mm512_castsi512_si256(w), _mm512_castsi512_si256(x));
  const __m512i high = products(_mm512_extracti64x4_epi64(w, 1), _mm512_extracti64x4_epi64(x, 1));
  const __m512i both = _mm512_add_epi32(low, high);
#ifdef HAS_AVX512
  sum = _mm512_castsi512_ps(_mm512_add_epi32(words(sum), both));
#else
  const __m256i all = _mm256_add_epi32(both.a, both.b);
  sum = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), all));
#endif
#endif
}

#ifdef HAS_AVX512

inline Sums no_sums() { return _mm512_setzero_ps(); }
inline Sums sums_of(const float* held) { return get(held); }
inline void hold(float* held, Sums v) { put(held, v); }

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
inline __m512 totals(const Sums (&v)[kTile][kTile]) {
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

#else

inline Sums no_sums() { return _mm256_setzero_ps(); }
inline Sums sums_of(const float* held) { return _mm256_loadu_ps(held); }
inline void hold(float* held, Sums v) { _mm256_storeu_ps(held, v); }

struct FloatSum {
  static __m256 neighbours(__m256 a, __m256 b) { return _mm256_hadd_ps(a, b); }
  static __m128 add(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};

struct IntegerSum {
  static __m256 neighbours(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_hadd_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static __m128 add(__m128 a, __m128 b) {
    return _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(a), _mm_castps_si128(b)));
  }
};

// The sums over the lanes of [rows][tokens] vectors, [tokens][rows].
template <class Sum>
inline __m512 totals(const Sums (&v)[kTile][kTile]) {
  const auto token = [&](int t) {
    const __m256 four = Sum::neighbours(Sum::neighbours(v[0][t], v[1][t]),
                                        Sum::neighbours(v[2][t], v[3][t]));
    return Sum::add(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
  };
  return {_mm256_set_m128(token(1), token(0)), _mm256_setzero_ps()};
}

#endif

template <class E>
using SumOf = std::conditional_t<std::is_same_v<E, uint8_t>, IntegerSum, FloatSum>;

// Names instead of arrays, as compilers keep arrays of sums in memory. The sums of earlier columns
// are in `held`, if any.
#define FOUR_SUMS(t)                                                            \
  Sums s##t##0 = no_sums(), s##t##1 = s##t##0, s##t##2 = s##t##0, s##t##3 = s##t##0; \
  if (T > t && !is_first) {                                                     \
    s##t##0 = sums_of(held + t * 64), s##t##1 = sums_of(held + t * 64 + 16);    \
    s##t##2 = sums_of(held + t * 64 + 32), s##t##3 = sums_of(held + t * 64 + 48); \
  }
#define HOLD_SUMS(t)                                                            \
  if constexpr (T > t) {                                                        \
    hold(held + t * 64, s##t##0), hold(held + t * 64 + 16, s##t##1);            \
    hold(held + t * 64 + 32, s##t##2), hold(held + t * 64 + 48, s##t##3);       \
  }
#define TOTALS(Sum)                                                             \
  totals<Sum>({{s00, s10, s20, s30}, {s01, s11, s21, s31}, {s02, s12, s22, s32}, \
               {s03, s13, s23, s33}})
#define ADD_TOKEN(t, ...)                                   \
  if constexpr (T > t) {                                    \
    const auto inputs = lanes(x + t * x_stride + __VA_ARGS__); \
    add(x, s##t##0, w0, inputs);                            \
    add(x, s##t##1, w1, inputs);                            \
    add(x, s##t##2, w2, inputs);                            \
    add(x, s##t##3, w3, inputs);                            \
  }
#ifdef HAS_AVX512
#define ADD_TILE(...)                                                              \
  {                                                                                \
    const auto w0 = lanes(w[0] + __VA_ARGS__), w1 = lanes(w[1] + __VA_ARGS__);     \
    const auto w2 = lanes(w[2] + __VA_ARGS__), w3 = lanes(w[3] + __VA_ARGS__);     \
    ADD_TOKEN(0, __VA_ARGS__)                                                      \
    ADD_TOKEN(1, __VA_ARGS__)                                                      \
    ADD_TOKEN(2, __VA_ARGS__)                                                      \
    ADD_TOKEN(3, __VA_ARGS__)                                                      \
  }
#else
#define ADD_ROW(n, ...)                           \
  {                                               \
    const auto weights = lanes(w[n] + __VA_ARGS__); \
    add(x, s0##n, weights, first);                \
    if constexpr (T > 1) add(x, s1##n, weights, second); \
  }
#define ADD_TILE(...)                                                    \
  {                                                                      \
    const auto first = lanes(x + __VA_ARGS__);                           \
    const auto second = lanes(x + (T > 1 ? x_stride : 0) + __VA_ARGS__); \
    ADD_ROW(0, __VA_ARGS__)                                              \
    ADD_ROW(1, __VA_ARGS__)                                              \
    ADD_ROW(2, __VA_ARGS__)                                              \
    ADD_ROW(3, __VA_ARGS__)                                              \
  }
#endif

inline void add_32(const float* x, Sums& sum, const Floats32& w) {
  add(x, sum, w.first, lanes(x));
  add(x, sum, w.second, lanes(x + 16));
}

inline void add_32(const Bf16* x, Sums& sum, __m512i w) { add(x, sum, w, lanes(x)); }

#define ADD_CODES(t)                       \
  if constexpr (T > t) {                   \
    const E* inputs = x + t * x_stride + i; \
    add_32(inputs, s##t##0, w0);           \
    add_32(inputs, s##t##1, w1);           \
    add_32(inputs, s##t##2, w2);           \
    add_32(inputs, s##t##3, w3);           \
  }

// Adds the products of four rows and T tokens to `held`; returns the sums, [tokens][rows], if these
// are the last columns. As many bytes are fetched from `ahead` on, if not null.
template <int T, class E>
inline __m512 tile(const E* const (&w)[kTile], const E* x, int64_t x_stride, int64_t columns,
                   float* held, bool is_first, bool is_last, const E* ahead) {
  constexpr int64_t step = 64 / sizeof(E);
  FOUR_SUMS(0) FOUR_SUMS(1) FOUR_SUMS(2) FOUR_SUMS(3)
  int64_t i = 0;
  for (; i + step <= columns; i += step) {
    if (ahead) fetch(ahead + kTile * i, kTile * kLine);
    ADD_TILE(i)
  }
  if (i < columns) ADD_TILE(i, columns - i)
  if (is_last)
    return TOTALS(SumOf<E>);
  HOLD_SUMS(0) HOLD_SUMS(1) HOLD_SUMS(2) HOLD_SUMS(3)
  return _mm512_setzero_ps();
}

enum Use { kRows, kInputs, kHeld, kChosen, kProducts };

template <class E, Use use>
E* buffer(int64_t size) {
  static thread_local std::vector<E> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// How many rows ahead to fetch: whole tiles.
inline int64_t rows_ahead(int64_t row_bytes) {
  return (kAhead / (kTile * row_bytes) + 1) * kTile;
}

// Weights of the rows of a block, and of how many elements further on to fetch the next.
template <class E>
struct Rows {
  const E* first;
  int64_t stride, ahead;
};

// Calls put(row, rows, token, tokens, sums) for all rows and tokens of a block. weights(column,
// width) returns the rows from a column on; a few columns are multiplied by all tokens, so that
// weights stay in L1.
template <class E, class Weights, class Put>
void multiply_rows(int64_t rows, const E* x, int64_t x_stride, int64_t tokens, int64_t columns,
                   Weights weights, Put put) {
  constexpr int64_t most = kColumnBytes / sizeof(E);
  const int64_t tiles = (rows + kTile - 1) / kTile, groups = (tokens + kTileTokens - 1) / kTileTokens;
  float* sums = columns > most ? buffer<float, kHeld>(tiles * groups * 256) : nullptr;
  for (int64_t c = 0; c < columns; c += most) {
    const int64_t width = columns - c < most ? columns - c : most;
    const bool is_first = c == 0, is_last = c + width == columns;
    const Rows<E> w = weights(c, width);
    float* held = sums;
    for (int64_t t = 0; t < tokens; t += kTileTokens) {
      const int64_t some = tokens - t < kTileTokens ? tokens - t : kTileTokens;
      const E* inputs = x + t * x_stride + c;
      for (int64_t n = 0; n < rows; n += kTile, held += sums ? 256 : 0) {
        const int64_t few = rows - n < kTile ? rows - n : kTile;
        const E* first = w.first + n * w.stride;
        // Behind the last row, it is read again.
        const E* const four[kTile] = {first, first + (few > 1 ? 1 : 0) * w.stride,
                                      first + (few > 2 ? 2 : 0) * w.stride,
                                      first + (few > 3 ? 3 : 0) * w.stride};
        const auto run = [&](auto count) {
          return tile<count.value>(four, inputs, x_stride, width, held, is_first, is_last,
                                   t == 0 && w.ahead ? first + w.ahead + (kTile - 1) * c : nullptr);
        };
        const __m512 result = some == 1   ? run(std::integral_constant<int, 1>())
                              : some == 2 ? run(std::integral_constant<int, 2>())
                              : some == 3 ? run(std::integral_constant<int, 3>())
                                          : run(std::integral_constant<int, 4>());
        if (is_last) put(n, few, t, some, result);
      }
    }
  }
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

// The sums of four rows and T tokens, [tokens][rows], in the order of `tile`.
template <Kind kind, int T, class E>
inline __m512 tile_of_codes(const Matrix& m, const int64_t (&rows)[kTile], const E* x,
                            int64_t x_stride, bool fetches) {
  constexpr bool is_first = true;
  const float* held = nullptr;
  Reader<kind, E> r0(m, rows[0]), r1(m, rows[1]), r2(m, rows[2]), r3(m, rows[3]);
  FOUR_SUMS(0) FOUR_SUMS(1) FOUR_SUMS(2) FOUR_SUMS(3)
  const uint8_t* ahead = at<const uint8_t>(m.codes) + (rows[0] + rows_ahead(m.row_bytes)) * m.row_bytes;
  const int64_t step = kTile * m.row_bytes * 32 / m.columns;
  for (int64_t i = 0; i < m.columns; i += 32, ahead += step) {
    if (fetches) fetch(ahead, step);
    const auto w0 = r0.next(), w1 = r1.next(), w2 = r2.next(), w3 = r3.next();
    ADD_CODES(0)
    ADD_CODES(1)
    ADD_CODES(2)
    ADD_CODES(3)
  }
  return TOTALS(FloatSum);
}

// y of few tokens, by weights that are decoded in registers, for each four of them.
template <Kind kind, class E>
void multiply_codes(const Matrix& m, const E* x, int64_t x_stride, int64_t tokens, E* y,
                    int64_t y_stride, int threads) {
  by_blocks(m.rows, kTile, threads, [&](int64_t start, int64_t stop) {
    // Behind the last row, it is read again.
    const int64_t few = stop - start;
    const int64_t rows[kTile] = {start, start + (few > 1 ? 1 : 0), start + (few > 2 ? 2 : 0),
                                 start + (few > 3 ? 3 : 0)};
    for (int64_t t = 0; t < tokens; t += kTileTokens) {
      const int64_t some = tokens - t < kTileTokens ? tokens - t : kTileTokens;
      const auto run = [&](auto count) {
        return tile_of_codes<kind, count.value>(m, rows, x + t * x_stride, x_stride, t == 0);
      };
      put_sums(y + t * y_stride + start, y_stride, few, some,
               some == 1   ? run(std::integral_constant<int, 1>())
               : some == 2 ? run(std::integral_constant<int, 2>())
               : some == 3 ? run(std::integral_constant<int, 3>())
                           : run(std::integral_constant<int, 4>()));
    }
  });
}

// Calls run(kind) if weights of the matrix are decoded in registers; returns whether it does.
template <class Run>
inline bool with_kind(const Matrix& m, Run run) {
  const bool is_whole = m.columns % 32 == 0;
  switch (m.kind) {
#define KIND(kind, fits) \
  case kind:             \
    return is_whole && (fits) && (run(std::integral_constant<Kind, kind>()), true);
    KIND(kInt8Weight, true)
    KIND(kHighFirst, m.group % 32 == 0)
    KIND(kLowFirst, m.group % 32 == 0)
    KIND(kInt4Half, m.group % 32 == 0)
    KIND(kInt4Bf16, m.group % 32 == 0)
    KIND(kFp8, m.group % 32 == 0)
    KIND(kQ8_0, true)
    KIND(kQ4_0, true)
    KIND(kQ4_1, true)
#undef KIND
  }
  return false;
}

template <class E>
void multiply(const Matrix& m, const E* x, int64_t x_stride, int64_t tokens, E* y, int64_t y_stride,
              int threads) {
  const auto by_codes = [&](auto kind) {
    multiply_codes<kind.value>(m, x, x_stride, tokens, y, y_stride, threads);
  };
  if (tokens <= kFewTokens && with_kind(m, by_codes)) return;
  const int64_t columns = m.columns;
  by_blocks(m.rows, tokens <= kTile ? kTile : kBlock, threads, [&](int64_t start, int64_t stop) {
    const int64_t rows = stop - start;
    const auto write = [&](int64_t n, int64_t few, int64_t t, int64_t some, __m512 sums) {
      put_sums(y + t * y_stride + start + n, y_stride, few, some, sums);
    };
    if (m.kind == kFloat) {
      const int64_t stride = m.row_bytes / sizeof(E);
      const E* first = at<const E>(m.codes) + start * stride;
      const auto plain = [&](int64_t c, int64_t) {
        return Rows<E>{first + c, stride, rows_ahead(m.row_bytes) * stride};
      };
      multiply_rows(rows, x, x_stride, tokens, columns, plain, write);
      return;
    }
    const auto by_chunks = [&](auto kind) {
      constexpr int64_t most = kColumnBytes / sizeof(E);
      E* decoded = buffer<E, kRows>(kBlock * most);
      const auto weights = [&](int64_t column, int64_t width) {
        for (int64_t n = 0; n < rows; n++) {
          const int64_t at_row = (start + n + kBlock) * m.row_bytes;
          fetch(at<const uint8_t>(m.codes) + at_row + m.row_bytes * column / columns,
                m.row_bytes * width / columns);
          Reader<kind.value, E> reader(m, start + n, column);
          for (int64_t i = 0; i < width; i += 32) put_32(decoded + n * most + i, reader.next());
        }
        return Rows<E>{decoded, most, 0};
      };
      multiply_rows(rows, x, x_stride, tokens, columns, weights, write);
    };
    if (with_kind(m, by_chunks)) return;
    E* decoded = buffer<E, kRows>(kBlock * columns);
    for (int64_t n = 0; n < rows; n++) decode(m, start + n, decoded + n * columns);
    const auto weights = [&](int64_t c, int64_t) { return Rows<E>{decoded + c, columns, 0}; };
    multiply_rows(rows, x, x_stride, tokens, columns, weights, write);
  });
}

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
    for (int64_t n = 0; is_rest && n < rows; n++) row[n] = widened(out[n]) + row[n];
    E written[16];
    put(written, _mm512_castps128_ps512(_mm_loadu_ps(row)));
    std::memcpy(out, written, rows * sizeof(E));
  }
}

template <class E>
void multiply_integers(const Matrix& m, const Rounded& x, E* y, int64_t y_stride, int threads) {
  const int32_t* sums_of_codes = at<const int32_t>(m.sums);
  const float* scales = at<const float>(m.scales);
  const int64_t rounded = x.tokens + x.rests;
  by_blocks(m.rows, rounded <= kTile ? kTile : kBlock, threads, [&](int64_t start, int64_t stop) {
    const uint8_t* w = at<const uint8_t>(m.codes) + start * m.row_bytes;
    const int64_t ahead = rows_ahead(m.row_bytes) * m.row_bytes;
    const auto weights = [&](int64_t c, int64_t) {
      return Rows<uint8_t>{w + c, m.row_bytes, ahead};
    };
    multiply_rows(stop - start, x.codes, x.columns, rounded, m.columns, weights,
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

template <class E>
void multiply_all(const Matrix* m, int64_t count, const E* x, int64_t x_stride, int64_t tokens,
                  E* y, int64_t y_stride, int threads) {
  Rounded rounded{};
  for (; count--; y += m++->rows) {
    if (m->kind == kInt8) {
      if (!rounded.codes) rounded = rounded_inputs(x, x_stride, tokens, m->columns, threads);
      multiply_integers(*m, rounded, y, y_stride, threads);
      continue;
    }
    for (int64_t t = 0; t < tokens; t += kTokens) {
      const int64_t some = tokens - t < kTokens ? tokens - t : kTokens;
      multiply(*m, x + t * x_stride, x_stride, some, y + t * y_stride, y_stride, threads);
    }
  }
}

}  // namespace

// y [tokens, rows of all matrices] = x W̃ᵀ, both of fp32 or of bf16. Strides count elements, from
// one token to the next.
struct MultiplyCall {
  int64_t matrices, count, x, x_stride, tokens, y, y_stride, is_bf16, threads;
};

extern "C" void pcg_multiply(const MultiplyCall& c) {
  const auto run = [&](auto one) {
    using E = decltype(one);
    multiply_all(at<const Matrix>(c.matrices), c.count, at<const E>(c.x), c.x_stride, c.tokens,
                 at<E>(c.y), c.y_stride, c.threads);
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}

// The outputs of rows that chose experts, each of which has `parts` matrices below each other:
// choice i of `order`, which has those of an expert after another, `sizes` of each, reads row
// i / share of x and writes row i of y.
struct ChosenCall {
  int64_t matrices, parts, order, sizes, experts, x, x_stride, share, y, y_stride, is_bf16, threads;
};

extern "C" void pcg_multiply_chosen(const ChosenCall& c) {
  const Matrix* m = at<const Matrix>(c.matrices);
  const int64_t *order = at<const int64_t>(c.order), *sizes = at<const int64_t>(c.sizes);
  const auto run = [&](auto one) {
    using E = decltype(one);
    const int64_t columns = m->columns;
    for (int64_t e = 0; e < c.experts; order += sizes[e++], m += c.parts) {
      const int64_t count = sizes[e];
      if (!count) continue;
      int64_t rows = 0;
      for (int64_t part = 0; part < c.parts; part++) rows += m[part].rows;
      E* inputs = buffer<E, kChosen>(count * columns);
      E* outputs = buffer<E, kProducts>(count * rows);
      for (int64_t i = 0; i < count; i++)
        std::memcpy(inputs + i * columns, at<const E>(c.x) + order[i] / c.share * c.x_stride,
                    columns * sizeof(E));
      multiply_all(m, c.parts, inputs, columns, count, outputs, rows, c.threads);
      for (int64_t i = 0; i < count; i++)
        std::memcpy(at<E>(c.y) + order[i] * c.y_stride, outputs + i * rows, rows * sizeof(E));
    }
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}

// Rows of a matrix, [stop - start, columns], in fp32 or bf16.
struct DequantizeCall {
  int64_t matrix, start, stop, out, is_bf16, threads;
};

extern "C" void pcg_dequantize(const DequantizeCall& c) {
  const Matrix& m = *at<const Matrix>(c.matrix);
  const auto run = [&](auto one) {
    using E = decltype(one);
    by_blocks(c.stop - c.start, 1, c.threads, [&](int64_t row, int64_t) {
      decode(m, c.start + row, at<E>(c.out) + row * m.columns);
    });
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}
