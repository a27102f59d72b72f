"""Returns and lengths of whole games, from the rows that `VecEnv.step` returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrl.types import Episode


class EpisodeStats:
    """Adds up the raw rewards of N envs and reports each game when it ends.

    A game ends at game over or truncation; a lost life does not end it. Reset rows are no steps and add nothing.
    """

    def __init__(self, num_envs: int) -> None:
        # float64: a long game's float32 sum would round.
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)

    def update(
        self,
        raw_rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        was_reset: np.ndarray,
        game_over: np.ndarray | None = None,
    ) -> list[Episode]:
        """Count one row of N envs. Arguments as in `Step`: float32 or bool [N]. Returns the games that ended on it."""
        counted = ~was_reset
        self._returns += np.where(counted, raw_rewards, 0)
        self._lengths += counted
        ended = (terminated if game_over is None else game_over) | truncated
        if not ended.any():
            return []
        envs = np.flatnonzero(ended)
        episodes = [Episode(float(self._returns[env]), int(self._lengths[env]), int(env)) for env in envs]
        self._returns[envs] = 0
        self._lengths[envs] = 0
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """The unfinished games: returns float64 [N] and lengths int64 [N], as tensors."""
        import torch

        return {"returns": torch.from_numpy(self._returns.copy()), "lengths": torch.from_numpy(self._lengths.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the games of a `state_dict` of as many envs."""
        if len(state["returns"]) != len(self._returns):
            got, expected = len(state["returns"]), len(self._returns)
            raise ValueError(f"state has statistics of {got} envs, expected {expected}: use the same --num-envs")
        self._returns[:] = state["returns"].numpy()
        self._lengths[:] = state["lengths"].numpy()
