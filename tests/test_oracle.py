"""fastrl as `--preset reference` against the oracle: an independent program with the same seeds and initial weights.

Tolerances, over 3 updates: float64 to 1e-9, float32 to what rounding grows to (see `TOLERANCE`). Actions are equal in
both. Rollouts are shorter than the prototype's 4096, so that several fit into a test.
"""

import copy
import csv
import dataclasses
import json

import gymnasium
import numpy as np
import oracle
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from fastrl import checkpoint
from fastrl.envs import make_envs
from fastrl.evaluate import policy_act
from fastrl.networks import make_network
from fastrl.ppo import Collector, Learner, PpoConfig, network_arguments, train, training_rows
from fastrl.runtime import configure_torch, seed_everything
from fastrl.timing import PhaseTimer

UPDATES = 3
TOLERANCE = {"float64": dict(rtol=1e-9, atol=1e-9), "float32": dict(rtol=1e-4, atol=2e-5)}
"""Of log-probabilities, values, advantages, returns and losses."""
PARAMETER_TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""Of all parameters: the norm of the difference by the norm of what the updates changed."""

GYM_SEED = 1
gymnasium.register("ShortCartPole-v0", entry_point=CartPoleEnv, max_episode_steps=8)
VECTORS = dict(num_steps=200, minibatch_size=60, hidden_size=64, keep_fraction=0.5)
GAMES = {
    # Dropout masks are equal only where fastrl does not fill up the last minibatch.
    "pong": dict(env_id="ALE/Pong-v5", num_steps=64, minibatch_size=32),
    # The loop's cap is reached often; the last minibatch of an epoch has 20 rows instead of 60.
    "cartpole": dict(env_id="CartPole-v1", loop_cap_steps=20, **VECTORS),
    # The env's own limit of 8 steps is passed all the time.
    "short-cartpole": dict(env_id="ShortCartPole-v0", **VECTORS),
}

NAMES = {
    "body.conv.0": "conv1", "body.conv.2": "conv2", "body.conv.4": "conv3", "body.linear.weight": "linear_weight",
    "body.linear.bias": "linear_bias", "body.linear.scale": "linear_scale", "body.linear.mask": "linear_mask",
    "body.": "",
}  # fmt: skip
"""Beginnings of fastrl's parameter names, and what the oracle calls them; the first that fits counts."""


def record_losses(learner):
    """A list that gets the `PpoLoss` of every minibatch from now on."""
    losses, loss = [], learner._loss

    def recorded(minibatch):
        losses.append(loss(minibatch))
        return losses[-1]

    learner._loss = recorded
    return losses


def translated(parameters):
    """fastrl's parameters under the oracle's names."""
    found = {}
    for name, value in parameters.items():
        start = next((start for start in NAMES if name.startswith(start)), "")
        found[NAMES.get(start, "") + name.removeprefix(start)] = value.clone()
    return found


def reference_config(**changes):
    return PpoConfig.from_preset("reference", seed=7, quiet=True, torch_threads=1, **changes)


def initial_network(config, envs, heads):
    """As `train` makes it, but with heads that are not zero: a uniform policy would hide what lies below it."""
    seed_everything(config.seed)
    network = make_network(**network_arguments(config, envs))
    for head in (network.policy, network.value):
        torch.nn.init.normal_(head.weight, std=heads)
    return network


def oracle_network(config, network):
    """The oracle's network with the parameters of fastrl's."""
    num_actions, hidden = network.policy.out_features, network.body.hidden.out_features
    if "Pong" in config.env_id:
        twin = oracle.AttentionCNN(num_actions, hidden, config.dropout, raw_tokens=config.token_layout == "raw")
    else:
        twin = oracle.MLP(network.body.linear.weight.shape[1], num_actions, hidden)
    state = translated(network.state_dict())
    state.setdefault("linear_mask", torch.ones_like(twin.linear_mask))
    twin.to(network.dtype).load_state_dict(state)
    return twin


def oracle_env(config):
    return oracle.atari_env(config.env_id) if "Pong" in config.env_id else gymnasium.make(config.env_id)


def oracle_rollouts(config, twin):
    """What the oracle makes of the same settings and seeds. Dropout draws from PyTorch's generator as it stands."""
    return list(
        oracle.train(
            oracle_env(config), twin, env_seed=GYM_SEED, generator=torch.Generator().manual_seed(config.seed),
            rng=np.random.default_rng(config.seed), total_steps=config.total_timesteps, num_steps=config.num_steps,
            loop_cap=config.loop_cap_steps, minibatch_size=config.minibatch_size,
        )
    )  # fmt: skip


def seeded_envs(env_config, num_envs, seed):
    """`make_envs` with the seed that the oracle's env has."""
    return make_envs(env_config, num_envs, [GYM_SEED])


def assert_same_parameters(network, twin, initial, dtype):
    """initial: fastrl's parameters before the updates."""
    ours, theirs, before = translated(network), twin.state_dict(), translated(initial)
    assert ours.keys() | {"linear_mask"} == theirs.keys()
    difference, change = (
        torch.cat([(ours[name] - other[name]).double().flatten() for name in ours]).norm() for other in (theirs, before)
    )
    assert change > 0
    assert difference < PARAMETER_TOLERANCE[dtype] * change


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("game", GAMES)
def test_oracle_acts_and_learns_as_the_reference_mode(game, dtype):
    config = reference_config(**GAMES[game], dtype=dtype)
    config = dataclasses.replace(config, total_timesteps=UPDATES * config.num_steps)
    configure_torch(config.torch_threads)
    envs = seeded_envs(config.env, 1, None)
    network = initial_network(config, envs, heads=0.05)
    initial = copy.deepcopy(network.state_dict())
    twin = oracle_network(config, network)

    torch.manual_seed(0)
    expected = oracle_rollouts(config, twin)
    torch.manual_seed(0)
    learner = Learner(network, config)
    collector = Collector(envs, config.num_steps, torch.device("cpu"), config.seed, network.dtype)
    losses = record_losses(learner)
    for theirs in expected:
        rollout, episodes = collector.collect(learner.policy(), PhaseTimer(), lambda row: True)
        (*_, returns, _), _ = training_rows(rollout, dataclasses.replace(config, norm_adv="none"))
        losses.clear()
        learner.update(rollout, PhaseTimer())

        assert rollout.actions[:, 0].tolist() == theirs.actions
        np.testing.assert_array_equal(rollout.obs[:, 0], np.stack(theirs.observations))
        np.testing.assert_array_equal(rollout.rewards[:, 0], theirs.rewards)
        np.testing.assert_array_equal(rollout.terminated[:, 0], theirs.dones)
        assert not rollout.truncated.any()
        assert rollout.valid.all()
        assert [(e.return_, e.length) for _, e in episodes] == [(e.return_, e.length) for e in theirs.episodes]
        for name, one, other in (
            ("log-probabilities", rollout.logprobs[:, 0].tolist(), theirs.logprobs),
            ("values", rollout.values[:, 0].tolist(), [*theirs.values, theirs.bootstrap]),
            ("returns", returns.tolist(), theirs.returns),
            ("advantages", (returns - rollout.values[:-1, 0]).tolist(), theirs.advantages),
            *((name, [getattr(loss, name).item() for loss in losses], [loss[name] for loss in theirs.losses])
              for name in ("total", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")),
        ):  # fmt: skip
            np.testing.assert_allclose(one, other, **TOLERANCE[dtype], err_msg=name)
    assert_same_parameters(network.state_dict(), twin, initial, dtype)

    # What should have happened did: rewards that differ, and in CartPole every kind of end.
    assert game != "pong" or any(reward for rollout in expected for reward in rollout.rewards)
    ends = [episode for rollout in expected for episode in rollout.episodes]
    assert game != "cartpole" or {episode.capped for episode in ends} == {True, False}
    assert game != "short-cartpole" or max(episode.length for episode in ends) > 8


def test_oracle_whole_training_with_the_preset_untouched(tmp_path):
    """`train` itself on CartPole: 4096 steps a rollout, 3 epochs of 1024, past the budget to whole rollouts."""
    run_dir = tmp_path / "run"
    config = reference_config(env_id="CartPole-v1", total_timesteps=8193, run_dir=str(run_dir))
    network = initial_network(config, seeded_envs(config.env, 1, None), heads=0.0)
    initial, twin = copy.deepcopy(network.state_dict()), oracle_network(config, network)

    expected = oracle_rollouts(config, twin)
    train(config, seeded_envs)

    saved = checkpoint.load(checkpoint.resolve(run_dir))
    assert saved["global_step"] == expected[-1].global_step == 3 * 4096
    assert_same_parameters(saved["model"], twin, initial, "float32")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row, theirs in zip(rows, expected, strict=True):
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
            mean = np.mean([loss[name] for loss in theirs.losses])
            np.testing.assert_allclose(row[name], mean, **TOLERANCE["float32"], err_msg=name)
    with open(run_dir / "episodes.csv", newline="") as file:
        episodes = [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]
    assert episodes == [(episode.return_, episode.length) for rollout in expected for episode in rollout.episodes]
    assert len(episodes) > 100


@pytest.mark.slow
def test_oracle_whole_training_through_the_end_of_a_game(tmp_path):
    """`train` itself on Pong, 960 steps."""
    run_dir = tmp_path / "run"
    config = reference_config(
        num_steps=320, minibatch_size=320, total_timesteps=960, head_init="orthogonal", run_dir=str(run_dir)
    )
    seed_everything(config.seed)
    network = make_network(**network_arguments(config, seeded_envs(config.env, 1, None)))
    drawn = torch.get_rng_state()
    initial, twin = copy.deepcopy(network.state_dict()), oracle_network(config, network)

    train(config, seeded_envs)
    torch.set_rng_state(drawn)  # what `train` draws its dropout from once its network is made
    expected = oracle_rollouts(config, twin)

    assert_same_parameters(checkpoint.load(checkpoint.resolve(run_dir))["model"], twin, initial, "float32")
    assert sum(len(rollout.episodes) for rollout in expected) == 1


@pytest.mark.parametrize("layout", ["raw", "grid"])
def test_oracle_token_layouts(layout):
    config = reference_config(token_layout=layout, dtype="float64")
    envs = seeded_envs(config.env, 1, None)
    network = initial_network(config, envs, heads=0.05).eval()
    twin = oracle_network(config, network).eval()
    obs = torch.from_numpy(envs.reset().copy())
    for ours, theirs in zip(network(obs), twin(obs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_oracle_evaluation_samples_and_leaves_dropout_active():
    config = reference_config()
    envs = seeded_envs(config.env, 1, None)
    network = initial_network(config, envs, heads=0.3)
    twin = oracle_network(config, network)

    class Recorded(oracle.ResizeAndStack):
        """Ends after 40 steps."""

        def reset(self):
            self.actions = []
            return super().reset()

        def step(self, action):
            self.actions.append(action)
            obs, reward, *_, info = super().step(action)
            return obs, reward, len(self.actions) == 40, False, info

    env = Recorded(oracle_env(config).env)
    env.env.reset(seed=GYM_SEED)
    torch.manual_seed(0)
    oracle.evaluate(env, twin, episodes=1, generator=torch.Generator().manual_seed(config.seed))

    def played(mask_seed):
        envs = seeded_envs(config.env, 1, None)
        envs.reset()  # the oracle's env has begun a game before the evaluation, too
        obs, actions = envs.reset(), []
        act = policy_act(network, "cpu", config.eval_greedy, config.seed, dropout=config.eval_dropout)
        torch.manual_seed(mask_seed)
        for _ in range(40):
            actions += act(obs).tolist()
            obs = envs.step(actions[-1:]).obs
        return actions

    assert played(mask_seed=0) == env.actions
    assert played(mask_seed=1) != env.actions
