from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from fastrl import kernels
from fastrl.attention import attention

SHAPES = [(3, 49, 16, 2), (1, 49, 16, 2), (2, 1, 16, 2), (2, 7, 5, 1), (2, 6, 17, 4), (2, 5, 33, 8), (9, 3, 4, 2)]


def random_qkv(batch, length, num_heads, width, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(batch, length, 3 * num_heads * width, generator=generator)


def exact_attention(qkv, num_heads):
    """nn.MultiheadAttention in float64, both of whose projections let the tokens through unchanged."""
    dim = qkv.shape[2] // 3
    oracle = nn.MultiheadAttention(dim, num_heads, batch_first=True, bias=False, kdim=dim, vdim=dim).double()
    oracle.in_proj_weight.data = torch.eye(dim, dtype=torch.float64).repeat(3, 1)
    oracle.out_proj.weight.data = torch.eye(dim, dtype=torch.float64)
    return oracle(*qkv.chunk(3, dim=2), need_weights=True)[0]


def output_and_gradient(function, qkv, grad):
    qkv = qkv.clone().requires_grad_()
    out = function(qkv)
    out.backward(grad.to(out.dtype))
    return out.detach(), qkv.grad


@pytest.mark.parametrize("implementation", ["fused", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_multihead_attention_in_float64(shape, implementation):
    batch, length, num_heads, width = shape
    qkv = random_qkv(*shape)
    grad = random_qkv(*shape, seed=1)[:, :, : num_heads * width]
    out, grad_qkv = output_and_gradient(lambda x: attention(x, num_heads, implementation=implementation), qkv, grad)
    exact, exact_grad = output_and_gradient(lambda x: exact_attention(x, num_heads), qkv.double(), grad)
    assert out.shape == (batch, length, num_heads * width)
    assert (out - exact).abs().max() <= 1e-5
    assert (grad_qkv - exact_grad).abs().max() <= 1e-4 * exact_grad.abs().max()


@pytest.mark.parametrize("scale", [1e-20, 30.0])
def test_fused_attention_stays_exact_where_softmax_is_flat_or_one_hot(scale):
    qkv = random_qkv(2, 49, 16, 2, scale)
    grad = random_qkv(2, 49, 16, 2, seed=1)[:, :, :32]
    out, grad_qkv = output_and_gradient(lambda x: attention(x, 16), qkv, grad)
    exact, exact_grad = output_and_gradient(lambda x: exact_attention(x, 16), qkv.double(), grad)
    # Scores reach 900 scale^2; their rounding, 6e-8 of that, is the relative error of a probability.
    assert (out - exact).abs().max() <= 1e-5 * max(1, scale) ** 2 * scale
    assert (grad_qkv - exact_grad).norm() <= 1e-4 * max(1, scale) * exact_grad.norm()


def test_fused_gradient_agrees_with_finite_differences():
    qkv = random_qkv(1, 4, 2, 2).requires_grad_()
    attention(qkv, 2).pow(2).sum().backward()
    step = 1e-2
    for index in [(0, 0, 0), (0, 1, 5), (0, 2, 6), (0, 3, 11)]:
        difference = torch.zeros_like(qkv)
        difference[index] = step
        with torch.no_grad():
            up, down = (attention(qkv + sign * difference, 2).pow(2).sum() for sign in (1, -1))
        assert qkv.grad[index].item() == pytest.approx(((up - down) / (2 * step)).item(), abs=2e-3)


@pytest.mark.parametrize("first", [(0, 0, 0), (0, 2, 32), (0, 2, 64)])
def test_fused_attention_shows_a_nan_exactly_where_it_reaches(first):
    qkv = random_qkv(2, 5, 16, 2)
    qkv[first] = float("nan")
    expected = torch.zeros(2, 5, 32, dtype=torch.bool)
    if first[2] == 0:  # a query: both columns of its own output
        expected[0, first[1], 0:2] = True
    elif first[2] == 32:  # a key: head 0 of every token of the sample
        expected[0, :, 0:2] = True
    else:  # a value: one column
        expected[0, :, 0] = True
    assert torch.equal(attention(qkv, 16).isnan(), expected)


def test_fused_attention_is_the_same_bits_on_each_call_and_for_any_number_of_threads():
    qkv, grad = random_qkv(40, 49, 16, 2), random_qkv(40, 49, 16, 2, seed=1)[:, :, :32]
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 2):
            torch.set_num_threads(num_threads)
            results.append(output_and_gradient(lambda x: attention(x, 16), qkv, grad))
    finally:
        torch.set_num_threads(before)
    for out, grad_qkv in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad_qkv, results[0][1])


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_attention_agrees_between_instruction_sets(shape):
    native = kernels.choose("native")
    batch, length, num_heads, width = shape
    qkv, grad = random_qkv(*shape), random_qkv(*shape, seed=1)[:, :, : num_heads * width].contiguous()
    results = {}
    for isa in native.attention_isas():
        out, stats, grad_qkv = torch.empty_like(grad), torch.empty(batch, length, 2, num_heads), torch.empty_like(qkv)
        native.attention_forward(qkv.numpy(), num_heads, 2, out.numpy(), stats.numpy(), isa=isa)
        arrays = (x.numpy() for x in (qkv, out, stats, grad))
        native.attention_backward(*arrays, num_heads, 2, grad_qkv.numpy(), isa=isa)
        results[isa] = out, grad_qkv
    assert "baseline" in results
    for result in results.values():  # they differ by fused multiply-adds
        torch.testing.assert_close(result, results["baseline"], atol=1e-5, rtol=1e-4)


def test_fused_attention_treats_samples_alone():
    qkv = random_qkv(12, 49, 16, 2)
    together = attention(qkv, 16)
    assert torch.equal(together, torch.cat([attention(sample, 16) for sample in qkv.split(1)]))


def test_fused_attention_compiles_without_a_graph_break():
    torch._dynamo.reset()
    qkv, grad = random_qkv(4, 9, 16, 2), random_qkv(4, 9, 16, 2, seed=1)[:, :, :32]
    compiled = torch.compile(lambda x: 2 * attention(3 * x, 16), fullgraph=True)
    out, grad_qkv = output_and_gradient(compiled, qkv, grad)
    eager, eager_grad = output_and_gradient(lambda x: 2 * attention(3 * x, 16), qkv, grad)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(grad_qkv, eager_grad)


def test_fused_attention_is_a_sound_torch_operator():
    torch.library.opcheck(torch.ops.fastrl.attention.default, (random_qkv(2, 5, 16, 2).requires_grad_(), 16))


def test_fused_attention_takes_strided_read_only_half_and_empty_input():
    qkv = random_qkv(3, 6, 4, 2)
    expected = attention(qkv, 4)
    strided = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attention(strided, 4), expected)
    half = attention(qkv.bfloat16(), 4)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, attention(qkv.bfloat16().float(), 4).bfloat16())
    assert attention(qkv[:0], 4).shape == (0, 6, 8)
    assert attention(qkv[:, :0], 4).shape == (3, 0, 8)


def test_attention_on_an_accelerator_is_the_same_function():
    # The form for other devices is plain torch, so its arithmetic can be checked on the CPU.
    from fastrl.attention import _broadcast

    qkv = random_qkv(3, 7, 16, 2)
    torch.testing.assert_close(_broadcast(qkv, 16), attention(qkv, 16, implementation="plain"))


@pytest.mark.gpu
def test_fused_attention_on_a_gpu_equals_the_cpu():
    qkv, grad = random_qkv(3, 49, 16, 2), random_qkv(3, 49, 16, 2, seed=1)[:, :, :32]
    on_cpu = output_and_gradient(lambda x: attention(x, 16), qkv, grad)
    on_gpu = output_and_gradient(lambda x: attention(x, 16), qkv.cuda(), grad.cuda())
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("qkv", "num_heads", "implementation", "message"),
    [
        (torch.zeros(2, 96), 16, "fused", r"qkv must be \[B, L, 3 \* D\]"),
        (torch.zeros(2, 5, 95), 16, "plain", "D a multiple of 16 heads"),
        (torch.zeros(2, 5, 96), 0, "fused", "D a multiple of 0 heads"),
        (torch.zeros(2, 5, 9), 1, "fused", "width 1, 2, 4 or 8; got 3: use 'plain'"),
        (torch.zeros(2, 5, 96).double(), 16, "fused", "got torch.float64: use 'plain'"),
        (torch.zeros(2, 5, 96), 16, "flash", "must be fused or plain; got 'flash'"),
    ],
)
def test_attention_names_what_does_not_fit(qkv, num_heads, implementation, message):
    with pytest.raises(ValueError, match=message):
        attention(qkv, num_heads, implementation=implementation)


def test_native_attention_refuses_what_it_cannot_run():
    native = kernels.choose("native")
    qkv, out, stats = np.zeros((2, 3, 12), "f4"), np.zeros((2, 3, 4), "f4"), np.zeros((2, 3, 2, 2), "f4")
    native.attention_forward(qkv, 2, 1, out, stats)
    with pytest.raises(ValueError, match="has no attention for isa mmx"):
        native.attention_forward(qkv, 2, 1, out, stats, isa="mmx")
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        native.attention_forward(qkv, 2, 0, out, stats)
    with pytest.raises(ValueError, match="qkv has 12 columns"):
        native.attention_forward(qkv, 5, 1, out, stats)
    with pytest.raises(ValueError, match="stats: axis 3 has length 2, expected 4"):
        native.attention_forward(qkv, 4, 1, out, stats)
    with pytest.raises(TypeError):
        native.attention_forward(qkv.astype("f8"), 2, 1, out, stats)


def test_fused_attention_without_the_native_build_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastrl._native", None)
    with pytest.raises(ValueError, match="native kernels are not available"):
        attention(torch.zeros(1, 2, 6), 1)
    assert attention(torch.zeros(1, 2, 6), 1, implementation="plain").shape == (1, 2, 2)
