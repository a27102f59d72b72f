"""Checkpoints: written so that a kill at any moment leaves a complete one, readable by plain `torch.load`."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastrl import config as config_files
from fastrl.runtime import atomic_file, sync_folder

_STEP_FILE = re.compile(r"step_(\d+)\.pt")
_PRIMITIVES = (bool, int, float, str, bytes, type(None))
_WRAPPERS = ("_orig_mod.", "module.")


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` to `path` atomically: the file is either the old one or the whole new one.

    Args:
      path: file to write; its folder must exist.
      state: nested dicts, lists and tuples of tensors and primitives. Tensors are stored on the CPU, views without
        the rest of their storage, so that `torch.load(path)` works in a process without fastrl and without a GPU.

    Raises:
      ValueError if a key carries a wrapper's prefix (`_orig_mod.` of torch.compile, `module.` of data-parallel).
      TypeError if a value is neither a tensor nor a primitive.
    """
    whole = plain(state)
    with atomic_file(path) as file:
        torch.save(whole, file)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint file onto the CPU. Raises ValueError if it is missing or damaged, naming one that loads."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {path} does not exist{_another(path)}")
    try:
        return _read(path)
    except Exception as error:  # torch.load raises half a dozen kinds for a damaged file
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise ValueError(f"checkpoint {path} is damaged or not a checkpoint ({reason}){_another(path)}") from error


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether `load` can read this file."""
    try:
        _read(Path(path))
    except Exception:  # whatever torch.load finds wrong with it
        return False
    return True


def save_run(
    run_dir: str | os.PathLike[str], step: int, state: Mapping[str, Any], keep: int = 3, is_best: bool = False
) -> Path:
    """Write `checkpoints/step_<step>.pt` of a run, move its links, remove what is old.

    `checkpoints/latest` points to this file afterwards, and `checkpoints/best` too if `is_best`. The `keep` newest
    files and the targets of both links stay. Temporary files of killed saves go, and so do files of later steps: they
    belong to what a run did before it was resumed from an earlier checkpoint.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
    folder = Path(run_dir) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".*.tmp"):
        stale.unlink(missing_ok=True)
    path = folder / f"step_{step}.pt"
    save(path, state)
    _link(folder / "latest", path.name)
    if is_best:
        _link(folder / "best", path.name)
    files = _step_files(folder)
    abandoned = [file for file in files if _step(file) > step]
    linked = {os.readlink(folder / name) for name in ("latest", "best") if (folder / name).is_symlink()}
    old = [file for file in files[len(abandoned) + keep :] if file.name not in linked]
    for file in abandoned + old:
        file.unlink()
    if not (folder / "best").exists():
        (folder / "best").unlink(missing_ok=True)  # it pointed to an abandoned file
    return path


def resolve(path: str | os.PathLike[str]) -> Path:
    """The checkpoint file meant by a run folder, its `checkpoints` folder, or a file (a link included).

    In a folder it is the `step_<n>.pt` with the largest n. Every one of them is complete, because a save takes that
    name last; the links are not consulted, as a kill may fall between the save and the link.

    Raises: ValueError if nothing is there.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} is neither a run folder nor a checkpoint file{_another(path)}")
    files = _step_files(path / "checkpoints") or _step_files(path)
    if not files:
        raise ValueError(
            f"{path} holds no checkpoint (looked for checkpoints/step_<n>.pt); give a run folder such as runs/NAME"
        )
    return files[0]


def load_resumable(config: Any, algo: str, parts: set[str], may_change: set[str]) -> dict[str, Any]:
    """The checkpoint that `config.resume` names.

    Args:
      config: of the run that goes on; its class's defaults stand for settings that the checkpoint does not know.
      algo: who must have written it. parts: keys that it must have, besides. may_change: settings free to differ.
    Raises: ValueError where the run cannot go on from it with this config.
    """
    path = resolve(config.resume)
    saved = load(path)
    if saved.get("algo") != algo or not {"config", *parts} <= saved.keys():
        raise ValueError(f"checkpoint {path} is none of fastrl's {algo.upper()} runs: give a run directory")
    newest = resolve(config_files.run_dir_of(path))
    if config.run_dir is None and newest.name != path.resolve().name and is_complete(newest):
        raise ValueError(
            f"{path} is not the newest checkpoint of its run ({newest.name}): add --run-dir NEW to branch off from it"
        )
    # A setting that the checkpoint's version did not have was what is the default now.
    then, now = config_files.as_dict(type(config)()) | saved["config"], config_files.as_dict(config)
    changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key) and key not in may_change)
    if changed:
        key = changed[0]
        raise ValueError(
            f"--resume cannot change {key} from {then.get(key)} to {now.get(key)}: drop the flag, or start a new run"
        )
    return saved


@contextmanager
def fits_run() -> Iterator[None]:
    """Whatever goes wrong while a run takes over a checkpoint becomes a ValueError: it does not fit."""
    try:
        yield
    except Exception as error:  # torch, pickle and the envs each raise their own kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the checkpoint does not fit this run ({type(error).__name__}: {reason})") from error


def rng_state(numpy_generator: np.random.Generator, torch_generator: torch.Generator | None = None) -> dict[str, Any]:
    """The states of a NumPy generator, of PyTorch's global generators (each GPU's too) and of one more, if given."""
    return {
        "numpy": numpy_generator.bit_generator.state,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generator": None if torch_generator is None else torch_generator.get_state(),
    }


def restore_rng(
    state: Mapping[str, Any], numpy_generator: np.random.Generator, torch_generator: torch.Generator | None = None
) -> None:
    """Put back what `rng_state` took. GPU states are used as far as this machine has as many GPUs."""
    numpy_generator.bit_generator.state = state["numpy"]
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    if torch_generator is not None and state["generator"] is not None:
        torch_generator.set_state(state["generator"])


def plain(value: Any, where: str = "state") -> Any:
    """A copy of nested state that `torch.load` accepts by default, with its tensors on the CPU.

    Tensors there already, with a storage of their own, are not copied. `where` names the place for an error.
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()  # torch.save writes the whole storage behind a view
    if isinstance(value, Mapping):
        return {_plain_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PRIMITIVES:
        return value
    raise TypeError(f"checkpoint: {where} is a {type(value).__name__}; store tensors and primitives only")


def _plain_key(key: Any, where: str) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"checkpoint: {where} has the key {key!r} of type {type(key).__name__}; keys are str or int")
    if isinstance(key, str) and any(part in f".{key}" for part in (f".{wrapper}" for wrapper in _WRAPPERS)):
        raise ValueError(
            f"checkpoint: {where} has the key {key!r} of a wrapped module; save the state of the module inside it"
        )
    return key


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch.load itself does not check the sums
        if damaged := archive.testzip():
            raise ValueError(f"checksum of {damaged} is wrong")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}, not a dict")
    return state


def _another(path: Path) -> str:
    """The end of an error message: the newest checkpoint beside `path` that loads, if any does."""
    complete = (other for other in _step_files(path.parent) if other.name != path.name and is_complete(other))
    return f"; use {other} instead" if (other := next(complete, None)) else ""


def _step(path: Path) -> int:
    return int(_STEP_FILE.fullmatch(path.name)[1])


def _step_files(folder: Path) -> list[Path]:
    """The step files of a folder, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP_FILE.fullmatch(path.name)), key=_step, reverse=True)


def _link(link: Path, target: str) -> None:
    """Point a relative symbolic link at `target` in one step, so that it is never missing in between."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
    sync_folder(link.parent)
