"""What every backend must do alike."""

import numpy as np
import pytest
import torch

from fastrl.envs import EnvConfig, EpisodeStats, make_envs

BACKENDS = ("envpool", "ale", "gymnasium")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def play(envs, steps, seed=0):
    """Random actions; returns the reset observation and the rows."""
    rng = np.random.default_rng(seed)
    first = envs.reset()
    return first, [envs.step(rng.integers(0, envs.num_actions, envs.num_envs)) for _ in range(steps)]


@every_backend
def test_envs_shapes_and_dtypes(backend):
    envs = make_envs(EnvConfig(backend=backend), 3, seed=0)
    assert (envs.num_envs, envs.obs_shape, envs.obs_dtype, envs.num_actions) == (3, (4, 84, 84), np.uint8, 6)
    obs, (step,) = play(envs, 1)
    assert obs.shape == step.obs.shape == (3, 4, 84, 84)
    assert obs.dtype == step.obs.dtype == np.uint8
    for name in ("rewards", "raw_rewards"):
        assert getattr(step, name).shape == (3,)
        assert getattr(step, name).dtype == np.float32
    for name in ("terminated", "truncated", "was_reset", "game_over"):
        assert getattr(step, name).shape == (3,)
        assert getattr(step, name).dtype == bool
    assert step.lives.dtype == np.int32
    envs.close()


@every_backend
@pytest.mark.parametrize("noop_max", [1, 30])
def test_envs_begin_after_a_random_number_of_noops(backend, noop_max):
    config = EnvConfig(env_id="Freeway-v5", backend=backend, sticky=0.0, noop_max=noop_max)
    envs = make_envs(config, 8, seed=0)
    starts = {obs[-1].tobytes() for obs in envs.reset()}
    assert len(starts) == 1 if noop_max == 1 else len(starts) > 4
    envs.close()


BAD_ACTIONS = {
    "0-d": np.int64(1),
    "short": np.array([1]),
    "long": np.array([1, 1, 1]),
    "matrix": np.array([[1, 1]]),
    "float": np.array([1.0, 1.0]),
    "nan": np.array([np.nan, 1.0]),
    "bool": np.array([True, False]),
    "too large": np.array([0, 6]),
    "negative": np.array([-1, 0]),
    "wraps to int32": np.array([2**32, 0]),
    "torch float": torch.zeros(2),
    "none": None,
}


@every_backend
def test_envs_refuse_bad_actions_and_go_on(backend):
    envs = make_envs(EnvConfig(backend=backend), 2, seed=0)
    envs.reset()
    for actions in BAD_ACTIONS.values():
        with pytest.raises(ValueError, match="actions must"):
            envs.step(actions)
    for actions in ([0, 5], torch.tensor([0, 5]), np.array([0, 5], np.uint8)):
        assert envs.step(actions).obs.shape == (2, 4, 84, 84)


@every_backend
def test_envs_seed_decides_the_observations(backend):
    def observations(seed):
        first, rows = play(make_envs(EnvConfig(backend=backend), 2, seed), 100)
        return np.stack([first] + [row.obs for row in rows])

    once, again, other = observations(7), observations(7), observations(8)
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)


@every_backend
def test_envs_sub_envs_differ(backend):
    envs = make_envs(EnvConfig(backend=backend), 2, seed=0)
    envs.reset()
    rows = [envs.step(np.full(2, t % 6)) for t in range(60)]
    assert any(not np.array_equal(row.obs[0], row.obs[1]) for row in rows)


@every_backend
@pytest.mark.parametrize("frame_skip", [4, 3])
def test_envs_time_limit_counts_emulator_frames(backend, frame_skip):
    """200 frames are 50 agent steps of 4, and 67 of 3; the reset row follows; then the next 200."""
    config = EnvConfig(backend=backend, max_episode_frames=200, frame_skip=frame_skip)
    limit = -(-200 // frame_skip)
    _, rows = play(make_envs(config, 1, seed=0), 2 * limit + 2)
    truncated = [t for t, row in enumerate(rows) if row.truncated[0]]
    assert truncated == [limit - 1, 2 * limit]
    assert [t for t, row in enumerate(rows) if row.was_reset[0]] == [limit, 2 * limit + 1]
    assert not any(row.terminated[0] or row.game_over[0] for row in rows)
    assert all(rows[t].raw_rewards[0] == 0 for t in (limit, 2 * limit + 1))


@every_backend
@pytest.mark.parametrize("settings", [dict(), dict(noop_max=0), dict(noop_max=30, fire_reset=True)])
def test_envs_stack_begins_with_the_first_frame_repeated(backend, settings):
    """At reset(), on a reset row, and on the rows after it; one fast env makes the ages differ."""
    first, rows = play(make_envs(EnvConfig(backend=backend, max_episode_frames=80, **settings), 2, seed=0), 50)
    starts = 0
    for t in range(-1, 45):
        obs = first if t < 0 else rows[t].obs
        for env in range(2):
            if t < 0 or rows[t].was_reset[env]:
                newest = obs[env, -1]
                assert newest.any()
                for age in range(3):
                    later = obs if age == 0 else rows[t + age].obs
                    np.testing.assert_array_equal(later[env, : 4 - age], np.broadcast_to(newest, (4 - age, 84, 84)))
                starts += 1
    assert starts >= 6


@every_backend
def test_envs_kept_arrays_do_not_change(backend):
    envs = make_envs(EnvConfig(backend=backend), 2, seed=0)
    first, rows = play(envs, 3)
    kept = [first, *(array for row in rows for array in row)]
    copies = [array.copy() for array in kept]
    play(envs, 20)
    for array, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


@every_backend
def test_envs_clipping_keeps_the_raw_reward(backend):
    config = EnvConfig(env_id="ALE/SpaceInvaders-v5", backend=backend, clip_rewards=True)
    _, rows = play(make_envs(config, 2, seed=0), 250)
    raw = np.stack([row.raw_rewards for row in rows])
    np.testing.assert_array_equal(np.stack([row.rewards for row in rows]), np.sign(raw))
    assert raw.max() >= 5


@every_backend
def test_envs_v5_reward_is_raw(backend):
    _, rows = play(make_envs(EnvConfig(env_id="ALE/SpaceInvaders-v5", backend=backend), 2, seed=0), 200)
    assert max(row.rewards.max() for row in rows) >= 5
    assert all(np.array_equal(row.rewards, row.raw_rewards) for row in rows)


@every_backend
def test_envs_life_loss_ends_the_learning_episode_but_not_the_game(backend):
    config = EnvConfig(env_id="Breakout-v5", backend=backend, env_setting="baselines", noop_max=0)
    envs, stats, episodes = make_envs(config, 2, seed=0), EpisodeStats(2), []
    first, rows = play(envs, 450)
    previous, lost, over = first, 0, 0
    lives, life_loss_before = np.full(2, 5), np.zeros(2, bool)
    for row in rows:
        kinds = np.stack([row.terminated, row.truncated, row.was_reset]).sum(0)
        assert kinds.max() <= 1
        life_loss = row.terminated & ~row.game_over
        np.testing.assert_array_equal(life_loss, (row.lives < lives) & (row.lives > 0))
        assert (row.lives[row.game_over] == 0).all()
        assert (row.terminated | ~row.game_over).all()
        for env in np.flatnonzero(life_loss_before):  # the stack runs on, whether the action counted or not
            np.testing.assert_array_equal(row.obs[env, :-1], previous[env, 1:])
        assert (row.raw_rewards[row.was_reset] == 0).all()
        episodes += stats.update(row.raw_rewards, row.terminated, row.truncated, row.was_reset, row.game_over)
        lost, over = lost + life_loss.sum(), over + row.game_over.sum()
        previous, lives, life_loss_before = row.obs, row.lives, life_loss
    assert over == len(episodes) >= 2
    assert lost >= 4 * over
    in_progress = stats.state_dict()["returns"].numpy().sum()
    assert sum(e.return_ for e in episodes) + in_progress == sum(row.raw_rewards.sum() for row in rows)


@every_backend
@pytest.mark.parametrize("ended_by", ["life", "time"])
def test_envs_was_reset_says_that_the_action_was_ignored(backend, ended_by):
    """Two equal envs get different actions after the first ended row: equal screens exactly where was_reset is set."""
    limit = {"max_episode_frames": 80} if ended_by == "time" else {}
    config = EnvConfig(env_id="Breakout-v5", backend=backend, env_setting="baselines", noop_max=0, **limit)
    pair = [make_envs(config, 1, seed=[5]) for _ in range(2)]
    for envs in pair:
        envs.reset()
    for _ in range(200):
        rows = [envs.step([1]) for envs in pair]
        if rows[0].terminated[0] or rows[0].truncated[0]:
            break
    assert rows[0].truncated[0] == (ended_by == "time")
    left, right = pair[0].step([3]), pair[1].step([2])
    assert np.array_equal(left.obs, right.obs) == left.was_reset[0] == right.was_reset[0]
    assert left.was_reset[0] == (ended_by == "time" or backend != "ale")


@every_backend
@pytest.mark.parametrize("episodic_life", [False, True])
def test_envs_reset_starts_a_new_game(backend, episodic_life):
    config = EnvConfig(env_id="Breakout-v5", backend=backend, env_setting="baselines", episodic_life=episodic_life)
    envs = make_envs(config, 1, seed=0)
    _, rows = play(envs, 150)
    assert min(row.lives[0] for row in rows) < 5
    envs.reset()
    row = envs.step([0])
    assert row.lives[0] == 5
    assert not row.was_reset[0]


@every_backend
def test_envs_whole_pong_game(backend):
    envs, stats, episodes = make_envs(EnvConfig(backend=backend, sticky=0.0), 1, seed=0), EpisodeStats(1), []
    _, rows = play(envs, 1000)
    for row in rows:
        episodes += stats.update(row.raw_rewards, row.terminated, row.truncated, row.was_reset, row.game_over)
    assert len(episodes) == 1
    assert -21 <= episodes[0].return_ <= -15
    assert episodes[0].length > 700
    ends = [t for t, row in enumerate(rows) if row.terminated[0]]
    assert ends[0] + 1 == episodes[0].length
    assert rows[ends[0] + 1].was_reset[0]


@every_backend
def test_envs_full_action_space(backend):
    envs = make_envs(EnvConfig(backend=backend, full_action_space=True), 1, seed=0)
    envs.reset()
    assert envs.num_actions == 18
    envs.step([17])


@pytest.mark.parametrize("backend", ["envpool", "ale"])
def test_envs_threads_do_not_change_results(backend):
    def observations(threads):
        return play(make_envs(EnvConfig(backend=backend, threads=threads), 3, 0), 20)[1][-1].obs

    np.testing.assert_array_equal(observations(1), observations(2))


@pytest.mark.parametrize("backend", ["envpool", "ale"])
def test_envs_without_restore_say_so(backend):
    envs = make_envs(EnvConfig(backend=backend), 1, 0)
    assert not envs.can_restore
    with pytest.raises(ValueError, match="--backend gymnasium"):
        envs.state_dict()
    with pytest.raises(ValueError, match="--backend gymnasium"):
        envs.load_state_dict({})
