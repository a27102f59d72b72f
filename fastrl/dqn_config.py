"""The settings of DQN."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fastrl import config as config_files
from fastrl import schedules
from fastrl.dqn_actors import Snapshot
from fastrl.envs import EnvConfig
from fastrl.networks import BODIES
from fastrl.runtime import derived_seed

NetworkName = Literal[("auto", *BODIES)]

MAX_EVAL_ENVS = 32


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

    def is_done(self, global_step: int, num_episodes: int) -> bool:
        """Whether the budget of steps, or of episodes, is used up."""
        return global_step >= self.total_timesteps or num_episodes >= (self.total_episodes or math.inf)

    def updates_for(self, transitions: int) -> float:
        """How many updates so many transitions allow."""
        return transitions * self.samples_per_insert / self.batch_size

    def epsilons(self, global_step: int) -> np.ndarray:
        """Probability of a random action in each env of all collectors: float64 [total_envs]."""
        fraction = global_step / self.exploration_steps if self.exploration_steps else 1.0
        epsilon = schedules.linear(self.epsilon_start, self.epsilon_end, fraction)
        return epsilon ** (1 + self.epsilon_alpha * np.linspace(0, 1, self.total_envs))

    def evaluation_of(self, snapshot: Snapshot) -> tuple[np.ndarray, int, int, float, int]:
        """The arguments of `Evaluator.play` for a snapshot. The seed depends on its step only, not on who plays it."""
        num_envs = min(self.eval_envs or MAX_EVAL_ENVS, self.eval_episodes)
        seed = derived_seed(self.seed, snapshot.global_step, 1)
        return snapshot.flat, self.eval_episodes, num_envs, self.eval_epsilon, seed

    @property
    def env(self) -> EnvConfig:
        """The part of this config that describes the environment."""
        return EnvConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EnvConfig)})
