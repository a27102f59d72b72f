/// Attention of one sample: what attention.cpp calls for each, once per instruction set (see CMakeLists.txt).
#pragma once

#include <cstddef>

namespace fastrl {

/// Scratch memory is handed over in pieces aligned to the widest vector.
struct alignas(64) Aligned {
  float lane[16];
};

struct AttentionShape {
  std::size_t length, num_heads, width;
};

/// Pieces of scratch memory that one call needs, for any number of lanes.
inline std::size_t attention_scratch(AttentionShape shape) { return (6 * shape.width + 2) * shape.length; }

using AttentionForward = void(const float* qkv, AttentionShape, Aligned* scratch, float* out, float* stats);
using AttentionBackward = void(const float* qkv, const float* out, const float* stats, const float* grad_out,
                               AttentionShape, Aligned* scratch, float* grad_qkv);

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
