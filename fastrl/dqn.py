"""Deep Q-learning: `python -m fastrl.dqn`. `fastrl.dqn_learner` is the algorithm; `train` here is a run of it.

Collectors, replay and evaluators (`fastrl.dqn_actors`) are plain classes. With `--num-collectors 0` they all live in
this process; else `fastrl.dqn_ray` spreads them over processes or machines, and this process only watches.

Source: Mnih et al. 2015, doi:10.1038/nature14236; the plumbing follows Horgan et al. 2018, arXiv:1803.00933 (Ape-X).
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import fastrl
from fastrl import checkpoint, kernels, plot
from fastrl import config as config_files
from fastrl.dqn_actors import (
    Collector,
    Evaluator,
    LocalExperience,
    MakeEnvs,
    Report,
    ServedCollector,
    Snapshot,
    Spaces,
    layout_of,
    make_policy,
    spaces_of,
    unflatten,
)
from fastrl.dqn_config import DqnConfig
from fastrl.dqn_learner import ModelServer, Training, make_learner, make_replay, network_arguments, pending_of
from fastrl.envs import make_envs as default_make_envs
from fastrl.envs import resolve
from fastrl.logger import RunLogger, import_wandb, open_logger
from fastrl.networks import make_q_network
from fastrl.runtime import (
    StopSignal,
    check_compiler,
    derived_seed,
    provenance,
    python_command,
    resolve_device,
    run_cli,
    user_errors,
)
from fastrl.schedules import passed
from fastrl.types import Episode

SAVED_REPLAY_BYTES = 200e6
"""Replay buffers up to this size are part of checkpoints by default."""

RESUMED_PARTS = {"learner", "training", "logger"}
MAY_CHANGE_ON_RESUME = {
    "total_timesteps", "total_episodes", "num_evaluators", "threads", "torch_threads", "device", "compile", "kernels",
    "attention", "fold", "ray_address", "hang_timeout_s", "max_failures", "eval_every", "eval_every_episodes",
    "eval_episodes", "eval_envs", "eval_epsilon", "log_every", "checkpoint_every", "keep_checkpoints", "save_replay",
    "track", "quiet",
}  # fmt: skip


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
        """For the display: role -> what it does, and where."""

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
            episodes = self._evaluator.play(*self._config.evaluation_of(self.pending[0]), keep_going)
            if not keep_going():
                return
            yield self.pending.popleft(), episodes

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        return self._training.state_dict(with_replay)

    def members(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self._envs.close()


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
        if saved and config.is_done(saved["global_step"], saved["training"]["num_episodes"]):
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
            logger.roles(crew.members())
            judge(run, keep_going)
            if passed(config.checkpoint_every, saved_step, step):
                saved_step = save(run)
        # Before the last evaluations: they are in it as still to be made, so that a kill loses nothing.
        save(run)
        if crew.pending and keep_going():
            logger.info(f"training is done; {len(crew.pending)} evaluations to go")
        while crew.pending and keep_going():
            judge(run, keep_going)
            logger.roles(crew.members())
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
    # What a lost process means, our log says in one line.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    try:
        from fastrl.dqn_ray import RayCrew
    except ImportError as error:
        raise ValueError(f"several processes need Ray: pip install ray, or use --num-collectors 0 ({error})") from error
    return RayCrew(config, make_envs, spaces, saved)


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
    for detail in report.details:
        logger.info(detail, show=False)
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
    if not config.num_collectors:
        logger.info(f"all roles are pid {os.getpid()} on {socket.gethostname()} ({config.device})", show=False)
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
