"""The kernels in NumPy: the readable definition the other two are tested against."""

from __future__ import annotations

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
