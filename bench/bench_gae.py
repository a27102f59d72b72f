"""GAE of a 4096-step rollout by each kernel, against a loop over torch tensors."""

from __future__ import annotations

import numpy as np
import pytest

from fastrl.returns import gae

NUM_STEPS = 4096


def rollout(num_envs: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    real = rng.standard_normal((3, NUM_STEPS // num_envs, num_envs)).astype(np.float32)
    done = rng.random((2, NUM_STEPS // num_envs, num_envs)) < 0.01
    return [*real, *done]


def torch_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    import torch

    deltas = rewards + gamma * torch.where(terminated, 0, next_values) - values
    decays = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.empty_like(rewards)
    trace = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        trace = deltas[t] + decays[t] * trace
        advantages[t] = trace
    return advantages


@pytest.mark.parametrize("implementation", ["native", "numba", "reference", "torch"])
@pytest.mark.parametrize("num_envs", [1, 16, 128])
def bench_gae(benchmark, num_envs, implementation):
    benchmark.group = f"gae, {NUM_STEPS} steps of {num_envs} envs together"
    arrays = rollout(num_envs)
    if implementation == "torch":
        import torch

        tensors = [torch.from_numpy(array) for array in arrays]

        def call():
            return torch_gae(*tensors, 0.99, 0.95).numpy()
    else:

        def call():
            return gae(*arrays, gamma=0.99, gae_lambda=0.95, kernels=implementation)

    advantages = benchmark.pedantic(call, rounds=20, iterations=1, warmup_rounds=2)
    np.testing.assert_allclose(advantages, gae(*arrays, gamma=0.99, gae_lambda=0.95, kernels="reference"), atol=1e-5)
    if benchmark.stats:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["steps_per_s"] = NUM_STEPS / seconds
        benchmark.extra_info["bytes_per_s"] = (sum(a.nbytes for a in arrays) + advantages.nbytes) / seconds
