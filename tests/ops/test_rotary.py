"""rotary_embedding: values against complex products, gradients by differences, dtypes, positions, layouts, errors."""

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

rng = np.random.default_rng


def rotary(x, positions, base=10000.0):
    """Pairs (x[i], x[i + D/2]) as complex numbers, turned by an angle each."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[..., None] * base ** (-np.arange(half) / max(half, 1)))
    y = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([y.real, y.imag], axis=-1)


@settings(max_examples=60)
@given(strategies.shapes(min_dims=1, max_side=3), st.sampled_from([0, 2, 4, 10]), layouts, st.data())
def test_values_and_gradients(device, rows, d, layout, data):
    """Positions of any shape that broadcasts to the rows, negative and large ones among them."""
    cut = data.draw(st.integers(0, len(rows)))
    shape = tuple(data.draw(st.sampled_from([1, n])) for n in rows[cut:])
    positions = data.draw(strategies.arrays(shape, np.int64, -1000, 1000)) * data.draw(st.sampled_from([1, 1000]))
    positions = positions.astype(data.draw(st.sampled_from([np.int64, np.int32])))
    base = data.draw(st.sampled_from([10000.0, 500000, 1, 0.5]))
    x = leaf(data.draw(strategies.arrays((*rows, d))), layout)
    op = lambda x: F.rotary_embedding(x, tg.Tensor(positions), base)  # noqa: E731
    assert_near(op(x).numpy(), rotary(x.numpy(), positions.astype(float), float(base)), rtol=1e-9, atol=1e-9)
    assert tg.testing.gradcheck(op, x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_dtypes(device, dtype):
    """Angles are float64: those of position 1,000,000 are as right as the others."""
    positions = tg.Tensor([0, 1, 1000, 10**6])
    floor = 3 if dtype == tg.float32 else 0.01  # half types round once, after float32
    check_dtype(lambda x: F.rotary_embedding(x, positions), [rng(0).uniform(-3, 3, (2, 4, 16))], dtype, floor)


def test_what_it_is_for(device):
    """Lengths stay, position 0 changes nothing, and products of two rows depend on the distance of their positions."""
    q, k = rng(0).standard_normal((2, 1, 6))
    at = lambda x, n: F.rotary_embedding(tg.Tensor(x), tg.Tensor([n])).numpy()[0]  # noqa: E731
    assert (at(q, 0) == q[0]).all()
    assert_near(np.linalg.norm(at(q, 77)), np.linalg.norm(q), rtol=1e-14)
    assert_near(at(q, 5) @ at(k, 2), at(q, 1005) @ at(k, 1002), rtol=1e-9)


def test_more_rows_than_a_grid_has_in_y(device):
    x, positions = rng(0).standard_normal((70001, 2)).astype(np.float32), np.arange(70001)
    found = gradients(lambda x: F.rotary_embedding(x, tg.Tensor(positions)), leaf(x))
    last = gradients(lambda x: F.rotary_embedding(x, tg.Tensor(positions[-1:])), leaf(x[-1:]))
    for a, b in zip(found, last, strict=True):
        assert (a.numpy()[-1:] == b.numpy()).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_a_broadcast_upstream_gradient(device, layout):
    results = []
    for form, g in (
        (layout, tg.Tensor(2.0, dtype=tg.float64).expand(2, 3, 4)),
        ("plain", tg.full((2, 3, 4), 2.0, dtype=tg.float64)),
    ):
        x = leaf(rng(0).standard_normal((2, 3, 4)), form)
        y = F.rotary_embedding(x, tg.arange(6)[::2])
        y.backward(g)
        results.append((y.numpy(), x.grad.numpy()))
    for a, b in zip(*results, strict=True):
        assert (a == b).all()


X, P = tg.ones(2, 3, 4, device="cpu"), tg.arange(3, device="cpu")
ERRORS = {
    "x must have shape (..., T, D), D even, got (4,)": (ValueError, X[0, 0], P[0]),
    "x must have shape (..., T, D), D even, got (2, 3, 3)": (ValueError, X[..., :3], P),
    "x must have a floating dtype, got int64": (TypeError, X.to(tg.int64), P),
    "x must be a Tensor, got NoneType": (TypeError, None, P),
    "positions must broadcast to x's (2, 3), got (2,)": (ValueError, X, P[:2]),
    "positions must broadcast to x's (2, 3), got (1, 1, 3)": (ValueError, X, P[None, None]),
    "positions must broadcast to x's (2, 1), got (3,)": (ValueError, X[:, :1], P),
    "positions must have an integer dtype, got float32": (TypeError, X, P.float()),
    "positions must be a Tensor, got int": (TypeError, X, 3),
    "base must be positive and finite, got 0": (ValueError, X, P, 0),
    "base must be positive and finite, got inf": (ValueError, X, P, math.inf),
    "base must be a number, got None": (TypeError, X, P, None),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    error, *arguments = ERRORS[message]
    with pytest.raises(error, match=re.escape(f"rotary_embedding: {message}")):
        F.rotary_embedding(*arguments)
