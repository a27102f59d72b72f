"""Deep Q-learning: `python -m fastrl.dqn`. Read `Training.advance` and `Training.learn` first, then `train`.

Collectors, replay and evaluators (`fastrl.dqn_actors`) are plain classes. With `--num-collectors 0` they all live in
this process; else `fastrl.dqn_ray` spreads them over processes or machines, and this process only watches.

Source: Mnih et al. 2015, doi:10.1038/nature14236; the plumbing follows Horgan et al. 2018, arXiv:1803.00933 (Ape-X).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import fastrl
from fastrl import checkpoint, kernels, plot, schedules
from fastrl import config as config_files
from fastrl.dqn_actors import (
    Added,
    Collector,
    Evaluator,
    Layout,
    LocalExperience,
    LostError,
    MakeEnvs,
    Report,
    ServedCollector,
    Snapshot,
    Spaces,
    explore,
    flatten,
    layout_of,
    make_policy,
    spaces_of,
    unflatten,
)
from fastrl.envs import EnvConfig, resolve
from fastrl.envs import make_envs as default_make_envs
from fastrl.logger import RunLogger, import_wandb, open_logger
from fastrl.losses import DqnLoss, dqn_loss, dqn_targets
from fastrl.networks import BODIES, QNetwork, make_q_network, network_options
from fastrl.replay import Replay
from fastrl.runtime import (
    RunFailed,
    StopSignal,
    available_cores,
    check_compiler,
    configure_torch,
    derived_seed,
    provenance,
    python_command,
    resolve_device,
    run_cli,
    seed_everything,
    user_errors,
)
from fastrl.schedules import passed
from fastrl.timing import PhaseTimer
from fastrl.types import Batch, Episode

NetworkName = Literal[("auto", *BODIES)]

MAX_EVAL_ENVS = 32
SAVED_REPLAY_BYTES = 200e6
"""Replay buffers up to this size are part of checkpoints by default."""

RESUMED_PARTS = {"learner", "training", "logger"}
MAY_CHANGE_ON_RESUME = {
    "total_timesteps", "total_episodes", "num_evaluators", "threads", "torch_threads", "device", "compile", "kernels",
    "attention", "fold", "ray_address", "hang_timeout_s", "max_failures", "eval_every", "eval_every_episodes",
    "eval_episodes", "eval_envs", "eval_epsilon", "log_every", "checkpoint_every", "keep_checkpoints", "save_replay",
    "track", "quiet",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DqnConfig(EnvConfig):
    """Train a policy with DQN. The defaults are the environment and hyper-parameters of the prototype."""

    preset: str = "default"
    """Named settings to start from: default, reference, slow-cartpole, atari."""
    config: str | None = None
    """TOML file of settings, applied after the preset and before the flags."""
    resume: str | None = None
    """Run directory (or checkpoint file) to continue. Its settings apply; see the README for what may change."""
    run_dir: str | None = None
    """Where to write; with --resume the run itself, else by default runs/<env>__dqn__<seed>__<time>-<id>."""
    seed: int = 42
    """Seeds network, exploration, sampling and environments."""

    env_id: str = "SlowCartPole-v0"
    """Environment: SlowCartPole-v0 (each step takes 10 ms), CartPole-v1, ALE/Pong-v5 or Pong-v5 (any Atari game), or
    any Gymnasium env with discrete actions (module:Name-v0 imports the module that registers it)."""
    backend: Literal["envpool", "ale", "numpy", "gymnasium"] = "numpy"
    """What steps it: numpy (CartPole only, all envs in one array), envpool (batched C++), ale (ale-py's batched C++,
    Atari only), gymnasium (the plain reference)."""

    total_timesteps: int = 1_000_000
    """Agent steps to train for, over all envs of all collectors."""
    total_episodes: int | None = None
    """Stop after so many training episodes, if that comes first."""
    num_collectors: int = 4
    """Processes that play; 0: everything in this one process, deterministic."""
    num_evaluators: int = 1
    """Processes that judge snapshots of the policy while training goes on."""
    num_envs: int = 16
    """Environments of each collector, stepped together."""
    num_steps: int = 16
    """Steps per env that a collector sends at once."""
    actions: Literal["local", "server"] = "local"
    """Who chooses them: each collector with its copy of the policy, or the learner one at a time, as the prototype."""
    replay_actors: int = 0
    """Processes that hold the replay buffer in parts; 0: the learner's process does."""
    publish_every: int = 10
    """Updates after which collectors get new weights, with their next chunk."""

    learning_rate: float = 3e-4
    """Adam's step size."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    gamma: float = 0.99
    """Discount per agent step."""
    batch_size: int = 32
    """Transitions per update."""
    samples_per_insert: float = 3.2
    """How often each transition is sampled on average: updates = transitions * samples_per_insert / batch_size. Neither
    side runs ahead."""
    learning_starts: int = 1_000
    """Transitions gathered before the first update."""
    target_every: int = 2_000
    """Transitions between copies of the network to the target network; 0: no target network."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; None: no clipping."""
    double_q: bool = False
    """Let the network choose the next action and the target network judge it."""
    n_step: int = 1
    """Rewards per return."""

    epsilon_start: float = 1.0
    """Probability of a random action at the start."""
    epsilon_end: float = 0.1
    """... and after exploration_steps."""
    exploration_steps: int = 100_000
    """Agent steps over which epsilon falls linearly."""
    epsilon_alpha: float = 0.0
    """Spread of exploration: env i of N uses epsilon ** (1 + alpha * i / (N - 1)); 0: all the same (Ape-X: 7)."""

    buffer_size: int = 2_000
    """Transitions in the replay buffer, over all envs."""
    prioritized: bool = False
    """Sample in proportion to the TD error."""
    priority_alpha: float = 0.6
    """Exponent of the priorities."""
    priority_beta: float = 0.4
    """Exponent of the importance weights at the start; it rises to 1 over the run."""

    network: NetworkName = "auto"
    """auto: nature-cnn for images, tanh-mlp for vectors."""
    dueling: bool = False
    """Value and advantages as two heads."""
    hidden_size: int | None = None
    """Width of the network's hidden layer; by default 512 (tanh-mlp: 256, others 1024)."""
    attention: Literal["fused", "plain"] = "fused"
    """attention-cnn's kernel."""
    fold: bool = True
    """Merge attention-cnn's linear branch with the head."""
    kernels: Literal["native", "numba", "reference"] = "native"
    """Implementation of the replay buffer's loops."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network: bfloat16 is mixed precision."""
    compile: bool = False
    """torch.compile the loss (seconds to a minute at the start; needs a C++ compiler on CPU)."""
    device: str = "auto"
    """Of the learner: auto, cpu, cuda, cuda:0, ..."""
    torch_threads: int | None = None
    """CPU threads of the learner; by default 1 for vectors, the cores this process may use for images."""

    ray_address: str | None = None
    """Join this Ray cluster (auto, or HOST:PORT) instead of starting one on this machine."""
    hang_timeout_s: float = 3.0
    """A process that answers nothing for so long is killed and started anew."""
    max_failures: int = 10
    """Give up when processes fail more often than this within a minute."""

    eval_every: int = 50_000
    """Evaluate the policy at step 0 and each time this many steps have passed; 0: never."""
    eval_every_episodes: int = 0
    """Evaluate at step 0 and after each so many training episodes; 0: never."""
    eval_episodes: int = 30
    """Whole games per evaluation."""
    eval_envs: int | None = None
    """Games played side by side; by default all of them, at most 32."""
    eval_epsilon: float = 0.0
    """Probability of a random action in evaluations."""
    log_every: int = 10_000
    """Steps per line of metrics."""
    checkpoint_every: int = 100_000
    """Write a checkpoint each time this many steps have passed (always at the end); 0: only at the end."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay on disk, beside the best."""
    save_replay: bool | None = None
    """Keep the replay buffer in checkpoints, so that a resumed run need not fill it anew; by default up to 200 MB."""
    track: bool = False
    """Also log to Weights & Biases (needs the extra `wandb`)."""
    quiet: bool = False
    """No progress display."""

    def __post_init__(self) -> None:
        config_files.check_places(self)
        super().__post_init__()
        check = config_files.check
        positive = (
            "total_timesteps", "num_envs", "num_steps", "publish_every", "batch_size", "learning_starts", "n_step",
            "buffer_size", "eval_episodes", "log_every", "keep_checkpoints", "max_failures",
        )  # fmt: skip
        counts = ("seed", "num_collectors", "replay_actors", "target_every", "exploration_steps", "eval_every")
        counts += ("eval_every_episodes", "checkpoint_every", "epsilon_alpha")
        check(self, positive, lambda x: x >= 1, "at least 1")
        check(self, counts, lambda x: 0 <= x < math.inf, "0 or more")
        optional = ("total_episodes", "hidden_size", "eval_envs")
        check(self, optional, lambda x: x is None or x >= 1, "at least 1")
        check(self, ("torch_threads",), lambda x: x is None or 1 <= x <= 1024, "between 1 and 1024")
        above_0 = ("learning_rate", "adam_eps", "samples_per_insert", "hang_timeout_s")
        check(self, above_0, lambda x: 0 < x < math.inf, "above 0")
        fractions = ("gamma", "epsilon_start", "epsilon_end", "priority_alpha", "priority_beta", "eval_epsilon")
        check(self, fractions, lambda x: 0 <= x <= 1, "between 0 and 1")
        check(self, ("max_grad_norm",), lambda x: x is None or x > 0, "above 0, or None")
        if self.autoreset != "next_step" or self.time_limit != "truncate":
            raise ValueError(
                "DQN needs the observation at the end of an episode: leave --autoreset and --time-limit out"
            )
        if self.learning_starts > self.buffer_size:
            raise ValueError(
                f"learning_starts is {self.learning_starts:,}, but the buffer never holds more than buffer_size "
                f"{self.buffer_size:,}: lower one or raise the other"
            )
        if self.buffer_size < self.total_envs:
            raise ValueError(
                f"buffer_size is {self.buffer_size:,}, expected at least one transition for each of "
                f"{self.total_envs:,} envs"
            )
        if self.evaluates and self.num_collectors and not self.num_evaluators:
            raise ValueError("num_evaluators is 0, but evaluations are asked for: add one, or --eval-every 0")
        self._check_patterns()

    def _check_patterns(self) -> None:
        if not self.num_collectors and (self.replay_actors or self.ray_address):
            name, value = (
                ("replay_actors", self.replay_actors) if self.replay_actors else ("ray_address", self.ray_address)
            )
            raise ValueError(f"{name} is {value}, but num_collectors 0 runs everything in one process: leave it out")
        if self.replay_actors > max(self.num_collectors, 0):
            raise ValueError(
                f"replay_actors is {self.replay_actors}, expected at most one per collector ({self.num_collectors})"
            )
        if self.actions == "server" and (
            self.num_envs > 1 or self.prioritized or self.n_step > 1 or self.replay_actors
        ):
            raise ValueError(
                "actions 'server' is the prototype's pattern: it needs --num-envs 1, --n-step 1, uniform sampling and "
                "no --replay-actors"
            )

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> DqnConfig:
        """The config of `--preset NAME`, with some fields changed."""
        return dataclasses.replace(config_files.parse(cls, "dqn", ["--preset", name]), **changes)

    @property
    def total_envs(self) -> int:
        """Environments of all collectors."""
        return self.num_envs * max(1, self.num_collectors)

    @property
    def evaluates(self) -> bool:
        return self.eval_every > 0 or self.eval_every_episodes > 0

    @property
    def target_updates(self) -> int:
        """Updates between copies to the target network; 0: there is none."""
        return max(1, round(self.updates_for(self.target_every))) if self.target_every else 0

    def updates_for(self, transitions: int) -> float:
        """How many updates so many transitions allow."""
        return transitions * self.samples_per_insert / self.batch_size

    def epsilons(self, global_step: int) -> np.ndarray:
        """Probability of a random action in each env of all collectors: float64 [total_envs]."""
        fraction = global_step / self.exploration_steps if self.exploration_steps else 1.0
        epsilon = schedules.linear(self.epsilon_start, self.epsilon_end, fraction)
        return epsilon ** (1 + self.epsilon_alpha * np.linspace(0, 1, self.total_envs))

    @property
    def env(self) -> EnvConfig:
        """The part of this config that describes the environment."""
        return EnvConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EnvConfig)})


class Learner:
    """Improves the network. Holds all that learning changes: parameters, target network, optimizer, counters."""

    def __init__(self, network: QNetwork, config: DqnConfig):
        self.network, self.config = network, config
        self.target = copy.deepcopy(network).requires_grad_(False) if config.target_every else network
        self.optimizer = torch.optim.Adam(
            network.parameters(), lr=config.learning_rate, eps=config.adam_eps, fused=True
        )
        self.optimizer_steps = self.target_syncs = 0
        self._loss = minibatch_loss(network, self.target, config.double_q)
        self._losses: list[DqnLoss] = []
        if config.compile:
            # PyTorch stops compiling a function after a few networks; each learner starts its count anew.
            torch.compiler.reset()
            self._loss = torch.compile(self._loss)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def update(self, batch: Batch) -> Tensor:
        """One gradient step, and the copy to the target network when it is due. Returns the TD errors [B]."""
        device = self.device
        # Arrays from shared memory are read-only and not ours: a tensor must not share them.
        tensors = [torch.from_numpy(x if x.flags.writeable else x.copy()).to(device) for x in batch[:-1]]
        loss = self._loss(*tensors)
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer_steps += 1
        self._losses.append(DqnLoss(*(x.detach() for x in loss)))
        if self.config.target_every and self.optimizer_steps % self.config.target_updates == 0:
            self.target.load_state_dict(self.network.state_dict())
            self.target_syncs += 1
        return loss.td_errors

    def read(self, global_step: int) -> dict[str, float]:
        """Means of the losses since the last call, once they and the parameters are known to be finite."""
        if not self._losses:
            return {}
        means = torch.stack([torch.stack([loss.total, loss.q_mean]) for loss in self._losses]).mean(dim=0)
        self._losses = []
        norms = torch.stack(torch._foreach_norm([p.detach() for p in self.network.parameters()]))
        names = ["loss", "q_mean"]
        terms = [*names, *(f"the norm of parameter {name}" for name, _ in self.network.named_parameters())]
        values = torch.cat([means, norms]).tolist()  # sync: one per row of metrics
        for term, value in zip(terms, values, strict=True):
            if not math.isfinite(value):
                raise RunFailed(f"{term} is {value} at step {global_step:,}")
        return dict(zip(names, values, strict=False))

    def state_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.state_dict() if self.config.target_every else None,
            "optimizer": self.optimizer.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "target_syncs": self.target_syncs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.config.target_every:
            self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer_steps, self.target_syncs = state["optimizer_steps"], state["target_syncs"]


def minibatch_loss(network: QNetwork, target: QNetwork, double_q: bool) -> Callable[..., DqnLoss]:
    """A function of the fields of a `Batch` up to `weights`, as tensors, to the loss under the current parameters."""

    def loss(
        obs: Tensor, actions: Tensor, returns: Tensor, discounts: Tensor, next_obs: Tensor, weights: Tensor
    ) -> DqnLoss:
        with torch.no_grad():
            next_q_online = network(next_obs) if double_q else None
            targets = dqn_targets(returns, discounts, target(next_obs), next_q_online)
        return dqn_loss(network(obs), actions, targets, weights)

    return loss


class Experience(Protocol):
    """Where transitions come from: collectors and replay buffer, wherever they live."""

    in_flight: int
    """Chunks on their way."""

    def publish(self, flat: np.ndarray, version: int) -> None:
        """Chunks begun from now on are played by these weights."""

    def gather(self, epsilons: np.ndarray) -> Added | None:
        """One more chunk into the replay buffer; None if none came within a second."""

    def sample(self, batch_size: int, beta: float) -> Batch | None:
        """A minibatch, valid until the next call; None if the replay buffer was lost and is empty."""

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Of the transitions of the last `sample`."""

    def failures(self) -> list[str]:
        """What went wrong with other processes since the last call, and was passed over."""

    def state_dict(self, with_replay: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue; returns whether the replay buffer is restored."""


class Training:
    """The loop of DQN: transitions in, updates out, at the ratio asked for."""

    def __init__(self, learner: Learner, experience: Experience):
        self.learner, self.config, self.experience = learner, learner.config, experience
        self.global_step = self.num_episodes = 0
        self.weight_version = self.published_at = 0
        self.num_inserted = 0
        """Transitions that count for `samples_per_insert`: those beyond the warm-up."""
        self.warming = self.config.learning_starts
        """Transitions that are to be gathered before they count."""
        self._snapshots: list[Snapshot] = []
        self._episodes: list[tuple[int, Episode]] = []
        self._rows: list[tuple[dict[str, float], dict[str, float]]] = []
        self._timer = PhaseTimer()
        self._since = _Since()
        self._flat = self._publish()
        if self.config.evaluates:
            self._snapshots.append(Snapshot(0, self._flat))

    @property
    def done(self) -> bool:
        return is_done(self.config, self.global_step, self.num_episodes)

    def advance(self, until: int, max_seconds: float = math.inf) -> Report:
        """Play and learn until global step `until` is reached, for `max_seconds` at most."""
        end = time.monotonic() + max_seconds
        if not self._since.steps:
            self._since = _Since()
        while self.global_step < until and not self.done and time.monotonic() < end:
            with self._timer("wait"):
                added = self.experience.gather(self.config.epsilons(self.global_step))
            if added is not None:
                self.learn(added)
        return self.report()

    def learn(self, added: Added) -> None:
        """Account for a chunk that is in the replay buffer, and make the updates that it allows."""
        before, episodes_before = self.global_step, self.num_episodes
        self._count(added)
        while self.learner.optimizer_steps + 1 <= self.config.updates_for(self.num_inserted) + 1e-9:
            if not self._update():
                self._warm_up_again()
        if self.learner.optimizer_steps >= self.published_at + self.config.publish_every:
            self.weight_version += 1
            self._flat = self._publish()
        if passed(self.config.eval_every, before, self.global_step) or passed(
            self.config.eval_every_episodes, episodes_before, self.num_episodes
        ):
            self._snapshots.append(Snapshot(self.global_step, flatten(self.learner.network)))
        if passed(self.config.log_every, before, self.global_step) or self.done:
            self._rows.append((self._metrics(added), self._timer.seconds))
            self._timer.reset()
            self._since = _Since()

    def report(self) -> Report:
        """What came since the last report."""
        report = Report(
            self.global_step, self.done, self._episodes, self._snapshots, self._rows, self.experience.failures()
        )
        self._episodes, self._snapshots, self._rows = [], [], []
        return report

    def _count(self, added: Added) -> None:
        self._episodes += [(self.global_step + steps, episode) for steps, episode in added.episodes]
        self.num_episodes += len(added.episodes)
        self.global_step += added.num_steps
        warming = min(self.warming, added.num_transitions)
        self.warming -= warming
        self.num_inserted += added.num_transitions - warming
        self._since.count(added, self.weight_version)

    def _update(self) -> bool:
        """One update; False if there is nothing to learn from."""
        config = self.config
        with self._timer("sample"):
            beta = schedules.linear(config.priority_beta, 1.0, self.global_step / config.total_timesteps)
            batch = self.experience.sample(config.batch_size, beta)
        if batch is None:
            return False
        with self._timer("update"):
            td_errors = self.learner.update(batch)
            self._since.updates += 1
        if config.prioritized:
            with self._timer("sample"):
                # sync: one per update, only with priorities
                self.experience.update_priorities(batch.ids, td_errors.float().cpu().numpy())
        return True

    def _warm_up_again(self) -> None:
        """With an empty buffer: gather `learning_starts` transitions anew, and forget the updates that are owed."""
        self.warming = self.config.learning_starts
        self.num_inserted = int(self.learner.optimizer_steps * self.config.batch_size / self.config.samples_per_insert)

    def _publish(self) -> np.ndarray:
        with self._timer("publish"):
            flat = flatten(self.learner.network)
            self.experience.publish(flat, self.weight_version)
        self.published_at = self.learner.optimizer_steps
        return flat

    def _metrics(self, added: Added) -> dict[str, float]:
        learner, since = self.learner, self._since
        metrics = {
            "global_step": self.global_step, "optimizer_steps": learner.optimizer_steps,
            "target_syncs": learner.target_syncs, "epsilon": float(self.config.epsilons(self.global_step).mean()),
            "weight_version": self.weight_version, "weight_lag": since.mean_lag, "replay_size": added.replay_size,
            "in_flight_chunks": self.experience.in_flight, "num_episodes": self.num_episodes, **since.speeds(),
            **learner.read(self.global_step),
        }  # fmt: skip
        if self.num_inserted:
            metrics["samples_per_insert"] = learner.optimizer_steps * self.config.batch_size / self.num_inserted
        return metrics

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        """All of a checkpoint that learning changes, tensors on the CPU; valid until the next call."""
        state = {
            "global_step": self.global_step,
            "model": self.learner.network.state_dict(),
            "learner": self.learner.state_dict(),
            "training": {name: getattr(self, name) for name in _COUNTERS},
            "published": torch.from_numpy(self._flat),
            "experience": self.experience.state_dict(with_replay),
        }
        return checkpoint.plain(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; with an empty replay buffer, the warm-up comes first."""
        self.learner.network.load_state_dict(state["model"])
        self.learner.load_state_dict(state["learner"])
        for name in _COUNTERS:
            setattr(self, name, state["training"][name])
        if not self.experience.load_state_dict(state["experience"]):
            self._warm_up_again()
        self._flat = state["published"].numpy()
        self.experience.publish(self._flat, self.weight_version)
        self._snapshots = []

    def restore(self, state: dict[str, Any] | None, global_step: int, num_episodes: int) -> None:
        """Continue after the process of the learner was lost: what it knew is older than what was played since."""
        if state is not None:
            self.load_state_dict(state)
        self._snapshots = []
        self.global_step, self.num_episodes = max(self.global_step, global_step), max(self.num_episodes, num_episodes)

    @property
    def device(self) -> str:
        return str(self.learner.device)


_COUNTERS = ("global_step", "num_episodes", "num_inserted", "warming", "weight_version", "published_at")


class _Since:
    """What happened since the last row of metrics."""

    def __init__(self) -> None:
        self.started, self.updates = time.perf_counter(), 0
        self.steps: dict[int, int] = {}
        self._lags: list[int] = []

    def count(self, added: Added, version: int) -> None:
        self.steps[added.collector] = self.steps.get(added.collector, 0) + added.num_steps
        self._lags.append(version - added.version)

    @property
    def mean_lag(self) -> float:
        return float(np.mean(self._lags)) if self._lags else 0.0

    def speeds(self) -> dict[str, float]:
        """Steps per second, over all and by collector, and updates per second."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        speeds = {"sps": sum(self.steps.values()) / seconds, "updates_per_s": self.updates / seconds}
        if len(self.steps) > 1:
            speeds |= {f"sps_collector_{i}": steps / seconds for i, steps in sorted(self.steps.items())}
        return speeds


class ModelServer(Training):
    """The learner of the prototype: it also chooses the actions of all collectors and evaluators, one call each."""

    def __init__(self, learner: Learner, experience: Experience):
        super().__init__(learner, experience)
        self._rng = np.random.default_rng(learner.config.seed)
        self._judged: dict[str, QNetwork] = {}

    def learn(self, added: Added) -> None:
        super().learn(added._replace(version=self.weight_version))

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Epsilon-greedy actions, int64 [N], for obs [N, *obs_shape]."""
        epsilon = self.config.epsilons(self.global_step)[0]
        greedy = _q_values(self.learner.network, obs).argmax(axis=1)
        return explore(greedy, epsilon, self.learner.network.advantage.out_features, self._rng)

    def hold(self, evaluator: str, flat: np.ndarray) -> None:
        """Keep frozen weights for an evaluator."""
        network = self._judged.setdefault(evaluator, copy.deepcopy(self.learner.network))
        parts = unflatten(flat, layout_of(network)).items()
        network.load_state_dict({name: torch.tensor(array) for name, array in parts})

    def judge(self, evaluator: str, obs: np.ndarray) -> np.ndarray:
        """Action values [N, A] under the weights held for this evaluator. Raises LostError if there are none."""
        if evaluator not in self._judged:
            raise LostError(f"no weights are held for {evaluator}")
        return _q_values(self._judged[evaluator], obs)


@torch.no_grad()
def _q_values(network: QNetwork, obs: np.ndarray) -> np.ndarray:
    device = next(network.parameters()).device
    return network(torch.tensor(obs, device=device)).float().cpu().numpy()  # sync: one per call


# ---- setting up


def network_arguments(config: DqnConfig, spaces: Spaces) -> dict[str, Any]:
    """Keyword arguments of `make_q_network` for this config and these envs, as a checkpoint keeps them."""
    name = config.network
    if name == "auto":
        name = "nature-cnn" if len(spaces.obs_shape) == 3 else "tanh-mlp"
    flags = dataclasses.asdict(config)
    options = {key: flags[key] for key in network_options(name) if flags.get(key) is not None}
    return dict(
        name=name, obs_shape=spaces.obs_shape, num_actions=spaces.num_actions, dueling=config.dueling,
        dtype=config.dtype, **options,
    )  # fmt: skip


def layout_for(config: DqnConfig, spaces: Spaces) -> Layout:
    """How the weights of this config's network are ordered in a flat array."""
    with torch.device("meta"):
        return layout_of(make_q_network(**network_arguments(config, spaces)))


def make_learner(config: DqnConfig, spaces: Spaces) -> Learner:
    """A new learner on its device; sets up PyTorch in this process."""
    default_threads = available_cores() if len(spaces.obs_shape) == 3 else 1
    configure_torch(config.torch_threads or default_threads)
    seed_everything(config.seed)
    network = make_q_network(**network_arguments(config, spaces)).to(resolve_device(config.device))
    return Learner(network, config)


def make_replay(config: DqnConfig, spaces: Spaces, part: int = 0, parts: int = 1) -> Replay:
    """The replay buffer, or part number `part` of several: that of the collectors i with i % parts == part."""
    if config.actions == "server":
        num_envs = 1  # transitions come one by one, whoever played them
    else:
        num_envs = len(range(part, max(1, config.num_collectors), parts)) * config.num_envs
    return Replay(
        max(num_envs, config.buffer_size // parts), spaces.frame_shape, spaces.obs_dtype, num_envs=num_envs,
        stack=spaces.stack, n_step=config.n_step, gamma=config.gamma, prioritized=config.prioritized,
        alpha=config.priority_alpha, kernels=config.kernels, seed=derived_seed(config.seed, part, 2),
    )  # fmt: skip


class Crew(Protocol):
    """Everyone who works on a run, in this process or in others."""

    pending: Sequence[Snapshot]
    """Snapshots whose evaluation is not finished, oldest first."""

    def poll(self) -> Report:
        """Let training go on for a while. Raises RunFailed where it cannot."""

    def evaluations(self, keep_going: Callable[[], bool]) -> Iterator[tuple[Snapshot, list[Episode]]]:
        """Finished evaluations, in the order of their snapshots. Waits a moment for one if training is over."""

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        """Where training is: what a new crew takes as part of `saved`."""

    def members(self) -> dict[str, str]:
        """Who works where: role -> process, host and device."""

    def close(self) -> None: ...


class LocalCrew:
    """All roles in this process, one after the other: the same seed gives the same run."""

    def __init__(self, config: DqnConfig, make_envs: MakeEnvs, spaces: Spaces, saved: dict[str, Any] | None):
        # Envs that cannot be restored must not replay what the run has seen: after a resume they get new seeds.
        seed = derived_seed(config.seed, saved["global_step"]) if saved else config.seed
        learner = make_learner(config, spaces)
        network, layout = network_arguments(config, spaces), layout_of(learner.network)
        self._config, self._envs = config, make_envs(config.env, config.num_envs, seed)
        if config.actions == "server":
            collector = ServedCollector(self._envs, lambda obs: self._training.act(obs))
        else:
            collector = Collector(self._envs, make_policy(network, layout), seed)
        experience = LocalExperience(collector, make_replay(config, spaces), config.num_steps)
        self._training = (ModelServer if config.actions == "server" else Training)(learner, experience)
        self._evaluator = Evaluator(config.env, make_envs, make_policy(network, layout))
        self.pending: deque[Snapshot] = deque()
        if saved:
            with checkpoint.fits_run():
                self._training.load_state_dict(saved)
            self.pending.extend(pending_of(saved))

    def poll(self) -> Report:
        step = self._training.global_step
        report = self._training.advance(step + self._config.log_every - step % self._config.log_every)
        self.pending.extend(report.snapshots)
        return report

    def evaluations(self, keep_going: Callable[[], bool]) -> Iterator[tuple[Snapshot, list[Episode]]]:
        while self.pending:
            episodes = self._evaluator.play(*evaluation_of(self._config, self.pending[0]), keep_going)
            if not keep_going():
                return
            yield self.pending.popleft(), episodes

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        return self._training.state_dict(with_replay)

    def members(self) -> dict[str, str]:
        return {"all roles": f"pid {os.getpid()} on {self._training.learner.device}"}

    def close(self) -> None:
        self._envs.close()


def evaluation_of(config: DqnConfig, snapshot: Snapshot) -> tuple[np.ndarray, int, int, float, int]:
    """The arguments of `Evaluator.play` for a snapshot. The seed depends on its step only, not on who plays when."""
    num_envs = config.eval_envs or min(config.eval_episodes, MAX_EVAL_ENVS)
    seed = derived_seed(config.seed, snapshot.global_step, 1)
    return snapshot.flat, config.eval_episodes, min(num_envs, config.eval_episodes), config.eval_epsilon, seed


# ---- a run


def train(config: DqnConfig, make_envs: MakeEnvs = default_make_envs) -> Path:
    """Trains a policy and returns the run directory.

    Raises:
      UsageError (a ValueError) for what the caller got wrong, before anything is written.
      RunFailed when a loss or a parameter is no longer finite, or processes fail again and again.
      SystemExit(128 + signal) after SIGINT or SIGTERM, with a checkpoint written.
    """
    with StopSignal() as stop:
        return _train(config, make_envs, stop)


def _train(config: DqnConfig, make_envs: MakeEnvs, stop: StopSignal) -> Path:
    with user_errors(), ExitStack() as on_error:
        config = resolve(config, make_envs)
        saved = checkpoint.load_resumable(config, "dqn", RESUMED_PARTS, MAY_CHANGE_ON_RESUME) if config.resume else None
        if saved and is_done(config, saved["global_step"], saved["training"]["num_episodes"]):
            print(f"nothing to do: step {saved['global_step']:,} of {config.total_timesteps:,} is reached already")
            return config_files.run_dir_of(config.resume)
        with closing(make_envs(config.env, 1, config.seed)) as envs:
            spaces = spaces_of(envs)
        check_installed(config, network_arguments(config, spaces)["name"])
        crew = make_crew(config, make_envs, spaces, saved)
        on_error.callback(crew.close)
        run_dir = config_files.create_run_dir(config, "dqn")
        logger = open_logger(config, run_dir, saved)
        config_files.write(config, run_dir)
        on_error.pop_all()

    run = Run(config, run_dir, spaces, crew, logger, saved["best_return"] if saved else -math.inf)
    with closing(crew), logger:
        announce(run, saved)

        def keep_going() -> bool:
            return stop.received is None

        step = saved_step = saved["global_step"] if saved else 0
        done = False
        while not done and keep_going():
            report = crew.poll()
            step, done = report.global_step, report.done
            record(report, logger)
            judge(run, keep_going)
            if passed(config.checkpoint_every, saved_step, step):
                saved_step = save(run)
        # Before the last evaluations: they are in it as still to be made, so that a kill loses nothing.
        save(run)
        while crew.pending and keep_going():
            judge(run, keep_going)
        if done and not crew.pending and config.evaluates:
            save(run)
        conclude(run, step, done and not crew.pending, stop)
    if not done or crew.pending:
        raise SystemExit(stop.exit_code)
    return run_dir


@dataclass
class Run:
    """What is written where."""

    config: DqnConfig
    run_dir: Path
    spaces: Spaces
    crew: Crew
    logger: RunLogger
    best_return: float


def make_crew(config: DqnConfig, make_envs: MakeEnvs, spaces: Spaces, saved: dict[str, Any] | None) -> Crew:
    if not config.num_collectors:
        return LocalCrew(config, make_envs, spaces, saved)
    try:
        from fastrl.dqn_ray import RayCrew
    except ImportError as error:
        raise ValueError(f"several processes need Ray: pip install ray, or use --num-collectors 0 ({error})") from error
    return RayCrew(config, make_envs, spaces, saved)


def is_done(config: DqnConfig, global_step: int, num_episodes: int) -> bool:
    """Whether the budget of steps, or of episodes, is used up."""
    return global_step >= config.total_timesteps or num_episodes >= (config.total_episodes or math.inf)


def check_installed(config: DqnConfig, network: str) -> None:
    """Raises ValueError if this config needs a device, a kernel or a compiler that is not here."""
    kernels.choose(config.kernels)
    if not config.ray_address:
        device = resolve_device(config.device)
        if network == "attention-cnn" and config.attention == "fused" and device.type == "cpu":
            kernels.choose("native")
        if config.compile:
            check_compiler(device)
    if config.track:
        import_wandb()


def record(report: Report, logger: RunLogger) -> None:
    for note in report.notes:
        logger.info(note)
    for step, episode in report.episodes:
        logger.episode(episode, step)
    for metrics, seconds in report.rows:
        logger.iteration(metrics, seconds)
    logger.progress(report.global_step)


def judge(run: Run, keep_going: Callable[[], bool]) -> None:
    """Record finished evaluations; the weights of the best one become `checkpoints/best`."""
    for snapshot, episodes in run.crew.evaluations(keep_going):
        run.logger.evaluation(snapshot.global_step, episodes)
        score = float(np.mean([episode.return_ for episode in episodes])) if episodes else -math.inf
        if score > run.best_return:
            run.best_return = score
            save_best(run, snapshot)


def save(run: Run) -> int:
    """Writes a checkpoint. Returns its step.

    Without evaluations, the best checkpoint is the one with the best mean return of the last 100 episodes.
    """
    score = None if run.config.evaluates else run.logger.recent_return
    is_best = score is not None and score > run.best_return
    if is_best:
        run.best_return = score
    training = run.crew.state_dict(saves_replay(run.config, run.spaces))
    state = {
        **_head(run), **training, "best_return": run.best_return, "logger": run.logger.state_dict(),
        "pending": [(snapshot.global_step, torch.tensor(snapshot.flat)) for snapshot in run.crew.pending],
    }  # fmt: skip
    checkpoint.save_run(run.run_dir, state["global_step"], state, run.config.keep_checkpoints, is_best)
    return state["global_step"]


def save_best(run: Run, snapshot: Snapshot) -> None:
    """Writes `checkpoints/best`: weights to evaluate, not to resume from."""
    network = make_q_network(**network_arguments(run.config, run.spaces))
    parts = unflatten(snapshot.flat, layout_of(network)).items()
    state = {**_head(run), "global_step": snapshot.global_step, "model": {k: torch.tensor(v) for k, v in parts}}
    folder = run.run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    checkpoint.save(folder / "best", state)


def _head(run: Run) -> dict[str, Any]:
    return {
        "algo": "dqn", "version": fastrl.__version__, "config": config_files.as_dict(run.config),
        "env": dataclasses.asdict(run.config.env), "network": network_arguments(run.config, run.spaces),
    }  # fmt: skip


def saves_replay(config: DqnConfig, spaces: Spaces) -> bool:
    if config.save_replay is not None:
        return config.save_replay
    return (
        config.buffer_size * math.prod(spaces.frame_shape) * np.dtype(spaces.obs_dtype).itemsize <= SAVED_REPLAY_BYTES
    )


def training_state(saved: dict[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint that `Training.load_state_dict` takes."""
    return {name: saved[name] for name in ("global_step", "model", "learner", "training", "published", "experience")}


def pending_of(saved: dict[str, Any]) -> list[Snapshot]:
    """The evaluations that were still to be made when a checkpoint was written."""
    return [Snapshot(step, flat.numpy()) for step, flat in saved["pending"]]


def announce(run: Run, saved: dict[str, Any] | None) -> None:
    """Says what is about to run, and for a resumed run what could not be continued."""
    config, logger = run.config, run.logger
    for line in provenance():
        logger.info(line, show=False)
    network = network_arguments(config, run.spaces)
    parameters = sum(p.numel() for p in make_q_network(**network).parameters())
    collectors = f"{config.num_collectors} collectors x " if config.num_collectors else ""
    logger.info(
        f"DQN on {config.env_id}: {collectors}{config.num_envs} envs ({config.backend}), {network['name']} with "
        f"{parameters:,} parameters, replay buffer of {config.buffer_size:,}, {config.kernels} kernels"
    )
    for role, place in run.crew.members().items():
        logger.info(f"{role}: {place}", show=False)
    logger.info(f"writing to {run.run_dir}")
    if saved:
        logger.info(f"resumed at step {saved['global_step']:,}")
        if not saved["experience"]["replay"]:
            logger.info("the checkpoint has no replay buffer (--save-replay keeps it): it is filled anew")


def conclude(run: Run, step: int, done: bool, stop: StopSignal) -> None:
    """Draws the learning curve and says how the run ended; its checkpoint is on disk already."""
    plot.learning_curve([run.run_dir], run.run_dir / "learning_curve.png")
    reason = "done" if done else f"interrupted by {signal.Signals(stop.received).name}"
    run.logger.info(f"{reason} at step {step:,}: checkpoint and learning curve are in {run.run_dir}")
    if done:
        run.logger.info(f"see how it plays: {python_command('fastrl.evaluate', run.run_dir)}")
    else:
        run.logger.info(f"go on with: {python_command('fastrl.dqn', '--resume', run.run_dir)}")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastrl.dqn`. Returns the exit code."""
    with user_errors():
        config = config_files.parse(DqnConfig, "dqn", sys.argv[1:] if argv is None else argv)
    train(config)
    return 0


if __name__ == "__main__":
    from fastrl import dqn  # by its name: other processes could not find what is in __main__

    sys.exit(run_cli(dqn.main))
