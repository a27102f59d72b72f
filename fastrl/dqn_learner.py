"""The algorithm of DQN: read `Training.learn`, then `Learner.update`. Who plays and where is not known here.

Source: Mnih et al. 2015, doi:10.1038/nature14236; a ratio of samples per insert as in Cassirer et al. 2021,
arXiv:2102.04736 (Reverb).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fastrl import checkpoint, schedules
from fastrl.dqn_actors import Added, Layout, LostError, Report, Snapshot, Spaces, flatten, layout_of, unflatten
from fastrl.dqn_config import DqnConfig
from fastrl.envs import explore
from fastrl.losses import DqnLoss, dqn_loss, dqn_targets
from fastrl.networks import QNetwork, make_q_network, network_options
from fastrl.replay import Replay
from fastrl.runtime import RunFailed, available_cores, configure_torch, derived_seed, resolve_device, seed_everything
from fastrl.schedules import passed
from fastrl.timing import PhaseTimer
from fastrl.types import Batch, Episode


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
        return self.config.is_done(self.global_step, self.num_episodes)

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


def training_state(saved: dict[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint that `Training.load_state_dict` takes."""
    return {name: saved[name] for name in ("global_step", "model", "learner", "training", "published", "experience")}


def pending_of(saved: dict[str, Any]) -> list[Snapshot]:
    """The evaluations that were still to be made when a checkpoint was written."""
    return [Snapshot(step, flat.numpy()) for step, flat in saved["pending"]]
