from __future__ import annotations

import numpy as np
import pytest

from fastrl.returns import gae

KERNELS = ("native", "numba", "reference")


def rollout(num_steps, num_envs, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.standard_normal((3, num_steps, num_envs)).astype(dtype)
    terminated, truncated = rng.random((2, num_steps, num_envs)) < 0.1
    return rewards, values, next_values, terminated, truncated


def no_done(shape):
    return np.zeros(shape, bool), np.zeros(shape, bool)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernels", KERNELS)
def test_gae_truncation_cuts_the_trace_and_keeps_the_bootstrap(kernels, dtype):
    rewards = np.ones((4, 1), dtype)
    values = np.array([[2], [3], [4], [2]], dtype)
    next_values = np.array([[3], [5], [2], [6]], dtype)
    terminated, truncated = no_done((4, 1))
    truncated[1] = True
    advantages = gae(rewards, values, next_values, terminated, truncated, gamma=0.9, gae_lambda=0.8, kernels=kernels)
    np.testing.assert_allclose(advantages[:, 0], [3.5, 2.5, 1.968, 4.4], rtol=1e-6)
    assert advantages.dtype == dtype


@pytest.mark.parametrize("kernels", KERNELS)
def test_gae_termination_drops_bootstrap_and_trace(kernels):
    rewards = np.ones((3, 1), np.float32)
    values, next_values = np.full((2, 3, 1), 2, np.float32)
    next_values[1] = np.nan  # what follows a terminal state must not be read
    terminated, truncated = no_done((3, 1))
    terminated[1] = True
    advantages = gae(rewards, values, next_values, terminated, truncated, gamma=0.5, gae_lambda=0.5, kernels=kernels)
    np.testing.assert_array_equal(advantages[:, 0], [0 + 0.25 * -1, 1 - 2, 1 + 1 - 2])


@pytest.mark.parametrize("kernels", KERNELS)
def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value(kernels):
    rewards, values, next_values, *_ = rollout(20, 3, np.float64)
    advantages = gae(rewards, values, values * 0 + 1, *no_done((20, 3)), gamma=1, gae_lambda=0, kernels=kernels)
    np.testing.assert_allclose(advantages, rewards + 1 - values)
    next_values[:-1] = values[1:]
    advantages = gae(rewards, values, next_values, *no_done((20, 3)), gamma=0.9, gae_lambda=1, kernels=kernels)
    discounts = 0.9 ** np.arange(20)[:, None]
    expected = (discounts * rewards).sum(0) + 0.9**20 * next_values[-1] - values[0]
    np.testing.assert_allclose(advantages[0], expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (33, 5), (128, 16), (5, 67), (0, 3), (3, 0), (0, 0)])
def test_gae_is_the_same_bits_in_all_kernels(shape, dtype):
    # Exact: all three round gamma and gamma * gae_lambda to the dtype once and apply the same operations in one order.
    arrays = rollout(*shape, dtype)
    results = [gae(*arrays, gamma=0.99, gae_lambda=0.95, kernels=kernels) for kernels in KERNELS]
    assert results[0].shape == shape
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(results[1], results[2])


@pytest.mark.parametrize("kernels", KERNELS)
def test_gae_takes_strided_and_read_only_arrays_and_leaves_them_alone(kernels):
    arrays = rollout(9, 4)
    expected = gae(*arrays, gamma=0.9, gae_lambda=0.8, kernels=kernels)
    strided = [np.ascontiguousarray(array.T).T for array in arrays]
    before = [array.copy() for array in strided]
    for array in strided:
        array.setflags(write=False)
    np.testing.assert_array_equal(gae(*strided, gamma=0.9, gae_lambda=0.8, kernels=kernels), expected)
    for array, copy in zip(strided, before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda a: a.astype(np.float16), "rewards must be a float32 or float64 array"),
        (0, lambda a: a[:, 0], "rewards must be a float32 or float64 array"),
        (0, lambda a: a.tolist(), "got list"),
        (1, lambda a: a[:-1], r"values must be float32 \[8, 4\], as rewards; got float32 \[7, 4\]"),
        (1, lambda a: a.astype(np.float64), "values must be float32"),
        (2, lambda a: a.T, "next_values must be"),
        (3, lambda a: a.astype(np.float32), "terminated must be bool"),
        (4, lambda a: a.astype(np.uint8), "truncated must be bool"),
    ],
)
def test_gae_names_the_array_that_does_not_fit(position, change, message):
    arrays = list(rollout(8, 4))
    arrays[position] = change(arrays[position])
    with pytest.raises(ValueError, match=message):
        gae(*arrays, gamma=0.9, gae_lambda=0.8)


@pytest.mark.parametrize("numbers", [{"gamma": 1.5, "gae_lambda": 0.9}, {"gamma": 0.9, "gae_lambda": float("nan")}])
def test_gae_refuses_numbers_outside_zero_to_one(numbers):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        gae(*rollout(2, 2), **numbers)
