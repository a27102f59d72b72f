"""The roles of distributed DQN as plain classes: they know nothing of Ray and can be tested alone.

Weights travel as one flat float32 array. A collector or an evaluator whose network is the tanh MLP computes in NumPy
and never loads PyTorch, which takes several times the memory of all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fastrl.envs import EnvConfig, Episode, EpisodeStats, VecEnv, evaluate, explore, whole_games
from fastrl.types import Batch, Chunk

if TYPE_CHECKING:
    from fastrl.networks import QNetwork
    from fastrl.replay import Replay

Layout = Mapping[str, tuple[int, ...]]
"""Names and shapes of the arrays in a flat one, in their order: those of the network's `state_dict`."""
MakeEnvs = Callable[[EnvConfig, int, int], VecEnv]

MAX_EVAL_STEPS = 108_000
"""Vector steps after which an evaluation gives up on games that do not end."""


class LostError(RuntimeError):
    """A process was started anew and lacks what another one had given it. Whoever asked may try again."""


# ---- what passes between the roles


class Added(NamedTuple):
    """What a chunk brought, once it is in the replay buffer."""

    collector: int
    """Who played it."""
    num_steps: int
    """T * N, reset rows included."""
    num_transitions: int
    """Those of them that are transitions."""
    episodes: list[tuple[int, Episode]]
    """What ended in it, each game after so many of the steps."""
    version: int
    """Of the weights that acted."""
    replay_size: int
    """Transitions that can be sampled now."""


class Snapshot(NamedTuple):
    """Weights to be judged, frozen."""

    global_step: int
    flat: np.ndarray
    """float32 [P], see `flatten`."""


class Report(NamedTuple):
    """What training brought since the report before."""

    global_step: int
    done: bool
    episodes: list[tuple[int, Episode]]
    """Finished games, each with the global step at its end."""
    snapshots: list[Snapshot]
    """Weights due for an evaluation."""
    rows: list[tuple[dict[str, float], dict[str, float]]]
    """Metrics and seconds by phase, as `RunLogger.iteration` takes them: one for each `log_every` steps passed."""
    notes: list[str]
    """What people should see: processes that failed, and so on."""
    details: Sequence[str] = ()
    """What only the log keeps: where processes are."""


class Spaces(NamedTuple):
    """What the envs of a config look like."""

    obs_shape: tuple[int, ...]
    obs_dtype: str
    """As `numpy.dtype` takes it."""
    num_actions: int

    @property
    def stack(self) -> int:
        """Frames per observation: of images [C, H, W] C, else 1."""
        return self.obs_shape[0] if len(self.obs_shape) == 3 else 1

    @property
    def frame_shape(self) -> tuple[int, ...]:
        return self.obs_shape[1:] if len(self.obs_shape) == 3 else self.obs_shape


def spaces_of(envs: VecEnv) -> Spaces:
    return Spaces(tuple(envs.obs_shape), np.dtype(envs.obs_dtype).str, envs.num_actions)


# ---- weights


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


def make_policy(network: Mapping[str, Any], layout: Layout) -> Policy:
    """The policy of a `make_q_network(**network)` whose weights have this layout."""
    if network["name"] == "tanh-mlp":
        return NumpyPolicy(layout)
    from fastrl.networks import make_q_network

    return TorchPolicy(make_q_network(**network))


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


# ---- roles


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

    def play(self, flat: np.ndarray | None, version: int, num_steps: int, epsilon: np.ndarray) -> Chunk | None:
        """`collect` by the weights of this version, which `flat` brings if this collector does not have them yet.

        Returns None if they are missing, as after a restart.
        """
        if flat is not None:
            self.load(flat, version)
        return self.collect(num_steps, epsilon) if self._version == version else None

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
        first = _newest(self._obs)
        frames = np.empty((num_steps + 1, *first.shape), first.dtype)
        frames[0] = first
        actions, rewards = np.empty(shape, np.int64), np.empty(shape, np.float32)
        terminated, truncated, valid = (np.empty(shape, bool) for _ in range(3))
        episodes: list[tuple[int, Episode]] = []
        for t in range(num_steps):
            actions[t] = self._act(epsilon)
            step = self._envs.step(actions[t])
            self._obs = step.obs
            frames[t + 1] = _newest(step.obs)
            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            valid[t] = ~step.was_reset
            ended = self._stats.update(
                step.raw_rewards, step.terminated, step.truncated, step.was_reset, step.game_over
            )
            episodes += [(t, episode) for episode in ended]
        return Chunk(frames, actions, rewards, terminated, truncated, valid, episodes, self._version)

    def _act(self, epsilon: float | np.ndarray) -> np.ndarray:
        greedy = self._policy(self._obs).argmax(axis=1)
        return explore(greedy, epsilon, self._envs.num_actions, self._rng)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on exactly, or with new episodes where the envs cannot be restored."""
        state: dict[str, Any] = {"rng": self._rng.bit_generator.state, "envs": None}
        if self._envs.can_restore and self._obs is not None:
            import torch

            obs = torch.from_numpy(self._obs.copy())
            state |= {"envs": self._envs.state_dict(), "stats": self._stats.state_dict(), "obs": obs}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        if state["envs"] is not None and self._envs.can_restore:
            self._envs.load_state_dict(state["envs"])
            self._stats.load_state_dict(state["stats"])
            self._obs = state["obs"].numpy()


def _newest(obs: np.ndarray) -> np.ndarray:
    """The newest frame of each stack in obs [N, C, H, W]; a vector observation is one whole."""
    return obs[:, -1] if obs.ndim > 2 else obs


class Evaluator:
    """Judges frozen weights."""

    def __init__(self, env: EnvConfig, make_envs: MakeEnvs, policy: Policy) -> None:
        self._env, self._make_envs, self._policy = whole_games(env), make_envs, policy

    def play(
        self,
        flat: np.ndarray,
        episodes: int,
        num_envs: int,
        epsilon: float,
        seed: int,
        keep_going: Callable[[], bool] = lambda: True,
    ) -> list[Episode]:
        """Whole games of the epsilon-greedy policy of these weights, in fresh envs; see `fastrl.evaluate.evaluate`."""
        self._policy.load(flat)
        rng = np.random.default_rng(seed)
        with closing(self._make_envs(self._env, num_envs, seed)) as envs:

            def act(obs: np.ndarray) -> np.ndarray:
                return explore(self._policy(obs).argmax(axis=1), epsilon, envs.num_actions, rng)

            return evaluate(act, envs, episodes, MAX_EVAL_STEPS, keep_going)


class ReplayServer:
    """A replay buffer that several collectors fill: collector i plays the envs from i * N on."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self._batch: Batch | None = None

    def add(self, chunk: Chunk | None, collector: int) -> Added | None:
        """Copy a chunk into the buffer, if there is one; its arrays may be read-only and are not kept."""
        if chunk is None:
            return None
        num_envs = chunk.actions.shape[1]
        self.replay.add(
            chunk.frames[:-1], chunk.actions, chunk.rewards, chunk.terminated, chunk.truncated, chunk.frames[1:],
            chunk.valid, first_env=collector * num_envs,
        )  # fmt: skip
        episodes = [((row + 1) * num_envs, episode) for row, episode in chunk.episodes]
        steps, transitions = chunk.valid.size, int(chunk.valid.sum())
        return Added(collector, steps, transitions, episodes, chunk.version, len(self.replay))

    def draw(self, batch_size: int, beta: float) -> Batch:
        """A minibatch, valid until the next call."""
        self._batch = self.replay.sample(batch_size, beta, out=self._batch)
        return self._batch

    def sample(self, num_batches: int, batch_size: int, beta: float) -> list[Batch]:
        """Minibatches; none while the buffer is empty."""
        return [] if not len(self.replay) else [self.replay.sample(batch_size, beta) for _ in range(num_batches)]

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.replay.update_priorities(ids, priorities)

    def state_dict(self) -> dict[str, Any]:
        return self.replay.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replay.load_state_dict(state)


class LocalExperience:
    """One collector and the replay buffer, in the learner's process: the same classes, deterministic."""

    in_flight = 0

    def __init__(self, collector: Collector | ServedCollector, replay: Replay, num_steps: int) -> None:
        self._collector, self._server, self._num_steps = collector, ReplayServer(replay), num_steps
        self.sample, self.update_priorities = self._server.draw, self._server.update_priorities

    def publish(self, flat: np.ndarray, version: int) -> None:
        """Play by these weights from now on."""
        self._collector.load(flat, version)

    def gather(self, epsilons: np.ndarray) -> Added:
        """Play one chunk, env n exploring with probability epsilons[n], into the replay buffer."""
        return self._server.add(self._collector.collect(self._num_steps, epsilons), 0)

    def failures(self) -> list[str]:
        return []

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        """Valid until the next call."""
        replay = self._server.replay.state_dict(copy=False) if with_replay else None
        return {"collector": self._collector.state_dict(), "replay": replay}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue; returns whether the replay buffer is restored."""
        self._collector.load_state_dict(state["collector"])
        if state["replay"]:
            self._server.replay.load_state_dict(state["replay"])
        return bool(state["replay"])


# ---- the prototype's pattern: a server chooses every action


class ServedCollector:
    """Plays one env by the actions that a server chooses, one at a time; the loop is otherwise a `Collector`'s.

    Args:
      act: obs [1, *obs_shape] -> action int64 [1].
      push: takes every transition when it happens, as a chunk of one step.
    """

    def __init__(
        self, envs: VecEnv, act: Callable[[np.ndarray], np.ndarray], push: Callable[[Chunk], None] = lambda chunk: None
    ) -> None:
        self._envs, self._act, self._push = envs, act, push
        self._version = 0

    def load(self, flat: np.ndarray, version: int) -> None:
        self._version = version  # the server acts by its own weights

    def collect(self, num_steps: int, epsilon: np.ndarray) -> Chunk:
        """One game from its beginning, whatever its length; the server explores."""
        stats, obs, row = EpisodeStats(1), self._envs.reset(), 0
        steps: list[Chunk] = []
        while True:
            actions = self._act(obs)
            step = self._envs.step(actions)
            ended = stats.update(step.raw_rewards, step.terminated, step.truncated, step.was_reset, step.game_over)
            steps.append(
                Chunk(
                    np.stack([_newest(obs), _newest(step.obs)]), actions[None], step.rewards[None],
                    step.terminated[None], step.truncated[None], ~step.was_reset[None], [], self._version,
                )
            )  # fmt: skip
            self._push(steps[-1])
            if ended:
                break
            obs, row = step.obs, row + 1
        frames = np.concatenate([steps[0].frames[:1], *(chunk.frames[1:] for chunk in steps)])
        rows = (np.concatenate(arrays) for arrays in list(zip(*steps, strict=True))[1:6])
        return Chunk(frames, *rows, [(row, ended[0])], self._version)

    def state_dict(self) -> dict[str, Any]:
        return {"envs": self._envs.state_dict() if self._envs.can_restore else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["envs"] is not None and self._envs.can_restore:
            self._envs.load_state_dict(state["envs"])
