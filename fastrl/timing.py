"""Where the wall-clock time of an iteration goes, phase by phase."""

from __future__ import annotations

from time import perf_counter


class PhaseTimer:
    """Adds up the seconds spent in named phases: `with timer("env"): ...`.

    Entering and leaving a phase costs well under a microsecond. Different phases may nest (each counts its own span);
    one phase may not nest in itself. A span is host time: work queued on a GPU counts where the host waits.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phases: dict[str, _Phase] = {}

    def __call__(self, name: str) -> _Phase:
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self, name)
        return phase

    def reset(self) -> None:
        """Start a new sum; a dictionary that a caller holds keeps the old one."""
        self.seconds = {}


class _Phase:
    __slots__ = ("_name", "_start", "_timer")

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._timer, self._name, self._start = timer, name, 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = self._timer.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + perf_counter() - self._start
