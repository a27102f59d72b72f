"""Self-attention of many narrow heads, as one fused operator.

With heads of width 2, matrix kernels spend their time on moving scores. `fused` runs a C++ kernel that keeps one head
per vector lane, never stores a score, and computes the scores again in the backward pass. It is a torch custom
operator: autograd and torch.compile see through it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastrl import kernels

FUSED_WIDTHS = (1, 2, 4, 8)


def attention(qkv_BLD: Tensor, num_heads: int, *, implementation: str = "fused") -> Tensor:
    """Multi-head self-attention of L tokens, between the input and the output projection.

        out_i = sum_j softmax_j(q_i . k_j / sqrt(width)) v_j   for each head, width = D / num_heads

    Args:
      qkv_BLD: [B, L, 3 * D], the queries, keys and values in the order of `nn.MultiheadAttention`'s input projection:
        D columns each, of which head h owns h * width to (h + 1) * width.
      num_heads: a divisor of D.
      implementation: "plain" is torch's `scaled_dot_product_attention`, for any width and dtype. "fused" takes width
        1, 2, 4 or 8, computes in float32 and accepts float32, bfloat16 and float16. On CPU it needs the native
        kernels; on other devices it is written as broadcasts that torch.compile may fuse (never run on a GPU so far).
    Returns: [B, L, D] in the dtype of the input, the heads side by side, ready for the output projection.
    Raises: ValueError on a shape, dtype or name it does not know, or when the native kernels are not installed.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1.
    """
    if qkv_BLD.dim() != 3 or num_heads < 1 or qkv_BLD.shape[2] % (3 * num_heads):
        raise ValueError(f"qkv must be [B, L, 3 * D] with D a multiple of {num_heads} heads; got {list(qkv_BLD.shape)}")
    if implementation == "plain":
        return _plain(qkv_BLD, num_heads)
    if implementation != "fused":
        raise ValueError(f"implementation must be fused or plain; got {implementation!r}")
    width = qkv_BLD.shape[2] // (3 * num_heads)
    if width not in FUSED_WIDTHS:
        raise ValueError(f"fused attention takes heads of width 1, 2, 4 or 8; got {width}: use 'plain'")
    if qkv_BLD.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"fused attention computes in float32; got {qkv_BLD.dtype}: use 'plain'")
    if qkv_BLD.device.type != "cpu":
        return _broadcast(qkv_BLD.float(), num_heads).to(qkv_BLD.dtype)
    out_BLD, _ = torch.ops.fastrl.attention(qkv_BLD.float(), num_heads)
    return out_BLD.to(qkv_BLD.dtype)


def _heads(qkv_BLD: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each [B, num_heads, L, width]."""
    batch, length, columns = qkv_BLD.shape
    qkv = qkv_BLD.view(batch, length, 3, num_heads, columns // (3 * num_heads))
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def _plain(qkv_BLD: Tensor, num_heads: int) -> Tensor:
    return F.scaled_dot_product_attention(*_heads(qkv_BLD, num_heads)).transpose(1, 2).flatten(2)


def _broadcast(qkv_BLD: Tensor, num_heads: int) -> Tensor:
    q, k, v = _heads(qkv_BLD, num_heads)
    # A sum over products instead of a matrix product, so that the compiler may fuse scores, softmax and output.
    scores = (q[:, :, :, None, :] * k[:, :, None, :, :]).sum(-1) * q.shape[-1] ** -0.5
    out = (scores.softmax(-1)[..., None] * v[:, :, None, :, :]).sum(-2)
    return out.transpose(1, 2).flatten(2)


@torch.library.custom_op("fastrl::attention", mutates_args=(), device_types="cpu")
def _attention(qkv_BLD: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """out [B, L, D] and, for the backward pass, the statistics of each softmax [B, L, 2, num_heads]."""
    qkv_BLD = qkv_BLD.detach().contiguous()
    out, stats = _empty_outputs(qkv_BLD, num_heads)
    native = kernels.choose("native")
    native.attention_forward(qkv_BLD.numpy(), num_heads, torch.get_num_threads(), out.numpy(), stats.numpy())
    return out, stats


@torch.library.custom_op("fastrl::attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(qkv_BLD: Tensor, out_BLD: Tensor, stats: Tensor, grad_BLD: Tensor, num_heads: int) -> Tensor:
    """The gradient of qkv_BLD from the gradient of out_BLD."""
    inputs = [t.detach().contiguous().numpy() for t in (qkv_BLD, out_BLD, stats, grad_BLD)]
    grad_qkv = torch.empty(qkv_BLD.shape)
    kernels.choose("native").attention_backward(*inputs, num_heads, torch.get_num_threads(), grad_qkv.numpy())
    return grad_qkv


@_attention.register_fake
def _empty_outputs(qkv_BLD: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    batch, length, columns = qkv_BLD.shape
    return qkv_BLD.new_empty(batch, length, columns // 3), qkv_BLD.new_empty(batch, length, 2, num_heads)


@_attention_backward.register_fake
def _(qkv_BLD: Tensor, out_BLD: Tensor, stats: Tensor, grad_BLD: Tensor, num_heads: int) -> Tensor:
    return qkv_BLD.new_empty(qkv_BLD.shape)


def _save(ctx, inputs, output) -> None:
    qkv_BLD, ctx.num_heads = inputs
    ctx.save_for_backward(qkv_BLD, *output)
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad_BLD: Tensor | None, _grad_stats: None) -> tuple[Tensor | None, None]:
    if grad_BLD is None:
        return None, None
    return torch.ops.fastrl.attention_backward(*ctx.saved_tensors, grad_BLD, ctx.num_heads), None


_attention.register_autograd(_gradient, setup_context=_save)
