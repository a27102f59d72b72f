"""Schedules of scalars over a run."""

from __future__ import annotations


def linear(start: float, end: float, fraction: float) -> float:
    """Straight line from `start` (fraction <= 0) to `end` (fraction >= 1)."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


def passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]; never for 0."""
    return every > 0 and now // every > before // every
