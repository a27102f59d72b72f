"""The kernels in Numba: as fast as C++ within a small factor, for platforms without a compiler.

Compiled on first use for each dtype; the machine code is cached next to this file or in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np


def compiled(kernel: Callable) -> Callable:
    """`kernel` compiled without the GIL; cached on disk where that is possible, else compiled per process."""
    try:
        return numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # a read-only install and no home folder: Numba finds no place for its cache
        return numba.njit(nogil=True)(kernel)


@compiled
def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
    advantages: np.ndarray,
) -> None:
    """Write generalised advantage estimates into `advantages`; see `fastrl.returns.gae` for formula and shapes."""
    real = rewards.dtype.type
    discount, decay, zero = real(gamma), real(gamma * gae_lambda), real(0)
    num_steps, num_envs = rewards.shape
    for t in range(num_steps - 1, -1, -1):
        for n in range(num_envs):
            bootstrap = zero if terminated[t, n] else discount * next_values[t, n]
            delta = rewards[t, n] + bootstrap - values[t, n]
            last = t + 1 == num_steps or terminated[t, n] or truncated[t, n]
            advantages[t, n] = delta + (zero if last else decay * advantages[t + 1, n])


# The flags of a transition in a replay ring.
START, TERMINATED, END = 1, 2, 4
FAN_OUT = 8


@compiled
def replay_add(
    obs, row_actions, row_rewards, terminated, truncated, next_obs, valid, row,
    bases, counts, running, frames, actions, rewards, flags, final_index, pending, finals, free_finals, num_free,
    ids,
):  # fmt: skip
    """Append rows to a replay ring; csrc/kernels.h says what the arrays are."""
    num_steps, num_envs = valid.shape
    for t in range(row, num_steps):
        if num_free[0] < 2 * num_envs:  # one for an episode that this row cuts off, one for its own, in each env
            return t
        for n in range(num_envs):
            base, length = bases[n], bases[n + 1] - bases[n]
            if running[n]:
                cut = not valid[t, n]
                for byte in range(obs.shape[2]):
                    if cut:
                        break
                    cut = obs[t, n, byte] != pending[n, byte]
                if cut:
                    slot = base + (counts[n] - 1) % length
                    num_free[0] -= 1
                    final_index[slot] = free_finals[num_free[0]]
                    finals[final_index[slot]] = pending[n]
                    flags[slot] |= END
                    running[n] = False
            ids[t, n] = -1
            if not valid[t, n]:
                continue
            q = counts[n]
            slot = base + q % length
            if q >= length and flags[slot] & END:
                free_finals[num_free[0]] = final_index[slot]
                num_free[0] += 1
            frames[slot] = obs[t, n]
            actions[slot] = row_actions[t, n]
            rewards[slot] = row_rewards[t, n]
            flags[slot] = 0 if running[n] else START
            final_index[slot] = -1
            running[n] = not (terminated[t, n] or truncated[t, n])
            if running[n]:
                pending[n] = next_obs[t, n]
            else:
                num_free[0] -= 1
                final_index[slot] = free_finals[num_free[0]]
                finals[final_index[slot]] = next_obs[t, n]
                flags[slot] |= END | TERMINATED if terminated[t, n] else END
            ids[t, n] = q * num_envs + n
            counts[n] = q + 1
    return num_steps


@compiled
def replay_draw(ends, counts, uniforms, ids):
    """Draw live transitions, each as likely as the others; csrc/kernels.h says what the arrays are."""
    for row in range(len(uniforms)):
        draw = np.int64(uniforms[row] * ends[-1])
        env = np.searchsorted(ends, draw, side="right")
        ids[row] = (counts[env] - ends[env] + draw) * len(counts) + env


@compiled
def _copy_stack(frames, flags, base, length, newest, q, at_start, out):
    """Write `newest` and the frames of transition q and before, oldest first, the first of the episode repeated."""
    out[-1] = newest
    for i in range(len(out) - 2, -1, -1):
        if at_start:
            out[i] = out[i + 1]
        else:
            slot = base + q % length
            out[i] = frames[slot]
            at_start = (flags[slot] & START) != 0
            q -= 1


@compiled
def replay_gather(
    ids, gammas, stack, num_threads,
    bases, counts, running, frames, actions, rewards, flags, final_index, pending, finals, free_finals, num_free,
    out_obs, out_actions, out_returns, out_discounts, out_next_obs,
):  # fmt: skip
    """Rebuild the n-step transitions `ids` from a replay ring; csrc/kernels.h says what the arrays are."""
    num_envs, n_step = len(counts), len(gammas) - 1
    for row in range(len(ids)):
        first, n = ids[row] // num_envs, ids[row] % num_envs
        base, length = bases[n], bases[n + 1] - bases[n]
        slot = base + first % length
        at_start = (flags[slot] & START) != 0
        _copy_stack(frames, flags, base, length, frames[slot], first - 1, at_start, out_obs[row])
        out_actions[row] = actions[slot]

        total, steps, last = 0.0, 0, first
        while True:
            slot = base + last % length
            total += gammas[steps] * np.float64(rewards[slot])
            steps += 1
            if steps == n_step or (flags[slot] & END) or last + 1 == counts[n]:
                break
            last += 1
        out_returns[row] = total
        out_discounts[row] = 0.0 if flags[slot] & TERMINATED else gammas[steps]

        if flags[slot] & END:
            next_frame = finals[final_index[slot]]
        elif last + 1 == counts[n]:
            next_frame = pending[n]
        else:
            next_frame = frames[base + (last + 1) % length]
        _copy_stack(frames, flags, base, length, next_frame, last, False, out_next_obs[row])


@compiled
def tree_update(ids, values, leaf_bases, counts, offsets, sums, mins):
    """Set the leaves of the live ids and recompute what stands above them; csrc/kernels.h says what the arrays are."""
    nodes = np.empty(len(ids), np.int64)
    kept = 0
    for i in range(len(ids)):
        n, q = ids[i] % len(counts), ids[i] // len(counts)
        length = leaf_bases[n + 1] - leaf_bases[n]
        if ids[i] < 0 or q >= counts[n] or q < counts[n] - length:
            continue
        leaf = leaf_bases[n] + q % length
        sums[leaf] = values[i]
        if len(mins):
            mins[leaf] = values[i]
        nodes[kept] = leaf
        kept += 1
    for level in range(len(offsets) - 1):
        below, here = offsets[level], offsets[level + 1]
        for i in range(kept):
            nodes[i] //= FAN_OUT
            c = sums[below + nodes[i] * FAN_OUT : below + (nodes[i] + 1) * FAN_OUT]
            sums[here + nodes[i]] = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]))
            if len(mins):
                mins[here + nodes[i]] = mins[below + nodes[i] * FAN_OUT : below + (nodes[i] + 1) * FAN_OUT].min()


@compiled
def tree_sample(uniforms, leaf_bases, counts, offsets, sums, mins, ids, values):
    """Draw leaves in proportion to their values, stratified; csrc/kernels.h says what the arrays are."""
    width = sums[-1] / len(uniforms)
    for row in range(len(uniforms)):
        target, node = (row + uniforms[row]) * width, 0
        for level in range(len(offsets) - 2, -1, -1):
            c = sums[offsets[level] + node * FAN_OUT : offsets[level] + (node + 1) * FAN_OUT]
            chosen, last = 0, 0
            while chosen < FAN_OUT:
                if c[chosen] > 0:
                    last = chosen
                if target < c[chosen]:
                    break
                target -= c[chosen]
                chosen += 1
            if chosen == FAN_OUT:  # rounding carried the target past the last child: the last that holds anything
                chosen = last
                target = c[last]
            node = node * FAN_OUT + chosen
        n = np.searchsorted(leaf_bases, node, side="right") - 1
        newest, length = counts[n] - 1, leaf_bases[n + 1] - leaf_bases[n]
        q = newest - (newest - (node - leaf_bases[n])) % length
        ids[row] = q * len(counts) + n
        values[row] = sums[node]
