"""The reductions: values against NumPy, gradients by differences, dtypes, long sums, ties, empty axes, errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.ops.reduce import Std
from tinygrad_gpu.testing import strategies

inf, nan = math.inf, math.nan


def lse(x, axis, keepdims=False):
    return np.log(np.exp(x).sum(axis=axis, keepdims=keepdims))


def std(x, axis=None, keepdims=False, correction=1):
    return Std.apply(x, axis=axis, keepdims=keepdims, correction=correction)


# name: op(x, axis, keepdims), the same on NumPy arrays, how many elements it must reduce over.
OPS = {
    "sum": (lambda x, *a: x.sum(*a), lambda x, *a: x.sum(axis=a[0], keepdims=a[1]), 0),
    "mean": (lambda x, *a: x.mean(*a), lambda x, *a: x.mean(axis=a[0], keepdims=a[1]), 1),
    "var": (
        lambda x, axis, keepdims: x.var(axis, keepdims=keepdims),
        lambda x, *a: x.var(axis=a[0], keepdims=a[1], ddof=1), 2,
    ),
    "var correction 0": (
        lambda x, axis, keepdims: x.var(axis, correction=0, keepdims=keepdims),
        lambda x, *a: x.var(axis=a[0], keepdims=a[1]), 1,
    ),
    "std": (std, lambda x, *a: x.std(axis=a[0], keepdims=a[1], ddof=1), 2),
    "std correction 0.5": (
        lambda x, axis, keepdims: x.std(axis, correction=0.5, keepdims=keepdims),
        lambda x, *a: x.std(axis=a[0], keepdims=a[1], ddof=0.5), 2,
    ),
    "max": (lambda x, *a: x.max(*a), lambda x, *a: x.max(axis=a[0], keepdims=a[1]), 1),
    "min": (lambda x, *a: x.min(*a), lambda x, *a: x.min(axis=a[0], keepdims=a[1]), 1),
    "logsumexp": (lambda x, *a: x.logsumexp(*a), lse, 0),
}  # fmt: skip


@st.composite
def cases(draw, least=0):
    """An array of distinct numbers, and an axis, axes or None, over which it has `least` elements or more."""
    some = least > 1  # else one element reduced over no axis will do
    shape = draw(strategies.shapes(some, max_side=5) | strategies.shapes(min_dims=1, max_dims=1, max_side=33))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=some, unique=True)) if shape else []
    shape = tuple(max(n, least) if i in axes else n for i, n in enumerate(shape))
    axis = tuple(a - len(shape) * draw(st.booleans()) for a in axes)  # counted from either end
    if len(axes) == 1 and draw(st.booleans()):
        axis = axis[0]
    elif len(axes) == len(shape) and draw(st.booleans()):
        axis = None
    return draw(strategies.arrays(shape, distinct=True)), axis


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=20)
@given(data=st.data(), keepdims=st.booleans())
def test_reductions(device, name, data, keepdims):
    op, reference, least = OPS[name]
    array, axis = data.draw(cases(least))
    x = leaf(array, data.draw(layouts))
    with np.errstate(divide="ignore"):
        expected = np.asarray(reference(x.numpy(), axis, keepdims))
    assert_near(op(x, axis, keepdims).numpy(), expected, rtol=1e-13, atol=1e-14)
    assert tg.testing.gradcheck(lambda x: op(x, axis, keepdims), x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("shape", "axis"), [((40, 7), 0), ((7, 40), 1), ((5, 4, 3), (0, 2)), ((60,), None)])
def test_dtypes(device, name, dtype, shape, axis):
    x = np.random.default_rng(0).permutation(np.linspace(-2, 3, math.prod(shape))).reshape(shape)
    # Sums of 40 numbers of size 1, in float32 and rounded once.
    check_dtype(lambda x: OPS[name][0](x, axis, False), [x], dtype, floor=10 if dtype == tg.float32 else 2**-10)


# Shape, axis, dtype. In its own dtype a sum of ones stops at 2048 in float16 and at 256 in bfloat16. The last is a
# sum across memory, in which NumPy's own would be off by 300 roundings; a pairwise one of 10^6 may be off by 20.
LONG = [((4096,), 0, tg.float16), ((4096, 2), 0, tg.bfloat16), ((2, 10**6), 1, tg.float32), ((10**6, 2), 0, tg.float32)]


@pytest.mark.parametrize(("shape", "axis", "dtype"), LONG)
def test_long_sums(device, shape, axis, dtype):
    ones = tg.ones(*shape, dtype=dtype)
    assert (ones.sum(axis) == shape[axis]).numpy().all()
    assert (ones.mean(axis) == 1).numpy().all()
    x = tg.Tensor(np.random.default_rng(0).uniform(0, 1, shape), dtype=dtype)
    exact = x.numpy().astype(np.float64)
    for op, reference in ((x.mean, np.mean), (x.var, lambda x, axis: np.var(x, axis, ddof=1)), (x.logsumexp, lse)):
        assert_near(op(axis).numpy().astype(np.float64), np.asarray(reference(exact, axis)), rtol=20 * ROUNDING[dtype])


def test_sum_beyond_float16(device):
    ones = tg.ones(70000, dtype=tg.float16)
    assert ones.sum().item() == inf
    assert ones.mean().item() == 1


@pytest.mark.parametrize("n", [2049, 70000])
def test_gradients_of_many_halves(device, n):
    """n does not fit in float16: a gradient over it must not become 0, nor one shared by n ties."""
    for op in (lambda x: x.mean(), lambda x: x.max(), lambda x: x.min()):
        _, dx = gradients(op, leaf(np.zeros(n), dtype=tg.float16), cotangent=256)
        assert_near(dx.numpy().astype(np.float64), np.full(n, 256 / n), rtol=ROUNDING[tg.float16])


# op, input, result, gradient for dL/dy = 1.
EDGES = {
    "max shares ties": (lambda x: x.max(), [[3, 1], [3, 3]], 3, [[1 / 3, 0], [1 / 3, 1 / 3]]),
    "min shares ties": (lambda x: x.min(1), [[3, 1], [3, 3]], [1, 3], [[0, 1], [0.5, 0.5]]),
    "max of infinities": (lambda x: x.max(1), [[-inf, -inf], [inf, 0]], [-inf, inf], [[0.5, 0.5], [1, 0]]),
    "max of NaN": (lambda x: x.max(1), [[1, nan], [1, 2]], [nan, 2], [[0, 0], [0, 1]]),
    "min of NaN": (lambda x: x.min(), [1, nan], nan, [0, 0]),
    "sum over no axis": (lambda x: x.sum(()), [[1, 2]], [[1, 2]], [[1, 1]]),
    "max over no axis": (lambda x: x.max(()), [1, 2], [1, 2], [1, 1]),
    "sum of nothing": (lambda x: x.sum(), [], 0, []),
    "mean of nothing": (lambda x: x.mean(), [], nan, []),
    "var of nothing": (lambda x: x.var(), [], nan, []),
    "std of nothing": (lambda x: x.std(), [], nan, []),
    "logsumexp of nothing": (lambda x: x.logsumexp(), [], -inf, []),
    "sums of nothing": (lambda x: x.sum(1), [[], []], [0, 0], [[], []]),
    "var of one": (lambda x: x.var(), [3], nan, [nan]),
    "var of one, uncorrected": (lambda x: x.var(correction=0), [3], 0, [0]),
    "var over correction": (lambda x: x.var(correction=5), [1, 2], inf, [-inf, inf]),
    "var of 48 far from 0": (
        lambda x: x.var(1, correction=0), [[4, 6] * 24] * 2, [1, 1], [[-1 / 24, 1 / 24] * 24] * 2,
    ),
    "std of equals": (std, [2, 2, 2], 0, [0, 0, 0]),
    "var far from 0": (
        lambda x: x.var(correction=0),
        [1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3],
        1.25,
        [-0.75, -0.25, 0.25, 0.75],
    ),
    "logsumexp of large": (lambda x: x.logsumexp(), [3e38, -3e38], 3e38, [1, 0]),
    "logsumexp of equals": (lambda x: x.logsumexp(), [1e4, 1e4], 1e4 + math.log(2), [0.5, 0.5]),
    "logsumexp of -inf": (lambda x: x.logsumexp(1), [[-inf, -inf], [-inf, 2]], [-inf, 2], [[0, 0], [0, 1]]),
    "logsumexp of inf": (lambda x: x.logsumexp(), [inf, 0], inf, [nan, 0]),
    "logsumexp of a number": (lambda x: x.logsumexp(), 3, 3, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("dtype", [tg.float32, tg.float64], ids=str)
def test_edges(device, name, dtype):
    op, array, result, grad = EDGES[name]
    y, dx = gradients(op, leaf(np.float64(array), dtype=dtype))
    assert_near(y.numpy(), np.asarray(result, dtype), rtol=1e-6)
    assert_near(dx.numpy(), np.asarray(grad, dtype), rtol=1e-6)


def test_float16_beyond_its_range_on_the_way(device):
    """Squares of 300 and exponentials of 20 do not fit in float16; the results do."""
    x = np.float64([300, -300])
    assert std(tg.Tensor(x, dtype=tg.float16), correction=0).item() == 300
    check_dtype(lambda x: std(x, correction=0), [x], tg.float16)
    check_dtype(lambda x: x.logsumexp(), [np.float64([20, 19])], tg.float16)
    row = tg.Tensor([1024, 1025, 1026, 1027], dtype=tg.float16)
    assert row.var(correction=0).item() == 1.25


@pytest.mark.parametrize("dtype", [tg.int64, tg.int32, tg.bool], ids=str)
def test_integers(device, dtype):
    x = tg.Tensor([[0, 1, 1], [0, 0, 1]], dtype=dtype)
    assert x.sum().dtype == tg.int64
    assert x.sum(1).tolist() == [2, 1]
    assert (x.max(0).dtype, x.max(0).tolist()) == (dtype, [0, 1, 1])
    assert x.min(1, keepdims=True).tolist() == [[0], [0]]
    big = tg.full((3,), 2**31 - 1, dtype=tg.int32)
    assert big.sum().item() == 3 * (2**31 - 1)


@given(data=st.data(), keepdims=st.booleans())
def test_argmax(device, data, keepdims):
    """The first of equals, along one axis or in the flat tensor."""
    array = data.draw(strategies.arrays(strategies.shapes(min_side=1), min_value=0, max_value=1 / 16))
    axis = data.draw(st.sampled_from([None, *range(-array.ndim, array.ndim)]))
    for dtype in (tg.float64, tg.bfloat16, tg.int64):
        x = tg.Tensor(64 * array, dtype=dtype)
        for op, reference in ((x.argmax, np.argmax), (x.argmin, np.argmin)):
            found = op(axis, keepdims)
            assert found.dtype == tg.int64
            assert found.tolist() == reference(array, axis, keepdims=keepdims).tolist()


ERRORS = {
    "sum: axis must be in [-2, 2), got 2": (IndexError, lambda x: x.sum(2)),
    "mean: axis must be in [-2, 2), got -3": (IndexError, lambda x: x.mean((0, -3))),
    "var: axis must be an int, got 0.5": (TypeError, lambda x: x.var(0.5)),
    "max: each axis may be named once, got (0, -2)": (ValueError, lambda x: x.max((0, -2))),
    "logsumexp: axis must be an int, got True": (TypeError, lambda x: x.logsumexp(True)),
    "max: cannot reduce over no element, got shape (0, 2), axis 0": (ValueError, lambda x: x[:0].max(0)),
    "min: cannot reduce over no element, got shape (0, 2), axis None": (ValueError, lambda x: x[:0].min()),
    "argmax: cannot reduce over no element, got shape (2, 0), axis 1": (ValueError, lambda x: x[:, :0].argmax(1)),
    "argmin: cannot reduce over no element, got shape (2, 0), axis None": (ValueError, lambda x: x[:, :0].argmin()),
    "argmax: axis must be an int, got (0, 1)": (TypeError, lambda x: x.argmax((0, 1))),
    "mean: x must have a floating dtype, got int64": (TypeError, lambda x: x.to(tg.int64).mean()),
    "var: x must have a floating dtype, got bool": (TypeError, lambda x: (x > 0).var()),
    "std: x must have a floating dtype, got int32": (TypeError, lambda x: std(x.to(tg.int32))),
    "logsumexp: x must have a floating dtype, got int64": (TypeError, lambda x: x.to(tg.int64).logsumexp()),
    "var: correction must be a number, got None": (TypeError, lambda x: x.var(correction=None)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        call(tg.ones(2, 2))


@pytest.mark.parametrize("name", OPS)
def test_no_result(device, name):
    """Over a full axis of an array with no rows there is no result, and no error."""
    y, dx = gradients(lambda x: OPS[name][0](x, 1, False), leaf(np.zeros((0, 3))))
    assert (y.shape, dx.shape) == ((0,), (0, 3))
