/// The native kernels of fastrl: plain loops over pointers and sizes, no Python, no torch, no global state.
///
/// Rules for every function here:
///   - the caller owns and allocates every array; outputs are written in full, inputs are only read;
///   - arrays are C-contiguous, with the shape in brackets; inputs may be read-only memory;
///   - calls that write to different outputs may run at the same time from different threads.
/// Shapes, dtypes and contiguity are checked in bind.cpp, not here.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fastrl {

/// Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).
///
///     delta[t] = rewards[t] + gamma * (terminated[t] ? 0 : next_values[t]) - values[t]
///     advantages[t] = delta[t] + gamma * gae_lambda * (terminated[t] or truncated[t] ? 0 : advantages[t + 1])
///
/// All arrays are [num_steps, num_envs]; next_values[t] is the value of the observation after step t, before any reset.
/// Rounds exactly as the NumPy kernel does. O(num_steps * num_envs) time, no memory of its own.
void gae(const float* rewards, const float* values, const float* next_values, const bool* terminated,
         const bool* truncated, std::size_t num_steps, std::size_t num_envs, double gamma, double gae_lambda,
         float* advantages);
void gae(const double* rewards, const double* values, const double* next_values, const bool* terminated,
         const bool* truncated, std::size_t num_steps, std::size_t num_envs, double gamma, double gae_lambda,
         double* advantages);

/// Self-attention of narrow heads (Vaswani et al. 2017, arXiv:1706.03762, eq. 1), never storing a score.
///
///     out[b, i, h] = sum_j softmax_j(q[b, i, h] . k[b, j, h] / sqrt(width)) v[b, j, h]
///
/// qkv is [batch, length, 3, num_heads, width]: q, k and v as one linear layer gives them. out is [batch, length,
/// num_heads, width]. stats is [batch, length, 2, num_heads], for the backward pass: the greatest score of a row, in
/// units of log(2), and 1 / sum_j exp(score - greatest).
/// width must be 1, 2, 4 or 8. Samples are shared among up to num_threads threads; the result does not
/// depend on how many. O(batch * num_heads * length^2 * width) time; per thread O(length * width) memory.
/// A NaN or infinite input gives NaN in the rows it reaches.
void attention_forward(const float* qkv, std::size_t batch, std::size_t length, std::size_t num_heads,
                       std::size_t width, int num_threads, float* out, float* stats,
                       const std::string& isa = "");

/// The gradient of attention_forward: grad_qkv, shaped as qkv, from grad_out, shaped as out. The scores are computed
/// again from qkv and stats.
void attention_backward(const float* qkv, const float* out, const float* stats, const float* grad_out,
                        std::size_t batch, std::size_t length, std::size_t num_heads, std::size_t width,
                        int num_threads, float* grad_qkv, const std::string& isa = "");

/// The instruction sets for which attention can run here, fastest first; `isa` chooses another than the first (tests).
std::vector<std::string> attention_isas();

}  // namespace fastrl
