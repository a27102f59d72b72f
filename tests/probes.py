"""Small environments whose right answers are known. Importing this module registers them with Gymnasium."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class CounterEnv(gymnasium.Env):
    """Observes how many steps the episode has had; ends after `length` steps; every step is worth 1."""

    def __init__(self, length: int = 3, ends_by: str = "terminated", first_action: int = 0) -> None:
        self.observation_space = Box(0, np.inf, (1,), np.float32)
        self.action_space = Discrete(2, start=first_action)
        self.length, self.ends_by, self.count = length, ends_by, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        ended = self.count >= self.length
        terminated, truncated = ended and self.ends_by != "truncated", ended and self.ends_by != "terminated"
        return np.full(1, self.count, np.float32), 1.0, terminated, truncated, {}


class RightActionEnv(gymnasium.Env):
    """Shows 0 or 1 at random and pays 1 for the action of that number, -1 for the other. Ends after one step."""

    def __init__(self) -> None:
        self.observation_space = Box(0, 1, (1,), np.float32)
        self.action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = int(self.np_random.integers(2))
        return np.full(1, self.shown, np.float32), {}

    def step(self, action):
        return np.full(1, self.shown, np.float32), 1.0 if action == self.shown else -1.0, True, False, {}


class ImageEnv(gymnasium.Env):
    """A uint8 image whose grey level is ten times the number of steps; writes into the same array every step."""

    def __init__(self, shape: tuple[int, ...] = (96, 100, 3), length: int = 5) -> None:
        self.observation_space = Box(0, 255, shape, np.uint8)
        self.action_space = Discrete(3)
        self.image, self.length, self.count = np.zeros(shape, np.uint8), length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.image[:] = 10
        return self.image, {}

    def step(self, action):
        self.count += 1
        self.image[:] = 10 * (self.count + 1)
        return self.image, 0.0, self.count >= self.length, False, {}


class UnpicklableEnv(CounterEnv):
    """Holds a function without a name, as many envs hold files, sockets or windows."""

    def __init__(self) -> None:
        super().__init__()
        self.callback = lambda: None


class UnsupportedEnv(gymnasium.Env):
    """Discrete observations, which fastrl does not take."""

    observation_space = Discrete(4)
    action_space = Discrete(2)


def _register(env_id: str, env: type, **kwargs) -> None:
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, entry_point=env, kwargs=kwargs)


_register("ProbeCounter-v0", CounterEnv)
_register("ProbeTruncated-v0", CounterEnv, ends_by="truncated")
_register("ProbeBothEnds-v0", CounterEnv, ends_by="both")
_register("ProbeOffsetActions-v0", CounterEnv, first_action=5)
_register("ProbeRightAction-v0", RightActionEnv)
_register("ProbeImage-v0", ImageEnv)
_register("ProbeGreyImage-v0", ImageEnv, shape=(60, 40))
_register("ProbeUnpicklable-v0", UnpicklableEnv)
_register("ProbeUnsupported-v0", UnsupportedEnv)
