"""Environments: one contract, four backends."""

from fastrl.envs.contract import EnvConfig, VecEnv, make_envs
from fastrl.envs.episode_stats import EpisodeStats
from fastrl.types import Episode, Step

__all__ = ["EnvConfig", "Episode", "EpisodeStats", "Step", "VecEnv", "make_envs"]
