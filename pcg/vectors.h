// Vectors of 16 numbers in fp32, read from fp32 or bf16; compilers split them where registers are
// shorter.

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int kLanes = 16;
constexpr int kLine = 64;  // bytes of a cache line

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));

struct Bf16 {
  uint16_t bits;
};

template <int N>
using Count = std::integral_constant<int, N>;

template <class T>
inline T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Floats load(const Bf16* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Floats v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

inline float widened(float v) { return v; }

inline float widened(Bf16 v) {
  const uint32_t word = static_cast<uint32_t>(v.bits) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

// Rounds to the nearest, ties to even, as torch does; NaN stays NaN.
template <class E>
inline E rounded(float v);

template <>
inline float rounded<float>(float v) {
  return v;
}

template <>
inline Bf16 rounded<Bf16>(float v) {
  uint32_t word;
  std::memcpy(&word, &v, sizeof word);
  const uint32_t sum = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(v != v ? 0x7fc0 : sum)};
}

inline float total(Floats v) {
  Floats8 eight[2];
  std::memcpy(eight, &v, sizeof eight);
  eight[0] += eight[1];
  Floats4 four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

}  // namespace
