/// Attention of one sample: what attention.cpp calls for each, once per instruction set (see CMakeLists.txt).
#pragma once

#include <cstddef>

namespace fastrl {

/// Heads that one pass works on side by side. A head costs a few multiply-adds per score, far too few for a matrix
/// product, but heads are independent and all of one length: one vector lane per head needs no reduction and no padding.
constexpr std::size_t num_lanes = 16;

struct alignas(64) Lane16 {
  float lane[num_lanes];
};

struct AttentionShape {
  std::size_t length, num_heads, width;
};

/// Lane16s of scratch memory that one call needs.
inline std::size_t attention_scratch(AttentionShape shape) { return (6 * shape.width + 3) * shape.length; }

using AttentionForward = void(const float* qkv, AttentionShape, Lane16* scratch, float* out, float* stats);
using AttentionBackward = void(const float* qkv, const float* out, const float* stats, const float* grad_out,
                               AttentionShape, Lane16* scratch, float* grad_qkv);

#define FASTRL_DECLARE(isa)              \
  namespace isa {                        \
  AttentionForward attention_forward;    \
  AttentionBackward attention_backward;  \
  }
FASTRL_DECLARE(baseline)
FASTRL_DECLARE(avx2)
FASTRL_DECLARE(avx512)
#undef FASTRL_DECLARE

}  // namespace fastrl
