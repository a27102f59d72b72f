"""Gymnasium, one env after another: the reference that the fast backends are compared with, and any other env."""

from __future__ import annotations

import pickle
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastrl.envs.contract import EnvConfig, VecEnv, check_actions
from fastrl.types import Step

if TYPE_CHECKING:
    import torch

IMAGE_SIZE = 84


class GymnasiumEnv(VecEnv):
    """N single Gymnasium envs in a plain loop. Takes a resolved config and one seed per env.

    Images become grey, 84 x 84 (area interpolation) and stacked, vectors float32. A lost life is followed by a row that
    plays the no-ops and FIRE of a reset in the running game, as EnvPool does it.
    """

    def __init__(self, config: EnvConfig, seeds: list[int]) -> None:
        single = AtariEnv if config.atari_game else PlainEnv
        self._envs = [single(config) for _ in seeds]
        self._seeds: list[int | None] = list(seeds)
        self._config = config
        self.num_envs = len(seeds)
        self.num_actions = self._envs[0].num_actions
        self.action_meanings = self._envs[0].action_meanings
        shape = self._envs[0].obs_shape
        self._is_image = len(shape) == 2
        if not self._is_image and config.stack not in (None, 1):
            raise ValueError(
                f"stack is for images, got {config.stack} for {config.env_id} with vectors {shape}: leave it out"
            )
        self.obs_shape = ((config.stack or 4), *shape) if self._is_image else shape
        self.obs_dtype = np.dtype(np.uint8 if self._is_image else np.float32)
        self._obs = np.zeros((self.num_envs, *self.obs_shape), self.obs_dtype)
        self._lives = np.zeros(self.num_envs, np.int32)
        self._steps = np.zeros(self.num_envs, np.int64)
        # What the previous row was: the next action is ignored after an ended one.
        self._game_ended = np.zeros(self.num_envs, bool)
        self._life_lost = np.zeros(self.num_envs, bool)

    @cached_property
    def can_restore(self) -> bool:
        """False for a Gymnasium env that holds something which cannot be pickled."""
        try:
            self._envs[0].state()
        except Exception:  # pickle raises whatever the objects inside it raise
            return False
        return True

    def reset(self) -> np.ndarray:
        for env in range(self.num_envs):
            self._begin_game(env)
        return self._obs.copy()

    def step(self, actions: np.ndarray) -> Step:
        actions = check_actions(actions, self.num_envs, self.num_actions)
        was_reset = self._game_ended | self._life_lost
        raw_rewards = np.zeros(self.num_envs, np.float32)
        over, cut, lost = (np.zeros(self.num_envs, bool) for _ in range(3))
        for env, action in enumerate(actions.tolist()):
            if was_reset[env]:
                self._begin(env)
            else:
                raw_rewards[env], over[env], cut[env], lost[env] = self._play(env, action)
        terminated, truncated = (over | lost) & ~cut, cut
        if self._config.time_limit == "silent":
            # The learner is not told of the cut; only the statistics see a game end.
            truncated, game_over = np.zeros_like(cut), over | cut
        else:
            game_over = over & ~cut
        self._game_ended, self._life_lost = over | cut, lost & ~(over | cut)
        if self._config.autoreset == "same_step":
            for env in np.flatnonzero(self._game_ended | self._life_lost):
                self._begin(env)
        return Step(
            obs=self._obs.copy(),
            rewards=np.sign(raw_rewards) if self._config.clip_rewards else raw_rewards,
            raw_rewards=raw_rewards,
            terminated=terminated,
            truncated=truncated,
            was_reset=was_reset,
            lives=self._lives.copy(),
            game_over=game_over,
        )

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def render(self, env: int) -> np.ndarray:
        """The screen of one env in its true colours, as it is now: uint8 [H, W, 3].

        Raises: ValueError if the env draws no pictures, or a package for that is missing.
        """
        return self._envs[env].render()

    def state_dict(self) -> dict[str, Any]:
        """As `VecEnv.state_dict`. Emulator and env states are pickles in uint8 tensors: load only what you trust."""
        import torch

        return {
            "env_id": self._config.env_id,
            "envs": [_to_tensor(env.state()) for env in self._envs],
            "seeds": list(self._seeds),
            **{name: torch.from_numpy(getattr(self, "_" + name).copy()) for name in SAVED_ARRAYS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if tuple(state["obs"].shape) != self._obs.shape:
            got, expected = tuple(state["obs"].shape), self._obs.shape
            raise ValueError(f"state has observations {got}, expected {expected}: use the env flags it was saved with")
        if state["env_id"] != self._config.env_id:
            raise ValueError(f"state is of {state['env_id']}, expected {self._config.env_id}: use its --env-id")
        for env, blob in zip(self._envs, state["envs"], strict=True):
            env.restore(blob.numpy().tobytes())
        self._seeds = list(state["seeds"])
        for name in SAVED_ARRAYS:
            getattr(self, "_" + name)[...] = state[name].numpy()

    def _play(self, env: int, action: int) -> tuple[float, bool, bool, bool]:
        """One agent step of one env. Returns reward, game over, cut by a time limit, life lost."""
        played = self._envs[env].step(action)
        self._push(env, played.obs)
        self._steps[env] += 1
        lost = self._config.episodic_life and 0 < played.lives < self._lives[env]
        self._lives[env] = played.lives
        cut = played.cut
        if self._config.time_limit == "silent":
            # Past its own limit ALE stands still; the prototype kept stepping it, and so does this.
            cut = self._steps[env] >= self._config.loop_cap_steps and not played.over
        return played.reward, played.over, cut, lost

    def _begin(self, env: int) -> None:
        if self._life_lost[env]:
            self._life_lost[env] = False
            played = self._envs[env].begin_life()
            self._push(env, played.obs)
            self._lives[env] = played.lives
        else:
            self._begin_game(env)

    def _begin_game(self, env: int) -> None:
        # Only the first reset is seeded: seeding ALE reloads the ROM and would repeat the episode.
        played = self._envs[env].begin_game(self._seeds[env])
        self._seeds[env] = None
        self._steps[env] = 0
        self._game_ended[env] = self._life_lost[env] = False
        self._lives[env] = played.lives
        if self._is_image:
            self._obs[env] = 0 if self._config.stack_padding == "zero" else played.obs
        self._push(env, played.obs)

    def _push(self, env: int, obs: np.ndarray) -> None:
        """Make obs the newest frame of a stack, or the whole observation of a vector env."""
        if self._is_image:
            self._obs[env, :-1] = self._obs[env, 1:]
            self._obs[env, -1] = obs
        else:
            self._obs[env] = obs


SAVED_ARRAYS = ("obs", "lives", "steps", "game_ended", "life_lost")


class Played(NamedTuple):
    """What a single env answers: obs is uint8 [84, 84] or float32 [S]."""

    obs: np.ndarray
    reward: float
    over: bool
    cut: bool
    lives: int


class AtariEnv:
    """One Atari game."""

    obs_shape = (IMAGE_SIZE, IMAGE_SIZE)

    def __init__(self, config: EnvConfig) -> None:
        import ale_py
        import gymnasium

        self._config = config
        # Before the first emulator, or it prints its banner.
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._env = gymnasium.make(
            f"ALE/{config.atari_game}-v5",
            obs_type="grayscale",
            # Pooling needs the last two frames, so it skips frames itself.
            frameskip=1 if config.max_pool else config.frame_skip,
            repeat_action_probability=config.sticky,
            full_action_space=config.full_action_space,
            max_num_frames_per_episode=config.max_episode_frames,
            disable_env_checker=True,
        )
        self._ale = self._env.unwrapped.ale
        self._noop_rng = np.random.default_rng(0)
        self.num_actions = int(self._env.action_space.n)
        self.action_meanings = tuple(self._env.unwrapped.get_action_meanings())

    def begin_game(self, seed: int | None) -> Played:
        self._env.reset(seed=seed)
        if seed is not None:
            self._noop_rng = np.random.default_rng(seed)
        return self._begin_play()

    def begin_life(self) -> Played:
        """Go on after a lost life as EnvPool does, with at least one no-op or FIRE frame."""
        return self._begin_play(min_frames=1)

    def step(self, action: int) -> Played:
        if not self._config.max_pool:
            screen, reward, over, cut, info = self._env.step(action)
            return Played(_shrink(screen), reward, over, cut, info["lives"])
        total, screens = 0.0, []
        for _ in range(self._config.frame_skip):
            screen, reward, over, cut, info = self._env.step(action)
            screens.append(screen)
            total += reward
            if over or cut:
                break
        return Played(_shrink(np.maximum.reduce(screens[-2:])), total, over, cut, info["lives"])

    def render(self) -> np.ndarray:
        return self._ale.getScreenRGB()

    def state(self) -> bytes:
        return pickle.dumps((self._env.unwrapped.clone_state(include_rng=True), self._noop_rng))

    def restore(self, state: bytes) -> None:
        self._env.reset()
        emulator, self._noop_rng = pickle.loads(state)
        self._env.unwrapped.restore_state(emulator)

    def close(self) -> None:
        self._env.close()

    def _begin_play(self, min_frames: int = 0) -> Played:
        """Random no-op frames, the last of them FIRE where asked for and the game has it."""
        from ale_py import Action

        fire = self._config.fire_reset and "FIRE" in self.action_meanings
        frames = max(min_frames, int(fire))
        if self._config.noop_max > 0:
            frames = int(self._noop_rng.integers(1, self._config.noop_max + 1))
        for frame in range(frames):
            self._ale.act(Action.FIRE if fire and frame == frames - 1 else Action.NOOP)
            if self._ale.game_over():
                self._ale.reset_game()
        return Played(_shrink(self._ale.getScreenGrayscale()), 0.0, False, False, self._ale.lives())


class PlainEnv:
    """One Gymnasium env with discrete actions and an image or vector observation."""

    action_meanings = None

    def __init__(self, config: EnvConfig) -> None:
        import gymnasium

        try:
            self._env = gymnasium.make(config.env_id, disable_env_checker=True)
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise ValueError(f"env_id {config.env_id!r} needs a package that is not installed: {error}") from error
        self._check_spaces(config.env_id)
        self._first_action = int(self._env.action_space.start)
        self.num_actions = int(self._env.action_space.n)
        space = self._env.observation_space
        self.obs_shape = (IMAGE_SIZE, IMAGE_SIZE) if is_image(space) else space.shape

    def begin_game(self, seed: int | None) -> Played:
        obs, _ = self._env.reset(seed=seed)
        return Played(self._prepare(obs), 0.0, False, False, 0)

    def step(self, action: int) -> Played:
        obs, reward, over, cut, _ = self._env.step(self._first_action + action)
        return Played(self._prepare(obs), float(reward), bool(over), bool(cut), 0)

    def render(self) -> np.ndarray:
        import gymnasium

        # Asked for only now, as in some envs being ready to draw slows every step down.
        self._env.unwrapped.render_mode = "rgb_array"
        try:
            screen = self._env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise ValueError(f"the pictures of {self._env.spec.id} need a package that is missing: {error}") from error
        if not isinstance(screen, np.ndarray):
            raise ValueError(f"{self._env.spec.id} draws no pictures (render_mode rgb_array)")
        return screen

    def state(self) -> bytes:
        return pickle.dumps(self._env)

    def restore(self, state: bytes) -> None:
        self._env = pickle.loads(state)

    def close(self) -> None:
        self._env.close()

    def _prepare(self, obs: np.ndarray) -> np.ndarray:
        if len(self.obs_shape) == 1:
            return np.asarray(obs, np.float32)
        import cv2

        return _shrink(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY) if obs.ndim == 3 and obs.shape[2] == 3 else obs)

    def _check_spaces(self, env_id: str) -> None:
        import gymnasium

        actions, observations = self._env.action_space, self._env.observation_space
        if not isinstance(actions, gymnasium.spaces.Discrete):
            raise ValueError(f"env_id {env_id!r} has actions {actions}; fastrl acts in Discrete action spaces only")
        is_box = isinstance(observations, gymnasium.spaces.Box)
        if not is_box or not (is_image(observations) or len(observations.shape) == 1):
            raise ValueError(
                f"env_id {env_id!r} has observations {observations}; fastrl takes Box vectors, or uint8 images "
                "[H, W] or [H, W, 1 or 3]"
            )


def is_image(space: Any) -> bool:
    """Whether a Box space holds uint8 images [H, W], [H, W, 1] or [H, W, 3]."""
    return space.dtype == np.uint8 and (len(space.shape) == 2 or (len(space.shape) == 3 and space.shape[2] in (1, 3)))


def _shrink(screen: np.ndarray) -> np.ndarray:
    import cv2

    return cv2.resize(screen, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_AREA)


def _to_tensor(blob: bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.frombuffer(blob, np.uint8).copy())
