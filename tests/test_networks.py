import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastrl.networks import (
    MLP,
    ActorCritic,
    AttentionCNN,
    NatureCNN,
    ScaledLinear,
    make_network,
    make_q_network,
    network_for,
)

OPTIONS = [
    dict(),
    dict(token_layout="raw"),
    dict(keep_fraction=0.5, unit_scale_fraction=0.25),
]


def frames(batch=5, seed=0):
    return torch.randint(0, 256, (batch, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def network(**options):
    """An actor-critic in float64 whose heads are not zero, so that every parameter gets a gradient."""
    torch.manual_seed(0)
    body = AttentionCNN(4, hidden_size=64, linear_size=96, **options)
    return ActorCritic(body, 6, init="orthogonal").double()


def outputs_and_gradients(model, obs):
    logits, values = model(obs)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    ((logits * weights).sum() + (values * values).sum()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())
    return logits, values, gradients


def written_out(model, obs):
    """The network of the reference, section by section, with ordinary modules and nothing folded."""
    body, conv = model.body, model.body.conv
    x = obs.double() / 255
    for layer in (conv[0], conv[2], conv[4]):
        x = F.relu(F.conv2d(x, layer.weight, layer.bias, layer.stride))
    flat = x.reshape(len(obs), 1568)
    scaled = body.linear.weight * body.linear.scale[:, None]
    linear = F.linear(flat, scaled if body.linear.mask is None else scaled * body.linear.mask, body.linear.bias)
    tokens = flat.view(-1, 49, 32) if body.token_layout == "raw" else x.permute(0, 2, 3, 1).reshape(-1, 49, 32)
    mixed = F.layer_norm(
        tokens + body.attention(tokens, tokens, tokens)[0], (32,), body.norm.weight, body.norm.bias, body.norm.eps
    )
    attended = F.relu(F.linear(mixed.reshape(-1, 1568), body.hidden.weight, body.hidden.bias))
    features = torch.cat([linear, attended], dim=1)
    return model.policy(features), model.value(features)[:, 0]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fold", [True, False])
def test_attention_cnn_is_the_reference_written_out(options, fold):
    model = network(attention="plain", fold=fold, **options)
    logits, values = model(frames())
    expected_logits, expected_values = written_out(model, frames())
    torch.testing.assert_close(logits, expected_logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(values, expected_values, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_attention_cnn_folded_equals_plain_in_outputs_and_gradients(options):
    folded, plain = network(attention="plain", fold=True, **options), network(attention="plain", fold=False, **options)
    plain.load_state_dict(folded.state_dict())
    for one, other in zip(outputs_and_gradients(folded, frames()), outputs_and_gradients(plain, frames()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_attention_cnn_fused_equals_plain_in_outputs_and_gradients():
    plain = network(attention="plain").float()
    fused = network(attention="fused").float()
    fused.load_state_dict(plain.state_dict())
    for one, other in zip(outputs_and_gradients(fused, frames()), outputs_and_gradients(plain, frames()), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def test_actor_critic_a_readout_made_once_gives_the_same():
    model = network(attention="plain")
    readout = model.readout()
    for one, other in zip(model(frames(), readout), model(frames()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_attention_cnn_token_layouts_differ():
    grid, raw = network(token_layout="grid", attention="plain"), network(token_layout="raw", attention="plain")
    raw.load_state_dict(grid.state_dict())
    assert (grid(frames())[0] - raw(frames())[0]).abs().max() > 1e-6


def test_attention_cnn_dropout_acts_in_train_mode_only():
    model = network(attention="plain", dropout=0.5)
    model.train()
    assert not torch.equal(model(frames())[1], model(frames())[1])
    model.eval()
    assert torch.equal(model(frames())[1], model(frames())[1])


def test_attention_cnn_has_the_sizes_of_the_prototype():
    model = make_network("attention-cnn", (4, 84, 84), 6)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["body.linear.weight"] == (4096, 1568)
    assert shapes["body.hidden.weight"] == (1024, 1568)
    assert shapes["policy.weight"] == (6, 5120)
    assert model.body.attention.num_heads == 16
    assert [c.kernel_size[0] for c in model.body.conv[::2]] == [8, 4, 3]


def test_heads_start_at_zero_or_orthogonal():
    logits, values = make_network("attention-cnn", (4, 84, 84), 6)(frames())
    assert logits.abs().max() == 0
    assert values.abs().max() == 0
    policy = make_network("nature-cnn", (4, 84, 84), 6, head_init="orthogonal").policy.weight
    torch.testing.assert_close(policy @ policy.T, 1e-4 * torch.eye(6), rtol=1e-4, atol=1e-9)


def test_scaled_linear_masks_scales_and_initialises():
    torch.manual_seed(0)
    layer = ScaledLinear(100, 400, keep_fraction=0.9, unit_scale_fraction=0.25)
    assert (layer.mask.sum(dim=1) == 90).all()
    assert layer.mask.unique().tolist() == [0, 1]
    assert not (layer.mask == layer.mask[0]).all()
    assert (layer.scale == 1).sum() == 100
    drawn = layer.scale[layer.scale < 1]
    assert 0.4 < drawn.mean() < 0.6
    assert drawn.min() >= 0
    assert layer.weight.abs().max() <= 1 / 10
    assert layer.bias.abs().max() <= 1 / 10
    x = torch.randn(3, 100)
    expected = x @ (layer.weight * layer.scale[:, None] * layer.mask).T + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert {"scale", "mask"} <= set(layer.state_dict())
    assert not list(ScaledLinear(4, 4).state_dict()).count("mask")


def test_scaled_linear_refuses_what_is_no_fraction():
    with pytest.raises(ValueError, match=r"keep_fraction is 1\.5"):
        ScaledLinear(4, 4, keep_fraction=1.5)


def test_mlp_is_masked_linear_then_relu():
    torch.manual_seed(0)
    body = MLP(10, hidden_size=32)
    x = torch.randn(3, 10, dtype=torch.float64)
    first = F.linear(x.float(), body.linear.weight * body.linear.scale[:, None] * body.linear.mask, body.linear.bias)
    torch.testing.assert_close(body(x), F.relu(body.hidden(first)), rtol=1e-5, atol=1e-6)


def test_networks_follow_the_observation_space():
    assert network_for((4, 84, 84)) == "attention-cnn"
    assert network_for((8,)) == "mlp"
    with pytest.raises(ValueError, match="mlp takes vectors"):
        make_network("mlp", (4, 84, 84), 6)
    with pytest.raises(ValueError, match="nature-cnn takes images"):
        make_network("nature-cnn", (4,), 2)


def test_nature_cnn_reads_pixels_as_fractions():
    torch.manual_seed(0)
    body = NatureCNN(4).double()
    plain = nn.Sequential(copy.deepcopy(body.conv), nn.Flatten(), copy.deepcopy(body.hidden), nn.ReLU())
    torch.testing.assert_close(body(frames()), plain(frames().double() / 255), rtol=1e-10, atol=1e-12)


# ---- action values


def test_tanh_mlp_is_the_prototypes_dqn_network():
    torch.manual_seed(0)
    network = make_q_network("tanh-mlp", (4,), 2)
    first, last = network.body.layers[0], network.body.layers[2]
    assert [tuple(p.shape) for p in network.parameters()] == [(256, 4), (256,), (64, 256), (64,), (2, 64), (2,)]
    for layer in (first, last, network.advantage):
        bound = (6 / sum(layer.weight.shape)) ** 0.5  # Xavier uniform
        assert 0.8 * bound < layer.weight.abs().max() <= bound
        assert layer.bias.abs().max() == 0
    x = torch.randn(5, 4)
    hidden = torch.tanh(last(torch.tanh(first(x))))
    torch.testing.assert_close(network(x), network.advantage(hidden))


def test_dueling_is_value_plus_centred_advantage():
    torch.manual_seed(0)
    network = make_q_network("nature-cnn", (4, 84, 84), 6, dueling=True, dtype="float64")
    features = network.body(frames())
    advantage = network.advantage(features)
    expected = network.value(features) + advantage - advantage.mean(dim=1, keepdim=True)
    torch.testing.assert_close(network(frames()), expected)


@pytest.mark.parametrize("dueling", [False, True])
def test_action_values_are_the_same_folded(dueling):
    sizes = dict(hidden_size=32, linear_size=64, attention="plain", dtype="float64", dueling=dueling)
    network, other = (make_q_network("attention-cnn", (4, 84, 84), 6, fold=fold, **sizes) for fold in (True, False))
    other.load_state_dict(network.state_dict())
    torch.testing.assert_close(network(frames()), other(frames()))
    torch.testing.assert_close(network(frames(), network.readout()), network(frames()))
