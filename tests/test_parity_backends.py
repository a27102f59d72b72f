"""Backends and implementations are interchangeable: whole training iterations, and every combination of flags."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
import torch._dynamo.config as dynamo

from fastrl import checkpoint
from fastrl.envs import make_envs
from fastrl.networks import make_network
from fastrl.ppo import Collector, Learner, PpoConfig, network_arguments, train
from fastrl.runtime import configure_torch, seed_everything
from fastrl.timing import PhaseTimer

GYM_SEED = 1
# Gymnasium derives ALE's seed from the one it is given; the `ale` backend hands its own to ALE.
ALE_SEED = int(np.random.SeedSequence(GYM_SEED).generate_state(2)[1].astype(np.int32))
SEEDS = {"gymnasium": GYM_SEED, "ale": ALE_SEED}


def iterations(backend, count, game, **env):
    """Trains for `count` iterations; yields each rollout, its episodes, and the parameters after it."""
    config = PpoConfig(
        env_id=f"ALE/{game}-v5", backend=backend, max_pool=False, num_envs=1, num_steps=200, minibatch_size=64,
        update_epochs=1, compile=False, seed=5, **env,
    )  # fmt: skip
    configure_torch(1)
    seed_everything(config.seed)
    envs = make_envs(config.env, 1, [SEEDS[backend]])
    learner = Learner(make_network(**network_arguments(config, envs)), config)
    collector = Collector(envs, config.rollout_steps, torch.device("cpu"), config.seed)
    for _ in range(count):
        rollout, episodes = collector.collect(learner.policy(), PhaseTimer(), lambda row: True)
        learner.update(rollout, PhaseTimer())
        yield rollout, episodes, copy.deepcopy(learner.network.state_dict())


@pytest.mark.parametrize(
    ("game", "count", "env"),
    [
        # Sticky actions in the first game of a seed only: afterwards the two sides have drawn differently.
        ("Pong", 3, dict(sticky=0.25)),
        # One only: ale-py's last screen before a cut is the one before it, and its value is bootstrapped from.
        ("Pong", 1, dict(sticky=0.0, max_episode_frames=500)),
        ("Breakout", 3, dict(sticky=0.0)),
    ],
    ids=["sticky", "truncated", "games"],
)
def test_parity_ale_and_gymnasium_give_the_same_training(game, count, env):
    ended = 0
    pairs = zip(iterations("ale", count, game, **env), iterations("gymnasium", count, game, **env), strict=True)
    for (ours, our_episodes, our_parameters), (theirs, episodes, parameters) in pairs:
        shown = torch.from_numpy(theirs.valid)  # ale-py's terminal screen is the one before it; no loss sees that row
        for name, one, other in zip(ours._fields, ours, theirs, strict=True):
            if name in ("obs", "values"):
                one, other = one[: len(shown)][shown], other[: len(shown)][shown]
            elif name in ("actions", "logprobs"):
                one, other = one[shown], other[shown]
            np.testing.assert_array_equal(one, other, err_msg=name)
        assert our_episodes == episodes
        assert our_parameters.keys() == parameters.keys()
        if not theirs.truncated.any():
            for name, value in parameters.items():
                assert torch.equal(our_parameters[name], value), name
        ended += len(episodes)
    assert (ended > 0) == (env["sticky"] == 0)
    assert theirs.truncated.any() == ("max_episode_frames" in env)


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory):
    """What a tiny run wrote, for any combination of flags; the same combination runs once."""
    folder, runs = tmp_path_factory.mktemp("tiny"), {}

    def run(backend, kernels, compile, attention):
        key = backend, kernels, compile, attention
        if key not in runs:
            config = PpoConfig(
                backend=backend, kernels=kernels, compile=compile, attention=attention, seed=3,
                num_envs=2, num_steps=16, minibatch_size=16, update_epochs=1, total_timesteps=64, hidden_size=32,
                max_episode_frames=40, quiet=True, torch_threads=1, run_dir=str(folder / str(len(runs))),
            )  # fmt: skip
            run_dir = train(config)
            runs[key] = (
                [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()],
                checkpoint.load(checkpoint.resolve(run_dir)),
            )
        return runs[key]

    return run


@pytest.mark.parametrize(
    ("compile", "attention", "backend", "kernels"),
    [
        *itertools.product(
            (False, True), ("plain", "fused"), ("gymnasium", "ale", "envpool"), ("reference", "numba", "native")
        )
    ],
)
@dynamo.patch(fail_on_recompile_limit_hit=True)  # or what is compiled too often would quietly run uncompiled
def test_every_combination_trains_the_same(tiny_runs, backend, kernels, compile, attention):
    metrics, saved = tiny_runs(backend, kernels, compile, attention)
    plain_metrics, plain = tiny_runs(backend, "reference", False, "plain")

    assert saved["global_step"] == 64
    flags = dict(backend=backend, kernels=kernels, compile=compile, attention=attention)
    assert saved["config"] == plain["config"] | flags
    assert len(metrics) == len(plain_metrics) == 2
    for row, expected in zip(metrics, plain_metrics, strict=True):
        assert row["masked_fraction"] == expected["masked_fraction"] > 0
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    for name, value in plain["model"].items():
        torch.testing.assert_close(saved["model"][name], value, rtol=0, atol=1e-3)
