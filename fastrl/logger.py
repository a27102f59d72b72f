"""What a run tells people and writes down: terminal, log.txt, metrics.jsonl, the two CSV files, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fastrl import config as config_files
from fastrl.runtime import atomic_file
from fastrl.types import Episode

EPISODE_COLUMNS = ("episode", "global_step", "return", "length", "seconds")
EVALUATION_COLUMNS = ("global_step", "episodes", "mean", "std", "min", "max", "mean_length")

# The names under which CleanRL's users look for these in TensorBoard; any other metric becomes charts/<key>.
TAGS = {
    "sps": "charts/SPS",
    "policy_loss": "losses/policy_loss",
    "value_loss": "losses/value_loss",
    "entropy": "losses/entropy",
    "approx_kl": "losses/approx_kl",
    "clip_fraction": "losses/clipfrac",
    "explained_variance": "losses/explained_variance",
    "loss": "losses/td_loss",
    "q_mean": "losses/q_values",
}

RECENT_EPISODES = 100
PLAIN_LINE_S = 5.0
"""Without a terminal, seconds between progress lines at least."""


class RunLogger:
    """Writes the records of one run and shows its progress. Use as a context manager.

    Nothing is lost to a kill: every file is flushed in each `iteration`, `evaluation` and `info`. With `resumed_step`
    the rows after that step, and a line torn by a kill, are dropped first, so that steps strictly increase.

    Args:
      run_dir: existing folder of the run.
      total_timesteps: the budget, in steps counted as `global_step` is.
      resumed_step: the global step of the checkpoint that the run continues from; None for a new run.
      quiet: nothing on the terminal; the files are written as ever.
      wandb: keyword arguments for `wandb.init` (project, config, ...), to send the same scalars to Weights & Biases.

    Raises: ValueError if a new run's folder already holds records, another process writes to it, or wandb is asked for
      and not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        total_timesteps: int,
        resumed_step: int | None = None,
        quiet: bool = False,
        wandb: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._wandb = None if wandb is None else import_wandb()
        self._resumed_step = resumed_step
        self._open_files()
        if self._wandb:
            self._wandb.init(dir=str(self.run_dir), **wandb)
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)
        self._num_episodes = 0
        self._seconds_before = 0.0
        self._start = time.monotonic()
        self._tensorboard = None
        self._closed = False
        self._progress = _Progress(total_timesteps, resumed_step or 0, quiet)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds that the run has taken, earlier parts of a resumed run included."""
        return self._seconds_before + time.monotonic() - self._start

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 episodes; None before the first."""
        return float(np.mean([return_ for return_, _ in self._recent])) if self._recent else None

    @property
    def num_episodes(self) -> int:
        return self._num_episodes

    def info(self, text: str, *, show: bool = True) -> None:
        """A message for people: on the terminal if `show`, and in log.txt with the time."""
        if show:
            self._progress.catch_up()
            self._progress.print(text)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp}  {line}\n" for line in text.splitlines())
        self._log.flush()

    def progress(self, global_step: int) -> None:
        """Move the live display within an iteration. Cheap enough for every vector step."""
        self._progress.step = global_step

    def roles(self, lines: Mapping[str, str]) -> None:
        """What each process of a run does, for the live display: role -> one line."""
        self._progress.roles = dict(lines)

    def episode(self, episode: Episode, global_step: int) -> None:
        """Record one finished game. `global_step`: the steps taken when it ended, its last one included."""
        self._num_episodes += 1
        self._recent.append((episode.return_, episode.length))
        row = (self._num_episodes, global_step, _short(episode.return_), episode.length, f"{self.seconds:.3f}")
        self._episodes.write(",".join(map(str, row)) + "\n")

    def iteration(self, metrics: Mapping[str, float], phase_seconds: Mapping[str, float]) -> None:
        """Record one iteration and show it.

        Args:
          metrics: numbers by the keys of the run contract; `global_step` is required. One that is not finite is left
            out. The mean return and length of the last 100 episodes are added.
          phase_seconds: seconds by phase, written as `seconds_<phase>`.
        """
        row = {key: _number(value) for key, value in metrics.items()}
        if self._recent:
            row.setdefault("episodic_return", self.recent_return)
            row.setdefault("episodic_length", float(np.mean([length for _, length in self._recent])))
        row |= {f"seconds_{phase}": round(seconds, 4) for phase, seconds in phase_seconds.items()}
        row = {key: value for key, value in row.items() if math.isfinite(value)}
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        self._episodes.flush()
        self._scalars(int(row["global_step"]), {_tag(key): value for key, value in row.items() if key != "global_step"})
        self._progress.show(row, phase_seconds, self.recent_return, self._num_episodes)

    def evaluation(self, global_step: int, episodes: Sequence[Episode]) -> None:
        """Record the games of one evaluation of the policy at `global_step`, see `summary`.

        A step up to the last one recorded is passed over: a resumed run may repeat an evaluation.
        """
        if global_step <= self._evaluated_step:
            return
        self._evaluated_step = global_step
        if not episodes:
            self.info(f"evaluation at step {global_step:,}: no episode finished within the step limit")
            return
        mean, std, low, high, length = values = tuple(summary(episodes).values())
        row = (global_step, len(episodes), *map(_short, values))
        self._evaluations.write(",".join(map(str, row)) + "\n")
        self._evaluations.flush()
        self._scalars(global_step, {"eval/episodic_return": mean, "eval/episodic_length": length})
        self.info(
            f"evaluation at step {global_step:,}: mean return {mean:.1f} "
            f"(std {std:.1f}, min {low:.1f}, max {high:.1f}, {len(episodes)} episodes)"
        )

    def close(self) -> None:
        """Show the last progress line and close every file. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        for file in (self._metrics, self._episodes, self._evaluations, self._log):
            file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the last 100 returns and lengths, the number of episodes, the seconds so far."""
        return {"recent": list(self._recent), "num_episodes": self._num_episodes, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the statistics of a checkpoint."""
        self._recent.clear()
        self._recent.extend((float(return_), int(length)) for return_, length in state["recent"])
        self._num_episodes = state["num_episodes"]
        self._seconds_before = state["seconds"]
        self._start = time.monotonic()

    def _open_files(self) -> None:
        step = self._resumed_step
        names = ("metrics.jsonl", "episodes.csv", "evaluations.csv")
        if step is None and (present := [name for name in names if (self.run_dir / name).exists()]):
            raise ValueError(f"run folder {self.run_dir} already holds {present[0]}: choose another, or --resume it")
        self._log = (self.run_dir / "log.txt").open("a", encoding="utf-8", errors="backslashreplace")
        _lock(self._log, self.run_dir)
        if step is not None:
            _keep_rows(self.run_dir / "metrics.jsonl", lambda line: json.loads(line)["global_step"] <= step)
            for name, columns in (("episodes.csv", EPISODE_COLUMNS), ("evaluations.csv", EVALUATION_COLUMNS)):
                _keep_rows(self.run_dir / name, _row_test(columns, step))
        self._metrics = (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._episodes = _open_csv(self.run_dir / "episodes.csv", EPISODE_COLUMNS)
        self._evaluations = _open_csv(self.run_dir / "evaluations.csv", EVALUATION_COLUMNS)
        rows = (self.run_dir / "evaluations.csv").read_text(encoding="utf-8").splitlines()[1:]
        self._evaluated_step = int(rows[-1].split(",")[0]) if rows else -1

    def _scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send scalars by tag to TensorBoard and, if asked for, to Weights & Biases."""
        if self._tensorboard is None:
            self._tensorboard = _open_tensorboard(self.run_dir, self._resumed_step)
        for tag, value in scalars.items():
            self._tensorboard.add_scalar(tag, value, step)
        self._tensorboard.flush()
        if self._wandb:
            self._wandb.log({**scalars, "global_step": step})


def open_logger(config: Any, run_dir: Path, saved: Mapping[str, Any] | None) -> RunLogger:
    """The logger of a run by its config; continued where `saved`, the checkpoint of a resumed run, was written."""
    wandb = dict(project="fastrl", name=run_dir.name, config=config_files.as_dict(config)) if config.track else None
    resumed_step = saved["global_step"] if saved else None
    logger = RunLogger(
        run_dir, total_timesteps=config.total_timesteps, resumed_step=resumed_step, quiet=config.quiet, wandb=wandb
    )
    if saved:
        logger.load_state_dict(saved["logger"])
    return logger


class _LastingConsole(Console):
    """A console whose reader may go away (`| head`): the run goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Python writes what is left in its buffer when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Progress:
    """The display of a run: a live block on a terminal, else now and then a line."""

    def __init__(self, total: int, start: int, quiet: bool) -> None:
        self.step = start
        self.roles: dict[str, str] = {}
        self._total = total
        self._console = _LastingConsole(quiet=quiet, highlight=False, soft_wrap=True)
        self._times = deque([(time.monotonic(), start)], maxlen=20)
        self._sps = 0.0
        self._shown: dict[str, str] = {}
        self._phases: dict[str, float] = {}
        self._pending = ""
        self._line_at = -math.inf
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)
            self._live.start()

    def print(self, text: str) -> None:
        try:
            self._console.print(text, markup=False)
        except OSError:  # a full disk behind stdout: the files still tell what happened
            self._console.quiet = True

    def catch_up(self) -> None:
        """Print the progress line that is waiting, if any, so that what follows is not older than it."""
        if not self._live and self._pending:
            self._print_line(time.monotonic())

    def show(self, row: Mapping[str, float], phases: Mapping[str, float], recent: float | None, episodes: int) -> None:
        now = time.monotonic()
        self.step = int(row["global_step"])
        self._times.append((now, self.step))
        self._sps = row.get("sps", self._speed())
        self._phases = dict(phases)
        if recent is None:
            score = "none, no episode has ended yet"
        else:
            score = f"{recent:.2f} (mean of the last {min(episodes, RECENT_EPISODES)} of {episodes:,} episodes)"
        self._shown = {"return": score, "speed": f"{self._sps:,.0f} steps/s", "left": _duration(self._seconds_left())}
        self._pending = self._line()
        if not self._live and now - self._line_at >= PLAIN_LINE_S:
            self._print_line(now)

    def close(self) -> None:
        if self._live:
            self._live.stop()
        self.catch_up()

    def _print_line(self, now: float) -> None:
        self._line_at = now
        self.print(self._pending)
        self._pending = ""

    def _speed(self) -> float:
        """Steps per second over the last iterations, everything included."""
        (then, step), now = self._times[0], time.monotonic()
        return (self.step - step) / max(now - then, 1e-9)

    def _seconds_left(self) -> float:
        return max(self._total - self.step, 0) / max(self._speed(), 1e-9)

    def _share(self) -> float:
        return min(self.step / max(self._total, 1), 1.0)

    def _line(self) -> str:
        phases = "  ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._phases.items())
        parts = [
            f"step {self.step:>{len(f'{self._total:,}')},} of {self._total:,} ({self._share():.1%})",
            f"return {self._shown['return']}",
            self._shown["speed"],
            f"{self._shown['left']} left",
            *([phases] if phases else []),
        ]
        return " | ".join(parts)

    def _render(self) -> Group:
        """The live block. Rendered by Live's own thread, so it only reads."""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{self.step:,} of {self._total:,} steps", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self.step, width=30),
            Text(f"{self._share():.1%}"),
        )
        facts = Table.grid(padding=(0, 2))
        if not self._shown:
            facts.add_row(Text("first iteration under way; numbers follow when it is done", style="dim"))
        rows = (("mean return", "return"), ("speed", "speed"), ("time left", "left"))
        for name, key in rows if self._shown else ():
            facts.add_row(Text(name, style="dim"), Text(self._shown[key]))
        if self._phases:
            phases = "  ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self._phases.items())
            facts.add_row(Text("last iteration", style="dim"), Text(phases))
        for role, line in self.roles.items():
            facts.add_row(Text(role, style="dim"), Text(line))
        return Group(head, facts)


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """mean, std (the population's, ddof 0), min, max of the returns, and mean_length; of at least one episode."""
    returns = np.array([episode.return_ for episode in episodes])
    spread = {"mean": returns.mean(), "std": returns.std(), "min": returns.min(), "max": returns.max()}
    spread["mean_length"] = np.mean([episode.length for episode in episodes])
    return {name: float(value) for name, value in spread.items()}


def _tag(key: str) -> str:
    return f"time/{key.removeprefix('seconds_')}" if key.startswith("seconds_") else TAGS.get(key, f"charts/{key}")


def _number(value: Any) -> float | int:
    """A Python number from a Python, NumPy or one-element torch number."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, int) else float(value)


def _short(value: float) -> str:
    """At most 6 decimals, whole numbers without any: 21, -20.4."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _duration(seconds: float) -> str:
    """45 s, 12 min 05 s, 3 h 20 min, 2 d 4 h."""
    if seconds >= 1000 * 86_400:
        return "unknown time"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def _open_csv(path: Path, columns: Sequence[str]) -> TextIO:
    file = path.open("a", encoding="utf-8")
    if file.tell() == 0:
        file.write(",".join(columns) + "\n")
        file.flush()
    return file


def _open_tensorboard(run_dir: Path, resumed_step: int | None) -> Any:
    """A writer to a new file of events, after which readers drop older events that lie beyond `resumed_step`."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    if resumed_step is None:
        return SummaryWriter(str(run_dir))
    # Readers order the files by the second in their names: a part of the run must not share it with the part before.
    written = [path.name.split(".")[3] for path in run_dir.glob("events.out.tfevents.*")]
    if max((int(second) for second in written if second.isdecimal()), default=0) >= int(time.time()):
        time.sleep(1)
    return SummaryWriter(str(run_dir), purge_step=resumed_step + 1)


def _row_test(columns: Sequence[str], step: int) -> Callable[[str], bool]:
    """Whether a CSV line is the header, or a row of all the columns that is not after `step`."""

    def keep(line: str) -> bool:
        fields = line.rstrip("\n").split(",")
        if fields == list(columns):
            return True
        return len(fields) == len(columns) and int(fields[columns.index("global_step")]) <= step

    return keep


def _keep_rows(path: Path, keep: Callable[[str], bool]) -> None:
    """Rewrite a file of lines atomically with those that `keep` accepts.

    A last line without its end is dropped, and so is any line that `keep` can make nothing of.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file, atomic_file(path) as kept:
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if line.endswith("\n") and keep(line):
                    kept.write(line.encode())


def _lock(file: TextIO, run_dir: Path) -> None:
    """Keep other processes from writing to the run as long as `file` is open. Raises ValueError if one does."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is writing to the run {run_dir}: stop it first, or choose another") from None


def import_wandb() -> Any:
    """The package `wandb`. Raises ValueError naming the install command if it is not there."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError('tracking needs Weights & Biases: pip install "fastrl[wandb]"') from error
    return wandb
