"""The roles of distributed DQN as plain classes: they know nothing of Ray and can be tested alone.

Weights travel as one flat float32 array. A collector whose network is the tanh MLP computes in NumPy and never loads
PyTorch, which takes several times the memory of all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastrl.envs import Episode, EpisodeStats, VecEnv
from fastrl.types import Chunk

if TYPE_CHECKING:
    from fastrl.networks import QNetwork

Layout = Mapping[str, tuple[int, ...]]
"""Names and shapes of the arrays in a flat one, in their order: those of the network's `state_dict`."""


def layout_of(network: QNetwork) -> Layout:
    """How `flatten` orders this network's parameters and buffers."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def flatten(network: QNetwork) -> np.ndarray:
    """All parameters and buffers, copied into one float32 array."""
    return np.concatenate([tensor.cpu().numpy().ravel() for tensor in network.state_dict().values()], dtype=np.float32)


def unflatten(flat: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """Views of the parts of a flat array.

    Raises: ValueError when it has another length than the layout.
    """
    ends = np.cumsum([math.prod(shape) for shape in layout.values()])
    if flat.shape != (ends[-1],):
        raise ValueError(f"weights have shape {list(flat.shape)}, expected [{ends[-1]}]: of another network?")
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(layout.items(), parts, strict=True)}


class Policy(Protocol):
    """Action values of what was loaded last."""

    def load(self, flat: np.ndarray) -> None:
        """Take over these weights; the array may be read-only and is not kept."""

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Q of obs [N, *obs_shape]: float32 [N, A]."""


class NumpyPolicy:
    """A `QNetwork` over `TanhMLP`, in NumPy."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def load(self, flat: np.ndarray) -> None:
        arrays = unflatten(flat, self._layout)
        weight, bias = arrays["advantage.weight"], arrays["advantage.bias"]
        if "value.weight" in arrays:
            weight = weight - weight.mean(axis=0) + arrays["value.weight"]
            bias = bias - bias.mean() + arrays["value.bias"]
        hidden = [(arrays[f"body.layers.{i}.weight"], arrays[f"body.layers.{i}.bias"]) for i in (0, 2)]
        self._hidden = [(weight.T.copy(), bias.copy()) for weight, bias in hidden]
        self._head = weight.T.copy(), bias.copy()

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        x = obs
        for weight, bias in self._hidden:
            x = np.tanh(x @ weight + bias)
        weight, bias = self._head
        return x @ weight + bias


class TorchPolicy:
    """Any `QNetwork`, on CPU."""

    def __init__(self, network: QNetwork) -> None:
        self._network, self._layout = network.eval().requires_grad_(False), layout_of(network)

    def load(self, flat: np.ndarray) -> None:
        import torch

        # torch.tensor copies: a tensor that shares the array would write to what all others read.
        arrays = unflatten(flat, self._layout).items()
        self._network.load_state_dict({name: torch.tensor(array) for name, array in arrays})
        self._readout = self._network.readout()

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self._network(torch.from_numpy(obs), self._readout).numpy()


class Collector:
    """Plays N envs by its own copy of the policy, epsilon-greedily, and hands out what happened in chunks."""

    def __init__(self, envs: VecEnv, policy: Policy, seed: int) -> None:
        self._envs, self._policy, self._rng = envs, policy, np.random.default_rng(seed)
        self._stats = EpisodeStats(envs.num_envs)
        self._obs: np.ndarray | None = None
        self._version = -1

    def load(self, flat: np.ndarray, version: int) -> None:
        """Act by these weights from now on."""
        self._policy.load(flat)
        self._version = version

    def collect(self, num_steps: int, epsilon: float | np.ndarray) -> Chunk:
        """Go on playing.

        Args:
          num_steps: T, of each env.
          epsilon: probability of a random action, one for all envs or [N].
        Raises: ValueError before the first `load`.
        """
        if self._version < 0:
            raise ValueError("a collector needs weights before it can play: call load()")
        if self._obs is None:
            self._obs = self._envs.reset()
        shape = (num_steps, self._envs.num_envs)
        first = self._newest()
        frames = np.empty((num_steps + 1, *first.shape), first.dtype)
        frames[0] = first
        actions, rewards = np.empty(shape, np.int64), np.empty(shape, np.float32)
        terminated, truncated, valid = (np.empty(shape, bool) for _ in range(3))
        episodes: list[Episode] = []
        for t in range(num_steps):
            actions[t] = self._act(epsilon)
            step = self._envs.step(actions[t])
            self._obs = step.obs
            frames[t + 1] = self._newest()
            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            valid[t] = ~step.was_reset
            episodes += self._stats.update(
                step.raw_rewards, step.terminated, step.truncated, step.was_reset, step.game_over
            )
        return Chunk(frames, actions, rewards, terminated, truncated, valid, episodes, self._version)

    def _act(self, epsilon: float | np.ndarray) -> np.ndarray:
        greedy = self._policy(self._obs).argmax(axis=1)
        explores = self._rng.random(len(greedy)) < epsilon
        return np.where(explores, self._rng.integers(self._envs.num_actions, size=len(greedy)), greedy)

    def _newest(self) -> np.ndarray:
        """The newest frame of each stack; a vector observation is one whole."""
        return self._obs[:, -1] if self._obs.ndim > 2 else self._obs
