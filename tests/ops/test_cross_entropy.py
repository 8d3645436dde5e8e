"""Cross-entropy: against a plain formula, gradients by differences over all options, hard rows, dtypes, errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.testing import strategies

IGNORED = -100


def reference(z, t, weight=None, reduction="mean", label_smoothing=0.0):
    """A row at a time, from the definition; z (N, V)."""
    n, v = z.shape
    w = np.ones(v) if weight is None else weight
    losses, total = np.zeros(n), 0.0
    for i in range(n):
        if t[i] != IGNORED:
            q = w * (label_smoothing / v + (1 - label_smoothing) * (np.arange(v) == t[i]))
            losses[i] = -(q * (z[i] - np.log(np.exp(z[i]).sum()))).sum()
            total += w[t[i]]
    mean = losses.sum() / total if total else 0.0
    return {"none": losses, "sum": losses.sum(), "mean": mean}[reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=20)
@given(data=st.data())
def test_values_and_gradients(device, reduction, weighted, data):
    n, v = data.draw(st.sampled_from([0, 1, 2, 5])), data.draw(st.sampled_from([1, 2, 7]))
    smoothing = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    z = leaf(data.draw(strategies.arrays((n, v))), data.draw(layouts))
    t = np.array(data.draw(st.lists(st.sampled_from([IGNORED, *range(v)]), min_size=n, max_size=n)), np.int64)
    w = np.linspace(0.5, 2, v) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    weight = None if w is None else tg.Tensor(w)
    op = lambda z: F.cross_entropy(z, tg.Tensor(t), weight=weight, **options)  # noqa: E731
    assert_near(op(z).numpy(), np.asarray(reference(z.numpy(), t, w, **options)), rtol=1e-12, atol=1e-13)
    assert tg.testing.gradcheck(op, z)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 5, 3), (2, 5, 3, 2), (2, 5, 0)], ids=str)
def test_the_class_axis_is_the_second(device, shape):
    z = leaf(np.random.default_rng(0).normal(size=shape))
    rest = shape[:1] + shape[2:] if len(shape) > 1 else ()
    t = np.random.default_rng(1).integers(0, 5, rest)
    y, dz = gradients(lambda z: F.cross_entropy(z, tg.Tensor(t), reduction="none"), z)
    rows = np.moveaxis(z.numpy(), min(1, len(shape) - 1), -1).reshape(-1, 5)
    expected = reference(rows, t.ravel(), reduction="none")
    assert_near(y.numpy(), expected.reshape(rest), rtol=1e-12)
    assert dz.shape == shape
    assert tg.testing.gradcheck(lambda z: F.cross_entropy(z, tg.Tensor(t)), z) if z.size else True


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_dtypes(device, dtype, reduction):
    z = np.random.default_rng(0).uniform(-3, 3, (4, 7))
    t = tg.Tensor([0, 6, 3, IGNORED])
    check_dtype(lambda z: F.cross_entropy(z, t, reduction=reduction, label_smoothing=0.1), [z], dtype, floor=8)


def test_every_target_ignored(device):
    z = leaf(np.array([[1.0, math.inf], [math.nan, 0.0]]))
    for reduction in ("mean", "sum"):
        z.grad = None
        y, dz = gradients(lambda z: F.cross_entropy(z, tg.Tensor([IGNORED] * 2), reduction=reduction), z)  # noqa: B023
        assert y.item() == 0
        assert (dz.numpy() == 0).all()


def test_an_ignored_row_may_hold_anything(device):
    z = np.array([[0.0, 0.0], [math.inf, math.nan]])
    y, dz = gradients(lambda z: F.cross_entropy(z, tg.Tensor([1, IGNORED])), leaf(z))
    assert y.item() == pytest.approx(math.log(2))
    assert dz.numpy().tolist() == [[0.5, -0.5], [0, 0]]


def test_large_logits(device):
    z = np.array([[1e4, 0.0, -1e4], [3e38, 3e38, 0.0]], np.float32)
    y, dz = gradients(lambda z: F.cross_entropy(z, tg.Tensor([1, 0]), reduction="none"), leaf(z))
    assert_near(y.numpy().astype(float), np.array([1e4, math.log(2)]), rtol=1e-6)
    assert_near(dz.numpy().astype(float), np.array([[1, -1, 0], [-0.5, 0.5, 0]]), rtol=1e-6, atol=1e-7)


def test_softmax_before_is_not_written_to(device):
    """p = softmax(a) is saved by its own op and used again: the loss on top of it must leave it alone."""
    a, t = leaf(np.random.default_rng(0).normal(size=(4, 5))), tg.Tensor([0, 1, 2, 3])

    def op(a):
        p = a.softmax()
        return F.cross_entropy(p, t) + 0.1 * (p * p).sum()

    p = a.softmax()
    before = p.numpy().copy()
    (F.cross_entropy(p, t) + 0.1 * (p * p).sum()).backward()
    assert (p.numpy() == before).all()
    assert tg.testing.gradcheck(op, a)


def test_the_last_row_of_a_wide_stride(device):
    """Rows 2^20 elements apart: offsets of the last pass 2^31 bytes."""
    base = np.zeros((600, 1 << 20), np.float16)
    base[:, :50] = np.random.default_rng(0).normal(size=(600, 50))
    whole = tg.from_dlpack(base) if device == "cpu" else tg.Tensor(base)
    t = tg.Tensor(np.arange(600) % 50)
    losses = F.cross_entropy(whole[:, :50], t, reduction="none").numpy()
    last = F.cross_entropy(tg.Tensor(base[-1:, :50]), t[-1:], reduction="none").numpy()
    assert losses[-1] == last[0]


BAD = {
    "target above": (lambda: F.cross_entropy(tg.ones(2, 3), tg.Tensor([0, 3])).item(), IndexError,
                     "cross_entropy: targets must be in [0, 3) or -100, got 3 at position (1,)"),
    "target below": (lambda: F.cross_entropy(tg.ones(2, 3), tg.Tensor([-1, 0])).item(), IndexError,
                     "cross_entropy: targets must be in [0, 3) or -100, got -1 at position (0,)"),
    "targets' shape": (lambda: F.cross_entropy(tg.ones(2, 3), tg.Tensor([0])), ValueError,
                       "cross_entropy: targets must have shape (2,), that of logits without the class axis, got (1,)"),
    "targets' dtype": (lambda: F.cross_entropy(tg.ones(1, 3), tg.Tensor([0.0])), TypeError,
                       "cross_entropy: targets must have an integer dtype, got float32"),
    "weight": (lambda: F.cross_entropy(tg.ones(1, 3), tg.Tensor([0]), weight=tg.ones(2)), ValueError,
               "cross_entropy: weight must have shape (V,) = (3,), got (2,)"),
    "trained weight": (lambda: F.cross_entropy(tg.ones(1, 3), tg.Tensor([0]), weight=tg.ones(3, requires_grad=True)),
                       ValueError, "cross_entropy: weight is a constant and must not require a gradient"),
    "reduction": (lambda: F.cross_entropy(tg.ones(1, 3), tg.Tensor([0]), reduction="avg"), ValueError,
                  "cross_entropy: reduction must be one of mean, sum, none, got 'avg'"),
    "smoothing": (lambda: F.cross_entropy(tg.ones(1, 3), tg.Tensor([0]), label_smoothing=2), ValueError,
                  "cross_entropy: label_smoothing must be in [0, 1], got 2"),
    "no axis": (lambda: F.cross_entropy(tg.ones(), tg.Tensor(0)), ValueError,
                "cross_entropy: logits must have shape (V,), (N, V) or (N, V, ...), got ()"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()
