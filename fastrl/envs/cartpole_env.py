"""CartPole for all envs at once, in NumPy: Gymnasium's, bit for bit, and many times as fast with many envs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fastrl.envs.contract import CARTPOLES, EnvConfig, VecEnv, check_actions
from fastrl.types import Step

GRAVITY, CART_MASS, POLE_MASS, HALF_POLE, PUSH, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * np.pi / 360


class CartPoleEnv(VecEnv):
    """CartPole-v0, CartPole-v1 or SlowCartPole-v0. Takes a resolved config and one seed per env.

    SlowCartPole stands for an environment whose steps take long: all envs of one `step` wait at the same time, as they
    would in a thread each.
    """

    can_restore = True

    def __init__(self, config: EnvConfig, seeds: list[int]) -> None:
        self._env_id = config.env_id
        self._max_steps, self._sleep_s = CARTPOLES[config.env_id]
        self.num_envs, self.obs_shape, self.obs_dtype, self.num_actions = len(seeds), (4,), np.dtype(np.float32), 2
        self._rngs = [np.random.default_rng(seed) for seed in seeds]
        self._state = np.zeros((4, self.num_envs))
        self._steps = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, bool)

    def reset(self) -> np.ndarray:
        self._begin(range(self.num_envs))
        return self._obs()

    def step(self, actions: np.ndarray) -> Step:
        actions = check_actions(actions, self.num_envs, self.num_actions)
        if self._sleep_s:
            time.sleep(self._sleep_s)
        was_reset = self._ended.copy()
        self._state = next_state(self._state, actions)
        self._steps += 1
        self._begin(np.flatnonzero(was_reset))
        fallen = (np.abs(self._state[0]) > MAX_POSITION) | (np.abs(self._state[2]) > MAX_ANGLE)
        truncated = self._steps >= self._max_steps
        terminated = fallen & ~truncated
        self._ended = fallen | truncated
        rewards = (~was_reset).astype(np.float32)
        return Step(
            obs=self._obs(),
            rewards=rewards,
            raw_rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            was_reset=was_reset,
            lives=np.zeros(self.num_envs, np.int32),
        )

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {
            "env_id": self._env_id,
            "state": torch.from_numpy(self._state.copy()),
            "steps": torch.from_numpy(self._steps.copy()),
            "ended": torch.from_numpy(self._ended.copy()),
            "rngs": [rng.bit_generator.state for rng in self._rngs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["env_id"] != self._env_id:
            raise ValueError(f"state is of {state['env_id']}, expected {self._env_id}: use its --env-id")
        if tuple(state["state"].shape) != self._state.shape:
            got = state["state"].shape[1]
            raise ValueError(f"state is of {got} envs, expected {self.num_envs}: use its --num-envs")
        self._state, self._steps = state["state"].numpy().copy(), state["steps"].numpy().copy()
        self._ended = state["ended"].numpy().copy()
        for rng, saved in zip(self._rngs, state["rngs"], strict=True):
            rng.bit_generator.state = saved

    def _begin(self, envs: range | np.ndarray) -> None:
        for env in envs:
            self._state[:, env] = self._rngs[env].uniform(-0.05, 0.05, 4)
        self._steps[envs] = 0
        self._ended[envs] = False

    def _obs(self) -> np.ndarray:
        return self._state.T.astype(np.float32, order="C")


def next_state(state: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """One Euler step of 20 ms.

    Args:
      state: float64 [4, N]: position, velocity, angle, angular velocity. actions: [N], 1 pushes right, 0 left.
    Source: Barto, Sutton and Anderson 1983, doi:10.1109/TSMC.1983.6313077; the order of operations is Gymnasium's.
    """
    x, x_dot, theta, theta_dot = state
    force = np.where(actions == 1, PUSH, -PUSH)
    cosine, sine = np.cos(theta), np.sin(theta)
    mass, pole = CART_MASS + POLE_MASS, POLE_MASS * HALF_POLE
    pushed = (force + pole * np.square(theta_dot) * sine) / mass
    theta_acc = (GRAVITY * sine - cosine * pushed) / (HALF_POLE * (4.0 / 3.0 - POLE_MASS * np.square(cosine) / mass))
    x_acc = pushed - pole * theta_acc * cosine / mass
    return np.stack([x + TICK * x_dot, x_dot + TICK * x_acc, theta + TICK * theta_dot, theta_dot + TICK * theta_acc])
