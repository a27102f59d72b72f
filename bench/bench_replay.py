"""Adding to and sampling from a replay buffer, against the buffers of other libraries and a plain copy of the bytes.

Atari: 84x84 uint8 frames, stacks of 4, one env. CartPole: 4 floats, stack 1. Every buffer is filled with the same
transitions first, and the buffers of one size are measured right after each other. `fastrl, out` samples into the same
arrays again and again, as a learner does; the other rows return fresh arrays. A peer that is not installed is skipped
(`pip install ".[bench]"`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from fastrl.replay import Replay

CHUNK = 1000
FRAME = (84, 84)
STACK = 4


class Buffer(NamedTuple):
    """One implementation, filled: what is timed."""

    add: Callable[[], object]
    """Adds CHUNK transitions."""
    sample: Callable[[int], object]
    update: Callable[[object, np.ndarray], object]
    """Sets the priorities of what `sample` returned."""


class Transitions(NamedTuple):
    """CHUNK steps of one env that go on from each other, and end every 500."""

    frames: np.ndarray
    """[CHUNK + STACK, *obs_shape]"""
    obs: np.ndarray
    """[CHUNK, STACK, *obs_shape], or [CHUNK, *obs_shape] without stacking"""
    next_obs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray


@lru_cache(maxsize=1)
def transitions(kind: str) -> Transitions:
    rng = np.random.default_rng(0)
    if kind == "atari":
        frames = rng.integers(0, 256, (CHUNK + STACK, *FRAME), np.uint8)
        windows = np.stack([frames[i : i + CHUNK + 1] for i in range(STACK)], axis=1)
        obs, next_obs = windows[:-1].copy(), windows[1:].copy()
    else:
        frames = rng.standard_normal((CHUNK + STACK, 4), np.float32)
        obs, next_obs = frames[STACK - 1 : -1], frames[STACK:]
    ends = np.arange(1, CHUNK + 1) % 500 == 0
    return Transitions(frames, obs, next_obs, rng.integers(0, 6, CHUNK), np.ones(CHUNK, np.float32), ends)


def fastrl_buffer(kind: str, capacity: int, prioritized: bool) -> Buffer:
    rows = transitions(kind)
    obs_shape, dtype, stack = (FRAME, np.uint8, STACK) if kind == "atari" else ((4,), np.float32, 1)
    replay = Replay(capacity, obs_shape, dtype, num_envs=1, stack=stack, prioritized=prioritized)
    frames = rows.frames[STACK - 1 :, None]
    column = (rows.actions[:, None], rows.rewards[:, None], rows.terminated[:, None], np.zeros((CHUNK, 1), bool))

    def update(batch, priorities):
        replay.update_priorities(batch.ids, priorities)

    return Buffer(lambda: replay.add(frames[:-1], *column, frames[1:]), replay.sample, update)


def reusing(buffer: Buffer) -> Buffer:
    """The same fastrl buffer, which samples into arrays of its own."""
    outs: dict[int, object] = {}

    def sample(batch_size):
        if batch_size not in outs:
            outs[batch_size] = buffer.sample(batch_size)
        return buffer.sample(batch_size, out=outs[batch_size])

    return buffer._replace(sample=sample)


def sb3_buffer(kind: str, capacity: int, prioritized: bool) -> Buffer:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium").spaces
    if prioritized:
        pytest.skip("stable-baselines3 has no prioritized buffer")
    rows = transitions(kind)
    if kind == "atari":
        space = spaces.Box(0, 255, (STACK, *FRAME), np.uint8)
    else:
        space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    needs_memory(capacity * (space.shape and int(np.prod(space.shape))) * space.dtype.itemsize)
    replay = buffers.ReplayBuffer(
        capacity, space, spaces.Discrete(6), device="cpu", optimize_memory_usage=True, handle_timeout_termination=False
    )

    def add():
        for i in range(CHUNK):
            row = (rows.obs[i, None], rows.next_obs[i, None], rows.actions[i, None], rows.rewards[i, None])
            replay.add(*row, rows.terminated[i, None], [{}])

    return Buffer(add, replay.sample, lambda batch, priorities: None)


def cpprb_buffer(kind: str, capacity: int, prioritized: bool) -> Buffer:
    cpprb = pytest.importorskip("cpprb")
    rows = transitions(kind)
    if kind == "atari":
        # Its stacks are compressed along the last axis.
        obs, next_obs = (np.ascontiguousarray(np.moveaxis(frames, 1, -1)) for frames in (rows.obs, rows.next_obs))
        fields = {"obs": {"shape": (*FRAME, STACK), "dtype": np.uint8}}
        options = {"next_of": "obs", "stack_compress": "obs"}
        needs_memory(capacity * int(np.prod(FRAME)))
    else:
        obs, next_obs = rows.obs, rows.next_obs
        fields, options = {"obs": {"shape": (4,), "dtype": np.float32}}, {"next_of": "obs"}
    fields |= {"act": {"dtype": np.int64}, "rew": {}, "done": {}}
    replay = (cpprb.PrioritizedReplayBuffer if prioritized else cpprb.ReplayBuffer)(capacity, fields, **options)
    halves = [slice(0, CHUNK // 2), slice(CHUNK // 2, CHUNK)]

    def add():
        for half in halves:
            columns = {"act": rows.actions, "rew": rows.rewards, "done": rows.terminated}
            columns |= {"obs": obs, "next_obs": next_obs}
            replay.add(**{name: column[half] for name, column in columns.items()})
            replay.on_episode_end()

    def update(batch, priorities):
        replay.update_priorities(batch["indexes"], priorities)

    return Buffer(add, replay.sample, update)


def torchrl_buffer(kind: str, capacity: int, prioritized: bool) -> Buffer:
    data = pytest.importorskip("torchrl.data")
    import torch
    from tensordict import TensorDict

    rows = transitions(kind)
    needs_memory(capacity * 2 * rows.obs[0].nbytes)
    columns = dict(zip(("obs", "next_obs", "action", "reward", "done"), map(torch.from_numpy, rows[1:]), strict=True))
    chunk = TensorDict(columns, [CHUNK])
    storage = data.LazyTensorStorage(capacity)
    if prioritized:
        try:
            replay = data.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
        except RuntimeError as error:  # its own C++ extension does not load with every version of PyTorch
            pytest.skip(f"torchrl's priorities: {error}")
    else:
        replay = data.TensorDictReplayBuffer(storage=storage)

    def update(batch, priorities):
        replay.update_priority(batch["index"], torch.from_numpy(priorities))

    return Buffer(lambda: replay.extend(chunk), replay.sample, update)


def memcpy_buffer(kind: str, capacity: int, prioritized: bool) -> Buffer:
    """As many bytes as a batch has, in one copy from a random place of as much storage (NumPy: one thread)."""
    if prioritized:
        pytest.skip("a copy has no priorities")
    stack_bytes = transitions(kind).obs[0].nbytes
    frames = transitions(kind).frames[0].nbytes
    capacity = min(capacity, 100_000)  # much larger than any cache
    storage = np.zeros(capacity * frames + stack_bytes, np.uint8)
    storage[:] = 1
    outs: dict[int, np.ndarray] = {}
    place = np.random.default_rng(0)

    def sample(batch_size):
        size = 2 * batch_size * stack_bytes
        out = outs.setdefault(batch_size, np.ones(size, np.uint8))
        start = int(place.integers(len(storage) - size))
        np.copyto(out, storage[start : start + size])

    def add():
        storage[: CHUNK * frames] = storage[-CHUNK * frames :]

    return Buffer(add, sample, lambda batch, priorities: None)


BUFFERS = {
    "fastrl": fastrl_buffer,
    "stable-baselines3": sb3_buffer,
    "cpprb": cpprb_buffer,
    "torchrl": torchrl_buffer,
    "memcpy": memcpy_buffer,
}


def needs_memory(nbytes: int) -> None:
    if nbytes > 0.9 * psutil.virtual_memory().available:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB")


_filled: dict[tuple, Buffer] = {}


def filled(name: str, *case: str | int | bool) -> Buffer:
    """The buffer, full; those of another case (kind, capacity, prioritized) are let go, for want of memory."""
    if any(key[1:] != case for key in _filled):
        _filled.clear()
        gc.collect()
    if name == "fastrl, out":
        return reusing(filled("fastrl", *case))
    if (name, *case) not in _filled:
        buffer = BUFFERS[name](*case)
        if name != "memcpy":
            for _ in range(-(-case[1] // CHUNK)):
                buffer.add()
        _filled[name, *case] = buffer
    return _filled[name, *case]


CASES = [("atari", 100_000), ("atari", 1_000_000), ("cartpole", 100_000), ("cartpole", 1_000_000)]
in_every_buffer = pytest.mark.parametrize("name", ["fastrl, out", *BUFFERS])  # outermost: it varies first
cases = pytest.mark.parametrize(("kind", "capacity"), CASES, ids=lambda value: str(value))
batch_sizes = pytest.mark.parametrize("batch_size", [32, 256, 512])


def record(benchmark, count: int, nbytes: int) -> None:
    if benchmark.stats:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["transitions_per_s"] = count / seconds
        benchmark.extra_info["bytes_per_s"] = nbytes / seconds


@in_every_buffer
@batch_sizes
@cases
def bench_uniform_sample(benchmark, name, kind, capacity, batch_size):
    benchmark.group = f"sample {batch_size} of {capacity:,} {kind} transitions"
    buffer = filled(name, kind, capacity, False)
    benchmark.pedantic(buffer.sample, (batch_size,), rounds=100, warmup_rounds=10)
    record(benchmark, batch_size, 2 * batch_size * transitions(kind).obs[0].nbytes)


@in_every_buffer
@batch_sizes
@cases
def bench_prioritized_sample_and_update(benchmark, name, kind, capacity, batch_size):
    benchmark.group = f"sample {batch_size} of {capacity:,} {kind} transitions by priority, set the priorities anew"
    buffer = filled(name, kind, capacity, True)
    priorities = np.random.default_rng(0).uniform(0.1, 2, batch_size).astype(np.float32)

    def call():
        buffer.update(buffer.sample(batch_size), priorities)

    benchmark.pedantic(call, rounds=100, warmup_rounds=10)
    record(benchmark, batch_size, 2 * batch_size * transitions(kind).obs[0].nbytes)


@in_every_buffer
@pytest.mark.parametrize("kind", ["atari", "cartpole"])
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
def bench_add(benchmark, name, kind, prioritized):
    benchmark.group = f"add {CHUNK} {kind} transitions, {'prioritized' if prioritized else 'uniform'}"
    buffer = filled(name, kind, 100_000, prioritized)
    benchmark.pedantic(buffer.add, rounds=20, warmup_rounds=2)
    record(benchmark, CHUNK, CHUNK * transitions(kind).frames[0].nbytes)


@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("capacity", [10_000, 30_000, 100_000, 300_000, 1_000_000])
def bench_sample_as_capacity_grows(benchmark, capacity, prioritized):
    benchmark.group = f"fastrl, sample 256 atari transitions, {'prioritized' if prioritized else 'uniform'}"
    buffer = filled("fastrl, out", "atari", capacity, prioritized)
    benchmark.pedantic(buffer.sample, (256,), rounds=100, warmup_rounds=10)
    record(benchmark, 256, 2 * 256 * transitions("atari").obs[0].nbytes)


@pytest.mark.parametrize("kernels", ["native", "numba"])
@pytest.mark.parametrize("batch_size", [32, 256, 512])
def bench_tree_of_a_million(benchmark, batch_size, kernels):
    """Drawing by priority and setting the priorities of what was drawn, without the transitions themselves."""
    benchmark.group = f"draw {batch_size} of 1,000,000 by priority, set the priorities anew"
    replay = Replay(1_000_000, (), np.uint8, num_envs=1, prioritized=True, kernels=kernels)
    no, frames = np.zeros((1_000_000, 1), bool), np.zeros((1_000_001, 1), np.uint8)
    replay.add(frames[:-1], no.astype(int), no.astype(np.float32), no, no, frames[1:])
    priorities = np.random.default_rng(0).uniform(0.1, 2, 1_000_000).astype(np.float32)
    replay.update_priorities(np.arange(1_000_000), priorities)
    batch = replay.empty_batch(batch_size)

    def call():
        replay._draw_prioritized(0.4, batch)
        replay.update_priorities(batch.ids, priorities[:batch_size])

    benchmark.pedantic(call, rounds=1000, warmup_rounds=10)
