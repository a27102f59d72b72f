#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace fastrl {
namespace {

constexpr std::uint8_t kStart = 1, kTerminated = 2, kEnd = 4;
// Rows of a batch between asking for memory and reading it.
constexpr std::int64_t kAhead = 8;

// The slots of one env: transition q lies in slot base + q % length.
struct Stream {
  std::int64_t base, length;
  std::size_t slot(std::int64_t q) const { return static_cast<std::size_t>(base + q % length); }
  // The neighbours on the ring; a division for each would cost as much as a small frame.
  std::size_t before(std::size_t slot) const {
    return slot == static_cast<std::size_t>(base) ? static_cast<std::size_t>(base + length - 1) : slot - 1;
  }
  std::size_t after(std::size_t slot) const {
    return slot + 1 == static_cast<std::size_t>(base + length) ? static_cast<std::size_t>(base) : slot + 1;
  }
};

Stream stream(const Ring& ring, std::size_t env) {
  return {ring.bases[env], ring.bases[env + 1] - ring.bases[env]};
}

// Marks a transition as the last of its episode and keeps the observation that followed it.
void end_episode(const Ring& ring, std::size_t slot, std::uint8_t flags, const std::uint8_t* final_obs) {
  const std::int32_t index = ring.free_finals[--*ring.num_free];
  std::memcpy(ring.finals + index * ring.frame_bytes, final_obs, ring.frame_bytes);
  ring.final_index[slot] = index;
  ring.flags[slot] |= flags | kEnd;
}

// Walks back through the frames of a stack, from its newest; the first frame of the episode repeats itself.
struct Frames {
  const std::uint8_t* frame;
  // The one of `frame`, were it in the ring.
  std::size_t slot;
  bool at_start;

  void step_back(const Ring& ring, const Stream& env) {
    if (at_start) return;
    slot = env.before(slot);
    frame = ring.frames + slot * ring.frame_bytes;
    at_start = ring.flags[slot] & kStart;
  }
};

void gather_one(const Ring& ring, std::int64_t id, std::size_t stack, const double* gammas, std::size_t num_steps,
                const Samples& out, std::size_t row) {
  const auto num_envs = static_cast<std::int64_t>(ring.num_envs);
  const auto n = static_cast<std::size_t>(id % num_envs);
  const std::int64_t first = id / num_envs, head = ring.counts[n];
  const Stream env = stream(ring, n);
  const std::size_t bytes = ring.frame_bytes, first_slot = env.slot(first);

  out.actions[row] = ring.actions[first_slot];

  double sum = 0;
  std::size_t steps = 0, slot = first_slot;
  std::int64_t last = first;
  for (;; ++last, slot = env.after(slot)) {
    sum += gammas[steps++] * static_cast<double>(ring.rewards[slot]);
    if (steps == num_steps || (ring.flags[slot] & kEnd) || last + 1 == head) break;
  }
  out.returns[row] = static_cast<float>(sum);
  out.discounts[row] = ring.flags[slot] & kTerminated ? 0.0f : static_cast<float>(gammas[steps]);

  const std::uint8_t* next = ring.flags[slot] & kEnd ? ring.finals + ring.final_index[slot] * bytes
                             : last + 1 == head      ? ring.pending + n * bytes
                                                     : ring.frames + env.after(slot) * bytes;

  // The two stacks share frames, `steps` places apart. Copied in step, each is read from memory once.
  Frames next_frames{next, env.after(slot), false};
  Frames obs_frames{ring.frames + first_slot * bytes, first_slot, (ring.flags[first_slot] & kStart) != 0};
  const std::size_t lag = std::min(steps, stack);
  for (std::size_t i = stack + lag; i-- > 0;) {
    if (i >= lag) {
      std::memcpy(out.next_obs + (row * stack + i - lag) * bytes, next_frames.frame, bytes);
      if (i > lag) next_frames.step_back(ring, env);
    }
    if (i < stack) {
      std::memcpy(out.obs + (row * stack + i) * bytes, obs_frames.frame, bytes);
      if (i > 0) obs_frames.step_back(ring, env);
    }
  }
}

// Asks for what gather_one reads first of a transition.
void prefetch(const Ring& ring, std::int64_t id) {
  const auto num_envs = static_cast<std::int64_t>(ring.num_envs);
  const std::size_t slot = stream(ring, static_cast<std::size_t>(id % num_envs)).slot(id / num_envs);
  __builtin_prefetch(ring.frames + slot * ring.frame_bytes);
  __builtin_prefetch(ring.flags + slot);
  __builtin_prefetch(ring.actions + slot);
  __builtin_prefetch(ring.rewards + slot);
}

}  // namespace

std::size_t replay_add(const Ring& ring, const Transitions& rows, std::size_t row, std::int64_t* ids) {
  const std::size_t num_envs = ring.num_envs, bytes = ring.frame_bytes;
  const std::size_t first_row = row;
  for (; row < rows.num_steps; ++row) {
    // A row keeps at most two final observations per env: of the episode that it cuts off, and its own.
    if (*ring.num_free < static_cast<std::int64_t>(2 * num_envs)) break;
    for (std::size_t n = 0; n < num_envs; ++n) {
      const std::size_t i = row * num_envs + n;
      const Stream env = stream(ring, n);
      const std::uint8_t* obs = rows.obs + i * bytes;
      const std::uint8_t* before = row == first_row ? ring.pending + n * bytes : rows.next_obs + (i - num_envs) * bytes;
      // An episode that does not go on from where it was is cut: without this its next observation would be lost.
      if (ring.running[n] && (!rows.valid[i] || (obs != before && std::memcmp(obs, before, bytes) != 0))) {
        end_episode(ring, env.slot(ring.counts[n] - 1), 0, before);
        ring.running[n] = false;
      }
      ids[i] = -1;
      if (!rows.valid[i]) continue;

      const std::int64_t q = ring.counts[n]++;
      const std::size_t slot = env.slot(q);
      if (q >= env.length && (ring.flags[slot] & kEnd)) ring.free_finals[(*ring.num_free)++] = ring.final_index[slot];
      std::memcpy(ring.frames + slot * bytes, obs, bytes);
      ring.actions[slot] = rows.actions[i];
      ring.rewards[slot] = rows.rewards[i];
      ring.flags[slot] = ring.running[n] ? 0 : kStart;
      ring.final_index[slot] = -1;
      const bool ended = rows.terminated[i] || rows.truncated[i];
      if (ended) end_episode(ring, slot, rows.terminated[i] ? kTerminated : 0, rows.next_obs + i * bytes);
      ring.running[n] = !ended;
      ids[i] = q * static_cast<std::int64_t>(num_envs) + static_cast<std::int64_t>(n);
    }
  }
  for (std::size_t n = 0; row > first_row && n < num_envs; ++n)
    if (ring.running[n])
      std::memcpy(ring.pending + n * bytes, rows.next_obs + ((row - 1) * num_envs + n) * bytes, bytes);
  return row;
}

void replay_draw(const std::int64_t* ends, const std::int64_t* counts, std::size_t num_envs, const double* uniforms,
                 std::size_t batch, std::int64_t* ids) {
  const auto live = static_cast<double>(ends[num_envs - 1]);
  for (std::size_t i = 0; i < batch; ++i) {
    const auto draw = static_cast<std::int64_t>(uniforms[i] * live);
    const std::int64_t n = std::upper_bound(ends, ends + num_envs, draw) - ends;
    ids[i] = (counts[n] - ends[n] + draw) * static_cast<std::int64_t>(num_envs) + n;
  }
}

void replay_gather(const Ring& ring, const std::int64_t* ids, std::size_t batch, std::size_t stack,
                   const double* gammas, std::size_t num_steps, int num_threads, const Samples& out) {
  // Starting threads costs some microseconds: worth it from about a megabyte.
  const std::size_t bytes_out = 2 * batch * stack * ring.frame_bytes;
  const int threads = bytes_out < (1u << 20) ? 1 : num_threads;
  const auto rows = static_cast<std::int64_t>(batch);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (std::int64_t row = 0; row < rows; ++row) {
    if (row + kAhead < rows) prefetch(ring, ids[row + kAhead]);
    gather_one(ring, ids[row], stack, gammas, num_steps, out, static_cast<std::size_t>(row));
  }
}

}  // namespace fastrl
