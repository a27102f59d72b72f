"""Whole-game returns and lengths."""

import io

import numpy as np
import pytest
import torch

from fastrl.envs import EpisodeStats


def feed(stats, rewards, terminated=None, truncated=None, was_reset=None, game_over=None):
    """Rows of one env, flags given by the positions where they are set. Returns what each row reported."""
    reported = []
    for t, reward in enumerate(rewards):
        flags = [np.array([t in (marks or ())]) for marks in (terminated, truncated, was_reset)]
        over = None if game_over is None else np.array([t in game_over])
        reported.append(stats.update(np.array([reward], np.float32), *flags, over))
    return reported


def test_episode_stats_life_loss_does_not_end_the_game():
    reported = feed(EpisodeStats(1), [7, 4, -1], terminated=(1, 2), game_over=(2,))
    assert reported[:2] == [[], []]
    assert reported[2] == [(10.0, 3, 0)]


def test_episode_stats_reset_row_adds_neither_reward_nor_length():
    reported = feed(EpisodeStats(1), [1, 1, 99, 1, 1], terminated=(1, 4), was_reset=(2,))
    assert reported == [[], [(2.0, 2, 0)], [], [], [(2.0, 2, 0)]]


def test_episode_stats_reset_row_after_life_loss_keeps_the_game():
    reported = feed(EpisodeStats(1), [1, 0, 2], terminated=(0, 2), was_reset=(1,), game_over=(2,))
    assert reported[2] == [(3.0, 2, 0)]


def test_episode_stats_truncation_ends_the_game():
    assert feed(EpisodeStats(1), [1, 2], truncated=(1,), game_over=())[1] == [(3.0, 2, 0)]


def test_episode_stats_game_over_alone_ends_the_game():
    """A silent time limit sets neither terminated nor truncated."""
    assert feed(EpisodeStats(1), [1, 2], game_over=(1,))[1] == [(3.0, 2, 0)]


def test_episode_stats_reports_every_end_of_random_rows():
    rng = np.random.default_rng(0)
    stats, episodes, ends, total = EpisodeStats(5), [], 0, np.zeros(5)
    was_reset = np.zeros(5, bool)
    for _ in range(400):
        reward = rng.integers(-3, 4, 5).astype(np.float32) * ~was_reset
        kind = rng.integers(0, 20, 5)
        terminated, truncated = (kind == 0) & ~was_reset, (kind == 1) & ~was_reset
        episodes += stats.update(reward, terminated, truncated, was_reset)
        was_reset = terminated | truncated
        ends += int(was_reset.sum())
        total += reward
    assert len(episodes) == ends > 100
    unfinished = stats.state_dict()["returns"].numpy()
    assert sum(e.return_ for e in episodes) + unfinished.sum() == total.sum()


def test_episode_stats_two_envs_end_on_one_row():
    stats = EpisodeStats(3)
    false = np.zeros(3, bool)
    ended = np.array([True, False, True])
    assert stats.update(np.array([1, 2, 3], np.float32), ended, false, false) == [(1.0, 1, 0), (3.0, 1, 2)]
    assert stats.update(np.array([0, 1, 0], np.float32), ~ended, false, ended) == [(3.0, 2, 1)]


def test_episode_stats_state_survives_a_plain_torch_file():
    stats, other = EpisodeStats(1), EpisodeStats(1)
    feed(stats, [1, 2])
    file = io.BytesIO()
    torch.save(stats.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert feed(other, [4], terminated=(0,)) == [[(7.0, 3, 0)]]


def test_episode_stats_state_of_another_number_of_envs_is_refused():
    with pytest.raises(ValueError, match="2 envs, expected 3"):
        EpisodeStats(3).load_state_dict(EpisodeStats(2).state_dict())
