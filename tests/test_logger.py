from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastrl.logger import EPISODE_COLUMNS, EVALUATION_COLUMNS, RunLogger, _duration
from fastrl.types import Episode


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What a reader of the TensorBoard files sees: tag -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _iterate(logger: RunLogger, iterations: range, episodes_each: int = 2) -> None:
    for iteration in iterations:
        step = 100 * iteration
        for i in range(episodes_each):
            logger.episode(Episode(float(iteration), 10 + i, env=i), step - 50 + i)
        logger.iteration({"global_step": step, "iteration": iteration, "sps": 50.0, "policy_loss": 0.5}, {"env": 0.25})


def test_every_finished_episode_is_one_row(tmp_path: Path) -> None:
    with RunLogger(tmp_path, total_timesteps=300, quiet=True) as logger:
        _iterate(logger, range(1, 4))
    rows = _rows(tmp_path / "episodes.csv")
    assert tuple(rows[0]) == EPISODE_COLUMNS
    assert [(r["episode"], r["global_step"], r["return"], r["length"]) for r in rows] == [
        ("1", "50", "1", "10"), ("2", "51", "1", "11"), ("3", "150", "2", "10"),
        ("4", "151", "2", "11"), ("5", "250", "3", "10"), ("6", "251", "3", "11"),
    ]  # fmt: skip
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)


def test_metrics_hold_numbers_only_and_the_mean_of_recent_episodes(tmp_path: Path) -> None:
    with RunLogger(tmp_path, total_timesteps=10, quiet=True) as logger:
        logger.iteration({"global_step": 1, "approx_kl": float("nan"), "entropy": float("inf")}, {})
        for i in range(150):
            logger.episode(Episode(float(i), i, 0), 2)
        metrics = {"global_step": np.int64(2), "value_loss": torch.tensor(0.5), "entropy": np.float32(0.25)}
        logger.iteration(metrics, {"env": 1.5})
        assert logger.recent_return == 99.5  # the last 100: 50 .. 149
    first, second = _lines(tmp_path / "metrics.jsonl")
    assert first == {"global_step": 1}
    assert second == {
        "global_step": 2, "value_loss": 0.5, "entropy": 0.25, "episodic_return": 99.5, "episodic_length": 99.5,
        "seconds_env": 1.5,
    }  # fmt: skip


def test_tensorboard_uses_the_tags_that_cleanrl_users_know(tmp_path: Path) -> None:
    with RunLogger(tmp_path, total_timesteps=10, quiet=True) as logger:
        logger.episode(Episode(3.0, 7, 0), 90)
        keys = ("sps", "learning_rate", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
        logger.iteration({"global_step": 100, **dict.fromkeys(keys, 0.5), "explained_variance": 0.25}, {"env": 2.0})
        logger.evaluation(100, [Episode(1.0, 4, 0), Episode(3.0, 6, 0)])
    scalars = _scalars(tmp_path)
    assert scalars["charts/episodic_return"] == [(100, 3.0)]
    assert scalars["losses/explained_variance"] == [(100, 0.25)]
    assert scalars["time/env"] == [(100, 2.0)]
    assert scalars["eval/episodic_return"] == [(100, 2.0)]
    assert {f"charts/{name}" for name in ("SPS", "learning_rate", "episodic_length")} <= set(scalars)
    losses = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    assert {f"losses/{name}" for name in losses} <= set(scalars)


def test_evaluations_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogger(tmp_path, total_timesteps=10) as logger:
        logger.evaluation(1000, [Episode(-20.0, 10, 0), Episode(-21.0, 20, 0)])
        logger.evaluation(2000, [])
    assert (
        tmp_path / "evaluations.csv"
    ).read_text() == f"{','.join(EVALUATION_COLUMNS)}\n1000,2,-20.5,0.5,-21,-20,15\n"
    out = capsys.readouterr().out
    assert "evaluation at step 1,000: mean return -20.5" in out
    assert "no episode finished" in out


KILLED_RUN = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_logger import _iterate
from fastrl.logger import RunLogger
from fastrl.types import Episode
logger = RunLogger(sys.argv[1], total_timesteps=2000, quiet=True)
_iterate(logger, range(1, 8))
logger.evaluation(500, [Episode(1.0, 1, 0)])
logger.evaluation(700, [Episode(2.0, 1, 0)])
os.kill(os.getpid(), 9)
"""


def test_after_a_kill_at_iteration_7_a_resume_from_5_continues_every_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_RUN, tmp_path, Path(__file__).parent], stderr=subprocess.PIPE)
    assert done.returncode == -9, done.stderr
    # nothing written before the kill is lost
    assert [line["iteration"] for line in _lines(tmp_path / "metrics.jsonl")] == list(range(1, 8))
    assert len(_rows(tmp_path / "episodes.csv")) == 14
    for name in ("metrics.jsonl", "episodes.csv", "evaluations.csv"):  # the kill may tear the last line
        with (tmp_path / name).open("a") as file:
            file.write('{"global_step": 4' if name == "metrics.jsonl" else "15,4")
    (events,) = tmp_path.glob("events*")
    os.truncate(events, events.stat().st_size - 3)

    state = {"recent": [(float(i), 10) for i in range(1, 6) for _ in range(2)], "num_episodes": 10, "seconds": 1000.0}
    for resumed in (500, 900):  # resumed twice, the second time where the first came to its end
        with RunLogger(tmp_path, total_timesteps=2000, resumed_step=resumed, quiet=True) as logger:
            logger.load_state_dict(state)
            _iterate(logger, range(resumed // 100 + 1, resumed // 100 + 5))
            logger.evaluation(resumed + 200, [Episode(3.0, 1, 0)])
            state = logger.state_dict()

    steps = [line["global_step"] for line in _lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(100, 1400, 100))
    episodes = (tmp_path / "episodes.csv").read_text().splitlines()
    assert [line.count(",") for line in episodes] == [len(EPISODE_COLUMNS) - 1] * 27
    assert sum(line.startswith("episode") for line in episodes) == 1
    assert [int(row["episode"]) for row in _rows(tmp_path / "episodes.csv")] == list(range(1, 27))
    assert float(_rows(tmp_path / "episodes.csv")[10]["seconds"]) >= 1000
    assert [row["global_step"] for row in _rows(tmp_path / "evaluations.csv")] == ["500", "700", "1100"]
    for tag, points in _scalars(tmp_path).items():
        steps = [step for step, _ in points]
        assert steps == ([500, 700, 1100] if tag.startswith("eval/") else list(range(100, 1400, 100))), tag


def test_resume_into_a_new_folder_writes_headers(tmp_path: Path) -> None:
    with RunLogger(tmp_path, total_timesteps=1000, resumed_step=500, quiet=True) as logger:
        _iterate(logger, range(6, 7))
    assert [line["global_step"] for line in _lines(tmp_path / "metrics.jsonl")] == [600]
    assert len(_rows(tmp_path / "episodes.csv")) == 2


def test_new_run_refuses_a_folder_that_holds_one(tmp_path: Path) -> None:
    RunLogger(tmp_path, total_timesteps=10, quiet=True).close()
    with pytest.raises(ValueError, match=r"already holds metrics\.jsonl"):
        RunLogger(tmp_path, total_timesteps=10, quiet=True)


def test_plain_output_has_the_first_and_the_last_line_and_few_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLogger(tmp_path, total_timesteps=2000) as logger:
        logger.info("PPO on ALE/Pong-v5 [bold]")
        _iterate(logger, range(1, 11))
        logger.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PPO on ALE/Pong-v5 [bold]"
    assert [line.split(" (")[0].split() for line in lines[1:]] == [
        ["step", "100", "of", "2,000"],
        ["step", "1,000", "of", "2,000"],
    ]
    last = lines[-1]
    assert all(part in last for part in ("50.0%", "5.50 (mean of the last 20 of 20", "50 steps/s", "left", "env 0.2 s"))
    assert (tmp_path / "log.txt").read_text().endswith("  PPO on ALE/Pong-v5 [bold]\n")


def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogger(tmp_path, total_timesteps=2000, quiet=True) as logger:
        logger.info("hello")
        _iterate(logger, range(1, 3))
    assert capsys.readouterr() == ("", "")
    assert "hello" in (tmp_path / "log.txt").read_text()


def test_terminal_shows_live_progress(tmp_path: Path) -> None:
    """On a real pseudo-terminal: the block is drawn, messages stand above it, the cursor comes back."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_logger import _iterate, RunLogger\n"
        "with RunLogger(sys.argv[1], total_timesteps=2000) as logger:\n"
        "  logger.info('hello'); logger.progress(50); _iterate(logger, range(1, 3))\n"
    )
    output = _run_on_a_terminal([sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)])
    assert "hello" in output
    for part in (
        "200 of 2,000 steps",
        "10.0%",
        "1.50 (mean of the last 4 of 4 episodes)",
        "50 steps/s",
        "time left",
        "env",
    ):
        assert part in output
    assert output.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def _run_on_a_terminal(command: list[str]) -> str:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    output = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        output += part
    os.close(master)
    assert process.wait() == 0, output.decode()
    return output.decode()


def test_tracking_without_wandb_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'pip install "fastrl\[wandb\]"'):
        RunLogger(tmp_path, total_timesteps=10, wandb={"project": "fastrl"})
    assert list(tmp_path.iterdir()) == []


def test_tracking_sends_the_same_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fake = SimpleNamespace(
        init=lambda **kwargs: calls.append(kwargs), log=calls.append, finish=lambda: calls.append("finish")
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with RunLogger(tmp_path, total_timesteps=10, quiet=True, wandb={"project": "fastrl"}) as logger:
        logger.iteration({"global_step": 100, "policy_loss": 0.5}, {})
    assert calls == [
        {"dir": str(tmp_path), "project": "fastrl"},
        {"losses/policy_loss": 0.5, "global_step": 100},
        "finish",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (3725, "1 h 02 min"), (90_000, "1 d 1 h"), (1e12, "unknown time")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_logger_resume_drops_rows_that_it_cannot_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"global_step": 1}\n\nnot json\n[1, 2]\n{"a": 1}\n\xff\xfe\n{"global_step": 2}\n'
    )
    (tmp_path / "episodes.csv").write_text(
        "episode,global_step,return,length,seconds\na,b,c,d,e\n1,1,2,3,0.5\n2,2.5,1,1,1\n"
    )
    (tmp_path / "events.out.tfevents.junk").touch()
    with RunLogger(tmp_path, total_timesteps=9, resumed_step=2, quiet=True) as logger:
        logger.iteration({"global_step": 3}, {})
    steps = [json.loads(line)["global_step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert (tmp_path / "episodes.csv").read_text().splitlines()[1:] == ["1,1,2,3,0.5"]


def test_logger_refuses_a_run_that_another_logger_writes(tmp_path):
    with (
        RunLogger(tmp_path, total_timesteps=9, quiet=True),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        RunLogger(tmp_path, total_timesteps=9, resumed_step=0, quiet=True)
