from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastrl import runtime
from fastrl.runtime import RunFailed, StopSignal, UsageError, run_cli, user_errors
from fastrl.timing import PhaseTimer


def _raise(error: BaseException) -> None:
    raise error


def test_run_cli_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(lambda: None) == 0
    assert run_cli(lambda: 143) == 143
    assert capsys.readouterr().err == ""
    assert run_cli(lambda: _raise(UsageError("bad\nflag"))) == 2
    assert capsys.readouterr().err == "error: bad flag\n"
    assert run_cli(lambda: _raise(RunFailed("value_loss became nan at step 5"))) == 1
    assert capsys.readouterr().err == "run failed: value_loss became nan at step 5\n"
    assert run_cli(lambda: _raise(KeyboardInterrupt())) == 130


def test_run_cli_shows_where_a_fault_of_ours_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(lambda: _raise(ValueError("shapes differ"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("run failed: ValueError: shapes differ\n")


def test_user_errors_become_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_envs"), user_errors():
        raise ValueError("num_envs must be at least 1, got 0")
    with pytest.raises(UsageError, match="No such file"), user_errors():
        (tmp_path / "none" / "file").write_text("")
    with pytest.raises(KeyError), user_errors():
        raise KeyError("a fault of ours")


def test_stop_signal_records_the_first_signal_and_restores_handlers() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert stop.received is None
        assert stop.exit_code == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGTERM
        assert stop.exit_code == 143
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_stop_signal_takes_an_immediate_repeat_for_the_same_wish() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 130


def test_stop_signal_stops_at_the_second_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        monkeypatch.setattr(StopSignal, "REPEAT_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_stop_signal_really_ends_the_process_at_the_second_sigterm() -> None:
    code = (
        "import time; from fastrl.runtime import StopSignal\nStopSignal.REPEAT_S = 0.1\n"
        "with StopSignal() as stop:\n  print('ready', flush=True)\n"
        "  while not stop.received: time.sleep(0.01)\n  print('first', flush=True)\n  time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "first\n"
    time.sleep(0.2)
    process.terminate()
    assert process.wait(timeout=20) == -signal.SIGTERM


def test_stop_signal_in_another_thread_does_nothing() -> None:
    seen = []

    def enter() -> None:
        with StopSignal() as stop:
            seen.append(stop.exit_code)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [0]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/job/task", {"job/cpu.max": "200000 100000", "job/task/cpu.max": "max 100000", "cpu.max": ""}, 2.0),
        ("0::/seen/by/the/host", {"cpu.max": "300000 100000"}, 3.0),
        (
            "5:memory:/x\n4:cpu,cpuacct:/x",
            {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_cpu_quota_of_the_control_group(
    tmp_path: Path, membership: str, files: dict[str, str], cpus: float | None
) -> None:
    for name, text in {**{f"fs/{name}": text for name, text in files.items()}, "self": membership}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert runtime._cgroup_cpus(tmp_path / "fs", tmp_path / "self") == cpus


def test_available_cores_obeys_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for quota, cores in ((None, 8), (3.7, 3), (0.2, 1), (64.0, 8)):
        monkeypatch.setattr(runtime, "_cgroup_cpus", lambda quota=quota: quota)
        assert runtime.available_cores() == cores


def test_resolve_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.resolve_device("auto") == runtime.resolve_device("cpu") == torch.device("cpu")
    for name, message in (
        ("cuda", "no GPU"),
        ("cuda:0", "no GPU"),
        ("gpu", "must be"),
        ("cuda:x", "must be"),
        ("", "must"),
    ):
        with pytest.raises(ValueError, match=message):
            runtime.resolve_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert runtime.resolve_device("auto") == torch.device("cuda")
    assert runtime.resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="only 2 GPUs"):
        runtime.resolve_device("cuda:2")


def test_seed_everything_repeats_every_global_generator() -> None:
    def draw(seed: int) -> tuple:
        runtime.seed_everything(seed)
        return runtime.random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002

    assert draw(1) == draw(1)
    assert all(a != b for a, b in zip(draw(1), draw(2), strict=True))


def test_provenance_names_command_versions_and_hardware() -> None:
    text = "\n".join(runtime.provenance())
    assert all(part in text for part in ("command: ", "fastrl 0.", f"torch {torch.__version__}", "cores"))


def test_atomic_file_is_whole_or_absent(tmp_path: Path) -> None:
    with runtime.atomic_file(tmp_path / "a") as file:
        file.write(b"old")
        assert not (tmp_path / "a").exists()
    with pytest.raises(TypeError), runtime.atomic_file(tmp_path / "a") as file:
        file.writelines([b"new", "not bytes"])
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_phase_timer_adds_up_and_resets() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer("sleep"), timer("inner"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("error"):
        raise KeyError
    held = timer.seconds
    assert 0.04 <= held["inner"] <= held["sleep"] < 2
    assert held["error"] >= 0
    timer.reset()
    assert timer.seconds == {}
    assert set(held) == {"sleep", "inner", "error"}
