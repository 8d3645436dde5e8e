"""Rotary embedding: against complex multiplication, gradients by differences, dtypes, relative positions, errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, layouts, leaf
from tinygrad_gpu.testing import strategies


def rotated(x, positions, base=10000.0):
    """Each pair (x[i], x[i + D/2]) as a complex number, times e^(i a)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    y = pairs * np.exp(1j * np.asarray(positions)[..., None] * base ** (-np.arange(half) / max(half, 1)))
    return np.concatenate([y.real, y.imag], axis=-1)


@settings(max_examples=25)
@given(data=st.data())
def test_values_and_gradients(device, data):
    rows = data.draw(strategies.shapes(min_dims=1, max_dims=3, max_side=5))
    shape = (*rows, 2 * data.draw(st.integers(0, 4)))
    base = data.draw(st.sampled_from([10000.0, 500.0]))
    dims = data.draw(st.integers(1, len(rows)))
    positions = np.random.default_rng(0).integers(
        0, 2000, [data.draw(st.sampled_from([1, n])) for n in rows[len(rows) - dims :]]
    )
    x = leaf(data.draw(strategies.arrays(shape)), data.draw(layouts))
    op = lambda x: F.rotary_embedding(x, tg.Tensor(positions), base)  # noqa: E731
    assert_near(op(x).numpy(), rotated(x.numpy(), positions, base), rtol=1e-12, atol=1e-12)
    assert tg.testing.gradcheck(op, x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_dtypes(device, dtype):
    x = np.random.default_rng(0).uniform(-2, 2, (3, 4, 6))
    check_dtype(lambda x: F.rotary_embedding(x, tg.Tensor([0, 1, 2, 1000])), [x], dtype, floor=4)


def test_scores_depend_on_distance_alone(device):
    q, k = tg.randn(1, 8, dtype=tg.float64), tg.randn(1, 8, dtype=tg.float64)

    def score(i, j):
        return (F.rotary_embedding(q, tg.Tensor([i])) * F.rotary_embedding(k, tg.Tensor([j]))).sum().item()

    assert score(5, 3) == pytest.approx(score(105, 103), rel=1e-12)
    assert score(5, 3) != pytest.approx(score(5, 4), rel=1e-3)


@pytest.mark.parametrize(
    ("x", "positions", "base", "error", "message"),
    [
        (
            (3, 5),
            [0, 1, 2],
            1e4,
            ValueError,
            r"rotary_embedding: x must have shape \(..., T, D\), D even, got \(3, 5\)",
        ),
        ((4,), [0], 1e4, ValueError, r"rotary_embedding: x must have shape"),
        ((3, 4), [0, 1], 1e4, ValueError, r"rotary_embedding: positions must broadcast to x's \(3,\), got \(2,\)"),
        (
            (3, 4),
            [0.0, 1.0, 2.0],
            1e4,
            TypeError,
            "rotary_embedding: positions must have an integer dtype, got float32",
        ),
        ((3, 4), [0, 1, 2], 0.0, ValueError, "rotary_embedding: base must be positive, got 0.0"),
    ],
)
def test_errors(device, x, positions, base, error, message):
    with pytest.raises(error, match=message):
        F.rotary_embedding(tg.ones(*x), tg.Tensor(positions), base)
