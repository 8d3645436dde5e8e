"""linear_cross_entropy: every option against NumPy and by differences, dtypes, memory, chunks, tokens that do not
count, errors."""

import itertools
import math
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import (
    LAYOUTS,
    ROUNDING,
    as_float64,
    assert_near,
    check_dtype,
    check_kernel,
    gradients,
    layouts,
    leaf,
)
from tinygrad_gpu import kernel
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import gemm
from tinygrad_gpu.ops import linear_cross_entropy as op
from tinygrad_gpu.ops.common import widen
from tinygrad_gpu.testing import strategies

rng = np.random.default_rng


def reference(x, w, t, b=0, u=1, *, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=-100):
    """From the definition, with the logits in memory."""
    z = x @ w.T + b
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    lse = np.log(np.exp(z).sum(-1, keepdims=True))
    counts = t != ignore_index
    hit = np.arange(len(w)) == t[..., None]
    q = label_smoothing / len(w) + (1 - label_smoothing) * hit
    u = counts * np.broadcast_to(u, t.shape)
    losses = u * ((q * (lse - z)).sum(-1) + z_loss * lse[..., 0] ** 2)
    return losses if reduction == "none" else losses.sum() / (u.sum() or math.inf if reduction == "mean" else 1)


@settings(max_examples=100)
@given(st.data())
def test_values_and_gradients(device, data):
    draw, some = data.draw, lambda *choices: data.draw(st.sampled_from(choices))
    rows, c, v = draw(strategies.shapes(max_dims=2, max_side=3)), some(0, 1, 2, 5), some(1, 2, 3, 7)
    arrays = [draw(strategies.arrays(s)) for s in [(*rows, c), (v, c), (v,)]]
    t = np.array([some(-1, *range(v)) for _ in range(math.prod(rows))], some(np.int64, np.int32)).reshape(rows)
    u = draw(st.none() | strategies.arrays(rows, min_value=0.25))
    options = {
        "reduction": some("mean", "sum", "none"), "label_smoothing": some(0.0, 0.1, 1.0), "z_loss": some(0.0, 0.1),
        "softcap": some(None, 2.0), "ignore_index": -1,
    }  # fmt: skip
    budget, weight = some(None, 1, 300, 10**6), None if u is None else tg.Tensor(u)

    def loss(x, w, b=None):
        return F.linear_cross_entropy(x, w, tg.Tensor(t), b, token_weight=weight, memory_budget=budget, **options)

    leaves = [leaf(a, draw(layouts)) for a in arrays[: some(2, 3)]]
    expected = reference(arrays[0], arrays[1], t, *arrays[2 : len(leaves)] or [0], *[] if u is None else [u], **options)
    assert_near(loss(*leaves).numpy(), np.asarray(expected), rtol=1e-12, atol=1e-12)
    assert tg.testing.gradcheck(loss, *leaves)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}], ids=["plain", "all"])
def test_dtypes(backend, dtype, reduction, options):
    """The losses of half inputs are float32; gradients have the inputs' dtype, x's rounded twice (see the floor)."""
    t, draw = tg.Tensor([3, 0, -100, 8, 3, 1]), rng(0).uniform
    u = tg.Tensor([0.5, 2, 1, 1, 0.25, 1])

    def loss(x, w, b):
        y = F.linear_cross_entropy(x, w, t, b, reduction=reduction, token_weight=u, memory_budget=400, **options)
        assert y.dtype == (tg.float64 if x.dtype == tg.float64 else tg.float32)
        return y.to(x.dtype)

    check_dtype(loss, [draw(-1, 1, s) for s in [(6, 8), (9, 8), (9,)]], dtype, floor=4)


def test_logits_beyond_float16(backend):
    """They are float32: 2 * 300 * 200 = 120,000 is finite, and so are the loss and the gradients."""
    x, w = np.zeros((1, 8)), np.zeros((8, 8))
    x[0, :2], w[0, :2], w[1, :2] = 300, 200, (199, 200)
    x, w = leaf(x, dtype=tg.float16), leaf(w, dtype=tg.float16)
    loss, dx, dw = gradients(lambda x, w: F.linear_cross_entropy(x, w, tg.Tensor([1])), x, w)
    assert loss.item() == 300
    assert dx.tolist() == [[1] + [0] * 7]
    assert dw.tolist() == [[300] * 2 + [0] * 6, [-300] * 2 + [0] * 6] + [[0] * 8] * 6


@pytest.mark.parametrize(
    ("token_weight", "w", "upstream"), [(3e5, 1.0, 1.0), (1.0, 1e-3, 2.0**16), (1e-6, 1.0, 2.0**16)]
)
def test_a_float16_gradient_waits_for_its_factor(backend, token_weight, w, upstream):
    """It neither over- nor underflows before the upstream gradient and the sum of the token weights are known."""
    x, t = rng(0).uniform(-1, 1, (64, 8)), tg.Tensor(rng(0).integers(0, 9, 64))
    weight, results = rng(1).uniform(-w, w, (9, 8)), []
    for dtype in (tg.float16, tg.float64):
        leaves = [leaf(np.float16(a).astype(float), dtype=dtype) for a in (x, weight)]
        u = tg.full((64,), token_weight, dtype=tg.float32)
        results.append(
            gradients(lambda x, w, u=u: F.linear_cross_entropy(x, w, t, token_weight=u), *leaves, cotangent=upstream)[1]
        )
    found, exact = results[0].numpy().astype(float), results[1].numpy()
    rounded = 0 if backend == "cpu" else 2**-11  # on kernels dz is float16 too
    assert_near(found, exact, rtol=2**-10, atol=2.0**-24 + rounded * abs(exact).max())


def test_float32_sums_of_bfloat16(backend):
    """In one chunk or in many the gradient of the weight is summed in float32: equally near the float64 answer. Kernels
    round what they sum."""
    n, chunks = (64, 8) if "host" in backend else (4096, 64)
    x, w, t = rng(0).standard_normal((n, 8)), rng(1).standard_normal((97, 8)), tg.Tensor(rng(2).integers(0, 97, n))
    x, w = (tg.Tensor(a, dtype=tg.bfloat16) for a in (x, w))
    wide = [leaf(a.to(tg.float64)) for a in (x, w)]
    exact = gradients(lambda x, w: F.linear_cross_entropy(x, w, t, reduction="sum"), *wide)[2].numpy()
    on_kernels, sums = kernel.runs(x.data), []
    for rows in (n, n // chunks):
        budget = rows * (4 * 104 + 2 * 8) if on_kernels else -(-rows * 4 * (97 + 3 * 8 + 16) * 4 // 3)
        config = op.config_kernel if on_kernels else lambda *a: op.config(*a[:4], None, a[4], "numpy")[0]
        assert config(n, 97, 8, tg.bfloat16, budget) == rows
        parameter = tg.nn.Parameter(w)
        F.linear_cross_entropy(x, parameter, t, reduction="sum", memory_budget=budget).backward()
        assert parameter.grad.dtype == tg.float32
        sums.append(parameter.grad.numpy())
        assert np.linalg.norm(sums[-1] - exact) <= (2**-9 if on_kernels else 1e-6) * np.linalg.norm(exact)
    assert_near(*sums, rtol=1e-5, atol=1e-5)


def peak(f):
    """f() and the bytes that NumPy held at most meanwhile, beyond what it held before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = f()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [tg.float32, tg.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "v", "c", "budget"),
    [(97, 2003, 8, None), (97, 2003, 8, 2**12), (97, 2003, 8, 2**16), (97, 2003, 8, 2**18), (33, 301, 1024, 2**18)],
)
def test_memory(dtype, n, v, c, budget, softcap, reduction):
    """With no budget given, all that is made is smaller than the logits. Else the workspace is within the budget (or
    that of one row) and 100 bytes a token. Beside it are gradients: as made, in the forward pass if possible, and then
    as handed on."""
    draw, options = rng(0), {"reduction": reduction, "softcap": softcap, "memory_budget": budget}
    x, w, b = (
        tg.Tensor(draw.standard_normal(s) / 8, dtype=dtype, device="cpu", requires_grad=True)
        for s in ((n, c), (v, c), (v,))
    )
    t = tg.Tensor(draw.integers(0, v, n), device="cpu")
    made, handed = x.data.nbytes + 4 * (w.size + b.size), x.data.nbytes + w.data.nbytes + b.data.nbytes
    row = 4 * ((2 if softcap else 1) * v + 4 * c)
    allowed = n * v * 4 - made if budget is None else max(budget, row) + 100 * n + 2**16
    loss, forward = peak(lambda: F.linear_cross_entropy(x, w, t, b, **options))
    upstream = tg.ones(*loss.shape, device="cpu")
    _, backward = peak(lambda: loss.backward(upstream))
    if reduction == "none":
        assert forward <= allowed
        assert backward <= made + handed + allowed
    else:
        assert forward <= made + allowed
        assert backward <= handed + 100 * n + 2**16


CONFIG = [  # n, v, c, dtype, softcap, budget, module: rows, columns
    ((10000, 50257, 768, tg.float32, None, None, "numpy"), (119, 2730)),  # a chunk of 24 MiB
    ((10000, 50257, 768, tg.float16, None, None, "numpy"), (119, 2730)),  # in float32 too
    ((10000, 50257, 768, tg.float64, None, None, "numpy"), (59, 1365)),
    ((10000, 50257, 768, tg.float32, 30.0, None, "numpy"), (61, 2730)),  # the slope of the cap takes as much again
    ((10000, 50257, 768, tg.float32, None, None, "cupy"), (957, 21845)),
    ((100, 256, 128, tg.float32, None, None, "numpy"), (25, 256)),  # a quarter of the rows
    ((100, 256, 128, tg.float32, None, 10**9, "numpy"), (100, 256)),  # as asked for
    ((100, 256, 128, tg.float32, None, 1, "numpy"), (1, 1)),
    ((0, 1, 0, tg.float32, None, None, "numpy"), (1, 1)),
]


@pytest.mark.parametrize(("case", "expected"), CONFIG)
def test_config(case, expected):
    assert op.config(*case) == expected


def problem(n=12, v=11, c=8, dtype=tg.float64, **options):
    """Leaves x, w and b, and the loss as a function of them."""
    x, w, b = (leaf(rng(i).standard_normal(s), dtype=dtype) for i, s in enumerate([(n, c), (v, c), (v,)]))
    t = tg.Tensor(rng(3).integers(0, v, n))
    return (x, w, b), lambda x, w, b: F.linear_cross_entropy(x, w, t, b, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_and_blocks_do_not_change_the_result(device, reduction):
    leaves, whole = problem(reduction=reduction, memory_budget=10**6)
    expected = gradients(whole, *leaves)
    for budget in (1, 500, 1000, 3000):
        leaves, loss = problem(reduction=reduction, memory_budget=budget)
        before = [a.numpy().copy() for a in leaves]
        for _ in range(2):  # the same bits every time, the inputs as they were
            found = gradients(loss, *leaves)
            assert all((a.numpy() == b).all() for a, b in zip(leaves, before, strict=True))
            for a, b in zip(found, expected, strict=True):
                assert_near(a.numpy(), b.numpy(), rtol=1e-12, atol=1e-12)
            for a in leaves:
                a.grad = None


def test_a_second_backward(device):
    """Gradients made in the forward pass serve each upstream gradient that comes, also where inputs are no leaves."""
    leaves, loss = problem()
    y = loss(*(a * 1 for a in leaves))
    once = tg.autograd.grad(y, leaves, tg.Tensor(3.0, dtype=tg.float64), retain_graph=True)
    twice = tg.autograd.grad(y, leaves)
    y = loss(*leaves)
    y.backward(retain_graph=True)
    y.backward()
    for a, b, c in zip(leaves, once, twice, strict=True):
        assert_near(b.numpy(), 3 * c.numpy(), rtol=1e-14)
        assert_near(a.grad.numpy(), 2 * c.numpy(), rtol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_leaf_as_two_inputs(device, reduction):
    w, t = leaf(rng(0).standard_normal((4, 4))), tg.Tensor([3, 1, 0, 1])
    op = lambda w: F.linear_cross_entropy(w, w, t, w[0], reduction=reduction)  # noqa: E731
    assert tg.testing.gradcheck(op, w)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", [*itertools.product([True, False], repeat=3)])
def test_only_gradients_that_are_needed_are_made(needs, reduction):
    """A frozen trunk with a trainable head, the reverse, …: the others are None and take no memory."""
    n = v = c = 256
    leaves = [
        tg.Tensor(rng(0).standard_normal(s), dtype=tg.float32, device="cpu", requires_grad=need)
        for s, need in zip(((n, c), (v, c), (v,)), needs, strict=True)
    ]
    t = tg.Tensor(rng(1).integers(0, v, n), device="cpu")
    x, w, b = leaves
    loss, forward = peak(lambda: F.linear_cross_entropy(x, w, t, b, reduction=reduction, memory_budget=2**15))
    size, slack = n * c * 4, 2**15 + 100 * n + 2**16
    assert forward <= (needs[0] + needs[1] if reduction == "mean" else 0) * size + slack
    assert loss.requires_grad == any(needs)
    if any(needs):
        _, backward = peak(lambda: loss.sum().backward())
        assert backward <= (needs[0] + needs[1]) * (1 if reduction == "mean" else 2) * size + slack
    assert [a.grad is not None for a in leaves] == list(needs)
    twins = (tg.Tensor(a, device="cpu", requires_grad=True) for a in leaves)
    full = gradients(lambda *a: F.linear_cross_entropy(*a[:2], t, a[2]), *twins)[1:]
    for a, exact in zip(leaves, full, strict=True):
        if a.grad is not None:
            assert_near(a.grad.numpy() / (n if reduction == "none" else 1), exact.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [*ROUNDING, tg.float64], ids=str)
def test_a_batch_that_does_not_count(backend, dtype, reduction):
    """6 tokens of width 8, 11 classes, every target -100: loss 0, every gradient exactly 0."""
    leaves = [leaf(rng(i).standard_normal(s), dtype=dtype) for i, s in enumerate([(6, 8), (11, 8), (11,)])]
    t, u = tg.full((6,), -100, dtype=tg.int64), tg.full((6,), math.nan)
    options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1, "token_weight": u}
    loss, *found = gradients(lambda x, w, b: F.linear_cross_entropy(x, w, t, b, **options), *leaves)
    assert (loss.numpy() == 0).all()
    assert all((g.numpy() == 0).all() for g in found)


def test_tokens_that_do_not_count_change_nothing(device):
    """A target of -100 and a token weight of 0 are as leaving the token out; integers and bools weigh too."""
    (x, w, b), _ = problem()
    t = np.array([1, -100, 3, 0, -100, 10, 2, 2, 2, 5, 6, 7])
    some = tg.Tensor(t), tg.Tensor(t >= 0)
    expected = gradients(lambda x, w, b: F.linear_cross_entropy(x[some[1]], w, some[0][some[1]], b), x, w, b)
    for targets, u in (
        (some[0], None),
        (tg.Tensor(abs(t) % 11), some[1]),
        (tg.Tensor(abs(t) % 11), some[1].to(tg.int32)),
    ):
        leaves = [leaf(a.data) for a in (x, w, b)]
        found = gradients(lambda x, w, b, t=targets, u=u: F.linear_cross_entropy(x, w, t, b, token_weight=u), *leaves)
        for a, c in zip(found, expected, strict=True):
            assert_near(a.numpy(), c.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tokens_that_do_not_count_may_hold_anything(backend, softcap, reduction):
    """Infinite and NaN activations, and weights of their own, reach no loss and no gradient."""
    (x, w, b), _ = problem(n=4, dtype=tg.float32)
    t, u = tg.Tensor([3, -100, -100, 0]), tg.Tensor([1, math.nan, math.inf, 2])
    op = lambda *a: F.linear_cross_entropy(*a[:2], t, a[2], token_weight=u, softcap=softcap, reduction=reduction)  # noqa: E731
    expected = gradients(op, x, w, b)
    bad = x.numpy().copy()
    bad[1:3] = [[math.nan], [math.inf]]
    for a, c in zip(gradients(op, leaf(bad), leaf(w.data), leaf(b.data)), expected, strict=True):
        assert_near(a.numpy(), c.numpy(), rtol=1e-6)


def test_the_bias_is_added_once(device):
    x, w, b = leaf(np.zeros((1, 3))), leaf(np.zeros((5, 3))), leaf(np.float64([7, 0, 0, 0, 0]))
    loss, _, _, db = gradients(lambda x, w, b: F.linear_cross_entropy(x, w, tg.Tensor([0]), b), x, w, b)
    assert abs(loss.item() - 0.003641) < 5e-7
    p = np.exp(b.numpy()) / np.exp(b.numpy()).sum()
    assert_near(db.numpy(), p - [1, 0, 0, 0, 0], rtol=1e-12)


def test_a_head_tied_to_the_embedding(device):
    """Both contributions arrive, whichever comes first."""
    ids, t = tg.Tensor([0, 2, 2]), tg.Tensor([2, 1, 0])
    w = leaf(rng(0).standard_normal((3, 4)))
    assert tg.testing.gradcheck(lambda w: F.linear_cross_entropy(F.embedding(ids, w), w, t), w)
    F.linear_cross_entropy(F.embedding(ids, w), w, t).backward()
    parts = [leaf(w.data), leaf(w.data)]
    F.linear_cross_entropy(F.embedding(ids, parts[0]), parts[1], t).backward()
    assert_near(w.grad.numpy(), (parts[0].grad + parts[1].grad).numpy(), rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_a_broadcast_upstream_gradient(device, layout):
    """Strided inputs and targets and an upstream gradient of stride 0, as with contiguous copies."""
    t, results = np.repeat([0, 4, -100, 2, 1, 3], 2), []
    for form, g in (
        (layout, tg.Tensor(2.0, dtype=tg.float64).expand(2, 3)),
        ("plain", tg.full((2, 3), 2.0, dtype=tg.float64)),
    ):
        x, w = (leaf(rng(i).standard_normal(s), form) for i, s in enumerate([(2, 3, 8), (5, 8)]))
        targets = tg.Tensor(t)[::2] if form == layout else tg.Tensor(t[::2].copy())
        y = F.linear_cross_entropy(x, w, targets.reshape(2, 3), reduction="none")
        y.backward(g)
        results.append((y.numpy(), x.grad.numpy(), w.grad.numpy()))
    for a, b in zip(*results, strict=True):
        assert_near(a, b, rtol=1e-12, atol=1e-14)


def test_offsets_beyond_32_bits(device):
    """Rows with a stride of 2^20 elements, on a GPU 2,100 of them: the last equals that row alone."""
    n = 40 if device == "cpu" else 2100
    with tg.device.on(device, "test") as xp:
        rows = xp.zeros((n, 2**20), np.float16)[:, :8]
        rows[...] = xp.asarray(rng(0).standard_normal((n, 8)))
        x = tg.from_dlpack(rows).requires_grad_()
    w, t = leaf(rng(1).standard_normal((11, 8)), dtype=tg.float16), rng(2).integers(0, 11, n)
    losses, dx = gradients(lambda x: F.linear_cross_entropy(x, w, tg.Tensor(t), reduction="none"), x)
    last = gradients(lambda x: F.linear_cross_entropy(x, w, tg.Tensor(t[-1:]), reduction="none"), leaf(x.data[-1:]))
    for a, b in zip((losses, dx), last, strict=True):
        assert_near(a.numpy()[-1:].astype(float), b.numpy().astype(float), rtol=2**-10)


def test_many_rows(device):
    """On a GPU 70,001 rows of 32,000 logits, more than 2^31 in one chunk: the last equals that row alone."""
    n, v = (70_001, 32_000) if device == "cuda" else (71, 320)
    x, w, t = tg.randn(n, 8), tg.randn(v, 8), tg.Tensor(np.arange(n) % v)
    losses, dx = gradients(lambda x: F.linear_cross_entropy(x, w, t, reduction="none", memory_budget=2**34), leaf(x))
    last = gradients(lambda x: F.linear_cross_entropy(x, w, t[-1:], reduction="none"), leaf(x[-1:]))
    for a, b in zip((losses[-1:], dx[-1:]), last, strict=True):
        assert_near(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_an_odd_vocabulary(device):
    """V = 50,257 with the targets in the last columns: the same finite loss and gradients every time, of 1,000 on a
    GPU."""
    x, w, t = tg.randn(3, 4), tg.randn(50257, 4), tg.Tensor([50256, 50255, 50252])
    results = []
    for _ in range(1000 if device == "cuda" else 10):
        loss, *found = gradients(lambda x, w: F.linear_cross_entropy(x, w, t), leaf(x.data), leaf(w.data))
        results.append([loss.item(), *(float(abs(g).sum()) for g in found)])
    assert np.isfinite(results).all()
    assert all(r == results[0] for r in results)


# Blocks of 64, 256 and 1024 threads take tiles of 1024, 4096 and 16384 logits.
WIDTHS = (1, 2, 7, 8, 9, 97, 1023, 1024, 1025, 4096, 4097, 16384, 16385, 40001)
# label_smoothing, z_loss, softcap
OPTIONS = {tg.float32: (0.1, 0.01, 3.0), tg.bfloat16: (0.0, 0.0, None), tg.float16: (0.1, 0.01, None)}


@pytest.mark.parametrize("v", WIDTHS)
@pytest.mark.parametrize("dtype", OPTIONS, ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_kernel_of_losses(kernels, dtype, v, data):
    """The target anywhere, in the last class too. A row that does not count may hold anything, and a class have no
    chance at all."""
    options, some = OPTIONS[dtype], lambda *choices: data.draw(st.sampled_from(choices))
    rows = some(1, 2, 19) if v < 200 else some(1, 2)
    z, t = rng(v).uniform(-4, 4, (rows, v)), rng(v).integers(0, v, rows)
    t = np.full_like(t, v - 1) if some(True, False) else t
    u, g = rng(rows).uniform(0.5, 2, (2, rows))
    smoothing, _, softcap = options
    if softcap is None:
        z += some(0, 200, -200)  # whose exponentials are beyond float32
    if rows > 1:
        u[0] = g[0] = 0
        z[0] = some(math.inf, -math.inf, *[math.nan] * (softcap is None))
    if v > 2 and not smoothing:
        z[-1, t[-1] - 1] = -math.inf

    def parts(dz, t):
        """dz of the targets, and V times that of the others: both near 1."""
        others, each = widen(dz) * v, np.arange(rows)
        hits, others[each, t] = others[each, t] / v, 0
        return hits, others

    def mathematics(z, t, u, g):
        wide, losses = widen(z).copy(), np.empty(rows, widen(z).dtype)
        with np.errstate(invalid="ignore"):
            dz = op.fwd(losses, wide, t, widen(u), widen(g), *options)
        return losses, *parts(dz.astype(z.dtype), t)

    def launcher(z, t, u, g):
        xp = array_module(z)
        losses, wide = xp.empty(rows, np.float32), xp.empty((rows, op.padded(v)), np.float32)
        wide[:, :v] = z
        dz = op.fwd_kernel(losses, wide, t, widen(u), widen(g), *options, v, z.dtype)
        db = xp.ones(v, np.float32)
        op.db_kernel(db, wide, z.dtype)
        assert_near(as_float64(db), 1 + as_float64(dz).sum(axis=0), rtol=1e-6, atol=1e-6)
        return losses, *parts(dz, t)

    check_kernel(mathematics, launcher, [z, t, u, g], dtype, floor=32 if dtype == tg.float32 else 1)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_kernels(kernels, monkeypatch, dtype, data):
    """Every option in any combination, in chunks of any size: near the float64 mathematics, the same bits again. The
    products, which have tests of their own, are NumPy's."""
    monkeypatch.setattr(gemm, "pick", lambda x, mathematics, kernels: mathematics)
    draw, some = data.draw, lambda *choices: data.draw(st.sampled_from(choices))
    n, c, v = some(0, 1, 2, 5), some(0, 1, 5, 8), some(1, 2, 13)
    arrays = [rng(i).uniform(-1, 1, s) for i, s in enumerate([(n, c), (v, c), (v,)])]
    t = np.array([some(-1, *range(v)) for _ in range(n)], np.int32 if dtype == tg.float32 else np.int64)
    options = {
        "reduction": some("mean", "sum", "none"), "label_smoothing": some(0.0, 0.1, 1.0), "z_loss": some(0.0, 0.1),
        "softcap": some(None, 2.0), "ignore_index": -1, "memory_budget": some(None, 1, 200),
        "token_weight": some(None, tg.Tensor(rng(9).uniform(0.25, 1, n), dtype=tg.float32)),
    }  # fmt: skip
    needs = [draw(st.booleans()) for _ in arrays]
    layout, has_bias = draw(layouts), draw(st.booleans())

    def results(to, layout):
        leaves = [
            leaf(tg.Tensor(a, dtype=dtype).to(to), layout, requires_grad=r) for a, r in zip(arrays, needs, strict=True)
        ]
        x, w, b = leaves
        loss = F.linear_cross_entropy(x, w, tg.Tensor(t), b if has_bias else None, **options)
        if loss.requires_grad:
            loss.backward(tg.full(loss.shape, 2.0, dtype=loss.dtype))
        return [loss.numpy(), *(a.grad.numpy() for a in leaves if a.grad is not None)]

    found, again, exact = results(dtype, layout), results(dtype, layout), results(tg.float64, "plain")
    for a, b, c in zip(found, again, exact, strict=True):
        assert (a == b).all()
        assert_near(a.astype(float), c, rtol=8 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])


CONFIG_KERNEL = [  # n, v, c, dtype, budget: rows
    ((16384, 128256, 4096, tg.bfloat16, None), 1024),  # what takes the product with dW as long as its memory
    ((32768, 50304, 768, tg.bfloat16, None), 1920),  # 384 MiB
    ((32768, 50304, 768, tg.bfloat16, 10**8), 384),
    ((32768, 50304, 768, tg.float16, 10**8), 384),
    ((1000, 50304, 768, tg.bfloat16, None), 256),  # a quarter
    ((1000, 50304, 768, tg.bfloat16, 10**9), 1000),  # as asked for
    ((1000, 50304, 768, tg.bfloat16, 10**7), 49),
    ((1000, 50304, 768, tg.bfloat16, 1), 1),
    ((0, 1, 0, tg.float32, None), 1),
]


@pytest.mark.parametrize(("case", "expected"), CONFIG_KERNEL)
def test_config_kernel(case, expected):
    assert op.config_kernel(*case) == expected


def test_config_loss():
    for v, threads in ((1, 64), (1024, 64), (1025, 256), (4096, 256), (4097, 1024), (128256, 1024)):
        what = op.config_loss(5, v, tg.bfloat16, tg.int64, False)
        assert (what.grid, what.block) == ((5, 1, 1), (threads, 1, 1))


@pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("budget", "allowed"), [(None, 403), (200e6, 200), (20e6, 20)])
def test_memory_of_a_gpu(dtype, reduction, budget, allowed):
    """What is in use at most are the gradients, as made and as handed on, and the workspace: as many MB, and 100 bytes
    a token. The logits are 3.3 GB."""
    import cupy

    n, v, c, used = 16384, 50257, 64, [0]

    def malloc(size):
        memory = pool.malloc(size)
        used.append(pool.used_bytes())
        return memory

    with tg.device.on("cuda", "test"):
        x, w, b = (leaf(tg.randn(*s, dtype=dtype)) for s in ((n, c), (v, c), (v,)))
        t, pool = tg.randint(0, v, (n,)), cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(malloc):
            y = F.linear_cross_entropy(x, w, t, b, reduction=reduction, memory_budget=budget)
            y.backward(tg.ones_like(y))
    made = x.data.nbytes + 4 * (w.size + b.size)
    assert max(used) <= 2 * made + allowed * 1e6 + 100 * n + 2**21


X, W, T = tg.ones(2, 4, device="cpu"), tg.ones(3, 4, device="cpu"), tg.zeros(2, device="cpu", dtype=tg.int64)
GRADS = tg.ones(2, device="cpu", requires_grad=True)
ERRORS = {
    "x must have shape (..., C) = (..., 4), got (2, 3)": (ValueError, X[:, :3], W, T),
    "x must have shape (..., C) = (..., 4), got ()": (ValueError, X.sum(), W, T),
    "x must have a floating dtype, got int64": (TypeError, T, W, T),
    "weight must have shape (V, C), V > 0, got (4,)": (ValueError, X, W[0], T),
    "weight must have shape (V, C), V > 0, got (0, 4)": (ValueError, X, W[:0], T - 100),
    "weight must have dtype float32 like the others, got float16": (TypeError, X, W.half(), T),
    "weight must be a Tensor, got NoneType": (TypeError, X, None, T),
    "targets must have x's shape without its last axis, (2,), got (1,)": (ValueError, X, W, T[:1]),
    "targets must have an integer dtype, got float32": (TypeError, X, W, T.float()),
    "targets must be in [0, 3) or -100, got 3 at position (0,)": (IndexError, X, W, T + 3),
    "bias must have shape (V,) = (3,), got (2,)": (ValueError, X, W, T, {"bias": X[:, 0]}),
    "bias must have dtype float32 like the others, got float64": (TypeError, X, W, T, {"bias": W[:, 0].to(tg.float64)}),
    "token_weight must have shape (2,) like targets, got (1,)": (ValueError, X, W, T, {"token_weight": X[:1, 0]}),
    "token_weight must be a Tensor or None, got float": (TypeError, X, W, T, {"token_weight": 1.0}),
    "token_weight must be a constant, got one with requires_grad": (ValueError, X, W, T, {"token_weight": GRADS}),
    "reduction must be one of mean, sum, none, got None": (ValueError, X, W, T, {"reduction": None}),
    "label_smoothing must be in [0, 1], got -0.1": (ValueError, X, W, T, {"label_smoothing": -0.1}),
    "z_loss must be finite and at least 0, got -1": (ValueError, X, W, T, {"z_loss": -1}),
    "z_loss must be a number, got True": (TypeError, X, W, T, {"z_loss": True}),
    "softcap must be positive and finite, got 0": (ValueError, X, W, T, {"softcap": 0}),
    "memory_budget must be positive and finite, got 0": (ValueError, X, W, T, {"memory_budget": 0}),
    "memory_budget must be a number, got '1GB'": (TypeError, X, W, T, {"memory_budget": "1GB"}),
    "ignore_index must be an int, got None": (TypeError, X, W, T, {"ignore_index": None}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, x, weight, t, *options = ERRORS[message]
    with pytest.raises(error, match=re.escape(f"linear_cross_entropy: {message}")):
        F.linear_cross_entropy(x, weight, t, **dict(*options))
