"""EnvPool: batched stepping in C++ threads, fastrl's default backend."""

from __future__ import annotations

import warnings

import numpy as np

from fastrl.envs.contract import EnvConfig, VecEnv, check_actions, rom_name
from fastrl.types import Step

# EnvPool keeps only the upper 210 rows of these games' screens.
TALL_SCREENS = (
    "Adventure AirRaid Carnival JourneyEscape KeystoneKapers KingKong Klax LaserGates MrDo Pacman Pooyan SirLancelot "
    "SpaceWar"
).split()


class EnvPoolEnv(VecEnv):
    """Atari games and classic control through EnvPool. Takes a resolved config and one seed per env.

    EnvPool ignores the action after every done row, a lost life included: it then plays the no-ops and FIRE of a reset
    without resetting the game, so `was_reset` is set there too.
    """

    def __init__(self, config: EnvConfig, seeds: list[int]) -> None:
        import envpool

        self.num_envs = len(seeds)
        self._clip_rewards = config.clip_rewards
        options = atari_options(config) if config.atari_game else {}
        if config.atari_game in TALL_SCREENS:
            warnings.warn(f"EnvPool crops the screen of {config.env_id} to its upper 210 rows", stacklevel=3)
        self._pool = envpool.make(
            envpool_id(config),
            env_type="gymnasium",
            num_envs=self.num_envs,
            num_threads=min(config.threads, self.num_envs),
            seed=seeds,
            **options,
        )
        with warnings.catch_warnings():
            # EnvPool states float32 bounds in float64, which Gymnasium remarks on.
            warnings.filterwarnings("ignore", message=".*precision lowered.*")
            space = self._pool.observation_space
        self.obs_shape, self.obs_dtype = space.shape, space.dtype
        self.num_actions = int(self._pool.action_space.n)
        self._done = np.zeros(self.num_envs, bool)

    def reset(self) -> np.ndarray:
        obs, _ = self._pool.reset()
        self._done = np.zeros(self.num_envs, bool)
        return obs

    def step(self, actions: np.ndarray) -> Step:
        actions = check_actions(actions, self.num_envs, self.num_actions)
        # Every step returns fresh arrays that EnvPool never touches again: no copies.
        obs, rewards, terminated, truncated, info = self._pool.step(actions)
        was_reset, self._done = self._done, terminated | truncated
        # Only Atari games have lives, and an unclipped reward apart from the one returned.
        raw_rewards = info.get("reward", rewards)
        return Step(
            obs=obs,
            rewards=np.sign(raw_rewards) if self._clip_rewards else raw_rewards,
            raw_rewards=raw_rewards,
            terminated=terminated & ~truncated,
            truncated=truncated,
            was_reset=was_reset,
            lives=info.get("lives", np.zeros(self.num_envs, np.int32)),
            game_over=info["terminated"].astype(bool) & ~truncated if "terminated" in info else terminated & ~truncated,
        )

    def close(self) -> None:
        # EnvPool stops its threads only when the pool is deleted; its own close() leaves them running.
        self._pool = None


def envpool_id(config: EnvConfig) -> str:
    """EnvPool's name of the env: `TicTacToe3d-v5` for `ALE/TicTacToe3D-v5`."""
    if not config.atari_game:
        return config.env_id
    return "".join(word.capitalize() for word in rom_name(config.atari_game).split("_")) + "-v5"


def atari_options(config: EnvConfig) -> dict:
    """EnvPool's arguments for a resolved Atari config."""
    return dict(
        frame_skip=config.frame_skip,
        stack_num=config.stack,
        repeat_action_probability=config.sticky,
        # EnvPool plays 1 to noop_max no-ops, the last of them being FIRE if fire_reset; 0 would crash the process.
        noop_max=max(1, config.noop_max),
        use_fire_reset=config.fire_reset,
        episodic_life=config.episodic_life,
        reward_clip=False,
        full_action_space=config.full_action_space,
        # EnvPool counts agent steps.
        max_episode_steps=-(-config.max_episode_frames // config.frame_skip),
    )
