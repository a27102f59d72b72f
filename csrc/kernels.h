/// The native kernels of fastrl: plain loops over pointers and sizes, no Python, no torch, no global state.
///
/// Rules for every function here:
///   - the caller owns and allocates every array; outputs are written in full, inputs are only read;
///   - arrays are C-contiguous, with the shape in brackets; inputs may be read-only memory;
///   - calls that write to different outputs may run at the same time from different threads.
/// Shapes, dtypes and contiguity are checked in bind.cpp, not here.
#pragma once

#include <cstddef>

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

}  // namespace fastrl
