"""layer_norm, add_layer_norm and rms_norm: values against NumPy, gradients by differences, dtypes, rows that are hard
to normalise, layouts, what frozen inputs cost, errors."""

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
    check_kernel,
    gradients,
    layouts,
    leaf,
)
from tinygrad_gpu import kernel
from tinygrad_gpu.device import array_module
from tinygrad_gpu.dtypes import accumulator
from tinygrad_gpu.ops import layernorm
from tinygrad_gpu.testing import strategies


def layer_norm(x, w=1, b=0, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * w + b


def rms_norm(x, w=1, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


# name: the function, the same on NumPy arrays, how many of its inputs have x's shape (the others are weight and bias).
OPS = {
    "layer_norm": (F.layer_norm, layer_norm, 1),
    "rms_norm": (F.rms_norm, rms_norm, 1),
    "add_layer_norm": (
        lambda *a, **k: F.add_layer_norm(*a, **k)[0],
        lambda x, residual, *a, **k: layer_norm(x + residual, *a, **k),
        2,
    ),
    "add_layer_norm, the sum": (
        lambda *a, **k: F.add_layer_norm(*a, **k)[1],
        lambda x, residual, *_, **k: x + residual,
        2,
    ),
}
PARAMETERS = {"layer_norm": 2, "rms_norm": 1, "add_layer_norm": 2, "add_layer_norm, the sum": 0}
rng = np.random.default_rng


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=25)
@given(data=st.data())
def test_values_and_gradients(device, name, data):
    op, reference, full = OPS[name]
    shape = data.draw(strategies.shapes(min_dims=1, max_side=5) | st.sampled_from([(2, 17), (1, 31), (33, 1)]))
    shapes = [shape] * full + [shape[-1:]] * data.draw(st.integers(0, PARAMETERS[name]))
    leaves = [leaf(data.draw(strategies.arrays(s)), data.draw(layouts)) for s in shapes]
    options = data.draw(st.sampled_from([{}, {"eps": 0.1}]))
    if shape[-1]:
        assert_near(op(*leaves, **options).numpy(), reference(*(x.numpy() for x in leaves), **options), 1e-12, 1e-12)
    else:
        assert op(*leaves).shape == shape
    assert tg.testing.gradcheck(lambda *leaves: op(*leaves, eps=0.1), *leaves)  # where eps is small, a step is not


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_dtypes(backend, name, dtype):
    """xhat is up to 3 here, rstd about 1/2, and a column has 11 terms."""
    draw = rng(0).uniform
    shapes = [(11, 13)] * OPS[name][2] + [(13,)] * PARAMETERS[name]
    check_dtype(OPS[name][0], [draw(-3, 3, s) for s in shapes], dtype, floor=4)


# A row that is hard to normalise, in a dtype, and the result without weight and bias.
ROWS = {
    "48 columns with mean 5": (np.linspace(4, 6, 48), tg.float32, layer_norm(np.linspace(4, 6, 48))),
    "1024 and more in float16": ([1024, 1025, 1026, 1027], tg.float16, [-1.3416, -0.4472, 0.4472, 1.3416]),
    "a large mean": ([1e6 + 0, 1e6 + 1], tg.float32, [-1, 1]),
    "a constant": ([33333.3] * 100, tg.float32, [0] * 100),
    "a huge constant": ([1e9 / 3] * 129, tg.float32, [0] * 129),
    "one column": ([7], tg.float32, [0]),
    "the end of float16": ([65504, -65504], tg.float16, [1, -1]),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(backend, name):
    row, dtype, expected = ROWS[name]
    y, dx = gradients(F.layer_norm, leaf([row, row], dtype=dtype), cotangent=[range(len(row))] * 2)
    assert_near(y.numpy().astype(float), np.float64([expected] * 2), rtol=2 * ROUNDING[dtype], atol=1e-4)
    assert np.isfinite(dx.numpy().astype(float)).all()
    assert abs(dx.numpy().astype(float).sum(axis=1)).max() < 1e-2 * max(abs(dx.numpy().astype(float)).max(), 1)


def test_rms_norm_of_float16_squares_in_float32(backend):
    y = F.rms_norm(tg.Tensor([[300, 400], [6e-6, 6e-6]], dtype=tg.float16), eps=0.0)
    assert_near(y.numpy().astype(float), rms_norm(np.float64([[300, 400], [1, 1]]), eps=0), rtol=2**-10)


@pytest.mark.parametrize("rows", [layernorm._ROWS, 16])
@pytest.mark.parametrize("name", OPS)
def test_more_rows_than_a_grid_has_in_y(device, monkeypatch, name, rows):
    """The last row is that row alone; sums over 70,001 rows are right to float32, though errors of one sign add up."""
    monkeypatch.setattr(layernorm, "_ROWS", rows)
    op, _, full = OPS[name]
    x = rng(0).uniform([0, 1, 3], [1, 2, 4], (70001, 3)).astype(np.float32)
    inputs = [x] * full + [np.float32([1, 2, 3])] * PARAMETERS[name]
    found = gradients(op, *(leaf(a) for a in inputs))
    exact = gradients(op, *(leaf(a, dtype=tg.float64) for a in inputs))
    assert_near(found[0].numpy()[-1], op(*(tg.Tensor(a[-1] if a.ndim == 2 else a) for a in inputs)).numpy(), 1e-6)
    for a, b in zip(found, exact, strict=True):
        assert_near(a.numpy(), b.numpy(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_layouts_and_a_broadcast_upstream_gradient(backend, name, layout):
    """As with contiguous copies, the same bits: rows are summed in one order."""
    op, _, full = OPS[name]
    arrays = [rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate([(2, 3, 5)] * full + [(5,)])]
    results = []
    for form, g in ((layout, tg.Tensor(2.0).expand(2, 3, 5)), ("plain", tg.full((2, 3, 5), 2.0))):
        leaves = [leaf(a, form) for a in arrays]
        y = op(*leaves)
        y.backward(g)
        results.append([y, *(x.grad for x in leaves if x.grad is not None)])
    for a, b in zip(*results, strict=True):
        assert_near(a.numpy(), b.numpy(), rtol=1e-6, atol=1e-6)


def test_add_layer_norm_hands_on_both_gradients(backend):
    """Of both results, of an input given twice, and rounded once in float16."""
    x, r, w = (leaf(rng(i).standard_normal(s)) for i, s in enumerate([(3, 4), (3, 4), (4,)]))

    def both(x, r, w):
        y, s = F.add_layer_norm(x, r, w)
        return y * 2, s * y, s

    assert tg.testing.gradcheck(both, x, r, w)
    assert tg.testing.gradcheck(lambda x: F.add_layer_norm(x, x)[0], x)
    a, g = leaf([[5, 5]], dtype=tg.float16), tg.Tensor([[1 + 2**-10, -1]], dtype=tg.float16)
    y, s = F.add_layer_norm(a, tg.zeros(1, 2, dtype=tg.float16), eps=1.0)
    (y * g + s * 2048).sum().backward()
    assert a.grad.tolist() == [[2050, 2047]]  # 2048 + (1 + 2^-11) goes up to even, 2048 + 1 would go down


@pytest.mark.parametrize("name", OPS)
def test_the_same_bits_every_time(backend, name):
    """In whatever order blocks run."""
    op, _, full = OPS[name]
    arrays = [rng(0).standard_normal(s).astype(np.float32) for s in [(300, 13)] * full + [(13,)] * PARAMETERS[name]]
    first, second = (gradients(op, *(leaf(a) for a in arrays)) for _ in range(2))
    assert all(a is b or (a.numpy() == b.numpy()).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("needs", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_a_frozen_input_costs_nothing(monkeypatch, needs):
    """No gradient of it is made, and its columns are not summed."""
    sums, column_sum = [], layernorm.column_sum
    monkeypatch.setattr(layernorm, "column_sum", lambda a: sums.append(a) or column_sum(a))
    x, dy = rng(0).standard_normal((2, 5, 7))
    _, mean, rstd = layernorm.fwd(x, None, None, 1e-5)
    for middle, width in ((mean, 3), (None, 2)):
        sums.clear()
        found = layernorm.bwd(dy, x, None, middle, rstd, (*needs[:width], False)[:3])
        assert [a is not None for a in found] == [*needs[:width], False][:3]
        assert len(sums) == sum(needs[1:width])


# What the kernels are made for: a dtype, widths, how many elements come before the first, whether centred.
KERNELS = {
    "narrow rows": (tg.float32, (1, 3, 31), 0, True),
    "vectors": (tg.float16, (0, 8, 248), 0, True),
    "several vectors a thread": (tg.bfloat16, (752, 768), 0, True),
    "several warps, no vectors": (tg.bfloat16, (769, 895), 0, True),
    "several warps, RMS norm": (tg.float32, (516, 768), 0, False),
    "addresses that take no vectors": (tg.bfloat16, (40, 64), 1, True),
    "rows that registers do not hold": (tg.float16, (8193,), 0, True),
}


@pytest.mark.parametrize("kind", KERNELS)
@settings(max_examples=6)
@given(data=st.data())
def test_kernels(kernels, kind, data):
    """With every optional array there or not, for any number of rows and all that may be needed."""
    dtype, widths, skipped, centred = KERNELS[kind]
    width = data.draw(st.sampled_from(widths))
    heights = [0, 1, 3, 70] if width < 1000 else [1]  # the backward of 70 takes blocks that go on to a second row
    height = data.draw(st.sampled_from(heights))
    numbers = rng(height).standard_normal
    x, residual, dy, ds, w, b = (numbers(skipped + n * width) for n in 4 * [height] + 2 * [1])
    residual, ds, w, b = (data.draw(st.sampled_from([a, None])) for a in (residual, ds, w, b))
    needs = data.draw(st.sampled_from([(1, 1, 1), (1, 1, 0), (0, 0, 1), *[(1, 0, 0)] * (width < 32)]))

    def cut(a, *shape):
        return None if a is None else a[skipped:].reshape(shape)

    def forward(f):
        def run(x, residual, w, b):
            x, residual = (cut(a, height, width) for a in (x, residual))
            return f(x, residual, cut(w, width), cut(b, width), 1e-5, centred)

        return run

    def backward(f):
        def run(dy, x, w, ds):
            dy, x, ds = (cut(a, height, width) for a in (dy, x, ds))
            statistics = layernorm.fwd(x.astype(np.float64), None, None, 1e-5, centred)[1:]
            mean, rstd = (None if a is None else a.astype(accumulator(x.dtype)) for a in statistics)
            return f(dy, x, cut(w, width), mean, rstd, needs, ds)

        return run

    def fwd(x, residual, w, b, eps, centred):
        s = x if residual is None else x + residual
        y, *statistics = layernorm.fwd(s, w, b, eps, centred)
        return y, None if residual is None else s, *statistics

    with np.errstate(invalid="ignore"):  # the mean of no columns
        check_kernel(forward(fwd), forward(layernorm.add_fwd_kernel), [x, residual, w, b], dtype, floor=4)
        check_kernel(backward(layernorm.bwd), backward(layernorm.bwd_kernel), [dy, x, w, ds], dtype, floor=16)


def test_far_from_zero(kernels):
    """There the sum that the mean comes from is rounded by more than the variance bears."""
    x = rng(0).standard_normal((4, 31)) + 2**20
    check_kernel(layernorm.fwd, layernorm.fwd_kernel, [x, None, None, 1e-5], tg.float32, floor=4)


@pytest.mark.parametrize("parts", [0, 1, 16, 17, 150])
def test_the_sum_of_the_shares(kernels, parts):
    shares = rng(0).standard_normal((2, parts, 33)).astype(np.float32)
    xp = array_module(tg.zeros(1).data)
    sums = xp.full((2, 33), np.nan, np.float32)
    kernel.launch(layernorm.sum_config(33, 2), sums, xp.asarray(shares), parts, 33)
    assert_near(as_float64(sums), shares.sum(axis=1, dtype=np.float64), rtol=1e-6, atol=1e-6)


@settings(max_examples=200)
@given(
    height=st.integers(0, 10**6) | st.just(2**31 - 1),
    width=st.integers(0, 2**15) | st.sampled_from([768, 4096, 12288]),
    dtype=st.sampled_from(kernel.KERNEL_DTYPES),
    warp=st.sampled_from([32, 64]),
    vectors=st.booleans(),
)
def test_config(height, width, dtype, warp, vectors):
    """All rows and columns have a thread, in blocks that GPUs run; those that add up are on the GPU all at once."""
    limits = kernel.H200._replace(warp_size=warp)
    vec = 16 // dtype.itemsize if vectors and width % 8 == 0 else 1
    for what, sums in (
        (layernorm.config(height, width, dtype, vec, limits, True), False),
        *((layernorm.bwd_config(height, width, dtype, vec, limits, True, sums), sums) for sums in (False, True)),
    ):
        defines = dict(what.defines)
        (threads, rows, _), items = what.block, defines["ITEMS"]
        assert threads % warp == 0
        assert threads * rows in (128, 256, 512, 1024)
        assert items * vec * dtype.itemsize <= 48
        assert items * threads * vec >= width or (items == 0 and threads == (512 if "SUMS" in defines else 1024))
        if sums:
            assert what.grid[0] <= limits.processors * defines["BLOCKS"]
            assert defines["BLOCKS"] * threads * rows == 512
        else:
            assert what.grid == (-(-height // rows), 1, 1)


X, INTS = tg.ones(2, 3, device="cpu"), tg.arange(3, device="cpu")
ERRORS = {
    "weight must have shape (C,) = (3,), got (2,)": (ValueError, X, X[0, :2]),
    "weight must have shape (C,) = (3,), got (1, 3)": (ValueError, X, X[:1]),
    "weight must have dtype float32 like the others, got float64": (TypeError, X, X[0].to(tg.float64)),
    "weight must be a Tensor or None, got float": (TypeError, X, 1.0),
    "x must have a floating dtype, got int64": (TypeError, INTS, None),
    "x must have at least one axis, got shape ()": (ValueError, X.sum(), None),
    "x must be a Tensor, got list": (TypeError, [1.0], None),
    "eps must be finite and at least 0, got -1": (ValueError, X, None, {"eps": -1}),
    "eps must be finite and at least 0, got nan": (ValueError, X, None, {"eps": float("nan")}),
    "eps must be a number, got '1'": (TypeError, X, None, {"eps": "1"}),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm"])
def test_errors(name, message):
    error, x, weight, *options = ERRORS[message]
    inputs = [x, x] if name == "add_layer_norm" else [x]
    with pytest.raises(error, match=re.escape(f"{name}: {message}")):
        getattr(F, name)(*inputs, weight, **dict(*options))


def test_more_errors():
    for message, call in {
        "layer_norm: bias must have shape (C,) = (3,), got (2,)": lambda: F.layer_norm(X, X[0], X[0, :2]),
        "add_layer_norm: residual must have shape (2, 3) like x, got (3,)": lambda: F.add_layer_norm(X, X[0]),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
