"""ale-py's own batched C++ stepping."""

from __future__ import annotations

import numpy as np

from fastrl.envs.contract import EnvConfig, VecEnv, check_actions, rom_name
from fastrl.types import Step


class AleEnv(VecEnv):
    """Atari games through ale-py's AtariVectorEnv. Takes a resolved config and one seed per env.

    After a lost life the game goes on without a reset row: the next action counts, and no FIRE is pressed for it.
    """

    def __init__(self, config: EnvConfig, seeds: list[int]) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self.num_envs = len(seeds)
        self._config = config
        self._seeds: np.ndarray | None = np.array(seeds)
        self._envs = AtariVectorEnv(
            rom_name(config.atari_game),
            self.num_envs,
            num_threads=min(config.threads, self.num_envs),
            frameskip=config.frame_skip,
            stack_num=config.stack,
            maxpool=config.max_pool,
            repeat_action_probability=config.sticky,
            noop_max=config.noop_max,
            use_fire_reset=config.fire_reset,
            # Its episodic_life really resets the game; this one only reports the lost life.
            life_loss_info=config.episodic_life,
            reward_clipping=False,
            full_action_space=config.full_action_space,
            max_num_frames_per_episode=config.max_episode_frames,
        )
        self.obs_shape = self._envs.single_observation_space.shape
        self.obs_dtype = self._envs.single_observation_space.dtype
        self.num_actions = int(self._envs.single_action_space.n)
        self.action_meanings = tuple(action.name for action in self._envs.ale.get_action_set())
        self._game_ended = np.zeros(self.num_envs, bool)
        self._lives = np.zeros(self.num_envs, np.int32)
        self._age = np.zeros(self.num_envs, np.int64)

    def reset(self) -> np.ndarray:
        # Seeded once: a seed on a later reset would repeat the episode.
        obs, info = self._envs.reset(seed=self._seeds)
        self._seeds = None
        self._game_ended[:] = False
        self._age[:] = 0
        self._lives = info["lives"]
        return self._pad(obs)

    def step(self, actions: np.ndarray) -> Step:
        actions = check_actions(actions, self.num_envs, self.num_actions)
        obs, rewards, terminated, truncated, info = self._envs.step(actions)
        raw_rewards = rewards.astype(np.float32)
        was_reset = self._game_ended
        game_over = terminated & ~truncated
        if self._config.episodic_life:
            # terminated marks lost lives as well. Adventure's game ends with its one life still shown.
            life_lost = (info["lives"] < self._lives) & (info["lives"] > 0)
            game_over &= ~life_lost
        self._lives = info["lives"]
        self._game_ended = game_over | truncated
        self._age = np.where(was_reset, 0, self._age + 1)
        return Step(
            obs=self._pad(obs),
            rewards=np.sign(raw_rewards) if self._config.clip_rewards else raw_rewards,
            raw_rewards=raw_rewards,
            terminated=terminated & ~truncated,
            truncated=truncated,
            was_reset=was_reset,
            lives=info["lives"],
            game_over=game_over,
        )

    def close(self) -> None:
        self._envs = None

    def _pad(self, obs: np.ndarray) -> np.ndarray:
        """Repeat an episode's first frame where ale-py left zeros: the stack - 1 - age oldest frames."""
        if self._config.stack_padding == "repeat":
            for env in np.flatnonzero(self._age < obs.shape[1] - 1):
                first = obs.shape[1] - 1 - self._age[env]
                obs[env, :first] = obs[env, first]
        return obs
