"""From a preset, a TOML file and flags to one frozen dataclass, and from that to the `config.toml` of a run.

A file is nothing but flags written down: its keys are turned into flags and put before the user's own, so the command
line wins, and one parser (tyro) checks names, types and choices of both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import re
import secrets
import time
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fastrl.runtime import atomic_file

ConfigT = TypeVar("ConfigT")
PLACES = ("config", "resume", "run_dir")


def parse(cls: type[ConfigT], algo: str, argv: Sequence[str]) -> ConfigT:
    """Reads the configuration of one run.

    In rising priority: the defaults of `cls`; `--preset NAME`; `--config FILE`; the config.toml of `--resume RUN`; the
    other flags.

    Raises: ValueError with one line for what the user got wrong; SystemExit(0) after `--help`.
    """
    sources = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--config", "--resume"):
        sources.add_argument(flag, nargs="?")
    given, _ = sources.parse_known_args(argv)
    settings = read_toml(Path(given.config)) if given.config else {}
    flags: list[str] = []
    if preset := given.preset or settings.get("preset"):
        flags += as_flags(cls, read_preset(algo, preset))
    flags += as_flags(cls, settings)
    if given.resume:
        flags += as_flags(cls, read_toml(run_dir_of(given.resume) / "config.toml"))
    return _parse_flags(cls, f"python -m fastrl.{algo}", [*flags, *argv])


def run_dir_of(path: str | Path) -> Path:
    """The run directory that a run or one of its checkpoints belongs to."""
    path = Path(path)
    if path.is_file() or path.suffix == ".pt":
        path = path.parent
    return path.parent if path.name == "checkpoints" else path


def preset_names(algo: str) -> list[str]:
    """Names that `--preset` takes for `algo` ("ppo", "dqn")."""
    files = resources.files("fastrl") / "presets"
    return sorted(
        f.name.removeprefix(f"{algo}-").removesuffix(".toml") for f in files.iterdir() if f.name.startswith(f"{algo}-")
    )


def read_preset(algo: str, name: str) -> dict[str, Any]:
    """The settings of `fastrl/presets/<algo>-<name>.toml`."""
    if name not in preset_names(algo):
        raise ValueError(f"--preset: got {name!r}, expected one of: {', '.join(preset_names(algo))}")
    return tomllib.loads((resources.files("fastrl") / "presets" / f"{algo}-{name}.toml").read_text())


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises: ValueError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read the settings in {path}: {reason}") from None


def as_flags(cls: type, settings: dict[str, Any]) -> list[str]:
    """{"num_envs": 8, "compile": False} -> ["--num-envs", "8", "--no-compile"].

    A field of type `bool | None` has three states and so takes a word: ["--fire-reset", "False"].
    """
    types = get_type_hints(cls)
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool) and types.get(name) is bool:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def as_dict(config: Any) -> dict[str, Any]:
    """The settings that make a run what it is: all that are not None, without where it is read from and written to."""
    return {
        name: value for name, value in dataclasses.asdict(config).items() if value is not None and name not in PLACES
    }


def open_run_dir(config: Any, algo: str) -> Path:
    """Creates the run directory of `config` with its `config.toml`, or finds the one that it resumes.

    Raises: ValueError if it holds a run already; OSError if it cannot be written.
    """
    import tomli_w

    if config.run_dir is None and config.resume:
        run_dir = run_dir_of(config.resume)
    else:
        run_dir = Path(config.run_dir or f"runs/{run_name(config, algo)}")
        if (run_dir / "config.toml").exists():
            raise ValueError(
                f"run_dir {run_dir} already holds a run: choose another, or continue it with --resume {run_dir}"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    with atomic_file(run_dir / "config.toml") as file:
        file.write(tomli_w.dumps(as_dict(config)).encode())
    return run_dir


def run_name(config: Any, algo: str) -> str:
    """<env>__<algo>__<seed>__<time>-<short id>."""
    env = config.env_id.removeprefix("ALE/").replace("/", "-")
    return f"{env}__{algo}__{config.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _parse_flags(cls: type[ConfigT], prog: str, flags: list[str]) -> ConfigT:
    import tyro

    if {"-h", "--help"} & set(flags):
        tyro.cli(cls, prog=prog, args=["--help"])
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _wide_terminal():
            return tyro.cli(cls, prog=prog, args=flags)
    except SystemExit:
        raise ValueError(f"{_one_line(errors.getvalue())} (see {prog} --help)") from None


@contextlib.contextmanager
def _wide_terminal():
    """tyro wraps its messages at the terminal's width; an error shall stay on one line."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _one_line(box: str) -> str:
    """The message in the box that tyro draws around an error, without title, frame, and the hints below the rule."""
    message = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip("│ ")
        if line.startswith(("╭", "╰")) or not text:
            continue
        if set(text) == {"─"}:
            break
        message.append(text)
    return " ".join(message)
