"""Attention: against a plain formula, gradients by differences over all options, blocks, masks, dropout, memory, errors."""

import math
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.ops import attention
from tinygrad_gpu.testing import strategies

OPTIONS = {
    "all keys": {},
    "scaled": {"scale": 0.7},
    "causal": {"is_causal": True},
    "window 1": {"is_causal": True, "window": 1},
    "window 3": {"is_causal": True, "window": 3},
}


def reference(q, k, v, is_causal=False, scale=None, window=None):
    """A query at a time, from the definition."""
    (b, h, tq, d), (_, hkv, tk, _) = q.shape, k.shape
    scale = 1 / math.sqrt(max(d, 1)) if scale is None else scale
    o = np.zeros(q.shape)
    for n, head, i in np.ndindex(b, h, tq):
        last = i + tk - tq if is_causal else tk - 1
        first = max(last - window + 1, 0) if window else 0
        keys, values = (a[n, head // (h // hkv), first : max(last + 1, first)] for a in (k, v))
        if len(keys):
            p = np.exp(scale * keys @ q[n, head, i])
            o[n, head, i] = p @ values / p.sum()
    return o


@st.composite
def operands(draw):
    """q, k and v with groups of heads, Tq and Tk apart, lengths of 0 and 1, in any memory layout."""
    b, hkv, group, d = (draw(st.integers(low, high)) for low, high in ((0, 2), (1, 2), (1, 3), (0, 3)))
    tq, tk = draw(st.sampled_from([0, 1, 2, 4])), draw(st.sampled_from([0, 1, 3, 5]))
    shapes = (b, hkv * group, tq, d), (b, hkv, tk, d), (b, hkv, tk, d)
    return [leaf(draw(strategies.arrays(s, min_value=-2, max_value=2)), draw(layouts)) for s in shapes]


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=20)
@given(inputs=operands())
def test_values_and_gradients(device, name, inputs):
    op = lambda *a: F.scaled_dot_product_attention(*a, **OPTIONS[name])  # noqa: E731
    assert_near(op(*inputs).numpy(), reference(*(x.numpy() for x in inputs), **OPTIONS[name]), rtol=1e-12, atol=1e-13)
    assert tg.testing.gradcheck(op, *inputs)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dtypes(device, name, dtype):
    """The gradients use the result as it was rounded; floor is the size of the sums they are differences of."""
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(-1, 1, s) for s in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))]
    check_dtype(lambda *a: F.scaled_dot_product_attention(*a, **OPTIONS[name]), arrays, dtype, floor=8)


@pytest.mark.parametrize(("window", "seen"), [(None, [4, 5]), (3, [3, 3])])
def test_causal_is_aligned_to_the_last_key(device, window, seen):
    """Tq = 2, Tk = 5. With q = 0 every key a query sees has the same weight."""
    v = tg.Tensor(np.eye(5, dtype=np.float32)[None, None])
    y = F.scaled_dot_product_attention(tg.zeros(1, 1, 2, 5), tg.zeros(1, 1, 5, 5), v, is_causal=True, window=window)
    weights = y.numpy()[0, 0]
    assert (weights > 0).sum(axis=1).tolist() == seen
    assert_near(weights.sum(axis=1).astype(float), np.ones(2), rtol=1e-6)


def test_a_query_without_keys_is_zero_and_leaves_its_neighbours(device):
    """Tq = 3, Tk = 1: two queries come before the first key."""
    q, k, v = (leaf(np.random.default_rng(0).normal(size=(1, 1, t, 2))) for t in (3, 1, 1))
    y, dq, dk, dv = gradients(lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), q, k, v)
    assert (y.numpy()[0, 0, :2] == 0).all()
    assert (y.numpy()[0, 0, 2] == v.numpy()[0, 0, 0]).all()
    assert (dq.numpy() == 0).all()  # one key alone has weight 1 whatever the query
    assert (dk.numpy() == 0).all()
    assert (dv.numpy() == 1).all()


def test_scores_of_minus_infinity(device):
    """A query whose every score is -inf: output 0, gradient 0; a query beside it as if alone."""
    q = np.ones((1, 1, 2, 1), np.float32)
    k = np.full((1, 1, 3, 1), -3e38, np.float32)
    q[0, 0, 0] = 3e38
    q[0, 0, 1] = 0.0
    v = np.array([1.0, 2.0, 6.0], np.float32).reshape(1, 1, 3, 1)
    y, dq, _, dv = gradients(F.scaled_dot_product_attention, leaf(q), leaf(k), leaf(v))
    assert_near(y.numpy().ravel().astype(float), np.array([0.0, 3.0]), rtol=1e-6)
    assert dq.numpy()[0, 0, 0] == 0
    assert_near(dv.numpy().ravel().astype(float), np.full(3, 1 / 3), rtol=1e-6)


@pytest.mark.parametrize("value", [1e4, math.inf, -math.inf])
def test_the_future_is_not_seen(device, value):
    q, k, v = (np.random.default_rng(i).normal(size=(1, 2, 6, 4)).astype(np.float32) for i in range(3))
    before = F.scaled_dot_product_attention(*map(tg.Tensor, (q, k, v)), is_causal=True).numpy()
    k[:, :, 4:] = value
    after = F.scaled_dot_product_attention(*map(tg.Tensor, (q, k, v)), is_causal=True).numpy()
    assert (before[:, :, :4] == after[:, :, :4]).all()


@pytest.mark.parametrize("size", [1, 200, 1000, 10_000])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_blocks_change_nothing(device, monkeypatch, size, dropout_p):
    """Down to one head a block; the dropout mask is that of the whole."""
    inputs = [leaf(np.random.default_rng(i).normal(size=(3, h, 4, 2))) for i, h in enumerate((6, 2, 2))]

    def run():
        tg.manual_seed(1)
        for x in inputs:
            x.grad = None
        op = lambda *a: F.scaled_dot_product_attention(*a, is_causal=True, dropout_p=dropout_p)  # noqa: E731
        return [t.numpy().copy() for t in gradients(op, *inputs)]

    whole = run()
    monkeypatch.setattr(attention, "_BLOCK", dict.fromkeys(attention._BLOCK, size))
    for found, expected in zip(run(), whole, strict=True):
        assert_near(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("batch", "heads", "size"), [(0, 2, 8), (1, 1, 8), (3, 4, 1 << 17), (5, 7, 1 << 18), (2, 3, 1 << 30)]
)
def test_blocks_cover_each_head_once(batch, heads, size):
    count = np.zeros((batch, heads), int)
    for b, h in attention.blocks(batch, heads, size, "numpy"):
        count[b, h] += 1
        assert (b.stop - b.start) * (h.stop - h.start) * size <= max(attention._BLOCK["numpy"], size)
        assert b.stop - b.start == 1 or h == slice(0, heads)
    assert (count == 1).all()


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_gradients(device, causal):
    inputs = [leaf(np.random.default_rng(i).normal(size=(2, h, 3, 2))) for i, h in enumerate((4, 2, 2))]

    def op(*a):
        tg.manual_seed(3)
        return F.scaled_dot_product_attention(*a, is_causal=causal, dropout_p=0.4)

    assert tg.testing.gradcheck(op, *inputs)


def test_dropout_keeps_the_mean(device):
    q, v = tg.zeros(1, 1, 64, 4), tg.ones(1, 1, 64, 4)
    y = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5).numpy()
    assert abs(y.mean() - 1) < 5 / 64 / 8 * 2
    assert y.std() > 0
    assert (F.scaled_dot_product_attention(q, q, v, dropout_p=1.0).numpy() == 0).all()


def test_no_array_of_the_scores_is_kept():
    """Neither forward nor backward holds (B, H, T, T), which is 32 MiB here."""
    q, k, v = (tg.randn(2, 16, 512, 8, device="cpu", requires_grad=True) for _ in range(3))
    tracemalloc.start()
    try:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


def test_frozen_inputs_get_nothing(device):
    q, k, v = (tg.randn(1, 1, 3, 2) for _ in range(3))
    k.requires_grad_()
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad.shape == k.shape


NAME = "scaled_dot_product_attention"
BAD = {
    "three axes": ({"q": (2, 3, 4)}, {}, ValueError, f"{NAME}: q must have shape (B, heads, T, D), got (2, 3, 4)"),
    "k and v": (
        {"v": (2, 2, 4, 4)},
        {},
        ValueError,
        f"{NAME}: k and v must have one shape, got (2, 2, 5, 4) and (2, 2, 4, 4)",
    ),
    "width": (
        {"q": (2, 4, 3, 6)},
        {},
        ValueError,
        f"{NAME}: q and k must agree in B and D, got (2, 4, 3, 6) and (2, 2, 5, 4)",
    ),
    "heads": (
        {"q": (2, 3, 3, 4)},
        {},
        ValueError,
        f"{NAME}: the heads of q must be a multiple of those of k, got 3 and 2",
    ),
    "window alone": ({}, {"window": 2}, ValueError, f"{NAME}: window needs is_causal=True"),
    "window 0": ({}, {"is_causal": True, "window": 0}, ValueError, f"{NAME}: window must be at least 1, got 0"),
    "dropout": ({}, {"dropout_p": 2}, ValueError, f"{NAME}: the probability must be in [0, 1], got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    shapes, options, error, message = BAD[name]
    shapes = {"q": (2, 4, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)} | shapes
    with pytest.raises(error, match=re.escape(message)):
        F.scaled_dot_product_attention(*(tg.ones(*s) for s in shapes.values()), **options)
