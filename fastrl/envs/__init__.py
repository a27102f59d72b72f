"""Environments: one contract, four backends."""

from fastrl.envs.contract import EnvConfig, VecEnv, make_envs, resolve
from fastrl.envs.episode_stats import EpisodeStats
from fastrl.envs.games import Act, evaluate, explore, whole_games
from fastrl.types import Episode, Step

__all__ = [
    "Act", "EnvConfig", "Episode", "EpisodeStats", "Step", "VecEnv",
    "evaluate", "explore", "make_envs", "resolve", "whole_games",
]  # fmt: skip
