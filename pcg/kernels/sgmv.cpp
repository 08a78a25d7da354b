// LoRA of few tokens for each of many adapters, on CPUs: SGMV, shrink and expand in one go.
//
//     s = x A^T,  y += s B          for each segment of tokens, by the adapter in its slot
//
// A decode step reads every adapter's weights once, so it is as fast as memory is read. A of all
// adapters is read in the order in which it lies, then B, and both are prefetched across pages,
// where hardware stops. Sums are in fp32, and those of a token do not depend on the tokens beside
// it.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int kUnroll = 4;
constexpr int64_t kStep = kLanes * kUnroll;
constexpr int64_t kHeld = 16384;  // numbers of s that are held at a time
constexpr int kSums = 8192;     // sums of y that are held at a time
constexpr int kAhead = 8192;    // bytes; of half that, bf16 is read 10 % slower

// B of one output, stored as [slots, rank, out]; strides count elements.
struct Part {
  int64_t b, slot_stride, rank_stride, rank, row, column, out;
};

// A of all outputs, stored as [slots, ranks, in]; behind it lie so many parts.
struct Site {
  int64_t a, slot_stride, row_stride, in, ranks, parts;
};

// Tokens `first` to `stop`, by the adapter of a slot.
struct Segment {
  int64_t first, stop, slot;
};

inline void add(float* y, float z) { *y += z; }

inline void add(Bf16* y, float z) { *y = rounded<Bf16>(widened(*y) + z); }

inline void add_to(float* sums, Floats v) {
  v += load(sums);
  std::memcpy(sums, &v, sizeof v);
}

// Of weights that are read once: kept out of the outer caches, fp32 is read 8 % faster.
template <class W>
inline void prefetch(const W* p) {
  const char* ahead = reinterpret_cast<const char*>(p);
  for (size_t i = 0; i < kStep * sizeof(W); i += kLine) __builtin_prefetch(ahead + i, 0, 0);
}

// s [N, ranks] of N tokens.
template <int N, class W>
void shrink(const float* x, int64_t x_stride, const W* a, const Site& site, float* s) {
  const int64_t in = site.in, ranks = site.ranks;
  for (int64_t r = 0; r < ranks; r++, a += site.row_stride) {
    Floats sums[N][kUnroll] = {};
    int64_t i = 0;
    for (; i + kStep <= in; i += kStep) {
      prefetch(a + i + kAhead / sizeof(W));
      for (int u = 0; u < kUnroll; u++) {
        const Floats w = load(a + i + u * kLanes);
        for (int n = 0; n < N; n++) sums[n][u] += w * load(x + n * x_stride + i + u * kLanes);
      }
    }
    for (; i + kLanes <= in; i += kLanes) {
      const Floats w = load(a + i);
      for (int n = 0; n < N; n++) sums[n][0] += w * load(x + n * x_stride + i);
    }
    for (int n = 0; n < N; n++) {
      float sum = total((sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3]));
      for (int64_t j = i; j < in; j++) sum += widened(a[j]) * x[n * x_stride + j];
      s[n * ranks + r] = sum;
    }
  }
}

// y += s B of N tokens and one output.
template <int N, class W, class Y>
void expand(Y* y, int64_t y_stride, const W* b, const Part& part, const float* s, int64_t ranks) {
  constexpr int64_t most = kSums / N;
  constexpr int64_t away = kAhead / sizeof(W);
  float z[N][most];
  for (int64_t column = 0; column < part.out; column += most) {
    const int64_t width = part.out - column < most ? part.out - column : most;
    for (int n = 0; n < N; n++) std::memset(z[n], 0, width * sizeof(float));
    for (int64_t r = 0; r < part.rank; r++) {
      const W* row = b + r * part.rank_stride + column;
      int64_t i = 0;
      for (; i + kStep <= width; i += kStep) {
        // Behind the last of these columns, the next row's are read.
        prefetch(row + i + away + (i + away < width ? 0 : part.rank_stride - width));
        for (int u = 0; u < kUnroll; u++) {
          const Floats w = load(row + i + u * kLanes);
          for (int n = 0; n < N; n++) add_to(z[n] + i + u * kLanes, w * s[n * ranks + r]);
        }
      }
      for (; i + kLanes <= width; i += kLanes) {
        const Floats w = load(row + i);
        for (int n = 0; n < N; n++) add_to(z[n] + i, w * s[n * ranks + r]);
      }
      for (; i < width; i++) {
        for (int n = 0; n < N; n++) z[n][i] += widened(row[i]) * s[n * ranks + r];
      }
    }
    for (int n = 0; n < N; n++) {
      for (int64_t i = 0; i < width; i++) add(y + n * y_stride + column + i, z[n][i]);
    }
  }
}

// Calls with the number of tokens, 4, 2 or 1, and the first of them, until all had their turn.
template <class Run>
inline void in_turn(const Segment& segment, Run run) {
  int64_t token = segment.first;
  for (; token + 4 <= segment.stop; token += 4) run(Count<4>(), token);
  for (; token + 2 <= segment.stop; token += 2) run(Count<2>(), token);
  for (; token < segment.stop; token++) run(Count<1>(), token);
}

template <class W, class Y>
struct Lora {
  Y* y;
  int64_t y_stride;
  const float* x;
  int64_t x_stride;
  const Site& site;
  const Part* parts;

  // Adds that of neighbouring segments, whose s has room.
  void add(const Segment* segment, const Segment* end) const {
    float held[kHeld];
    float* s = held;
    for (const Segment* one = segment; one != end; one++) {
      const W* a = reinterpret_cast<const W*>(site.a) + one->slot * site.slot_stride;
      in_turn(*one, [&](auto count, int64_t token) {
        shrink<count.value>(x + token * x_stride, x_stride, a, site, s);
        s += count.value * site.ranks;
      });
    }
    s = held;
    for (const Segment* one = segment; one != end; one++) {
      float* first = s;
      for (const Part* part = parts; part != parts + site.parts; part++) {
        const W* b = reinterpret_cast<const W*>(part->b) + one->slot * part->slot_stride;
        s = first;
        in_turn(*one, [&](auto count, int64_t token) {
          Y* columns = y + token * y_stride + part->column;
          expand<count.value>(columns, y_stride, b, *part, s + part->row, site.ranks);
          s += count.value * site.ranks;
        });
      }
    }
  }

  // Adds that of segments, of as many tokens at a time as s has room for.
  void add_in_parts(const Segment* segment, const Segment* end) const {
    const int64_t most = kHeld / site.ranks;
    while (segment != end) {
      const Segment* next = segment;
      int64_t tokens = 0;
      while (next != end && (tokens += next->stop - next->first) <= most) next++;
      add(segment, next);
      if (next == segment) {
        for (Segment part = *next++; part.first < segment->stop; part.first = part.stop) {
          part.stop = part.first + most < segment->stop ? part.first + most : segment->stop;
          add(&part, &part + 1);
        }
      }
      segment = next;
    }
  }

  void add_by_threads(const Segment* segments, int64_t count, int64_t threads) const {
    if (threads > count) threads = count;
// Segments have tokens of their own, so no two threads write one.
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < threads; i++)
      add_in_parts(segments + count * i / threads, segments + count * (i + 1) / threads);
  }
};

}  // namespace

// y is fp32, or bf16 where `y_is_bf16`; the weights likewise. Strides count elements, from one token
// to the next. The site has at most kHeld ranks.
struct AddLoraCall {
  int64_t y, y_stride, x, x_stride, site, segments, count, threads, y_is_bf16, weights_are_bf16;
};

extern "C" void pcg_add_lora(const AddLoraCall& c) {
  const Site& site = *at<const Site>(c.site);
  if (site.ranks == 0) return;  // AdaLoRA has dropped all of them
  const Part* parts = reinterpret_cast<const Part*>(&site + 1);
  const auto run = [&](auto out, auto weight) {
    using Y = decltype(out);
    const Lora<decltype(weight), Y> lora{at<Y>(c.y), c.y_stride, at<const float>(c.x), c.x_stride,
                                         site, parts};
    lora.add_by_threads(at<const Segment>(c.segments), c.count, c.threads);
  };
  const auto run_to = [&](auto out) { c.weights_are_bf16 ? run(out, Bf16()) : run(out, 0.0f); };
  c.y_is_bf16 ? run_to(Bf16()) : run_to(0.0f);
}
