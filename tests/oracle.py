"""The oracle: what "reference" means, as one plain, slow program that shares no code with fastrl.

It is the PPO of the prototype that fastrl re-implements: one environment, one observation at a time, Python lists, the
ordinary layers of PyTorch, and nothing that is there for speed. It is written from the prototype's described behaviour,
and the numbers in the comments (F1, F2, ...) name its facts:

   F1  Atari: grayscale frames of Gymnasium's ALE/*-v5 (skip 4, sticky 0.25, raw reward), area-resized to 84x84; 4 are
       stacked.
   F2  A stack starts with the first frame repeated.
   F3  Pixels are divided by 255. Convolutions 4->16 8x8/4, 16->32 4x4/2, 32->32 3x3/1, each with ReLU: [B, 32, 7, 7].
   F4  Linear branch, no activation: each row of the weight is multiplied by a fixed scale from U(0, 1); a fixed
       0/1 mask keeps a fraction p of each row (p = 1 in the CNN, 0.9 in the MLP).
   F5  Attention branch: 49 tokens of width 32, 16 heads, residual, LayerNorm, linear to 1024, ReLU, dropout 0.1.
   F6  Quirk: a token is 32 consecutive numbers of the channel-major [32, 7, 7] buffer, not one grid cell.
   F7  Both heads are linear and start at zero, weights and biases.
   F8  Rollout: eval mode, sampled actions, 4096 steps. `done` is `terminated` alone.
   F9  Quirk: `truncated` is ignored. Only `terminated` or the loop's own cap of 100,000 steps resets, and at that cap
       `done` stays False: GAE bootstraps from the first state of the *new* episode.
  F10  GAE with gamma 0.99, lambda 0.95; the bootstrap is V of the current state; returns = advantages + values.
  F11  Advantages are normalised once over the whole rollout: unbiased std, + 1e-8.
  F12  Quirk: the update runs in train mode, so dropout is active and the first ratio is not 1.
  F13  3 epochs, a NumPy shuffle of the indices in each, minibatches of 1024, the last may be smaller.
  F14  Loss = clipped surrogate (0.15) + 0.9 MSE(value, return) - 0.05 entropy. Adam, lr 3e-4, eps 1e-8, constant; no
       gradient clipping, no value clipping, no early stop.
  F15  Training stops at the first rollout boundary at or past the budget.
  F16  Quirk: evaluation samples actions and leaves dropout active.

One fault of the prototype is not kept: it never seeds its environment, the oracle does, once, at the first reset.

Shapes: B batch, A actions, T steps of a rollout. Torch computes in the dtype of the network's parameters (call
`network.double()` for float64); what is left to Python is float64. CPU only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class ActorCritic(nn.Module):
    """What both networks have: the masked and scaled linear branch (F4) and the two heads (F7).

    Parameters: linear_weight [out, in] and linear_bias [out]; policy (Linear to A) and value (Linear to 1).
    Buffers: linear_scale [out], the factor of each row; linear_mask [out, in] of 0 and 1.
    """

    def __init__(self, linear_in: int, linear_out: int, keep_fraction: float, head_in: int, num_actions: int):
        super().__init__()
        self.linear_weight = nn.Parameter(torch.empty(linear_out, linear_in))
        nn.init.kaiming_uniform_(self.linear_weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(linear_in)
        self.linear_bias = nn.Parameter(torch.empty(linear_out).uniform_(-bound, bound))
        self.register_buffer("linear_scale", torch.rand(linear_out))
        self.register_buffer("linear_mask", torch.zeros(linear_out, linear_in))
        for row in self.linear_mask:  # our reading: the same number in every row, rounded (all 4 of CartPole's 4)
            row[torch.randperm(linear_in)[: round(keep_fraction * linear_in)]] = 1
        self.policy = nn.Linear(head_in, num_actions)
        self.value = nn.Linear(head_in, 1)
        for head in (self.policy, self.value):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear_weight * self.linear_mask * self.linear_scale[:, None]
        return F.linear(x, weight, self.linear_bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(x), self.value(x).squeeze(1)


class AttentionCNN(ActorCritic):
    """The actor-critic for images: uint8 [B, 4, 84, 84] -> logits [B, A], values [B].

    Parameters: conv1, conv2, conv3; linear_* (1568 -> 4096); attention, norm, hidden (1568 -> hidden); policy, value.
    `raw_tokens=False` makes one token of each grid cell: fastrl's standard, not the prototype's.
    """

    def __init__(self, num_actions: int, hidden: int = 1024, dropout: float = 0.1, raw_tokens: bool = True):
        super().__init__(1568, 4096, keep_fraction=1.0, head_in=4096 + hidden, num_actions=num_actions)
        self.raw_tokens = raw_tokens
        self.conv1 = nn.Conv2d(4, 16, kernel_size=8, stride=4)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=4, stride=2)
        self.conv3 = nn.Conv2d(32, 32, kernel_size=3, stride=1)
        self.attention = nn.MultiheadAttention(32, 16, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.hidden = nn.Linear(1568, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = obs.to(self.linear_weight.dtype) / 255  # F3
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))  # [B, 32, 7, 7]
        features = x.flatten(1)
        tokens = features.reshape(-1, 49, 32) if self.raw_tokens else x.flatten(2).transpose(1, 2)  # F6
        attended, _ = self.attention(tokens, tokens, tokens)
        y = self.norm(tokens + attended).flatten(1)
        y = self.dropout(F.relu(self.hidden(y)))  # F5
        return self.heads(torch.cat([self.linear(features), y], dim=1))


class MLP(ActorCritic):
    """The actor-critic for vectors: [B, obs_size] -> logits [B, A], values [B]. It has no dropout.

    Parameters: linear_* (obs_size -> hidden, no activation); hidden (hidden -> hidden, ReLU); policy, value.
    """

    def __init__(self, obs_size: int, num_actions: int, hidden: int = 1024, keep_fraction: float = 0.9):
        super().__init__(obs_size, hidden, keep_fraction, head_in=hidden, num_actions=num_actions)
        self.hidden = nn.Linear(hidden, hidden)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(obs.to(self.linear_weight.dtype))
        return self.heads(F.relu(self.hidden(x)))


class ResizeAndStack:
    """Gymnasium's env of grayscale frames, seen as uint8 [4, 84, 84]: the last 4 frames, oldest first (F1)."""

    def __init__(self, env: gymnasium.Env):
        self.env = env
        self.frames = deque(maxlen=4)
        self.action_space = env.action_space

    def reset(self, seed: int | None = None):
        frame, info = self.env.reset(seed=seed)
        self.frames.extend([self.resize(frame)] * 4)  # F2
        return np.stack(self.frames), info

    def step(self, action: int):
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.frames.append(self.resize(frame))
        return np.stack(self.frames), reward, terminated, truncated, info

    @staticmethod
    def resize(frame: np.ndarray) -> np.ndarray:
        import cv2

        return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)

    def close(self):
        self.env.close()


def atari_env(game_id: str, repeat_action_probability: float = 0.25) -> ResizeAndStack:
    """The prototype's Atari env, for example `ALE/Pong-v5`; everything not named here is Gymnasium's default (F1)."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(game_id, obs_type="grayscale", repeat_action_probability=repeat_action_probability)
    return ResizeAndStack(env)


def cartpole_env() -> gymnasium.Env:
    """CartPole-v1 as it is. Its time limit only reports `truncated`, so whoever ignores that plays on past 500 (F9)."""
    return gymnasium.make("CartPole-v1")


class Episode(NamedTuple):
    """A finished episode: the sum of raw rewards, its agent steps, and whether the loop's cap ended it."""

    return_: float
    length: int
    capped: bool


@dataclass
class State:
    """Where the environment stands between two rollouts."""

    obs: np.ndarray
    episode_return: float = 0.0
    episode_length: int = 0


@dataclass
class Rollout:
    """T steps of one env, in lists; `train` adds the last four fields."""

    observations: list[np.ndarray] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    dones: list[bool] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    bootstrap: float = 0.0
    """V of the state after the last step (after the reset, if there was one)."""
    episodes: list[Episode] = field(default_factory=list)

    advantages: list[float] = field(default_factory=list)
    """Not yet normalised."""
    returns: list[float] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    """One dict per minibatch, in the order of the updates."""
    global_step: int = 0
    """Agent steps of the whole training, this rollout included."""


def act(network: nn.Module, obs: np.ndarray, generator: torch.Generator | None) -> tuple[int, float, float]:
    """Sample an action for one observation: action, log pi(action | obs), V(obs)."""
    with torch.no_grad():
        logits, values = network(torch.from_numpy(obs)[None])
    probabilities = F.softmax(logits, dim=1)
    action = torch.multinomial(probabilities, 1, generator=generator).item()
    return action, F.log_softmax(logits, dim=1)[0, action].item(), values.item()


def collect(
    env,
    state: State,
    network: nn.Module,
    generator: torch.Generator | None,
    num_steps: int = 4096,
    loop_cap: int = 100_000,
) -> Rollout:
    """Play `num_steps` from `state`, which is moved on in place. `generator=None` draws from torch's global one."""
    network.eval()  # F8
    rollout = Rollout()
    for _ in range(num_steps):
        action, logprob, value = act(network, state.obs, generator)
        obs, reward, terminated, _truncated, _info = env.step(action)  # F9: nobody looks at `truncated`
        rollout.observations.append(state.obs)
        rollout.actions.append(action)
        rollout.logprobs.append(logprob)
        rollout.rewards.append(float(reward))
        rollout.dones.append(bool(terminated))
        rollout.values.append(value)

        state.obs = obs
        state.episode_return += float(reward)
        state.episode_length += 1
        if terminated or state.episode_length >= loop_cap:  # F9: the cap resets, but `done` above stays False
            rollout.episodes.append(Episode(state.episode_return, state.episode_length, capped=not terminated))
            state.obs, _info = env.reset()
            state.episode_return, state.episode_length = 0.0, 0

    with torch.no_grad():
        rollout.bootstrap = network(torch.from_numpy(state.obs)[None])[1].item()  # F10
    return rollout


def gae(
    rewards: list[float],
    values: list[float],
    dones: list[bool],
    bootstrap: float,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> list[float]:
    """Advantages of a rollout (F10); Schulman et al. 2016, arXiv:1506.02438.

    delta_t = r_t + gamma V_{t+1} (1 - done_t) - V_t,   A_t = delta_t + gamma lam (1 - done_t) A_{t+1},

    with V_T = bootstrap and A_T = 0. V_{t+1} belongs to the next *stored* state, also across a reset by the cap (F9).
    """
    next_values = [*values[1:], bootstrap]
    advantages = [0.0] * len(rewards)
    later = 0.0
    for t in reversed(range(len(rewards))):
        go_on = 0.0 if dones[t] else 1.0
        delta = rewards[t] + gamma * next_values[t] * go_on - values[t]
        later = delta + gamma * lam * go_on * later
        advantages[t] = later
    return advantages


def update(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    rng: np.random.Generator,
    minibatch_size: int = 1024,
    epochs: int = 3,
    clip: float = 0.15,
    vf: float = 0.9,
    ent: float = 0.05,
) -> list[dict[str, float]]:
    """Improve the network in place on a rollout that has its advantages and returns.

    `rng` shuffles; dropout draws from torch's global generator. The gradients of the last minibatch stay in `.grad`.

    Returns: for each minibatch policy_loss, value_loss, entropy, total, clip_fraction, approx_kl.
    """
    dtype = network.linear_weight.dtype
    observations = torch.from_numpy(np.stack(rollout.observations))
    actions = torch.tensor(rollout.actions)
    old_logprobs = torch.tensor(rollout.logprobs, dtype=dtype)
    returns = torch.tensor(rollout.returns, dtype=dtype)
    advantages = torch.tensor(rollout.advantages, dtype=dtype)
    advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=True) + 1e-8)  # F11

    network.train()  # F12
    losses = []
    for _ in range(epochs):
        indices = rng.permutation(len(actions))  # F13
        for start in range(0, len(actions), minibatch_size):
            i = torch.from_numpy(indices[start : start + minibatch_size])
            logits, values = network(observations[i])
            log_policy = F.log_softmax(logits, dim=1)
            logprobs = log_policy.gather(1, actions[i, None]).squeeze(1)
            log_ratio = logprobs - old_logprobs[i]
            ratio = log_ratio.exp()

            surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(1 - clip, 1 + clip) * advantages[i])
            policy_loss = -surrogate.mean()
            value_loss = ((values - returns[i]) ** 2).mean()
            entropy = -(log_policy.exp() * log_policy).sum(dim=1).mean()
            total = policy_loss + vf * value_loss - ent * entropy  # F14

            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            losses.append(
                {
                    "policy_loss": policy_loss.item(),
                    "value_loss": value_loss.item(),
                    "entropy": entropy.item(),
                    "total": total.item(),
                    "clip_fraction": ((ratio - 1).abs() > clip).double().mean().item(),
                    "approx_kl": ((ratio - 1) - log_ratio).mean().item(),
                }
            )
    return losses


def train(
    env,
    network: nn.Module,
    *,
    env_seed: int | None,
    generator: torch.Generator | None,
    rng: np.random.Generator,
    total_steps: int = 20_000_000,
    num_steps: int = 4096,
    loop_cap: int = 100_000,
    learning_rate: float = 3e-4,
    gamma: float = 0.99,
    lam: float = 0.95,
    minibatch_size: int = 1024,
    epochs: int = 3,
    clip: float = 0.15,
    vf: float = 0.9,
    ent: float = 0.05,
) -> Iterator[Rollout]:
    """Train `network` in place on one env; yields the complete rollout after each update.

    Args: `env_seed` seeds the env, once; `generator` draws the actions; `rng` shuffles the minibatches. Dropout draws
      from torch's global generator: seed that too for a repeatable run.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, eps=1e-8)  # F14
    state = State(env.reset(seed=env_seed)[0])
    global_step = 0
    while global_step < total_steps:  # F15
        rollout = collect(env, state, network, generator, num_steps, loop_cap)
        global_step += num_steps
        rollout.global_step = global_step
        rollout.advantages = gae(rollout.rewards, rollout.values, rollout.dones, rollout.bootstrap, gamma, lam)
        rollout.returns = [a + v for a, v in zip(rollout.advantages, rollout.values, strict=True)]  # F10
        rollout.losses = update(network, optimizer, rollout, rng, minibatch_size, epochs, clip, vf, ent)
        yield rollout


def evaluate(
    env,
    network: nn.Module,
    episodes: int = 5,
    generator: torch.Generator | None = None,
    loop_cap: int = 100_000,
) -> list[float]:
    """The raw return of each of `episodes` episodes of the sampling policy, dropout active (F16).

    The env is not seeded here. Episodes end as in training: on `terminated` or at the loop's cap.
    """
    network.train()
    returns = []
    for _ in range(episodes):
        obs, _info = env.reset()
        total, length, terminated = 0.0, 0, False
        while not terminated and length < loop_cap:
            action, _logprob, _value = act(network, obs, generator)
            obs, reward, terminated, _truncated, _info = env.step(action)
            total += float(reward)
            length += 1
        returns.append(total)
    return returns
