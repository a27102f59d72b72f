"""SlowCartPole for Gymnasium: the reference for `cartpole_env`."""

from __future__ import annotations

import time

from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from fastrl.envs.cartpole_env import SLOW_SLEEP_S


class SlowCartPole(CartPoleEnv):
    """CartPole of which every step takes 10 ms longer; a stand-in for environments slower than a model's update."""

    def step(self, action):
        time.sleep(SLOW_SLEEP_S)
        return super().step(action)
