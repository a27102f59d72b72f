"""The fast backends against the reference, step by step and exactly.

Gymnasium derives ALE's seed from the one it is given; the other backends hand theirs to ALE directly, so they get that
derived seed. Seed 1 gives a positive one, which is the kind that ALE obeys.
"""

import gymnasium
import numpy as np
import pytest

from fastrl.envs import EnvConfig, make_envs

GYM_SEED = 1
ALE_SEED = int(np.random.SeedSequence(GYM_SEED).generate_state(2)[1].astype(np.int32))


def assert_equal_rows(fast, reference, steps, *, terminal_obs=True):
    """Same random actions; every field equal. Returns the rows of the reference."""
    rng, rows = np.random.default_rng(0), []
    np.testing.assert_array_equal(fast.reset(), reference.reset())
    for t in range(steps):
        actions = rng.integers(0, fast.num_actions, 1)
        one, other = fast.step(actions), reference.step(actions)
        for name, left, right in zip(one._fields, one, other, strict=True):
            if terminal_obs or name != "obs" or not (other.game_over[0] or other.was_reset[0]):
                np.testing.assert_array_equal(left, right, err_msg=f"{name} at step {t}")
        rows.append(other)
    return rows


def test_ale_seed_is_positive():
    assert ALE_SEED > 0


@pytest.mark.parametrize(("sticky", "steps"), [(0.0, 200), (0.25, 500)])
def test_parity_ale_backend_is_the_reference_path(sticky, steps):
    """Pixels, rewards, flags and lives, up to the end of the first game (its last frame is stale in ale-py)."""
    settings = dict(sticky=sticky, stack_padding="zero")
    fast = make_envs(EnvConfig(backend="ale", **settings), 1, [ALE_SEED])
    reference = make_envs(EnvConfig(backend="gymnasium", **settings), 1, [GYM_SEED])
    rows = assert_equal_rows(fast, reference, steps)
    assert sum(abs(row.raw_rewards[0]) for row in rows) >= steps // 100


@pytest.mark.parametrize(("sticky", "steps"), [(0.0, 200), (0.25, 1000)])
def test_parity_envpool_is_gymnasium_with_max_pool_and_one_noop(sticky, steps):
    """Over more than one game; EnvPool's last frame of a game may be stale."""
    fast = make_envs(EnvConfig(sticky=sticky), 1, [ALE_SEED])
    reference = make_envs(EnvConfig(backend="gymnasium", sticky=sticky, max_pool=True, noop_max=1), 1, [GYM_SEED])
    rows = assert_equal_rows(fast, reference, steps, terminal_obs=False)
    assert any(row.game_over[0] for row in rows) == (steps == 1000)


def test_parity_envpool_rewards_equal_the_unpooled_reference():
    """Without max-pool the game is the same; only pixels differ, and little."""
    fast = make_envs(EnvConfig(), 1, [ALE_SEED])
    reference = make_envs(EnvConfig(backend="gymnasium", noop_max=1), 1, [GYM_SEED])
    rng, differences = np.random.default_rng(0), []
    fast.reset(), reference.reset()
    for _ in range(250):
        actions = rng.integers(0, 6, 1)
        one, other = fast.step(actions), reference.step(actions)
        for name in ("rewards", "raw_rewards", "terminated", "truncated", "was_reset", "lives", "game_over"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        differences.append(np.abs(one.obs.astype(int) - other.obs).mean())
    assert 0 < np.mean(differences) < 0.5


@pytest.mark.parametrize("game", ["Breakout", "SpaceInvaders"])
def test_parity_envpool_baselines_through_lost_lives_and_games(game):
    """Lost lives, the FIRE after them, clipped rewards and new games, with sticky actions off and no random no-ops."""
    # A game without FIRE or no-ops would begin one frame later in EnvPool; both games here have FIRE.
    settings = dict(env_id=f"ALE/{game}-v5", env_setting="baselines", noop_max=0)
    fast = make_envs(EnvConfig(**settings), 1, [ALE_SEED])
    reference = make_envs(EnvConfig(backend="gymnasium", **settings), 1, [GYM_SEED])
    rows = assert_equal_rows(fast, reference, 600, terminal_obs=False)
    assert any(row.game_over[0] for row in rows)
    assert sum(row.terminated[0] & ~row.game_over[0] for row in rows) >= 2


def state_of(env_id, obs):
    obs = obs.astype(np.float64)
    return [np.arctan2(obs[1], obs[0]), np.arctan2(obs[3], obs[2]), *obs[4:]] if env_id == "Acrobot-v1" else obs


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
def test_parity_envpool_classic_control_step_by_step(env_id):
    """From each state that EnvPool shows, Gymnasium takes the same step: equal but for the float32 of that state."""
    envs, env = make_envs(EnvConfig(env_id=env_id), 1, seed=0), gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    rng, obs, ended = np.random.default_rng(0), envs.reset(), False
    for _ in range(300):
        action = rng.integers(0, envs.num_actions, 1)
        row = envs.step(action)
        if not ended:
            env.state = np.array(state_of(env_id, obs[0]))
            if env_id == "CartPole-v1":
                env.steps_beyond_terminated = None
            expected, reward, terminated, _, _ = env.step(int(action[0]))
            np.testing.assert_allclose(row.obs[0], expected, atol=2e-5)
            assert row.rewards[0] == reward
            assert row.terminated[0] == terminated or row.truncated[0]
        assert row.was_reset[0] == ended
        obs, ended = row.obs, row.terminated[0] or row.truncated[0]


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
@pytest.mark.parametrize(("env_id", "limit"), [("CartPole-v1", 500), ("Acrobot-v1", 500), ("MountainCar-v0", 200)])
def test_parity_classic_control_time_limits_truncate(env_id, limit, backend):
    envs = make_envs(EnvConfig(env_id=env_id, backend=backend), 1, seed=0)
    obs = envs.reset()
    for t in range(limit):
        # Pushes the cart under the leaning pole, which keeps CartPole up; in the others it reaches no goal.
        action = int(obs[0, 2] + 0.5 * obs[0, 3] + 0.02 * obs[0, 0] > 0) if env_id == "CartPole-v1" else 0
        row = envs.step([action])
        assert (row.terminated[0], row.truncated[0], row.was_reset[0]) == (False, t == limit - 1, False), t
        obs = row.obs
    assert envs.step([0]).was_reset[0]
