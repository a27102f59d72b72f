"""CartPole in NumPy against Gymnasium's, and its slow variant."""

import time

import numpy as np
import pytest

from fastrl.envs import EnvConfig, make_envs
from fastrl.types import Step


@pytest.fixture
def sleeps(monkeypatch):
    """What was slept, in seconds; it takes no time here."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def envs_of(backend, env_id, num_envs=3, seed=4):
    return make_envs(EnvConfig(env_id=env_id, backend=backend), num_envs, seed)


def balanced(obs, rng):
    """Actions that hold the pole, but for one in ten."""
    return np.where(rng.random(len(obs)) < 0.1, rng.integers(0, 2, len(obs)), obs[:, 2] + obs[:, 3] > 0)


@pytest.mark.parametrize("env_id", ["CartPole-v0", "CartPole-v1", "SlowCartPole-v0"])
@pytest.mark.parametrize("policy", ["random", "balanced"])
def test_cartpole_is_gymnasiums_bit_for_bit(env_id, policy, sleeps):
    ours, theirs, rng = envs_of("numpy", env_id), envs_of("gymnasium", env_id), np.random.default_rng(0)
    assert (ours.obs_shape, ours.obs_dtype, ours.num_actions) == (theirs.obs_shape, theirs.obs_dtype, 2)
    obs = ours.reset()
    np.testing.assert_array_equal(obs, theirs.reset())
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(1200):
        actions = rng.integers(0, 2, 3) if policy == "random" else balanced(obs, rng).astype(int)
        step, expected = ours.step(actions), theirs.step(actions)
        for name in set(Step._fields) - {"game_over"}:
            got, want = getattr(step, name), getattr(expected, name)
            assert got.dtype == want.dtype, name
            np.testing.assert_array_equal(got, want, err_msg=name)
        ends = {name: count + getattr(step, name).sum() for name, count in ends.items()}
        obs = step.obs
    assert ends["terminated" if policy == "random" else "truncated"] >= 3


def test_cartpole_slow_steps_of_many_envs_overlap(sleeps):
    envs, singles = envs_of("numpy", "SlowCartPole-v0", 16), envs_of("gymnasium", "SlowCartPole-v0", 16)
    for vector, expected in ((envs, [0.01] * 5), (singles, [0.01] * 5 * 16)):
        vector.reset()
        for _ in range(5):
            vector.step(np.ones(16, int))
        assert sleeps == expected
        sleeps.clear()


def test_cartpole_really_waits():
    envs = envs_of("numpy", "SlowCartPole-v0")
    envs.reset()
    began = time.monotonic()
    for _ in range(5):
        envs.step(np.zeros(3, int))
    assert time.monotonic() - began >= 0.05


def test_cartpole_goes_on_from_a_saved_state():
    envs, others = envs_of("numpy", "CartPole-v1"), envs_of("numpy", "CartPole-v1", seed=9)
    envs.reset()
    rng = np.random.default_rng(1)
    for _ in range(30):
        envs.step(rng.integers(0, 2, 3))
    others.load_state_dict(envs.state_dict())
    for _ in range(60):
        actions = rng.integers(0, 2, 3)
        for got, expected in zip(others.step(actions), envs.step(actions), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_cartpole_refuses_the_state_of_another():
    state = envs_of("numpy", "CartPole-v1").state_dict()
    with pytest.raises(ValueError, match="state is of CartPole-v1, expected CartPole-v0"):
        envs_of("numpy", "CartPole-v0").load_state_dict(state)
    with pytest.raises(ValueError, match="state is of 3 envs, expected 2"):
        envs_of("numpy", "CartPole-v1", 2).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(env_id="Pong-v5", backend="numpy"), "numpy.* steps CartPole-v0, .*got env_id 'Pong-v5'"),
        (dict(env_id="Acrobot-v1", backend="numpy"), "numpy.* got env_id 'Acrobot-v1'"),
        (dict(env_id="SlowCartPole-v0"), "use --backend numpy"),
        (dict(env_id="CartPole-v1", backend="numpy", threads=2), "one thread"),
        (dict(env_id="CartPole-v1", backend="numpy", stack=4), "--stack does not apply"),
        (dict(env_id="CartPole-v1", backend="numpy", sticky=0.25), "--sticky does not apply"),
    ],
)
def test_cartpole_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_envs(EnvConfig(**settings), 2, seed=0)
