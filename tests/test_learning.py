"""Learning runs with the documented presets. Minutes, not seconds: marked slow."""

import json

import pytest

from fastrl import config
from fastrl.ppo import PpoConfig, train


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learning_cartpole_preset_reaches_475(seed, tmp_path):
    argv = ["--preset", "cartpole", "--seed", str(seed), "--run-dir", str(tmp_path / "run"), "--quiet"]
    run = train(config.parse(PpoConfig, "ppo", argv))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["global_step"] < 205_000
    assert max(row.get("episodic_return", 0) for row in rows) >= 475
