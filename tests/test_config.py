from dataclasses import dataclass
from typing import Literal

import pytest

from fastrl import config
from fastrl.ppo import PpoConfig


def parse(*argv):
    return config.parse(PpoConfig, "ppo", argv)


def test_config_flags_win_over_file_over_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('gamma = 0.5\nnum_envs = 3\nenv_id = "Acrobot-v1"\n')
    parsed = parse("--preset", "cartpole", "--config", str(file), "--num-envs", "5")
    assert (parsed.num_envs, parsed.gamma, parsed.env_id, parsed.num_steps) == (5, 0.5, "Acrobot-v1", 128)


def test_config_file_may_name_its_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "cartpole"\ngamma = 0.5\n')
    parsed = parse("--config", str(file))
    assert (parsed.env_id, parsed.gamma) == ("CartPole-v1", 0.5)


@pytest.mark.parametrize("name", config.preset_names("ppo"))
def test_config_every_preset_is_valid_and_read_back_from_its_run(name, tmp_path):
    first = parse("--preset", name, "--run-dir", str(tmp_path / "run")).resolved()
    assert first.num_iterations >= 1
    config.write(first, config.create_run_dir(first, "ppo"))
    again = parse("--resume", str(tmp_path / "run")).resolved()
    assert config.as_dict(again) == config.as_dict(first)


def test_config_presets_of_the_issue_exist():
    assert set(config.preset_names("ppo")) >= {"default", "reference", "cleanrl-atari", "cartpole"}


BAD = {
    "unknown flag": (["--num-env", "3"], r"--num-env\b"),
    "not a number": (["--num-envs", "many"], "--num-envs.*many"),
    "no choice": (["--kernels", "cuda"], "cuda.*--kernels"),
    "zero envs": (["--num-envs", "0"], "num_envs is 0, expected at least 1"),
    "gamma": (["--gamma", "1.5"], r"gamma is 1\.5, expected between 0 and 1"),
    "nan": (["--learning-rate", "nan"], "learning_rate is nan"),
    "no preset": (["--preset", "atarii"], "atarii.*expected one of.*reference"),
    "no file": (["--config", "/nowhere.toml"], "/nowhere.toml: No such file"),
    "no run": (["--resume", "/nowhere"], "--resume /nowhere: there is no run"),
    "one step": (["--num-envs", "1", "--num-steps", "1"], "one step per rollout"),
    "env setting": (["--sticky", "2"], "sticky.*2"),
}


@pytest.mark.parametrize(("argv", "message"), BAD.values(), ids=BAD)
def test_config_refuses_in_one_line(argv, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


def test_config_refuses_broken_and_unknown_toml(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("gamma = \n")
    with pytest.raises(ValueError, match=r"bad\.toml.*line 1"):
        parse("--config", str(file))
    file.write_text("gama = 0.9\n")
    with pytest.raises(ValueError, match=r"bad\.toml: 'gama' is no setting, did you mean 'gamma'"):
        parse("--config", str(file))
    file.write_text('resume = "runs/x"\n')
    with pytest.raises(ValueError, match="'resume' is no setting"):
        parse("--config", str(file))


def test_config_resume_takes_no_preset(tmp_path):
    with pytest.raises(ValueError, match="leave --preset and --config out"):
        parse("--resume", str(tmp_path), "--preset", "cartpole")


def test_config_whole_numbers_may_be_written_with_an_exponent():
    parsed = parse("--total-timesteps", "1e6", "--num-envs", "1.6e1", "--learning-rate", "1e-3")
    assert (parsed.total_timesteps, parsed.num_envs, parsed.learning_rate) == (1_000_000, 16, 1e-3)
    with pytest.raises(ValueError, match=r"1\.55e1"):
        parse("--num-envs", "1.55e1")


TYPES = {
    "literal": (dict(norm_adv="foo"), "norm_adv is 'foo'.*'rollout'"),
    "network": (dict(network="foo"), "network is 'foo'.*'nature-cnn'"),
    "float for int": (dict(num_steps=16.5), r"num_steps is 16\.5.*expected int or None"),
    "word for float": (dict(learning_rate="3e-4"), "learning_rate is '3e-4'.*expected float"),
    "none": (dict(seed=None), "seed is None"),
    "bool for int": (dict(num_envs=True), "num_envs is True"),
    "empty path": (dict(resume=""), "resume is empty"),
}


@pytest.mark.parametrize(("changes", "message"), TYPES.values(), ids=TYPES)
def test_config_checks_types_from_python_too(changes, message):
    with pytest.raises(ValueError, match=message):
        PpoConfig(**changes)


def test_config_takes_paths(tmp_path):
    assert PpoConfig(run_dir=tmp_path).run_dir == str(tmp_path)


def test_config_from_preset():
    made = PpoConfig.from_preset("cartpole", seed=5)
    assert (made.env_id, made.seed, made.preset) == ("CartPole-v1", 5, "cartpole")


@dataclass(frozen=True, kw_only=True)
class Tiny:
    kind: Literal["a", "b"] = "a"
    limit: float | None = None
    fast: bool = True
    run_dir: str | None = None
    resume: str | None = None
    config: str | None = None
    preset: str = "default"


def test_config_flags_of_every_type():
    assert config.as_flags(Tiny, {"limit": 8, "fast": False}) == ["--limit", "8", "--no-fast"]
    assert config.as_flags(PpoConfig, {"fire_reset": False, "compile": True}) == ["--fire-reset", "False", "--compile"]
    parsed = config.parse(Tiny, "ppo", ["--limit", "0.5", "--no-fast", "--kind", "b"])
    assert (parsed.limit, parsed.fast, parsed.kind) == (0.5, False, "b")
    assert config.parse(Tiny, "ppo", ["--limit", "0.5", "--limit", "None"]).limit is None


def test_config_run_dir_is_created_once(tmp_path):
    tiny = Tiny(run_dir=str(tmp_path / "deep" / "run"), limit=2.0)
    run_dir = config.create_run_dir(tiny, "ppo")
    assert run_dir == tmp_path / "deep" / "run"
    config.write(tiny, run_dir)
    assert config.read_toml(tmp_path / "deep" / "run" / "config.toml") == {
        "kind": "a", "limit": 2.0, "fast": True, "preset": "default",
    }  # fmt: skip
    with pytest.raises(ValueError, match="holds a run already"):
        config.create_run_dir(tiny, "ppo")
    assert config.run_dir_of(tmp_path / "run" / "checkpoints" / "step_3.pt") == tmp_path / "run"
    assert config.run_dir_of(tmp_path / "run") == tmp_path / "run"
