from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastrl import checkpoint


def test_save_is_readable_by_plain_torch_without_fastrl(tmp_path: Path) -> None:
    path = tmp_path / "step_1.pt"
    state = {
        "model": {"weight": torch.arange(6.0).reshape(2, 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
        "best": np.float64(2.5),
        "nothing": None,
    }
    checkpoint.save(path, state)
    code = (
        "import sys, torch; state = torch.load(sys.argv[1]); assert 'fastrl' not in sys.modules;"
        "print(state['model']['weight'].sum().item(), state['optimizer']['param_groups'], type(state['best']).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "15.0 [{'lr': 0.001, 'betas': (0.9, 0.999)}] float"


def test_save_stores_a_view_without_the_storage_behind_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "view.pt", {"row": torch.zeros(1000, 1000)[0]})
    assert (tmp_path / "view.pt").stat().st_size < 20_000


@pytest.mark.parametrize("key", ["_orig_mod.policy.weight", "module.policy.weight", "body._orig_mod.weight"])
def test_save_refuses_keys_of_wrapped_modules(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="wrapped module"):
        checkpoint.save(tmp_path / "step_1.pt", {"model": {key: torch.zeros(1)}})
    assert list(tmp_path.iterdir()) == []


def test_save_accepts_names_that_only_look_like_a_wrapper(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "step_1.pt", {"model": {"submodule.weight": torch.zeros(1)}})


@pytest.mark.parametrize("value", [np.zeros(3), object(), {1, 2}, torch.float32])
def test_save_refuses_what_plain_torch_cannot_load(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        checkpoint.save(tmp_path / "step_1.pt", {"a": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step_1.pt"
    checkpoint.save(path, {"a": 1})

    def no_space(state: object, file: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(path, {"a": 2})
    assert checkpoint.load(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["step_1.pt"]


def _damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("hello")
    elif kind == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("kind", ["cut", "empty", "text", "flipped", "missing"])
def test_load_of_a_damaged_file_is_one_line_that_names_another(tmp_path: Path, kind: str) -> None:
    for step in (10, 20, 30):
        checkpoint.save(tmp_path / f"step_{step}.pt", {"weight": torch.arange(10_000.0)})
    _damage(tmp_path / "step_30.pt", kind)
    _damage(tmp_path / "step_20.pt", "cut")
    with pytest.raises(ValueError, match=r"step_30.pt .*use .*step_10.pt instead") as error:
        checkpoint.load(tmp_path / "step_30.pt")
    assert "\n" not in str(error.value)


def test_load_refuses_a_file_that_would_run_code(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / "step_1.pt")
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.load(tmp_path / "step_1.pt")


def _names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_save_run_keeps_the_newest_and_what_the_links_point_to(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step_50.pt.123.tmp").write_bytes(b"half a save")
    for step in (100, 200, 900, 1000, 1100):
        path = checkpoint.save_run(tmp_path, step, {"step": step}, keep=2, is_best=step == 200)
        assert path == tmp_path / "checkpoints" / f"step_{step}.pt"
    assert _names(tmp_path) == ["best", "latest", "step_1000.pt", "step_1100.pt", "step_200.pt"]
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step_1100.pt"  # relative: the run folder can move
    assert checkpoint.load(tmp_path / "checkpoints" / "best") == {"step": 200}


def test_save_run_after_a_resume_from_earlier_drops_what_was_abandoned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save_run(tmp_path, step, {"step": step}, keep=9, is_best=step == 4)
    checkpoint.save_run(tmp_path, 3, {"step": 3}, keep=9)
    assert _names(tmp_path) == ["latest", "step_1.pt", "step_2.pt", "step_3.pt"]
    assert checkpoint.resolve(tmp_path).name == "step_3.pt"


def test_resolve_finds_the_newest_step_by_number(tmp_path: Path) -> None:
    for step in (9, 1000, 200):
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        checkpoint.save(tmp_path / "checkpoints" / f"step_{step}.pt", {})
    newest = tmp_path / "checkpoints" / "step_1000.pt"
    (tmp_path / "checkpoints" / "latest").symlink_to("step_7.pt")  # dangling, as after a kill
    (tmp_path / "checkpoints" / ".step_2000.pt.1.tmp").write_bytes(b"half")
    assert checkpoint.resolve(tmp_path) == newest
    assert checkpoint.resolve(tmp_path / "checkpoints") == newest
    assert checkpoint.resolve(newest) == newest
    with pytest.raises(ValueError, match=r"use .*step_1000\.pt"):
        checkpoint.resolve(tmp_path / "checkpoints" / "latest")


def test_resolve_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoint.resolve(tmp_path)
    with pytest.raises(ValueError, match="neither a run folder"):
        checkpoint.resolve(tmp_path / "none")


def test_rng_states_survive_a_save(tmp_path: Path) -> None:
    numpy_generator, torch_generator = np.random.default_rng(3), torch.Generator().manual_seed(4)
    numpy_generator.integers(10, size=3, dtype=np.int32)  # leaves half a draw buffered

    def draw() -> list[float]:
        own = torch.rand(2, generator=torch_generator).tolist()
        return [*numpy_generator.integers(10**6, size=3, dtype=np.int32).tolist(), *torch.rand(2).tolist(), *own]

    checkpoint.save(tmp_path / "rng.pt", checkpoint.rng_state(numpy_generator, torch_generator))
    expected = draw()
    assert draw() != expected
    checkpoint.restore_rng(checkpoint.load(tmp_path / "rng.pt"), numpy_generator, torch_generator)
    assert draw() == expected


def _save_for_ever(run_dir: Path, first: int, started: Any) -> None:
    for step in itertools.count(first):
        weight = torch.full((400_000,), float(step))
        checkpoint.save_run(run_dir, step, {"step": step, "weight": weight}, keep=2, is_best=step % 3 == 0)
        started.set()


def test_kill_during_a_save_leaves_a_complete_newest_checkpoint(tmp_path: Path) -> None:
    """kill -9 twenty times at random moments of a process that does nothing but save."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["fastrl.checkpoint"])  # so that only the first process imports torch
    step, moments, torn = 0, random.Random(5), 0
    for _ in range(20):
        started = processes.Event()
        process = processes.Process(target=_save_for_ever, args=(tmp_path, step + 1, started))
        process.start()
        assert started.wait(60)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        torn += len(list((tmp_path / "checkpoints").glob(".*.tmp")))
        newest = checkpoint.resolve(tmp_path)
        state = checkpoint.load(newest)
        assert newest.name == f"step_{state['step']}.pt"
        assert state["step"] > step
        assert torch.equal(state["weight"], torch.full((400_000,), float(state["step"])))
        step = state["step"]
    assert torn > 0, "no kill fell into a save: the test shows nothing"
    checkpoint.save_run(tmp_path, step + 1, {}, keep=2)
    assert not list((tmp_path / "checkpoints").glob(".*"))  # what the killed saves left is gone
    assert len(list((tmp_path / "checkpoints").glob("step_*.pt"))) <= 3
