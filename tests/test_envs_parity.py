"""Pairs of environments that must be the same: one game, played on both with the same actions, compared row by row.

    ale               ale-py's batched stepping is the reference path: pixels, rewards, flags, lives, lengths.
    envpool-pooled    EnvPool is Gymnasium with the same max-pool, one no-op frame later: those and RAM.
    envpool-plain     EnvPool is the reference path one no-op frame later, but for the pixels that its pool brightens.
    envpool-by-frame  EnvPool without frame skip, skipping outside it, is that path in its pixels as well.

The reference path is Gymnasium's `ALE/*-v5` with its own frame skip, resized and stacked. With sticky actions it plays
other games than the fast sides from a seed's second one on: after game over it still draws the random numbers of the
frames that it skips. No such frames are left after a truncation, or where the skip stops at game over, as for the pool.
"""

from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, MaxAndSkipObservation, ResizeObservation

from fastrl.envs import EnvConfig, Episode, EpisodeStats, gymnasium_env, make_envs


class Pair(NamedTuple):
    fast: dict
    reference: dict
    stale: tuple[str, ...]
    """The rows that end a game, where the newest frame of the fast side may not be the last one of the game."""


PAIRS = {
    "ale": Pair(
        dict(backend="ale", max_pool=False, stack_padding="zero"),
        dict(stack_padding="zero"),
        stale=("game_over", "truncated"),
    ),
    "envpool-pooled": Pair(dict(), dict(max_pool=True, noop_max=1), stale=("game_over",)),
    "envpool-plain": Pair(dict(), dict(max_pool=False, noop_max=1), stale=("game_over",)),
    "envpool-by-frame": Pair(dict(frame_skip=1, stack=1), dict(max_pool=False, noop_max=1), stale=()),
}
EXACT_PAIRS = [name for name in PAIRS if name != "envpool-plain"]
# The lives that a game begins with.
LIVES = {"Asterix": 3, "Breakout": 5, "Pong": 0, "Qbert": 4, "SpaceInvaders": 3}
# Games that are short under random actions, and how many of them.
SEVERAL = [("Asterix", 2), ("Breakout", 2), ("SpaceInvaders", 1)]
FIRST_STICKY = ["Asterix", "Breakout", "Qbert"]


def ale_seed(gym_seed):
    """Gymnasium derives ALE's seed from its own. The other backends hand theirs to ALE, so they get the derived one."""
    return int(np.random.SeedSequence(gym_seed).generate_state(2)[1].astype(np.int32))


def make_pair(name, game, gym_seeds, *, max_episode_frames=None, **settings):
    pair, settings = PAIRS[name], dict(env_id=f"ALE/{game}-v5", **settings)
    # EnvPool's limit leaves out the no-op frame.
    limit = max_episode_frames and max_episode_frames + pair.reference.get("noop_max", 0)
    fast = EnvConfig(**settings, **pair.fast, max_episode_frames=max_episode_frames)
    reference = EnvConfig(backend="gymnasium", **settings, **pair.reference, max_episode_frames=limit)
    seeds = [ale_seed(seed) for seed in gym_seeds]
    fast, reference = make_envs(fast, len(seeds), seeds), make_envs(reference, len(seeds), gym_seeds)
    if name != "ale":
        fast._pool = RamRecorder(fast._pool)
    return SoftwareSkip(fast) if name == "envpool-by-frame" else fast, reference


class RamRecorder:
    """An EnvPool pool that keeps the RAM of its last answer, uint8 [N, 128]; the adapter has no use for it."""

    def __init__(self, pool):
        self._pool = pool

    def reset(self):
        return self._keep(self._pool.reset())

    def step(self, actions):
        return self._keep(self._pool.step(actions))

    def _keep(self, answer):
        self.ram = answer[-1]["ram"]
        return answer


class SoftwareSkip:
    """Four steps of every-frame envs as one, up to the end of a game; the last frame is seen, and stacked here."""

    def __init__(self, envs):
        self._envs, self._pool, self.num_actions = envs, envs._pool, envs.num_actions

    def reset(self):
        self._stack = np.repeat(self._envs.reset(), 4, axis=1)
        return self._stack

    def step(self, actions):
        total = 0
        for _ in range(4):
            row = self._envs.step(actions)
            total += row.raw_rewards
            stops = row.terminated | row.truncated | row.was_reset
            assert stops.all() == stops.any(), "these envs must end together"
            if stops.all():
                break
        new_game = row.was_reset.all()
        self._stack = np.concatenate([row.obs] * 4 if new_game else [self._stack[:, 1:], row.obs], axis=1)
        return row._replace(obs=self._stack, rewards=total, raw_rewards=total)


class Seen(NamedTuple):
    """What happened in the games that were compared, so that no test passes on games where nothing does."""

    episodes: list[Episode]
    rewarded: int
    terminated: int
    truncated: int
    resets: int
    lives_lost: int


def play(fast, reference, games, same_screens, extra_rows=20):
    """The same random actions on both until `games` have ended, and `extra_rows` more. Everything but the screens is
    compared here, the screens of a row by `same_screens(one, other)`."""
    rng, rows, episodes = np.random.default_rng(0), [], []
    counts = EpisodeStats(reference.num_envs), EpisodeStats(reference.num_envs)
    assert fast.num_actions == reference.num_actions
    np.testing.assert_array_equal(fast.reset(), reference.reset())
    assert_same_ram(fast, reference)
    while len(episodes) < games or extra_rows > 0:
        assert len(rows) < 2500, "no end of these games"
        extra_rows -= len(episodes) >= games
        actions = rng.integers(0, fast.num_actions, reference.num_envs)
        one, other = fast.step(actions), reference.step(actions)
        for name in other._fields[1:]:
            left, right = getattr(one, name), getattr(other, name)
            assert np.array_equal(left, right), f"{name} of row {len(rows)}: {left} and {right}"
        assert_same_ram(fast, reference)
        same_screens(one, other)
        ended, expected = (
            count.update(row.raw_rewards, row.terminated, row.truncated, row.was_reset, row.game_over)
            for count, row in zip(counts, (one, other), strict=True)
        )
        assert ended == expected
        episodes += expected
        rows.append(other._replace(obs=None))
    flags = ("raw_rewards", "terminated", "truncated", "was_reset")
    lives_lost = np.count_nonzero(np.diff([row.lives for row in rows], axis=0) < 0)
    return Seen(episodes, *(np.count_nonzero([getattr(row, flag) for row in rows]) for flag in flags), lives_lost)


def assert_same_ram(fast, reference):
    """Of the emulators, where the fast side shows its own."""
    if isinstance(getattr(fast, "_pool", None), RamRecorder):
        np.testing.assert_array_equal(fast._pool.ram, [env._ale.getRAM() for env in reference._envs])


def exact_screens(pair, reference):
    """Equal, but that on the pair's stale rows the newest frame may lack the pool or repeat the previous one."""

    def compare(one, other):
        for env in range(reference.num_envs):
            screens, expected = one.obs[env], other.obs[env]
            if any(getattr(other, flag)[env] for flag in PAIRS[pair].stale):
                unpooled = gymnasium_env._shrink(reference._envs[env]._ale.getScreenGrayscale())
                assert any(np.array_equal(screens[-1], frame) for frame in (expected[-1], unpooled, expected[-2]))
                screens, expected = screens[:-1], expected[:-1]
            np.testing.assert_array_equal(screens, expected)

    return compare


def assert_eventful(seen, game, games):
    assert len(seen.episodes) >= games
    assert seen.resets >= games - 1
    assert seen.rewarded >= games
    assert seen.lives_lost >= games * LIVES[game]
    assert not seen.truncated


def assert_truncated(seen):
    assert seen.truncated == seen.resets == 4
    assert [episode.length for episode in seen.episodes] == [100] * 4
    assert seen.rewarded >= 4
    assert not seen.terminated


@pytest.mark.parametrize("seed", [1, 4])
def test_parity_seeds_are_positive(seed):
    """ALE ignores negative ones."""
    assert ale_seed(seed) > 0


@pytest.mark.parametrize(("game", "games"), SEVERAL)
@pytest.mark.parametrize("pair", EXACT_PAIRS)
def test_parity_of_several_games(pair, game, games):
    """Without sticky actions, so nothing is random."""
    fast, reference = make_pair(pair, game, [1], sticky=0.0)
    assert_eventful(play(fast, reference, games, exact_screens(pair, reference)), game, games)


@pytest.mark.parametrize("game", FIRST_STICKY)
@pytest.mark.parametrize("pair", ["ale", "envpool-by-frame"])
def test_parity_of_the_first_sticky_game(pair, game):
    fast, reference = make_pair(pair, game, [4], sticky=0.25)
    assert_eventful(play(fast, reference, 1, exact_screens(pair, reference), extra_rows=0), game, 1)


@pytest.mark.parametrize(
    ("game", "games", "seeds"),
    [
        ("Asterix", 2, [1, 4]),
        ("Breakout", 3, [1, 4]),
        ("Qbert", 2, [1, 4]),
        ("SpaceInvaders", 1, [1, 4]),
        ("Pong", 1, [1]),
    ],
)
def test_parity_of_sticky_games_with_the_pool(game, games, seeds):
    """Also in two envs, whose games differ and end apart."""
    fast, reference = make_pair("envpool-pooled", game, seeds, sticky=0.25)
    assert_eventful(play(fast, reference, games, exact_screens("envpool-pooled", reference)), game, games)


@pytest.mark.parametrize("pair", EXACT_PAIRS)
def test_parity_of_truncated_games(pair):
    """In two envs, sticky, after games that are left by reset() in the middle. EnvPool's last frames are exact here."""
    fast, reference = make_pair(pair, "Pong", [1, 4], sticky=0.25, max_episode_frames=400)
    for envs in (fast, reference):
        envs.reset()
        for _ in range(30):
            envs.step([2, 3])
    seen = play(fast, reference, 4, exact_screens(pair, reference))
    assert_truncated(seen)


@pytest.mark.parametrize(
    ("game", "games", "sticky", "bound"),
    [
        ("Asterix", 2, 0.0, 0.3),
        ("Breakout", 2, 0.0, 0.06),
        ("SpaceInvaders", 1, 0.0, 0.2),
        ("Asterix", 1, 0.25, 0.3),
        ("Breakout", 1, 0.25, 0.06),
        ("Qbert", 1, 0.25, 0.05),
    ],
)
def test_parity_of_the_game_without_the_pool(game, games, sticky, bound):
    """The pool brightens pixels and darkens none; by less than `bound` grey levels on average."""
    fast, reference = make_pair("envpool-plain", game, [4], sticky=sticky)
    seen, brightened = play_unpooled(fast, reference, games, extra_rows=0 if sticky else 20)
    assert_eventful(seen, game, games)
    assert 0 < brightened < bound


def test_parity_of_truncated_games_without_the_pool():
    fast, reference = make_pair("envpool-plain", "Pong", [1, 4], sticky=0.25, max_episode_frames=400)
    seen, brightened = play_unpooled(fast, reference, 4)
    assert_truncated(seen)
    assert 0 < brightened < 0.06


def play_unpooled(fast, reference, games, **options):
    """As `play`; also returns by how many grey levels the fast screens are brighter on average."""
    differences = []

    def brighter(one, other):
        running = ~other.game_over  # a game's last frame may be stale
        difference = one.obs[running].astype(int) - other.obs[running]
        assert (difference >= 0).all()
        assert not difference[other.was_reset[running]].any()  # nothing is pooled there
        differences.extend(difference[:, -1].mean(axis=(1, 2)))

    return play(fast, reference, games, brighter, **options), np.mean(differences)


def test_parity_of_tall_screens(monkeypatch):
    """Klax has 250 rows: ale-py shrinks them all, EnvPool the upper 210, and fastrl says so."""
    fast, reference = make_pair("ale", "Klax", [1], sticky=0.0)
    seen = play(fast, reference, 2, exact_screens("ale", reference))
    assert len(seen.episodes) == 2
    assert seen.rewarded > 0
    with pytest.warns(UserWarning, match="crops the screen of ALE/Klax-v5 to its upper 210 rows"):
        fast, reference = make_pair("envpool-pooled", "Klax", [4], sticky=0.25)
    shrink = gymnasium_env._shrink
    monkeypatch.setattr(gymnasium_env, "_shrink", lambda screen: shrink(screen[:210]))
    seen = play(fast, reference, 2, exact_screens("envpool-pooled", reference))
    assert len(seen.episodes) == 2
    assert seen.rewarded > 0


def breakout(frameskip):
    return gymnasium.make("ALE/Breakout-v5", obs_type="grayscale", frameskip=frameskip)


WRAPPED = {
    "plain": lambda: ResizeObservation(breakout(frameskip=4), (84, 84)),
    "MaxAndSkip": lambda: ResizeObservation(MaxAndSkipObservation(breakout(frameskip=1), 4), (84, 84)),
    "AtariPreprocessing": lambda: AtariPreprocessing(breakout(frameskip=1), noop_max=0),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_parity_gymnasium_backend_is_gymnasium(wrapped):
    """What the fast sides are compared with is Gymnasium with its own wrappers."""
    max_pool, padding = wrapped != "plain", {"plain": "zero"}.get(wrapped, "repeat")
    config = EnvConfig(env_id="ALE/Breakout-v5", backend="gymnasium", max_pool=max_pool, stack_padding=padding)
    envs = make_envs(config, 1, [1])
    env = FrameStackObservation(WRAPPED[wrapped](), 4, padding_type="reset" if padding == "repeat" else "zero")
    np.testing.assert_array_equal(envs.reset()[0], env.reset(seed=1)[0])
    rng, ended, games = np.random.default_rng(0), False, 0
    for _ in range(300):
        actions = rng.integers(0, envs.num_actions, 1)
        row = envs.step(actions)
        obs, reward, over, cut, _ = (env.reset()[0], 0, False, False, {}) if ended else env.step(actions[0])
        # Where a game ends within a skip, Gymnasium pools older frames.
        exact = 3 if over and max_pool else 4
        np.testing.assert_array_equal(row.obs[0, :exact], obs[:exact])
        found = row.raw_rewards[0], row.terminated[0], row.truncated[0], row.was_reset[0]
        assert found == (reward, over, cut, ended)
        ended, games = over, games + over
    assert games >= 1


@pytest.mark.parametrize("game", ["Breakout", "SpaceInvaders"])
def test_parity_envpool_baselines_through_lost_lives_and_games(game):
    """Lost lives, the FIRE after them, clipped rewards and new games, with sticky actions off and no random no-ops."""
    # A game without FIRE or no-ops would begin one frame later in EnvPool; both games here have FIRE.
    settings = dict(env_id=f"ALE/{game}-v5", env_setting="baselines", noop_max=0)
    fast = make_envs(EnvConfig(**settings), 1, [ale_seed(1)])
    reference = make_envs(EnvConfig(backend="gymnasium", **settings), 1, [1])
    fast._pool = RamRecorder(fast._pool)
    seen = play(fast, reference, 1, exact_screens("envpool-pooled", reference), extra_rows=60)
    assert_eventful(seen, game, 1)
    assert seen.terminated - len(seen.episodes) >= LIVES[game] - 1
    assert seen.resets - len(seen.episodes) >= LIVES[game] - 1


def uniforms(seed, low, high):
    """What C++ draws as std::uniform_real_distribution<double>(low, high) from std::mt19937(seed)."""
    twister = np.random.RandomState(seed)  # the same generator; each double takes two of its numbers
    while True:
        lower, upper = twister.randint(2**32, size=2, dtype=np.uint32).tolist()
        yield low + (high - low) * (lower + upper * 2**32) / 2**64


def test_parity_cartpole_is_exact_from_an_equal_state():
    """EnvPool's starts can be drawn again in float64. Gymnasium plays the same bits from there, for 100 steps at least;
    a last bit that differs then grows. Every other episode is kept up for longer, the rest fall within these steps."""
    envs, env = make_envs(EnvConfig(env_id="CartPole-v1"), 1, [7]), gymnasium.make("CartPole-v1").unwrapped
    rng, starts, lengths = np.random.default_rng(0), uniforms(7, -0.05, 0.05), []
    obs = envs.reset()
    for episode in range(20):
        env.reset()
        env.state, age, over = np.array([next(starts) for _ in range(4)]), 0, False
        np.testing.assert_array_equal(obs[0], env.state.astype(np.float32))
        while not over:
            action = int(rng.integers(2) if episode % 2 else obs[0, 2] + 0.5 * obs[0, 3] + 0.02 * obs[0, 0] > 0)
            row = envs.step([action])
            obs, age, over = row.obs, age + 1, row.terminated[0] or row.truncated[0]
            if age <= 100:
                expected, reward, terminated, _, _ = env.step(action)
                np.testing.assert_array_equal(obs[0], expected)
                assert (row.rewards[0], row.terminated[0], row.was_reset[0]) == (reward, terminated, False)
        lengths.append(age)
        obs = envs.step([0]).obs
    assert min(lengths[0::2]) > 100 > max(lengths[1::2])


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
