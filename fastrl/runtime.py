"""What a run needs from the machine: cores, device, seeds, signals, exit codes, atomic files, provenance."""

from __future__ import annotations

import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

import fastrl

# Processes that only step envs live without PyTorch, which takes several times their memory: imported where used.
if TYPE_CHECKING:
    import torch


class UsageError(ValueError):
    """The user asked for what cannot be done; the message is one line that says what to change. Exit code 2."""


class RunFailed(RuntimeError):
    """The run cannot go on (NaN in the loss, say); the message names the step and the term. Exit code 1."""


# ---- exit codes


def run_cli(main: Callable[[], int | None]) -> int:
    """Run a command and turn what it raises into an exit code: `sys.exit(run_cli(main))`.

    0 done, or what `main` returns; 2 after a `UsageError` (one line on stderr); 1 after `RunFailed` (one line) or any
    other exception (its traceback: it is a fault of ours or of the machine); 130 after KeyboardInterrupt.
    """
    try:
        return main() or 0
    except UsageError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"run failed: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:  # the one place that answers for every fault: it still shows where
        traceback.print_exc()
        print(f"run failed: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1


@contextmanager
def user_errors() -> Iterator[None]:
    """Mark the part of a command that checks what the user gave: ValueError and OSError in it become `UsageError`.

    A ValueError after this part is a fault of the program and keeps its traceback.
    """
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UsageError(f"{where}{error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def python_command(*words: object) -> str:
    """`python -m WORDS` with this interpreter, for people to copy."""
    python = os.path.relpath(sys.executable)
    return shlex.join([python if not python.startswith("..") else sys.executable, "-m", *map(str, words)])


# ---- signals


class StopSignal:
    """Turns SIGINT and SIGTERM into a flag that the loop reads, so that it can finish its step and write a checkpoint.

    The first signal sets `received`. The same one again, a second or more later, does what it would have done without
    us: the process stops at once. (A repeat within the second is taken for the same wish: `timeout` and `torchrun`
    signal a process both directly and through its group.) Outside the main thread, where Python allows no handlers,
    this does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    REPEAT_S = 1.0

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at: dict[int, float] = {}
        self._old: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._old = {signum: signal.signal(signum, self._handle) for signum in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            # None: a handler that C code installed, which Python cannot put back
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._old = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count; 0 when none came."""
        return 0 if self.received is None else 128 + self.received

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = int(signum)
        first = self._received_at.setdefault(signum, time.monotonic())
        if time.monotonic() - first >= self.REPEAT_S:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(signum)


# ---- the machine


def available_cores() -> int:
    """CPU cores that this process may use: its affinity mask, cut by the cgroup's CPU quota (v2 or v1); at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _cgroup_cpus(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The smallest CPU quota (in cores) on the way from this process's control group to the root; None if unlimited."""
    quotas = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # inside a container the path may name what only the host can see; the root is then our own group
        base = root if not controllers else root / "cpu"
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                quotas.append(_quota(folder))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    if limit := _read(folder / "cpu.max").split():  # v2: "max 100000" or "200000 100000"
        return None if limit[0] == "max" else int(limit[0]) / int(limit[1])
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")  # v1: -1 is unlimited
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def resolve_device(name: str) -> torch.device:
    """The torch device for `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:INDEX`.

    Raises: ValueError if the name is not one of these, or the GPU is not there.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if (kind, index) != ("cpu", "") and (kind != "cuda" or not (index.isdecimal() or name == "cuda")):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:INDEX, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this PyTorch ({torch.__version__}) sees no GPU; use --device cpu or auto")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: there are only {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return torch.device(name)


def check_compiler(device: torch.device) -> None:
    """Raises ValueError where torch.compile would find no C++ compiler for this device."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"torch.compile on CPU needs the C++ compiler {compiler}: install it, set CXX, or use --no-compile"
        )


def configure_torch(threads: int) -> None:
    """Let PyTorch use `threads` CPU threads and flush denormal numbers (which are many times slower) to zero."""
    import torch

    # Worker threads inherit the flush mode from the thread that creates them, so it comes first.
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy (which takes 32 bits) and PyTorch, all devices."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third-party envs may draw from it
    torch.manual_seed(seed)


def derived_seed(*entropy: int) -> int:
    """One seed in [0, 2^31) from several numbers; different numbers give unrelated seeds."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


# ---- files


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all, whatever is killed when: `with atomic_file(path) as file`.

    The bytes go to `.NAME.PID.tmp` in the same folder, are forced to disk, and then take the name in one step. If the
    block raises, the file of that name stays as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk, so that a rename survives a power cut. Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- provenance


def provenance() -> list[str]:
    """What somebody needs to repeat this run: command, versions, commit and hardware, one line each."""
    import torch

    packages = ("torch", "numpy", "gymnasium", "envpool", "ale-py", "numba", "ray")
    versions = [f"{name} {version}" for name in packages if (version := _version(name))]
    commit = git_commit()
    return [
        f"command: {shlex.join(sys.orig_argv)}",
        f"fastrl {fastrl.__version__}{f' (commit {commit})' if commit else ''}, Python {platform.python_version()}",
        ", ".join(versions),
        f"{platform.system()} {platform.machine()}, {cpu_model()}, {available_cores()} of {os.cpu_count()} cores"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
    ]


def git_commit() -> str:
    """The commit of the checkout that this package runs from, `-dirty` if changed; empty if it is no checkout."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
