"""Proximal policy optimisation: `python -m fastrl.ppo`. Read `train` first; it is the algorithm, top to bottom.

Source: Schulman et al. 2017, arXiv:1707.06347; details as in Huang et al. 2022, "The 37 implementation details of PPO".
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastrl
from fastrl import checkpoint, kernels, plot, schedules
from fastrl import config as config_files
from fastrl.envs import EnvConfig, EpisodeStats, VecEnv, evaluate, resolve, whole_games
from fastrl.envs import make_envs as default_make_envs
from fastrl.evaluate import policy_act
from fastrl.logger import RunLogger, import_wandb, open_logger
from fastrl.losses import PpoLoss, ppo_loss
from fastrl.networks import BODIES, DTYPES, Readout, make_network, network_for, network_options
from fastrl.returns import gae
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
from fastrl.types import Episode, Minibatch, Rollout

Policy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(obs [N, *obs_shape], noise [N, A]) -> actions int64 [N], logprobs [N], values [N]."""

NetworkName = Literal[("auto", *BODIES)]
DtypeName = Literal[tuple(DTYPES)]

MAX_EVAL_STEPS = 108_000
"""Vector steps after which an evaluation gives up on games that do not end."""

RESUMED_PARTS = {"collector", "logger", "iteration"}
MAY_CHANGE_ON_RESUME = {
    "total_timesteps", "threads", "torch_threads", "device", "compile", "kernels", "attention", "fold",
    "eval_every", "eval_episodes", "eval_greedy", "eval_dropout", "checkpoint_every", "keep_checkpoints", "track",
    "quiet",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PpoConfig(EnvConfig):
    """Train a policy with PPO. The defaults are the hyper-parameters of the prototype that fastrl re-does."""

    preset: str = "default"
    """Named settings to start from: default, reference, cleanrl-atari, cartpole."""
    config: str | None = None
    """TOML file of settings, applied after the preset and before the flags."""
    resume: str | None = None
    """Run directory (or checkpoint file) to continue. Its settings apply; see the README for what may change."""
    run_dir: str | None = None
    """Where to write; with --resume the run itself, else by default runs/<env>__ppo__<seed>__<time>-<id>."""
    seed: int = 42
    """Seeds network, sampling, shuffling and environments."""

    total_timesteps: int = 20_000_000
    """Agent steps to train for, over all envs (rounded up to whole rollouts)."""
    num_envs: int = 32
    """Environments stepped together."""
    num_steps: int | None = None
    """Steps per env in one rollout; by default 4096 / num_envs, rounded up."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    anneal_lr: bool = False
    """Lower the learning rate linearly to 0 over the run."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    gamma: float = 0.99
    """Discount per agent step."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    update_epochs: int = 3
    """Passes over each rollout."""
    minibatch_size: int = 1024
    """Transitions per gradient step; the last step of an epoch takes those that are left."""
    norm_adv: Literal["rollout", "minibatch", "none"] = "rollout"
    """Normalise advantages once over the rollout, within each minibatch, or not at all."""
    clip_coef: float = 0.15
    """Clipping range of the probability ratio."""
    clip_vloss: bool = False
    """Clip the value update by clip_coef as well."""
    ent_coef: float = 0.05
    """Weight of the entropy bonus."""
    vf_coef: float = 0.9
    """Weight of the value loss, which is the plain mean squared error (no factor 1/2)."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; None: no clipping."""
    target_kl: float | None = None
    """Stop the update as soon as a minibatch's approximate KL exceeds this; None: never."""

    network: NetworkName = "auto"
    """auto: attention-cnn for images, mlp for vectors."""
    hidden_size: int | None = None
    """Width of the network's hidden layer; by default 1024 (nature-cnn: 512)."""
    dropout: float = 0.0
    """Dropout of attention-cnn in the update (the prototype: 0.1)."""
    token_layout: Literal["grid", "raw"] = "grid"
    """attention-cnn's tokens: one per grid cell, or the prototype's raw reinterpretation of the buffer."""
    keep_fraction: float | None = None
    """Fraction p of inputs that each row of the scaled linear layer keeps; by default 1.0 (mlp: 0.9)."""
    unit_scale_fraction: float = 0.0
    """Fraction m of rows of the scaled linear layer whose scale is 1."""
    head_init: Literal["zero", "orthogonal"] = "zero"
    """How the policy and value heads start."""
    attention: Literal["fused", "plain"] = "fused"
    """One native kernel, or torch.nn.MultiheadAttention."""
    fold: bool = True
    """Merge attention-cnn's linear branch with the heads (same function and gradients, less arithmetic)."""
    kernels: Literal["native", "numba", "reference"] = "native"
    """Implementation of advantage estimation."""
    dtype: DtypeName = "float32"
    """Arithmetic of the network: bfloat16 is mixed precision (parameters, losses and returns stay float32)."""
    compile: bool = True
    """torch.compile acting and the loss (about a minute at the start; needs a C++ compiler on CPU)."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:0, ..."""
    torch_threads: int | None = None
    """CPU threads of PyTorch; by default the cores this process may use."""

    eval_every: int = 0
    """Evaluate each time this many steps have passed; 0: never."""
    eval_episodes: int = 5
    """Whole games per evaluation."""
    eval_greedy: bool = False
    """Evaluate the most probable action instead of a sampled one."""
    eval_dropout: bool = False
    """Leave dropout active in evaluations, as the prototype does."""
    checkpoint_every: int = 200_000
    """Write a checkpoint each time this many steps have passed (always at the end); 0: only at the end."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay on disk, beside the best."""
    track: bool = False
    """Also log to Weights & Biases (needs the extra `wandb`)."""
    quiet: bool = False
    """No progress display."""

    def __post_init__(self) -> None:
        config_files.check_places(self)
        super().__post_init__()
        positive = (
            "total_timesteps",
            "num_envs",
            "update_epochs",
            "minibatch_size",
            "eval_episodes",
            "keep_checkpoints",
        )
        config_files.check(self, positive, lambda x: x >= 1, "at least 1")
        config_files.check(self, ("num_steps", "hidden_size"), lambda x: x is None or x >= 1, "at least 1")
        config_files.check(self, ("torch_threads",), lambda x: x is None or 1 <= x <= 1024, "between 1 and 1024")
        config_files.check(
            self,
            ("seed", "eval_every", "checkpoint_every", "ent_coef", "vf_coef"),
            lambda x: 0 <= x < math.inf,
            "0 or more",
        )
        config_files.check(self, ("learning_rate", "adam_eps", "clip_coef"), lambda x: 0 < x < math.inf, "above 0")
        config_files.check(self, ("gamma", "gae_lambda"), lambda x: 0 <= x <= 1, "between 0 and 1")
        config_files.check(self, ("dropout",), lambda x: 0 <= x < 1, "at least 0 and below 1")
        config_files.check(self, ("max_grad_norm", "target_kl"), lambda x: x is None or x > 0, "above 0, or None")
        if self.batch_size < 2 and self.norm_adv != "none":
            raise ValueError(
                f"num_envs {self.num_envs} x num_steps {self.num_steps} is one step per rollout, expected 2 or more"
            )

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> PpoConfig:
        """The config of `--preset NAME`, with some fields changed."""
        return dataclasses.replace(config_files.parse(cls, "ppo", ["--preset", name]), **changes)

    @property
    def rollout_steps(self) -> int:
        """T: `num_steps`, or what gives the prototype's 4096 transitions."""
        return self.num_steps or -(-4096 // self.num_envs)

    @property
    def batch_size(self) -> int:
        """Agent steps per rollout, T x N."""
        return self.rollout_steps * self.num_envs

    @property
    def num_iterations(self) -> int:
        return -(-self.total_timesteps // self.batch_size)

    @property
    def env(self) -> EnvConfig:
        """The part of this config that describes the environment."""
        return EnvConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EnvConfig)})


class Collector:
    """Acts in the environments. Holds all that acting changes: envs, observations, running episodes, sampling noise.

    dtype: of log-probabilities, values and noise.
    Raises: ValueError if the observations of a rollout would not fit into memory.
    """

    def __init__(
        self, envs: VecEnv, num_steps: int, device: torch.device, seed: int, dtype: torch.dtype = torch.float32
    ):
        rollout_bytes = (num_steps + 1) * envs.num_envs * math.prod(envs.obs_shape) * np.dtype(envs.obs_dtype).itemsize
        if device.type == "cpu" and rollout_bytes > (free := psutil.virtual_memory().available):
            raise ValueError(
                f"a rollout of {num_steps:,} steps x {envs.num_envs:,} envs takes {rollout_bytes / 1e9:,.1f} GB, and "
                f"{free / 1e9:,.1f} GB are free: lower --num-steps or --num-envs"
            )
        self.envs, self.num_steps, self.dtype = envs, num_steps, dtype
        self.stats = EpisodeStats(envs.num_envs)
        self.generator = torch.Generator(device).manual_seed(seed)
        obs_dtype = torch.from_numpy(np.empty(0, envs.obs_dtype)).dtype
        # One row more than the rollout: the observation that the next one starts from.
        self.obs = torch.zeros((num_steps + 1, envs.num_envs, *envs.obs_shape), dtype=obs_dtype, device=device)
        self.obs[-1] = torch.from_numpy(envs.reset())

    def collect(
        self, policy: Policy, timer: PhaseTimer, on_row: Callable[[int], bool]
    ) -> tuple[Rollout, list[tuple[int, Episode]]] | None:
        """Plays one rollout.

        Args:
          on_row: called with the number of each finished row; where it returns False the rollout is given up.
        Returns: the rollout and the episodes that ended in it, each with its row; None if it was given up.
        """
        shape, device = (self.num_steps, self.envs.num_envs), self.obs.device
        actions = torch.empty(shape, dtype=torch.int64, device=device)
        logprobs = torch.empty(shape, dtype=self.dtype, device=device)
        values = torch.empty((self.num_steps + 1, shape[1]), dtype=self.dtype, device=device)
        rewards = np.empty(shape, np.float32)
        terminated, truncated, valid = (np.empty(shape, bool) for _ in range(3))
        episodes: list[tuple[int, Episode]] = []
        noise = torch.empty((shape[1], self.envs.num_actions), dtype=self.dtype, device=device)

        self.obs[0] = self.obs[-1]
        for t in range(self.num_steps):
            with timer("inference"):
                noise.exponential_(generator=self.generator)
                actions[t], logprobs[t], values[t] = policy(self.obs[t], noise)
                chosen = actions[t].cpu().numpy()  # sync: the one per step
            with timer("env"):
                step = self.envs.step(chosen)
            with timer("transfer"):
                self.obs[t + 1] = torch.from_numpy(step.obs)
            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            valid[t] = np.logical_not(step.was_reset)
            ended = self.stats.update(step.raw_rewards, step.terminated, step.truncated, step.was_reset, step.game_over)
            episodes += [(t, episode) for episode in ended]
            if not on_row(t):
                return None
        with timer("inference"):
            values[-1] = policy(self.obs[-1], noise)[2]
        return Rollout(self.obs[:-1], actions, logprobs, values, rewards, terminated, truncated, valid), episodes

    def state_dict(self) -> dict[str, Any]:
        state = {"generator": self.generator.get_state(), "envs": None}
        if self.envs.can_restore:
            state |= {"envs": self.envs.state_dict(), "obs": self.obs[-1].clone(), "stats": self.stats.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Envs that cannot be restored stay at the start of new episodes."""
        self.generator.set_state(state["generator"])
        if self.envs.can_restore and state["envs"] is not None:
            self.envs.load_state_dict(state["envs"])
            self.obs[-1] = state["obs"]
            self.stats.load_state_dict(state["stats"])


class Learner:
    """Improves the network. Holds all that learning changes: parameters, optimizer, shuffling, counters."""

    def __init__(self, network: nn.Module, config: PpoConfig):
        self.network, self.config = network, config
        self.optimizer = torch.optim.Adam(
            network.parameters(), lr=config.learning_rate, eps=config.adam_eps, fused=True
        )
        self.shuffle = np.random.default_rng(config.seed)
        self.iteration = self.global_step = self.optimizer_steps = 0
        self.best_return = -math.inf
        self._act, self._loss = torch.no_grad()(acting(network)), minibatch_loss(network, config)
        if config.compile:
            # PyTorch stops compiling a function after a few networks; each learner starts its count anew.
            torch.compiler.reset()
            self._act, self._loss = torch.compile(self._act), torch.compile(self._loss)

    def policy(self) -> Policy:
        """The policy of the parameters as they are now."""
        self.network.eval()
        with torch.no_grad():
            return partial(self._act, self.network.readout())

    def update(self, rollout: Rollout, timer: PhaseTimer) -> dict[str, float]:
        """Epochs of clipped policy-gradient steps on one rollout. Returns metrics under the names of metrics.jsonl."""
        config, device = self.config, rollout.obs.device
        with timer("gae"):
            batch, explained_variance = training_rows(rollout, config)
        rows = np.flatnonzero(rollout.valid)
        losses: list[PpoLoss] = []
        learning_rate = self._set_learning_rate()
        self.network.train()
        for indices, weights in minibatches(rows, config, self.shuffle):
            with timer("gather"):
                minibatch = Minibatch(*(x[indices.to(device)] for x in batch), weights.to(device))
            with timer("update"):
                losses.append(self._loss(minibatch))
                # sync: only where a KL limit needs the number
                if config.target_kl is not None and losses[-1].approx_kl.item() > config.target_kl:
                    break
                self._step(losses[-1].total)
        self.iteration += 1
        self.global_step += rollout.valid.size
        with timer("update"):
            means = self._read(losses)
        metrics = {
            "global_step": self.global_step, "iteration": self.iteration, "optimizer_steps": self.optimizer_steps,
            "learning_rate": learning_rate, **means, "masked_fraction": 1 - len(rows) / rollout.valid.size,
        }  # fmt: skip
        return metrics if explained_variance is None else metrics | {"explained_variance": explained_variance}

    def _step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer_steps += 1

    def _set_learning_rate(self) -> float:
        rate = self.config.learning_rate
        if self.config.anneal_lr:
            rate = schedules.linear(rate, 0.0, self.iteration / self.config.num_iterations)
        self.optimizer.param_groups[0]["lr"] = rate
        return rate

    def _read(self, losses: list[PpoLoss]) -> dict[str, float]:
        """Means over the minibatches, once they and the parameters are known to be finite. sync: one per update."""
        if not losses:
            return {}
        means = torch.stack([torch.stack([x.detach() for x in loss[1:]]) for loss in losses]).mean(dim=0)
        norms = torch.stack(torch._foreach_norm([p.detach() for p in self.network.parameters()]))
        names = PpoLoss._fields[1:]
        terms = [*names, *(f"the norm of parameter {name}" for name, _ in self.network.named_parameters())]
        values = torch.cat([means, norms]).tolist()
        for term, value in zip(terms, values, strict=True):
            if not math.isfinite(value):
                raise RunFailed(f"{term} is {value} after the update at step {self.global_step:,}")
        return dict(zip(names, values, strict=False))

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "global_step": self.global_step,
            "optimizer_steps": self.optimizer_steps,
            "best_return": self.best_return,
            "rng": checkpoint.rng_state(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.global_step = state["iteration"], state["global_step"]
        self.optimizer_steps, self.best_return = state["optimizer_steps"], state["best_return"]
        checkpoint.restore_rng(state["rng"], self.shuffle)


def acting(network: nn.Module) -> Callable[[Readout, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """A function of (readout, obs [N, *obs_shape], noise [N, A]) to actions, log-probabilities and values, all [N]."""

    def act(readout: Readout, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, values = network(obs, readout)
        log_probs = logits.log_softmax(dim=1)
        # An exponential race: with noise ~ Exp(1), argmax(p / noise) is distributed as p.
        actions = (log_probs.exp() / noise).argmax(dim=1)
        return actions, log_probs.gather(1, actions[:, None])[:, 0], values

    return act


def minibatch_loss(network: nn.Module, config: PpoConfig) -> Callable[[Minibatch], PpoLoss]:
    """A function of a minibatch to its loss under the current parameters."""
    coefs = {name: getattr(config, name) for name in ("clip_coef", "ent_coef", "vf_coef", "clip_vloss")}
    norm_minibatch = config.norm_adv == "minibatch"

    def loss(batch: Minibatch) -> PpoLoss:
        if norm_minibatch:
            batch = batch._replace(advantages=normalise(batch.advantages, batch.weights))
        logits, values = network(batch.obs)
        return ppo_loss(logits, values, batch, **coefs)

    return loss


def training_rows(rollout: Rollout, config: PpoConfig) -> tuple[tuple[Tensor, ...], float | None]:
    """The fields of `Minibatch` up to `values`, for all T * N rows of the rollout (t * N + n; invalid ones too).

    Also the explained variance 1 - Var(returns - values) / Var(returns); None where all returns are equal.
    """
    values = rollout.values.cpu().numpy()  # sync: the values come to the host once
    # Under next-step autoreset, V(terminal observation) is the value of the following row.
    advantages = gae(
        rollout.rewards.astype(values.dtype, copy=False), values[:-1], values[1:],
        rollout.terminated, rollout.truncated,
        gamma=config.gamma, gae_lambda=config.gae_lambda, kernels=config.kernels,
    )  # fmt: skip
    returns = advantages + values[:-1]
    spread = returns[rollout.valid].var() if rollout.valid.any() else 0.0
    explained = 1 - float(advantages[rollout.valid].var() / spread) if spread > 0 else None
    if config.norm_adv == "rollout":
        advantages = normalise(torch.from_numpy(advantages), torch.from_numpy(rollout.valid)).numpy()
    device = rollout.obs.device
    tensors = (
        rollout.obs, rollout.actions, rollout.logprobs,
        torch.from_numpy(advantages).to(device), torch.from_numpy(returns).to(device), rollout.values[:-1],
    )  # fmt: skip
    return tuple(x.flatten(0, 1) for x in tensors), explained


def normalise(advantages: Tensor, weights: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-8), with the mean and unbiased std over the rows of weight 1 (the others have weight 0).

    Finite for a single row (its deviation counts as 0) and for equal ones.
    """
    count = weights.sum()
    mean = (advantages * weights).sum() / count
    variance = ((advantages - mean).square() * weights).sum() / (count - 1).clamp(min=1)
    return (advantages - mean) / (variance.sqrt() + 1e-8)


def minibatches(rows: np.ndarray, config: PpoConfig, shuffle: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Row indices, int64 [B], and their weights, float32 [B]: each of `rows` once per epoch, in an order shuffled anew.

    B is the same for all; the last minibatch of an epoch repeats row 0 of the rollout with weight 0 where it must.
    """
    size = min(config.minibatch_size, config.batch_size)
    for _ in range(config.update_epochs if len(rows) else 0):
        for indices in torch.from_numpy(shuffle.permutation(rows)).split(size):
            filler = size - len(indices)
            yield F.pad(indices, (0, filler)), F.pad(torch.ones(len(indices)), (0, filler))


def network_arguments(config: PpoConfig, envs: VecEnv) -> dict[str, Any]:
    """Keyword arguments of `make_network` for this config and these envs, as a checkpoint keeps them."""
    name = network_for(envs.obs_shape) if config.network == "auto" else config.network
    flags = dataclasses.asdict(config)
    options = {key: flags[key] for key in network_options(name) if flags.get(key) is not None}
    return dict(
        name=name, obs_shape=envs.obs_shape, num_actions=envs.num_actions, head_init=config.head_init,
        dtype=config.dtype, **options,
    )  # fmt: skip


def train(config: PpoConfig, make_envs: Callable[[EnvConfig, int, int], VecEnv] = default_make_envs) -> Path:
    """Trains a policy and returns the run directory.

    Raises:
      UsageError (a ValueError) for what the caller got wrong, before anything is written.
      RunFailed when a loss or a parameter is no longer finite.
      SystemExit(128 + signal) after SIGINT or SIGTERM, with a checkpoint written.
    """
    with user_errors():
        config = resolve(config, make_envs)
        device = resolve_device(config.device)
        configure_torch(config.torch_threads or available_cores())
        seed_everything(config.seed)
        saved = checkpoint.load_resumable(config, "ppo", RESUMED_PARTS, MAY_CHANGE_ON_RESUME) if config.resume else None
        if saved and saved["iteration"] >= config.num_iterations:
            print(f"nothing to do: step {saved['global_step']:,} of {config.total_timesteps:,} is reached already")
            return config_files.run_dir_of(config.resume)
        resumed_step = saved["global_step"] if saved else None
        # Envs that cannot be restored must not replay what the run has seen: after a resume they get new seeds.
        envs = make_envs(config.env, config.num_envs, derived_seed(config.seed, resumed_step) if saved else config.seed)
        check_installed(config, network_arguments(config, envs)["name"], device)
        network = make_network(**network_arguments(config, envs)).to(device)
        timer, learner = PhaseTimer(), Learner(network, config)
        collector = Collector(envs, config.rollout_steps, device, config.seed, network.dtype)
        if saved:
            with checkpoint.fits_run():
                learner.load_state_dict(saved)
                collector.load_state_dict(saved["collector"])
        run_dir = config_files.create_run_dir(config, "ppo")
        logger = open_logger(config, run_dir, saved)
        config_files.write(config, run_dir)

    with closing(envs), StopSignal() as stop, logger:
        announce(config, run_dir, collector, learner, logger)
        boundary, saved_step = collector.state_dict(), resumed_step

        def on_row(row: int) -> bool:
            logger.progress(learner.global_step + (row + 1) * config.num_envs)
            return stop.received is None

        while learner.iteration < config.num_iterations:
            started, before = time.perf_counter(), learner.global_step
            timer.reset()
            collected = collector.collect(learner.policy(), timer, on_row)
            if collected is None:
                break
            rollout, episodes = collected
            metrics = learner.update(rollout, timer)
            boundary = collector.state_dict()

            for row, episode in episodes:
                logger.episode(episode, before + (row + 1) * config.num_envs)
            logger.iteration(metrics | {"sps": rollout.valid.size / (time.perf_counter() - started)}, timer.seconds)

            evaluated = None
            if passed(config.eval_every, before, learner.global_step):
                evaluated = run_evaluation(config, make_envs, learner, logger, stop)
            if evaluated is not None or passed(config.checkpoint_every, before, learner.global_step):
                save(config, run_dir, envs, learner, boundary, logger, evaluated)
                saved_step = learner.global_step

        # An interrupted rollout is not kept: the run goes on from its first step.
        if saved_step != learner.global_step:
            save(config, run_dir, envs, learner, boundary, logger)
        conclude(config, run_dir, learner, logger, stop)
    if learner.iteration < config.num_iterations:
        raise SystemExit(stop.exit_code)
    return run_dir


def save(
    config: PpoConfig, run_dir: Path, envs: VecEnv, learner: Learner, boundary: dict[str, Any], logger: RunLogger,
    evaluated: float | None = None,
) -> None:  # fmt: skip
    """Writes a checkpoint. boundary: the collector's state when the learner's counters became what they are.

    evaluated: the mean return of an evaluation just made. The best checkpoint is the one that evaluated best or,
    without evaluations, the one with the best mean return of the last 100 episodes.
    """
    score = evaluated if config.eval_every else logger.recent_return
    is_best = score is not None and score > learner.best_return
    if is_best:
        learner.best_return = score
    state = {
        "algo": "ppo", "version": fastrl.__version__, "config": config_files.as_dict(config),
        "env": dataclasses.asdict(config.env), "network": network_arguments(config, envs),
        **learner.state_dict(), "collector": boundary, "logger": logger.state_dict(),
    }  # fmt: skip
    checkpoint.save_run(run_dir, learner.global_step, state, config.keep_checkpoints, is_best)


def run_evaluation(
    config: PpoConfig, make_envs: Callable, learner: Learner, logger: RunLogger, stop: StopSignal
) -> float | None:
    """Plays whole games with the raw reward in fresh envs. Returns their mean return; None if none ended or stopped."""
    env = whole_games(config.env)
    device = next(learner.network.parameters()).device
    seed = derived_seed(config.seed, learner.global_step, 1)
    act = policy_act(learner.network, device, config.eval_greedy, seed, dropout=config.eval_dropout)
    with closing(make_envs(env, min(config.eval_episodes, config.num_envs), seed)) as envs:
        episodes = evaluate(act, envs, config.eval_episodes, MAX_EVAL_STEPS, lambda: stop.received is None)
    if stop.received:
        return None
    logger.evaluation(learner.global_step, episodes)
    return float(np.mean([episode.return_ for episode in episodes])) if episodes else None


def check_installed(config: PpoConfig, network: str, device: torch.device) -> None:
    """Raises ValueError if this config needs a kernel or a compiler that is not here."""
    kernels.choose(config.kernels)
    if network == "attention-cnn" and config.attention == "fused":
        if config.dtype == "float64":
            raise ValueError("dtype is float64, but fused attention computes in float32: add --attention plain")
        if device.type == "cpu":
            kernels.choose("native")
    if config.compile:
        check_compiler(device)
    if config.track:
        import_wandb()


def announce(config: PpoConfig, run_dir: Path, collector: Collector, learner: Learner, logger: RunLogger) -> None:
    """Says what is about to run, and for a resumed run what could not be continued."""
    for line in provenance():
        logger.info(line, show=False)
    envs, parameters = collector.envs, sum(p.numel() for p in learner.network.parameters())
    threads = f", {config.threads} threads" if (config.threads or 1) > 1 else ""
    logger.info(
        f"PPO on {config.env_id}: {config.num_envs} envs ({config.backend}{threads}) x {config.rollout_steps} steps, "
        f"{network_arguments(config, envs)['name']} with {parameters:,} parameters on {collector.obs.device} "
        f"(threads: {torch.get_num_threads()}), {config.kernels} kernels"
    )
    logger.info(f"writing to {run_dir}")
    if config.resume:
        logger.info(f"resumed at step {learner.global_step:,}")
        if not envs.can_restore:
            logger.info(f"the {config.backend} backend cannot restore environments: unfinished episodes begin anew")
    if config.compile:
        logger.info("compiling the network in the first iteration, which takes about a minute (--no-compile skips it)")


def conclude(config: PpoConfig, run_dir: Path, learner: Learner, logger: RunLogger, stop: StopSignal) -> None:
    """Draws the learning curve and says how the run ended; its checkpoint is on disk already."""
    plot.learning_curve([run_dir], run_dir / "learning_curve.png")
    done = learner.iteration >= config.num_iterations
    reason = "done" if done else f"interrupted by {signal.Signals(stop.received).name}"
    logger.info(f"{reason} at step {learner.global_step:,}: checkpoint and learning curve are in {run_dir}")
    if done:
        logger.info(f"see how it plays: {python_command('fastrl.evaluate', run_dir)}")
    else:
        logger.info(f"go on with: {python_command('fastrl.ppo', '--resume', run_dir)}")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastrl.ppo`. Returns the exit code."""
    with user_errors():
        config = config_files.parse(PpoConfig, "ppo", sys.argv[1:] if argv is None else argv)
    train(config)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
