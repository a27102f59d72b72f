from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastrl import checkpoint
from fastrl.envs import EnvConfig, VecEnv, make_envs
from fastrl.evaluate import evaluate, film, load_policy, main, policy_act, report, whole_games
from fastrl.networks import make_network
from fastrl.runtime import RunFailed, run_cli
from fastrl.types import Episode, Step

REPOSITORY = Path(__file__).parent.parent


class CountingEnvs(VecEnv):
    """Env i plays episodes of `lengths[i]` steps, for ever, reward 1 each; NEXT_STEP autoreset. Obs: its step."""

    obs_shape, obs_dtype, num_actions = (1,), np.dtype(np.float32), 2

    def __init__(self, lengths: list[int]) -> None:
        self.num_envs = len(lengths)
        self.lengths = np.array(lengths)
        self.at = np.zeros(self.num_envs, np.int64)
        self.resets = 0
        self.actions: list[np.ndarray] = []

    def reset(self) -> np.ndarray:
        self.resets += 1
        self.at[:] = 0
        return self._obs()

    def step(self, actions: np.ndarray) -> Step:
        self.actions.append(actions)
        was_reset = self.at == self.lengths
        self.at = np.where(was_reset, 0, self.at + 1)
        done = self.at == self.lengths
        rewards = np.where(was_reset, 0, 1).astype(np.float32)
        never = np.zeros(self.num_envs, bool)
        return Step(self._obs(), rewards, rewards, done, never, was_reset, np.zeros(self.num_envs, np.int32))

    def render(self, env: int) -> np.ndarray:
        return np.full((34, 46, 3), 10 * self.at[env], np.uint8)

    def close(self) -> None:
        pass

    def _obs(self) -> np.ndarray:
        return self.at[:, None].astype(np.float32)


def _act(obs: np.ndarray) -> np.ndarray:
    return np.zeros(len(obs), np.int64)


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_evaluate_plays_exactly_the_episodes_asked_for_each_from_its_start(num_envs: int) -> None:
    envs = CountingEnvs([3, 5, 4][:num_envs])
    for call in range(1, 4):  # nothing is left over from the evaluation before
        envs.step(_act(envs._obs()))
        episodes = evaluate(_act, envs, 7, max_steps=100)
        assert envs.resets == call
        assert len(episodes) == 7
        for episode in episodes:
            assert episode.return_ == episode.length == envs.lengths[episode.env]
        played = np.bincount([episode.env for episode in episodes], minlength=num_envs)
        assert played.max() - played.min() <= 1


def test_evaluate_does_not_prefer_short_episodes() -> None:
    episodes = evaluate(_act, CountingEnvs([2, 50]), 4, max_steps=200)
    assert sorted(episode.length for episode in episodes) == [2, 2, 50, 50]


def test_evaluate_with_fewer_episodes_than_envs() -> None:
    assert [episode.env for episode in evaluate(_act, CountingEnvs([9, 3, 2]), 2, max_steps=50)] == [1, 0]


def test_evaluate_stops_at_max_steps_and_says_what_is_missing() -> None:
    envs = CountingEnvs([3, 1000])
    with pytest.warns(UserWarning, match="only 1 of 2 episodes ended within 20 steps"):
        episodes = evaluate(_act, envs, 2, max_steps=20)
    assert len(envs.actions) == 20
    assert len(episodes) == 1
    assert "only 1 of 2" in report(episodes, 2)


class FixedPolicy(nn.Module):
    """The same probabilities for every observation; dropout, which in training mode would spoil them."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())
        self.dropout = nn.Dropout(0.9)

    def readout(self) -> None:
        return None

    def forward(self, obs: torch.Tensor, readout: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.dropout(self.logits.expand(len(obs), -1) + 1) - 1, obs.sum(1)


def test_policy_act_samples_with_the_policys_probabilities() -> None:
    network, obs = FixedPolicy([0.5, 0.3, 0.2]).train(), np.zeros((20_000, 1), np.float32)
    actions = policy_act(network, "cpu", greedy=False, seed=1)(obs)
    assert actions.shape == (20_000,)
    assert actions.dtype == np.int64
    np.testing.assert_allclose(np.bincount(actions) / 20_000, [0.5, 0.3, 0.2], atol=0.02)
    assert network.training  # left as it was
    assert (policy_act(network, "cpu", greedy=True, seed=1)(obs) == 0).all()


def test_policy_act_is_seeded_and_leaves_the_global_generator_alone() -> None:
    network, obs = FixedPolicy([0.5, 0.5]), np.zeros((64, 1), np.float32)
    before = torch.get_rng_state()
    first, second, other = (policy_act(network, "cpu", greedy=False, seed=seed)(obs) for seed in (1, 1, 2))
    assert (first == second).all()
    assert (first != other).any()
    assert torch.equal(torch.get_rng_state(), before)


def test_policy_act_stops_at_nan() -> None:
    act = policy_act(FixedPolicy([0.5, float("nan")]), "cpu", greedy=True, seed=1)
    with pytest.raises(RunFailed, match="not finite"):
        act(np.zeros((1, 1), np.float32))


def test_whole_games_turns_off_what_shortens_games_or_changes_rewards() -> None:
    trained = EnvConfig(env_id="ALE/Breakout-v5", env_setting="baselines").resolved()
    played = whole_games(trained)
    assert (played.episodic_life, played.clip_rewards) == (False, False)
    assert (played.noop_max, played.sticky, played.fire_reset, played.frame_skip) == (30, 0.0, True, 4)
    on_screen = whole_games(trained, "gymnasium")
    assert (on_screen.backend, on_screen.max_pool) == ("gymnasium", True)
    silent = EnvConfig(env_id="CartPole-v1", backend="gymnasium", time_limit="silent", autoreset="same_step").resolved()
    assert (whole_games(silent).time_limit, whole_games(silent).autoreset) == ("truncate", "next_step")


def _frames(path: Path) -> list[np.ndarray]:
    import imageio.v2 as imageio

    with imageio.get_reader(path) as reader:
        return [frame for frame in reader]  # not list(): it would ask for the length, which is infinite


@pytest.mark.parametrize("kind", ["mp4", "gif"])
def test_film_has_a_file_per_episode_and_a_frame_per_state(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("imageio_ffmpeg" if kind == "mp4" else "imageio")
    episodes = film(_act, CountingEnvs([6]), 3, 100, tmp_path, "step_5", kind, fps=15)
    assert [episode.length for episode in episodes] == [6, 6, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_5_episode_{n}.{kind}" for n in (1, 2, 3)]
    for path in tmp_path.iterdir():
        frames = _frames(path)
        assert len(frames) == 7
        assert frames[0].shape == (34, 46, 3)  # not stretched
        levels = [float(frame.mean()) for frame in frames]
        np.testing.assert_allclose(levels, [0, 10, 20, 30, 40, 50, 60], atol=4)


def test_film_that_is_stopped_loses_none_that_finished(tmp_path: Path) -> None:
    pytest.importorskip("imageio")
    envs, steps = CountingEnvs([6]), iter(range(8))

    def stopping(obs: np.ndarray) -> np.ndarray:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return _act(obs)

    with pytest.raises(KeyboardInterrupt):
        film(stopping, envs, 3, 100, tmp_path, "step_5", "gif", fps=15)
    assert [path.name for path in tmp_path.iterdir()] == ["step_5_episode_1.gif"]
    assert len(_frames(tmp_path / "step_5_episode_1.gif")) == 7


def _save_policy(run_dir: Path, env_id: str = "CartPole-v1", **network_options: object) -> Path:
    """A run folder with the checkpoint of an untrained policy."""
    config = EnvConfig(env_id=env_id, backend="gymnasium").resolved()
    envs = make_envs(config, 1, 0)
    name = "mlp" if len(envs.obs_shape) == 1 else "nature-cnn"
    network = dict(name=name, obs_shape=envs.obs_shape, num_actions=envs.num_actions, **network_options)
    envs.close()
    model = make_network(**network).state_dict()
    state = {"env": asdict(config), "network": network, "model": model, "global_step": 123}
    return checkpoint.save_run(run_dir, 123, state)


def test_load_policy_restores_every_parameter(tmp_path: Path) -> None:
    path = _save_policy(tmp_path, hidden_size=16)
    network, config, state = load_policy(path, torch.device("cpu"))
    assert config.env_id == "CartPole-v1"
    assert not network.training
    assert all(torch.equal(value, state["model"][name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("fault", ["no network", "missing weight", "another weight"])
def test_load_policy_never_makes_up_what_is_missing(tmp_path: Path, fault: str) -> None:
    path = _save_policy(tmp_path, hidden_size=16)
    state = checkpoint.load(path)
    name = next(iter(state["model"]))
    if fault == "no network":
        del state["network"]
    elif fault == "missing weight":
        del state["model"][name]
    else:
        state["model"]["another.weight"] = torch.zeros(1)
    checkpoint.save(path, state)
    with pytest.raises(ValueError, match="lacks 'network'" if fault == "no network" else "do not fit"):
        load_policy(path, torch.device("cpu"))


def _command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "fastrl.evaluate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)


def test_command_reports_whole_games_and_repeats_with_the_same_seed(tmp_path: Path) -> None:
    _save_policy(tmp_path, hidden_size=16)
    first, second = (
        _command(tmp_path, "--episodes", 5, "--num-envs", 2, "--seed", 7, "-o", tmp_path / n) for n in "ab"
    )
    assert first.returncode == 0, first.stderr
    results = [json.loads((tmp_path / n / "step_123_sampled_seed_7.json").read_text()) for n in "ab"]
    assert results[0]["returns"] == results[1]["returns"]
    returns = results[0]["returns"]
    assert len(returns) == 5
    assert results[0]["mean"] == np.mean(returns)
    assert f"mean {np.mean(returns):.2f}   std {np.std(returns):.2f}   min {min(returns):g}   max {max(returns):g}" in (
        first.stdout
    )
    assert second.stdout.splitlines()[:-1] == first.stdout.splitlines()[:-1]


def test_command_films_atari_in_colour(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    _save_policy(tmp_path, "ALE/Freeway-v5")
    done = _command(tmp_path, "--episodes", 1, "--video", "--max-steps", 40, "--device", "cpu")
    assert done.returncode == 1  # a game of Freeway lasts longer, and that is said
    assert "only 0 of 1 episodes" in done.stdout
    frames = _frames(tmp_path / "evaluations" / "step_123_sampled_seed_1000_episode_1.mp4")
    assert len(frames) == 41
    assert frames[0].shape == (210, 160, 3)
    assert np.ptp(frames[0].astype(int), axis=2).max() > 50  # colours, not grey
    assert len({frame.tobytes() for frame in frames}) > 1


def test_a_run_of_ppo_can_be_evaluated_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastrl import plot
    from fastrl.ppo import PpoConfig, train

    threads = torch.get_num_threads()
    sizes = dict(num_envs=4, num_steps=16, minibatch_size=32, total_timesteps=128, hidden_size=16)
    run = train(PpoConfig(env_id="CartPole-v1", run_dir=str(tmp_path / "run"), compile=False, quiet=True, **sizes))
    monkeypatch.setattr(sys, "argv", ["evaluate", str(run), "--episodes", "3"])
    assert run_cli(main) == 0
    torch.set_num_threads(threads)  # the command sets its own; later tests want theirs
    assert "step_128.pt (step 128), sampled actions" in capsys.readouterr().out
    curve = plot.read_run(run)
    assert curve.env_id == "CartPole-v1"
    assert len(curve.returns) > 0
    assert (run / "learning_curve.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "neither a run folder nor a checkpoint"),
        (["RUN", "--episodes", "0"], "episodes must be at least 1"),
        (["RUN", "--video", "--num-envs", "2"], "--video films one game"),
        (["RUN/checkpoints/cut.pt"], "damaged"),
    ],
)
def test_command_on_a_users_mistake_is_one_line_and_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = _save_policy(tmp_path, hidden_size=16)
    (path.parent / "cut.pt").write_bytes(path.read_bytes()[:1000])
    arguments = [argument.replace("RUN", str(tmp_path)) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    assert run_cli(main) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not (tmp_path / "evaluations").exists()


def test_video_without_the_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastrl.evaluate import check_film

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    pytest.importorskip("imageio")
    check_film("gif")
    with pytest.raises(ValueError, match=r'pip install "fastrl\[video\]"'):
        check_film("mp4")


def test_report_is_a_table() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = report([Episode(-20.0, 900, 0), Episode(-21.0, 800, 1)], 2).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["episode", "return", "length"],
        ["1", "-20", "900"],
        ["2", "-21", "800"],
    ]
    assert lines[3] == "mean -20.50   std 0.50   min -21   max -20   mean length 850.0"
