/// The native kernels of fastrl: plain loops over pointers and sizes, no Python, no torch, no global state.
///
/// Rules for every function here:
///   - the caller owns and allocates every array; outputs are written in full, inputs are only read;
///   - arrays are C-contiguous, with the shape in brackets; inputs may be read-only memory;
///   - calls that write to different outputs may run at the same time from different threads.
/// Shapes, dtypes and contiguity are checked in bind.cpp, not here.
#pragma once

#include <cstddef>
#include <cstdint>
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

/// The storage of a replay buffer: one ring of slots per env, one slot per transition. slots = bases[num_envs].
///
/// Transition q of env n (q = 0, 1, ... in the order of their arrival) has the id q * num_envs + n and lies in slot
/// bases[n] + q % (bases[n + 1] - bases[n]). A frame is frame_bytes raw bytes.
struct Ring {
  std::size_t num_envs, frame_bytes;
  const std::int64_t* bases;   ///< [num_envs + 1]
  std::int64_t* counts;        ///< [num_envs]: transitions that ever arrived
  bool* running;               ///< [num_envs]: the newest transition did not end its episode
  std::uint8_t* frames;        ///< [slots, frame_bytes]: the observation acted on, without the older ones of its stack
  std::int64_t* actions;       ///< [slots]
  float* rewards;              ///< [slots]
  std::uint8_t* flags;         ///< [slots]: 1 first of its episode, 2 terminated, 4 last of its episode
  std::int32_t* final_index;   ///< [slots]: the row in `finals` of the observation after the last one, else -1
  std::uint8_t* pending;       ///< [num_envs, frame_bytes]: the observation after the newest transition, if running
  std::uint8_t* finals;        ///< [num_finals, frame_bytes]
  std::int32_t* free_finals;   ///< [num_finals]: a stack of unused rows of `finals`
  std::int64_t* num_free;      ///< [1]: how many entries of that stack count
};

/// Rows that arrive: all [num_steps, num_envs], the frames with frame_bytes behind. valid is false on an autoreset row.
struct Transitions {
  std::size_t num_steps;
  const std::uint8_t *obs, *next_obs;
  const std::int64_t* actions;
  const float* rewards;
  const bool *terminated, *truncated, *valid;
};

/// Sampled rows: [batch], the observations [batch, stack, frame_bytes].
struct Samples {
  std::uint8_t* obs;
  std::int64_t* actions;
  float *returns, *discounts;
  std::uint8_t* next_obs;
};

/// Appends rows[row:], and returns the row at which it stopped: num_steps, or an earlier one before which `finals` must
/// grow (fewer than 2 * num_envs are free). ids is [num_steps, num_envs], -1 where a row is not valid.
///
/// An episode that goes on elsewhere than at its newest next_obs, or that an invalid row follows, ends there as if
/// truncated. O(num_steps * num_envs * frame_bytes); one thread at a time per ring.
std::size_t replay_add(const Ring& ring, const Transitions& rows, std::size_t row, std::int64_t* ids);

/// Draws `batch` live transitions, each as likely as the others: uniforms [batch] in [0, 1) say which. ends is
/// [num_envs], the cumulative sum of the live transitions of the envs, and not 0 at the end. O(batch * log(num_envs)).
void replay_draw(const std::int64_t* ends, const std::int64_t* counts, std::size_t num_envs, const double* uniforms,
                 std::size_t batch, std::int64_t* ids);

/// Rebuilds the transitions `ids` [batch], each the first of at most num_steps steps:
///
///     returns = sum_{i<k} gammas[i] * reward[q + i],  discounts = terminated ? 0 : gammas[k]
///
/// with k steps up to the end of the episode or the newest transition; next_obs is the stack after them. gammas is
/// [num_steps + 1]. Every id must be live, and the ring must have stack - 1 more slots per env than live transitions.
/// Rows are shared among up to num_threads threads. O(batch * (stack * frame_bytes + num_steps)).
void replay_gather(const Ring& ring, const std::int64_t* ids, std::size_t batch, std::size_t stack,
                   const double* gammas, std::size_t num_steps, int num_threads, const Samples& out);

/// A tree of fan-out 8 over non-negative leaves. Level 0 holds the leaves, level num_levels - 1 the root alone; level i
/// begins at offsets[i] and is padded with zeros (infinities in `mins`) to a multiple of 8.
struct Tree {
  std::size_t num_levels;
  const std::int64_t* offsets;  ///< [num_levels]
  double* sums;                 ///< a node is the sum of its children
  double* mins;                 ///< a node is the least of its children, +inf where nothing was written; or null
};

/// Which leaf belongs to which id: transition q of env n has leaf bases[n] + q % (bases[n + 1] - bases[n]), as long as
/// it is one of the newest of its env.
struct Leaves {
  std::size_t num_envs;
  const std::int64_t* bases;   ///< [num_envs + 1]
  const std::int64_t* counts;  ///< [num_envs]
};

/// Sets the leaves of the live ones of `ids` [batch] to `values` and sums up again; the last of equal ids wins. `nodes`
/// is [batch], scratch. O(batch * log(leaves)).
void tree_update(const Tree& tree, const Leaves& leaves, const std::int64_t* ids, const double* values,
                 std::size_t batch, std::int64_t* nodes);

/// Draws `batch` leaves in proportion to their value, one from each of `batch` equal parts of the total (stratified):
/// uniforms [batch] in [0, 1) say where in its part. Writes ids and the values of their leaves. A leaf of value 0 is
/// never drawn; the total must be positive. O(batch * log(leaves)).
void tree_sample(const Tree& tree, const Leaves& leaves, const double* uniforms, std::size_t batch, std::int64_t* ids,
                 double* values);

}  // namespace fastrl
