"""Softmax and log-softmax: values against NumPy, gradients by differences, dtypes, offsets, infinities, errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.testing import strategies

inf, nan = math.inf, math.nan


def softmax(x, axis):
    y = np.exp(x)
    return y / y.sum(axis, keepdims=True)


OPS = {
    "softmax": (tg.Tensor.softmax, softmax),
    "log_softmax": (tg.Tensor.log_softmax, lambda x, axis: np.log(softmax(x, axis))),
}


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=25)
@given(data=st.data())
def test_softmax(device, name, data):
    op, reference = OPS[name]
    shape = data.draw(
        strategies.shapes(min_dims=1, max_side=5) | strategies.shapes(min_dims=1, max_dims=1, max_side=33)
    )
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = leaf(data.draw(strategies.arrays(shape)), data.draw(layouts))
    assert_near(op(x, axis).numpy(), reference(x.numpy(), axis), rtol=1e-13)
    assert tg.testing.gradcheck(lambda x: op(x, axis), x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis", [0, 1])
def test_dtypes(device, name, dtype, axis):
    """A gradient is a difference whose terms carry the rounding of the saved result."""
    x = np.random.default_rng(0).uniform(-3, 3, (9, 11))
    check_dtype(lambda x: OPS[name][0](x, axis), [x], dtype, floor=2)


# Row, softmax, its gradient for dL/dy = [1, 0, …], log-softmax, its gradient.
ROWS = {
    "large": ([3e38, 3e38, 0], [0.5, 0.5, 0], [0.25, -0.25, 0], [-math.log(2), -math.log(2), -3e38], [0.5, -0.5, 0]),
    "huge offset": ([1e6, 1e6, 1e6 - 1000], [0.5, 0.5, 0], [0.25, -0.25, 0],
                    [-math.log(2), -math.log(2), -1000 - math.log(2)], [0.5, -0.5, 0]),
    "opposite ends": ([3e38, -3e38], [1, 0], [0, 0], [0, -inf], [0, 0]),
    "masked": ([-inf, 2, -inf, 2], [0, 0.5, 0, 0.5], [0, 0, 0, 0],
               [-inf, -math.log(2), -inf, -math.log(2)], [1, -0.5, 0, -0.5]),
    "one": ([5], [1], [0], [0], [0]),
    "all -inf": ([-inf, -inf], [nan, nan], [nan, nan], [nan, nan], [nan, nan]),
    "NaN": ([nan, 0], [nan, nan], [nan, nan], [nan, nan], [nan, nan]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [tg.float32, tg.float64], ids=str)
def test_rows(device, name, dtype):
    """Neighbours, and their gradients, are as without the row. One of nothing but -inf gives NaN, as documented."""
    row, *expected = ROWS[name]
    other = list(np.linspace(0, 1, len(row)))
    weights = np.float64([[1] + [0] * (len(row) - 1)] * 3)
    results = []
    for op in (tg.Tensor.softmax, tg.Tensor.log_softmax):
        neighbours = gradients(op, leaf([other, other], dtype=dtype), cotangent=weights[:2])
        found = gradients(op, leaf([other, row, other], dtype=dtype), cotangent=weights)
        for a, b in zip(found, neighbours, strict=True):
            assert_near(a.numpy()[::2], b.numpy(), rtol=1e-6)
            results.append(a.numpy()[1])
    for a, b in zip(results, expected, strict=True):
        if dtype == tg.float32 or name not in ("large", "opposite ends"):  # these ask for the range of float32
            assert_near(a, np.asarray(b, dtype), rtol=1e-6)


def test_float16_over_its_whole_range(device):
    x = tg.Tensor([65504, 65504, -65504], dtype=tg.float16)
    assert x.softmax().tolist() == [0.5, 0.5, 0]
    assert x.log_softmax().tolist() == [np.float16(-math.log(2))] * 2 + [-inf]
    row = leaf([1024, 1025, 1026, 1027], dtype=tg.float16)
    check_dtype(lambda x: x.softmax(), [row.numpy().astype(np.float64)], tg.float16)


def test_many_rows_and_long_rows(device):
    """More rows than a grid has in y or z, more elements than float16 can count, and long sums across memory."""
    y = tg.zeros(70000, 2).softmax()
    assert (y == 0.5).numpy().all()
    y = tg.zeros(1, 2**17, dtype=tg.float16).log_softmax()
    assert (y == float(np.float16(-17 * math.log(2)))).numpy().all()
    x = np.random.default_rng(0).uniform(0, 1, (10**5, 2)).astype(np.float32)
    for op, reference in OPS.values():
        found = op(tg.Tensor(x), 0).numpy().astype(np.float64)
        assert_near(found, reference(x.astype(np.float64), 0), rtol=4 * ROUNDING[tg.float32])


@pytest.mark.parametrize("name", OPS)
def test_no_rows_and_no_columns(device, name):
    for shape in ((0, 3), (3, 0)):
        y, dx = gradients(OPS[name][0], leaf(np.zeros(shape)))
        assert y.shape == dx.shape == shape


ERRORS = {
    "{}: axis must be in [-2, 2), got 2": (IndexError, lambda op: op(tg.ones(2, 2), 2)),
    "{}: axis must be an int, got None": (TypeError, lambda op: op(tg.ones(2, 2), None)),
    "{}: axis must be in [0, 0), got -1": (IndexError, lambda op: op(tg.ones())),
    "{}: x must have a floating dtype, got int64": (TypeError, lambda op: op(tg.arange(3))),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, name, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message.format(name))):
        call(OPS[name][0])
