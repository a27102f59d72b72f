"""The kernels in NumPy: the readable definition the other two are tested against."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


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
    deltas = rewards + np.where(terminated, real(0), real(gamma) * next_values) - values
    decays = np.where(terminated | truncated, real(0), real(gamma * gae_lambda))
    trace = np.zeros(rewards.shape[1:], rewards.dtype)
    for t in reversed(range(len(rewards))):
        trace = deltas[t] + decays[t] * trace
        advantages[t] = trace


# The flags of a transition in a replay ring.
START, TERMINATED, END = 1, 2, 4
FAN_OUT = 8


def replay_add(
    obs, row_actions, row_rewards, terminated, truncated, next_obs, valid, row,
    bases, counts, running, frames, actions, rewards, flags, final_index, pending, finals, free_finals, num_free,
    ids,
) -> int:  # fmt: skip
    """Append rows to a replay ring; csrc/kernels.h says what the arrays are."""
    num_steps, num_envs = valid.shape

    def end_episode(slot: int, extra: int, final_obs: np.ndarray) -> None:
        num_free[0] -= 1
        final_index[slot] = free_finals[num_free[0]]
        finals[final_index[slot]] = final_obs
        flags[slot] |= END | extra

    for t in range(row, num_steps):
        if num_free[0] < 2 * num_envs:  # one for an episode that this row cuts off, one for its own, in each env
            return t
        for n in range(num_envs):
            base, length = bases[n], bases[n + 1] - bases[n]
            if running[n] and not (valid[t, n] and np.array_equal(obs[t, n], pending[n])):
                end_episode(base + (counts[n] - 1) % length, 0, pending[n])
                running[n] = False
            ids[t, n] = -1
            if not valid[t, n]:
                continue
            q = counts[n]
            slot = base + q % length
            if q >= length and flags[slot] & END:
                free_finals[num_free[0]] = final_index[slot]
                num_free[0] += 1
            frames[slot], actions[slot], rewards[slot] = obs[t, n], row_actions[t, n], row_rewards[t, n]
            flags[slot], final_index[slot] = 0 if running[n] else START, -1
            ended = terminated[t, n] or truncated[t, n]
            if ended:
                end_episode(slot, TERMINATED if terminated[t, n] else 0, next_obs[t, n])
            running[n], pending[n] = not ended, next_obs[t, n]
            ids[t, n] = q * num_envs + n
            counts[n] = q + 1
    return num_steps


def replay_draw(ends, counts, uniforms, ids) -> None:
    """Draw live transitions, each as likely as the others; csrc/kernels.h says what the arrays are."""
    draws = (uniforms * ends[-1]).astype(np.int64)
    envs = np.searchsorted(ends, draws, side="right")
    ids[:] = (counts[envs] - ends[envs] + draws) * len(counts) + envs


def replay_gather(
    ids, gammas, stack, num_threads,
    bases, counts, running, frames, actions, rewards, flags, final_index, pending, finals, free_finals, num_free,
    out_obs, out_actions, out_returns, out_discounts, out_next_obs,
) -> None:  # fmt: skip
    """Rebuild the n-step transitions `ids` from a replay ring; csrc/kernels.h says what the arrays are."""
    num_envs, n_step = len(counts), len(gammas) - 1
    for row in range(len(ids)):
        first, n = divmod(int(ids[row]), num_envs)
        base, length, head = int(bases[n]), int(bases[n + 1] - bases[n]), int(counts[n])

        def stacked(newest: np.ndarray, q: int, at_start: bool, base: int = base, length: int = length) -> list:
            """`newest` and the frames of transition q and before, oldest first, the first of the episode repeated."""
            stack_ = [newest]
            while len(stack_) < stack:
                if not at_start:
                    newest, at_start = frames[base + q % length], flags[base + q % length] & START
                    q -= 1
                stack_.append(newest)
            return stack_[::-1]

        slot = base + first % length
        out_obs[row] = stacked(frames[slot], first - 1, flags[slot] & START)
        out_actions[row] = actions[slot]

        total, steps, last = 0.0, 0, first
        while True:
            slot = base + last % length
            total += float(gammas[steps]) * float(rewards[slot])
            steps += 1
            if steps == n_step or flags[slot] & END or last + 1 == head:
                break
            last += 1
        out_returns[row] = total
        out_discounts[row] = 0.0 if flags[slot] & TERMINATED else gammas[steps]

        if flags[slot] & END:
            next_frame = finals[final_index[slot]]
        elif last + 1 == head:
            next_frame = pending[n]
        else:
            next_frame = frames[base + (last + 1) % length]
        out_next_obs[row] = stacked(next_frame, last, False)


def tree_update(ids, values, leaf_bases, counts, offsets, sums, mins) -> None:
    """Set the leaves of the live ids and recompute what stands above them; csrc/kernels.h says what the arrays are."""
    q, n = np.divmod(ids, len(counts))
    lengths = np.diff(leaf_bases)[n]
    live = (ids >= 0) & (q < counts[n]) & (q >= counts[n] - lengths)
    leaves = (leaf_bases[n] + q % lengths)[live]
    for tree in (sums, mins) if len(mins) else (sums,):
        for leaf, value in zip(leaves, values[live], strict=True):  # one by one: the last of equal ids wins
            tree[leaf] = value
    nodes = leaves
    for below, here in pairwise(offsets):
        nodes = np.unique(nodes // FAN_OUT)
        children = below + nodes[:, None] * FAN_OUT + np.arange(FAN_OUT)
        c = sums[children].T
        sums[here + nodes] = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]))
        if len(mins):
            mins[here + nodes] = mins[children].min(axis=1)


def tree_sample(uniforms, leaf_bases, counts, offsets, sums, mins, ids, values) -> None:
    """Draw leaves in proportion to their values, stratified; csrc/kernels.h says what the arrays are."""
    width = sums[-1] / len(uniforms)
    for row, uniform in enumerate(uniforms):
        target, node = (row + uniform) * width, 0
        for below in offsets[-2::-1]:
            children = sums[below + node * FAN_OUT :][:FAN_OUT]
            chosen = 0
            while chosen < FAN_OUT and target >= children[chosen]:
                target -= children[chosen]
                chosen += 1
            if chosen == FAN_OUT:  # rounding carried the target past the last child: the last that holds anything
                chosen = int(np.flatnonzero(children)[-1])
                target = children[chosen]
            node = node * FAN_OUT + chosen
        n = int(np.searchsorted(leaf_bases, node, side="right")) - 1
        newest, length = counts[n] - 1, leaf_bases[n + 1] - leaf_bases[n]
        q = newest - (newest - (node - leaf_bases[n])) % length
        ids[row], values[row] = q * len(counts) + n, sums[node]
