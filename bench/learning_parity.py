"""Does the fast path learn what the reference loop learns? Several seeds of each, judged by evaluations at equal steps.

    python bench/learning_parity.py runs/parity --total-timesteps 300000 --seeds 1 2 3 4 5 -- --torch-threads 1

The sides differ in how they compute and in how many envs they play, not in their algorithm's settings; what follows
`--` goes to all of them. Runs that are complete are kept, so that the command may be interrupted and repeated.

Evaluations judge, not the episodes of the training: with many envs side by side short episodes end first, and at any
step more of the unfinished ones are long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy import stats

from fastrl import checkpoint
from fastrl.plot import COLOURS, read_run
from fastrl.runtime import atomic_file

# One time-limit rule for all; `reference` ignores limits otherwise.
PLAIN = ["--preset", "reference", "--time-limit", "truncate", "--autoreset", "next_step"]
SIDES = {
    "reference": PLAIN,
    "fast": ["--preset", "default", "--dropout", "0.1", "--token-layout", "raw", "--eval-dropout"],
    "plain-32": [*PLAIN, "--num-envs", "32", "--num-steps", "128"],
}
METRICS = ("value_loss", "explained_variance", "entropy", "approx_kl", "clip_fraction")


def train(run_dir: Path, flags: list[str], total_timesteps: int) -> None:
    """Trains in a process of its own, unless that is done already; goes on with a run that was interrupted."""
    if (run_dir / "checkpoints").is_dir():
        if checkpoint.load(checkpoint.resolve(run_dir))["global_step"] >= total_timesteps:
            return
        flags = ["--resume", str(run_dir), "--total-timesteps", str(total_timesteps)]
    else:
        flags = [*flags, "--total-timesteps", str(total_timesteps), "--run-dir", str(run_dir)]
    print(f"{run_dir.name}: {' '.join(flags)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "fastrl.ppo", *flags], check=False).returncode
    if code != 0:  # it has said why
        sys.exit(code)


def compare(folder: Path, sides: list[str], seeds: list[int]) -> dict:
    """The mean of all evaluations of each run, and how the sides differ from the first one.

    Returns: for each side `areas` (one number per seed); for each but the first `difference` of the means, its 95 %
      Welch interval and p-value.
    """
    areas = {
        side: [float(read_run(folder / f"{side}_{seed}").evaluations[:, 1].mean()) for seed in seeds] for side in sides
    }
    result: dict = {"areas": areas, "differences": {}}
    for side in sides[1:]:
        test = stats.ttest_ind(areas[side], areas[sides[0]], equal_var=False)
        low, high = test.confidence_interval()
        difference = float(np.mean(areas[side]) - np.mean(areas[sides[0]]))
        result["differences"][side] = {
            "mean": difference,
            "low": float(low),
            "high": float(high),
            "p": float(test.pvalue),
        }
    return result


def metrics(folder: Path, sides: list[str], seeds: list[int], windows: int) -> dict[str, list[dict[str, float]]]:
    """For each side the means of `METRICS` over its runs, in windows of equal steps."""
    found: dict[str, list[dict[str, float]]] = {}
    for side in sides:
        files = [folder / f"{side}_{seed}" / "metrics.jsonl" for seed in seeds]
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        edges = np.linspace(0, max(row["global_step"] for row in rows), windows + 1)
        found[side] = []
        for low, high in itertools.pairwise(edges):
            inside = [row for row in rows if low < row["global_step"] <= high]
            means = {name: float(np.mean([row[name] for row in inside if name in row])) for name in METRICS}
            found[side].append({"to_step": int(high), **means})
    return found


def draw(folder: Path, sides: list[str], seeds: list[int], out: Path) -> None:
    """The evaluations of each side: the mean over seeds, and a band of its 95 % interval (Student's t)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    ax = figure.subplots()
    for side, colour in zip(sides, COLOURS, strict=False):
        runs = [read_run(folder / f"{side}_{seed}") for seed in seeds]
        steps, values = runs[0].evaluations[:, 0], np.stack([run.evaluations[:, 1] for run in runs])
        half = stats.sem(values) * stats.t.ppf(0.975, len(seeds) - 1)
        ax.fill_between(steps, values.mean(0) - half, values.mean(0) + half, color=colour, alpha=0.2, linewidth=0)
        ax.plot(
            steps, values.mean(0), color=colour, linewidth=2, label=f"{side} ({len(seeds)} seeds, band: 95 % interval)"
        )
    ax.set_title(runs[0].env_id, loc="left")
    ax.set_xlabel("agent steps")
    ax.set_ylabel("evaluation return")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    with atomic_file(out) as file:
        figure.savefig(file, format="png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs are, and the results: parity.json and parity.png")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["reference", "fast"])
    parser.add_argument("--evaluations", type=int, default=15, help="how many, evenly spread over the run")
    parser.add_argument("--eval-episodes", type=int, default=20)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, flags_for_all = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if len(set(arguments.seeds)) != len(arguments.seeds) or len(arguments.seeds) < 2:
        parser.error(f"--seeds: got {arguments.seeds}, expected two or more, all different, for an interval")
    if len(set(arguments.sides)) != len(arguments.sides):
        parser.error(f"--sides: got {arguments.sides}, expected each at most once")
    if not arguments.total_timesteps >= arguments.evaluations > 0:
        got = f"{arguments.evaluations} evaluations in {arguments.total_timesteps} steps"
        parser.error(f"got {got}, expected at least one evaluation and one step for each")

    every = arguments.total_timesteps // arguments.evaluations
    common = ["--env-id", arguments.env_id, "--eval-every", str(every), "--eval-episodes", str(arguments.eval_episodes)]
    for seed in arguments.seeds:  # the sides in turn, so that what is there at any time can be compared
        for side in arguments.sides:
            flags = [*SIDES[side], *common, "--seed", str(seed), *flags_for_all]
            train(arguments.folder / f"{side}_{seed}", flags, arguments.total_timesteps)

    result = compare(arguments.folder, arguments.sides, arguments.seeds)
    result["metrics"] = metrics(arguments.folder, arguments.sides, arguments.seeds, windows=6)
    (arguments.folder / "parity.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(arguments.folder, arguments.sides, arguments.seeds, arguments.folder / "parity.png")

    for side, areas in result["areas"].items():
        by_seed = " ".join(f"{area:.1f}" for area in areas)
        print(f"{side:10} mean of all evaluations, by seed: {by_seed}  mean {np.mean(areas):.1f}")
    for side, found in result["differences"].items():
        interval = (
            f"{found['mean']:+.1f}, 95 % interval {found['low']:+.1f} to {found['high']:+.1f}, p = {found['p']:.2f}"
        )
        print(f"{side} - {arguments.sides[0]}: {interval} (Welch)")
    for side, rows in result["metrics"].items():
        for row in rows:
            print(
                f"{side:10} to step {row['to_step']:>9,}  " + "  ".join(f"{name} {row[name]:.4g}" for name in METRICS)
            )


if __name__ == "__main__":
    main()
