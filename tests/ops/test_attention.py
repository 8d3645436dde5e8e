"""scaled_dot_product_attention: values against a loop over queries, gradients by differences, masks, groups, dropout,
blocks, dtypes, memory, infinite scores, errors."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import LAYOUTS, ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tests.ops.test_linear_cross_entropy import peak
from tinygrad_gpu.ops import attention
from tinygrad_gpu.random import philox
from tinygrad_gpu.testing import strategies

inf, nan = math.inf, math.nan
rng = np.random.default_rng
attend = F.scaled_dot_product_attention


def seen(i, tq, tk, is_causal=False, window=None):
    """The keys that query i sees."""
    last = i + tk - tq
    return [j for j in range(tk) if not is_causal or (j <= last and (window is None or j > last - window))]


def reference(q, k, v, scale=None, **mask):
    """Query by query, from the definition."""
    out, group = np.zeros_like(q), max(q.shape[1] // max(k.shape[1], 1), 1)
    for b, h, i in np.ndindex(q.shape[:3]):
        keys = seen(i, q.shape[2], k.shape[2], **mask)
        if keys:
            p = np.exp(k[b, h // group, keys] @ q[b, h, i] * (max(q.shape[3], 1) ** -0.5 if scale is None else scale))
            out[b, h, i] = p / p.sum() @ v[b, h // group, keys]
    return out


MASKS = [{}, {"is_causal": True}, *({"is_causal": True, "window": w} for w in (1, 2, 3, 100))]


@st.composite
def problems(draw, max_side=5):
    """q, k and v: zero and one included in each size, Tq unlike Tk, groups of heads."""
    side = st.sampled_from([n for n in strategies.SIDES if n <= max_side])
    b, heads, group, tq, tk, d = draw(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3), side, side, side)
    )
    shapes = (b, heads * group, tq, d), (b, heads, tk, d), (b, heads, tk, d)
    return [draw(strategies.arrays(s, min_value=-2, max_value=2)) for s in shapes]


@settings(max_examples=60)
@given(
    problems(),
    st.lists(layouts, min_size=3, max_size=3),
    st.sampled_from(MASKS),
    st.sampled_from([None, 0.3, -1.0, 0.0]),
)
def test_values_and_gradients(device, arrays, forms, mask, scale):
    leaves = [leaf(a, form) for a, form in zip(arrays, forms, strict=True)]
    assert_near(attend(*leaves, scale=scale, **mask).numpy(), reference(*arrays, scale=scale, **mask), 1e-12, 1e-13)
    if sum(x.size for x in leaves) <= 150:
        assert tg.testing.gradcheck(lambda q, k, v: attend(q, k, v, scale=scale, **mask), *leaves)


@settings(max_examples=15)
@given(problems(), st.sampled_from(list(ROUNDING)), st.sampled_from(MASKS), st.sampled_from([0.0, 0.4]))
def test_kernels(kernels, cut, arrays, dtype, mask, dropout_p):
    """As float64, all heads at once and head by head: with products and rounded weights of their own."""
    for size in (1 << 20, 1):
        cut(size, 1 << 20)

        def op(*x):
            tg.manual_seed(0)
            return attend(*x, dropout_p=dropout_p, **mask)

        check_dtype(op, arrays, dtype, floor=16)


def dtype_of(backend):
    """What the mathematics is tested in, and what the kernels take."""
    return tg.float64 if backend == "cpu" else tg.float32


def qkv(b=2, heads=4, key_heads=2, tq=9, tk=9, d=4):
    return [
        rng(i).standard_normal(s)
        for i, s in enumerate([(b, heads, tq, d), (b, key_heads, tk, d), (b, key_heads, tk, d)])
    ]


@pytest.fixture
def cut(monkeypatch):
    """cut(bytes, queries): work in blocks of so many bytes and spans of so many queries from now on."""

    def cut(size, queries):
        for name, value in (("_BLOCK", size), ("_SPAN", queries)):
            monkeypatch.setattr(attention, name, {"numpy": value, "cupy": value})

    return cut


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("tq", "tk"), [(9, 9), (5, 10), (10, 5), (1, 9)])
def test_blocks_do_not_change_the_result(device, cut, tq, tk, mask, dropout_p):
    """One key head at a time or all, one query at a time or all: the dropout mask is the same too."""
    results = []
    for size, queries in ((1 << 29, 100), (1, 1), (1, 4), (2000, 3), (3 * 8 * 10 * 2, 100), (1 << 29, 2)):
        cut(size, queries)
        tg.manual_seed(0)
        found = gradients(
            lambda *x: attend(*x, dropout_p=dropout_p, **mask),
            *map(leaf, qkv(tq=tq, tk=tk)),
            cotangent=COTANGENT[:, :, :tq],
        )
        results.append([a.numpy() for a in found])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert_near(a, b, rtol=1e-12, atol=1e-13)


COTANGENT = rng(9).uniform(0.5, 1.5, (2, 4, 10, 4))

CONFIG = [  # batch, key heads, group, tq, tk, bytes, causal, window, module: blocks, spans (queries and keys)
    ((2, 2, 1, 64, 64, 4, True, None, "numpy"), [(0, 2, 0, 2)], [(0, 64, 0, 64)]),
    ((1, 2, 1, 256, 256, 4, True, None, "numpy"), [(0, 1, 0, 2)], [(0, 128, 0, 128), (128, 256, 0, 256)]),
    ((1, 1, 1, 256, 256, 4, True, 100, "numpy"), [(0, 1, 0, 1)], [(0, 128, 0, 128), (128, 256, 29, 256)]),
    ((1, 2, 2, 256, 256, 4, False, None, "numpy"), [(0, 1, 0, 1), (0, 1, 1, 2)], [(0, 256, 0, 256)]),
    ((2, 1, 2, 256, 256, 4, False, None, "numpy"), [(0, 1, 0, 1), (1, 2, 0, 1)], [(0, 256, 0, 256)]),
    ((1, 1, 1, 2, 300000, 8, False, None, "numpy"), [(0, 1, 0, 1)], [(0, 1, 0, 300000), (1, 2, 0, 300000)]),
    ((1, 1, 1, 256, 256, 4, True, None, "cupy"), [(0, 1, 0, 1)], [(0, 256, 0, 256)]),
    ((1, 1, 1, 3, 1, 4, True, None, "numpy"), [(0, 1, 0, 1)], [(0, 3, 0, 1)]),
    ((1, 1, 1, 0, 1, 4, True, None, "numpy"), [(0, 1, 0, 1)], []),
    ((1, 0, 0, 3, 1, 4, True, None, "numpy"), [], [(0, 3, 0, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "blocks", "spans"), CONFIG)
def test_config(case, blocks, spans):
    found, parts = attention.config(*case)
    assert [(b.start, b.stop, h.start, h.stop) for b, h in found] == blocks
    assert [(s.queries.start, s.queries.stop, s.keys.start, s.keys.stop) for s in parts] == spans


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_dtypes(backend, dtype, mask, dropout_p):
    """Values far from 0 make dP and D, up to 60 here, large next to their difference: a rounded O would show in D."""

    def op(*x):
        tg.manual_seed(0)
        return attend(*x, dropout_p=dropout_p, **mask)

    q, k, v = qkv(tq=6)
    check_dtype(op, [q, k, v + 10], dtype, floor=60 if dtype == tg.float32 else 4)


def test_two_queries_and_five_keys(backend):
    """Query 0 sees four keys, query 1 five; in a window of 3, exactly three each."""
    q, k, v = np.zeros((1, 1, 2, 5)), np.zeros((1, 1, 5, 5)), np.eye(5)[None, None]
    weights = attend(*(tg.Tensor(a) for a in (q, k, v)), is_causal=True).numpy()[0, 0]
    assert_near(weights, np.float64([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]) / [[4], [5]], rtol=1e-15)
    weights = attend(*(tg.Tensor(a) for a in (q, k, v)), is_causal=True, window=3).numpy()[0, 0]
    assert_near(weights, np.float64([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]) / 3, rtol=1e-15)


def test_a_query_that_sees_no_key(backend):
    """Its output and gradient are 0, its neighbours' those that they have without it."""
    q, k, v = qkv(tq=5, tk=2)
    found = gradients(lambda *x: attend(*x, is_causal=True), *map(leaf, (q, k, v)))
    alone = gradients(lambda *x: attend(*x, is_causal=True), *map(leaf, (q[:, :, 3:], k, v)))
    for a, b, rows in zip(found, alone, (slice(3, None), slice(3, None), slice(None), slice(None)), strict=True):
        assert_near(a.numpy()[:, :, rows], b.numpy(), rtol=1e-14)
    assert (found[0].numpy()[:, :, :3] == 0).all()
    assert (found[1].numpy()[:, :, :3] == 0).all()


@pytest.mark.parametrize("queries", [2, 100])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("which", "value"), [(1, -7.0), (2, -7.0), (1, inf), (1, -inf), (1, nan)])
def test_a_key_that_is_not_seen_is_not_noticed(backend, cut, queries, window, which, value):
    """Whatever key 3 holds, the queries that do not see it keep their outputs; while it is finite, as its value must
    be, their gradients too (0 times inf is NaN)."""
    cut(1 << 29, queries)
    arrays, op = qkv(tq=6, tk=6), lambda *x: attend(*x, is_causal=True, window=window)
    blind = [i for i in range(6) if 3 not in seen(i, 6, 6, is_causal=True, window=window)]
    y, dq, *_ = gradients(op, *(leaf(a, dtype=dtype_of(backend)) for a in arrays))
    arrays[which][:, :, 3] = value
    changed, dchanged, *_ = gradients(op, *(leaf(a, dtype=dtype_of(backend)) for a in arrays))
    for a, b in ((y, changed), (dq, dchanged))[: 2 if np.isfinite(value) else 1]:
        assert (b.numpy()[:, :, blind] == a.numpy()[:, :, blind]).all()  # to the bit
    assert (y.numpy() != changed.numpy())[:, :, [i for i in range(6) if i not in blind]].any(axis=(0, 1, 3)).all()


def test_infinite_scores_and_values(backend):
    """A score of -inf is a weight of 0; one of +inf, or a NaN, makes that query's output NaN, as in PyTorch.
    Where all scores are -inf the output is 0."""

    def outputs(q, k, v, **mask):
        leaves = (tg.Tensor(np.float64(a)[None, None], dtype=dtype_of(backend)) for a in (q, k, v))
        return attend(*leaves, **mask).numpy().astype(np.float64)[0, 0]

    v = [[1, 2], [3, 4], [5, 6]]
    assert np.isnan(outputs([[1, 0]], [[0, 0], [0, -inf], [0, 0]], v)).all()  # 0 times inf
    assert_near(outputs([[1, 1]], [[0, 0], [-inf, 0], [0, 0]], v), np.float64([[3, 4]]), rtol=1e-6)
    assert (outputs([[1, 1]] * 2, [[-inf, 0]] * 3, v) == 0).all()
    assert_near(outputs([[inf, inf], [1, 1]], [[1, 1], [1, 1], [1, 1]], v)[:, 0], np.float64([nan, 3]), rtol=1e-6)


def test_large_scores_do_not_overflow(backend):
    """In float16 too, where scores reach 800,000: the largest wins."""
    q, k = (
        leaf(np.full((1, 1, 2, 4), 400.0), dtype=tg.float16),
        leaf(np.arange(3)[:, None] * np.full((1, 1, 3, 4), 250.0), dtype=tg.float16),
    )
    v = leaf(np.float64([1, 2, 3]).reshape(1, 1, 3, 1) * np.ones((1, 1, 3, 4)), dtype=tg.float16)
    y, *found = gradients(lambda q, k, v: attend(q, k, v, scale=1.0), q, k, v)
    assert (y.numpy() == 3).all()
    assert all(np.isfinite(g.numpy().astype(float)).all() for g in found)


def test_dropout(device):
    """Weights are dropped after the softmax, the others scaled; the expected output is the output without; the
    generator advances once a call; p = 1 leaves nothing."""
    q, k, v = np.zeros((1, 1, 2000, 1)), np.zeros((1, 1, 8, 1)), np.ones((1, 1, 8, 1))
    y = attend(*(tg.Tensor(a) for a in (q, k, v)), dropout_p=0.25).numpy().ravel()
    assert set(np.round(y * 6, 9)) <= set(range(9))  # each of 8 weights of 1/8 is 0 or 4/3 of itself
    assert abs(y.mean() - 1) < 4 * (1 / 3 / 8 / 2000) ** 0.5
    state = tg.random.default_generator.draw
    assert (attend(*(tg.Tensor(a) for a in (q, k, v)), dropout_p=0.25).numpy().ravel() != y).any()
    assert tg.random.default_generator.draw == state + 1
    found = gradients(lambda *x: attend(*x, dropout_p=1.0), *map(leaf, qkv()))
    assert all((a.numpy() == 0).all() for a in found)


@pytest.mark.parametrize("tk", [3, 4, 6])
def test_the_dropout_mask(backend, tk):
    """The weights of each query, in the order of (B, H, Tq), start with a Philox counter (four words) of their own."""
    q, k, v = np.zeros((2, 4, 5, tk)), np.zeros((2, 2, tk, tk)), np.broadcast_to(np.eye(tk), (2, 2, tk, tk))
    y = attend(*(tg.Tensor(a) for a in (q, k, v)), dropout_p=0.5).numpy()
    words = philox(np, 0, 0, 2 * 4 * 5 * 4 * -(-tk // 4)).reshape(2, 4, 5, -1)[..., :tk]
    assert ((y != 0) == (words >= 2**31)).all()


@pytest.mark.parametrize(
    ("tk", "mask"), [(3, {}), (4, {}), (6, {"is_causal": True}), (6, {"is_causal": True, "window": 2})]
)
def test_dropout_backward(backend, tk, mask):
    """The mask of the forward pass, which a window cuts anywhere, is that of the backward pass."""

    def op(q, k, v):
        tg.manual_seed(1)
        return attend(q, k, v, dropout_p=0.5, **mask)

    assert tg.testing.gradcheck(op, *map(leaf, qkv(1, 4, 2, 5, tk, 2)))


@pytest.mark.parametrize(("is_causal", "dropout_p"), [(False, 0.0), (True, 0.0), (True, 0.1)])
def test_memory(is_causal, dropout_p):
    """Less is in use at a time, gradients included, than half of the scores of one head would take."""
    n = 1536
    q, k, v = (tg.Tensor(a, dtype=tg.float32, device="cpu", requires_grad=True) for a in qkv(1, 2, 2, n, n, 4))
    y, forward = peak(lambda: attend(q, k, v, is_causal=is_causal, dropout_p=dropout_p))
    _, backward = peak(lambda: y.sum().backward())
    assert max(forward, backward) < n * n * 4 / 2


@pytest.mark.parametrize("needs", [*itertools.product([True, False], repeat=3)])
def test_a_frozen_input_costs_nothing(monkeypatch, needs):
    """Of the five products of backward (the scores and dP among them) those that nobody needs are not made."""
    arrays, products = qkv(), []
    problem = attention._Problem(*arrays[:2], True, None, None, 0.0, None)
    _, o, lse = attention.fwd(*arrays, problem)
    monkeypatch.setattr(problem, "xp", type("Counting", (), {"__getattr__": lambda _, name: getattr(np, name)})())
    problem.xp.matmul = lambda a, b: products.append(1) or np.matmul(a, b)
    found = attention.bwd(np.ones_like(o), *arrays, o, lse, problem, needs)
    assert [a is not None for a in found] == list(needs)
    assert len(products) == 1 + (needs[0] or needs[1]) + sum(needs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_a_broadcast_upstream_gradient(backend, layout):
    """Any strides, those of (B, T, H, D) memory among them, and an upstream gradient of stride 0."""
    arrays = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in qkv()]
    results = []
    for form in (layout, "plain"):
        leaves = [leaf(a, form) for a in arrays]
        y = attend(*(x.transpose(1, 2) for x in leaves), is_causal=True)
        one = tg.Tensor(2.0, dtype=tg.float64)
        y.backward(one.expand(*y.shape) if form == layout else tg.full(y.shape, 2.0, dtype=tg.float64))
        results.append([y.numpy(), *(x.grad.numpy() for x in leaves)])
    for a, b in zip(*results, strict=True):
        assert_near(a, b, rtol=1e-12, atol=1e-14)


def test_many_heads(device):
    """More pairs of batch and head than a grid has in y: the last equals that pair alone."""
    q, k, v = (rng(i).standard_normal((70001, 1, 2, 1)).astype(np.float32) for i in range(3))
    found = gradients(lambda *x: attend(*x, is_causal=True), *map(leaf, (q, k, v)))
    last = gradients(lambda *x: attend(*x, is_causal=True), *(leaf(a[-1:]) for a in (q, k, v)))
    for a, b in zip(found, last, strict=True):
        assert_near(a.numpy()[-1:], b.numpy(), rtol=1e-6, atol=1e-7)


def test_the_same_bits_every_time(backend):
    leaves = [leaf(a, dtype=dtype_of(backend)) for a in qkv(tq=70, tk=70)]
    first, second = (
        gradients(lambda *x: attend(*x, is_causal=True), *(x.detach().requires_grad_() for x in leaves))
        for _ in range(2)
    )
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(first, second, strict=True))


Q, K = tg.ones(1, 4, 3, 2, device="cpu"), tg.ones(1, 2, 5, 2, device="cpu")
ERRORS = {
    "q must have shape (B, heads, T, D), got (4, 3, 2)": (ValueError, Q[0], K, K),
    "v must have shape (B, heads, T, D), got (5, 2)": (ValueError, Q, K, K[0, 0]),
    "k and v must have one shape, got (1, 2, 5, 2) and (1, 2, 4, 2)": (ValueError, Q, K, K[:, :, :4]),
    "q and k must agree in B and D, got (1, 4, 3, 1) and (1, 2, 5, 2)": (ValueError, Q[..., :1], K, K),
    "the heads of q must be a multiple of those of k, got 3 and 2": (ValueError, Q[:, :3], K, K),
    "the heads of q must be a multiple of those of k, got 4 and 0": (ValueError, Q, K[:, :0], K[:, :0]),
    "k must have dtype float32 like the others, got float16": (TypeError, Q, K.half(), K.half()),
    "q must have a floating dtype, got int64": (TypeError, Q.to(tg.int64), K, K),
    "q must be a Tensor, got NoneType": (TypeError, None, K, K),
    "window needs is_causal=True, got False": (ValueError, Q, K, K, {"window": 2}),
    "window must be positive and finite, got 0": (ValueError, Q, K, K, {"is_causal": True, "window": 0}),
    "window must be an int, got 2.5": (TypeError, Q, K, K, {"is_causal": True, "window": 2.5}),
    "scale must be finite, got inf": (ValueError, Q, K, K, {"scale": inf}),
    "scale must be a number, got '1'": (TypeError, Q, K, K, {"scale": "1"}),
    "the probability must be in [0, 1], got 1.5": (ValueError, Q, K, K, {"dropout_p": 1.5}),
    "the probability must be a number, got NoneType": (TypeError, Q, K, K, {"dropout_p": None}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, q, k, v, *options = ERRORS[message]
    with pytest.raises(error, match=re.escape(f"scaled_dot_product_attention: {message}")):
        attend(q, k, v, **dict(*options))
