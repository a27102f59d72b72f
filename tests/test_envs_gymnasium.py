"""The reference backend: any Gymnasium env, the prototype's loop, exact restore."""

import io

import gymnasium
import numpy as np
import probes  # noqa: F401  registers the probe envs
import pytest
import torch

from fastrl.envs import EnvConfig, EpisodeStats, make_envs


def plain(env_id, **settings):
    return EnvConfig(env_id=env_id, backend="gymnasium", **settings)


def play(envs, steps):
    envs.reset()
    return [envs.step(np.zeros(envs.num_envs, int)) for _ in range(steps)]


def column(rows, name):
    return [getattr(row, name)[0].item() for row in rows]


def test_envs_three_step_episodes_have_one_reset_row_each():
    rows = play(make_envs(plain("ProbeCounter-v0"), 1, seed=0), 8)
    assert column(rows, "was_reset") == [False, False, False, True, False, False, False, True]
    assert column(rows, "obs") == [1, 2, 3, 0, 1, 2, 3, 0]
    assert column(rows, "rewards") == [1, 1, 1, 0, 1, 1, 1, 0]
    assert column(rows, "terminated") == column(rows, "game_over") == [False, False, True, False] * 2
    assert not any(column(rows, "truncated"))


@pytest.mark.parametrize("env_id", ["ProbeTruncated-v0", "ProbeBothEnds-v0"])
def test_envs_time_out_is_truncated_whatever_else_happens(env_id):
    rows = play(make_envs(plain(env_id), 1, seed=0), 4)
    assert column(rows, "truncated") == [False, False, True, False]
    assert not any(column(rows, "terminated"))
    assert not any(column(rows, "game_over"))
    assert column(rows, "obs") == [1, 2, 3, 0]


def test_envs_same_step_shows_the_next_episode_on_the_done_row():
    config = plain("ProbeCounter-v0", autoreset="same_step", time_limit="silent")
    rows = play(make_envs(config, 1, seed=0), 6)
    assert column(rows, "obs") == [1, 2, 0, 1, 2, 0]
    assert column(rows, "terminated") == [False, False, True] * 2
    assert not any(column(rows, "was_reset"))


def test_envs_silent_time_limit_plays_on_until_the_loop_cap():
    """The env says truncated from its third step on; the loop resets after its own five, unmarked but for game_over."""
    config = plain("ProbeTruncated-v0", autoreset="same_step", time_limit="silent", loop_cap_steps=5)
    rows = play(make_envs(config, 1, seed=0), 10)
    assert column(rows, "obs") == [1, 2, 3, 4, 0] * 2
    assert not any(column(rows, "terminated"))
    assert not any(column(rows, "truncated"))
    assert column(rows, "game_over") == [False, False, False, False, True] * 2
    stats = EpisodeStats(1)
    episodes = [stats.update(r.raw_rewards, r.terminated, r.truncated, r.was_reset, r.game_over) for r in rows]
    assert [e for row in episodes for e in row] == [(5.0, 5, 0)] * 2


def test_envs_silent_cap_with_next_step_has_a_reset_row():
    rows = play(make_envs(plain("ProbeTruncated-v0", time_limit="silent", loop_cap_steps=4), 1, seed=0), 6)
    assert column(rows, "obs") == [1, 2, 3, 4, 0, 1]
    assert column(rows, "was_reset") == [False, False, False, False, True, False]


def test_envs_actions_start_at_zero_for_the_agent():
    envs = make_envs(plain("ProbeOffsetActions-v0"), 1, seed=0)
    envs.reset()
    assert envs.num_actions == 2
    envs.step([1])  # the probe asserts that it receives 5 or 6
    with pytest.raises(ValueError, match="between 0 and 1"):
        envs.step([5])


@pytest.mark.parametrize("env_id", ["ProbeImage-v0", "ProbeGreyImage-v0"])
def test_envs_images_become_grey_stacks(env_id):
    envs = make_envs(plain(env_id), 2, seed=0)
    first = envs.reset()
    assert (envs.obs_shape, envs.obs_dtype) == ((4, 84, 84), np.uint8)
    rows = [envs.step([0, 0]) for _ in range(6)]
    grey = [[level] * 4 for level in (10,)] + [[10, 10, 10, 20], [10, 10, 20, 30], [10, 20, 30, 40], [20, 30, 40, 50]]
    for obs, levels in zip([first, *(row.obs for row in rows[:4])], grey, strict=True):
        np.testing.assert_array_equal(obs, np.broadcast_to(np.array(levels)[:, None, None], (2, 4, 84, 84)))
    assert rows[5].was_reset.all()
    assert (rows[5].obs == 10).all()


def test_envs_module_names_register_their_own():
    assert make_envs(plain("probes:ProbeCounter-v0"), 1, seed=0).obs_shape == (1,)


def test_envs_unsupported_spaces_are_refused():
    with pytest.raises(ValueError, match="Discrete action spaces only"):
        make_envs(plain("Pendulum-v1"), 1, seed=0)
    with pytest.raises(ValueError, match="Box vectors, or uint8 images"):
        make_envs(plain("ProbeUnsupported-v0"), 1, seed=0)
    with pytest.raises(ValueError, match="stack is for images, got 4"):
        make_envs(plain("CartPole-v1", stack=4), 1, seed=0)


def test_envs_reset_does_not_seed_twice():
    envs = make_envs(plain("CartPole-v1"), 1, seed=3)
    assert not np.array_equal(envs.reset(), envs.reset())


def test_envs_cartpole_is_gymnasium_itself():
    envs, env = make_envs(plain("CartPole-v1"), 1, seed=[11]), gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=11)
    np.testing.assert_array_equal(envs.reset()[0], obs)
    rng, ended = np.random.default_rng(0), False
    for _ in range(200):
        action = int(rng.integers(2))
        row = envs.step([action])
        if ended:
            obs, ended = env.reset()[0], False
            assert row.was_reset[0]
        else:
            obs, _, ended, _, _ = env.step(action)
            assert row.terminated[0] == ended
            assert not row.was_reset[0]
        np.testing.assert_array_equal(row.obs[0], obs)


RESTORED = {
    "Pong": plain("ALE/Pong-v5"),
    "Breakout with lives and no-ops": plain("ALE/Breakout-v5", env_setting="baselines", sticky=0.25),
    "short Pong": plain("ALE/Pong-v5", max_episode_frames=120, noop_max=30),
    "CartPole": plain("CartPole-v1"),
    "loop cap": plain("CartPole-v1", time_limit="silent", autoreset="same_step", loop_cap_steps=7),
}


@pytest.mark.parametrize("config", RESTORED.values(), ids=RESTORED.keys())
def test_envs_restored_state_continues_bit_for_bit(config):
    """Also from fresh envs of another seed, through a file that plain torch.load reads."""
    rng = np.random.default_rng(0)
    envs, fresh = make_envs(config, 2, seed=0), make_envs(config, 2, seed=99)
    envs.reset()
    actions = rng.integers(0, envs.num_actions, (170, 2))
    for t in range(47):
        envs.step(actions[t])
    file = io.BytesIO()
    torch.save(envs.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for t in range(47, 170):
        for one, other in zip(envs.step(actions[t]), fresh.step(actions[t]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_envs_state_before_the_first_reset_keeps_the_seed():
    envs, fresh = (make_envs(plain("CartPole-v1"), 2, seed) for seed in (0, 99))
    fresh.load_state_dict(envs.state_dict())
    np.testing.assert_array_equal(envs.reset(), fresh.reset())


def test_envs_state_of_other_envs_is_refused():
    state = make_envs(plain("CartPole-v1"), 2, seed=0).state_dict()
    with pytest.raises(ValueError, match="use the env flags"):
        make_envs(plain("CartPole-v1"), 3, seed=0).load_state_dict(state)
    state = make_envs(plain("ALE/Pong-v5"), 1, seed=0).state_dict()
    with pytest.raises(ValueError, match="state is of ALE/Pong-v5, expected ALE/Breakout-v5"):
        make_envs(plain("ALE/Breakout-v5"), 1, seed=0).load_state_dict(state)
