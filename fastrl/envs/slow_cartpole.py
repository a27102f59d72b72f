"""SlowCartPole for Gymnasium: the reference for `cartpole_env`."""

from __future__ import annotations

import time

from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from fastrl.envs.contract import CARTPOLES, SLOW_CARTPOLE


class SlowCartPole(CartPoleEnv):
    """CartPole of which every step takes 10 ms longer; a stand-in for environments slower than a model's update."""

    def step(self, action):
        time.sleep(CARTPOLES[SLOW_CARTPOLE].sleep_s)
        return super().step(action)
