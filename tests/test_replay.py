"""The replay buffer against a plain list of episodes, by hand, and over long use; each case with all three kernels."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fastrl import checkpoint
from fastrl.replay import Replay

KERNELS = ("native", "numba", "reference")
all_kernels = pytest.mark.parametrize("kernels", KERNELS)


# ---- a model: lists of episodes, everything spelled out


@dataclass
class ModelEpisode:
    frames: list[int]
    """The first observation, then the one after each transition."""
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False
    open: bool = True


@dataclass
class Model:
    """What a replay buffer should answer, from whole episodes that are never forgotten."""

    capacities: list[int]
    stack: int
    n_step: int
    gamma: float

    def __post_init__(self) -> None:
        self.streams: list[list[ModelEpisode]] = [[] for _ in self.capacities]
        self.places: list[list[tuple[ModelEpisode, int]]] = [[] for _ in self.capacities]

    def add_row(self, n, obs, action, reward, terminated, truncated, next_obs, valid) -> int:
        episodes = self.streams[n]
        current = episodes[-1] if episodes and episodes[-1].open else None
        if current is not None and (not valid or current.frames[-1] != obs):
            current.open, current = False, None
        if not valid:
            return -1
        if current is None:
            current = ModelEpisode([obs])
            episodes.append(current)
        current.frames.append(next_obs)
        current.actions.append(action)
        current.rewards.append(reward)
        current.terminated = terminated
        current.open = not (terminated or truncated)
        self.places[n].append((current, len(current.actions) - 1))
        return (len(self.places[n]) - 1) * len(self.capacities) + n

    def live_ids(self) -> list[int]:
        num_envs = len(self.capacities)
        return [
            q * num_envs + n
            for n, capacity in enumerate(self.capacities)
            for q in range(max(0, len(self.places[n]) - capacity), len(self.places[n]))
        ]

    def transition(self, id_: int):
        episode, t = self.places[id_ % len(self.capacities)][id_ // len(self.capacities)]
        steps = min(self.n_step, len(episode.actions) - t)
        returns = sum(self.gamma**i * episode.rewards[t + i] for i in range(steps))
        ends = t + steps == len(episode.actions)
        discount = 0.0 if ends and episode.terminated else self.gamma**steps
        return self._stack(episode, t), episode.actions[t], returns, discount, self._stack(episode, t + steps)

    def _stack(self, episode: ModelEpisode, t: int) -> list[int]:
        return [episode.frames[max(0, t - back)] for back in reversed(range(self.stack))]


def assert_matches(model: Model, batch) -> None:
    frames = batch.obs.reshape(len(batch.ids), model.stack, -1), batch.next_obs.reshape(len(batch.ids), model.stack, -1)
    for i, id_ in enumerate(batch.ids.tolist()):
        obs, action, returns, discount, next_obs = model.transition(id_)
        for got, expected in zip((frames[0][i], frames[1][i]), (obs, next_obs), strict=True):
            np.testing.assert_array_equal(got, np.repeat(np.array(expected)[:, None], got.shape[1], axis=1))
        assert batch.actions[i] == action
        np.testing.assert_allclose(batch.returns[i], returns, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(batch.discounts[i], discount, rtol=1e-6)


class Rows:
    """Random rows of N envs with ends, autoreset rows and sudden jumps, as arrays for `add` and rows for the model."""

    def __init__(self, num_envs: int, obs_shape: tuple[int, ...], obs_dtype: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.obs_shape, self.dtype = num_envs, obs_shape, np.dtype(obs_dtype)
        self.frame = self.rng.integers(0, 50, num_envs)
        self.reset_next = np.zeros(num_envs, bool)

    def draw(self, num_steps: int):
        shape = (num_steps, self.num_envs)
        obs, next_obs = np.zeros(shape, int), np.zeros(shape, int)
        terminated, truncated = self.rng.random(shape) < 0.12, self.rng.random(shape) < 0.12
        valid = np.ones(shape, bool)
        for t, n in np.ndindex(shape):
            if self.rng.random() < 0.05:  # whoever steps the envs lost some rows
                self.frame[n] += 7
            obs[t, n] = self.frame[n]
            if self.reset_next[n]:
                valid[t, n] = False
                self.frame[n] = self.rng.integers(0, 50)
            else:
                self.frame[n] += 1
                valid[t, n] = self.rng.random() > 0.03
            next_obs[t, n] = self.frame[n]
            ended = valid[t, n] and (terminated[t, n] or truncated[t, n])
            self.reset_next[n] = ended and self.rng.random() < 0.7
            if ended and not self.reset_next[n]:
                self.frame[n] = self.rng.integers(0, 50)
        actions = self.rng.integers(0, 9, shape)
        rewards = self.rng.normal(size=shape).astype(np.float32)
        return obs, actions, rewards, terminated, truncated, next_obs, valid

    def spread(self, frames: np.ndarray) -> np.ndarray:
        wide = frames.reshape(*frames.shape, *(1 for _ in self.obs_shape))
        return np.broadcast_to(wide, (*frames.shape, *self.obs_shape)).astype(self.dtype)


SHAPES = (((), "int64"), ((3,), "float32"), ((2, 2), "uint8"), ((1,), "float64"), ((5,), "int16"))


@given(
    capacity=st.integers(1, 41),
    num_envs=st.integers(1, 5),
    stack=st.integers(1, 4),
    n_step=st.integers(1, 5),
    prioritized=st.booleans(),
    weight_maximum=st.sampled_from(("batch", "buffer")),
    shape=st.sampled_from(SHAPES),
    operations=st.lists(st.sampled_from(("add", "add", "add", "long", "sample", "update", "save")), max_size=14),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_replay_agrees_with_a_list_of_episodes(
    capacity, num_envs, stack, n_step, prioritized, weight_maximum, shape, operations, seed
):
    capacity = max(capacity, num_envs)
    obs_shape, dtype = shape
    gamma, alpha = 0.9, 0.7

    def make(kernels):
        return Replay(
            capacity, obs_shape, dtype, num_envs=num_envs, stack=stack, n_step=n_step, gamma=gamma,
            prioritized=prioritized, alpha=alpha, weight_maximum=weight_maximum, kernels=kernels, seed=seed,
        )  # fmt: skip

    replays = {kernels: make(kernels) for kernels in KERNELS}
    lengths = [capacity // num_envs + (n < capacity % num_envs) for n in range(num_envs)]
    model = Model(lengths, stack, n_step, gamma)
    rows, rng = Rows(num_envs, obs_shape, dtype, seed), np.random.default_rng(seed)
    priorities: dict[int, float] = {}
    greatest = 1.0
    for operation in (*operations, "add", "sample", "save", "sample"):
        if operation in ("add", "long"):
            drawn = rows.draw(int(rng.integers(1, 6 if operation == "add" else 3 * capacity)))
            obs, actions, rewards, terminated, truncated, next_obs, valid = drawn
            ids = [
                [model.add_row(n, *(array[t, n].item() for array in drawn)) for n in range(num_envs)]
                for t in range(len(obs))
            ]
            priorities |= {id_: greatest for row in ids for id_ in row}
            arrays = (rows.spread(obs), actions, rewards, terminated, truncated, rows.spread(next_obs), valid)
            for replay in replays.values():
                np.testing.assert_array_equal(replay.add(*arrays), ids)
        elif operation == "update" and prioritized and model.live_ids():
            issued = np.array([n + num_envs * q for n in range(num_envs) for q in range(len(model.places[n]))])
            chosen = rng.choice(issued, size=7)
            new = rng.normal(size=7) * 10.0 ** rng.integers(-8, 11)
            clamped = np.clip(np.abs(new), 1e-6, 1e9)
            greatest = max(greatest, clamped.max())
            live = set(model.live_ids())
            priorities |= {id_: p for id_, p in zip(chosen.tolist(), clamped, strict=True) if id_ in live}
            for replay in replays.values():
                replay.update_priorities(chosen, new)
        elif operation == "save":
            for kernels, replay in list(replays.items()):
                state = replay.state_dict()
                replays[kernels] = make(kernels)
                replays[kernels].load_state_dict(state)
        elif operation == "sample":
            assert {len(replay) for replay in replays.values()} == {len(model.live_ids())}
            if model.live_ids():
                batches = [replay.sample(16, beta=0.5) for replay in replays.values()]
                for one, other in pairwise(batches):
                    for got, expected in zip(one, other, strict=True):
                        np.testing.assert_array_equal(got, expected)
                check_sample(model, batches[0], priorities if prioritized else None, weight_maximum, alpha)


def check_sample(model, batch, priorities, weight_maximum, alpha) -> None:
    live = model.live_ids()
    assert set(batch.ids.tolist()) <= set(live)
    assert_matches(model, batch)
    if priorities is None:
        np.testing.assert_array_equal(batch.weights, 1)
        return
    masses = {id_: priorities[id_] ** alpha for id_ in live}
    weights = {id_: (len(live) * mass / sum(masses.values())) ** -0.5 for id_, mass in masses.items()}
    over = live if weight_maximum == "buffer" else batch.ids.tolist()
    greatest = max(weights[id_] for id_ in over)
    np.testing.assert_allclose(batch.weights, [weights[id_] / greatest for id_ in batch.ids.tolist()], rtol=1e-5)
    assert ((batch.weights > 0) & (batch.weights <= 1)).all()


# ---- by hand


def counting(replay: Replay, first: int, count: int, ends: dict[int, str] | None = None, reward: float = 1.0) -> None:
    """Add transitions first, first + 1, ... of one env, whose observation is their number."""
    for i in range(first, first + count):
        end = (ends or {}).get(i)
        obs = np.full((1, 1, *replay.obs_shape), i, replay.obs_dtype)
        flags = (np.array([[end == kind]]) for kind in ("terminated", "truncated"))
        replay.add(obs, np.array([[i]]), np.full((1, 1), reward, np.float32), *flags, obs + 1)


def every(replay: Replay, live: int):
    """A batch with every live transition, in order of arrival; fails if one is never drawn."""
    batch = replay.sample(60 * live)
    _, rows = np.unique(batch.ids, return_index=True)
    assert len(rows) == live
    return type(batch)(*(array[rows] for array in batch))


@all_kernels
@pytest.mark.parametrize("fill", [1, 15, 16, 17, 40])
def test_stacks_stay_inside_what_was_written(kernels, fill):
    replay = Replay(16, (), np.int32, num_envs=1, stack=4, kernels=kernels)
    counting(replay, 0, fill)
    live = min(fill, 16)
    assert len(replay) == live
    batch = every(replay, live)
    expected = np.arange(fill - live, fill)
    np.testing.assert_array_equal(batch.ids, expected)
    np.testing.assert_array_equal(batch.obs, np.maximum(expected[:, None] + [-3, -2, -1, 0], 0))
    np.testing.assert_array_equal(batch.next_obs, np.maximum(expected[:, None] + [-2, -1, 0, 1], 0))


@all_kernels
def test_stacks_and_returns_stop_at_both_kinds_of_end(kernels):
    replay = Replay(100, (), np.int32, num_envs=1, stack=3, n_step=3, gamma=0.5, kernels=kernels)
    counting(replay, 0, 4, {3: "terminated"})
    counting(replay, 10, 3, {12: "truncated"})
    counting(replay, 20, 2)
    batch = every(replay, 9)
    np.testing.assert_array_equal(batch.obs[[3, 4, 5, 7]], [[1, 2, 3], [10, 10, 10], [10, 10, 11], [20, 20, 20]])
    np.testing.assert_array_equal(
        batch.next_obs[[0, 2, 3, 4, 6, 7, 8]],
        [[1, 2, 3], [2, 3, 4], [2, 3, 4], [11, 12, 13], [11, 12, 13], [20, 21, 22], [20, 21, 22]],
    )
    np.testing.assert_allclose(batch.returns, [1.75, 1.75, 1.5, 1, 1.75, 1.5, 1, 1.5, 1])
    np.testing.assert_allclose(batch.discounts, [0.125, 0, 0, 0, 0.125, 0.25, 0.5, 0.25, 0.5])


@all_kernels
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_an_episode_that_begins_as_the_last_one_ended_is_another_one(kernels, kind):
    replay = Replay(10, (), np.int32, num_envs=1, stack=2, n_step=4, gamma=0.5, kernels=kernels)
    counting(replay, 0, 4, {1: kind})  # transition 2 starts from the observation that followed transition 1
    batch = every(replay, 4)
    np.testing.assert_allclose(batch.returns, [1.5, 1, 1.5, 1])
    goes_on = kind == "truncated"
    np.testing.assert_allclose(batch.discounts, [0.25 * goes_on, 0.5 * goes_on, 0.25, 0.5])
    np.testing.assert_array_equal(batch.obs, [[0, 0], [0, 1], [2, 2], [2, 3]])


@all_kernels
def test_n_step_targets_by_hand(kernels):
    """n=2, gamma 0.9, rewards 1 and 1, Q = 10: 1 + 0.9 + 0.81 * 10 = 10; the one-step tail: 1 + 0.9 * 10 = 10."""
    replay = Replay(10, (), np.int32, num_envs=1, n_step=2, gamma=0.9, kernels=kernels)
    counting(replay, 0, 2)
    batch = every(replay, 2)
    np.testing.assert_allclose(batch.returns + batch.discounts * 10, [10, 10], rtol=1e-6)
    replay = Replay(10, (), np.int32, num_envs=1, n_step=3, gamma=0.9, kernels=kernels)
    counting(replay, 0, 5, {4: "terminated"})
    batch = every(replay, 5)
    np.testing.assert_allclose((batch.returns + batch.discounts * 10)[2:], [2.71, 1.9, 1], rtol=1e-6)


@all_kernels
def test_reset_rows_are_not_transitions(kernels):
    replay = Replay(10, (), np.int32, num_envs=1, stack=2, kernels=kernels)
    obs, next_obs = (np.array(frames, np.int32)[:, None] for frames in ([1, 2, 50], [2, 50, 51]))
    no, valid = np.zeros((3, 1), bool), np.array([[True], [False], [True]])
    ids = replay.add(obs, np.zeros((3, 1), int), np.ones((3, 1), np.float32), ~valid[[1, 0, 0]], no, next_obs, valid)
    np.testing.assert_array_equal(ids, [[0], [-1], [1]])
    batch = every(replay, 2)
    np.testing.assert_array_equal(batch.obs, [[1, 1], [50, 50]])
    np.testing.assert_array_equal(batch.next_obs, [[1, 2], [50, 51]])
    np.testing.assert_allclose(batch.discounts, [0, 0.99])


@all_kernels
def test_an_episode_cut_without_an_end_keeps_its_last_observation(kernels):
    replay = Replay(10, (), np.int32, num_envs=1, stack=2, n_step=5, kernels=kernels)
    counting(replay, 0, 3)
    counting(replay, 70, 2)
    batch = every(replay, 5)
    np.testing.assert_array_equal(batch.next_obs[:3], [[2, 3]] * 3)
    np.testing.assert_allclose(batch.discounts[:3], 0.99 ** np.array([3, 2, 1]), rtol=1e-6)
    np.testing.assert_array_equal(batch.obs[3], [70, 70])


@all_kernels
def test_terminated_counts_when_both_are_set(kernels):
    replay = Replay(4, (), np.int32, num_envs=1, kernels=kernels)
    yes, frame = np.ones((1, 1), bool), np.zeros((1, 1), np.int32)
    replay.add(frame, frame.astype(int), np.ones((1, 1), np.float32), yes, yes, frame)
    assert replay.sample(1).discounts.tolist() == [0]


# ---- priorities


def prioritized(capacity: int, kernels: str, **options) -> Replay:
    replay = Replay(capacity, (), np.int32, num_envs=1, prioritized=True, kernels=kernels, **options)
    counting(replay, 0, capacity)
    return replay


@all_kernels
def test_priorities_of_overwritten_transitions_are_ignored(kernels):
    replay, other = prioritized(5, kernels), prioritized(5, kernels)
    for buffer in (replay, other):
        counting(buffer, 5, 3)
    replay.update_priorities(np.array([0, 1, 2]), np.array([100.0, 100.0, 100.0]))
    other.update_priorities(np.array([3]), np.array([1.0]))
    np.testing.assert_array_equal(replay.sample(64).ids, other.sample(64).ids)


@all_kernels
def test_the_sign_of_a_priority_does_not_count(kernels):
    replay = prioritized(2, kernels)
    replay.update_priorities(np.array([0, 1]), np.array([-5.0, 5.0]))
    assert np.bincount(replay.sample(1000).ids).tolist() == [500, 500]  # stratified: exactly half


@all_kernels
def test_new_transitions_enter_at_the_greatest_priority(kernels):
    replay = prioritized(3, kernels, alpha=1.0)
    replay.update_priorities(np.array([1]), np.array([9.0]))
    replay.update_priorities(np.array([1]), np.array([1.0]))
    counting(replay, 3, 1)
    assert np.bincount(replay.sample(1100).ids).tolist() == [0, 100, 100, 900]


@all_kernels
def test_zero_and_huge_priorities_are_clamped(kernels):
    replay = prioritized(3, kernels, alpha=1.0)
    replay.update_priorities(np.array([0, 1, 2]), np.array([0.0, 1e-6, 1e-300]))
    assert np.bincount(replay.sample(300).ids).tolist() == [100, 100, 100]
    replay.update_priorities(np.array([0, 1, 2]), np.array([1e300, 1e9, 2e10]))
    assert np.bincount(replay.sample(300).ids).tolist() == [100, 100, 100]
    assert np.isfinite(replay.sample(9, beta=1.0).weights).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_priorities_that_are_not_finite_are_refused(bad):
    replay = prioritized(3, "native")
    before = replay.state_dict()["priorities"]
    with pytest.raises(ValueError, match="finite"):
        replay.update_priorities(np.array([0, 1]), np.array([1.0, bad]))
    assert torch.equal(replay.state_dict()["priorities"], before)


@all_kernels
@pytest.mark.parametrize("capacity", [1, 7, 8, 9, 63, 64, 65, 100, 513])
def test_the_tree_holds_exact_sums_at_any_capacity_after_long_use(kernels, capacity):
    """A node is a function of its children, so the tree equals one built afresh, bit for bit."""
    replay, rng = prioritized(capacity, kernels, weight_maximum="buffer"), np.random.default_rng(0)
    for i in range(60):
        ids = rng.integers(max(0, i - 3), capacity + i, 40)
        replay.update_priorities(ids, 10.0 ** rng.uniform(-6, 9, 40))
        counting(replay, capacity + i, 1)
    tree, state = replay._tree, replay.state_dict()
    leaves = tree.sums[:capacity]
    assert (leaves > 0).all()
    np.testing.assert_allclose(tree.sums[-1], np.sum(leaves), rtol=1e-14)
    assert tree.mins[-1] == leaves.min()
    afresh = Replay(
        capacity, (), np.int32, num_envs=1, prioritized=True, weight_maximum="buffer", kernels=kernels, seed=5
    )
    afresh.load_state_dict(state)
    np.testing.assert_array_equal(afresh._tree.sums, tree.sums)
    np.testing.assert_array_equal(afresh._tree.mins, tree.mins)


@all_kernels
@pytest.mark.parametrize("num_envs", [1, 3])
def test_uniform_sampling_is_uniform(kernels, num_envs):
    replay = Replay(50, (), np.int32, num_envs=num_envs, kernels=kernels, seed=1)
    rows = Rows(num_envs, (), "int32", 0)
    obs, *small, next_obs, _ = rows.draw(40)
    replay.add(obs.astype(np.int32), *small, next_obs.astype(np.int32))
    ids = np.concatenate([replay.sample(500).ids for _ in range(40)])
    _, drawn = np.unique(ids, return_counts=True)
    assert len(drawn) == len(replay)
    assert chisquare(drawn).pvalue > 1e-3


@all_kernels
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_prioritized_sampling_is_proportional(kernels, alpha):
    replay = prioritized(77, kernels, alpha=alpha)
    priorities = np.random.default_rng(0).uniform(0.1, 5, 77)
    replay.update_priorities(np.arange(77), priorities)
    # One draw at a time: stratified batches are more even than a chi-square test expects.
    ids = np.concatenate([replay.sample(1).ids for _ in range(8000)])
    expected = priorities**alpha
    assert chisquare(np.bincount(ids, minlength=77), expected / expected.sum() * len(ids)).pvalue > 1e-3


@all_kernels
def test_prioritized_batches_are_stratified(kernels):
    replay = prioritized(64, kernels)
    assert np.array_equal(np.sort(replay.sample(64).ids), np.arange(64))


def drawn_by(uniforms, replay) -> list[int]:
    """The ids that `uniforms`, one per stratum, select."""
    ids, values = np.empty(len(uniforms), np.int64), np.empty(len(uniforms))
    tree = (replay._leaf_bases, replay._ring.counts, *replay._tree)
    replay._kernels.tree_sample(np.array(uniforms, np.float64), *tree, ids, values)
    np.testing.assert_array_equal(values, replay._tree.sums[replay._leaf_bases[ids % 2] + ids // 2])
    return ids.tolist()


@all_kernels
def test_draws_at_the_very_edges_of_leaves_and_strata(kernels):
    """Priorities 1, 1, 2, 4 own [0, 1), [1, 2), [2, 4) and [4, 8) of the total; leaves never written own nothing."""
    no = np.zeros((4, 2), bool)
    frames, only_second = np.arange(10, dtype=np.int32).reshape(5, 2), np.tile([False, True], (4, 1))
    replay = Replay(20, (), np.int32, num_envs=2, prioritized=True, alpha=1.0, kernels=kernels)
    ids = replay.add(frames[:4], no.astype(int), no.astype(np.float32), no, no, frames[1:], only_second)[:, 1]
    replay.update_priorities(ids, np.array([1, 1, 2, 4]))
    edges = {0.0: 0, 1 / 8: 1, 2 / 8: 2, 4 / 8: 3}
    for uniform, transition in edges.items():
        assert drawn_by([uniform], replay) == [ids[transition]]
    # In the last stratum 3 + the greatest double below 1 rounds to 4: a target of the whole total.
    below_one = np.nextafter(1.0, 0.0)
    assert drawn_by([below_one] * 4, replay) == ids[[1, 3, 3, 3]].tolist()


# ---- state, memory, arguments


@all_kernels
@pytest.mark.parametrize("copy", [True, False])
def test_a_saved_buffer_goes_on_exactly(kernels, copy, tmp_path):
    def make(seed):
        return Replay(31, (2,), np.float32, num_envs=3, stack=2, n_step=2, prioritized=True, kernels=kernels, seed=seed)

    def add(replay, rows):
        obs, *small, next_obs, valid = rows.draw(9)
        replay.add(rows.spread(obs), *small, rows.spread(next_obs), valid)

    rows, replay = Rows(3, (2,), "float32", 0), make(0)
    for _ in range(4):
        add(replay, rows)
    replay.update_priorities(replay.sample(20).ids, np.linspace(0.1, 3, 20))
    checkpoint.save(tmp_path / "replay.pt", replay.state_dict(copy=copy))
    resumed = make(7)
    resumed.load_state_dict(checkpoint.load(tmp_path / "replay.pt"))
    for seed in range(4):
        for got, expected in zip(resumed.sample(12), replay.sample(12), strict=True):
            np.testing.assert_array_equal(got, expected)
        for buffer in (replay, resumed):
            add(buffer, Rows(3, (2,), "float32", seed))


def test_saving_without_a_copy_shares_memory():
    replay = Replay(1000, (84, 84), np.uint8, num_envs=1)
    frames = np.ones((1000, 1, 84, 84), np.uint8)
    no = np.zeros((1000, 1), bool)
    replay.add(frames, no.astype(int), no.astype(np.float32), no, no, frames)
    state = replay.state_dict(copy=False)
    assert np.shares_memory(state["frames"][0].numpy(), replay._ring.frames)
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 1.01 * replay.nbytes
    assert not np.shares_memory(replay.state_dict()["frames"][0].numpy(), replay._ring.frames)


def test_an_unfilled_buffer_saves_only_what_it_holds():
    replay = Replay(10_000, (84, 84), np.uint8, num_envs=2)
    assert sum(part.nbytes for part in replay.state_dict()["frames"]) == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state["config"].update(stack=3), "stack 3"),
        (lambda state: state["final_index"][0].fill_(7), "final observations"),
        (lambda state: state["flags"][0].fill_(4), "final observations"),
        (lambda state: state["counts"].fill_(50), "actions|frames"),
        (lambda state: state["counts"].fill_(-1), "counts"),
        (lambda state: state["priorities"].fill_(torch.nan), "finite"),
        (lambda state: state.update(frames=state["frames"][:0]), "frames"),
        (lambda state: state.update(rng={}), "RNG"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(damage, message):
    replay, other, untouched = (
        Replay(20, (), np.int32, num_envs=1, stack=2, prioritized=True, seed=seed) for seed in (0, 1, 0)
    )
    for buffer, first in ((replay, 0), (other, 50), (untouched, 0)):
        counting(buffer, first, 10, {first + 4: "truncated"})
    state = other.state_dict()
    damage(state)
    with pytest.raises(ValueError, match=message):
        replay.load_state_dict(state)
    for got, expected in zip(replay.sample(50), untouched.sample(50), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_frames_are_stored_once():
    for num_envs in (1, 8):
        replay = Replay(10_000, (84, 84), np.uint8, num_envs=num_envs, stack=4)
        assert abs(replay.nbytes / 10_000 - 7060) < 0.03 * 7060


def test_a_buffer_larger_than_the_free_memory_is_refused(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(ValueError, match=r"7\.07 GB, but 1\.00 GB"):
        Replay(1_000_000, (84, 84), np.uint8, num_envs=1)


@all_kernels
def test_sampling_an_empty_buffer_is_refused(kernels):
    for prioritized_ in (False, True):
        replay = Replay(4, (), np.int32, num_envs=1, prioritized=prioritized_, kernels=kernels)
        with pytest.raises(ValueError, match="empty"):
            replay.sample(1)


@all_kernels
def test_read_only_and_strided_inputs_are_accepted(kernels):
    frames = np.arange(2 * 6 * 3, dtype=np.float32).reshape(6, 2, 3)
    frames.flags.writeable = False
    small = np.zeros((5, 2), bool)
    small.flags.writeable = False
    replay = Replay(20, (3,), np.float32, num_envs=2, kernels=kernels)
    wide = np.zeros((5, 4), np.int32)[:, ::2]
    replay.add(frames[:-1], wide, np.zeros((5, 2), np.float32), small, small, frames[1:])
    batch = every(replay, 10)
    np.testing.assert_array_equal(np.sort(batch.obs[:, 0]), np.sort(frames[:-1, :, 0].ravel()))
    np.testing.assert_array_equal(batch.next_obs, batch.obs + 6)


@all_kernels
def test_sampling_into_given_arrays(kernels):
    replay = Replay(30, (2,), np.float32, num_envs=1, stack=2, kernels=kernels)
    counting(replay, 0, 30)
    out = replay.empty_batch(5)
    assert replay.sample(5, out=out) is out
    np.testing.assert_array_equal(out.obs[:, 1, 0], out.actions)
    with pytest.raises(ValueError, match=r"out\.obs"):
        replay.sample(4, out=out)
    with pytest.raises(ValueError, match=r"out\.ids"):
        replay.sample(5, out=out._replace(ids=out.ids.astype(np.int32)))


def test_threads_do_not_change_a_batch():
    def batch(num_threads):
        replay = Replay(300, (84, 84), np.uint8, num_envs=2, stack=4, seed=3, num_threads=num_threads)
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (101, 2, 84, 84), np.uint8)
        no = np.zeros((100, 2), bool)
        replay.add(frames[:-1], no.astype(int), no.astype(np.float32), no, rng.random((100, 2)) < 0.1, frames[1:])
        return replay.sample(256)

    for got, expected in zip(batch(4), batch(1), strict=True):
        np.testing.assert_array_equal(got, expected)


GOOD = {"capacity": 10, "obs_shape": (2,), "obs_dtype": np.float32, "num_envs": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": 1}, "num_envs"),
        ({"capacity": 10.0}, "capacity"),
        ({"num_envs": 0}, "num_envs"),
        ({"stack": 0}, "stack"),
        ({"n_step": True}, "n_step"),
        ({"gamma": 1.1}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"alpha": -0.1}, "alpha"),
        ({"weight_maximum": "all"}, "batch, buffer"),
        ({"kernels": "cuda"}, "kernels"),
        ({"obs_shape": (0,)}, "obs_shape"),
        ({"obs_dtype": object}, "obs_dtype"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Replay(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((3, 2, 2))}, r"obs must be float32 \[T, 2, 2\]"),
        ({"obs": np.zeros((3, 1, 2), np.float32)}, "obs"),
        ({"obs": np.zeros((3, 2, 4, 2), np.float32)}, "single frames"),
        ({"next_obs": np.zeros((2, 2, 2), np.float32)}, r"next_obs must be float32 \[3, 2, 2\]"),
        ({"actions": np.zeros((3, 2))}, "actions"),
        ({"actions": [[0, 0]] * 3}, "actions"),
        ({"rewards": np.zeros((3, 2))}, "rewards must be float32"),
        ({"rewards": np.zeros(3, np.float32)}, "rewards"),
        ({"terminated": np.zeros((3, 2), int)}, "terminated"),
        ({"truncated": np.zeros((3, 1), bool)}, "truncated"),
        ({"valid": np.zeros((3, 2), np.float32)}, "valid"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_stored(change, message):
    replay = Replay(**GOOD)
    no = np.zeros((3, 2), bool)
    frames = np.zeros((3, 2, 2), np.float32)
    rows = {"obs": frames, "actions": no.astype(int), "rewards": no.astype(np.float32), "terminated": no}
    with pytest.raises(ValueError, match=message):
        replay.add(**(rows | {"truncated": no, "next_obs": frames} | change))
    assert len(replay) == 0


@pytest.mark.parametrize(
    ("ids", "priorities", "message"),
    [
        (np.array([0.0]), np.ones(1), "int64"),
        (np.array([0]), np.ones(2), "one per id"),
        (np.array([3]), np.ones(1), "never gave out"),
        (np.array([-1]), np.ones(1), "never gave out"),
        (np.array([0]), np.array(["a"]), "numbers"),
    ],
)
def test_bad_updates_are_refused(ids, priorities, message):
    with pytest.raises(ValueError, match=message):
        prioritized(3, "native").update_priorities(ids, priorities)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": 2, "beta": -1.0}])
def test_bad_samples_are_refused(arguments):
    with pytest.raises(ValueError, match=r"batch_size|beta"):
        prioritized(3, "native").sample(**arguments)


def test_updating_a_uniform_buffer_is_refused():
    with pytest.raises(ValueError, match="prioritized=True"):
        Replay(**GOOD).update_priorities(np.array([0]), np.ones(1))


def test_ten_million_adds_take_constant_memory():
    replay = Replay(50_000, (4,), np.float32, num_envs=8, stack=2, n_step=3, prioritized=True)
    rng, process, sizes = np.random.default_rng(0), psutil.Process(), []
    for chunk in range(1250):
        frames = rng.random((1001, 8, 4), np.float32)
        ends = rng.random((2, 1000, 8)) < 0.01
        actions, rewards = np.zeros((1000, 8), int), np.ones((1000, 8), np.float32)
        replay.add(frames[:-1], actions, rewards, *ends, frames[1:])
        batch = replay.sample(512)
        replay.update_priorities(batch.ids, rng.random(512))
        if chunk % 125 == 124:
            sizes.append((process.memory_info().rss, replay.nbytes))
    assert len(replay) == 50_000
    assert sizes[-1][1] == sizes[0][1]
    assert sizes[-1][0] < sizes[4][0] + 4e6
    np.testing.assert_allclose(replay._tree.sums[-1], replay._tree.sums[:50_000].sum(), rtol=1e-13)
