"""The real commands, as a user types them."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastrl import checkpoint, kernels
from fastrl.ppo import main
from fastrl.runtime import run_cli

ROOT = Path(__file__).parent.parent
SMALL = [
    "--preset",
    "cartpole",
    "--num-envs",
    "2",
    "--num-steps",
    "64",
    "--minibatch-size",
    "64",
    "--hidden-size",
    "16",
]


def command(*argv, module="fastrl.ppo"):
    return [sys.executable, "-m", module, *map(str, argv)]


def environment(tmp_path):
    return os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def start(tmp_path, *argv):
    return subprocess.Popen(
        command(*argv),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rows(run, rows, process):
    path, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < rows:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps(run):
    return [json.loads(line)["global_step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


MISTAKES = {
    "env": (["--env-id", "Pongg-v5"], "Pongg-v5.*did you mean.*Pong-v5"),
    "flag": (["--num-env", "2"], "--num-env"),
    "value": (["--gamma", "2"], "gamma is 2"),
    "network": ([*SMALL, "--network", "nature-cnn"], "nature-cnn takes images.*--network auto"),
    "device": ([*SMALL, "--device", "cuda"], "no GPU.*--device cpu"),
    "continuous": (["--env-id", "Pendulum-v1", "--backend", "gymnasium"], "Pendulum-v1"),
    "backend": (["--env-id", "CartPole-v1", "--backend", "ale"], "CartPole-v1"),
    "atari flag": ([*SMALL, "--sticky", "0.5"], "sticky"),
    "max pool": (["--max-pool", "False"], "max_pool"),
}


@pytest.mark.parametrize(("argv", "message"), MISTAKES.values(), ids=MISTAKES)
def test_command_says_a_mistake_in_one_line_and_leaves_nothing(argv, message, tmp_path, monkeypatch, capfd):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    assert run_cli(lambda: main(argv)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert re.search(message, err), err
    assert list(tmp_path.iterdir()) == []


def test_command_says_that_a_compiler_is_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert run_cli(lambda: main([*SMALL, "--compile"])) == 2
    assert "/nowhere/g++: install it, set CXX, or use --no-compile" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_command_says_that_the_native_kernels_are_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(kernels.MODULES, "native", "fastrl.not_built")
    assert run_cli(lambda: main(SMALL)) == 2
    assert "--kernels numba" in capfd.readouterr().err
    pong = ["--num-envs", "1", "--num-steps", "2", "--no-compile", "--kernels", "numba"]
    assert run_cli(lambda: main(pong)) == 2
    assert "--attention plain" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_command_says_that_wandb_is_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_cli(lambda: main([*SMALL, "--track"])) == 2
    assert "pip install" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_command_whose_reader_goes_away_trains_on(tmp_path):
    """`python -m fastrl.ppo | head -1`, a closed ssh session, ..."""
    process = start(tmp_path, *SMALL, "--total-timesteps", "20000", "--run-dir", tmp_path / "run")
    assert process.stdout.readline().startswith("PPO on CartPole-v1")
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert steps(tmp_path / "run")[-1] == checkpoint.load(checkpoint.resolve(tmp_path / "run"))["global_step"] == 20_096


def test_command_refuses_an_unwritable_run_dir(tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    assert run_cli(lambda: main([*SMALL, "--run-dir", str(tmp_path / "file" / "run")])) == 2
    assert "Not a directory" in capfd.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_command_refuses_a_damaged_checkpoint_and_names_a_good_one(tmp_path, capfd):
    run = tmp_path / "run"
    budget = ["--total-timesteps", "512", "--checkpoint-every", "128", "--quiet"]
    assert run_cli(lambda: main([*SMALL, *budget, "--run-dir", str(run)])) == 0
    newest, files = run / "checkpoints" / "step_512.pt", sorted(path.name for path in run.rglob("*"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    capfd.readouterr()
    assert run_cli(lambda: main(["--resume", str(run)])) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "step_512.pt is damaged" in err
    assert "step_384.pt instead" in err
    assert sorted(path.name for path in run.rglob("*")) == files
    # and what the message says works
    assert run_cli(lambda: main(["--resume", str(run / "checkpoints" / "step_384.pt")])) == 0
    assert steps(run) == [128, 256, 384, 512]
    assert checkpoint.load(newest)["global_step"] == 512


def test_command_mistake_exits_2_without_a_traceback(tmp_path):
    done = subprocess.run(
        command("--env-id", "Pongg-v5"),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not any(path.suffix != ".pyc" for path in tmp_path.rglob("runs*"))


def test_command_help_explains_every_flag(tmp_path):
    done = subprocess.run(
        command("--help"), cwd=tmp_path, env=environment(tmp_path) | {"COLUMNS": "120"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    for text in ("--num-envs", "--env-id", "Environments stepped together", "--kernels {native,numba,reference}"):
        assert text in done.stdout


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_command_stopped_by_a_signal_leaves_a_checkpoint_and_resumes(signum, code, tmp_path):
    run = tmp_path / "run"
    process = start(tmp_path, *SMALL, "--total-timesteps", "100000", "--run-dir", run)
    wait_for_rows(run, 3, process)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert f"--resume {run}" in output
    saved = checkpoint.load(checkpoint.resolve(run))["global_step"]
    assert saved == steps(run)[-1]
    assert (run / "learning_curve.png").stat().st_size > 10_000
    # A plain torch.load works where fastrl is not installed.
    code = "import sys, torch; sys.modules['fastrl'] = None; print(torch.load(sys.argv[1])['global_step'])"
    newest = checkpoint.resolve(run)
    assert int(subprocess.check_output([sys.executable, "-c", code, newest], cwd=tmp_path)) == saved
    assert run_cli(lambda: main(["--resume", str(run), "--total-timesteps", str(saved + 128), "--quiet"])) == 0
    assert steps(run) == list(range(128, saved + 129, 128))


def test_command_killed_at_any_moment_resumes_from_the_newest_checkpoint(tmp_path):
    """SIGKILL at random moments of a run that checkpoints after every rollout."""
    run, rng = tmp_path / "run", random.Random(0)
    reached = 0
    for attempt in range(3):
        where = ["--resume", run] if attempt else [*SMALL, "--checkpoint-every", "1", "--run-dir", run]
        process = start(tmp_path, *where, "--total-timesteps", "100000000")
        wait_for_rows(run, reached // 128 + 2, process)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.communicate()
        newest = checkpoint.load(checkpoint.resolve(run))["global_step"]
        assert newest > reached
        reached = newest
    assert run_cli(lambda: main(["--resume", str(run), "--total-timesteps", str(reached + 128), "--quiet"])) == 0
    assert steps(run) == list(range(128, reached + 129, 128))
    lines = (run / "episodes.csv").read_text().splitlines()
    assert lines.count("episode,global_step,return,length,seconds") == 1
    assert [line.split(",")[0] for line in lines[1:]] == [str(i) for i in range(1, len(lines))]


def test_command_run_directory_is_complete(tmp_path):
    run = tmp_path / "run"
    argv = [*SMALL, "--total-timesteps", "600", "--eval-every", "256", "--eval-episodes", "2", "--run-dir", run]
    done = subprocess.run(
        command(*argv), cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert "600" in done.stdout
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.toml", "metrics.jsonl", "episodes.csv", "evaluations.csv", "checkpoints", "learning_curve.png",
        "log.txt",
    }  # fmt: skip
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {"latest", "best", "step_640.pt"} <= {path.name for path in (run / "checkpoints").iterdir()}
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(last) >= {
        "global_step", "iteration", "optimizer_steps", "learning_rate", "sps", "episodic_return", "episodic_length",
        "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance", "masked_fraction",
        "seconds_env", "seconds_inference", "seconds_update",
    }  # fmt: skip
    played = subprocess.run(
        command(run, "--episodes", "3", module="fastrl.evaluate"), cwd=tmp_path, env=environment(tmp_path),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "mean" in played.stdout
    subprocess.run(
        command(run, "-o", tmp_path / "curve.png", module="fastrl.plot"),
        cwd=tmp_path,
        env=environment(tmp_path),
        check=True,
    )
    assert (tmp_path / "curve.png").stat().st_size > 10_000
