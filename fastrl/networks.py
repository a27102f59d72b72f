"""Networks: bodies that turn observations into features, and the heads that read them.

Suffixes name dimensions (see `fastrl.types`): B batch, C H W image, L tokens, D token width, F features; R is the
number of outputs of a read-out.

A body has `forward(obs)`, giving features [B, F]. `fold(weight, bias)` prepares a linear read-out of those features
and `read(obs, readout)` applies it, so that a body whose last layer is itself linear may merge the two.
"""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastrl.attention import attention


class Readout(NamedTuple):
    """A linear read-out of a body's features, in the form that the body's `read` takes."""

    weight: Tensor
    """[R, F]: applied to the features, or (folded) to the part of them after the last non-linearity."""
    bias: Tensor
    """[R]"""
    folded: Tensor | None = None
    """[R, input of the linear branch]: read-out and linear branch multiplied together; None when not folded."""


class Body(nn.Module):
    """What turns observations into features. Subclasses set `takes` and `out_features` and define `forward`.

    Their first constructor argument is the first entry of the observation's shape, the others are options.
    """

    takes: str = "image"
    """"image" ([C, 84, 84]) or "vector" ([S])."""
    out_features: int

    def fold(self, weight: Tensor, bias: Tensor) -> Readout:
        """Prepares a linear read-out of the features: weight [R, out_features], bias [R]."""
        return Readout(weight, bias)

    def read(self, obs: Tensor, readout: Readout) -> Tensor:
        """The read-out of the features of obs [B, ...]: [B, R]."""
        return F.linear(self(obs), readout.weight, readout.bias)


class ScaledLinear(nn.Module):
    """Linear layer whose weight rows carry a fixed random scale and, optionally, a fixed sparse mask.

        y = (W * scale * mask) x + b,   scale_i ~ U(0, 1)

    Args:
      keep_fraction: p, the fraction of inputs that each row keeps (rounded to whole inputs); 1 means no mask.
      unit_scale_fraction: m, the fraction of rows whose scale is set to 1.
    Parameters are initialised as `nn.Linear`'s: Kaiming uniform with a = sqrt(5), bias U(+-1/sqrt(fan_in)).
    """

    def __init__(
        self, in_features: int, out_features: int, keep_fraction: float = 1.0, unit_scale_fraction: float = 0.0
    ):
        super().__init__()
        for name, value in (("keep_fraction", keep_fraction), ("unit_scale_fraction", unit_scale_fraction)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}, expected a fraction between 0 and 1")
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.uniform_(self.bias, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))
        scale = torch.rand(out_features)
        scale[torch.randperm(out_features)[: round(unit_scale_fraction * out_features)]] = 1.0
        self.register_buffer("scale", scale)
        self.register_buffer("mask", _row_mask(out_features, in_features, keep_fraction))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_features] -> [B, out_features]."""
        weight = self.weight * self.scale[:, None]
        return F.linear(x, weight if self.mask is None else weight * self.mask, self.bias)

    def fold(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """A linear layer (weight [R, out_features], bias [R]) after this one, as one layer ([R, in_features], [R]).

        H (W x + b) + c = (H W) x + (H b + c): the same function and, by autograd through the product, the same
        gradients.
        """
        masked = self.weight if self.mask is None else self.weight * self.mask
        return (weight * self.scale) @ masked, torch.mv(weight, self.bias) + bias


def _row_mask(rows: int, columns: int, keep_fraction: float) -> Tensor | None:
    if keep_fraction == 1.0:
        return None
    keep = round(keep_fraction * columns)
    kept = torch.rand(rows, columns).argsort(dim=1)[:, :keep]
    return torch.zeros(rows, columns).scatter_(1, kept, 1.0)


class AttentionCNN(Body):
    """Convolutions, then a linear branch beside a self-attention branch (the prototype's network, reference section 1).

    obs uint8 [B, C, 84, 84] -> features [B, linear_size + hidden_size].

    Args:
      in_channels: C, the stacked frames.
      hidden_size, linear_size: widths of the attention and of the linear branch.
      keep_fraction, unit_scale_fraction: p and m of the linear branch, see `ScaledLinear`.
      dropout: probability on the attention branch in train mode (the prototype: 0.1).
      token_layout: "grid", one token per cell of the 7x7 map, or "raw", the prototype's: 32 consecutive numbers of the
        channel-major buffer.
      attention: "fused" (one kernel) or "plain" (`nn.MultiheadAttention`).
      fold: merge the linear branch with the heads that read it (same function, about half the arithmetic).
    """

    def __init__(
        self,
        in_channels: int,
        hidden_size: int = 1024,
        linear_size: int = 4096,
        keep_fraction: float = 1.0,
        unit_scale_fraction: float = 0.0,
        dropout: float = 0.0,
        token_layout: str = "grid",
        attention: str = "fused",
        fold: bool = True,
    ):
        super().__init__()
        self.token_layout, self.attention_kind, self.folds = token_layout, attention, fold
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, 16, 8, stride=4), nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
            nn.Conv2d(32, 32, 3), nn.ReLU(),
        )  # fmt: skip
        self.linear = ScaledLinear(1568, linear_size, keep_fraction, unit_scale_fraction)
        self.attention = nn.MultiheadAttention(32, num_heads=16, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.hidden = nn.Linear(1568, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.out_features = linear_size + hidden_size

    def forward(self, obs: Tensor) -> Tensor:
        x_BF, attended = self._branches(obs)
        return torch.cat([self.linear(x_BF), attended], dim=1)

    def fold(self, weight: Tensor, bias: Tensor) -> Readout:
        if not self.folds:
            return super().fold(weight, bias)
        split = self.linear.weight.shape[0]
        folded, bias = self.linear.fold(weight[:, :split], bias)
        return Readout(weight[:, split:], bias, folded)

    def read(self, obs: Tensor, readout: Readout) -> Tensor:
        if readout.folded is None:
            return super().read(obs, readout)
        x_BF, attended = self._branches(obs)
        return F.linear(x_BF, readout.folded, readout.bias) + F.linear(attended, readout.weight)

    def _branches(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the linear branch [B, 1568] and the output of the attention branch [B, hidden_size]."""
        x_BCHW = _convolve(self.conv, obs)
        x_BF = x_BCHW.flatten(1)
        x_BLD = x_BCHW.flatten(2).transpose(1, 2) if self.token_layout == "grid" else x_BF.view(-1, 49, 32)
        x_BLD = self.norm(x_BLD + self._attend(x_BLD))
        return x_BF, self.dropout(F.relu(self.hidden(x_BLD.flatten(1))))

    def _attend(self, x_BLD: Tensor) -> Tensor:
        module = self.attention
        if self.attention_kind == "plain":
            return module(x_BLD, x_BLD, x_BLD, need_weights=False)[0]
        qkv = F.linear(x_BLD, module.in_proj_weight, module.in_proj_bias)
        return module.out_proj(attention(qkv, module.num_heads))


class NatureCNN(Body):
    """The convolutional network of DQN. obs uint8 [B, C, 84, 84] -> features [B, hidden_size].

    Source: Mnih et al. 2015, doi:10.1038/nature14236; orthogonal initialisation (gain sqrt 2), as is usual with PPO.
    """

    def __init__(self, in_channels: int, hidden_size: int = 512):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(),
        )  # fmt: skip
        self.hidden = nn.Linear(64 * 7 * 7, hidden_size)
        self.out_features = hidden_size
        for module in (*self.conv[::2], self.hidden):
            nn.init.orthogonal_(module.weight, math.sqrt(2))
            nn.init.zeros_(module.bias)

    def forward(self, obs: Tensor) -> Tensor:
        return F.relu(self.hidden(_convolve(self.conv, obs).flatten(1)))


class MLP(Body):
    """The prototype's network for vectors: obs [B, S] -> features [B, hidden_size].

    A masked and scaled linear layer without activation (p = 0.9, m = 0), then linear and ReLU.
    """

    takes = "vector"

    def __init__(
        self, in_features: int, hidden_size: int = 1024, keep_fraction: float = 0.9, unit_scale_fraction: float = 0.0
    ):
        super().__init__()
        self.linear = ScaledLinear(in_features, hidden_size, keep_fraction, unit_scale_fraction)
        self.hidden = nn.Linear(hidden_size, hidden_size)
        self.out_features = hidden_size

    def forward(self, obs: Tensor) -> Tensor:
        return F.relu(self.hidden(self.linear(obs.to(self.linear.weight.dtype))))


class TanhMLP(Body):
    """The prototype's DQN network for vectors: obs [B, S] -> features [B, feature_size].

    Two layers with tanh, Xavier-uniform weights and biases of 0.
    """

    takes = "vector"

    def __init__(self, in_features: int, hidden_size: int = 256, feature_size: int = 64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_size), nn.Tanh(),
            nn.Linear(hidden_size, feature_size), nn.Tanh(),
        )  # fmt: skip
        self.out_features = feature_size
        for layer in self.layers[::2]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, obs: Tensor) -> Tensor:
        return self.layers(obs.to(self.layers[0].weight.dtype))


def _convolve(layers: nn.Sequential, obs: Tensor) -> Tensor:
    """layers(obs / 255), with the division moved into the first layer's few weights instead of the many pixels."""
    first = layers[0]
    x = F.conv2d(obs.to(first.weight.dtype), first.weight / 255, first.bias, first.stride)
    return layers[1:](x)


class ActorCritic(nn.Module):
    """Policy and value heads over a shared body. obs [B, *obs_shape] -> (logits [B, A], values [B]).

    `init="zero"`: both heads start at zero (the prototype: uniform policy, value 0). `init="orthogonal"`: gains 0.01
    and 1 (Huang et al. 2022, "The 37 implementation details of PPO", detail 2).
    `autocast`: the layers compute in bfloat16 where that is safe; parameters, logits and values keep their dtype.
    """

    def __init__(self, body: Body, num_actions: int, init: str = "zero", autocast: bool = False):
        super().__init__()
        self.body, self.autocast = body, autocast
        self.policy = nn.Linear(body.out_features, num_actions)
        self.value = nn.Linear(body.out_features, 1)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):
            nn.init.zeros_(head.bias)
            nn.init.zeros_(head.weight) if init == "zero" else nn.init.orthogonal_(head.weight, gain)

    def readout(self) -> Readout:
        """Both heads as one read-out. It depends on the parameters only: while acting, make it once per rollout."""
        weight = torch.cat([self.policy.weight, self.value.weight])
        return self.body.fold(weight, torch.cat([self.policy.bias, self.value.bias]))

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, logits and values."""
        return self.value.weight.dtype

    def forward(self, obs: Tensor, readout: Readout | None = None) -> tuple[Tensor, Tensor]:
        readout = self.readout() if readout is None else readout
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.autocast):
            out = self.body.read(obs, readout).to(self.dtype)
        return out[:, :-1], out[:, -1]


class QNetwork(nn.Module):
    """Action values over a body: obs [B, *obs_shape] -> Q [B, A].

    `dueling`: Q = V + A - mean(A) (Wang et al. 2016, arXiv:1511.06581, eq. 9), V and A each a linear layer on the
    features; the paper gives each a hidden layer of its own as well. The sum is linear in the features, so it is still
    one read-out. Heads are initialised as the prototype's, Xavier uniform with biases of 0.
    """

    def __init__(self, body: Body, num_actions: int, dueling: bool = False, autocast: bool = False):
        super().__init__()
        self.body, self.autocast = body, autocast
        self.advantage = nn.Linear(body.out_features, num_actions)
        self.value = nn.Linear(body.out_features, 1) if dueling else None
        for head in filter(None, (self.advantage, self.value)):
            nn.init.xavier_uniform_(head.weight)
            nn.init.zeros_(head.bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and action values."""
        return self.advantage.weight.dtype

    def readout(self) -> Readout:
        """The heads as one read-out. It depends on the parameters only."""
        weight, bias = self.advantage.weight, self.advantage.bias
        if self.value is not None:
            weight = weight - weight.mean(dim=0) + self.value.weight
            bias = bias - bias.mean() + self.value.bias
        return self.body.fold(weight, bias)

    def forward(self, obs: Tensor, readout: Readout | None = None) -> Tensor:
        readout = self.readout() if readout is None else readout
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.autocast):
            return self.body.read(obs, readout).to(self.dtype)


def network_for(obs_shape: tuple[int, ...]) -> str:
    """The default network: `attention-cnn` for images [C, H, W], `mlp` for vectors [S]."""
    return "attention-cnn" if len(obs_shape) == 3 else "mlp"


BODIES: dict[str, type[Body]] = {
    "attention-cnn": AttentionCNN,
    "nature-cnn": NatureCNN,
    "mlp": MLP,
    "tanh-mlp": TanhMLP,
}
"""What `--network` offers. A new body is added here."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""What `--dtype` offers, and the dtype of the parameters. bfloat16 is mixed precision, see `ActorCritic`."""


def network_options(name: str) -> list[str]:
    """The keyword arguments that a body takes."""
    return list(inspect.signature(BODIES[name]).parameters)[1:]


def make_body(name: str, obs_shape: tuple[int, ...], **options) -> Body:
    """The named body for these observations.

    Args:
      name: a key of BODIES. obs_shape: [C, 84, 84] for the convolutional ones, [S] for the others.
      options: see the body.
    Raises: ValueError when the body does not fit the observations.
    """
    if name not in BODIES:
        raise ValueError(f"network is {name!r}, expected one of {', '.join(BODIES)}")
    body = BODIES[name]
    if not (len(obs_shape) == 1 if body.takes == "vector" else tuple(obs_shape[1:]) == (84, 84)):
        want = "vectors [S]" if body.takes == "vector" else "images [C, 84, 84]"
        raise ValueError(
            f"network {name} takes {want}, got observations of shape {list(obs_shape)}: use --network auto"
        )
    return body(obs_shape[0], **options)


def make_network(
    name: str, obs_shape: tuple[int, ...], num_actions: int, head_init: str = "zero", dtype: str = "float32", **options
) -> ActorCritic:
    """An actor-critic over the named body; see `make_body` for its arguments and errors. dtype: a key of DTYPES."""
    body = make_body(name, obs_shape, **options)
    return ActorCritic(body, num_actions, head_init, autocast=dtype == "bfloat16").to(DTYPES[dtype])


def make_q_network(
    name: str, obs_shape: tuple[int, ...], num_actions: int, dueling: bool = False, dtype: str = "float32", **options
) -> QNetwork:
    """Action values over the named body; see `make_body` for its arguments and errors. dtype: a key of DTYPES."""
    body = make_body(name, obs_shape, **options)
    return QNetwork(body, num_actions, dueling, autocast=dtype == "bfloat16").to(DTYPES[dtype])
