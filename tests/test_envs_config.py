"""EnvConfig: what each flag comes to, and what is refused."""

import pickle
from dataclasses import dataclass, fields

import numpy as np
import pytest

from fastrl.envs import EnvConfig, make_envs
from fastrl.envs.contract import env_seeds

OWN_CHOICES = (
    "env_id",
    "backend",
    "env_setting",
    "threads",
    "stack_padding",
    "autoreset",
    "time_limit",
    "loop_cap_steps",
)


def atari_fields(config):
    return {f.name: getattr(config, f.name) for f in fields(EnvConfig) if f.name not in OWN_CHOICES}


V5 = dict(
    frame_skip=4,
    stack=4,
    sticky=0.25,
    noop_max=0,
    fire_reset=False,
    episodic_life=False,
    clip_rewards=False,
    full_action_space=False,
    max_episode_frames=108_000,
    max_pool=True,
)
BASELINES = V5 | dict(sticky=0.0, noop_max=30, fire_reset=True, episodic_life=True, clip_rewards=True)


def test_env_config_settings():
    assert atari_fields(EnvConfig().resolved()) == V5
    assert atari_fields(EnvConfig(backend="gymnasium").resolved()) == V5 | dict(max_pool=False)
    for backend in ("envpool", "ale", "gymnasium"):
        assert atari_fields(EnvConfig(backend=backend, env_setting="baselines").resolved()) == BASELINES


def test_env_config_explicit_flag_wins_over_the_setting():
    resolved = EnvConfig(env_setting="baselines", sticky=0.1, noop_max=0, frame_skip=1).resolved()
    assert (resolved.sticky, resolved.noop_max, resolved.max_pool) == (0.1, 0, False)


@pytest.mark.parametrize(
    ("env_id", "backend"), [("Pong-v5", "envpool"), ("CartPole-v1", "envpool"), ("CartPole-v1", "gymnasium")]
)
def test_env_config_resolved_twice_is_resolved_once(env_id, backend):
    once = EnvConfig(env_id=env_id, backend=backend).resolved()
    assert once.resolved() == once
    assert once.threads >= 1


def test_env_config_subclass_stays_itself():
    @dataclass(frozen=True, kw_only=True)
    class Config(EnvConfig):
        gamma: float = 0.99

    config = Config(env_id="CartPole-v1", gamma=0.5)
    assert type(config.resolved()) is Config
    assert config.resolved().gamma == 0.5
    assert make_envs(config, 2, seed=0).obs_shape == (4,)


def test_env_config_pickles():
    config = EnvConfig(sticky=0.5)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "Pong-v5"])
@pytest.mark.parametrize("backend", ["envpool", "ale", "gymnasium"])
def test_env_config_both_names_of_a_game(env_id, backend):
    assert make_envs(EnvConfig(env_id=env_id, backend=backend), 1, seed=0).num_actions == 6


def test_env_config_every_game_is_known_to_every_backend():
    import ale_py
    import envpool
    import gymnasium

    from fastrl.envs.contract import rom_name
    from fastrl.envs.envpool_env import envpool_id

    roms, pools = set(ale_py.roms.get_all_rom_ids()), set(envpool.list_all_envs())
    games = [EnvConfig(env_id=name) for name in gymnasium.registry if name.startswith("ALE/")]
    assert len(games) > 100
    for config in games:
        assert rom_name(config.atari_game) in roms
        assert envpool_id(config) in pools


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sticky=1.5), "sticky .* between 0 and 1, got 1.5"),
        (dict(frame_skip=0), "frame_skip .* at least 1, got 0"),
        (dict(stack=0), "stack .* at least 1, got 0"),
        (dict(stack=2.0), r"stack is 2\.0 \(float\), expected int or None"),
        (dict(noop_max=-1), "noop_max .* at least 0, got -1"),
        (dict(threads=0), "threads .* at least 1"),
        (dict(max_episode_frames=0), "max_episode_frames"),
        (dict(loop_cap_steps=0), "loop_cap_steps"),
        (
            dict(backend="envpol"),
            r"backend is 'envpol' \(str\), expected one of 'envpool', 'ale', 'numpy', 'gymnasium'",
        ),
        (dict(env_setting="v4"), "env_setting is 'v4' .* expected one of 'v5', 'baselines'"),
        (dict(autoreset="same_step", time_limit="silent"), "needs --backend gymnasium"),
        (dict(time_limit="silent", backend="ale"), "needs --backend gymnasium"),
        (dict(autoreset="same_step", backend="gymnasium"), "add --time-limit silent"),
        (dict(stack_padding="zero"), "--backend ale or gymnasium"),
    ],
)
def test_env_config_bad_values_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        EnvConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(env_id="Pongg-v5"), "'Pongg-v5' is unknown: did you mean Pong-v5"),
        (dict(env_id="ALE/Breakot-v5"), "did you mean ALE/Breakout-v5"),
        (dict(env_id="CartPol-v1"), "did you mean CartPole-v1"),
        (dict(env_id="PongNoFrameskip-v4"), "old Atari name: write ALE/<Game>-v5"),
        (dict(env_id="no_such_module:Env-v0"), "cannot be imported"),
        (dict(env_id="xyzzy"), "is unknown"),
        (dict(env_id="Taxi-v4"), "use --backend gymnasium"),
        (dict(env_id="CartPole-v1", backend="ale"), "Atari games only"),
        (dict(env_id="CartPole-v1", sticky=0.25), "--sticky does not apply to CartPole-v1"),
        (dict(env_id="CartPole-v1", frame_skip=4), "--frame-skip does not apply"),
        (dict(env_id="CartPole-v1", stack=4), "--stack does not apply"),
        (dict(env_id="CartPole-v1", env_setting="baselines"), "--env-setting does not apply"),
        (dict(max_pool=False), "cannot be had from EnvPool"),
        (dict(max_pool=True, frame_skip=1), "cannot be had from EnvPool"),
        (dict(backend="gymnasium", threads=2), "one thread"),
    ],
)
def test_env_config_flags_that_do_not_apply_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make_envs(EnvConfig(**settings), 1, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True])
def test_make_envs_bad_number_of_envs_is_refused(num_envs):
    with pytest.raises(ValueError, match="num_envs must be"):
        make_envs(EnvConfig(env_id="CartPole-v1"), num_envs, seed=0)


def test_env_seeds_are_distinct_positive_and_stable():
    seeds = env_seeds(42, 1000)
    assert len(set(seeds)) == 1000
    assert min(seeds) > 0
    assert max(seeds) < 2**31
    assert env_seeds(42, 10) == seeds[:10]
    assert not set(env_seeds(43, 1000)) & set(seeds[:100])
    assert env_seeds([5, 0], 2) == [5, 0]
    assert env_seeds(np.array([5, 7]), 2) == [5, 7]


@pytest.mark.parametrize("seed", [-1, [1], [1, 2, 3], [1, -2], [1, 2**31]])
def test_env_seeds_bad_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        env_seeds(seed, 2)


def test_envpool_tall_screens_are_warned_about():
    with pytest.warns(UserWarning, match="crops the screen of ALE/KingKong-v5"):
        make_envs(EnvConfig(env_id="ALE/KingKong-v5"), 1, seed=0)
