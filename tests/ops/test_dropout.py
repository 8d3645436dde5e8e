"""dropout: how many elements it drops, that backward drops the same, the generator, dtypes, layouts, errors."""

import math
import re

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
    gradients,
    layouts,
    leaf,
    poisoned,
)
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import dropout
from tinygrad_gpu.random import default_generator, philox
from tinygrad_gpu.testing import strategies


def drop(x, p):
    """The mask of seed 0 and draw 0."""
    tg.manual_seed(0)
    return F.dropout(x, p)


@settings(max_examples=50)
@given(
    strategies.shapes(max_side=5), st.sampled_from([0.0, 1e-12, 0.1, 0.5, 0.999, 1 - 2**-40, 1.0]), layouts, st.data()
)
def test_values_and_gradients(device, shape, p, layout, data):
    """Element i is dropped where word i of the draw is below p 2^32, whatever the layout."""
    x = leaf(data.draw(strategies.arrays(shape)), layout)
    kept = philox(np, 0, 0, x.size).astype(float).reshape(shape) >= round(p * 2**32)
    expected = np.where(kept, x.numpy() / (1 - p if p < 1 else 1), 0)
    assert_near(drop(x, p).numpy(), expected, rtol=1e-15)
    if p < 0.99:  # the differences of larger numbers are rounded more
        assert tg.testing.gradcheck(lambda x: drop(x, p), x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mean_and_variance(backend, p):
    """Of n ones: mean 1, variance p / (1 - p), within four standard errors; a share p is dropped."""
    n = 2**16 + 3
    y = F.dropout(tg.ones(n), p).numpy()
    assert set(np.unique(y)) == {0, np.float32(1 / (1 - p))}
    variance = p / (1 - p)
    assert abs(y.mean() - 1) < 4 * math.sqrt(variance / n)
    assert abs((y == 0).mean() - p) < 4 * math.sqrt(p * (1 - p) / n)
    pairs = (y[1:] == 0) & (y[:-1] == 0)  # neighbours fall independently
    assert abs(pairs.mean() - p * p) < 6 * math.sqrt(p * p / n)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_dtypes(backend, dtype, p):
    """The factor is not rounded to the dtype: bfloat16 would scale by 1.109 in place of 1.111."""
    check_dtype(lambda x: drop(x, p), [np.random.default_rng(0).uniform(-3, 3, (9, 11))], dtype, floor=0.01)
    y = drop(tg.ones(4000, dtype=dtype), p).numpy().astype(float)
    assert abs(y.max() * (1 - p) - 1) <= ROUNDING[dtype] * 1.01


def test_what_is_dropped_is_0(backend):
    """Infinite and NaN elements too; so is a gradient; also where 1 / (1 - p) is beyond float16."""
    x = leaf([math.inf, -math.inf, math.nan, 1e30] * 100, dtype=tg.float32)
    y, dx = gradients(lambda x: drop(x, 0.5), x, cotangent=np.full(400, math.inf))
    kept = drop(tg.ones(400), 0.5).numpy() != 0
    assert (y.numpy()[~kept] == 0).all()
    assert (dx.numpy()[~kept] == 0).all()
    assert (dx.numpy()[kept] == math.inf).all()
    y = drop(tg.full((10**6,), 1e-3, dtype=tg.float16), 0.99999).numpy().astype(float)
    assert np.isfinite(y).all()
    assert 0 < (y != 0).sum() < 30
    assert abs(y.max() / 100 - 1) < 2e-3


def test_p_of_0_and_1_and_evaluation(backend):
    x = leaf([[1.0, 2.0]], dtype=tg.float32)
    draws = default_generator.draw
    assert F.dropout(x, 0.0) is x
    assert F.dropout(x, 0.5, training=False) is x
    assert default_generator.draw == draws  # nothing was drawn
    y, dx = gradients(lambda x: F.dropout(x, 1.0), x)
    assert (y.numpy() == 0).all()
    assert (dx.numpy() == 0).all()


def test_the_generator(backend):
    """It advances once a call; the seed and the draw number give the mask again, on every device the same."""
    x = tg.ones(1000)
    first, second = F.dropout(x), F.dropout(x)
    assert default_generator.draw == 2
    assert (first.numpy() != second.numpy()).any()
    default_generator.load_state_dict({"seed": 0, "draw": 1})
    assert (F.dropout(x).numpy() == second.numpy()).all()
    tg.manual_seed(0)
    assert (F.dropout(tg.ones(1000, device="cpu")).numpy() == first.numpy()).all()
    tg.manual_seed(1)
    assert (F.dropout(x).numpy() != first.numpy()).any()
    tg.manual_seed(0)
    assert (F.dropout(tg.ones(70001)).numpy()[:1000] == first.numpy()).all()  # an element's word is its own


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broadcast_upstream_gradient(device, layout):
    x = leaf(np.ones((5, 7)), layout)
    y = drop(x, 0.5)
    y.backward(tg.Tensor(1.0, dtype=tg.float64).expand(5, 7))
    assert (x.grad.numpy() == y.numpy()).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_kernel(kernels, dtype, data):
    """The bits of the mathematics, for any row of a larger array, seed, draw and address, in place too."""
    xp, words = array_module(tg.zeros(1).data), st.integers(0, 2**64 - 1)
    rows = data.draw(st.sampled_from((0, 1, 2, 5)))
    cols = data.draw(st.sampled_from((1, 3, 4, 7, 8, 9, 1023, 1024, 1029, 2048, 2051)) | st.integers(0, 50))
    first, p = data.draw(st.sampled_from((0, 1, 2**33))), data.draw(st.sampled_from((0.0, 0.1, 0.5, 1 - 2**-40, 1.0)))
    drawn, skipped = (data.draw(words), data.draw(words)), data.draw(st.sampled_from((0, 0, 1)))
    flat = np.random.default_rng(cols).uniform(-3, 3, skipped + rows * cols).astype(dtype)
    x = flat[skipped:].reshape(rows, cols)

    quarters = -(-cols // 4)
    counters = np.arange(first * quarters, (first + rows) * quarters, dtype=np.uint64)
    mask = dropout.kept(np, counters, p, drawn).reshape(rows, 4 * quarters)[:, :cols]
    expected = dropout.fwd(x, mask, p)

    given = xp.asarray(flat)[skipped:].reshape(rows, cols)
    with poisoned(xp):
        found = dropout.rows_kernel(given, p, drawn, first)
    assert as_float64(found).tobytes() == as_float64(expected).tobytes()
    assert dropout.rows_kernel(given, p, drawn, first, out=given) is given
    assert as_float64(given).tobytes() == as_float64(expected).tobytes()


def test_kernels_store_no_mask(kernels):
    assert drop(leaf(np.ones(5), dtype=tg.float32), 0.5)._node.saved_arrays == ()


ERRORS = {
    "dropout: the probability must be in [0, 1], got -0.1": (ValueError, tg.ones(2), -0.1),
    "dropout: the probability must be in [0, 1], got 1.5": (ValueError, tg.ones(2), 1.5),
    "dropout: the probability must be in [0, 1], got nan": (ValueError, tg.ones(2), math.nan),
    "dropout: the probability must be a number, got str": (TypeError, tg.ones(2), "0.5"),
    "dropout: the probability must be a number, got bool": (TypeError, tg.ones(2), True),
    "dropout: x must have a floating dtype, got int64": (TypeError, tg.arange(2), 0.5),
    "dropout: x must be a Tensor, got ndarray": (TypeError, np.ones(2), 0.5),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("message", ERRORS)
def test_errors(message, training):
    error, x, p = ERRORS[message]
    draws = default_generator.draw
    with pytest.raises(error, match=re.escape(message)):
        F.dropout(x, p, training)
    assert default_generator.draw == draws
