#include <stdexcept>
#include <string>
#include <vector>

#include "attention_sample.h"
#include "kernels.h"

namespace fastrl {
namespace {

struct Implementation {
  const char* isa;
  AttentionForward* forward;
  AttentionBackward* backward;
};

/// What this processor can run, fastest first.
std::vector<Implementation> implementations() {
  std::vector<Implementation> found;
#ifdef HAVE_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
    found.push_back({"avx512", avx512::attention_forward, avx512::attention_backward});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back({"avx2", avx2::attention_forward, avx2::attention_backward});
#endif
  found.push_back({"baseline", baseline::attention_forward, baseline::attention_backward});
  return found;
}

Implementation implementation(const std::string& isa) {
  for (const Implementation& candidate : implementations())
    if (isa.empty() || isa == candidate.isa) return candidate;
  throw std::invalid_argument("this processor or build has no attention for isa " + isa);
}

/// Calls sample(b, scratch) for every b in 0..batch-1 from up to num_threads threads. OpenMP because torch uses it:
/// with one runtime in the process its threads, which spin for a while after each operator, are the ones that work.
template <class Sample>
void for_each_sample(std::size_t batch, int num_threads, std::size_t scratch_size, Sample sample) {
  constexpr std::size_t min_samples_per_thread = 4;
  const bool parallel = batch >= min_samples_per_thread * static_cast<std::size_t>(num_threads) && num_threads > 1;
#pragma omp parallel num_threads(num_threads) if (parallel)
  {
    std::vector<Aligned> scratch(scratch_size);
#pragma omp for schedule(dynamic, 4)
    for (std::size_t b = 0; b < batch; ++b) sample(b, scratch.data());
  }
  (void)parallel;
}

}  // namespace

std::vector<std::string> attention_isas() {
  std::vector<std::string> names;
  for (const Implementation& candidate : implementations()) names.emplace_back(candidate.isa);
  return names;
}

void attention_forward(const float* qkv, std::size_t batch, std::size_t length, std::size_t num_heads,
                       std::size_t width, int num_threads, float* out, float* stats, const std::string& isa) {
  const AttentionShape shape{length, num_heads, width};
  const auto forward = implementation(isa).forward;
  const std::size_t columns = num_heads * width;
  for_each_sample(batch, num_threads, attention_scratch(shape), [=](std::size_t b, Aligned* scratch) {
    const std::size_t first = b * length;
    forward(qkv + first * 3 * columns, shape, scratch, out + first * columns, stats + first * 2 * num_heads);
  });
}

void attention_backward(const float* qkv, const float* out, const float* stats, const float* grad_out,
                        std::size_t batch, std::size_t length, std::size_t num_heads, std::size_t width,
                        int num_threads, float* grad_qkv, const std::string& isa) {
  const AttentionShape shape{length, num_heads, width};
  const auto backward = implementation(isa).backward;
  const std::size_t columns = num_heads * width;
  for_each_sample(batch, num_threads, attention_scratch(shape), [=](std::size_t b, Aligned* scratch) {
    const std::size_t first = b * length;
    backward(qkv + first * 3 * columns, out + first * columns, stats + first * 2 * num_heads,
             grad_out + first * columns, shape, scratch, grad_qkv + first * 3 * columns);
  });
}

}  // namespace fastrl
