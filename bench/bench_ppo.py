"""Training steps/s: one whole iteration (rollout and update) of the default preset against the reference loop.

`pytest bench/bench_ppo.py --benchmark-only`, or, for ratios on a machine whose speed drifts, the variants in turn:
`python bench/bench_ppo.py reference default --rounds 5`. All play real Pong; the reference plays shorter rollouts with
the same work per step, since a whole one takes half a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import pytest
import torch

from fastrl import config as config_files
from fastrl.envs import make_envs
from fastrl.networks import make_network
from fastrl.ppo import Collector, Learner, PpoConfig, network_arguments
from fastrl.runtime import available_cores, configure_torch
from fastrl.timing import PhaseTimer

REFERENCE_STEPS = 1024


def iteration(preset: str, **changes):
    """A function that plays one rollout and learns from it, and the number of steps in it."""
    config = config_files.parse(PpoConfig, "ppo", ["--preset", preset]).resolved()
    config = dataclasses.replace(config, **changes)
    torch.manual_seed(0)
    envs = make_envs(config.env, config.num_envs, 0)
    learner = Learner(make_network(**network_arguments(config, envs)), config)
    collector = Collector(envs, config.rollout_steps, torch.device("cpu"), 0)

    def run() -> None:
        configure_torch(config.torch_threads or available_cores())
        rollout, _ = collector.collect(learner.policy(), PhaseTimer(), lambda row: True)
        learner.update(rollout, PhaseTimer())

    return run, config.batch_size


VARIANTS = {
    "reference": ("reference", dict(num_steps=REFERENCE_STEPS)),
    "default": ("default", dict()),
    "default, not compiled": ("default", dict(compile=False)),
    "default, plain attention": ("default", dict(attention="plain")),
    "default, not folded": ("default", dict(fold=False)),
    "default, 1 thread": ("default", dict(torch_threads=1, threads=1)),
    "default, 8 envs": ("default", dict(num_envs=8)),
    "default, 64 envs": ("default", dict(num_envs=64)),
    "cleanrl-atari": ("cleanrl-atari", dict(env_id="ALE/Pong-v5")),
}


@pytest.mark.parametrize("name", VARIANTS)
def bench_ppo_iteration(benchmark, name):
    preset, changes = VARIANTS[name]
    run, steps = iteration(preset, **changes)
    benchmark.group = f"one PPO iteration of {steps} steps"  # seconds compare only where the work is the same
    benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    benchmark.extra_info["steps_per_second"] = round(steps / benchmark.stats.stats.median)


def main() -> None:
    parser = argparse.ArgumentParser(description="Median training steps/s of some variants, played in turn.")
    parser.add_argument("variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    prepared = {name: iteration(VARIANTS[name][0], **VARIANTS[name][1]) for name in arguments.variants}
    speeds: dict[str, list[float]] = {name: [] for name in prepared}
    for number in range(arguments.rounds + 1):
        for name, (run, steps) in prepared.items():
            start = time.perf_counter()
            run()
            if number:  # the first round compiles
                speeds[name].append(steps / (time.perf_counter() - start))
    base = arguments.variants[0]
    for name, values in speeds.items():
        ratios = [value / other for value, other in zip(values, speeds[base], strict=True)]
        print(
            f"{name:28} {statistics.median(values):7.0f} steps/s (from {min(values):.0f} to {max(values):.0f}), "
            f"{statistics.median(ratios):.2f} times {base}"
        )


if __name__ == "__main__":
    main()
