"""Softmax and log-softmax: values against NumPy, gradients by differences, dtypes, offsets, infinities, errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, as_float64, assert_near, check_dtype, check_kernel, gradients, layouts, leaf
from tinygrad_gpu.device import array_module
from tinygrad_gpu.kernel import H200, KERNEL_DTYPES
from tinygrad_gpu.ops import softmax as softmax_op
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
def test_dtypes(backend, name, dtype, axis):
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
def test_rows(backend, name, dtype):
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


def test_float16_over_its_whole_range(backend):
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
        assert_near(found, reference(x.astype(np.float64), 0), rtol=6 * ROUNDING[tg.float32])


@pytest.mark.parametrize("n", [31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_rows_about_the_width_of_a_warp(backend, n):
    """Of 32 lanes and of 64: each element counts, once."""
    x = np.random.default_rng(n).uniform(-1, 1, (3, n)).astype(np.float32)
    for name, (op, reference) in OPS.items():
        y, dx = gradients(lambda x, op=op: op(x, -1), leaf(x), cotangent=x)
        assert_near(y.numpy(), reference(x.astype(np.float64), -1), rtol=6 * ROUNDING[tg.float32], name=name)
        assert abs(dx.numpy().astype(np.float64).sum(-1)).max() < 1e-5  # a shift of a row changes nothing


@pytest.mark.parametrize("name", OPS)
def test_no_rows_and_no_columns(device, name):
    for shape in ((0, 3), (3, 0)):
        y, dx = gradients(OPS[name][0], leaf(np.zeros(shape)))
        assert y.shape == dx.shape == shape


# What the kernels are made for: the dtype of scores, that of results (a plain softmax has one), widths, how many
# elements come before the first.
KERNELS = {
    "narrow rows": (tg.float32, tg.float32, (1, 3, 31), 0),
    "vectors": (tg.float16, tg.float16, (0, 8, 248), 0),
    "several warps, no vectors": (tg.bfloat16, tg.bfloat16, (769, 895), 0),
    "several vectors a thread": (tg.float32, tg.bfloat16, (516, 768), 0),
    "addresses that take no vectors": (tg.float32, tg.float16, (40, 64), 1),
    "rows that registers do not hold": (tg.float16, tg.float16, (8193,), 0),
}
FORMS = {
    "softmax": (softmax_op.fwd, softmax_op.fwd_kernel, softmax_op.bwd, softmax_op.bwd_kernel),
    "log_softmax": (softmax_op.log_fwd, softmax_op.log_fwd_kernel, softmax_op.log_bwd, softmax_op.log_bwd_kernel),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", [kind for kind, (scores, results, *_) in KERNELS.items() if scores == results])
@settings(max_examples=4)
@given(data=st.data())
def test_kernels(kernels, kind, name, data):
    dtype, _, widths, _ = KERNELS[kind]
    width, axis = data.draw(st.sampled_from(widths)), data.draw(st.sampled_from([0, 1]))
    height = data.draw(st.integers(0, 70 if width < 32 else 9 if width < 1000 else 1))
    fwd, fwd_kernel, bwd, bwd_kernel = (lambda *arrays, f=f: f(*arrays, axis) for f in FORMS[name])
    x, dy = np.random.default_rng(height).uniform(-4, 4, (2, height, width) if axis else (2, width, height))
    with np.errstate(divide="ignore"):  # the logarithm of no sum
        check_kernel(fwd, fwd_kernel, [x], dtype, floor=8)
        check_kernel(bwd, bwd_kernel, [dy, fwd(x)], dtype, floor=16)


# Queries, offset less the number of keys, window; all keys are seen where there is no offset.
MASKS = {
    "all keys": (3, None, None),
    "causal": (5, -5, None),
    "keys that no query sees": (4, -7, None),
    "queries that see no key": (4, -(10**5), None),
    "some queries that see no key": (6, -3, 2),
    "a window": (4, -4, 3),
    "a window wider than int": (4, -4, 2**40),
}


def attention(s, dp, scale, offset, window):
    """What is seen, p, lse and ds by their formulas."""
    i, j = np.ogrid[: s.shape[1], : s.shape[2]]
    seen = j >= 0 * i
    if offset is not None:
        seen = (j <= i + offset) & (j > i + offset - (window or inf))
    z = np.where(seen, s * scale, -inf)
    total = np.exp(z).sum(-1)
    lse = np.log(total, out=np.full_like(total, inf), where=total > 0)
    p = np.exp(z - lse[..., None])
    d = (p * dp).sum(-1)
    return seen, p, lse, p * (dp - d[..., None]) * scale


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KERNELS)
def test_attention_kernels(kernels, kind, mask):
    """What is not seen is NaN; the first query of the second batch sees nothing but -inf."""
    scores, results, (*_, keys), skipped = KERNELS[kind]
    queries, offset, window = MASKS[mask]
    queries, offset = queries if keys < 1000 else 1, None if offset is None else offset + keys
    options, xp = (-0.5, offset, window), array_module(tg.zeros(1).data)

    def new(dtype, values=nan):
        a = xp.empty(skipped + 2 * queries * keys, dtype)[skipped:].reshape(2, queries, keys)
        a[...] = xp.asarray(values, dtype)
        return a

    s, dp = np.random.default_rng(0).uniform(-4, 4, (2, 2, queries, keys)).astype(scores).astype(np.float64)
    s[1, 0] = inf
    seen, p, lse, ds = attention(s, dp, *options)
    s, dp = (new(scores, np.where(seen, a, nan)) for a in (s, dp))

    found = new(results)
    log = softmax_op.causal_fwd(s, *options, out=found)[1]
    assert_near(as_float64(log), lse, rtol=2**-20, name="lse")
    again, slope = new(results), new(results)
    softmax_op.causal_bwd(s, log, dp, *options, p=again, ds=slope)
    for name, a, b in (("p", found, p), ("p in backward", again, p), ("ds", slope, ds)):
        assert_near(as_float64(a), b, rtol=ROUNDING[results] + 2**-19, atol=2**-22, name=name)

    alone = new(results), new(results)
    softmax_op.causal_bwd(s, log, None, *options, p=alone[0])
    softmax_op.causal_bwd(s, log, dp, *options, ds=alone[1])
    assert (alone[0] == again).all()
    assert (alone[1] == slope).all()
    if scores == results:
        other = s.copy()
        softmax_op.causal_fwd(other, *options, out=other)
        assert (other == found).all()
        softmax_op.causal_bwd(s, log, dp, *options, p=s, ds=dp)
        assert (s == again).all()
        assert (dp == slope).all()


@settings(max_examples=100)
@given(
    shape=st.tuples(st.integers(0, 10**6), st.integers(0, 2**15)),
    dtypes=st.tuples(*2 * [st.sampled_from(KERNEL_DTYPES)]),
    warp=st.sampled_from([32, 64]),
)
def test_config(shape, dtypes, warp):
    """All rows and columns have a thread, in blocks that GPUs run, and rows ride on the grid's x."""
    vec = 16 // max(t.itemsize for t in dtypes) if shape[1] % 8 == 0 else 1
    for name, most in (("softmax_fwd", 1024), ("softmax_bwd", 512)):
        what = softmax_op.config(name, shape, *dtypes, vec, H200._replace(warp_size=warp))
        (threads, rows, _), items = what.block, dict(what.defines)["ITEMS"]
        assert threads % warp == 0
        assert threads * rows in (128, 256, 512, 1024)
        assert what.grid == (-(-shape[0] // rows), 1, 1)
        assert items * threads * vec >= shape[1] or (items == 0 and threads == most)


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
