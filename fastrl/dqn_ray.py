"""Distributed DQN on Ray: who runs where, what they send each other, and what happens when one of them fails.

The driver (the process of the command) watches, writes and hands out evaluations; no experience passes through it.
The learner asks the collectors for chunks, at most `MAX_IN_FLIGHT` at a time from each, and sends the newest weights
along as one object in shared memory. Every wait has a timeout; every process answers pings on a thread of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from fastrl.dqn_actors import (
    Added,
    Collector,
    Evaluator,
    Layout,
    LostError,
    MakeEnvs,
    ReplayServer,
    Report,
    ServedCollector,
    Snapshot,
    Spaces,
    make_policy,
)
from fastrl.envs import EnvConfig, Episode
from fastrl.runtime import RunFailed, available_cores, derived_seed
from fastrl.types import Batch, Chunk

if TYPE_CHECKING:
    from fastrl.dqn_config import DqnConfig
    from fastrl.dqn_learner import Learner, Training

MAX_IN_FLIGHT = 2
"""Chunks that one collector has begun or finished and the learner has not taken yet."""
BATCHES_PER_CALL = 16
"""Minibatches that a replay actor sends at once; the next ones are asked for while these are learned from."""
MAX_PENDING_EVALUATIONS = 32
"""Training waits while more snapshots than this wait to be judged."""
ADVANCE_S, PING_S, STATE_S = 0.5, 0.5, 2.0
"""How long the learner works before it reports; between pings; between copies of its state, to restart it from."""
START_S = 180.0
"""How long a process may take to start."""
RETRY_S = 0.3
"""Before a collector whose chunk was lost is asked again."""
MIN_STORE_BYTES = 256_000_000
"""Of shared memory: room for weights, snapshots and copies of the learner's state."""
CALL_S = 60.0
"""How long an answer may take that nobody else watches over."""

_FOLDER = "fastrl-ray-"


# ---- one process


class Ping(NamedTuple):
    pid: int
    host: str
    device: str
    rss_bytes: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} ({self.device})"


class _Role:
    """A process of Ray that holds one part of the work and answers pings, whatever the part is doing."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._part = make(*args)

    def begin(self, make: Callable[..., Any], *args: Any) -> None:
        """Make of the part what needs to know of other processes."""
        self._part = make(self._part, *args)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._part, method)(*args)

    @ray.method(concurrency_group="control")
    def ping(self) -> Ping:
        device = getattr(self._part, "device", "cpu")
        return Ping(os.getpid(), socket.gethostname(), device, psutil.Process().memory_info().rss)


Role = ray.remote(concurrency_groups={"control": 1}, max_restarts=-1, max_task_retries=0)(_Role)


def _seed(*entropy: int) -> int:
    """A seed of these numbers; another one each time a process was started anew, so that nothing is played twice."""
    restarted = ray.get_runtime_context().was_current_actor_reconstructed
    return derived_seed(*entropy, *([time.time_ns()] if restarted else []))


def _make_collector(
    env: EnvConfig, make_envs: MakeEnvs, num_envs: int, network: dict[str, Any], layout: Layout, entropy: Sequence[int]
) -> Collector:
    seed = _seed(*entropy)
    return Collector(make_envs(env, num_envs, seed), make_policy(network, layout), seed)


def _make_evaluator(env: EnvConfig, make_envs: MakeEnvs, network: dict[str, Any], layout: Layout) -> Evaluator:
    return Evaluator(env, make_envs, make_policy(network, layout))


def _make_replay_server(config: DqnConfig, spaces: Spaces, part: int, parts: int) -> ReplayServer:
    from fastrl.dqn_learner import make_replay

    return ReplayServer(make_replay(config, spaces, part, parts))


def _make_learner(config: DqnConfig, spaces: Spaces) -> Learner:
    from fastrl.dqn_learner import make_learner

    return make_learner(config, spaces)


def _make_training(
    learner: Learner, spaces: Spaces, collectors: list[ActorHandle], replay_actors: list[ActorHandle],
    state: dict[str, Any] | None, global_step: int, num_episodes: int,
) -> Training:  # fmt: skip
    from fastrl.dqn_learner import ModelServer, Training, make_replay

    config = learner.config
    if config.actions == "server":
        training = ModelServer(learner, RayExperience(config, [], RemoteReplay(replay_actors, 1)))
    else:
        replay = RemoteReplay(replay_actors) if replay_actors else LocalReplay(make_replay(config, spaces))
        training = Training(learner, RayExperience(config, collectors, replay))
    if state is not None or global_step:
        training.restore(state, global_step, num_episodes)
    return training


# ---- the learner's side


class LocalReplay(ReplayServer):
    """The replay buffer in the learner's process."""

    def take(self, chunk: ray.ObjectRef, collector: int) -> Added | None:
        return self.add(ray.get(chunk, timeout=CALL_S), collector)


class RemoteReplay:
    """The replay buffer in actors: collector i's part is in actor i % K. Minibatches come from each actor in turn."""

    def __init__(self, actors: list[ActorHandle], batches_per_call: int = BATCHES_PER_CALL) -> None:
        self._actors, self._batches_per_call = actors, batches_per_call
        self._sizes = [0] * len(actors)
        self._turn = 0
        self._asked: tuple[int, ray.ObjectRef] | None = None
        self._batches: deque[Batch] = deque()
        self._drawn_from = 0
        self._priorities: list[tuple[np.ndarray, np.ndarray]] = []

    def take(self, chunk: ray.ObjectRef, collector: int) -> Added | None:
        """Have an actor add a finished chunk, straight from its collector."""
        number, actor = divmod(collector, len(self._actors))
        added = ray.get(self._actors[actor].call.remote("add", chunk, number), timeout=CALL_S)
        if added is None:
            return None
        self._sizes[actor] = added.replay_size
        return added._replace(collector=collector, replay_size=sum(self._sizes))

    def draw(self, batch_size: int, beta: float) -> Batch | None:
        """A minibatch; None if an actor lost its part of the buffer, or does not answer."""
        if not self._batches:
            self._flush_priorities()
            self._drawn_from, batches = self._asked or self._ask(batch_size, beta)
            self._asked = None
            try:
                self._batches.extend(ray.get(batches, timeout=CALL_S))
            except Exception as error:
                if not is_loss(error):
                    raise
            if not self._batches:
                return None
            if self._batches_per_call > 1:
                self._asked = self._ask(batch_size, beta)
        return self._batches.popleft()

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Sent once for all minibatches of a call."""
        self._priorities.append((ids, priorities))

    def state_dict(self) -> Any:
        return ray.get([actor.call.remote("state_dict") for actor in self._actors], timeout=CALL_S)

    def load_state_dict(self, state: Any) -> None:
        calls = [actor.call.remote("load_state_dict", part) for actor, part in zip(self._actors, state, strict=True)]
        ray.get(calls, timeout=CALL_S)

    def _ask(self, batch_size: int, beta: float) -> tuple[int, ray.ObjectRef]:
        actor, self._turn = self._turn, (self._turn + 1) % len(self._actors)
        return actor, self._actors[actor].call.remote("sample", self._batches_per_call, batch_size, beta)

    def _flush_priorities(self) -> None:
        if self._priorities:
            ids, priorities = (np.concatenate(arrays) for arrays in zip(*self._priorities, strict=True))
            self._actors[self._drawn_from].call.remote("update_priorities", ids, priorities)
            self._priorities = []


class RayExperience:
    """Transitions from collectors in other processes; the `Experience` of `fastrl.dqn.Training`."""

    def __init__(self, config: DqnConfig, collectors: list[ActorHandle], replay: LocalReplay | RemoteReplay) -> None:
        self._collectors, self._replay = collectors, replay
        self._num_steps, self._num_envs = config.num_steps, config.num_envs
        self._chunks: dict[ray.ObjectRef, int] = {}
        self._has = [-1] * len(collectors)
        """The version of the weights that each collector was sent last."""
        self._failures: list[str] = []
        self._lost: dict[int, float] = {}
        """Collectors whose last chunk was lost, and when."""
        self._weights: ray.ObjectRef | None = None
        self._version = 0
        self.sample, self.update_priorities = replay.draw, replay.update_priorities

    @property
    def in_flight(self) -> int:
        return len(self._chunks)

    def publish(self, flat: np.ndarray, version: int) -> None:
        if self._collectors:
            self._weights = ray.put(flat)
        self._version = version

    def gather(self, epsilons: np.ndarray) -> Added | None:
        now = time.monotonic()
        for number in range(len(self._collectors)):
            busy = sum(collector == number for collector in self._chunks.values())
            if now - self._lost.get(number, -math.inf) > RETRY_S:
                for _ in range(MAX_IN_FLIGHT - busy):
                    self._ask(number, epsilons)
        if not self._chunks:
            time.sleep(RETRY_S)
            return None
        ready, _ = ray.wait(list(self._chunks), num_returns=1, timeout=1.0, fetch_local=False)
        return self._take(ready[0]) if ready else None

    def _take(self, ref: ray.ObjectRef) -> Added | None:
        number = self._chunks.pop(ref)
        try:
            added = self._replay.take(ref, number)
        except Exception as error:
            if not is_loss(error):
                raise
            if number not in self._lost:
                self._failures.append(f"a chunk of collector {number} was lost: {in_short(error)}")
            self._lost[number] = time.monotonic()
            added = None
        else:
            self._lost.pop(number, None)
        if added is None:
            self._has[number] = -1
        return added

    def failures(self) -> list[str]:
        failures, self._failures = self._failures, []
        return failures

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        return {"collector": None, "replay": self._replay.state_dict() if with_replay else None}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        if state["replay"]:
            self._replay.load_state_dict(state["replay"])
        return bool(state["replay"])

    def _ask(self, number: int, epsilons: np.ndarray) -> None:
        """Ask a collector for a chunk, and send weights along if it has older ones."""
        weights = None if self._has[number] == self._version else self._weights
        self._has[number] = self._version
        part = epsilons[number * self._num_envs : (number + 1) * self._num_envs]
        chunk = self._collectors[number].call.remote("play", weights, self._version, self._num_steps, part)
        self._chunks[chunk] = number


# ---- the prototype's pattern


class ServedPlayer:
    """A collector that asks the server for every action and sends every transition to the memory server."""

    def __init__(self, env: EnvConfig, make_envs: MakeEnvs, number: int, entropy: Sequence[int]) -> None:
        self._envs, self._number = make_envs(env, 1, _seed(*entropy)), number

    def play_episode(self, server: ActorHandle, memory: ActorHandle) -> int:
        """One game, and the call that learns from it. Returns its length."""
        pushed: list[ray.ObjectRef] = []

        def act(obs: np.ndarray) -> np.ndarray:
            return ray.get(server.call.remote("act", obs), timeout=CALL_S)

        def push(chunk: Chunk) -> None:
            pushed[:] = [memory.call.remote("add", chunk, 0)]  # in order, so the last stands for all

        chunk = ServedCollector(self._envs, act, push).collect(0, np.zeros(1))
        size = ray.get(pushed[0], timeout=CALL_S).replay_size
        length = len(chunk.actions)
        [(row, episode)] = chunk.episodes
        added = Added(self._number, length, length, [(row + 1, episode)], 0, size)
        ray.get(server.call.remote("learn", added), timeout=CALL_S)
        return length


class ServedPolicy:
    """Action values from the server, under weights that it holds for one evaluator."""

    def __init__(self, server: ActorHandle, name: str) -> None:
        self._server, self._name = server, name

    def load(self, flat: np.ndarray) -> None:
        ray.get(self._server.call.remote("hold", self._name, flat), timeout=CALL_S)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        return ray.get(self._server.call.remote("judge", self._name, obs), timeout=CALL_S)


def _make_served_evaluator(
    _: Evaluator, env: EnvConfig, make_envs: MakeEnvs, server: ActorHandle, name: str
) -> Evaluator:
    return Evaluator(env, make_envs, ServedPolicy(server, name))


# ---- the driver's side


@dataclass
class _Member:
    """What the driver knows of a process."""

    name: str
    handle: ActorHandle
    begin: Callable[[], tuple[Any, ...]] | None = None
    """The arguments of `_Role.begin`, for a process that has just started."""
    place: Ping | None = None
    """Where it is; None while it starts."""
    seen: float = field(default_factory=time.monotonic)
    """When it last answered, or began to start."""
    ping: ray.ObjectRef | None = None
    pinged: float = -math.inf


class RayCrew:
    """Learner, collectors, evaluators and replay actors in processes of their own; the driver supervises.

    A process that dies is started anew by Ray, one that does not answer is killed first. A new learner continues from
    the last copy of its state.
    """

    def __init__(self, config: DqnConfig, make_envs: MakeEnvs, spaces: Spaces, saved: dict[str, Any] | None):
        from fastrl.dqn_learner import pending_of, training_state

        self._config = config
        self.pending: deque[Snapshot] = deque(pending_of(saved) if saved else [])
        self._judged: dict[int, list[Episode]] = {}
        self._jobs: dict[ray.ObjectRef, tuple[_Member, Snapshot]] = {}
        self._advances: deque[ray.ObjectRef] = deque()
        self._games: dict[ray.ObjectRef, _Member] = {}
        self._begun: dict[ray.ObjectRef, _Member] = {}
        self._notes: list[str] = []
        self._details: list[str] = []
        self._metrics: dict[str, float] = {}
        self._failed_at: deque[float] = deque()
        self._watched = time.monotonic()
        self._state: Any = training_state(saved) if saved else None
        self._state_ref: ray.ObjectRef | None = None
        self._state_at = self._advanced_at = -math.inf
        self._step, self._episodes, self._done = 0, 0, False
        if saved:
            self._step, self._episodes = saved["global_step"], saved["training"]["num_episodes"]
        self._cluster = Cluster(config, spaces)
        try:
            self._start(make_envs, spaces)
        except BaseException:
            self._cluster.close()
            raise

    def _start(self, make_envs: MakeEnvs, spaces: Spaces) -> None:
        from fastrl.dqn_learner import layout_for, network_arguments

        config = self._config
        network, layout = network_arguments(config, spaces), layout_for(config, spaces)
        served = config.actions == "server"
        parts = 1 if served else config.replay_actors
        start = self._cluster.start

        def entropy(number: int) -> tuple[int, ...]:
            return config.seed, self._step, number

        replay = [start(_make_replay_server, config, spaces, i, parts) for i in range(parts)]
        learner = start(_make_learner, config, spaces, num_gpus=self._cluster.learner_gpus)
        if served:
            players = [start(ServedPlayer, config.env, make_envs, i, entropy(i)) for i in range(config.num_collectors)]
        else:
            players = [
                start(_make_collector, config.env, make_envs, config.num_envs, network, layout, entropy(i))
                for i in range(config.num_collectors)
            ]
        evaluators = [
            start(_make_evaluator, config.env, make_envs, network, layout) for _ in range(config.num_evaluators)
        ]

        self._learner = _Member("server" if served else "learner", learner)
        self._learner.begin = lambda: (_make_training, spaces, players, replay, self._state, self._step, self._episodes)
        self._replay = [_Member("memory" if served else f"replay {i}", handle) for i, handle in enumerate(replay)]
        self._collectors = [_Member(f"collector {i}", handle) for i, handle in enumerate(players)]
        self._evaluators = [_Member(f"evaluator {i}", handle) for i, handle in enumerate(evaluators)]
        if served:
            for member in self._evaluators:
                member.begin = partial(
                    lambda name: (_make_served_evaluator, config.env, make_envs, learner, name), member.name
                )
        self._members = [self._learner, *self._replay, *self._collectors, *self._evaluators]

    # ---- what `fastrl.dqn.train` calls

    def poll(self) -> Report:
        end = time.monotonic() + ADVANCE_S
        while True:
            self._supervise()
            self._keep_busy()
            report = self._handle_events(list(self._advances)[:1])
            if report is not None or time.monotonic() > end:
                break
        report = report or Report(self._step, self._done, [], [], [], [])
        report = report._replace(notes=[*self._notes, *report.notes], details=self._details)
        self._notes, self._details = [], []
        return report

    def evaluations(self, keep_going: Callable[[], bool]) -> Iterator[tuple[Snapshot, list[Episode]]]:
        if self._done and self.pending:
            self._supervise()
            self._keep_busy()
            self._handle_events([])
        while self.pending and self.pending[0].global_step in self._judged:
            snapshot = self.pending.popleft()
            yield snapshot, self._judged.pop(snapshot.global_step)

    def state_dict(self, with_replay: bool) -> dict[str, Any]:
        """The learner's; as it was a moment ago if it fails right now."""
        while True:
            self._supervise()
            if not self._learner.place:
                time.sleep(0.05)
                continue
            ref = self._learner.handle.call.remote("state_dict", with_replay)
            while not ray.wait([ref], timeout=0.2)[0]:
                self._supervise()
            try:
                return ray.get(ref, timeout=CALL_S)
            except Exception as error:
                self._lost(self._learner, error)

    def members(self) -> dict[str, str]:
        work = {self._learner.name: self._learner_work()}
        for i, member in enumerate(self._collectors):
            speed = self._metrics.get(f"sps_collector_{i}", self._metrics.get("sps", 0.0))
            work[member.name] = f"{speed:,.0f} steps/s"
        judging = {member.name: snapshot for member, snapshot in self._jobs.values()}
        for member in self._evaluators:
            snapshot = judging.get(member.name)
            work[member.name] = f"judging step {snapshot.global_step:,}" if snapshot else "waiting for a snapshot"
        return {
            member.name: f"{work.get(member.name, 'holding transitions')}, {member.place.rss_bytes / 1e6:,.0f} MB, "
            f"{member.place}" if member.place else "starting"
            for member in self._members
        }  # fmt: skip

    def _learner_work(self) -> str:
        metrics = self._metrics
        return (
            f"{metrics.get('updates_per_s', 0):,.0f} updates/s, weights {metrics.get('weight_version', 0):,.0f} "
            f"(lag {metrics.get('weight_lag', 0):.1f})"
        )

    def close(self) -> None:
        for member in self._members:
            _kill(member)
        self._cluster.close()

    # ---- work

    def _keep_busy(self) -> None:
        """Give everyone who is there and has nothing to do something to do."""
        now = time.monotonic()
        if self._learner.place and not self._done:
            self._ask_learner(now)
        given_out = {snapshot.global_step for _, snapshot in self._jobs.values()} | self._judged.keys()
        waiting = (snapshot for snapshot in self.pending if snapshot.global_step not in given_out)
        busy = {member.name for member, _ in self._jobs.values()}
        idle = [member for member in self._evaluators if member.place and member.name not in busy]
        for member, snapshot in zip(idle, waiting, strict=False):
            ref = member.handle.call.remote("play", *self._config.evaluation_of(snapshot))
            self._jobs[ref] = member, snapshot

    def _ask_learner(self, now: float) -> None:
        if self._state_ref is None and now - self._state_at > STATE_S:
            self._state_ref, self._state_at = self._learner.handle.call.remote("state_dict", False), now
        if self._config.actions == "server":
            if not self._advances and now - self._advanced_at > ADVANCE_S:
                self._advances.append(self._learner.handle.call.remote("report"))
                self._advanced_at = now
            playing = {member.name for member in self._games.values()}
            for member in self._collectors:
                if member.place and member.name not in playing:
                    call = member.handle.call.remote("play_episode", self._learner.handle, self._replay[0].handle)
                    self._games[call] = member
        else:
            # Two, so that the learner goes on while this process writes.
            while len(self._advances) < 2 and len(self.pending) <= MAX_PENDING_EVALUATIONS:
                call = self._learner.handle.call.remote("advance", self._config.total_timesteps, ADVANCE_S)
                self._advances.append(call)

    def _handle_events(self, reports: list[ray.ObjectRef]) -> Report | None:
        """Wait for a moment for what was given out, and take what is ready. Returns the first of `reports`."""
        states = [self._state_ref] if self._state_ref is not None else []
        waiting = [*reports, *states, *self._begun, *self._jobs, *self._games]
        if not waiting:
            time.sleep(0.05)
            return None
        ready, _ = ray.wait(waiting, num_returns=1, timeout=0.1)
        more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0) if ready else ([], [])
        for ref in more:
            if ref in self._jobs:
                self._take_evaluation(ref)
            elif ref in self._games:
                self._take(ref, self._games.pop(ref))
            elif ref in self._begun:
                self._take(ref, self._begun.pop(ref))
            elif ref is self._state_ref:
                self._state_ref = None
                if self._take(ref, self._learner, fetch=False):
                    self._state = ref
            else:
                self._advances.popleft()
                report = self._take(ref, self._learner)
                if report is not None:
                    self._step, self._done = report.global_step, report.done
                    self._episodes += len(report.episodes)
                    self.pending.extend(report.snapshots)
                    self._metrics = report.rows[-1][0] if report.rows else self._metrics
                    return report
        return None

    def _take_evaluation(self, ref: ray.ObjectRef) -> None:
        member, snapshot = self._jobs.pop(ref)
        episodes = self._take(ref, member)
        if episodes is not None:
            self._judged[snapshot.global_step] = episodes

    def _take(self, ref: ray.ObjectRef, member: _Member, fetch: bool = True) -> Any:
        """What a call returned; None if it was lost. Raises RunFailed if it raised."""
        try:
            answer = ray.get(ref, timeout=CALL_S)
            return answer if fetch else True
        except Exception as error:
            self._lost(member, error)
            return None

    # ---- supervision

    def _supervise(self) -> None:
        """Ping everybody, notice who is new, gone or stuck."""
        now = time.monotonic()
        pause, self._watched = now - self._watched, now
        for member in self._members:
            if pause > 1:
                member.seen += pause  # this process was busy or stopped itself: nobody could answer
            if member.ping is None:
                if now - member.pinged > PING_S:
                    member.ping, member.pinged = member.handle.ping.remote(), now
            elif ray.wait([member.ping], timeout=0)[0]:
                self._answered(member)
            elif member.place and now - member.seen > self._config.hang_timeout_s:
                self._fail(member, f"no answer for {self._config.hang_timeout_s:g} s, killed")
            if member.place is None and now - member.seen > START_S:
                raise RunFailed(f"{member.name} did not start within {START_S:.0f} s")

    def _answered(self, member: _Member) -> None:
        ping, member.ping = member.ping, None
        try:
            place = ray.get(ping, timeout=CALL_S)
        except Exception as error:
            self._lost(member, error)
            return
        if member.place and member.place.pid != place.pid:
            self._fail(member, "its process is gone")
        if member.place is None:
            self._details.append(f"{member.name} is {place}")
            if member.begin:
                self._begun[member.handle.begin.remote(*member.begin())] = member
        member.place, member.seen = place, time.monotonic()

    def _lost(self, member: _Member, error: Exception) -> None:
        """A call came to nothing. Raises RunFailed unless the process, or one that it needed, was merely lost."""
        if not is_loss(error):
            cause = getattr(error, "cause", error)
            if isinstance(cause, RunFailed):
                raise cause
            raise RunFailed(f"{member.name}: {in_short(error)}") from error
        if isinstance(error, ActorDiedError):  # Ray does not start it anew: it failed when it was made
            raise RunFailed(f"{member.name} cannot start: {in_short(error)}") from error
        if isinstance(error, RayTaskError):
            return  # it lives; somebody whom it needed is gone
        if member.place:
            self._fail(member, in_short(error))

    def _fail(self, member: _Member, reason: str) -> None:
        """Note that a process is gone, and make sure of it; give up if there were too many."""
        now = time.monotonic()
        _kill(member)
        member.place, member.seen, member.ping = None, now, None
        self._notes.append(f"{member.name} failed: {reason}; it is started anew")
        if member is self._learner:
            self._advances.clear()
            self._state_ref = None
        self._failed_at.append(now)
        while self._failed_at[0] < now - 60:
            self._failed_at.popleft()
        if len(self._failed_at) > self._config.max_failures:
            raise RunFailed(
                f"{len(self._failed_at)} failures of processes within a minute (max_failures "
                f"{self._config.max_failures}), the last of {member.name}: {reason}"
            )


def _kill(member: _Member) -> None:
    """End a process at once, even one that is stopped; Ray notices and starts it anew."""
    if member.place and member.place.host == socket.gethostname():
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.place.pid, signal.SIGKILL)
    elif member.place:
        ray.kill(member.handle, no_restart=False)


def is_loss(error: Exception) -> bool:
    """Whether a call came to nothing because a process was lost, this one or another; not by a fault of its own."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, RayActorError | GetTimeoutError | ObjectLostError | LostError)
    return isinstance(error, RayActorError | GetTimeoutError | ObjectLostError | WorkerCrashedError)


def in_short(error: Exception) -> str:
    """The kind and the last line of an error."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayActorError):
        return "its process is gone"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1] if lines else ''}"[:300]


# ---- Ray itself


class Cluster:
    """Ray on this machine for this run alone, or a running cluster that it joins.

    Raises: ValueError if the machine or the cluster lacks what the run needs.
    """

    def __init__(self, config: DqnConfig, spaces: Spaces) -> None:
        memory = max(config.replay_actors, config.actions == "server")
        roles = 1 + config.num_collectors + config.num_evaluators + memory
        self._folder: str | None = None
        self._handles: list[ActorHandle] = []
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        sigterm = signal.getsignal(signal.SIGTERM)
        quiet = dict(log_to_driver=False, logging_level="ERROR")
        if config.ray_address:
            try:
                ray.init(address=config.ray_address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"ray_address {config.ray_address}: cannot join that cluster ({reason})") from error
        else:
            self._folder = _session_folder()
            store = _object_store_bytes(config, spaces)
            ray.init(
                address="local", num_cpus=max(roles, available_cores()), include_dashboard=False,
                object_store_memory=store, _temp_dir=self._folder, **quiet,
            )  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm)  # Ray's own would end this process without a checkpoint
        resources = ray.cluster_resources()
        if resources.get("CPU", 0) < roles:
            self.close()
            raise ValueError(
                f"the cluster has {resources.get('CPU', 0):g} CPUs, but the run needs {roles}, one per process"
            )
        wants_gpu = config.device.startswith("cuda") or (config.device == "auto" and resources.get("GPU", 0) >= 1)
        self.learner_gpus = 1 if wants_gpu else 0
        if wants_gpu and resources.get("GPU", 0) < 1:
            self.close()
            raise ValueError(f"device is {config.device}, but Ray sees no GPU: use --device cpu")

    def start(self, make: Callable[..., Any], *args: Any, num_gpus: int = 0) -> ActorHandle:
        """A process that holds what `make(*args)` returns."""
        handle = Role.options(num_cpus=1, num_gpus=num_gpus).remote(make, *args)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """End the run's processes; of a Ray of our own, all of it."""
        for handle in self._handles:
            with contextlib.suppress(Exception):  # it may be gone, and Ray with it
                ray.kill(handle)
        ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _session_folder() -> str:
    """A new folder for Ray's sockets and logs. Those of runs that were killed are removed."""
    # Sockets have paths of at most 107 bytes.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 30 else "/tmp"
    for path in Path(base).glob(f"{_FOLDER}*"):
        owner = path.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=base)


def _object_store_bytes(config: DqnConfig, spaces: Spaces) -> int:
    """Shared memory for what can be on its way at once. Raises ValueError if this machine has less."""
    frame_bytes = math.prod(spaces.frame_shape) * np.dtype(spaces.obs_dtype).itemsize
    chunk_bytes = (config.num_steps + 1) * config.num_envs * (frame_bytes + 20)
    batch_bytes = BATCHES_PER_CALL * config.batch_size * (2 * spaces.stack * frame_bytes + 32)
    replay_bytes = config.buffer_size * (frame_bytes + 17)
    needed = 2 * MAX_IN_FLIGHT * config.num_collectors * chunk_bytes + 4 * config.replay_actors * batch_bytes
    needed += 2 * replay_bytes * (config.save_replay is not False and (config.save_replay or replay_bytes < 400e6))
    needed = int(needed + MIN_STORE_BYTES)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else needed
    if free < needed:
        raise ValueError(
            f"/dev/shm has {free / 1e6:,.0f} MB free, but this run needs {needed / 1e6:,.0f} MB of shared memory: "
            "enlarge it (docker run --shm-size), or lower --num-steps or --num-envs"
        )
    return needed
