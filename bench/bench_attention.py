"""Attention of AttentionCNN (49 tokens, 16 heads of width 2) on a minibatch of 1024, against torch's own."""

from __future__ import annotations

import pytest

BATCH, LENGTH, DIM, NUM_HEADS = 1024, 49, 32, 16


def attend(implementation: str):
    """A function from qkv [B, L, 3 * D] to [B, L, D]."""
    import torch
    from torch.nn import functional as F

    from fastrl.attention import attention

    if implementation == "nn.MultiheadAttention":
        # Its whole functional form, which cannot leave its two projections out; identities stand in for them, so this
        # reference also pays for four small matrix products.
        eye = torch.eye(DIM)

        def multihead(qkv):
            q, k, v = (x.transpose(0, 1) for x in qkv.chunk(3, dim=2))
            return F.multi_head_attention_forward(
                q, k, v, DIM, NUM_HEADS, eye.repeat(3, 1), None, None, None, False, 0.0, eye, None, need_weights=True
            )[0].transpose(0, 1)

        return multihead
    return lambda qkv: attention(qkv, NUM_HEADS, implementation=implementation)


@pytest.mark.parametrize("implementation", ["fused", "plain", "nn.MultiheadAttention"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def bench_attention(benchmark, direction, implementation):
    import torch

    benchmark.group = f"attention {direction}, {BATCH} samples"
    torch.manual_seed(0)
    qkv = torch.randn(BATCH, LENGTH, 3 * DIM, requires_grad=direction != "forward")
    grad = torch.randn(BATCH, LENGTH, DIM)
    function = attend(implementation)

    def call():
        qkv.grad = None
        out = function(qkv)
        if qkv.requires_grad:
            out.backward(grad)
        return out.detach()

    out = benchmark.pedantic(call, rounds=5, iterations=1, warmup_rounds=1)
    torch.testing.assert_close(out, attend("plain")(qkv).detach(), atol=1e-5, rtol=1e-4)
    if benchmark.stats:
        benchmark.extra_info["samples_per_s"] = BATCH / benchmark.stats.stats.median
        benchmark.extra_info["threads"] = torch.get_num_threads()
