"""The replay buffer of DQN: frames stored once, transitions rebuilt when sampled. Hot loops are in `fastrl.kernels`.

Every env writes to a ring of its own, one slot per transition. A stack of frames and the next observation are read
from the neighbouring slots; only the observation after the last transition of an episode, which no slot holds, is kept
apart.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from fastrl import kernels as kernels_
from fastrl.runtime import available_cores
from fastrl.types import Batch, describe

MIN_PRIORITY, MAX_PRIORITY = 1e-6, 1e9
"""Absolute priorities are clamped to this range: a zero stays samplable, and no transition drowns all others."""
WEIGHT_MAXIMA = ("batch", "buffer")
_FAN_OUT = 8
_FIRST_FINALS_PER_ENV = 4


class _Ring(NamedTuple):
    """The storage, in the order in which the kernels take it; `fastrl::Ring` in csrc/kernels.h says what each is."""

    bases: np.ndarray
    counts: np.ndarray
    running: np.ndarray
    frames: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    flags: np.ndarray
    final_index: np.ndarray
    pending: np.ndarray
    finals: np.ndarray
    free_finals: np.ndarray
    num_free: np.ndarray

    def part(self, envs: slice) -> _Ring:
        """Some of the envs, as a ring that shares the storage."""
        bases = self.bases[envs.start : envs.stop + 1]
        slots = slice(bases[0], bases[-1])
        return self._replace(
            bases=bases - bases[0],
            **{name: getattr(self, name)[envs] for name in ("counts", "running", "pending")},
            **{name: getattr(self, name)[slots] for name in _PER_SLOT},
        )


_PER_SLOT = ("frames", "actions", "rewards", "flags", "final_index")


class _SumTree(NamedTuple):
    """Priorities to the power of alpha, in the order in which the kernels take them: `fastrl::Tree`."""

    offsets: np.ndarray
    sums: np.ndarray
    mins: np.ndarray


class Replay:
    """A ring of the newest `capacity` transitions of `num_envs` envs, sampled uniformly or by priority.

    Every transition it holds can be sampled. Those of one env follow each other as they were added; nothing sampled
    reaches across the end of an episode, terminated or truncated, nor across the newest or the oldest transition.

    Args:
      capacity: transitions over all envs, at least one per env; env n keeps its newest capacity // num_envs (the first
        capacity % num_envs envs one more).
      obs_shape, obs_dtype: of one frame, as `add` takes it.
      num_envs: parallel streams of transitions.
      stack: frames per observation of `sample`. An episode begins with its first frame repeated.
      n_step: rewards per return. Fewer are summed at the end of an episode and at the newest transition, and the
        discount counts the steps really taken.
      gamma: discount per step.
      prioritized: sample in proportion to priority^alpha, stratified (Schaul et al. 2016, arXiv:1511.05952, sec. 3.3).
      alpha: 0 is uniform, 1 fully proportional.
      weight_maximum: importance weights are divided by the greatest of the "batch" or of the whole "buffer".
      kernels: "native", "numba" or "reference"; the three give the same bits.
      seed: of the sampling.
      num_threads: for copying large batches (native kernels); default: the cores of this process.

    Raises: ValueError on a bad argument, or when the buffer would not fit into the free memory.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        obs_dtype: np.dtype | type | str,
        *,
        num_envs: int,
        stack: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritized: bool = False,
        alpha: float = 0.6,
        weight_maximum: str = "batch",
        kernels: str = "native",
        seed: int = 0,
        num_threads: int | None = None,
    ) -> None:
        counts = {"capacity": capacity, "num_envs": num_envs, "stack": stack, "n_step": n_step}
        for name, count in {**counts, "num_threads": 1 if num_threads is None else num_threads}.items():
            if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
                raise ValueError(f"{name} must be a whole number of at least 1; got {count!r}")
        if capacity < num_envs:
            raise ValueError(f"capacity must be at least num_envs ({num_envs}), one transition each; got {capacity}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1]; got {gamma}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1]; got {alpha}")
        if weight_maximum not in WEIGHT_MAXIMA:
            raise ValueError(f"weight_maximum must be one of {', '.join(WEIGHT_MAXIMA)}; got {weight_maximum!r}")
        self.obs_shape, self.obs_dtype = tuple(map(operator.index, obs_shape)), np.dtype(obs_dtype)
        if min(self.obs_shape, default=1) < 1 or self.obs_dtype.hasobject or not self.obs_dtype.itemsize:
            raise ValueError(
                f"obs_shape must have positive lengths and obs_dtype a fixed size; "
                f"got {list(self.obs_shape)} {self.obs_dtype}"
            )
        self.capacity, self.num_envs, self.stack, self.n_step = map(int, counts.values())
        self.gamma, self.prioritized, self.alpha = float(gamma), bool(prioritized), float(alpha)
        self.weight_maximum = weight_maximum
        self.num_threads = available_cores() if num_threads is None else int(num_threads)
        self._kernels = kernels_.choose(kernels)
        self._rng = np.random.default_rng(seed)
        # Multiplied up, not pow(): the same bits on every platform.
        self._gammas = np.multiply.accumulate(np.concatenate([[1.0], np.full(self.n_step, self.gamma)]))

        lengths = np.full(self.num_envs, self.capacity // self.num_envs, np.int64)
        lengths[: self.capacity % self.num_envs] += 1
        self._lengths = lengths
        self._leaf_bases = np.concatenate([[0], np.cumsum(lengths)])
        frame_bytes = int(np.prod(self.obs_shape, dtype=np.int64)) * self.obs_dtype.itemsize
        _check_memory(self._projected_bytes(frame_bytes), self.capacity, frame_bytes)
        # The oldest transition's stack reaches back into stack - 1 slots that are no longer sampled themselves.
        self._ring = _empty_ring(lengths + self.stack - 1, frame_bytes)
        self._tree = _empty_tree(self.capacity, self.weight_maximum) if self.prioritized else None
        self._max_priority = 1.0
        self._count_live()

    def __len__(self) -> int:
        """Transitions that can be sampled now."""
        return int(self._live_ends[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage at full use, the tree of priorities included."""
        return sum(array.nbytes for array in (*self._ring, *(self._tree or ())))

    def add(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        valid: np.ndarray | None = None,
        *,
        first_env: int | None = None,
    ) -> np.ndarray:
        """Append T steps of N envs. Arrays are copied once, straight into the ring, and may be read-only.

        Where an env goes on from another observation than its last `next_obs`, though its episode had not ended, the
        episode counts as truncated there. With `obs` and `next_obs` as two views of one [T + 1, N, ...] array that
        comparison costs nothing.

        Args:
          obs, next_obs: obs_dtype [T, N, *obs_shape], single frames: the one acted on and the one after the step,
            before any reset.
          actions: integers [T, N]. rewards: float32 [T, N]. terminated, truncated: bool [T, N]; if both are set,
            terminated counts.
          valid: bool [T, N], False for rows that are no transitions (`Step.was_reset`); default: all True.
          first_env: given, the rows are of N of the buffer's envs only, those from this one on, as when several
            collectors play them.
        Returns: ids, int64 [T, N]; -1 where not valid.
        Raises: ValueError on a shape or dtype mismatch.
        """
        frames = self._frames("obs", obs, first_env=first_env)
        rows = frames.shape[:2]
        first_env = first_env or 0
        next_frames = self._frames("next_obs", next_obs, rows)
        if not isinstance(actions, np.ndarray) or actions.shape != rows or actions.dtype.kind not in "iu":
            raise ValueError(f"actions must be integers {list(rows)}; got {describe(actions)}")
        valid = np.ones(rows, bool) if valid is None else valid
        checked = {"rewards": (rewards, np.float32), "terminated": (terminated, np.bool_)}
        checked |= {"truncated": (truncated, np.bool_), "valid": (valid, np.bool_)}
        for name, (array, dtype) in checked.items():
            if not isinstance(array, np.ndarray) or array.shape != rows or array.dtype != dtype:
                raise ValueError(f"{name} must be {np.dtype(dtype)} {list(rows)}; got {describe(array)}")
        small = (actions.astype(np.int64, copy=False), rewards, terminated, truncated)
        actions, rewards, terminated, truncated, valid = map(np.ascontiguousarray, (*small, valid))

        ids = np.empty(rows, np.int64)
        envs = slice(first_env, first_env + rows[1])
        row = 0
        while True:
            row = self._kernels.replay_add(
                frames, actions, rewards, terminated, truncated, next_frames, valid, row, *self._ring.part(envs), ids
            )
            if row == rows[0]:
                break
            self._grow_finals()
        if rows[1] < self.num_envs:  # the kernel numbered them as if there were no other envs
            count, env = np.divmod(ids, rows[1])
            ids = np.where(valid, count * self.num_envs + first_env + env, -1)
        self._count_live()
        if self._tree is not None:
            new = ids[valid]
            self._set_priorities(new, np.full(len(new), self._max_priority))
        return ids

    def sample(self, batch_size: int, beta: float = 0.4, out: Batch | None = None) -> Batch:
        """Draw transitions with replacement and rebuild their observations and n-step returns.

        Args:
          batch_size: B.
          beta: exponent of the importance weights (len * P(i))^-beta, annealed towards 1 by the caller. Only when
            prioritized.
          out: a batch from `empty_batch` to write to and return; default: fresh arrays.
        Returns: a Batch of NumPy arrays.
        Raises: ValueError when the buffer is empty or an argument does not fit.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1; got {batch_size!r}")
        if not beta >= 0 or beta == np.inf:
            raise ValueError(f"beta must be at least 0 and finite; got {beta}")
        if not len(self):
            raise ValueError("the replay buffer is empty; add transitions before sampling")
        out = self.empty_batch(batch_size) if out is None else self._check_out(out, batch_size)
        if self._tree is None:
            self._draw_uniform(out)
        else:
            self._draw_prioritized(beta, out)
        obs, next_obs = (_as_bytes(array, 1, self.stack) for array in (out.obs, out.next_obs))
        self._kernels.replay_gather(
            out.ids, self._gammas, self.stack, self.num_threads, *self._ring,
            obs, out.actions, out.returns, out.discounts, next_obs,
        )  # fmt: skip
        return out

    def empty_batch(self, batch_size: int, pin_memory: bool = False) -> Batch:
        """Arrays of the right shapes for `sample(..., out=)`, uninitialised; pinned for copies to a GPU if asked."""
        stack = (self.stack,) if self.stack > 1 else ()

        def empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
            if not pin_memory:
                return np.empty(shape, dtype)
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)

        frames = (batch_size, *stack, *self.obs_shape)
        row = (batch_size,)
        return Batch(
            obs=empty(frames, self.obs_dtype),
            actions=empty(row, np.int64),
            returns=empty(row, np.float32),
            discounts=empty(row, np.float32),
            next_obs=empty(frames, self.obs_dtype),
            weights=empty(row, np.float32),
            ids=empty(row, np.int64),
        )

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of transitions, such as their TD errors; the sign does not count.

        Absolute values are clamped to [1e-6, 1e9]. Transitions that were overwritten since are passed over. The last of
        equal ids wins.

        Args:
          ids: int64 [K], from `sample` or `add`.
          priorities: float [K], finite.
        Raises: ValueError if the buffer is not prioritized, on a shape or dtype mismatch, a NaN or infinite priority,
          or an id that was never given out.
        """
        if self._tree is None:
            raise ValueError("update_priorities needs a buffer made with prioritized=True")
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype != np.int64:
            raise ValueError(f"ids must be int64 [K], as sample() returns them; got {describe(ids)}")
        priorities = np.asarray(priorities)
        if priorities.shape != ids.shape or priorities.dtype.kind not in "fiu":
            raise ValueError(f"priorities must be numbers {list(ids.shape)}, one per id; got {describe(priorities)}")
        if not np.isfinite(priorities).all():
            raise ValueError("priorities must be finite; got NaN or infinity (has the loss diverged?)")
        if len(ids) and (ids.min() < 0 or (ids // self.num_envs >= self._ring.counts[ids % self.num_envs]).any()):
            raise ValueError("ids must come from sample() or add() of this buffer; got one that it never gave out")
        magnitudes = np.clip(np.abs(priorities.astype(np.float64)), MIN_PRIORITY, MAX_PRIORITY)
        if len(ids):
            self._max_priority = max(self._max_priority, float(magnitudes.max()))
        self._set_priorities(np.ascontiguousarray(ids), magnitudes)

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on exactly, as tensors and primitives.

        Only slots in use are included. With `copy=False` the tensors share the buffer's memory, so that saving a large
        buffer takes no second copy: save before the next `add`.
        """

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.copy() if copy else array)

        ring = self._ring
        used = [slice(base, base + n) for base, n in zip(ring.bases[:-1], self._used(), strict=True)]
        state = {
            "config": self._config(),
            **{name: [tensor(getattr(ring, name)[part]) for part in used] for name in _PER_SLOT},
            **{name: tensor(getattr(ring, name)) for name in ("counts", "running", "pending", "finals", "free_finals")},
            "num_free": int(ring.num_free[0]),
            "max_priority": self._max_priority,
            "rng": self._rng.bit_generator.state,
        }
        if self._tree is not None:
            state["priorities"] = tensor(self._tree.sums[: self.capacity])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of a buffer with the same arguments returned.

        Kernels, seed and threads may differ. Raises: ValueError if the buffers differ otherwise, naming where, or if
        the state is damaged; the buffer is then unchanged.
        """
        ring, tree = self._checked(state)
        max_priority, rng = float(state["max_priority"]), np.random.default_rng()
        rng.bit_generator.state = state["rng"]
        for slot_array, parts in ((getattr(self._ring, name), ring[name]) for name in _PER_SLOT):
            for base, part in zip(self._ring.bases[:-1], parts, strict=True):
                slot_array[base : base + len(part)] = part
        for name in ("counts", "running", "pending"):
            getattr(self._ring, name)[...] = ring[name]
        num_free = np.array([state["num_free"]], np.int64)
        self._ring = self._ring._replace(
            finals=ring["finals"].copy(), free_finals=ring["free_finals"].copy(), num_free=num_free
        )
        self._count_live()
        if self._tree is not None:
            self._tree = _empty_tree(self.capacity, self.weight_maximum)
            self._fill_tree(tree)
        self._max_priority, self._rng = max_priority, rng

    # ---- drawing

    def _draw_uniform(self, out: Batch) -> None:
        uniforms = self._rng.random(len(out.ids))
        self._kernels.replay_draw(self._live_ends, self._ring.counts, uniforms, out.ids)
        out.weights.fill(1)

    def _draw_prioritized(self, beta: float, out: Batch) -> None:
        leaves = np.empty(len(out.ids))
        uniforms = self._rng.random(len(out.ids))
        self._kernels.tree_sample(uniforms, self._leaf_bases, self._ring.counts, *self._tree, out.ids, leaves)
        # (len * P)^-beta over the greatest such weight: len and the total cancel.
        least = leaves.min() if self.weight_maximum == "batch" else self._tree.mins[-1]
        np.power(least / leaves, beta, out=out.weights, casting="same_kind")

    def _set_priorities(self, ids: np.ndarray, magnitudes: np.ndarray) -> None:
        self._kernels.tree_update(ids, magnitudes**self.alpha, self._leaf_bases, self._ring.counts, *self._tree)

    # ---- storage

    def _grow_finals(self) -> None:
        """Half as many final observations more, and at least as many as one row may need."""
        ring, old = self._ring, len(self._ring.finals)
        new = old + max(2 * self.num_envs, old // 2)
        finals = np.empty((new, ring.finals.shape[1]), np.uint8)
        finals[:old] = ring.finals
        num_free = int(ring.num_free[0])
        free = np.empty(new, np.int32)
        free[:num_free] = ring.free_finals[:num_free]
        free[num_free : num_free + new - old] = np.arange(new - 1, old - 1, -1)
        ring.num_free[0] += new - old
        self._ring = ring._replace(finals=finals, free_finals=free)

    def _projected_bytes(self, frame_bytes: int) -> int:
        slots = self.capacity + self.num_envs * (self.stack - 1)
        tree = (2 if self.weight_maximum == "buffer" else 1) * 8 * self.capacity * 8 // 7 if self.prioritized else 0
        return slots * (frame_bytes + 17) + (1 + _FIRST_FINALS_PER_ENV) * self.num_envs * frame_bytes + tree

    def _count_live(self) -> None:
        """Where the live transitions of each env end, were all of them in one row."""
        self._live_ends = np.cumsum(np.minimum(self._ring.counts, self._lengths))

    def _used(self) -> np.ndarray:
        return np.minimum(self._ring.counts, np.diff(self._ring.bases))

    def _frames(
        self, name: str, frames: np.ndarray, rows: tuple[int, ...] | None = None, first_env: int | None = None
    ) -> np.ndarray:
        """`frames` as bytes [T, N, frame_bytes], without a copy if each [T, N] row is contiguous."""
        expected = (*(rows or ("T", self.num_envs)), *self.obs_shape)
        given = frames.shape if isinstance(frames, np.ndarray) else ()
        if first_env is not None and len(given) > 1:
            if not (0 <= first_env <= self.num_envs - given[1] and given[1]):
                raise ValueError(f"first_env is {first_env} with {given[1]} envs; the buffer has {self.num_envs}")
            expected = ("T", given[1], *self.obs_shape)
        fits = len(given) == len(expected) and given[1:] == expected[1:] and (rows is None or given[:2] == rows)
        if not fits or frames.dtype != self.obs_dtype:
            shape = ", ".join(map(str, expected))
            raise ValueError(f"{name} must be {self.obs_dtype} [{shape}], single frames; got {describe(frames)}")
        return _as_bytes(np.ascontiguousarray(frames), 2)

    def _check_out(self, out: Batch, batch_size: int) -> Batch:
        stack = (self.stack,) if self.stack > 1 else ()
        frames = (self.obs_dtype, (batch_size, *stack, *self.obs_shape))
        int_, float_ = ((np.dtype(dtype), (batch_size,)) for dtype in (np.int64, np.float32))
        expected = Batch(frames, int_, float_, float_, frames, float_, int_)
        for name, array, (dtype, shape) in zip(Batch._fields, out, expected, strict=True):
            fits = isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape
            if not fits or not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError(
                    f"out.{name} must be a writable contiguous {dtype} {list(shape)}, as empty_batch() makes it; "
                    f"got {describe(array)}"
                )
        return out

    # ---- state

    def _config(self) -> dict[str, Any]:
        names = ("capacity", "num_envs", "stack", "n_step", "gamma", "prioritized", "alpha", "weight_maximum")
        config = {name: getattr(self, name) for name in names}
        return config | {"obs_shape": list(self.obs_shape), "obs_dtype": self.obs_dtype.str}

    def _checked(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
        """The arrays of a state, checked so that no kernel can leave its memory."""
        mine, theirs = self._config(), state.get("config", {})
        differing = [
            f"{name} {theirs.get(name)!r} (here {value!r})" for name, value in mine.items() if theirs.get(name) != value
        ]
        if differing:
            raise ValueError(f"the replay state is of a buffer with another {', '.join(differing)}")
        ring = {name: state[name].numpy() for name in ("counts", "running", "pending", "finals", "free_finals")}
        num_envs, frame_bytes = self.num_envs, self._ring.frames.shape[1]
        _expect("counts", ring["counts"], np.int64, (num_envs,))
        _expect("running", ring["running"], np.bool_, (num_envs,))
        _expect("pending", ring["pending"], np.uint8, (num_envs, frame_bytes))
        num_finals = len(ring["finals"])
        _expect("finals", ring["finals"], np.uint8, (num_finals, frame_bytes))
        _expect("free_finals", ring["free_finals"], np.int32, (num_finals,))
        used = np.minimum(ring["counts"], np.diff(self._ring.bases))
        if used.min() < 0 or not 0 <= state["num_free"] <= num_finals:
            raise ValueError("the replay state is damaged: counts or num_free out of range")
        for name in _PER_SLOT:
            like = getattr(self._ring, name)
            parts = [part.numpy() for part in state[name]]
            if len(parts) != num_envs:
                raise ValueError(f"the replay state is damaged: {name} holds {len(parts)} envs, expected {num_envs}")
            for part, length in zip(parts, used, strict=True):
                _expect(name, part, like.dtype, (int(length), *like.shape[1:]))
            ring[name] = parts
        free = ring["free_finals"][: state["num_free"]]
        kept = [index[(flags & 4) != 0] for index, flags in zip(ring["final_index"], ring["flags"], strict=True)]
        indices = np.concatenate([free, *kept])
        if len(indices) != num_finals or not np.array_equal(np.sort(indices), np.arange(num_finals)):
            raise ValueError("the replay state is damaged: final observations do not match the ends of the episodes")
        if self._tree is None:
            return ring, None
        priorities = state["priorities"].numpy()
        _expect("priorities", priorities, np.float64, (self.capacity,))
        if not np.isfinite(priorities).all() or priorities.min() < 0:
            raise ValueError("the replay state is damaged: priorities must be finite and not negative")
        return ring, priorities

    def _fill_tree(self, leaves: np.ndarray) -> None:
        live = [
            np.arange(max(0, count - length), count) * self.num_envs + n
            for n, (count, length) in enumerate(zip(self._ring.counts, self._lengths, strict=True))
        ]
        ids = np.concatenate(live)
        q, n = np.divmod(ids, self.num_envs)
        values = leaves[self._leaf_bases[n] + q % self._lengths[n]]
        self._kernels.tree_update(ids, values, self._leaf_bases, self._ring.counts, *self._tree)


def _empty_ring(lengths: np.ndarray, frame_bytes: int) -> _Ring:
    bases = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    num_envs, slots = len(lengths), int(bases[-1])
    num_finals = _FIRST_FINALS_PER_ENV * num_envs
    return _Ring(
        bases=bases,
        counts=np.zeros(num_envs, np.int64),
        running=np.zeros(num_envs, bool),
        frames=np.empty((slots, frame_bytes), np.uint8),
        actions=np.empty(slots, np.int64),
        rewards=np.empty(slots, np.float32),
        flags=np.zeros(slots, np.uint8),
        final_index=np.full(slots, -1, np.int32),
        pending=np.zeros((num_envs, frame_bytes), np.uint8),
        finals=np.zeros((num_finals, frame_bytes), np.uint8),
        free_finals=np.arange(num_finals, dtype=np.int32)[::-1].copy(),
        num_free=np.array([num_finals], np.int64),
    )


def _empty_tree(capacity: int, weight_maximum: str) -> _SumTree:
    """Levels from the leaves to the root, each padded to whole groups of children; the minima only where used."""
    sizes = [-(-capacity // _FAN_OUT) * _FAN_OUT]
    while sizes[-1] > _FAN_OUT:
        sizes.append(-(-sizes[-1] // _FAN_OUT**2) * _FAN_OUT)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    nodes = int(offsets[-1]) + 1
    mins = np.full(nodes if weight_maximum == "buffer" else 0, np.inf)
    return _SumTree(offsets, _aligned_zeros(nodes), mins)


def _aligned_zeros(count: int) -> np.ndarray:
    """float64 zeros that begin at a cache line, so that the eight children of a node lie in one."""
    doubles = np.zeros(count + 7)
    skip = -doubles.ctypes.data % 64 // 8
    return doubles[skip : skip + count]


def _as_bytes(array: np.ndarray, leading: int, parts: int = 0) -> np.ndarray:
    """A view of the bytes: the leading axes, then `parts` if given, then the rest in one axis."""
    shape = (*array.shape[:leading], *((parts,) if parts else ()))
    if 0 in shape:
        width = int(np.prod(array.shape[leading:])) * array.itemsize // max(1, parts)
        return np.empty((*shape, width), np.uint8)
    return array.reshape(*shape, -1).view(np.uint8)


def _check_memory(projected: int, capacity: int, frame_bytes: int) -> None:
    free = psutil.virtual_memory().available
    if projected > free:
        raise ValueError(
            f"capacity {capacity:,} of {frame_bytes:,}-byte frames needs {projected / 1e9:.2f} GB, but "
            f"{free / 1e9:.2f} GB are free; a capacity of {int(capacity * 0.8 * free / projected):,} would fit"
        )


def _expect(name: str, array: np.ndarray, dtype: np.dtype | type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        want = f"{np.dtype(dtype)} {list(shape)}"
        raise ValueError(f"the replay state is damaged: {name} must be {want}, got {describe(array)}")
