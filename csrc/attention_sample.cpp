// Compiled several times, with ISA = baseline, avx2, avx512 and LANES = 4, 8, 16 floats in a vector. Everything here is
// local to this file or in namespace ISA, and no inline function of a library is used: the linker would be free to keep
// the copy with AVX-512 instructions.
#include "attention_sample.h"

#include <cstdint>
#include <cstring>

namespace fastrl::ISA {
namespace {

#define ALWAYS_INLINE inline __attribute__((always_inline))

/// Heads that one pass works on side by side. A head costs a few multiply-adds per score, far too few for a matrix
/// product, but heads are independent and all of one length: one vector lane per head needs no reduction and no padding.
constexpr std::size_t num_lanes = LANES;

typedef float Lanes __attribute__((vector_size(4 * num_lanes)));
typedef std::int32_t IntLanes __attribute__((vector_size(4 * num_lanes)));

constexpr float log2_e = 1.44269504f;
constexpr float ln_2 = 0.69314718f;

/// 1 / sqrt(width), by hand because std::sqrt is a library function.
template <std::size_t width>
constexpr float inv_sqrt = width == 1 ? 1.0f : width == 2 ? 0.70710678f : width == 4 ? 0.5f : 0.35355339f;

/// 2^x for x <= 0 or a little above: 2^round(x) times a minimax polynomial on [-0.5, 0.5]. Relative error at most 2e-7;
/// below -126 it stays at 2^-126.
ALWAYS_INLINE Lanes exp2(Lanes x) {
  const Lanes floor = Lanes{} - 126.0f;
  x = x < floor ? floor : x;  // in this order a NaN stays
  const Lanes shifted = x + 12582912.0f;  // 1.5 * 2^23: the addition rounds x to an integer, kept in the low bits
  const Lanes r = x - (shifted - 12582912.0f);
  Lanes y = 1.32647272e-3f * r + 9.67151281e-3f;
  y = y * r + 5.55073374e-2f;
  y = y * r + 2.40222421e-1f;
  y = y * r + 6.93146978e-1f;
  y = y * r + 1.0f;
  return (Lanes)((IntLanes)y + ((IntLanes)shifted << 23));
}

ALWAYS_INLINE Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }

template <std::size_t width>
ALWAYS_INLINE Lanes dot(const Lanes* a, const Lanes* b) {
  Lanes sum = a[0] * b[0];
  for (std::size_t e = 1; e < width; ++e) sum += a[e] * b[e];
  return sum;
}

/// Heads first_head.. of one token from [num_heads, width] in memory to [width] lanes; absent heads become 0.
template <std::size_t width>
ALWAYS_INLINE void load(const float* from, std::size_t num_heads, float scale, Lanes* to) {
  float lane[width][num_lanes] = {};
  if (num_heads >= num_lanes) {
    for (std::size_t e = 0; e < width; ++e)
      for (std::size_t h = 0; h < num_lanes; ++h) lane[e][h] = from[h * width + e] * scale;
  } else {
    for (std::size_t e = 0; e < width; ++e)
      for (std::size_t h = 0; h < num_heads; ++h) lane[e][h] = from[h * width + e] * scale;
  }
  std::memcpy(to, lane, sizeof lane);
}

/// The inverse of `load`.
template <std::size_t width>
ALWAYS_INLINE void store(const Lanes* from, std::size_t num_heads, float scale, float* to) {
  float lane[width][num_lanes];
  std::memcpy(lane, from, sizeof lane);
  if (num_heads >= num_lanes) {
    for (std::size_t h = 0; h < num_lanes; ++h)
      for (std::size_t e = 0; e < width; ++e) to[h * width + e] = lane[e][h] * scale;
  } else {
    for (std::size_t h = 0; h < num_heads; ++h)
      for (std::size_t e = 0; e < width; ++e) to[h * width + e] = lane[e][h] * scale;
  }
}

/// `rows` queries against all keys. q [rows, width] holds log2(e) / sqrt(width) times the query.
template <std::size_t width, std::size_t rows>
ALWAYS_INLINE void forward_rows(const Lanes* q, const Lanes* k, const Lanes* v, std::size_t length, Lanes* out,
                                Lanes* greatest_out, Lanes* inverse_sum) {
  Lanes greatest[rows], sum[rows] = {}, acc[rows][width] = {};
  for (std::size_t i = 0; i < rows; ++i) greatest[i] = dot<width>(q + i * width, k);
  for (std::size_t j = 1; j < length; ++j)
    for (std::size_t i = 0; i < rows; ++i) greatest[i] = greater(dot<width>(q + i * width, k + j * width), greatest[i]);
  for (std::size_t j = 0; j < length; ++j) {
    for (std::size_t i = 0; i < rows; ++i) {
      const Lanes p = exp2(dot<width>(q + i * width, k + j * width) - greatest[i]);
      sum[i] += p;
      for (std::size_t e = 0; e < width; ++e) acc[i][e] += p * v[j * width + e];
    }
  }
  for (std::size_t i = 0; i < rows; ++i) {
    greatest_out[i] = greatest[i];
    inverse_sum[i] = 1.0f / sum[i];
    for (std::size_t e = 0; e < width; ++e) out[i * width + e] = acc[i][e] * inverse_sum[i];
  }
}

template <std::size_t width>
void forward(const float* qkv, AttentionShape shape, Aligned* scratch, float* out, float* stats) {
  const std::size_t length = shape.length, columns = shape.num_heads * width;
  Lanes* q = reinterpret_cast<Lanes*>(scratch);
  Lanes *k = q + length * width, *v = k + length * width;
  for (std::size_t head = 0; head < shape.num_heads; head += num_lanes) {
    const std::size_t num_heads = shape.num_heads - head;
    for (std::size_t i = 0; i < length; ++i) {
      const float* token = qkv + i * 3 * columns + head * width;
      load<width>(token, num_heads, log2_e * inv_sqrt<width>, q + i * width);
      load<width>(token + columns, num_heads, 1, k + i * width);
      load<width>(token + 2 * columns, num_heads, 1, v + i * width);
    }
    constexpr std::size_t rows = width <= 2 ? 4 : 2;
    Lanes row_out[rows * width], greatest[rows], inverse_sum[rows];
    for (std::size_t i = 0; i < length;) {
      const std::size_t num_rows = length - i >= rows ? rows : 1;
      if (num_rows == rows)
        forward_rows<width, rows>(q + i * width, k, v, length, row_out, greatest, inverse_sum);
      else
        forward_rows<width, 1>(q + i * width, k, v, length, row_out, greatest, inverse_sum);
      for (std::size_t r = 0; r < num_rows; ++r, ++i) {
        store<width>(row_out + r * width, num_heads, 1, out + i * columns + head * width);
        store<1>(greatest + r, num_heads, 1, stats + (2 * i) * shape.num_heads + head);
        store<1>(inverse_sum + r, num_heads, 1, stats + (2 * i + 1) * shape.num_heads + head);
      }
    }
  }
}

/// What one query adds to the gradients of all keys and values, and its own gradient, each up to a constant factor.
/// grad is the gradient of its output over the sum of its row; grad_out_out is grad . out.
template <std::size_t width, std::size_t rows>
ALWAYS_INLINE void backward_rows(const Lanes* q, const Lanes* k, const Lanes* v, const Lanes* grad,
                                 const Lanes* greatest, const Lanes* grad_out_out, std::size_t length, Lanes* grad_q,
                                 Lanes* grad_k, Lanes* grad_v) {
  Lanes acc[rows][width] = {};
  for (std::size_t j = 0; j < length; ++j) {
    const Lanes *k_j = k + j * width, *v_j = v + j * width;
    Lanes acc_k[width], acc_v[width];
    for (std::size_t e = 0; e < width; ++e) acc_k[e] = grad_k[j * width + e], acc_v[e] = grad_v[j * width + e];
    for (std::size_t i = 0; i < rows; ++i) {
      const Lanes *q_i = q + i * width, *grad_i = grad + i * width;
      const Lanes p = exp2(dot<width>(q_i, k_j) - greatest[i]);
      const Lanes grad_score = p * (dot<width>(grad_i, v_j) - grad_out_out[i]);
      for (std::size_t e = 0; e < width; ++e) {
        acc_v[e] += p * grad_i[e];
        acc_k[e] += grad_score * q_i[e];
        acc[i][e] += grad_score * k_j[e];
      }
    }
    for (std::size_t e = 0; e < width; ++e) grad_k[j * width + e] = acc_k[e], grad_v[j * width + e] = acc_v[e];
  }
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t e = 0; e < width; ++e) grad_q[i * width + e] = acc[i][e];
}

template <std::size_t width>
void backward(const float* qkv, const float* out, const float* stats, const float* grad_out, AttentionShape shape,
              Aligned* scratch, float* grad_qkv) {
  const std::size_t length = shape.length, columns = shape.num_heads * width;
  Lanes* q = reinterpret_cast<Lanes*>(scratch);
  Lanes *k = q + length * width, *v = k + length * width, *grad = v + length * width;
  Lanes *grad_k = grad + length * width, *grad_v = grad_k + length * width;
  Lanes *greatest = grad_v + length * width, *grad_out_out = greatest + length;
  for (std::size_t head = 0; head < shape.num_heads; head += num_lanes) {
    const std::size_t num_heads = shape.num_heads - head;
    for (std::size_t i = 0; i < length; ++i) {
      const float* token = qkv + i * 3 * columns + head * width;
      load<width>(token, num_heads, log2_e * inv_sqrt<width>, q + i * width);
      load<width>(token + columns, num_heads, 1, k + i * width);
      load<width>(token + 2 * columns, num_heads, 1, v + i * width);
      load<width>(grad_out + i * columns + head * width, num_heads, 1, grad + i * width);
      Lanes row_out[width], inverse_sum;
      load<width>(out + i * columns + head * width, num_heads, 1, row_out);
      load<1>(stats + (2 * i) * shape.num_heads + head, num_heads, 1, greatest + i);
      load<1>(stats + (2 * i + 1) * shape.num_heads + head, num_heads, 1, &inverse_sum);
      for (std::size_t e = 0; e < width; ++e) grad[i * width + e] *= inverse_sum;
      grad_out_out[i] = dot<width>(grad + i * width, row_out);
    }
    std::memset(grad_k, 0, 2 * length * width * sizeof(Lanes));
    constexpr std::size_t rows = width <= 2 ? 2 : 1;
    Lanes grad_q[rows * width];
    for (std::size_t i = 0; i < length;) {
      const std::size_t num_rows = length - i >= rows ? rows : 1;
      if (num_rows == rows)
        backward_rows<width, rows>(q + i * width, k, v, grad + i * width, greatest + i, grad_out_out + i, length,
                                   grad_q, grad_k, grad_v);
      else
        backward_rows<width, 1>(q + i * width, k, v, grad + i * width, greatest + i, grad_out_out + i, length, grad_q,
                                grad_k, grad_v);
      for (std::size_t r = 0; r < num_rows; ++r, ++i)
        store<width>(grad_q + r * width, num_heads, inv_sqrt<width>, grad_qkv + i * 3 * columns + head * width);
    }
    for (std::size_t j = 0; j < length; ++j) {
      float* token = grad_qkv + j * 3 * columns + head * width;
      store<width>(grad_k + j * width, num_heads, ln_2, token + columns);  // q held log2(e) / sqrt(width)
      store<width>(grad_v + j * width, num_heads, 1, token + 2 * columns);
    }
  }
}

}  // namespace

void attention_forward(const float* qkv, AttentionShape shape, Aligned* scratch, float* out, float* stats) {
  switch (shape.width) {
    case 1: return forward<1>(qkv, shape, scratch, out, stats);
    case 2: return forward<2>(qkv, shape, scratch, out, stats);
    case 4: return forward<4>(qkv, shape, scratch, out, stats);
    case 8: return forward<8>(qkv, shape, scratch, out, stats);
  }
}

void attention_backward(const float* qkv, const float* out, const float* stats, const float* grad_out,
                        AttentionShape shape, Aligned* scratch, float* grad_qkv) {
  switch (shape.width) {
    case 1: return backward<1>(qkv, out, stats, grad_out, shape, scratch, grad_qkv);
    case 2: return backward<2>(qkv, out, stats, grad_out, shape, scratch, grad_qkv);
    case 4: return backward<4>(qkv, out, stats, grad_out, shape, scratch, grad_qkv);
    case 8: return backward<8>(qkv, out, stats, grad_out, shape, scratch, grad_qkv);
  }
}

}  // namespace fastrl::ISA
