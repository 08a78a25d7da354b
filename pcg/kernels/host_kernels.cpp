// Attention, recurrences and short convolutions of single new tokens, norms and rotary embedding on
// CPUs, where a call of PyTorch's operators costs more than their arithmetic.
//
//     attention   s = scale * q k^T;  s = softcap * tanh(s / softcap);  s += slope * distance
//                 out = softmax(s) v
//     rms_norm    y = x / sqrt(mean(x^2) + eps) * (offset + weight)
//     rope        y = x * cos + (-x2, x1) * sin    of halves x1, x2
//
// Attention reads keys and values once, in the rows where they lie: a sequence is a list of spans of
// rows. All is computed in fp32, for each token by itself, so a result depends on nothing else.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kQueries = 4;           // whose sums are held in registers
constexpr int kVectors = 4;           // of a row of values
constexpr int64_t kColumns = kVectors * kLanes;
constexpr int64_t kFewRows = 64;      // of keys or values, in a core's L1
constexpr int64_t kAhead = 4096;       // bytes; hardware does not prefetch across pages
constexpr int64_t kLeastWork = 1 << 16; // numbers that are worth a second thread
constexpr float kLeast = -87.0f;      // e^x is a normal number above it

// The arguments of attention, as `pcg.kernels.torch.host_kernels` has them; strides count elements.
struct Call {
  int64_t q, q_stride, out, out_stride;  // of tokens [heads, size] and [heads, value_size]
  int64_t keys, key_head, key_row, values, value_head, value_row;
  int64_t heads, kv_heads, size, value_size;
  int64_t slopes, sinks;                 // fp32, of each head; 0 for none
  int64_t sequences, count;
  int64_t k, k_stride, v, v_stride;      // of tokens to append; 0 if the cache has them
  int64_t rows, tokens;                  // of the cache, for each of them
  int64_t cos, sin, turned;              // of rotary embedding, [tokens, turned]; 0 for none
  double scale, softcap;
  int64_t is_bf16, threads;
};

// A sequence's token, the length of its spans, and these.
struct Sequence {
  int64_t token, rows, first_span, spans;
};

struct Span {
  int64_t row, rows;
};

// Fetches a row that is read soon.
template <class E>
inline void prefetch(const E* row, int64_t size) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < size * static_cast<int64_t>(sizeof(E)); i += kLine)
    __builtin_prefetch(bytes + i);
}

// e^x of x <= 0, to an ulp or two; NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats magic = Floats{} + 0x1.8p23f;  // rounds what is added to it to a whole number
  const Floats shifted = x * 1.44269504f + magic;
  const Floats whole = shifted - magic;
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Words bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return x < kLeast ? Floats{} : p * power;
}

// Scores of N queries and some keys.
template <int N, class E>
void score(const float* q, int64_t size, const E* k, int64_t k_row, int64_t rows, float* scores,
           int64_t stride) {
  const int64_t away = kAhead / (k_row * sizeof(E)) + 1;
  for (int64_t r = 0; r < rows; r++, k += k_row) {
    prefetch(k + away * k_row, size);
    Floats sums[N] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Floats key = load(k + i);
      for (int n = 0; n < N; n++) sums[n] += key * load(q + n * size + i);
    }
    for (int n = 0; n < N; n++) {
      float sum = total(sums[n]);
      for (int64_t j = i; j < size; j++) sum += widened(k[j]) * q[n * size + j];
      scores[n * stride + r] = sum;
    }
  }
}

// out [N, size] += weights [N, rows] v.
template <int N, class E>
void combine(const float* weights, int64_t stride, const E* v, int64_t v_row, int64_t rows,
             float* out, int64_t size) {
  const int64_t away = kAhead / (v_row * sizeof(E)) + 1;
  const auto add = [&](int64_t column, auto vectors) {
    Floats sums[N][vectors];
    for (int n = 0; n < N; n++)
      for (int u = 0; u < vectors; u++) sums[n][u] = load(out + n * size + column + u * kLanes);
    for (int64_t r = 0; r < rows; r++) {
      const E* row = v + r * v_row + column;
      prefetch(row + away * v_row, vectors * kLanes);
      for (int u = 0; u < vectors; u++) {
        const Floats value = load(row + u * kLanes);
        for (int n = 0; n < N; n++) sums[n][u] += value * weights[n * stride + r];
      }
    }
    for (int n = 0; n < N; n++)
      std::memcpy(out + n * size + column, sums[n], vectors * sizeof(Floats));
  };
  int64_t i = 0;
  for (; i + kColumns <= size; i += kColumns) add(i, Count<kVectors>());
  for (; i + kLanes <= size; i += kLanes) add(i, Count<1>());
  for (; i < size; i++)
    for (int n = 0; n < N; n++)
      for (int64_t r = 0; r < rows; r++)
        out[n * size + i] += weights[n * stride + r] * widened(v[r * v_row + i]);
}

// Calls run(how many, the first) until all queries had their turn.
template <class Run>
inline void in_turn(int64_t queries, Run run) {
  int64_t n = 0;
  for (; n + kQueries <= queries; n += kQueries) run(Count<kQueries>(), n);
  switch (queries - n) {
    case 3: return run(Count<3>(), n);
    case 2: return run(Count<2>(), n);
    case 1: return run(Count<1>(), n);
  }
}

// Calls run(row of the cache, rows, rows before) for some rows at a time.
template <class Run>
inline void by_rows(const Sequence& sequence, const Span* spans, Run run) {
  int64_t before = 0;
  for (const Span* span = spans; span != spans + sequence.spans; before += span++->rows)
    for (int64_t r = 0; r < span->rows; r += kFewRows)
      run(span->row + r, std::min(kFewRows, span->rows - r), before + r);
}

float* buffer(size_t size) {
  static thread_local std::vector<float> memory;
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

// A head of a token, with rotary embedding.
// It is not inlined, as compilers may round sums of products otherwise where they inline them.
template <class E>
__attribute__((noinline)) void rope_head(const E* x, const E* cos, const E* sin, E* y, int64_t turned, int64_t size) {
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = widened(x[i]), b = widened(x[i + half]);
    y[i] = rounded<E>(a * widened(cos[i]) - b * widened(sin[i]));
    y[i + half] = rounded<E>(b * widened(cos[i + half]) + a * widened(sin[i + half]));
  }
  std::memcpy(y + turned, x + turned, (size - turned) * sizeof(E));
}

template <class E>
void turn(const Call& call, int64_t token, const E* x, E* y, int64_t heads) {
  const E *cos = at<const E>(call.cos) + token * call.turned,
          *sin = at<const E>(call.sin) + token * call.turned;
  for (int64_t h = 0; h < heads; h++)
    rope_head(x + h * call.size, cos, sin, y + h * call.size, call.turned, call.size);
}

template <class E>
void attend(const Call& call, const Sequence& sequence, int64_t head) {
  const float scale = call.scale, softcap = call.softcap;
  const int64_t group = call.heads / call.kv_heads, size = call.size, first = head * group;
  const int64_t wide = call.value_size, rows = sequence.rows;
  const int64_t stride = (rows + kLanes - 1) / kLanes * kLanes;
  float* q = buffer(group * (2 * size + wide + stride));
  float *out = q + group * size, *scores = out + group * wide;
  const E* queries = at<const E>(call.q) + sequence.token * call.q_stride + first * size;
  if (call.turned) {
    E* turned = reinterpret_cast<E*>(scores + group * stride);
    turn(call, sequence.token, queries, turned, group);
    queries = turned;
  }
  for (int64_t i = 0; i < group * size; i++) q[i] = widened(queries[i]) * scale;
  const Span* spans =
      at<const Span>(call.sequences + call.count * sizeof(Sequence)) + sequence.first_span;

  const E* keys = at<const E>(call.keys) + head * call.key_head;
  by_rows(sequence, spans, [&](int64_t row, int64_t some, int64_t before) {
    in_turn(group, [&](auto count, int64_t n) {
      score<count.value>(q + n * size, size, keys + row * call.key_row, call.key_row, some,
                         scores + n * stride + before, stride);
    });
  });

  for (int64_t n = 0; n < group; n++) {
    float* s = scores + n * stride;
    if (softcap != 0)
      for (int64_t i = 0; i < rows; i++) s[i] = softcap * std::tanh(s[i] / softcap);
    if (call.slopes) {
      const float slope = at<const float>(call.slopes)[first + n];
      for (int64_t i = 0; i < rows; i++) s[i] += slope * static_cast<float>(i + 1 - rows);
    }
    for (int64_t i = rows; i < stride; i++) s[i] = -std::numeric_limits<float>::infinity();
    Floats best = load(s);
    for (int64_t i = kLanes; i < stride; i += kLanes) {
      const Floats v = load(s + i);
      best = v > best ? v : best;
    }
    float most = best[0];
    for (int i = 1; i < kLanes; i++) most = best[i] > most ? best[i] : most;
    const float* sink = call.sinks ? at<const float>(call.sinks) + first + n : nullptr;
    if (sink) most = *sink > most ? *sink : most;
    Floats sums = {};
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Floats weights = exponential(load(s + i) - most);
      std::memcpy(s + i, &weights, sizeof weights);
      sums += weights;
    }
    const float sum = total(sums) + (sink ? std::exp(*sink - most) : 0.0f);
    for (int64_t i = 0; i < rows; i++) s[i] /= sum;
  }

  const E* values = at<const E>(call.values) + head * call.value_head;
  std::memset(out, 0, group * wide * sizeof(float));
  by_rows(sequence, spans, [&](int64_t row, int64_t some, int64_t before) {
    in_turn(group, [&](auto count, int64_t n) {
      combine<count.value>(scores + n * stride + before, stride, values + row * call.value_row,
                           call.value_row, some, out + n * wide, wide);
    });
  });
  E* written = at<E>(call.out) + sequence.token * call.out_stride + first * wide;
  for (int64_t i = 0; i < group * wide; i++) written[i] = rounded<E>(out[i]);
}

}  // namespace

namespace {

// A row of a norm; a factor is rounded where PyTorch rounds it.
template <class E>
void norm_row(const E* x, const E* weight, E* y, int64_t size, float eps, float offset,
              bool rounds_first) {
  Floats sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Floats a = load(x + i), b = load(x + i + kLanes);
    sums[0] += a * a;
    sums[1] += b * b;
  }
  float sum = total(sums[0] + sums[1]);
  for (int64_t j = i; j < size; j++) sum += widened(x[j]) * widened(x[j]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (int64_t j = 0; j < size; j++) {
    float v = widened(x[j]) * scale;
    if (weight) {
      float factor = widened(weight[j]) + offset;
      if (rounds_first) v = widened(rounded<E>(v)), factor = widened(rounded<E>(factor));
      v *= factor;
    }
    y[j] = rounded<E>(v);
  }
}

// Calls run(token) in threads where there is enough to do.
template <class Run>
void by_tokens(int64_t tokens, int64_t work, int threads, Run run) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * work > kLeastWork)
  for (int64_t t = 0; t < tokens; t++) run(t);
}

}  // namespace

// Rows of [tokens, heads, size]: x has a stride from one token to the next, y none. Weight 0 for
// none.
struct NormCall {
  int64_t x, x_stride, weight, y, tokens, heads, size;
  double eps, offset;
  int64_t rounds_first, is_bf16, threads;
};

extern "C" void pcg_rms_norm(const NormCall& c) {
  const auto run = [&](auto one) {
    using E = decltype(one);
    by_tokens(c.tokens, c.heads * c.size, c.threads, [&](int64_t t) {
      for (int64_t h = 0; h < c.heads; h++)
        norm_row(at<const E>(c.x) + t * c.x_stride + h * c.size, at<const E>(c.weight),
                 at<E>(c.y) + (t * c.heads + h) * c.size, c.size, c.eps, c.offset, c.rounds_first);
    });
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}

// As for norms; cos and sin are [tokens, turned].
struct RopeCall {
  int64_t x, x_stride, cos, sin, y, tokens, heads, size, turned, is_bf16, threads;
};

extern "C" void pcg_rope(const RopeCall& c) {
  const auto run = [&](auto one) {
    using E = decltype(one);
    by_tokens(c.tokens, c.heads * c.size, c.threads, [&](int64_t t) {
      const E *cos = at<const E>(c.cos) + t * c.turned, *sin = at<const E>(c.sin) + t * c.turned;
      for (int64_t h = 0; h < c.heads; h++)
        rope_head(at<const E>(c.x) + t * c.x_stride + h * c.size, cos, sin,
                  at<E>(c.y) + (t * c.heads + h) * c.size, c.turned, c.size);
    });
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}

// Writes the heads of tokens [tokens, heads, size] to rows of a cache [heads, rows, size]; strides
// count bytes. Lines of the cache are fetched some tokens before, as they lie far apart.
struct AppendCall {
  int64_t x, x_stride, cache, head_stride, row_stride, rows, tokens, heads, size;
};

extern "C" void pcg_append(const AppendCall& c) {
  constexpr int64_t kTokensAhead = 2;
  const auto place = [&](int64_t t, int64_t h) {
    return at<char>(c.cache) + h * c.head_stride + at<const int64_t>(c.rows)[t] * c.row_stride;
  };
  for (int64_t t = 0; t < c.tokens; t++) {
    for (int64_t h = 0; t + kTokensAhead < c.tokens && h < c.heads; h++)
      for (int64_t i = 0; i < c.size; i += kLine)
        __builtin_prefetch(place(t + kTokensAhead, h) + i, 1);
    const char* token = at<const char>(c.x) + t * c.x_stride;
    for (int64_t h = 0; h < c.heads; h++) std::memcpy(place(t, h), token + h * c.size, c.size);
  }
}

namespace {

template <class E>
void append_new(const Call& call) {
  const int64_t bytes = sizeof(E), heads = call.kv_heads;
  pcg_append({call.v, call.v_stride * bytes, call.values, call.value_head * bytes,
              call.value_row * bytes, call.rows, call.tokens, heads, call.value_size * bytes});
  AppendCall keys{call.k, call.k_stride * bytes, call.keys, call.key_head * bytes,
                  call.key_row * bytes, call.rows, call.tokens, heads, call.size * bytes};
  if (!call.turned) return pcg_append(keys);
  std::vector<E> turned(heads * call.size);
  keys.x = reinterpret_cast<int64_t>(turned.data());
  keys.tokens = 1;
  for (int64_t t = 0; t < call.tokens; t++, keys.rows += sizeof(int64_t)) {
    turn(call, t, at<const E>(call.k) + t * call.k_stride, turned.data(), heads);
    pcg_append(keys);
  }
}

}  // namespace

// Appends new keys and values, if there are any, and attends.
extern "C" void pcg_decode_attention(const Call& call) {
  const Sequence* sequences = at<const Sequence>(call.sequences);
  const int64_t parts = call.count * call.kv_heads;
  if (call.tokens) call.is_bf16 ? append_new<Bf16>(call) : append_new<float>(call);
#pragma omp parallel for num_threads(call.threads) schedule(dynamic) if (call.threads > 1)
  for (int64_t i = 0; i < parts; i++) {
    // A head's rows of all sequences lie near each other.
    const Sequence& sequence = sequences[i % call.count];
    const int64_t head = i / call.count;
    call.is_bf16 ? attend<Bf16>(call, sequence, head) : attend<float>(call, sequence, head);
  }
}

namespace {

// A token of a head: N vectors of columns of its state [keys, values], which is read twice and
// written once. A decay is of the head (step 0) or of each key (step 1).
template <int N>
void recur(float* state, int64_t keys, int64_t values, const float* q, const float* k,
           const float* v, const float* decay, int64_t step, const float* beta, float* out) {
  Floats added[N], sums[N] = {};
  for (int n = 0; n < N; n++) added[n] = load(v + n * kLanes);
  if (beta) {
    Floats known[N] = {};
    for (int64_t i = 0; i < keys; i++) {
      const float factor = k[i] * decay[i * step];
      for (int n = 0; n < N; n++) known[n] += load(state + i * values + n * kLanes) * factor;
    }
    for (int n = 0; n < N; n++) added[n] = (added[n] - known[n]) * *beta;
  }
  for (int64_t i = 0; i < keys; i++, state += values) {
    for (int n = 0; n < N; n++) {
      const Floats row = load(state + n * kLanes) * decay[i * step] + added[n] * k[i];
      std::memcpy(state + n * kLanes, &row, sizeof row);
      sums[n] += row * q[i];
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

}  // namespace

// The states of sequences lie in slots, `stride` elements from one to the next; q and k are
// [tokens, groups, keys], v and out [tokens, heads, values], decay [tokens, heads, keys or 1], the
// factor on the state, and beta [tokens, heads] or 0. values is a multiple of 16.
struct RecurCall {
  int64_t states, stride, slots, tokens, heads, groups, keys, values, q, k, v, decay, decays, beta,
      out, threads;
};

extern "C" void pcg_recur(const RecurCall& c) {
  by_tokens(c.tokens, c.heads * c.keys * c.values, c.threads, [&](int64_t t) {
    const int64_t slot = at<const int64_t>(c.slots)[t];
    for (int64_t h = 0; h < c.heads; h++) {
      const int64_t head = t * c.heads + h, group = (t * c.groups + h / (c.heads / c.groups)) * c.keys;
      float* state = at<float>(c.states) + slot * c.stride + h * c.keys * c.values;
      const auto run = [&](auto count, int64_t column) {
        recur<count.value>(state + column, c.keys, c.values, at<const float>(c.q) + group,
                           at<const float>(c.k) + group,
                           at<const float>(c.v) + head * c.values + column,
                           at<const float>(c.decay) + head * c.decays, c.decays > 1,
                           c.beta ? at<const float>(c.beta) + head : nullptr,
                           at<float>(c.out) + head * c.values + column);
      };
      int64_t column = 0;
      for (; column + kColumns <= c.values; column += kColumns) run(Count<kVectors>(), column);
      for (; column < c.values; column += kLanes) run(Count<1>(), column);
    }
  });
}

// A short convolution of a token of each sequence, whose last inputs [size, channels] lie in slots;
// taps are [size + 1, channels], and bias is 0 for none.
struct ConvolveCall {
  int64_t states, stride, slots, tokens, channels, size, x, x_stride, taps, bias, out, is_bf16,
      threads;
};

extern "C" void pcg_convolve(const ConvolveCall& c) {
  const float *taps = at<const float>(c.taps), *bias = at<const float>(c.bias);
  const auto run = [&](auto one) {
    using E = decltype(one);
    by_tokens(c.tokens, c.channels * c.size, c.threads, [&](int64_t t) {
      E* state = at<E>(c.states) + at<const int64_t>(c.slots)[t] * c.stride;
      const E* input = at<const E>(c.x) + t * c.x_stride;
      E* output = at<E>(c.out) + t * c.channels;
      for (int64_t i = 0; i < c.channels; i++) {
        float sum = 0.0f;
        for (int64_t n = 0; n < c.size; n++)
          sum += widened(state[n * c.channels + i]) * taps[n * c.channels + i];
        sum += widened(input[i]) * taps[c.size * c.channels + i];
        output[i] = rounded<E>(bias ? sum + bias[i] : sum);
      }
      std::memmove(state, state + c.channels, (c.size - 1) * c.channels * sizeof(E));
      std::memcpy(state + (c.size - 1) * c.channels, input, c.channels * sizeof(E));
    });
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}

namespace {

// A sum or product of numbers side by side; a number of bf16 is widened first.
template <class E, class Act>
void by_elements(const E* a, const E* b, E* y, int64_t count, Act act) {
  for (int64_t i = 0; i < count; i++) y[i] = rounded<E>(act(widened(a[i]), widened(b[i])));
}

}  // namespace

// y = a + b, or a * b, of numbers side by side.
struct ElementsCall {
  int64_t a, b, y, count, is_product, is_bf16;
};

extern "C" void pcg_elements(const ElementsCall& c) {
  const auto run = [&](auto one) {
    using E = decltype(one);
    const E *a = at<const E>(c.a), *b = at<const E>(c.b);
    E* y = at<E>(c.y);
    if (c.is_product)
      by_elements(a, b, y, c.count, [](float p, float q) { return p * q; });
    else
      by_elements(a, b, y, c.count, [](float p, float q) { return p + q; });
  };
  c.is_bf16 ? run(Bf16()) : run(0.0f);
}

// Calls functions by their addresses and those of their arguments, one pair after another.
struct ReplayCall {
  int64_t calls, count;
};

extern "C" void pcg_replay(const ReplayCall& c) {
  const int64_t* calls = at<const int64_t>(c.calls);
  for (int64_t i = 0; i < c.count; i++)
    reinterpret_cast<void (*)(const void*)>(calls[2 * i])(at<const void>(calls[2 * i + 1]));
}
