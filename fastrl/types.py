"""The arrays that pass between the parts of fastrl. This is the shape legend of the whole package.

T time (rows of a rollout), N envs, B batch, A actions, C H W image channels/height/width, S flat state size,
L tokens, D features. Arrays are NumPy unless a field says torch; `bool` masks are NumPy bool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class Step(NamedTuple):
    """What `VecEnv.step` returns: one row for each of N envs.

    A row is exactly one of running, ended (`terminated` and/or `truncated`) or reset (`was_reset`).
    """

    obs: np.ndarray
    """[N, *obs_shape] obs_dtype. On an ended row the terminal observation, on a reset row the first of the next one."""
    rewards: np.ndarray
    """[N] float32: what the agent learns from (clipped when `clip_rewards`); 0 on a reset row."""
    raw_rewards: np.ndarray
    """[N] float32: the game's own reward, never clipped; 0 on a reset row."""
    terminated: np.ndarray
    """[N] bool: the episode reached a terminal state (with `episodic_life`, a lost life). No bootstrap."""
    truncated: np.ndarray
    """[N] bool: a time limit cut the episode. Bootstrap from V(obs). Never set together with `terminated`."""
    was_reset: np.ndarray
    """[N] bool: the action of this step was ignored and the env began a new episode. Not a transition: mask it."""
    lives: np.ndarray
    """[N] int32: lives left, 0 where the env has none."""
    game_over: np.ndarray | None = None
    """[N] bool: the whole game ended (not merely a life). None means: the same as `terminated`."""


class Episode(NamedTuple):
    """One finished whole game."""

    return_: float
    """Sum of raw rewards from reset to game over or truncation."""
    length: int
    """Agent steps."""
    env: int
    """Index of the env that played it."""


class Rollout(NamedTuple):
    """T steps of N envs, in torch tensors on the learner's device; obs[t] led to actions[t], which gave rewards[t]."""

    obs: torch.Tensor
    """[T, N, *obs_shape]"""
    actions: torch.Tensor
    """[T, N] int64"""
    logprobs: torch.Tensor
    """[T, N] float32, or the network's float64: log pi(actions | obs) of the policy that acted."""
    values: torch.Tensor
    """[T + 1, N], dtype of `logprobs`: V(obs[t]); the last row is V of the observation after the rollout."""
    rewards: np.ndarray
    """[T, N] float32"""
    terminated: np.ndarray
    """[T, N] bool"""
    truncated: np.ndarray
    """[T, N] bool"""
    valid: np.ndarray
    """[T, N] bool: False where the step was an autoreset (`Step.was_reset`)."""


class Minibatch(NamedTuple):
    """B transitions of a rollout in torch tensors, as `losses.ppo_loss` takes them. Shape [B] unless stated, float32
    or the network's float64.

    Every minibatch of a run has the same B, so that compiled code sees one shape: the last one of an epoch is filled up
    with rows of weight 0.
    """

    obs: torch.Tensor
    """[B, *obs_shape]"""
    actions: torch.Tensor
    """[B] int64"""
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    """V(obs) when the rollout was collected."""
    weights: torch.Tensor
    """1 for a transition, 0 for a row that only fills up the minibatch."""


class Chunk(NamedTuple):
    """T steps of N envs as a collector sends them, in contiguous NumPy arrays that nobody writes to again.

    `Replay.add(frames[:-1], actions, rewards, terminated, truncated, frames[1:], valid)` takes it as it is.
    """

    frames: np.ndarray
    """[T + 1, N, *frame_shape] obs_dtype: the newest frame of each observation (a vector observation is one whole).
    frames[t] is of the observation that led to actions[t], frames[t + 1] of the one after."""
    actions: np.ndarray
    """[T, N] int64"""
    rewards: np.ndarray
    """[T, N] float32"""
    terminated: np.ndarray
    """[T, N] bool"""
    truncated: np.ndarray
    """[T, N] bool"""
    valid: np.ndarray
    """[T, N] bool: False where the step was an autoreset (`Step.was_reset`)."""
    episodes: list[tuple[int, Episode]]
    """What ended in it, each game with its row."""
    version: int
    """Of the weights that acted."""


class Batch(NamedTuple):
    """B transitions of n steps sampled from a replay buffer, in NumPy arrays; the target is
    `returns + discounts * Q(next_obs)`."""

    obs: np.ndarray
    """[B, *obs_shape], or [B, stack, *obs_shape] with stack > 1 (oldest frame first), in obs_dtype."""
    actions: np.ndarray
    """[B] int64"""
    returns: np.ndarray
    """[B] float32: the discounted sum of the rewards of the steps taken."""
    discounts: np.ndarray
    """[B] float32: gamma^k after k steps, 0 if the last of them terminated the episode."""
    next_obs: np.ndarray
    """As `obs`: what was seen after the last step, before any reset."""
    weights: np.ndarray
    """[B] float32 in (0, 1]: importance-sampling weights; 1 in uniform sampling."""
    ids: np.ndarray
    """[B] int64: stable names of the transitions, for `update_priorities`."""


def describe(array: object) -> str:
    """What an error message says of an argument: dtype and shape, or the type of what is no NumPy array."""
    if isinstance(array, np.ndarray):
        return f"{array.dtype} {list(array.shape)}"
    return type(array).__name__
