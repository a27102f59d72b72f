import math

import pytest
import torch

from fastrl.losses import dqn_loss, dqn_targets, ppo_loss
from fastrl.types import Minibatch

COEFS = dict(clip_coef=0.2, ent_coef=0.01, vf_coef=0.5)


def batch(logprobs, advantages, returns=(0.0, 0.0), values=(0.0, 0.0), actions=(0, 1)):
    floats = (torch.tensor(x) for x in (logprobs, advantages, returns, values))
    logprobs, advantages, returns, values = floats
    obs, weights = torch.empty(len(actions), 0), torch.ones(len(actions))
    return Minibatch(obs, torch.tensor(actions), logprobs, advantages, returns, values, weights)


def test_ppo_loss_of_an_unchanged_uniform_policy():
    half = math.log(0.5)
    rows = batch([half, half], [1.0, -3.0], returns=[1.0, 3.0])
    loss = ppo_loss(torch.zeros(2, 2), torch.zeros(2), rows, **COEFS)
    assert loss.policy_loss.item() == pytest.approx(1.0)  # -(1 - 3) / 2
    assert loss.value_loss.item() == pytest.approx(5.0)  # (1 + 9) / 2
    assert loss.entropy.item() == pytest.approx(math.log(2))
    assert loss.total.item() == pytest.approx(1.0 + 0.5 * 5.0 - 0.01 * math.log(2))
    assert loss.approx_kl.item() == pytest.approx(0, abs=1e-7)
    assert loss.clip_fraction.item() == 0


def test_ppo_loss_clips_only_where_it_is_pessimistic():
    # ratios 2 (above the range) and 0.5 (below it), each with both signs of the advantage
    logprobs = [math.log(0.25), math.log(1.0), math.log(0.25), math.log(1.0)]
    rows = batch(logprobs, [1.0, 1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4, actions=[0, 0, 0, 0])
    loss = ppo_loss(torch.zeros(4, 2), torch.zeros(4), rows, **COEFS)
    assert loss.policy_loss.item() == pytest.approx(-(1.2 + 0.5 - 2.0 - 0.8) / 4)
    assert loss.clip_fraction.item() == 1
    kl = [(r - 1) - math.log(r) for r in (2.0, 0.5, 2.0, 0.5)]
    assert loss.approx_kl.item() == pytest.approx(sum(kl) / 4)


def test_ppo_loss_gradient_vanishes_where_clipped():
    logits = torch.zeros(2, 2, requires_grad=True)
    rows = batch([math.log(0.25), math.log(0.25)], [1.0, -1.0], actions=[0, 0])
    ppo_loss(logits, torch.zeros(2), rows, clip_coef=0.2, ent_coef=0.0, vf_coef=0.0).total.backward()
    assert logits.grad[0].abs().max() == 0  # gains, already past the range
    assert logits.grad[1].abs().max() > 0.4  # a loss is never clipped away


def test_ppo_loss_value_clipping_takes_the_worse_error():
    values = torch.tensor([1.0, 1.0])
    rows = batch([math.log(0.5)] * 2, [0.0, 0.0], returns=[1.0, 3.0], values=[0.0, 0.9])
    plain = ppo_loss(torch.zeros(2, 2), values, rows, **COEFS)
    clipped = ppo_loss(torch.zeros(2, 2), values, rows, **COEFS, clip_vloss=True)
    assert plain.value_loss.item() == pytest.approx((0 + 4) / 2)
    assert clipped.value_loss.item() == pytest.approx((0.8**2 + 4) / 2)


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_ppo_loss_ignores_rows_of_weight_zero(clip_vloss):
    torch.manual_seed(0)
    logits, values = torch.randn(6, 3), torch.randn(6)
    rows = Minibatch(torch.empty(6, 0), torch.arange(6) % 3, -torch.rand(6), *torch.randn(3, 6), torch.ones(6))
    some = Minibatch(*(field[:4] for field in rows))
    padded = rows._replace(weights=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    expected = ppo_loss(logits[:4], values[:4], some, **COEFS, clip_vloss=clip_vloss)
    torch.testing.assert_close(ppo_loss(logits, values, padded, **COEFS, clip_vloss=clip_vloss), expected)


# ---- DQN

NEXT_Q = torch.tensor([[1.0, 4.0], [2.0, -1.0], [5.0, 6.0]])


def test_dqn_targets_by_hand():
    """A step with gamma 0.9, two steps, and a terminal one, whose target is its reward sum alone."""
    returns, discounts = torch.tensor([1.0, 1.9, -1.0]), torch.tensor([0.9, 0.81, 0.0])
    targets = dqn_targets(returns, discounts, NEXT_Q)
    torch.testing.assert_close(targets, torch.tensor([1 + 0.9 * 4, 1.9 + 0.81 * 2, -1.0]))


def test_dqn_targets_of_double_q_take_the_online_choice_and_the_target_value():
    online = torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]], requires_grad=True)
    targets = dqn_targets(torch.zeros(3), torch.ones(3), NEXT_Q.requires_grad_(), online)
    assert targets.tolist() == [1, -1, 6]
    assert not targets.requires_grad


def test_dqn_loss_by_hand():
    """Errors of 0.5 and 3 in the actions taken: 0.125 and 2.5, the second weighted by a half."""
    q_values = torch.tensor([[0.0, 1.0], [-1.0, 7.0]], requires_grad=True)
    loss = dqn_loss(q_values, torch.tensor([1, 0]), torch.tensor([1.5, 2.0]), torch.tensor([1.0, 0.5]))
    assert loss.total.item() == pytest.approx((0.125 + 0.5 * 2.5) / 2)
    assert loss.td_errors.tolist() == [0.5, 3.0]
    assert loss.q_mean.item() == 0
    loss.total.backward()
    torch.testing.assert_close(q_values.grad, torch.tensor([[0.0, -0.5 / 2], [-0.5 / 2, 0.0]]))
