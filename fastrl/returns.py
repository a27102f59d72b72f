"""What is scanned over time: advantages. Arrays are NumPy, [T, N]."""

from __future__ import annotations

import numpy as np

from fastrl import kernels as kernels_
from fastrl.types import describe


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    *,
    gamma: float,
    gae_lambda: float,
    kernels: str = "native",
) -> np.ndarray:
    """Generalised advantage estimates over a batch of trajectories.

        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * gae_lambda * (1 - done_t) * A_{t+1},  A_T = 0,  done = terminated or truncated

    Args:
      rewards, values, next_values: float32 [T, N], or all three float64; next_values[t] is V of the observation after
        step t, before any reset.
      terminated, truncated: bool [T, N]. Truncation cuts the trace and keeps the bootstrap.
      gamma, gae_lambda: discount and trace decay, both in [0, 1].
      kernels: "native", "numba" or "reference"; the three give the same bits.
    Returns: advantages [T, N], in the dtype of `rewards`.
    Raises: ValueError on a shape, dtype or range mismatch, or when the chosen kernels are not installed.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    _check(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)
    contiguous = map(np.ascontiguousarray, (rewards, values, next_values, terminated, truncated))
    advantages = np.empty(rewards.shape, rewards.dtype)
    kernels_.choose(kernels).gae(*contiguous, float(gamma), float(gae_lambda), advantages)
    return advantages


def _check(rewards, values, next_values, terminated, truncated, gamma, gae_lambda) -> None:
    if not isinstance(rewards, np.ndarray) or rewards.ndim != 2 or rewards.dtype not in (np.float32, np.float64):
        raise ValueError(f"rewards must be a float32 or float64 array [T, N]; got {describe(rewards)}")
    expected = {"values": rewards.dtype, "next_values": rewards.dtype, "terminated": np.bool_, "truncated": np.bool_}
    arrays = (values, next_values, terminated, truncated)
    for (name, dtype), array in zip(expected.items(), arrays, strict=True):
        if not isinstance(array, np.ndarray) or array.shape != rewards.shape or array.dtype != dtype:
            want = f"{np.dtype(dtype)} {list(rewards.shape)}, as rewards"
            raise ValueError(f"{name} must be {want}; got {describe(array)}")
    for name, number in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must lie in [0, 1]; got {number}")
