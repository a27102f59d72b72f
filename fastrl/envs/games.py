"""Whole games, for evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fastrl.envs.contract import EnvConfig, VecEnv
from fastrl.envs.episode_stats import EpisodeStats
from fastrl.types import Episode

Act = Callable[[np.ndarray], np.ndarray]
"""obs [N, *obs_shape] -> actions [N] int64."""


def evaluate(
    act: Act, envs: VecEnv, episodes: int, max_steps: int, keep_going: Callable[[], bool] = lambda: True
) -> list[Episode]:
    """Play `episodes` whole games, each from its beginning.

    How many games each env plays is fixed beforehand (as even as can be), so that short games are not counted more
    often than long ones; an env that is through plays on unrecorded until all are.

    Args:
      act: the policy, see `Act`.
      envs: N envs that end no game early (`episodic_life` off); they are reset first.
      episodes: games to record, over all envs.
      max_steps: steps of `envs` after which the games still going are given up.
      keep_going: asked before every step; where it returns False the evaluation ends with what it has.

    Returns: the episodes in the order in which they ended; fewer than asked for, and a warning, if `max_steps` came
      first.
    """
    to_play = np.full(envs.num_envs, episodes // envs.num_envs)
    to_play[: episodes % envs.num_envs] += 1
    stats = EpisodeStats(envs.num_envs)
    finished: list[Episode] = []
    obs = envs.reset()
    for _ in range(max_steps):
        if not keep_going():
            return finished
        step = envs.step(act(obs))
        obs = step.obs
        ended = stats.update(step.raw_rewards, step.terminated, step.truncated, step.was_reset, step.game_over)
        for episode in ended:
            if to_play[episode.env] > 0:
                to_play[episode.env] -= 1
                finished.append(episode)
        if len(finished) == episodes:
            return finished
    warnings.warn(
        f"evaluation: only {len(finished)} of {episodes} episodes ended within {max_steps} steps per env; "
        "the mean lacks the long ones",
        stacklevel=2,
    )
    return finished


def whole_games(config: EnvConfig, backend: str | None = None) -> EnvConfig:
    """The same environment for evaluation: whole games, raw rewards, time limits that end an episode as usual."""
    return replace(
        config,
        backend=backend or config.backend,
        threads=None,
        episodic_life=False,
        clip_rewards=False,
        time_limit="truncate",
        autoreset="next_step",
    )


def explore(greedy: np.ndarray, epsilon: float | np.ndarray, num_actions: int, rng: np.random.Generator) -> np.ndarray:
    """Each of these actions [N], or with probability epsilon (one for all, or [N]) a random one: int64 [N]."""
    explores = rng.random(len(greedy)) < epsilon
    return np.where(explores, rng.integers(num_actions, size=len(greedy)), greedy)
