"""From a preset, a TOML file and flags to one frozen dataclass, and from that to the `config.toml` of a run.

A file is nothing but flags written down: its keys are turned into flags and put before the user's own, so the command
line wins, and one parser (tyro) checks names, types and choices of both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fastrl.runtime import atomic_file

ConfigT = TypeVar("ConfigT")
PLACES = ("config", "resume", "run_dir")
"""Settings that say where to read and write. They are no part of what a run is, and so not in its `config.toml`."""


def parse(cls: type[ConfigT], algo: str, argv: Sequence[str]) -> ConfigT:
    """Reads the configuration of one run.

    In rising priority: the defaults of `cls`; `--preset NAME`; `--config FILE`; the other flags. With `--resume RUN`:
    the config.toml of the run; the other flags. Whole numbers may be written as 1e6.

    Raises: ValueError with one line for what the user got wrong; SystemExit(0) after `--help`.
    """
    sources = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--config", "--resume"):
        sources.add_argument(flag, nargs="?")
    given, _ = sources.parse_known_args(argv)
    flags: list[str] = []
    if given.resume:
        if given.preset or given.config:
            raise ValueError("--resume goes on with the settings of the run: leave --preset and --config out")
        run_dir = run_dir_of(given.resume)
        if not (run_dir / "config.toml").exists():
            raise ValueError(f"--resume {given.resume}: there is no run (no config.toml in {run_dir})")
        flags += read_settings(cls, run_dir / "config.toml")
    else:
        settings = read_toml(Path(given.config)) if given.config else {}
        if preset := given.preset or settings.get("preset"):
            flags += as_flags(cls, read_preset(algo, preset))
        flags += read_settings(cls, Path(given.config)) if given.config else []
    return _parse_flags(cls, f"python -m fastrl.{algo}", [*flags, *map(_whole_number, argv)])


def run_dir_of(path: str | Path) -> Path:
    """The run directory that a run or one of its checkpoints belongs to."""
    path = Path(path)
    if (path / "config.toml").exists():
        return path
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
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read the settings in {path}: {reason}") from None


def read_settings(cls: type, path: Path) -> list[str]:
    """The flags for the settings of `cls` in a TOML file. Raises: ValueError for a key that is no setting."""
    settings = read_toml(path)
    known = {field.name for field in dataclasses.fields(cls)} - set(PLACES)
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{path}: {name!r} is no setting" + (f", did you mean {close[0]!r}?" if close else ""))
    return as_flags(cls, settings)


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


def check_types(config: Any) -> None:
    """Raises ValueError unless every field holds a value of its declared type; an int passes for a float."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if get_origin(hint) is Literal:
            fits, expected = value in get_args(hint), f"one of {', '.join(map(repr, get_args(hint)))}"
        else:
            kinds = get_args(hint) or (hint,)
            kinds += (int,) if float in kinds else ()
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            expected = " or ".join("None" if kind is NoneType else kind.__name__ for kind in get_args(hint) or (hint,))
        if not fits:
            raise ValueError(f"{field.name} is {value!r} ({type(value).__name__}), expected {expected}")


def check(config: Any, names: Sequence[str], holds: Callable[[Any], bool], expected: str) -> None:
    """Raises ValueError, with name and value, for the first of these fields for which `holds` is False."""
    for name in names:
        if not holds(value := getattr(config, name)):
            raise ValueError(f"{name} is {value}, expected {expected}")


def check_places(config: Any) -> None:
    """Raises ValueError for a path that is empty; turns a Path into text."""
    for name in PLACES:
        if isinstance(path := getattr(config, name), Path):
            object.__setattr__(config, name, str(path))
        if getattr(config, name) == "":
            raise ValueError(f"{name} is empty, expected a path (is a shell variable unset?)")


def create_run_dir(config: Any, algo: str) -> Path:
    """Creates the run directory of `config`, or finds the one that it resumes.

    Raises: ValueError if it holds a run already; OSError if it cannot be created.
    """
    if config.run_dir is None and config.resume:
        return run_dir_of(config.resume)
    run_dir = Path(config.run_dir or f"runs/{run_name(config, algo)}")
    if (run_dir / "config.toml").exists():
        raise ValueError(
            f"run_dir {run_dir} holds a run already: choose another, or continue it with --resume {run_dir}"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def write(config: Any, run_dir: Path) -> None:
    """Writes `config.toml` of a run atomically."""
    import tomli_w

    with atomic_file(run_dir / "config.toml") as file:
        file.write(tomli_w.dumps(as_dict(config)).encode())


def run_name(config: Any, algo: str) -> str:
    """<env>__<algo>__<seed>__<time>-<short id>."""
    env = re.sub(r"[^A-Za-z0-9.]+", "-", config.env_id.removeprefix("ALE/"))
    return f"{env}__{algo}__{config.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _whole_number(word: str) -> str:
    """1e6 -> 1000000; any other word as it is."""
    return (
        str(int(float(word))) if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", word) and float(word).is_integer() else word
    )


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
