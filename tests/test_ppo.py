"""PPO in this process, on probe environments and tiny runs."""

import csv
import dataclasses
import json
import math

import numpy as np
import probes  # noqa: F401  (registers Probe*-v0)
import pytest
import torch

from fastrl import checkpoint
from fastrl.envs import Step, VecEnv, make_envs
from fastrl.networks import BODIES, Body, make_network
from fastrl.ppo import Collector, Learner, PpoConfig, acting, minibatches, normalise, train, training_rows
from fastrl.runtime import RunFailed, UsageError
from fastrl.schedules import passed
from fastrl.timing import PhaseTimer

TINY = dict(
    env_id="CartPole-v1", backend="gymnasium", compile=False, quiet=True, torch_threads=1, num_envs=4, num_steps=32,
    minibatch_size=48, hidden_size=16, total_timesteps=640, seed=3,
)  # fmt: skip


def run(tmp_path, name="run", make_envs=make_envs, **changes):
    return train(PpoConfig(**(TINY | dict(run_dir=str(tmp_path / name)) | changes)), make_envs)


def metrics(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "sps" and not k.startswith("seconds_")} for row in rows]


def final(run_dir):
    return checkpoint.load(checkpoint.resolve(run_dir))


def assert_same_parameters(one, other):
    for key in ("model", "optimizer"):
        torch.testing.assert_close(final(one)[key], final(other)[key], rtol=0, atol=0)


def collected(env_id, num_envs, num_steps, value=lambda obs: obs[:, 0], **env):
    """One rollout of action 0 with V(obs) = value(obs)."""
    config = PpoConfig(
        env_id=env_id, backend="gymnasium", num_envs=num_envs, num_steps=num_steps, norm_adv="none", **env
    )
    envs = make_envs(config.env, num_envs, 0)

    def policy(obs, noise):
        return torch.zeros(len(obs), dtype=torch.int64), torch.zeros(len(obs)), value(obs)

    collector = Collector(envs, num_steps, torch.device("cpu"), 0)
    return config, *collector.collect(policy, PhaseTimer(), lambda row: True)


# ---- collecting and its arithmetic


def test_ppo_reset_rows_are_masked_and_every_episode_is_reported():
    _, rollout, episodes = collected("ProbeCounter-v0", 1, 8)
    assert rollout.valid[:, 0].tolist() == [True, True, True, False, True, True, True, False]
    assert rollout.obs[rollout.valid[:, 0], 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rollout.rewards[~rollout.valid].tolist() == [0, 0]
    assert [(row, episode.return_, episode.length) for row, episode in episodes] == [(2, 3, 3), (6, 3, 3)]


@pytest.mark.parametrize(("env_id", "last"), [("ProbeCounter-v0", 1.0), ("ProbeTruncated-v0", 1 + 0.99 * 3)])
def test_ppo_truncation_is_bootstrapped_and_termination_is_not(env_id, last):
    config, rollout, _ = collected(env_id, 2, 4, gae_lambda=0.0)
    (_, _, _, advantages, returns, values), _ = training_rows(rollout, config)
    # lambda 0: the return is the one-step target r + gamma V(s'), where V is the count and 3 the terminal observation's
    by_row = returns.view(4, 2)
    torch.testing.assert_close(by_row[:3, 0], torch.tensor([1 + 0.99 * 1, 1 + 0.99 * 2, last]))
    torch.testing.assert_close(advantages, returns - values)


def test_ppo_the_next_rollout_begins_where_the_last_one_ended():
    config = PpoConfig(env_id="ProbeCounter-v0", backend="gymnasium", num_envs=1, num_steps=2)
    collector = Collector(make_envs(config.env, 1, 0), 2, torch.device("cpu"), 0)

    def policy(obs, noise):
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.zeros(1)

    seen = [collector.collect(policy, PhaseTimer(), lambda row: True)[0].obs[:, 0, 0].tolist() for _ in range(3)]
    assert seen == [[0, 1], [2, 3], [0, 1]]


def test_ppo_the_bootstrap_of_the_last_row_is_the_value_of_the_current_state():
    _, rollout, _ = collected("ProbeCounter-v0", 1, 2)
    assert rollout.values[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("rows", "size"), [(96, 32), (97, 32), (5, 32), (1, 1)])
def test_ppo_minibatches_use_every_valid_row_once_per_epoch(rows, size):
    config = PpoConfig(num_envs=1, num_steps=max(rows, 2) + 2, minibatch_size=size, update_epochs=3)
    valid = np.arange(rows) + 2
    pieces = list(minibatches(valid, config, np.random.default_rng(0)))
    assert {len(indices) for indices, _ in pieces} == {min(size, config.batch_size)}
    per_epoch = len(pieces) // 3
    orders = []
    for epoch in range(3):
        some = pieces[epoch * per_epoch : (epoch + 1) * per_epoch]
        orders.append(torch.cat([indices[weights == 1] for indices, weights in some]).tolist())
        assert sorted(orders[-1]) == valid.tolist()
        assert sum(weights.sum().item() for _, weights in some) == rows
    assert rows < 10 or orders[0] != orders[1]


def test_ppo_normalise_is_unbiased_and_always_finite():
    x = torch.randn(50)
    torch.testing.assert_close(normalise(x, torch.ones(50)), (x - x.mean()) / (x.std() + 1e-8))
    weights = (torch.arange(50) < 20).float()
    counted = x[:20]
    torch.testing.assert_close(normalise(x, weights)[:20], (counted - counted.mean()) / (counted.std() + 1e-8))
    assert normalise(torch.tensor([3.0]), torch.ones(1)).tolist() == [0]
    assert normalise(torch.full((4,), 2.0), torch.ones(4)).tolist() == [0] * 4


def test_ppo_actions_are_those_that_multinomial_samples():
    logits = torch.tensor([0.5, 0.3, 0.2]).log() + 1

    def network(obs, readout):
        return logits.expand(len(obs), -1), torch.zeros(len(obs))

    noise = torch.empty(20_000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    actions, logprobs, _ = acting(network)(None, torch.zeros(20_000, 1), noise)
    probabilities = logits.softmax(0).expand(20_000, -1)
    expected = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    assert torch.equal(actions, expected)
    torch.testing.assert_close(actions.bincount() / 20_000, probabilities[0], rtol=0, atol=0.015)
    torch.testing.assert_close(logprobs, probabilities[0].log()[actions])


def test_ppo_passed_multiples():
    assert [passed(1000, a, b) for a, b in ((0, 999), (0, 1000), (999, 1001), (1000, 1999))] == [
        False,
        True,
        True,
        False,
    ]
    assert not passed(0, 0, 10**9)


# ---- whole runs


def test_ppo_learns_the_right_action(tmp_path):
    changes = dict(num_envs=8, minibatch_size=64, learning_rate=3e-3, ent_coef=0.0, total_timesteps=12_000)
    last = metrics(run(tmp_path, env_id="ProbeRightAction-v0", **changes))[-1]
    assert last["episodic_return"] > 0.9
    assert last["masked_fraction"] == 0.5  # an episode of one step, then its reset row


def test_ppo_same_seed_same_bits_and_another_seed_differs(tmp_path):
    one, same, other = run(tmp_path, "one"), run(tmp_path, "same"), run(tmp_path, "other", seed=4)
    assert metrics(one) == metrics(same)
    assert_same_parameters(one, same)
    assert metrics(one) != metrics(other)


def test_ppo_same_seed_same_bits_on_pong(tmp_path):
    pong = dict(env_id="ALE/Pong-v5", backend="envpool", num_envs=2, num_steps=8, minibatch_size=8, total_timesteps=48)
    one, same = run(tmp_path, "one", **pong), run(tmp_path, "same", **pong)
    assert metrics(one) == metrics(same)
    assert_same_parameters(one, same)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(backend="numpy"),
        dict(
            env_id="ALE/Pong-v5",
            num_envs=2,
            num_steps=6,
            minibatch_size=8,
            total_timesteps=48,
            dropout=0.1,
            anneal_lr=True,
        ),
    ],
    ids=["cartpole", "cartpole in numpy", "pong"],
)
def test_ppo_stopping_and_resuming_changes_nothing(tmp_path, changes):
    whole = run(tmp_path, "whole", **changes)
    total = TINY["total_timesteps"] if "total_timesteps" not in changes else changes["total_timesteps"]
    parts = tmp_path / "parts"
    # Each part is ended as an interrupt ends it: in the middle of a rollout, which is thrown away.
    for stop_after in (0.3, 0.75):
        resume = dict(resume=str(parts), run_dir=None) if parts.exists() else dict(run_dir=str(parts))
        with pytest.raises(SystemExit) as stopped:
            train(PpoConfig(**(TINY | changes | resume)), interrupted_envs(int(total * stop_after)))
        assert stopped.value.code == 130
    train(PpoConfig(**(TINY | changes | dict(resume=str(parts)))))
    assert_same_parameters(whole, parts)
    assert metrics(whole) == metrics(parts)
    assert rows_of(whole / "episodes.csv") == rows_of(parts / "episodes.csv")


def interrupted_envs(global_step):
    """`make_envs` whose envs send SIGINT to this process once so many steps have been taken, resumed ones included."""
    import signal

    def make(config, num_envs, seed):
        envs = make_envs(config, num_envs, seed)
        step, taken = envs.step, 0

        def counted(actions):
            nonlocal taken
            taken += num_envs
            if taken >= global_step - counted.before:
                signal.raise_signal(signal.SIGINT)
            return step(actions)

        counted.before = 0
        envs.step = counted
        return envs

    return make


def rows_of(path):
    with path.open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def test_ppo_a_finished_run_is_left_alone_or_extended(tmp_path):
    first = run(tmp_path)
    before = metrics(first)
    train(PpoConfig(**(TINY | dict(resume=str(first)))))
    assert metrics(first) == before
    train(PpoConfig(**(TINY | dict(resume=str(first), total_timesteps=1280))))
    assert metrics(first)[: len(before)] == before
    assert_same_parameters(first, run(tmp_path, "whole", total_timesteps=1280))


def test_ppo_resume_refuses_another_algorithm_of_learning_and_older_checkpoints(tmp_path):
    first = run(tmp_path, checkpoint_every=128)
    with pytest.raises(UsageError, match=r"--resume cannot change gamma from 0\.99 to 0\.5"):
        train(PpoConfig(**(TINY | dict(resume=str(first), gamma=0.5))))
    older = first / "checkpoints" / "step_384.pt"
    with pytest.raises(UsageError, match="not the newest checkpoint"):
        train(PpoConfig(**(TINY | dict(resume=str(older)))))
    branch = train(PpoConfig(**(TINY | dict(resume=str(older), run_dir=str(tmp_path / "branch")))))
    assert_same_parameters(first, branch)
    assert metrics(branch) == metrics(first)[3:]


def test_ppo_counts_and_budget(tmp_path):
    rows = metrics(run(tmp_path, total_timesteps=1))
    assert [(row["global_step"], row["iteration"]) for row in rows] == [(128, 1)]
    rows = metrics(run(tmp_path, "more", total_timesteps=300, anneal_lr=True, minibatch_size=1000))
    assert [row["global_step"] for row in rows] == [128, 256, 384]
    assert [row["optimizer_steps"] for row in rows] == [3, 6, 9]
    assert [row["learning_rate"] for row in rows] == pytest.approx([3e-4, 2e-4, 1e-4])


def test_ppo_checkpoints_and_evaluations_at_their_steps(tmp_path):
    changes = dict(
        num_envs=3, num_steps=20, total_timesteps=2000, checkpoint_every=200, eval_every=500, keep_checkpoints=99
    )
    done = run(tmp_path, eval_episodes=2, **changes)
    steps = sorted(int(path.stem.removeprefix("step_")) for path in (done / "checkpoints").glob("step_*.pt"))
    every_200 = [60 * math.ceil(k * 200 / 60) for k in range(1, 11)]
    every_500 = [60 * math.ceil(k * 500 / 60) for k in range(1, 5)]
    assert steps == sorted({*every_200, *every_500, 2040})
    assert all(checkpoint.load(done / "checkpoints" / f"step_{step}.pt")["global_step"] == step for step in steps)
    evaluations = rows_of(done / "evaluations.csv")
    assert [int(row["global_step"]) for row in evaluations] == every_500
    assert {row["episodes"] for row in evaluations} == {"2"}
    assert (done / "checkpoints" / "best").resolve().stem.removeprefix("step_") in map(str, every_500)


def test_ppo_evaluations_change_nothing_of_the_training(tmp_path):
    without, with_ = run(tmp_path, "without"), run(tmp_path, "with", eval_every=128, eval_episodes=1)
    assert_same_parameters(without, with_)


def test_ppo_every_episode_that_ended_is_in_the_file(tmp_path):
    ends = 0

    def counting(config, num_envs, seed):
        envs = make_envs(config, num_envs, seed)
        step = envs.step

        def counted(actions):
            nonlocal ends
            result = step(actions)
            ends += int((result.terminated | result.truncated).sum())
            return result

        envs.step = counted
        return envs

    done = run(tmp_path, make_envs=counting)
    rows = rows_of(done / "episodes.csv")
    assert len(rows) == ends > 5
    assert [int(row["episode"]) for row in rows] == list(range(1, ends + 1))
    assert all(0 < int(row["global_step"]) <= 640 for row in rows)


class Countdown(VecEnv):
    """An env of one's own, outside Gymnasium and without `game_over`: pays 1 a step and ends after four."""

    obs_shape, obs_dtype, num_actions = (2,), np.dtype(np.float64), 3

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def reset(self):
        self.count = 0
        return np.zeros((self.num_envs, 2))

    def step(self, actions):
        self.count = (self.count + 1) % 5
        ended, started = np.full(self.num_envs, self.count == 4), np.full(self.num_envs, self.count == 0)
        rewards, lives = np.where(started, 0, 1).astype(np.float32), np.zeros(self.num_envs, np.int32)
        obs = np.full((self.num_envs, 2), self.count, float)
        return Step(obs, rewards, rewards, ended, np.zeros_like(ended), started, lives)

    def close(self):
        pass


def test_ppo_takes_envs_of_ones_own_and_says_that_they_cannot_be_restored(tmp_path, capsys):
    def own_envs(config, num_envs, seed):
        return Countdown(num_envs)

    done = run(tmp_path, make_envs=own_envs, env_id="Countdown", quiet=False)
    assert metrics(done)[-1]["episodic_return"] == 4
    more = PpoConfig(**(TINY | dict(env_id="Countdown", resume=str(done), total_timesteps=768, quiet=False)))
    train(more, own_envs)
    assert "cannot restore environments" in capsys.readouterr().out
    assert len(metrics(done)) == 6


def test_ppo_an_env_that_cannot_be_pickled_trains_and_resumes(tmp_path):
    done = run(tmp_path, env_id="ProbeUnpicklable-v0", total_timesteps=128)
    assert (
        len(
            metrics(
                train(PpoConfig(**(TINY | dict(env_id="ProbeUnpicklable-v0", resume=str(done), total_timesteps=256))))
            )
        )
        == 2
    )


def test_ppo_an_interrupt_ends_an_evaluation_and_keeps_the_update_before_it(tmp_path):
    import signal

    made = 0

    def make(config, num_envs, seed):
        nonlocal made
        envs, made = make_envs(config, num_envs, seed), made + 1
        if made == 2:  # the envs of the first evaluation
            signal.raise_signal(signal.SIGINT)
        return envs

    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, make_envs=make, eval_every=128)
    assert stopped.value.code == 130
    assert final(tmp_path / "run")["global_step"] == 128
    assert rows_of(tmp_path / "run" / "evaluations.csv") == []


def test_ppo_two_processes_cannot_write_to_one_run(tmp_path):
    import fcntl

    done = run(tmp_path)
    with (done / "log.txt").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is writing to the run"):
            train(PpoConfig(**(TINY | dict(resume=str(done), total_timesteps=1280))))
    assert len(metrics(done)) == 5
    assert "total_timesteps = 640" in (done / "config.toml").read_text()


def test_ppo_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_touched(tmp_path):
    done = run(tmp_path)
    newest, before = checkpoint.resolve(done), (done / "metrics.jsonl").read_bytes()
    for spoil in (lambda state: state["model"].pop("policy.weight"), lambda state: state.pop("optimizer")):
        state = checkpoint.load(newest)
        spoil(state)
        checkpoint.save(newest, state)
        with pytest.raises(UsageError, match="does not fit this run"):
            train(PpoConfig(**(TINY | dict(resume=str(done), total_timesteps=1280))))
    assert (done / "metrics.jsonl").read_bytes() == before
    assert "total_timesteps = 640" in (done / "config.toml").read_text()


def test_ppo_refuses_a_rollout_that_does_not_fit_into_memory(tmp_path):
    with pytest.raises(UsageError, match=r"takes .* GB, and .* GB are free"):
        run(tmp_path, num_steps=10**11)
    assert not (tmp_path / "run").exists()


def test_ppo_trains_with_a_network_that_somebody_added(tmp_path, monkeypatch):
    class Small(Body):
        takes = "vector"

        def __init__(self, in_features, hidden_size=8):
            super().__init__()
            self.out_features = hidden_size
            self.layer = torch.nn.Linear(in_features, hidden_size)

        def forward(self, obs):
            return torch.tanh(self.layer(obs))

    monkeypatch.setitem(BODIES, "mlp", Small)
    assert final(run(tmp_path, hidden_size=7))["model"]["body.layer.weight"].shape == (7, 4)


def test_ppo_target_kl_stops_the_update_at_once(tmp_path):
    # The first minibatch has KL 0 by construction, the second one does not.
    rows = metrics(run(tmp_path, target_kl=1e-12, learning_rate=1e-2))
    assert [row["optimizer_steps"] for row in rows] == [1, 2, 3, 4, 5]


def test_ppo_max_grad_norm_shortens_the_gradient_and_keeps_its_direction():
    def gradient_of(max_grad_norm):
        config, rollout, _ = collected("CartPole-v1", num_envs=2, num_steps=16, hidden_size=16, compile=False)
        config = dataclasses.replace(config, update_epochs=1, minibatch_size=32, max_grad_norm=max_grad_norm)
        torch.manual_seed(0)
        network = make_network("mlp", (4,), 2, hidden_size=16)
        Learner(network, config).update(rollout, PhaseTimer())
        return torch.cat([x.grad.ravel() for x in network.parameters()])

    free, short = gradient_of(None), gradient_of(1e-2)
    assert free.norm() > 1e-1
    torch.testing.assert_close(short, free * 1e-2 / free.norm(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_ppo_stops_where_a_number_is_no_longer_finite(tmp_path, reward):
    def poisoned(config, num_envs, seed):
        envs = make_envs(config, num_envs, seed)
        step, calls = envs.step, 0

        def later(actions):
            nonlocal calls
            calls += 1
            result = step(actions)
            return result._replace(rewards=np.full_like(result.rewards, reward)) if calls > 70 else result

        envs.step = later
        return envs

    with pytest.raises(RunFailed, match=r"policy_loss is nan after the update at step 384"):
        run(tmp_path, make_envs=poisoned, checkpoint_every=128)
    assert [row["global_step"] for row in metrics(tmp_path / "run")] == [128, 256]
    assert all(torch.isfinite(x).all() for x in final(tmp_path / "run")["model"].values())


def test_ppo_a_rollout_of_reset_rows_only_is_survived(tmp_path):
    rows = metrics(run(tmp_path, env_id="ProbeCounter-v0", num_envs=2, num_steps=1, total_timesteps=16))
    assert [row["masked_fraction"] for row in rows] == [0, 0, 0, 1] * 2
    assert [row["optimizer_steps"] for row in rows] == [3, 6, 9, 9, 12, 15, 18, 18]
    assert "policy_loss" not in rows[3]


def test_ppo_compiled_code_is_never_compiled_again_and_leaves_plain_checkpoints(tmp_path):
    """Twelve iterations with masked rows, annealing and evaluations between; then the run goes on uncompiled."""
    changes = dict(
        env_id="ProbeCounter-v0", num_envs=2, num_steps=16, minibatch_size=16, total_timesteps=12 * 32, anneal_lr=True,
        eval_every=64, eval_episodes=1,
    )  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = run(tmp_path, "compiled", compile=True, **changes)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # acting and the loss
    eager = run(tmp_path, "eager", **changes)
    torch.testing.assert_close(final(compiled)["model"], final(eager)["model"], rtol=1e-3, atol=1e-5)
    assert final(compiled)["model"].keys() == final(eager)["model"].keys()
    more = PpoConfig(**(TINY | changes | dict(resume=str(compiled), compile=False, total_timesteps=13 * 32)))
    assert len(metrics(train(more))) == 13


def test_ppo_reference_preset_runs_with_one_env(tmp_path):
    from fastrl import config

    argv = ["--preset", "reference", "--num-steps", "16", "--total-timesteps", "32", "--quiet", "--update-epochs", "1"]
    parsed = config.parse(PpoConfig, "ppo", [*argv, "--minibatch-size", "8", "--run-dir", str(tmp_path / "run")])
    rows = metrics(train(parsed))
    assert [row["optimizer_steps"] for row in rows] == [2, 4]
    assert {row["masked_fraction"] for row in rows} == {0}


def test_ppo_config_derives_its_sizes():
    assert (PpoConfig().rollout_steps, PpoConfig().batch_size) == (128, 4096)
    assert PpoConfig(num_envs=1).rollout_steps == 4096
    assert PpoConfig(num_envs=3).batch_size == 4098
    assert PpoConfig(num_envs=3, num_steps=10, total_timesteps=61).num_iterations == 3
    assert dataclasses.asdict(PpoConfig(sticky=0.5).env)["sticky"] == 0.5
