"""The roles of distributed DQN, in one process."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from fastrl.dqn_actors import Collector, NumpyPolicy, TorchPolicy, flatten, layout_of, unflatten
from fastrl.envs import EnvConfig, make_envs
from fastrl.networks import make_q_network
from fastrl.replay import Replay


def cartpole(num_envs=3, seed=0):
    return make_envs(EnvConfig(env_id="CartPole-v1", backend="numpy"), num_envs, seed)


def mlp(dueling=False, seed=0):
    torch.manual_seed(seed)
    return make_q_network("tanh-mlp", (4,), 2, dueling=dueling)


def loaded(policy, network):
    policy.load(flatten(network))
    return policy


def test_flat_weights_are_all_of_the_network():
    network = mlp(dueling=True)
    parts = unflatten(flatten(network), layout_of(network))
    assert parts.keys() == network.state_dict().keys()
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(parts[name], tensor)


def test_flat_weights_of_another_network_are_refused():
    with pytest.raises(ValueError, match=r"weights have shape \[17858\], expected \[17923\]"):
        unflatten(flatten(mlp()), layout_of(mlp(dueling=True)))


@pytest.mark.parametrize("dueling", [False, True])
def test_numpy_policy_is_the_network(dueling):
    network, obs = mlp(dueling), np.random.default_rng(0).standard_normal((50, 4), np.float32)
    policy = loaded(NumpyPolicy(layout_of(network)), network)
    assert policy(obs).dtype == np.float32
    np.testing.assert_allclose(policy(obs), network(torch.from_numpy(obs)).detach(), rtol=1e-5, atol=1e-6)


def test_torch_policy_owns_its_weights_and_takes_read_only_ones():
    """An array from shared memory is read-only, and every other process reads it too."""
    network, other = mlp(), mlp(seed=1)
    flat, obs = flatten(network), np.ones((2, 4), np.float32)
    flat.flags.writeable = False
    policy = TorchPolicy(other)
    policy.load(flat)
    expected = network(torch.from_numpy(obs)).detach().numpy()
    np.testing.assert_array_equal(policy(obs), expected)
    for parameter in other.parameters():
        parameter.zero_()
    np.testing.assert_array_equal(flat, flatten(network))


def test_collector_records_what_the_envs_answer():
    network = mlp()
    collector = Collector(cartpole(), loaded(NumpyPolicy(layout_of(network)), network), seed=5)
    collector.load(flatten(network), version=7)
    chunks = [collector.collect(40, epsilon=0.5) for _ in range(3)]
    envs = cartpole()
    obs, lengths = envs.reset(), np.zeros(3, int)
    for chunk in chunks:
        assert (chunk.version, chunk.frames.shape, chunk.actions.shape) == (7, (41, 3, 4), (40, 3))
        ended = []
        for t in range(40):
            np.testing.assert_array_equal(chunk.frames[t], obs)
            step = envs.step(chunk.actions[t])
            for name in ("rewards", "terminated", "truncated"):
                np.testing.assert_array_equal(getattr(chunk, name)[t], getattr(step, name))
            np.testing.assert_array_equal(chunk.valid[t], ~step.was_reset)
            lengths = np.where(step.was_reset, 0, lengths + 1)
            ended += [(t, env, lengths[env]) for env in np.flatnonzero(step.terminated | step.truncated)]
            obs = step.obs
        np.testing.assert_array_equal(chunk.frames[40], obs)
        assert [(row, episode.env, episode.length) for row, episode in chunk.episodes] == ended
    assert not all(chunk.valid.all() for chunk in chunks)


def test_collector_explores_each_env_by_its_own_epsilon():
    """The weights choose action 1: an env without exploration always does, one that only explores every other time."""
    network = mlp()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.advantage.bias[1] = 1
    collector = Collector(cartpole(), NumpyPolicy(layout_of(network)), seed=0)
    collector.load(flatten(network), 0)
    share = collector.collect(2000, epsilon=np.array([0.0, 0.2, 1.0])).actions.mean(axis=0)
    assert share[0] == 1
    assert share[1] == pytest.approx(0.9, abs=0.03)
    assert share[2] == pytest.approx(0.5, abs=0.05)


def test_collector_acts_by_the_weights_loaded_last():
    network = mlp()
    collector = Collector(cartpole(), NumpyPolicy(layout_of(network)), seed=0)
    for version, action in enumerate([1, 0, 1]):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.zero_()
            network.advantage.bias[action] = 1
        collector.load(flatten(network), version)
        chunk = collector.collect(10, epsilon=0.0)
        assert (chunk.version, set(chunk.actions.ravel().tolist())) == (version, {action})


def test_collector_without_weights_refuses_to_play():
    with pytest.raises(ValueError, match="needs weights"):
        Collector(cartpole(), NumpyPolicy(layout_of(mlp())), seed=0).collect(1, 0.0)


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
def test_chunks_of_single_frames_give_back_the_stacks(backend):
    """Pong's stacks, rebuilt by the replay buffer from the newest frames alone."""
    envs = make_envs(EnvConfig(env_id="Pong-v5", backend=backend, max_episode_frames=60), 2, seed=3)
    torch.manual_seed(0)
    network = make_q_network("nature-cnn", (4, 84, 84), 6)
    collector = Collector(envs, TorchPolicy(network), seed=0)
    collector.load(flatten(network), 0)
    seen = [envs.reset()]
    collector._obs, step = seen[0], envs.step
    envs.step = lambda actions: seen.append((answer := step(actions)).obs) or answer
    replay = Replay(200, (84, 84), np.uint8, num_envs=2, stack=4)
    ids = []
    for _ in range(4):
        chunk = collector.collect(10, epsilon=0.3)
        ids.append(replay.add(chunk.frames[:-1], *chunk[1:5], chunk.frames[1:], chunk.valid))
    place = {id_: (t, env) for t, row in enumerate(np.concatenate(ids).tolist()) for env, id_ in enumerate(row)}
    batch = replay.sample(200)
    for row, id_ in enumerate(batch.ids.tolist()):
        t, env = place[id_]
        np.testing.assert_array_equal(batch.obs[row], seen[t][env])
        np.testing.assert_array_equal(batch.next_obs[row], seen[t + 1][env])


def test_collecting_with_the_mlp_does_without_torch():
    program = """
import sys
import numpy as np
from fastrl.dqn_actors import Collector, NumpyPolicy
from fastrl.envs import EnvConfig, make_envs

layout = {"body.layers.0.weight": (8, 4), "body.layers.0.bias": (8,), "body.layers.2.weight": (4, 8),
          "body.layers.2.bias": (4,), "advantage.weight": (2, 4), "advantage.bias": (2,)}
envs = make_envs(EnvConfig(env_id="CartPole-v1", backend="numpy"), 2, 0)
collector = Collector(envs, NumpyPolicy(layout), 0)
collector.load(np.zeros(86, np.float32), 0)
assert collector.collect(5, 0.1).valid.all()
print(*sys.modules)
"""
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "numba", "envpool"} & set(loaded)
