"""Linear cross-entropy: against its definition, gradients over all options, chunks, memory, precision, hard inputs."""

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
from tests.ops.helpers import ROUNDING, assert_near, gradients, layouts, leaf
from tinygrad_gpu.ops import linear_cross_entropy
from tinygrad_gpu.testing import strategies

IGNORED = -100
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.3},
    "z_loss": {"z_loss": 0.1},
    "softcap": {"softcap": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0},
}


def reference(x, w, t, b=None, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, u=None):
    """A token at a time, from the definition."""
    losses, total, v = np.zeros(len(x)), 0.0, len(w)
    for i in range(len(x)):
        if t[i] == IGNORED:
            continue
        z = w @ x[i] + (0 if b is None else b)
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        lse = np.log(np.exp(z).sum())
        q = label_smoothing / v + (1 - label_smoothing) * (np.arange(v) == t[i])
        weight = 1.0 if u is None else u[i]
        losses[i] = weight * ((q * (lse - z)).sum() + z_loss * lse**2)
        total += weight
    mean = losses.sum() / total if total else 0.0
    return np.asarray({"none": losses, "sum": losses.sum(), "mean": mean}[reduction])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=12)
@given(data=st.data())
def test_values_and_gradients(device, name, reduction, data):
    n, v, c = (data.draw(st.sampled_from(sizes)) for sizes in ([0, 1, 2, 5], [1, 2, 7], [0, 1, 3]))
    x, w, b = (leaf(data.draw(strategies.arrays(s)), data.draw(layouts)) for s in ((n, c), (v, c), (v,)))
    biased, weighted = data.draw(st.booleans()), data.draw(st.booleans())
    t = np.array(data.draw(st.lists(st.sampled_from([IGNORED, *range(v)]), min_size=n, max_size=n)), np.int64)
    u = np.linspace(0.5, 2, n) if weighted else None
    options = {**OPTIONS[name], "reduction": reduction}

    def op(x, w, *b):
        budget = data_budget  # one row and one row of the weight at a time, or all at once
        weights = None if u is None else tg.Tensor(u)
        return F.linear_cross_entropy(x, w, tg.Tensor(t), *b, token_weight=weights, memory_budget=budget, **options)

    inputs = (x, w, b) if biased else (x, w)
    expected = reference(x.numpy(), w.numpy(), t, b.numpy() if biased else None, u=u, **options)
    for data_budget in (None, 1, 10**6):
        assert_near(op(*inputs).numpy(), expected, rtol=1e-12, atol=1e-13)
    data_budget = data.draw(st.sampled_from([None, 1, 300]))
    assert tg.testing.gradcheck(op, *inputs)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_dtypes(device, dtype, reduction):
    """The loss is float32 whatever is narrower; each gradient is rounded to its input's dtype once, or twice for x, whose
    unscaled gradient is kept in it."""
    rng = np.random.default_rng(0)
    arrays = [tg.Tensor(a, dtype=dtype).to(tg.float64).numpy() for a in (rng.normal(size=(6, 8)), rng.normal(size=(5, 8)), rng.normal(size=5))]
    t = tg.Tensor([0, 4, 2, IGNORED, 1, 1])
    op = lambda x, w, b: F.linear_cross_entropy(x, w, t, b, reduction=reduction)  # noqa: E731
    found = gradients(op, *(leaf(a, dtype=dtype) for a in arrays))
    exact = gradients(op, *(leaf(a) for a in arrays))
    assert found[0].dtype == tg.float32
    assert [g.dtype for g in found[1:]] == [dtype] * 3
    assert_near(found[0].numpy().astype(float), exact[0].numpy(), rtol=2e-6)
    for a, e in zip(found[1:], exact[1:], strict=True):
        assert_near(a.numpy().astype(float), e.numpy(), rtol=2.5 * ROUNDING[dtype], atol=32 * ROUNDING[tg.float32])  # sums of up to 48 terms


def test_every_target_ignored(device):
    """6 tokens of width 8, V = 11."""
    for reduction in ("mean", "sum", "none"):
        inputs = [leaf(np.random.default_rng(i).normal(size=s)) for i, s in enumerate(((6, 8), (11, 8), (11,)))]
        t = tg.Tensor([IGNORED] * 6)
        op = lambda x, w, b: F.linear_cross_entropy(x, w, t, b, reduction=reduction, softcap=5.0, z_loss=0.1)  # noqa: B023, E731
        y, *grads = gradients(op, *inputs)
        assert (y.numpy() == 0).all()
        assert all((g.numpy() == 0).all() for g in grads)


def test_an_ignored_token_may_hold_anything(device):
    x, w = leaf(np.array([[1.0], [math.nan], [math.inf]])), leaf(np.array([[1.0], [2.0]]))
    t = tg.Tensor([1, IGNORED, IGNORED])
    for options in ({}, {"softcap": 3.0}):
        x.grad = w.grad = None
        y, dx, dw = gradients(lambda x, w: F.linear_cross_entropy(x, w, t, **options), x, w)  # noqa: B023
        assert math.isfinite(y.item())
        assert dx.numpy()[1:].tolist() == [[0.0], [0.0]]
        assert np.isfinite(dx.numpy()).all()
    assert dw.shape == w.shape


def test_the_bias_is_added_once(device):
    x, w, b = leaf(np.zeros((1, 3))), leaf(np.ones((5, 3))), leaf(np.array([7.0, 0, 0, 0, 0]))
    y, _, _, db = gradients(lambda *a: F.linear_cross_entropy(a[0], a[1], tg.Tensor([0]), a[2]), x, w, b)
    p = np.exp(b.numpy()) / np.exp(b.numpy()).sum()
    assert y.item() == pytest.approx(0.003641, abs=5e-7)
    assert_near(db.numpy(), p - np.eye(5)[0], rtol=1e-12)


def problem(n, c, v, dtype=np.float64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, c)).astype(dtype), (rng.normal(size=(v, c)) / math.sqrt(c)).astype(dtype), rng.integers(0, v, n)


def test_the_gradient_of_the_weight_is_summed_in_float32(device):
    """bfloat16, N = 4096, V = 97: one chunk and 64 chunks are equally near the exact gradient."""
    x, w, t = problem(4096, 32, 97)
    x, w = (tg.Tensor(a, dtype=tg.bfloat16).to(tg.float64).numpy() for a in (x, w))
    exact = gradients(lambda w: F.linear_cross_entropy(tg.Tensor(x), w, tg.Tensor(t)), leaf(w))[1].numpy()
    errors = []
    for rows in (4096, 64):
        budget = 4 * rows * 4 * (2 * 97 + 2 * 32 + 8) // 3 + 4
        assert linear_cross_entropy.config(4096, 97, 32, tg.bfloat16, budget, "numpy")[0] == rows
        weight = tg.nn.Parameter(tg.Tensor(w, dtype=tg.bfloat16))
        F.linear_cross_entropy(tg.Tensor(x, dtype=tg.bfloat16), weight, tg.Tensor(t), memory_budget=budget).backward()
        assert weight.grad.dtype == tg.float32
        errors.append(np.linalg.norm(weight.grad.numpy() - exact) / np.linalg.norm(exact))
    assert max(errors) < 3e-6
    assert max(errors) < 2 * min(errors) + 1e-6


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_what_is_needed_is_computed(device, monkeypatch, needs, reduction):
    x, w, t = problem(6, 3, 5)
    inputs = [tg.Tensor(a, requires_grad=need) for a, need in zip((x, w, np.zeros(5)), needs, strict=True)]
    made = []
    original = linear_cross_entropy._Problem.gradients
    monkeypatch.setattr(
        linear_cross_entropy._Problem, "gradients", lambda self, *a: (made.append([g is not None for g in a[4:]]), original(self, *a))
    )
    y = F.linear_cross_entropy(inputs[0], inputs[1], tg.Tensor(t), inputs[2], reduction=reduction)
    if any(needs):
        y.sum().backward()
    assert all(flags == list(needs) for flags in made)
    assert bool(made) == any(needs)
    assert [a.grad is not None for a in inputs] == list(needs)
    with tg.no_grad():
        made.clear()
        F.linear_cross_entropy(inputs[0], inputs[1], tg.Tensor(t), inputs[2])
        assert not made


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_the_workspace_stays_within_its_budget(reduction, dtype, budget):
    """Beyond inputs and gradients, forward and backward hold no more than the budget: never the logits, 16 MB here."""
    n, c, v = 2000, 64, 2000
    x, w, t = problem(n, c, v, dtype)
    x, w, t = (tg.Tensor(a, device="cpu", requires_grad=a.dtype != np.int64) for a in (x, w, t))
    kept = n * c * dtype().itemsize + v * c * 4  # the unscaled gradients
    tracemalloc.start()
    try:
        loss = F.linear_cross_entropy(x, w, t, reduction=reduction, memory_budget=budget)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        loss.sum().backward()
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    allowed = n * v * 4 * 5 // 8 if budget is None else budget
    small = 60 * n + 200_000  # targets, masks, losses, statistics, and what Python itself takes
    assert forward < kept + allowed + small
    assert backward < 2 * kept + v * c * 4 + (allowed if reduction == "none" else 0) + small
    assert forward < n * v * 4


def test_config():
    config = linear_cross_entropy.config
    assert config(1000, 50257, 768, np.dtype(np.float32), 1, "numpy") == (1, 1)  # below one row: one row
    assert config(16384, 128256, 4096, tg.bfloat16, 1 << 28, "cupy") == (190, 4096)
    assert config(100, 256, 128, np.dtype(np.float32), None, "numpy")[0] == 25  # by default a quarter at most
    assert config(100, 256, 128, np.dtype(np.float32), 1 << 30, "numpy") == (100, 256)
    assert config(0, 1, 0, np.dtype(np.float64), None, "numpy") == (1, 1)


def test_strided_inputs_and_an_upstream_gradient_of_stride_zero(device):
    x, w, t = problem(12, 6, 5)
    base, targets = tg.Tensor(x, requires_grad=True), tg.Tensor(t)
    y = F.linear_cross_entropy(base[:, ::2], tg.Tensor(w[:, :3]), targets.to(tg.int32), reduction="none")
    y.backward(tg.ones(1, dtype=tg.float64).expand(12))
    plain = tg.Tensor(np.ascontiguousarray(x[:, ::2]), requires_grad=True)
    F.linear_cross_entropy(plain, tg.Tensor(w[:, :3]), targets, reduction="sum").backward()
    assert_near(base.grad.numpy()[:, ::2], plain.grad.numpy(), rtol=1e-12)
    assert (base.grad.numpy()[:, 1::2] == 0).all()
    every_second = F.linear_cross_entropy(base[::2], tg.Tensor(w), targets[::2])
    assert every_second.item() == F.linear_cross_entropy(tg.Tensor(x[::2].copy()), tg.Tensor(w), tg.Tensor(t[::2].copy())).item()


def test_an_odd_vocabulary_gives_the_same_loss_each_time(device):
    x, w, _ = problem(3, 4, 50257, np.float32)
    x, w, t = tg.Tensor(x), tg.Tensor(w), tg.Tensor([50256, 50255, 0])
    losses = {F.linear_cross_entropy(x, w, t).item() for _ in range(20)}
    assert len(losses) == 1
    assert math.isfinite(losses.pop())


def test_float16_logits_beyond_its_range(device):
    x, w = leaf(np.full((2, 64), 60.0), dtype=tg.float16), leaf(np.full((3, 64), 30.0), dtype=tg.float16)
    w.data[1] = 29.0  # logits 115200, 111360, 115200
    y, dx, dw = gradients(lambda x, w: F.linear_cross_entropy(x, w, tg.Tensor([0, 1])), x, w)
    assert y.item() == pytest.approx((math.log(2) + 3840 + math.log(2)) / 2, rel=1e-6)
    assert np.isfinite(dx.numpy()).all()
    assert np.isfinite(dw.numpy()).all()


def test_inputs_stay_as_they_were_and_shapes_are_free(device):
    x, w, t = problem(6, 3, 5)
    inputs = [tg.Tensor(a, requires_grad=a.dtype == np.float64) for a in (x.reshape(2, 3, 3), w, t.reshape(2, 3))]
    before = [a.numpy().copy() for a in inputs]
    y = F.linear_cross_entropy(*inputs, reduction="none", softcap=1.0)
    assert y.shape == (2, 3)
    y.sum().backward(retain_graph=True)
    first = inputs[0].grad.numpy().copy()
    y.sum().backward()
    assert_near(inputs[0].grad.numpy(), 2 * first, rtol=1e-12)
    assert inputs[0].grad.shape == (2, 3, 3)
    assert all((a.numpy() == b).all() for a, b in zip(inputs, before, strict=True))


NAME = "linear_cross_entropy"
BAD = {
    "weight": ({"weight": lambda: tg.ones(5)}, ValueError, f"{NAME}: weight must have shape (V, C), got (5,)"),
    "width": ({"x": lambda: tg.ones(2, 4)}, ValueError, f"{NAME}: x must have shape (..., C) = (..., 3), got (2, 4)"),
    "targets": ({"targets": lambda: tg.zeros(3, dtype=tg.int64)}, ValueError,
                f"{NAME}: targets must have x's shape without its last axis, (2,), got (3,)"),
    "targets' dtype": ({"targets": lambda: tg.zeros(2)}, TypeError, f"{NAME}: targets must have an integer dtype, got float32"),
    "bias": ({"bias": lambda: tg.ones(4)}, ValueError, f"{NAME}: bias must have shape (V,) = (5,), got (4,)"),
    "dtypes": ({"weight": lambda: tg.ones(5, 3).half()}, TypeError, f"{NAME}: weight must have dtype float32 like the others, got float16"),
    "softcap": ({"softcap": 0.0}, ValueError, f"{NAME}: softcap must be positive, got 0.0"),
    "budget": ({"memory_budget": 0}, ValueError, f"{NAME}: memory_budget must be positive, got 0"),
    "token_weight": ({"token_weight": lambda: tg.ones(3)}, ValueError, f"{NAME}: token_weight must have shape (2,) like targets, got (3,)"),
    "trained token_weight": ({"token_weight": lambda: tg.ones(2, requires_grad=True)}, ValueError,
                             f"{NAME}: token_weight is a constant and must not require a gradient"),
    "reduction": ({"reduction": "avg"}, ValueError, f"{NAME}: reduction must be one of mean, sum, none, got 'avg'"),
    "target": ({"targets": lambda: tg.Tensor([0, 5])}, IndexError, f"{NAME}: targets must be in [0, 5) or -100, got 5 at position (1,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    change, error, message = BAD[name]
    good = {"x": tg.ones(2, 3), "weight": tg.ones(5, 3), "targets": tg.zeros(2, dtype=tg.int64)}
    change = {k: value() if callable(value) else value for k, value in change.items()}
    with pytest.raises(error, match=re.escape(message)):
        F.linear_cross_entropy(**{**good, **change}).item()
