"""Learning curves: `python -m fastrl.plot RUN... [-o FILE]` draws episode returns against steps or wall-clock time.

Works without a display, on a run that is still going or was killed, and on one that has no finished episode.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from fastrl.config import parse, read_toml
from fastrl.logger import EPISODE_COLUMNS, EVALUATION_COLUMNS
from fastrl.runtime import atomic_file, run_cli, user_errors

# Colour-blind safe (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Settings that do not make two runs different experiments: their runs are drawn as one curve with a band.
NOT_COMPARED = frozenset(
    (
        "seed run_dir resume config total_timesteps device threads torch_threads compile kernels quiet track "
        "eval_every eval_episodes eval_greedy checkpoint_every keep_checkpoints"
    ).split()
)
NAMED_FIRST = ("preset", "network")
"""Settings that name a curve before others do."""
RAW_POINTS = 20_000
"""Single episodes drawn per run at most, evenly thinned; the mean uses all of them."""


@dataclass(frozen=True)
class PlotConfig:
    """Draw the learning curves of runs. Runs that differ only in their seed share one curve, with a band."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...")]
    """Run folders."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Picture to write: .png, .svg or .pdf (RUN/learning_curve.png of one run, ./learning_curves.png of several)."""
    x: Literal["steps", "time"] = "steps"
    """Horizontal axis: agent steps, or wall-clock time."""
    window: int = 200
    """Episodes in the rolling mean."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("name at least one run folder, such as runs/NAME")


@dataclass(frozen=True)
class Curve:
    """What a run wrote down. Arrays of E episodes and V evaluations, float64."""

    run_dir: Path
    config: dict[str, Any]
    steps: np.ndarray
    """[E] global step at which each episode ended."""
    seconds: np.ndarray
    """[E] wall-clock seconds since the run began."""
    returns: np.ndarray
    """[E]"""
    evaluations: np.ndarray
    """[V, 3]: global step, mean, standard deviation."""

    @property
    def env_id(self) -> str:
        return self.config.get("env_id", "unknown environment")


def learning_curve(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    x: Literal["steps", "time"] = "steps",
    window: int = 200,
) -> Path:
    """Draw the episode returns of runs with their rolling mean. One panel per environment.

    Runs whose settings differ only in the seed form a group: its line is the mean over runs, its band their minimum and
    maximum, over the span that all of them cover. A run alone shows its single episodes too.

    Args:
      run_dirs: folders with config.toml, episodes.csv and, if there, evaluations.csv.
      out: picture file; by default learning_curve.png in the one run, or ./learning_curves.png.
      x: "steps" for agent steps, "time" for wall-clock time.
      window: episodes in the rolling mean; at the start it is over as many as there are.

    Returns: the path written.
    Raises: ValueError on a folder that is no run, a window below 1 or a picture format that cannot be drawn.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 episode, got {window}")
    if x not in ("steps", "time"):
        raise ValueError(f"x must be steps or time, got {x!r}")
    curves = [read_run(Path(run_dir)) for run_dir in run_dirs]
    if out is None:
        out = curves[0].run_dir / "learning_curve.png" if len(curves) == 1 else Path("learning_curves.png")
    return _draw(curves, Path(out), x, window)


def read_run(run_dir: Path) -> Curve:
    """Read a run's settings and episodes. A row that a kill cut short is left out."""
    if not (run_dir / "config.toml").is_file():
        raise ValueError(f"{run_dir} is not a run folder: it has no config.toml")
    episodes = _read_csv(run_dir / "episodes.csv", EPISODE_COLUMNS)
    evaluations = _read_csv(run_dir / "evaluations.csv", EVALUATION_COLUMNS)
    _, steps, returns, _, seconds = episodes.T
    return Curve(run_dir, read_toml(run_dir / "config.toml"), steps, seconds, returns, evaluations[:, (0, 2, 3)])


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each place, of all so far where there are fewer. float64 [E] -> [E]."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main() -> int:
    with user_errors():
        config = parse(PlotConfig, "plot", sys.argv[1:])
        print(learning_curve(config.runs, config.out, x=config.x, window=config.window))
    return 0


def _read_csv(path: Path, columns: Sequence[str]) -> np.ndarray:
    """The complete rows of a CSV file of numbers: float64 [rows, columns]; no rows if there is no file."""
    if not path.exists():
        return np.empty((0, len(columns)))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and lines[0].rstrip("\n") != ",".join(columns):
        raise ValueError(f"{path} has the columns {lines[0].strip()!r}, expected {','.join(columns)}")
    rows = [line for line in lines[1:] if line.endswith("\n")]
    return np.loadtxt(rows, delimiter=",", ndmin=2) if rows else np.empty((0, len(columns)))


def _group(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Curves of one environment by label: together where only the seed and the like differ."""
    groups: dict[tuple, list[Curve]] = {}
    for curve in curves:
        # With an annealed learning rate another budget is another experiment.
        ignored = NOT_COMPARED - {"total_timesteps"} if curve.config.get("anneal_lr") else NOT_COMPARED
        compared = {name: str(value) for name, value in curve.config.items() if name not in ignored}
        groups.setdefault(tuple(sorted(compared.items())), []).append(curve)
    return dict(zip(_labels([dict(key) for key in groups]), groups.values(), strict=True))


def _labels(settings: Sequence[dict[str, str]]) -> list[str]:
    """Names for groups by the settings that tell them apart, as few as do; empty for a group alone."""
    named: list[str] = []
    for name in sorted(set().union(*settings), key=lambda name: (name not in NAMED_FIRST, name)):
        if len(_values(settings, [*named, name])) > len(_values(settings, named)):
            named.append(name)
    return [", ".join(f"{name} {group.get(name, 'unset')}" for name in named) for group in settings]


def _values(settings: Sequence[dict[str, str]], names: Sequence[str]) -> set[tuple]:
    return {tuple(group.get(name) for name in names) for group in settings}


def _draw(curves: Sequence[Curve], out: Path, x: str, window: int) -> Path:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display and keep global state

    panels: dict[str, list[Curve]] = {}
    for curve in curves:
        panels.setdefault(curve.env_id, []).append(curve)
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8 * columns, 4.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, (env_id, members) in zip(axes, panels.items(), strict=False):
        _draw_panel(ax, env_id, members, x, window)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    kind = out.suffix.removeprefix(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{out} must end in .png, .svg or .pdf")
    with atomic_file(out) as file:
        figure.savefig(file, format=kind, dpi=120)
    return out


def _draw_panel(ax: Any, env_id: str, curves: Sequence[Curve], x: str, window: int) -> None:
    groups = _group(curves)
    unit, unit_seconds = _time_unit(curves)
    for colour, (label, members) in zip(_cycle(COLOURS), groups.items(), strict=False):
        played = [curve for curve in members if len(curve.returns)]
        places = [curve.steps if x == "steps" else curve.seconds / unit_seconds for curve in played]
        if len(played) == 1:
            _draw_one(ax, places[0], played[0], colour, label, window, alone=len(groups) == 1)
        elif played:
            _draw_band(ax, places, played, colour, label, window)
        for curve, place in zip(played, places, strict=True):
            _draw_evaluations(ax, curve, place, colour, x)
    _dress(ax, env_id, curves, f"wall-clock time ({unit})" if x == "time" else "agent steps", x)
    if not any(len(curve.returns) for curve in curves):
        text = "no episode has finished yet"
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="0.4", fontsize=13)


def _draw_one(ax: Any, place: np.ndarray, curve: Curve, colour: str, label: str, window: int, alone: bool) -> None:
    if alone:
        every = slice(None, None, max(1, len(place) // RAW_POINTS))
        dots = dict(s=5, color=colour, alpha=0.2, linewidths=0, rasterized=True)
        ax.scatter(place[every], curve.returns[every], label="one episode", **dots)
    mean = f"mean of the last {window} episodes"
    ax.plot(place, rolling_mean(curve.returns, window), color=colour, linewidth=2, label=label or mean)


def _draw_band(ax: Any, places: list, curves: list[Curve], colour: str, label: str, window: int) -> None:
    """The mean over runs and their extremes, on the span that all of them cover."""
    grid = np.linspace(max(place[0] for place in places), min(place[-1] for place in places), 500)
    pairs = zip(places, curves, strict=True)
    values = np.stack([np.interp(grid, place, rolling_mean(curve.returns, window)) for place, curve in pairs])
    runs = f"mean of the last {window} episodes, {len(curves)} runs" if not label else f"{label} ({len(curves)} runs)"
    ax.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    ax.plot(grid, values.mean(0), color=colour, linewidth=2, label=f"{runs}, band: min to max")


def _draw_evaluations(ax: Any, curve: Curve, place: np.ndarray, colour: str, x: str) -> None:
    steps, means, stds = curve.evaluations.T
    if len(steps):
        at = steps if x == "steps" else np.interp(steps, curve.steps, place)
        name = "evaluation (mean and std)"
        label = None if name in ax.get_legend_handles_labels()[1] else name
        style = dict(fmt="D", markersize=5, markerfacecolor="white", capsize=2, elinewidth=1, zorder=3)
        ax.errorbar(at, means, stds, color=colour, label=label, **style)


def _dress(ax: Any, env_id: str, curves: Sequence[Curve], x_label: str, x: str) -> None:
    from matplotlib.ticker import EngFormatter

    seeds = sorted({curve.config["seed"] for curve in curves if "seed" in curve.config})
    title = f"   seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}" if seeds else ""
    ax.set_title(env_id + title, loc="left")
    ax.set_xlabel(x_label)
    ax.set_ylabel("episode return (raw reward)")
    if x == "steps":
        ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[1]:
        legend = ax.legend(frameon=False, loc="best")
        for handle in legend.legend_handles:
            handle.set_alpha(1)
            if hasattr(handle, "set_sizes"):
                handle.set_sizes([20])  # a dot of the size in the plot would not be seen


def _time_unit(curves: Sequence[Curve]) -> tuple[str, float]:
    longest = max((curve.seconds[-1] for curve in curves if len(curve.seconds)), default=0.0)
    return ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 120 else ("seconds", 1.0)


def _cycle(colours: Sequence[str]) -> Any:
    while True:
        yield from colours


if __name__ == "__main__":
    sys.exit(run_cli(main))
