"""Learning runs with the documented presets. Minutes, not seconds: marked slow."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_learning_fast_path_learns_what_the_reference_loop_learns(tmp_path):
    """Five seeds of each on CartPole, with settings that learn within 61,440 steps; deterministic on one machine."""
    script = Path(__file__).parents[1] / "bench" / "learning_parity.py"
    settings = (
        "--learning-rate 1e-3 --update-epochs 10 --minibatch-size 256 --hidden-size 256 --torch-threads 1 --quiet"
    )
    arguments = f"{tmp_path} --total-timesteps 61440 --evaluations 5 --eval-episodes 10 -- {settings}"
    subprocess.run([sys.executable, script, *arguments.split()], check=True)
    result = json.loads((tmp_path / "parity.json").read_text())

    reference, fast = (np.mean(result["areas"][side]) for side in ("reference", "fast"))
    difference = result["differences"]["fast"]
    assert reference > 100  # a policy that has learned nothing lasts 22 steps
    assert abs(fast - reference) < 0.4 * reference
    assert difference["p"] > 0.01
    # How sure the policies have become is the same from seed to seed, so that it tells more than the returns do.
    entropies = np.array([[window["entropy"] for window in result["metrics"][side]] for side in ("reference", "fast")])
    assert np.abs(entropies[0] - entropies[1]).max() < 0.03
    assert entropies.min() < 0.62
