"""cross_entropy: values against NumPy, gradients by differences, every option, dtypes, rows that do not count, scores
that are large or infinite, layouts, errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import LAYOUTS, ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.testing import strategies

inf = math.inf
rng = np.random.default_rng


def cross_entropy(z, t, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """Row by row, from the definition."""
    axis = min(1, z.ndim - 1)
    v, w = z.shape[axis], np.ones(z.shape[axis]) if weight is None else weight
    losses, total = [], 0
    for row, target in zip(np.moveaxis(z, axis, -1).reshape(-1, v), t.ravel(), strict=True):
        if target == ignore_index:
            losses.append(0)
            continue
        q = w * (label_smoothing / v + (1 - label_smoothing) * (np.arange(v) == target))
        losses.append(-(q * np.log(np.exp(row) / np.exp(row).sum())).sum())
        total += w[target]
    if reduction == "none":
        return np.reshape(losses, t.shape)
    return np.float64(sum(losses)) / (total or inf if reduction == "mean" else 1)


@st.composite
def problems(draw):
    """Scores (V,), (N, V) or (N, V, ...), and targets, some of which may not count."""
    v, n = draw(st.sampled_from([1, 2, 3, 5, 17])), draw(st.sampled_from([0, 1, 2, 3]))
    more = draw(strategies.shapes(max_dims=2, max_side=2))
    shape = (v,) if draw(st.booleans()) and draw(st.booleans()) else (n, v, *more)
    ignored = draw(st.sampled_from([-100, 0]))
    counted = st.integers(0, v - 1)
    rows = () if len(shape) == 1 else (n, *more)
    t = [draw(counted | st.just(ignored)) for _ in range(math.prod(rows))]
    dtype = draw(st.sampled_from([np.int64, np.int32]))
    return draw(strategies.arrays(shape)), np.reshape(t, rows).astype(dtype), ignored


@settings(max_examples=100)
@given(problems(), layouts, st.sampled_from(["mean", "sum", "none"]), st.sampled_from([0.0, 0.1, 1.0]), st.data())
def test_values_and_gradients(device, problem, layout, reduction, smoothing, data):
    z, t, ignored = problem
    w = data.draw(st.none() | strategies.arrays(z.shape[min(1, z.ndim - 1)], min_value=0.25))
    options = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
    weight = None if w is None else tg.Tensor(w)

    def loss(z):
        return F.cross_entropy(z, tg.Tensor(t), weight=weight, **options)

    x = leaf(z, layout)
    assert_near(loss(x).numpy(), np.asarray(cross_entropy(z, t, w, **options)), rtol=1e-12, atol=1e-12)
    assert tg.testing.gradcheck(loss, x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0, 0), (0.1, 0), (0, 1), (0.1, 1)])
def test_dtypes(device, dtype, reduction, smoothing, weighted):
    """The result has the dtype of the scores; a loss sums a few terms of their size, and is rounded once."""
    t = tg.Tensor([3, 0, -100, 8, 3])
    w = tg.Tensor(rng(1).uniform(0.5, 2, 9), dtype=dtype) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check_dtype(
        lambda z: F.cross_entropy(z, t, weight=None if w is None else w.to(z.dtype), **options),
        [rng(0).uniform(-4, 4, (5, 9))], dtype, floor=4,
    )  # fmt: skip


def test_a_weighted_sum_of_float16_losses(device):
    """More losses than float16 counts, each of log 2: they are summed in float32."""
    z, t = leaf(np.zeros((5000, 2)), dtype=tg.float16), tg.zeros(5000, dtype=tg.int64)
    loss, dz = gradients(lambda z: F.cross_entropy(z, t), z)
    assert loss.item() == np.float16(math.log(2))
    assert (abs(dz.numpy()) == np.float16(1e-4)).all()


@pytest.mark.parametrize("offset", [1e4, 1e8, -1e8, 3e38])
def test_large_scores(device, offset):
    """Differences of large scores count, not the scores: the loss and its gradient are those of the shifted row."""
    small = np.float32([0, -64, -128, -32]) if abs(offset) > 1e5 else np.float32([0, 1, -2, 0.5])
    row = np.float32([offset]) + small * (np.spacing(np.float32(offset)) / 8 if offset > 1e38 else 1)
    shifted = (row.astype(float) - row.astype(float).max())[None]
    for target in range(4):
        t = tg.Tensor([target])
        found = gradients(lambda z, t=t: F.cross_entropy(z, t, label_smoothing=0.1), leaf(row[None]))
        exact = gradients(lambda z, t=t: F.cross_entropy(z, t, label_smoothing=0.1), leaf(shifted))
        for a, b in zip(found, exact, strict=True):
            assert_near(a.numpy(), b.numpy(), rtol=1e-6, atol=1e-7)


def test_an_infinite_score(device):
    """-inf rules a class out; +inf, or nothing but -inf, gives NaN, as in PyTorch; other rows do not notice."""
    rows = [[0, -inf, 0], [0, 1, 2], [-inf, -inf, -inf], [0, 0, inf]]
    loss, dz = gradients(lambda z: F.cross_entropy(z, tg.Tensor([0, 1, 0, 0]), reduction="none"), leaf(rows))
    good, dgood = gradients(
        lambda z: F.cross_entropy(z, tg.Tensor([0, 1]), reduction="none"), leaf([[0, -1e3, 0], [0, 1, 2]])
    )
    assert (loss.numpy()[:2] == good.numpy()).all()
    assert (dz.numpy()[:2] == dgood.numpy()).all()
    assert np.isnan(loss.numpy()[2:]).all()
    ruled_out = F.cross_entropy(tg.Tensor([[0, -inf]]), tg.Tensor([1]))
    assert ruled_out.item() == inf


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bad", [math.nan, inf, -inf])
def test_rows_that_do_not_count(device, reduction, bad):
    """They have loss 0 and gradient exactly 0, whatever they hold; alone, the mean is 0 too."""
    z = rng(0).standard_normal((4, 3))
    z[[1, 3]] = bad
    t = tg.Tensor([2, -1, 0, -1])
    op = lambda z: F.cross_entropy(z, t, ignore_index=-1, reduction=reduction, label_smoothing=0.1)  # noqa: E731
    loss, dz = gradients(op, leaf(z))
    assert np.isfinite(loss.numpy()).all()
    assert (dz.numpy()[[1, 3]] == 0).all()
    assert (dz.numpy()[[0, 2]] != 0).all()
    t = tg.full((4,), -1, dtype=tg.int64)
    loss, dz = gradients(op, leaf(z))
    assert (loss.numpy() == 0).all()
    assert (dz.numpy() == 0).all()


def test_a_class_of_weight_0_counts_for_nothing(device):
    """Where all targets have weight 0, the mean is 0, not 0 / 0 or x / 0."""
    z, w = leaf(rng(0).standard_normal((2, 3))), tg.Tensor([0.0, 1.0, 1.0], dtype=tg.float64)
    loss, dz = gradients(lambda z: F.cross_entropy(z, tg.Tensor([0, 0]), weight=w, label_smoothing=0.5), z)
    assert loss.item() == 0
    assert (dz.numpy() == 0).all()


def test_softmax_before_a_loss_is_left_alone(device):
    """p is used twice; its values stay, and the gradients are those of the two uses, added."""
    t = tg.Tensor([2, 0])
    a = leaf(rng(0).standard_normal((2, 3)))
    p = a.softmax()
    before = p.numpy().copy()
    (F.cross_entropy(p, t) + 0.1 * (p * p).sum()).backward()
    assert (p.numpy() == before).all()
    assert tg.testing.gradcheck(lambda a: F.cross_entropy(a.softmax(), t) + 0.1 * (a.softmax() * a.softmax()).sum(), a)
    again = (
        tg.autograd.grad(F.cross_entropy(a.softmax(), t), a)[0]
        + tg.autograd.grad((a.softmax() * a.softmax()).sum() * 0.1, a)[0]
    )
    assert_near(a.grad.numpy(), again.numpy(), rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_a_broadcast_upstream_gradient(device, layout):
    """Scores and targets of any strides, and an upstream gradient of stride 0, as with contiguous copies."""
    z, t = rng(0).standard_normal((6, 5)), np.repeat([0, 4, -100, 2, 1, 3], 2)
    targets = tg.Tensor(t)[::2]
    results = []
    for form, g in (
        (layout, tg.Tensor(2.0, dtype=tg.float64).expand(6)),
        ("plain", tg.full((6,), 2.0, dtype=tg.float64)),
    ):
        x = leaf(z, form)
        y = F.cross_entropy(x, targets if form == layout else tg.Tensor(t[::2].copy()), reduction="none")
        y.backward(g)
        results.append((y.numpy(), x.grad.numpy()))
    for a, b in zip(*results, strict=True):
        assert_near(a, b, rtol=1e-13)


def test_more_rows_than_a_grid_has_in_y_and_an_odd_vocabulary(device):
    """The last row of 70,001 equals that row alone; a target in the last odd column, the same bits every time."""
    z, t = rng(0).standard_normal((70001, 3)).astype(np.float32), rng(1).integers(0, 3, 70001)
    found = gradients(lambda z: F.cross_entropy(z, tg.Tensor(t), reduction="sum"), leaf(z))
    last = gradients(lambda z: F.cross_entropy(z, tg.Tensor(t[-1:]), reduction="sum"), leaf(z[-1:]))
    assert_near(found[1].numpy()[-1:], last[1].numpy(), rtol=1e-6)
    exact = F.cross_entropy(tg.Tensor(z, dtype=tg.float64), tg.Tensor(t), reduction="sum")
    assert abs(found[0].item() - exact.item()) < 1e-6 * exact.item()
    z = leaf(rng(0).standard_normal((2, 50257)), dtype=tg.float32)
    t = tg.Tensor([50256, 50255])
    results = {gradients(lambda z: F.cross_entropy(z, t), leaf(z.data))[0].item() for _ in range(20)}
    assert len(results) == 1
    assert math.isfinite(results.pop())


def test_offsets_beyond_32_bits(device):
    """Rows with a stride of 2^20 elements, on a GPU 2,100 of them: the last equals that row alone."""
    n = 40 if device == "cpu" else 2100
    with tg.device.on(device, "test") as xp:
        rows = xp.zeros((n, 2**20), np.float16)[:, :50]
        rows[...] = xp.asarray(rng(0).standard_normal((n, 50)))
        z = tg.from_dlpack(rows).requires_grad_()
    t = rng(1).integers(0, 50, n)
    found = gradients(lambda z: F.cross_entropy(z, tg.Tensor(t), reduction="none"), z)
    last = gradients(lambda z: F.cross_entropy(z, tg.Tensor(t[-1:]), reduction="none"), leaf(z.data[-1:]))
    for a, b in zip(found, last, strict=True):
        assert_near(a.numpy()[-1:].astype(float), b.numpy().astype(float), rtol=2**-10)


def test_scores_and_a_frozen_graph(device):
    z, t = tg.Tensor([[0.0, 1.0]]), tg.Tensor([1])
    assert not F.cross_entropy(z, t).requires_grad
    with tg.no_grad():
        assert not F.cross_entropy(z.requires_grad_(), t).requires_grad


Z, T = tg.ones(2, 3, device="cpu"), tg.zeros(2, device="cpu", dtype=tg.int64)
CONSTANT = tg.ones(3, device="cpu", requires_grad=True)
EXPECTED = "targets must have shape (2,), that of logits without the class axis"
ERRORS = {
    "logits must have shape (V,), (N, V) or (N, V, ...), got ()": (ValueError, Z.sum(), T),
    "logits must have at least one class, got shape (2, 0)": (ValueError, Z[:, :0], T - 100),
    "logits must have a floating dtype, got int64": (TypeError, T, T),
    "logits must be a Tensor, got list": (TypeError, [1.0], T),
    f"{EXPECTED}, got (1,)": (ValueError, Z, T[:1]),
    f"{EXPECTED}, got (2, 1)": (ValueError, Z, T[:, None]),
    "targets must have an integer dtype, got float32": (TypeError, Z, T.float()),
    "targets must be in [0, 3) or -100, got 3 at position (1,)": (IndexError, Z, tg.Tensor([2, 3], device="cpu")),
    "targets must be in [0, 3) or -1, got -100 at position (0,)": (IndexError, Z, T - 100, {"ignore_index": -1}),
    "weight must have shape (V,) = (3,), got (2,)": (ValueError, Z, T, {"weight": Z[0, :2]}),
    "weight must have dtype float32 like the others, got float16": (TypeError, Z, T, {"weight": Z[0].half()}),
    "weight must be a constant, got one with requires_grad": (ValueError, Z, T, {"weight": CONSTANT}),
    "reduction must be one of mean, sum, none, got 'max'": (ValueError, Z, T, {"reduction": "max"}),
    "label_smoothing must be in [0, 1], got 1.5": (ValueError, Z, T, {"label_smoothing": 1.5}),
    "label_smoothing must be in [0, 1], got nan": (ValueError, Z, T, {"label_smoothing": math.nan}),
    "label_smoothing must be a number, got '0'": (TypeError, Z, T, {"label_smoothing": "0"}),
    "ignore_index must be an int, got 0.5": (TypeError, Z, T, {"ignore_index": 0.5}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, z, t, *options = ERRORS[message]
    with pytest.raises(error, match=re.escape(f"cross_entropy: {message}")):
        F.cross_entropy(z, t, **dict(*options))


def test_a_target_out_of_range_is_found_by_the_next_synchronisation(device):
    t = tg.Tensor([[0, 1], [-2, 5]])
    with pytest.raises(
        IndexError, match=re.escape("cross_entropy: targets must be in [0, 3) or -100, got -2 at position (1, 0)")
    ):
        F.cross_entropy(tg.zeros(2, 3, 2), t).item()
