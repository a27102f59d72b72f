"""Losses: pure functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastrl.types import Minibatch


class PpoLoss(NamedTuple):
    """`total` is what is minimised; the others are its parts and diagnostics. All scalar tensors."""

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def ppo_loss(
    logits: Tensor,
    values: Tensor,
    batch: Minibatch,
    *,
    clip_coef: float,
    ent_coef: float,
    vf_coef: float,
    clip_vloss: bool = False,
) -> PpoLoss:
    """Clipped surrogate objective with value loss and entropy bonus, averaged over the minibatch by its weights.

        ratio = pi(a|s) / pi_old(a|s)
        total = -mean(min(ratio A, clip(ratio, 1 +- clip_coef) A)) + vf_coef mean((V - R)^2) - ent_coef mean(entropy)

    Args:
      logits: [B, A] float; values: [B] float: of the current parameters.
      batch: what the rollout recorded; advantages normalised already if they shall be.
      clip_vloss: take the worse of the value error and the error of V clipped to batch.values +- clip_coef.
    Returns: PpoLoss. approx_kl is mean((ratio - 1) - log ratio) (Schulman, "Approximating KL divergence", k3).
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9. The value error is the plain mean square, without 1/2.
    """

    def mean(x: Tensor) -> Tensor:
        return (x * batch.weights).sum() / batch.weights.sum()

    log_probs = F.log_softmax(logits, dim=1)
    log_ratio = log_probs.gather(1, batch.actions[:, None])[:, 0] - batch.logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = -mean(torch.min(ratio * batch.advantages, clipped * batch.advantages))

    value_error = (values - batch.returns).square()
    if clip_vloss:
        near = batch.values + (values - batch.values).clamp(-clip_coef, clip_coef)
        value_error = torch.max(value_error, (near - batch.returns).square())
    value_loss = mean(value_error)

    entropy = -mean((log_probs.exp() * log_probs).sum(dim=1))
    total = policy_loss + vf_coef * value_loss - ent_coef * entropy
    with torch.no_grad():
        approx_kl = mean(ratio - 1 - log_ratio)
        clip_fraction = mean(((ratio - 1).abs() > clip_coef).to(ratio.dtype))
    return PpoLoss(total, policy_loss, value_loss, entropy, approx_kl, clip_fraction)


class DqnLoss(NamedTuple):
    """`total`, a scalar tensor, is what is minimised."""

    total: Tensor
    td_errors: Tensor
    """[B], detached: target minus Q(s, a). What prioritized replay takes."""
    q_mean: Tensor
    """Scalar, detached: the mean of Q(s, a)."""


def dqn_targets(
    returns: Tensor, discounts: Tensor, next_q_target: Tensor, next_q_online: Tensor | None = None
) -> Tensor:
    """What Q(s, a) is drawn towards.

        y = returns + discounts * max_a Q_target(s', a)
        y = returns + discounts * Q_target(s', argmax_a Q_online(s', a))   with next_q_online (double Q-learning)

    Args:
      returns, discounts: [B] float: sums of n rewards, and gamma^n or 0 after termination (`fastrl.types.Batch`).
      next_q_target, next_q_online: [B, A] float: of the target network and the learning one.
    Returns: [B], without gradient.
    Source: Mnih et al. 2015, doi:10.1038/nature14236; van Hasselt et al. 2016, arXiv:1509.06461, eq. 4.
    """
    if next_q_online is None:
        next_values = next_q_target.max(dim=1).values
    else:
        next_values = next_q_target.gather(1, next_q_online.argmax(dim=1, keepdim=True))[:, 0]
    return (returns + discounts * next_values).detach()


def dqn_loss(q_values: Tensor, actions: Tensor, targets: Tensor, weights: Tensor) -> DqnLoss:
    """Huber loss of the temporal-difference errors, weighted, averaged over the batch.

        total = mean(w * huber(y - Q(s, a))),  huber(e) = e^2 / 2 for |e| <= 1, |e| - 1/2 beyond

    Args:
      q_values: [B, A] float, of the network that learns. actions: [B] int64. targets: [B] float, from `dqn_targets`.
      weights: [B] float: importance-sampling weights, 1 in uniform sampling.
    Source: Mnih et al. 2015, doi:10.1038/nature14236 (clipped errors); weights: Schaul et al. 2016, arXiv:1511.05952.
    """
    taken = q_values.gather(1, actions[:, None])[:, 0]
    total = (weights * F.smooth_l1_loss(taken, targets, reduction="none")).mean()
    return DqnLoss(total, (targets - taken).detach(), taken.detach().mean())
