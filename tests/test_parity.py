"""The same algorithm, many times faster: the fast parts against the plain ones, on the same recorded rollout.

`REFERENCE` is the plain form of every part. Each variant changes one of them, `fast` all. Both sides get the same
parameters and the same rollout of a real game, and what they make of it is compared: how they act, advantages, each
term of the loss, gradients, and the parameters after a whole update.
"""

import copy
import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor

from fastrl.envs import make_envs
from fastrl.networks import make_network
from fastrl.ppo import Collector, Learner, PpoConfig, network_arguments, training_rows
from fastrl.runtime import configure_torch
from fastrl.timing import PhaseTimer
from fastrl.types import Minibatch, Rollout

REFERENCE = dict(kernels="reference", attention="plain", fold=False, compile=False)
PARTS = {
    "numba": dict(kernels="numba"),
    "native": dict(kernels="native"),
    "folded": dict(fold=True),
    "fused": dict(attention="fused"),
    "compiled": dict(compile=True),
    "fast": dict(kernels="native", attention="fused", fold=True, compile=True),
}
GAMES = {
    # Games are cut after 100 steps, within the recorded rollout. No minibatch is full at the end of an epoch.
    "pong": dict(env_id="ALE/Pong-v5", threads=1, max_episode_frames=400, num_envs=4, num_steps=64, minibatch_size=100),
    "cartpole": dict(env_id="CartPole-v1", num_envs=6, num_steps=40, minibatch_size=70, hidden_size=64),
}


class Tolerance(NamedTuple):
    term: float
    """Of log-probabilities, values and loss terms: absolute, and relative to the plain value."""
    gradient: float
    """Norm of the difference by the norm, over all parameters."""
    update: float
    """The same for the change of the parameters in a whole update. It is wider because Adam divides by the gradient's
    size: where the gradient is zero but for rounding (the keys' bias), the step is not."""


TOLERANCES = {
    "float64": Tolerance(term=1e-9, gradient=1e-9, update=1e-9),
    "float32": Tolerance(term=1e-5, gradient=1e-5, update=5e-3),
    "bfloat16": Tolerance(term=3e-2, gradient=1e-1, update=6e-1),
}


def config_of(game, dtype="float64", **changes):
    return PpoConfig(**(dict(seed=5, dtype=dtype) | REFERENCE | GAMES[game] | changes))


class Recording:
    """A rollout of a game, played by a network that has learned from one before, and that network's parameters."""

    def __init__(self, game, dtype):
        configure_torch(1)
        self.config = config = config_of(game, dtype)
        self.envs = make_envs(config.env, config.num_envs, config.seed)
        torch.manual_seed(11)
        network = make_network(**network_arguments(config, self.envs))
        for head in (network.policy, network.value):  # zero heads would hide what lies below them
            torch.nn.init.normal_(head.weight, std=0.1)
        learner = Learner(network, config)
        collector = Collector(self.envs, config.rollout_steps, torch.device("cpu"), config.seed, network.dtype)
        for _ in range(2):
            self.parameters = copy.deepcopy(network.state_dict())
            self.rollout, _ = collector.collect(learner.policy(), PhaseTimer(), lambda row: True)
            self.rollout = self.rollout._replace(obs=self.rollout.obs.clone())  # the collector writes on
            learner.update(self.rollout, PhaseTimer())

    def learner(self, config):
        network = make_network(**network_arguments(config, self.envs))
        network.load_state_dict(self.parameters)
        return Learner(network, config)

    @cached_property
    def plain(self):
        """What the reference makes of it."""
        return outcome(self, self.config)


@pytest.fixture(scope="module")
def recordings():
    made = {}

    def recording(game, dtype):
        key = game, "float64" if dtype == "float64" else "float32"
        if key not in made:
            made[key] = Recording(*key)
        return made[key]

    return recording


def transitions(rollout, config):
    """All valid transitions of the rollout as one minibatch."""
    rows, _ = training_rows(rollout, config)
    valid = torch.from_numpy(rollout.valid.ravel())
    return Minibatch(*(x[valid] for x in rows), torch.ones(int(valid.sum())))


def act(recording, config):
    """The actions, log-probabilities and values of the recorded observations under fixed noise."""
    learner, obs = recording.learner(config), recording.rollout.obs.flatten(0, 1)
    noise = torch.empty(len(obs), recording.envs.num_actions, dtype=learner.network.dtype)
    return learner.policy()(obs, noise.exponential_(generator=torch.Generator().manual_seed(3)))


def loss_and_gradient(learner, minibatch):
    """The terms of the loss as floats, and the gradient of all parameters as one vector."""
    learner.network.train()
    loss = learner._loss(minibatch)
    loss.total.backward()
    return [term.item() for term in loss], torch.cat([p.grad.flatten() for p in learner.network.parameters()])


def change_of_update(learner, rollout):
    """How an update changes all parameters, as one vector, and the metrics that it returns."""
    before = torch.cat([p.detach().flatten() for p in learner.network.parameters()])
    metrics = learner.update(rollout, PhaseTimer())
    return torch.cat([p.detach().flatten() for p in learner.network.parameters()]) - before, metrics


def assert_relative(found, expected, tolerance):
    assert expected.norm() > 0
    assert float((found - expected).norm() / expected.norm()) < tolerance


def assert_close(found, expected, tolerance, name=""):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=name)


class Outcome(NamedTuple):
    """What a config makes of a recording."""

    minibatch: Minibatch
    acted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    terms: list[float]
    gradient: torch.Tensor
    change: torch.Tensor
    metrics: dict[str, float]


def outcome(recording, config):
    minibatch = transitions(recording.rollout, config)
    return Outcome(
        minibatch,
        act(recording, config),
        *loss_and_gradient(recording.learner(config), minibatch),
        *change_of_update(recording.learner(config), recording.rollout),
    )


# Compiling takes long, most of all in mixed precision and in float64. The MLP has no attention and no linear branch
# beside its heads.
slow = pytest.mark.slow
CASES = [
    *(("cartpole", dtype, part) for dtype in TOLERANCES for part in ("native", "numba", "compiled")),
    *(("pong", "float32", part) for part in ("native", "numba", "folded", "fused")),
    *(pytest.param("pong", "float32", part, marks=slow) for part in ("compiled", "fast")),
    ("pong", "float64", "folded"),
    pytest.param("pong", "float64", "compiled", marks=slow),
    ("pong", "bfloat16", "fused"),
    pytest.param("pong", "bfloat16", "fast", marks=slow),
]


@pytest.mark.parametrize(("game", "dtype", "part"), CASES)
def test_parity_of_a_part_with_its_plain_form(recordings, game, dtype, part):
    recording, tolerance = recordings(game, dtype), TOLERANCES[dtype]
    found, plain = outcome(recording, config_of(game, dtype, **PARTS[part])), recording.plain

    assert torch.equal(found.minibatch.advantages, plain.minibatch.advantages)
    assert torch.equal(found.minibatch.returns, plain.minibatch.returns)

    same = found.acted[0] == plain.acted[0]
    assert same.all() or (dtype == "bfloat16" and same.double().mean() > 0.95)
    for name, one, other in zip(("log-probabilities", "values"), found.acted[1:], plain.acted[1:], strict=True):
        assert_close(one[same], other[same], tolerance.term, name)

    assert_close(found.terms, plain.terms, tolerance.term, "loss terms")
    assert_relative(found.gradient, plain.gradient, tolerance.gradient)
    if dtype == "bfloat16":  # it did compute in half the bits: float32 would be a hundred times closer
        assert (found.gradient - plain.gradient).norm() > 1e-3 * plain.gradient.norm()
    assert_relative(found.change, plain.change, tolerance.update)
    assert found.metrics.keys() == plain.metrics.keys()


def test_parity_the_recordings_hold_what_matters(recordings):
    for game in GAMES:
        rollout = recordings(game, "float64").rollout
        assert (rollout.truncated if game == "pong" else rollout.terminated).any()
        assert not rollout.valid.all()
        assert np.unique(rollout.rewards).size > 1
        assert rollout.values.std() > 0.01
        assert rollout.logprobs.std() > 0.01


# ---- dropout: the same masks


@pytest.mark.parametrize("part", ["folded", "fused", pytest.param("fast", marks=slow)])
@inductor.patch(fallback_random=True)  # compiled code draws its masks as eager code does
def test_parity_with_dropout(recordings, part):
    dtype = "float64" if part == "folded" else "float32"
    recording, changes = recordings("pong", dtype), []
    for variant in (PARTS[part], {}, {}):
        torch.manual_seed(len(changes) // 2)
        config = config_of("pong", dtype, dropout=0.1, **variant)
        changes.append(change_of_update(recording.learner(config), recording.rollout)[0])
    fast, plain, other_masks = changes
    assert_relative(fast, plain, TOLERANCES[dtype].update)
    with pytest.raises(AssertionError):
        assert_relative(other_masks, plain, 10 * TOLERANCES[dtype].update)


# ---- one env or many, in any order


def arranged(rollout, columns):
    """The rollout with its envs in this order, or only these of them."""
    return Rollout(*(x[:, columns] for x in rollout))


@pytest.mark.parametrize("game", GAMES)
def test_parity_the_order_of_envs_does_not_matter(recordings, game):
    """One minibatch is the whole rollout, so that it holds the same transitions in both orders."""
    recording = recordings(game, "float64")
    config = config_of(game, minibatch_size=10_000)
    order = np.random.default_rng(0).permutation(config.num_envs)
    assert order.tolist() != sorted(order)
    shuffled = arranged(recording.rollout, order)

    for one, other in zip(training_rows(shuffled, config)[0], training_rows(recording.rollout, config)[0], strict=True):
        expected = other.unflatten(0, recording.rollout.actions.shape)[:, order].flatten(0, 1)
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    one, other = (change_of_update(recording.learner(config), rollout)[0] for rollout in (shuffled, recording.rollout))
    assert_relative(one, other, TOLERANCES["float64"].update)


@pytest.mark.parametrize("kernels", ["reference", "numba", "native"])
@pytest.mark.parametrize("game", GAMES)
def test_parity_each_env_of_many_is_as_if_alone(recordings, game, kernels):
    """Advantages of N envs are those of each env alone, and the loss is the mean of theirs."""
    recording = recordings(game, "float64")
    config = config_of(game, kernels=kernels, norm_adv="none")
    together = recording.rollout
    alone = [arranged(together, [env]) for env in range(config.num_envs)]

    advantages = training_rows(together, config)[0][3].unflatten(0, together.actions.shape)
    for env, rollout in enumerate(alone):
        assert torch.equal(training_rows(rollout, config)[0][3], advantages[:, env])

    weights = np.array([rollout.valid.sum() for rollout in alone]) / together.valid.sum()
    losses = [loss_and_gradient(recording.learner(config), transitions(rollout, config)) for rollout in alone]
    terms, gradient = loss_and_gradient(recording.learner(config), transitions(together, config))
    assert_close(terms, sum(w * np.array(terms) for w, (terms, _) in zip(weights, losses, strict=True)), 1e-9)
    assert_relative(gradient, sum(w * gradient for w, (_, gradient) in zip(weights, losses, strict=True)), 1e-9)


@pytest.mark.parametrize("game", GAMES)
def test_parity_many_short_rollouts_are_one_long_one_where_episodes_end_with_them(recordings, game):
    """N envs x T steps teach what one env teaches in N x T steps, if no episode crosses from one to the next."""
    recording = recordings(game, "float64")
    config = config_of(game, minibatch_size=10_000)
    many = recording.rollout._replace(
        terminated=recording.rollout.terminated.copy(), truncated=recording.rollout.truncated.copy()
    )
    many.terminated[-1], many.truncated[-1] = True, False
    steps, envs = many.actions.shape
    values = torch.cat([many.values[:-1].T.flatten(), many.values[-1, -1:]])[:, None]
    one = Rollout(*(_end_to_end(x[:steps]) for x in many))._replace(values=values)
    assert one.actions.shape == (steps * envs, 1)

    longer = dataclasses.replace(config, num_envs=1, num_steps=steps * envs)
    ours, theirs = transitions(many, config), transitions(one, longer)
    assert sorted(ours.advantages.tolist()) == pytest.approx(sorted(theirs.advantages.tolist()), rel=1e-12, abs=1e-12)
    changes = (
        change_of_update(recording.learner(config), many)[0],
        change_of_update(recording.learner(longer), one)[0],
    )
    assert_relative(*changes, TOLERANCES["float64"].update)


def test_parity_reset_rows_teach_nothing(recordings):
    """A rollout with the masked rows of next-step autoreset teaches what it does without them."""
    recording = recordings("cartpole", "float64")
    config = config_of("cartpole", minibatch_size=10_000)
    for env in range(config.num_envs):
        masked = arranged(recording.rollout, [env])
        kept = masked.valid[:, 0]
        if kept.all() or not kept[0]:
            continue
        values = torch.cat([masked.values[:-1][kept], masked.values[-1:]])
        plain = Rollout(*(x[: len(kept)][kept] for x in masked))._replace(values=values)
        changes = [change_of_update(recording.learner(config), rollout)[0] for rollout in (masked, plain)]
        assert_relative(*changes, TOLERANCES["float64"].update)
        return
    raise AssertionError("no env of the recording was reset")


def _end_to_end(x):
    """[T, N, ...] -> [N * T, 1, ...], one env after the other."""
    return x.swapaxes(0, 1).reshape(-1, 1, *x.shape[2:])
