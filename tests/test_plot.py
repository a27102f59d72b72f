from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastrl import plot
from fastrl.runtime import run_cli

REPOSITORY = Path(__file__).parent.parent


def _run(
    folder: Path,
    returns: list[float],
    *,
    seed: int = 1,
    env_id: str = "ALE/Pong-v5",
    network: str = "mlp",
    evals: int = 0,
) -> Path:
    """A run folder as training leaves it: one episode every 100 steps and 0.5 s."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'env_id = "{env_id}"\nnetwork = "{network}"\nseed = {seed}\nnum_envs = 8\n')
    rows = [f"{i},{100 * i},{value},10,{0.5 * i}\n" for i, value in enumerate(returns, start=1)]
    (folder / "episodes.csv").write_text("episode,global_step,return,length,seconds\n" + "".join(rows))
    rows = [f"{100 * i},5,{i}.5,1,0,{i},10\n" for i in range(1, evals + 1)]
    (folder / "evaluations.csv").write_text("global_step,episodes,mean,std,min,max,mean_length\n" + "".join(rows))
    return folder


def _is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def _axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dirs: list[Path], **options: object) -> list:
    """The panels of the figure that `learning_curve` draws."""
    import matplotlib.figure

    figures = []
    original = matplotlib.figure.Figure.savefig

    def savefig(self: matplotlib.figure.Figure, *args: object, **kwargs: object) -> None:
        figures.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
    assert _is_png(plot.learning_curve(run_dirs, tmp_path / "out.png", **options))
    return figures[0].axes


def _labels(ax: object) -> list[str]:
    return ax.get_legend_handles_labels()[1]


def test_rolling_mean_by_hand() -> None:
    np.testing.assert_allclose(plot.rolling_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2), [1, 2, 4, 6])
    np.testing.assert_allclose(plot.rolling_mean(np.array([1.0, 3.0, 5.0]), 200), [1, 2, 3])
    assert len(plot.rolling_mean(np.array([]), 200)) == 0


def test_one_run_shows_episodes_mean_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "run", [1, 3, 5, 7], evals=2)
    (ax,) = _axes(tmp_path, monkeypatch, [run], window=2)
    assert sorted(_labels(ax)) == ["evaluation (mean and std)", "mean of the last 2 episodes", "one episode"]
    np.testing.assert_allclose(ax.collections[0].get_offsets(), [[100, 1], [200, 3], [300, 5], [400, 7]])
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[100, 1], [200, 2], [300, 4], [400, 6]])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[100, 1.5], [200, 2.5]])
    assert "ALE/Pong-v5" in ax.get_title(loc="left")
    assert ax.get_xlabel() == "agent steps"


def test_time_axis_is_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ax,) = _axes(tmp_path, monkeypatch, [_run(tmp_path / "run", [1, 3], evals=1)], x="time")
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [0.5, 1.0])
    np.testing.assert_allclose(ax.lines[1].get_xdata(), [0.5])  # the evaluation at step 100
    assert ax.get_xlabel() == "wall-clock time (seconds)"


def test_seeds_share_a_curve_with_a_band_over_their_common_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [_run(tmp_path / "a", [0, 0, 0], seed=1), _run(tmp_path / "b", [4, 4, 4, 4], seed=2)]
    (ax,) = _axes(tmp_path, monkeypatch, runs)
    x, y = ax.lines[0].get_data()
    assert (x[0], x[-1]) == (100, 300)
    np.testing.assert_allclose(y, 2.0)
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0, 4)
    assert _labels(ax) == ["mean of the last 200 episodes, 2 runs, band: min to max"]


def test_runs_with_other_settings_are_other_curves_named_by_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [_run(tmp_path / "a", [1, 2]), _run(tmp_path / "b", [3, 4], network="nature-cnn")]
    (ax,) = _axes(tmp_path, monkeypatch, runs)
    assert _labels(ax) == ["network mlp", "network nature-cnn"]
    assert ax.lines[0].get_color() != ax.lines[1].get_color()


def test_labels_name_no_more_than_tells_the_curves_apart() -> None:
    presets = [dict(preset="a", gamma="0.9", clip="1"), dict(preset="b", gamma="0.99", clip="2")]
    assert plot._labels(presets) == ["preset a", "preset b"]
    assert plot._labels([*presets, dict(preset="b", gamma="0.99")]) == [
        "preset a, clip 1", "preset b, clip 2", "preset b, clip unset",
    ]  # fmt: skip
    assert plot._labels(presets[:1]) == [""]


def test_each_environment_has_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_run(tmp_path / str(i), [1, 2], env_id=env_id) for i, env_id in enumerate(("A-v0", "B-v0", "C-v0"))]
    axes = _axes(tmp_path, monkeypatch, runs)
    assert [ax.get_title(loc="left").split()[0] for ax in axes if ax.axison] == ["A-v0", "B-v0", "C-v0"]


@pytest.mark.parametrize("missing", ["no rows", "no file", "empty file"])
def test_run_without_a_finished_episode_gives_a_picture_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    run = _run(tmp_path / "run", [], evals=0)
    if missing == "no file":
        (run / "episodes.csv").unlink()
        (run / "evaluations.csv").unlink()
    elif missing == "empty file":
        (run / "episodes.csv").write_text("")
    (ax,) = _axes(tmp_path, monkeypatch, [run])
    assert [text.get_text() for text in ax.texts] == ["no episode has finished yet"]


def test_interrupted_run_is_drawn_without_its_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "run", [1, 2])
    with (run / "episodes.csv").open("a") as file:
        file.write("3,300,12")
    (ax,) = _axes(tmp_path, monkeypatch, [run])
    assert len(ax.lines[0].get_xdata()) == 2


def test_default_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [_run(tmp_path / "a", [1]), _run(tmp_path / "b", [2])]
    assert plot.learning_curve(runs[:1]) == tmp_path / "a" / "learning_curve.png"
    assert plot.learning_curve(runs) == Path("learning_curves.png")
    assert _is_png(tmp_path / "learning_curves.png")


def test_bad_arguments_are_value_errors(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [1, 2])
    for options, message in (
        ({"window": 0}, "window"),
        ({"x": "frames"}, "x must be"),
        ({"out": run / "a.xyz"}, ".png"),
    ):
        with pytest.raises(ValueError, match=message):
            plot.learning_curve([run], **options)
    (run / "episodes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        plot.learning_curve([run])


def _command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    without_display = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "MPLBACKEND")}
    command = [sys.executable, "-m", "fastrl.plot", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=without_display | environment, check=False
    )


def test_command_draws_without_a_display(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", [1, 2], seed=1), _run(tmp_path / "b", [2, 3], seed=2)]
    done = _command(*runs, "-o", tmp_path / "curves.png", "--x", "time", "--window", "10", MPLBACKEND="TkAgg")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(tmp_path / "curves.png")
    assert _is_png(tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none is not a run folder"),
        (["RUN", "-o", "no/folder.png"], "No such file or directory"),
        (["RUN", "--window", "0"], "window must be at least 1"),
        ([], "name at least one run folder"),
    ],
)
def test_command_on_a_users_mistake_is_one_line_and_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    run = _run(tmp_path / "run", [1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot", *(str(run) if argument == "RUN" else argument for argument in arguments)])
    assert run_cli(plot.main) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
